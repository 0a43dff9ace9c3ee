"""`DraftModelProposer` beside its parity (test_parity.py): vocabularies, cheaper views, bad input."""

import copy
import functools
import warnings

import pytest
import torch
from accelerate import dispatch_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerFast

from specdec import (
    DraftModelProposer,
    DynamicTree,
    EarlyExitProposer,
    HybridProposer,
    SpeculativeGenerator,
    TranslatedDraftProposer,
)
from specdec.models import int8_linear
from specdec.models.int8_linear import Int8Alone, Int8Linear, by_int8, int8_pays, with_int8_linears, with_trimmed_head
from tests.support import tiny


def save_with_tokenizer(model, folder, words):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def test_tokenizers_that_differ_are_found_out(tmp_path, llama):
    words = [f"w{i}" for i in range(llama.config.vocab_size)]
    target = type(llama).from_pretrained(save_with_tokenizer(llama, tmp_path / "target", words))
    other = save_with_tokenizer(llama, tmp_path / "other", [*words[:5], *reversed(words[5:])])
    with pytest.raises(ValueError, match="differ, at token id 5 first"):
        SpeculativeGenerator(target, DraftModelProposer(str(other)))
    assert isinstance(SpeculativeGenerator(target, f"draft:{other}").proposer, TranslatedDraftProposer)
    same = save_with_tokenizer(llama, tmp_path / "same", words)
    out = SpeculativeGenerator(target, f"draft:{same}").generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3)
    assert out.shape == (1, 6)
    both = SpeculativeGenerator(target, f"ngram+draft:{same}").proposer
    assert isinstance(both, HybridProposer)
    assert isinstance(both.other, DraftModelProposer)


def test_a_view_shares_the_weights_and_leaves_the_model_alone(llama):
    head = llama.get_output_embeddings()
    view = with_trimmed_head(llama, torch.arange(7))
    assert llama.get_output_embeddings() is head
    assert view.get_output_embeddings().weight.shape[0] == 7
    ours, theirs = dict(llama.named_parameters()), dict(with_int8_linears(llama).named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    assert all(type(module) is not Int8Linear for module in llama.modules())
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    torch.testing.assert_close(view(ids).logits, llama(ids).logits[..., :7])


def dropping():
    """The target's weights, with so much dropout in train mode that hardly a draft is right."""
    return copy.deepcopy(tiny.model("llama", attention_dropout=0.5)).train()


def with_hooks(model):
    return dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def with_a_compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    return model


def partly_in_eval_mode(model):
    model.training = False
    return model


IN_TRAIN_MODE = {
    "as it is": lambda model: model,
    "in part": partly_in_eval_mode,
    "with hooks": with_hooks,
    "compiled forward": with_a_compiled_forward,
}


@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["single", "ragged"])
@pytest.mark.parametrize("kind", IN_TRAIN_MODE)
@pytest.mark.parametrize("asked", ["made for it", "by the call"])
def test_a_draft_model_in_train_mode_drafts_without_dropout(asked, kind, lengths):
    """It draws none of the call's random numbers, and stays in the mode that it was in."""
    target, inputs, draft = tiny.model("llama"), tiny.prompts(*lengths), IN_TRAIN_MODE[kind](dropping())
    modes = [module.training for module in draft.modules()]
    spec = SpeculativeGenerator(target, draft if asked == "made for it" else "ngram", draft_length=3)
    more = {} if asked == "made for it" else {"assistant_model": draft}
    for arguments in ({"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(1)
        plain = target.generate(**inputs, **arguments, max_new_tokens=16).tolist()
        state = torch.get_rng_state()
        torch.manual_seed(1)
        assert spec.generate(**inputs, **arguments, **more, max_new_tokens=16).tolist() == plain
        assert torch.equal(torch.get_rng_state(), state)
        assert spec.last_report.num_accepted_tokens == spec.last_report.num_draft_tokens > 9
    assert [module.training for module in draft.modules()] == modes


def test_a_draft_of_another_class_in_train_mode_is_tried_out_as_it_drafts():
    target, draft = tiny.model("llama"), copy.deepcopy(tiny.model("qwen3", attention_dropout=0.5)).train()
    spec = SpeculativeGenerator(target, draft, draft_length=3)
    inputs = tiny.prompts(9, 4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=8).tolist()
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=8).tolist() == plain
    assert spec.report.num_draft_tokens > 0


def test_a_target_in_train_mode_drafts_for_itself():
    """Without dropout it is the same in either mode, and it stays in its own."""
    target, inputs = copy.deepcopy(tiny.model("llama")).train(), tiny.prompts(9, 4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12).tolist()
    for proposer in (target, EarlyExitProposer(1)):
        spec = SpeculativeGenerator(target, proposer, draft_length=3)
        assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain
        assert spec.report.num_plain_calls == 0
        assert spec.report.num_accepted_tokens > 0
        assert all(module.training for module in target.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "out", "into"), [(1, 32, 64), (3, 33, 96), (5, 7, 32), (9, 130, 160)], ids=str)
