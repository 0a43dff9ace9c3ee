"""Captured passes: one full graph per size, plain decoding's text; what cannot be captured runs on."""

import copy
import gc
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import DraftModelProposer, NgramProposer, SpeculativeGenerator
from specdec.engine.draft_session import CallKind
from specdec.models import runner as runner_module
from specdec.models import static_forward as module
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import StaticForward, filled_up, nodes_of_size
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.proposers.pacing.cost_store import CostStore
from specdec.proposers.pacing.pass_cost import BUCKETS, SIZES, PassCost
from specdec.sampling.draft_tree import DraftTree
from tests.law import test_distribution as law_of
from tests.parity import test_fuzz as fuzzing
from tests.parity import test_parity as parity
from tests.support import eagle3, families, fuzz, static, tiny

FAMILIES = ["llama", "qwen3", "gemma3", "mistral", "gpt2", "gpt_neox", "phi"]
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_code(monkeypatch):
    """Graphs are taken and run as they are; no code is generated. What would be captured twice is an error."""
    monkeypatch.setattr(module, "BACKEND", "eager")
    gc.collect()  # other tests' generators hook what they tap
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture
def static_shapes(monkeypatch):
    static.switch_on(monkeypatch)


class Varying(tiny.Garbage):
    """Drafts of 1 to 5 nodes."""

    def propose(self, context):
        self.size = 1 + self._number(4)
        return super().propose(context)


def text(generate, prompts, **kwargs):
    torch.manual_seed(0)
    return generate(**prompts, **{"do_sample": False, "max_new_tokens": 40} | kwargs).tolist()


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=slow) for name in FAMILIES[1:])])
def test_as_many_graphs_as_sizes_and_the_text_is_plain_decodings(name, caplog):
    """Ragged rows, chains and trees of 2 to 6 nodes: sizes 2, 4 and 8."""
    target, prompts = tiny.model(name), tiny.prompts(9, 1, 5)
    plain = text(target.generate, prompts)
    spec = SpeculativeGenerator(target, Varying(answer=torch.tensor(plain)), draft_length=5, compile=True)
    with tiny.specdec_warnings() as warned:
        for _ in range(3):
            assert text(spec.generate, prompts) == plain
    assert not warned
    captured = spec._sessions.own.static_forward
    assert not captured.refused
    assert len(captured) == len(captured._captured) == 3
    assert [record.message for record in caplog.records if "compiling" in record.message] == [
        f"compiling passes of {type(target).__name__}: torch keeps their code for later processes"
    ]


@slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles by g++")
def test_generated_code_writes_plain_decodings_text(monkeypatch):
    monkeypatch.setattr(module, "BACKEND", "inductor")
    target, prompts = tiny.model("gemma3"), tiny.prompts(9, 1, 5)
    spec = SpeculativeGenerator(target, DraftModelProposer(tiny.model("gemma3", seed=1)), draft_length=3, compile=True)
    with tiny.specdec_warnings() as warned:
        for sampling in (False, True, False):
            plain = text(target.generate, prompts, do_sample=sampling)
            assert text(spec.generate, prompts, do_sample=sampling) == plain
    assert not warned
    assert len(spec._sessions.own.static_forward) >= 1


@pytest.mark.parametrize(
    ("name", "lengths", "sampling"),
    [
        pytest.param("ngram", (9, 1, 5), False, marks=slow),
        pytest.param("draft", (9,), False, marks=slow),
        ("draft", (9, 1, 5), True),
        pytest.param("head", (9,), True, marks=slow),
        pytest.param("head", (9, 1, 5), False, marks=slow),
    ],
)
def test_proposers_beside_captured_passes(name, lengths, sampling):
    target = tiny.model("llama")
    proposer = {
        "ngram": NgramProposer,
        "draft": lambda: DraftModelProposer(tiny.model("llama", seed=1)),
        "head": lambda: Eagle3Proposer(eagle3.head()),
    }[name]()
    prompts = tiny.prompts(*lengths)
    spec = SpeculativeGenerator(target, proposer, draft_length=4, compile=True)
    plain = text(target.generate, prompts, do_sample=sampling)
    for _ in range(2):
        assert text(spec.generate, prompts, do_sample=sampling) == plain
    assert len(spec._sessions.own.static_forward) >= 1
    if name == "draft":
        assert len(proposer._static_forward) >= 1


