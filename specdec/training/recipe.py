"""`Recipe`: what to train, on what, and how; and what of it makes two runs the same."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from accelerate import PartialState
from transformers.integrations import get_available_reporting_integrations

from specdec.utils.choices import HeadKind, LossName, OptimizerName, Sharding, Tracker, check_choice
from specdec.utils.paths import named, require_folder_or_id

DRAFT_VOCAB = 8192
# Of accelerate, which would leave each process with a part of the head. Its variables when they are on.
SHARDING = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}
# What may differ between two runs of one recipe.
FREE = "data held_out_data out device shard teacher evaluate_every max_minutes rows_at_once flex report_to".split()


@dataclass(frozen=True)
class Recipe:
    """What to train, on what, and how.

    Args:
        target: path or hub id. data: texts the target wrote, see `read_entries`. out: folder for all results.
        start_from: a head to go on from, a folder or hub id. None: a fresh one.
        start_from_target: what that head is for, if it is another model, with the same tokens: see `transfer`.
        kind: of head: EAGLE-3's, DFlash's or DSpark's drafters of blocks, or MTP layers.
        draft_vocab: tokens that can be drafted, the most frequent ones; a head to go on from keeps those it has if it
            is to draft more. None: 8,192, or those it has. MTP layers draft all tokens, and learn from drafts of these;
            None: of all.
        intermediate_size: of a fresh head's MLP; None: the target's.
        layers: of a fresh head; None: 1, of a drafter of blocks 2.
        attention_bias: a fresh EAGLE head's attention has biases if the target's has.
        steps: drafted tokens to train; None: 3, of a drafter of blocks 7. anchors: its blocks in each row of texts.
        loss: "ce"; "lk" to go on from a head with; "ce+lk", half of each; "tv", which a DSpark drafter is trained with
            (see `losses`). None: what the kind's paper has.
        optimizer: "muon" (see `optimizer`), or "adamw" for all weights. None: "muon" for EAGLE-3's heads.
        length: tokens per packed row.
        batch_size: rows per update, of all processes. rows_at_once: per process and pass; None: all. The
            loss is per token learnt in an update, however passes and processes share them.
        cache_states: compute the target's states once and keep them on disk, not anew in every epoch.
        rounded_states: compute them in 8 bits, see `in_eight_bits`.
        shard: where the target's weights lie: "none": all of them on each process's device; "devices": over the
            devices of the one process; "tp", "fsdp": over the processes, in parts of its layers or of its weights.
        teacher: address of a server of the target's states (`served_teacher`), which is then not loaded here.
        flex: use flex attention, see `unroll`.
        max_texts: use the first so many. held_out: texts, evenly over the data, that are only evaluated on.
        held_out_data: texts only evaluated on, in a file of their own, in place of those.
        save_every: updates between checkpoints. evaluate_every: between evaluations by the decoder;
            0: none, the best head is that of the lowest loss on held-out texts.
        max_minutes: stop after them, at the next update that is logged; the same call goes on.
        report_to: a tracker that is sent what is logged, by transformers.
        device: None: an accelerator if there is one.
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
        """Tokens that are drafted in training."""
        return self.steps or (3 if self.kind in ("eagle3", "mtp") else 7)

    @property
    def loss_name(self) -> LossName:
        return self.loss or ("tv" if self.kind == "dspark" else "ce")

    @property
    def optimizer_name(self) -> OptimizerName:
        return self.optimizer or ("muon" if self.kind == "eagle3" else "adamw")

    def check(self) -> None:
        """What can be said before anything is read."""
        if self.device not in (None, "cpu"):
            raise ValueError(f'device is "cpu", or left out for an accelerator if there is one; got {self.device!r}')
        for kind, variable in SHARDING.items():
            if os.environ.get(variable, "false").lower() == "true":
                raise ValueError(
                    f"heads are trained by several GPUs with DDP, not with {kind}: a head is small and fits any one of "
                    "them. Use `accelerate launch --multi_gpu`"
                )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {self.seed}")
        for option, number in {"epochs": self.epochs, "learning_rate": self.learning_rate}.items():
            if not 0 <= number < math.inf:
                raise ValueError(f"{option} must be a number of at least 0, got {number}")
        if self.start_from_target is not None and self.start_from is None:
            raise ValueError("--from-target says what the head of --from is for: give --from too")
        check_choice("kind", self.kind, HeadKind)
        check_choice("loss", self.loss_name, LossName)
        check_choice("optimizer", self.optimizer_name, OptimizerName)
        check_choice("shard", self.shard, Sharding)
        self._check_shard()
        self._check_teacher()
        check_choice("report_to", self.report_to, Tracker)
        if self.report_to != "none" and self.report_to not in get_available_reporting_integrations():
            raise ValueError(
                f"--report-to {self.report_to} needs a package that is missing: pip install {self.report_to}"
            )
        if self.rounded_states and not self.cache_states:
            raise ValueError("--rounded-states says how states are made that are kept: give --cache-states too")
        if self.kind == "mtp" and (self.intermediate_size is not None or not self.attention_bias):
            raise ValueError(
                "MTP layers are as the target's own: leave out --intermediate-size and --no-attention-bias"
            )
        if self.flex and self.kind == "mtp":
            raise ValueError("MTP layers attend as the target does: leave out --flex")
        if self.flex and self.kind != "eagle3":
            raise ValueError(f"a {self.kind} drafter learns from few anchors of a row: it needs no --flex")
        if self.flex and (self.device == "cpu" or not torch.cuda.is_available()):
            raise ValueError("flex attention is trained on CUDA devices only, and here is none: leave out --flex")
        if self.start_from_target is not None and self.kind != "eagle3":
            raise ValueError("only EAGLE-3 heads can be carried over from another target: leave out --from-target")
        for name in (self.target, self.start_from_target):
            if name is not None:
                require_folder_or_id(name)

    def _check_shard(self) -> None:
        if self.shard in ("tp", "fsdp"):
            for option, given in {
                "--kind mtp": self.kind == "mtp",
                "--from-target": self.start_from_target is not None,
                "--rounded-states": self.rounded_states,
            }.items():
                if given:
                    raise ValueError(f"{option} wants all of the target in a process: leave out --shard {self.shard}")
        if self.shard == "tp" and self.cache_states:
            raise ValueError("processes that keep states each read texts of their own: use --shard fsdp")

    def _check_teacher(self) -> None:
        if self.teacher is None:
            return
        if not self.teacher.startswith(("http://", "https://")):
            raise ValueError(f"--teacher is an address, as in http://host:8100; got {self.teacher!r}")
        for option, given in {
            "--kind mtp": self.kind == "mtp",
            "--from-target": self.start_from_target is not None,
            "--rounded-states": self.rounded_states,
            f"--shard {self.shard}": self.shard != "none",
        }.items():
            if given:
                raise ValueError(f"{option} wants the target here, and --teacher has it run elsewhere: leave out one")
        if self.evaluate_every:
            raise ValueError("the target is run elsewhere and decodes nothing here: give --evaluate-every 0, too")

    def check_processes(self, count: int) -> None:
        """Raise ValueError if the target cannot lie in so many processes as it is to."""
        if self.shard == "devices" and count > 1:
            raise ValueError(
                f"--shard devices has one process use all devices, and {count} were started: start one, or use --shard "
                "fsdp"
            )
        if self.shard in ("tp", "fsdp") and count == 1:
            raise ValueError(
                f"--shard {self.shard} is for several processes, and one was started: use `accelerate launch "
                "--num_processes`, or --shard devices"
            )

    def identity(self, texts: str, weights: str) -> dict[str, str]:
        """What two runs that share a folder must have in common.

        Args:
            texts: a checksum of those that were given. weights: one of the target's.
        """
        mine = {key: str(value) for key, value in asdict(self).items() if key not in FREE}
        mine |= {key: named(mine[key]) for key in ("target", "start_from", "start_from_target")}
        if self.start_from is None:
            mine["draft_vocab"] = str(self.draft_vocab or DRAFT_VOCAB)
        mine |= {"steps": str(self.drafted), "loss": self.loss_name, "optimizer": self.optimizer_name}
        mine |= {"texts": texts, "weights": weights}
        if self.held_out_data is not None:
            mine["held_out"] = "a file of its own"
        return mine

    def defaults(self) -> dict[str, str]:
        """Of an identity: what holds for a run of before an option was there."""
        known = {field.name: str(field.default) for field in fields(self) if field.name not in FREE}
        return known | {"optimizer": "adamw"}

    def per_pass(self, processes: PartialState) -> int:
        """Rows of a process in one pass."""
        at_once = min(self.rows_at_once or self.batch_size, self.batch_size // processes.num_processes)
        if at_once == 0 or self.batch_size % (at_once * processes.num_processes):
            raise ValueError(
                f"batch_size {self.batch_size} cannot be divided among {processes.num_processes} processes in passes "
                f"of {at_once or 1} rows: choose a multiple"
            )
        return at_once
