"""On a CUDA device, pretended or real: what is recorded once is replayed as one launch, without a line of Python.

python -m pytest --device pretend tests/unit/models/test_cuda_graphs.py    # --device cuda counts no launches
"""

import copy
import itertools
import statistics
import sys
import warnings
from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from specdec import DraftModelProposer, DynamicTree, HybridProposer, SpeculativeGenerator, SuffixProposer
from specdec.engine import cuda_graph_round, speculation
from specdec.engine.cuda_graph_round import CapturedRound
from specdec.engine.draft_tally import IdleDraftWarning
from specdec.engine.loop import Loop
from specdec.models import draft_attention, graph_capture, static_forward
from specdec.models.cache import buffers as buffers_module
from specdec.models.cache.ragged_rows import CachedRows
from specdec.models.cuda_graphs import MOST, WARM, KnownFunctions, Recorder
from specdec.proposers import hybrid
from specdec.proposers.draft_models import cuda_graph_drafts
from specdec.proposers.draft_models.cuda_graph_drafts import CapturedDraft
from tests.support import launches, tiny

pytestmark = pytest.mark.skipif(tiny.DEVICE == "cpu", reason="pytest --device pretend, or cuda")
PRETENDED = not torch.cuda.is_available()

NEW = 40
ROUND = 40  # launches, at most, that a round of replays may ask for
ROW_AT_0 = 8  # of one row at T = 0, with a fixed draft length


@pytest.fixture
def recorders(monkeypatch):
    """Those of all calls; no code is generated, passes are recorded as they are."""
    made: list[Recorder] = []

    class Kept(Recorder):
        def __init__(self, known, state):
            super().__init__(known, state)
            made.append(self)

    monkeypatch.setattr(speculation, "Recorder", Kept)
    monkeypatch.setattr(static_forward, "with_compiled_layers", lambda model, backend: model)
    return made


def replaying(name: str, automatic: bool) -> SpeculativeGenerator:
    spec = launches.generator(name, automatic)
    spec.compile = True
    return spec


def text(generate, sampling, **kwargs):
    torch.manual_seed(0)
    return generate(**kwargs, do_sample=sampling, max_new_tokens=NEW).tolist()


@pytest.mark.parametrize(
    ("name", "automatic", "batch_size", "sampling"),
    [
        *((name, False, 1, False) for name in launches.PROPOSERS),
        *((name, True, 3, True) for name in launches.PROPOSERS),
        ("eagle3 tree", True, 1, True),
        ("eagle3 tree", False, 3, False),
    ],
)
def test_the_text_is_plain_decodings_and_a_round_is_few_launches(name, automatic, batch_size, sampling, recorders):
    spec, given = replaying(name, automatic), launches.prompts(batch_size, short=True)
    plain = text(spec.model.generate, sampling, **given)
    with tiny.specdec_warnings() as warned:
        warnings.simplefilter("ignore", IdleDraftWarning)  # heads of random weights are rarely right
        assert text(spec.generate, sampling, **given) == plain
        if not PRETENDED:
            assert len(recorders[-1]) >= 1
            return
        books = launches.counted(spec, do_sample=sampling, max_new_tokens=NEW, **given)
    assert not warned
    recorder = recorders[-1]
    assert len(recorder) >= 1
    for book in launches.settled(books):
        assert book.count("waits") == 1, book.waits
    replayed = launches.replaying(books, name)
    assert len(replayed) >= (1 if name == "hybrid" else 2)
    for book in replayed:
        assert book.count("launches") <= ROUND, book.launches
        assert book.count("launches", launches.DRAFT, launches.TARGET) == 0
    if batch_size == 1 and not (automatic or sampling or name == "hybrid"):  # a hybrid's rounds are of several kinds
        assert statistics.median(book.count("launches") for book in replayed) <= ROW_AT_0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_chains_that_are_laid_out_as_trees_are_sampled(batch_size, recorders):
    """Suffix drafts of one continuation are chains with a number of levels; they are shorter than their padded size."""
    target, given = launches.models()[0], launches.prompts(batch_size)
    spec = SpeculativeGenerator(target, SuffixProposer(), draft_length=2, compile=True)
    assert text(spec.generate, True, **given) == text(target.generate, True, **given)
    assert spec.report.num_draft_tokens
    assert len(recorders[-1]) >= 1


