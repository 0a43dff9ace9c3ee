"""Passes over drafts as graphs have them, without a compiler: padded to few sizes, whole buffers, slots."""

from functools import partialmethod

from specdec import SpeculativeGenerator
from specdec.models import static_forward


def switch_on(patch) -> None:
    """Every generator captures its passes, which stay the functions they are. patch: a `MonkeyPatch`."""
    patch.setattr(static_forward, "with_compiled_layers", lambda model, backend: model)
    patch.setattr(SpeculativeGenerator, "__init__", partialmethod(SpeculativeGenerator.__init__, compile=True))
