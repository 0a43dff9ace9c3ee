"""Encoder-decoder targets: texts, sound and pictures in, drafts for the decoder."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from specdec import DraftModelProposer, EarlyExitProposer, NgramProposer, SpeculativeGenerator, SuffixProposer
from specdec.models.cache.ragged_rows import CachedRows, VisibleSlots
from specdec.models.capability import capability, probe
from specdec.models.compat import CACHE, CACHE_NAMES, cache_in
from tests.support import encoded, tiny
from tests.support.since import since

LENGTH = {"max_new_tokens": 40}
GREEDY, SAMPLED = LENGTH | {"do_sample": False}, LENGTH | {"do_sample": True, "top_k": 0}
SOME = [
    pytest.param(name, rows, marks=[] if (name, rows) in (("t5", 3), ("whisper", 1)) else pytest.mark.slow)
    for name in ("t5", "bart", "m2m_100", "whisper")
    for rows in (1, 3)
]


def same(model, inputs, proposer, sampled=False, **arguments):
    """Plain decoding's text and ours, of one seed; the generator."""
    arguments = (SAMPLED if sampled else GREEDY) | arguments
    spec = SpeculativeGenerator(model, proposer, draft_length=4, on_unsupported="error")
    texts = []
    for generate in (model.generate, spec.generate):
        torch.manual_seed(5)
        texts.append(generate(**inputs, **arguments))
    assert texts[0].tolist() == texts[1].tolist()
    return texts[0], spec


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "name", [*sorted(encoded.FAMILIES.keys() - {"umt5"}), pytest.param("umt5", marks=since("5.18"))]
)
def test_the_text_is_plain_decoding_s(name, rows):
    """Trees and ragged rows: some end before others."""
    model, inputs = encoded.model(name), encoded.inputs(name, rows)
    assert capability(model).trees
    for sampled in (False, True):
        answer, spec = same(model, inputs, NgramProposer(continuations=2), sampled)
        if name == "whisper":  # whose answers are without it
            answer = torch.cat([torch.full((rows, 1), encoded.PAD), answer], 1)
        _, spec = same(model, inputs, tiny.Garbage(answer=answer), sampled)
        assert spec.report.num_accepted_tokens > 3


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("fault", ["positions", "seen"])
def test_a_wrong_position_is_caught(name, fault, monkeypatch):
    if fault == "positions":
        place = CachedRows.place_draft

        def off(rows, *arguments):
            visible_slots = place(rows, *arguments)
            return VisibleSlots(
                visible_slots.cache,
                visible_slots.positions + 1,
                visible_slots.base,
                visible_slots.depth,
                visible_slots.ancestors,
            )

        monkeypatch.setattr(CachedRows, "place_draft", off)
    else:
        monkeypatch.setattr(VisibleSlots, "held", lambda visible_slots, span: visible_slots._slots(span))
    trees = probe(encoded.model(name)).trees
    assert trees == (fault == "seen" and name != "t5")  # T5 alone looks at where the seen tokens stand


@pytest.mark.parametrize(("name", "rows"), SOME)
def test_draft_models_read_the_input_too(name, rows):
    model, inputs = encoded.model(name), encoded.inputs(name, rows)
    alike = encoded.model(name)  # which agrees with the target about everything
    other = encoded.model(name, seed=1)
    for sampled in (False, True):
        _, spec = same(model, inputs, DraftModelProposer(alike), sampled, num_return_sequences=1)
        assert spec.report.draft_acceptance_rate > 0.9
        same(model, inputs, DraftModelProposer(other, branching=(2, 2)), sampled)
    _, spec = same(model, inputs, DraftModelProposer(alike), sampled=True, num_return_sequences=2)
    assert spec.report.draft_acceptance_rate > 0.9
    spec = SpeculativeGenerator(model, draft_length=4)
    given = spec.generate(**inputs, **GREEDY, assistant_model=alike)
    assert given.tolist() == model.generate(**inputs, **GREEDY).tolist()
    assert spec.last_report.num_drafts_by["DraftModelProposer"] > 0


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_draft_model_in_train_mode_reads_the_input_without_dropout(name):
    model, inputs, draft = encoded.model(name), encoded.inputs(name, 3), copy.deepcopy(encoded.model(name)).train()
    torch.manual_seed(1)
    plain = model.generate(**inputs, **GREEDY)
    state = torch.get_rng_state()
    spec = SpeculativeGenerator(model, draft, draft_length=4, on_unsupported="error")
    torch.manual_seed(1)
    assert spec.generate(**inputs, **GREEDY).tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert spec.report.draft_acceptance_rate > 0.9
    assert draft.training


