"""`MtpTrainee`: trainable MTP layers of a target, without its embedding and LM head, which stay frozen."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.heads.mtp.head import MtpHead, MtpLayer
from specdec.models.hidden_states import FINAL


class FinalState:
    """Config of MTP layers: they read the target's final state."""

    @staticmethod
    def taps(target_layers: int) -> tuple[int, ...]:
        return (FINAL,)


class MtpTrainee(nn.Module):
    """Trainable parameters of a target's MTP layers.

    Args:
        layers: in the order in which they draft, see `MtpHead`.
        draft_to_target: (K,) int64, the tokens in the training loss. The layers draft the target's whole vocabulary.
    """

    config = FinalState()
    embed_tokens = lm_head = None  # the target's

    def __init__(self, layers: Sequence[MtpLayer], draft_to_target: Tensor):
        super().__init__()
        self._layers = nn.ModuleList(layers)
        for layer in layers:
            layer.block.set_input_embeddings(nn.Identity())  # the block reads fused embeddings
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)

    draft_to_target: Tensor

    @property
    def layers(self) -> list[MtpLayer]:
        return list(self._layers)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.layers[0].fuse.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].fuse.weight.dtype

    def copied(self, dtype: torch.dtype) -> MtpTrainee:
        """Return a copy of the layers in another precision, in eval mode."""
        layers = []
        for layer in self.layers:
            norms = copy.deepcopy(layer.embed_norm), copy.deepcopy(layer.state_norm)
            layers.append(MtpLayer(*norms, copy.deepcopy(layer.fuse), copy.deepcopy(layer.block), layer.states_first))
        return MtpTrainee(layers, self.draft_to_target).to(dtype).eval()

    def for_target(self, target: PreTrainedModel) -> MtpHead:
        """Return an `MtpHead` of these layers with the target's embedding and LM head."""
        return MtpHead(self.layers, target.get_input_embeddings(), target.get_output_embeddings())
