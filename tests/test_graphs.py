"""Captured passes: one full graph per size, plain decoding's text; what cannot be captured runs on."""

import pytest
import torch

from specdec import DraftModelProposer, NgramProposer, SpeculativeGenerator
from specdec import graphs as module
from specdec.graphs import Graphs, filled_up, nodes_of_size
from specdec.proposers import Eagle3Proposer
from specdec.runner import ModelRunner
from specdec.tree import DraftTree
from tests import eagle3, tiny

FAMILIES = ["llama", "qwen3", "gemma3", "mistral", "gpt2", "gpt_neox", "phi"]


@pytest.fixture(autouse=True)
def without_code(monkeypatch):
    """Graphs are taken and run as they are; no code is generated. What would be captured twice is an error."""
    monkeypatch.setattr(module, "BACKEND", "eager")
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


class Varying(tiny.Garbage):
    """Drafts of 1 to 5 nodes."""

    def propose(self, context):
        self.size = 1 + self._number(4)
        return super().propose(context)


def text(generate, prompts, **kwargs):
    torch.manual_seed(0)
    return generate(**prompts, **{"do_sample": False, "max_new_tokens": 40} | kwargs).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_as_many_graphs_as_sizes_and_the_text_is_plain_decodings(name):
    """Ragged rows, chains and trees of 2 to 6 nodes: sizes 2, 4 and 8."""
    target, prompts = tiny.model(name), tiny.prompts(9, 1, 5)
    plain = text(target.generate, prompts)
    spec = SpeculativeGenerator(target, Varying(answer=torch.tensor(plain)), draft_length=5, compile=True)
    with tiny.specdec_warnings() as warned:
        for _ in range(3):
            assert text(spec.generate, prompts) == plain
    assert not warned
    captured = spec._drafting.graphs
    assert not captured.refused
    assert len(captured) == len(captured._graphs) == 3


@pytest.mark.parametrize("sampling", [False, True], ids=["T = 0", "T = 1"])
@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", ["ngram", "draft", "head"])
def test_proposers_beside_captured_passes(name, lengths, sampling):
    if name == "head":
        head, target, _ = eagle3.trained(updates=150)
    else:
        target = tiny.model("llama")
    proposer = {
        "ngram": NgramProposer,
        "draft": lambda: DraftModelProposer(tiny.model("llama", seed=1)),
        "head": lambda: Eagle3Proposer(head),
    }[name]()
    prompts = tiny.prompts(*lengths)
    spec = SpeculativeGenerator(target, proposer, draft_length=4, compile=True)
    plain = text(target.generate, prompts, do_sample=sampling)
    for _ in range(2):
        assert text(spec.generate, prompts, do_sample=sampling) == plain
    assert len(spec._drafting.graphs) >= 1
    if name == "draft":
        assert len(proposer._graphs) >= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_padded_nodes_change_nothing(name):
    """A tree of 5 in a pass over 8, before and after a commit that moves nodes."""
    target = tiny.model(name)
    draft = DraftTree(torch.arange(10).view(2, 5), torch.tensor([-1, 0, 0, 1, 2]).expand(2, 5))
    taken = []
    for graphs in (None, Graphs(target)):
        runner = ModelRunner(target, graphs=graphs)
        runner.start(2)
        runner.extend(given=tiny.prompts(9, 4)["input_ids"], pads=[0, 5])
        for _ in range(3):
            taken.append(runner.grow(draft.tokens, draft.depth, draft.ancestors).logits)
            runner.commit([3, 1], torch.tensor([[0, 2, 4], [0, 1, 2]]))
    for plain, padded in zip(taken[:3], taken[3:], strict=True):
        assert plain.shape == padded.shape
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-4)


def test_filled_up_nodes_see_and_are_seen_by_nobody():
    tokens, depth, ancestors = filled_up(torch.ones(1, 3).long(), torch.tensor([[0, 0, 1, 2]]), torch.ones(1, 3, 4) > 0)
    assert tokens.tolist() == [[1, 1, 1, 0]]
    assert depth.tolist() == [[0, 0, 1, 2, 0]]
    assert ancestors[0].int().tolist() == [[1, 1, 1, 1, 0]] * 3 + [[0, 0, 0, 0, 1]]
    assert [nodes_of_size(n) for n in (1, 2, 3, 5, 8, 9, 60)] == [1, 2, 4, 8, 8, 16, 64]


def test_texts_that_outgrow_their_size():
    target, prompts = tiny.model("llama"), tiny.prompts(9, 4)
    spec = SpeculativeGenerator(target, NgramProposer(), draft_length=4, compile=True)
    kwargs = {"max_new_tokens": 540}
    assert text(spec.generate, prompts, **kwargs) == text(target.generate, prompts, **kwargs)
    slots = {key[0][2] for key in spec._drafting.graphs._graphs}
    assert slots == {512, 1024}


@pytest.mark.parametrize("failure", ["raises", "is wrong"])
def test_what_cannot_be_captured_runs_on_with_one_warning(failure, monkeypatch):
    def compiled(device):
        def graph(*args):
            if failure == "raises":
                raise RuntimeError("no graph of this")
            logits, features = module._pass(*args)
            return logits.roll(1, -1), features

        return graph

    monkeypatch.setattr(module, "_compiled", compiled)
    target, prompts = tiny.model("llama"), tiny.prompts(9, 4)
    spec = SpeculativeGenerator(target, NgramProposer(), draft_length=4, compile=True)
    plain = text(target.generate, prompts)
    with tiny.specdec_warnings() as warned:
        for _ in range(2):
            assert text(spec.generate, prompts) == plain
    assert len(warned) == 1
    assert {"raises": "no graph of this", "is wrong": "standard deviations"}[failure] in warned[0]
    assert len(spec._drafting.graphs) == 0


def test_recurrent_models_are_not_captured():
    target, prompts = tiny.model("lfm2"), tiny.prompts(9, 4)
    spec = SpeculativeGenerator(target, NgramProposer(), draft_length=4, compile=True)
    with tiny.specdec_warnings() as warned:
        assert text(spec.generate, prompts) == text(target.generate, prompts)
    assert len(warned) == 1
    assert "recurrent" in warned[0]


def test_auto_is_for_gpus_and_nonsense_is_refused():
    spec = SpeculativeGenerator(tiny.model("llama"), NgramProposer(), compile="auto")
    text(spec.generate, tiny.prompts(9))
    assert (spec._drafting.graphs is None) == (tiny.DEVICE == "cpu")
    with pytest.raises(ValueError, match="compile must be one of True, False, 'auto'"):
        SpeculativeGenerator(tiny.model("llama"), NgramProposer(), compile="yes")
