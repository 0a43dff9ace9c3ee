"""Every argument of `generate()`: the same sequences, side outputs, streams and errors as plain `generate()`."""

import copy
import functools
import gc
import inspect
import itertools
import pickle
import threading
import types
import weakref
from typing import get_args

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StopStringCriteria

from specdec import (
    DraftModelProposer,
    DraftTree,
    Eagle3Proposer,
    NgramProposer,
    Proposer,
    SpeculativeGenerator,
    Unsupported,
)
from specdec.engine.transcript import Transcript
from specdec.heads.eagle3.export import save
from specdec.models.compat import CACHE, cache_in
from specdec.sampling.results import RoundResult
from specdec.utils.choices import HeadLayout
from tests.support import eagle3, families, tiny
from tests.support.fuzz import AllTogether, EndsAfter, NoTokenTwice, Recorder, difference

NEW = 20


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.letters()


@pytest.fixture(params=["ngram", "tree"])
def spec(request, llama):
    """A proposer with some hits, and one whose trees are mostly right."""
    proposer = NgramProposer() if request.param == "ngram" else DraftModelProposer(llama, branching=(3, 2, 1))
    return SpeculativeGenerator(llama, proposer, draft_length=4)


@pytest.fixture(params=[(9,), (9, 1, 5)], ids=["single", "ragged"])
def inputs(request):
    return tiny.prompts(*request.param)


@pytest.fixture
def ends(llama, inputs):
    """End tokens that stop the rows of `inputs` at different steps."""
    output = llama.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    width = inputs["input_ids"].shape[1]
    return sorted({int(row[width + step]) for row, step in zip(output, (6, 14, 10), strict=False)})


def same(spec, arguments, speculated=True):
    """Run both with fresh `arguments()` and compare all that comes back; returns what specdec returned."""
    plain, mine = {"do_sample": False} | arguments(), {"do_sample": False} | arguments()
    for kwargs in (plain, mine):
        if "max_length" not in kwargs and "generation_config" not in kwargs:
            kwargs.setdefault("max_new_tokens", NEW)
    before = spec.report.num_plain_calls
    expected = spec.model.generate(**plain)
    ours = spec.generate(**mine)
    assert not difference(expected, ours, plain.get("streamer"), mine.get("streamer"), mine)
    assert spec.report.num_plain_calls - before == (0 if speculated else 1)
    return ours


class ScoresAbove(StoppingCriteria):
    """Looks at the scores it is given: one entry per step, that step's rows."""

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is not None
        assert len(scores[-1]) == len(input_ids)
        assert scores[-1].gather(1, input_ids[:, -1:]).shape == (len(input_ids), 1)
        return torch.full((len(input_ids),), len(scores) >= 7)


def some_tokens(row, text):
    return [token for token in range(tiny.VOCAB) if (token + row + len(text)) % 3]


