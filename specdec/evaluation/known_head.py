"""`KnownHead`: the head that `registry` lists for a target, to be measured with a proposer that is not it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from specdec.evaluation.methods import Method, speculative
from specdec.heads import registry
from specdec.proposers.base import Proposer
from specdec.proposers.factory import PATIENCE, as_proposer
from specdec.utils.choices import WITH_NGRAMS


@dataclass(frozen=True)
class KnownHead:
    """The head that the registry lists for a target.

    Attributes:
        method: n-grams together with it; None if it is not measured.
        note: why it is not measured; empty if it is, or if there is none.
    """

    method: Method | None = None
    note: str = ""

    @classmethod
    def of(cls, target: PreTrainedModel, given: Proposer | PreTrainedModel | str) -> KnownHead:
        """Find the target's head. A head of this project is downloaded, one on the hub only if it was given by name.

        Args:
            target: the target.
            given: the proposer that is measured anyway. There is nothing to add if it drafts with this head.
        """
        entry = registry.known(target)
        if entry is None:
            return cls()
        name, words = entry.kind, f"{registry.KIND_NAMES[entry.kind]} {entry.head}"
        if not entry.files and registry.where(entry) is None:
            note = f"the {words} is known for this target, but not downloaded: measure it by the proposer {name!r}"
            return cls() if _is_it(given, entry.kind, entry.head) else cls(note=note)
        try:
            source = registry.find(target, entry.kind, PATIENCE)
            if _is_it(given, entry.kind, source):
                return cls()
            head = as_proposer(f"{WITH_NGRAMS}{name}:{source}", target)
            head.check(target)
        except (ValueError, OSError) as error:
            return cls(note=f"the {words} is known for this target, but was not measured: {error}")
        return cls(speculative(f"n-grams and the known head {entry.head}", target, head, code=f'"{WITH_NGRAMS}{name}"'))


def _is_it(given: Proposer | PreTrainedModel | str, kind: str, source: str) -> bool:
    """Return whether a proposer's name stands for this head."""
    return isinstance(given, str) and given.removeprefix(WITH_NGRAMS) in ("auto", kind, f"{kind}:{source}")
