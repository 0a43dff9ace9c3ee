"""What `model.generate(..., custom_generate="path-or-hub-id")` runs where that is ours (the folder `hub/`).

Owns the generators that such calls share: one per model and settings. Knows nothing of how they generate.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from specdec.engine.generator import SpeculativeGenerator
from specdec.models.compat import REPOSITORY_ARGUMENTS
from specdec.proposers.base import Proposer
from specdec.utils.choices import COUPLED, OnUnsupported, ProposerName, RuleName

KEPT_AT = "_specdec_generators"


class Generators(dict[Any, SpeculativeGenerator]):
    """A model's, by their settings. They lie at the model and go with it; a copy of the model makes its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Generators:
        return Generators()

    def __reduce__(self) -> tuple[type[Generators], tuple[()]]:
        return Generators, ()


def generate(
    model: PreTrainedModel,
    inputs: Any = None,
    *,
    proposer: Proposer | PreTrainedModel | ProposerName | str = "auto",
    draft_length: int | None = None,
    rule: RuleName = COUPLED,
    on_unsupported: OnUnsupported = "plain",
    **kwargs: Any,
):
    """What `model.generate(inputs, **kwargs)` would return; the other arguments are `SpeculativeGenerator`'s."""
    kwargs = {name: value for name, value in kwargs.items() if name not in REPOSITORY_ARGUMENTS}
    return generator(model, proposer, draft_length, rule, on_unsupported).generate(inputs, **kwargs)


def generator(
    model: PreTrainedModel,
    proposer: Proposer | PreTrainedModel | ProposerName | str = "auto",
    draft_length: int | None = None,
    rule: RuleName = COUPLED,
    on_unsupported: OnUnsupported = "plain",
) -> SpeculativeGenerator:
    """The one that such calls of this model share, made by the first of them; its `report` counts them."""
    kept = vars(model).setdefault(KEPT_AT, Generators())
    settings = (proposer, draft_length, rule, on_unsupported)
    if settings not in kept or kept[settings].model is not model:  # a shallow copy of a model shares what it keeps
        kept[settings] = SpeculativeGenerator(
            model, proposer, draft_length=draft_length, rule=rule, on_unsupported=on_unsupported
        )
    return kept[settings]
