"""Hydra's heads: against naive ones, their files, and through the decoder."""

import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from specdec import BlockProposer, DynamicTree, HybridProposer, HydraProposer, SpeculativeGenerator
from specdec.cli.app import app
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.hydra.head import PrefixLayer
from specdec.heads.hydra.runner import HydraRunner, PrefixRows
from specdec.heads.loading import load
from tests.support import blocks, tiny
from tests.support.naive_blocks import NaiveHydra

KINDS = {"prefix": True, "plain": False}
SHAPES = {
    "default": {},
    "dynamic": {"tree": DynamicTree(depth=3, top_k=3, size=8)},
    "fixed": {"branching": (3, 2, 1)},
    "chain": {"branching": (1, 1, 1)},
}
kinds = pytest.mark.parametrize("prefix", KINDS.values(), ids=KINDS)


def naive(head, target):
    return NaiveHydra(head.state_dict(), head.config, target.get_input_embeddings().weight)


class Rows:
    """Random texts and states, a runner fed with them, and what naive heads make of them."""

    def __init__(self, head, lengths):
        target, generator = tiny.model("llama"), torch.Generator().manual_seed(0)
        B, T = len(lengths), max(lengths) + 6
        self.head, self.lengths = head, list(lengths)
        self.states = torch.randn(B, T, 32, generator=generator).to(tiny.DEVICE)
        self.tokens = torch.randint(1, tiny.VOCAB, (B, T), generator=generator).to(tiny.DEVICE)
        self.runner, self.reference = HydraRunner(head, BorrowedEmbeddings.by(target, head), head), naive(head, target)
        self.runner.start(B)

    def extend(self, ends, counts):
        """Feed each row's `counts[b]` states before column `ends[b]`; logits behind the token there."""
        width = max(counts)
        index = torch.stack([torch.arange(end - width, end) for end in ends]).clamp(min=0).to(tiny.DEVICE)
        fed = self.states.gather(1, index[..., None].expand(-1, -1, 32))
        return self.runner.extend(self.tokens.gather(1, index + 1), fed, [width - count for count in counts])

    def check(self, logits, ends, paths):
        """logits: (B, V), behind the tokens `paths` of each row."""
        for b, end in enumerate(ends):
            wanted = self.reference.draft(self.states[b, :end], self.tokens[b, : end + 1].tolist(), paths[b])
            torch.testing.assert_close(logits[b].double(), wanted, rtol=1e-4, atol=1e-4)

    def check_rounds(self):
        """A prompt in two parts, more text, and a tree behind each: siblings, and children of either."""
        half, ends = [max(1, length // 2) for length in self.lengths], self.lengths
        self.check_tree(self.extend(half, half), half)
        self.check_tree(self.extend(ends, [end - h for end, h in zip(ends, half, strict=True)]), ends)
        gained = [3, 1, 2][: len(ends)]
        ends = [end + more for end, more in zip(ends, gained, strict=True)]
        self.check_tree(self.extend(ends, gained), ends)

    def check_tree(self, logits, ends):
        B = len(ends)
        self.check(logits[:, 0], ends, [()] * B)
        rows = torch.arange(B, device=tiny.DEVICE)[:, None]
        first = (torch.tensor([[5, 9]], device=tiny.DEVICE) + rows) % tiny.VOCAB
        second = (torch.tensor([[3, 8, 4]], device=tiny.DEVICE) + 2 * rows) % tiny.VOCAB
        logits = self.runner.logits_after(1, first, None)
        for n in range(2):
            self.check(logits[:, n], ends, first[:, n : n + 1].tolist())
        above = torch.tensor([[0, 1, 1]], device=tiny.DEVICE).expand(B, -1)
        logits = self.runner.logits_after(2, second, above)
        for n, parent in enumerate((0, 1, 1)):
            self.check(logits[:, n], ends, torch.stack([first[:, parent], second[:, n]], 1).tolist())


@torch.no_grad()
@kinds
@pytest.mark.parametrize("lengths", [(9,), (7, 2, 9), (40, 21)], ids=["single", "ragged", "long"])
def test_they_compute_what_naive_heads_do(prefix, lengths):
    Rows(blocks.hydra(prefix), lengths).check_rounds()


@torch.no_grad()
def test_prompts_are_read_in_parts(monkeypatch):
    monkeypatch.setattr("specdec.heads.base.AT_ONCE", 4)
    Rows(blocks.hydra(), (40, 21)).check_rounds()


@torch.no_grad()
def test_a_fourth_token_knows_its_ancestors():
    rows = Rows(blocks.hydra(heads=4), (9,))
    rows.extend([9], [9])
    device = tiny.DEVICE
    rows.runner.logits_after(1, torch.tensor([[5, 9]], device=device), None)
    rows.runner.logits_after(2, torch.tensor([[3, 8, 4]], device=device), torch.tensor([[0, 1, 1]], device=device))
    logits = rows.runner.logits_after(3, torch.tensor([[6, 7]], device=device), torch.tensor([[2, 4]], device=device))
    rows.check(logits[:, 0], [9], [(5, 3, 6)])
    rows.check(logits[:, 1], [9], [(9, 4, 7)])


def shifted(monkeypatch):
    """States belong to the tokens after theirs."""
    extend = HydraRunner.extend
    monkeypatch.setattr(HydraRunner, "extend", lambda self, t, states, p: extend(self, t, states.roll(1, 1), p))


def late(monkeypatch):
    """Positions are counted from one: a layer that turns keys and queries alike does not care, one after a gap does."""
    append_kv = PrefixLayer.append_kv
    monkeypatch.setattr(PrefixLayer, "append_kv", lambda self, s, positions, c: append_kv(self, s, positions + 1, c))


def forgetful(monkeypatch):
    """Of the text only the newest states are seen."""
    read = PrefixRows.read

    def broken(self, states, pads):
        self.start(len(states))
        return read(self, states, pads)

    monkeypatch.setattr(PrefixRows, "read", broken)


def orphaned(monkeypatch):
    """All nodes are children of the last one of the depth before."""
    logits_after = HydraRunner.logits_after
    monkeypatch.setattr(
        HydraRunner, "logits_after", lambda self, depth, tokens, parents: logits_after(self, depth, tokens, None)
    )


def one_place_early(monkeypatch):
    """Heads read the token before the root in its place."""
    extend = HydraRunner.extend
    monkeypatch.setattr(HydraRunner, "extend", lambda self, tokens, s, p: extend(self, tokens.roll(1, 1), s, p))


@torch.no_grad()
@pytest.mark.parametrize(
    "fault", [shifted, late, forgetful, orphaned, one_place_early], ids=lambda fault: fault.__name__
)
def test_that_check_finds_faults(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        Rows(blocks.hydra(), (40,)).check_rounds()


# Through the decoder


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@kinds
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", [(9,), (20, 1, 14)], ids=["single", "ragged"])
def test_the_text_is_plain_decodings(name, prefix, shape, lengths):
    target, inputs = tiny.model(name), tiny.prompts(*lengths)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=20)
    proposer = HydraProposer(blocks.hydra(prefix), **shape)
    spec = SpeculativeGenerator(target, proposer, draft_length=4 if shape else None, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=20).tolist() == plain.tolist()
    if shape:
        assert spec.report.num_draft_tokens > 0


@kinds
@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3}, {"top_k": 5}], ids=["plain", "penalty", "top-k"])
@pytest.mark.parametrize("shape", [SHAPES["dynamic"], SHAPES["chain"]], ids=["dynamic", "chain"])
def test_with_the_same_seed_it_is_plain_generates_text(prefix, sampling, shape):
    target, inputs = tiny.model("llama"), tiny.prompts(9, 4)
    arguments = {"do_sample": True, "max_new_tokens": 20, "top_k": 0, **sampling}
    spec = SpeculativeGenerator(target, HydraProposer(blocks.hydra(prefix), **shape), draft_length=3)
    torch.manual_seed(5)
    plain = target.generate(**inputs, **arguments)
    torch.manual_seed(5)
    assert spec.generate(**inputs, **arguments).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens > 0


