"""`Settings`: settings of a `SpeculativeGenerator` that a call may change."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from specdec.engine.lenient import Lenient
from specdec.utils.choices import COUPLED, OnUnsupported, RuleName, check_choice

# Arguments of `generate()` for one row, and its tokens alone, whatever the model's generation config asks for.
ONE_ROW = {"num_return_sequences": 1, "num_beams": 1, "return_dict_in_generate": False, "use_cache": True}
# The same where a text is measured, which ends at its end token or length.
MEASURED: dict[str, Any] = (
    ONE_ROW
    | {"cache_implementation": None, "output_attentions": False, "stop_strings": None}
    | dict.fromkeys(("penalty_alpha", "token_healing", "dola_layers", "num_beam_groups"))
)


class Settings(TypedDict, total=False):
    """Settings by name, as `SpeculativeGenerator` documents them."""

    draft_length: int | None
    rule: RuleName | Lenient
    on_unsupported: OnUnsupported
    exact: bool


def checked_settings(
    *, draft_length: int | None, rule: RuleName | Lenient, on_unsupported: OnUnsupported, exact: bool
) -> Settings:
    """Return the settings.

    Raises:
        ValueError: a wrong value, or settings that exclude each other.
    """
    is_int = isinstance(draft_length, int) and not isinstance(draft_length, bool)
    if draft_length is not None and (not is_int or draft_length < 0):
        raise ValueError(f"draft_length must be None or an int of at least 0, got {draft_length!r}")
    if not isinstance(rule, Lenient):
        check_choice("rule", rule, RuleName)
    check_choice("on_unsupported", on_unsupported, OnUnsupported)
    check_choice("exact", exact, Literal[True, False])
    if exact and rule != COUPLED:
        raise ValueError(f'exact=True needs rule="coupled", the rule that keeps the text; got rule={rule!r}')
    return {"draft_length": draft_length, "rule": rule, "on_unsupported": on_unsupported, "exact": exact}