@pytest.mark.parametrize(("name", "rows"), SOME)
def test_the_decoder_s_first_layers_draft(name, rows):
    model, inputs = encoded.model(name), encoded.inputs(name, rows)
    for shape in ({}, {"branching": (2, 2)}):
        for sampled in (False, True):
            _, spec = same(model, inputs, EarlyExitProposer(1, **shape), sampled)
            assert spec.report.num_draft_tokens


def test_a_draft_model_without_the_input():
    """A call may bring the encoder's output alone."""
    model, inputs = encoded.model("t5"), encoded.inputs("t5")
    states = model.get_encoder()(**inputs)
    plain = model.generate(encoder_outputs=states, **GREEDY)
    spec = SpeculativeGenerator(model, "ngram", on_unsupported="error")
    assert spec.generate(encoder_outputs=states, **GREEDY).tolist() == plain.tolist()
    spec = SpeculativeGenerator(model, encoded.model("t5", seed=1), on_unsupported="error")
    with pytest.warns(UserWarning, match="draft with n-grams"):
        assert spec.generate(encoder_outputs=states, **GREEDY).tolist() == plain.tolist()
    assert not spec.report.num_draft_tokens
    spec.generate(**inputs, **GREEDY)
    assert spec.report.num_draft_tokens


def test_a_draft_model_is_loaded_as_what_it_is(tmp_path):
    encoded.model("bart").save_pretrained(tmp_path)
    _, spec = same(encoded.model("bart"), encoded.inputs("bart"), f"draft:{tmp_path}")
    assert isinstance(spec.proposer.model, hf.BartForConditionalGeneration)
    assert spec.report.draft_acceptance_rate > 0.9


@pytest.mark.parametrize("rows", [1, 3])
def test_a_decoder_that_borrows_the_encoder_s_states(rows):
    """As distil-whisper's drafts for Whisper do."""
    _, spec = same(encoded.model("whisper"), encoded.inputs("whisper", rows), encoded.borrowing())
    assert spec.report.draft_acceptance_rate > 0.9


@pytest.mark.parametrize("proposer", [NgramProposer, SuffixProposer])
def test_what_the_encoder_read_is_drafted_from(proposer):
    model, inputs = encoded.model("t5"), encoded.inputs("t5", 2)
    begun = inputs["input_ids"][:, :3].clone()
    spec = SpeculativeGenerator(model, proposer(), draft_length=3, on_unsupported="error")
    with spec.watch() as rounds:
        spec.generate(**inputs, decoder_input_ids=begun, logits_processor=[_Copies(inputs["input_ids"])], **GREEDY)
    assert len(rounds[0].path) >= 3  # the root and two tokens
    assert spec.last_report.draft_acceptance_rate > 0.3


