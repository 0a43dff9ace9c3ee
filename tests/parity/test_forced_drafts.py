"""Grammars that can be rolled back: the text of plain `generate()`, with forced tokens drafted beside any proposer."""

import pytest
import torch

from specdec import DraftModelProposer, DynamicTree, HybridProposer, NgramProposer, SpeculativeGenerator, SuffixProposer
from tests.support import tiny
from tests.support.grammars import RECORD, TOKENS, processor

PROPOSERS = {
    "ngram": lambda target: NgramProposer(),
    "suffix": lambda target: SuffixProposer(),
    "itself": lambda target: DraftModelProposer(target),
    "tree of itself": lambda target: DraftModelProposer(target, tree=DynamicTree(depth=3, top_k=3)),
    "other": lambda target: DraftModelProposer(tiny.model("llama", seed=1, vocab_size=len(TOKENS))),
    "hybrid": lambda target: HybridProposer(DraftModelProposer(target)),
    "turns": lambda target: tiny.TakingTurns(DraftModelProposer(target)),
    "garbage": lambda target: tiny.Garbage(),
}
TWO = [*RECORD[:-1], '","', "abcde", '":"', None, '"}']


@pytest.fixture(scope="module")
def target():
    return tiny.model("llama", vocab_size=len(TOKENS))


def written(generate, lengths, new_processor, seed=0, **kwargs):
    """The new tokens (B, T) of a call."""
    torch.manual_seed(seed)
    arguments = {"max_new_tokens": 60, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False} | kwargs
    output = generate(**tiny.prompts(*lengths, vocab=len(TOKENS)), logits_processor=[new_processor()], **arguments)
    return output[:, max(lengths) :]


def same(target, spec, lengths, new_processor, **kwargs):
    """Check that a call writes what plain decoding writes; return it."""
    plain, ours = (written(generate, lengths, new_processor, **kwargs) for generate in (target.generate, spec.generate))
    assert torch.equal(plain, ours), (plain, ours)
    assert spec.report.num_plain_calls == 0
    return ours


def text(row):
    return "".join(TOKENS[token] for token in row.tolist())


@pytest.mark.parametrize("length", [None, 4])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["single", "ragged"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_text_is_that_of_plain_decoding(target, proposer, lengths, sample, length):
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=length, on_unsupported="error")
    for seed in range(2):
        same(target, spec, lengths, lambda: processor(RECORD), do_sample=sample, seed=seed)


@pytest.mark.parametrize("rule", ["block", "token", "typical"])
def test_other_rules_keep_to_the_grammar(target, rule):
    spec = SpeculativeGenerator(target, target, draft_length=4, rule=rule, on_unsupported="error")
    rows = written(spec.generate, (9, 1), lambda: processor(RECORD), do_sample=True, max_new_tokens=200)
    assert all(text(row).startswith('{"abcde":"') and '"}<end>' in text(row) for row in rows)


def test_forced_tokens_are_drafted_and_accepted(target):
    """Of 9 tokens before the first letter, all but the first are drafted in the second round."""
    spec = SpeculativeGenerator(target, "ngram", draft_length=8, on_unsupported="error")
    with spec.watch() as rounds:
        ours = same(target, spec, (9,), lambda: processor(RECORD))
    print(rounds, text(ours[0]))
    assert rounds[0].drafted_by == "GrammarLookup"
