"""Targets whose layers attend to the few tokens that an indexer picks: the text is plain decoding's."""

import functools

import pytest
import torch

from specdec import DraftModelProposer, SpeculativeGenerator
from specdec.models.cache.buffers import Slots
from specdec.models.capability import probe
from specdec.models.compat import CACHE, cache_in
from tests.support import families, tiny


@functools.cache
def target():
    return families.tiny_model("deepseek_v32")


@pytest.mark.parametrize("how", ["garbage", "answer", "itself", "itself tree"])
@pytest.mark.parametrize("lengths", [(9,), (27, 3, 14)], ids=["one row", "ragged"])
def test_the_text_is_plain_decodings(lengths, how):
    """Of texts longer than the 8 tokens that are picked."""
    model, inputs = target(), tiny.prompts(*lengths)
    assert model.config.index_topk == 8
    for kwargs in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
        torch.manual_seed(3)
        plain = model.generate(**inputs, max_new_tokens=16, **kwargs)
        proposer = {
            "garbage": tiny.Garbage(),
            "answer": tiny.Garbage(answer=plain),
            "itself": DraftModelProposer(model),
            "itself tree": DraftModelProposer(model, branching=(2, 2, 1)),
        }[how]
        spec = SpeculativeGenerator(model, proposer, draft_length=4, on_unsupported="error")
        torch.manual_seed(3)
        assert spec.generate(**inputs, max_new_tokens=16, **kwargs).tolist() == plain.tolist()
    assert how == "garbage" or spec.report.num_accepted_tokens


def test_a_second_turn_goes_on_with_what_the_indexer_kept():
    model, texts = target(), []
    spec = SpeculativeGenerator(model, "ngram", draft_length=4, on_unsupported="error")
    for generate in (model.generate, spec.generate):
        first = generate(**tiny.prompts(11), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        text = torch.cat([first.sequences, tiny.prompts(4, seed=1)["input_ids"]], 1)
        cache = cache_in(first)
        second = generate(text, **{CACHE: cache}, max_new_tokens=12, do_sample=False)
        texts.append((second.tolist(), cache.layers[0].indexer_keys.shape[1] - cache.layers[0].keys.shape[2]))
    assert texts[0] == texts[1]


def test_indexed_tokens_left_where_they_were_show(monkeypatch):
    """A planted fault: a commit moves keys and values alone, not what the indexer keeps."""
    monkeypatch.setattr(Slots, "all_buffers", property(lambda self: list(self.buffers.values())))
    assert not probe(target()).trees
