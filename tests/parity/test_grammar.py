"""JSON by grammar, with packages that others use: they are asked about drafts, and forced tokens drafted."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import DraftModelProposer, DynamicTree, NgramProposer, SpeculativeGenerator
from tests.support import tiny

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
REGEX = r'\{"name": "[a-z]{1,4}", "kind": "(tree|chain)", "sizes": \[(1|24)(, (1|24)){1,2}\]\}'


def by_xgrammar(tokenizer, target):
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar has no wheel for this platform")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(TEXT), stop_token_ids=[0])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: hf.LogitsProcessor(grammar)


def by_outlines(tokenizer, target):
    outlines = pytest.importorskip("outlines", reason="outlines has no wheel for this platform")
    from outlines.backends import get_json_schema_logits_processor

    wrapped = outlines.from_transformers(target, tokenizer)
    return lambda: get_json_schema_logits_processor("outlines_core", wrapped, json.dumps(SCHEMA))


def by_xgrammar_in_outlines(tokenizer, target):
    outlines = pytest.importorskip("outlines", reason="outlines has no wheel for this platform")
    from outlines.backends import get_regex_logits_processor

    wrapped = outlines.from_transformers(target, tokenizer)
    return lambda: get_regex_logits_processor("xgrammar", wrapped, REGEX)  # a schema leaves the spaces free


@pytest.fixture(scope="module")
def target():
    return tiny.model("llama", vocab_size=len(TEXT))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(by_xgrammar, id="xgrammar"),
        pytest.param(by_outlines, id="outlines", marks=pytest.mark.slow),  # whose first call compiles for long
        pytest.param(by_xgrammar_in_outlines, id="xgrammar in outlines", marks=pytest.mark.slow),
    ],
)
def new_processor(request, target):
    """Makes a processor for one call: it keeps the place in the grammar that the text has reached."""
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TEXT)}, unk_token="<end>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")
    return request.param(tokenizer, target)


PROPOSERS = {
    "ngram": lambda target: NgramProposer(),
    "itself": lambda target: DraftModelProposer(target),
    "tree of itself": lambda target: DraftModelProposer(target, tree=DynamicTree(depth=3, top_k=3)),
}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["single", "ragged"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_json_by_grammar(new_processor, target, proposer, lengths, sample):
    inputs = tiny.prompts(*lengths, vocab=len(TEXT))
    spec = SpeculativeGenerator(target, PROPOSERS[proposer](target), draft_length=4, on_unsupported="error")
    texts = []
    for generate in (target.generate, spec.generate):
        torch.manual_seed(0)
        out = generate(
            **inputs,
            do_sample=sample,
            max_new_tokens=80,
            eos_token_id=0,
            pad_token_id=0,
            logits_processor=[new_processor()],
        )
        texts.append(["".join(TEXT[token] for token in row) for row in out[:, 9:].tolist()])
    assert texts[0] == texts[1]
    for text in texts[1]:
        assert set(json.loads(text.partition("<end>")[0])) == set(SCHEMA["required"])
    assert spec.report.num_plain_calls == 0
    assert spec.report.tokens_per_round > 1.5
