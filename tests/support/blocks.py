"""Tiny block-parallel drafters for the tests: random ones of every variant, and one that was trained."""

import functools

import torch

from specdec.heads.config import LayerConfig
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.convolution import ConvolutionShape
from specdec.heads.dflash.domino import DominoShape
from specdec.heads.dflash.head import DFlashHead
from specdec.heads.dflash.selector import SelectorShape
from specdec.heads.eagle3.head import Eagle3Head
from specdec.heads.hydra.head import HydraConfig, HydraHeads
from specdec.heads.medusa import MedusaConfig, MedusaHeads
from tests.support import eagle3, tiny

SHAPE = {
    "hidden_size": 32,
    "vocab_size": tiny.VOCAB,
    "draft_vocab_size": tiny.VOCAB,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "target_hidden_size": 32,
    "num_layers": 2,
    "qk_norm": True,
    "tap_ids": (1, 2),
    "block_size": 5,
    "mask_token_id": 63,
    "windows": (None, None),
}
OWN = {"own_head": True, "draft_vocab_size": 40}
DFLASH2 = {
    "selector": SelectorShape(rank=6, candidates=9),
    "convolution": ConvolutionShape(kernel_size=2, group_size=8),
}
MARKOV = {"markov_rank": 4, "from_anchor": True, "confidence": True, "confidence_with_markov": True}
TRAINED = {
    "DFlash": {},
    "one layer": {"num_layers": 1, "windows": (None,)},
    "window": {"windows": (6, None)},
    "window from the anchor": {"windows": (None, 6), "window_from_anchor": True, "causal": "windows"},
    "JetSpec": {"causal": "all"},
    "causal and windowed": {"causal": "all", "windows": (6, None)},
    "from the anchor": {"from_anchor": True},
    "own vocabulary": OWN,
    "own embedding": {"own_embedding": True, "own_head": True},
    "llama layers": {"qk_norm": False, "attention_bias": True},
    "rope": {"rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "DSpark": {"markov": "vanilla"} | MARKOV,
    "gated": {"markov": "gated"} | MARKOV | OWN,
    "rnn": {"markov": "rnn"} | MARKOV,
    "rnn behind the anchor": {"markov": "rnn"} | MARKOV | {"from_anchor": False, "confidence_with_markov": False},
    "confidence alone": {"confidence": True},
}
UNTRAINED = {  # variants that specdec does not train
    "Domino": {"domino": DominoShape(state_size=6, rank=5, uncorrected=1), "from_anchor": True},
    "Domino behind the anchor": {"domino": DominoShape(state_size=6, rank=5)} | OWN,
    "DFlash 2": DFLASH2,
    "DFlash 2, wide kernel": DFLASH2 | {"convolution": ConvolutionShape(kernel_size=4, group_size=16)},
    "scaled": {"embedding_scale": 1.5, "logit_scale": 0.5, "logit_softcap": 3.0},
}
VARIANTS = TRAINED | UNTRAINED


def head(name: str = "DFlash", seed: int = 0, **changes) -> DFlashHead:
    """A random drafter: norms are not ones, and a vocabulary of its own is scattered over the target's."""
    config = DFlashConfig(**SHAPE | VARIANTS[name] | changes)
    torch.manual_seed(seed)
    made = DFlashHead(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("base_kernel"):
                weight.normal_()
            else:
                weight.mul_(2.0) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
    if made.d2t is not None and config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        made.d2t.copy_(ids - torch.arange(len(ids)))
    return made.to(tiny.DEVICE)


def parallel(seed: int = 0, **changes) -> Eagle3Head:
    """A random P-EAGLE head."""
    made = eagle3.head("norm before residual", seed, mask_token_id=63, block_size=4, **changes)
    with torch.no_grad():
        made.mask_hidden.normal_(generator=torch.Generator(tiny.DEVICE).manual_seed(seed))
    return made


def medusa(heads: int = 3, hidden: int = 32, vocab: int = tiny.VOCAB) -> MedusaHeads:
    """Random heads of Medusa's."""
    return spread(MedusaHeads(MedusaConfig(hidden, vocab, heads, 1)))


def hydra(
    prefix: bool = True, heads: int = 3, layers: int = 2, hidden: int = 32, vocab: int = tiny.VOCAB
) -> HydraHeads:
    """Random heads of Hydra's; with a layer over the states, of grouped queries, or without."""
    layer = LayerConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        intermediate_size=48,
        num_attention_heads=hidden // 8,
        num_key_value_heads=hidden // 16,
        head_dim=8,
        target_hidden_size=hidden,
    )
    return spread(HydraHeads(HydraConfig(hidden, vocab, heads, layers, layer if prefix else None)))


def spread(made):
    """The heads, with weights under which tokens differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)
    return made.eval().requires_grad_(False).to(tiny.DEVICE)


class Kept:
    """Keys and values by layer, which a training's gradients go through."""

    def __init__(self):
        self.layers = {}

    def update(self, keys, values, layer, *args, **kwargs):
        if layer not in self.layers:
            self.layers[layer] = keys, values
            return keys, values
        context = self.layers[layer]
        return tuple(torch.cat(pair, 2) for pair in zip(context, (keys, values), strict=True))


def corrected(head, logits, h, tokens, embed):
    """The logits (B, D, K) after the true tokens (B, D)."""
    parts, state = [], None
    for depth in range(logits.shape[1]) if head.correction is not None else ():
        at = slice(depth, depth + 1)
        before = head.correction.embedded(tokens[:, at], embed)
        part, state = head.correction.corrected(logits[:, at], before, h[:, at], state, depth)
        parts.append(part)
    return torch.cat(parts, 1) if parts else logits


@functools.cache
def trained(name: str = "DFlash", updates: int = 250):
    """A drafter overfitted to a tiny target's own greedy texts; the target, and the prompts it was trained on."""
    target = tiny.on_host("llama", num_hidden_layers=4, hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    prompts = tiny.prompts(*[8] * 24)["input_ids"].cpu()
    texts = target.generate(prompts, do_sample=False, max_new_tokens=40, attention_mask=torch.ones_like(prompts))
    shape = SHAPE | VARIANTS[name] | {"hidden_size": 48, "target_hidden_size": 48, "tap_ids": (1, 3)}
    config = DFlashConfig(**shape | {"confidence": False, "confidence_with_markov": False})
    torch.manual_seed(0)
    made = DFlashHead(config)
    for name, weight in made.named_parameters():  # DFlash 2's parts begin as if they were not there
        if "codebook" in name or "kernel_projection" in name:
            weight.data.mul_(0.1)
    states, (B, T) = eagle3.states_of(target, texts, config.tap_ids), texts.shape
    n, skipped = config.block_size, config.block_size - config.drafted
    embed, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=updates)
    places, rows = torch.arange(n), torch.arange(B)[:, None]
    for _ in range(updates):
        anchor = torch.randint(8, T - n, (B, 1))
        cache = Kept()
        made.append_kv(states, torch.arange(T).expand(B, -1), cache)
        ids = torch.full((B, n), config.mask_token_id)
        ids[:, :1] = texts.gather(1, anchor)
        text, own = torch.arange(T) < anchor, torch.ones(B, n, n, dtype=torch.bool)
        own = own.tril() if config.causal == "all" else own
        visible = [torch.cat([text[:, None].expand(-1, n, -1), own], -1)] * config.num_layers
        h = made(embed(ids), anchor + places, visible, cache)[:, skipped:]
        logits, wanted = lm_head(h), texts[rows, anchor + 1 + torch.arange(config.drafted)]
        drafted = [logits, corrected(made, logits, h, texts[rows, anchor + torch.arange(config.drafted)], embed)]
        losses = [torch.nn.functional.cross_entropy(part.mT, wanted, reduction="none") for part in drafted]
        loss = sum(part[part.isfinite()].mean() for part in losses)  # a selector learns from its candidates alone
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return tuple(part.to(tiny.DEVICE) for part in (made.eval(), target, prompts))
