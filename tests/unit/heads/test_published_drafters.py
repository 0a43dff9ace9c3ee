"""DFlash and DFlash 2 drafters of the packages `dflash` 0.1 and `speculators` 0.9, where one of them is installed.

Their own modules write a checkpoint. What specdec drafts from it is what their own forward pass drafts.
"""

import functools
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from specdec import BlockProposer, SpeculativeGenerator
from specdec.heads.dflash.runner import DFlashRunner
from specdec.heads.embeddings import BorrowedEmbeddings
from specdec.heads.loading import load
from tests.support import eagle3, tiny

MASK, BLOCK, TAPS, UPDATES = 63, 5, (1, 3), 300
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 9}
SCALES = {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}


@functools.cache
def target():
    return tiny.on_host("llama", num_hidden_layers=4, hidden_size=48, num_attention_heads=4, num_key_value_heads=2)


def qwen3(**changes):
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": tiny.VOCAB, "rope_theta": 10000.0}
    return Qwen3Config(**shape | {"num_target_layers": 4} | changes)


def randomised(model):
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith("base_kernel") or "codebook" in name:
            torch.nn.init.normal_(weight)
        elif weight.dim() > 1:
            torch.nn.init.normal_(weight, std=2 / weight.shape[-1] ** 0.5)
        else:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


class Package:
    """A drafter of the `dflash` package."""

    def __init__(self, kind, top, nested):
        reference = pytest.importorskip("dflash.model")
        config = qwen3(**top)
        config.dflash_config = {"mask_token_id": MASK, "block_size": BLOCK, "target_layer_ids": [0, 2]} | nested
        self.model = randomised(getattr(reference, kind)(config))

    def hidden(self, states, anchors):
        """States (B, T, C) and anchors (B,) to the block's hidden states (B, D, H)."""
        ids = torch.full((len(anchors), BLOCK), MASK)
        ids[:, 0] = anchors
        scale = self.model.config.dflash_config.get("input_embedding_scale", 1.0)
        embeds = target().get_input_embeddings()(ids) * scale
        position = torch.arange(states.shape[1] + BLOCK).expand(len(anchors), -1)
        return self.model(target_hidden=states, noise_embedding=embeds, position_ids=position)[:, 1:]

    def drafted(self, states, anchors):
        """Tokens (B, D) of the draft, and the distributions (B, D, V) that they were chosen from."""
        hidden, lm_head = self.hidden(states, anchors), target().get_output_embeddings()
        logits = self.model.compute_logits(hidden, lm_head)
        if not hasattr(self.model, "candidate_selector"):
            return logits.argmax(-1), logits.softmax(-1)
        tokens, candidates, q = self.model.candidate_selector.select(hidden, logits, anchors, 1.0)
        return tokens, torch.zeros_like(logits).scatter(-1, candidates, q)

    def best(self, states, anchors):
        """Tokens (B, D) of the draft at T = 0."""
        hidden, lm_head = self.hidden(states, anchors), target().get_output_embeddings()
        if not hasattr(self.model, "candidate_selector"):
            return self.model.compute_logits(hidden, lm_head).argmax(-1)
        return self.model.propose(hidden, anchors, lm_head, 0.0)[0]


PACKAGES = {
    "DFlash": ("DFlashDraftModel", {}, {}),
    "DFlash, windows": ("DFlashDraftModel", SLIDING, {}),
    "DFlash, windows both ways": ("DFlashDraftModel", SLIDING | {"is_causal": False}, {}),
    "JetSpec": ("DFlashDraftModel", {"is_causal": True}, {}),
    "scaled": ("DFlashDraftModel", {}, SCALES),
    "DFlash 2": ("DFlash2DraftModel", SLIDING | {"is_causal": False}, SELECTOR),
    "DFlash 2, scaled": ("DFlash2DraftModel", {}, SELECTOR | SCALES),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PACKAGES)
