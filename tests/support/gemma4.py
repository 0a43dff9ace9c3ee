"""A tiny Gemma 4 and its assistant, with random weights."""

import functools

import torch
import transformers
from transformers import AutoConfig

from tests.support import tiny

AVAILABLE = hasattr(transformers, "Gemma4AssistantForCausalLM")

LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TEXT = tiny.BASE | {
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "sliding_window": tiny.WINDOW,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}


@functools.cache
def target(**changes):
    return tiny.randomised(AutoConfig.for_model("gemma4_text", **TEXT | changes)).to(tiny.DEVICE)


def assistant(centroids: bool = False, **changes):
    """The assistant of `target`. centroids: its LM head computes the logits of a few clusters of tokens alone."""
    text = TEXT | {"hidden_size": 16, "layer_types": LAYERS[:2], "num_hidden_layers": 2, "num_kv_shared_layers": 2}
    config = transformers.Gemma4AssistantConfig(
        text_config=AutoConfig.for_model("gemma4_text", **text | changes),
        backbone_hidden_size=TEXT["hidden_size"],
        use_ordered_embeddings=centroids,
        num_centroids=8,
        centroid_intermediate_top_k=3,
    )
    torch.manual_seed(1)
    made = transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 2 / weight.shape[-1] ** 0.5)
        if centroids:
            made.masked_embedding.token_ordering.copy_(torch.randperm(tiny.VOCAB))
    return made.requires_grad_(False).to(tiny.DEVICE)
