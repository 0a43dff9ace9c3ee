"""Measure memory with long prompts: the peak while generating, and the cache by kind of layer, against plain decoding.

    python -m benchmarks.regression.long_prompts --target full --target windows --lengths 1024,8192,32768
    python -m benchmarks.regression.long_prompts --target PATH --lengths 1024,4096 --proposer ngram --proposer eagle3

`full` and `windows` are small random models, with full attention in all layers, or with windows of 512 tokens in five
of six (as in Gemma 3). Each figure is measured in its own process, as the increase during generation. Each row of a
batch is an eighth shorter than the previous one.
"""

from __future__ import annotations

import gc
import json
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from benchmarks.harness import machine
from benchmarks.harness.memory import reset_peak, run_apart, status
from benchmarks.harness.script import Dtype, Proposers
from benchmarks.harness.table import table
from specdec import Context, DraftTree, Proposer, SpeculativeGenerator
from specdec.models.capability import capability
from specdec.models.compat import CACHE
from specdec.models.runner import ModelRunner

PLAIN, NOTHING = "plain", "specdec"  # the latter with a proposer that keeps nothing
DRAFT = 8
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 512, "num_hidden_layers": 6, "head_dim": 64, "max_position_embeddings": 2**17}
SHAPES = {"full": ("qwen3", {}), "windows": ("gemma3_text", {"sliding_window": 512})}

app = typer.Typer(add_completion=False)


class LastAgain(Proposer):
    """A proposer that repeats the last token."""

    def propose(self, context: Context) -> DraftTree:
        return context.chain([[root] * DRAFT for root in context.root.tolist()])


@app.command(help=__doc__)
def main(
    target: Annotated[list[str], typer.Option(help="Target: full, windows, or a path or hub id.")],
    lengths: Annotated[
        str, typer.Option(help="Lengths of prompts in tokens, separated by commas.")
    ] = "1024,4096,16384,32768",
    rows: Annotated[str, typer.Option(help="Rows per batch.")] = "1",
    proposer: Proposers = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 32,
    dtype: Dtype = "auto",
    without_plain: Annotated[
        bool, typer.Option(help="Skip plain decoding, if it needs more memory than available.")
    ] = False,
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    if one is not None:
        method, length, batch = json.loads(one)
        print(json.dumps(generating(load(target[0], dtype), method, length, batch, max_new_tokens)))
        return
    methods = [*([] if without_plain else [PLAIN]), NOTHING, *(proposer or [])]
    print(f"{machine.cpu_model()}, {torch.get_num_threads()} threads, {max_new_tokens} new tokens.\n")
    for name in target:
        print(f"## {name}\n\nMiB at most while generating, over the weights and what else was held before:\n")
        found = []
        for batch in map(int, rows.split(",")):
            for length in map(int, lengths.split(",")):
                same = ["--target", name, "--dtype", dtype, "--max-new-tokens", str(max_new_tokens)]
                each = {method: json.dumps([method, length, batch]) for method in methods}
                most = {method: run_apart(__spec__.name, *same, "--one", one) for method, one in each.items()}
                reference = most.get(PLAIN)
                cells = [f"{most[m]:.0f}" + (f" ({most[m] / reference:.2f}x)" if reference else "") for m in methods]
                found.append([str(batch), str(length), *cells])
        print(table(["rows", "prompt", *methods], found))
        print("\nThe cache after the prompt and a draft, bytes per token of the prompt, by kind of layer:\n")
        model = load(name, dtype)
        rows_of_cache = [row for length in lengths.split(",") for row in cached(model, int(length))]
        print(table(["layers", "prompt", PLAIN, NOTHING], rows_of_cache) + "\n")


def generating(model: PreTrainedModel, method: str, length: int, batch: int, new: int) -> float:
    """Peak increase of memory during `generate()`, in MiB."""
    generate: Any = model.generate
    if method != PLAIN:
        made = LastAgain() if method == NOTHING else method
        generate = SpeculativeGenerator(model, made, draft_length=DRAFT, on_unsupported="error").generate
    arguments = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    generate(**prompts(model, 40, batch), **arguments | {"max_new_tokens": 4, "min_new_tokens": 4})
    inputs = prompts(model, length, batch)
    gc.collect()
    before = reset_peak()
    generate(**inputs, **arguments)
    return status("VmHWM") - before


@torch.no_grad()
def cached(model: PreTrainedModel, length: int) -> list[list[str]]:
    """For each kind of layer: its name, the prompt length, and bytes per token with plain decoding and specdec."""
    config = model.config.get_text_config(decoder=True)
    runner = ModelRunner(model, capability(model).masks)
    ids = prompts(model, length, 1)["input_ids"]
    runner.start(1)
    runner.extend(ids, [0])
    seen = torch.ones(DRAFT, DRAFT).tril().bool()[None]
    runner.grow(ids[:, :DRAFT], torch.arange(DRAFT)[None], seen, chain=True)
    plain = DynamicCache(config=config)
    model(ids, **{CACHE: plain}, logits_to_keep=1)
    out = []
    for span, ours in runner.cache.nbytes.items():
        layers = [layer for layer in plain.layers if getattr(layer, "sliding_window", None) == span.window]
        theirs = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        kind = "full" if span.window is None else f"the last {span.window}"
        out.append([f"{len(layers)} x {kind}", str(length), f"{theirs / length:.0f}", f"{ours / length:.0f}"])
    return out


def load(name: str, dtype: str) -> PreTrainedModel:
    logging.set_verbosity_error()
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    kind, more = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL, **more)
    number_format = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    return AutoModelForCausalLM.from_config(config).to(number_format).eval()


def prompts(model: PreTrainedModel, length: int, batch: int) -> dict[str, torch.Tensor]:
    """Random prompts, each row an eighth shorter than the previous one, padded on the left."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(1, vocab, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : row * length // 8] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


if __name__ == "__main__":
    app()
