"""Preparation of a run: the initial head, and the teacher, whose states may first be cached on disk.

If an earlier run left both in the folder, the target is not loaded.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.progress import Progress
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from specdec.data.texts import Texts
from specdec.heads.kinds import Head, StandAlone, save
from specdec.heads.loading import load as load_head
from specdec.models.capability import capability
from specdec.models.loading import load as load_model
from specdec.models.text_limits import check_tokens, vocab_size
from specdec.training import precision
from specdec.training.callbacks import format_size
from specdec.training.recipe import Recipe
from specdec.training.run_folder import RunFolder
from specdec.training.starting_head import starting_head
from specdec.training.teacher.base import LocalTeacher, Teacher, fingerprint
from specdec.training.teacher.cached import CachedTeacher, save_teacher
from specdec.training.teacher.int8_target import with_int8_decoder
from specdec.training.teacher.remote import ServedTeacher, describe_server
from specdec.training.teacher.sharded import FullyShardedTeacher, TensorParallelTeacher
from specdec.training.teacher.state_cache import DONE, bytes_per_token, extract
from specdec.training.time_limit import TimedSteps, TimeLimit
from specdec.utils.choices import Sharding

KINDS: dict[Sharding, type[LocalTeacher]] = {"tp": TensorParallelTeacher, "fsdp": FullyShardedTeacher}
KINDS |= {"none": LocalTeacher, "devices": LocalTeacher}


@dataclass(frozen=True)
class Preparation:
    """Steps between reading the texts and the first update of a run.

    Args:
        recipe: options of the run.
        folder: folder of the run.
        processes: processes that share the run.
        given: the head to continue training, if any.
        checksum: checksum of the given texts.
        training_texts: encoded texts to train on.
        held_out: encoded texts to evaluate on.
        limit: time limit of the run.
    """

    recipe: Recipe
    folder: RunFolder
    processes: PartialState
    given: StandAlone | None
    checksum: str
    training_texts: Texts
    held_out: Texts
    limit: TimeLimit

    def run(self) -> tuple[Head, Teacher] | None:
        """Return the initial head and its teacher, or None if time ran out first.

        Raises:
            ValueError: The folder holds another recipe's work, or the target cannot be decoded speculatively.
        """
        return self._from_disk() if self._is_complete() else self._from_target()

    def _is_complete(self) -> bool:
        """Return whether the folder has all that is needed of the target. MTP layers also need its class."""
        if not self.recipe.cache_states or self.recipe.kind == "mtp" or self.folder.identity() is None:
            return all(gather_object([False]))
        needed = [self.folder.states / DONE, self.folder.held_out_states / DONE, self.folder.teacher, self.folder.start]
        return all(gather_object([all(path.exists() for path in needed)]))

    def _from_disk(self) -> tuple[Head, Teacher]:
        teacher = self._cached()
        self._checked_identity(teacher.fingerprint)
        head: Any = load_head(self.folder.start)
        return head, teacher

    def _from_target(self) -> tuple[Head, Teacher] | None:
        if self.recipe.teacher is not None:
            describe_server(self.recipe.teacher)  # fail early if the server cannot be reached
        target = self._load()
        if self.recipe.teacher is None and capability(target).masks is None:
            raise ValueError(capability(target).message(f"{self.recipe.target} cannot be decoded speculatively"))
        for texts in (self.training_texts, self.held_out):
            self._check_tokens(texts, vocab_size(target))
        identity = self._checked_identity(fingerprint(target))
        head = starting_head(
            self.recipe, self.given, target, (self.training_texts, self.held_out), self.folder, self.processes
        )
        if self.processes.is_main_process:
            if self.recipe.teacher is None:
                print(precision.summary(target))
            self.folder.write_identity(identity)
        teacher: LocalTeacher
        if self.recipe.teacher is None:
            teacher = KINDS[self.recipe.shard].of(target, head)
        else:
            address, weights = self.recipe.teacher, identity["weights"]
            teacher = ServedTeacher.of(target, head, address=address, fingerprint=weights)
        if not self.recipe.cache_states:
            return head, teacher
        first = self.processes.is_local_main_process
        if first or teacher.collective:
            save_teacher(teacher, self.folder.teacher, writes=first)
        if first and self.recipe.kind != "mtp":
            save(head, self.folder.start)
        if not self._cache_states(target, teacher):
            return None
        return head, teacher if self.recipe.kind == "mtp" else self._cached()

    def _check_tokens(self, texts: Texts, size: int) -> None:
        try:
            check_tokens([int(texts.ids.max())], size)
        except ValueError as error:
            raise ValueError(f"a text of {self.recipe.data} cannot be read by {self.recipe.target}: {error}") from error

    def _load(self) -> PreTrainedModel:
        name, count = self.recipe.target, self.processes.num_processes
        if self.recipe.teacher is not None:
            on_disk = load_model(name, device_map={"": "disk"})
            return precision.in_fastest_dtype(on_disk, self.processes.device)
        if self.recipe.shard == "none":
            return precision.in_fastest_dtype(load_model(name).to(self.processes.device))
        if self.recipe.shard == "devices":
            return load_model(name, device_map="auto")
        parts = {"tp_size" if self.recipe.shard == "tp" else "fsdp_size": count}
        return load_model(name, distributed_config=DistributedConfig(**parts))

    def _cached(self) -> CachedTeacher:
        loaded = ": the target is loaded for decoding only" if self.recipe.evaluate_every else ""
        self.processes.print(f"states are read from {self.folder.states}{loaded}")
        return CachedTeacher(self.folder.teacher, self._load, collective=self.recipe.shard in ("tp", "fsdp"))

    def _checked_identity(self, weights: str) -> dict[str, str]:
        """Return this run's identity for a target's `weights`; raise ValueError if the folder has another one."""
        identity = self.recipe.identity(self.checksum, weights)
        self.folder.check_identity(identity, self.recipe.defaults() | {"weights": weights})
        return identity

    def _cache_states(self, target: PreTrainedModel, teacher: LocalTeacher) -> bool:
        """Cache all states on disk and return whether all are there. Only those of training texts may be rounded."""
        reader: Teacher = teacher
        if self.recipe.rounded_states:
            reader = LocalTeacher(with_int8_decoder(target, self.training_texts[0].ids), teacher.taps)
        self._check_disk_space(reader)
        steps = TimedSteps(self.limit, at_least=1)  # a run that comes no further would never end
        self._extract(teacher, self.held_out, self.folder.held_out_states, steps)
        self._extract(reader, self.training_texts, self.folder.states, steps)
        self.processes.wait_for_everyone()
        return all((place / DONE).exists() for place in (self.folder.states, self.folder.held_out_states))

    def _check_disk_space(self, teacher: Teacher) -> None:
        tokens = len(self.training_texts.ids)
        done = sum(path.stat().st_size for path in self.folder.states.glob("states-*.safetensors"))
        size = tokens * bytes_per_token(teacher.logits.weight.shape[-1], teacher.taps)
        free, needed = shutil.disk_usage(self.folder.path).free, format_size(size)
        if self.processes.is_local_main_process:
            texts = len(self.training_texts)
            print(f"{texts} texts, {tokens} tokens; their states take {needed} in {self.folder.states}")
        if size - done > 0.95 * free:
            raise ValueError(
                f"{needed} of states do not fit on the disk, {format_size(free)} are free: free some space, use fewer "
                "texts (--max-texts), or leave out --cache-states"
            )

    def _extract(self, teacher: Teacher, texts: Texts, place: Path, steps: TimedSteps) -> None:
        """Cache the states of `texts`, shared among the processes of a machine. The first one shows its progress."""
        first = self.processes.is_local_main_process
        count = int(os.environ.get("LOCAL_WORLD_SIZE", self.processes.num_processes))
        disk_full = self.folder.readable_errors("use a shorter --length")
        with Progress(disable=not first) as bar, disk_full, teacher.lockstep():
            task = bar.add_task("states", total=len(texts.ids) / count)

            def advance(tokens: int) -> None:
                steps.done(tokens)
                bar.advance(task, tokens)

            extract(
                teacher,
                texts,
                place,
                share=(self.processes.local_process_index, count),
                progress=advance,
                should_continue=steps.may_begin,
            )
