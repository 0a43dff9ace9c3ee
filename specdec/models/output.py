"""`Output`: the result of a model's pass over tokens or draft nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Output:
    """Result of a model's pass.

    Attributes:
        logits: (B, n, V), of the tokens whose logits were requested.
        hidden_states: one (B, n, H) per layer; None unless requested.
        features: (B, W, C), tapped states of all W tokens of the pass; None without taps.
    """

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    features: Tensor | None = None

    def first(self, count: int) -> Output:
        """Return the output of the first `count` nodes."""
        hidden = self.hidden_states and tuple(states[:, :count] for states in self.hidden_states)
        return Output(self.logits[:, :count], hidden, None if self.features is None else self.features[:, :count])

    def on(self, device: torch.device) -> Output:
        """Move logits and hidden states to the text's device, as plain decoding does."""
        if self.logits.device == device:
            return self
        hidden = self.hidden_states and tuple(states.to(device) for states in self.hidden_states)
        return replace(self, logits=self.logits.to(device), hidden_states=hidden)


def joined(outputs: Sequence[Output]) -> Output:
    """Join the outputs of passes over consecutive parts of a text: the last one's logits, the states of all."""
    if len(outputs) == 1:
        return outputs[0]
    hidden = [output.hidden_states for output in outputs if output.hidden_states is not None]
    features = [output.features for output in outputs if output.features is not None]
    return Output(
        outputs[-1].logits,
        tuple(torch.cat(layer, 1) for layer in zip(*hidden, strict=True)) if hidden else None,
        torch.cat(features, 1) if features else None,
    )
