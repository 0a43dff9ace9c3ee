"""`AssistantProposer`: Gemma 4's assistant drafts from the keys and values of its target, and has none of its own.

One pass per drafted token reads the token's embedding next to a hidden state, of the target at first, then its own.
All passes of a draft are made at the position of the root, and attend to the same keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specdec.models.attention_masks import masks_as_taken
from specdec.models.cache.buffers import Span
from specdec.models.hidden_states import FINAL, Taps
from specdec.models.introspection import device_of, is_sharded
from specdec.models.loading import load
from specdec.models.number_format import convert
from specdec.proposers.context import Context
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.utils.device_copies import uploaded
from specdec.utils.timing import clock


class AssistantProposer(AutoregressiveProposer):
    """Drafts with the assistant that is published next to a Gemma 4 model (`google/gemma-4-E2B-it-assistant`).

    transformers runs an assistant for one row and in chains. Here it drafts for batches, and trees as well. Drafts are
    chains by default.

    Args:
        model: a `Gemma4AssistantForCausalLM` or `Gemma4UnifiedAssistantForCausalLM`, or a path or hub id to load one
            from.
        branching: the number of children per node at each depth of a fixed tree, see `AutoregressiveProposer`.
        tree: the settings of a dynamic tree.
        draw: True to draw drafts from q where the rule allows it, see `AutoregressiveProposer`.

    Raises:
        ValueError: the model is no assistant; for a target, if the assistant does not fit it.

    Example:
        ```python
        spec = SpeculativeGenerator(model, AssistantProposer("google/gemma-4-E2B-it-assistant"))
        output = spec.generate(input_ids, max_new_tokens=128)
        ```
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        *,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
    ):
        super().__init__(branching=branching, tree=tree, draw=draw)
        self._loaded = isinstance(model, str)  # a model loaded here is moved to the target's device
        self.model: Any = load(model) if isinstance(model, str) else model
        if not is_assistant(self.model):
            raise ValueError(
                f"AssistantProposer needs an assistant of Gemma 4, got {type(self.model).__name__}: pass it as the "
                "proposer itself, or use DraftModelProposer"
            )

    def check(self, target: PreTrainedModel) -> None:
        ours, text = self.model.config, target.config.get_text_config(decoder=True)
        if text.hidden_size != ours.backbone_hidden_size:
            raise ValueError(
                f"the assistant was made for hidden states of {ours.backbone_hidden_size}, the target's have "
                f"{text.hidden_size}: it belongs to another model"
            )
        own = ours.get_text_config(decoder=True)
        if text.vocab_size != own.vocab_size:
            raise ValueError(
                f"the assistant was made for a vocabulary of {own.vocab_size} tokens, the target's has "
                f"{text.vocab_size}: it belongs to another model"
            )
        missing = {*own.layer_types} - {*shared_layers(target)}
        if missing:
            raise ValueError(
                f"the assistant reads keys and values of {' and '.join(sorted(missing))} layers, which "
                f"{type(target).__name__} does not share: it belongs to another model"
            )
        if is_sharded(target):
            raise ValueError(
                "the target is sharded over several processes, which assistants do not support: use another proposer"
            )
        if self._loaded:
            convert(self.model, target.dtype).to(device_of(target))

    def drafting_model(self) -> nn.Module:
        return self.model

    def taps(self, target: PreTrainedModel) -> Taps:
        return Taps(target, [FINAL], device_of(self.model))

    def begin(self, context: Context) -> None:
        super().begin(context)
        assert context.target is not None
        assert context.call.cache is not None
        self._target, self._cache = context.target, context.call.cache
        self._layers = shared_layers(context.target)
        self._state: Tensor | None = None  # (B, 1, H), the target's hidden state at the token before each root

    def propose(self, context: Context) -> DraftTree:
        self._keep_state(context)
        return DraftTree.root_only(context.root) if self._state is None else super().propose(context)

    def sync(self, context: Context) -> None:
        self._keep_state(context)

    def _keep_state(self, context: Context) -> None:
        """Keep the target's newest hidden state of each row that has a new one."""
        if context.features is None or not max(context.fresh, default=0):
            return
        newest = context.features[:, -1:]
        if self._state is None:
            self._state = newest.clone()
        else:
            new = uploaded(list(context.fresh), newest.device)[:, None, None] > 0
            self._state = torch.where(new, newest, self._state)

    def _backlog(self, context: Context) -> int:
        return 0

    def _catch_up(self, context: Context) -> Tensor:
        """Read the root. The target's cache already holds all tokens before it."""
        assert self._state is not None
        start, device = clock(), device_of(self.model)
        self._position = uploaded(self._cache.lengths, device)[:, None]
        self._hidden = self._state.to(device)[:, :0]
        self._shared, self._slots = {}, {}
        for kind, layer in self._layers.items():
            keys, values, held = self._cache.committed(layer)
            self._shared[kind] = keys.to(device), values.to(device)
            self._slots[kind] = held.to(device)
        logits = self._pass(context.root[:, None], self._state.to(device))
        self._book_pass(context, logits, clock() - start)
        return logits.to(context.root.device)

    def _step(self, stepped: DraftNodes) -> Tensor:
        tokens, parents = stepped.newest, stepped.parents
        if parents is None:  # the last node, or the root
            above = self._hidden[:, -1:].expand(-1, tokens.shape[1], -1)
        else:
            index = (1 + parents.to(self._hidden.device))[..., None]
            above = self._hidden.gather(1, index.expand(-1, -1, self._hidden.shape[-1]))
        return self._pass(tokens, above)

    @torch.no_grad()
    def _pass(self, tokens: Tensor, above: Tensor) -> Tensor:
        """Run the assistant over nodes (B, n) whose parents have the hidden states above (B, n, H). Returns logits."""
        embedding: Any = self._target.get_input_embeddings()
        embeds = embedding(tokens.to(embedding.weight.device)).to(above.device)
        x = torch.cat([embeds, above.to(embeds.dtype)], -1).to(self.model.dtype)
        position = self._position.expand(-1, tokens.shape[1])
        # An int for `logits_to_keep` slices inputs that an assistant does not have (5.24, modeling_gemma4.py).
        output = self.model.model(
            inputs_embeds=self.model.pre_projection(x),
            attention_mask=masks_as_taken(self.model, "dict", self._seen),
            position_ids=position,
            shared_kv_states=self._shared,
            use_cache=False,
            logits_to_keep=torch.arange(tokens.shape[1], device=x.device),
        ).last_hidden_state
        self._hidden = torch.cat([self._hidden, self.model.post_projection(output).to(self._hidden.dtype)], 1)
        return self._logits(output)

    def _logits(self, h: Tensor) -> Tensor:
        """Return logits (B, n, V); with clusters of tokens, -inf for those outside of the most probable clusters.

        transformers gives these the least logit of the batch, less 1, which makes rows depend on each other.
        """
        lm_head, clusters = self.model.lm_head, self.model.masked_embedding
        if clusters is None:
            return lm_head(h)
        best = clusters.centroids(h).topk(clusters.centroid_intermediate_top_k, -1).indices
        ids = clusters.token_ordering.long().view(clusters.num_centroids, -1)[best].flatten(2)  # (B, n, tokens)
        logits = (lm_head.weight[ids] @ h[..., None])[..., 0]
        return logits.new_full((*h.shape[:2], lm_head.out_features), -torch.inf).scatter(-1, ids, logits)

    def _seen(self, span: Span) -> Tensor:
        """Slots (B, 1, S) bool that layers of a span see: as the root would, but without itself."""
        held = self._slots["full_attention" if span.window is None else "sliding_attention"]
        seen = held >= 0
        if span.window is not None:
            seen = seen & (held > self._position - span.window)
        return seen[:, None]


def is_assistant(model: PreTrainedModel | str) -> bool:
    """Return whether a model, or that in a folder or hub repository, is an assistant of Gemma 4."""
    if not isinstance(model, str):
        return getattr(getattr(model, "config", None), "model_type", None) in ASSISTANTS
    with suppress(OSError, ValueError):  # `load` says what is wrong with a path
        return PretrainedConfig.get_config_dict(model)[0].get("model_type") in ASSISTANTS
    return False


def shared_layers(target: PreTrainedModel) -> dict[str, int]:
    """Return the layers whose keys and values a target shares, by kind. Empty if it shares none."""
    config = target.config.get_text_config(decoder=True)
    modes = getattr(config, "kv_sharing_modes", ())
    return {config.layer_types[layer]: layer for layer, mode in enumerate(modes) if mode == "store"}


ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
