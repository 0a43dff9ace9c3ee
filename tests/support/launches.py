"""What each round of a `generate()` call asks of a (pretended) device: waits, kernels, copies to it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from specdec import (
    BlockProposer,
    DraftModelProposer,
    DynamicTree,
    Eagle3Proposer,
    HybridProposer,
    MtpProposer,
    NgramProposer,
    SpeculativeGenerator,
)
from specdec.engine.loop import Loop
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.mtp.head import MtpHead
from specdec.models import static_forward
from specdec.models.runner import ModelRunner
from specdec.proposers.draft_models.cuda_graph_drafts import WIDTHS
from specdec.proposers.pacing.pacer import Pacer
from specdec.training.initialization.mtp import initialize_mtp
from tests.support import blocks, eagle3, pretend, tiny

OUTSIDE, TARGET, DRAFT = "outside", "target", "draft"  # of the models; the target's pass; the draft's own passes
COMPARISON = "comparison"  # of a compiled pass with the plain one, once per size
PROPOSERS = ("ngram", "draft chain", "eagle3 chain", "eagle3 tree", "block chain", "block tree", "mtp chain", "hybrid")
LENGTH = 5  # tokens drafted per round, where that is set
LARGE = DynamicTree(depth=8, top_k=8, size=60)


@functools.cache
def models() -> tuple[Any, Any, Any]:
    """Target, draft model and head on the device; the draft is the target, so that drafts are accepted."""
    if not torch.cuda.is_available():
        pretend.install()
    head, target, _ = eagle3.trained(updates=150)
    return tuple(copy.deepcopy(model).to("cuda") for model in (target, target, head))


@functools.cache
def block_head() -> DFlashHead:
    """For the same target; drafts of ten tokens with a Markov head."""
    shape = {"hidden_size": 48, "target_hidden_size": 48, "block_size": 10, "tap_ids": (1, 3)}
    return copy.deepcopy(blocks.head("DSpark", **shape)).to("cuda")


@functools.cache
def mtp_head() -> MtpHead:
    """An MTP layer for the same target, untrained: what its last layer says once more."""
    target, _, _ = models()
    on_host = copy.deepcopy(target).to("cpu")
    return initialize_mtp(on_host, torch.arange(on_host.config.vocab_size)).to("cuda").for_target(target)


def generator(name: str, automatic: bool) -> SpeculativeGenerator:
    """automatic: how far is drafted is for the pacer to say."""
    target, draft, head = models()
    tree = DynamicTree(depth=8, top_k=8) if automatic else LARGE
    proposer = {
        "ngram": NgramProposer,
        "draft chain": lambda: DraftModelProposer(draft),
        "eagle3 chain": lambda: Eagle3Proposer(head).shaped(),
        "eagle3 tree": lambda: Eagle3Proposer(head, tree=tree),
        "block chain": lambda: BlockProposer(block_head()).shaped(),
        "block tree": lambda: BlockProposer(block_head(), tree=tree),
        "mtp chain": lambda: MtpProposer(mtp_head()),
        "hybrid": lambda: HybridProposer(Eagle3Proposer(head, tree=tree)),
    }[name]()
    length = None if automatic else LARGE.depth if "tree" in name or name == "hybrid" else LENGTH
    return SpeculativeGenerator(target, proposer, draft_length=length, compile=False)


def prompts(batch_size: int, short: bool = False) -> dict[str, torch.Tensor]:
    """Prompts on the device, of different lengths in a batch. short: of at most `WIDTHS[0]` tokens."""
    lengths = [WIDTHS[0] - row % 4 if short else 9 + 2 * (row % 4) for row in range(batch_size)]
    return {name: tensor.to("cuda") for name, tensor in tiny.prompts(*lengths).items()}


def counted(spec: SpeculativeGenerator, **kwargs: Any) -> list[pretend.Ledger]:
    """A ledger per round that drafts something. Where lengths are automatic, every draft is taken to pay."""
    books: list[pretend.Ledger] = []
    with ExitStack() as stack:
        stack.enter_context(_in_regions(books))
        if spec.draft_length is None:
            stack.enter_context(_drafts_pay())
        torch.manual_seed(0)
        spec.generate(**kwargs)
    return books


def settled(books: list[pretend.Ledger]) -> list[pretend.Ledger]:
    """The rounds in which no CUDA graph was captured and no compiled pass was compared with the plain one."""
    return [book for book in books if not book.captures and not book.count("waits", COMPARISON)]


def replaying(books: list[pretend.Ledger], name: str) -> list[pretend.Ledger]:
    """Those in which all that can be was replayed: the target's pass, and a draft that is made by passes."""
    parts = 1 if name == "ngram" else 2
    return [book for book in settled(books) if replays(book) == parts]


def replays(book: pretend.Ledger) -> int:
    return sum(times for (what, _, _), times in book.launches.items() if what == "replay")


def mean(books: list[pretend.Ledger], kind: str, *regions: str) -> float:
    return sum(book.count(kind, *regions) for book in books) / len(books)


@contextmanager
def _in_regions(books: list[pretend.Ledger]) -> Iterator[None]:
    run_round, forward = Loop._round, ModelRunner._forward

    def in_round(loop: Loop) -> None:
        drafts = loop.stopwatch.report.num_drafts
        with pretend.ledger() as book, pretend.region(OUTSIDE):
            run_round(loop)
        if loop.stopwatch.report.num_drafts > drafts:
            books.append(book)

    def in_pass(runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        with pretend.region(TARGET if runner.model is models()[0] else DRAFT):
            return forward(runner, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Loop, "_round", in_round))
        stack.enter_context(patch.object(ModelRunner, "_forward", in_pass))
        compared = _in_region(COMPARISON, static_forward._distance)
        stack.enter_context(patch.object(static_forward, "_distance", compared))
        for name in ("forward", "fuse", "logits", "append_kv", "rotation"):
            stack.enter_context(patch.object(Eagle3Head, name, _in_region(DRAFT, getattr(Eagle3Head, name))))
        yield


def _in_region(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with pretend.region(name):
            return method(*args, **kwargs)

    return wrapped


@contextmanager
def _drafts_pay() -> Iterator[None]:
    """As if on a machine where drafting cost nothing: what is decided from times differs from run to run."""
    with (
        patch.object(Pacer, "may_start", lambda *args, **kwargs: True),
        patch.object(Pacer, "worth", lambda pacer, chances, drafted, draft_steps=0: drafted < LENGTH),
        patch.object(Pacer, "best_length", lambda pacer, gains, rows: min(60, len(gains))),
    ):
        yield
