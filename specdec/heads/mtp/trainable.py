"""`MtpTrainee`: trainable MTP layers of a target, without its embedding and LM head, which stay frozen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.heads.mtp.head import MtpHead, MtpLayer, MtpLayers
from specdec.models.hidden_states import FINAL
from specdec.models.number_format import convert


class MtpTrainee(MtpLayers):
    """Trainable parameters of a target's MTP layers.

    Args:
        layers: in the order in which they draft.
        draft_to_target: (K,) int64, the tokens in the training loss. The layers draft the target's whole vocabulary.
    """

    config = SimpleNamespace(taps=lambda num_target_layers: (FINAL,))
    embed_tokens = lm_head = None  # the target's
    draft_to_target: Tensor

    def __init__(self, layers: Sequence[MtpLayer], draft_to_target: Tensor):
        super().__init__(layers)
        for layer in layers:
            layer.block.set_input_embeddings(nn.Identity())  # the block reads fused embeddings
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)

    def copy_to(self, dtype: torch.dtype) -> MtpTrainee:
        """Return a copy of the layers in another precision, in eval mode."""
        layers = []
        for layer in self.layers:
            norms = copy.deepcopy(layer.embed_norm), copy.deepcopy(layer.state_norm)
            layers.append(MtpLayer(*norms, copy.deepcopy(layer.fuse), copy.deepcopy(layer.block), layer.states_first))
        return convert(MtpTrainee(layers, self.draft_to_target), dtype).eval()

    def for_target(self, target: PreTrainedModel) -> MtpHead:
        """Return an `MtpHead` of these layers with the target's embedding and LM head."""
        return MtpHead(self.layers, target.get_input_embeddings(), target.get_output_embeddings())
