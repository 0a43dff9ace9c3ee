"""Compare the fused kernels with the modules they replace: largest difference, and microseconds inside a CUDA graph.

    python -m benchmarks.regression.kernels                                  # on a GPU, in bfloat16
    TRITON_INTERPRET=1 python -m benchmarks.regression.kernels --small       # on a CPU, in float16, without times

A case that fails is reported, and the others are run. The last case of each shape is a whole decoder layer.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness.table import table
from specdec.models.compat import CACHE
from specdec.models.fused_layers import with_fused_layers
from specdec.models.static_forward import SlottedCache

CALLS, REPLAYS = 20, 20  # calls in a graph, and its replays
SHAPES: dict[str, tuple[str, dict[str, int]]] = {  # by name: model type, and sizes
    "Llama-3.1-8B": ("llama", {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}),
    "Qwen3-4B": ("qwen3", {"hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128}),
    "Gemma-3-4B": (
        "gemma3_text",
        {"hidden_size": 2560, "intermediate_size": 10240, "head_dim": 256}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
    ),
}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 80, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
Function = Callable[[], tuple[Any, ...]]
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    nodes: Annotated[str, typer.Option(help="Nodes per pass, separated by commas.")] = "1,8,64",
    slots: Annotated[int, typer.Option(min=64, help="Slots of the cache's buffers.")] = 512,
    small: Annotated[bool, typer.Option(help="Small shapes, on the CPU through Triton's interpreter.")] = False,
) -> None:
    logging.basicConfig(level=logging.INFO)  # why a module keeps its own code
    started, lines, recognised = time.perf_counter(), [], []
    device = torch.device("cpu" if small else "cuda")
    dtype = torch.float16 if small else torch.bfloat16  # the interpreter does not round to bfloat16
    counts = (1, 3) if small else tuple(map(int, nodes.split(",")))
    with torch.no_grad():
        for name, (kind, sizes) in SHAPES.items():
            try:
                start = time.perf_counter()
                model = one_layer(kind, SMALL if small else HEADS | sizes, device, dtype)
                fused = with_fused_layers(model)
                seconds = time.perf_counter() - start
                kinds = sorted(
                    {type(module).__name__ for module in fused.modules() if "Fused" in type(module).__name__}
                )
                recognised.append(f"{name}: {', '.join(kinds) or 'nothing'} in {seconds:.1f} s")
            except Exception as error:
                recognised.append(f"{name}: {type(error).__name__}: {error}")
                continue
            for n in counts:
                try:
                    for case, ours, right in cases(model, fused, n, 64 if small else slots):
                        lines.append([name, case, str(n), *measured(ours, right, timed=not small)])
                        print(" ".join(lines[-1]), flush=True)
                except Exception as error:
                    lines.append([name, "all others", str(n), f"{type(error).__name__}: {error}", "", "", ""])
    head = ["shape", "kernel", "n", "largest difference", "differing", "us, kernel", "us, module"]
    print("\n".join(["", *recognised, "", table(head, lines)]))
    print(f"\n{time.perf_counter() - started:.0f} s")


def one_layer(kind: str, sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Any:
    """A random model of one layer, whose norms have random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=256, num_hidden_layers=1, **sizes)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def cases(model: Any, fused: Any, n: int, slots: int) -> Iterator[tuple[str, Function, Function]]:
    """Yield the name of each case, with the fused and the original function."""
    from specdec.models.fused_modules import RotaryWrite
    from specdec.models.kernels.activation import gated

    config, plain, ours = model.config, model.model.layers[0], fused.model.layers[0]
    attention, dim = plain.self_attn, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    weight = model.get_input_embeddings().weight
    new = partial(torch.randn, device=weight.device, dtype=weight.dtype)
    update, residual = new(1, n, config.hidden_size), new(1, n, config.hidden_size)
    yield "norm", lambda: (ours.input_layernorm(update),), lambda: (plain.input_layernorm(update),)
    for inner, outer in (ours.layout.attention, (ours.layout.mlp, None)):
        if (inner, outer) != (None, None):
            yield (
                " ".join([*(["norm"] if inner else []), "sum", *(["norm"] if outer else [])]),
                partial(ours._added, update, residual, inner, outer),
                partial(_sum, update, residual, getattr(plain, inner or "", None), getattr(plain, outer or "", None)),
            )
    gate, up = new(1, n, config.intermediate_size), new(1, n, config.intermediate_size)
    yield (
        "activation",
        lambda: (gated(gate, up, ours.mlp.activation),),
        lambda: (plain.mlp.act_fn(gate) * up,),
    )
    positions = torch.arange(n, device=weight.device)[None] + 17
    rotation = model.model.rotary_emb(
        update, positions, *([config.layer_types[0]] if "gemma" in config.model_type else [])
    )
    where = torch.randperm(slots, device=weight.device)[None, :n]
    mine, theirs = (
        SlottedCache(
            {0: (torch.zeros_like(new(1, kv_heads, slots, dim)), torch.zeros_like(new(1, kv_heads, slots, dim)), where)}
        )
        for _ in range(2)
    )
    query, key, value = (
        new(1, n, count * dim).view(1, n, count, dim).transpose(1, 2) for count in (heads, kv_heads, kv_heads)
    )
    apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    names = ("q_norm", "k_norm") if ours.self_attn.folded else ()
    norms = [getattr(ours.self_attn, name) for name in names] or [None, None]

    def written() -> tuple[Tensor, ...]:
        write = RotaryWrite(mine, rotation, (norms[0], norms[1]), apply)
        rotated, same = write.rotate(query, key)
        return rotated, *write.update(same, value, 0)

    def written_by_module() -> tuple[Tensor, ...]:
        states = [getattr(attention, name)(given) for name, given in zip(names, (query, key), strict=False)]
        rotated, turned = apply(*(states or (query, key)), *rotation)
        return rotated, *theirs.update(turned, value, 0)

    yield "rotary, cache", written, written_by_module
    mask = torch.ones(1, 1, n, slots, dtype=torch.bool, device=weight.device)
    given = {"attention_mask": mask, "position_ids": positions, "position_embeddings": rotation}
    yield (
        "decoder layer",
        lambda: (ours(update, **given, **{CACHE: mine}),),
        lambda: (plain(update, **given, **{CACHE: theirs}),),
    )


def _sum(update: Tensor, residual: Tensor, inner: Any, outer: Any) -> tuple[Tensor, Any]:
    total = residual + (update if inner is None else inner(update))
    return total, None if outer is None else outer(total)


def measured(ours: Function, right: Function, timed: bool) -> list[str]:
    """Largest difference, share of differing values, and microseconds of both; the error of a case that fails."""
    try:
        pairs = [(a.float(), b.float()) for a, b in zip(ours(), right(), strict=True) if a is not None]
        largest = max(float((a - b).abs().max()) for a, b in pairs)
        differing = sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
        taken = [f"{microseconds(function):.1f}" for function in (ours, right)] if timed else ["-", "-"]
        return [f"{largest:.2g}", f"{differing:.2%}", *taken]
    except Exception as error:
        return [f"{type(error).__name__}: {error}".splitlines()[0][:200], "", "", ""]


def microseconds(function: Function) -> float:
    """Time of a call inside a CUDA graph, without launches; the smallest of several replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return min(times)


if __name__ == "__main__":
    app()
