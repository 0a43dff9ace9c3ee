"""The target's own MTP layers draft: the text stays the target's, the drafts are those of slow references."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import candidate_generator

from specdec import DynamicTree, SpeculativeGenerator
from specdec.heads.mtp.checkpoint import NoMtpLayers
from specdec.heads.mtp.head import MtpLayer
from specdec.heads.mtp.loading import load
from specdec.heads.mtp.runner import MtpRunner
from specdec.models.introspection import decoder_layers
from specdec.proposers.draft_heads.mtp import MtpProposer
from specdec.proposers.hybrid import HybridProposer
from specdec.proposers.lookup.ngram import NgramProposer
from tests.support import mtp, tiny
from tests.support.naive_mtp import NaiveMtp

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_5_text")
QUICK = ("qwen3_next", "nemotron_h", "mimo_v2_flash")
SHAPES = {"chain": {}, "fixed": {"branching": (2, 2, 1)}, "dynamic": {"tree": DynamicTree(top_k=3, size=8)}}


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    known = {}

    def made(family, layers=1):
        if (family, layers) not in known:
            known[family, layers] = mtp.target(family, tmp_path_factory.mktemp(family), layers)
        return known[family, layers]

    return made


@pytest.mark.parametrize(
    ("family", "layers", "lengths", "shape"),
    [
        *(
            pytest.param(family, 1, (11, 4, 1), shape, marks=[] if i == j else pytest.mark.slow)
            for i, family in enumerate(FAMILIES)
            for j, shape in enumerate(SHAPES)
        ),
        *(pytest.param(family, 1, (9,), "chain", marks=pytest.mark.slow) for family in FAMILIES),
        *(pytest.param("qwen3_5_text", 3, (11, 4, 1), shape, marks=pytest.mark.slow) for shape in ("chain", "fixed")),
        ("qwen3_5_text", 3, (11, 4, 1), "dynamic"),
        ("deepseek_v3", 2, (9,), "dynamic"),
    ],
)
def test_the_text_is_plain_decodings(target, family, layers, lengths, shape):
    model, inputs = target(family, layers), tiny.prompts(*lengths, vocab=mtp.VOCAB)
    spec = SpeculativeGenerator(model, MtpProposer(**SHAPES[shape]), draft_length=4, on_unsupported="error")
    for kwargs in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
        torch.manual_seed(3)
        plain = model.generate(**inputs, max_new_tokens=20, **kwargs)
        torch.manual_seed(3)
        assert spec.generate(**inputs, max_new_tokens=20, **kwargs).tolist() == plain.tolist()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
        for family in mtp.CONFIGS
        if family not in FAMILIES
    ],
)
def test_every_family_has_its_layers(target, family):
    """Of the kind that they are, with the checkpoint's weights, and the text stays plain decoding's."""
    model, inputs = target(family), tiny.prompts(11, 4, 1, vocab=mtp.VOCAB)
    (layer,) = load(model).layers
    known = torch.load(Path(model.name_or_path) / "blocks.pt")
    for block, state in zip(decoder_layers(layer.block), known, strict=True):
        assert block.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items())
    spec = SpeculativeGenerator(model, "mtp", draft_length=3, on_unsupported="error")
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()
    assert spec.report.num_draft_tokens


def test_layers_in_train_mode_draft_without_dropout(tmp_path):
    model, inputs = mtp.target("glm4_moe", tmp_path, attention_dropout=0.5), tiny.prompts(11, 4, vocab=mtp.VOCAB)
    head, reports = load(model), []
    torch.manual_seed(1)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    state = torch.get_rng_state()
    for mode in (False, True):
        head.layers[0].train(mode)
        spec = SpeculativeGenerator(model, MtpProposer(head), draft_length=3, on_unsupported="error")
        torch.manual_seed(1)
        assert spec.generate(**inputs, do_sample=False, max_new_tokens=20).tolist() == plain.tolist()
        assert torch.equal(torch.get_rng_state(), state)
        assert head.layers[0].block.training == mode
        reports.append(spec.report.num_accepted_tokens_per_pos)
    assert reports[0] == reports[1]


def test_a_target_that_is_trained_stays_so(tmp_path):
    """Its embedding and LM head are the layers', too."""
    model = mtp.target("glm4_moe", tmp_path).train()
    head = load(model)
    spec = SpeculativeGenerator(model, MtpProposer(head), draft_length=3)
    spec.generate(**tiny.prompts(9, vocab=mtp.VOCAB), do_sample=False, max_new_tokens=4)
    assert all(module.training for module in model.modules())
    assert all(weight.requires_grad for weight in model.parameters() if weight.is_floating_point())
    assert not any(weight.requires_grad for layer in head.layers for weight in layer.parameters())


class Recorded(MtpProposer):
    """Keeps each draft beside the text that it was made for."""

    def begin(self, context):
        super().begin(context)
        self.drafts = DRAFTS

    def propose(self, context):
        draft = super().propose(context)
        for b in context.rows:
            self.drafts.append((context.row(b).clone(), draft.tokens[b, 1:].tolist()))
        return draft


DRAFTS: list = []


@pytest.fixture
def drafts():
    """Of `Recorded`, in this test."""
    DRAFTS.clear()
    return DRAFTS


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_drafts_are_those_of_the_naive_reference(target, drafts, layers):
    """Also behind accepted drafts, whose features the target's own states replace."""
    model = target("qwen3_5_text", layers)
    spec = SpeculativeGenerator(model, Recorded(), draft_length=4, on_unsupported="error")
    spec.generate(**tiny.prompts(11, 4, 1, vocab=mtp.VOCAB), do_sample=False, max_new_tokens=20)
    assert spec.report.num_accepted_tokens
    assert wrong(model, drafts) == 0


