"""`DraftModelProposer`: a smaller causal LM with the target's tokenizer drafts, one pass per drafted token.

The draft model's cache is rolled back to the accepted text, so no token is processed twice. The draft model may have
a smaller vocabulary and fewer positions: unknown token ids are read as its last one, and it stops at its last position.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.cache.ragged_rows import CachedRows
from specdec.models.capability import Capability, capability, draft_positions
from specdec.models.encoder import EncoderOutputs, unfit
from specdec.models.int8_linear import int8_pays, with_int8_linears, with_trimmed_head
from specdec.models.introspection import device_of, end_tokens, is_sharded, require_lm_head, unwrap_model
from specdec.models.loading import load
from specdec.models.number_format import convert
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import StaticForward, cannot_capture
from specdec.models.views import in_eval_mode
from specdec.proposers.context import Context
from specdec.proposers.draft_models.autoregressive import AutoregressiveProposer
from specdec.proposers.draft_models.cuda_graph_drafts import WIDTHS
from specdec.proposers.draft_models.draft_nodes import DraftNodes
from specdec.proposers.draft_models.vocabularies import what_differs
from specdec.proposers.pacing.draft_passes import FEW_TOKENS
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.sampling.results import RoundResult
from specdec.utils.device_copies import uploaded
from specdec.utils.timing import clock


class DraftModelProposer(AutoregressiveProposer):
    """Drafts with a smaller model that has the target's tokenizer (Leviathan et al., arXiv 2211.17192).

    Drafts are chains by default. Give `branching` for a tree of a fixed shape, or `tree` for a dynamic one.

    Args:
        model: the draft model, or a path or hub id to load one from.
        branching: the number of children per node at each depth of a fixed tree, see `AutoregressiveProposer`.
        tree: the settings of a dynamic tree.
        draw: True to draw drafts from q where the rule allows it, see `AutoregressiveProposer`.
        vocab: token ids to restrict the draft's LM head to, (K,) int64, or an int for this many of the lowest ids. In
            BPE vocabularies these are the earliest merges, so the most frequent tokens. None: the whole vocabulary.
            With 152k tokens the head takes a quarter of the time of a 0.5B draft.
        int8: True to use 8-bit integer weights in passes over few tokens (CPU, bfloat16 or float32). They take one more
            byte per weight, except for a float32 model loaded here, which keeps only the integers. None: if faster.
        like: a model, usually the target. A draft loaded here gets its dtype and device. None: the dtype of the
            checkpoint and the target's device.

    Raises:
        ValueError: the model has no LM head, or an argument does not fit it.

    Example:
        ```python
        proposer = DraftModelProposer("path/to/draft-model", like=model, tree=DynamicTree())
        spec = SpeculativeGenerator(model, proposer)
        ```
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        *,
        branching: Sequence[int] | None = None,
        tree: DynamicTree | None = None,
        draw: bool = True,
        vocab: Tensor | int | None = None,
        int8: bool | None = None,
        like: PreTrainedModel | None = None,
    ):
        super().__init__(branching=branching, tree=tree, draw=draw)
        self._path = model if isinstance(model, str) else None  # a model loaded here is moved to the target's device
        self.model = load(model, like) if isinstance(model, str) else unwrap_model(model)
        require_lm_head(self.model)
        self.vocab = _vocabulary(self.model, vocab)
        self._int8 = int8
        self._settle()
        self._settled_for = self.model.device, self.model.dtype

    _static_forward: StaticForward | None = None

    def check(self, target: PreTrainedModel) -> None:
        self._check_vocabulary(target)
        if reason := unfit(self.model, target):
            raise ValueError(f"{reason}: choose a draft model of the target's kind")
        if is_sharded(self.model):
            raise ValueError(
                "the draft model is sharded over several processes, but must be whole in each: load it without sharding"
            )
        if self._path is not None and device_of(target) != self.model.device:
            self.model = convert(load(self._path), self.model.dtype).to(device_of(target))
            self._settle()
        now = self.model.device, self.model.dtype
        if self._path is None and self._settled_for != now:  # the caller has moved or converted it
            self._settle()
            self._settled_for = now
        if device_of(target).type != device_of(self.model).type:
            raise ValueError(
                f"the draft model is on {self.model.device} and the target on {device_of(target)}: move the draft with "
                f"draft.to('{device_of(target)}')"
            )
        able = self._capability(target)
        if able is not None and able.masks is None:
            raise ValueError(able.message(f"{type(self.model).__name__} cannot draft"))

    def _capability(self, target: PreTrainedModel) -> Capability | None:
        """The draft model's capabilities, found by running it. None for the target's class: the target's apply."""
        return None if type(self.model) is type(target) else capability(self.model, drafts=True)

    def _check_vocabulary(self, target: PreTrainedModel) -> None:
        differ = what_differs(self.model, target)
        if differ is not None:
            raise ValueError(
                f"{differ}. Choose a draft model of the target's family, or use TranslatedDraftProposer, which drafts "
                "the tokens that both tokenizers have."
            )

    def _settle(self) -> None:
        """Make the view of the model that drafts: trimmed LM head, int8 weights."""
        owned = self._path is not None
        self._view = self.model if self.vocab is None else with_trimmed_head(self.model, self.vocab)
        if decide_int8(self._int8, self.model):
            # In float32, int8 is faster up to 32 tokens (AVX2) and takes a quarter of the memory, so it replaces the
            # weights. bfloat16 weights are kept for passes over more tokens: some processors multiply them natively.
            self._view = with_int8_linears(self._view, alone=owned and self.model.dtype == torch.float32)
        if owned:
            self.model = self._view  # release weights that the view does not use

    def drafting_model(self) -> nn.Module:
        return self._view

    def new_runner(
        self, masks: str | None = None, sized: bool = False, encoder_outputs: EncoderOutputs | None = None
    ) -> ModelRunner:
        """A runner of the drafting view in eval mode, with a cache of its own.

        Args:
            masks: see `ModelRunner`.
            sized: True if drafts may be captured as CUDA graphs, which needs padded sizes.
            encoder_outputs: the encoder outputs of an encoder-decoder draft model.
        """
        view, captured, fits = in_eval_mode(self._view), self._static_forward, masks != "own"
        if captured is not None and (captured.refused or not fits or view is not self._view):
            captured = None
        return ModelRunner(view, masks, static_forward=captured, encoder_outputs=encoder_outputs, sized=sized and fits)

    def capture(self, compiled: bool) -> None:
        if self._view is self.model and cannot_capture(self.model) is None:
            self._static_forward = StaticForward(self.model, compiled=compiled)

    def propose(self, context: Context) -> DraftTree:
        if self._idle:
            return DraftTree.root_only(context.root)
        context = self._within_positions(context)
        ready = [count > 0 for count in self._missing(context)]  # a row that waits for others has no new token
        if not any(ready):
            return DraftTree.root_only(context.root)
        return super().propose(context if ready == list(context.active) else replace(context, active=ready))

    def drafts_chains(self, context: Context) -> bool:
        return self.runner.masks == "own" or super().drafts_chains(context)

    @property
    def rows(self) -> CachedRows:
        return self.runner

    def newest(self, context: Context, most: int) -> tuple[Sequence[int], Tensor | None] | None:
        if not self._captures:
            return None
        missing = self._missing(context)
        if max(missing) > most and min(missing) > WIDTHS[0]:  # prompts, of which a captured draft processes the end
            self._read(context, missing, max(missing) - WIDTHS[0])
            missing = [WIDTHS[0]] * len(missing)
        return (missing, None) if 0 < max(missing) <= most else None

    def read_after(self, tokens: Tensor, states: Tensor | None, pads: Tensor) -> Tensor:
        return self.runner.extend_after(self._readable(tokens), pads).logits

    def begin(self, context: Context) -> None:
        super().begin(context)
        assert context.target is not None
        able = self._capability(context.target)
        self._idle = able is not None and not able.trees and context.batch_size > 1
        if able is not None and self._idle:
            warnings.warn(able.message(f"{type(self.model).__name__} drafts nothing in a batch"))
        said = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        found = draft_positions(self.model) if able is None else able.positions
        self._positions = min((most for most in (said, found) if most is not None), default=None)
        masks = context.call.masks if able is None else able.masks
        source = context.call.encoder_outputs
        if source is not None and not source.readable_by(self.model):
            self._idle = True
            warnings.warn(
                f"specdec: {type(self.model).__name__} drafts nothing: its own encoder needs the input, but the call "
                "passed encoder_outputs alone. Pass the input as well, or draft with n-grams"
            )
        source = source.for_model(in_eval_mode(self.model)) if source is not None and not self._idle else None
        self._captures = context.call.recorder is not None and cannot_capture(self.model) is None
        self.runner = self.new_runner(masks, self._captures, source)
        self.runner.start(context.batch_size)
        if self._captures:
            self._lend(context)

    def observe(self, draft: DraftTree, result: RoundResult, accepted: Sequence[int]) -> None:
        super().observe(draft, result, accepted)
        if self.runner.pending:  # the root is committed already
            self.runner.commit_path(self._accepted_steps(result.host(), accepted), self.runner.device)

    def _within_positions(self, context: Context) -> Context:
        """The context with each row's budget limited by the draft model's positions."""
        most = self._positions
        if most is None:
            return context
        lengths = self._lengths(context)
        budget = [max(0, min(budget, most - length)) for budget, length in zip(context.budget, lengths, strict=True)]
        active = [alive and most > length for alive, length in zip(context.active, lengths, strict=True)]
        return replace(context, budget=budget, active=active)

    def _lengths(self, context: Context) -> list[int]:
        """Number of tokens in each row's text, in the draft model's tokens."""
        return context.lengths

    def _readable(self, tokens: Tensor) -> Tensor:
        """Clamp tokens to the draft model's vocabulary, since a fine-tuned target may have added chat markers."""
        return tokens.clamp(max=self.model.config.get_text_config(decoder=True).vocab_size - 1)

    def _missing(self, context: Context) -> list[int]:
        """Tokens of each row that the draft model has not processed; 0 for finished rows."""
        rows = zip(context.lengths, self.runner.lengths, context.active, strict=True)
        return [max(0, length - have) if active else 0 for length, have, active in rows]

    def _backlog(self, context: Context) -> int:
        width = max(self._missing(context))
        return width * context.batch_size if width > FEW_TOKENS else 0

    def _catch_up(self, context: Context) -> Tensor:
        missing = self._missing(context)
        return self._read(context, missing, max(missing))

    def _read(self, context: Context, missing: Sequence[int], count: int) -> Tensor:
        """Process the first `count` columns of the `missing` tokens, left-padded; logits (B, 1, V) after them."""
        width, start = max(missing), clock()
        tokens = self._unread_tokens(context, missing)[:, :count]
        logits = self.runner.extend(tokens, [width - m for m in missing]).logits
        self._book_pass(context, logits, clock() - start, tokens.numel() if count > FEW_TOKENS else 1)
        return logits.to(context.tokens.device)

    def _unread_tokens(self, context: Context, missing: Sequence[int]) -> Tensor:
        """The `missing` tokens of each row in the draft model's vocabulary, left-padded to (B, W)."""
        return self._readable(context.last_tokens(max(missing)))

    def _step(self, stepped: DraftNodes) -> Tensor:
        tokens, depth, most = self._readable(stepped.newest), stepped.depth, self._positions
        if most is not None and self.runner.device_lengths is None and max(self.runner.lengths) >= most:
            # A row without a budget may be at the last position already: its nodes are placed there.
            left = [most - 1 - length for length in self.runner.lengths]
            depth = torch.minimum(depth, uploaded(left, depth.device)[:, None])
        return self.runner.grow(tokens, depth, stepped.seen, chain=stepped.is_chain).logits

    def known_tokens(self) -> Tensor | None:
        return self.vocab


