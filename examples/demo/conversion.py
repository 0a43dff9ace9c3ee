"""Conversion of a GGUF file to bfloat16 safetensors and a tokenizer, which `from_pretrained` loads quickly."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def to_safetensors(gguf: Path, folder: Path, end_tokens: Sequence[int] = ()) -> Path:
    """Convert the model in `gguf`, and write it to `folder`, which is replaced.

    Args:
        gguf: path of the GGUF file.
        folder: folder to write.
        end_tokens: replacement for the model's end tokens; empty to keep them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, **_dequantize())
    tie(model)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the saved weights are not quantised
    if end_tokens:
        model.generation_config.eos_token_id = list(end_tokens)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


@torch.no_grad()
def tie(model: PreTrainedModel) -> None:
    """Tie the embedding to the output matrix.

    GGUF files of tied models may contain the matrix twice, with a finer quantisation for the output. transformers loads
    them as untied models with a quarter more parameters.
    """
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not output:
        embedding.copy_(output)
    model.config.tie_word_embeddings = True
    model.tie_weights()


def _dequantize() -> dict[str, Any]:
    """Return the arguments that make `from_pretrained` dequantise the blocks."""
    config = getattr(transformers, "GgufConfig", None)  # since 5.23; older versions always dequantise
    return {} if config is None else {"quantization_config": config(dequantize=True)}
