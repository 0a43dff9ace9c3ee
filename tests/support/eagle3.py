"""Tiny heads for the tests: random ones of every variant, and one that was trained."""

import functools

import torch

from specdec.heads.eagle3.config import Eagle3Config
from specdec.heads.eagle3.head import Eagle3Head
from specdec.models.hidden_states import Taps
from specdec.training.objectives.unroll import unroll
from tests.support import tiny

SHAPE = {
    "hidden_size": 32,
    "vocab_size": tiny.VOCAB,
    "draft_vocab_size": 40,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "target_hidden_size": 32,
}
VARIANTS = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": tiny.VOCAB},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm per tap": {"fc_norm": True},
    "norm output": {"norm_output": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "two layers": {"num_layers": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope": {"rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "partial rope": {"rope": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "window": {"sliding_window": 5},
    "own embedding": {"own_embedding": True},
    "two taps": {"tap_ids": (0, 2)},
    "narrow": {"hidden_size": 24},  # not as its target
    "wide": {"hidden_size": 48},
}


def head(name: str = "plain", seed: int = 0, **changes) -> Eagle3Head:
    """A random head: norms are not ones, and the draft vocabulary is scattered over the target's."""
    config = Eagle3Config(**SHAPE | VARIANTS[name] | changes)
    torch.manual_seed(seed)
    made = Eagle3Head(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(2.0) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        made.d2t.copy_(ids - torch.arange(len(ids)))
    return made.to(tiny.DEVICE)


@torch.no_grad()
def states_of(target, ids: torch.Tensor, taps) -> torch.Tensor:
    """(B, T, C), by transformers' own `output_hidden_states`, which is right for all taps but the last layer's."""
    listener = Taps(target, taps)
    with listener.listening() as taken:
        target(input_ids=ids)
    return listener.features(taken)


BRIEFLY = {"steps": 3, "updates": 100}  # enough for drafts of which some are right


@functools.cache
def trained(steps: int = 5, updates: int = 400):
    """A head overfitted to a tiny target's own greedy texts; the target, and the prompts it was trained on."""
    target = tiny.on_host("llama", num_hidden_layers=4, hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    prompts = tiny.prompts(*[8] * 24)["input_ids"].cpu()
    texts = target.generate(prompts, do_sample=False, max_new_tokens=40, attention_mask=torch.ones_like(prompts))
    config = Eagle3Config(**SHAPE | {"hidden_size": 48, "target_hidden_size": 48, "head_dim": 12})
    torch.manual_seed(0)
    made = Eagle3Head(config)
    common = texts.flatten().bincount(minlength=tiny.VOCAB).topk(config.draft_vocab_size).indices.sort().values
    made.d2t.copy_(common - torch.arange(len(common)))
    states = states_of(target, texts, config.taps(4))
    embeds = target.get_input_embeddings()(texts).detach()
    to_draft = torch.full((tiny.VOCAB,), -100)
    to_draft[common] = torch.arange(len(common))
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=updates)
    for _ in range(updates):
        loss = torch.zeros(())
        for step, h in enumerate(unroll(made, embeds, states, steps)):
            rows = h[:, : texts.shape[1] - 2 - step]
            wanted = to_draft[texts[:, 2 + step :]]
            loss = loss + torch.nn.functional.cross_entropy(made.logits(rows).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return tuple(trained.to(tiny.DEVICE) for trained in (made.eval(), target, prompts))