class _Copies(hf.LogitsProcessor):
    """The model says what stands there in the input."""

    stateless = True

    def __init__(self, encoder_outputs):
        self.encoder_outputs = encoder_outputs

    def __call__(self, input_ids, scores):
        place = min(input_ids.shape[1], self.encoder_outputs.shape[1] - 1)
        chosen = torch.full_like(scores, float("-inf"))
        return chosen.scatter_(1, self.encoder_outputs[: len(scores), place, None], 0.0)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_what_comes_back_beside_the_text(name):
    model, inputs = encoded.model(name), encoded.inputs(name, 2 if name == "t5" else 1)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    arguments = GREEDY | wanted | {"output_hidden_states": True}
    plain = model.generate(**inputs, **arguments)
    spec = SpeculativeGenerator(model, tiny.Garbage(answer=plain["sequences"]), draft_length=4, on_unsupported="error")
    ours = spec.generate(**inputs, **arguments)
    assert type(ours) is type(plain)
    assert ours.keys() == plain.keys()
    for name in ours.keys() - set(CACHE_NAMES):
        torch.testing.assert_close(ours[name], plain[name], atol=1e-4, rtol=1e-3)
    for part in ("self_attention_cache", "cross_attention_cache"):
        for mine, theirs in zip(*(getattr(cache_in(o), part).layers for o in (ours, plain)), strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "name",
    ["t5", "whisper", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bart", "m2m_100", "speech_to_text"))],
)
def test_texts_that_go_on_behind_padding(name):
    """Who counts positions counts padding, too."""
    model, inputs = encoded.model(name), encoded.inputs(name, 2)
    start = model.generation_config.decoder_start_token_id
    begun = torch.tensor([[encoded.PAD, start, 5, 6], [start, 7, 8, 9]])
    for real in ([[0, 1, 1, 1], [1, 1, 1, 1]], [[1, 0, 1, 1], [1, 1, 1, 1]]):
        arguments = {"decoder_input_ids": begun, "decoder_attention_mask": torch.tensor(real)}
        plain = model.generate(**inputs, **arguments, **GREEDY)
        answer = torch.cat([begun, plain], 1) if name == "whisper" else plain
        spec = SpeculativeGenerator(model, tiny.Garbage(answer=answer), draft_length=4)
        with tiny.specdec_warnings() as messages:
            assert spec.generate(**inputs, **arguments, **GREEDY).tolist() == plain.tolist()
        assert spec.report.num_accepted_tokens > 3 or messages


@pytest.mark.parametrize("kind", ["m2m_100", "speech_to_text"])
def test_padding_inside_a_prompt(kind):
    """Who numbers a prompt without its padding decodes plainly behind one that holds some."""
    model, inputs = encoded.model(kind), encoded.inputs(kind)
    spec = SpeculativeGenerator(model, "ngram", draft_length=4)
    begun = {"decoder_input_ids": torch.tensor([[2, 5, encoded.PAD, 6]])}
    with pytest.warns(UserWarning, match="contains padding"):
        ours = spec.generate(**inputs, **begun, **GREEDY)
    assert ours.tolist() == model.generate(**inputs, **begun, **GREEDY).tolist()


def test_embeddings_in_place_of_tokens():
    """The encoder's, and those of decoders alone that count their positions."""
    model, inputs = encoded.model("t5"), encoded.inputs("t5", 2)
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    same(model, embedded | {"attention_mask": inputs["attention_mask"]}, "ngram")
    for kind in (hf.BartForCausalLM, hf.WhisperForCausalLM):
        settings = encoded.IDS | encoded.LAYERS | ({} if kind is hf.BartForCausalLM else encoded.SOUND)
        torch.manual_seed(0)
        decoder = kind(kind.config_class(**settings)).eval()
        embeds = decoder.get_input_embeddings()(torch.tensor([[5, 6, 7, 5, 6]])).detach()
        same(decoder, {"inputs_embeds": embeds}, "ngram")


def test_chunks_of_a_prompt_are_plain_decoding_s():
    model, inputs = encoded.model("t5"), encoded.inputs("t5", 3)
    spec = SpeculativeGenerator(model, "ngram")
    begun = {"decoder_input_ids": torch.tensor([[encoded.PAD, 5, 6]] * 3), "prefill_chunk_size": 2}
    with pytest.warns(UserWarning, match="prefill_chunk_size"):
        ours = spec.generate(**inputs, **begun, **GREEDY)
    assert ours.tolist() == model.generate(**inputs, **begun, **GREEDY).tolist()


def test_draft_models_that_read_something_else_are_refused(llama):
    whisper, t5 = encoded.model("whisper"), encoded.model("t5")
    wide = hf.WhisperConfig(**encoded.IDS | encoded.LAYERS | encoded.SOUND | {"d_model": 64})
    other = hf.WhisperConfig(**encoded.IDS | encoded.LAYERS | encoded.SOUND | {"num_mel_bins": 16})
    for target, draft, said in (
        (t5, whisper, "encoder reads"),
        (whisper, hf.WhisperForConditionalGeneration(other), "encoder reads"),
        (whisper, hf.WhisperForCausalLM(wide), "states of size 64"),
        (llama, t5, "the target has none"),
    ):
        with pytest.raises(ValueError, match=said):
            SpeculativeGenerator(target, draft)


def test_a_cache_that_a_call_brings():
    """An empty one is filled; transformers reads a text again behind one that holds it, and so does our plain call."""
    model, inputs = encoded.model("bart"), encoded.inputs("bart")
    spec = SpeculativeGenerator(model, "ngram", draft_length=4)
    caches = [hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache()) for _ in range(2)]
    for arguments in (GREEDY, GREEDY | {"decoder_input_ids": torch.tensor([[encoded.PAD, 5, 6]])}):
        with tiny.specdec_warnings() as messages:
            ours = spec.generate(**inputs, **arguments, **{CACHE: caches[0]})
        assert ours.tolist() == model.generate(**inputs, **arguments, **{CACHE: caches[1]}).tolist()
        assert caches[0].get_seq_length() == caches[1].get_seq_length() > 0
        assert bool(messages) == ("decoder_input_ids" in arguments)


