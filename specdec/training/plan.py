"""Estimate of the memory, disk space and work of a training run, before it starts.

No weights are loaded: the target is on torch's meta device, and the head is an `Outline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec.data.packed_dataset import PackedTexts
from specdec.data.texts import Texts
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.config import Eagle3Config
from specdec.models.introspection import decoder_layers
from specdec.training import precision
from specdec.training.corpus import check_length, corpus, write_corpus
from specdec.training.cost_model import META, Outline, parameters
from specdec.training.initialization.dflash import block_config_for
from specdec.training.initialization.eagle3 import config_for
from specdec.training.objectives.losses import ROWS_AT_ONCE
from specdec.training.progress import in_bytes
from specdec.training.recipe import DRAFT_VOCAB, Recipe
from specdec.training.run import checked
from specdec.training.run_folder import RunFolder
from specdec.training.starting_head import fresh_changes, given_head
from specdec.training.teacher.state_cache import bytes_per_token
from specdec.training.teacher.state_extractor import batch_tokens_of
from specdec.training.teacher.target_logits import NUMBERS_AT_ONCE

CHECKPOINTS = 3  # checkpoints on the disk at the same time, while one is written


@dataclass(frozen=True)
class Plan:
    """Cost of a run.

    Attributes:
        texts: number of training texts.
        tokens: tokens of the training texts.
        learned_tokens: tokens among them that the target wrote.
        updates: updates of the head.
        target: parameters of the target.
        head: parameters of the head.
        device: device of the run.
        processes: number of processes.
        speed: floating-point operations per second of one product, measured on this machine's device.
        memory: bytes on the device of each process, by purpose.
        disk: bytes on the disk, by purpose.
        work: floating-point operations of all processes, by purpose.
    """

    texts: int
    tokens: int
    learned_tokens: int
    updates: int
    target: int
    head: int
    device: str
    processes: int
    speed: float
    memory: dict[str, float]
    disk: dict[str, float]
    work: dict[str, float]

    def summary(self) -> str:
        """Format the plan as text."""
        seconds = sum(self.work.values()) / self.speed / self.processes
        size = partial(in_bytes, digits=2)
        lines = [
            f"{self.texts} texts to train on, {self.tokens} tokens, {self.learned_tokens} of them the target's own: "
            f"{self.updates} updates",
            f"target of {_short(self.target)} parameters, head of {_short(self.head)}",
            "",
            f"memory, in each of {self.processes} processes, on {self.device}"
            if self.processes > 1
            else f"memory, on {self.device}",
            *_table(self.memory, size),
            "",
            "disk",
            *_table(self.disk, size),
            "",
            "work, in floating-point operations",
            *_table(self.work, lambda number: f"{number:.1e}"),
            "",
            f"at {self.speed / 1e9:,.0f} billion a second, measured here for one product, at least {_time(seconds)}, "
            "without decoding held-out texts",
        ]
        return "\n".join(lines)


def plan(recipe: Recipe) -> Plan:
    """Estimate the cost of `train(recipe)`. Reads texts and configurations, and writes nothing.

    Where memory depends on the texts it is an upper bound, as if all tokens were trained on.

    Raises:
        ValueError: `train` would refuse the recipe before loading the target's weights, or its kind is "mtp".
    """
    _, processes = checked(recipe)
    if recipe.kind == "mtp":
        raise ValueError(
            "--dry-run does not support --kind mtp: MTP layers have the target's own architecture. Leave out --dry-run"
        )
    check_length(recipe)
    target = _on_meta(recipe.target, processes.device)
    with TemporaryDirectory() as place:
        write_corpus(recipe, RunFolder(Path(place)), AutoTokenizer.from_pretrained(recipe.target), "")
        training_texts, _ = corpus(RunFolder(Path(place)))
        return Arithmetic(recipe, target, _config(recipe, target), training_texts, processes).plan()


@dataclass(frozen=True)
class Arithmetic:
    """Sizes of the parts of a run. `target` is on the meta device."""

    recipe: Recipe
    target: PreTrainedModel
    head: Eagle3Config | DFlashConfig
    texts: Texts
    processes: PartialState

    def plan(self) -> Plan:
        device = self.processes.device
        return Plan(
            texts=len(self.texts),
            tokens=self.tokens,
            learned_tokens=self.learned_tokens,
            updates=self.updates,
            target=parameters(self.target),
            head=self.outline.weights,
            device=str(device),
            processes=self.processes.num_processes,
            speed=precision.operations_per_second(self.computed_in, device),
            memory=self.memory(),
            disk=self.disk(),
            work=self.work(),
        )

    @property
    def tokens(self) -> int:
        return len(self.texts.ids)

    @property
    def learned_tokens(self) -> int:
        return int(self.texts.learn.sum())

    @cached_property
    def outline(self) -> Outline:
        recipe = self.recipe
        taps, device = len(self._taps), self.processes.device
        return Outline(self.head, taps, recipe.length, recipe.drafted, recipe.anchors, device)

    @property
    def rows(self) -> int:
        return len(PackedTexts(self.texts, self.recipe.length))

    @property
    def updates(self) -> int:
        return math.ceil(math.ceil(self.rows / self.recipe.batch_size) * self.recipe.epochs)

    @property
    def computed_in(self) -> torch.dtype:
        """Number format of the head's matrix products."""
        return torch.bfloat16 if precision.pays(self.processes.device) else torch.float32

    def memory(self) -> dict[str, float]:
        own, theirs, T = self.outline.weights, self.target.dtype.itemsize, self.recipe.length
        rows, several = self.recipe.per_pass(self.processes), self.processes.num_processes > 1
        H, V, K = self._H, self._V, self.head.draft_vocab_size
        halves = 2 * own if self.computed_in == torch.bfloat16 else 0
        read = batch_tokens_of(self.processes.device)
        text = self.target.config.get_text_config(decoder=True)
        wide = getattr(text, "intermediate_size", 4 * H)
        passes = {
            f"the target's weights, {_name(self.target.dtype)}": parameters(self.target) * theirs,
            f"a pass of the target over {read} tokens": read * (2 * self._states * H + 3 * wide) * theirs,
        }
        return ({} if self.recipe.teacher else passes) | {
            "a copy of its embedding and LM head": (V + K) * H * theirs,
            "the head, its gradients and their moments": 4 * (own * (2 + several) + self._moments) + halves,
            f"{rows} x {T} tokens' states": rows * T * self._states * H * (theirs + 4),
            "activations of the head kept for gradients": self.outline.kept_for_gradients(rows),
            "logits": 4 * min(ROWS_AT_ONCE, rows * T) * K * 4 + 2 * NUMBERS_AT_ONCE * 4,
        }

    def disk(self) -> dict[str, float]:
        own = self.outline.weights
        states: dict[str, float] = {}
        if self.recipe.cache_states:
            states["the target's states"] = self.tokens * bytes_per_token(self._H, self._taps)
        return states | {
            "checkpoints": CHECKPOINTS * 4 * (own + self._moments),
            "the head, bfloat16": 2 * own * 2,  # the previous one stays until the next is complete
        }

    def work(self) -> dict[str, float]:
        epochs, H, V = self.recipe.epochs, self._H, self._V
        K, W, steps = self.head.draft_vocab_size, self.outline.width, self.recipe.drafted
        passes = 1.0 if self.recipe.cache_states else epochs
        here = 0 if self.recipe.teacher else passes
        readout = parameters(self.target.get_output_embeddings())
        scored = min(self.learned_tokens, self.rows * self.outline.trained_per_row)  # drafts per step
        return {
            "the target's passes": 2 * (parameters(self.target) - readout) * self.tokens * here,
            "logits of its whole vocabulary": 2 * V * H * self.learned_tokens * passes,
            "the head's passes, forward and backward": 3 * self.outline.forward_work() * self.rows * epochs,
            "logits of drafts and their gradients": 2 * K * (H * self.learned_tokens + 3 * steps * W * scored) * epochs,
        }

    @property
    def _moments(self) -> int:
        """Count the optimizer's state: Adam keeps two numbers per weight, Muon one."""
        return 2 * self.outline.weights - (self.outline.matrices if self.recipe.optimizer_name == "muon" else 0)

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.head.taps(len(decoder_layers(self.target)))

    @property
    def _states(self) -> int:
        """Number of states per token: those at the taps, and the final one."""
        return len(self._taps) + 1

    @property
    def _H(self) -> int:
        return self.target.config.get_text_config(decoder=True).hidden_size

    @property
    def _V(self) -> int:
        return self.target.config.get_text_config(decoder=True).vocab_size


