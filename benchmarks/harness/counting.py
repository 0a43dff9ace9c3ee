"""Models of real shapes and random weights that count: behind token t comes t + 1, with no near tie.

In half precision a random model's text hangs on rounding, and with it on how many tokens a pass is over. These models'
embeddings outweigh what the layers add, and the LM head has the rows of the tokens that come next: the text is known
before it is written, at a pass's full cost. Draft models count too, but for a set share of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.heads.eagle3.config import Eagle3Config, default_taps
from specdec.heads.eagle3.head import Eagle3Head

LOUD = 10.0  # of the embeddings; 32 layers of transformers' initial weights add about 11 to them
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
def counting(shape: str, device: torch.device, small: bool = False, wrong: float = 0.0, **changes: Any):
    """A model made where it will run, in bfloat16 on a GPU, else in float32.

    Args:
        shape: of `SHAPES`. small: its kind alone, in the size of a test's. wrong: share of tokens behind which it does
            not count. changes: of its config.
    """
    given = COMMON | SHAPES[shape] | ({key: SMALL[key] for key in SMALL if key in SHAPES[shape]} if small else {})
    kind = given.pop("model_type")
    config = AutoConfig.for_model(kind, **given | changes)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.normal_(std=LOUD)
    head[_next_tokens(config.vocab_size, wrong).to(device)] = embedding / (LOUD * config.hidden_size**0.5)
    return model.eval()


def _next_tokens(vocab_size: int, wrong: float) -> Tensor:
    """(V,) int64, what comes behind each token."""
    behind = torch.arange(1, vocab_size + 1) % vocab_size
    astray = torch.rand(vocab_size, generator=torch.Generator().manual_seed(1)) < wrong
    behind[astray] = behind[astray].roll(1)
    return behind


def head_for(target: PreTrainedModel) -> Eagle3Head:
    """A head of random weights, of the shape that published ones have."""
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
    return head.to(target.dtype).eval()


def prompts(rows: int, length: int, vocab_size: int, device: torch.device) -> Tensor:
    """(rows, length) int64, random."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, vocab_size, (rows, length), generator=generator).to(device)


def counted(ids: Tensor, count: int, vocab_size: int) -> list[list[int]]:
    """What a target that counts makes of prompts (B, T): the rows with `count` tokens behind each."""
    return [row + [(row[-1] + i) % vocab_size for i in range(1, count + 1)] for row in ids.tolist()]


def share_counted(output: Tensor, ids: Tensor, vocab_size: int) -> float:
    """Of the new tokens of `output` (B, T + new), how many are the expected ones."""
    new: Sequence[list[int]] = output[:, ids.shape[1] :].tolist()
    wanted = [row[ids.shape[1] :] for row in counted(ids, output.shape[1] - ids.shape[1], vocab_size)]
    hits = [a == b for row, other in zip(new, wanted, strict=True) for a, b in zip(row, other, strict=True)]
    return sum(hits) / len(hits)
