"""Heads on disk: every layout in and out, bit for bit, and clear errors for what is not a head."""

import json
import pickle
import re
from pathlib import Path
from reprlib import repr as shortened
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typer.testing import CliRunner

from specdec import Eagle3Proposer, SpeculativeGenerator
from specdec.cli.app import app
from specdec.heads.eagle3.checkpoint import load, read
from specdec.heads.eagle3.config import default_taps, infer_convention
from specdec.heads.eagle3.export import WRITERS, save, widen
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.hydra.checkpoint import read as read_hydra
from specdec.heads.loading import load as load_block
from specdec.heads.medusa import read as read_medusa
from specdec.utils.choices import HeadLayout
from tests.support import blocks, eagle3, tiny

EXACT = [layout for layout in get_args(HeadLayout) if layout != "int8"]


def drafts(head, seed=0):
    """Logits of a head on some input, bit for bit what its weights and variant make them."""
    generator = torch.Generator().manual_seed(seed)
    c = head.config
    states = torch.randn(1, 6, c.target_hidden_size * c.num_taps, generator=generator)
    embeds = torch.randn(1, 6, c.embedding_size, generator=generator)
    with torch.no_grad():
        h = head(embeds, head.fuse(states), torch.arange(6)[None], None)
        return head.logits(head(embeds, h, torch.arange(6)[None], None))


def same(one: Eagle3Head, other: Eagle3Head) -> bool:
    return torch.equal(drafts(one), drafts(other)) and torch.equal(one.draft_to_target, other.draft_to_target)


# The layouts that we write


@pytest.mark.parametrize("name", eagle3.VARIANTS)
@pytest.mark.parametrize("first", EXACT)
@pytest.mark.parametrize("second", EXACT)
def test_round_trips_are_bit_identical(name, first, second, tmp_path):
    head = eagle3.head(name)
    save(head, tmp_path / "one", first)
    between = load(tmp_path / "one")
    save(between, tmp_path / "two", second)
    loaded = load(tmp_path / "two")
    assert same(head, between)
    assert same(head, loaded)
    assert loaded.config.taps(8) == head.config.taps(8)


@pytest.mark.parametrize("layout", EXACT)
def test_half_precision_stays(layout, tmp_path):
    save(eagle3.head().bfloat16(), tmp_path, layout)
    assert load(tmp_path).dtype == torch.bfloat16


