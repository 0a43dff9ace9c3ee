"""`SpeculativeGenerator`: `model.generate()` with the same output in fewer target passes.

Owns the public class, its way into transformers' `generate()`, and the loop. Knows nothing of model internals.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from specdec import acceptance
from specdec.capability import capability
from specdec.eagle3 import registry
from specdec.logits import NodeProcessors, stateful
from specdec.loop import Loop, Rule
from specdec.pacing import Pacer
from specdec.proposers import DraftModelProposer, Eagle3Proposer, HybridProposer, NgramProposer, Proposer
from specdec.report import Report, Stopwatch
from specdec.runner import ModelRunner, Output, device_of
from specdec.transcript import Records, Transcript
from specdec.tree import DraftTree, Verdict

# Keyword arguments of the hook that the loop understands. Another one with a value goes to the model's forward pass in
# a way we cannot know to be right for trees: plain decoding.
KNOWN_KWARGS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "logits_to_keep",
    "use_cache",
    "inputs_embeds",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "return_dict",
    "cache_position",
}
WITH_NGRAMS = "ngram+"
PROPOSERS = re.compile(r"ngram|auto|(ngram\+)?(eagle3|(draft|eagle3):.+)")
PROPOSERS_IN_WORDS = (
    '"ngram", "draft:PATH_OR_ID", "eagle3" (a known head), "eagle3:PATH_OR_ID", "ngram+draft:PATH_OR_ID", '
    '"ngram+eagle3", "ngram+eagle3:PATH_OR_ID" or "auto"'
)
# Fields of a GenerationConfig that steer transformers' own assisted generation, and have no say here.
ASSISTED_FIELDS = ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight", "use_mtp")


class Unsupported(ValueError):
    """A `generate()` call that cannot be speculated on, under `on_unsupported="error"`."""


class SpeculativeGenerator:
    """Generates what `model.generate()` would, verifying a proposer's drafts instead of single tokens.

    At T = 0 the output is the same token for token (in float32; in half precision a pass over several tokens rounds
    differently than one over a single token, and near ties may fall the other way); at T > 0 it has the same
    distribution. Calls that cannot be speculated on run as plain `generate()`, with one warning that says why.

    Args:
        model: the target, a causal LM from transformers.
        proposer: what drafts: a `Proposer`, a draft model, "ngram", "draft:PATH_OR_ID", "eagle3:PATH_OR_ID", "eagle3"
            (the head that `eagle3.registry` knows for this model), one of the latter three behind "ngram+" (see
            `HybridProposer`), or "auto" ("ngram+eagle3" where a head is known, else "ngram").
        draft_length: tokens to draft per round; None lets measured costs and acceptance decide.
        rule: how drawn chains are verified at T > 0: "block" (Sun et al. 2403.10444), "token" (Leviathan et al.
            2211.17192), or "typical" (Medusa 2401.10774), which is LOSSY: the output no longer has the target's
            distribution.
        on_unsupported: "plain" to fall back with a warning, "error" to raise `Unsupported`.

    Attributes:
        report: counts over all calls. last_report: those of the last one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        proposer: Proposer | PreTrainedModel | str,
        *,
        draft_length: int | None = None,
        rule: str = "block",
        on_unsupported: str = "plain",
    ):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
        if draft_length is not None and (not isinstance(draft_length, int) or draft_length < 0):
            raise ValueError(f"draft_length must be None or an int of at least 0, got {draft_length!r}")
        if rule not in ("block", "token", "typical"):
            raise ValueError(f'rule must be "block", "token" or "typical", got {rule!r}')
        if on_unsupported not in ("plain", "error"):
            raise ValueError(f'on_unsupported must be "plain" or "error", got {on_unsupported!r}')
        self.model = model
        self.proposer = as_proposer(proposer, model)
        self.draft_length, self.rule, self.on_unsupported = draft_length, rule, on_unsupported
        self.capability = capability(model)
        self.proposer.check(model)
        self._taps = self.proposer.taps(model)
        self.report, self.last_report = Report(), Report()
        self._pacers: dict[tuple[int, bool], Pacer] = {}
        self._warned: set[str] = set()

    # Ways in

    def generate(self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any):
        """Everything `model.generate()` takes; returns what it returns."""
        streamer, synced_gpus = kwargs.get("streamer"), kwargs.get("synced_gpus")
        if kwargs.pop("assistant_model", None) is not None:
            self._warn("assistant_model is ignored: the proposer drafts. Pass it as SpeculativeGenerator's proposer.")
        generation_config, kwargs = self._with_stop_strings(generation_config, kwargs)
        plain_generate = type(self.model).generate
        outside = self._outside_the_hook(generation_config, kwargs)
        if outside:
            self._fall_back(outside)
            self.last_report = Report(num_calls=1, num_plain_calls=1)
            self.report.add(self.last_report)
            return plain_generate(self.model, inputs, generation_config=generation_config, **kwargs)

        def decode(model, input_ids, **hook_kwargs):
            return self._decode(model, input_ids, streamer=streamer, synced_gpus=synced_gpus, **hook_kwargs)

        # transformers takes the streamer (it puts the prompt) but does not hand it to a custom_generate callable.
        kwargs.pop("tokenizer", None)
        return plain_generate(self.model, inputs, generation_config=generation_config, custom_generate=decode, **kwargs)

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, **kwargs: Any):
        """`model.generate(..., custom_generate=spec)`: transformers' own hook."""
        if model is not self.model:
            raise ValueError("custom_generate got another model than this SpeculativeGenerator was made for")
        caller = _generate_frame()
        return self._decode(
            model, input_ids, streamer=caller.get("streamer"), synced_gpus=caller.get("synced_gpus"), **kwargs
        )

    @contextmanager
    def installed(self) -> Iterator[SpeculativeGenerator]:
        """Within this context `model.generate` is `self.generate`, also for code we don't own (a pipeline, say)."""
        before = self.model.__dict__.get("generate")
        self.model.__dict__["generate"] = self.generate
        try:
            yield self
        finally:
            if before is None:
                del self.model.__dict__["generate"]
            else:
                self.model.__dict__["generate"] = before

    # A call, as transformers has prepared it

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        synced_gpus: bool | None = None,
        **model_kwargs: Any,
    ):
        report = self.last_report = Report(num_calls=1, num_rows=len(input_ids))
        watch = Stopwatch(report, device_of(model))
        reason = self._unsupported(input_ids, logits_processor, generation_config, synced_gpus, model_kwargs)
        if reason:
            self._fall_back(reason)
            output = _plain(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                synced_gpus,
                model_kwargs,
            )
            report.num_plain_calls = 1
            sequences = output if isinstance(output, Tensor) else output.sequences
            report.num_output_tokens = sequences.shape[0] * (sequences.shape[1] - input_ids.shape[1])
        else:
            with torch.no_grad():
                output = self._speculate(
                    input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs, watch
                )
        report.total_seconds = watch.elapsed()
        self.report.add(report)
        return output

    def _speculate(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
        model_kwargs: dict[str, Any],
        watch: Stopwatch,
    ):
        text = _transcript(input_ids, stopping_criteria, config, streamer, model_kwargs)
        target = ModelRunner(self.model, self.capability.masks, self._taps)
        target.start(text.batch_size)
        loop = Loop(
            target=target,
            proposer=self.proposer,
            rule=self._rule(config),
            processors=NodeProcessors(logits_processor),
            text=text,
            pacer=self._pacer(text.batch_size, bool(config.do_sample)),
            watch=watch,
            sampling=bool(config.do_sample),
            trees=self.capability.trees,
        )
        loop.run(_prefill(target, input_ids, text, config, model_kwargs))
        watch.report.num_output_tokens = text.num_output_tokens
        if not config.return_dict_in_generate:
            return text.sequences
        cache = _as_dynamic_cache(target, text, loop.cache_base)
        return GenerateDecoderOnlyOutput(sequences=text.sequences, past_key_values=cache, **text.recorded())

    def _rule(self, config: GenerationConfig) -> Rule:
        """The verification rule of a call: processed scores (B, N, V) in, verdict out."""
        if not config.do_sample:
            return acceptance.greedy
        drawn_chain = {"block": acceptance.block_verification, "token": acceptance.speculative_sampling}

        def rule(draft: DraftTree, scores: Tensor) -> Verdict:
            probs = scores.softmax(-1)  # (B, N, V)
            if self.rule == "typical":
                return acceptance.typical(draft, probs)
            if draft.probs is None:
                return acceptance.point_mass(draft, probs)
            return (drawn_chain[self.rule] if draft.chain else acceptance.recursive_rejection)(draft, probs)

        return rule

    def _pacer(self, batch_size: int, sampling: bool) -> Pacer:
        """Costs and acceptance carry over from call to call of one kind."""
        return self._pacers.setdefault((batch_size, sampling), Pacer(self.draft_length))

    # What cannot be speculated on

    def _unsupported(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        synced_gpus: bool | None,
        model_kwargs: dict[str, Any],
    ) -> str | None:
        """Why this call must run as plain decoding, or None. Raises for input that is wrong either way."""
        mode = config.get_generation_mode()
        if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH, GenerationMode.ASSISTED_GENERATION):
            return f"{mode.value.replace('_', ' ')} keeps several hypotheses or its own state"
        if self.capability.masks is None:
            return f"{type(self.model).__name__}: {self.capability.reason}"
        if not config.use_cache:
            return "use_cache=False"
        if synced_gpus:
            return "synced_gpus: ranks would take different numbers of passes"
        if config.output_attentions:
            return "output_attentions: attention weights of a draft pass are not those of single tokens"
        if config.cache_implementation in ("quantized", "offloaded"):
            return f"cache_implementation={config.cache_implementation!r} stores the cache in its own way"
        cache = model_kwargs.get("past_key_values")
        if cache is not None and (getattr(cache, "_is_user_defined", False) or _filled(cache)):
            return "past_key_values was passed in"
        unknown = [key for key, value in model_kwargs.items() if key not in KNOWN_KWARGS and not _empty(value)]
        if unknown:
            return f"the model argument {unknown[0]} has no meaning for drafted tokens here"
        if input_ids.dim() != 2:
            return f"input_ids has {input_ids.dim()} dimensions"
        reason = _padding_problem(input_ids, model_kwargs)
        if reason:
            return reason
        if not self.capability.trees and len(input_ids) > 1:
            return f"{type(self.model).__name__} in a batch: {self.capability.reason}"
        blocker = stateful(processors, input_ids, self.model.config.get_text_config(decoder=True).vocab_size)
        if blocker:
            return f"{blocker} follows the text with a state of its own and must not see drafted tokens"
        for name in ASSISTED_FIELDS:
            if getattr(config, name, None):
                self._warn(f"{name} belongs to transformers' own assisted generation and is ignored")
        return None

    def _fall_back(self, reason: str) -> None:
        if self.on_unsupported == "error":
            raise Unsupported(f'cannot speculate: {reason}. Pass on_unsupported="plain" to run it as plain generate().')
        self._warn(f"running as plain generate(): {reason}")

    def _warn(self, message: str) -> None:
        """Once per generator and message."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"specdec: {message}", stacklevel=_callers_level())

    def _outside_the_hook(self, config: GenerationConfig | None, kwargs: dict[str, Any]) -> str | None:
        """What transformers decides before it calls a custom_generate callable."""
        if kwargs.get("custom_generate") is not None:
            return "custom_generate brings its own decoding loop"
        for name in ("token_healing", "penalty_alpha", "dola_layers", "constraints", "force_words_ids"):
            if kwargs.get(name) or getattr(config, name, None):
                return f"{name} is handled by transformers before any decoding loop"
        if kwargs.get("cache_implementation") == "paged":
            return "cache_implementation='paged' is continuous batching"
        return None

    def _with_stop_strings(
        self, config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[GenerationConfig | None, dict[str, Any]]:
        """Turn `stop_strings` into a criterion: transformers hands no tokenizer to a custom_generate callable."""
        given = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
        given = given or getattr(self.model.generation_config, "stop_strings", None)
        if not given:
            return config, kwargs
        tokenizer = kwargs.get("tokenizer")
        if tokenizer is None:
            raise ValueError(f"stop_strings={given!r} needs the tokenizer: pass tokenizer=... to generate()")
        kwargs = {**kwargs, "stop_strings": None}
        if config is not None and config.stop_strings:
            config = copy.deepcopy(config)
            config.stop_strings = None
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(stop_strings=given, tokenizer=tokenizer))
        return config, {**kwargs, "stopping_criteria": criteria}


def check_name(proposer: str) -> None:
    """Raise ValueError unless it is one of the short forms."""
    first, plus, last = proposer.rpartition("+")
    if plus and last == "ngram":
        raise ValueError(f'n-grams come first: "{WITH_NGRAMS}{first}", got {proposer!r}')
    if not PROPOSERS.fullmatch(proposer):
        raise ValueError(f"proposer must be {PROPOSERS_IN_WORDS}, got {proposer!r}")


def as_proposer(proposer: Proposer | PreTrainedModel | str, target: PreTrainedModel) -> Proposer:
    """A `Proposer` from an object, a loaded draft model, or a short string."""
    if isinstance(proposer, Proposer):
        return proposer
    if isinstance(proposer, PreTrainedModel):
        return DraftModelProposer(proposer)
    if not isinstance(proposer, str):
        raise ValueError(
            f"proposer must be a Proposer (an instance), a loaded draft model, {PROPOSERS_IN_WORDS}, got {proposer!r}"
        )
    check_name(proposer)
    kind, _, source = proposer.partition(":")
    if kind.startswith(WITH_NGRAMS):
        return HybridProposer(as_proposer(proposer.removeprefix(WITH_NGRAMS), target))
    if kind == "draft":
        return DraftModelProposer(source)
    if kind == "eagle3":
        return Eagle3Proposer(source or registry.find(target))
    head = _known_head(target) if kind == "auto" else None
    return NgramProposer() if head is None else HybridProposer(head)


def _known_head(target: PreTrainedModel) -> Proposer | None:
    """The registry's head if there is one, it is at hand and fits; "auto" is content with n-grams."""
    if registry.known(target) is None:
        return None
    try:
        proposer = Eagle3Proposer(registry.find(target))
        proposer.check(target)
    except (ValueError, OSError) as error:
        warnings.warn(f'"auto" drafts with n-grams: {error}')
        return None
    return proposer


