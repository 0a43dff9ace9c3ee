"""Hooks of a proposer over a `generate()` call: begin, propose and observe in each round, end."""

from dataclasses import replace

import pytest
import torch

from specdec import (
    DraftModelProposer,
    DraftTree,
    HybridProposer,
    NgramProposer,
    Proposer,
    SpeculativeGenerator,
    SuffixProposer,
    TextMemory,
)
from specdec.engine import draft_session
from specdec.proposers.pacing.estimates import Estimates
from specdec.proposers.pacing.pass_cost import BUCKETS, PassCost
from tests.support import tiny


class Remembering(Proposer):
    """Drafts the text of plain decoding and stores the tokens that each hook receives."""

    def __init__(self, answer, width, wrong=()):
        self.answer, self.width, self.wrong = answer, width, wrong
        self.heard, self.ended, self.drafted = {}, [], []

    def begin(self, context):
        self.heard.clear()
        for b in range(context.batch_size):
            self.heard[b] = context.row(b).tolist()

    def propose(self, context):
        drafts = []
        for b, end in enumerate(context.ends):
            draft = self.answer[b, end : end + 5].tolist()
            drafts.append([(token + (end + i in self.wrong)) % tiny.VOCAB for i, token in enumerate(draft)])
        self.drafted.append([len(draft) for draft in drafts])
        return context.chain(drafts)

    def observe(self, draft, result, accepted):
        passed_on = replace(result)  # as a proposer that wraps another may
        assert passed_on.host() == result.host()
        for b, tokens in enumerate(passed_on.host().tokens):
            self.heard[b] += tokens

    def end(self, context):
        self.ended.append([context.row(b).tolist() for b in range(context.batch_size)])


def texts_of(inputs, out, eos):
    """Each row's text without padding, up to its end token."""
    width, texts = inputs["input_ids"].shape[1], []
    for row, mask in zip(out.tolist(), inputs["attention_mask"].tolist(), strict=True):
        new = row[width:]
        ends = [i + 1 for i, token in enumerate(new) if token in eos]
        texts.append([token for token, real in zip(row, mask, strict=False) if real] + new[: ends[0] if ends else None])
    return texts


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("eos", [(), (5, 9, 11, 17, 23, 44)], ids=["to the length", "end tokens"])
@pytest.mark.parametrize("lengths", [(7,), (7, 4, 9)], ids=["one row", "ragged"])
@pytest.mark.parametrize("new", [1, 2, 11])
def test_a_proposer_is_told_the_text_it_gained(new, lengths, eos, do_sample):
    """`observe` gives a row's new tokens of the round, without those after its end; `end` gives all texts."""
    model, inputs = tiny.model("llama"), tiny.prompts(*lengths)
    arguments = {"max_new_tokens": new, "do_sample": do_sample, "eos_token_id": list(eos) or None}
    torch.manual_seed(3)
    plain = model.generate(**inputs, **arguments)
    proposer = Remembering(plain, inputs["input_ids"].shape[1], wrong=(13, 16))
    torch.manual_seed(3)
    out = SpeculativeGenerator(model, proposer, draft_length=4, on_unsupported="error").generate(**inputs, **arguments)
    assert out.tolist() == plain.tolist()
    expected = texts_of(inputs, plain, eos)
    assert proposer.ended == [expected]
    assert [proposer.heard[b] for b in range(len(lengths))] == expected


def test_rows_that_a_criterion_cuts_back():
    model, inputs = tiny.model("llama"), tiny.prompts(7, 4)
    arguments = {"max_new_tokens": 20, "do_sample": False}
    whole = model.generate(**inputs, **arguments)
    stop = [lambda ids, scores, **kwargs: torch.full((len(ids),), ids.shape[1] >= 12)]
    proposer = Remembering(whole, 7)
    spec = SpeculativeGenerator(model, proposer, draft_length=4, on_unsupported="error")
    out = spec.generate(**inputs, **arguments, stopping_criteria=stop)
    assert out.tolist() == whole[:, :12].tolist()
    assert proposer.ended == [texts_of(inputs, out, ())]