def test_sglang_layout_has_its_keys(tmp_path):
    save(eagle3.head(tap_ids=(2, 4, 5)), tmp_path, "sglang")
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    layer = {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
    layer |= {f"self_attn.{kind}_proj" for kind in "qkvo"} | {f"mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    expected = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert weights.keys() == expected | {"d2t", "t2d"}
    assert weights["t2d"].dtype == torch.bool
    assert weights["t2d"].nonzero()[:, 0].tolist() == (torch.arange(40) + weights["d2t"]).tolist()
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 40
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # as SGLang counts
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # as vLLM does, which looks here
    assert load(tmp_path).config.taps(8) == (2, 4, 5)


def test_speculators_layout_has_its_keys(tmp_path):
    save(eagle3.head("norm before residual"), tmp_path, "speculators", target="some/model")
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert "layers.0.hidden_norm.weight" in weights
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    assert config["transformer_layer_config"]["vocab_size"] == tiny.VOCAB
    assert config["norm_before_residual"] is True
    assert config["target_hidden_size"] == 32


@pytest.mark.parametrize(("layout", "layer"), [("speculators", "layers.0"), ("sglang", "midlayer")])
def test_vllms_attention_has_four_biases_or_none(layout, layer, tmp_path):
    """Its `attention_bias` is of the o projection too, whose bias stays uninitialised there if it is missing."""
    head = eagle3.head(attention_bias=True)
    save(head, tmp_path, layout)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert config.get("transformer_layer_config", config)["attention_bias"] is True
    biases = {name: tensor for name, tensor in weights.items() if name.endswith("bias")}
    assert set(biases) == {f"{layer}.self_attn.{kind}_proj.bias" for kind in "qkvo"}
    assert not biases[f"{layer}.self_attn.o_proj.bias"].any()
    assert same(load(tmp_path), head)


@pytest.mark.parametrize("layout", EXACT)
def test_vllm_sees_windows_and_the_number_of_taps(layout, tmp_path):
    """It reads the window from the layers' types, and takes three taps where nothing else is said."""
    save(eagle3.head(sliding_window=6, tap_ids=(1, 3)), tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config.get("transformer_layer_config", config)
    assert layer["layer_types"] == ["sliding_attention"]
    assert layer["num_aux_hidden_states"] == 2
    assert load(tmp_path).config.sliding_window == 6


@pytest.mark.parametrize("layout", [*EXACT, "int8"])
def test_a_window_for_drafting_is_kept(layout, tmp_path):
    """Other engines do not know it, and read the layer's own span."""
    save(eagle3.head(draft_window=6), tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "sliding_window" not in config.get("transformer_layer_config", config)
    found = load(tmp_path).config
    assert (found.draft_window, found.window, found.sliding_window) == (6, 6, None)
    assert eagle3.head(draft_window=6, sliding_window=4).config.window == 4


@pytest.mark.parametrize("layout", [*EXACT, "int8"])
def test_p_eagle_heads_keep_what_they_draft_with(layout, tmp_path):
    head = blocks.parallel()
    save(head, tmp_path, layout, "target")
    found = load(tmp_path)
    assert (found.config.mask_token_id, found.config.block_size) == (63, 4)
    if layout != "int8":
        assert torch.equal(found.mask_hidden, head.mask_hidden)


def test_heads_we_ship_are_what_vllm_takes_them_for(tmp_path):
    save(load(Path(__file__).parents[3] / "heads" / "qwen2.5-coder-0.5b-instruct-2"), tmp_path / "head")
    folder = tmp_path / "head"
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 12, 21]
    assert config["num_aux_hidden_states"] == 3
    checkpoint = read(folder)
    assert checkpoint.config.taps(24) == (2, 12, 21)
    assert checkpoint.ignored["midlayer.self_attn.o_proj.bias"].startswith("zeros")


# Others' checkpoints, written by hand as their tools write them


def written(folder, weights, config, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(weights, folder / file)
    else:
        save_file(weights, folder / file)
    return folder


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "vocab_size": tiny.VOCAB,
    "draft_vocab_size": 40,
    "bos_token_id": 1,
}


def midlayer(head, **extra):
    return {name.replace("layers.0.", "midlayer."): t for name, t in head.state_dict().items()} | extra


def by_frequency(head, seed=5):
    """The same head with its draft tokens in another order, as ModelOpt writes them."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    shuffled = Eagle3Head(head.config).eval()
    shuffled.load_state_dict(head.state_dict())
    with torch.no_grad():
        shuffled.lm_head.weight.copy_(head.lm_head.weight[order])
    shuffled.d2t.copy_(head.draft_to_target[order] - torch.arange(40))
    return shuffled


def fields(path):
    return {field.name: field for field in read(path).fields}


def test_safeailab(tmp_path):
    head = eagle3.head()
    t2d = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    written(tmp_path, midlayer(head, t2d=t2d), LLAMA, "pytorch_model.bin")
    assert same(load(tmp_path), head)
    checkpoint = read(tmp_path)
    assert checkpoint.format == "SafeAILab EAGLE-3"
    assert checkpoint.ignored == {"t2d": "the inverse of d2t"}
    known = fields(tmp_path)
    assert known["rope"].source == "assumed"
    assert known["taps"].source == "assumed"
    assert known["hidden_size"].source == "weights"


def test_specforge(tmp_path):
    head = eagle3.head(tap_ids=(1, 3, 4), tap_convention="output")
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 28,
        "rope_theta": 500.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    }
    embedding = {"model.embed_tokens.weight": torch.randn(tiny.VOCAB, 32)}
    written(tmp_path, midlayer(head) | embedding, config)
    loaded = load(tmp_path)
    assert loaded.config.taps(8) == (2, 4, 5)
    assert loaded.config.rope["rope_theta"] == 500.0
    assert torch.equal(loaded.embed_tokens.weight, embedding["model.embed_tokens.weight"])
    known = fields(tmp_path)
    assert known["num_layers"].note == "the config says 28"
    assert known["tap_convention"].source == "assumed"


def test_speculators(tmp_path):
    head = eagle3.head("norm before fc", norm_before_residual=True)
    layer = {key: value for key, value in LLAMA.items() if key not in ("architectures", "draft_vocab_size")}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [], "verifier": {"name_or_path": "x"}},
        "transformer_layer_config": layer | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 1.0}},
        "draft_vocab_size": 40,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "target_hidden_size": None,
    }
    embedding = torch.randn(tiny.VOCAB, 32)
    extra = {"embed_tokens.weight": embedding, "verifier_norm.weight": torch.ones(32)}
    written(tmp_path, head.state_dict() | extra, config)
    loaded = load(tmp_path)
    assert torch.equal(drafts(loaded), drafts(head))
    assert loaded.config.taps(8) == (2, 4, 5)
    assert read(tmp_path).format == "vLLM speculators"
    assert "verifier_norm.weight" in read(tmp_path).ignored


def test_speculators_that_counts_outputs(tmp_path):
    """Converted checkpoints kept [1, n // 2 - 1, n - 4]: the target's number of layers settles it."""
    save(eagle3.head(), tmp_path, "speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 46, 90]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).config.taps(94) == default_taps(94) == (2, 47, 91)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [3.0, 4.0, 5.0, 6.0]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
# What configs say of their RoPE, and what transformers takes for the same.
ROPES = {
    "silent": ({"rope_theta": 500.0}, {"rope_type": "default"}),
    "null": ({"rope_theta": 500.0, "rope_scaling": None, "rope_parameters": None}, {"rope_type": "default"}),
    "Qwen2.5-VL": (
        {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        {"rope_type": "default"},
    ),
    "Qwen3-VL": (
        {
            "rope_theta": 500.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True},
        },
        {"rope_type": "default"},
    ),
    "saved again": (
        {"rope_parameters": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 500.0}},
        {"rope_type": "default"},
    ),
    "linear": ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}}, {"rope_type": "linear"}),
    "dynamic": (
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0}},
        {"rope_type": "dynamic"},
    ),
    "llama3": ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, {"rope_type": "llama3"}),
    "yarn": ({"rope_theta": 500.0, "rope_scaling": {"type": "yarn"} | YARN}, {"rope_type": "yarn"}),
    "yarn of a picture model": (
        {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "mrope_section": [1, 1, 2]} | YARN},
        {"rope_type": "yarn"},
    ),
    "yarn by its lengths": (
        {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 500.0, "factor": None, "mscale": None}},
        {"rope_type": "yarn"} | YARN,
    ),
    "longrope": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0, "factor": 4.0} | FACTORS},
        {"rope_type": "longrope"},
    ),
    "Phi-3": (
        {"rope_theta": 500.0, "rope_scaling": {"type": "su"} | FACTORS, "original_max_position_embeddings": 512},
        {"rope_type": "longrope", "original_max_position_embeddings": 512},
    ),
    "proportional": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"rope_type": "proportional"},
    ),
    "HunYuan": (
        {"rope_theta": 20.0, "rope_scaling": {"type": "dynamic", "alpha": 25.0 ** (6 / 8), "factor": 1.0}},
        {"rope_type": "default"},
    ),
    "by layers": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "layer_types": ["full_attention"],
        },
        {"rope_type": "linear", "factor": 2.0},
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_every_type_of_rope(name, tmp_path):
    said, meant = ROPES[name]
    written(tmp_path, midlayer(eagle3.head()), LLAMA | said)
    head = load(tmp_path)
    given = {**(said.get("rope_scaling") or {}), **(said.get("rope_parameters") or {}), **meant, "rope_theta": 500.0}
    if meant["rope_type"] == "default":
        given = {"rope_type": "default", "rope_theta": 500.0}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**LLAMA | {"rope_parameters": given}))
    x = torch.zeros(1, 3, 32)
    for positions in (torch.tensor([[0, 1, 400]]), torch.tensor([[3, 700, 3000]])):  # beyond 2048, too
        for ours, right in zip(head.rotation(x, positions), theirs(x, positions), strict=True):
            assert torch.allclose(ours, right, atol=1e-6)
    assert fields(tmp_path)["rope"].source == "config"
    save(head, tmp_path / "again")
    assert same(load(tmp_path / "again"), head)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rope_scaling": {"type": "xdrope"}}, "unknown type 'xdrope', expected one of default, .*mrope"),
        ({"rope_scaling": {"type": "linear"}}, "type 'linear' lacks factor: add it to rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of RoPE must be a number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "lacks short_factor"),
        ({"rope_scaling": {"type": "su"} | FACTORS | {"long_factor": [1.0]}}, "long_factor of RoPE has 1 numbers .* 4"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, it is 'yarn'"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            "different rotations",
        ),
    ],
)
def test_rope_that_is_not_known_names_its_field(said, message, tmp_path):
    written(tmp_path, midlayer(eagle3.head()), LLAMA | said)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_modelopt(prefix, tmp_path):
    head = by_frequency(eagle3.head())
    weights = {name.replace("layers.0.", prefix): t for name, t in head.state_dict().items()}
    written(tmp_path, weights, LLAMA | {"eagle_config": {"use_aux_hidden_state": True}})
    loaded = load(tmp_path)
    assert same(loaded, head)
    plain = eagle3.head()
    ours, theirs = drafts(loaded)[0, -1], drafts(plain)[0, -1]
    assert loaded.draft_to_target[ours.argmax()] == plain.draft_to_target[theirs.argmax()]


