"""Drafts where a grammar forces a text, and the candidates of another lookup that it leaves."""

from dataclasses import replace

import pytest
import torch

from specdec import GrammarState, NgramProposer
from specdec.proposers.context import CallState
from specdec.proposers.lookup.grammar import DEEPEST, LIKELY, GrammarLookup
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.grammar import GrammarRows
from specdec.utils.byte_pairs import BytePairs
from tests.support import tiny

VOCABULARY = [b"<end>", b"a", b"b", b"c", b":", b'"', b"ab", b'":', b'",', b"abc", b","]
END, A, B, C, COLON, QUOTE, AB, QUOTE_COLON, QUOTE_COMMA, ABC, COMMA = range(len(VOCABULARY))


class Scripted(GrammarState):
    """Allows so many tokens at each place, and says which text is forced there."""

    def __init__(self, places, vocabulary=VOCABULARY):
        self.places, self.given, self.written = places, vocabulary, []

    def accept(self, token):
        fits = len(self.written) < len(self.places) and token in self.places[len(self.written)][0]
        if fits:
            self.written.append(token)
        return fits

    def rollback(self, count):
        del self.written[-count:]

    def allowed(self, vocab_size):
        allowed = self.places[len(self.written)][0] if not self.ended else [END]
        return torch.isin(torch.arange(vocab_size), torch.tensor(allowed))

    @property
    def ended(self):
        return len(self.written) == len(self.places)

    def forced_text(self):
        return b"" if self.ended else self.places[len(self.written)][1]

    def vocabulary(self):
        return self.given


def drafted(state, prompt=(B,), written=(), lookup=None, length=8, **changed):
    """The tokens and parents that are drafted for a row."""
    text = torch.tensor([[*prompt, *written]])
    context = tiny.lone_row(text, text.shape[1], Pacer(length), budget=20, vocab_size=len(VOCABULARY))
    call = CallState(grammar=GrammarRows([state], len(prompt)), written=[list(written)], start=len(prompt))
    context = replace(context, call=call, **changed)
    proposer = GrammarLookup(lookup)
    proposer.begin(context)
    gains = proposer.expect(context)
    draft = proposer.draft(context, gains)
    assert state.written == list(written)
    assert gains == sorted(gains, reverse=True)
    return draft.tokens[0, 1:].tolist(), draft.parents[0, 1:].tolist()


def free(*tokens):
    return list(tokens), b""


@pytest.mark.parametrize(
    ("places", "tokens"),
    [
        pytest.param([([A, AB, ABC], b"abc")], [ABC], id="one token for a forced text"),
        pytest.param([([A, AB, ABC], b'abc"'), ([QUOTE], b'"')], [ABC, QUOTE], id="two tokens"),
        pytest.param([free(A)], [A], id="a single token without a text"),
        pytest.param([free(A), free(A, B), free(C)], [A], id="nothing where there is a choice"),
        pytest.param([free(END)], [END], id="the end"),
    ],
)
def test_forced_tokens(places, tokens):
    assert drafted(Scripted(places), written=[])[0] == tokens


def test_without_bytes_a_forced_text_is_left_to_others():
    assert drafted(Scripted([([A, AB], b"ab"), free(C)], None))[0] == []
    assert drafted(Scripted([([A], b"a"), free(C)], None))[0] == [A, C]


def test_the_last_token_is_the_one_that_the_row_wrote_last():
    """After a key a quote is forced, and the token may go on to a colon or a comma."""
    ends = [QUOTE, QUOTE_COLON, QUOTE_COMMA]
    places = [free(A), (ends, b'"'), free(A), (ends, b'"'), free(C, END)]
    for earlier in ends:
        assert drafted(Scripted(places), written=[A, earlier])[0] == [A, earlier]
    assert drafted(Scripted(places[2:]), prompt=[QUOTE_COLON])[0] == [
        A,
        QUOTE,
    ]  # no prompt counts


def test_candidates_of_another_lookup_go_as_far_as_the_grammar_allows():
    prompt = [A, B, C, A]  # the n-gram drafts B, C, A
    assert drafted(Scripted([free(A, B), free(B, C), free(B)]), prompt, lookup=NgramProposer())[0] == [B, C, B]
    assert drafted(Scripted([free(A, B), free(A, B)]), prompt, lookup=NgramProposer())[0] == [B]
    assert drafted(Scripted([free(A, C), free(B)]), prompt, lookup=NgramProposer())[0] == []


def test_a_forced_token_comes_before_another_way_to_write_it():
    prompt = [C, A, B, C]  # the n-gram drafts A, B
    places = [([A, AB, ABC], b"abc"), free(B, C), free(C, END)]
    for count, expected in [(1, ([ABC], [0])), (2, ([ABC, A], [0, 0])), (3, ([ABC, A, B], [0, 0, 2]))]:
        assert drafted(Scripted(places), prompt, lookup=NgramProposer(), length=count) == expected
    assert drafted(Scripted(places), prompt, lookup=NgramProposer(), chains_only=True)[0] == [ABC]


def test_rates_follow_what_the_target_chose():
    """The first of two forced tokens was chosen, the second was not."""
    state, pacer = Scripted([free(A), free(C), free(B, C)]), Pacer(8)
    state.places[1] = ([C, B], b"c")
    context = tiny.lone_row(torch.tensor([[B]]), 1, pacer, budget=20, vocab_size=len(VOCABULARY))
    call = CallState(grammar=GrammarRows([state], 1), written=[[]], start=1)
    proposer = GrammarLookup()
    proposer.begin(replace(context, call=call))
    proposer.expect(replace(context, call=call))
    proposer.expect(replace(context, call=replace(call, written=[[A, B]])))
    rate = pacer.acceptance.rate
    assert rate(("grammar", "alone"), like=LIKELY["alone"]) > LIKELY["alone"]
    assert rate(("grammar", "last"), like=LIKELY["last"]) < LIKELY["last"]
    assert rate(("grammar", "within"), like=LIKELY["within"]) == LIKELY["within"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param(b"abc", [ABC], id="merged twice"),
        pytest.param(b'ab":', [AB, QUOTE_COLON], id="two words"),
        pytest.param(b'b",', [B, QUOTE_COMMA], id="with a single byte"),
        pytest.param(b"", [], id="nothing"),
        pytest.param(b"ax", [], id="an unknown byte"),
    ],
)
def test_byte_pairs(text, tokens):
    assert BytePairs(VOCABULARY).encode(text) == tokens


def test_a_very_long_draft_is_cut():
    """A chance that is rounded to 0 divides nothing, and the tree is grown by recursive calls."""
    LONG = 4000
    assert 0.3**LONG == 0

    class Periodic(NgramProposer):
        def expect(self, context):
            return [0.3] * LONG

        def candidates(self, context, b):
            return [(0.3**depth, A, depth - 2) for depth in range(1, LONG)]

    draft, _ = drafted(Scripted([free(A, B)] * LONG), length=LONG, lookup=Periodic(), budget=[LONG])
    assert draft == [A] * DEEPEST
