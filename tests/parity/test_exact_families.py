"""Half precision with `exact=True`: every causal-LM family either writes plain decoding's text, or runs as it."""

import copy
import warnings

import pytest
import torch

from specdec import SpeculativeGenerator
from tests.support import families
from tests.support.tiny import Garbage, prompts

EXACT = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2", "qwen3_5_text", "lfm2")
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "nemotron_h", "granitemoehybrid")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, (11, 4, 8)) for name in families.NAMES if name not in families.VARIANTS]
    + [(name, (9,)) for name in EXACT + EXPERTS],
)
def test_family_writes_the_same_text_in_bfloat16(name, lengths):
    try:
        model = copy.deepcopy(families.tiny_model(name)).to(torch.bfloat16)
        inputs = prompts(*lengths, vocab=60)
        plain = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
    except Exception as error:
        pytest.skip(f"plain decoding fails in bfloat16: {type(error).__name__}")
    for proposer in (Garbage(), Garbage(answer=plain)):
        spec = SpeculativeGenerator(model, proposer, draft_length=4, exact=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = spec.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert torch.equal(text, plain), spec.report
    if name in EXACT or (name in EXPERTS and len(lengths) == 1):
        assert spec.report.num_exact_calls == 1