def test_first_eagle(tmp_path):
    head = eagle3.head(version=1, draft_vocab_size=tiny.VOCAB, fc_bias=True)
    weights = {name: t for name, t in head.state_dict().items() if name != "d2t"}
    embedding = torch.randn(tiny.VOCAB, 32)
    config = {key: value for key, value in LLAMA.items() if key != "draft_vocab_size"}
    written(tmp_path, weights | {"embed_tokens.weight": embedding}, config, "pytorch_model.bin")
    loaded = load(tmp_path)
    assert loaded.config.version == 1
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    spec = SpeculativeGenerator(target, Eagle3Proposer(loaded), draft_length=3, on_unsupported="error")
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


def test_sharded(tmp_path):
    head = eagle3.head()
    weights = sorted(midlayer(head).items())
    written(tmp_path, dict(weights[:5]), LLAMA, "model-00001-of-00002.safetensors")
    save_file(dict(weights[5:]), tmp_path / "model-00002-of-00002.safetensors")
    index = {"weight_map": {name: "model" for name, _ in weights}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(load(tmp_path), head)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index.json names .*, which no file contains"):
        load(tmp_path)


def test_conventions():
    assert infer_convention([2, 16, 29], 32) == "entering"
    assert infer_convention([1, 15, 28], 32) == "output"
    assert infer_convention([4, 15, 28], 32) is None


# What is not a head


class Trap:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (self.mark.write_text, ("executed",))


def broken(folder, change):
    """A head's folder, changed."""
    save(eagle3.head(), folder)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(weights, config)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, c: w["fc.weight"].fill_(float("nan")), "fc.weight holds NaN"),
        (lambda w, c: w.pop("norm.weight"), "lacks norm.weight"),
        (lambda w, c: w.pop("fc.weight"), "holds no fc.weight"),
        (lambda w, c: w.pop("lm_head.weight"), "holds no lm_head.weight"),
        (lambda w, c: w.pop("d2t"), "has no d2t"),
        (lambda w, c: w.update({"gate.weight": torch.ones(3)}), "holds gate.weight, which this kind of head does not"),
        (lambda w, c: w["d2t"].fill_(60), "outside the vocabulary, or two to the same token"),
        (lambda w, c: w.update({"d2t": torch.zeros(7, dtype=torch.long)}), "d2t has shape"),
        (lambda w, c: w.update({"norm.weight": torch.ones(7)}), r"norm.weight has shape \(7,\)"),
        (lambda w, c: w.update({"fc.weight": torch.ones(32, 97)}), "97 values, which are not 3 states of equal width"),
        (lambda w, c: c.update({"head_dim": 7}), "head_dim 7 does not divide"),
        (lambda w, c: [c.pop(k) for k in ("head_dim", "num_attention_heads")], "neither num_attention_heads nor"),
        (lambda w, c: c.pop("vocab_size"), "has no vocab_size"),
        (lambda w, c: w.update({"fc.weight": torch.ones(32)}), r"fc.weight has shape \(32,\), expected 2 dim"),
        (
            lambda w, c: w.update({"lm_head.weight": torch.tensor(1.0)}),
            r"lm_head.weight has shape \(\), expected 2",
        ),
        (
            lambda w, c: w.update({"norm.weight": torch.ones(32).long()}),
            "norm.weight has dtype torch.int64, expected floating-point",
        ),
        (lambda w, c: w.update({"d2t": w["d2t"].float()}), "d2t has dtype torch.float32, expected integers"),
        (
            lambda w, c: w.update({"fc.weight": w["fc.weight"].to(torch.float8_e4m3fn)}),
            "has dtype torch.float8_e4m3fn, which",
        ),
        (lambda w, c: w.update({"layers.x.weight": torch.ones(3)}), "holds layers.x.weight, which this kind of head"),
    ],
)
def test_broken_heads_are_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(broken(tmp_path, change))


