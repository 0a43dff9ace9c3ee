"""`MtpProposer`: the target's own MTP (multi-token prediction) layers draft from its hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from specdec.heads.mtp.head import MtpHead
from specdec.heads.mtp.loading import load
from specdec.heads.mtp.runner import MtpRunner
from specdec.models.hidden_states import FINAL, Taps
from specdec.models.int8_linear import int8_pays, with_int8_linears
from specdec.models.introspection import device_of
from specdec.proposers.context import Context
from specdec.proposers.draft_heads.feature_proposer import CapturableRunner, FeatureProposer, Follower
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.sampling.dynamic_tree import DynamicTree


class MtpProposer(FeatureProposer):
    """Drafts with the target's own MTP layers (multi-token prediction, DeepSeek-V3, arXiv 2412.19437).

    transformers drops these layers when it loads a target, so they are loaded from the target's checkpoint, once per
    target. A single layer drafts all tokens, one after the other. Several layers draft one token each, in turn. Drafts
    are chains by default. On CPUs, int8 weights are used where they are faster, because drafts are verified.

    Args:
        head: the layers, or a folder or hub id to load them from. None: the target's checkpoint.
        branching: the number of children per node at each depth of a fixed tree, see `AutoregressiveProposer`.
        tree: the settings of a dynamic tree.
        draw: True to draw drafts from q where the rule allows it, see `AutoregressiveProposer`.

    Raises:
        ValueError: for a target, if there are no MTP layers or they do not fit.

    Example:
        ```python
        spec = SpeculativeGenerator(model, MtpProposer())  # or by name: "mtp"
        output = spec.generate(input_ids, max_new_tokens=128)
        ```
    """

    def __init__(
        self,
        head: MtpHead | str | None = None,
        *,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
    ):
        super().__init__(branching=branching, tree=tree, draw=draw)
        self.head = head
        # By their target's config, which views of the target share: the target's device and dtype, and the layers.
        self._heads = WeakIdKeyDictionary()

    def check(self, target: PreTrainedModel) -> None:
        state = device_of(target), target.dtype
        if target.config not in self._heads or self._heads[target.config][0] != state:
            head = self.head if isinstance(self.head, MtpHead) else load(target, self.head)
            self._heads[target.config] = state, with_int8_linears(head) if int8_pays(head) else head
        self._head = self._of(target)

    def taps(self, target: PreTrainedModel) -> Taps:
        return Taps(target, [FINAL], self._of(target).device)

    def drafting_model(self) -> nn.Module:
        return self._head

    def begin(self, context: Context) -> None:
        assert context.target is not None
        head = self._of(context.target)
        self.runner = MtpRunner(head, sized=context.call.recorder is not None and len(head.layers) == 1)
        self.runner.start(context.batch_size)
        self._lend(context)
        super().begin(context)

    def _of(self, target: PreTrainedModel) -> MtpHead:
        """The layers of this target."""
        return self._heads[target.config][1]

    @property
    def follower(self) -> Follower:
        return self.runner

    @property
    def recordable(self) -> CapturableRunner | None:
        """The runner if there is a single layer: several layers have separate rows, which are not captured."""
        return self.runner if len(self.runner.layers) == 1 else None

    def _step(self, stepped: DraftNodes) -> Tensor:
        tokens, n, level = stepped.tokens, stepped.newest.shape[1], stepped.levels
        return self.runner.grow(tokens, n, stepped.parents, stepped.depth, stepped.seen, level, stepped.is_chain)
