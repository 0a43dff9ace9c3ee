"""Entry point of the `custom_generate` repository in `hub/`, and the generators that its calls share.

`model.generate(..., custom_generate="path-or-hub-id")` calls `generate`. There is one generator per model and settings.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from specdec.engine.generator import SpeculativeGenerator
from specdec.models.compat import REPOSITORY_ARGUMENTS
from specdec.models.fingerprint import Same
from specdec.proposers.base import Proposer
from specdec.utils.choices import COUPLED, OnUnsupported, ProposerName, RuleName
from specdec.utils.recent import Recent

KEPT_AT = "_specdec_generators"
MOST = 16  # generators of a model; a proposer object made for each call would add one each time


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

    def make() -> SpeculativeGenerator:
        return SpeculativeGenerator(
            model, proposer, draft_length=draft_length, rule=rule, on_unsupported=on_unsupported
        )

    kept: Recent[SpeculativeGenerator] = vars(model).setdefault(KEPT_AT, Recent(MOST))
    key = Same(proposer) if isinstance(proposer, (Proposer, PreTrainedModel)) else proposer
    # A shallow copy of the model shares its attributes.
    return kept.get((key, draft_length, rule, on_unsupported), make, lambda found: found.model is model)