NUMBERS = ("8", -3, 10**30, float("nan"), float("inf"), [1], {"a": 1}, True)  # none of them is one
COUNT, FLAG, LIST, OBJECT = (*NUMBERS, 0, 1.5), ("true", 1, [], {}), ("a", 3, {"a": 1}, [{}]), ("a", 3, [1], True)


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        ("head_dim", COUNT, "an integer from 1 to"),
        ("num_attention_heads", COUNT, "an integer from 1 to"),
        ("max_position_embeddings", COUNT, "an integer from 1 to"),
        ("sliding_window", COUNT[:-2], "an integer from 0 to"),
        ("draft_window", COUNT, "an integer from 1 to"),
        ("vocab_size", COUNT[:-2], "an integer from 0 to"),
        ("rms_norm_eps", NUMBERS, "a number from 0 to 1"),
        ("rope_theta", (*NUMBERS, 0), "a number from 1 to"),
        ("hidden_act", ("swishy", *NUMBERS), "one of gelu, "),
        ("norm_output", FLAG, "true or false"),
        ("use_sliding_window", FLAG, "true or false"),
        ("architectures", LIST, "a list of strings"),
        ("layer_types", LIST, "a list of strings"),
        ("target_layer_ids", (*LIST, [-2], [1.5], [True]), "a list of integers from -1"),
        ("eagle_config", OBJECT, "an object"),
        ("transformer_layer_config", OBJECT, "an object"),
        ("rope_parameters.rope_theta", (*NUMBERS, 0), "a number from 1 to"),
        ("transformer_layer_config.head_dim", COUNT, "an integer from 1 to"),
        ("dflash_config.mask_token_id", COUNT[:-2], "an integer from 0 to"),
        ("speculators_config.proposal_methods", OBJECT, "a list of objects"),
    ],
)
def test_a_field_of_another_kind_is_named(path, wrong, words, tmp_path):
    """With its file, what was found, and what is allowed: of heads in any layout."""
    *outer, name = path.split(".")
    for value in wrong:
        config = {name: value}
        for place in outer:
            config = {place: config}
        (tmp_path / "config.json").write_text(json.dumps(config))
        for reading in (load, load_block, read_medusa, read_hydra):
            said = f"{re.escape(str(tmp_path))}/config.json: {path} must be {words}"
            with pytest.raises(ValueError, match=f"^{said}.*{re.escape(f'it is {shortened(value)}: ')}"):
                reading(tmp_path)