# Arguments as a function of the end tokens: whatever keeps a state is made anew for each call.
ARGUMENTS = {
    "nothing": lambda ends: {},
    "eos_token_id": lambda ends: {"eos_token_id": ends[0]},
    "eos_token_id list": lambda ends: {"eos_token_id": ends},
    "min_new_tokens": lambda ends: {"eos_token_id": ends, "min_new_tokens": 8},
    "min_length": lambda ends: {"eos_token_id": ends, "min_length": 17},
    "max_length": lambda ends: {"max_length": 21},
    "max_length and eos": lambda ends: {"max_length": 21, "eos_token_id": ends},
    "max_time": lambda ends: {"max_time": 1e6},
    "max_time, no time": lambda ends: {"max_time": 0.0},
    "pad_token_id": lambda ends: {"pad_token_id": 33, "eos_token_id": ends},
    "repetition_penalty": lambda ends: {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": lambda ends: {"no_repeat_ngram_size": 2},
    "bad_words_ids": lambda ends: {"bad_words_ids": [[5], [7, 9], [ends[0]]]},
    "sequence_bias": lambda ends: {"sequence_bias": [[[5], 4.0], [[ends[0]], -5.0]]},
    "suppress_tokens": lambda ends: {"suppress_tokens": [*ends, 3]},
    "prefix_allowed_tokens_fn": lambda ends: {"prefix_allowed_tokens_fn": some_tokens},
    "logits_processor": lambda ends: {"logits_processor": LogitsProcessorList([NoTokenTwice()])},
    "criterion per row": lambda ends: {
        "stopping_criteria": StoppingCriteriaList([EndsAfter(ends[0], 9)]),
        "eos_token_id": ends[-1],
    },
    "criterion per row, no eos": lambda ends: {"stopping_criteria": StoppingCriteriaList([EndsAfter(ends[0], 9)])},
    "criterion on all rows": lambda ends: {"stopping_criteria": StoppingCriteriaList([AllTogether()])},
    "criterion on scores": lambda ends: {
        "stopping_criteria": StoppingCriteriaList([ScoresAbove()]),
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "streamer": lambda ends: {"streamer": Recorder()},
    "streamer and eos": lambda ends: {"streamer": Recorder(), "eos_token_id": ends},
    "return_dict": lambda ends: {"return_dict_in_generate": True, "eos_token_id": ends},
    "output_scores": lambda ends: {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": ends},
    "output_logits": lambda ends: {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": ends},
    "output_hidden_states": lambda ends: {
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "eos_token_id": ends,
    },
    "all outputs, processed": lambda ends: {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "repetition_penalty": 1.3,
        "eos_token_id": ends,
        "streamer": Recorder(),
    },
    "outputs without return_dict": lambda ends: {"output_scores": True},
    "generation_config": lambda ends: {"generation_config": GenerationConfig(max_new_tokens=12, pad_token_id=0)},
    "generation_config, overridden": lambda ends: {
        "generation_config": GenerationConfig(max_new_tokens=12, pad_token_id=0, repetition_penalty=1.2),
        "max_new_tokens": 9,
        "eos_token_id": ends,
    },
    "prefill_chunk_size": lambda ends: {"prefill_chunk_size": 4},
    "prefill_chunk_size of one": lambda ends: {"prefill_chunk_size": 1},
    "cache_implementation static": lambda ends: {"cache_implementation": "static"},
    "num_return_sequences of one": lambda ends: {"num_return_sequences": 1},
    "synced_gpus": lambda ends: {"synced_gpus": False},
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_argument(spec, inputs, ends, argument):
    same(spec, lambda: {**inputs, **ARGUMENTS[argument](ends)})


# Criteria of one's own with an attribute `eos_token_id`: plain decoding pads finished rows then, and asks them all


class EndsOn(StoppingCriteria):
    """Ends a row the second time that it writes the token."""

    def __init__(self, eos_token_id, token, start):
        self.eos_token_id, self.token, self.start = eos_token_id, token, start

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, self.start :] == self.token).sum(-1) >= 2


class EndsLater(EosTokenCriteria):
    """Overrides when its tokens end a row."""

    def __call__(self, input_ids, scores, **kwargs):
        return super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] > 20)


OWN_CRITERIA = {
    "an int": lambda end: EndsOn(end, end, 9),
    "a tensor": lambda end: EndsOn(torch.tensor([end]), end, 9),
    "a subclass": lambda end: type("Same", (EosTokenCriteria,), {})(end),
    "a subclass that decides itself": lambda end: EndsLater(end),
}


@pytest.mark.parametrize("name", OWN_CRITERIA)
def test_criteria_with_an_attribute_eos_token_id(spec, inputs, ends, name):
    for end in ends:
        same(spec, lambda end=end: {**inputs, "stopping_criteria": StoppingCriteriaList([OWN_CRITERIA[name](end)])})


def test_criteria_that_never_end_what_they_promised_to_end_raise(spec, single):
    class Unending(MaxLengthCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(len(input_ids), dtype=torch.bool)

    text = Transcript(single["input_ids"], [0], StoppingCriteriaList([Unending(11)]), pad_token=0, max_length=11)
    text.write(
        RoundResult.of(
            DraftTree.from_chain(torch.tensor([2]), torch.tensor([[3]])), *map(torch.tensor, ([[0, 1]], [1], [4]))
        )
    )
    with pytest.raises(RuntimeError, match="no row can grow after column 11.*Unending"):
        text.settle()


# Input in other forms


def test_positional_inputs(spec, single):
    expected = spec.model.generate(single["input_ids"], max_new_tokens=NEW, do_sample=False)
    assert spec.generate(single["input_ids"], max_new_tokens=NEW, do_sample=False).tolist() == expected.tolist()
    config = GenerationConfig(max_new_tokens=5)
    assert spec.generate(single["input_ids"], config).tolist() == expected[:, : 9 + 5].tolist()


def test_all_arguments_by_their_position(spec, single):
    """logits_processor, stopping_criteria, prefix_allowed_tokens_fn, synced_gpus, assistant_model, streamer."""
    outputs, streams = [], [Recorder(), Recorder()]
    for generate, streamer in zip((spec.model.generate, spec.generate), streams, strict=True):
        more = (LogitsProcessorList([NoTokenTwice()]), StoppingCriteriaList([EndsAfter(5, 9)]), some_tokens)
        outputs.append(generate(single["input_ids"], None, *more, False, None, streamer, max_new_tokens=NEW).tolist())
    assert outputs[0] == outputs[1]
    assert streams[0].puts == streams[1].puts
    assert spec.report.num_plain_calls == 0
    with pytest.raises(TypeError, match="at most 11 positional arguments"):
        spec.generate(*[None] * 12)


def test_padding_is_found_without_a_mask(spec, ragged):
    same(spec, lambda: {"input_ids": ragged["input_ids"]})


def test_inputs_embeds(spec, inputs, ends):
    embeds = spec.model.get_input_embeddings()(inputs["input_ids"]).detach()
    mask = {"attention_mask": inputs["attention_mask"], "eos_token_id": ends}
    same(spec, lambda: {"inputs_embeds": embeds, **mask})
    same(spec, lambda: {"inputs_embeds": embeds, "input_ids": inputs["input_ids"], **mask})


def test_short_integers(spec, inputs):
    """Plain decoding returns int64 whatever it was given."""
    given = {name: tensor.int() for name, tensor in inputs.items()}
    assert same(spec, lambda: given).dtype == torch.int64


def test_position_ids(spec, inputs):
    own = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    same(spec, lambda: {**inputs, "position_ids": own})


def test_a_mask_longer_than_the_prompt(spec, inputs):
    mask = torch.nn.functional.pad(torch.ones_like(inputs["input_ids"]), (0, 1), value=1)
    given = {"input_ids": inputs["input_ids"], "attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
    with tiny.specdec_warnings() as messages:
        found = spec.generate(**given)
    assert f"have {mask.shape[1]} columns, the prompt {mask.shape[1] - 1}" in messages[0]
    assert torch.equal(found, spec.model.generate(**given))


def test_a_generator_is_not_copied(spec):
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make another one from the model and the proposer"):
            copied(spec)


def test_generation_config_of_the_model(llama, inputs, ends):
    spec = SpeculativeGenerator(llama, "ngram", draft_length=4)
    before = llama.generation_config
    llama.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=ends, max_new_tokens=15, min_new_tokens=3)
    try:
        expected = llama.generate(**inputs)
        assert spec.generate(**inputs).tolist() == expected.tolist()
    finally:
        llama.generation_config = before


# Output in other forms


@pytest.mark.parametrize("ends", [None, [0, 8]], ids=["no end", "rows that end early"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_returned_cache_continues_the_text(models, inputs, name, ends):
    model = models(name)
    spec = SpeculativeGenerator(model, DraftModelProposer(model, branching=(3, 2)), draft_length=4)
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    results = []
    for generate in (model.generate, spec.generate):
        first = generate(**inputs, **arguments, return_dict_in_generate=True, eos_token_id=ends)
        more = torch.ones(len(first.sequences), 2, dtype=torch.long)
        text = torch.cat([first.sequences, more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(text[:, inputs["input_ids"].shape[1] :])], 1)
        assert cache_in(first).get_seq_length() == first.sequences.shape[1] - 1
        results.append(model.generate(text, attention_mask=mask, **{CACHE: cache_in(first)}, **arguments).tolist())
    assert results[0] == results[1]


def test_text_iterator_streamer_in_a_thread(spec, single, tokenizer):
    texts = []
    for generate in (spec.model.generate, spec.generate):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        kwargs = {**single, "streamer": streamer, "max_new_tokens": NEW, "do_sample": False}
        thread = threading.Thread(target=generate, kwargs=kwargs)
        thread.start()
        texts.append("".join(streamer))
        thread.join()
    assert texts[0] == texts[1]
    assert len(texts[0]) == NEW


def test_sampling_several_sequences(spec, inputs):
    rows = len(inputs["input_ids"])
    output = spec.generate(**inputs, do_sample=True, num_return_sequences=3, max_new_tokens=7, top_k=10)
    assert output.shape == (3 * rows, inputs["input_ids"].shape[1] + 7)
    assert len({tuple(row.tolist()) for row in output}) > rows
    with pytest.raises(ValueError, match="num_return_sequences"):
        spec.generate(**inputs, do_sample=False, num_return_sequences=3)


# Stop strings


@pytest.fixture
def stop(llama, inputs, tokenizer):
    """Three letters in a row of what the first row writes."""
    written = tokenizer.decode(llama.generate(**inputs, do_sample=False, max_new_tokens=NEW)[0, -NEW:])
    return [written[8:11], "never written"]


def test_stop_strings(spec, inputs, tokenizer, stop):
    ours = same(spec, lambda: {**inputs, "stop_strings": stop, "tokenizer": tokenizer})
    if len(inputs["input_ids"]) == 1:
        assert ours.shape[1] <= inputs["input_ids"].shape[1] + 11
    same(spec, lambda: {**inputs, "stop_strings": stop[0], "tokenizer": tokenizer, "streamer": Recorder()})


class FirstRowEnds(StoppingCriteria):
    def __init__(self, width):
        self.width = width

    def __call__(self, input_ids, scores, **kwargs):
        ended = torch.zeros(len(input_ids), dtype=torch.bool)
        ended[0] = input_ids.shape[1] >= self.width
        return ended


@pytest.mark.parametrize(
    "wanted", [{}, {"return_dict_in_generate": True, "output_scores": True}], ids=["ids", "scores"]
)
def test_an_end_token_that_a_row_ran_ahead_to(llama, wanted):
    """In one draft, behind the column at which it is stopped."""
    inputs = tiny.prompts(9, 5)
    T = inputs["input_ids"].shape[1]
    written = llama.generate(**inputs, do_sample=False, max_new_tokens=NEW)[:, T:].tolist()
    end = next(i for i in range(3, 7) if written[0][i] not in written[0][:i] + written[1][:8])
    spec = SpeculativeGenerator(llama, DraftModelProposer(llama), draft_length=8)

    def arguments():
        criteria = StoppingCriteriaList([FirstRowEnds(T + end - 1)])
        return {**inputs, **wanted, "eos_token_id": written[0][end], "pad_token_id": 0, "stopping_criteria": criteria}

    same(spec, arguments)
    assert spec.report.mean_acceptance_length > end + 1


def test_stop_strings_in_the_generation_config(spec, inputs, tokenizer, stop):
    def arguments():
        config = GenerationConfig(stop_strings=stop, max_new_tokens=NEW, pad_token_id=0)
        return {**inputs, "generation_config": config, "tokenizer": tokenizer}

    same(spec, arguments)
    kept = GenerationConfig(stop_strings=stop, max_new_tokens=NEW, pad_token_id=0)
    spec.generate(**inputs, generation_config=kept, tokenizer=tokenizer, do_sample=False)
    assert kept.stop_strings == stop


def test_stop_strings_in_the_models_generation_config(llama, inputs, tokenizer, stop):
    spec = SpeculativeGenerator(llama, "ngram", draft_length=4)
    before = llama.generation_config
    llama.generation_config = GenerationConfig(pad_token_id=0, stop_strings=stop)
    try:
        same(spec, lambda: {**inputs, "tokenizer": tokenizer})
    finally:
        llama.generation_config = before


ABSENT = object()


def with_bytes():
    """A tokenizer under which even an empty stop string is one: it ends the text at once."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: tiny.VOCAB]
    inner = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def outcome(generate, **arguments):
    """What it wrote, or the kind of its error."""
    try:
        return generate(**arguments).tolist()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("argument", [ABSENT, None, "", [], "written"], ids=["absent", "None", "empty", "[]", "text"])
def test_stop_strings_take_precedence_as_in_plain_decoding(argument, single):
    """The argument's, even None, before the config's, before the model's; an empty string is one."""
    model, tokenizer = copy.deepcopy(tiny.model("llama")), with_bytes()
    spec = SpeculativeGenerator(model, "ngram", draft_length=4)
    written = tokenizer.decode(model.generate(**single, do_sample=False, max_new_tokens=16)[0, -16:])
    assert len(written) == 16
    if argument == "written":
        argument = [written[2:5]]
    for in_config, in_model in itertools.product([ABSENT, None, "", [written[5:8]]], [None, "", written[8:11]]):
        for given in ({}, {"tokenizer": tokenizer}):
            model.generation_config.stop_strings = in_model
            arguments = {**single, **given, "do_sample": False, "max_new_tokens": 16}
            if argument is not ABSENT:
                arguments["stop_strings"] = argument
            if in_config is not ABSENT:
                arguments["generation_config"] = GenerationConfig(pad_token_id=0, stop_strings=in_config)
            assert outcome(spec.generate, **arguments) == outcome(model.generate, **arguments)


def test_a_criterion_for_stop_strings_takes_precedence(spec, inputs, tokenizer, stop):
    def arguments():
        criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, "never written")])
        return {**inputs, "stop_strings": stop, "tokenizer": tokenizer, "stopping_criteria": criteria}

    assert same(spec, arguments).shape[1] == inputs["input_ids"].shape[1] + NEW


# Whether a setting was given, and not whether it is true


class Silent(Recorder):
    def __len__(self):
        return 0


EMPTY = {
    "streamer of length 0": lambda: {"streamer": Silent()},
    "no criteria": lambda: {"stopping_criteria": StoppingCriteriaList()},
    "no processors": lambda: {"logits_processor": LogitsProcessorList()},
    "custom_generate": lambda: {"custom_generate": None},
    "assistant_model": lambda: {"assistant_model": None},
    "prompt_lookup_num_tokens": lambda: {"prompt_lookup_num_tokens": None},
    "eos_token_id 0": lambda: {"eos_token_id": 0},
    "temperature 0": lambda: {"temperature": 0.0, "do_sample": False},
    "num_beam_groups 0": lambda: {"num_beam_groups": 0},
    "penalty_alpha 0": lambda: {"penalty_alpha": 0.0},
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_values(spec, inputs, name):
    same(spec, lambda: {**inputs, **EMPTY[name]()})


@pytest.mark.parametrize("place", ["argument", "config", "model"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_lookup_num_tokens", 0),
        ("prefill_chunk_size", 0),
        ("num_beams", 0),
        ("dola_layers", ""),
        ("constraints", []),
        ("force_words_ids", []),
    ],
)
def test_empty_values_that_plain_decoding_refuses(single, name, value, place):
    model = copy.deepcopy(tiny.model("llama"))
    spec = SpeculativeGenerator(model, "ngram", draft_length=4)
    arguments = {**single, "max_new_tokens": 4}
    if place == "argument":
        arguments[name] = value
    else:
        config = GenerationConfig(pad_token_id=0) if place == "config" else model.generation_config
        setattr(config, name, value)
        arguments |= {"generation_config": config} if place == "config" else {}
    expected = outcome(model.generate, **arguments)
    assert issubclass(expected, Exception)
    with tiny.specdec_warnings():
        assert outcome(spec.generate, **arguments) == expected


def test_prompt_lookup_of_no_tokens(spec, single):
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens must be at least 1, got 0: None turns it off"):
        spec.generate(**single, prompt_lookup_num_tokens=0)


def test_none_as_an_argument_overrides_the_models_setting(single):
    """None as an argument is a value."""
    model = copy.deepcopy(tiny.model("llama"))
    model.generation_config.token_healing = True  # which needs a tokenizer
    spec = SpeculativeGenerator(model, "ngram", on_unsupported="error")
    expected = model.generate(**single, do_sample=False, max_new_tokens=4, token_healing=None)
    ours = spec.generate(**single, do_sample=False, max_new_tokens=4, token_healing=None)
    assert ours.tolist() == expected.tolist()


# transformers' own ways in


def test_custom_generate(spec, inputs, ends):
    arguments = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends}
    theirs, ours = Recorder(), Recorder()
    expected = spec.model.generate(**inputs, **arguments, streamer=theirs)
    output = spec.model.generate(**inputs, **arguments, streamer=ours, custom_generate=spec)
    assert not difference(expected, output, theirs, ours, {})
    assert spec.report.num_calls == 1
    assert spec.report.num_plain_calls == 0


def test_stop_strings_through_custom_generate_say_what_to_do(spec, inputs, tokenizer):
    """transformers keeps the tokenizer to itself."""
    for stop in (["x"], ""):
        with pytest.raises(ValueError, match=r"call SpeculativeGenerator.generate\(.* or pass stopping_criteria="):
            spec.model.generate(**inputs, stop_strings=stop, tokenizer=tokenizer, custom_generate=spec)


def test_decoding_modes_that_moved_are_named_to_those_who_call_the_hook(spec, single):
    beams = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
    with tiny.specdec_warnings(), pytest.raises(ValueError, match="group_beam_search is handled before"):
        spec.model.generate(**single, **beams, custom_generate=spec)


def test_custom_generate_of_another_model(spec, single, draft):
    with pytest.raises(ValueError, match="another model"):
        draft.generate(**single, custom_generate=spec)


def test_installed(spec, inputs):
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    expected = spec.model.generate(**inputs, **arguments)
    with spec.installed() as inside:
        assert inside is spec
        assert spec.model.generate(**inputs, **arguments).tolist() == expected.tolist()
    assert spec.report.num_calls == 1
    spec.model.generate(**inputs, **arguments)
    assert spec.report.num_calls == 1


def test_installed_is_undone_after_an_error(spec):
    with pytest.raises(RuntimeError, match="inside"), spec.installed():
        raise RuntimeError("inside")
    assert "generate" not in vars(spec.model)


def test_a_copy_of_the_model_generates_by_itself(spec, single):
    arguments = {**single, "max_new_tokens": NEW, "do_sample": False}
    expected = spec.model.generate(**arguments).tolist()
    with spec.installed():
        copied = copy.deepcopy(spec.model)
    with torch.no_grad():
        copied.lm_head.weight.neg_()
    assert copied.generate(**arguments).tolist() != expected
    assert spec.report.num_calls == 0


def calls(specs, model, inputs):
    """How many calls of `model.generate` each of these generators answered so far, after one more."""
    model.generate(**inputs, max_new_tokens=2, do_sample=False)
    return [spec.report.num_calls for spec in specs]


@pytest.mark.parametrize("left", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)], ids=str)
def test_contexts_that_overlap(single, left):
    """Entered and left in any order, as those of several threads are: the newest answers, the last one tidies up."""
    model = copy.deepcopy(tiny.model("llama"))
    specs = [SpeculativeGenerator(model, "ngram") for _ in range(2)]
    contexts = [spec.installed() for spec in (*specs, specs[0])]
    inside, expected = [], [0, 0]
    for place, context in enumerate(contexts):
        context.__enter__()
        inside.append(place)
    for place in left:
        expected[(0, 1, 0)[max(inside)]] += 1
        assert calls(specs, model, single) == expected
        contexts[place].__exit__(None, None, None)
        inside.remove(place)
    assert calls(specs, model, single) == expected
    assert "generate" not in vars(model)


