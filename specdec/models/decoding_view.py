"""`decoding_view`: the view of a model that runs passes over drafts on GPUs. `CurrentView` keeps a view up to date."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from transformers import PreTrainedModel

from specdec.models.draft_attention import with_draft_attention
from specdec.models.fingerprint import fingerprint
from specdec.models.fused_layers import with_fused_layers


def decoding_view(model: PreTrainedModel) -> PreTrainedModel:
    """A view of `model` whose layers run faster on few tokens; `model` itself if none can."""
    return with_fused_layers(with_draft_attention(model))


class CurrentView:
    """A view of a model that is made anew after modules, settings or hooks of the model have changed.

    Args:
        model: the model.
        make: makes the view.
    """

    def __init__(self, model: PreTrainedModel, make: Callable[[PreTrainedModel], PreTrainedModel]):
        self._model, self._view, self._make = model, model, make
        self._made_from: Hashable | None = None

    def current(self) -> PreTrainedModel:
        """The view of the model as it is now."""
        state = fingerprint(self._model, hooks=True)
        if state != self._made_from:
            self._view, self._made_from = self._make(self._model), state
        return self._view
