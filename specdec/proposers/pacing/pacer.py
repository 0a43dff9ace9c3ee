"""`Pacer`: decides how far to draft next, from measured costs and acceptance rates (`Estimates`).

Proposers label each token with a *confidence bin* (how sure the draft was), and the pacer estimates whether the token
is worth its cost. Estimates use past rounds only. Bins depend on the draft's distribution, never on the token sampled
from it. Pacing therefore cannot bias the output.

Sensitivity of the speed-up to each constant here and in `estimates`: benchmarks/results/pacing-constants.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdec.proposers.pacing.estimates import Acceptance, Estimates, PassCost

FEW_TOKENS = 16  # a draft pass over up to this many tokens takes about as long as one over a single token
CALL_SHARE, CALL_LENGTH = 0.02, 64  # share of a call's passes for exploration; passes assumed for every call
LARGEST_BATCH = 1 << 20
LONGEST = 24  # most tokens drafted per row when the length is automatic


@dataclass
class DraftPasses:
    """Forward passes of a draft model in one call.

    Attributes:
        count: number of passes.
        seconds: seconds that they took.
        reading: the part of these seconds spent on passes over long texts.
        launched: passes enqueued in this round whose duration is not yet known.
        long: tokens of the pass among these that reads a long text.
    """

    count: int = 0
    seconds: float = 0.0
    reading: float = 0.0
    launched: int = 0
    long: int = 0


class Pacer:
    """Decides in one call how far to draft, by comparing expected accepted tokens with their cost.

    Throughput is highest where the last drafted token costs as many seconds as a token costs on average. An additional
    token is therefore worth `chance * seconds_per_token`. Drafts that are not expected to pay are explored as far as
    `Budget` allows, because texts change and costs are only known from passes.

    Args:
        length: None to decide automatically, or an int to draft exactly that many tokens (0: plain decoding).
        estimates: the estimates shared with other calls of this kind. New ones by default.

    Attributes:
        passes: the passes of a draft model in this call.
        drafting: the seconds of the last round's draft.
    """

    def __init__(self, length: int | None = None, estimates: Estimates | None = None):
        self.length = length
        self.estimates = Estimates() if estimates is None else estimates
        self.passes = DraftPasses()
        self.drafting = 0.0
        self._read = 0.0  # seconds of `passes.reading` in recorded rounds
        self._ran = 0  # number of `passes` in recorded rounds
        self._rows = LARGEST_BATCH  # unfinished rows in the last round
        self._took = self._behind = 0.0  # duration of the call and its loss by drafting, in target passes
        self._exploring = False  # this round's draft is for exploration

    def apart(self, estimates: Estimates) -> Pacer:
        """A pacer for a proposer that drafts in some of the call's rounds. estimates: from `Estimates.apart`."""
        other = Pacer(self.length, estimates)
        other.passes = self.passes
        return other

    @property
    def verify(self) -> PassCost:
        return self.estimates.verify

    @property
    def acceptance(self) -> Acceptance:
        return self.estimates.acceptance

    @property
    def expected_rate(self) -> float:
        return self.estimates.expected_rate

    @property
    def limit(self) -> int:
        """The largest number of tokens to draft per row."""
        return LONGEST if self.length is None else self.length

    def best_length(self, gains: Sequence[float], rows: int) -> int:
        """The number of nodes per row to verify when drafting is free or already done.

        Args:
            gains: for each node of a row, the expected number of accepted ones over all rows, in falling order.
            rows: the number of rows in the target pass.
        """
        if self.length is not None:
            return min(self.length, len(gains))
        if not gains or not self.verify.known:
            return 0
        price, plain = self._price(rows), self.verify.plain
        sums = accumulate(gain * price for gain in gains[: self.verify.explored - 1])
        profits = [won - self.verify(2 + i) + plain for i, won in enumerate(sums)]
        best = max(range(len(profits)), key=profits.__getitem__)
        if profits[best] > 0:
            return best + 1
        worth_exploring = self._exploring or not self.verify.familiar(2 + best)
        return best + 1 if worth_exploring and self._affords(-profits[best]) else 0

    def worth(self, chances: Sequence[float], drafted: int, draft_steps: int = 0) -> bool:
        """Return whether one more token for each row is worth its cost.

        Args:
            chances: for each row of the pass, the probability that this token and all before it are accepted.
            drafted: the tokens that each row already has in this draft.
            draft_steps: the draft passes that the token still needs.
        """
        if self.length is not None:
            return drafted < self.length
        if not drafted and (self._exploring or self._tests()):  # a trial drafts one token
            return True
        return drafted < LONGEST and self._outlook(sum(chances), len(chances), drafted, draft_steps) > 0

    def may_start(self, chances: Sequence[float], draft_steps: int, backlog: int = 0, tokens_left: int = 0) -> bool:
        """Return whether to start a draft, because it is expected to pay or for exploration.

        Args:
            chances: for each row of the pass, the probability that the first token is accepted.
            draft_steps: the draft passes that the first token needs.
            backlog: tokens over all rows that the draft has to read first, for example a prompt.
            tokens_left: tokens that a row may still get. The backlog is spread over half as many rounds, since rows
                end early and rounds bring more than one token.
        """
        self._exploring = False
        if self.length is not None or not self.verify.known:
            return (self.length or 0) > 0
        reading = backlog * self.seconds_to_read
        outlook = self._outlook(sum(chances), len(chances), 0, draft_steps)
        if outlook * max(1, tokens_left / 2) > reading and not self._overdrawn:
            return True
        leaving_plain = self.verify(2) - self.verify.plain
        self._exploring = self._affords(reading + draft_steps * self.estimates.draft_step + leaving_plain)
        return self._exploring

    @property
    def seconds_to_read(self) -> float:
        """Seconds of the draft per token of a long text: as measured, but not more than expected from the target.

        The draft is expected to read as much faster than the target as it decodes, or half as much, since its decoding
        may be quantized.
        """
        likely = self.verify.reading * min(1.0, 2 * self.estimates.draft_step / self.verify.plain)
        reading = self.estimates.draft.reading
        return min(reading, likely) if reading else likely

    def promise(self) -> float:
        """Expected tokens per row and second of a draft of the best length."""
        verify, drafting, best, new_tokens, chance = (
            self.verify,
            self.estimates.draft_step,
            1 / self.verify.plain,
            1.0,
            1.0,
        )
        for length in range(1, 1 + LONGEST):
            chance *= self.expected_rate
            new_tokens += chance
            best = max(best, new_tokens / (verify(1 + length) + drafting))
            drafting += self.estimates.further_token
        return best

    def _price(self, rows: int) -> float:
        """Seconds per token in recent rounds, at most those of plain decoding."""
        plain = self.verify.plain / min(rows, self._rows)
        pace = self.estimates.seconds_per_token
        return plain if pace is None else min(pace, plain)

    @property
    def _overdrawn(self) -> bool:
        """True if drafts that were expected to pay are slower than plain decoding."""
        pace, plain = self.estimates.seconds_per_token, self.verify.plain / min(self._rows, LARGEST_BATCH)
        return self.estimates.budget.overdrawn and (pace is None or pace > plain)

    def _affords(self, seconds: float) -> bool:
        """Return whether the exploration budget, and the share of it for one call, allow a loss of so many seconds."""
        passes = seconds / self.verify.plain
        return passes <= min(self.estimates.budget.left, CALL_SHARE * (CALL_LENGTH + self._took) - self._behind)

    def _tests(self) -> bool:
        """Return whether to verify a first token to test the draft's confidence, which has not been tested yet."""
        return not self.acceptance.tested and self._affords(self.verify(2) - self.verify.plain)

    def _outlook(self, gain: float, rows: int, drafted: int, draft_steps: int) -> float:
        """Seconds that further drafting saves at best, if tokens after the next are accepted as expected."""
        verify, price, rate, further = self.verify, self._price(rows), self.expected_rate, self.estimates.further_token
        step = further if drafted else self.estimates.draft_step
        best, won, cost = float("-inf"), 0.0, draft_steps * step - verify(1 + drafted)
        for size in range(2 + drafted, 1 + min(1 + LONGEST, verify.explored)):
            won += gain * price
            best = max(best, won - cost - verify(size))
            gain *= rate
            cost += further
        return best

    def observe_expectation(self, rate: float) -> None:
        """Record the expected acceptance rate of a token just evaluated, drafted or not."""
        self.estimates.observe_expectation(rate)

    def observe_draft_pass(self, seconds: float, tokens: int = 1, building: float = 0.0) -> None:
        """Record a draft pass over so many tokens. building: seconds to turn its logits into nodes."""
        self.passes.count += 1
        self.passes.seconds += seconds
        if tokens <= FEW_TOKENS:
            self.estimates.draft.observe(seconds + building)
        else:
            self.passes.reading += seconds
            self.estimates.draft.reading = seconds / tokens

    def observe_read_out(self, seconds: float) -> None:
        """Record the seconds to read one more token out of a pass that drafts several."""
        self.estimates.draft.observe_read_out(seconds)

    def launched_draft_pass(self, tokens: int = 1) -> None:
        """Record a draft pass enqueued on a device. Its duration follows with `observe_drafting`."""
        self.passes.count += 1
        self.passes.launched += 1
        if tokens > FEW_TOKENS:
            self.passes.long = tokens

    def observe_drafting(self, seconds: float) -> None:
        """Record the seconds of this round's draft, which its launched passes share."""
        passes, self.drafting = self.passes, seconds
        if passes.launched:
            self._share(seconds, passes.launched, passes.long)
        passes.launched = passes.long = 0

    def _share(self, seconds: float, launched: int, long: int) -> None:
        steps = launched - (long > 0)
        stepping = min(seconds, steps * self.estimates.draft_step) if long else seconds
        self.passes.seconds += seconds
        for _ in range(steps):
            self.estimates.draft.observe(stepping / steps)
        if long:
            self.passes.reading += seconds - stepping
            self.estimates.draft.reading = (seconds - stepping) / long

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record the target's prefill. tokens: of all rows, including padding."""
        self.verify.reading = seconds / tokens
        if self.verify.known:
            self._took = seconds / self.verify.plain

    def observe_round(self, size: int, rows: int, drafting: float, seconds: float, new_tokens: int) -> None:
        """Record a round.

        Args:
            size: nodes per row in the target pass, including the root.
            rows: the number of unfinished rows.
            drafting: seconds of the draft.
            seconds: seconds of the round up to its result on the host, including the draft.
            new_tokens: new tokens over all rows.
        """
        self._rows = rows
        self.verify.observe(size, seconds - drafting)
        passing = min(seconds - drafting, PassCost.OUTLIER * self.verify(size))
        read, self._read = self.passes.reading - self._read, self.passes.reading
        ran, self._ran = self.passes.count - self._ran, self.passes.count
        self.estimates.observe_pace(passing + max(0.0, drafting - read), new_tokens)
        if self.verify.known:
            plain = self.verify.plain
            took = (passing + drafting) / plain
            behind = took - new_tokens / rows if size > 1 or ran else 0.0  # a lookup without a draft loses nothing
            self._took, self._behind = self._took + took, max(0.0, self._behind + behind)
            self.estimates.budget.observe(took, -behind)

    def observe_confidence(self, confidence_bins: Sequence[Hashable], accepted: int) -> None:
        """Record the confidence bins of a row's drafted tokens in order; the first `accepted` ones were accepted."""
        for i, key in enumerate(confidence_bins[: accepted + 1]):
            self.acceptance.observe(key, i < accepted)
