"""Compare training losses of a head on the same batches, measured on held-out texts.

    python benchmarks/losses.py --target PATH --head PATH --states OUT/states

OUT is the folder of a `specdec train --cache-states` run, whose texts the head should not have been trained on. Without
--head a new head is trained. The last rows are used for measuring, or separate texts:

    python benchmarks/losses.py --target PATH --head PATH --held-out-data TEXTS

Without --states nothing is trained, and the acceptance of the given head is measured with teacher forcing. Only tokens
that the target wrote count. For each draft token, "accuracy" is the rate at which the head's first choice equals the
target's. "acceptance" is sum(min(p, q)), the rate at which a token sampled from the head is accepted at T = 1. Lengths
are those of chains with independent steps. Dynamic trees, the default, use first choices at T = 1, too, and differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from failure import bad_input_ends
from table import table
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments

from specdec.data.conversations import read_texts
from specdec.data.packed_dataset import StateDataset, collate
from specdec.data.texts import kept_texts
from specdec.heads.eagle3.checkpoint import load
from specdec.heads.eagle3.head import Eagle3Head
from specdec.models.hidden_states import FINAL
from specdec.models.introspection import decoder_layers
from specdec.proposers.draft_heads.eagle3 import Eagle3Proposer
from specdec.training import precision
from specdec.training.initialization.draft_vocabulary import frequent_tokens, token_counts
from specdec.training.initialization.eagle3 import initialize
from specdec.training.objectives.losses import LOSSES
from specdec.training.objectives.unroll import unroll
from specdec.training.recipe import DRAFT_VOCAB
from specdec.training.run_folder import RunFolder
from specdec.training.teacher.base import LocalTeacher, embedding_of
from specdec.training.teacher.state_cache import states_of
from specdec.training.teacher.target_logits import TargetLogits
from specdec.training.trainer import HeadTrainer

STEPS = 3
LENGTH = 512  # tokens of a row

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    target: Annotated[str, typer.Option(help="Path or hub id of the model.")],
    head: Annotated[str | None, typer.Option(help="Path or hub id of an EAGLE-3 head. Default: a new head.")] = None,
    states: Annotated[
        Path | None, typer.Option(help="Folder with the target's states over its own texts.", exists=True)
    ] = None,
    held_out_data: Annotated[
        Path | None,
        typer.Option(help="Texts for measuring only, in a format that `specdec train` reads or writes.", exists=True),
    ] = None,
    held_out: Annotated[
        int, typer.Option(min=1, help="Rows of the states used for measuring, without --held-out-data.")
    ] = 40,
    updates: Annotated[int, typer.Option(min=1)] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help=f"Rows of {LENGTH} tokens per update.")] = 4,
    learning_rate: Annotated[float, typer.Option()] = 1e-4,
) -> None:
    with bad_input_ends():
        if states is None and (held_out_data is None or head is None):
            raise ValueError("give --states to train on, or --head and --held-out-data to measure it on")
        model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()
        start = fresh(model, RunFolder(states.parent).estimates) if head is None else load(head)
        Eagle3Proposer(start).check(model)
        taps = start.config.taps(len(decoder_layers(model)))
        training, measured = split(states, taps, held_out if held_out_data is None else 0)
        if held_out_data is not None:
            measured = rows_of(held_out_data, model, taps)
    lines = [line("as it was", deepcopy(start), model, measured)]
    for name in LOSSES if training is not None else ():
        trained = deepcopy(start)
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
                bf16=precision.pays(torch.device("cpu")),
                use_cpu=True,
                save_strategy="no",
                report_to=[],
                seed=0,
            )
            teacher = LocalTeacher.of(model, trained)
            options = {"steps": STEPS, "loss": name, "state_weight": 0.0}
            HeadTrainer(trained, teacher, args, **options, train_dataset=training).train()
        lines.append(line(f"{name}, {updates} updates", trained, model, measured))
    columns = [f"{what}, step {step + 1}" for what in ("accuracy", "acceptance") for step in range(STEPS)]
    own, whole = sum(int(row["learn"].sum()) for row in measured), sum(len(row["ids"]) for row in measured)
    print(f"Measured on {own:,} tokens of the target's in texts of {whole:,}")
    print()
    print(table(["loss", *columns, "chain at T = 0", "chain at T = 1, drawn"], lines))


def fresh(model: PreTrainedModel, texts: Path) -> Eagle3Head:
    """Make a new head as `specdec train` does for these texts."""
    torch.manual_seed(0)
    size = model.config.get_text_config(decoder=True).vocab_size
    counts = token_counts(kept_texts(texts), size)
    return initialize(model, frequent_tokens(counts, DRAFT_VOCAB))


def split(
    states: Path | None, taps: Sequence[int], held_out: int
) -> tuple[Dataset[dict[str, Tensor]] | None, list[dict[str, Tensor]]]:
    """Split rows into those to train on and the last `held_out`."""
    if states is None:
        return None, []
    rows = StateDataset(states, LENGTH)
    if rows.taps != tuple(taps):
        raise ValueError(f"the states are of layers {rows.taps}, the head reads {taps}")
    if held_out >= len(rows):
        raise ValueError(f"the states are {len(rows)} rows and {held_out} are held out: choose a smaller --held-out")
    count = len(rows) - held_out
    return Subset(rows, range(count)), [rows[i] for i in range(count, len(rows))]


def rows_of(file: Path, model: PreTrainedModel, taps: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return a row for each text."""
    if file.suffix == ".safetensors":
        texts = kept_texts(file)
    else:
        texts = list(read_texts(file, AutoTokenizer.from_pretrained(model.name_or_path), LENGTH))
    found, logits = states_of(model, [*taps, FINAL], texts), TargetLogits.of(model)
    return [
        {
            "ids": text.ids,
            "learn": text.learn,
            "documents": torch.zeros_like(text.ids),
            "states": states,
            "over_all": logits.over_all(states, text.learn),
        }
        for text, states in zip(texts, found, strict=True)
    ]


