"""`ModelRunner`: runs a Hugging Face causal LM or decoder over known tokens and draft trees of a batch of ragged rows.

It is responsible for the cache, the positions and the masks. The target and draft models both run through it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.models.attention_masks import default_masks, known_at_once, masks_as_taken, spans
from specdec.models.cache.buffers import Span
from specdec.models.cache.ragged_rows import CachedRows, VisibleSlots, pads_of_part
from specdec.models.cache.stepped_states import SteppedStates
from specdec.models.decoding_view import decoding_view
from specdec.models.encoder import EncoderOutputs, declined
from specdec.models.exact.draft_pass import DraftPass
from specdec.models.exact.exact_view import exact_view
from specdec.models.exact.row_kernels import exact_target
from specdec.models.hidden_states import Taps
from specdec.models.introspection import (
    INDEXED,
    RECURRENT,
    cache_argument,
    decoders_name,
    device_of,
    forward_parameters,
    is_sharded,
    layer_kinds,
    takes_positions,
)
from specdec.models.linear import with_fast_linears
from specdec.models.lockstep import Step
from specdec.models.output import Output, joined
from specdec.models.positions import RowPositions, with_positions
from specdec.models.recurrent_layers import with_states
from specdec.models.static_forward import StaticForward, filled_up


class ModelRunner(CachedRows):
    """A model with its cache: `extend` the rows, `grow` a draft after them, `commit` a part of the draft.

    Args:
        model: a causal LM or decoder from transformers, in eval mode. It is run as a `with_fast_linears` view, unless
            its weights are sharded: rounding must not depend on what one process finds fastest.
        masks: how the model takes an attention mask: "dict" (keyed by layer type), "tensor", or "own" if it can only
            build its own. "own" restricts it to chains of rows of one length.
        taps: hidden states to capture in every pass.
        step: synchronizes passes with other processes.
        static_forward: runs draft passes of the model, with the same taps, as captured functions.
        encoder_outputs: encoder outputs that the decoder also reads; None for a decoder-only model.
        pads: (B, 1) int64, padding of each row that a model which counts positions counts as well; None for none.
        sized: pad drafts to few sizes, as captured passes need. Implied by `static_forward`.
        exact: give each draft node the bits of plain decoding's own pass. Names of the modules that have to run each
            node alone for this (`Exactness.alone`); None for the fastest passes. Not with `static_forward` or `sized`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        masks: str | None = None,
        taps: Taps | None = None,
        step: Step | None = None,
        static_forward: StaticForward | None = None,
        encoder_outputs: EncoderOutputs | None = None,
        sized: bool = False,
        pads: Tensor | None = None,
        exact: Collection[str] | None = None,
    ):
        self.masks, self.row_positions = masks or default_masks(model), RowPositions()
        self._takes_positions = takes_positions(model)
        whole = model if exact is not None else with_states(model)
        whole = whole if self.masks == "own" else with_positions(whole, self.row_positions)
        self.config, self.device = model.config.get_text_config(decoder=True), device_of(model)
        self.static_forward, self.sized = static_forward, sized or static_forward is not None
        if sized and static_forward is None and self.device.type == "cuda":
            whole = decoding_view(whole)
        whole = whole if exact is None else exact_target(whole)
        self.model = whole if exact is not None or is_sharded(model) else with_fast_linears(whole)
        self.taps, self.step = taps, step
        self.draft_model, self.draft_pass = self.model, None
        if exact is not None:
            cross = None if encoder_outputs is None else encoder_outputs.keys
            self.kind_of_states = SteppedStates
            self.draft_pass = DraftPass(self.row_positions, spans(model, self.masks), cross)
            self.draft_model = exact_view(whole, self.draft_pass, exact)
        self.encoder_outputs = encoder_outputs
        self.row_positions.pads = pads
        self._planes: Tensor | None = None
        super().__init__(spans(model, self.masks))
        self.cache_argument = cache_argument(model)
        self._declined = declined(model)
        self._takes_logits_to_keep = "logits_to_keep" in forward_parameters(model)

    @torch.no_grad()
    def extend(
        self,
        given: Tensor,
        pads: Sequence[int],
        *,
        embedded: bool = False,
        hidden_states: bool = False,
    ) -> Output:
        """Append known tokens to the rows and commit them, in several passes if one would need a large mask.

        Args:
            given: (B, W) int64 tokens; (B, W, H) embeddings if `embedded`.
            pads: number of padding tokens on the left of each row.
            embedded: `given` holds embeddings.
            hidden_states: also return all hidden states.

        Returns:
            Logits (B, 1, V) after each row's last token; hidden states and features of all W tokens.
        """
        given = given.to(self.device)
        width = self._most_at_once(given.shape[1], pads)
        outputs = []
        for start in range(0, given.shape[1], width):
            part = given[:, start : start + width]
            part_pads = pads_of_part(pads, start, part.shape[1])
            outputs.append(self._extend(part, part_pads, embedded, hidden_states))
        return joined(outputs)

    def _most_at_once(self, width: int, pads: Sequence[int]) -> int:
        """Number of known tokens per row to run in one pass."""
        unmasked = self.aligned and not any(pads) and self.lengths[0] == 0
        if self.masks == "own" or unmasked or self.draft_pass is not None:
            return width
        return known_at_once(len(pads), max(self.lengths) + width)

    def _extend(self, given: Tensor, pads: Sequence[int], embedded: bool, hidden_states: bool) -> Output:
        self._require_masks(unless=not any(pads) and self.aligned)
        unmasked = not any(pads) and self._unmasked(given.shape[1], chain=True)
        visible_slots = self.place_known(given.shape[1], pads, given.device)
        mask = None if visible_slots.alone else self._mask_argument(visible_slots, unmasked)
        output = self._forward(given, visible_slots, mask, embedded=embedded, keep=1, hidden=hidden_states)
        self.commit([given.shape[1] - pad for pad in pads])
        return output

    @torch.no_grad()
    def extend_after(self, given: Tensor, pads: Tensor, *, embedded: bool = False) -> Output:
        """Append few tokens as `extend` does, but after the rows of `device_lengths`; pads: (B, 1) int64."""
        visible_slots = self.place_after(given.shape[1], pads)
        mask = self._mask_argument(visible_slots, unmasked=False)
        # Compilation takes a minute, and the first pass of all allocates the buffers.
        captured = self.static_forward is not None and not self.static_forward.compiled and bool(self.cache.filled)
        return self._forward(given, visible_slots, mask, keep=1, hidden=False, embedded=embedded, draft=captured)

    @torch.no_grad()
    def read_multimodal(self, inputs: Mapping[str, Any]) -> Output:
        """Run one pass over whole prompts with their images, videos or audio.

        Args:
            inputs: model inputs as `generate()` prepares them, including the cache to fill.

        Returns:
            Logits (B, 1, V), features and, if requested, hidden states of all columns.
        """
        logits, states, features = self._listen(self.model, {**self._declined, **inputs})
        return Output(logits[:, -1:], states, features)

    def shift_positions(self, planes: Tensor) -> None:
        """Add (P, B, 1) int64 to the rows' positions in later passes: the model's own have P planes."""
        self._planes = planes

    @torch.no_grad()
    def grow(
        self,
        tokens: Tensor,
        depth: Tensor,
        ancestors: Tensor | None = None,
        *,
        chain: bool = False,
        embedded: bool = False,
        hidden_states: bool = False,
    ) -> Output:
        """Write n draft nodes after the rows and the nodes already pending, and run the model over them.

        Args:
            tokens: (B, n) int64; (B, n, H) embeddings if `embedded`.
            depth: (B, M + n) int64, depth of the M pending and the n new nodes: position = length + depth.
            ancestors: (B, n, M + n) bool, nodes that each new node sees, itself included. Not needed for a chain.
            chain: the nodes form one path in order, in every row. `depth` may go on with nodes of later passes.
            embedded: `tokens` holds embeddings.
            hidden_states: also return all hidden states.

        Returns:
            Logits (B, n, V).

        Raises:
            ValueError: the model builds its own masks, and the pass needs others.
        """
        self._require_masks(unless=chain and self.aligned)
        tokens, depth = tokens.to(self.device), depth.to(self.device)
        ancestors = None if chain or ancestors is None else ancestors.to(self.device)
        n = tokens.shape[1]
        if self.sized:
            tokens, depth, ancestors = filled_up(tokens, depth, ancestors)
        unmasked = self._unmasked(n, chain)
        size = tokens.shape[1]
        visible_slots = self.place_draft(depth, ancestors, size, count=n)
        mask = self._mask_argument(visible_slots, unmasked)
        output = self._forward(
            tokens, visible_slots, mask, keep=size, hidden=hidden_states, embedded=embedded, draft=True
        )
        return output.first(n) if self.sized else output

    def idle(self) -> None:
        """Run a pass over one dummy token per row and discard it, to stay in step with other processes."""
        B, device = len(self.lengths), device_of(self.model)
        nothing = torch.zeros(B, 1, dtype=torch.long, device=device)
        last = nothing - 1  # the position of the row's last token: there may be none after it
        self.grow(nothing, last, chain=True)
        self.commit([0] * B)

    # Masks

    def _require_masks(self, unless: bool = False) -> None:
        if self.masks == "own" and not unless:
            raise ValueError(
                f"{type(self.model).__name__} builds its own attention masks: it can run chains of rows of one length "
                "only, not trees or ragged batches"
            )

    def _unmasked(self, width: int, chain: bool) -> bool:
        """True if the next pass should run without a mask, which would rule out flash attention.

        On CPUs even a single token gets a mask. Without one, sdpa takes its slow GQA path (1290 against 102 us a layer
        for one token, 12 heads over 2, 1000 slots).
        """
        # A cache of the target's captured passes, which a draft may borrow, shows drafts its empty slots.
        return self.device.type != "cpu" and not self.cache.sized and self.sees_all(width, chain)

    def _mask_argument(self, visible_slots: VisibleSlots, unmasked: bool) -> Any:
        """Build a 4D `attention_mask`, or one per layer type; None if the model builds its own or needs none."""
        kinds = set(layer_kinds(self.config))
        own = self.masks == "own" or (kinds and kinds <= set(RECURRENT))
        if own or (unmasked and self.masks == "tensor"):
            return None
        if unmasked and INDEXED not in kinds:
            return dict.fromkeys([*kinds, *RECURRENT])

        def seen(span: Span) -> Tensor:
            return visible_slots.visible(span).expand(len(visible_slots.positions), -1, -1)

        return masks_as_taken(self.model, self.masks, seen)

    def _forward(
        self,
        given: Tensor,
        visible_slots: VisibleSlots,
        mask: Any,
        *,
        keep: int,
        hidden: bool,
        embedded: bool = False,
        draft: bool = False,
    ) -> Output:
        inputs: dict[str, Any] = {"use_cache": True, "return_dict": True, **self._declined}
        inputs["inputs_embeds" if embedded else "input_ids"] = given
        if mask is not None:
            inputs["attention_mask"] = mask
        if self._takes_positions:
            inputs["position_ids"] = (
                visible_slots.positions if self._planes is None else visible_slots.positions + self._planes
            )
        self.row_positions.visible_slots = visible_slots
        if self._takes_logits_to_keep:
            # Given a number, Gemma 4 runs its last layers over these tokens alone, but features are read of all.
            sliced = self.taps is not None and getattr(self.config, "num_kv_shared_layers", None)
            inputs["logits_to_keep"] = torch.arange(-keep, 0, device=self.device) if sliced else keep
        if self.static_forward is not None and draft and not hidden:
            written = self.cache.written(self.device)
            logits, features = self.static_forward(written, inputs, lambda: self._pass(self.draft_model, inputs)[::2])
            return Output(logits[:, -keep:], None, features)
        if hidden:
            inputs["output_hidden_states"] = True
        logits, states, features = self._pass(self.draft_model if draft else self.model, inputs)
        return Output(logits[:, -keep:], states, features)

    def _pass(
        self, model: PreTrainedModel, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, Tensor | None]:
        """Run `_listen` with this runner's cache."""
        with self.cache.states.passing():
            return self._listen(model, {**inputs, self.cache_argument: self.cache})

    def _listen(
        self, model: PreTrainedModel, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, Tensor | None]:
        """Run the model; return logits, hidden states (if requested) and features."""
        if self.step is not None:
            self.step.before_pass()
        if self.encoder_outputs is not None:
            inputs = self.encoder_outputs.read_by(self.model, dict(inputs))
        with nullcontext() if self.taps is None else self.taps.listening() as taken:
            output = model(**inputs)
        features = None if self.taps is None or taken is None else self.taps.features(taken)
        hidden = decoders_name(self.model, "hidden_states")
        return output.logits, output[hidden] if inputs.get("output_hidden_states") else None, features
