"""Estimate of the memory, disk space and work of a training run, before it starts.

No weights are loaded: the target and the head are on torch's meta device. The head's cost is computed from its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.data.packed_dataset import PackedTexts
from specdec.data.survey import survey
from specdec.data.texts import Texts
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.config import Eagle3Config
from specdec.models.introspection import decoder_layers
from specdec.training import precision
from specdec.training.callbacks import format_size
from specdec.training.corpus import check_target, corpus, write_corpus
from specdec.training.evaluation_cost import ROWS, EvaluationCost, evaluation_cost
from specdec.training.head_cost import META, head_cost, parameters
from specdec.training.initialization.dflash import block_config_for
from specdec.training.initialization.eagle3 import config_for
from specdec.training.objectives.losses import ROWS_AT_ONCE
from specdec.training.recipe import DRAFT_VOCAB, Recipe
from specdec.training.run import check_identity, check_recipe
from specdec.training.run_folder import RunFolder
from specdec.training.starting_head import fresh_changes, given_head
from specdec.training.teacher.state_cache import bytes_per_token
from specdec.training.teacher.state_extractor import batch_tokens_of
from specdec.training.teacher.target_logits import NUMBERS_AT_ONCE
from specdec.utils.tokenizer_files import load_tokenizer

CHECKPOINTS = 3  # checkpoints on the disk at the same time, while one is written


@dataclass(frozen=True)
class Plan:
    """Cost of a run.

    Attributes:
        texts: number of training texts.
        tokens: tokens of the training texts.
        learned_tokens: tokens among them that are trained on, those of the answers.
        origin: what the files record about who wrote the answers.
        updates: updates of the head.
        target: parameters of the target.
        head: parameters of the head.
        device: device of the run.
        processes: number of processes.
        speed: floating-point operations per second of a product of many rows, measured on this machine's device.
        decoding_speed: the same of a product of few rows, as in decoding.
        memory: bytes on the device of each process, by purpose.
        disk: bytes on the disk, by purpose.
        work: floating-point operations of all processes, by purpose.
        evaluation: cost of the evaluations, which one process makes.
    """

    texts: int
    tokens: int
    learned_tokens: int
    origin: str
    updates: int
    target: int
    head: int
    device: str
    processes: int
    speed: float
    decoding_speed: float
    memory: Mapping[str, float]
    disk: Mapping[str, float]
    work: Mapping[str, float]
    evaluation: EvaluationCost

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds that training takes at least, and seconds of the evaluations."""
        return (
            sum(self.work.values()) / self.speed / self.processes,
            self.evaluation.decoding / self.decoding_speed + self.evaluation.loss / self.speed,
        )

    def summary(self) -> str:
        """Format the plan as text."""
        training, evaluating = self.seconds
        work = dict(self.work) | {"evaluations": self.evaluation.decoding + self.evaluation.loss}
        size = partial(format_size, digits=2)
        lines = [
            f"{self.texts} texts to train on, {self.tokens} tokens, {self.learned_tokens} of them in answers: "
            f"{self.updates} updates",
            self.origin,
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
            *_table(work, lambda number: f"{number:.1e}"),
            "",
            f"at {self.speed / 1e9:,.0f} billion a second, measured here for one product, training takes at least "
            f"{_time(training)}",
            f"evaluations of {self.evaluation.texts} held-out texts take up to {_time(evaluating)} more. Their number, "
            f"by decoding: {self.evaluation.decodings} (at {self.decoding_speed / 1e9:,.0f} billion a second, for a "
            f"product of {ROWS} rows), by loss: {self.evaluation.losses}",
        ]
        return "\n".join(lines)


def plan(recipe: Recipe) -> Plan:
    """Estimate the cost of `train(recipe)`. Reads texts and configurations, and writes nothing.

    Where memory depends on the texts it is an upper bound, as if all tokens were trained on.

    Raises:
        ValueError: `train` would refuse the recipe before loading the target's weights, or its kind is "mtp".
    """
    _, processes = check_recipe(recipe)
    if recipe.kind == "mtp":
        raise ValueError(
            "--dry-run does not support --kind mtp: MTP layers have the target's own architecture. Leave out --dry-run"
        )
    found = survey(recipe.data, recipe.held_out_data)  # finds broken data before anything is loaded
    check_target(recipe)
    check_identity(recipe, RunFolder(recipe.out), found.checksum)
    with TemporaryDirectory() as place:
        write_corpus(recipe, RunFolder(Path(place)), load_tokenizer(recipe.target), "")
        training_texts, held_out = corpus(RunFolder(Path(place)))
        target = _on_meta(recipe.target, processes.device)
        planned = estimate(recipe, target, _config(recipe, target), training_texts, processes, held_out)
    return replace(planned, origin=found.origin(recipe.target))


