"""Draft models with another tokenizer than the target's."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import SpeculativeGenerator, TranslatedDraftProposer
from specdec.proposers.draft_models.token_translation import Translation, pieces
from tests.support import tiny


def bpe(vocabulary, byte_level, special=()):
    """A tokenizer with exactly these tokens, as BPE spells them."""
    made = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *vocabulary])}, []))
    if byte_level:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=list(special))


def test_tokens_are_the_same_where_their_bytes_are():
    theirs = bpe(["a", "b", "\u0120a", "ab", "\u0120", "\u00c3", "\u00a9", "\u00c3\u00a9", "abba"], True)
    ours = bpe(["\u2581a", "b", "a", "\u2581", "\u00e9", "<0xC3>", "ba", "zz"], False)
    translation = Translation.between(theirs, ours, 9, 8)
    shared = dict(translation.shared.T.tolist())
    assert shared == {0: 2, 1: 1, 2: 0, 4: 3, 5: 5, 7: 4}  # a, b, " a", " ", the byte C3, \u00e9
    assert translation.spelled[3] == (2, 1)  # ab: a, b
    assert translation.spelled[8] == (2, 1, 6)  # abba: the longest first, a, b, ba
    assert translation.spelled[6]  # the byte A9 alone cannot be spelled; something stands there


def test_special_tokens_are_the_same_where_their_names_are():
    theirs = bpe(["a", "<", "s", ">"], True, special=["<end>", "<s>"])
    ours = bpe(["a", "<", "s", ">"], False, special=["<end>"])
    translation = Translation.between(theirs, ours, 6, 5)
    assert dict(translation.shared.T.tolist()) == {0: 0, 2: 1, 3: 2, 4: 3, 5: 4}
    assert translation.spelled[1] == (2, 3, 4)  # "<s>" in three tokens
    assert pieces(theirs)[0] == "<end>"


def test_tokens_that_no_model_embeds_are_left_out():
    theirs, ours = bpe(["a", "b", "c"], True), bpe(["c", "b", "a"], False)
    assert dict(Translation.between(theirs, ours, 2, 2).shared.T.tolist()) == {1: 1}


# Through the decoder


LETTERS = "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"


def words(tokens):
    """A tokenizer of these letters and pairs of letters."""
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    return PreTrainedTokenizerFast(tokenizer_object=made)


TARGETS = words(list(LETTERS))
BACKWARDS = words(list(reversed(LETTERS)))
HALF = words([*reversed(LETTERS[20:]), "qq", "zz"])
TOKENIZERS = {"backwards": BACKWARDS, "half": HALF}


def drafting(name, model=None, **shape):
    model = tiny.model("llama", seed=1, vocab_size=len(TOKENIZERS[name])) if model is None else model
    return TranslatedDraftProposer(model, tokenizer=TOKENIZERS[name], target_tokenizer=TARGETS, **shape)


def permuted():
    """The target itself, its tokens numbered backwards."""
    model = tiny.on_host("llama")
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight.copy_(table.weight.flip(0))
    return model.to(tiny.DEVICE)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("shape", [{}, {"branching": (2, 2, 1)}], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["single", "ragged"])
@pytest.mark.parametrize("draft_length", [None, 3])
def test_the_text_is_plain_decodings(tokenizer, shape, lengths, draft_length):
    target, inputs = tiny.model("llama"), tiny.prompts(*lengths)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    spec = SpeculativeGenerator(target, drafting(tokenizer, **shape), draft_length=draft_length, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=24).tolist() == plain.tolist()
    if draft_length:
        assert spec.report.num_draft_tokens > 0


@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["single", "ragged"])
def test_the_same_model_with_other_numbers_is_always_right(lengths):
    """What it reads and drafts is put into its tokens and back: each of its drafts is the target's own choice."""
    target, inputs = tiny.model("llama"), tiny.prompts(*lengths)
    spec = SpeculativeGenerator(target, drafting("backwards", permuted()), draft_length=4)
    spec.generate(**inputs, do_sample=False, max_new_tokens=25)
    assert spec.report.num_accepted_tokens == spec.report.num_draft_tokens > 15


