"""`Recipe`: from a target and texts it wrote to a trained head, in one command that goes on where it was stopped."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import is_torch_bf16_gpu_available

from specdec.capability import capability
from specdec.eagle3.checkpoint import load, save
from specdec.eagle3.evaluation import Evaluation
from specdec.eagle3.fresh import convert, grown
from specdec.eagle3.head import Eagle3Head
from specdec.eagle3.judge import Judge, read_json
from specdec.eagle3.objective import LOSSES, frequent_tokens, token_counts
from specdec.eagle3.progress import speak
from specdec.eagle3.registry import WEIGHTS
from specdec.eagle3.states import PackedTexts, StateDataset, bytes_per_token, extract
from specdec.eagle3.texts import Text, context_of, keep, kept_texts, read_entries, read_texts
from specdec.eagle3.trainer import STATE_WEIGHT, Eagle3Trainer
from specdec.eagle3.transfer import transferred
from specdec.paths import named, require_folder_or_id
from specdec.proposers.draft_model import load as load_model
from specdec.proposers.eagle3 import Eagle3Proposer
from specdec.taps import decoder_layers

CHECKPOINT_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
DRAFT_VOCAB = 8192
TRANSFER_TOKENS = 4  # per entry of the states that a carried over head reads
# Of accelerate, which would leave each process with a part of the head. Its variables when they are on.
SHARDING = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}
# Of the command line, where it calls them otherwise.
OPTIONS = {"start_from": "--from", "start_from_target": "--from-target"}
CHANGES = {"texts": "on other texts", "weights": "the target's weights were others"}
LOG_EVERY = 10  # updates
DISK_FULL = ("No space left", "inline_container")  # the second is what torch.save says of a file it cannot fill
KEPT = ("texts.safetensors", "held_out.safetensors")  # what is trained and evaluated on
# What may differ between two runs of one recipe.
FREE = ("data", "held_out_data", "out", "device", "evaluate_every", "max_minutes", "rows_at_once", "flex")


@dataclass(frozen=True)
class Recipe:
    """What to train, on what, and how.

    Args:
        target: path or hub id. data: texts the target wrote, see `read_entries`. out: folder for all results.
        start_from: a head to go on from, a folder or hub id. None: a fresh one.
        start_from_target: what that head is for, if it is another model, with the same tokens: see `transfer`.
        draft_vocab: tokens that can be drafted, the most frequent ones; a head to go on from keeps those it has. None:
            8,192, or those it has. intermediate_size: of a fresh head's MLP; None: the target's.
        attention_bias: a fresh head's attention has biases if the target's has.
        steps: drafted tokens to train. loss: "ce", or "lk" to go on from a head with (`objective.LOSSES`).
        length: tokens per packed row.
        batch_size: rows per update, of all processes. rows_at_once: per process and pass; None: all. Passes
            of one update count alike, however many tokens are learnt in each.
        cache_states: compute the target's states once and keep them on disk, not anew in every epoch.
        flex: use flex attention, see `unroll`.
        max_texts: use the first so many. held_out: texts, evenly over the data, that are only evaluated on.
        held_out_data: texts only evaluated on, in a file of their own, in place of those.
        save_every, evaluate_every: updates between checkpoints, and between evaluations by the decoder.
        max_minutes: stop after them, at the next update that is logged; the same call goes on.
        device: None: an accelerator if there is one.
    """

    target: str
    data: Path
    out: Path
    start_from: str | None = None
    start_from_target: str | None = None
    draft_vocab: int | None = None
    intermediate_size: int | None = None
    attention_bias: bool = True
    steps: int = 3
    loss: str = "ce"
    length: int = 512
    epochs: float = 2.0
    learning_rate: float = 1e-3
    batch_size: int = 4
    rows_at_once: int | None = None
    cache_states: bool = False
    flex: bool = False
    max_texts: int | None = None
    held_out: int = 16
    held_out_data: Path | None = None
    save_every: int = 100
    evaluate_every: int = 500
    max_minutes: float | None = None
    seed: int = 0
    device: str | None = None

    def run(self) -> Evaluation | None:
        """Extract, train, evaluate; everything in `out`, the best head in `out/head`. None if time was up before."""
        started = time.monotonic()
        self._check()
        processes = PartialState(cpu=self.device == "cpu", timeout=timedelta(days=1))  # one extracts, all wait
        self._at_once(processes)
        self.out.mkdir(parents=True, exist_ok=True)
        with _alone(self.out) if processes.is_main_process else nullcontext():
            return self._run(processes, started)

    def _run(self, processes: PartialState, started: float) -> Evaluation | None:
        given = self._given()
        tokenizer = AutoTokenizer.from_pretrained(self.target)
        asked = self._asked()
        training, held_out = self._texts(tokenizer, asked)
        target = load_model(self.target).to(processes.device)
        if capability(target).masks is None:
            raise ValueError(f"{self.target} cannot be decoded speculatively: {capability(target).reason}")
        settled = self._settled(asked, weights_of(target))
        head = self._head(given, target, training, processes)
        if processes.is_main_process:
            for name, texts in zip(KEPT, (training, held_out), strict=True):
                keep(texts, self.out / name)
            (self.out / "recipe.json").write_text(json.dumps(settled, indent=1))
        deadline = None if self.max_minutes is None else started + 60 * self.max_minutes
        dataset: Dataset = PackedTexts(training, self.length)
        if self.cache_states:
            if processes.is_local_main_process:
                self._extract(target, head, training, deadline)
            processes.wait_for_everyone()
            if not (self.out / "states" / "states.json").exists():
                return None
            dataset = StateDataset(self.out / "states", self.length)
        trainer = self._trainer(head, target, dataset, processes)
        prompts = [_prompt(text) for text in held_out]
        judge = Judge(
            trainer,
            prompts,
            self.out,
            every=self.evaluate_every,
            at_start=self.start_from is not None,
        )
        trainer.add_callback(judge)
        if deadline is not None:
            trainer.add_callback(Deadline(deadline))
        with _clear_failures(self.out, "use fewer --rows-at-once"):
            trainer.train(resume_from_checkpoint=last_checkpoint(self.out / "run"))
        if trainer.state.global_step < trainer.state.max_steps:
            return None
        trainer.accelerator.wait_for_everyone()  # one process judges
        return judge.best()

    def _check(self) -> None:
        """What can be said before anything is read."""
        if self.device not in (None, "cpu"):
            raise ValueError(f'device is "cpu", or left out for an accelerator if there is one; got {self.device!r}')
        for kind, variable in SHARDING.items():
            if os.environ.get(variable, "false").lower() == "true":
                raise ValueError(
                    f"heads are trained by several GPUs with DDP, not with {kind}: a head is small and fits any one of "
                    "them. Use `accelerate launch --multi_gpu`"
                )
        if self.start_from_target is not None and self.start_from is None:
            raise ValueError("--from-target says what the head of --from is for: give --from too")
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file: give a folder for the results")
        if (self.out / "config.json").exists():
            raise ValueError(f"{self.out} is a model's folder: choose another one for the results")
        for name in (self.target, self.start_from_target):
            if name is not None:
                require_folder_or_id(name)

    def _texts(self, tokenizer: PreTrainedTokenizerBase, asked: str) -> tuple[list[Text], list[Text]]:
        """To train and to evaluate on: as an earlier run read them, for a chat template may show the date."""
        context = context_of(AutoConfig.from_pretrained(self.target))
        if self.length > context:
            raise ValueError(
                f"{self.target} reads {context} tokens at most, --length is {self.length}: choose a smaller one"
            )
        kept, before = [self.out / name for name in KEPT], read_json(self.out / "recipe.json") or {}
        if before.get("texts") == asked and all(file.exists() for file in kept):
            return kept_texts(kept[0]), kept_texts(kept[1])
        texts = list(islice(read_texts(self.data, tokenizer, self.length), self.max_texts))
        if self.held_out_data is not None:
            apart_from_them = list(read_texts(self.held_out_data, tokenizer, self.length))
            learnt = {tuple(text.ids.tolist()) for text in texts}
            seen = sum(tuple(text.ids.tolist()) in learnt for text in apart_from_them)
            if seen:
                warnings.warn(f"{seen} of the {len(apart_from_them)} texts to evaluate on are learnt from, too")
            return texts, apart_from_them
        if len(texts) <= self.held_out:
            raise ValueError(
                f"{self.data} holds {len(texts)} texts and {self.held_out} are held out: none is left. Choose a "
                "smaller --held-out"
            )
        apart = {i * len(texts) // self.held_out for i in range(self.held_out)}  # evenly over the data
        return [text for i, text in enumerate(texts) if i not in apart], [texts[i] for i in sorted(apart)]

    def _asked(self) -> str:
        """Of the texts as they were given, before any template."""
        content = hashlib.sha256()
        for file in (self.data, self.held_out_data):
            for _, entry in read_entries(file) if file is not None else ():
                content.update(json.dumps(entry, sort_keys=True, default=str).encode())
        return content.hexdigest()

    def _settled(self, asked: str, weights: str) -> dict[str, str]:
        """This recipe, for its folder, which must not hold another's states and checkpoints."""
        mine = {key: str(value) for key, value in asdict(self).items() if key not in FREE}
        mine |= {key: named(mine[key]) for key in ("target", "start_from", "start_from_target")}
        if self.start_from is None:
            mine["draft_vocab"] = str(self.draft_vocab or DRAFT_VOCAB)
        mine |= {"texts": asked, "weights": weights}
        if self.held_out_data is not None:
            mine["held_out"] = "a file of its own"
        usual = {field.name: str(field.default) for field in fields(self) if field.name in mine}
        found = read_json(self.out / "recipe.json")
        theirs = usual | {"weights": weights} | found if found else mine
        if theirs != mine:
            name = next(key for key in [*mine, *theirs] if theirs.get(key) != mine.get(key))
            change = f"{OPTIONS.get(name, name)} was {theirs.get(name)}, is {mine.get(name)}"
            onward = f" (--from {self.out / 'head'} goes on from its head)" if (self.out / "head").exists() else ""
            raise ValueError(
                f"{self.out} holds the work of another recipe ({CHANGES.get(name, change)}): choose another folder"
                f"{onward}"
            )
        return mine

    def _extract(
        self, target: PreTrainedModel, head: Eagle3Head, texts: Sequence[Text], deadline: float | None
    ) -> None:
        taps = head.config.taps(len(decoder_layers(target)))
        tokens = sum(len(text.ids) for text in texts)
        done = sum(path.stat().st_size for path in (self.out / "states").glob("states-*.safetensors"))
        size, free = tokens * bytes_per_token(target, taps), shutil.disk_usage(self.out).free
        print(f"{len(texts)} texts, {tokens} tokens; their states take {_bytes(size)} in {self.out / 'states'}")
        if size - done > 0.95 * free:
            raise ValueError(f"{_bytes(size)} of states do not fit on the disk, {_bytes(free)} are free")
        with Progress() as bar, _clear_failures(self.out, "use a shorter --length"):
            task = bar.add_task("states", total=tokens)
            extract(
                target,
                texts,
                taps,
                self.out / "states",
                progress=lambda done: bar.advance(task, done),
                go_on=lambda: deadline is None or time.monotonic() < deadline,
            )

    def _trainer(
        self, head: Eagle3Head, target: PreTrainedModel, dataset: Dataset, processes: PartialState
    ) -> Eagle3Trainer:
        at_once = self._at_once(processes)
        on_cpu = processes.device.type == "cpu"
        args = TrainingArguments(
            output_dir=str(self.out / "run"),
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=self.batch_size // (at_once * processes.num_processes),
            num_train_epochs=self.epochs,
            learning_rate=self.learning_rate,
            adam_beta2=0.95,
            max_grad_norm=0.5,
            warmup_steps=20,
            lr_scheduler_type="cosine",
            bf16=on_cpu or is_torch_bf16_gpu_available(),
            use_cpu=on_cpu,
            ddp_backend="gloo" if on_cpu and processes.num_processes > 1 else None,
            logging_steps=math.gcd(LOG_EVERY, self.save_every),  # a resumed run logs the same means
            save_steps=self.save_every,
            save_total_limit=2,
            seed=self.seed,
            report_to=[],
            remove_unused_columns=False,
            dataloader_pin_memory=not on_cpu,
        )
        weight = STATE_WEIGHT if self.start_from is None else 0.0
        trainer = Eagle3Trainer(
            head,
            target,
            args,
            steps=self.steps,
            loss=self.loss,
            state_weight=weight,
            flex=self.flex,
            train_dataset=dataset,
        )
        speak(trainer)
        return trainer

    def _at_once(self, processes: PartialState) -> int:
        """Rows per process and pass."""
        at_once = min(self.rows_at_once or self.batch_size, self.batch_size // processes.num_processes)
        if at_once == 0 or self.batch_size % (at_once * processes.num_processes):
            raise ValueError(
                f"batch_size {self.batch_size} cannot be divided among {processes.num_processes} processes in passes "
                f"of {at_once or 1} rows: choose a multiple"
            )
        return at_once

    def _given(self) -> Eagle3Head | None:
        """The head to go on from, if there is one."""
        if self.start_from is None:
            return None
        if self.intermediate_size is not None:
            raise ValueError("a head to go on from has an MLP of its own: leave out --intermediate-size")
        if not self.attention_bias:
            raise ValueError("a head to go on from keeps its attention: leave out --no-attention-bias")
        head = load(self.start_from)
        if head.config.version != 3:
            raise ValueError(f"{self.start_from} is an EAGLE-1 or EAGLE-2 head: only EAGLE-3 heads can be trained")
        return head

    def _head(
        self, given: Eagle3Head | None, target: PreTrainedModel, texts: Sequence[Text], processes: PartialState
    ) -> Eagle3Head:
        """To begin with."""
        torch.manual_seed(self.seed)
        size = target.config.get_text_config(decoder=True).vocab_size
        written = token_counts([(text.ids, text.learn) for text in texts], size)
        if given is None:
            changes: dict[str, Any] = {}
            if self.intermediate_size is not None:
                changes["intermediate_size"] = self.intermediate_size
            if not self.attention_bias:
                changes["attention_bias"] = False
            head = convert(target, frequent_tokens(written, self.draft_vocab or DRAFT_VOCAB), **changes)
        else:
            if self.start_from_target is None:
                Eagle3Proposer(given).check(target)
            if self.draft_vocab is not None and self.draft_vocab < len(given.d2t):
                raise ValueError(
                    f"{self.start_from} drafts {len(given.d2t)} tokens already: choose a larger --draft-vocab or none"
                )
            head = given
            if self.start_from_target is not None:
                head = self._transferred(given, self.start_from_target, target, texts, processes)
            if self.draft_vocab is not None:
                counts = written[: head.config.vocab_size].index_fill(0, head.draft_to_target, written.sum() + 1)
                head = grown(head, target, frequent_tokens(counts, self.draft_vocab))
        covered = float(written[head.draft_to_target].sum() / written.sum().clamp(min=1))
        processes.print(
            f"the {len(head.draft_to_target)} tokens of the draft vocabulary are {100 * covered:.1f}% of what it writes"
        )
        return head

    def _transferred(
        self, head: Eagle3Head, name: str, target: PreTrainedModel, texts: Sequence[Text], processes: PartialState
    ) -> Eagle3Head:
        """A head of another target's, made into one for this; made once, and kept in `out`."""
        kept = self.out / "transferred"
        mine = (self.out / "recipe.json").exists()  # else what lies there may be of a run with other options
        if processes.is_main_process and not (mine and (kept / WEIGHTS).exists()):
            theirs, ours = (AutoTokenizer.from_pretrained(source).get_vocab() for source in (name, self.target))
            if theirs != ours:
                raise ValueError(
                    f"{name} and {self.target} have different tokens, so a head of one is no start for the other's: "
                    "choose a model of the same family, or leave out --from to train a fresh head"
                )
            donor = load_model(name).to(target.device)
            width = 3 * target.config.get_text_config(decoder=True).hidden_size
            enough = texts[:: max(1, sum(len(text.ids) for text in texts) // (TRANSFER_TOKENS * width))]
            print(f"carrying {self.start_from} over from {name}: both models read {len(enough)} texts")
            with _clear_failures(self.out, "use a shorter --length"):
                save(transferred(head, donor, target, enough), kept)
        processes.wait_for_everyone()
        return load(kept)


class Deadline(TrainerCallback):
    """Saves and stops when time is up."""

    def __init__(self, at: float):
        self.at = at

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if state.global_step % args.logging_steps:  # what is logged is of whole intervals, stopped or not
            return control
        up = torch.tensor(float(time.monotonic() > self.at), device=args.device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(up)  # all stop at the same update
        if bool(up) and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            if state.is_world_process_zero:
                print(f"time is up at update {state.global_step} of {state.max_steps}: the same command goes on")
        return control


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end; the trainer's state is what is written last."""
    whole = [
        path
        for path in folder.glob("checkpoint-*")
        if all((path / name).exists() for name in CHECKPOINT_FILES) and read_json(path / "trainer_state.json")
    ]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def weights_of(model: PreTrainedModel) -> str:
    """Tells apart models of one shape, by a few entries of each tensor."""
    content = hashlib.sha256()
    for tensor in model.state_dict().values():
        flat = tensor.flatten()
        content.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return content.hexdigest()[:16]


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two runs in one folder would overwrite each other's work."""
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(f"another run is at work in {out}: wait for it, or choose another folder") from error


@contextmanager
def _clear_failures(out: Path, needs_less: str) -> Iterator[None]:
    """What can go wrong for want of room, in words, with what needs less memory; what was saved before is kept."""
    kept = f"What was finished is kept in {out}; the same command goes on from there."
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"out of memory: {needs_less}. {kept}") from error
    except Exception as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        if full or any(sign in str(error) for sign in DISK_FULL):
            raise ValueError(f"the disk is full. Make room. {kept}") from error
        if "can't allocate memory" in str(error):  # of CPUs
            raise ValueError(f"out of memory: {needs_less}. {kept}") from error
        raise


def _bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _prompt(text: Text) -> Tensor:
    """What stands before the first token that the target wrote; of a plain text its first quarter."""
    start = int(text.learn.long().argmax())
    return text.ids[: start or max(1, len(text.ids) // 4)]
