"""`DecodingView`: the view of a model that runs passes over drafts on GPUs."""

from __future__ import annotations

from collections.abc import Hashable

from transformers import PreTrainedModel

from specdec.models.draft_attention import with_draft_attention
from specdec.models.fingerprint import fingerprint
from specdec.models.fused_layers import with_fused_layers


def decoding_view(model: PreTrainedModel) -> PreTrainedModel:
    """A view of `model` whose layers run faster on few tokens; `model` itself if none can."""
    return with_fused_layers(with_draft_attention(model))


class DecodingView:
    """The decoding view of a model. It is made anew after modules, settings or hooks of the model have changed."""

    def __init__(self, model: PreTrainedModel):
        self._model, self._view = model, model
        self._made_from: Hashable | None = None

    def current(self) -> PreTrainedModel:
        """The view of the model as it is now."""
        state = fingerprint(self._model, hooks=True)
        if state != self._made_from:
            self._view, self._made_from = decoding_view(self._model), state
        return self._view