def passes_over_drafts(target, static_forward):
    """Logits of a tree of 5, thrice, with commits that move nodes between them."""
    draft = DraftTree(torch.arange(10).view(2, 5), torch.tensor([-1, 0, 0, 1, 2]).expand(2, 5))
    runner = ModelRunner(target, static_forward=static_forward)
    runner.start(2)
    runner.extend(given=tiny.prompts(9, 4)["input_ids"], pads=[0, 5])
    for _ in range(3):
        yield runner.grow(draft.tokens, draft.depth, draft.ancestors).logits
        runner.commit([3, 1], torch.tensor([[0, 2, 4], [0, 1, 2]]))


@pytest.mark.usefixtures("static_shapes")
@pytest.mark.parametrize(
    "name", [name if name in ("llama", "gemma3", "gpt2") else pytest.param(name, marks=slow) for name in FAMILIES]
)
def test_padded_nodes_change_nothing(name, monkeypatch):
    """A pass over 8 gives what one over 5 does, to the last digits of float64; whatever is in the other 3, to the
    very last."""
    target = copy.deepcopy(tiny.model(name)).double()
    static_forward = StaticForward(target)
    plain, padded = list(passes_over_drafts(target, None)), list(passes_over_drafts(target, static_forward))
    assert len(static_forward) == 1  # the third pass is the captured one

    def otherwise(tokens, depth, ancestors):
        n = tokens.shape[1]
        tokens, depth, ancestors = filled_up(tokens, depth, ancestors)
        tokens[:, n:], depth[:, n - tokens.shape[1] :] = 7, 3
        return tokens, depth, ancestors

    monkeypatch.setattr(runner_module, "filled_up", otherwise)
    again = list(passes_over_drafts(target, StaticForward(target)))
    for right, ours, same in zip(plain, padded, again, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-9)
        assert torch.equal(ours, same)


def test_filled_up_nodes_see_and_are_seen_by_nobody():
    tokens, depth, ancestors = filled_up(torch.ones(1, 3).long(), torch.tensor([[0, 0, 1, 2]]), torch.ones(1, 3, 4) > 0)
    assert tokens.tolist() == [[1, 1, 1, 0]]
    assert depth.tolist() == [[0, 0, 1, 2, 2]]  # where the row has a position: its own may be the last one
    assert ancestors[0].int().tolist() == [[1, 1, 1, 1, 0]] * 3 + [[0, 0, 0, 0, 1]]
    assert [nodes_of_size(n) for n in (1, 2, 3, 5, 8, 9, 60)] == [1, 2, 4, 8, 8, 16, 64]


@pytest.mark.usefixtures("static_shapes")
@pytest.mark.slow
def test_texts_that_outgrow_their_size():
    target, prompts = tiny.model("llama"), tiny.prompts(460, 4)
    spec = SpeculativeGenerator(target, NgramProposer(), draft_length=4, compile=True)
    kwargs = {"max_new_tokens": 90}
    assert text(spec.generate, prompts, **kwargs) == text(target.generate, prompts, **kwargs)
    slots = {key[0][2] for key in spec._sessions.own.static_forward._captured}
    assert slots == {512, 1024}


@pytest.mark.parametrize("failure", ["raises", "is wrong"])
def test_what_cannot_be_captured_runs_on_with_one_warning(failure, monkeypatch):
    run = module._pass

    def failing(*args):
        if failure == "raises":
            raise RuntimeError("no graph of this")
        logits, features = run(*args)
        return logits.roll(1, -1), features

    monkeypatch.setattr(module, "_pass", failing)
    monkeypatch.setattr(module, "with_compiled_layers", lambda model, backend: model)
    target, prompts = tiny.model("llama"), tiny.prompts(9, 4)
    spec = SpeculativeGenerator(target, NgramProposer(), draft_length=4, compile=True)
    plain = text(target.generate, prompts)
    with tiny.specdec_warnings() as warned:
        for _ in range(2):
            assert text(spec.generate, prompts) == plain
    assert len(warned) == 1
    assert {"raises": "no graph of this", "is wrong": "standard deviations"}[failure] in warned[0]
    assert len(spec._sessions.own.static_forward) == 0


def why_not(target, prompts, calls=1):
    """The one warning, while a model that is not to be captured writes plain decoding's text."""
    spec = SpeculativeGenerator(target, NgramProposer(), draft_length=4, compile=True)
    with tiny.specdec_warnings() as warned:
        for _ in range(calls):
            assert text(spec.generate, prompts) == text(target.generate, prompts)
    assert len(warned) == 1
    return warned[0]


def test_recurrent_models_are_not_captured():
    assert "recurrent" in why_not(tiny.model("lfm2"), tiny.prompts(9, 4))


