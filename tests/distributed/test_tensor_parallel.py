"""Two processes with a part of each layer each: one text, plain decoding's, whatever their clocks and seeds say."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.distributed import DistributedConfig

from specdec import DraftModelProposer, Eagle3Proposer, HybridProposer, NgramProposer, SpeculativeGenerator
from specdec.engine import report as reports
from specdec.engine.tensor_parallel import Group
from specdec.models import linear
from tests.support import eagle3, tiny
from tests.support.ranks import together

FAMILIES = ("llama", "gemma3", "qwen3_moe")
TOKENS = 24
CALLS = {
    "T=0": {"do_sample": False},
    "T=1": {"do_sample": True},
    "T=0.8, top-k": {"do_sample": True, "temperature": 0.8, "top_k": 20},
}
pytestmark = pytest.mark.slow


class Clock:
    """Ticks at each look; a `false` one by anything from a tenth of a millisecond to ten."""

    def __init__(self, false):
        self.now, self.ticks = 0.0, random.Random(0) if false else None

    def __call__(self):
        self.now += self.ticks.choice([1e-4, 1e-3, 1e-2]) if self.ticks else 1e-3
        return self.now


class InSecondProcess(StoppingCriteria):
    """Would stop at once there, and after ten tokens in the first: as a clock could say."""

    def __init__(self, rank, start):
        self.most = start + 10 if rank == 0 else start

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.most)


def proposers():
    draft = tiny.model("llama")  # of one of the targets the equal, of the others not even alike
    return {
        "ngram": NgramProposer(),
        "draft": DraftModelProposer(draft),
        "tree": DraftModelProposer(draft, branching=(2, 2)),
        "eagle3": Eagle3Proposer(eagle3.head(tap_ids=(0, 1, 2))),
        "hybrid": HybridProposer(DraftModelProposer(draft)),
    }


def worker(rank: int, folder: Path):
    """Per case: the text here, plain decoding's here, tokens drafted, the clock's or seed's part in it."""
    linear.perf_counter = reports.perf_counter = Clock(false=rank == 1)
    found = {}
    for family in FAMILIES:
        target = AutoModelForCausalLM.from_pretrained(
            folder / family, distributed_config=DistributedConfig(tp_size=2)
        ).eval()
        assert target.tp_size == 2
        inputs = tiny.prompts(9, 4)
        for name, proposer in proposers().items():
            spec = SpeculativeGenerator(target, proposer, on_unsupported="error")
            for call, arguments in CALLS.items():
                torch.manual_seed(3)
                plain = target.generate(**inputs, **arguments, max_new_tokens=TOKENS)
                torch.manual_seed(3 + rank)  # the first process's is everybody's
                text = spec.generate(**inputs, **arguments, max_new_tokens=TOKENS)
                found[family, name, call] = text.tolist(), plain.tolist(), spec.last_report.num_draft_tokens
    drawn = SpeculativeGenerator(target, proposers()["draft"], draft_length=3, rule="block")
    torch.manual_seed(rank)
    text = drawn.generate(**inputs, do_sample=True, max_new_tokens=TOKENS)
    found["drawn"] = text.tolist(), torch.rand(1).item(), drawn.last_report.num_draft_tokens
    until = [InSecondProcess(rank, inputs["input_ids"].shape[1])]
    found["stopped"] = spec.generate(**inputs, do_sample=False, max_new_tokens=TOKENS, stopping_criteria=until).tolist()
    for name, criterion in {"a bool": AfterTen(inputs["input_ids"].shape[1]), "an error": Broken()}.items():
        try:
            arguments = {"do_sample": False, "max_new_tokens": TOKENS, "stopping_criteria": [criterion]}
            found[name] = spec.generate(**inputs, **arguments).tolist()
        except (ZeroDivisionError, RuntimeError) as error:
            found[name] = str(error)
    if rank == 0:  # one process that probed the model again would wait for passes of the other
        hook = target.get_decoder().layers[0].register_forward_hook(lambda *given: None)
    found["hooked"] = spec.generate(**inputs, do_sample=False, max_new_tokens=TOKENS).tolist()
    if rank == 0:
        hook.remove()
    broken = SpeculativeGenerator(target, Broken())
    with pytest.raises((ZeroDivisionError, RuntimeError)) as raised:
        broken.generate(**inputs, max_new_tokens=TOKENS)
    found["broken"] = str(raised.value)
    return found


