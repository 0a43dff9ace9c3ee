"""Cost of a head in training, computed from its shape. No weights are created."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.eagle3.head import Eagle3Head
from specdec.training.optimizer import matrices
from specdec.training.recipe import Recipe

META = torch.device("meta")


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
