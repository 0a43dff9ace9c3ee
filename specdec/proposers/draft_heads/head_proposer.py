"""`HeadProposer`: base class of proposers that draft with a small head, trained for one target.

It checks that head and target fit, places the head on the target's device, and maps the head's vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from specdec.heads.base import StateHead
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.dflash.runner import DFlashRunner
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.eagle3.parallel_runner import ParallelRunner
from specdec.heads.eagle3.runner import HeadRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.hydra.head import HydraHeads
from specdec.heads.hydra.runner import HydraRunner
from specdec.heads.medusa import MedusaHeads, MedusaRunner
from specdec.models.fused_layers import with_fused_layers
from specdec.models.hidden_states import Taps
from specdec.models.int8_linear import FEW_TOKENS as FEW_INT8_TOKENS
from specdec.models.int8_linear import int8_pays, with_int8_linears
from specdec.models.introspection import decoder_layers, device_of, is_sharded
from specdec.proposers.context import LARGEST_PADDING, Context
from specdec.proposers.draft_heads.feature_proposer import CapturableRunner, FeatureProposer, Follower
from specdec.sampling.dynamic_tree import DynamicTree

Head = Eagle3Head | DFlashHead | MedusaHeads | HydraHeads
Runner = HeadRunner | DFlashRunner | ParallelRunner | MedusaRunner | HydraRunner
Same = TypeVar("Same", bound="HeadProposer")


class HeadProposer(FeatureProposer):
    """Drafts with a head that reads the target's hidden states.

    Drafts are dynamic trees by default, as large as pays, and chains if the target cannot verify trees. On CPUs, int8
    weights are used for the head where they are faster, because drafts are verified and need not be exact.

    Args:
        head: the head, or a folder or hub id to load it from, in any known format (see `specdec inspect`).
        branching: the number of children per node at each depth of a fixed tree, see `AutoregressiveProposer`.
        tree: the settings of a dynamic tree.
        draw: True to draw drafts from q where the rule allows it, see `AutoregressiveProposer`.
    """

    head: Head
    runner: Runner
    _fast: Any  # the view of the head that drafts

    def __init__(
        self,
        head: Head | str | Path,
        *,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
    ):
        self._loaded = isinstance(head, (str, Path))  # a head loaded here is moved to the target's device
        self.head = self._load(head) if isinstance(head, (str, Path)) else head
        self._check_kind()
        self._automatic = branching is None and tree is None
        if self._automatic:
            tree = self._tree(DynamicTree().top_k)
        super().__init__(branching=branching, tree=tree, draw=draw)
        self._fast = self.head
        # By sharded target
        self._embeddings: WeakKeyDictionary[PreTrainedModel, BorrowedEmbeddings] = WeakKeyDictionary()

    # Implemented by subclasses

    @abstractmethod
    def _load(self, path: str | Path) -> Head:
        """Load a head from a folder or hub id."""

    @abstractmethod
    def _check_kind(self) -> None:
        """Raise ValueError for a kind of head that needs another proposer."""

    @abstractmethod
    def _tree(self, top_k: int) -> DynamicTree:
        """The default settings of dynamic trees."""

    @abstractmethod
    def _runner(self, embeddings: BorrowedEmbeddings, sized: bool) -> Runner:
        """Make the runner of the head for a call. sized: True if drafts may be captured, which needs padded sizes."""

    # Implementation of Proposer

    def check(self, target: PreTrainedModel) -> None:
        self._check_fit(target)
        if self._loaded:
            self.head.to(device_of(target))
        if isinstance(self.head, StateHead):
            self.head.move_frequencies()  # now, so that all calls find the same tensors
        if self._automatic and device_of(target).type == "cpu":
            self.tree = self._tree(FEW_INT8_TOKENS)
        if is_sharded(target):
            self._embeddings[target] = BorrowedEmbeddings.by(target, self.head)
        self.taps(target)  # raises if the target has no such layers
        self._fast = with_int8_linears(self.head) if int8_pays(self.head) else self.head
        if device_of(target).type == "cuda":
            self._fast = with_fused_layers(self._fast)

    def _check_fit(self, target: PreTrainedModel) -> None:
        """Raise ValueError if the head's shape does not fit the target."""
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
                f"{embedded[-1]} wide: it belongs to another model"
            )
        known = head.vocab_size if self.head.embed_tokens is not None else embedded[0]
        if head.mask_token_id is not None and head.mask_token_id >= known:
            raise ValueError(
                f"the head's mask token {head.mask_token_id} is outside the {known} tokens that have an embedding: it "
                "belongs to another model"
            )
        ids = self.head.draft_to_target
        if ids is not None and int(ids.max()) >= text.vocab_size:
            raise ValueError(
                f"the head drafts tokens beyond the target's vocabulary of {text.vocab_size}: it belongs to another "
                "model"
            )

    def shaped(self: Same, *, branching: Sequence[int] | None = None, tree: DynamicTree | None = None) -> Same:
        other = super().shaped(branching=branching, tree=tree)
        other._automatic = False  # so that `check` keeps the shape
        return other

    def taps(self, target: PreTrainedModel) -> Taps:
        return Taps(target, self.head.config.taps(len(decoder_layers(target))), self.head.device)

    def drafting_model(self) -> Head:
        return self._fast

    def begin(self, context: Context) -> None:
        assert context.target is not None
        embeddings = self._embeddings.get(context.target) or BorrowedEmbeddings.by(context.target, self.head)
        self.runner = self._runner(embeddings, sized=context.call.recorder is not None)
        self.runner.start(context.batch_size)
        self._lend(context)
        super().begin(context)

    @property
    def follower(self) -> Follower:
        return self.runner

    @property
    def recordable(self) -> CapturableRunner | None:
        """The runner, except for Medusa's and Hydra's heads, whose runners have no cached rows."""
        return None if isinstance(self.runner, (MedusaRunner, HydraRunner)) else self.runner

    def known_tokens(self) -> Tensor | None:
        return self.head.draft_to_target
