"""Every causal-LM family of the installed transformers, tiny: which run speculatively, and is the output the same?

python -m tests.support.families > docs/families.md
python -m tests.support.families llama mamba     # these alone
"""

import contextlib
import copy
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec import NgramProposer, SpeculativeGenerator
from specdec.models.capability import Capability
from tests.support import encoded
from tests.support.tiny import Garbage, prompts, randomised

NEW_TOKENS = 24
LENGTHS = ((9,), (11, 4))  # of the prompts: a single one, a ragged batch
LARGEST = 8_000_000  # parameters that still count as tiny
# Values to which a config is shrunk, wherever it has an attribute of that name.
SMALL: dict[str, Any] = (
    {"vocab_size": 96, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    | dict.fromkeys("hidden_size embedding_size d_model encoder_hidden_size lru_width".split(), 32)
    | dict.fromkeys("intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size".split(), 48)
    | dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size".split(), 16)
    | dict.fromkeys("num_hidden_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers".split(), 2)
    | dict.fromkeys("num_attention_heads encoder_attention_heads decoder_attention_heads".split(), 4)
    | dict.fromkeys("num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads".split(), 4)
    | dict.fromkeys("num_key_value_heads linear_num_key_heads".split(), 2)
    | dict.fromkeys("head_dim global_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim index_head_dim".split(), 8)
    | dict.fromkeys("linear_key_head_dim linear_value_head_dim state_size mamba_d_state".split(), 8)
    | dict.fromkeys("q_lora_rank kv_lora_rank".split(), 16)
    | dict.fromkeys("num_experts n_routed_experts num_local_experts moe_num_experts".split(), 4)
    | dict.fromkeys("num_experts_per_tok moe_topk moe_k".split(), 2)
    | dict.fromkeys("n_group topk_group n_shared_experts first_k_dense_replace moe_layer_start_index".split(), 1)
    | {
        "sliding_window": 6,
        "is_decoder": True,
        "index_topk": 8,
        "index_n_heads": 16,  # with few, scores are exactly zero for several tokens, and which are picked is chance
        "chunk_size": 8,
        "rotary_dim": 8,
        "original_max_position_embeddings": 128,
    }
)
# Further settings of some families; nested dictionaries are for its parts.
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "n_groups": 1, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
SWA = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
SWA |= {"qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "xlstm": {"num_heads": 4, "chunk_size": 64},
    "recurrent_gemma": {"num_hidden_layers": 3},  # the third attends
    "mpt": {"use_cache": True},  # its configs say no, and a call with use_cache=True has one nevertheless
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "llama4_text": {"num_hidden_layers": 4, "layer_types": None, "moe_layers": None, "no_rope_layers": None}
    | {"intermediate_size_mlp": 48, "attention_chunk_size": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 500,
        "heads_per_ngram": 2,
        "split_ngram_parts": 4,
        "ple_embed_dim": 32,
        "ple_layer_ids": [1],
        "hc_lowrank": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    # Other weights: the first ones write the padding token, for which the indexer gives all tokens a score of zero.
    "dots3_note_text": {"num_key_value_heads": 4, "shared_experts_intermediate_size": 16, "index_n_heads": 32}
    | {f"swa_{name}": value for name, value in SWA.items()},
    "gemma3n_text": SHARED_KV | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5] * 4},
    "gemma4_text": SHARED_KV,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8},
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8, "shape_vocab_size": 96},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
}


def _longrope(limit: int, **more: float) -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [3.0, 4.0, 5.0, 6.0]}
    rope = ROPE | factors | {"rope_type": "longrope", "original_max_position_embeddings": limit} | more
    return {"rope_parameters": rope, "original_max_position_embeddings": limit}


def _dynamic(limit: int) -> dict[str, Any]:
    return {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": limit}


# RoPE whose frequencies change after a limit: (family, overrides, prompts of a single and of a ragged batch).
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    f"{name}, {kind}, {where}": (name, make(limit), lengths)
    for where, limit, lengths in (
        ("before", 64, LENGTHS),
        ("across", 20, LENGTHS),
        ("beyond", 20, ((21,), (27, 4))),
    )
    for name, kind, make in (
        ("phi3", "longrope", _longrope),
        ("phimoe", "longrope", partial(_longrope, short_mscale=1.0, long_mscale=1.0)),
        ("llama", "longrope", _longrope),
        ("llama", "dynamic", _dynamic),
        ("falcon", "dynamic", _dynamic),
    )
}