@pytest.mark.parametrize("content", [b'{"head_dim": ' + b"[" * 100_000, b'{"head_dim": 8', b"\xff{}"])
def test_a_config_that_is_no_json(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json (is not JSON|cannot be read: its JSON is nested too deeply)"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["[]", '{"weight_map": []}', "[" * 100_000])
def test_an_index_of_weights_that_is_none(content, tmp_path):
    save(eagle3.head(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json (is not a weight index|cannot be read)"):
        load(tmp_path)


def test_files_that_are_damaged(tmp_path):
    save(eagle3.head(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or truncated"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load(tmp_path)
    torch.save(midlayer(eagle3.head()), tmp_path / "pytorch_model.bin")
    half = (tmp_path / "pytorch_model.bin").read_bytes()[:-2000]
    (tmp_path / "pytorch_model.bin").write_bytes(half)
    with pytest.raises(ValueError, match=re.escape("is damaged or contains more than weights")):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        load(tmp_path / "pytorch_model.bin")


def test_a_pickle_is_not_executed(tmp_path):
    mark = tmp_path / "mark"
    folder = tmp_path / "head"
    save(eagle3.head(), folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Trap(mark)}))
    with pytest.raises(ValueError, match="nothing in it was executed"):
        load(folder)
    torch.save({"fc.weight": Trap(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="nothing in it was executed"):
        load(folder)
    assert not mark.exists()
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="dictionary of tensors"):
        load(folder)


@pytest.mark.parametrize("name", eagle3.VARIANTS)
def test_eight_bits(name, tmp_path):
    head = eagle3.head(name).to(torch.bfloat16)
    for layout in ("sglang", "int8"):
        save(head, tmp_path / layout, layout)
    whole, half = ((tmp_path / layout / "model.safetensors").stat().st_size for layout in ("sglang", "int8"))
    assert half < 0.55 * whole + 4000  # names, and the vocabulary's maps
    loaded = read(tmp_path / "int8")
    assert loaded.format.endswith(", 8-bit")
    assert loaded.head().config == load(tmp_path / "sglang").config
    for key, weight in load(tmp_path / "int8").state_dict().items():
        exact = head.state_dict()[key].float()
        step = exact.abs().amax(-1, keepdim=True) / 127 if exact.dim() == 2 else 0 * exact
        within = 0.5 * step + exact.abs() / 128  # half a step, and the rounding of bfloat16
        assert ((weight.float() - exact).abs() <= within).all(), key
    save(load(tmp_path / "int8"), tmp_path / "again", "int8")
    again, once = load(tmp_path / "again").state_dict(), load(tmp_path / "int8").state_dict()
    assert all(torch.equal(weight, once[key]) for key, weight in again.items())


def test_eight_bits_without_their_scales(tmp_path):
    save(eagle3.head(), tmp_path, "int8")
    path = tmp_path / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if name != "fc.weight_scale"}, path)
    with pytest.raises(ValueError, match=r"fc.weight has dtype int8, but its scales \(fc.weight_scale\) are missing"):
        load(tmp_path)


def test_eight_bits_with_scales_of_another_shape(tmp_path):
    save(eagle3.head(), tmp_path, "int8")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"fc.weight_scale": weights["fc.weight_scale"][:, 0].contiguous()}, path)
    with pytest.raises(ValueError, match="expected one scale per row"):
        load(tmp_path)


def test_a_scale_that_belongs_to_nothing(tmp_path):
    save(eagle3.head(), tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"midlayer.self_attn.k_scale": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_scale, which this kind of head does not have"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["narrow", "norm output", "two layers"])
@torch.no_grad()
def test_widened_drafts_the_same(name):
    head = eagle3.head(name, hidden_size=24, attention_bias=True, fc_bias=True, rms_norm_eps=1e-12)
    wide = widen(head)
    assert wide.config.hidden_size == wide.config.target_hidden_size == 32
    embeds, states = torch.randn(2, 1, 9, 32, device=head.device)
    position = torch.arange(9, device=head.device)[None]
    features = [each.fuse(states.repeat(1, 1, 3)) for each in (head, wide)]
    for _ in range(2):  # the second pass is fed what the first put out
        features = [each(embeds, h, position, None) for each, h in zip((head, wide), features, strict=True)]
        logits = [each.logits(h) for each, h in zip((head, wide), features, strict=True)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert widen(wide) is wide


def test_a_head_wider_than_its_target_has_no_other_layout():
    with pytest.raises(ValueError, match="48 wide, its target 32"):
        widen(eagle3.head("wide"))
    assert widen(own := eagle3.head("own embedding", hidden_size=48)) is own


def test_export_refuses():
    with pytest.raises(ValueError, match="layout must be one of"):
        save(eagle3.head(), "nowhere", "onnx")
    with pytest.raises(ValueError, match="only EAGLE-3"):
        save(eagle3.head(version=1, draft_vocab_size=tiny.VOCAB), "nowhere")


def test_a_head_is_not_written_over_a_model(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="choose another folder"):
        save(eagle3.head(), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("config", ['{"model_type": "gpt2"}', "// mine\n{}", "[]"])
def test_a_head_is_not_written_over_another_config(config, tmp_path):
    """Its weights may be in files that are no safetensors."""
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match="choose another folder"):
        save(eagle3.head(), tmp_path)
    assert (tmp_path / "config.json").read_text() == config


def test_a_head_is_written_over_a_head(tmp_path):
    save(eagle3.head(), tmp_path, "speculators")
    save(eagle3.head(), tmp_path)
    assert same(load(tmp_path), eagle3.head())


# specdec inspect


def test_inspect_lists_everything(tmp_path):
    save(eagle3.head("3.1", tap_ids=(0, 1, 2)), tmp_path, "speculators")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for name in load_file(tmp_path / "model.safetensors"):
        assert name in result.output
    for name in ("taps", "tap_convention", "rope", "norm_before_residual", "norm_output", "fc_norm", "qk_norm"):
        assert f"  {name} " in result.output
    assert "embed_tokens.weight (the target's is used)" in result.output


def test_inspect_says_what_is_wrong(tmp_path):
    save(eagle3.head(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 2
    assert "damaged or truncated" in result.output


def test_export_from_the_command_line(tmp_path):
    head = eagle3.head("3.1")
    save(head, tmp_path / "one", "sglang")
    save(eagle3.head("narrow"), tmp_path / "narrow")
    command = ["export", str(tmp_path / "narrow"), str(tmp_path / "as wide")]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert load(tmp_path / "as wide").config.hidden_size == 32
    command = ["export", str(tmp_path / "one"), str(tmp_path / "two"), "--layout", "speculators"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert read(tmp_path / "two").format == "vLLM speculators"
    assert same(load(tmp_path / "two"), head)
    assert CliRunner().invoke(app, [*command[:-1], "gguf"]).exit_code == 2


def test_a_head_is_not_exported_over_itself(tmp_path, monkeypatch):
    save(eagle3.head(), tmp_path / "one")
    before = (tmp_path / "one" / "model.safetensors").read_bytes()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["export", "one", str(tmp_path / "one"), "--layout", "int8"])
    assert result.exit_code == 2
    assert "is the folder of the head itself" in result.output
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("bias", "options", "said"),
    [
        (True, [], "SGLang's code ignores the biases"),
        (False, [], ""),
        (True, ["--layout", "speculators", "--target", "some/model"], ""),
        (False, ["--layout", "speculators"], "give --target"),
    ],
)
def test_export_says_what_others_would_miss(bias, options, said, tmp_path):
    save(eagle3.head(attention_bias=bias), tmp_path / "one")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "one"), str(tmp_path / "two"), *options])
    assert result.exit_code == 0
    assert said in result.stderr
    assert bool(said) == ("warning" in result.stderr)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fc_bias": True}, "ignores the bias of this head's fc,"),
        ({"qk_norm": True, "output_bias": True}, "ignores the bias of this head's o_proj in a Qwen3"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc before fc_norm"),
    ],
)
def test_export_says_what_vllm_would_miss(changes, said, tmp_path):
    save(eagle3.head(**changes), tmp_path / "one")
    out = str(tmp_path / "two")
    command = ["export", str(tmp_path / "one"), out, "--layout", "speculators", "--target", "some/model"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert said in result.stderr.replace("\n", " ")


def test_an_unknown_convention_stays_unknown_through_exports(tmp_path):
    """[2, 16, 29] of 32 layers are entering states, whatever the layout they came in usually means."""
    config = LLAMA | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}
    written(tmp_path / "one", midlayer(eagle3.head()), config)
    assert load(tmp_path / "one").config.taps(32) == (2, 16, 29)
    for number, layout in enumerate(["speculators", "sglang"]):
        save(load(tmp_path / "one"), tmp_path / str(number), layout)
        assert load(tmp_path / str(number)).config.taps(32) == (2, 16, 29)
        assert load(tmp_path / str(number)).config.taps(40) == (3, 17, 30)


def test_biases_of_every_projection(tmp_path):
    head = eagle3.head("biases", output_bias=True)
    for layout in EXACT:
        save(head, tmp_path / layout, layout)
        assert same(load(tmp_path / layout), head)


def test_a_width_that_the_heads_do_not_divide():
    head = eagle3.head(num_attention_heads=3, num_key_value_heads=1, head_dim=16)
    assert drafts(head).shape == (1, 6, 40)


def test_a_trainers_files_beside_the_weights(tmp_path):
    written(tmp_path, midlayer(eagle3.head()), LLAMA, "pytorch_model.bin")
    (tmp_path / "training_args.bin").write_bytes(b"something else")
    assert same(load(tmp_path), eagle3.head())


def test_every_layout_has_a_writer_of_its_own(tmp_path):
    assert WRITERS.keys() == {*get_args(HeadLayout)}
    written = set()
    for layout in WRITERS:
        save(eagle3.head(), tmp_path / layout, layout)
        config = (tmp_path / layout / "config.json").read_bytes()
        written.add((config, (tmp_path / layout / "model.safetensors").read_bytes()))
    assert len(written) == len(WRITERS)