def test_streams_and_beams():
    model, inputs = encoded.model("t5"), encoded.inputs("t5")

    class Columns:
        def __init__(self):
            self.put, self.end, self.seen = self.take, lambda: None, []

        def take(self, value):
            self.seen.append(value.tolist())

    streams = [Columns(), Columns()]
    spec = SpeculativeGenerator(model, "ngram")
    for generate, stream in zip((model.generate, spec.generate), streams, strict=True):
        generate(**inputs, **GREEDY, streamer=stream)
    assert streams[0].seen == streams[1].seen
    with pytest.warns(UserWarning, match="beam search"):
        beams = spec.generate(**inputs, **GREEDY, num_beams=2)
    assert beams.tolist() == model.generate(**inputs, **GREEDY, num_beams=2).tolist()


# Whisper, whose generate() runs several decoding loops


def long_sound(rows: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    features = torch.randn(rows, 8, 2 * encoded.FRAMES + 60, generator=draws)
    return {"input_features": features, "attention_mask": torch.ones(rows, features.shape[2], dtype=torch.long)}


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_long_sound_with_timestamps(rows):
    model = encoded.model("whisper")
    arguments = {"max_new_tokens": 30, "return_timestamps": True}
    _, spec = same(model, long_sound(rows), "ngram", **arguments)
    assert spec.report.num_calls == 1
    assert spec.report.num_rows > rows
    _, drafted = same(model, long_sound(rows), encoded.model("whisper"), **arguments)
    assert drafted.report.draft_acceptance_rate > 0.9
    assert len(spec.report.times_to_first_token) == 1
    beams = SpeculativeGenerator(model, "ngram")
    with pytest.warns(UserWarning, match="beam search"):
        beams.generate(**long_sound(rows), **arguments, num_beams=2)
    assert (beams.report.num_calls, beams.report.num_plain_calls) == (1, 1)
    segments = [
        generate(**long_sound(rows), **arguments, return_segments=True)["segments"]
        for generate in (model.generate, spec.generate)
    ]
    for mine, plain in zip(*segments, strict=True):
        assert [s["tokens"].tolist() for s in mine] == [s["tokens"].tolist() for s in plain]


def test_the_speech_pipeline(tmp_path):
    """Installed, transformers' own pipeline decodes with it, and its draft model is ours."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: encoded.VOCAB - 25]
    words = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    words.decoder = decoders.ByteLevel()
    tokenizer = hf.WhisperTokenizerFast(tokenizer_object=words)
    ears = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    tokenizer.pad_token = letters[0]
    model, draft = encoded.model("whisper"), encoded.model("whisper")
    pipe = hf.pipeline("automatic-speech-recognition", model=model, tokenizer=tokenizer, feature_extractor=ears)
    sound = [np.random.default_rng(i).standard_normal(9000).astype("float32") for i in range(3)]
    arguments = {"batch_size": 3, "generate_kwargs": {"max_new_tokens": 30, "do_sample": False}}
    plain = pipe(list(sound), **arguments)
    spec = SpeculativeGenerator(model, DraftModelProposer(draft), draft_length=4, on_unsupported="error")
    with spec.installed():
        ours = pipe(list(sound), **arguments)
    assert [text["text"] for text in ours] == [text["text"] for text in plain]
    assert len(plain[0]["text"]) > 5
    assert spec.report.draft_acceptance_rate > 0.9
    assert spec.report.tokens_per_round > 3


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_embeddings_beside_a_draft_model(name):
    """They are the target's, which the draft model's encoder cannot read."""
    model, inputs = encoded.model(name), encoded.inputs(name)
    spec = SpeculativeGenerator(model, encoded.model(name, 1))
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embedded, "attention_mask": inputs["attention_mask"], **GREEDY}
    with pytest.warns(UserWarning, match="draft with n-grams"):
        assert spec.generate(**given).tolist() == model.generate(**given).tolist()
