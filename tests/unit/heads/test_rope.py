"""RoPE whose frequencies follow the largest position of a pass: the sweep of families has more of it."""

import copy

import pytest

from specdec import SpeculativeGenerator
from tests.support import families, tiny

LIMIT = 20
LENGTHS = {
    "up to the limit": ((9,), 11, True),
    "one beyond": ((9,), 12, False),
    "across": ((9,), 30, False),
    "at the limit": ((20,), 9, False),
    "behind": ((21,), 9, True),
    "ragged, up to the limit": ((9, 4, 2), 11, True),
    "ragged, across": ((9, 4, 2), 12, False),
    "ragged, behind": ((21, 4), 9, True),
}


@pytest.fixture(scope="module")
def phi3():
    return families.tiny_model("phi3, longrope, across")


@pytest.mark.parametrize("draft_length", [0, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_longrope(phi3, lengths, draft_length):
    """Phi-3 reads the whole text again where it crosses the limit."""
    prompts, new, speculated = LENGTHS[lengths]
    inputs = tiny.prompts(*prompts)
    plain = phi3.generate(**inputs, do_sample=False, max_new_tokens=new)
    spec = SpeculativeGenerator(phi3, tiny.Garbage(answer=plain), draft_length=draft_length)
    with tiny.specdec_warnings() as messages:
        assert spec.generate(**inputs, do_sample=False, max_new_tokens=new).tolist() == plain.tolist()
    assert spec.report.num_plain_calls == (not speculated)
    assert [f"changes its frequencies after {LIMIT}" in message for message in messages] == [True] * (not speculated)


def test_chunks_of_a_prompt_that_is_longer_than_the_limit(phi3):
    """The first ones have other frequencies than the whole."""
    arguments = {**tiny.prompts(25), "do_sample": False, "max_new_tokens": 9, "prefill_chunk_size": 7}
    spec = SpeculativeGenerator(copy.deepcopy(phi3), "ngram")
    with tiny.specdec_warnings():
        assert spec.generate(**arguments).tolist() == phi3.generate(**arguments).tolist()
    assert spec.report.num_plain_calls == 1
