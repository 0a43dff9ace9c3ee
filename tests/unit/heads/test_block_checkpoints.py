"""Block-parallel drafters on disk: every published layout, and clear errors for what is none."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from specdec import SpeculativeGenerator
from specdec.cli.app import app
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.dflash.runner import DFlashRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.loading import load, read
from specdec.models.compat import CACHE
from specdec.models.loading import load as load_draft
from tests.support import blocks, tiny

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": tiny.VOCAB,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}
Z_LAB = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 5,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]},
}
DEEPSPEC = QWEN3 | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 5,
    "mask_token_id": 63,
    "target_layer_ids": [0, 1],
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "num_anchors": 512,
}


def speculators(kind, layer=(), **changes):
    config = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "some/model", "architectures": []},
        },
        "transformer_layer_config": QWEN3 | dict(layer),
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": 5,
        "mask_token_id": 63,
        "draft_vocab_size": tiny.VOCAB,
        "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": False,
    }
    return config | changes


def z_lab(top=(), architectures=("DFlashDraftModel",), **nested):
    """A config in z-lab's layout with these fields in its `dflash_config`."""
    config = Z_LAB | {"architectures": list(architectures)} | dict(top)
    return config | {"dflash_config": Z_LAB["dflash_config"] | nested}


def written(folder, weights, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


@torch.no_grad()
def drafts(head):
    """Logits of all of a block."""
    generator = torch.Generator().manual_seed(0)
    target = tiny.model("llama")
    runner = DFlashRunner(head, BorrowedEmbeddings.by(target, head))
    runner.start(1)
    tokens = torch.randint(1, 60, (1, 16), generator=generator)
    logits = [runner.extend(tokens, torch.randn(1, 16, 64, generator=generator), [0])]
    logits += [runner.logits_after(depth, tokens[:, :1], None) for depth in range(1, head.config.drafted)]
    return torch.cat(logits, 1)


WINDOWED = {"windows": (6, None)}
ANCHORED = {"windows": (7, None), "window_from_anchor": True}
MASK = "sliding_window_non_causal"  # its default depends on the kind
BORROWED = {"own_head": False, "draft_vocab_size": tiny.VOCAB}
DOMINO = {"projector_type": "domino", "emb_dim": 5, "gru_hidden_dim": 6}
PUBLISHED = {  # names in checkpoints
    "domino_head.input_gates.weight": "prefix_gru.weight_ih_l0",
    "domino_head.state_gates.weight": "prefix_gru.weight_hh_l0",
    "domino_head.down_proj.weight": "embed_proj.0.weight",
    "domino_head.up_proj.weight": "embed_proj.2.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
WITH_TABLES = {"own_embedding": True, "own_head": True}
LAYOUTS = {
    "z-lab": ("DFlash", {}, Z_LAB, "z-lab"),
    "z-lab, nested block size": (
        "DFlash",
        {},
        {k: v for k, v in Z_LAB.items() if k != "block_size"}
        | {"dflash_config": Z_LAB["dflash_config"] | {"block_size": 5}},
        "z-lab",
    ),
    "z-lab, windows": ("DFlash", WINDOWED | {"causal": "windows"}, Z_LAB | SLIDING, "z-lab"),
    "z-lab, windows both ways": ("DFlash", WINDOWED, Z_LAB | SLIDING | {"is_causal": False}, "z-lab"),
    "JetSpec": ("JetSpec", {}, z_lab(causal_head=True), "z-lab"),
    "JetSpec, for vLLM": ("JetSpec", {}, z_lab(causal=True), "z-lab"),
    "Domino": (
        "Domino",
        {},
        z_lab(architectures=["DominoDraftModel"], **DOMINO, pure_draft_prefix_len=1, shift_label=True),
        "z-lab",
    ),
    "Domino, masks alone": ("Domino behind the anchor", BORROWED, z_lab(**DOMINO, shift_label=False), "z-lab"),
    "DFlash 2": ("DFlash 2", WINDOWED, z_lab(SLIDING | {"is_causal": False}, selector_top_k=9), "z-lab"),
    "DFlash 2, scaled": (
        "DFlash 2, wide kernel",
        {"embedding_scale": 1.5, "logit_scale": 0.5, "logit_softcap": 3.0},
        z_lab(selector_top_k=9, input_embedding_scale=1.5, output_multiplier=0.5, final_logit_softcapping=3.0),
        "z-lab",
    ),
    "speculators dflash2": (
        "DFlash 2",
        ANCHORED,
        {name: value for name, value in speculators("dflash2", SLIDING, selector_top_k=9).items() if name != MASK},
        "vLLM speculators",
    ),
    "DeepSpec": ("DSpark", WITH_TABLES, DEEPSPEC, "DeepSpec"),
    "DeepSpec, gated": ("gated", WITH_TABLES | {"draft_vocab_size": 64}, DEEPSPEC, "DeepSpec"),
    "DeepSpec, rnn": ("rnn", WITH_TABLES, DEEPSPEC, "DeepSpec"),
    "DeepSpec, without its heads": ("from the anchor", WITH_TABLES, DEEPSPEC, "DeepSpec"),
    "speculators dflash": ("DFlash", {}, speculators("dflash"), "vLLM speculators"),
    "speculators dflash, own vocabulary": (
        "own vocabulary",
        {},
        speculators("dflash", draft_vocab_size=40),
        "vLLM speculators",
    ),
    "speculators dflash, windows": (
        "DFlash",
        ANCHORED | {"causal": "windows"},
        speculators("dflash", SLIDING),
        "vLLM speculators",
    ),
    "speculators dflash, windows both ways": (
        "DFlash",
        ANCHORED,
        speculators("dflash", SLIDING, sliding_window_non_causal=True),
        "vLLM speculators",
    ),
    "speculators dspark": ("DSpark", {}, speculators("dspark"), "vLLM speculators"),
    "speculators dspark, rnn": (
        "rnn behind the anchor",
        {},
        speculators("dspark", sample_from_anchor=False),
        "vLLM speculators",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout, tmp_path):
    name, changes, config, format = LAYOUTS[layout]
    head = blocks.head(name, **changes)
    weights = dict(head.state_dict())
    if head.config.draft_vocab_size == tiny.VOCAB:
        weights.pop("d2t", None)
    else:
        weights["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    weights = {PUBLISHED.get(name, name): tensor for name, tensor in weights.items()}
    checkpoint = read(written(tmp_path, weights, config))
    assert checkpoint.format == format
    loaded = checkpoint.head()
    assert loaded.config == head.config
    torch.testing.assert_close(drafts(loaded), drafts(head))  # where weights lie decides how sums are rounded


def test_rope_of_a_picture_model(tmp_path):
    """In a text all its planes turn alike: plain RoPE."""
    config = Z_LAB | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert load(written(tmp_path, blocks.head().state_dict(), config)).config == blocks.head().config


def test_half_precision_stays(tmp_path):
    written(tmp_path, blocks.head().bfloat16().state_dict(), Z_LAB)
    assert load(tmp_path).dtype == torch.bfloat16


@torch.no_grad()
def test_transformers_own_drafter(tmp_path):
    """A model of its `speculation_type="dflash"`, saved by transformers: our block is its block."""
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    from transformers.cache_utils import DFlashCache

    config = assistant.MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        block_size=5,
        mask_token_id=63,
        target_layer_ids=[0, 1],
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = assistant.MuseGlimmerAssistantModel(config).eval()
    for weight in theirs.parameters():
        weight.mul_(8) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    checkpoint = read(tmp_path)
    assert checkpoint.format == "transformers"
    target = tiny.on_host("llama")
    ours = checkpoint.head()
    runner = DFlashRunner(ours, BorrowedEmbeddings.by(target, ours))
    runner.start(1)
    states, tokens, cache = torch.randn(1, 20, 64), torch.randint(1, 60, (1, 21)), DFlashCache(config=config)
    cache.activate_past_recording()
    before = 0
    for end in (12, 15, 20):
        cache.set_previous_accepted_tokens(end - before)
        if before:
            cache.crop(-5)
        block = torch.cat([tokens[:, end : end + 1], torch.full((1, 4), 63)], 1)
        wanted = theirs(
            noise_embeds=target.get_input_embeddings()(block),
            context_hidden_states=states[:, before:end],
            position_ids=torch.arange(before, end + 5)[None],
            **{CACHE: cache},
        ).last_hidden_state[:, 1:]
        runner.drop_draft()
        runner.extend(tokens[:, before + 1 : end + 1], states[:, before:end], [0])
        torch.testing.assert_close(runner.block.hidden, wanted, rtol=1e-4, atol=1e-4)
        before = end
    spec = SpeculativeGenerator(target, f"dflash:{tmp_path}", draft_length=4, on_unsupported="error")
    inputs = tiny.prompts(9, 4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


def test_an_embedding_that_norms_is_read_without_that(monkeypatch):
    """As transformers does for the targets that have one."""
    target, head = tiny.on_host("llama"), blocks.head()
    normed = nn.Embedding.from_pretrained(target.get_input_embeddings().weight.detach())
    normed.register_forward_hook(lambda module, args, out: out * 0)
    normed.embed_norm = nn.Identity()
    runner = DFlashRunner(head, BorrowedEmbeddings(normed, target.get_output_embeddings()))
    read = []
    monkeypatch.setattr(DFlashHead, "forward", lambda self, embeds, *rest: read.append(embeds) or embeds)
    runner.start(1)
    runner.extend(torch.tensor([[5]]), torch.zeros(1, 1, 64), [0])
    assert torch.equal(read[0], target.get_input_embeddings()(torch.tensor([[5, 63, 63, 63, 63]])))


def test_p_eagle_of_speculators(tmp_path):
    head = blocks.parallel(own_embedding=True)
    config = speculators("peagle", eagle_aux_hidden_state_layer_ids=[2, 1, 0], norm_before_residual=True)
    config["transformer_layer_config"] = QWEN3 | {"model_type": "llama", "num_hidden_layers": 1, "head_dim": 8}
    config = {name: value for name, value in config.items() if name != "aux_hidden_state_layer_ids"}
    checkpoint = read(written(tmp_path, head.state_dict(), config | {"architectures": ["PEagleDraftModel"]}))
    assert checkpoint.config.block_size == 4
    assert checkpoint.config.mask_token_id == 63
    target, inputs = tiny.model("llama"), tiny.prompts(9, 4)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, f"dflash:{tmp_path}", draft_length=4, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens > 0
    with pytest.raises(ValueError, match="P-EAGLE"):
        SpeculativeGenerator(target, f"eagle3:{tmp_path}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, c: w.pop("norm.weight"), "lacks norm.weight"),
        (lambda w, c: w.update({"conv.weight": torch.zeros(2)}), "holds conv.weight, which this kind of head does not"),
        (lambda w, c: w.pop("fc.weight"), "no fc.weight"),
        (lambda w, c: w.update({"fc.weight": torch.zeros(32, 65)}), "65 values, which are not 2 states of equal width"),
        (lambda w, c: w["hidden_norm.weight"].fill_(float("nan")), "hidden_norm.weight holds NaN"),
        (lambda w, c: c.pop("block_size"), "has no block_size"),
        (lambda w, c: c["dflash_config"].pop("mask_token_id"), "has no mask_token_id"),
        (
            lambda w, c: (c["dflash_config"].pop("target_layer_ids"), c.pop("num_target_layers")),
            "which of the target's states are read",
        ),
        (lambda w, c: c.update(draft_vocab_size=40), "drafts 40 of 64 tokens and lacks lm_head.weight"),
        (lambda w, c: w.update({"lm_head.weight": torch.zeros(40, 32)}), "has no d2t that maps them"),
        (lambda w, c: c.update(SLIDING | {"sliding_window": 4}), "smaller than a block of 5"),
        (lambda w, c: c.update(layer_types=["full_attention"]), "1 layer_types for 2 layers"),
    ],
)
def test_what_is_wrong_is_said(change, message, tmp_path):
    config = json.loads(json.dumps(Z_LAB))
    weights = {name: tensor.clone() for name, tensor in blocks.head().state_dict().items()}
    change(weights, config)
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path, weights, config))


def test_where_the_taps_are_not_named_they_are_spread_out(tmp_path):
    config = Z_LAB | {"dflash_config": {"mask_token_id": 63}, "num_target_layers": 9}
    known = read(written(tmp_path, blocks.head().state_dict(), config))
    assert known.config.tap_ids == (2, 7)  # what leaves layers 1 and 6
    assert {field.name: field.source for field in known.fields}["taps"] == "assumed"


def test_other_ways_in_say_where_to_go(tmp_path):
    written(tmp_path, blocks.head().state_dict(), Z_LAB)
    target = tiny.model("llama")
    with pytest.raises(ValueError, match='pass "dflash:'):
        SpeculativeGenerator(target, f"eagle3:{tmp_path}")
    with pytest.raises(ValueError, match='pass "dflash:'):
        load_draft(str(tmp_path))


def test_inspect_lists_everything(tmp_path):
    written(tmp_path, blocks.head("DSpark").state_dict(), speculators("dspark"))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for name in blocks.head("DSpark").state_dict():
        assert name in result.output
    for name in ("taps", "block_size", "mask_token_id", "from_anchor", "markov", "confidence", "rope"):
        assert f"  {name} " in result.output
    assert "lm_head.weight (the target's is used)" in result.output


def test_inspect_says_whether_a_target_fits(tmp_path):
    written(tmp_path / "drafter", blocks.head().state_dict(), Z_LAB)
    tiny.model("llama").save_pretrained(tmp_path / "target")
    command = ["inspect", str(tmp_path / "drafter"), "--target", str(tmp_path / "target")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "reads the states entering its layers (1, 2)" in result.output
    assert CliRunner().invoke(app, [*command, "--probe"]).exit_code == 2


# Medusa


def medusa_weights(heads=3, layers=2, hidden=32):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator) / 4

    weights = {}
    for i in range(heads):
        for j in range(layers):
            weights |= {f"{i}.{j}.linear.weight": random(hidden, hidden), f"{i}.{j}.linear.bias": random(hidden)}
        weights[f"{i}.{layers}.weight"] = random(tiny.VOCAB, hidden)
    return weights


MEDUSA = {"medusa_num_heads": 5, "medusa_num_layers": 2, "base_model_name_or_path": "some/model"}


@torch.no_grad()
@pytest.mark.parametrize("layout", ["medusa_lm_head.pt", "model.safetensors", "vLLM"])
def test_medusas_heads(layout, tmp_path):
    """They draft what a hand-made forward pass over the target's last state says, and the text stays."""
    weights = medusa_weights()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa"} if layout == "vLLM" else MEDUSA))
    if layout == "medusa_lm_head.pt":
        torch.save(weights, tmp_path / layout)
    elif layout == "model.safetensors":
        save_file({f"medusa_head.{name}": tensor for name, tensor in weights.items()}, tmp_path / layout)
    else:
        blocks_of = {re.sub(r"(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2", name): t for name, t in weights.items()}
        renamed = {re.sub(r"^(\d+)\.2\.weight", r"lm_heads.\1.weight", name): t for name, t in blocks_of.items()}
        save_file(renamed, tmp_path / "model.safetensors")
    head = load(tmp_path)
    assert head.config.drafted == 3
    h, wanted = torch.randn(2, 32), []
    for i in range(3):
        x = h
        for j in range(2):
            x = x + nn.functional.silu(x @ weights[f"{i}.{j}.linear.weight"].T + weights[f"{i}.{j}.linear.bias"])
        wanted.append(x @ weights[f"{i}.2.weight"].T)
    torch.testing.assert_close(head(h), torch.stack(wanted, 1), rtol=1e-4, atol=1e-4)

    target = tiny.model("llama")
    for lengths in ((9,), (9, 1, 5)):
        inputs = tiny.prompts(*lengths)
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=16)
        spec = SpeculativeGenerator(target, f"medusa:{tmp_path}", draft_length=4, on_unsupported="error")
        with spec.watch() as rounds:
            assert spec.generate(**inputs, do_sample=False, max_new_tokens=16).tolist() == plain.tolist()
        assert spec.report.num_draft_tokens > 0
    first = rounds[1]  # of the second row, whose one token was read: the state is the one that chose the root
    state = target(plain[first.row : first.row + 1, 8:9], output_hidden_states=True).hidden_states[-1][0, -1]
    if first.row == 1:
        assert first.tokens[1] == int(head(state[None])[0, 0].argmax())


def test_heads_without_lm_heads_are_refused(tmp_path):
    weights = {name: tensor for name, tensor in medusa_weights().items() if "linear" in name}
    written(tmp_path, weights, MEDUSA)
    with pytest.raises(ValueError, match="holds no Medusa heads"):
        load(tmp_path)


def test_a_tensor_that_no_medusa_head_has(tmp_path):
    written(tmp_path, medusa_weights() | {"other": torch.zeros(2)}, MEDUSA)
    with pytest.raises(ValueError, match="holds other, which this kind of head does not have"):
        load(tmp_path)


def test_damaged_medusa_heads(tmp_path):
    weights = medusa_weights()
    weights["1.0.linear.bias"][3] = float("nan")
    written(tmp_path, weights, MEDUSA)
    with pytest.raises(ValueError, match=r"1.0.linear.bias holds NaN"):
        load(tmp_path)


def test_medusas_heads_are_inspected(tmp_path):
    written(tmp_path, medusa_weights(), MEDUSA)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "the config says 5" in result.output
    assert "2.1.linear.bias" in result.output
