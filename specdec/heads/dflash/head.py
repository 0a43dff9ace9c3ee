"""`DFlashHead`: drafts a block of tokens in one pass that attends to the target's states. DFlash, 2602.06036.

    context = hidden_norm(fc([tap, tap, ...]))          # one entry per known token before the anchor
    x = [embed(anchor), embed(mask), embed(mask), ...]  # the anchor is the last known token
    x = layer(x)                                        # attends to the context and to x, causally in JetSpec alone
    logits = lm_head(norm(x))                           # of the tokens after the anchor

The context's keys and values do not depend on x, so they are computed once per token and cached. Embeddings and
attention masks are passed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.heads.base import StateHead
from specdec.heads.block import Correction
from specdec.heads.dflash.config import DFlashConfig
from specdec.heads.dflash.convolution import ConvolvedLayer
from specdec.heads.dflash.domino import DominoHead
from specdec.heads.dflash.selector import CandidateSelector
from specdec.heads.layers import DecoderLayer
from specdec.heads.markov import ConfidenceHead, MarkovHead


class DFlashHead(StateHead):
    """DFlash drafter, with the further parts of JetSpec, DSpark, Domino or DFlash 2 if the config has them.

    Parameters have the names of z-lab's checkpoints; the Markov and confidence heads have DeepSpec's.

    Args:
        config: shape of the drafter.

    Buffers:
        d2t: (K,) int64, target id minus draft id of each draft token. None if the target's LM head is used.

    Example:
        ```python
        drafter = specdec.heads.loading.load("z-lab/Qwen3-4B-DFlash-b16")
        generator = SpeculativeGenerator(target, BlockProposer(drafter))
        ```
    """

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.config = config
        H, V, K = config.hidden_size, config.vocab_size, config.draft_vocab_size
        self.embed_tokens = nn.Embedding(V, H) if config.own_embedding else None
        self.fc = nn.Linear(config.target_hidden_size * len(config.tap_ids), H, bias=False)
        self.hidden_norm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList(self._layer(i) for i in range(config.num_layers))
        self.norm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.lm_head = nn.Linear(H, K, bias=False) if config.own_head else None
        self.markov_head = None
        if config.markov is not None:
            self.markov_head = MarkovHead(config.markov, config.markov_rank, V, K, H)
        self.domino_head = None if config.domino is None else DominoHead(config.domino, H, K)
        self.candidate_selector = None if config.selector is None else CandidateSelector(config.selector, H, K)
        self.confidence_head = None
        if config.confidence:
            self.confidence_head = ConfidenceHead(H + config.markov_rank * config.confidence_with_markov)
        self.register_buffer("d2t", torch.zeros(K, dtype=torch.long) if config.own_head else None)

    def _layer(self, index: int) -> DecoderLayer:
        c = self.config
        if c.convolution is None:
            return DecoderLayer(c, index)
        return ConvolvedLayer(c, index, c.convolution, c.block_size)

    @property
    def correction(self) -> Correction | None:
        """The head that corrects the logits for the tokens drafted so far, if there is one."""
        heads = self.markov_head, self.domino_head, self.candidate_selector
        return next((head for head in heads if head is not None), None)

    @property
    def draft_to_target(self) -> Tensor | None:
        """(K,) int64, the target's id of each draft token. None if the vocabularies are the same."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def append_kv(self, states: Tensor, positions: Tensor, cache: Cache) -> None:
        """Write keys and values to the cache, of states (B, n, taps * target H) at positions (B, n) int64."""
        context = self.hidden_norm(self.fc(states))
        rotation = self.rotation(context, positions)
        for layer in self.layers:
            layer.self_attn.append_kv(context, rotation, cache)

    def forward(self, embeds: Tensor, positions: Tensor, visible: Sequence[Tensor], cache: Cache) -> Tensor:
        """Run one pass over a block.

        Args:
            embeds: (B, n, H), embeddings of the anchor and the masks.
            positions: (B, n) int64.
            visible: (B, n, slots) bool for each layer, the cache slots that each token attends to.
            cache: keys and values of the context. Those of the block are appended.

        Returns:
            (B, n, H), normed: the input of the LM head.
        """
        rotation = self.rotation(embeds, positions)
        h = embeds
        for layer, seen in zip(self.layers, visible, strict=True):
            h = layer(h, rotation, seen, cache)
        return self.norm(h)
