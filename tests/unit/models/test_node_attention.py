"""Kernels whose bits for a row depend on that row alone, in Triton's interpreter or on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from specdec.models.exact.draft_pass import in_order
from specdec.models.kernels.few_rows import DOWN, OUT, QKV, TILES, joined_linear
from specdec.models.kernels.launch import available
from specdec.models.kernels.node_attention import PART, node_attention
from specdec.sampling.draft_tree import DraftTree
from tests.support import interpreted, tiny

DEVICE = torch.device(tiny.DEVICE)
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="Triton's kernels do not run here")
DTYPES = [torch.float16, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32]
PARENTS = [-1, 0, 0, 1, 2, 2, 4, 3]
if DEVICE.type == "cpu":
    interpreted.mend()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize(("use", "dtype"), [(QKV, DTYPES[0]), (OUT, DTYPES[1]), (DOWN, DTYPES[0])])
def test_a_rows_product_has_the_same_bits_among_any_rows(use, dtype):
    weight, bias, x = random(70, 600, dtype=dtype), random(70, dtype=dtype), random(64, 600, dtype=dtype)
    (right,) = joined_linear(x, [weight], [bias], TILES[use])
    for rows in (1, 2, 5, 8, 17, 64):
        for start in {0, 3, 64 - rows}:
            (part,) = joined_linear(x[start : start + rows], [weight], [bias], TILES[use])
            assert torch.equal(part, right[start : start + rows]), (rows, start)
    (others,) = joined_linear(torch.cat([random(9, 600, dtype=dtype), x[:1]]), [weight], [bias], TILES[use])
    assert torch.equal(others[-1], right[0])


def rows_of(lengths, slots, n, KV, groups, D, dtype):
    query = random(len(lengths), n, KV * groups, D, dtype=dtype).transpose(1, 2)
    return query, random(len(lengths), KV, slots, D, dtype=dtype), random(len(lengths), KV, slots, D, dtype=dtype)


def visible(draft, lengths, slots):
    """(B, n, S) bool and positions (B, S) of trees written after rows of these lengths."""
    B, n = draft.tokens.shape
    mask = torch.zeros(B, n, slots, dtype=torch.bool, device=DEVICE)
    positions = torch.arange(slots, device=DEVICE).repeat(B, 1)
    for row, length in enumerate(lengths):
        mask[row, :, :length] = True
        mask[row, :, length : length + n] = draft.ancestors[row]
        positions[row, length : length + n] = length + draft.depth[row]
    return mask, positions


@pytest.mark.parametrize(
    ("KV", "groups", "D", "dtype"), [(2, 3, 64, DTYPES[0]), (1, 1, 80, DTYPES[1]), (1, 18, 16, DTYPES[0])]
)
def test_a_node_of_a_tree_has_the_bits_of_its_path_as_a_plain_text(KV, groups, D, dtype):
    """Alone, in a row of its own length, in a contiguous cache of another size; and close to float64."""
    lengths, n, slots = (2 * PART - 3, 7), len(PARENTS), 2 * PART + 40
    draft = DraftTree(torch.zeros(2, n, dtype=torch.long), torch.tensor(PARENTS).expand(2, n))
    query, keys, values = rows_of(lengths, slots, n, KV, groups, D, dtype)
    mask, positions = visible(draft, lengths, slots)
    ours = node_attention(query, keys, values, *in_order(mask, positions), D**-0.5)
    for row, length in enumerate(lengths):
        for node in range(n):
            path = [int(each) + length for each in draft.ancestors[row, node].nonzero()[:, 0]]
            text = [*range(length), *path]
            states = [part[row : row + 1, :, text].contiguous() for part in (keys, values)]
            order = torch.arange(len(text), dtype=torch.int32, device=DEVICE)[None, None]
            count = torch.tensor([[len(text)]], dtype=torch.int32, device=DEVICE)
            asked = query[row : row + 1, :, node : node + 1]
            assert torch.equal(node_attention(asked, *states, order, count, D**-0.5)[0, 0], ours[row, node])
            right = torch.nn.functional.scaled_dot_product_attention(
                *(part.double() for part in (asked, *states)), enable_gqa=True
            )
            torch.testing.assert_close(ours[row, node].double(), right[0, :, 0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_and_the_order_of_slots_do_not_matter(dtype):
    query, keys, values = rows_of((0,), 50, 1, 2, 2, 32, dtype)
    mask = torch.ones(1, 1, 50, dtype=torch.bool, device=DEVICE)
    mask[..., :9] = False
    right = node_attention(query, keys, values, *in_order(mask, torch.arange(50, device=DEVICE)[None]), 0.2)
    shuffled = torch.randperm(50, device=DEVICE)
    seen = in_order(mask[..., shuffled], shuffled[None])
    assert torch.equal(node_attention(query, keys[:, :, shuffled], values[:, :, shuffled], *seen, 0.2), right)
    whole = torch.ones(1, 1, 41, dtype=torch.bool, device=DEVICE), torch.arange(41, device=DEVICE)[None]
    assert torch.equal(node_attention(query, keys[:, :, 9:], values[:, :, 9:], *in_order(*whole), 0.2), right)