def test_int8_weights_give_nearly_the_same(dtype, rows, out, into):
    torch.manual_seed(0)
    linear = nn.Linear(into, out).to(dtype)
    x = torch.randn(rows, into).to(dtype)
    error = (by_int8(x, Int8Linear.of(linear)) - linear(x)).float().abs().max()
    assert 0 < error < 0.05
    assert by_int8(x, Int8Linear.of(linear)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_integers_alone_multiply_in_three_ways(dtype, bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(96, 33, bias=bias).to(dtype), torch.randn(9, 96).to(dtype)
    alone = Int8Alone.of(linear)
    assert alone.weight.device.type == "meta"
    for kernel in alone.kernels:
        torch.testing.assert_close(kernel(x, alone), by_int8(x, Int8Linear.of(linear)), atol=0.02, rtol=0.02)
    with torch.no_grad():
        assert alone(x[None]).shape == (1, 9, 33)


def test_integers_multiply_without_torchs_internal_product(monkeypatch):
    torch.manual_seed(0)
    linear, x = nn.Linear(96, 33), torch.randn(9, 96)
    expected = by_int8(x, Int8Linear.of(linear))
    monkeypatch.setattr(int8_linear, "INT8_PRODUCT", False)
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    for layer in (Int8Linear.of(linear), Int8Alone.of(linear)):
        with torch.no_grad():
            torch.testing.assert_close(layer(x), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("vocab", [None, 20])
def test_a_draft_that_was_loaded_here_is_not_held_twice(llama, tmp_path, monkeypatch, vocab):
    """Of its linear layers the integers are kept, and the weights where the embedding has them too."""
    monkeypatch.setattr("specdec.proposers.draft_models.draft_model.int8_pays", lambda model: True)
    llama.save_pretrained(tmp_path)
    proposer = DraftModelProposer(str(tmp_path), vocab=vocab)
    layers = [module for module in proposer.model.modules() if isinstance(module, Int8Linear)]
    assert layers
    gone = [module for module in layers if module.weight.device.type == "meta"]
    assert all(module.weight is llama_head(proposer.model).weight for module in layers if module not in gone)
    assert len(gone) >= 6 * llama.config.num_hidden_layers
    spec = SpeculativeGenerator(llama, proposer, draft_length=3)
    inputs = tiny.prompts(40)
    arguments = {"max_new_tokens": 12, "do_sample": False}
    assert spec.generate(**inputs, **arguments).tolist() == llama.generate(**inputs, **arguments).tolist()
    assert spec.report.num_accepted_tokens


def llama_head(model):
    return model.get_output_embeddings()


def test_rows_that_are_no_whole_vectors_stay_as_they_are():
    view = with_int8_linears(nn.Sequential(nn.Linear(64, 7), nn.Linear(7, 64)).bfloat16())
    assert [type(layer) for layer in view] == [Int8Linear, nn.Linear]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_drafts_on_cpus_are_read_as_int8(dtype):
    with torch.device("meta"):
        large = nn.Linear(4000, 3000, dtype=dtype)
    assert not int8_pays(large)  # not on a CPU
    assert int8_pays(large.to_empty(device="cpu"))
    assert not int8_pays(nn.Linear(40, 30, dtype=dtype))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"vocab": 0}, "positive number of tokens", id="no tokens"),
        pytest.param(
            {"vocab": torch.tensor([1, 10_000])}, "ids of the draft model, 0 to", id="ids beyond the vocabulary"
        ),
        pytest.param({"branching": ()}, "at least one child", id="empty tree"),
        pytest.param({"branching": (2, 0)}, "at least one child", id="childless depth"),
        pytest.param({"branching": "32"}, "at least one child", id="no numbers"),
        pytest.param({"int8": True}, "needs a bfloat16 or float32 model", id="int8 in float32"),
    ],
)
def test_bad_arguments(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        DraftModelProposer(llama, **arguments)


def test_end_tokens_stay_in_a_trimmed_vocabulary():
    model = copy.deepcopy(tiny.model("llama"))  # the others share the original
    model.generation_config.eos_token_id = [40, 41]
    proposer = DraftModelProposer(model, vocab=8)
    assert proposer.vocab.tolist() == [*range(8), 40, 41]


SHAPES = {"chain": {}, "fixed tree": {"branching": (3, 2, 1)}, "dynamic tree": {"tree": DynamicTree(top_k=3)}}


@pytest.mark.parametrize("lengths", [(9,), (9, 1, 5)], ids=["single", "ragged"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("less", ["token ids", "positions"])
def test_a_draft_model_that_knows_less_than_the_target(less, shape, lengths):
    """Text with tokens that the draft model has no embedding for, or longer than it has positions for."""
    target = tiny.model("llama")
    draft = (
        tiny.model("llama", seed=1, num_hidden_layers=1, vocab_size=40)
        if less == "token ids"
        else tiny.model("gpt2", n_positions=16)
    )
    inputs = tiny.prompts(*lengths)
    assert int(inputs["input_ids"].max()) >= 40
    spec = SpeculativeGenerator(target, DraftModelProposer(draft, **SHAPES[shape]), draft_length=4)
    arguments = {"do_sample": False, "max_new_tokens": 20}
    assert torch.equal(spec.generate(**inputs, **arguments), target.generate(**inputs, **arguments))
    assert spec.report.num_draft_tokens > 0


@functools.cache
def bloom(seed=0):
    shape = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": tiny.PAD}
    config = AutoConfig.for_model("bloom", **shape, bos_token_id=1, eos_token_id=None)
    return tiny.randomised(config, seed).to(tiny.DEVICE)


@pytest.mark.parametrize("of_its_kind", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_model_that_makes_its_own_masks(shape, of_its_kind):
    """It drafts chains of one row."""
    target, draft = bloom() if of_its_kind else tiny.model("llama"), bloom(seed=1)
    arguments = {"do_sample": False, "max_new_tokens": 20}
    for proposer in (DraftModelProposer(draft, **SHAPES[shape]), HybridProposer(DraftModelProposer(draft))):
        spec = SpeculativeGenerator(target, proposer, draft_length=4)
        for lengths in ((9,), (9, 5)):
            inputs = tiny.prompts(*lengths)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = spec.generate(**inputs, **arguments)
            assert torch.equal(found, target.generate(**inputs, **arguments))
            said = [str(each.message) for each in caught if "drafts nothing in a batch" in str(each.message)]
            assert bool(said) == (len(lengths) > 1 and not of_its_kind)  # such a target runs plain
            if len(lengths) == 1:
                assert spec.last_report.num_draft_tokens > 0


def test_a_draft_model_that_cannot_be_run():
    target, draft = tiny.model("llama"), copy.deepcopy(bloom())
    draft.forward = lambda input_ids, past_key_values=None: None
    with pytest.raises(ValueError, match="BloomForCausalLM cannot draft: its forward pass"):
        SpeculativeGenerator(target, draft)


def test_models_without_an_lm_head(llama):
    for arguments in ((llama.model, "ngram"), (llama, llama.model)):
        with pytest.raises(ValueError, match="has no LM head.* load the model with AutoModelForCausalLM"):
            SpeculativeGenerator(*arguments)


def test_a_prompt_longer_than_the_draft_model_has_positions_for(llama):
    spec = SpeculativeGenerator(llama, tiny.model("gpt2", n_positions=16), draft_length=4)
    inputs = tiny.prompts(30, 5)
    arguments = {"do_sample": False, "max_new_tokens": 20}
    assert torch.equal(spec.generate(**inputs, **arguments), llama.generate(**inputs, **arguments))
    assert spec.report.num_draft_tokens > 0  # of the shorter row


def test_a_draft_that_is_converted_later(llama, single):
    """Its trimmed LM head is made anew, and so would be its 8-bit weights."""
    draft = copy.deepcopy(tiny.model("llama", seed=1))
    spec = SpeculativeGenerator(llama, DraftModelProposer(draft, vocab=40), draft_length=3, on_unsupported="error")
    expected = llama.generate(**single, do_sample=False, max_new_tokens=12)
    for convert in (draft.float, draft.bfloat16, draft.float):
        convert()
        assert torch.equal(spec.generate(**single, do_sample=False, max_new_tokens=12), expected)
    assert spec.report.num_draft_tokens