def test_what_the_model_had_comes_back():
    """An attribute of its own, as transformers gives models whose repository has a `generate`."""
    model = copy.deepcopy(tiny.model("llama"))
    own = model.generate = functools.partial(type(model).generate, model, top_k=7)
    first, second = (SpeculativeGenerator(model, "ngram").installed() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.generate is not own
    second.__exit__(None, None, None)
    assert model.generate is own


def test_what_others_put_there_meanwhile_stays(single):
    model = copy.deepcopy(tiny.model("llama"))
    specs = [SpeculativeGenerator(model, "ngram") for _ in range(2)]
    first, second = (spec.installed() for spec in specs)
    first.__enter__()
    ours, seen = model.generate, []

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        seen.append(kwargs)
        return ours(*args, **kwargs)

    model.generate = theirs
    assert calls(specs, model, single) == [1, 0]
    second.__enter__()
    assert calls(specs, model, single) == [1, 1]
    first.__exit__(None, None, None)
    assert calls(specs, model, single) == [1, 2]
    second.__exit__(None, None, None)
    assert model.generate is theirs
    assert calls(specs, model, single) == [1, 2]
    assert len(seen) == 2


def test_an_installed_generator_is_a_method(single):
    model = tiny.on_host("llama").to(tiny.DEVICE)  # pickled: others' tests leave local functions as hooks on theirs
    before, spec = model.generate, SpeculativeGenerator(model, "ngram")
    arguments = {**single, "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**arguments).tolist()
    with spec.installed():
        method = model.generate
        assert inspect.ismethod(method)
        assert method.__self__ is model
        assert method == model.generate
        assert inspect.signature(method) == inspect.signature(before)
        assert inspect.unwrap(method) is inspect.unwrap(before)
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
            assert getattr(method, name) == getattr(before, name)
        assert types.MethodType(method.__func__, model)(**arguments).tolist() == expected
        assert (
            functools.wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))(**arguments).tolist() == expected
        )
        assert spec.report.num_calls == 2
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(method).__self__]
        copies.append(pickle.loads(pickle.dumps(method)).__self__)
        other = types.MethodType(method.__func__, copies[0])
    for copied in copies:
        assert copied is not model
        assert inspect.ismethod(copied.generate)
        assert copied.generate.__self__ is copied
        assert copied.generate(**arguments).tolist() == expected
    assert other(**arguments).tolist() == expected
    assert spec.report.num_calls == 2
    assert method(**arguments).tolist() == expected  # kept beyond the context: the model's own again
    assert spec.report.num_calls == 2


