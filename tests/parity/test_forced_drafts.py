"""Grammars that can be rolled back: the text of plain `generate()`, with forced tokens drafted next to any proposer."""

import pytest
import torch
from transformers import StoppingCriteria, SuppressTokensLogitsProcessor

from specdec import (
    BlockProposer,
    DraftModelProposer,
    DynamicTree,
    GrammarProcessor,
    HybridProposer,
    HydraProposer,
    NgramProposer,
    SpeculativeGenerator,
    SuffixProposer,
)
from tests.support import blocks, tiny
from tests.support.grammars import LETTERS, RECORD, TOKENS, Template, processor

PROPOSERS = {
    "ngram": lambda target: NgramProposer(),
    "ngram tree": lambda target: NgramProposer(continuations=3),
    "suffix": lambda target: SuffixProposer(),
    "itself": lambda target: DraftModelProposer(target),
    "tree of itself": lambda target: DraftModelProposer(target, tree=DynamicTree(depth=3, top_k=3)),
    "turns": lambda target: tiny.TakingTurns(DraftModelProposer(target)),
    "hybrid": lambda target: HybridProposer(DraftModelProposer(tiny.model("llama", seed=1))),
    "block": lambda target: BlockProposer(blocks.head("DSpark")),
    "medusa": lambda target: BlockProposer(blocks.medusa()),
    "hydra": lambda target: HydraProposer(blocks.hydra()),
    "garbage": lambda target: tiny.Garbage(),
}
FIXED = ['{"', "abcde", '":"', "fgh", '"}']
KEY = ["abc", "de", '":"']  # what a byte-pair tokenizer makes of the first key


@pytest.fixture(scope="module")
def target():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def plain(target):
    """Plain decoding's new tokens, made once for the same arguments."""
    known = {}

    def generate(lengths, template, **kwargs):
        key = lengths, str(template), str(kwargs)
        if key not in known:
            known[key] = written(target.generate, lengths, processor(template), **kwargs)
        return known[key]

    return generate


def written(generate, lengths, *processors, seed=0, **kwargs):
    """The new tokens (B, T) of a call."""
    torch.manual_seed(seed)
    arguments = {"max_new_tokens": 40, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False} | kwargs
    prompts = tiny.prompts(*lengths, vocab=len(TOKENS))
    return generate(**prompts, logits_processor=list(processors), **arguments)[:, max(lengths) :]


def speculating(target, proposer, length=4, **settings):
    return SpeculativeGenerator(target, proposer, draft_length=length, on_unsupported="error", **settings)


