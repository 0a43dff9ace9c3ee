"""Training recipe: the options of a run, their checks, and the subset that identifies a run."""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import torch
from accelerate import PartialState
from transformers.integrations import get_available_reporting_integrations

from specdec.utils.choices import HeadKind, LossName, OptimizerName, Sharding, StepWeights, Tracker, check_choice
from specdec.utils.paths import named, require_folder_or_id

DRAFT_VOCAB = 8192
# accelerate's sharding modes, which would divide the head among processes, and the variables that enable them.
SHARDING = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}
# Fields that may differ between two runs of one recipe.
FREE = "data held_out_data out device shard teacher evaluate_every max_minutes rows_at_once flex report_to".split()


@dataclass(frozen=True)
class Recipe:
    """Options of a training run, as `specdec train` takes them.

    Args:
        target: path or hub id of the target model.
        data: file or folder of texts, see `read_entries`. Best are answers that the target wrote, as `regenerate` lets
            it.
        out: folder for all results.
        kind: "eagle3", "dflash", "jetspec" or "dspark" (block drafters), or "mtp" (multi-token-prediction layers).
        start_from: folder or hub id of a head to continue training. None: a fresh head.
        start_from_target: the model that `start_from` drafts for, if that is another one with the same tokens
            (see `transfer_head`).
        draft_vocab: number of tokens that can be drafted, the most frequent ones. A `start_from` head that is enlarged
            keeps its own tokens. None: 8,192, or the tokens of `start_from`. MTP layers draft all tokens and are
            trained on drafts of these; None: of all.
        layers: layers of a fresh head. None: 1, or 2 for a block drafter.
        intermediate_size: MLP width of a fresh head. None: the target's.
        attention_bias: give a fresh EAGLE-3 head attention biases if the target has them.
        steps: drafted tokens to train. None: 3, or 7 for a block drafter.
        anchors: blocks per row of texts, for a block drafter.
        loss: "ce", "lk" (to continue training a head), "ce+lk" (half of each) or "tv" (DSpark's), see `losses`.
            None: the loss of the kind's paper.
        step_weights: "decay", or "d-pace" to weight each step by how likely it is reached and followed, see
            `step_weights.weights_by_acceptance`.
        optimizer: "muon" (see `optimizer.muon`), or "adamw" for all weights. None: "muon", except for MTP layers.
        length: tokens per packed row.
        epochs: passes over the texts.
        learning_rate: peak learning rate; it falls to 0 along a cosine.
        batch_size: rows per update, over all processes. The loss is a mean over the tokens of an update, however
            passes and processes share them.
        rows_at_once: rows per process and pass. None: all.
        cache_states: compute the target's states once and keep them on disk, instead of computing them in every epoch.
        rounded_states: compute cached states in 8 bits, see `with_int8_decoder`.
        shard: where the target's weights are. "none": all of them on each process's device. "devices": divided among
            the devices of a single process. "tp" and "fsdp": divided among processes, by layer parts or by weight.
        teacher: address of a server of the target's states (`ServedTeacher`). The target is then not loaded here.
        flex: use flex attention, see `unroll`.
        max_texts: use only this many texts, from the start of the data.
        held_out: number of texts used for evaluation only, taken evenly from the data.
        held_out_data: file of texts used for evaluation only, instead of `held_out`.
        save_every: updates between checkpoints.
        evaluate_every: updates between evaluations with the decoder. 0: none; the best head is the one with the lowest
            loss on held-out texts.
        max_minutes: time limit for everything, evaluations and checkpoints included. The same call resumes. At least
            one update, or one shard of cached states, is done in each call.
        report_to: experiment tracker that transformers sends the logs to.
        seed: random seed.
        device: "cpu", or None for an accelerator if there is one.

    Examples:
        >>> recipe = Recipe("Qwen/Qwen3-0.6B", Path("answers.jsonl"), Path("out"), kind="dspark")
        >>> recipe.drafted, recipe.loss_name
        (7, 'tv')
    """

    target: str
    data: Path
    out: Path
    kind: HeadKind = "eagle3"
    start_from: str | None = None
    start_from_target: str | None = None
    draft_vocab: int | None = None
    intermediate_size: int | None = None
    layers: int | None = None
    attention_bias: bool = True
    steps: int | None = None
    anchors: int = 64
    loss: LossName | None = None
    step_weights: StepWeights = "decay"
    optimizer: OptimizerName | None = None
    length: int = 512
    epochs: float = 2.0
    learning_rate: float = 1e-3
    batch_size: int = 4
    rows_at_once: int | None = None
    cache_states: bool = False
    rounded_states: bool = False
    shard: Sharding = "none"
    teacher: str | None = None
    flex: bool = False
    max_texts: int | None = None
    held_out: int = 16
    held_out_data: Path | None = None
    save_every: int = 100
    evaluate_every: int = 500
    max_minutes: float | None = None
    report_to: Tracker = "none"
    seed: int = 0
    device: str | None = None

    @property
    def drafted(self) -> int:
        """Number of tokens drafted in training."""
        return self.steps or (3 if self.kind in ("eagle3", "mtp") else 7)

    @property
    def loss_name(self) -> LossName:
        return self.loss or ("tv" if self.kind == "dspark" else "ce")

    @property
    def optimizer_name(self) -> OptimizerName:
        return self.optimizer or ("adamw" if self.kind == "mtp" else "muon")

    def check(self) -> None:
        """Check everything that does not require reading a file.

        Raises:
            ValueError: An option is invalid, or two options contradict each other.
        """
        if self.device not in (None, "cpu"):
            raise ValueError(f'device must be "cpu", or None for an accelerator if there is one; got {self.device!r}')
        for kind, variable in SHARDING.items():
            if os.environ.get(variable, "false").lower() == "true":
                raise ValueError(
                    f"heads are trained on several GPUs with DDP, not with {kind}: a head is small and fits on any one "
                    "of them. Use `accelerate launch --multi_gpu`"
                )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {self.seed}")
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be a number above 0, got {self.epochs}")
        if not 0 <= self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be a number of at least 0, got {self.learning_rate}")
        if self.start_from_target is not None and self.start_from is None:
            raise ValueError("--from-target names the model that the head of --from drafts for: give --from too")
        check_choice("kind", self.kind, HeadKind)
        check_choice("loss", self.loss_name, LossName)
        check_choice("step_weights", self.step_weights, StepWeights)
        check_choice("optimizer", self.optimizer_name, OptimizerName)
        check_choice("shard", self.shard, Sharding)
        check_choice("report_to", self.report_to, Tracker)
        self._check_shard()
        self._check_teacher()
        if self.report_to != "none" and self.report_to not in get_available_reporting_integrations():
            raise ValueError(
                f"--report-to {self.report_to} needs a package that is missing: pip install {self.report_to}"
            )
        if self.rounded_states and not self.cache_states:
            raise ValueError("--rounded-states applies to cached states only: give --cache-states too")
        if self.kind == "mtp" and (self.intermediate_size is not None or not self.attention_bias):
            raise ValueError(
                "MTP layers have the shape of the target's own: leave out --intermediate-size and --no-attention-bias"
            )
        if self.flex and self.kind == "mtp":
            raise ValueError("MTP layers use the target's own attention: leave out --flex")
        if self.flex and self.kind != "eagle3":
            raise ValueError(f"a {self.kind} drafter is trained on few anchors per row: it needs no --flex")
        if self.flex and (self.device == "cpu" or not torch.cuda.is_available()):
            raise ValueError("flex attention is trained on CUDA devices only, and none is used here: leave out --flex")
        if self.start_from_target is not None and self.kind != "eagle3":
            raise ValueError("only EAGLE-3 heads can be transferred from another target: leave out --from-target")
        for name in (self.target, self.start_from, self.start_from_target):
            if name is not None:
                require_folder_or_id(name)

    @property
    def _options_for_whole_target(self) -> list[str]:
        """List the given options that need the whole target in this process."""
        given = {
            "--kind mtp": self.kind == "mtp",
            "--from-target": self.start_from_target is not None,
            "--rounded-states": self.rounded_states,
        }
        return [option for option in given if given[option]]

    def _check_shard(self) -> None:
        if self.shard in ("tp", "fsdp"):
            for option in self._options_for_whole_target:
                raise ValueError(f"{option} needs the whole target in one process: leave out --shard {self.shard}")
        if self.shard == "tp" and self.cache_states:
            raise ValueError(
                "with --cache-states each process reads different texts, which --shard tp cannot: use --shard fsdp"
            )

    def _check_teacher(self) -> None:
        if self.teacher is None:
            return
        if not self.teacher.startswith(("http://", "https://")):
            raise ValueError(f"--teacher must be an address such as http://host:8100; got {self.teacher!r}")
        shard = [] if self.shard == "none" else [f"--shard {self.shard}"]
        for option in self._options_for_whole_target + shard:
            raise ValueError(f"{option} needs the target here, but --teacher runs it elsewhere: leave out one")
        if self.evaluate_every:
            raise ValueError(
                "--teacher runs the target elsewhere, so it cannot decode for evaluations: give --evaluate-every 0 too"
            )

    def check_processes(self, count: int) -> None:
        """Raise ValueError if `shard` does not fit this number of processes."""
        if self.shard == "devices" and count > 1:
            raise ValueError(
                f"--shard devices uses all devices from one process, but {count} were started: start one, or use "
                "--shard fsdp"
            )
        if self.shard in ("tp", "fsdp") and count == 1:
            raise ValueError(
                f"--shard {self.shard} is for several processes, but one was started: use `accelerate launch "
                "--num_processes`, or --shard devices"
            )

    def identity(self, texts: str, weights: str) -> dict[str, str]:
        """Return the options that two runs in one folder must have in common, with checksums of texts and weights."""
        mine = {key: str(value) for key, value in asdict(self).items() if key not in FREE}
        mine |= {key: named(mine[key]) for key in ("target", "start_from", "start_from_target")}
        if self.start_from is None:
            mine["draft_vocab"] = str(self.draft_vocab or ("all" if self.kind == "mtp" else DRAFT_VOCAB))
        mine |= {"steps": str(self.drafted), "loss": self.loss_name, "optimizer": self.optimizer_name}
        mine |= {"texts": texts, "weights": weights}
        if self.held_out_data is not None:
            mine["held_out"] = "a file of its own"
        return mine

    def defaults(self) -> dict[str, str]:
        """Identity values assumed for a run that was started before an option existed."""
        given = [field for field in fields(self) if field.default is not MISSING]
        known = {field.name: str(field.default) for field in given if field.name not in FREE}
        return known | {"optimizer": "adamw"}

    def per_pass(self, processes: PartialState) -> int:
        """Return the number of rows that one process reads in one pass.

        Raises:
            ValueError: The batch cannot be divided into equal passes.
        """
        at_once = min(self.rows_at_once or self.batch_size, self.batch_size // processes.num_processes)
        if at_once == 0 or self.batch_size % (at_once * processes.num_processes):
            raise ValueError(
                f"batch_size {self.batch_size} cannot be divided among {processes.num_processes} processes in passes "
                f"of {at_once or 1} rows: choose a multiple"
            )
        return at_once