def test_tokens_only_the_target_has_are_spelled():
    """The draft knows letters of the second half alone: the others are never drafted, and read as what spells them."""
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    proposer = drafting("half")
    spec = SpeculativeGenerator(target, proposer, draft_length=3)
    with spec.watch() as rounds:
        spec.generate(**inputs, do_sample=False, max_new_tokens=24)
    drafted = {int(token) for round in rounds for token in round.tokens[1:]}
    assert drafted <= set(range(20, tiny.VOCAB))
    assert proposer.known_tokens().tolist() == list(range(20, tiny.VOCAB))


def test_processors_see_the_targets_tokens():
    target, inputs = tiny.model("llama"), tiny.prompts(9, 4)
    arguments = {"do_sample": False, "max_new_tokens": 16, "repetition_penalty": 1.3, "suppress_tokens": [30, 31]}
    plain = target.generate(**inputs, **arguments)
    spec = SpeculativeGenerator(target, drafting("half"), draft_length=3)
    assert spec.generate(**inputs, **arguments).tolist() == plain.tolist()


def test_a_call_may_bring_both_tokenizers():
    """As transformers' universal assisted generation wants them."""
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=16)
    spec = SpeculativeGenerator(target, "ngram", draft_length=3)
    arguments = {"assistant_model": permuted(), "tokenizer": TARGETS, "assistant_tokenizer": BACKWARDS}
    ours = spec.generate(**inputs, do_sample=False, max_new_tokens=16, **arguments)
    assert ours.tolist() == plain.tolist()
    assert set(spec.report.num_drafts_by) == {"TranslatedDraftProposer"}
    assert spec.report.num_accepted_tokens == spec.report.num_draft_tokens > 9


def test_tokenizers_that_a_later_call_brings():
    """The assistant drafted in its own numbers until then, and was hardly ever right."""
    target, inputs, assistant = tiny.model("llama"), tiny.prompts(9), permuted()
    spec = SpeculativeGenerator(target, "ngram", draft_length=4)
    spec.generate(**inputs, do_sample=False, max_new_tokens=16, assistant_model=assistant)
    assert spec.last_report.num_accepted_tokens < spec.last_report.num_draft_tokens
    brought = {"tokenizer": TARGETS, "assistant_tokenizer": BACKWARDS}
    spec.generate(**inputs, do_sample=False, max_new_tokens=16, assistant_model=assistant, **brought)
    assert spec.last_report.num_accepted_tokens == spec.last_report.num_draft_tokens > 0


def test_without_tokenizers():
    with pytest.raises(ValueError, match="no tokenizer next to the weights"):
        SpeculativeGenerator(tiny.model("llama"), TranslatedDraftProposer(tiny.on_host("llama", seed=1)))


def test_nothing_in_common():
    proposer = TranslatedDraftProposer(
        tiny.model("llama", seed=1), tokenizer=words(["\u00e4", "\u00f6"]), target_tokenizer=TARGETS
    )
    with pytest.raises(ValueError, match="no token in common"):
        SpeculativeGenerator(tiny.model("llama"), proposer)


def test_one_proposer_drafts_for_targets_with_other_tokenizers(tmp_path):
    """Each target keeps its own tables, whichever was checked last."""
    large, small = tiny.on_host("llama"), tiny.on_host("llama", seed=2, vocab_size=40)
    for name, model, tokenizer in (("large", large, TARGETS), ("small", small, words(list(LETTERS[-40:])))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        model.name_or_path = str(tmp_path / name)
    proposer = TranslatedDraftProposer(tiny.on_host("llama", seed=1), tokenizer=BACKWARDS)
    specs = [SpeculativeGenerator(model, proposer, draft_length=3) for model in (large, small)]
    for spec in [*specs, specs[0]]:
        size = spec.model.config.vocab_size
        prompt = torch.arange(size - 6, size)[None]
        arguments = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 8}
        assert torch.equal(spec.generate(prompt, **arguments), spec.model.generate(prompt, **arguments))
        assert spec.last_report.num_draft_tokens > 0
