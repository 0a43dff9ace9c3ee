"""From a GGUF file to a folder that `from_pretrained` loads quickly: bfloat16 safetensors and the tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def to_safetensors(gguf: Path, folder: Path, end_tokens: Sequence[int] = ()) -> Path:
    """Convert the model in `gguf` into `folder`, which is made anew.

    Args:
        end_tokens: replace the model's own; empty to keep them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, **_dequantize())
    tie(model)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the saved weights are plain ones
    if end_tokens:
        model.generation_config.eos_token_id = list(end_tokens)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


@torch.no_grad()
def tie(model: PreTrainedModel) -> None:
    """Make embedding and output one matrix, the output's.

    GGUF files of tied models may hold the matrix twice, quantised more finely for the output, which decides the
    tokens. transformers loads that as an untied model with a quarter more parameters.
    """
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not output:
        embedding.copy_(output)
    model.config.tie_word_embeddings = True
    model.tie_weights()


def _dequantize() -> dict[str, Any]:
    """Arguments that make `from_pretrained` unpack the blocks."""
    config = getattr(transformers, "GgufConfig", None)  # 5.23 has it; versions without it always unpack
    return {} if config is None else {"quantization_config": config(dequantize=True)}