@torch.no_grad()
@kinds
@pytest.mark.parametrize("beside_ngrams", [False, True], ids=["alone", "beside n-grams"])
def test_they_draft_what_naive_heads_would(prefix, beside_ngrams):
    """Each chain, over the states that the target itself has of the text so far."""
    target, head, inputs = tiny.model("llama"), blocks.hydra(prefix), tiny.prompts(9, 3)
    proposer = HydraProposer(head, branching=(1, 1, 1))
    spec = SpeculativeGenerator(target, HybridProposer(proposer) if beside_ngrams else proposer, draft_length=3)
    with spec.watch() as rounds:
        text = spec.generate(**inputs, do_sample=False, max_new_tokens=16)
    reference, checked = naive(head, target), 0
    for round in rounds:
        if round.drafted_by != "HydraProposer":
            continue
        size = (9, 3)[round.row]
        row = text[round.row, 9 - size :][: size + round.position]
        states = target.model(row[None, :-1]).last_hidden_state[0]
        path = []
        for token in round.tokens[1:]:
            path.append(int(reference.draft(states, row.tolist(), path).argmax()))
            assert token == path[-1]
            checked += 1
    assert checked > 20 or beside_ngrams


@pytest.mark.parametrize("prefix", [True])
def test_prompt_given_as_embeddings(prefix):
    target = tiny.model("llama")
    embeds = target.get_input_embeddings()(tiny.prompts(9)["input_ids"]).detach()
    plain = target.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, HydraProposer(blocks.hydra(prefix)), draft_length=3, on_unsupported="error")
    assert spec.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