def wrong(model, drafts):
    """How many drafts are not the naive reference's."""
    naive = NaiveMtp(model)
    return sum(draft != naive.drafts(text, 4)[: len(draft)] for text, draft in drafts)


@pytest.mark.parametrize("fault", ["token", "position", "norms", "order", "layer"])
def test_a_planted_fault_shows(target, drafts, fault, monkeypatch):
    """A token or a position too far, norms exchanged, the state before the embedding, layers not in turn."""
    extend, grow, fused = MtpRunner.extend, MtpRunner.grow, MtpLayer.fused
    if fault == "token":
        monkeypatch.setattr(MtpRunner, "extend", lambda self, tokens, *args: extend(self, tokens.roll(1, 1), *args))
    elif fault == "position":
        monkeypatch.setattr(
            MtpRunner,
            "grow",
            lambda self, tokens, n, parents, depth, *args: grow(self, tokens, n, parents, depth + 1, *args),
        )
    elif fault == "norms":

        def exchanged(self, embeds, states):
            pair = [self.state_norm(embeds), self.embed_norm(states)]
            return self.fuse(torch.cat(pair, -1))

        monkeypatch.setattr(MtpLayer, "fused", exchanged)
    elif fault == "order":
        monkeypatch.setattr(MtpLayer, "fused", lambda self, embeds, states: fused(self, states, embeds))
    else:
        monkeypatch.setattr(
            MtpRunner,
            "grow",
            lambda self, tokens, n, parents, depth, seen, level, chain: grow(
                self, tokens, n, parents, depth, seen, level + 1, chain
            ),
        )
    model = target("qwen3_5_text", 2)
    spec = SpeculativeGenerator(model, Recorded(), draft_length=4, on_unsupported="error")
    inputs = tiny.prompts(11, 4, vocab=mtp.VOCAB)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=12).tolist() == plain.tolist()
    assert wrong(model, drafts)


def transformers_drafts(model, inputs, monkeypatch, **kwargs):
    """What transformers' own `use_mtp` drafts, by text, and what it writes."""
    if not hasattr(candidate_generator, "MTPCandidateGenerator"):
        pytest.skip("this transformers has no use_mtp")
    # It knows the layers by the number that they have in the published checkpoints.
    behind = rf"model\.layers\.(?:{'|'.join(str(model.config.num_hidden_layers + i) for i in range(4))})\."
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [behind], raising=False)
    known = {}
    original = candidate_generator.MTPCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, *args, **more):
        found = original(self, input_ids, *args, **more)
        if found[0].shape[1] > input_ids.shape[1]:
            known[tuple(input_ids[0].tolist())] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    monkeypatch.setattr(candidate_generator.MTPCandidateGenerator, "get_candidates", get_candidates)
    text = model.generate(**inputs, use_mtp=True, do_sample=False, **kwargs)
    return known, text.tolist()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_drafts_are_those_of_transformers(target, drafts, family, layers, monkeypatch):
    model, inputs = target(family, layers), tiny.prompts(9, vocab=mtp.VOCAB)
    theirs, text = transformers_drafts(model, inputs, monkeypatch, max_new_tokens=50)
    spec = SpeculativeGenerator(model, Recorded(), draft_length=layers, on_unsupported="error")
    assert spec.generate(**inputs, do_sample=False, max_new_tokens=50).tolist() == text
    common = [(draft, theirs[tuple(ids.tolist())]) for ids, draft in drafts if tuple(ids.tolist()) in theirs]
    assert len(common) > 10
    assert all(ours == other[: len(ours)] for ours, other in common)


def test_auto_takes_them_where_no_head_is_known(target):
    spec = SpeculativeGenerator(target("qwen3_5_text"), "auto")
    assert isinstance(spec.proposer, HybridProposer)
    assert isinstance(spec.proposer.other, MtpProposer)


def test_what_a_checkpoint_lacks_is_said(target, tmp_path):
    """A model that was saved by transformers has lost them; they can be had from where they are."""
    model = target("qwen3_5_text")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(NoMtpLayers, match="holds no MTP layers"):
        SpeculativeGenerator(again, "mtp")
    with pytest.raises(NoMtpLayers, match="was not loaded from a folder or hub id"):
        SpeculativeGenerator(tiny.model("llama"), "mtp")
    assert isinstance(SpeculativeGenerator(again, "auto").proposer, NgramProposer)
    assert isinstance(SpeculativeGenerator(again, f"mtp:{model.name_or_path}").proposer, MtpProposer)


def test_a_proposer_serves_two_targets(target):
    """Each drafts with its own layers, in turns and whichever was checked last."""
    one, other = target("qwen3_5_text"), target("deepseek_v3")
    proposer, inputs = MtpProposer(), tiny.prompts(9, vocab=mtp.VOCAB)
    specs = [SpeculativeGenerator(model, proposer, draft_length=3, on_unsupported="error") for model in (one, other)]
    for model, spec in zip((one, other), specs, strict=True):
        plain = model.generate(**inputs, do_sample=False, max_new_tokens=10)
        assert spec.generate(**inputs, do_sample=False, max_new_tokens=10).tolist() == plain.tolist()
