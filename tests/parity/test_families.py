"""Every causal-LM family of the installed transformers; `python -m tests.support.families` makes the table of it."""

import pytest

from tests.support import families

# Left padding changes the model's own plain output of a row, ours is what the row gets alone.
OWN_BATCHES_DIFFER = {"git"}


@pytest.mark.slow
@pytest.mark.parametrize("name", families.NAMES)
def test_family_writes_what_plain_decoding_writes(name):
    row = families.try_family(name)
    if row.result == families.NOT_RUN:
        pytest.skip(row.why)
    if "fails" in row.result and families.SAME not in row.result:
        pytest.skip(f"{row.result}: {row.why}")
    if name in OWN_BATCHES_DIFFER:
        assert "equals plain row by row" in row.result
    else:
        assert row.result == families.SAME


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "roberta", "bloom", "mamba", "deepseek_v3"),
        *(pytest.param(name, marks=[] if "across" in name else pytest.mark.slow) for name in families.VARIANTS),
    ],
)
def test_some_families(name):
    """A family of each kind, quickly."""
    test_family_writes_what_plain_decoding_writes(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", families.ENCODERS)
def test_an_encoder_decoder_family_writes_what_plain_decoding_writes(name):
    row = families.try_encoder_decoder(name)
    assert (row.mode, row.result) == ("trees, batches", families.SAME)
