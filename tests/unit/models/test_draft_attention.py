"""Attention of draft nodes: the kernel against float64, packed queries against transformers, the view of a model."""

import os

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec.models import draft_attention as module
from specdec.models import encoder, int8_linear
from specdec.models.draft_attention import attend, draft_attention, with_draft_attention
from tests.support import encoded, interpreted, tiny

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(interpreted.MISSING or not INTERPRETED, reason="triton's interpreter")
pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="compares values, which needs no device")
if INTERPRETED and not interpreted.MISSING:
    interpreted.mend()


def tree_mask(lengths, n, slots):
    """(B, n, S): each node sees the tokens of its row, itself and the ancestors of a random parent."""
    mask = torch.zeros(len(lengths), n, slots, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, :, :length] = True
        for node in range(n):
            if node:
                parent = int(torch.randint(node, ()))
                mask[row, node] = mask[row, parent]
            mask[row, node, length + node] = True
    return mask


def window_mask(lengths, n, slots, window=90):
    """(B, n, S): the last tokens of a window whose slots begin anew after the last one."""
    slot, mask = torch.arange(slots), torch.zeros(len(lengths), n, slots, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for node in range(n):
            last = length + node
            position = last - (last - slot) % slots
            mask[row, node] = (position >= 0) & (position > last - window)
    return mask


def states(B, KV, groups, n, D, slots, dtype=torch.float16, Dv=None):
    """Query with the strides of a projection, keys and values."""
    query = torch.randn(B, n, KV * groups, D).to(dtype).transpose(1, 2)
    return query, torch.randn(B, KV, slots, D).to(dtype), torch.randn(B, KV, slots, Dv or D).to(dtype)


def right(query, keys, values, mask):
    """Attention in float64, (B, n, H, Dv); zeros for nodes that see nothing."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (states.double().nan_to_num(0.0).repeat_interleave(groups, 1) for states in (keys, values))
    scores = (query.double() @ keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ values).transpose(1, 2)


def by_kernel(query, keys, values, mask, **options):
    from specdec.models.kernels.tree_attention import tree_attention, visible_range

    return tree_attention(query, keys, values, mask, *visible_range(mask), query.shape[-1] ** -0.5, **options)


def poisoned(keys, values, mask):
    """The same with NaN in all slots before the first and after the last that a row sees."""
    keys, values = keys.clone(), values.clone()
    for row, seen in enumerate(mask.any(1)):
        slots = seen.nonzero()[:, 0]
        for buffer in (keys, values):
            buffer[row, :, : slots[0]] = torch.nan
            buffer[row, :, slots[-1] + 1 :] = torch.nan
    return keys, values


def close(ours, expected, tolerance=2e-3):
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=tolerance)


# The kernel


@needs_triton
@pytest.mark.parametrize(
    ("KV", "groups", "n", "D", "lengths", "slots"),
    [
        pytest.param(2, 4, 8, 64, (150, 31), 200, id="ragged rows, 4 heads per key head"),
        pytest.param(1, 1, 1, 128, (300,), 333, id="one token, one head"),
        pytest.param(1, 3, 7, 96, (100, 5), 190, id="3 heads per key head, 96 dims"),
        pytest.param(1, 8, 16, 80, (70,), 128, id="8 heads per key head: two tiles of queries, 80 dims"),
        pytest.param(1, 1, 64, 64, (129,), 200, id="64 nodes"),
        pytest.param(1, 2, 3, 256, (40,), 70, id="256 dims"),
        pytest.param(2, 2, 2, 16, (3, 9), 512, id="all in the first block, 16 dims"),
    ],
)
def test_the_kernel_on_trees(KV, groups, n, D, lengths, slots):
    query, keys, values = states(len(lengths), KV, groups, n, D, slots)
    mask = tree_mask(lengths, n, slots)
    close(by_kernel(query, *poisoned(keys, values, mask), mask), right(query, keys, values, mask))


@needs_triton
@pytest.mark.parametrize("lengths", [(60, 95), (130, 250)], ids=["not full", "wrapped"])
def test_the_kernel_in_windows(lengths):
    query, keys, values = states(2, 1, 2, 4, 64, 120)
    mask = window_mask(lengths, 4, 120)
    close(by_kernel(query, keys, values, mask), right(query, keys, values, mask))


@needs_triton
def test_slots_outside_of_the_visible_ones_are_not_read():
    """Before the first as well: the window has left them."""
    query, keys, values = states(2, 1, 2, 3, 64, 400)
    mask = window_mask((300, 170), 3, 400)
    assert not mask[:, :, :70].any()
    close(by_kernel(query, *poisoned(keys, values, mask), mask), right(query, keys, values, mask))


@needs_triton
def test_the_kernel_in_float32():
    query, keys, values = states(1, 2, 2, 3, 32, 80, torch.float32)
    mask = tree_mask((60,), 3, 80)
    close(by_kernel(query, keys, values, mask), right(query, keys, values, mask), 1e-6)


@needs_triton
@pytest.mark.parametrize("parts", [1, 2, 16, 64])
def test_any_number_of_parts(parts):
    query, keys, values = states(2, 1, 2, 3, 64, 300)
    mask = tree_mask((290, 20), 3, 300)
    close(by_kernel(query, keys, values, mask, parts=parts), right(query, keys, values, mask))


@needs_triton
def test_values_of_other_dims_and_buffers_that_are_slices():
    query, keys, values = states(2, 4, 2, 3, 48, 300, Dv=32)
    mask = tree_mask((100,), 3, 160)
    keys, values = keys[:, ::2, :160], values[:, ::2, :160]
    query = query[:, :4]
    expected = right(query, keys, values, mask.expand(2, -1, -1))
    close(by_kernel(query, keys, values, mask.expand(2, -1, -1)), expected)


@needs_triton
def test_nodes_that_see_nothing_get_zeros():
    query, keys, values = states(2, 1, 2, 3, 64, 100)
    mask = tree_mask((50, 50), 3, 100)
    mask[0, 1] = False
    mask[1] = False
    ours = by_kernel(query, keys, values, mask)
    close(ours, right(query, keys, values, mask))
    assert not ours[0, 1].any()
    assert not ours[1].any()


@needs_triton
@pytest.mark.parametrize("slots", [5, 100, 9000])
def test_the_range_of_visible_slots(slots):
    from specdec.models.kernels.tree_attention import visible_range

    mask = torch.zeros(3, 2, slots, dtype=torch.bool)
    mask[0, 0, 1], mask[0, 1, 3], mask[1, :, slots - 1] = True, True, True
    first, end = visible_range(mask)
    assert first.tolist() == [1, slots - 1, 0]
    assert end.tolist() == [4, slots, 0]


def test_tiles_of_queries_hold_all_of_them_or_64():
    if interpreted.MISSING:
        pytest.skip("no triton")
    from specdec.models.kernels.tree_attention import tiles_for

    assert [tiles_for(queries, 128, 2).queries for queries in (1, 16, 17, 64, 500)] == [16, 16, 32, 64, 64]


# Which of the two is used


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Take the CPU for a GPU: buffers of any size go to the kernel, once it was checked."""
    monkeypatch.setattr(module, "compiles_for", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "TRITON_FROM", 1)
    monkeypatch.setattr(module, "_right", {})


@needs_triton
def test_a_kernel_that_was_checked_is_used(as_on_a_gpu, monkeypatch):
    query, keys, values = states(1, 2, 2, 3, 32, 80)
    mask = tree_mask((60,), 3, 80)
    with torch.no_grad():
        ours = attend(query, keys, values, mask)
        assert list(module._right.values()) == [True]
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", None)  # not needed any more
        assert torch.equal(attend(query, keys, values, mask), ours)
    close(ours, right(query, keys, values, mask))


@needs_triton
def test_a_kernel_whose_results_are_wrong_is_not_used(as_on_a_gpu, monkeypatch):
    from specdec.models.kernels import tree_attention as kernels

    true_kernel = kernels.tree_attention
    monkeypatch.setattr(kernels, "tree_attention", lambda *args, **kwargs: 1.5 * true_kernel(*args, **kwargs))
    query, keys, values = states(1, 2, 2, 3, 32, 80)
    mask = tree_mask((60,), 3, 80)
    with torch.no_grad():
        close(attend(query, keys, values, mask), right(query, keys, values, mask))
    assert list(module._right.values()) == [False]


@pytest.mark.parametrize("capturing", [False, True])
def test_a_kernel_is_not_checked_during_a_capture(capturing, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(module, "_is_right", lambda *kind: False)
    query, keys, values = states(1, 2, 2, 3, 32, 80)
    with torch.no_grad():
        attend(query, keys, values, tree_mask((60,), 3, 80))
    assert len(module._right) == (0 if capturing else 1)


# Packed queries


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("n", [1, 5, module.MOST_NODES + 1])
def test_packed_queries_give_what_transformers_does(n, groups):
    query, keys, values = states(2, 2, groups, n, 16, 300, torch.float32)
    attention = nn.Module()
    attention.num_key_value_groups = groups
    mask = tree_mask((20, 37), n, 300)
    expected = sdpa_attention_forward(attention, query, keys, values, mask[:, None])[0]
    for given in (mask, mask[:, None]):
        ours = attend(query, keys, values, given)
        torch.testing.assert_close(ours, expected)
        assert ours.is_contiguous()
    torch.testing.assert_close(draft_attention(attention, query, keys, values, mask[:, None])[0], expected)


def test_what_follows_from_a_mask_is_computed_once_for_each_mask(monkeypatch):
    made, added = [], module._added
    monkeypatch.setattr(module, "_added", lambda mask, *args: made.append(mask.shape) or added(mask, *args))
    given = states(1, 2, 2, 3, 16, 40, torch.float32)
    masks = [tree_mask((length,), 3, 40)[:, None] for length in (20, 30)]
    for mask in masks:
        for _ in range(3):
            close(attend(*given, mask), right(*given, mask[:, 0]), 1e-5)
    assert len(made) == 2


@pytest.mark.parametrize(
    "unusual",
    [{"dropout": 0.1}, {"position_bias": torch.zeros(1, 4, 3, 40)}, {"s_aux": torch.zeros(4)}, {"mask": None}],
    ids=lambda unusual: next(iter(unusual)),
)
def test_unusual_arguments_are_left_to_transformers(unusual, monkeypatch):
    passed = []
    monkeypatch.setattr(module, "sdpa_attention_forward", lambda *args, **kwargs: passed.append((args, kwargs)))
    monkeypatch.setattr(module, "attend", None)
    query, keys, values = states(1, 2, 2, 3, 16, 40)
    mask = unusual.pop("mask", tree_mask((20,), 3, 40)[:, None])
    draft_attention(nn.Module(), query, keys, values, mask, scaling=0.5, **unusual)
    assert passed[0][0][4] is mask
    assert passed[0][0][6] == 0.5


# The view


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "mixtral", "gpt_neox", "phi"])
def test_the_view_gives_what_the_model_does(name, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "attend", lambda *args: calls.append(args[3]) or attend(*args))
    target = tiny.model(name)
    fast = with_draft_attention(target)
    ids = torch.randint(1, tiny.VOCAB, (2, 5))
    mask = tree_mask((0, 0), 5, 5)[:, None]
    kinds = set(getattr(target.config, "layer_types", None) or ())
    given = dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask
    with torch.no_grad():
        expected = target(ids, attention_mask=given, use_cache=False).logits
        ours = fast(ids, attention_mask=given, use_cache=False).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == target.config.num_hidden_layers
    assert all(seen is mask for seen in calls)  # so that what follows from it is computed once
    assert {module.config._attn_implementation for module in target.modules() if hasattr(module, "config")} == {"sdpa"}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_pass_with_the_models_own_mask(name):
    target, ids = tiny.model(name), torch.randint(1, tiny.VOCAB, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(with_draft_attention(target)(ids).logits, target(ids).logits, rtol=1e-4, atol=1e-4)


def test_other_attention_functions_are_kept():
    target = tiny.on_host("llama")
    target.set_attn_implementation("eager")
    assert with_draft_attention(target) is target


def test_checks_do_not_depend_on_the_default_device():
    cpu, translator = torch.device("cpu"), encoded.model("t5")
    with torch.device("meta"):
        right = module._is_right(torch.float16, 16, 16, 1, cpu)
        assert int8_linear._gpu_kernels_work.__wrapped__(cpu) in (True, False)
        assert encoder.stand_in(translator, 2).states[0].device == cpu
    assert right == module._is_right(torch.float16, 16, 16, 1, cpu)