def text(row):
    return "".join(TOKENS[token] for token in row.tolist())


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["single", "ragged"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_text_is_that_of_plain_decoding(target, plain, proposer, lengths, sample):
    spec = speculating(target, PROPOSERS[proposer](target), 4)
    ours = written(spec.generate, lengths, processor(RECORD), do_sample=sample)
    assert torch.equal(plain(lengths, RECORD, do_sample=sample), ours)
    assert all(text(row).startswith('{"abcde":"') for row in ours)
    assert spec.report.num_plain_calls == 0


def test_each_row_may_have_a_grammar_of_its_own(target):
    templates, lengths = (RECORD, FIXED, ["gh", None, '"']), (9, 1, 5)
    spec = speculating(target, "ngram", None)
    plain, ours = (written(each, lengths, processor(*templates)) for each in (target.generate, spec.generate))
    assert torch.equal(plain, ours)
    assert text(ours[1]).startswith('{"abcde":"fgh"}<end>')


@pytest.mark.parametrize("rule", ["block", "token", "typical"])
def test_other_rules_keep_to_the_grammar(target, rule):
    spec = speculating(target, target, rule=rule)
    for row in written(spec.generate, (9, 1), processor(RECORD), do_sample=True):
        written_text = text(row).partition("<end>")[0]
        assert written_text.startswith('{"abcde":"')
        assert set(written_text[len('{"abcde":"') :].partition('"')[0]) <= set(LETTERS)


@pytest.mark.parametrize("proposer", [NgramProposer(), tiny.Garbage()], ids=["lookup", "other"])
def test_forced_text_is_drafted_as_a_tokenizer_writes_it(target, proposer):
    """After '{"' a key and its quotes are forced. Whether the target writes them with these tokens is up to it."""
    spec = speculating(target, proposer, len(KEY))
    begin = SuppressTokensLogitsProcessor([TOKENS.index("{")])
    with spec.watch() as rounds:
        written(spec.generate, (9,), processor(RECORD), begin)
    first = next(trace for trace in rounds if trace.drafted_by == "GrammarLookup")
    root, *drafted = (TOKENS[token] for token in first.tokens)
    assert drafted
    forced = ['{"', *KEY]
    assert drafted == forced[1 + forced.index(root) :]


def test_without_the_tokens_bytes_only_single_tokens_are_drafted(target):
    spec = speculating(target, "ngram", 8)
    with spec.watch() as rounds:
        ours = written(spec.generate, (9,), processor(RECORD, encodes=False))
    assert torch.equal(ours, written(target.generate, (9,), processor(RECORD, encodes=False)))
    for trace in rounds[:2]:  # before there are n-grams of the answer
        state = processor(RECORD).states(1)[0]
        assert all(map(state.accept, ours[0, : trace.position].tolist()))
        for token in trace.tokens[1:2]:
            assert state.allowed(tiny.VOCAB).nonzero().flatten().tolist() == [token]


def test_the_end_is_drafted_and_nothing_after_it(target, plain):
    spec = speculating(target, "ngram", 12)
    with spec.watch() as rounds:
        ours = written(spec.generate, (9,), processor(FIXED))
    assert torch.equal(ours, plain((9,), FIXED))
    assert text(ours[0]).endswith('"}<end>')
    assert rounds[-1].tokens[-1] == 0
    assert sum(trace.tokens.count(0) for trace in rounds) == 1 + sum(trace.tokens[-1] == 0 for trace in rounds[:-1])


@pytest.mark.parametrize("count", range(1, 9))
def test_max_new_tokens_in_a_forced_text(target, plain, count):
    spec = speculating(target, "ngram", 8)
    ours = written(spec.generate, (9, 5), processor(FIXED), max_new_tokens=count)
    assert torch.equal(ours, plain((9, 5), FIXED, max_new_tokens=count))


class StopAfter(StoppingCriteria):
    """Ends rows at a token, as a stop string would."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("lengths", [(9,), (5,), (9, 5)], ids=str)
def test_a_stop_string_in_a_forced_text(target, plain, lengths):
    """In a batch plain decoding passes the padding of ended rows to the grammar, which refuses it: ours does not."""
    alone = [plain((length,), RECORD)[0].tolist() for length in lengths]
    if len(lengths) > 1:
        prompts = tiny.prompts(*lengths, vocab=len(TOKENS))
        alone = [
            target.generate(
                prompts["input_ids"][b : b + 1],
                attention_mask=prompts["attention_mask"][b : b + 1],
                logits_processor=[processor(RECORD)],
                max_new_tokens=40,
                eos_token_id=0,
                pad_token_id=0,
                do_sample=False,
            )[0, max(lengths) :].tolist()
            for b in range(len(lengths))
        ]
    stop = alone[0][4]
    spec = speculating(target, "ngram", 8)
    ours = written(spec.generate, lengths, processor(RECORD), stopping_criteria=[StopAfter(stop)]).tolist()
    for mine, whole in zip(ours, alone, strict=True):
        end = 1 + whole.index(stop) if stop in whole else len(whole)
        assert mine[:end] == whole[:end][: len(mine)]
        assert not any(mine[end:])


def test_recorded_scores_are_those_of_plain_decoding(target):
    spec = speculating(target, "ngram")
    arguments = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False, "max_new_tokens": 24}
    plain, ours = (
        generate(
            **tiny.prompts(9, 1, 5, vocab=len(TOKENS)),
            logits_processor=[processor(RECORD, FIXED, RECORD)],
            eos_token_id=0,
            pad_token_id=0,
            **arguments,
        )
        for generate in (target.generate, spec.generate)
    )
    assert torch.equal(plain.sequences, ours.sequences)
    for expected, scores in zip(plain.scores, ours.scores, strict=True):
        assert torch.equal(expected == float("-inf"), scores == float("-inf"))
        torch.testing.assert_close(expected, scores)


class Biased(GrammarProcessor):
    """A subclass that prefers one letter as well."""

    def __call__(self, input_ids, scores):
        scores = super().__call__(input_ids, scores)
        scores[:, TOKENS.index("h")] += 100
        return scores


@pytest.mark.parametrize("lengths", [(9,), (9, 5)], ids=str)
def test_a_subclass_with_its_own_call_is_called_as_in_plain_decoding(target, lengths):
    spec = SpeculativeGenerator(target, "ngram", draft_length=4)
    plain, ours = (
        written(generate, lengths, Biased(lambda rows: [Template(RECORD) for _ in range(rows)]), max_new_tokens=12)
        for generate in (target.generate, spec.generate)
    )
    assert torch.equal(plain, ours)
    assert all("hhh" in text(row) for row in ours)
    assert spec.report.num_plain_calls == (len(lengths) > 1)


def test_a_state_for_each_row(target):
    for generate in (target.generate, speculating(target, "ngram").generate):
        with pytest.raises(ValueError, match="got 2 states for 3 rows: its function takes the batch size"):
            written(generate, (9, 1, 5), processor(RECORD, FIXED))


@pytest.mark.parametrize("lengths", [(9,), (9, 5)], ids=str)
def test_a_text_that_the_grammar_refuses_is_an_error(target, lengths):
    """Another processor forbids all letters and their pairs, so that the best of nothing is token 0."""
    letters = SuppressTokensLogitsProcessor([i for i, token in enumerate(TOKENS) if token[0] in LETTERS])
    for generate in (target.generate, speculating(target, "ngram").generate):
        with pytest.raises(ValueError, match="the grammar refuses the text of row 0, which ends in token 0: another"):
            written(generate, lengths, processor(RECORD), letters, eos_token_id=None)