def _on_meta(name: str, device: torch.device) -> PreTrainedModel:
    """Create the target without weights, in the number format it will run in."""
    config = AutoConfig.from_pretrained(name)
    saved = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype or torch.float32
    read_in = precision.read_in(saved, device)
    with META:
        return AutoModelForCausalLM.from_config(config, dtype=read_in).eval()


def _config(recipe: Recipe, target: PreTrainedModel) -> Eagle3Config | DFlashConfig:
    """Return the config of the head that `starting_head` makes."""
    given, changes = given_head(recipe), fresh_changes(recipe)
    if isinstance(given, DFlashHead):
        return given.config
    if given is not None and recipe.start_from_target is None:
        return replace(given.config, draft_vocab_size=max(recipe.draft_vocab or 0, given.config.draft_vocab_size))
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    size = min(recipe.draft_vocab or DRAFT_VOCAB, vocab_size)
    if recipe.kind == "eagle3":
        return config_for(target, size, **changes)
    return block_config_for(target, size, vocab_size - 1, recipe.kind, recipe.drafted, **changes)


def _table(parts: dict[str, float], shown: Callable[[float], str]) -> Iterator[str]:
    rows = [*parts.items(), ("total", sum(parts.values()))]
    wide = max(len(what) for what, _ in rows)
    for what, number in rows:
        yield f"  {what:<{wide}}  {shown(number):>9}"


def _short(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _time(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