def test_a_checkpoint_drafts_what_its_own_package_does(name, tmp_path):
    theirs = Package(*PACKAGES[name])
    theirs.model.save_pretrained(tmp_path)
    head = load(tmp_path)
    runner = DFlashRunner(head, BorrowedEmbeddings.by(target(), head))
    states, tokens = torch.randn(1, 20, 96), torch.randint(1, 60, (1, 21))
    runner.start(1)
    before = 0
    for end in (12, 15, 20):
        path, wanted = theirs.drafted(states[:, :end], tokens[:, end])
        runner.drop_draft()
        logits = [runner.extend(tokens[:, before + 1 : end + 1], states[:, before:end], [0])]
        logits += [runner.logits_after(d, path[:, d - 1 : d], None) for d in range(1, BLOCK - 1)]
        torch.testing.assert_close(torch.cat(logits, 1).softmax(-1), wanted, rtol=1e-3, atol=1e-4)
        before = end


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DFlash", "JetSpec", "DFlash 2"])
def test_a_trained_drafter_accepts_what_its_own_package_drafts(name, tmp_path):
    """Trained by the package's own forward pass, on a tiny target's own texts."""
    theirs = Package(*PACKAGES[name])
    for name, weight in theirs.model.named_parameters():
        weight.data.mul_(0.1 if "codebook" in name else 1.0)  # the selector is not trained
    prompts = tiny.prompts(*[8] * 24)["input_ids"]
    arguments = {"do_sample": False, "attention_mask": torch.ones_like(prompts)}
    texts = target().generate(prompts, max_new_tokens=40, **arguments)
    states, T = eagle3.states_of(target(), texts, TAPS), texts.shape[1]
    optimizer, lm_head = torch.optim.AdamW(theirs.model.parameters(), lr=3e-3), target().get_output_embeddings()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=UPDATES)
    for _ in range(UPDATES):
        end = int(torch.randint(8, T - BLOCK, ()))
        hidden, wanted = theirs.hidden(states[:, :end], texts[:, end]), texts[:, end + 1 : end + BLOCK]
        loss = torch.nn.functional.cross_entropy(lm_head(hidden).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    theirs.model.save_pretrained(tmp_path)
    proposer = BlockProposer(load(tmp_path), branching=(1,) * 4)
    spec = SpeculativeGenerator(target(), proposer, draft_length=4, on_unsupported="error")
    for row in range(6):
        text = spec.generate(prompts[row : row + 1], do_sample=False, max_new_tokens=30)
        assert text[0].tolist() == texts[row, :38].tolist()
        assert spec.last_report.num_drafts == rounds(theirs, text)
    assert spec.report.mean_acceptance_length > 1.25


@torch.no_grad()
def rounds(theirs, text):
    """Rounds that the package's drafts take to write the text; its first token comes from the prefill."""
    states, root, count = eagle3.states_of(target(), text, TAPS), 8, 0
    while root < text.shape[1] - 2:
        path = theirs.best(states[:, :root], text[:, root])[0, : text.shape[1] - 2 - root]
        right = (path == text[0, root + 1 : root + 1 + len(path)]).cumprod(0).sum()
        root, count = root + 1 + int(right), count + 1
    return count


# The speculators package


@torch.no_grad()
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_checkpoint_of_speculators_drafts_what_its_own_package_does(kind, both_ways, tmp_path):
    """Its training pass over one block after the anchor, with a window that counts from there."""
    speculators = pytest.importorskip("speculators")
    models = pytest.importorskip(f"speculators.models.{kind}.core")
    config = vars(models)["DFlashSpeculatorConfig" if kind == "dflash" else "DFlash2SpeculatorConfig"](
        transformer_layer_config=qwen3(**SLIDING, attn_implementation="eager"),
        draft_vocab_size=tiny.VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=list(TAPS),
        mask_token_id=MASK,
        sliding_window_non_causal=both_ways,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[speculators.proposals.GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **(SELECTOR if kind == "dflash2" else {}),
    )
    theirs = randomised(getattr(models, "DFlashDraftModel" if kind == "dflash" else "DFlash2DraftModel")(config))
    theirs.embed_tokens.weight.copy_(target().get_input_embeddings().weight)
    theirs.lm_head.weight.copy_(target().get_output_embeddings().weight)
    left_out = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
    weights = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items() if name not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    save_file(weights, tmp_path / "model.safetensors")

    head, end, T = load(tmp_path), 14, 20
    states, tokens = torch.randn(1, T, 96), torch.randint(1, 60, (1, T))
    anchored = torch.zeros(1, T)
    anchored[0, end] = 1  # the only anchor that may be chosen
    hidden, logits, *_ = theirs._backbone_forward(
        states, tokens, anchored, torch.zeros(1, T, 48), torch.zeros(1, T, dtype=torch.long), max_anchors=1
    )
    runner = DFlashRunner(head, BorrowedEmbeddings.by(target(), head))
    runner.start(1)
    ours = [runner.extend(tokens[:, 1 : end + 1], states[:, :end], [0])]
    path = tokens[:, end + 1 : end + BLOCK]
    ours += [runner.logits_after(d, path[:, d - 1 : d], None) for d in range(1, BLOCK - 1)]
    wanted = logits[:, 1:]
    if kind == "dflash2":
        before = tokens[:, end : end + BLOCK - 1]
        ids, scores = theirs.candidate_selector.select(wanted, hidden[:, 1:], before)
        wanted = torch.full_like(wanted, -torch.inf).scatter(-1, ids, scores)
    torch.testing.assert_close(torch.cat(ours, 1).softmax(-1), wanted.softmax(-1), rtol=1e-3, atol=1e-4)
