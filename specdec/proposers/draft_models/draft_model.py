"""`DraftModelProposer`: a smaller causal LM with the target's tokenizer drafts, one pass per drafted token.

Owns the draft model's runner, whose cache follows the accepted text: nothing is fed twice. A draft model may know less
than the target: token ids it has none for are read as its last one, and behind its last position it drafts nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from specdec.models.cache.ragged_rows import CachedRows
from specdec.models.capability import Capability, capability, draft_positions
from specdec.models.encoder import unfit
from specdec.models.int8_linear import FEW_TOKENS, int8_pays, with_int8_linears, with_trimmed_head
from specdec.models.introspection import device_of, end_tokens, is_sharded, require_lm_head, unwrap_model
from specdec.models.loading import load
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import StaticForward, cannot_capture
from specdec.models.views import in_eval_mode
from specdec.proposers.base import LARGEST_PADDING, Context
from specdec.proposers.draft_models.cuda_graph_drafts import RecordedDrafts
from specdec.proposers.draft_models.draft_nodes import Stepped
from specdec.sampling.draft_tree import DraftTree
from specdec.sampling.dynamic_tree import DynamicTree
from specdec.sampling.results import Verdict
from specdec.utils.device_copies import uploaded
from specdec.utils.timing import clock


class DraftModelProposer(RecordedDrafts):
    """A smaller model drafts chains, or trees.

    Args:
        model: the draft model, or a path or hub id to load one from.
        like: a model loaded here has this one's number format and device, which a target's draft does best in; None:
            the format as saved, and the target's device.
        branching: the draft's shape, see `AutoregressiveProposer`; chains by default.
        tree: likewise.
        draw: how the draft is chosen, see there.
        vocab: restrict the draft's LM head to these token ids, (K,) int64, or to the `vocab` lowest ids, which in BPE
            vocabularies are the earliest merges and so the most frequent tokens; None: the whole vocabulary. With
            152k tokens the head is a quarter of a 0.5B draft's time.
        int8: read the weights as 8-bit integers in passes over few tokens (CPU, bfloat16 or float32; a byte for each
            of the weights in memory; of a float32 model that is loaded here, the integers alone are kept). None: where
            it pays.
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
        self._path = model if isinstance(model, str) else None  # then it goes where the target is
        self.model = load(model, like) if isinstance(model, str) else unwrap_model(model)
        require_lm_head(self.model)
        self.vocab = _vocabulary(self.model, vocab)
        self._int8 = int8
        self._settle()

    _static_forward: StaticForward | None = None

    def check(self, target: PreTrainedModel) -> None:
        self._check_vocabulary(target)
        if reason := unfit(self.model, target):
            raise ValueError(f"{reason}: choose a draft model of the target's kind")
        if is_sharded(self.model):
            raise ValueError(
                "the draft model's weights lie in several processes, which would have to draft together: load it whole "
                "in each of them"
            )
        if self._path is not None and device_of(target) != self.model.device:
            self.model = load(self._path).to(device_of(target), self.model.dtype)
            self._settle()
        if device_of(target).type != device_of(self.model).type:
            raise ValueError(
                f"the draft model is on {self.model.device} and the target on {device_of(target)}: move the draft with "
                f"draft.to('{device_of(target)}')"
            )
        able = self._capability(target)
        if able is not None and able.masks is None:
            raise ValueError(able.message(f"{type(self.model).__name__} cannot draft"))

    def _capability(self, target: PreTrainedModel) -> Capability | None:
        """How the draft model can be run; None: as a target of its class, without trying it out."""
        return None if type(self.model) is type(target) else capability(self.model, drafts=True)

    def _check_vocabulary(self, target: PreTrainedModel) -> None:
        differ = what_differs(self.model, target)
        if differ is not None:
            raise ValueError(
                f"{differ}. Choose a draft model of the target's family, or use TranslatedDraftProposer, which drafts "
                "in the tokens that both have."
            )

    def _settle(self) -> None:
        """Make the view of the model that drafts."""
        owned = self._path is not None
        self._view = self.model if self.vocab is None else with_trimmed_head(self.model, self.vocab)
        if decide_int8(self._int8, self.model):
            # In float32 the integers are the faster ones up to 32 tokens (AVX2), and a quarter of the memory; beside
            # bfloat16, which some processors multiply as it is, catching up over several tokens keeps the weights.
            self._view = with_int8_linears(self._view, alone=owned and self.model.dtype == torch.float32)
        if owned:
            self.model = self._view  # weights that it does without are nobody's now

    def drafting_model(self) -> nn.Module:
        return self._view

    def new_runner(self, masks: str | None = None, sized: bool = False) -> ModelRunner:
        """Of the draft model as it drafts, in eval mode whatever its own is, with a cache of its own; masks: see there;
        sized: its drafts may be recorded.
        """
        view = in_eval_mode(self._view)
        static_forward = (
            self._static_forward if self._static_forward is not None and not self._static_forward.refused else None
        )
        if masks == "own" or view is not self._view:
            static_forward = None
        return ModelRunner(view, masks, static_forward=static_forward, sized=sized and masks != "own")

    def capture(self, compiled: bool) -> None:
        if type(self) is DraftModelProposer and self._view is self.model and cannot_capture(self.model) is None:
            self._static_forward = StaticForward(self.model, compiled=compiled)

    def propose(self, context: Context) -> DraftTree:
        if self._idle:
            return DraftTree.root_only(context.root)
        return super().propose(self._within_positions(context))

    def _in_chains(self, context: Context) -> bool:
        return self.runner.masks == "own" or super()._in_chains(context)

    @property
    def rows(self) -> CachedRows:
        return self.runner

    def _newest(self, context: Context, most: int) -> tuple[Sequence[int], Tensor | None] | None:
        missing = self._missing(context)
        return (missing, None) if 0 < max(missing) <= most else None

    def _read_behind(self, tokens: Tensor, states: Tensor | None, pads: Tensor) -> Tensor:
        return self.runner.extend_behind(self._readable(tokens), pads).logits

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
        masks = context.masks if able is None else able.masks
        self.runner = self.new_runner(masks, sized=context.recorder is not None)
        self.runner.encoder_outputs = (
            None if context.encoder_outputs is None else context.encoder_outputs.beside(in_eval_mode(self.model))
        )
        self.runner.start(context.batch_size)

    def observe(self, draft: DraftTree, verdict: Verdict, accepted: Sequence[int]) -> None:
        super().observe(draft, verdict, accepted)
        if self.runner.pending:  # the root is committed already
            assert verdict.outcome is not None
            self.runner.commit_path(self._accepted_steps(verdict.outcome, accepted), self.runner.device)

    def _within_positions(self, context: Context) -> Context:
        """The context with room for as many tokens as the draft model has positions for."""
        most = self._positions
        if most is None:
            return context
        lengths = self._lengths(context)
        budget = [max(0, min(budget, most - length)) for budget, length in zip(context.budget, lengths, strict=True)]
        active = [alive and most > length for alive, length in zip(context.active, lengths, strict=True)]
        return replace(context, budget=budget, active=active)

    def _lengths(self, context: Context) -> list[int]:
        """Tokens of each row's text, as the draft model has them."""
        return context.lengths

    def _readable(self, tokens: Tensor) -> Tensor:
        """A fine-tuned target may have tokens that its draft model has not: chat markers, say."""
        return tokens.clamp(max=self.model.config.get_text_config(decoder=True).vocab_size - 1)

    def _missing(self, context: Context) -> list[int]:
        return [
            max(0, end - pad - have) if active else 0
            for end, pad, have, active in zip(
                context.ends, context.pads, self.runner.lengths, context.active, strict=True
            )
        ]

    def _backlog(self, context: Context) -> int:
        width = max(self._missing(context))
        return width * context.batch_size if width > FEW_TOKENS else 0

    def _catch_up(self, context: Context) -> Tensor:
        """Feed what the text gained since the last draft, the root included; logits after it, (B, 1, V)."""
        missing = self._missing(context)
        width, start = max(missing), clock()
        tokens = self._readable(context.last_tokens(width))
        logits = self.runner.extend(tokens, [width - m for m in missing]).logits
        self._book_pass(context, logits, clock() - start, tokens.numel() if width > FEW_TOKENS else 1)
        return logits.to(tokens.device)

    def _step(self, stepped: Stepped, n: int, parents: Tensor | None, chain: bool) -> Tensor:
        tokens, depth, most = self._readable(stepped.tokens[:, -n:]), stepped.depth, self._positions
        if most is not None and self.runner.device_lengths is None and max(self.runner.lengths) >= most:
            # A row that has no room may have been read up to the last position: its nodes are run there.
            left = [most - 1 - length for length in self.runner.lengths]
            depth = torch.minimum(depth, uploaded(left, depth.device)[:, None])
        return self.runner.grow(tokens, depth, stepped.seen, chain=chain).logits.to(tokens.device)

    def known_tokens(self) -> Tensor | None:
        return self.vocab

    def _full(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits over the target's vocabulary: what the draft does not know gets -inf."""
        if self.vocab is not None:
            full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
            return full.index_copy_(-1, self.vocab.to(logits.device), logits)
        missing = vocab_size - logits.shape[-1]
        return nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[..., :vocab_size]


def what_differs(model: PreTrainedModel, target: PreTrainedModel) -> str | None:
    """Between the vocabularies of a draft model and a target, in words; None where they are the same."""
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (model, target))
    if abs(ours - theirs) > LARGEST_PADDING:
        return f"the draft model's vocabulary has {ours} tokens and the target's {theirs}: they don't share a tokenizer"
    differing = _first_difference(_vocabulary_of(model), _vocabulary_of(target))
    if differing is None:
        return None
    return (
        f"the draft model's tokenizer ({model.name_or_path}) and the target's ({target.name_or_path}) differ, at token "
        f"id {differing} first"
    )