def tiny_config(name: str) -> PreTrainedConfig:
    """The family's own default configuration with everything that makes it large made small, or one of `VARIANTS`."""
    model_type, overrides, _ = VARIANTS.get(name, (name, {}, LENGTHS))
    return _shrunk(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}) | overrides)


def _shrunk(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    overrides = overrides or OVERRIDES.get(config_class.model_type, {})
    default = config_class()
    has = vars(default)
    names = default.attribute_map or {}
    small = {names.get(name, name): value for name, value in SMALL.items()}
    small = {name: value for name, value in small.items() if has.get(name) is not None}
    # Per-layer lists are cut to the fewest layers that show every kind of layer.
    layers = names.get("num_hidden_layers", "num_hidden_layers")
    lists = {name: value for name, value in has.items() if isinstance(value, list) and len(value) == has.get(layers)}
    if lists:
        kinds = [list(map(str, value)) for value in lists.values()]
        small[layers] = max(2, *(1 + max(map(kind.index, set(kind))) for kind in kinds))
        small |= {name: value[: small[layers]] for name, value in lists.items()}
    if has.get("kv_lora_rank") is not None:  # latent attention has a key for every head
        small["num_key_value_heads"] = small["num_attention_heads"]
    for name in default.sub_configs or {}:
        if isinstance(has.get(name), PreTrainedConfig):
            small[name] = _shrunk(type(has[name]), {})
    return config_class(**small | overrides)


ALIBI = "its distance bias (ALiBi) counts columns, which are not the positions in ragged rows and trees"
NO_CACHE = "it has no cache: each pass reads the whole text again"
OWN_FAILS = "plain generate() fails as well"
INDEXED = "its n-grams of token ids do not follow a tree, and its indexer assumes the same positions in all rows"
LENGTHS_DECIDE = (
    "RoPE changes its frequencies within the text: the frequencies of earlier keys depend on the order of passes, "
    "which is one token at a time in plain decoding"
)
# Why a family runs with less than trees and batches, according to its code; the probe sees only the effect.
WHY = {
    "bloom": ALIBI,
    "mpt": ALIBI,
    "inkling_text": "its distance bias counts columns over the whole text",
    "inkling2_text": "its distance bias counts columns over the whole text",
    "roformer": "it numbers positions by column and takes no position_ids",
    "blt": f"{OWN_FAILS}: its config does not give the number of layers",
    "cpmant": "it puts 32 tokens of its own before the text, and masks by lengths instead of attention masks",
    "deepseek_v4": "its layers compress several tokens into one cached key, from which a rejected token cannot be "
    "removed",
    "minimax": "it accepts only its own cache class, and its linear attention is implemented inside the layer",
    "moshi": "its cache drops tokens beyond a window that its masks do not include: plain passes with and without it "
    "differ",
    "openai-gpt": NO_CACHE,
    "prophetnet": "with a cache it reads one token at a time",
    "qwen4_exp": INDEXED,
    "qwen4_exp_text": INDEXED,
    "recurrent_gemma": "its layers store their states in themselves instead of a cache: they cannot be rolled back",
    "reformer": "its cache holds hash buckets, into which it sorts the whole text",
    "rwkv": "its state is a separate argument, updated one token at a time inside the layer",
    "xlm": f"{NO_CACHE}, with a mask token after it",
    "xlnet": f"{NO_CACHE}, with an empty token after it that attends to all tokens and that no token attends to",
    "xlstm": f"{OWN_FAILS}; it accepts only its own cache class",
    "zaya": "its layers mix neighbouring queries, keys and values in their own code, from states that they slice "
    "themselves",
    **dict.fromkeys(VARIANTS, LENGTHS_DECIDE),
}

ENCODERS = [*encoded.FAMILIES, *encoded.LIKE_THEM]
NAMES = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


@dataclass(frozen=True)
class Row:
    """Result of one family. `mode` and `result` are the words of the table."""

    family: str
    model: str
    mode: str
    result: str
    why: str = ""


SAME = "identical"
NOT_RUN = "not run"


def try_family(name: str) -> Row:
    """Build the family tiny, generate plainly and speculatively, compare."""
    model_type, _, prompt_lengths = VARIANTS.get(name, (name, {}, LENGTHS))
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        model = tiny_model(name)
    except Exception as error:
        return Row(name, architecture, NOT_RUN, NOT_RUN, f"cannot be built tiny: {_error_text(error)}")
    capability = SpeculativeGenerator(model, "ngram").capability
    mode = _mode(capability)
    results, notes = [], [capability.reason] if capability.reason else []
    for lengths in prompt_lengths:
        where = f"batch {len(lengths)}"
        inputs = prompts(*lengths, vocab=_vocabulary(model))
        try:
            plain = _afresh(model, name).generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        except Exception as error:
            results.append(f"plain generate() fails at {where}")
            notes.append(_error_text(error))
            continue
        for proposer in (NgramProposer(), Garbage(), Garbage(answer=plain)):
            spec = SpeculativeGenerator(_afresh(model, name), proposer, draft_length=4)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ours = spec.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            same = torch.equal(ours, plain)
            results.append(SAME if same else f"differs from plain at {where}")
            if not same and torch.equal(ours, _row_by_row(model, inputs)):
                results[-1] += ", equals plain row by row"
            reasons = [str(w.message).split("generate(): ")[1] for w in caught if "running as plain" in str(w.message)]
            if reasons and capability.masks and len(lengths) == 1:
                mode = "plain decoding"
                notes.append(reasons[0])
    why = "; ".join(dict.fromkeys(notes))
    return Row(name, architecture, mode, "; ".join(dict.fromkeys(results)), WHY.get(name, why) if why else "")


def _mode(capability: Capability) -> str:
    return "trees, batches" if capability.trees else "chains of one row" if capability.masks else "plain decoding"


def try_encoder_decoder(name: str) -> Row:
    """The same for a model whose encoder reads text, audio or images, at T = 0 and T = 1."""
    model = encoded.model(name)
    capability = SpeculativeGenerator(model, "ngram").capability
    results = []
    for rows in (1, 3):
        inputs = encoded.inputs(name, rows)
        for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
            texts = []
            spec = SpeculativeGenerator(model, NgramProposer(continuations=2), draft_length=4)
            for generate in (model.generate, spec.generate):
                torch.manual_seed(0)
                texts.append(generate(**inputs, max_new_tokens=NEW_TOKENS, **sampling))
            results.append(SAME if torch.equal(*texts) else f"differs from plain at batch {rows}")
    return Row(name, type(model).__name__, _mode(capability), "; ".join(dict.fromkeys(results)), capability.reason)


def tiny_model(name: str) -> PreTrainedModel:
    config = tiny_config(name)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(tiny_config(name)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f}M parameters remain")
    return randomised(config)


def _afresh(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Copy a model whose frequencies depend on the last text it read."""
    return copy.deepcopy(model) if name in VARIANTS else model


def _vocabulary(model: PreTrainedModel) -> int:
    return min(getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or 90, 90)


def _row_by_row(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Decode each row without padding, for the text that a batch should give."""
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        text = ids[mask.bool()][None]
        rows.append(
            torch.cat([ids, model.generate(text, max_new_tokens=NEW_TOKENS, do_sample=False)[0, text.shape[1] :]])
        )
    return torch.stack(rows)


def _error_text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:140]}"