def line(name: str, head: Eagle3Head, model: PreTrainedModel, rows: list[dict[str, Tensor]]) -> list[str]:
    found = measure(head.float().eval(), model, rows)  # (2, STEPS)
    lengths = 1 + found.cumprod(-1).sum(-1)
    return [name, *(f"{x:.3f}" for x in found.flatten().tolist()), *(f"{x:.3f}" for x in lengths.tolist())]


@torch.no_grad()
def measure(head: Eagle3Head, model: PreTrainedModel, rows: list[dict[str, Tensor]]) -> Tensor:
    """Measure accuracy and acceptance of the tokens that the target wrote, (2, STEPS)."""
    embedding = embedding_of(model).float() if head.embed_tokens is None else head.embed_tokens.weight
    target_logits = TargetLogits.of(model, head.draft_to_target)
    H = target_logits.weight.shape[-1]
    total, count = torch.zeros(2, STEPS), torch.zeros(STEPS)
    for row in rows:
        batch = collate([row])
        ids, learn, documents, states = (batch[name] for name in ("ids", "learn", "documents", "states"))
        over_all = batch["over_all"]
        taps, final = states[..., :-H].float(), states[..., -H:]
        for step, h in enumerate(unroll(head, embedding[ids], taps, STEPS, documents)):
            first = 2 + step
            keep = learn[:, first:].bool() & (documents[:, first:] == documents[:, :-first])
            norm, choice = over_all[:, first - 1 : -1][keep].unbind(-1)
            p = (target_logits(final[:, first - 1 : -1][keep]) - norm[:, None]).exp()
            q = head.logits(h[:, : ids.shape[1] - first][keep]).softmax(-1)
            total[0, step] += (choice == head.draft_to_target[q.argmax(-1)]).sum()
            total[1, step] += torch.minimum(p, q).sum()
            count[step] += len(p)
    return total / count


if __name__ == "__main__":
    app()
