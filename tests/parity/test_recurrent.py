"""Targets whose layers carry more than keys and values: the text is plain decoding's, in fewer passes."""

import pytest
import torch

from specdec import DraftModelProposer, NgramProposer, SpeculativeGenerator
from specdec.models.cache import recurrent_passes, recurrent_states
from specdec.models.capability import probe
from specdec.models.compat import CACHE, cache_in
from tests.support import families, fuzz, tiny
from tests.support.diagonal import diagonal
from tests.support.since import since

HYBRIDS = ("qwen3_5", "lfm2", "mamba2", "falcon_h1")


def proposers(name, plain):
    return {
        "ngram": NgramProposer(),
        "garbage": tiny.Garbage(),
        "answer": tiny.Garbage(answer=plain),
        "itself": DraftModelProposer(tiny.model(name)),
        "itself tree": DraftModelProposer(tiny.model(name), branching=(2, 2, 1)),
        "draft": DraftModelProposer(tiny.model(name, seed=1)),
    }


@pytest.mark.parametrize("name", HYBRIDS)
def test_all_kinds_of_layers_are_there_and_run_over_trees(name):
    model = tiny.model(name)
    assert any("conv" in type(module).__name__.lower() for module in model.modules())
    assert probe(model).trees


@pytest.mark.parametrize(
    ("name", "lengths", "how"),
    diagonal(
        HYBRIDS,
        {"ragged": (58, 3, 21), "one row": (9,)},
        ["ngram", "garbage", "answer", "itself", "itself tree", "draft"],
        times=2,
    ),
)
def test_the_text_is_plain_decodings(name, lengths, how):
    """Texts that cross the 64 tokens of a chunk, rows shorter than a convolution, drafts that branch."""
    model, inputs = tiny.model(name), tiny.prompts(*lengths)
    for kwargs in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
        torch.manual_seed(3)
        plain = model.generate(**inputs, max_new_tokens=20, **kwargs)
        spec = SpeculativeGenerator(model, proposers(name, plain)[how], draft_length=5, on_unsupported="error")
        torch.manual_seed(3)
        assert spec.generate(**inputs, max_new_tokens=20, **kwargs).tolist() == plain.tolist()


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_is_right_saves_passes(name):
    model, inputs = tiny.model(name), tiny.prompts(9)
    spec = SpeculativeGenerator(model, DraftModelProposer(model), draft_length=4)
    spec.generate(**inputs, do_sample=False, max_new_tokens=20)
    assert spec.report.num_accepted_tokens >= 0.9 * spec.report.num_draft_tokens
    assert spec.report.num_rounds < 8


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "mamba2"])  # whose plain decoding fails there
def test_prompts_in_chunks(name):
    model, inputs = tiny.model(name), tiny.prompts(30, 7, 2)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=12, prefill_chunk_size=8).tolist()
    spec = SpeculativeGenerator(model, "ngram", draft_length=4, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12, prefill_chunk_size=8).tolist() == expected


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "mamba2"])
@pytest.mark.parametrize("lengths", [(9,), (11, 4)], ids=["one row", "ragged"])
def test_a_second_turn_goes_on_from_the_states(name, lengths):
    """Also where an end falls into a draft, and other rows have run ahead: what is behind it is in no state."""
    model, texts = tiny.model(name), []
    free = model.generate(**tiny.prompts(*lengths), do_sample=False, max_new_tokens=16)
    end = {"eos_token_id": int(free[0, -9]), "pad_token_id": tiny.PAD, "do_sample": False}
    spec = SpeculativeGenerator(model, tiny.Garbage(answer=free), draft_length=5, on_unsupported="error")
    for generate in (model.generate, spec.generate):
        inputs = tiny.prompts(*lengths)
        first = generate(**inputs, max_new_tokens=16, return_dict_in_generate=True, **end)
        new = tiny.prompts(*[3] * len(lengths), seed=1)["input_ids"]
        text = torch.cat([first.sequences, new], 1)
        mask = torch.nn.functional.pad(
            inputs["attention_mask"], (0, text.shape[1] - inputs["attention_mask"].shape[1]), value=1
        )
        second = generate(text, attention_mask=mask, **{CACHE: cache_in(first)}, max_new_tokens=10, do_sample=False)
        texts.append(second.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["zamba", pytest.param("qwen4_exp_text", marks=since("5.21"))])