def table(rows: list[Row], encoders: list[Row]) -> str:
    families = [row for row in rows if ", " not in row.family]  # the others are RoPE variants
    counts = Counter(row.mode for row in families)
    lines = [
        "# Causal-LM families",
        "",
        f"Every causal-LM family of transformers {transformers.__version__}, as a tiny random model in float32 on the "
        "CPU. The output is compared with plain `generate()` at T = 0, at batch 1 and in a left-padded batch of 2. "
        "Drafts are n-grams, random drafts and mostly right drafts (chains and trees) of up to 4 tokens. The last "
        "rows are models whose RoPE frequencies change after a limit, with texts before, across and beyond it. The "
        "last column gives the reason from the model's code, or the result of the probe. "
        "`python -m tests.support.families > docs/families.md` writes this page.",
        "",
        f"{len(families)} families: " + ", ".join(f"{mode} {count}" for mode, count in counts.most_common()) + ".",
        "",
        *_lines(rows),
        "",
        "## Encoder-decoder models",
        "",
        "The same for models whose encoder reads text, audio or an image: at T = 0 and at T = 1 with the same seed, "
        "batches of 1 and 3, n-gram drafts in trees.",
        "",
        *_lines(encoders),
    ]
    return "\n".join(lines) + "\n"


def _lines(rows: list[Row]) -> list[str]:
    return [
        "| family | model | runs with | output | why not more |",
        "|---|---|---|---|---|",
        *(f"| {r.family} | {r.model} | {r.mode} | {r.result} | {r.why.replace('|', '/')} |" for r in rows),
    ]


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # models that print in their forward pass must not end up in the table
        rows = [try_family(name) for name in names or NAMES]
        encoders = [] if names else [try_encoder_decoder(name) for name in ENCODERS]
    sys.stdout.write(table(rows, encoders))


if __name__ == "__main__":
    main(sys.argv[1:])