@pytest.mark.skipif(not PRETENDED, reason="counts launches")
def test_a_draft_of_a_size_that_is_seldom_runs_as_one_that_is_recorded(recorders):
    """At the end of a text drafts have no budget: each of their sizes comes once."""
    spec, given = replaying("ngram", automatic=False), launches.prompts(1)
    books = launches.counted(spec, do_sample=False, max_new_tokens=NEW, **given)
    assert [launches.replays(book) for book in books[-4:]] == [1] * 4


@pytest.mark.parametrize("name", ["ngram", "draft chain", "eagle3 tree"])
def test_passes_that_are_not_compiled_run_the_decoding_view(name, recorders, monkeypatch):
    used, attend = [], draft_attention.attend
    monkeypatch.setattr(draft_attention, "attend", lambda *args: used.append(args) or attend(*args))
    spec, given = launches.generator(name, automatic=False), launches.prompts(3)
    spec.compile = "auto"
    plain = text(spec.model.generate, False, **given)
    with tiny.specdec_warnings() as warned:
        assert text(spec.generate, False, **given) == plain
    assert not warned
    assert len(recorders[-1]) >= 1
    assert used


@pytest.mark.parametrize("at_once", [False, True], ids=["step by step", "at once"])
def test_buffers_are_made_for_the_whole_call_where_empty_slots_take_no_time(at_once, recorders, monkeypatch):
    for module in (cuda_graph_round, cuda_graph_drafts):
        monkeypatch.setattr(module, "skips_empty_slots", lambda device: at_once)
    monkeypatch.setattr(buffers_module, "FEWEST", 16)
    reserve, sizes = CachedRows.reserve, {}

    def noting(rows, *args):
        made = reserve(rows, *args)
        sizes.setdefault(id(rows), set()).add(made)
        return made

    monkeypatch.setattr(CachedRows, "reserve", noting)
    spec, given = replaying("eagle3 chain", automatic=False), launches.prompts(2)
    assert text(spec.generate, False, **given) == text(spec.model.generate, False, **given)
    assert [len(made) == 1 for made in sizes.values()] == [at_once, at_once]  # of the target and the head


@pytest.mark.parametrize("shape", [{}, {"tree": DynamicTree(depth=3, top_k=2)}], ids=["chain", "tree"])
def test_rows_whose_positions_have_run_out(shape, recorders):
    """Of a model with a table of positions: one row ends at its last one, while the others are drafted for."""
    target = copy.deepcopy(tiny.on_host("gpt2", n_positions=60))
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    for weight in draft.parameters():  # right in some places only, so that rows write at paces of their own
        weight.data += 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
    target, draft = target.to("cuda"), draft.to("cuda")
    given = {name: tensor.to("cuda") for name, tensor in tiny.prompts(20, 20, 20).items()}
    ends = {"do_sample": False, "max_length": 60}
    spec = SpeculativeGenerator(target, DraftModelProposer(draft, **shape), draft_length=3, compile=True)
    ours, plain = (generate(**given, **ends).tolist() for generate in (spec.generate, target.generate))
    assert ours == plain
    assert len(recorders[-1]) == 2


