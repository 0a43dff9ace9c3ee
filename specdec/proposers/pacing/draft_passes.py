"""`DraftPasses`: count and duration of the forward passes of a draft model in one call."""

from __future__ import annotations

from dataclasses import dataclass, field

FEW_TOKENS = 16  # a draft pass over up to this many tokens takes about as long as one over a single token


@dataclass
class DraftPasses:
    """Forward passes of a draft model in one call.

    The seconds of a round are kept until the target's pass shows how fast the machine is at that time.

    Attributes:
        count: number of passes.
        seconds: seconds that they took.
        steps: seconds of each pass over few tokens in this round.
        read_outs: seconds of each further token in this round that was read out of a pass.
        texts: seconds and tokens of each pass over a long text in this round.
        launched: passes enqueued in this round whose duration is not yet known.
        long: tokens of the pass among these that reads a long text.
    """

    count: int = 0
    seconds: float = 0.0
    steps: list[float] = field(default_factory=list)
    read_outs: list[float] = field(default_factory=list)
    texts: list[tuple[float, int]] = field(default_factory=list)
    launched: int = 0
    long: int = 0

    def observe(self, seconds: float, tokens: int, building: float) -> None:
        """Record a pass over so many tokens. building: seconds to turn its logits into nodes."""
        self.count += 1
        self.seconds += seconds
        if tokens <= FEW_TOKENS:
            self.steps.append(seconds + building)
        else:
            self.texts.append((seconds, tokens))

    def launch(self, tokens: int) -> None:
        """Record a pass that was enqueued on a device."""
        self.count += 1
        self.launched += 1
        if tokens > FEW_TOKENS:
            self.long = tokens

    def share(self, seconds: float, step: float) -> None:
        """Share the seconds of a draft among the passes that it launched. step: expected seconds of a short one."""
        steps = self.launched - (self.long > 0)
        if self.launched:
            self.seconds += seconds
            stepping = min(seconds, steps * step) if self.long else seconds
            self.steps += [stepping / steps] * steps if steps else []
            if self.long:
                self.texts.append((seconds - stepping, self.long))
        self.launched = self.long = 0

    def end_round(self) -> None:
        """Forget the seconds of this round's passes."""
        self.steps, self.read_outs, self.texts = [], [], []
