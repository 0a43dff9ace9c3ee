"""`Speculation`: one `generate()` call decoded speculatively, from its prepared arguments to its output."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateOutput

from specdec.engine.call_history import CallHistory
from specdec.engine.cuda_graph_round import CapturedRound
from specdec.engine.draft_session import CallKind, DraftSession
from specdec.engine.hf.call import Call, prefill, returned, transcript
from specdec.engine.hf.grammars import is_grammar, with_grammar_rows
from specdec.engine.hf.multimodal import multimodal_prefill, shown
from specdec.engine.hf.prompt_layout import PromptLayout, prompt_layout
from specdec.engine.lenient import Lenient
from specdec.engine.loop import Loop
from specdec.engine.rules import uses_target_choices, verification
from specdec.engine.stopwatch import Stopwatch
from specdec.engine.tensor_parallel import group_of
from specdec.engine.transcript import Transcript
from specdec.models.capability import Capability
from specdec.models.compat import prepare_to_capture
from specdec.models.cuda_graphs import Recorder
from specdec.models.exact.exactness import Exactness
from specdec.models.exact.row_kernels import has_row_kernels
from specdec.models.fingerprint import fingerprint, settings
from specdec.models.introspection import device_of
from specdec.models.lockstep import Step
from specdec.models.output import Output
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import StaticForward, cannot_capture
from specdec.proposers.draft_state import DraftState
from specdec.proposers.pacing.pacer import Pacer
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise, noise_of_call
from specdec.utils.choices import COUPLED, RuleName
from specdec.utils.device_copies import as_current


@dataclass
class Speculation:
    """A call that can be speculated on.

    Args:
        model: the target.
        able: its capability.
        drafting: the proposer, prepared for it.
        call: the call.
        rule: as for `SpeculativeGenerator`.
        draft_length: likewise.
        stopwatch: measures the call for its report.
        history: the generator's; has the lists to which every round is appended, and warns the user.
        step: keeps passes in step with other processes; None for a single process.
        compile: as for `SpeculativeGenerator`.
        exact: how the target gives each draft node the bits of plain decoding; None: the fastest passes.
    """

    model: PreTrainedModel
    able: Capability
    drafting: DraftSession
    call: Call
    rule: RuleName | Lenient
    draft_length: int | None
    stopwatch: Stopwatch
    history: CallHistory
    step: Step | None
    compile: bool | Literal["auto"]
    exact: Exactness | None = None

    def __post_init__(self) -> None:
        self._group, self._device = group_of(self.model), self.call.input_ids.device
        self._traces, self._row_kernels = self.history.traces, has_row_kernels(self.model)
        self.kind = self._call_kind()

    def _call_kind(self) -> CallKind:
        """The kind of the call, which shares estimates with others of its kind."""
        samples = self.call.samples
        rule = self.rule if samples or isinstance(self.rule, Lenient) else COUPLED  # others are the same at T = 0
        grammar = any(map(is_grammar, self.call.processors))
        exact = self.exact is not None
        return CallKind(len(self.call.input_ids), samples, exact, rule, grammar, self._row_kernels)

    def run(self) -> Tensor | GenerateOutput:
        """Decode the call on the target's device, see `_run`."""
        with torch.no_grad(), as_current(device_of(self.model)):
            return self._run()

    def _run(self) -> Tensor | GenerateOutput:
        """Set up the call in the order below, decode it, and return what transformers would.

        1. Processes that share the model agree on stopping criteria and random numbers.
        2. The layout of the prompts says which tokens the caller's cache holds. The transcript begins with them.
        3. The runner of the target is made. Images, videos and audio are read, which ends the prompts that have any.
        4. The rows get the caller's cache, and the rest of the prompts is read. Its logits give the vocabulary's size,
        5. and with it the noise that the call samples with.
        6. The loop decodes.
        7. Costs are stored, processes that ran fewer passes catch up, and the caller's cache gets the rows back.
        """
        call = self._agreed()
        if call.config.output_hidden_states:
            prepare_to_capture(self.model)
        layout = prompt_layout(self.model, call.input_ids, call.config, call.text_kwargs)
        text = transcript(call, layout, self.model, self.able.positions)
        media = shown(call.text_kwargs)
        eager = media or self.step is not None or self._group is not None or self.exact is not None
        captured = None if eager else self._captured_passes()
        target = ModelRunner(
            self.model,
            self.able.masks,
            self.drafting.taps,
            self.step,
            captured,
            call.encoder_outputs,
            pads=layout.pads,
            exact=None if self.exact is None else self.exact.alone,
        )
        recorder, kind = self._recorder(target, layout)
        fresh, multimodal = layout.fresh, None
        if media:
            layout, multimodal = multimodal_prefill(target, call.input_ids, layout, call.text_kwargs)
        with self._kept(recorder, kind), layout.in_rows(target) as columns:
            if recorder is not None:
                recorder.lend("target", target.cache)
            read = multimodal or prefill(target, call, layout, text)
            memory = None if media or call.encoder_outputs is not None else self.drafting.memory
            earlier = None if memory is None else memory.recall(layout, call.input_ids)
            state, texts = self._decode(target, text, read, fresh, recorder, earlier, layout.cache is not None)
            if memory is not None:
                memory.keep(layout, state, texts)
            if self.step is not None:
                self.step.wait(target.idle)
            columns.append(layout.real.shape[1] + text.settled - text.start - 1)  # the last token is not in the cache
        return returned(text, layout, call.encoder_outputs) if call.config.return_dict_in_generate else text.sequences

    def _agreed(self) -> Call:
        """The call with rank 0's stopping criteria and random state, under tensor parallelism."""
        if self._group is None:
            return self.call
        if self.call.samples:
            self._group.share_random_numbers(self._device)
        return replace(self.call, criteria=self._group.stopping(self.call.criteria))

    @property
    def _launches(self) -> bool:
        """True on devices where launches are worth capturing, if the texts are there, too."""
        return device_of(self.model).type == "cuda" and self._device == device_of(self.model)

    def _captured_passes(self) -> StaticForward | None:
        """The captured target passes; None if they are not wanted or cannot be captured."""
        if not self.compile or (self.compile == "auto" and not self._launches):
            return None
        reason = cannot_capture(self.model) if self.able.trees else "it builds its own attention masks"
        if reason is not None:
            if self.compile is True:  # "auto" is silent
                self.history.warn(f"{type(self.model).__name__} runs without graphs: {reason}")
            return None
        captured = self.drafting.capture(compiled=self.compile is True)
        return None if captured.refused else captured

    def _recorder(self, target: ModelRunner, layout: PromptLayout) -> tuple[Recorder | None, Hashable | None]:
        """The call's recorder, if its passes are captured, and the kind of call that may use it later; None: no other.

        It is one that an earlier call of this kind has left. A call that gets or returns a cache moves the buffers with
        which passes are captured.
        """
        if target.static_forward is None or not self._launches:
            return None, None
        kind = None if layout.cache is not None else self._kind()
        kept = None if kind is None else self.drafting.graphs.take(kind)
        return Recorder(self.drafting.recorded, self._state()) if kept is None else kept, kind

    def _state(self) -> Hashable:
        """Describe the models and the modes in which their passes run."""
        draft = self.drafting.proposer.drafting_model()
        models = [self.model] if draft is None else [self.model, draft]
        return (*_modes(), *(fingerprint(model, hooks=True) for model in models))

    def _kind(self) -> Hashable | None:
        """Describe what captured functions read in Python; None if that is not known."""
        proposer, draft = self.drafting.proposer, self.drafting.proposer.drafting_model()
        read = [fingerprint(self.model), settings(proposer), *map(settings, self.call.processors)]
        if draft is not None:
            read.append(fingerprint(draft))
        if None in read:
            return None
        stream = torch.cuda.current_stream(self._device)  # on another one the last call's work may still run
        call = len(self.call.input_ids), self._device, self.call.samples, repr(self.rule), repr(self.able), self.compile
        return (*call, *_modes(), stream, *read)

    @contextmanager
    def _kept(self, recorder: Recorder | None, kind: Hashable | None) -> Iterator[None]:
        """Keep the recorder for later calls if this one ends well, else free it."""
        before = 0 if recorder is None else recorder.captures
        try:
            yield
        except BaseException as error:
            if recorder is not None:
                recorder.clear()
            if isinstance(error, torch.OutOfMemoryError):
                self.drafting.graphs.clear()
            raise
        if recorder is not None:
            # A streamer or another thread may have changed what the functions captured in this call have read.
            known = recorder.captures == before or kind is None or kind == self._kind()
            self.drafting.graphs.put(kind if known else None, recorder, self._device)

    def _noise(self, vocab_size: int) -> AbstractContextManager[Noise | None]:
        """The noise that verification and drafts share; None at T = 0 and for rejection rules."""
        if not self.call.samples or not uses_target_choices(self.rule, sampling=True):
            return nullcontext()
        return noise_of_call(len(self.call.input_ids), vocab_size, self._device)

    def _decode(
        self,
        target: ModelRunner,
        text: Transcript,
        read: Output,
        fresh: Sequence[int],
        recorder: Recorder | None,
        earlier: DraftState | None,
        keeps: bool,
    ) -> tuple[DraftState | None, list[Tensor]]:
        """Run the loop, arguments as for `Loop.run`; if the caller `keeps` the cache, return what was drafted from.

        This is the proposer's state, and the text of each row.
        """
        with self._noise(read.logits.shape[-1]) as noise:
            loop = self._loop(target, text, noise, recorder)
            try:
                final = loop.run(read, fresh, earlier)
            finally:
                self._count(text, loop.pacer)
                if noise is not None:  # also after an error of a streamer or a criterion
                    noise.settle(text.settled - text.start)
        if self._group is None or self._group.leads:
            self.drafting.keep(self.kind, loop.pacer)
        if not keeps:
            return None, []
        try:
            state = loop.proposer.draft_state(final)
        except torch.OutOfMemoryError:  # the call's output is worth more
            state = None
        return state, [final.row(b) for b in range(final.batch_size)]

    def _count(self, text: Transcript, pacer: Pacer) -> None:
        """Report the tokens, and the seconds of plain decoding where its passes were measured."""
        report = self.stopwatch.report
        report.num_output_tokens = text.num_output_tokens
        passes = text.settled - text.start - 1  # of plain decoding, after the prefill
        if passes > 0 and pacer.verify.compared:
            report.estimate_plain(passes * pacer.plain_seconds)

    def _loop(self, target: ModelRunner, text: Transcript, noise: Noise | None, recorder: Recorder | None) -> Loop:
        processors = NodeProcessors(with_grammar_rows(self.call.processors, text.batch_size, text.start))
        sampling = self.call.samples
        proposer = self.drafting.proposer_of(self.kind)
        verify = verification(self.rule, processors, noise, sampling, self._device)
        return Loop(
            target=target,
            proposer=proposer if self._group is None else self._group.drafting(proposer),
            verify=verify,
            processors=processors.for_drafts(captured=recorder is not None),
            noise=noise,
            text=text,
            pacer=self.drafting.pacer(self.kind, self.draft_length),
            stopwatch=self.stopwatch,
            sampling=sampling,
            trees=self.able.trees,
            traces=self._traces,
            recorder=recorder,
            captured_round=CapturedRound.of(target, verify, recorder),
            grammar=next(iter(processors.grammars), None),
        )


def _modes() -> tuple[bool, bool, torch.dtype]:
    return torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