@pytest.mark.parametrize("length", [2, 9])
def test_states_of_other_kinds_go_into_a_cache_and_out_of_it(name, length):
    """Zamba's layers scan in a call for each head; Qwen4's keep ids, and positions for an indexer."""
    model, texts = families.tiny_model(name), []
    spec = SpeculativeGenerator(model, "ngram", draft_length=4, on_unsupported="error")
    for first, second in ((model, model), (model, spec), (spec, model), (spec, spec)):
        out = first.generate(**tiny.prompts(length), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        text = torch.cat([out.sequences, tiny.prompts(5, seed=1)["input_ids"]], 1)
        cache = cache_in(out)
        texts.append(second.generate(text, **{CACHE: cache}, max_new_tokens=10, do_sample=False).tolist())
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_padding_between_two_turns_is_left_to_plain_decoding():
    model = tiny.model("qwen3_5")
    first = model.generate(**tiny.prompts(9, 9), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    new = tiny.prompts(5, 2)
    text = torch.cat([first.sequences, new["input_ids"]], 1)
    mask = torch.cat([torch.ones_like(first.sequences), new["attention_mask"]], 1)
    spec = SpeculativeGenerator(model, "ngram")
    with tiny.specdec_warnings() as messages:
        spec.generate(text, attention_mask=mask, **{CACHE: cache_in(first)}, max_new_tokens=4)
    assert "would enter this model's recurrent states" in messages[0]


def test_rows_that_wait_unlike_many_nodes_are_settled_without_a_draft():
    """One row may be rolled back by three tokens, the other by one; then both may not."""
    states = recurrent_states.States(2)
    states.place_known([0, 0], 4, [0, 0])
    states.convolve((0, 0), torch.arange(8.0).view(2, 1, 4), 4)
    states.place_draft(torch.ones(3, 3, dtype=torch.bool).tril().expand(2, -1, -1), True, [4, 4], None)
    states.convolve((0, 0), torch.arange(10.0, 16).view(2, 1, 3), 4)
    states.commit(None)
    states.settle([7, 5], [4, 4])
    states.settle([7, 5])
    (window,) = states.windows.values()
    assert window.state[:, 0].tolist() == [[3, 10, 11, 12], [5, 6, 7, 13]]


@pytest.mark.parametrize("fault", ["mask", "window"])
@pytest.mark.parametrize("name", ["qwen3_5"])
def test_a_state_that_is_off_by_one_shows(name, fault, monkeypatch):
    """A planted fault: the last node that is accepted is left out of the recurrence, or of the convolution's window."""
    if fault == "mask":
        taken = recurrent_states.Taken

        def short(nodes, path, last, *rest, **more):
            nodes = nodes.clone()
            nodes[torch.arange(len(nodes)), last.clamp(min=0)] = False
            return taken(nodes, path, last, *rest, **more)

        monkeypatch.setattr(recurrent_states, "Taken", short)
    else:
        slid = recurrent_passes.slid
        monkeypatch.setattr(recurrent_passes, "slid", lambda line, by, width: slid(line, (by - 1).clamp(min=0), width))
    model = tiny.model(name)
    assert "wrong by" in probe(model).reason


def test_the_model_stays_as_it_was():
    """Its classes, the functions of its file and its modules: plain decoding calls none of ours."""
    model = tiny.model("qwen3_5")
    file = __import__(type(model).__module__, fromlist=["x"])
    before = dict(vars(file)), [type(module) for module in model.modules()]
    SpeculativeGenerator(model, "ngram").generate(**tiny.prompts(9), max_new_tokens=4, do_sample=False)
    assert dict(vars(file)) == before[0]
    assert [type(module) for module in model.modules()] == before[1]


BLOCK = 10


def check(first):
    wrong = {}
    for seed in range(first, first + BLOCK):
        message, _ = fuzz.run(seed, HYBRIDS)
        if message:
            wrong[fuzz.describe(seed, HYBRIDS)] = message
    assert not wrong


@pytest.mark.parametrize("first", range(0, 30, BLOCK))
def test_some_cases(first):
    check(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(30, 600, BLOCK))
def test_many_cases(first):
    check(first)