def _transcript(
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Transcript:
    B = len(input_ids)
    wanted = config.return_dict_in_generate
    ends_on_tokens = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    pad = config._pad_token_tensor
    return Transcript(
        prompt=input_ids,
        pads=_pads(input_ids, model_kwargs) if input_ids.shape[1] else [0] * B,
        criteria=criteria,
        pad_token=int(pad) if ends_on_tokens and pad is not None else None,
        streamer=streamer,
        max_length=criteria.max_length,
        records=Records(
            scores=[[] for _ in range(B)] if wanted and config.output_scores else None,
            logits=[[] for _ in range(B)] if wanted and config.output_logits else None,
            hidden_states=[[] for _ in range(B)] if wanted and config.output_hidden_states else None,
            wanted=bool(wanted),
        ),
    )


def _prefill(
    target: ModelRunner, input_ids: Tensor, text: Transcript, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Output:
    """Run the prompts, in chunks of `prefill_chunk_size` if asked; logits (B, 1, V) after them."""
    embeds = model_kwargs.get("inputs_embeds")
    given = input_ids if embeds is None else embeds
    device = device_of(target.model)
    given, pads = given.to(device), _pads(given, model_kwargs)
    wants_hidden = text.records.hidden_states is not None
    chunk = config.prefill_chunk_size or given.shape[1]
    features: list[Tensor | None] = []
    for start in range(0, given.shape[1], chunk):
        part = given[:, start : start + chunk]
        part_pads = [min(max(pad - start, 0), part.shape[1]) for pad in pads]
        output = target.extend(
            part if embeds is None else None,
            part_pads,
            embeds=part if embeds is not None else None,
            hidden_states=wants_hidden,
        )
        features.append(output.features)
    if output.features is None:
        return output
    return replace(output, features=torch.cat([part for part in features if part is not None], 1))


def _pads(given: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Left padding of each row, from the attention mask (None: no padding)."""
    mask = model_kwargs.get("attention_mask")
    return [0] * len(given) if mask is None else (mask == 0).sum(1).tolist()


def _padding_problem(input_ids: Tensor, model_kwargs: dict[str, Any]) -> str | None:
    """Raises for right padding and empty rows; names what else is unusual about mask or positions."""
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    width = input_ids.shape[1] if embeds is None else embeds.shape[1]
    if len(input_ids) == 0:
        raise ValueError("the batch is empty: give at least one prompt")
    if width == 0:
        raise ValueError("the prompt is empty: give at least one token, the tokenizer's bos_token for example")
    if mask is None:
        real = torch.ones(len(input_ids), width, dtype=torch.bool)
    else:
        if mask.dim() != 2 or mask.shape[1] != width:
            return f"attention_mask has shape {tuple(mask.shape)}, the prompt {(len(input_ids), width)}"
        real = mask.bool()
        if not bool(real.any(1).all()):
            row = int((~real.any(1)).nonzero()[0])
            raise ValueError(f"row {row} of the batch is all padding: every prompt needs at least one token")
        if not bool(real[:, -1].all()):
            row = int((~real[:, -1]).nonzero()[0])
            raise ValueError(
                f"row {row} of the batch is padded on the right: set tokenizer.padding_side = 'left' for generation"
            )
        if bool((real[:, 1:].int() < real[:, :-1].int()).any()):
            return "attention_mask has holes inside a prompt"
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = (real.long().cumsum(-1) - 1).to(positions.device)
        if positions.shape != expected.shape or not bool(((positions == expected) | ~real.to(positions.device)).all()):
            return "position_ids are not the prompt's own order"
    return None


def _empty(value: Any) -> bool:
    """Nothing was given; `generate()` hands a multimodal model an empty `mm_encoder_outputs` with every text."""
    return value is None or (isinstance(value, dict) and not value)


def _filled(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except Exception:  # a cache that cannot say how long it is is not one of attention keys
        return True


def _plain(model, input_ids, processors, criteria, config, streamer, synced_gpus, model_kwargs):
    """What `generate()` would have called without us, with the arguments it prepared (transformers 5.17 to 5.23)."""
    kwargs = dict(model_kwargs)
    if synced_gpus is not None:
        kwargs["synced_gpus"] = synced_gpus
    method = "_beam_search" if config.num_beams and config.num_beams > 1 else "_sample"
    if method == "_sample":
        kwargs["streamer"] = streamer
    return getattr(type(model), method)(
        model, input_ids, logits_processor=processors, stopping_criteria=criteria, generation_config=config, **kwargs
    )


def _as_dynamic_cache(target: ModelRunner, text: Transcript, base: Sequence[int]) -> DynamicCache:
    """The settled text's keys and values as `generate()` returns them: left padding included, last token not."""
    cache = DynamicCache(config=target.config)
    new = text.settled - text.start - 1
    longest = max(base) + 1 + new
    for index in range(len(target.cache)):
        try:
            keys, values = target.cache.layer(index)
        except IndexError:
            continue
        column = torch.arange(longest, device=keys.device)
        shift = torch.tensor([longest - (b + 1 + new) for b in base], device=keys.device)[:, None]
        slot = (column - shift).clamp(0, keys.shape[2] - 1)[:, None, :, None]
        cache.update(*(t.gather(2, slot.expand(-1, t.shape[1], -1, t.shape[3])) for t in (keys, values)), index)
    return cache


def _callers_level() -> int:
    """`stacklevel` that makes a warning point at the first line outside of specdec, transformers and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("specdec", "transformers", "torch", "contextlib"):
            return level
        frame, level = frame.f_back, level + 1
    return level


def _generate_frame() -> dict[str, Any]:
    """The local variables of transformers' `generate()` that is calling us.

    It has the streamer and synced_gpus, but (5.17 to 5.23, generation/utils.py) drops them on the way to a
    custom_generate callable, even to one that names them; a streamer would wait for its end forever.
    """
    frame: FrameType | None = sys._getframe(2)
    wanted = inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not wanted:
        frame = frame.f_back
    return frame.f_locals if frame is not None else {}
