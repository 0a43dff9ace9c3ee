"""A call's state lives in the call: threads, calls within calls, shared proposers, nothing kept afterwards."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from specdec import (
    DraftModelProposer,
    DynamicTree,
    Eagle3Proposer,
    HybridProposer,
    NgramProposer,
    SpeculativeGenerator,
    SuffixProposer,
    TextMemory,
)
from specdec.models.cache.kv_cache import SpeculativeCache
from tests.support import eagle3, tiny

PROPOSERS = {
    "ngram": lambda: NgramProposer(),
    "suffix": lambda: SuffixProposer(TextMemory(capacity=0)),
    "draft": lambda: DraftModelProposer(tiny.model("llama", seed=1)),
    "draft tree": lambda: DraftModelProposer(tiny.model("llama", seed=1), tree=DynamicTree(depth=3, top_k=2)),
    "head": lambda: Eagle3Proposer(eagle3.head(tap_ids=(0, 1, 2))),
    "ngram+head": lambda: HybridProposer(Eagle3Proposer(eagle3.head(tap_ids=(0, 1, 2)))),
}


def prompts(count: int) -> list[dict[str, torch.Tensor]]:
    return [tiny.prompts(5 + i % 4, seed=i) for i in range(count)]


def plain(model, inputs, **kwargs):
    return model.generate(**inputs, do_sample=False, max_new_tokens=12, **kwargs)


@pytest.mark.parametrize("name", PROPOSERS)
def test_four_threads_on_one_generator(name):
    model, asked = tiny.model("llama"), prompts(16)
    spec = SpeculativeGenerator(model, PROPOSERS[name](), draft_length=3, on_unsupported="error")
    wanted = [plain(model, inputs) for inputs in asked]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda inputs: spec.generate(**inputs, do_sample=False, max_new_tokens=12), asked))
    for text, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(text, right)
    assert spec.report.num_calls == 16


def test_two_generators_with_heads_beside_plain_decoding_of_another_thread():
    """A head sees the states of its own call's passes alone."""
    model, asked = tiny.model("llama"), prompts(12)
    specs = [
        SpeculativeGenerator(model, Eagle3Proposer(eagle3.head(tap_ids=taps)), draft_length=3, on_unsupported="error")
        for taps in ((0, 1, 2), (0, 2))
    ]
    wanted = [plain(model, inputs) for inputs in asked]

    def answer(job):
        which, inputs = job
        generate = model.generate if which == 2 else specs[which].generate
        return generate(**inputs, do_sample=False, max_new_tokens=12)

    jobs = [(which, inputs) for inputs in asked for which in range(3)]
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(answer, jobs))
    for text, right in zip(got, [text for text in wanted for _ in range(3)], strict=True):
        torch.testing.assert_close(text, right)


@pytest.mark.slow
def test_drafts_do_not_depend_on_other_threads():
    """As many tokens accepted as alone: a state taken from another pass would cost drafts, not texts."""
    head, model, prompts = eagle3.trained(**eagle3.BRIEFLY)
    asked = prompts[:8]

    def accepted(workers: int) -> int:
        spec = SpeculativeGenerator(model, Eagle3Proposer(head), draft_length=3, on_unsupported="error")
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda row: spec.generate(row[None], do_sample=False, max_new_tokens=24), asked))
        return spec.report.num_accepted_tokens

    assert accepted(4) == accepted(1) > 50


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_call_within_a_call(name):
    """A streamer that generates with the very generator that feeds it."""
    model = tiny.model("llama")
    outer, inner = tiny.prompts(7, seed=3), tiny.prompts(5, seed=4)
    spec = SpeculativeGenerator(model, PROPOSERS[name](), draft_length=3, on_unsupported="error")
    inside = []

    class Nested:
        def put(self, tokens):
            if len(inside) < 3:
                inside.append(None)
                inside[-1] = spec.generate(**inner, do_sample=False, max_new_tokens=9)

        def end(self):
            pass

    got = spec.generate(**outer, do_sample=False, max_new_tokens=16, streamer=Nested())
    torch.testing.assert_close(got, model.generate(**outer, do_sample=False, max_new_tokens=16))
    for text in inside:
        torch.testing.assert_close(text, model.generate(**inner, do_sample=False, max_new_tokens=9))