def worker_without_a_leader(rank: int, folder: Path):
    """Each process drafts as its own clock says."""
    Group.drafting = lambda self, proposer: proposer
    linear.perf_counter = reports.perf_counter = Clock(false=rank == 1)
    target = AutoModelForCausalLM.from_pretrained(folder / "llama", distributed_config=DistributedConfig(tp_size=2))
    spec = SpeculativeGenerator(target.eval(), "ngram", on_unsupported="error")
    inputs = tiny.prompts(9, 4)
    text = spec.generate(**inputs, do_sample=False, max_new_tokens=4 * TOKENS)
    return text.tolist(), target.generate(**inputs, do_sample=False, max_new_tokens=4 * TOKENS).tolist()


class Broken(NgramProposer):
    """Fails as a proposer, and as a stopping criterion."""

    def propose(self, context):
        raise ZeroDivisionError("nothing to divide by")

    def __call__(self, input_ids, scores, **kwargs):
        raise ZeroDivisionError("nothing to divide by")


class AfterTen(StoppingCriteria):
    """Returns a bool, as transformers' `ConfidenceCriteria` does."""

    def __init__(self, start):
        self.most = start + 10

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.most


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        tiny.model(family).save_pretrained(folder / family)
    return together("tests.distributed.test_tensor_parallel:worker", folder)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["ngram", "draft", "tree", "eagle3", "hybrid"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_text_in_all_processes(found, family, name, call):
    (first, plain, _), (second, other_plain, _) = (process[family, name, call] for process in found)
    assert plain == other_plain
    assert first == second == plain


@pytest.mark.parametrize("name", ["ngram", "draft", "tree", "eagle3", "hybrid"])
def test_drafts_were_made(found, name):
    """By the first process's clock; what never pays, a random head say, is tried here and there."""
    drafted = [process[family, name, call][2] for process in found for family in FAMILIES for call in CALLS]
    assert sum(drafted) > 0


def test_without_a_leader_they_part(tmp_path):
    """The planted fault: passes of different widths add up to nothing, or never end."""
    tiny.model("llama").save_pretrained(tmp_path / "llama")
    try:
        found = together("tests.distributed.test_tensor_parallel:worker_without_a_leader", tmp_path, patience=45)
    except RuntimeError:  # a process failed, or they waited for each other
        return
    assert any(text != plain for text, plain in found)


def test_drawn_drafts_and_the_verdict_on_them_are_the_first_processs(found):
    (first, after, drafted), (second, other_after, _) = (process["drawn"] for process in found)
    assert first == second
    assert after == other_after
    assert drafted > 0


def test_a_hook_in_one_process(found):
    first, second = (process["hooked"] for process in found)
    assert first == second == found[0]["qwen3_moe", "ngram", "T=0"][0]


def test_a_criterion_is_asked_in_the_first_process(found):
    first, second = (process["stopped"] for process in found)
    assert first == second
    assert len(first[0]) == 9 + 10


def test_criteria_that_return_a_bool_or_raise(found):
    """Neither leaves the other process waiting."""
    first, second = (process["a bool"] for process in found)
    assert first == second
    assert len(first[0]) == 9 + 10
    first, second = (process["an error"] for process in found)
    assert first == "nothing to divide by"
    assert second.startswith("a stopping criterion failed in rank 0: ZeroDivisionError")


def test_what_fails_in_the_first_process_ends_the_others(found):
    first, second = (process["broken"] for process in found)
    assert first == "nothing to divide by"
    assert "ZeroDivisionError: nothing to divide by" in second
