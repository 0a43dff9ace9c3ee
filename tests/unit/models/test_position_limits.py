"""Targets whose positions end: drafts stay within them, so that text and errors are plain decoding's."""

import copy
from functools import cache

import pytest
import torch
from transformers import StoppingCriteriaList

from specdec import (
    DraftModelProposer,
    DraftTree,
    DynamicTree,
    EarlyExitProposer,
    HybridProposer,
    NgramProposer,
    Proposer,
    SpeculativeGenerator,
    SuffixProposer,
)
from specdec.models.capability import capability
from specdec.models.position_limits import positions_of
from specdec.models.runner import ModelRunner
from tests.support import encoded, families, static, tiny
from tests.support.diagonal import diagonal

POSITIONS, PROMPT = 40, 20
LAST = POSITIONS - PROMPT + 1  # tokens that plain decoding writes before a pass at a position that is not there
LENGTHS = "max_position_embeddings max_target_positions max_seq_len".split()
TABLES = ["gpt2", "opt", "bert", "roberta", "ctrl", "gptj", "codegen", "gpt_neo", "roformer", "bart", "whisper", "mpt"]
RUN = ["gpt2", "opt", "codegen", "gpt_neo", "mpt"]


@cache
def short(name, positions=POSITIONS, seed=0):
    """A tiny model of a family with so few positions, and no end token."""
    config = families.tiny_config(name)
    for field in LENGTHS:
        if hasattr(config, field):
            setattr(config, field, positions)
    config.forced_eos_token_id = None
    model = tiny.randomised(config, seed)
    model.config.eos_token_id = None
    return model.to(tiny.DEVICE)


class RowAfterRow(Proposer):
    """Drafts what plain decoding wrote, `answer`, for the first row that has budget: the others wait."""

    def __init__(self, answer):
        self.answer = answer

    def propose(self, context):
        drafts = [[] for _ in context.ends]
        for b in context.rows[:1]:
            drafts[b] = self.answer[b, context.ends[b] : context.ends[b] + 4].tolist()
        return context.chain(drafts)


class Boundless(RowAfterRow):
    """Drafts eight tokens for every row, whatever room it has."""

    def propose(self, context):
        rows = [self.answer[b, end : end + 8].tolist() for b, end in enumerate(context.ends)]
        drafts = torch.tensor([row + [3] * (8 - len(row)) for row in rows], device=context.tokens.device)
        return DraftTree.from_chain(context.root, drafts)


PROPOSERS = {
    "garbage": lambda target, answer: tiny.Garbage(),
    "right": lambda target, answer: tiny.Garbage(answer=answer),
    "row after row": lambda target, answer: RowAfterRow(answer),
    "boundless": lambda target, answer: Boundless(answer),
    "boundless in turn": lambda target, answer: HybridProposer(Boundless(answer)),
    "ngram tree": lambda target, answer: NgramProposer(continuations=2),
    "suffix": lambda target, answer: SuffixProposer(),
    "draft": lambda target, answer: DraftModelProposer(target),
    "dynamic tree": lambda target, answer: DraftModelProposer(target, tree=DynamicTree(depth=4, top_k=3, size=9)),
    "fixed tree": lambda target, answer: DraftModelProposer(target, branching=(2, 2, 1, 1)),
}


def texts(target, proposer, lengths, count=LAST, **kwargs):
    """Plain decoding's and ours; `count` tokens are known that plain decoding writes."""
    inputs = tiny.prompts(*lengths)
    answer = target.generate(**inputs, do_sample=False, max_new_tokens=count)
    kwargs = {"do_sample": False, "max_new_tokens": 200} | kwargs
    if "end" in kwargs:
        kwargs["eos_token_id"] = answer[:, max(lengths) + kwargs.pop("end")].tolist()
    made = PROPOSERS[proposer](target, answer) if isinstance(proposer, str) else proposer
    spec = SpeculativeGenerator(target, made, draft_length=6, on_unsupported="error")
    written = []
    for generate in (target.generate, spec.generate):
        torch.manual_seed(0)
        written.append(generate(**inputs, **kwargs).tolist())
    return *written, spec


@pytest.mark.parametrize("name", TABLES)
def test_the_positions_of_a_model_are_found(name):
    assert capability(short(name)).positions == POSITIONS


@pytest.mark.parametrize("name", ["llama", "xglm", "mamba", "bloom", "falcon"])
def test_a_model_without_tables_of_positions_has_any(name):
    """RoPE, tables that grow, states, ALiBi."""
    assert capability(short(name)).positions is None