def decide_int8(int8: bool | None, model: PreTrainedModel) -> bool:
    """Resolve the `int8` argument. Raises ValueError if int8 is requested and does not fit the model."""
    pays = int8_pays(model)
    if int8 and not pays:
        raise ValueError(
            f"int8 drafting needs a bfloat16 or float32 model of at least 10M parameters on a CPU, got {model.dtype}, "
            f"{model.num_parameters() / 1e6:.0f}M parameters on {model.device}: use int8=None"
        )
    return pays if int8 is None else int8


def _vocabulary(model: PreTrainedModel, vocab: Tensor | int | None) -> Tensor | None:
    """Token ids of a trimmed LM head, ascending and including end tokens; None for the whole vocabulary."""
    size = model.config.get_text_config(decoder=True).vocab_size
    if vocab is None or (isinstance(vocab, int) and vocab >= size):
        return None
    if isinstance(vocab, int) and vocab < 1:
        raise ValueError(f"vocab must be a positive number of tokens or a tensor of token ids, got {vocab}")
    known = torch.arange(vocab) if isinstance(vocab, int) else vocab.long().cpu()
    known = torch.cat([known, torch.tensor(sorted(end_tokens(model)), dtype=torch.long)]).unique()
    if int(known[0]) < 0 or int(known[-1]) >= size:
        raise ValueError(
            f"vocab has ids from {int(known[0])} to {int(known[-1])}, expected ids of the draft model, 0 to {size - 1}"
        )
    return known
