"""Recognition of grammar processors: those of xgrammar and outlines, and `GrammarProcessor`.

Read in xgrammar 0.2.8 and outlines 1.3.3 with outlines_core 0.2.14. A processor that was used before, and one of an
unknown class, is left as it is: it follows the text with a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.sampling.grammar import GrammarProcessor, GrammarRows, GrammarState


def is_grammar(processor: Any) -> bool:
    """Return True for an unused processor of a known grammar library."""
    if isinstance(processor, GrammarProcessor):
        return processor.stateless
    known = _LIBRARIES.get(_name(processor))
    return known is not None and known[0](processor)


def with_grammar_rows(processors: Iterable[Any], batch_size: int, start: int) -> list[Any]:
    """Return a call's processors, with `GrammarRows` in place of each grammar's.

    Args:
        processors: the call's logits processors.
        batch_size: B.
        start: the column of the first new token.
    """
    return [
        GrammarRows(_states(processor, batch_size), start) if is_grammar(processor) else processor
        for processor in processors
    ]


def _name(processor: Any) -> str:
    return f"{type(processor).__module__}.{type(processor).__qualname__}"


def _states(processor: Any, batch_size: int) -> Sequence[GrammarState]:
    if isinstance(processor, GrammarProcessor):
        return processor.states(batch_size)
    return _LIBRARIES[_name(processor)][1](processor, batch_size)


class XgrammarState(GrammarState):
    """The state of one xgrammar matcher.

    Once the matcher has accepted a stop token, the mask before it stays, as in the processors of both libraries.

    Args:
        matcher: an `xgrammar.GrammarMatcher`.
        grammar: its compiled grammar.
        width: tokens that the mask covers; None: all that the scores have.
    """

    def __init__(self, matcher: Any, grammar: Any, width: int | None):
        self.matcher, self._grammar, self._width = matcher, grammar, width
        self._stops = set(matcher.stop_token_ids)
        self._mask: Tensor | None = None
        self._padding = 0  # tokens after the stop token

    def accept(self, token: int) -> bool:
        if self.ended:
            self._padding += 1
            return True
        if token in self._stops and self._mask is not None:
            self.matcher.fill_next_token_bitmask(self._mask)
        return self.matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        padding = min(count, self._padding)
        self._padding -= padding
        if count > padding:
            self.matcher.rollback(count - padding)

    def allowed(self, vocab_size: int) -> Tensor:
        if self._mask is None:
            width = vocab_size if self._width is None else self._width
            self._mask = torch.full((1, (width + 31) // 32), -1, dtype=torch.int32)
        if not self.ended:
            self.matcher.fill_next_token_bitmask(self._mask)
        return unpacked(self._mask[0], vocab_size)

    @property
    def ended(self) -> bool:
        return self.matcher.is_terminated()

    def forced_text(self) -> bytes:
        if self.ended:
            return b""
        try:
            return self.matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # the text begins or ends within a character: its bytes are here
            return error.object

    def vocabulary(self) -> Sequence[bytes]:
        return self._grammar.tokenizer_info.decoded_vocab


class OutlinesState(GrammarState):
    """The state of one guide of outlines_core.

    A guide that has come to an end of its grammar ignores tokens that it does not accept, as in outlines' processor.

    Args:
        guide: an `outlines_core.Guide`.
    """

    def __init__(self, guide: Any):
        self._guide = guide
        self._accepted: list[int | None] = []  # None for a token that the guide ignored
        self._mask: Tensor | None = None

    def accept(self, token: int) -> bool:
        advances = self._guide.accepts_tokens([token])
        if not advances and not self._guide.is_finished():
            return False
        if advances:
            self._guide.advance(token, return_tokens=False)
        self._accepted.append(token if advances else None)
        return True

    def rollback(self, count: int) -> None:
        del self._accepted[-count:]
        self._guide.reset()  # it remembers few states, and reads a text within microseconds
        for token in self._accepted:
            if token is not None:
                self._guide.advance(token, return_tokens=False)

    def allowed(self, vocab_size: int) -> Tensor:
        if self._mask is None:
            self._mask = torch.full(((vocab_size + 31) // 32,), -1, dtype=torch.int32)
        self._guide.write_mask_into(self._mask.data_ptr(), self._mask.numel(), self._mask.element_size())
        return unpacked(self._mask, vocab_size)

    @property
    def ended(self) -> bool:
        return self._accepted[-1:] == [None]


def unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """Unpack a bit mask (W,) int32 to (V,) bool; tokens beyond it are allowed.

    Examples:
        >>> unpacked(torch.tensor([0b101], dtype=torch.int32), 4)
        tensor([ True, False,  True, False])
    """
    bits = torch.arange(8, dtype=torch.uint8)
    allowed = (mask.view(torch.uint8)[:, None] >> bits & 1).flatten()[:vocab_size].bool()
    return torch.nn.functional.pad(allowed, (0, vocab_size - len(allowed)), value=True)


def _of_xgrammar(processor: Any, batch_size: int) -> Sequence[GrammarState]:
    """Use the processor up, as its first call does: it keeps the matchers, and refuses another `generate()` call."""
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    given, width = processor.compiled_grammars, processor.full_vocab_size
    grammars = given if len(given) > 1 else given * batch_size
    if len(grammars) != batch_size:
        raise ValueError(
            f"xgrammar's LogitsProcessor has {len(grammars)} grammars for {batch_size} rows: give it one for "
            "all rows, or one for each"
        )
    processor.compiled_grammars, processor.batch_size, processor.prefilled = grammars, batch_size, True
    processor.matchers = [GrammarMatcher(grammar) for grammar in grammars]
    processor.token_bitmask = allocate_token_bitmask(batch_size, width)
    return [XgrammarState(*each, width) for each in zip(processor.matchers, grammars, strict=True)]


def _of_outlines_xgrammar(processor: Any, batch_size: int) -> Sequence[GrammarState]:
    from xgrammar import GrammarMatcher

    grammar = processor.compiled_grammar
    return [XgrammarState(GrammarMatcher(grammar), grammar, None) for _ in range(batch_size)]


def _of_outlines_core(processor: Any, batch_size: int) -> Sequence[GrammarState]:
    from outlines_core import Guide

    return [OutlinesState(Guide(processor.index)) for _ in range(batch_size)]


# By the processor's class: whether it is unused, and the states of the rows of a call.
_LIBRARIES: dict[str, tuple[Callable[[Any], bool], Callable[[Any, int], Sequence[GrammarState]]]] = {
    "xgrammar.contrib.hf.LogitsProcessor": (lambda processor: not processor.prefilled, _of_xgrammar),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": (
        lambda processor: processor.is_first_token and processor.tensor_library_name == "torch",
        _of_outlines_xgrammar,
    ),
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": (
        lambda processor: processor.is_first_token and processor.tensor_library_name == "torch",
        _of_outlines_core,
    ),
}
