"""`Speculation`: one `generate()` call decoded speculatively, from its prepared arguments to its output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateOutput

from specdec.engine.cuda_graph_round import CapturedRound
from specdec.engine.draft_session import DraftSession
from specdec.engine.hf.call import Call, prefill, returned, transcript
from specdec.engine.hf.multimodal import multimodal_prefill, shown
from specdec.engine.hf.prompt_layout import prompt_layout
from specdec.engine.lenient import Lenient
from specdec.engine.loop import Loop
from specdec.engine.rules import uses_target_choices, verification
from specdec.engine.stopwatch import Stopwatch
from specdec.engine.tensor_parallel import group_of
from specdec.engine.trace import RoundTrace
from specdec.engine.transcript import Transcript
from specdec.models.capability import Capability
from specdec.models.cuda_graphs import Recorder
from specdec.models.introspection import device_of
from specdec.models.lockstep import Step
from specdec.models.output import Output
from specdec.models.runner import ModelRunner
from specdec.models.static_forward import StaticForward, cannot_capture
from specdec.sampling.logits_processors import NodeProcessors
from specdec.sampling.noise import Noise, noise_of_call
from specdec.utils.choices import RuleName


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
        traces: lists to which every round is appended.
        step: keeps passes in step with other processes; None for a single process.
        compile: as for `SpeculativeGenerator`.
        warn: called with a message for the user.
    """

    model: PreTrainedModel
    able: Capability
    drafting: DraftSession
    call: Call
    rule: RuleName | Lenient
    draft_length: int | None
    stopwatch: Stopwatch
    traces: Sequence[list[RoundTrace]]
    step: Step | None
    compile: bool | Literal["auto"]
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self._group, self._device = group_of(self.model), self.call.input_ids.device

    @torch.no_grad()
    def run(self) -> Tensor | GenerateOutput:
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
        layout = prompt_layout(self.model, call.input_ids, call.config, call.text_kwargs)
        text = transcript(call, layout, self.model, self.able.positions)
        media = shown(call.text_kwargs)
        captured = None if media or self.step is not None or self._group is not None else self._captured_passes()
        target = ModelRunner(
            self.model,
            self.able.masks,
            self.drafting.taps,
            self.step,
            captured,
            call.encoder_outputs,
            pads=layout.pads,
        )
        fresh, multimodal = layout.fresh, None
        if media:
            layout, multimodal = multimodal_prefill(target, call.input_ids, layout, call.text_kwargs)
        with layout.in_rows(target) as columns:
            read = multimodal or prefill(target, call, layout, text)
            self._decode(target, text, read, fresh)
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
        """True on devices where launches are worth capturing."""
        return device_of(self.model).type == "cuda"

    def _captured_passes(self) -> StaticForward | None:
        """The captured target passes; None if they are not wanted or cannot be captured."""
        if not self.compile or (self.compile == "auto" and not self._launches):
            return None
        reason = cannot_capture(self.model) if self.able.trees else "it builds its own attention masks"
        if reason is not None:
            if self.compile is True:  # "auto" is silent
                self.warn(f"{type(self.model).__name__} runs without graphs: {reason}")
            return None
        captured = self.drafting.capture(compiled=self.compile is True)
        return None if captured.refused else captured

    def _noise(self, vocab_size: int) -> AbstractContextManager[Noise | None]:
        """The noise that verification and drafts share; None at T = 0 and for rejection rules."""
        if not self.call.samples or not uses_target_choices(self.rule, sampling=True):
            return nullcontext()
        return noise_of_call(len(self.call.input_ids), vocab_size, self._device)

    def _decode(self, target: ModelRunner, text: Transcript, read: Output, fresh: Sequence[int]) -> None:
        with self._noise(read.logits.shape[-1]) as noise:
            loop = self._loop(target, text, noise)
            try:
                loop.run(read, fresh)
            finally:
                self.stopwatch.report.num_output_tokens = text.num_output_tokens
                if noise is not None:  # also after an error of a streamer or a criterion
                    noise.settle(text.settled - text.start)
        if self._group is None or self._group.leads:
            self.drafting.keep(text.batch_size, loop.pacer)

    def _loop(self, target: ModelRunner, text: Transcript, noise: Noise | None) -> Loop:
        processors, sampling = NodeProcessors(self.call.processors), self.call.samples
        proposer = copy.copy(self.drafting.proposer)  # attributes that a call sets are its own
        verify = verification(self.rule, processors, noise, sampling, self._device)
        captured = target.static_forward is not None and self._launches
        recorder = Recorder(self.drafting.recorded) if captured else None
        return Loop(
            target=target,
            proposer=proposer if self._group is None else self._group.drafting(proposer),
            verify=verify,
            processors=processors.without_unknown(),
            noise=noise,
            text=text,
            pacer=self.drafting.pacer(text.batch_size, sampling, self.draft_length),
            stopwatch=self.stopwatch,
            sampling=sampling,
            trees=self.able.trees,
            traces=self.traces,
            recorder=recorder,
            captured_round=CapturedRound.of(target, verify, recorder),
        )
