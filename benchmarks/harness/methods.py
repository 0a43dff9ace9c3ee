"""`catalogue`: the methods to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness.options import Bench
from benchmarks.harness.peers import NAMES, peers
from specdec import DraftModelProposer, NgramProposer, Proposer
from specdec.evaluation.methods import PLAIN, Method, speculative
from specdec.models.compat import ASSISTED_STATIC
from specdec.proposers.factory import as_proposer
from specdec.utils.choices import COUPLED, RuleName

TRANSFORMERS = "hf-"  # names of transformers' own assisted generation start with it
MAX_DRAFT_TOKENS = 64  # tokens that a static cache has room for beyond the text
CACHE_SIZES = 512  # tokens by which static caches differ
EXACT = ":exact"  # drafted tokens computed bit for bit as in plain decoding
SINGLES = ":singles"  # the batch's prompts one after the other


def catalogue(bench: Bench) -> dict[str, Callable[[], Method]]:
    """Return factories of all methods that the options allow, by name and in the order of the table.

    transformers' assisted generation supports one row only. In a batch it is available as single calls. Other libraries
    are included if they are installed (peers.py).
    """
    options = bench.options
    whole_vocab = cache(lambda: DraftModelProposer(bench.draft))
    trimmed = cache(lambda: DraftModelProposer(bench.draft, vocab=options.draft_vocab))
    ngram = partial(NgramProposer, max_ngram=options.ngram_size)
    K = options.lookup_tokens
    single: dict[str, Callable[[], Callable[..., Any]]] = {
        PLAIN: lambda: bench.target.generate,
        f"hf-lookup-{K}": lambda: lookup(bench.target, K, options.ngram_size),
    }
    ours: dict[str, tuple[Callable[[], Proposer], int | None]] = {
        "specdec-ngram": (NgramProposer, None),
        f"specdec-ngram-{K}": (ngram, K),
    }
    if options.draft is not None:
        for length in (None, *options.draft_lengths):
            ending = "" if length is None else f"-{length}"
            single[f"hf-assistant{ending}"] = partial(_assisted, bench, length)
            if ASSISTED_STATIC:
                single[f"hf-assistant-static{ending}"] = partial(_assisted, bench, length, static=True)
            ours[f"specdec-draft{ending}"] = (whole_vocab, length)
        ours[f"specdec-draft-vocab{options.draft_vocab}"] = (trimmed, None)
    for text in options.proposers:
        ours[f"specdec-{text}"] = (lambda text=text: as_proposer(text, bench.target), None)

    made: dict[str, Callable[[], Method]] = {}
    for name, make in single.items():
        if options.batch_size == 1 or name == PLAIN:
            made[name] = partial(_call, name, make)
        if options.batch_size > 1:
            made[name + SINGLES] = partial(_call, name + SINGLES, make)
    rules: dict[str, RuleName] = {"": COUPLED} | {f":{rule}": rule for rule in options.rules}
    for name, (proposer, fixed) in ours.items():
        for ending, rule in rules.items():
            made[name + ending] = partial(_speculative, name + ending, bench, proposer, fixed, rule)
        made[name + EXACT] = partial(_speculative, name + EXACT, bench, proposer, fixed, COUPLED, exact=True)
    return made | {name: partial(_call, name, make) for name, make in peers(bench).items()}


def select(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern (`*` for any text), and plain decoding as the baseline.

    Exact methods match patterns that end with `EXACT`. Without patterns: all methods except these, single calls of
    transformers' methods, and those of other libraries.
    """
    usual = [name for name in names if not name.endswith(EXACT)]
    if not patterns:
        theirs = [name for name in names if name.startswith(TRANSFORMERS) and name.endswith(SINGLES)]
        return [name for name in usual if name not in theirs and not name.startswith(NAMES)]
    chosen = {PLAIN}
    for pattern in patterns:
        found = [name for name in (names if pattern.endswith(EXACT) else usual) if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"no method is called {pattern!r}; there are {', '.join(names)}")
        chosen.update(found)
    return [name for name in names if name in chosen]


def lookup(target: PreTrainedModel, tokens: int, ngram_size: int) -> Callable[..., Any]:
    """Make the method of transformers' prompt lookup decoding."""
    return partial(target.generate, prompt_lookup_num_tokens=tokens, max_matching_ngram_size=ngram_size)


def assisted(
    target: PreTrainedModel, draft: PreTrainedModel, tokens: int | None, static: bool = False
) -> Callable[..., Any]:
    """Make the method of transformers' assisted generation, with its default schedule or a constant draft length.

    The length is set in the assistant's generation config, because `generate()` ignores its own argument (transformers
    5.17 to 5.24, generation/candidate_generator.py). The confidence threshold is off, as it would shorten drafts.

    Args:
        static: use a static cache (since 5.24), whose passes transformers compiles on a GPU.
    """
    config = copy.deepcopy(draft.generation_config)
    if tokens is not None:
        config.num_assistant_tokens = tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0

    def generate(**kwargs: Any) -> Any:
        before, draft.generation_config = draft.generation_config, config
        try:
            return target.generate(assistant_model=draft, **(kwargs | static_cache(**kwargs) if static else kwargs))
        finally:
            draft.generation_config = before

    return generate


def static_cache(input_ids: Tensor, max_new_tokens: int, **others: Any) -> dict[str, Any]:
    """Return arguments for a static cache with space for drafts, rounded up as each size is compiled separately."""
    needed = input_ids.shape[1] + max_new_tokens + MAX_DRAFT_TOKENS
    return {"cache_implementation": "static", "max_cache_len": -(-needed // CACHE_SIZES) * CACHE_SIZES}


def _assisted(bench: Bench, tokens: int | None, static: bool = False) -> Callable[..., Any]:
    return assisted(bench.target, bench.draft, tokens, static)


def _call(name: str, make: Callable[[], Callable[..., Any]]) -> Method:
    return Method(name, make())


def _speculative(
    name: str, bench: Bench, proposer: Callable[[], Proposer], length: int | None, rule: RuleName, exact: bool = False
) -> Method:
    return speculative(name, bench.target, proposer(), length, rule, exact=exact)