def test_a_copy_made_meanwhile_keeps_no_model(single):
    model = copy.deepcopy(tiny.model("llama"))
    spec = SpeculativeGenerator(model, "ngram")
    with spec.installed():
        copied = copy.deepcopy(model)
    with SpeculativeGenerator(copied, "ngram").installed():
        copied.generate(**single, max_new_tokens=2, do_sample=False)
    gone = weakref.ref(model)
    del model, spec
    gc.collect()
    assert gone() is None


def test_pipeline(spec, tokenizer):
    pipe = pipeline("text-generation", model=spec.model, tokenizer=tokenizer)
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    expected = pipe(["abcabc", "xyz"], batch_size=2, **arguments)
    with spec.installed():
        assert pipe(["abcabc", "xyz"], batch_size=2, **arguments) == expected
    assert spec.report.num_calls == 1
    assert spec.report.num_plain_calls == 0


# What runs as plain decoding: the same output, one warning that says why, none the second time


PLAIN = {
    "num_beams": (lambda model, inputs: {"num_beams": 2}, "beam search"),
    "use_cache": (lambda model, inputs: {"use_cache": False}, "use_cache=False"),
    "position_ids": (lambda model, inputs: {"position_ids": torch.arange(9)[None] + 3}, "position_ids"),
    "output_attentions": (
        lambda model, inputs: {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions",
    ),
    "padded on the right": (
        lambda model, inputs: {"attention_mask": torch.tensor([[1] * 7 + [0] * 2])},
        "row 0 of the batch ends in padding: set tokenizer.padding_side",
    ),
    "all padding": (
        lambda model, inputs: {"attention_mask": torch.zeros(1, 9, dtype=torch.long)},
        "row 0 of the batch is all padding",
    ),
    "ends in the padding token": (
        lambda model, inputs: {"input_ids": torch.tensor([[3, 4, 5, 6, 0]]), "attention_mask": None},
        "pass attention_mask where a prompt's own last token is the padding token",
    ),
    "beam sampling outputs": (lambda model, inputs: {"num_beams": 3, "num_return_sequences": 2}, "beam search"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_with_one_warning(models, single, name):
    make, reason = PLAIN[name]
    model = models("llama", attn_implementation="eager") if name == "output_attentions" else models("llama")
    spec = SpeculativeGenerator(model, "ngram", draft_length=4)

    def arguments():
        return {**single, **make(model, single)}

    with tiny.specdec_warnings() as first:
        same(spec, arguments, speculated=False)
    with tiny.specdec_warnings() as second:
        same(spec, arguments, speculated=False)
    assert len(first) == 1
    assert reason in first[0]
    assert second == []
    strict = SpeculativeGenerator(model, "ngram", on_unsupported="error")
    with pytest.raises(Unsupported, match=reason):
        strict.generate(**arguments(), max_new_tokens=NEW)


def test_token_type_ids_run_as_plain_decoding(models, single):
    spec = SpeculativeGenerator(models("gpt2"), "ngram")
    with tiny.specdec_warnings() as messages:
        same(spec, lambda: {**single, "token_type_ids": torch.ones_like(single["input_ids"])}, speculated=False)
    assert len(messages) == 1
    assert "token_type_ids" in messages[0]


def test_plain_decoding_streams_and_stops_too(llama, single, tokenizer):
    """A fallback keeps what specdec took out of transformers' hands: the streamer and the stop strings."""
    spec = SpeculativeGenerator(llama, "ngram")
    with tiny.specdec_warnings():
        written = tokenizer.decode(llama.generate(**single, do_sample=False, max_new_tokens=NEW)[0, -NEW:])
        same(
            spec,
            lambda: {
                **single,
                "use_cache": False,
                "streamer": Recorder(),
                "stop_strings": written[5:7],
                "tokenizer": tokenizer,
            },
            speculated=False,
        )


# What a call asks to draft with


WAYS_IN = {
    "generate": lambda spec, **kwargs: spec.generate(**kwargs),
    "custom_generate": lambda spec, **kwargs: spec.model.generate(**kwargs, custom_generate=spec),
    "installed": lambda spec, **kwargs: _installed(spec, kwargs),
}


def _installed(spec, kwargs):
    with spec.installed():
        return spec.model.generate(**kwargs)


@pytest.mark.parametrize("way", WAYS_IN)
def test_assistant_model_drafts_in_its_call(spec, inputs, way):
    """The target itself: all of its greedy drafts are right."""
    arguments = {**inputs, "do_sample": False, "max_new_tokens": NEW}
    expected, perfect = spec.model.generate(**arguments).tolist(), copy.deepcopy(spec.model)
    with tiny.specdec_warnings() as messages:
        assert WAYS_IN[way](spec, **arguments, assistant_model=perfect).tolist() == expected
        asked = spec.last_report
        assert WAYS_IN[way](spec, **arguments).tolist() == expected
    assert messages == []
    assert asked.num_draft_tokens == asked.num_accepted_tokens > 0
    own = spec.last_report
    assert own.num_draft_tokens > own.num_accepted_tokens
    assert spec.report.num_calls == 2


@pytest.mark.parametrize("way", WAYS_IN)
def test_prompt_lookup_drafts_in_its_call(llama, draft, single, way):
    arguments = {**single, "do_sample": False, "max_new_tokens": NEW}
    expected, ngram = llama.generate(**arguments).tolist(), SpeculativeGenerator(llama, "ngram", draft_length=4)
    spec = SpeculativeGenerator(llama, draft, draft_length=4)
    ngram.generate(**arguments)
    with tiny.specdec_warnings() as messages:
        assert WAYS_IN[way](spec, **arguments, prompt_lookup_num_tokens=3).tolist() == expected
    assert messages == []
    assert spec.report.num_accepted_tokens_per_pos == ngram.report.num_accepted_tokens_per_pos
    assert spec.report.num_draft_tokens == ngram.report.num_draft_tokens


def test_an_assistant_is_prepared_once(llama, single, draft, monkeypatch):
    made, prepare = [], DraftModelProposer._settle
    monkeypatch.setattr(DraftModelProposer, "_settle", lambda self: (made.append(self), prepare(self)))
    spec = SpeculativeGenerator(llama, "ngram", draft_length=4)
    for _ in range(2):
        spec.generate(**single, max_new_tokens=4, assistant_model=draft)
    assert len(made) == 1


def test_an_assistant_that_drafts_anyway(llama, single, draft):
    """As it was set up: with a vocabulary of its own, say."""
    spec = SpeculativeGenerator(llama, DraftModelProposer(draft, vocab=40), draft_length=4)
    reports = []
    for asked in ({}, {"assistant_model": draft}):
        spec.generate(**single, **asked, do_sample=False, max_new_tokens=NEW)
        reports.append(spec.last_report)
    assert reports[0].num_accepted_tokens_per_pos == reports[1].num_accepted_tokens_per_pos
    assert not [*spec._sessions.assistants]


def test_an_assistant_of_another_tokenizer_is_named_and_ignored(spec, single, models):
    expected = spec.model.generate(**single, do_sample=False, max_new_tokens=NEW)
    other = models("llama", vocab_size=tiny.VOCAB * 200)
    with tiny.specdec_warnings() as messages:
        for _ in range(2):
            ours = spec.generate(**single, do_sample=False, max_new_tokens=NEW, assistant_model=other)
    assert ours.tolist() == expected.tolist()
    assert len(messages) == 1
    assert "assistant_model is ignored" in messages[0]
    assert "they don't share a tokenizer" in messages[0]


def test_an_assistant_that_did_not_fit_and_was_mended(spec, single, models):
    other = copy.deepcopy(models("llama", vocab_size=tiny.VOCAB * 200))
    arguments = {**single, "do_sample": False, "max_new_tokens": NEW, "assistant_model": other}
    expected = spec.model.generate(**single, do_sample=False, max_new_tokens=NEW)
    with tiny.specdec_warnings() as messages:
        spec.generate(**arguments)
    assert "assistant_model is ignored" in messages[0]
    other.resize_token_embeddings(tiny.VOCAB)
    assert spec.generate(**arguments).tolist() == expected.tolist()
    assert set(spec.last_report.num_drafts_by) == {"DraftModelProposer"}


def test_a_target_that_loses_tokens_is_compared_with_its_head_again(llama, single):
    target = copy.deepcopy(llama)
    spec = SpeculativeGenerator(target, Eagle3Proposer(eagle3.head()), draft_length=3)
    spec.generate(**single, max_new_tokens=4)
    target.resize_token_embeddings(tiny.VOCAB - 4)
    with pytest.raises(ValueError, match=f"beyond the target's vocabulary of {tiny.VOCAB - 4}"):
        spec.generate(**single, max_new_tokens=4)


def test_an_early_exit_that_cannot_be_is_named_and_ignored(spec, single):
    expected = spec.model.generate(**single, do_sample=False, max_new_tokens=NEW)
    with tiny.specdec_warnings() as messages:
        ours = spec.generate(**single, do_sample=False, max_new_tokens=NEW, assistant_early_exit=9)
    assert ours.tolist() == expected.tolist()
    assert len(messages) == 1
    assert "assistant_early_exit" in messages[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"cache_implementation": "quantized"},
        {"token_type_ids": torch.ones(1, 9)},
        {"num_beams": 2, "streamer": Recorder()},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"penalty_alpha": 0.6, "top_k": 4},
    ],
)
def test_what_plain_generate_refuses_is_refused_alike(spec, single, arguments):
    """A cache that is not installed, an argument that nobody knows, beams that cannot be streamed, modes that moved."""
    with pytest.raises(Exception) as plain:  # noqa: PT011 (whatever it is, ours must be it)
        spec.model.generate(**single, **arguments, max_new_tokens=4)
    with tiny.specdec_warnings(), pytest.raises(type(plain.value)) as ours:
        spec.generate(**single, **arguments, max_new_tokens=4)
    assert str(ours.value) == str(plain.value)