# Their files


def published(head, dropout=False):
    """Tensors by the names that Hydra's own modules give them."""
    tensors = {"input_embed_fn.weight": tiny.model("llama").get_input_embeddings().weight.detach().clone()}
    for name, tensor in head.state_dict().items():
        kind, *rest = name.split(".")
        if kind == "heads" and rest[1] == "blocks":
            place = 2 * int(rest[2]) + 1 if dropout else rest[2]
            tensors[f"hydra_mlp.{rest[0]}.{place}." + ".".join(rest[3:])] = tensor
        elif kind == "heads":
            tensors[f"hydra_lm_head.{rest[0]}.{'1.' if dropout else ''}{rest[2]}"] = tensor
        elif rest[0] == "layer":
            tensors["prefix_embeding_layer.layers.0." + ".".join(rest[1:])] = tensor
        else:
            tensors["prefix_embeding_layer.norm.weight"] = tensor
    if head.prefix is not None:
        tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(tiny.VOCAB, 32)
        turns = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
        tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = turns
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def written(folder, tensors, changes=(), safetensors=False):
    folder.mkdir(exist_ok=True)
    config = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": "prefix-mlp",
        "hydra_num_heads": 3,
        "hydra_num_layers": 2,
    }
    (folder / "config.json").write_text(json.dumps(config | dict(changes)))
    if safetensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "hydra_lm_head.pt")
    return folder