def test_one_proposer_in_two_generators():
    """Each call's head reads the embedding of its own target."""
    head = eagle3.head(tap_ids=(0, 1, 2))
    one, other = tiny.model("llama"), tiny.model("llama", seed=5)
    proposer, inputs = Eagle3Proposer(head), tiny.prompts(8)

    def accepted(model, proposer):
        spec = SpeculativeGenerator(model, proposer, draft_length=3, on_unsupported="error")
        return spec, lambda: [spec.generate(**inputs, do_sample=False, max_new_tokens=30), spec.last_report][1]

    alone = accepted(one, Eagle3Proposer(head))[1]()
    _, first = accepted(one, proposer)
    _, second = accepted(other, proposer)
    second()
    report = first()
    assert report.num_draft_tokens == alone.num_draft_tokens
    assert report.num_accepted_tokens_per_pos == alone.num_accepted_tokens_per_pos


def tensors_alive():
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, (torch.Tensor, SpeculativeCache))]


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_nothing_of_a_call_stays(name, fails, sample):
    """Not even of a generator's first call; what the model itself makes once, another generator has it make."""
    model = tiny.model("llama")
    specs = [SpeculativeGenerator(model, PROPOSERS[name](), draft_length=3, on_unsupported="error") for _ in range(2)]

    class Failing:
        columns = 0

        def put(self, tokens):
            self.columns += 1
            if fails and self.columns > 6:
                raise RuntimeError("enough")

        def end(self):
            pass

    def call(spec):
        with pytest.raises(RuntimeError, match="enough") if fails else nullcontext():
            spec.generate(**tiny.prompts(9), do_sample=sample, max_new_tokens=12, streamer=Failing())

    call(specs[0])
    before = tensors_alive()  # held, so that no other object gets their ids
    known = {id(thing) for thing in before}
    call(specs[1])
    kept = [thing for thing in tensors_alive() if id(thing) not in known]
    assert not any(isinstance(thing, SpeculativeCache) for thing in kept)
    assert sum(thing.numel() for thing in kept if isinstance(thing, torch.Tensor)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("name", ["draft tree", "ngram+head"])
def test_a_thousand_calls_of_changing_shapes_leave_nothing(name):
    model, sizes = tiny.model("llama"), Path("/proc/self/statm")
    spec = SpeculativeGenerator(model, PROPOSERS[name](), on_unsupported="error")

    def calls(numbers):
        for i in numbers:
            lengths = [1 + (7 * i + 5 * b) % 40 for b in range(1 + i % 3)]
            spec.generate(**tiny.prompts(*lengths, seed=i), do_sample=i % 2 == 0, max_new_tokens=2 + i % 9)

    def held():
        numbers = sum(thing.numel() for thing in tensors_alive() if isinstance(thing, torch.Tensor))
        resident = int(sizes.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if sizes.exists() else 0
        return numbers, len(gc.get_objects()), resident

    calls(range(200))
    before = held()
    calls(range(200, 1200))
    after = held()
    assert spec.report.num_calls == 1200
    assert after[0] == before[0]
    assert after[1] - before[1] < 500  # one object a call would be a thousand
    assert after[2] - before[2] < 16 * 2**20


def test_hooks_go_with_the_generator():
    model = tiny.model("llama", seed=9)
    layers = model.get_decoder().layers

    def hooks():
        return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers)

    before = hooks()
    spec = SpeculativeGenerator(model, Eagle3Proposer(eagle3.head(tap_ids=(0, 1, 2))))
    assert hooks() == before + 3
    del spec
    gc.collect()
    assert hooks() == before