def drafts_of_rounds(monkeypatch) -> list:
    """Token and parent of each node that is drafted from now on, by round and unfinished row."""
    propose, drafts = Loop._propose, []

    def seen(self, context):
        draft = propose(self, context)
        rows = [b for b, active in enumerate(self.text.active) if active]
        nodes = [zip(draft.tokens[b].tolist(), draft.parents[b].tolist(), strict=True) for b in rows]
        drafts.append([[node for node in row if node[1] >= 0] for row in nodes])
        return draft

    monkeypatch.setattr(Loop, "_propose", seen)
    return drafts


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", ["draft chain", "eagle3 chain", "eagle3 tree", "mtp chain"])
def test_recorded_drafts_are_those_of_eager_passes(name, batch_size, sampling, recorders, monkeypatch):
    """A chain that is recorded is placed as a whole, and its passes take their parts of masks and positions."""
    spec, given = launches.generator(name, automatic=False), launches.prompts(batch_size)
    drafts, made = drafts_of_rounds(monkeypatch), []
    for mode in (True, False):
        spec.compile, drafts[:] = mode, []
        made.append((text(spec.generate, sampling, **given), [paths(draft) for draft in drafts]))
    (ours, recorded), (plain, eager) = made
    assert ours == plain
    assert len(recorded) == len(eager)
    shared = sum(len(one & other) for one, other in zip(recorded, eager, strict=True))
    # Rounding decides which of two nodes that are nearly as likely is in a tree.
    assert shared >= (0.95 if "tree" in name else 1.0) * sum(
        len(one | other) for one, other in zip(recorded, eager, strict=True)
    )
    assert len(recorders[-1]) >= 2


def paths(rows):
    """The nodes of a draft after the root, each with the tokens down to it."""
    found = set()
    for b, row in enumerate(rows):
        to: list[tuple[int, ...]] = [()]
        for token, parent in row:
            to.append((*to[parent], token))
        found |= {(b, path) for path in to[1:]}
    return found


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_drafts_of_models_that_cannot_be_recorded_are_those_of_eager_calls(name, monkeypatch):
    """Recurrent draft models keep their states in Python objects."""
    target, _, _ = launches.models()
    draft = tiny.on_host(name, vocab_size=target.config.vocab_size).to("cuda")
    spec, given = SpeculativeGenerator(target, DraftModelProposer(draft), draft_length=3), launches.prompts(2)
    drafts, made = drafts_of_rounds(monkeypatch), []
    for spec.compile in (False, "auto", "auto"):
        drafts[:] = []
        made.append((text(spec.generate, False, **given), list(drafts)))
    assert made[0][0] == text(target.generate, False, **given)
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", ["eagle3 chain", "eagle3 tree", "block tree", "mtp chain"])
def test_drafts_ahead_of_the_verdict_are_those_behind_it(name, batch_size, sampling, recorders, monkeypatch):
    """A head drafts the same while the host waits for the round as when all is known."""
    behind, drafts = CapturedDraft._inputs, drafts_of_rounds(monkeypatch)
    told: list[int] = []
    monkeypatch.setattr(CapturedDraft, "_inputs", lambda *args: told.append(len(drafts)) or behind(*args))
    spec, given = replaying(name, automatic=False), launches.prompts(batch_size)
    ours = text(spec.generate, sampling, **given)
    ahead, drafts[:] = list(drafts), []
    assert not [round for round in told if round > 1]  # the first round's is behind the prompt
    monkeypatch.setattr(CapturedDraft, "draft_ahead", lambda *args: None)
    monkeypatch.setattr(type(spec.proposer), "draft_ahead", lambda *args: None)
    assert text(spec.generate, sampling, **given) == ours
    assert len(told) > 5
    assert ahead == drafts


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_draft_ahead_that_n_grams_replace_leaves_nothing_behind(batch_size, sampling, recorders, monkeypatch):
    """Every third round is the n-grams': the head's draft for it was launched, and is dropped."""
    spec, given, dropped = replaying("hybrid", automatic=False), launches.prompts(batch_size), []
    forget, drafts, rounds = CapturedDraft.forget, drafts_of_rounds(monkeypatch), itertools.count()

    def watched(self):
        dropped.append(self._ahead is not None and sys._getframe(1).f_code.co_name == "sync")
        forget(self)

    monkeypatch.setattr(CapturedDraft, "forget", watched)
    monkeypatch.setattr(HybridProposer, "_lookup_pays", lambda *args: next(rounds) % 3 == 2)
    made = {}
    for again in (0.0, 2.0):  # always ahead, and never
        monkeypatch.setattr(hybrid, "AGAIN", again)
        rounds, drafts[:], dropped[:] = itertools.count(), [], []
        ours = text(spec.generate, sampling, **given)
        made[again] = ours, list(drafts), sum(dropped)
    assert made[0.0][:2] == made[2.0][:2]
    assert made[0.0][2] > 1
    assert made[2.0][2] == 0
    assert set(spec.report.num_drafts_by) == {"Eagle3Proposer", "NgramProposer"}
    assert made[0.0][0] == text(spec.model.generate, sampling, **given)