class RotaryTable(torch.nn.Module):
    """RoPE as some models have it that are no part of transformers: looked up in a table of the text's length."""

    def __init__(self, computed):
        super().__init__()
        self.computed = computed

    def forward(self, x, position_ids):
        tables = self.computed(x, torch.arange(x.shape[1])[None])
        return tuple(table[0][position_ids] for table in tables)


def test_a_table_that_is_made_for_a_text_is_none_of_positions():
    model = tiny.on_host("llama")
    model.model.rotary_emb = RotaryTable(model.model.rotary_emb)
    assert positions_of(model) is None


def test_the_positions_of_decoders_are_found():
    found = {name: positions_of(encoded.model(name)) for name in ("bart", "marian", "whisper", "t5", "m2m_100")}
    assert found == {"bart": 128, "marian": 128, "whisper": 128, "t5": None, "m2m_100": None}


def test_an_encoder_s_positions_do_not_count():
    model = encoded.model("bart")
    table = model.get_encoder().embed_positions
    model.get_encoder().embed_positions = type(table)(16, model.config.d_model)
    assert positions_of(model) == 128


def test_the_smallest_input():
    """Of the n-grams' drafts one would have stood behind the 32 positions, before the end token came."""
    target = short("gpt2", 32)
    plain, ours, _ = texts(target, "ngram tree", (PROMPT,), count=12, end=11)
    assert ours == plain


@pytest.mark.parametrize(("proposer", "name"), diagonal(PROPOSERS.keys(), RUN))
def test_an_end_token_before_the_last_position(proposer, name):
    for end in (LAST - 1, LAST - 3):
        plain, ours, _ = texts(short(name), proposer, (PROMPT,), end=end)
        assert ours == plain


@pytest.mark.parametrize(("proposer", "name"), diagonal(PROPOSERS.keys(), ["gpt2", "gpt_neo", "bart"]))
def test_rows_that_stand_at_different_positions(proposer, name):
    """The second row is far from its last position when the first one comes to it, in our passes long before."""
    for kwargs in ({"max_new_tokens": LAST}, {"end": LAST - 1}, {"end": LAST - 2}):
        plain, ours, _ = texts(short(name), proposer, (PROMPT, 7), **kwargs)
        assert ours == plain
    plain, ours, _ = texts(short(name), proposer, (PROMPT, 7), max_new_tokens=LAST, do_sample=True, top_k=0)
    assert ours == plain


@pytest.mark.parametrize("proposer", ["row after row", "boundless"])
def test_a_row_at_its_last_position_waits_for_criteria_that_see_all_rows(proposer):
    """They end the text before plain decoding asks for another position."""

    def enough(ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] == PROMPT + LAST)

    criteria = StoppingCriteriaList([enough])
    plain, ours, _ = texts(short("gpt2"), proposer, (PROMPT, 7), stopping_criteria=criteria)
    assert ours == plain


def test_a_row_that_ended_at_its_last_position_is_in_nobody_s_way():
    """Its end token is at the position that there is not; the other row ends later in passes, earlier in columns."""
    target, inputs = short("gpt2"), tiny.prompts(PROMPT, 7, seed=9)
    answer = target.generate(**inputs, do_sample=False, max_new_tokens=LAST)
    ends = [int(answer[0, -1]), int(answer[1, -3])]
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=200, eos_token_id=ends)
    spec = SpeculativeGenerator(target, RowAfterRow(answer), draft_length=6)
    ours = spec.generate(**inputs, do_sample=False, max_new_tokens=200, eos_token_id=ends)
    assert plain.shape[1] == PROMPT + LAST
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("name", [*RUN, "roberta", "bart"])
@pytest.mark.parametrize("proposer", ["suffix", "boundless"])
def test_without_an_end_token_the_error_is_plain_decoding_s(name, proposer):
    """After as many tokens."""
    target, inputs = short(name), tiny.prompts(PROMPT)
    answer = target.generate(**inputs, do_sample=False, max_new_tokens=LAST)

    class Streamer:
        def __init__(self):
            self.columns = []

        def put(self, value):
            self.columns.append(value.tolist())

        def end(self):
            raise AssertionError("the text does not end")

    streamed, errors = [], []
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target, answer), draft_length=6)
    for generate in (target.generate, spec.generate):
        streamer = Streamer()
        with pytest.raises((IndexError, RuntimeError)) as error:
            generate(**inputs, do_sample=False, max_new_tokens=200, streamer=streamer)
        streamed.append(streamer.columns)
        errors.append(error.type)
    assert streamed[0] == streamed[1]
    assert errors[0] is errors[1]
    assert len(streamed[0]) == 1 + LAST


