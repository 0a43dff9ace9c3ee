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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec.data.packed_dataset import PackedTexts
from specdec.data.texts import Texts
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.eagle3.head import Eagle3Head
from specdec.models.introspection import decoder_layers
from specdec.training import precision
from specdec.training.callbacks import format_size
from specdec.training.corpus import check_length, corpus, write_corpus
from specdec.training.initialization.dflash import block_config_for
from specdec.training.initialization.eagle3 import config_for
from specdec.training.objectives.losses import ROWS_AT_ONCE
from specdec.training.optimizer import matrices
from specdec.training.recipe import DRAFT_VOCAB, Recipe
from specdec.training.run import check_recipe
from specdec.training.run_folder import RunFolder
from specdec.training.starting_head import fresh_changes, given_head
from specdec.training.teacher.state_cache import bytes_per_token
from specdec.training.teacher.state_extractor import batch_tokens_of
from specdec.training.teacher.target_logits import NUMBERS_AT_ONCE

META = torch.device("meta")
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
    memory: Mapping[str, float]
    disk: Mapping[str, float]
    work: Mapping[str, float]

    def summary(self) -> str:
        """Format the plan as text."""
        seconds = sum(self.work.values()) / self.speed / self.processes
        size = partial(format_size, digits=2)
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
    _, processes = check_recipe(recipe)
    if recipe.kind == "mtp":
        raise ValueError(
            "--dry-run does not support --kind mtp: MTP layers have the target's own architecture. Leave out --dry-run"
        )
    check_length(recipe)
    target = _on_meta(recipe.target, processes.device)
    with TemporaryDirectory() as place:
        write_corpus(recipe, RunFolder(Path(place)), AutoTokenizer.from_pretrained(recipe.target), "")
        training_texts, _ = corpus(RunFolder(Path(place)))
        return estimate(recipe, target, _config(recipe, target), training_texts, processes)


def estimate(
    recipe: Recipe,
    target: PreTrainedModel,
    config: Eagle3Config | DFlashConfig,
    texts: Texts,
    processes: PartialState,
) -> Plan:
    """Estimate the cost of a run, given the shapes of its parts. The target may be on the meta device."""
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
    scored = 3 * recipe.drafted * head.width * min(learned_tokens, rows * head.trained)
    work = {
        "the target's passes": 2 * (weights - readout) * tokens * (0 if recipe.teacher else passes),
        "logits of its whole vocabulary": 2 * V * H * learned_tokens * passes,
        "the head's passes, forward and backward": 3 * head.forward * rows * epochs,
        "logits of drafts and their gradients": 2 * K * (H * learned_tokens + scored) * epochs,
    }
    return Plan(
        texts=len(texts),
        tokens=tokens,
        learned_tokens=learned_tokens,
        updates=math.ceil(math.ceil(rows / recipe.batch_size) * epochs),
        target=weights,
        head=head.weights,
        device=str(device),
        processes=processes.num_processes,
        speed=precision.operations_per_second(torch.bfloat16 if in_half else torch.float32, device),
        memory=memory,
        disk=disk,
        work=work,
    )


@dataclass(frozen=True)
class HeadCost:
    """Cost of a head in training.

    Attributes:
        weights: number of parameters.
        matrices: number of parameters that Muon updates.
        width: width of the LM head's input (W), including a Markov head's embeddings.
        trained: maximum number of tokens in a row after which drafts are trained: all, or the anchors.
        activations: numbers kept for the backward pass over one row, if all tokens are trained on.
        forward: floating-point operations over one row, all steps included, logits excluded.
    """

    weights: int
    matrices: int
    width: int
    trained: int
    activations: int
    forward: int


def head_cost(c: Eagle3Config | DFlashConfig, recipe: Recipe) -> HeadCost:
    """Compute the cost of a head from its shape. Terms below 3% are left out."""
    with META:
        head = DFlashHead(c) if isinstance(c, DFlashConfig) else Eagle3Head(c)
    T, H, layers, wide = recipe.length, c.hidden_size, c.num_layers, head.fc.in_features
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    L, steps = T - 1, min(recipe.drafted, T - 2)
    # Over all steps, tokens: inputs of the layers; keys: the keys that they read; context: tokens whose keys and values
    # alone are computed; ends: numbers kept before and after the layers, and the gradient of the drafts.
    if isinstance(c, DFlashConfig):
        trained, width, context = min(recipe.anchors, T - 2), H + c.markov_rank, L
        tokens = trained * c.block_size
        keys = L + tokens
        scores = tokens * keys
        ends = 3 * L * H + tokens * H + steps * (L + trained * c.confidence) * width
    else:
        trained, width, context, tokens = T - 2, H, 0, L * steps
        keys = L * steps * (steps + 1) // 2
        scores = L * keys
        ends = tokens * (2 * c.embedding_size + 3 * H) + (L * wide if c.fc_norm or c.norm_before_fc else 0)
    # Kept in each layer: two norms' inputs and outputs, the MLP's four products, queries, outputs, the keys and values
    # of all query heads, and the mask as numbers.
    normed = (tokens * (q + kv) + context * kv) * 2 * c.qk_norm
    layer = tokens * (6 * H + 4 * c.intermediate_size + 2 * q) + normed + 2 * q * keys + scores
    linear = sum(weight.numel() for weight in matrices(head.layers))
    products = L * head.fc.weight.numel() + tokens * linear + layers * (context * 2 * kv * H + 2 * q * scores)
    return HeadCost(
        weights=parameters(head),
        matrices=sum(weight.numel() for weight in matrices(head)),
        width=width,
        trained=trained,
        activations=T * wide + layers * layer + ends,
        forward=2 * products,
    )


def parameters(module: torch.nn.Module | None) -> int:
    return 0 if module is None else sum(weight.numel() for weight in module.parameters())


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
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