# Bad arguments: one clear error before any work

BAD_CONSTRUCTION = {
    "another vocabulary": (lambda m: {"proposer": tiny.model("llama", vocab_size=2000)}, ValueError, "2000 tokens"),
    "negative draft_length": (lambda m: {"draft_length": -1}, ValueError, "got -1"),
    "unknown proposer": (lambda m: {"proposer": "n-gram"}, ValueError, "'n-gram'"),
    "proposer of a wrong type": (lambda m: {"proposer": 3}, ValueError, "got 3"),
    "no model": (lambda m: {"model": torch.nn.Linear(2, 2)}, TypeError, "Linear"),
    "a model's name": (lambda m: {"model": "gpt2"}, TypeError, "str"),
    "unknown rule": (lambda m: {"rule": "greedy"}, ValueError, "'greedy'"),
    "unknown on_unsupported": (lambda m: {"on_unsupported": "ignore"}, ValueError, "'ignore'"),
    "draft elsewhere": (lambda m: {"proposer": on_meta(m)}, ValueError, "meta"),
}


def on_meta(model):
    with torch.device("meta"):
        return type(model)(model.config)


@pytest.mark.parametrize("name", BAD_CONSTRUCTION)
def test_bad_construction(llama, name):
    make, kind, words = BAD_CONSTRUCTION[name]
    arguments = {"model": llama, "proposer": "ngram"} | make(llama)
    with pytest.raises(kind, match=words):
        SpeculativeGenerator(arguments.pop("model"), arguments.pop("proposer"), **arguments)


