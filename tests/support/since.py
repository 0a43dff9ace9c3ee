"""Marks for tests of what specdec does on newer releases of transformers only; docs/releases.md lists them."""

import pytest
import transformers

from specdec.utils.releases import release


def since(version: str) -> pytest.MarkDecorator:
    """Skips a test on older releases, where the call runs as plain decoding."""
    older = release(transformers.__version__) < release(version)
    return pytest.mark.skipif(older, reason=f"runs as plain decoding before transformers {version}")