@pytest.mark.parametrize("new", [1, 2, 8])
@pytest.mark.parametrize(
    "make", [SuffixProposer, lambda memory: HybridProposer(SuffixProposer(memory))], ids=["alone", "in turns"]
)
def test_a_memory_holds_the_whole_text_of_every_call(make, new):
    model, memory = tiny.model("llama"), TextMemory()
    spec = SpeculativeGenerator(model, make(memory), draft_length=4, on_unsupported="error")
    expected = []
    for lengths in ((9,), (7,), (8, 5)):
        inputs = tiny.prompts(*lengths, seed=sum(lengths))
        out = spec.generate(**inputs, max_new_tokens=new, do_sample=False)
        expected += texts_of(inputs, out, ())
    assert sorted(memory.texts()) == sorted(expected)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_draft_length_limits_drafts_of_any_proposer(length):
    model, inputs = tiny.model("llama"), tiny.prompts(7, 4)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    proposer = Remembering(plain, 7)
    spec = SpeculativeGenerator(model, proposer, draft_length=length, on_unsupported="error")
    with spec.watch() as rounds:
        out = spec.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert out.tolist() == plain.tolist()
    assert max(len(found.path) - 1 for found in rounds) == length
    assert (spec.report.num_draft_tokens == 0) == (length == 0)
    assert spec.report.num_draft_tokens <= length * len(rounds)


def test_draft_length_cuts_trees():
    class Trees(Proposer):
        def propose(self, context):
            root = context.root[:, None]
            B = len(root)
            parents = torch.tensor([[-1, 0, 0, 1, 2, 3]]).expand(B, -1)
            return DraftTree(torch.cat([root, torch.arange(5).expand(B, -1) + 3], 1), parents)

    model, inputs = tiny.model("llama"), tiny.prompts(7, 4)
    for length, nodes in ((0, 0), (1, 2), (2, 4), (9, 5)):
        spec = SpeculativeGenerator(model, Trees(), draft_length=length, on_unsupported="error")
        spec.generate(**inputs, max_new_tokens=12, do_sample=False)
        report = spec.report
        assert report.num_draft_tokens <= nodes * report.num_row_rounds
        assert report.num_draft_tokens >= nodes * (report.num_row_rounds - 6)  # fewer at the end of the text


class Steep(PassCost):
    """Each further node of a pass costs half a token, on any machine."""

    def __init__(self):
        super().__init__({bucket: (1 + bucket / 2, self.FAMILIAR) for bucket in BUCKETS})
        self.known = True

    def observe(self, size, seconds):
        pass


class OnAnyMachine(Estimates):
    draft_step = 0.0

    def __init__(self, verify, draft):
        super().__init__(Steep(), draft)

    def observe_pace(self, cost, new_tokens):
        pass


def test_pacing_rests_a_proposer_whose_drafts_are_never_right(monkeypatch):
    """Without a fixed length, few wrong drafts of any proposer are verified."""
    monkeypatch.setattr(draft_session, "Estimates", OnAnyMachine)
    model, inputs = tiny.model("llama"), tiny.prompts(7)
    plain = model.generate(**inputs, max_new_tokens=200, do_sample=False)
    proposer = Remembering(plain, 7, wrong=range(1000))
    spec = SpeculativeGenerator(model, proposer, on_unsupported="error")
    out = spec.generate(**inputs, max_new_tokens=200, do_sample=False)
    assert out.tolist() == plain.tolist()
    assert sum(map(sum, proposer.drafted)) > 600
    assert 0 < spec.report.num_draft_tokens < 60


