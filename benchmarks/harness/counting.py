"""Models with real shapes and random weights that count: token t + 1 follows token t, with no near tie.

In half precision the text of a random model depends on rounding, and so on the number of tokens in a pass. Here the
embeddings outweigh the output of the layers, and the LM head maps each token to the next one. The text is therefore
known in advance, at the full cost of a pass. Draft models count, too, except after a given share of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.heads.eagle3.config import Eagle3Config, default_taps
from specdec.heads.eagle3.head import Eagle3Head

EMBEDDING_SCALE = 10.0  # of the embeddings; 32 layers of transformers' initial weights add about 11 to them
SURE = 8.0  # standard deviation of a head's logits: the most likely of 32,000 tokens has some 60% of the probability
COMMON = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b, half its layers": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@torch.no_grad()
def counting(
    shape: str,
    device: torch.device,
    small: bool = False,
    wrong: float = 0.0,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Make a model that counts.

    Args:
        shape: key of `SHAPES`.
        device: device of the weights.
        small: use the same architecture with the size of a test model.
        wrong: share of tokens after which the model does not count.
        dtype: of the weights. None: bfloat16 on a GPU and float32 otherwise.
        changes: changes to the config.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float)
    given = COMMON | SHAPES[shape] | ({key: SMALL[key] for key in SMALL if key in SHAPES[shape]} if small else {})
    kind = given.pop("model_type")
    config = AutoConfig.for_model(kind, **given | changes)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.normal_(std=EMBEDDING_SCALE)
    head[_next_tokens(config.vocab_size, wrong).to(device)] = embedding / (EMBEDDING_SCALE * config.hidden_size**0.5)
    return model.eval()


def _next_tokens(vocab_size: int, wrong: float) -> Tensor:
    """Successor of each token, (V,) int64."""
    successors = torch.arange(1, vocab_size + 1) % vocab_size
    astray = torch.rand(vocab_size, generator=torch.Generator().manual_seed(1)) < wrong
    successors[astray] = successors[astray].roll(1)
    return successors


def head_for(target: PreTrainedModel) -> Eagle3Head:
    """Make an EAGLE-3 head with random weights and the shape of published heads.

    It is as sure of its tokens as a trained one, so that dynamic trees are deep.
    """
    config = target.config
    with target.device:
        head = Eagle3Head(
            Eagle3Config(
                hidden_size=config.hidden_size,
                target_hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
                draft_vocab_size=min(32000, config.vocab_size // 2),
                intermediate_size=config.intermediate_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                tap_ids=default_taps(config.num_hidden_layers),
            )
        )
    with torch.no_grad():
        head.lm_head.weight.mul_(SURE / head.lm_head.weight.std() / config.hidden_size**0.5)
    return head.to(target.dtype).eval()


def prompts(rows: int, length: int, vocab_size: int, device: torch.device) -> Tensor:
    """Make random prompts, (rows, length) int64."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, vocab_size, (rows, length), generator=generator).to(device)


def counted(ids: Tensor, count: int, vocab_size: int) -> list[list[int]]:
    """Expected texts for prompts (B, T): each row followed by `count` tokens."""
    return [row + [(row[-1] + i) % vocab_size for i in range(1, count + 1)] for row in ids.tolist()]


def share_counted(output: Tensor, ids: Tensor, vocab_size: int) -> float:
    """Share of the new tokens in `output` (B, T + new) that are as expected."""
    new: Sequence[list[int]] = output[:, ids.shape[1] :].tolist()
    wanted = [row[ids.shape[1] :] for row in counted(ids, output.shape[1] - ids.shape[1], vocab_size)]
    hits = [a == b for row, other in zip(new, wanted, strict=True) for a, b in zip(row, other, strict=True)]
    return sum(hits) / len(hits)