def test_stop_strings_without_a_tokenizer(spec):
    with pytest.raises(ValueError, match="tokenizer"):
        spec.generate(torch.tensor([[3, 4, 5], [6, 7, 8]]), stop_strings=["x"], max_new_tokens=4)


def test_empty_prompt(spec):
    with pytest.raises(ValueError, match="prompt is empty"):
        spec.generate(torch.ones(1, 0, dtype=torch.long), max_new_tokens=4)


def tree(context, parents, chain=False, token=1):
    """Both rows draft this token behind these parents."""
    tokens = torch.full((2, len(parents)), token)
    return DraftTree(tokens, torch.tensor([parents] * 2), chain=chain)


class Saying(Proposer):
    """Returns what it was given, whatever it is."""

    def __init__(self, make):
        self.make = make

    def propose(self, context):
        return self.make(context)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda c: c.chain([1, 2, 3]), TypeError, "one list of tokens for each of the 2 rows, got .1, 2, 3."),
        (lambda c: [[1, 2]], TypeError, "Saying.propose must return a DraftTree, got list"),
        (lambda c: c.chain([[10**7], [1]]), ValueError, "token outside of the target's vocabulary of 64: 10000000"),
        (lambda c: c.chain([[-5], [1]]), ValueError, "token outside of the target's vocabulary of 64: -5"),
        (lambda c: DraftTree.root_only(c.root[:1]), ValueError, "returned 1 rows of 1 nodes for a batch of 2 rows"),
        (lambda c: tree(c, [-1, 0], token=64), ValueError, "Saying.propose drafted a token outside of .* of 64: 64"),
        (lambda c: tree(c, [-1, 0, 3, 0]), ValueError, "a node before its parent"),
        (lambda c: tree(c, [0, 0, 1, 2]), ValueError, "the root's is -1"),
        (lambda c: tree(c, [-1, -1, 1, 2]), ValueError, "whose parent is padding"),
        (lambda c: tree(c, [-1, 0, 0, 1], chain=True), ValueError, "set chain=True"),
        (lambda c: DraftTree(torch.rand(2, 2), torch.tensor([[-1, 0]] * 2)), ValueError, "use int64"),
    ],
)
def test_a_proposer_that_breaks_the_rules_is_named(make, error, message):
    spec = SpeculativeGenerator(tiny.model("llama"), Saying(make))
    with pytest.raises(error, match=message):
        spec.generate(**tiny.prompts(5, 3), max_new_tokens=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda c: DraftTree.from_chain(c.root.flip(0) + 1, torch.ones(2, 3, dtype=torch.long)),
        lambda c: DraftTree.from_chain(c.root.int(), torch.ones(2, 3, dtype=torch.int32)),
        lambda c: DraftTree.from_chain(c.tokens[:, 0], c.tokens[:, :4]),
        lambda c: DraftTree.from_chain(c.root, torch.full((2, 30), 7)),
    ],
    ids=["another root", "int32", "stale", "beyond the room"],
)
def test_a_proposer_that_is_merely_wrong_changes_nothing(make):
    """Column 0 is the loop's own."""
    model, inputs = tiny.model("llama"), tiny.prompts(5, 3)
    spec = SpeculativeGenerator(model, Saying(make), on_unsupported="error")
    out = spec.generate(**inputs, do_sample=False, max_new_tokens=9)
    assert out.tolist() == model.generate(**inputs, do_sample=False, max_new_tokens=9).tolist()


