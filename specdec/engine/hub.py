"""Entry point of the `custom_generate` repository in `hub/`, and the generators that its calls share.

`model.generate(..., custom_generate="path-or-hub-id")` calls `generate`. There is one generator per model and settings.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from specdec.engine.generator import SpeculativeGenerator
from specdec.models.compat import REPOSITORY_ARGUMENTS
from specdec.proposers.base import Proposer
from specdec.utils.choices import COUPLED, OnUnsupported, ProposerName, RuleName

KEPT_AT = "_specdec_generators"
MOST = 16  # generators of a model; a proposer object made for each call would add one each time


class Generators(dict[Any, SpeculativeGenerator]):
    """Generators of one model by settings, kept as an attribute of the model. Copies of the model start empty."""

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
    """Return the output of `model.generate(inputs, **kwargs)`, decoded speculatively.

    The arguments that are named here are those of `SpeculativeGenerator`. The others are those of `model.generate()`.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in REPOSITORY_ARGUMENTS}
    return generator(model, proposer, draft_length, rule, on_unsupported).generate(inputs, **kwargs)


def generator(
    model: PreTrainedModel,
    proposer: Proposer | PreTrainedModel | ProposerName | str = "auto",
    draft_length: int | None = None,
    rule: RuleName = COUPLED,
    on_unsupported: OnUnsupported = "plain",
) -> SpeculativeGenerator:
    """Return the generator that `custom_generate` calls of this model with these settings share.

    It is made on first use. Its `report` counts the calls. A model keeps the last 16: pass the same proposer object in
    each call.

    Args:
        model: the target.
        proposer: as for `SpeculativeGenerator`, and so are the arguments after it.

    Example:
        ```python
        model.generate(**inputs, custom_generate="path/to/hub", proposer="ngram")
        print(generator(model, "ngram").report)
        ```
    """
    kept = vars(model).setdefault(KEPT_AT, Generators())
    settings = (proposer, draft_length, rule, on_unsupported)
    found = kept.pop(settings, None)
    if found is None or found.model is not model:  # a shallow copy shares its attributes
        found = SpeculativeGenerator(
            model, proposer, draft_length=draft_length, rule=rule, on_unsupported=on_unsupported
        )
    kept[settings] = found
    while len(kept) > MOST:
        kept.pop(next(iter(kept)), None)
    return found