def estimate(
    recipe: Recipe,
    target: PreTrainedModel,
    config: Eagle3Config | DFlashConfig,
    texts: Texts,
    processes: PartialState,
    held_out: Texts | None = None,
) -> Plan:
    """Estimate the cost of a run, given the shapes of its parts. The target may be on the meta device.

    held_out: held-out texts. None: none are evaluated.
    """
    T, epochs, device, several = recipe.length, recipe.epochs, processes.device, processes.num_processes > 1
    text = target.config.get_text_config(decoder=True)
    H, V, K = text.hidden_size, text.vocab_size, config.draft_vocab_size
    taps = config.taps(len(decoder_layers(target)))
    states = (len(taps) + 1) * H  # those at the taps, and the final one
    weights, width = parameters(target), target.dtype.itemsize
    head = head_cost(config, recipe)
    moments = 2 * head.weights - (head.matrices if recipe.optimizer_name == "muon" else 0)  # of Adam two, of Muon one
    in_half = precision.bfloat16_is_faster(device)
    tokens, learned_tokens = len(texts.ids), int(texts.learn.sum())
    rows, at_once, read = len(PackedTexts(texts, T)), recipe.per_pass(processes), batch_tokens_of(device)
    wide = getattr(text, "intermediate_size", 4 * H)
    of_target = {
        f"the target's weights, {str(target.dtype).removeprefix('torch.')}": weights * width,
        f"a pass of the target over {read} tokens": read * (2 * states + 3 * wide) * width,
    }
    optimized = 4 * (head.weights * (2 + several) + moments) + (2 * head.weights if in_half else 0)
    memory = ({} if recipe.teacher else of_target) | {
        "a copy of its embedding and LM head": (V + K) * H * width,
        "the head, its gradients and their moments": optimized,
        f"{at_once} x {T} tokens' states": at_once * T * states * (width + 4),
        "activations of the head kept for gradients": 4 * head.activations * at_once,
        "logits": 4 * min(ROWS_AT_ONCE, at_once * T) * K * 4 + 2 * NUMBERS_AT_ONCE * 4,
    }
    of_states = {"the target's states": tokens * bytes_per_token(H, taps)} if recipe.cache_states else {}
    disk = of_states | {
        "checkpoints": CHECKPOINTS * 4 * (head.weights + moments),
        "the head, bfloat16": 2 * head.weights * 2,  # the previous one stays until the next is complete
    }
    passes = 1.0 if recipe.cache_states else epochs
    readout = parameters(target.get_output_embeddings())
    again = recipe.step_weights == "d-pace"  # the logits are computed twice
    scored = (3 + again) * recipe.drafted * head.width * min(learned_tokens, rows * head.trained)
    work = {
        "the target's passes": 2 * (weights - readout) * tokens * (0 if recipe.teacher else passes),
        "logits of its whole vocabulary": 2 * V * H * learned_tokens * passes,
        "the head's passes, forward and backward": 3 * head.forward * rows * epochs,
        "logits of drafts and their gradients": 2 * K * (H * learned_tokens * (1 + again) + scored) * epochs,
    }
    updates = math.ceil(math.ceil(rows / recipe.batch_size) * epochs)
    evaluation = EvaluationCost(0, 0, 0, 0.0, 0.0)
    if held_out is not None:
        evaluation = evaluation_cost(recipe, held_out, updates, target=weights, head=head.weights, forward=head.forward)
    return Plan(
        texts=len(texts),
        tokens=tokens,
        learned_tokens=learned_tokens,
        origin="",
        updates=updates,
        target=weights,
        head=head.weights,
        device=str(device),
        processes=processes.num_processes,
        speed=precision.operations_per_second(torch.bfloat16 if in_half else torch.float32, device),
        decoding_speed=precision.operations_per_second(target.dtype, device, rows=ROWS),
        memory=memory,
        disk=disk,
        work=work,
        evaluation=evaluation,
    )


def _on_meta(name: str, device: torch.device) -> PreTrainedModel:
    """Create the target without weights, in the number format it will run in."""
    config = AutoConfig.from_pretrained(name)
    saved = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype or torch.float32
    dtype = precision.running_dtype(saved, device)
    with META:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


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


def _table(parts: Mapping[str, float], shown: Callable[[float], str]) -> Iterator[str]:
    rows = [*parts.items(), ("total", sum(parts.values()))]
    wide = max(len(what) for what, _ in rows)
    for what, number in rows:
        yield f"  {what:<{wide}}  {shown(number):>9}"


def _short(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _time(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} hours"
    if seconds >= 120:
        return f"{seconds / 60:.0f} minutes"
    return "1 second" if round(seconds) == 1 else f"{seconds:.0f} seconds"