@pytest.mark.skipif(not PRETENDED, reason="reads what the pretended device carries")
def test_buffers_stay_where_they_are(recorders, monkeypatch):
    spec, given = replaying("eagle3 tree", automatic=False), launches.prompts(1)
    launched, replayed, homes, drafting = CapturedRound.__call__, CapturedDraft._replayed, [], []

    def watched(self, draft, text):
        made = launched(self, draft, text)
        homes.append(
            [buffer.carried.data_ptr() for runner in (self.target, drafting[-1]) for buffer in buffers(runner)]
        )
        return made

    def seen(self, drafter, *args, **kwargs):
        drafting.append(drafter.rows)
        return replayed(self, drafter, *args, **kwargs)

    monkeypatch.setattr(CapturedRound, "__call__", watched)
    monkeypatch.setattr(CapturedDraft, "_replayed", seen)
    text(spec.generate, False, **given)
    assert len(homes) > WARM + 2
    assert all(home == homes[-1] for home in homes[WARM:])


def buffers(runner):
    return [b for kind in runner.cache._kinds.values() for held in kind.all_buffers for b in held]


def test_a_length_that_is_recorded_as_a_number_is_seen(recorders, monkeypatch):
    """It is right in the round that is recorded, and in no other: the text of the tests above would be wrong."""
    spec, given = replaying("ngram", automatic=False), launches.prompts(1)
    plain, made = text(spec.model.generate, False, **given), CapturedRound._made

    def with_a_number(self, chain, levels, size, rows, **more):
        fixed = torch.cat([torch.zeros_like(rows[:, :1]) + self.target.lengths[0], rows[:, 1:]], 1)
        return made(self, chain, levels, size, fixed, **more)

    monkeypatch.setattr(CapturedRound, "_made", with_a_number)
    assert text(spec.generate, False, **given) != plain
    assert len(recorders[-1]) >= 1


# The recorder itself


def on_device(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).to("cuda")


def runs(recorder, function, times=WARM + 3):
    return [recorder(0, "key", function, {"x": on_device(float(n), 1.0)})["y"].tolist() for n in range(times)]


def test_a_function_is_run_until_it_is_recorded_and_then_no_more():
    recorder, calls = Recorder(), []

    def doubled(x):
        calls.append(1)
        return {"y": (x * 2).cumsum(0)}

    assert runs(recorder, doubled) == [[2.0 * n, 2.0 * n + 2] for n in range(WARM + 3)]
    assert len(calls) == WARM + 2  # once more to record it
    assert len(recorder) == 1


def test_what_a_call_found_right_the_next_records_at_once():
    known, calls = KnownFunctions(), []

    def doubled(x):
        calls.append(1)
        return {"y": x * 2}

    for _ in range(2):
        calls.clear()
        assert runs(Recorder(known), doubled) == [[2.0 * n, 2.0] for n in range(WARM + 3)]
    assert len(calls) == 1  # to record it


def test_buffers_are_written_in_replays():
    recorder, buffer = Recorder(), on_device(0.0, 0.0, 0.0)

    def stored(x):
        buffer.narrow(0, 1, 2).copy_(x)
        return {"y": buffer + 1}

    assert runs(recorder, stored)[-1] == [1.0, WARM + 3.0, 2.0]
    assert buffer.tolist() == [0.0, WARM + 2.0, 1.0]