@pytest.mark.parametrize("records", [{"output_scores": True}, {}], ids=["scores", "cache"])
def test_finished_rows_that_go_on_with_padding_stay_within_their_positions(records):
    target, inputs = short("gpt2"), tiny.prompts(PROMPT, 7)
    answer = target.generate(**inputs, do_sample=False, max_new_tokens=LAST)
    end = int(answer[0, PROMPT + 3])
    given = {"max_new_tokens": LAST, "eos_token_id": end, "return_dict_in_generate": True, "do_sample": False}
    plain = target.generate(**inputs, **given, **records)
    ours = SpeculativeGenerator(target, RowAfterRow(answer), draft_length=6).generate(**inputs, **given, **records)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for score, expected in zip(ours.scores or (), plain.scores or (), strict=True):
        torch.testing.assert_close(score, expected)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mpt"])
@pytest.mark.parametrize("lengths", [(PROMPT,), (PROMPT, 7)], ids=["single", "ragged"])
def test_a_draft_model_of_fewer_positions_drafts_as_far_as_it_can(name, lengths):
    draft = short(name, 30, seed=1)
    if len(lengths) > 1 and not capability(draft).trees:
        pytest.skip("it drafts for single rows alone")
    target = short("gpt2", 64)
    target.config.max_position_embeddings = 64
    plain, ours, spec = texts(target, DraftModelProposer(draft), lengths, max_new_tokens=40)
    assert ours == plain
    assert spec.report.num_draft_tokens


@pytest.mark.parametrize(("name", "lengths"), [("whisper", (PROMPT, 7)), ("bart", (18, 12, PROMPT))])
def test_a_row_that_a_draft_model_has_read_up_to_the_last_position(name, lengths):
    """It is run with the others, whose drafts go on."""
    plain, ours, _ = texts(short(name), "draft", lengths, max_new_tokens=LAST)
    assert ours == plain


@pytest.mark.parametrize(
    ("lengths", "name"),
    diagonal({"single": (PROMPT,), "ragged": (PROMPT, 7)}, ["gpt2", "gpt_neo", "bart", "marian"]),
)
def test_an_early_exit_drafts_within_the_target_s_positions(lengths, name):
    target = short(name)
    for shape in ({}, {"branching": (2, 2, 1)}):
        plain, ours, spec = texts(target, EarlyExitProposer(1, **shape), lengths, max_new_tokens=LAST)
        assert ours == plain
        assert spec.report.num_draft_tokens


@pytest.mark.parametrize(
    ("proposer", "name"),
    [
        ("row after row", "opt"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("row after row", "gpt2"), ("dynamic tree", "opt"), ("dynamic tree", "gpt2"))
        ),
    ],
)
def test_padded_passes_stay_within_the_positions(proposer, name, monkeypatch):
    """Nodes that pad a captured pass have positions, too."""
    static.switch_on(monkeypatch)
    for kwargs in ({"max_new_tokens": LAST}, {"end": LAST - 1}):
        plain, ours, spec = texts(short(name), proposer, (PROMPT, 7), **kwargs)
        assert ours == plain
    assert len(spec._sessions.own.static_forward)


def test_a_pass_for_nothing_needs_no_further_position():
    """After a text that fills all of them, for the sake of other processes."""
    target = short("gpt2")
    runner = ModelRunner(target, "tensor")
    runner.start(2)
    runner.extend(torch.ones(2, POSITIONS, dtype=torch.long), [0, 3])
    runner.idle()
    assert runner.lengths == [POSITIONS, POSITIONS - 3]


def test_more_positions_than_the_config_says_are_no_limit():
    """RoPE's: they are the lengths of texts to train on."""
    target = short("llama")
    plain, ours, spec = texts(target, "right", (PROMPT,), count=60, max_new_tokens=60)
    assert ours == plain
    assert spec.report.mean_acceptance_length > 2


@pytest.mark.parametrize(
    ("proposer", "lengths", "window"),
    diagonal(["dynamic tree", "garbage", "right"], {"ragged": (40, 7, 31), "single": (40,)}, [6, 24]),
)
def test_a_layer_s_own_causal_mask_is_looked_up_by_position(proposer, lengths, window):
    """GPT-Neo's also limits how far local layers look back: in trees and ragged rows columns are not positions."""
    config = copy.deepcopy(short("gpt_neo").config)
    config.max_position_embeddings, config.window_size = 128, window
    target = tiny.randomised(config).to(tiny.DEVICE)
    plain, ours, spec = texts(target, proposer, lengths, count=60, max_new_tokens=60)
    assert ours == plain
    assert spec.capability.trees


def test_a_tree_may_be_wider_than_the_columns_that_are_left():
    """Of a mask that the target keeps: GPT-Neo's has as many columns as there are positions."""
    plain, ours, _ = texts(short("gpt_neo"), SuffixProposer(), (PROMPT,), max_new_tokens=PROMPT)
    assert ours == plain
