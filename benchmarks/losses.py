"""What each training loss makes of a head, all else being equal: on the same batches, measured on held-out rows.

    python benchmarks/losses.py --target PATH --head PATH --states OUT/states

OUT is the folder of a `specdec train --cache-states`, whose texts the head should not have been trained on.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from table import table
from torch import Tensor
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments

from specdec.eagle3 import Eagle3Head, Eagle3Trainer, load
from specdec.eagle3.fresh import embedding_of
from specdec.eagle3.objective import LOSSES
from specdec.eagle3.readout import Readout
from specdec.eagle3.states import StateDataset, collate
from specdec.eagle3.unroll import unroll
from specdec.taps import decoder_layers

STEPS = 3

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    head: Annotated[str, typer.Option(help="Path or hub id of the EAGLE-3 head to go on from.")],
    states: Annotated[Path, typer.Option(help="The target's states over texts of its own.", exists=True)],
    updates: Annotated[int, typer.Option(min=1)] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of 512 tokens per update.")] = 4,
    learning_rate: Annotated[float, typer.Option()] = 1e-4,
    held_out: Annotated[int, typer.Option(min=1, help="Rows that are only measured on.")] = 40,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
    rows = StateDataset(states, 512)
    taps = load(head).config.taps(len(decoder_layers(model)))
    if rows.taps != taps:
        raise typer.BadParameter(f"the states are of layers {rows.taps}, the head reads {taps}", param_hint="--states")
    if held_out >= len(rows):
        raise typer.BadParameter(f"there are {len(rows)} rows: none is left to train on", param_hint="--held-out")
    training, measured = Subset(rows, range(len(rows) - held_out)), [rows[-i] for i in range(1, held_out + 1)]
    lines = [line("as it was", load(head), model, measured)]
    for name in LOSSES:
        trained = load(head)
        with TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder,
                max_steps=updates,
                per_device_train_batch_size=batch_size,
                learning_rate=learning_rate,
                warmup_steps=updates // 5,
                lr_scheduler_type="cosine",
                adam_beta2=0.95,
                max_grad_norm=0.5,
                bf16=True,
                use_cpu=True,
                save_strategy="no",
                report_to=[],
                seed=0,
            )
            Eagle3Trainer(
                trained, model, args, steps=STEPS, loss=name, state_weight=0.0, train_dataset=training
            ).train()
        lines.append(line(f"{name}, {updates} updates", trained, model, measured))
    columns = [f"{what}, step {step + 1}" for what in ("accuracy", "acceptance") for step in range(STEPS)]
    print(table(["loss", *columns, "length at T = 0", "at T = 1"], lines))


def line(name: str, head: Eagle3Head, model: PreTrainedModel, rows: list[dict[str, Tensor]]) -> list[str]:
    """Lengths are those of chains of `STEPS` if steps were independent."""
    found = measure(head.float().eval(), model, rows)  # (2, STEPS)
    lengths = 1 + found.cumprod(-1).sum(-1)
    return [name, *(f"{x:.3f}" for x in found.flatten().tolist()), *(f"{x:.3f}" for x in lengths.tolist())]


@torch.no_grad()
def measure(head: Eagle3Head, model: PreTrainedModel, rows: list[dict[str, Tensor]]) -> Tensor:
    """(2, STEPS): how often the head's first choice is the target's, and sum(min(p, q)), of the tokens to learn."""
    embedding = embedding_of(model).float() if head.embed_tokens is None else head.embed_tokens.weight
    readout = Readout.of(model, head.draft_to_target)
    H = readout.weight.shape[-1]
    total, count = torch.zeros(2, STEPS), torch.zeros(STEPS)
    for row in rows:
        batch = collate([row])
        ids, learn, documents, states = (batch[name] for name in ("ids", "learn", "documents", "states"))
        taps, final = states[..., :-H].float(), states[..., -H:]
        for step, h in enumerate(unroll(head, embedding[ids], taps, STEPS, documents)):
            first = 2 + step
            keep = learn[:, first:].bool() & (documents[:, first:] == documents[:, :-first])
            p = readout(final[:, first - 1 : -1][keep]).softmax(-1)
            q = head.logits(h[:, : ids.shape[1] - first][keep]).softmax(-1)
            total[0, step] += (p.argmax(-1) == q.argmax(-1)).sum()
            total[1, step] += torch.minimum(p, q).sum()
            count[step] += len(p)
    return total / count


if __name__ == "__main__":
    app()
