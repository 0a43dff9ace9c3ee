"""`ExactLinear`: a linear layer that gives each draft node the bits of plain decoding's own product.

Matrix products over several rows may add in another order than those over one. Whether they do depends on the library,
the processor, the shape, the dtype and the number of threads, so it is found out by comparing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from specdec.models.exact.draft_pass import DraftPass
from specdec.models.views import shallow_copy_as
from specdec.utils.timing import clock, lose

Kernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x (B, n, in), weight and bias: (B, n, out)

COMPARED = 2**18  # numbers that have to agree. In bfloat16 another order changes about one in 3,000
CANCELLING = 2**13  # numbers that have to agree first whose terms cancel. Another order changes most of them
LARGEST = 2**26  # weights for which others are made up, whose terms cancel
BLOCK = 2**21  # weights per block of outputs, which stay in the processor's cache
GROUPS = (32, 16, 8, 4, 2)  # nodes multiplied together where more have other bits: with AMX from 33 on, say
TRIES = 3  # measurements per kernel; the fastest counts


class ExactLinear(nn.Linear):
    """A linear layer for passes over draft nodes. Shares the parameters of the layer that it is made from."""

    draft: DraftPass

    @classmethod
    def of(cls, layer: nn.Linear, draft: DraftPass) -> ExactLinear:
        """The exact form of a layer."""
        made = shallow_copy_as(layer, cls)
        made.draft = draft
        return made

    def forward(self, x: Tensor) -> Tensor:
        rows, nodes = self.draft.batch_size, self.draft.nodes
        if nodes == 1 or (x.dim() > 2 and x.shape[1] == 1):  # of a module that runs each node alone
            return super().forward(x)
        if x.dim() == 2 and rows == 1:  # some of the nodes, as experts get them
            nodes = len(x)
        elif x.dim() > 3 or x.shape[:-1].numel() != rows * nodes:
            self.draft.unknown_layers.add(self)
            return super().forward(x)
        if nodes < 2:
            return super().forward(x)
        multiply = exact_kernel(self.weight, self.bias, rows, nodes)
        return multiply(x.reshape(rows, nodes, -1), self.weight, self.bias).view(*x.shape[:-1], -1)


def together(x: Tensor, weight: Tensor, bias: Tensor | None, size: int = 1) -> Tensor:
    """One product over all nodes. Fewer than `size` are padded.

    It is a product of two matrices: with three dimensions torch chooses between two ways by the strides of `x`.
    """
    rows, nodes, _ = x.shape
    padded = x if nodes >= size else pad(x, (0, 0, 0, size - nodes))
    return linear(padded.flatten(0, 1), weight, bias).unflatten(0, (rows, -1))[:, :nodes]


def in_groups(x: Tensor, weight: Tensor, bias: Tensor | None, size: int = 1, group: int = 1) -> Tensor:
    """A product for each `group` of nodes. The last group is padded to as many."""
    return torch.cat([together(part.contiguous(), weight, bias, max(size, group)) for part in x.split(group, 1)], 1)


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None, size: int = 1) -> Tensor:
    """A product for each node, with the shape of plain decoding's, whose single rows may be padded to `size`."""
    return in_groups(x, weight, bias, size)


def in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product for each node and block of outputs. The processor reads each block from memory once."""
    height = max(16, BLOCK // weight.shape[1])
    biases = [None] * len(weight) if bias is None else bias.split(height)
    nodes = [node.contiguous() for node in x.split(1, 1)]
    result = x.new_empty(*x.shape[:2], len(weight))
    for start, part, part_bias in zip(range(0, len(weight), height), weight.split(height), biases, strict=False):
        for i, node in enumerate(nodes):
            result[:, i : i + 1, start : start + len(part)] = linear(node, part, part_bias)
    return result


_kernels: dict[tuple[object, ...], Kernel] = {}  # found in this process


def exact_kernel(weight: Tensor, bias: Tensor | None, batch_size: int, nodes: int, size: int = 1) -> Kernel:
    """The fastest exact kernel for a number of nodes per row, where plain decoding pads a single row to `size`."""
    layout = weight.dtype, weight.shape, weight.stride(), bias is None
    kind = *layout, batch_size, nodes, size, torch.get_num_threads()
    if kind not in _kernels:
        start = clock()
        _kernels[kind] = _found(weight, bias, batch_size, nodes, size)
        lose(clock() - start)  # without what the search for a group has lost before
    return _kernels[kind]


def is_whole(kernel: Kernel) -> bool:
    """Return whether a kernel multiplies all nodes together."""
    return isinstance(kernel, partial) and kernel.func is together


@torch.no_grad()
def _found(weight: Tensor, bias: Tensor | None, batch_size: int, nodes: int, size: int) -> Kernel:
    whole, singly = partial(together, size=size), partial(one_by_one, size=size)
    equal: dict[Kernel, bool] = {whole: True, in_blocks: size == 1 and weight.numel() > BLOCK}
    shape = batch_size, nodes, weight.shape[1]
    generator = torch.Generator().manual_seed(0)

    def compare(weight: Tensor, bias: Tensor | None, made: Callable[[], Tensor], numbers: int) -> None:
        """Compare products of `made()` (B, n, in) until so many numbers have agreed."""
        enough = min(nodes, max(2, numbers // (batch_size * len(weight))))  # nodes to compare of each product
        while numbers > 0 and any(equal.values()):
            x = made()
            chosen = torch.randperm(nodes, generator=generator)[:enough].to(weight.device)
            right = singly(x[:, chosen], weight, bias)
            for each, so_far in equal.items():
                equal[each] = so_far and torch.equal(each(x, weight, bias)[:, chosen], right)
            numbers -= right.numel()

    def together_is_exact(nodes: int) -> bool:
        return is_whole(exact_kernel(weight, bias, batch_size, nodes, size))

    def random() -> Tensor:
        return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

    numbers = COMPARED
    if weight.numel() <= LARGEST and weight.is_contiguous():
        cancelling, source = _cancelling(weight, generator)
        numbers, nothing = CANCELLING, None if bias is None else torch.zeros_like(bias)
        compare(cancelling, nothing, lambda: random()[..., source], CANCELLING)
    compare(weight, bias, random, numbers)
    x = random()
    if equal[whole]:
        return whole
    group = next((group for group in GROUPS if group < nodes and together_is_exact(group)), 1)
    candidates: list[Kernel] = [partial(in_groups, size=size, group=group)]
    if equal[in_blocks]:
        candidates.append(in_blocks)
    return min(candidates, key=lambda each: _seconds(each, x, weight, bias))


def _cancelling(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights of the same shape that come in pairs of opposite columns, and the column of which each is a copy.

    Products with inputs that are equal in the columns of a pair are sums of terms that cancel: only rounding is left.
    """
    outputs, inputs = weight.shape
    order = torch.randperm(inputs, generator=generator)
    first, second = order[: inputs // 2], order[inputs // 2 : inputs // 2 * 2]
    made = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    made[:, second] = -made[:, first]
    made[:, order[inputs // 2 * 2 :]] = 0
    source = torch.arange(inputs)
    source[second] = first
    return made.to(weight.device, weight.dtype), source.to(weight.device)


def _seconds(each: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    taken = []
    for _ in range(TRIES):
        start = perf_counter()
        each(x, weight, bias)
        taken.append(perf_counter() - start)
    return min(taken)
