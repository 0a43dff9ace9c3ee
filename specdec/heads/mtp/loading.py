"""`load`: builds an `MtpHead` from a checkpoint's tensors, using the target's class for the decoder layers.

An MTP layer gets the type of the target's layers that it resembles most. transformers assigns the tensors
(`from_pretrained` with a `state_dict`), which fuses experts, converts names and handles quantized formats.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specdec.heads.mtp.checkpoint import EMBED_NORM, FUSE, NORM, STATE_NORM, MtpTensors, names, read
from specdec.heads.mtp.head import MtpHead, MtpLayer
from specdec.models.hardware import DTYPES
from specdec.models.introspection import decoder_layers, is_sharded
from specdec.models.views import whole

EXPERT = re.compile(r"\bexperts\.(?:\d+\.)?.*")
MLP = re.compile(r"\b(mlp|moe|feed_forward|block_sparse_moe)\b")


def load(target: PreTrainedModel, path: str | None = None) -> MtpHead:
    """Load a target's MTP layers, on the target's device and in its dtype.

    Args:
        path: folder or hub id that holds them. None for the one that the target was loaded from.

    Raises:
        NoMtpLayers: the checkpoint does not exist or holds none.
        ValueError: the layers do not fit the target.
    """
    found = read(path or _source(target), len(decoder_layers(target)))
    layers = [build_layer(target, tensors, index).requires_grad_(False) for index, tensors in enumerate(found)]
    embeddings = [target.get_input_embeddings(), target.get_output_embeddings()]
    return MtpHead(layers, *(map(whole, embeddings) if is_sharded(target) else embeddings))


def at_hand(target: PreTrainedModel) -> bool:
    """Return whether the local checkpoint that the target was loaded from has MTP layers."""
    try:
        return bool(names(_source(target), len(decoder_layers(target)), local=True))
    except ValueError:  # no local checkpoint, or no decoder layers in the target
        return False


def _source(target: PreTrainedModel) -> str:
    return str(getattr(target.config, "_name_or_path", "") or "")


def build_layer(target: PreTrainedModel, tensors: MtpTensors, index: int = 0) -> MtpLayer:
    """Build the MTP layer number `index`."""
    kind, config = _kind_and_config(target, tensors.block, index)
    with torch.device("meta"):
        outline = kind(copy.deepcopy(config))
    norm_name, norm = last_norm(outline)
    first = decoder_layers(outline)[0]
    prefix = next(name for name, module in outline.named_modules() if module is first).rpartition(".")[0]
    state = {f"{prefix}.{i}.{name}": tensor for i, layer in enumerate(tensors.block) for name, tensor in layer.items()}
    state[f"{norm_name}.weight"] = tensors.own[NORM]
    for weight in (outline.get_input_embeddings().weight, outline.get_output_embeddings().weight):
        name = next(name for name, other in outline.named_parameters() if other is weight)
        state[name] = torch.zeros(weight.shape)  # unused: the target's are used instead
    dtype = target.dtype if target.dtype in DTYPES.values() else tensors.own[FUSE].dtype
    block, found = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    wrong = [*map(str, found["mismatched_keys"]), *found["missing_keys"], *found["unexpected_keys"]]
    if wrong:
        raise ValueError(
            f"the MTP layers of {target.name_or_path} do not fit the {kind.__name__} of this transformers version: "
            f"{', '.join(sorted(wrong)[:3])}"
        )
    block.set_output_embeddings(nn.Identity())
    embed_norm, state_norm = (copy.deepcopy(norm).to_empty(device="cpu").to(dtype) for _ in range(2))
    embed_norm.load_state_dict({"weight": tensors.own[EMBED_NORM]})
    state_norm.load_state_dict({"weight": tensors.own[STATE_NORM]})
    weight = tensors.own[FUSE].to(dtype)
    with torch.device("meta"):
        fuse = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    fuse.weight = nn.Parameter(weight, requires_grad=False)
    device = next(decoder_layers(target)[-1].parameters()).device
    return MtpLayer(embed_norm, state_norm, fuse, block, tensors.states_first).to(device).eval()


def tensors_of(layer: MtpLayer) -> MtpTensors:
    """Return the tensors of a layer. Inverse of `build_layer`."""
    _, norm = last_norm(layer.block)
    modules = {EMBED_NORM: layer.embed_norm, STATE_NORM: layer.state_norm, FUSE: layer.fuse, NORM: norm}
    own: dict[str, Any] = {role: module.weight.detach() for role, module in modules.items()}
    block = [
        {name: tensor.detach() for name, tensor in each.state_dict().items()} for each in decoder_layers(layer.block)
    ]
    return MtpTensors(own, block, layer.states_first)


def _kind_and_config(
    target: PreTrainedModel, block: Sequence[dict[str, Tensor]], index: int
) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Return the class of a causal LM that can hold these decoder layers, and its config."""
    text = target.config.get_text_config(decoder=True)
    kind = type(target) if text is target.config else MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    config = copy.deepcopy(text)
    like = [_resembled(target, layer) for layer in block]
    count = len(decoder_layers(target))
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count and "layer" in name:
            of_mlp, stated = "mlp" in name or "moe" in name, getattr(text, f"mtp_{name}", None)
            kinds = [value[mlp if of_mlp else attention] for attention, mlp in like]
            setattr(config, name, stated[index * len(like) :][: len(like)] if stated else kinds)
    if hasattr(config, "first_k_dense_replace"):
        dense = sum(mlp < text.first_k_dense_replace for _, mlp in like)
        config.first_k_dense_replace = dense
    if getattr(config, "num_hidden_layers", None) != len(block):
        config.num_hidden_layers = len(block)
    config.vocab_size, config.pad_token_id, config.tie_word_embeddings = 1, None, False
    quantization: Any = getattr(target.config, "quantization_config", None)
    stored = [name for layer in block for name, tensor in layer.items() if not name.endswith((".weight", ".bias"))]
    if quantization is not None and any("scale" in name or "qweight" in name for name in stored):
        config.quantization_config = quantization
    elif hasattr(config, "quantization_config"):
        del config.quantization_config
    return kind, config


def _resembled(target: PreTrainedModel, tensors: dict[str, Tensor]) -> tuple[int, int]:
    """Return the indices of the target's layers with the most similar attention and MLP, by parameter names."""
    theirs = {EXPERT.sub("experts", name): tensor.shape for name, tensor in tensors.items()}

    def likeness(layer: nn.Module, of_mlp: bool) -> int:
        score = 0
        for name, weight in layer.named_parameters():
            name = EXPERT.sub("experts", name)
            if bool(MLP.search(name)) == of_mlp:
                score += 1 if name in theirs else -1
                score += name in theirs and weight.shape == theirs[name]
        return score

    layers = decoder_layers(target)
    best = [max(range(len(layers)), key=lambda i: (likeness(layers[i], of_mlp), i)) for of_mlp in (False, True)]
    return best[0], best[1]


def last_norm(outline: PreTrainedModel) -> tuple[str, nn.Module]:
    """Return the name and module of the norm after a model's decoder layers."""
    decoder = outline.get_decoder()
    norms = [child for name, child in decoder.named_children() if "norm" in name and "embed" not in name]
    if len(norms) != 1:
        raise ValueError(
            f"cannot find the final norm of {type(decoder).__name__}: expected one child named like a norm"
        )
    return next(name for name, module in outline.named_modules() if module is norms[0]), norms[0]
