"""Second turns with the first one's cache: a head drafts as if it had read everything at once."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from specdec import BlockProposer, Eagle3Proposer, HybridProposer, MtpProposer, NgramProposer, SpeculativeGenerator
from specdec.engine.draft_memory import DraftMemory
from specdec.models.compat import CACHE
from specdec.proposers.draft_state import DraftState, Entries
from tests.support import blocks, eagle3, mtp, tiny

ARGUMENTS = {"do_sample": False, "max_new_tokens": 12}
LENGTH = 3


@pytest.fixture(scope="module")
def drafters(llama, tmp_path_factory):
    """A target and a proposer of chains by kind."""
    chain = {"branching": (1,) * LENGTH}
    head, target, _ = eagle3.trained(**eagle3.BRIEFLY)
    windowed = copy.deepcopy(head)
    windowed.config = replace(head.config, draft_window=6)
    with_layers = mtp.target("deepseek_v3", tmp_path_factory.mktemp("mtp"))
    return {
        "EAGLE-3": (target, Eagle3Proposer(head, **chain)),
        # n-grams that are never found: where they are, costs decide who drafts
        "after n-grams": (target, HybridProposer(Eagle3Proposer(head, **chain), NgramProposer(40, 40))),
        "window": (target, Eagle3Proposer(windowed, **chain)),
        "DFlash": (llama, BlockProposer(blocks.head("DFlash"), **chain)),
        "P-EAGLE": (llama, BlockProposer(blocks.parallel(), **chain)),
        "MTP layer": (with_layers, MtpProposer(**chain)),
    }


def say(spec, ids, mask, cache=None):
    """The output and the drafts of a turn."""
    arguments = ARGUMENTS if cache is None else ARGUMENTS | {CACHE: cache}
    with spec.watch() as rounds:
        output = spec.generate(ids, attention_mask=mask, **arguments)
    return output, [(one.row, one.position, list(one.tokens)) for one in rounds]


def ones(ids):
    return torch.ones_like(ids)


KINDS = ("EAGLE-3", "after n-grams", "window", "DFlash", "P-EAGLE", "MTP layer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_second_turn_drafts_as_if_all_was_read_at_once(drafters, kind, rows):
    target, proposer = drafters[kind]
    spec = SpeculativeGenerator(target, proposer, draft_length=LENGTH, on_unsupported="error")
    vocab = target.config.vocab_size
    inputs = tiny.prompts(*(9, 14, 11)[:rows], vocab=vocab)
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], DynamicCache(config=target.config)
    for _ in range(3):
        plain = target.generate(ids, attention_mask=mask, **ARGUMENTS)
        whole, expected = say(spec, ids, mask)
        output, drafts = say(spec, ids, mask, cache)
        assert output.tolist() == whole.tolist() == plain.tolist()
        assert drafts == expected
        more = tiny.prompts(*[5] * rows, vocab=vocab)["input_ids"]
        ids, mask = torch.cat([output, more], 1), torch.cat([mask, ones(output[:, mask.shape[1] :]), ones(more)], 1)


def test_without_its_memory_a_head_drafts_otherwise(drafters, monkeypatch):
    """The tests here compare something."""
    monkeypatch.setattr(DraftMemory, "keep", lambda *args: None)
    with pytest.raises(AssertionError):
        test_a_second_turn_drafts_as_if_all_was_read_at_once(drafters, "EAGLE-3", 1)


def recalled(spec):
    """The states that calls begin with from now on."""
    memory, found = spec._sessions.own.memory, []
    recall = memory.recall
    memory.recall = lambda *args: found.append(recall(*args)) or found[-1]
    return found


def test_a_turn_of_new_tokens_alone(drafters):
    """The mask covers the cached tokens, which the call does not get: those that wait are left out."""
    target, proposer = drafters["EAGLE-3"]
    spec = SpeculativeGenerator(target, proposer, draft_length=LENGTH, on_unsupported="error")
    ids, cache = tiny.prompts(9)["input_ids"], DynamicCache(config=target.config)
    whole, states = say(spec, ids, ones(ids), cache)[0], recalled(spec)
    for turn in range(3):
        whole = torch.cat([whole, tiny.prompts(5, seed=turn)["input_ids"]], 1)
        had = cache.get_seq_length()
        expected, _ = say(spec, whole, ones(whole))
        assert say(spec, whole[:, had:], ones(whole), cache)[0].tolist() == expected[:, had:].tolist()
        whole = expected
    known = [state.known[0] for state in states if state is not None]
    assert len(known) == 3
    assert had - 3 * (LENGTH + 1) <= known[-1] <= had


def test_rows_that_end_early_remember_their_own_text(drafters):
    """After its end a row is filled with padding, whose states are not the text's."""
    target, proposer = drafters["EAGLE-3"]
    spec = SpeculativeGenerator(target, proposer, draft_length=LENGTH, on_unsupported="error")
    inputs, cache = tiny.prompts(9, 14), DynamicCache(config=target.config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    plain = target.generate(ids, attention_mask=mask, **ARGUMENTS)[0, ids.shape[1] :].tolist()
    end = next(token for i, token in enumerate(plain) if i >= 3 and token not in plain[:i])
    ended = {"eos_token_id": end, "pad_token_id": 0}
    output = spec.generate(ids, attention_mask=mask, **ARGUMENTS, **ended, **{CACHE: cache})
    new = output[:, ids.shape[1] :]
    real = (new == end).cumsum(1) - (new == end).long() == 0
    assert not real.all()
    more = tiny.prompts(5, 5)["input_ids"]
    ids, mask = torch.cat([output, more], 1), torch.cat([mask, real.long(), ones(more)], 1)
    states = recalled(spec)
    assert say(spec, ids, mask, cache)[0].tolist() == target.generate(ids, attention_mask=mask, **ARGUMENTS).tolist()
    state, cached = states[0], mask[:, : output.shape[1] - 1].sum(1).tolist()
    assert 9 <= state.lengths[0] <= state.known[0] <= cached[0]


def test_an_interrupted_turn_leaves_the_memory(drafters):
    target, proposer = drafters["EAGLE-3"]
    spec = SpeculativeGenerator(target, proposer, draft_length=LENGTH, on_unsupported="error")
    ids, cache = tiny.prompts(9)["input_ids"], DynamicCache(config=target.config)
    whole = torch.cat([say(spec, ids, ones(ids), cache)[0], tiny.prompts(5)["input_ids"]], 1)

    def interrupt(scores, *args, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spec.generate(whole, attention_mask=ones(whole), stopping_criteria=[interrupt], **ARGUMENTS, **{CACHE: cache})
    _, expected = say(spec, whole, ones(whole))
    assert say(spec, whole, ones(whole), cache)[1] == expected


@pytest.mark.parametrize("kind", ["EAGLE-3", "window"])
@pytest.mark.parametrize("cut", [1, 4, 15])
def test_a_cropped_cache_keeps_the_beginning(drafters, cut, kind):
    target, proposer = drafters[kind]
    spec = SpeculativeGenerator(target, proposer, draft_length=LENGTH, on_unsupported="error")
    ids, cache = tiny.prompts(12)["input_ids"], DynamicCache(config=target.config)
    output, _ = say(spec, ids, ones(ids), cache)
    cache.crop(-cut)
    have = cache.get_seq_length()
    edited = torch.cat([output[:, :have], tiny.prompts(6, seed=3)["input_ids"]], 1)
    taken = recalled(spec)
    plain = target.generate(edited, attention_mask=ones(edited), **ARGUMENTS)
    assert say(spec, edited, ones(edited), cache)[0].tolist() == plain.tolist()
    known = taken[0].known[0]
    assert have - LENGTH - 2 <= known <= have or (kind == "window" and cut > 1 and known == 0)
    assert taken[0].lengths[0] <= have - 1


def test_an_edited_text_keeps_what_is_the_same(drafters):
    """The cache is wrong for this text, as in plain `generate()`, and drafts do not matter."""
    target, proposer = drafters["EAGLE-3"]
    spec = SpeculativeGenerator(target, proposer, draft_length=LENGTH)
    ids, cache = tiny.prompts(12)["input_ids"], DynamicCache(config=target.config)
    output, _ = say(spec, ids, ones(ids), cache)
    other = copy.deepcopy(cache)
    edited = torch.cat([output, tiny.prompts(3)["input_ids"]], 1)
    edited[0, 5] = (edited[0, 5] + 1) % tiny.VOCAB
    plain = target.generate(edited, attention_mask=ones(edited), **ARGUMENTS, **{CACHE: other})
    assert say(spec, edited, ones(edited), cache)[0].tolist() == plain.tolist()


def test_a_memory_goes_with_its_cache(drafters):
    target, proposer = drafters["EAGLE-3"]
    spec = SpeculativeGenerator(target, proposer, draft_length=LENGTH)
    ids = tiny.prompts(9)["input_ids"]
    kept = spec._sessions.own.memory._kept
    say(spec, ids, ones(ids))
    assert not kept  # nobody sees the call's cache
    output = spec.generate(ids, return_dict_in_generate=True, **ARGUMENTS)
    cache = DynamicCache(config=target.config)
    say(spec, ids, ones(ids), cache)
    assert len(kept) == 2
    assert kept[cache].state.known == [cache.get_seq_length()]
    assert [len(text) for text in kept[cache].texts] == [cache.get_seq_length() + 1]
    del output, cache
    gc.collect()
    assert not kept


def test_another_number_of_rows_has_no_memory(drafters):
    target, proposer = drafters["EAGLE-3"]
    spec = SpeculativeGenerator(target, proposer, draft_length=LENGTH)
    ids, cache = tiny.prompts(9, 9)["input_ids"], DynamicCache(config=target.config)
    output, _ = say(spec, ids, ones(ids), cache)
    cache.batch_select_indices(torch.tensor([1]))
    ids = torch.cat([output[1:], tiny.prompts(3)["input_ids"]], 1)
    plain = target.generate(ids, attention_mask=ones(ids), **ARGUMENTS)
    assert say(spec, ids, ones(ids), cache)[0].tolist() == plain.tolist()


def state_of(length, waiting):
    return DraftState({}, [length], [torch.arange(length, length + waiting)[:, None]])


@pytest.mark.parametrize(
    ("length", "waiting", "cached", "same", "left"),
    [
        pytest.param(5, 2, 7, 8, (5, [5, 6]), id="unchanged"),
        pytest.param(5, 2, 6, 8, (5, [5]), id="a token of those that wait was cut"),
        pytest.param(5, 2, 5, 5, (4, []), id="an entry's next token was cut"),
        pytest.param(5, 2, 3, 3, (2, []), id="cut far back"),
        pytest.param(5, 2, 9, 9, (5, []), id="others have extended the cache"),
        pytest.param(5, 2, 7, 3, (2, []), id="another text"),
        pytest.param(5, 2, 7, 0, (0, []), id="quite another text"),
        pytest.param(0, 4, 4, 4, (0, [0, 1, 2, 3]), id="nothing was read yet"),
        pytest.param(0, 4, 2, 4, (0, [0, 1]), id="nothing was read yet, and the cache was cut"),
    ],
)
def test_what_still_holds(length, waiting, cached, same, left):
    found = state_of(length, waiting).up_to([cached], [same])
    assert (found.lengths[0], found.waiting[0][:, 0].tolist()) == left


def test_a_window_has_nothing_to_go_back_to():
    entries = Entries(torch.zeros(2, 1, 5, 1), torch.zeros(2, 1, 5, 1), window=3)
    state = DraftState({0: entries}, [5, 3], [torch.zeros(2, 1), torch.zeros(2, 1)])
    assert state.up_to([7, 5], [8, 6]).known == [7, 5]
    assert state.up_to([9, 9], [9, 9]).known == [5, 3]
    assert state.up_to([5, 3], [5, 3]).known == [0, 2]