def tokenizers_at_hand(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether the tokenizers of both lie beside their weights."""
    return _vocabulary_of(model) is not None and _vocabulary_of(target) is not None


def _vocabulary_of(model: PreTrainedModel) -> dict[int, str] | None:
    """The tokens of the tokenizer that lies beside the model's weights; None where there is none at hand."""
    if not model.name_or_path:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    except Exception:  # no tokenizer there, or one that needs what is not installed: nothing to compare
        return None
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _first_difference(ours: dict[int, str] | None, theirs: dict[int, str] | None) -> int | None:
    """The lowest token id that both know by different names, or None."""
    if ours is None or theirs is None:
        return None
    return min((index for index in ours.keys() & theirs.keys() if ours[index] != theirs[index]), default=None)


def decide_int8(int8: bool | None, model: PreTrainedModel) -> bool:
    pays = int8_pays(model)
    if int8 and not pays:
        raise ValueError(
            f"int8 drafting needs a bfloat16 or float32 model of at least 10M parameters on a CPU, got {model.dtype}, "
            f"{model.num_parameters() / 1e6:.0f}M parameters on {model.device}. Use int8=None."
        )
    return pays if int8 is None else int8


def _vocabulary(model: PreTrainedModel, vocab: Tensor | int | None) -> Tensor | None:
    size = model.config.get_text_config(decoder=True).vocab_size
    if vocab is None or (isinstance(vocab, int) and vocab >= size):
        return None
    if isinstance(vocab, int) and vocab < 1:
        raise ValueError(f"vocab must be a positive number of tokens or a tensor of token ids, got {vocab}")
    known = torch.arange(vocab) if isinstance(vocab, int) else vocab.long().cpu()
    known = torch.cat([known, torch.tensor(sorted(end_tokens(model)), dtype=torch.long)]).unique()
    if int(known[0]) < 0 or int(known[-1]) >= size:
        raise ValueError(f"vocab holds ids from {int(known[0])} to {int(known[-1])}, the draft knows 0 to {size - 1}")
    return known