@kinds
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("safetensors", [False, True])
def test_published_layouts(prefix, dropout, safetensors, tmp_path):
    made = blocks.hydra(prefix)
    changes = {} if prefix else {"hydra_head_arch": "mlp"}
    written(tmp_path, published(made, dropout), changes, safetensors)
    loaded = load(tmp_path)
    assert loaded.config == made.config
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.cpu())
    target, inputs = tiny.model("llama"), tiny.prompts(9)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    spec = SpeculativeGenerator(target, f"ngram+hydra:{tmp_path}", draft_length=3, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


def test_a_state_before_the_last(tmp_path):
    """Of four layers' states the one that leaves the third is the one that enters the fourth."""
    written(tmp_path, published(blocks.hydra()), {"hidden_state_offset": 1})
    target = tiny.model("llama", num_hidden_layers=4)
    assert HydraProposer(tmp_path).taps(target).at == (3,)
    spec = SpeculativeGenerator(target, f"hydra:{tmp_path}", draft_length=3, on_unsupported="error")
    plain = target.generate(**tiny.prompts(9), do_sample=False, max_new_tokens=12)
    assert spec.generate(**tiny.prompts(9), do_sample=False, max_new_tokens=12).tolist() == plain.tolist()


def test_without_frequencies_the_config_says_how_wide_attention_heads_are(tmp_path):
    tensors = {name: tensor for name, tensor in published(blocks.hydra()).items() if "inv_freq" not in name}
    with pytest.raises(ValueError, match="Add the target's num_attention_heads to config.json"):
        load(written(tmp_path, tensors))
    assert load(written(tmp_path, tensors, {"num_attention_heads": 4})).config == blocks.hydra().config


def without(*ends):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (without("hydra_mlp.1.0.res_connection.bias"), {}, "lacks heads.1.blocks.0.res_connection.bias"),
        (without("q_proj.weight"), {}, "lacks prefix_embeding_layer.layers.0.self_attn.q_proj.weight"),
        (lambda tensors: tensors | {"other": torch.zeros(2)}, {}, "holds other, which this kind of head does not have"),
        (lambda tensors: {"other": torch.zeros(2)}, {}, "it is not a checkpoint of Hydra heads"),
        (
            lambda tensors: tensors | {"hydra_lm_head.0.1.weight": torch.zeros(2)},
            {},
            "two tensors map to heads.0.lm_head.weight",
        ),
        (
            lambda tensors: tensors | {"hydra_lm_head.0.bias": torch.tensor([float("nan")])},
            {},
            "hydra_lm_head.0.bias holds NaN",
        ),
        (
            lambda tensors: {name: t.repeat(2) if "inv_freq" in name else t for name, t in tensors.items()},
            {},
            "inv_freq does not have the base 10000",
        ),
        (
            lambda tensors: {name: t[:0] if "inv_freq" in name else t for name, t in tensors.items()},
            {},
            r"inv_freq has shape \(0,\), expected a vector",
        ),
        (lambda tensors: tensors, {"grounded_heads": False}, "do not read the drafted tokens before theirs"),
        (lambda tensors: tensors, {"hydra_head_arch": "eagle-attn"}, "of kind 'eagle-attn', supported are mlp and"),
    ],
)
def test_files_that_are_not_theirs(change, config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path, change(published(blocks.hydra())), config))


def test_bytes_that_are_no_weights(tmp_path):
    (written(tmp_path, {}) / "hydra_lm_head.pt").write_bytes(b"junk" * 100)
    with pytest.raises(ValueError, match="is damaged or contains more than weights"):
        load(tmp_path)


def test_a_field_that_is_null_says_nothing(tmp_path):
    written(tmp_path, published(blocks.hydra()), {"hidden_state_offset": None})
    assert load(tmp_path).config.state_offset == 0


def test_they_are_inspected(tmp_path):
    written(tmp_path / "heads", published(blocks.hydra(), dropout=True), {"hydra_num_heads": 5})
    tiny.model("llama").save_pretrained(tmp_path / "target")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "heads"), "--target", str(tmp_path / "target")])
    assert result.exit_code == 0, result.output
    assert "the config says 5" in result.output
    assert "hydra_mlp.2.3.linear.bias" in result.output
    assert "embed_tokens.weight (the target's is used)" in result.output
    assert "It is compatible with" in result.output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HydraProposer(blocks.hydra(hidden=16)), "hidden states of 16, this one's have 32"),
        (lambda: HydraProposer(blocks.medusa()), "needs Hydra's heads, got MedusaHeads: use BlockProposer"),
        (lambda: BlockProposer(blocks.hydra()), 'pass "hydra:PATH"'),
        (lambda: "hydra", '"hydra" needs an argument, "hydra:PATH_OR_ID"'),
    ],
)
def test_heads_of_another_target_or_kind(make, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeGenerator(tiny.model("llama"), make())
