"""Watched rounds: together they are the text, their chances the target's, their counts the report's."""

import pytest
import torch

from specdec import DynamicTree, Eagle3Proposer, NgramProposer, SpeculativeGenerator
from specdec.engine.trace import RoundTrace
from tests.support import eagle3, tiny

PROPOSERS = {
    "n-grams": NgramProposer,
    "random drafts": tiny.Garbage,
    "trees": lambda: Eagle3Proposer(eagle3.head(), tree=DynamicTree(4, 4, 10)),
}
TREE = RoundTrace(
    row=0,
    position=3,
    drafted_by="someone",
    tokens=[7, 1, 2, 3, 4],
    parents=[-1, 0, 0, 2, 2],
    chances=[1.0, 0.25, 0.5, 0.125, 0.75],
    top=[[(2, 0.5)], [], [(4, 0.75)], [], [(9, 0.625)]],
    path=[0, 2, 4],
    next_token=9,
)


def watched(proposer, inputs, **arguments):
    """What was generated, the generator and its rounds."""
    target = tiny.model("llama")
    spec = SpeculativeGenerator(target, proposer, draft_length=4, on_unsupported="error")
    with spec.watch() as rounds:
        text = spec.generate(**inputs, max_new_tokens=20, **arguments)
    return text, spec, rounds


def row_text(rounds, row, first):
    """What the rounds say that a row wrote, behind its first token, which needs no round."""
    text = [first]
    for seen in rounds:
        if seen.row == row:
            assert (seen.position, seen.tokens[0]) == (len(text), text[-1])
            text += seen.new_tokens
    return text


@pytest.mark.parametrize("sampling", [False, True], ids=["T = 0", "T = 1"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_the_rounds_are_the_text(name, sampling):
    inputs = tiny.prompts(9, 1, 5)
    plain = tiny.model("llama").generate(**inputs, max_new_tokens=20, do_sample=False)[:, 9:]
    eos = int(plain[0, 6])  # the first row ends early
    torch.manual_seed(3)
    output, _, rounds = watched(PROPOSERS[name](), inputs, do_sample=sampling, eos_token_id=eos)
    for row, text in enumerate(output[:, 9:].tolist()):
        wrote = row_text(rounds, row, text[0])
        assert wrote + [tiny.PAD] * (len(text) - len(wrote)) == text
        assert len(wrote) <= len(text)


@pytest.mark.parametrize("name", PROPOSERS)
def test_chances_are_those_of_a_plain_pass(name):
    inputs = tiny.prompts(9)
    output, _, rounds = watched(PROPOSERS[name](), inputs, do_sample=False)
    for seen in rounds:
        before = output[0, : 9 + seen.position].tolist()  # its last token is the root
        for node, parent in enumerate(seen.parents):
            probs = plain_pass(before + path_to(node, seen))
            assert [chance for _, chance in seen.top[node]] == pytest.approx(
                probs[-1].topk(5).values.tolist(), abs=1e-5
            )
            assert seen.top[node][0][0] == int(probs[-1].argmax())
            assert parent < 0 or seen.chances[node] == pytest.approx(float(probs[-2, seen.tokens[node]]), abs=1e-5)
    assert sum(len(seen.tokens) - 1 for seen in rounds) > 5


def path_to(node, seen):
    """The tokens from the root, it not included, down to a node."""
    return [*path_to(seen.parents[node], seen), seen.tokens[node]] if node else []


def plain_pass(tokens):
    with torch.no_grad():
        return tiny.model("llama")(torch.tensor([tokens], device=tiny.DEVICE)).logits[0].softmax(-1)


def test_counts_are_the_reports():
    _, spec, rounds = watched(tiny.Garbage(), tiny.prompts(9, 1, 5), do_sample=False)
    report = spec.report
    assert report.num_draft_tokens == sum(len(seen.tokens) - 1 for seen in rounds) > 0
    assert report.num_accepted_tokens == sum(len(seen.path) - 1 for seen in rounds) > 0
    assert {seen.drafted_by for seen in rounds} == {"Garbage"}


def test_only_calls_within_the_context_are_watched():
    _, spec, rounds = watched(NgramProposer(), tiny.prompts(9), do_sample=False)
    count = len(rounds)
    spec.generate(**tiny.prompts(9), max_new_tokens=5, do_sample=False)
    assert len(rounds) == count > 0


def test_contexts_that_overlap():
    """Each has the rounds of the calls that begin within it, in whatever order they end."""
    spec, counts = SpeculativeGenerator(tiny.model("llama"), tiny.Garbage(), draft_length=4), []
    contexts = [spec.watch() for _ in range(3)]
    kept = [context.__enter__() for context in contexts[:2]]
    for context in (*contexts[:2], None):
        spec.generate(**tiny.prompts(9), max_new_tokens=5, do_sample=False)
        counts.append([len(rounds) for rounds in kept])
        if context is not None:
            context.__exit__(None, None, None)
    n = counts[0][0]
    assert n > 0
    assert counts == [[n, n], [n, 2 * n], [n, 2 * n]]
    with contexts[2] as alone:
        spec.generate(**tiny.prompts(9), max_new_tokens=5, do_sample=False)
    assert len(alone) == n


def test_a_round_in_words():
    assert repr(TREE) == "<RoundTrace: row 0 at 3, 4 drafted by someone, 2 accepted>"
    assert TREE.depths == [0, 1, 1, 2, 2]
    assert TREE.new_tokens == [2, 4, 9]
    assert TREE.text().splitlines() == [
        "+ 7  1.000",
        "-   1  0.250",
        "+   2  0.500",
        "-     3  0.125",
        "+     4  0.750",
        "= 9",
    ]