def test_traces_show_the_root_of_the_text():
    spec = SpeculativeGenerator(
        tiny.model("llama"), Saying(lambda c: DraftTree.from_chain(c.root * 0 - 1, torch.ones(1, 3, dtype=torch.long)))
    )
    with spec.watch() as rounds:
        out = spec.generate(**tiny.prompts(5), do_sample=False, max_new_tokens=9)
    assert len(rounds) > 2
    assert all(trace.tokens[0] == out[0, 5 + trace.position - 1] for trace in rounds)


@pytest.mark.parametrize("length", ["4", 1.5, -1, True, False])
def test_draft_lengths_that_are_none(length):
    with pytest.raises(ValueError, match="draft_length must be None or an int of at least 0"):
        SpeculativeGenerator(tiny.model("llama"), "ngram", draft_length=length)


def test_a_draft_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="neither a folder with a model nor a hub repository"):
        SpeculativeGenerator(tiny.model("llama"), f"draft:{tmp_path / 'nothing'}")


@pytest.mark.parametrize("layout", get_args(HeadLayout))
def test_a_draft_that_is_a_head(layout, tmp_path):
    save(eagle3.head(), tmp_path, layout)
    with pytest.raises(ValueError, match='is an EAGLE head, not a model: pass "eagle3:'):
        SpeculativeGenerator(tiny.model("llama"), f"draft:{tmp_path}")


def test_an_empty_batch():
    with pytest.raises(ValueError, match="the batch is empty"):
        SpeculativeGenerator(tiny.model("llama"), "ngram").generate(torch.zeros(0, 3, dtype=torch.long))


