"""Marks for tests of what specdec does on newer releases of transformers only; docs/releases.md lists them."""

import pytest
import transformers

from specdec.utils.releases import release


def since(version: str, what: str = "runs as plain decoding") -> pytest.MarkDecorator:
    """Skips a test on older releases; what: happens there instead."""
    older = release(transformers.__version__) < release(version)
    return pytest.mark.skipif(older, reason=f"{what} before transformers {version}")