@pytest.mark.parametrize("rows", [1, 3])
def test_an_input_with_fewer_columns_is_copied_into_the_first_ones(rows):
    recorder = Recorder()

    def totals(x, count):
        return {"y": x.masked_fill(torch.arange(4, device=x.device) >= count, 0).sum(1)}

    for n in (3, 1, 4, 2, 3):
        given = torch.full((rows, n), float(n)).to("cuda"), torch.tensor([n]).to("cuda")
        made = recorder(0, "key", totals, dict(zip(("x", "count"), given, strict=True)), {"x": 4})
        assert made["y"].tolist() == [float(n * n)] * rows
    assert len(recorder) == 1


@pytest.mark.parametrize("fault", ["waits", "uploads", "remembers"])
def test_what_cannot_be_recorded_runs_on_with_one_warning(fault):
    recorder, seen = Recorder(), []

    def odd(x):
        seen.append(1)
        if fault == "waits":
            return {"y": x + float(x.sum())}
        if fault == "uploads":
            return {"y": x + torch.tensor([1.0, 2.0]).to("cuda")}
        return {"y": x + len(seen)}

    with tiny.specdec_warnings() as warned:
        given = runs(recorder, odd)
    assert len(warned) == 1
    said = str(warned[0])
    assert ("a replay gave different values of y" if fault == "remembers" else "not permitted") in said
    assert recorder.refused
    assert len(recorder) == 0
    if fault == "waits":
        assert given == [[2.0 * n + 1, n + 2.0] for n in range(WARM + 3)]


@pytest.mark.parametrize("missing", ["graph_pool_handle", "CUDAGraph", "Stream"])
def test_a_torch_with_another_interface_for_graphs_runs_without(missing, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(graph_capture, "_users", defaultdict(Counter))  # no streams of an earlier recorder
    monkeypatch.delattr(torch.cuda, missing)
    with tiny.specdec_warnings() as warned:
        assert runs(recorder, lambda x: {"y": x * 2}) == [[2.0 * n, 2.0] for n in range(WARM + 3)]
    assert len(warned) == 1
    assert f"has no attribute '{missing}'" in warned[0]


def test_captures_share_a_stream_only_while_there_is_no_other(monkeypatch):
    streams = [torch.cuda.Stream() for _ in range(graph_capture.POOLED)]
    turns = itertools.cycle(streams)
    monkeypatch.setattr(graph_capture, "_users", defaultdict(Counter))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(turns))
    device = streams[0].device
    taken = [graph_capture.take_stream(device) for _ in range(graph_capture.POOLED + 1)]
    assert set(taken) == set(streams)
    for stream in taken:
        graph_capture.give_back(stream)
    assert len({graph_capture.take_stream(device) for _ in streams}) == graph_capture.POOLED


def test_drafts_of_a_model_on_another_device_are_not_captured():
    text = SimpleNamespace(tokens=on_device(1.0))
    for model, elsewhere in ((torch.nn.Linear(2, 2, device="meta"), True), (tiny.model("llama"), False), (None, False)):
        assert (
            CapturedDraft()._is_elsewhere(SimpleNamespace(drafting_model=partial(lambda model: model, model)), text)
            is elsewhere
        )


def test_inputs_are_copied_one_by_one_where_torch_cannot_copy_a_list(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_copy_")
    assert runs(Recorder(), lambda x: {"y": x * 2}) == [[2.0 * n, 2.0] for n in range(WARM + 3)]


def test_no_more_than_so_many_are_recorded():
    recorder = Recorder()
    for key in range(MOST + 2):
        for _ in range(WARM + 1):
            recorder(0, key, lambda x: {"y": x + 1}, {"x": on_device(1.0)})
    assert len(recorder) == MOST