def test_a_draft_model_ends_nothing():
    """`end` is optional: proposers without a memory need none."""
    model = tiny.model("llama")
    for proposer in (NgramProposer(), DraftModelProposer(model)):
        out = SpeculativeGenerator(model, proposer, draft_length=3).generate(**tiny.prompts(5), max_new_tokens=4)
        assert out.shape == (1, 9)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_draft_length_limits_a_proposer_that_takes_turns_with_n_grams(length):
    model, inputs = tiny.model("llama"), tiny.prompts(7, 4)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    spec = SpeculativeGenerator(model, HybridProposer(Remembering(plain, 7)), draft_length=length)
    with spec.watch() as rounds:
        out = spec.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert out.tolist() == plain.tolist()
    assert max(len(found.path) - 1 for found in rounds) == length


def test_every_proposer_of_the_library_paces_itself():
    """A new one that does not is limited as a user's own is."""
    todo, found = [Proposer], []
    while todo:
        todo += (kinds := [kind for kind in todo.pop().__subclasses__() if kind.__module__.startswith("specdec.")])
        found += kinds
    assert len(found) > 15
    assert all(kind.paces_itself for kind in found)


def test_hooks_are_told_no_padding_of_finished_rows():
    """With `return_dict_in_generate` rows that have ended go on with padding, as in plain decoding."""
    model, inputs, eos = tiny.model("llama"), tiny.prompts(7, 4, 9), [5, 9, 11, 17, 23, 44]
    arguments = {"max_new_tokens": 14, "do_sample": True, "eos_token_id": eos, "return_dict_in_generate": True}
    for seed in range(4):
        torch.manual_seed(seed)
        plain = model.generate(**inputs, **arguments).sequences
        proposer, memory = Remembering(plain, inputs["input_ids"].shape[1]), TextMemory()
        for drafts in (proposer, SuffixProposer(memory)):
            torch.manual_seed(seed)
            spec = SpeculativeGenerator(model, drafts, draft_length=4, on_unsupported="error")
            assert spec.generate(**inputs, **arguments).sequences.tolist() == plain.tolist()
        expected = texts_of(inputs, plain, eos)
        assert proposer.ended == [expected]
        assert [proposer.heard[b] for b in range(3)] == expected
        assert sorted(memory.texts()) == sorted(expected)
        assert spec.report.num_output_tokens == sum(map(len, expected)) - int(inputs["attention_mask"].sum())


MALFORMED = {
    "no rows": lambda root: DraftTree(root.new_zeros(0, 3), root.new_zeros(0, 3)),
    "no nodes": lambda root: DraftTree(root.new_zeros(len(root), 0), root.new_zeros(len(root), 0)),
    "probabilities of another width": lambda root: DraftTree.from_chain(
        root, root[:, None].repeat(1, 3), probs=torch.full((len(root), 3, 5), 0.2)
    ),
    "tokens that are no integers": lambda root: DraftTree.from_chain(root, torch.rand(len(root), 3)),
}


@pytest.mark.parametrize("length", [None, 2])
@pytest.mark.parametrize("made", MALFORMED)
def test_malformed_drafts_are_named(made, length):
    class Malformed(Proposer):
        def propose(self, context):
            return MALFORMED[made](context.root)

    model, inputs = tiny.model("llama"), tiny.prompts(7, 4)
    for proposer in (Malformed(), HybridProposer(Malformed())):
        spec = SpeculativeGenerator(model, proposer, draft_length=length)
        with pytest.raises(ValueError, match="Malformed.propose returned"):
            spec.generate(**inputs, max_new_tokens=8, do_sample=True)


def test_observers_of_the_old_signature():
    class Old(Remembering):
        def observe(self, draft, verdict, accepted):
            assert verdict.new_tokens(draft).shape[0] == len(self.heard)
            for b, tokens in enumerate(verdict.outcome.tokens):
                self.heard[b] += tokens

    model, inputs = tiny.model("llama"), tiny.prompts(7, 4)
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    proposer = Old(plain, 7)
    with pytest.warns(DeprecationWarning, match="RoundResult.host"):
        SpeculativeGenerator(model, proposer, draft_length=4).generate(**inputs, max_new_tokens=8, do_sample=False)
    assert [proposer.heard[b] for b in range(2)] == texts_of(inputs, plain, ())