def test_warnings_point_at_the_callers_line():
    spec = SpeculativeGenerator(tiny.model("llama"), "ngram")
    with pytest.warns(UserWarning, match="running as plain") as caught:
        spec.generate(**tiny.prompts(5), num_beams=2, max_new_tokens=4)
    other = tiny.model("llama", vocab_size=tiny.VOCAB * 200)
    with pytest.warns(UserWarning, match="assistant_model is ignored") as also:
        spec.generate(**tiny.prompts(5), assistant_model=other, max_new_tokens=4)
    assert {warning.filename for warning in [caught[0], also[0]]} == {__file__}


def test_one_prompt_is_a_batch_of_one(llama):
    with pytest.raises(ValueError, match=r"takes prompts of shape \(B, T\), got one of shape \(5,\): pass ids\[None\]"):
        SpeculativeGenerator(llama, "ngram").generate(torch.arange(5))


def test_a_generators_own_settings_are_no_arguments_of_a_call():
    spec = SpeculativeGenerator(tiny.model("llama"), "ngram")
    with pytest.raises(TypeError, match=r"draft_length is an argument of SpeculativeGenerator\(...\), not of generate"):
        spec.generate(**tiny.prompts(5), draft_length=3)
    assert spec.report.num_calls == 0


@pytest.mark.parametrize("inputs", ["a text", ["a text"], [[1, 2, 3]]])
def test_what_is_no_tensor_is_told_how_to_become_one(inputs):
    spec = SpeculativeGenerator(tiny.model("llama"), "ngram")
    with pytest.raises(TypeError, match=r"takes a tensor of token ids, got a (str|list): generate\(\*\*tokenizer"):
        spec.generate(inputs)


class Limited(LlamaForCausalLM):
    """Reads other tokens than it is given."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **others):
        inputs = super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **others)
        return inputs | {"input_ids": inputs["input_ids"].clamp(max=40)}


class Later(LlamaForCausalLM):
    """Changes the positions of all passes but the first."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **others):
        inputs = super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **others)
        if not others.get("is_first_iteration"):
            inputs["position_ids"] = inputs["position_ids"] * 2
        return inputs


class Counting(LlamaForCausalLM):
    """Overrides the method, as many models of hubs do, but gives the usual inputs."""

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **others):
        inputs = super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **others)
        positions = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        return inputs | {"position_ids": positions[:, -inputs["input_ids"].shape[1] :]}


@pytest.mark.parametrize(("kind", "plain_calls"), [(Limited, 1), (Later, 1), (Counting, 0)])
def test_a_class_that_prepares_its_inputs_itself(kind, plain_calls, ragged):
    model = copy.deepcopy(tiny.model("llama"))
    model.__class__ = kind
    spec = SpeculativeGenerator(model, "ngram", draft_length=4)
    arguments = {**ragged, "do_sample": False, "max_new_tokens": NEW}
    with tiny.specdec_warnings():
        assert spec.generate(**arguments).tolist() == model.generate(**arguments).tolist()
    assert spec.report.num_plain_calls == plain_calls


def test_a_length_that_the_prompt_has_already(spec, inputs):
    """Plain decoding writes one token before it asks its criteria."""
    length = inputs["input_ids"].shape[1]
    arguments = {**inputs, "do_sample": False, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(length)])}
    expected = spec.model.generate(**arguments)
    assert expected.shape[1] == length + 1
    assert spec.generate(**arguments).tolist() == expected.tolist()


def test_a_function_of_allowed_tokens_may_declare_a_state(single):
    """It is called in plain decoding's order, and as often."""

    def counting():
        calls = []

        def allowed(row, ids):
            calls.append(row)
            return [token for token in range(tiny.VOCAB) if token % 3 != len(calls) % 3]

        allowed.stateless = False
        return allowed

    model = tiny.model("llama")
    spec = SpeculativeGenerator(model, tiny.model("llama", seed=1), draft_length=4, on_unsupported="error")
    arguments = {**single, "do_sample": False, "max_new_tokens": NEW}
    expected = model.generate(**arguments, prefix_allowed_tokens_fn=counting())
    assert spec.generate(**arguments, prefix_allowed_tokens_fn=counting()).tolist() == expected.tolist()


def test_queries_that_are_scaled_by_their_column():
    """Llama 4's, from a length on: rows of a batch and nodes of a tree are not in plain decoding's columns."""
    config = families.tiny_config("llama4_text")
    changed = families.OVERRIDES["llama4_text"] | {"floor_scale": 40}
    model = tiny.randomised(families._shrunk(type(config), changed), 0)
    spec, prompt = SpeculativeGenerator(model, "ngram", draft_length=6), tiny.prompts(3, 17, 8, vocab=90)
    for new_tokens, plain_calls in ((22, 0), (60, 1)):
        arguments = {**prompt, "do_sample": False, "max_new_tokens": new_tokens}
        with tiny.specdec_warnings():
            assert spec.generate(**arguments).tolist() == model.generate(**arguments).tolist()
        assert spec.last_report.num_plain_calls == plain_calls


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "gemma3", "gemma3n_text"])
def test_hidden_states_of_later_calls(name):
    """The hooks that keep them are those of the model, also if its first call is not plain decoding."""
    model = families.tiny_model(name) if name == "gemma3n_text" else tiny.model.__wrapped__(name)
    spec = SpeculativeGenerator(model, "ngram", draft_length=3)
    arguments = {**tiny.prompts(9), "do_sample": False, "max_new_tokens": 6}
    arguments |= {"return_dict_in_generate": True, "output_hidden_states": True}
    with tiny.specdec_warnings():
        found = [spec.generate(**arguments) for _ in range(3)]
    expected = model.generate(**arguments)
    for output in found:
        assert output.sequences.tolist() == expected.sequences.tolist()
        for mine, its in zip(output.hidden_states, expected.hidden_states, strict=True):
            assert [states.shape for states in mine] == [states.shape for states in its]
    passed = model(tiny.prompts(9)["input_ids"], output_hidden_states=True)
    assert len(passed.hidden_states) == len(expected.hidden_states[0])
