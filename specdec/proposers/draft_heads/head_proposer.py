"""`HeadProposer`: a small head, trained for one target, drafts from its hidden states.

Owns whether head and target fit, where the head's weights lie, and its vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.heads.dflash.head import DFlashHead
from specdec.heads.dflash.runner import DFlashRunner
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.eagle3.parallel_runner import ParallelRunner
from specdec.heads.eagle3.runner import HeadRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.hydra.head import HydraHeads
from specdec.heads.hydra.runner import HydraRunner
from specdec.heads.medusa import MedusaHeads, MedusaRunner
from specdec.models.hidden_states import Taps
from specdec.models.int8_linear import FEW_TOKENS as FEW_INT8_TOKENS
from specdec.models.int8_linear import int8_pays, with_int8_linears
from specdec.models.introspection import decoder_layers, device_of, is_sharded
from specdec.proposers.base import LARGEST_PADDING, Context
from specdec.proposers.draft_heads.feature_proposer import Follower, FollowingProposer, RecordableFollower
from specdec.proposers.draft_models.autoregressive import top_children
from specdec.proposers.draft_models.draft_nodes import Stepped
from specdec.sampling.dynamic_tree import DynamicTree

Head = Eagle3Head | DFlashHead | MedusaHeads | HydraHeads
Runner = HeadRunner | DFlashRunner | ParallelRunner | MedusaRunner | HydraRunner
Same = TypeVar("Same", bound="HeadProposer")


class HeadProposer(FollowingProposer):
    """Drafts dynamic trees by default, as large as pays here; chains where the target can verify nothing else.

    On CPUs in bfloat16 the head's weights are read as 8-bit integers: a draft need not be exact, it is verified.

    Args:
        head: the head, or a folder or hub id of any of the known formats (see `specdec inspect`).
        branching: the draft's shape, see `AutoregressiveProposer`.
        tree: likewise.
        draw: how the draft is chosen, see there.
    """

    head: Head
    runner: Runner
    _fast: Any  # a view of the head, which drafts

    def __init__(
        self,
        head: Head | str | Path,
        *,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
    ):
        self._loaded = isinstance(head, (str, Path))  # then it goes where the target is
        self.head = self._load(head) if isinstance(head, (str, Path)) else head
        self._check_kind()
        self._automatic = branching is None and tree is None
        if self._automatic:
            tree = self._tree(DynamicTree().top_k)
        super().__init__(branching=branching, tree=tree, draw=draw)
        self._fast = self.head
        self._embeddings: WeakKeyDictionary[PreTrainedModel, BorrowedEmbeddings] = (
            WeakKeyDictionary()
        )  # by targets in several processes
        self._ids: Tensor | None = None  # `known_tokens`, where they were wanted last

    # What a head does

    @abstractmethod
    def _load(self, path: str | Path) -> Head:
        """The head in a folder, or of a hub id."""

    @abstractmethod
    def _check_kind(self) -> None:
        """Raise ValueError for a head of a kind that another proposer drafts with."""

    @abstractmethod
    def _tree(self, top_k: int) -> DynamicTree:
        """The trees that are drafted where nobody asked for a shape."""

    @abstractmethod
    def _runner(self, embeddings: BorrowedEmbeddings, sized: bool) -> Runner:
        """What runs the head in a call; sized: its drafts may be recorded."""

    # The rest of a proposer

    def check(self, target: PreTrainedModel) -> None:
        self._check_fit(target)
        if self._loaded:
            self.head.to(device_of(target))
        if self._automatic and device_of(target).type == "cpu":
            self.tree = self._tree(FEW_INT8_TOKENS)
        if is_sharded(target):
            self._embeddings[target] = BorrowedEmbeddings.by(target, self.head)
        self.taps(target)  # raises if the target has no such layers
        self._fast = with_int8_linears(self.head) if int8_pays(self.head) else self.head

    def _check_fit(self, target: PreTrainedModel) -> None:
        head, text = self.head.config, target.config.get_text_config(decoder=True)
        embedded = target.get_input_embeddings().weight.shape
        if text.hidden_size != head.target_hidden_size:
            raise ValueError(
                f"the head was made for a target with hidden states of {head.target_hidden_size}, this one's have "
                f"{text.hidden_size}: it belongs to another model"
            )
        if head.vocab_size and abs(head.vocab_size - text.vocab_size) > LARGEST_PADDING:
            raise ValueError(
                f"the head was made for a vocabulary of {head.vocab_size} tokens, the target's has {text.vocab_size}: "
                "it belongs to another model"
            )
        if self.head.embed_tokens is None and embedded[-1] != head.embedding_size:
            raise ValueError(
                f"the head reads embeddings {head.embedding_size} wide and has none of its own, the target's are "
                f"{embedded[-1]} wide"
            )
        known = head.vocab_size if self.head.embed_tokens is not None else embedded[0]
        if head.mask_token_id is not None and head.mask_token_id >= known:
            raise ValueError(f"the head's mask token {head.mask_token_id} is none of the {known} that are embedded")
        ids = self.head.draft_to_target
        if ids is not None and int(ids.max()) >= text.vocab_size:
            raise ValueError(f"the head drafts tokens beyond the target's vocabulary of {text.vocab_size}")

    def shaped(self: Same, *, branching: Sequence[int] | None = None, tree: DynamicTree | None = None) -> Same:
        other = super().shaped(branching=branching, tree=tree)
        other._automatic = False  # `check` leaves the shape as it is
        return other

    def taps(self, target: PreTrainedModel) -> Taps:
        return Taps(target, self.head.config.taps(len(decoder_layers(target))), self.head.device)

    def drafting_model(self) -> Head:
        return self._fast

    def begin(self, context: Context) -> None:
        assert context.target is not None
        self._ids = None
        embeddings = self._embeddings.get(context.target) or BorrowedEmbeddings.by(context.target, self.head)
        self.runner = self._runner(embeddings, sized=context.recorder is not None)
        self.runner.start(context.batch_size)
        super().begin(context)

    @property
    def follower(self) -> Follower:
        return self.runner

    @property
    def recordable(self) -> RecordableFollower | None:
        """Medusa's and Hydra's heads are not recorded: their runners are no rows of a cache."""
        return None if isinstance(self.runner, (MedusaRunner, HydraRunner)) else self.runner

    def known_tokens(self) -> Tensor | None:
        return self.head.draft_to_target

    def _children(self, context: Context, logits: Tensor, stepped: Stepped, n: int, k: int) -> tuple[Tensor, Tensor]:
        """In the draft's own vocabulary, where no processor wants to see the text or names tokens.

        An end token that is drafted too early is rejected.
        """
        ids = self._targets(logits.device)
        if ids is None or not context.processors.fit_any_vocabulary:
            return super()._children(context, logits, stepped, n, k)
        scores = context.coupled_scores(context.processors.in_any_vocabulary(logits.float()), stepped.levels, ids)
        tokens, log_probs = top_children(scores, k)
        return ids[tokens], log_probs

    def _full(self, logits: Tensor, vocab_size: int) -> Tensor:
        ids = self._targets(logits.device)
        if ids is None:
            missing = vocab_size - logits.shape[-1]
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
        full = logits.new_full((*logits.shape[:-1], max(vocab_size, self.head.config.vocab_size)), float("-inf"))
        return full.index_copy_(-1, ids, logits)[..., :vocab_size]

    def _targets(self, device: torch.device) -> Tensor | None:
        if self._ids is None or self._ids.device != device:
            ids = self.head.draft_to_target
            self._ids = None if ids is None else ids.to(device)
        return self._ids
