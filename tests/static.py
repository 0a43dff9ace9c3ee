"""Passes over drafts as graphs have them, without a compiler: padded to few sizes, whole buffers, slots."""

from functools import partialmethod

from specdec import SpeculativeGenerator, graphs


def switch_on(patch) -> None:
    """Every generator captures its passes, which stay the functions they are. patch: a `MonkeyPatch`."""
    patch.setattr(graphs, "_compiled", lambda: graphs._pass)
    patch.setattr(SpeculativeGenerator, "__init__", partialmethod(SpeculativeGenerator.__init__, compile=True))
