"""`Judge`: measures a head while it is trained, by the real decoder, and keeps the best one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdec.eagle3.evaluation import Evaluation, evaluate
from specdec.eagle3.states import PackedTexts, StateDataset
from specdec.eagle3.trainer import Eagle3Trainer, copy_of


class Judge(TrainerCallback):
    """Has the real decoder measure the head now and then, and keeps the best one.

    Owns `out/head`, `out/evaluation.json` and the curve, `out/curve.png`.

    Args:
        prompts: (T,) int64 each. every: updates between measurements.
        at_start: measure before the first update too: the head may be the best already.
    """

    def __init__(
        self,
        trainer: Eagle3Trainer,
        prompts: Sequence[Tensor],
        out: Path,
        *,
        every: int,
        at_start: bool = False,
    ):
        self.trainer, self.prompts, self.out = trainer, prompts, out
        self.every, self.at_start = every, at_start
        self.path = out / "evaluation.json"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.at_start and state.global_step == 0:
            self._judge(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._judge(state)

    def best(self) -> Evaluation | None:
        """The evaluation of the head in `out/head`; None in processes other than the first."""
        if not self.trainer.is_world_process_zero():
            return None
        if not self.path.exists():
            self._judge(self.trainer.state)
        return _evaluation(json.loads(self.path.read_text())["best"])

    def _judge(self, state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        print(f"update {state.global_step}: decoding {len(self.prompts)} held-out texts")
        head = copy_of(self.trainer.head, self.trainer.target.dtype)
        device = self.trainer.target.device
        # Decoding draws; training goes on as if it had not.
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed(self.trainer.args.seed)
            found = evaluate(head, self.trainer.target, self.prompts, draft_length=self.trainer.steps)
        measured = {key: value for key, value in asdict(found).items() if isinstance(value, float)}
        due = self.trainer.control.should_log
        self.trainer.log({f"decoder_{key}": round(value, 4) for key, value in measured.items()})
        self.trainer.control.should_log = due  # logging settles it, and the other processes log together with this one
        if found.warning:
            print(f"warning: {found.warning}")
        before = read_json(self.path)
        content: dict[str, Any] = before or {}
        if before is None or found.tree_length >= before["best"]["tree_length"]:
            self.trainer.save_head(self.out / "head")
            rates = [rate if rate == rate else None for rate in found.acceptance_rate_per_pos]  # JSON has no NaN
            content |= {"best": asdict(found) | {"acceptance_rate_per_pos": rates}, "best_update": state.global_step}
        content |= {"warning": found.warning, "tokens_per_epoch": self._tokens(), "log": state.log_history}
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.rename(self.path)
        draw(content, self.out / "curve.png")

    def _tokens(self) -> int:
        dataset = self.trainer.train_dataset
        assert isinstance(dataset, (StateDataset, PackedTexts))
        return dataset.num_tokens


def draw(content: dict[str, Any], path: Path) -> None:
    """Loss and acceptance against training tokens; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    log, tokens = content["log"], content["tokens_per_epoch"] / 1e6
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)

    def line(axes: Any, key: str, label: str, style: str = "-") -> None:
        points = [(entry["epoch"] * tokens, entry[key]) for entry in log if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)

    line(left, "loss", "loss")
    left.set(xlabel="training tokens (millions)", ylabel="loss")
    line(right, "simulated_length", "training batches, steps taken as independent")
    line(right, "decoder_simulated_length", "held-out prompts, simulated", "s:")
    line(right, "decoder_mean_acceptance_length", "held-out prompts, decoder: chains", "o-")
    line(right, "decoder_tree_length", "decoder: trees", "^-")
    line(right, "decoder_tree_length_sampled", "decoder: trees, T = 1", "v-")
    right.set(xlabel="training tokens (millions)", ylabel="mean acceptance length")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)


def _evaluation(entry: dict[str, Any]) -> Evaluation:
    rates = tuple(float("nan") if rate is None else rate for rate in entry["acceptance_rate_per_pos"])
    return Evaluation(**entry | {"acceptance_rate_per_pos": rates})


def read_json(path: Path) -> Any | None:
    """What is in a file; None if there is none, or it was not written to its end."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
