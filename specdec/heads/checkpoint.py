"""`HeadCheckpoint`: a parsed checkpoint, and the checks of its tensors' names, shapes and vocabulary.

All kinds of heads and all layouts share this code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from specdec.heads.config import LayerConfig
from specdec.heads.config_fields import Field

H = TypeVar("H", bound=nn.Module, covariant=True)
Rules = Sequence[tuple[re.Pattern[str], str]]
# Tensor names in other layouts, each with specdec's.
RULES = (
    (re.compile(r"midlayer\.(.*)"), r"layers.0.\1"),
    (re.compile(r"encoder\.fc\.(.*)"), r"fc.\1"),
    (re.compile(r"encoder\.output_norm_enc\.(.*)"), r"hidden_norm.\1"),
)
# Suffixes of the tensors from whose shapes the config is inferred, by their number of dimensions.
DIMENSIONS = {
    1: ("norm.weight", "d2t"),
    2: (
        *("fc.weight", "lm_head.weight", "embed_tokens.weight", "proj.weight", "projection.weight", "gates.weight"),
        *("markov_w1.weight", "codebook.weight"),
    ),
    3: ("base_kernel",),
}
# Tensors that a head does not compute with, each with the reason that `specdec inspect` gives.
IGNORED = {
    "t2d": "the inverse of d2t",
    "rotary_emb.inv_freq": "computed from the config",
    "verifier_lm_head.weight": "the target's own",
    "verifier_norm.weight": "the target's own",
}
SOURCES = {"config": "from its config", "weights": "from its weights", "assumed": "ASSUMED"}


@dataclass(frozen=True)
class HeadCheckpoint(Generic[H]):
    """Parsed checkpoint of a head, of any kind and layout.

    Attributes:
        kind: class of the head.
        path: the local folder.
        format: name of the layout.
        config: the head's config.
        fields: every fact about the head, with its source.
        used: shapes of the tensors in use, by the checkpoint's names.
        ignored: reasons for the tensors left out, by the checkpoint's names.
        weights: tensors in use, by specdec's names.
    """

    kind: Callable[[Any], H]
    path: Path
    format: str
    config: Any
    fields: Sequence[Field]
    used: dict[str, tuple[int, ...]]
    ignored: dict[str, str]
    weights: dict[str, Tensor]

    def head(self) -> H:
        """Build the head, frozen, on the CPU, in the precision it was saved in, or in bfloat16 if that was int8.

        Raises:
            ValueError: a tensor is missing, unexpected, or of another shape or kind of number.
        """
        with torch.device("meta"):
            head = self.kind(self.config)
        state = head.state_dict()
        missing, unexpected = sorted(state.keys() - self.weights.keys()), sorted(self.weights.keys() - state.keys())
        if missing or unexpected:
            faults = [f"lacks {', '.join(missing)}"] if missing else []
            if unexpected:
                faults.append(f"holds {', '.join(unexpected)}, which this kind of head does not have")
            layout = ": its layout may be one that specdec does not know" if missing and unexpected else ""
            raise ValueError(f"{self.path} {' and '.join(faults)}{layout}")
        for name, tensor in self.weights.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"{self.path}: {name} has shape {tuple(tensor.shape)}, expected {tuple(state[name].shape)} from "
                    "the config and the other weights"
                )
            if tensor.is_floating_point() != state[name].is_floating_point():
                expected = "floating-point numbers" if state[name].is_floating_point() else "integers"
                raise ValueError(
                    f"{self.path}: {name} has dtype {tensor.dtype}, expected {expected}: the file is damaged"
                )
        dtype = self.weights["fc.weight" if "fc.weight" in self.weights else min(self.weights)].dtype
        weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.weights.items()}
        head.load_state_dict(weights, assign=True)
        return head.requires_grad_(False).eval()

    def summary(self) -> str:
        """List every config field with its source, and every tensor that is used, ignored or borrowed."""
        lines = [f"{self.path}: {self.format}", "", "fields"]
        width = max(len(field.name) for field in self.fields)
        for field in self.fields:
            note = f"; {field.note}" if field.note else ""
            lines.append(f"  {field.name:{width}}  {field.value}  ({SOURCES[field.source]}{note})")
        width = max(map(len, self.used))
        lines += ["", "tensors used", *(f"  {name:{width}}  {list(self.used[name])}" for name in sorted(self.used))]
        lines += ["", "tensors ignored", *(f"  {name}: {why}" for name, why in sorted(self.ignored.items()))]
        if not self.ignored:
            lines.append("  none")
        own = {"embed_tokens.weight": self.config.own_embedding, "lm_head.weight": self.config.own_head}
        borrowed = [f"  {name} (the target's is used)" for name in own if not own[name]]
        return "\n".join([*lines, "", "not in the files", *(borrowed or ["  nothing"])])


def rename_tensors(
    tensors: Mapping[str, Tensor], folder: Path, rules: Rules = RULES, ignored: Mapping[str, str] = IGNORED
) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]], dict[str, str]]:
    """Assign a file's tensors to specdec's names.

    Args:
        tensors: tensors by the checkpoint's names.
        folder: folder of the checkpoint, for error messages.
        rules: patterns of the checkpoint's names, each with specdec's. Names that match none stay as they are.
        ignored: endings of the names of tensors that a head does not compute with, each with the reason.

    Returns:
        `HeadCheckpoint.weights`, `HeadCheckpoint.used` and `HeadCheckpoint.ignored`.
    """
    weights: dict[str, Tensor] = {}
    sources: dict[str, str] = {}  # the checkpoint's names, by specdec's
    left_out: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        reason = next((why for end, why in ignored.items() if f".{plain}".endswith(f".{end}")), None)
        if plain.endswith("self_attn.o_proj.bias") and not bool(tensor.any()):
            reason = "zeros, written for engines that expect it"
        if reason:
            left_out[name] = reason
            continue
        ours = next((found.expand(to) for rule, to in rules if (found := rule.fullmatch(plain))), plain)
        if ours in weights:
            raise ValueError(f"{folder}: two tensors map to {ours}: {sources[ours]} and {name}")
        weights[ours], sources[ours] = tensor, name
    check_shapes(folder, weights)
    return weights, {name: tuple(tensors[name].shape) for name in sources.values()}, left_out


def check_shapes(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError for an empty tensor, or for one that the config is inferred from with a wrong number of dims."""
    for name, tensor in weights.items():
        dims = next((dims for dims, ends in DIMENSIONS.items() if name.endswith(ends)), tensor.dim())
        if tensor.dim() != dims or not tensor.numel():
            expected = f"{dims} dimension{'s' if dims > 1 else ''} and at least one value"
            raise ValueError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, expected {expected}: the file is damaged"
            )


def check_vocabulary(folder: Path, d2t: Tensor | None, config: LayerConfig) -> None:
    """Raise ValueError unless d2t maps the draft tokens to distinct tokens of the target's vocabulary."""
    if d2t is None:
        raise ValueError(
            f"{folder} drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no d2t that maps them to "
            "the target's"
        )
    if d2t.shape != (config.draft_vocab_size,):
        raise ValueError(f"{folder}: d2t has shape {tuple(d2t.shape)}, expected ({config.draft_vocab_size},)")
    ids = torch.arange(len(d2t)) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"{folder}: d2t maps draft tokens outside the vocabulary, or two to the same token")
