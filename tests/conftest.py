"""Fixtures around the tiny models and prompts of `tests.tiny`."""

import pytest
import torch

from tests import tiny


@pytest.fixture(scope="session")
def models():
    """`models(name, seed=0, **config)`: a tiny random model, made once."""
    return tiny.model


@pytest.fixture(scope="session")
def llama(models):
    return models("llama")


@pytest.fixture(scope="session")
def draft(models):
    """Another, smaller model with llama's vocabulary."""
    return models("llama", seed=1, num_hidden_layers=1)


@pytest.fixture(scope="session")
def single():
    return tiny.prompts(9)


@pytest.fixture(scope="session")
def ragged():
    """Three rows, left-padded, one of a single token."""
    return tiny.prompts(9, 1, 5)


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)
