"""Train a hybrid target of about 10M parameters with an MTP layer, in the architecture of Qwen3.5.

    python benchmarks/hybrid_target.py OUT --text FILES...     # jsonl with prompt and response, or plain text
    python benchmarks/hybrid_target.py OUT                     # on the sources of Python's standard library
    python benchmarks/hybrid_rounds.py OUT                     # compare proposers on it

The target has six gated delta nets and two layers of full attention, and a vocabulary of 4096 tokens. The MTP layer is
trained together with the target, with a loss weight of 0.3 as in DeepSeek-V3 (2412.19437). Run the same command again
to resume. A few hundred steps are enough to measure costs.
"""

from __future__ import annotations

import gzip
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from specdec.heads.mtp.head import MtpLayer

VOCAB, END, WEIGHT = 4096, 0, 0.3
STATE, TEXT = "training.pt", "text.pt"
LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2

app = typer.Typer(add_completion=False)


def config(**changes: object) -> Qwen3_5TextConfig:
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": LAYER_TYPES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": 1,  # as Qwen3.5's configs say; economize asks them, specdec looks for the tensors
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    return Qwen3_5TextConfig(**settings | changes)


def untrained() -> tuple[Qwen3_5ForCausalLM, MtpLayer]:
    """Make the target and its MTP layer, which has full attention."""
    target = Qwen3_5ForCausalLM(config())
    alone = config(num_hidden_layers=1, layer_types=["full_attention"], vocab_size=1, pad_token_id=None)
    H = target.config.hidden_size
    norms = [Qwen3_5RMSNorm(H, eps=target.config.rms_norm_eps) for _ in range(2)]
    return target, MtpLayer(*norms, nn.Linear(2 * H, H, bias=False), Qwen3_5ForCausalLM(alone))


def losses(target: Qwen3_5ForCausalLM, layer: MtpLayer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean losses of the next token and of the one after it, over ids (B, T)."""
    states = target.model(input_ids=ids).last_hidden_state  # (B, T, H)
    embeds = target.get_input_embeddings()(ids[:, 1:])
    ahead = layer.block.model(inputs_embeds=layer.fused(embeds, states[:, :-1])).last_hidden_state
    logits, further = target.lm_head(states[:, :-1]), target.lm_head(ahead[:, :-1])
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), cross_entropy(
        further.flatten(0, 1), ids[:, 2:].flatten()
    )


def texts(files: list[Path]) -> Iterator[str]:
    """Yield the prompt and response of each line of .jsonl files, other files as a whole, or Python's own sources."""
    for file in files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rt", encoding="utf-8", errors="ignore") as lines:
            if ".jsonl" in file.name:
                yield from ("\n".join(str(entry[part]) for part in ("prompt", "response")) for entry in entries(lines))
            else:
                yield lines.read()


def entries(lines: object) -> Iterator[dict[str, object]]:
    yield from (json.loads(line) for line in lines)  # type: ignore[attr-defined]


def prepared(out: Path, files: list[Path]) -> Tensor:
    """Tokenize the text, (T,) int64, with a tokenizer that is trained on it and saved with the target."""
    if not (out / TEXT).exists():
        known = list(texts(files))
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<end>"], initial_alphabet=alphabet)
        tokenizer.train_from_iterator(known, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
        fast.padding_side = "left"
        fast.save_pretrained(out)
        ids = [index for encoded in tokenizer.encode_batch(known) for index in (*encoded.ids, END)]
        torch.save(torch.tensor(ids), out / TEXT)
    return torch.load(out / TEXT)


def keep(out: Path, target: Qwen3_5ForCausalLM, layer: MtpLayer) -> None:
    """Save the target together with the MTP layer's tensors, under the names used by Qwen3.5."""
    target.save_pretrained(out)
    own = {
        "mtp.pre_fc_norm_embedding.weight": layer.embed_norm.weight,
        "mtp.pre_fc_norm_hidden.weight": layer.state_norm.weight,
        "mtp.fc.weight": layer.fuse.weight,
        "mtp.norm.weight": layer.block.model.norm.weight,
    }
    own |= {f"mtp.layers.0.{name}": weight for name, weight in layer.block.model.layers[0].named_parameters()}
    file = out / "model.safetensors"
    tensors = load_file(file) | {name: weight.detach().clone() for name, weight in own.items()}
    save_file(tensors, file, {"format": "pt"})


@app.command(help=__doc__)
def main(
    out: Annotated[Path, typer.Argument(help="Folder for the target. An unfinished run in it is resumed.")],
    text: Annotated[list[Path] | None, typer.Option(help="Training files.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    rows: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 8,
    length: Annotated[int, typer.Option(min=8, help="Tokens per row.")] = 128,
    learning_rate: Annotated[float, typer.Option(min=0)] = 2e-3,
    keep_every: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 25,
) -> None:
    if (out / "config.json").exists() and not (out / TEXT).exists():
        raise typer.BadParameter(f"{out} holds another model, which would be lost: choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    ids = prepared(out, text or [])
    torch.manual_seed(0)
    target, layer = untrained()
    weights = [*target.parameters(), *(w for w in layer.parameters() if w.shape[0] > 1)]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    done = 0
    if (out / STATE).exists():
        state = torch.load(out / STATE)
        done = state["done"]
        target.load_state_dict(state["target"])
        layer.load_state_dict(state["layer"])
        optimizer.load_state_dict(state["optimizer"])
    count = sum(weight.numel() for weight in target.parameters()) / 1e6
    print(f"{count:.1f}M parameters, {len(ids) / 1e6:.2f}M tokens of text, {done} of {steps} steps done", flush=True)
    for step in range(done, steps):
        start = time.perf_counter()
        chosen = torch.Generator().manual_seed(step)
        begins = torch.randint(len(ids) - length - 1, (rows,), generator=chosen)
        batch = torch.stack([ids[begin : begin + length + 1] for begin in begins.tolist()])
        for group in optimizer.param_groups:  # up over 50 steps, down over the last quarter
            group["lr"] = learning_rate * min(1.0, (step + 1) / 50, 4 * (steps - step) / steps)
        now, ahead = losses(target, layer, batch)
        optimizer.zero_grad()
        (now + WEIGHT * ahead).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if (step + 1) % keep_every == 0 or step + 1 == steps:
            seconds = time.perf_counter() - start
            print(f"step {step + 1}: loss {now:.3f}, of the MTP layer {ahead:.3f}, {seconds:.1f} s a step", flush=True)
            state = {"target": target.state_dict(), "layer": layer.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"done": step + 1}, out / "part")
            (out / "part").replace(out / STATE)
            keep(out, target, layer)


if __name__ == "__main__":
    app()
