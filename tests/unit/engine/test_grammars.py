"""States of the grammar packages: the masks of the packages' own processors, at any text and back again."""

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from specdec.engine.hf.grammars import is_grammar, with_grammar_rows
from tests.support import tiny

TEXT = ["<end>", *"abc12,", "ab", "12"]
REGEX = "(ab)+c?,[12]{2,4}(,c)?"
START = 3  # columns of the prompt


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TEXT)}, unk_token="<end>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def by_xgrammar(tokenizer):
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar has no wheel for this platform")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(TEXT), stop_token_ids=[0])
    grammar = xgrammar.GrammarCompiler(info).compile_regex(REGEX)
    return lambda: hf.LogitsProcessor(grammar)


def by_outlines(backend):
    def make(tokenizer):
        outlines = pytest.importorskip("outlines", reason="outlines has no wheel for this platform")
        from outlines.backends import get_regex_logits_processor

        wrapped = outlines.from_transformers(tiny.model("llama", vocab_size=len(TEXT)), tokenizer)
        return lambda: get_regex_logits_processor(backend, wrapped, REGEX)

    return make


@pytest.fixture(
    params=[
        pytest.param(by_xgrammar, id="xgrammar"),
        pytest.param(by_outlines("xgrammar"), id="xgrammar in outlines"),
        # Its processor compiles a kernel with the first call.
        pytest.param(by_outlines("outlines_core"), id="outlines", marks=pytest.mark.slow),
    ]
)
def new_processor(request, tokenizer):
    return request.param(tokenizer)


def columns(new):
    return torch.tensor([[7] * START + new])


def masks(processor, new):
    """The tokens that a processor allows after each prefix of a text, called as plain decoding calls it."""
    scores = torch.arange(len(TEXT)).float()[None]
    return [processor(columns(new[:count]), scores.clone())[0] for count in range(len(new) + 1)]


def test_masks_at_any_text_are_those_of_the_processor(new_processor):
    """Texts are visited in random order, so that the state is moved back and forth; some go on after the end."""
    choose, visited = random.Random(0), []
    rows = with_grammar_rows([new_processor()], 1, START)[0]
    for _ in range(4):
        text, processor = [], new_processor()
        for _ in range(9):
            allowed = masks(new_processor(), text)[-1].isfinite().nonzero()[:, 0].tolist()
            text.append(choose.choice(allowed))
        visited += [(text[:count], mask) for count, mask in enumerate(masks(processor, text))]
    choose.shuffle(visited)
    assert any(0 in text[:-1] for text, _ in visited)
    for text, expected in visited:
        scores = torch.arange(len(expected)).float()[None, None]
        assert torch.equal(rows.masked(scores, [[columns(text)[0]]])[0, 0], expected)


def test_a_refused_token_leaves_the_state_as_it_is(new_processor):
    rows = with_grammar_rows([new_processor()], 1, START)[0]
    assert rows.after(0, [1]) is not None
    assert rows.after(0, [1, 1]) is None
    assert rows.after(0, [1, 2]) is not None


def test_forced_text_of_xgrammar(tokenizer):
    rows = with_grammar_rows([by_xgrammar(tokenizer)()], 1, START)[0]
    state = rows.after(0, [])
    assert state.forced_text() == b"ab"
    assert list(state.vocabulary()) == [token.encode() for token in TEXT]
    state = rows.after(0, [7, 3, 6, 8, 8, 0])  # ab c , 12 12 <end>
    assert state.ended
    assert state.forced_text() == b""


def test_forced_text_of_xgrammar_may_end_within_a_character():
    """Two emojis differ in their last byte: what is forced is no text, and has to be drafted as bytes."""
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar has no wheel for this platform")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<end>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.BYTE_FALLBACK, vocab_size=257, stop_token_ids=[256])
    grammar = xgrammar.GrammarCompiler(info).compile_regex("😀|😁")
    rows = with_grammar_rows([hf.LogitsProcessor(grammar)], 1, START)[0]
    one, other = "😀".encode(), "😁".encode()
    for count in range(4):
        assert rows.after(0, list(one[:count])).forced_text() == one[count:3] == other[count:3]


def test_xgrammars_processor_is_used_up_by_a_call(tokenizer):
    """As by plain decoding: its matchers are where the text ended, and another call is refused."""
    processor = by_xgrammar(tokenizer)()
    rows = with_grammar_rows([processor], 2, START)[0]
    rows.after(1, [7, 3, 6, 8, 8, 0])
    assert [matcher.is_terminated() for matcher in processor.matchers] == [False, True]
    assert not is_grammar(processor)


def test_as_many_grammars_as_rows(tokenizer):
    new = by_xgrammar(tokenizer)
    two = type(new())([*new().compiled_grammars, *new().compiled_grammars])
    with pytest.raises(ValueError, match="2 grammars for 3 rows: give it one for all rows, or one for each"):
        with_grammar_rows([two], 3, START)


def test_other_processors_are_left_alone(tokenizer):
    class Own(type(by_xgrammar(tokenizer)())):
        """A subclass may do anything."""

    others = [LogitsProcessor(), Own(by_xgrammar(tokenizer)().compiled_grammars), len]
    assert not any(map(is_grammar, others))
    assert with_grammar_rows(others, 1, START) == others
