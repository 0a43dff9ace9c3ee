"""`SpeculativeGenerator`: `model.generate()` with the same output in fewer target passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateOutput

from specdec.engine.call_history import CallHistory
from specdec.engine.draft_session import CallKind, DraftSession, DraftSessions
from specdec.engine.draft_tally import IdleDraftWarning, relative_size
from specdec.engine.hf.call import Call
from specdec.engine.hf.eligibility import (
    Unsupported,
    check_arguments,
    decided_before,
    exactness_of,
    ignored_fields,
    why_plain,
)
from specdec.engine.hf.hooks import callers_level, count_tokens, further_arguments, install, plain, with_stop_strings
from specdec.engine.lenient import Lenient
from specdec.engine.report import Report
from specdec.engine.rules import uses_target_choices
from specdec.engine.settings import Settings, checked_settings
from specdec.engine.speculation import Speculation
from specdec.engine.stopwatch import Stopwatch
from specdec.engine.trace import RoundTrace
from specdec.models.capability import Capability, capability
from specdec.models.compat import NOT_HANDED_OVER, generate_frame, is_synced, with_current_cache_name
from specdec.models.cpu_threads import warn_of_excess_threads
from specdec.models.exact.exactness import Exactness, exactness
from specdec.models.exact.row_kernels import has_row_kernels, row_kernels
from specdec.models.introspection import device_of, generate_owner, require_lm_head, unwrap_model
from specdec.models.lockstep import in_step
from specdec.proposers.base import Proposer
from specdec.proposers.factory import as_proposer
from specdec.utils.choices import COUPLED, OnUnsupported, ProposerName, RuleName, check_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SpeculativeGenerator:
    """Generates the output of `model.generate()` by speculative decoding (Leviathan et al., arXiv 2211.17192).

    A proposer drafts several tokens. The target verifies all of them in one forward pass.

    In float32 the output is the same token for token: the greedy one at T = 0, and at T > 0 with the coupled rule the
    one for the same seed. In half precision a pass over several tokens rounds differently than one over a single token.
    Near ties may be resolved differently then, also from call to call, and the distribution is still the target's.
    Calls that cannot be speculated on run as plain `generate()`, with one warning that states the reason.

    A call's own `assistant_model` or `prompt_lookup_num_tokens` replaces the proposer in that call. `draft_length` and
    `rule` still apply. An assistant is prepared once and kept.

    Args:
        model: the target, a causal LM or an encoder-decoder from transformers, also with PEFT adapters or wrapped in
            `torch.compile`.
        proposer: a `Proposer`, a draft model, or one of these names:

            - "ngram", "suffix": lookup in the text so far.
            - "draft:PATH_OR_ID": a draft model.
            - "eagle3", "dflash": the head that `registry` lists for the target.
            - "eagle3:PATH_OR_ID", "dflash:PATH_OR_ID", "medusa:PATH_OR_ID", "hydra:PATH_OR_ID": a head.
            - "mtp", "mtp:PATH_OR_ID": the MTP layers of the target, or of another checkpoint.
            - "exit:LAYERS": the target's first layers.
            - "ngram+NAME": n-grams together with one of the above, except "ngram" and "suffix" (see `HybridProposer`).
            - "auto": "ngram+" with the EAGLE-3 or DFlash head that `registry` lists, else "ngram+mtp" if the checkpoint
              has MTP layers, else "ngram".
        draft_length: tokens to draft per round. None chooses it from measured costs and acceptance, 0 drafts nothing.
        rule: verification of drafts at T > 0.

            - "coupled": target and draft share the exponential noise of sampling. In float32 the text is that of plain
              `generate()` with the same seed (see `sampling.noise`).
            - "block" (Sun et al., arXiv 2403.10444), "token" (Leviathan et al.): rejection sampling of chains drawn
              from the draft's distribution.
            - "typical" (Medusa, arXiv 2401.10774): LOSSY, the output no longer has the target's distribution.
            - `Lenient(gap, budget)`: LOSSY, also at T = 0. Accepts drafts hardly worse than the target's choice.
        on_unsupported: "plain" to run unsupported calls as plain `generate()` with a warning, "error" to raise
            `Unsupported`.
        compile: "auto" captures drafts and rounds as CUDA graphs on CUDA, in a few padded sizes. True also compiles the
            target's layers with `torch.compile`, on any device; this takes seconds at the second use of a size. False
            does neither. A model that cannot be captured runs eagerly; with True there is one warning.
        exact: compute every drafted token bit for bit as plain decoding computes it, so that the text is the same in
            half precision, too. On a GPU plain decoding does so within `exact()`. The first call probes the model, see
            `exactness`. Where it computes drafted tokens differently nevertheless, calls run as plain `generate()`.
            Needs `rule="coupled"`. Passes are not compiled.

    Raises:
        ValueError: an unknown proposer name, rule or option, or a proposer that does not fit the target.

    Example:
        ```python
        spec = SpeculativeGenerator(model, "ngram")
        output = spec.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=64)
        print(spec.report)
        ```
    """

    draft_length: int | None
    rule: RuleName | Lenient
    on_unsupported: OnUnsupported

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        proposer: Proposer | PreTrainedModel | ProposerName | str = "auto",
        *,
        draft_length: int | None = None,
        rule: RuleName | Lenient = COUPLED,
        on_unsupported: OnUnsupported = "plain",
        compile: bool | Literal["auto"] = "auto",
        exact: bool = False,
    ):
        check_choice("compile", compile, Literal[True, False, "auto"])
        self._set(draft_length=draft_length, rule=rule, on_unsupported=on_unsupported, exact=exact)
        self.compile = compile
        self.model, self._generate_owner = unwrap_model(model), generate_owner(model)
        require_lm_head(self.model)
        self.proposer = as_proposer(proposer, self.model)
        self._sessions = DraftSessions(self.proposer, self.model)
        self._history = CallHistory()
        warn_of_excess_threads(device_of(self.model), callers_level())

    def __repr__(self) -> str:
        settings = f"draft_length={self.draft_length}, rule={self.rule!r}"
        return (
            f"SpeculativeGenerator({type(self.model).__name__}, {type(self.proposer).__name__}, {settings})\n"
            f"{self.report!r}"
        )

    def __getstate__(self) -> Any:
        """Refuse to be copied or pickled."""
        raise TypeError(
            "a SpeculativeGenerator cannot be copied or pickled: make another one from the model and the proposer"
        )

    @property
    def report(self) -> Report:
        """The report over all calls."""
        return self._history.total

    @property
    def last_report(self) -> Report:
        """The report of the call that finished last."""
        return self._history.last

    @property
    def capability(self) -> Capability:
        """The capability of the target in its current mode and precision."""
        return capability(self.model)

    @property
    def exactness(self) -> Exactness:
        """Result of the probe for `exact=True`, in calls with one row without padding."""
        return exactness(self.model, self.capability)

    def options(self, **changed: Unpack[Settings]) -> SpeculativeGenerator:
        """Return this generator with other settings for some calls. Nothing is prepared again.

        Both share the model, the proposer, estimates, reports and warnings. A setting that is not named stays.

        Args:
            changed: `draft_length`, `rule`, `on_unsupported` or `exact`, as for `SpeculativeGenerator`.

        Raises:
            TypeError: another argument.
            ValueError: a wrong value, or settings that exclude each other.

        Example:
            ```python
            output = spec.options(draft_length=4).generate(**inputs, max_new_tokens=64)
            ```
        """
        settings = self._settings
        if unknown := changed.keys() - settings.keys():
            known = ", ".join(settings)
            raise TypeError(f"options() takes {known}, got {min(unknown)}: pass it to SpeculativeGenerator(...)")
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._set(**settings | changed)
        return other

    @property
    def _settings(self) -> Settings:
        return {
            "draft_length": self.draft_length,
            "rule": self.rule,
            "on_unsupported": self.on_unsupported,
            "exact": self._exact,
        }

    def _set(self, **settings: Any) -> None:
        checked = checked_settings(**settings)
        self.draft_length, self.rule = checked["draft_length"], checked["rule"]
        self.on_unsupported, self._exact = checked["on_unsupported"], checked["exact"]

    # Public entry points

    @overload
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *more: Any,
        return_dict_in_generate: Literal[True],
        **kwargs: Any,
    ) -> GenerateOutput: ...
    @overload
    def generate(self, inputs: Tensor | None = None, generation_config: None = None, **kwargs: Any) -> Tensor: ...
    @overload
    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, *more: Any, **kwargs: Any
    ) -> Tensor | GenerateOutput: ...
    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, *more: Any, **kwargs: Any
    ) -> Tensor | GenerateOutput:
        """Generate like `model.generate()` with the same arguments.

        Args:
            inputs: prompts (B, T) int64, left-padded; or pass them as `input_ids` or `inputs_embeds` (B, T, H).
            generation_config: settings, which keyword arguments override. None for the model's own.
            more: further positional arguments of `model.generate()`.
            kwargs: keyword arguments of `model.generate()`: `attention_mask` (B, T), `max_new_tokens`, `do_sample`,
                `streamer` and so on. `stop_strings` needs `tokenizer`. `assistant_model` (with `assistant_tokenizer`),
                `assistant_early_exit` and `prompt_lookup_num_tokens` choose the proposer of this call.

        Returns:
            Prompts and new tokens (B, T + new) int64, with rows that end early padded on the right. With
            `return_dict_in_generate`, as argument or in the config, transformers' output object with these as
            `sequences`.

        Raises:
            TypeError: an argument of `SpeculativeGenerator`, or inputs that are not a tensor.
            Unsupported: the call cannot be speculated on and `on_unsupported` is "error".
            ValueError: an empty batch or prompt, `stop_strings` without `tokenizer`, or arguments that
                `model.generate()` rejects.

        Example:
            ```python
            output = spec.generate(**inputs, max_new_tokens=64, do_sample=True, temperature=0.7)
            text = tokenizer.batch_decode(output, skip_special_tokens=True)
            ```
        """
        check_arguments(inputs, kwargs)
        with self._history.counted() as report:
            kwargs = with_current_cache_name(self.model, kwargs | further_arguments(more))
            return self._generate(report, inputs, generation_config, kwargs)

    def _generate(
        self, report: Report, inputs: Tensor | None, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
    ):
        given = {name: kwargs.get(name) for name in NOT_HANDED_OVER}
        tokenizers = kwargs.get("tokenizer"), kwargs.get("assistant_tokenizer")
        kwargs = with_stop_strings(self._generate_owner, generation_config, kwargs)
        plain_generate = type(self._generate_owner).generate
        first = () if inputs is None else (inputs,)  # by position: Whisper's `generate()` has another name for it
        outside = decided_before(self._generate_owner, generation_config, kwargs)
        if outside:
            self._fall_back(outside, report)
            return plain_generate(self._generate_owner, *first, generation_config=generation_config, **kwargs)

        def decode(model, input_ids, inputs_tensor=None, **hook_kwargs):  # transformers looks for `inputs_tensor`
            hook_kwargs |= {"inputs_tensor": inputs_tensor, **given}
            with report.part() as part:
                return self._decode(part, model, input_ids, tokenizers=tokenizers, **hook_kwargs)

        # transformers puts the prompt into the streamer, but does not pass it to a custom_generate callable.
        not_theirs = ("tokenizer", "assistant_tokenizer", "assistant_model", "custom_generate")
        kwargs = {name: value for name, value in kwargs.items() if name not in not_theirs}
        return plain_generate(
            self._generate_owner, *first, generation_config=generation_config, custom_generate=decode, **kwargs
        )

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        stop_strings: Any = None,
        inputs_tensor: Tensor | None = None,
        **kwargs: Any,
    ):
        """Decode a call of `model.generate(..., custom_generate=spec)`.

        Transformers calls this with its prepared arguments.

        Raises:
            ValueError: `stop_strings`, or a model other than the target.
        """
        if stop_strings is not None:
            raise ValueError(
                f"stop_strings={stop_strings!r} needs a tokenizer, which transformers does not pass to "
                "custom_generate: call SpeculativeGenerator.generate(..., stop_strings=..., tokenizer=...), or pass "
                "stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]"
            )
        if model is not self.model:
            raise ValueError(
                "custom_generate was called for another model than the one this SpeculativeGenerator was made "
                "for: make a SpeculativeGenerator for that model"
            )
        caller = generate_frame()
        given: dict[str, Any] = {name: caller.get(name) for name in NOT_HANDED_OVER}
        with self._history.counted() as report:
            return self._decode(report, model, input_ids, inputs_tensor=inputs_tensor, **given, **kwargs)

    @contextmanager
    def installed(self) -> Iterator[SpeculativeGenerator]:
        """Replace `model.generate` by `self.generate` within this context, for third-party code such as pipelines.

        An `assistant_model` or prompt lookup requested by that code is used as in `generate()`. Contexts of several
        generators or threads may overlap: the one entered last is used, in every thread.

        Yields:
            This generator.

        Example:
            ```python
            with spec.installed():
                pipeline("text-generation", model=spec.model, tokenizer=tokenizer)("Once upon a time")
            ```
        """
        remove = install(self._generate_owner, self.generate)
        try:
            yield self
        finally:
            remove()

    @contextmanager
    def exact(self) -> Iterator[SpeculativeGenerator]:
        """Let the model compute each token with the same arithmetic within this context, however many a pass has.

        Within it `model.generate()` and this generator write the same text in half precision, as with `exact=True`,
        which calls of this generator then need not name. The model's own texts may differ from those outside of the
        context. On a GPU exact calls compute like this everywhere, so it is this text that they write. On a CPU they
        cost less within the context. Contexts of several generators or threads may overlap.

        Yields:
            This generator.

        Raises:
            ValueError: the generator's rule is not "coupled".

        Example:
            ```python
            with spec.exact():
                plain = model.generate(**inputs, max_new_tokens=64)
                assert torch.equal(spec.generate(**inputs, max_new_tokens=64), plain)
            ```
        """
        self.options(exact=True)  # checks the rule
        with row_kernels(self.model):
            yield self

    def watch(self) -> AbstractContextManager[list[RoundTrace]]:
        """Record the rounds of all calls that begin within this context, in any thread.

        Contexts may nest or overlap: each list gets all rounds. A trace takes about a kilobyte per drafted token. The
        time to record it counts as "other" in the report.

        Yields:
            A list, to which one `RoundTrace` per round and active row is appended.

        Example:
            ```python
            with spec.watch() as rounds:
                spec.generate(**inputs, max_new_tokens=64)
            print(rounds[0].text(tokenizer))
            ```
        """
        return self._history.traced()

    def release_memory(self) -> None:
        """Free the CUDA graphs and key-value buffers that are kept between calls, and torch's unused memory.

        They are kept for later calls of the same kind, as long as a tenth of the device's memory is free.

        Example:
            ```python
            spec.release_memory()  # before another model is loaded
            ```
        """
        self._sessions.release_memory()
        if device_of(self.model).type == "cuda":
            torch.cuda.empty_cache()

    # Decoding of a call that transformers has prepared

    def _decode(
        self,
        report: Report,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        tokenizers: tuple[Any, Any] = (None, None),
        **prepared: Any,
    ):
        report.num_rows, history = len(input_ids), self._history
        call = Call.of(model, input_ids, **prepared)
        stopwatch = Stopwatch(report, device_of(model))
        step = in_step(is_synced(model, synced_gpus), device_of(model))
        able = self.capability
        reason = why_plain(model, able, call, uses_target_choices(self.rule, call.samples))
        found = None
        if reason is None and (self._exact or (has_row_kernels(self.model) and self.rule == COUPLED)):
            found, reason = exactness_of(self.model, able, call)
        if step is not None and step.anywhere(reason is not None) and reason is None:
            reason = (
                "another process runs its call as plain decoding, and forward passes are synchronised (synced_gpus)"
            )
        if reason:
            self._fall_back(reason, report)
            output = plain(model, call, step is not None)
            sequences = output if isinstance(output, Tensor) else output.sequences
            report.num_output_tokens = count_tokens(sequences, call)
        else:
            for name in ignored_fields(call.config):
                history.warn(f"{name} is a setting of transformers' own assisted generation and is ignored")
            drafting = self._sessions.for_call(call.config, assistant_model, tokenizers, history.warn)
            speculation = Speculation(
                self.model,
                able,
                drafting,
                call,
                self.rule,
                self.draft_length,
                stopwatch,
                history,
                step,
                self.compile,
                found,
            )
            output = speculation.run()
            report.num_exact_calls += found is not None
            self._warn_if_idle(report, drafting, speculation.kind)
        report.total_seconds = stopwatch.elapsed()
        return output

    def _fall_back(self, reason: str, report: Report) -> None:
        """Count and warn of a call that runs as plain decoding, or raise `Unsupported`."""
        if self.on_unsupported == "error":
            raise Unsupported(f'cannot speculate: {reason}. Pass on_unsupported="plain" to run it as plain generate().')
        report.record_plain(reason)
        self._history.warn(f"running as plain generate(): {reason}")

    def _warn_if_idle(self, report: Report, drafting: DraftSession, kind: CallKind) -> None:
        """Warn, once per generator, if next to nothing was drafted or accepted over its calls."""
        with self._history.lock:
            if self.draft_length != 0:
                drafting.tally.add(report, drafting.proposer)
            idle = drafting.tally.idle(self.draft_length)
        if idle and not self._history.warned_of(IdleDraftWarning.__name__):
            size = relative_size(drafting.proposer, self.model)
            message = drafting.tally.warning(drafting.estimates[kind], size)
            self._history.warn(message, IdleDraftWarning)
