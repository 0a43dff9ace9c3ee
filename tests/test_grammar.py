"""JSON by grammar, with a package that others use: its processor follows the text, and is still speculated on."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import DraftModelProposer, DynamicTree, NgramProposer, SpeculativeGenerator
from tests import tiny

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar has no wheel for this platform")
hf = pytest.importorskip("xgrammar.contrib.hf")

TEXT = ["<end>", *(chr(code) for code in range(33, 127)), " "]  # one character a token; 0 ends
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["tree", "chain"]},
        "sizes": {"type": "array", "items": {"enum": [1, 24]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammar():
    """A compiled grammar, and how to read its texts."""
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TEXT)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(TEXT), stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)


PROPOSERS = {
    "ngram": lambda target: NgramProposer(),
    "itself": lambda target: DraftModelProposer(target),
    "tree of itself": lambda target: DraftModelProposer(target, tree=DynamicTree(depth=3, top_k=3)),
}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_json_by_grammar(grammar, proposer, sample):
    target = tiny.model("llama", vocab_size=len(TEXT))
    inputs = tiny.prompts(9, vocab=len(TEXT))
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=4, on_unsupported="error")
    texts = []
    for generate in (target.generate, spec.generate):
        torch.manual_seed(0)
        processor = hf.LogitsProcessor(grammar)
        out = generate(
            **inputs, do_sample=sample, max_new_tokens=80, eos_token_id=0, pad_token_id=0, logits_processor=[processor]
        )
        texts.append("".join(TEXT[token] for token in out[0, 9:].tolist()))
    assert texts[0] == texts[1]
    written = json.loads(texts[1].removesuffix("<end>"))
    assert set(written) == set(SCHEMA["required"])
    assert spec.report.num_plain_calls == 0
    assert spec.report.num_rounds < len(texts[1])