def test_auto_is_for_gpus_and_nonsense_is_refused():
    spec = SpeculativeGenerator(tiny.model("llama"), NgramProposer(), compile="auto")
    text(spec.generate, tiny.prompts(9))
    assert (spec._sessions.own.static_forward is None) == (tiny.DEVICE == "cpu")
    with pytest.raises(ValueError, match="compile must be one of True, False, 'auto'"):
        SpeculativeGenerator(tiny.model("llama"), NgramProposer(), compile="yes")


def test_models_that_are_moved_or_make_their_own_masks_are_not_captured(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    moved = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places | {"lm_head": "cpu"}, offload_folder=tmp_path / "parts"
    ).eval()
    for target, reason in (
        (moved, "accelerate's hooks"),
        (families.tiny_model("bloom"), "builds its own attention masks"),
        (families.tiny_model("gpt_neo"), "mask of fixed length"),
    ):
        assert reason in why_not(target, tiny.prompts(9), calls=2)


def test_what_slotted_caches_lack_is_no_captured_pass():
    """An indexer keeps more than keys and values: such a model runs on as ever."""
    assert "runs without graphs" in why_not(families.tiny_model("deepseek_v32"), tiny.prompts(9, 4))


def test_further_sizes_than_the_most_run_without_a_graph(monkeypatch):
    monkeypatch.setattr(module, "MOST", 1)
    target, prompts = tiny.model("llama"), tiny.prompts(9, 1, 5)
    plain = text(target.generate, prompts)
    spec = SpeculativeGenerator(target, Varying(answer=torch.tensor(plain)), draft_length=5, compile=True)
    with tiny.specdec_warnings() as warned:
        assert text(spec.generate, prompts) == plain
    assert not warned
    assert len(spec._sessions.own.static_forward) == 1 < len(spec._sessions.own.static_forward._captured)


# What passes cost


def test_costs_are_a_figure_per_size():
    """A pass over 5 is one over 8; without graphs it has a bucket of its own."""
    cost, other = PassCost(buckets=SIZES), PassCost()
    for _ in range(5):
        for size, seconds in ((1, 1.0), (2, 1.1), (5, 2.0), (8, 2.0)):
            cost.observe(size, seconds)
            other.observe(size, seconds)
    assert cost.seen().keys() == {1, 2, 8} < other.seen().keys()
    assert all(SIZES[size.bit_length() - 1] == nodes_of_size(size) for size in SIZES)
    assert cost(8) - cost(5) == pytest.approx(3 * PassCost.TILT)


def test_costs_of_graphs_are_kept_apart(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECDEC_KEEP_COSTS")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    target, prompts = tiny.model("llama"), tiny.prompts(9)
    for compile in (True, False):
        spec = SpeculativeGenerator(target, tiny.Garbage(size=5), compile=compile)
        text(spec.generate, prompts)
        verify = spec._sessions.own.estimates[CallKind(1, sampling=False)].verify
        assert verify.seen().keys() <= set(SIZES if compile else BUCKETS)
        assert (verify._buckets == SIZES) == compile
    captured, eager = (CostStore(target, 1, captured=captured).path for captured in (True, False))
    assert captured != eager


# Static shapes in tests that know nothing of them; all of these run so under `pytest --static`


@pytest.mark.usefixtures("static_shapes")
@pytest.mark.parametrize(
    ("name", "proposer"),
    [
        ("gemma3", "dynamic tree"),
        ("llama", "block"),
        *(
            pytest.param(name, proposer, marks=slow)
            for name in ("llama", "gemma3", "mixtral", "gpt2")
            for proposer in ("ngram tree", "hybrid", "target tree")
        ),
    ],
)
def test_parity(name, proposer):
    target = tiny.model(name)
    target.name = name
    spec = SpeculativeGenerator(target, parity.PROPOSERS[proposer](target))
    prompts = tiny.prompts(20, 3, 14)
    for _ in range(2):
        assert text(spec.generate, prompts) == text(target.generate, prompts)
    assert len(spec._sessions.own.static_forward) >= 1


@pytest.mark.usefixtures("static_shapes")
def test_fuzz():
    assert not any(fuzz.run(seed)[0] for seed in range(2))


@slow
@pytest.mark.usefixtures("static_shapes")
@pytest.mark.parametrize("first", range(0, 60, fuzzing.BLOCK))
def test_more_fuzz(first):
    fuzzing.check(first)


@slow
@pytest.mark.usefixtures("static_shapes")
def test_distribution():
    assert law_of.measured(law_of.PROPOSERS["tree, drawn"](), 4, law_of.SAMPLING["plain"], "block", 3) < law_of.EXACT
