"""`Pacer`: how far to draft next, from what drafting and verifying cost here and how much gets accepted.

Owns the costs and the acceptance estimates (`Learnt`, which calls and threads share) and the decisions of one call
(`Pacer`). Knows nothing of proposers: they label their tokens with a *key* (how sure they were) and ask whether a token
is worth its cost. Estimates use past rounds only, and keys depend on the draft's distribution, never on the token
sampled from it, so pacing cannot bias the output.

Threads share estimates without locks: each estimate is one value that is replaced whole. Of two updates at once one
may be lost; none is ever seen half made.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

FIRST_LENGTH = 4  # drafted per row until a round has been measured
TRIAL_LENGTH = 2  # drafted to see whether it pays again: enough to time a draft pass
FEW_TOKENS = 16  # a draft's pass over so many takes about as long as one over a single token
STEPS = 15  # recent draft passes that are remembered
LONGEST = 24  # drafted per row at most, when the length is automatic


class PassCost:
    """Seconds of a target pass: one figure without a draft, a line in its number of tokens with one.

    They are kept apart because they may be far apart: on CPUs in float32 a pass over two tokens per row takes another
    kernel than one over a single token, and twice the time (in bfloat16 the same time). Fitted with forgetting; the
    prior slope, 2% of a pass per token, is what 2 CPU cores show in bfloat16 at 8 to 16 tokens.
    """

    PRIOR_SLOPE, PRIOR_WEIGHT, FORGET = 0.02, 20.0, 0.98
    OUTLIER = 1.5  # times the expected seconds; what takes longer was another program's doing

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of passes with a draft: their weight, n, t, n n, n t
        self._plain = (0.0, 0.0)  # of passes without: their weight, t
        self.reading = 0.0  # seconds per token of a long text

    def observe(self, tokens: int, seconds: float) -> None:
        """Book a pass that verified a draft."""
        if self.drafted:
            seconds = min(seconds, self.OUTLIER * self(tokens))
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        w, n, t, nn, nt = (self.FORGET * old + one for old, one in zip(self._sums, new, strict=True))
        self._sums = (w, n, t, nn, nt)

    def observe_plain(self, seconds: float) -> None:
        """Book a pass without a draft."""
        weight, total = self._plain
        if weight:
            seconds = min(seconds, self.OUTLIER * total / weight)
        self._plain = (self.FORGET * weight + 1, self.FORGET * total + seconds)

    @property
    def drafted(self) -> bool:
        """Has a pass with a draft been seen?"""
        return self._sums[0] > 0

    @property
    def undrafted(self) -> bool:
        """Has a pass without a draft been seen?"""
        return self._plain[0] > 0

    @property
    def known(self) -> bool:
        """Has a pass of each kind been seen?"""
        return self.drafted and self.undrafted

    @property
    def plain(self) -> float:
        """Seconds of a pass without a draft."""
        weight, total = self._plain
        return total / weight

    @property
    def per_token(self) -> float:
        """Seconds one more token adds to a pass with a draft."""
        return self._line()[2]

    def __call__(self, tokens: float) -> float:
        """Seconds of a pass over `tokens` tokens, drafted ones among them."""
        mean_n, mean_t, slope = self._line()
        return max(mean_t + slope * (tokens - mean_n), 0.25 * mean_t)

    def _line(self) -> tuple[float, float, float]:
        """Mean tokens, mean seconds and the slope."""
        w, n, t, nn, nt = self._sums
        mean_n, mean_t = n / w, t / w
        prior = self.PRIOR_SLOPE * mean_t
        slope = (nt - t * mean_n + self.PRIOR_WEIGHT * prior) / (nn - n * mean_n + self.PRIOR_WEIGHT)
        return mean_n, mean_t, max(slope, 0.1 * prior)


@dataclass
class DraftPasses:
    """Forward passes of a draft model, and the seconds they took, in one call."""

    count: int = 0
    seconds: float = 0.0


class Acceptance:
    """Conditional acceptance rate per key: of the tokens with this key whose predecessors were all accepted."""

    STEP = 0.05  # weight of a new observation in the long run

    def __init__(self) -> None:
        self._rates: dict[Hashable, tuple[float, int]] = {}

    def observe(self, key: Hashable, accepted: bool, prior: float = 0.6) -> None:
        rate, count = self._rates.get(key, (prior, 1))
        step = max(1 / (count + 1), self.STEP)
        self._rates[key] = (rate + step * (accepted - rate), count + 1)

    def rate(self, key: Hashable, prior: float = 0.6) -> float:
        return self._rates.get(key, (prior, 0))[0]


class Learnt:
    """What calls of one kind, a batch size and sampling or not, learn from each other, also at the same time.

    Attributes:
        verify: costs of target passes. acceptance: per key.
        expected_rate: of a token not yet looked at, moving average.
        draft_steps: seconds of recent draft passes. reading: of the draft, seconds per token of a long text.
        pace: seconds and tokens of recent rounds, moving sums.
    """

    def __init__(self) -> None:
        self.verify = PassCost()
        self.acceptance = Acceptance()
        self.expected_rate = 0.8
        self.draft_steps: tuple[float, ...] = ()
        self.reading = 0.0
        self.pace = (0.0, 0.0)

    def apart(self) -> Learnt:
        """For a proposer that drafts in some of the rounds: the same costs of the target and the same acceptance, but
        a pace of its own."""
        other = Learnt()
        other.verify, other.acceptance = self.verify, self.acceptance
        return other

    def observe_pace(self, seconds: float, gained: int) -> None:
        """Book what a round took and how many tokens it gained over all rows."""
        old_seconds, old_tokens = self.pace
        self.pace = (0.9 * old_seconds + seconds, 0.9 * old_tokens + gained)


class Pacer:
    """Decides, in one call, how far to draft: the chance of more tokens to be accepted against the seconds they cost.

    Throughput is best where the marginal token's seconds equal the seconds a token costs at the present rate, so a
    token is worth `chance * seconds_per_token`.

    Args:
        length: None to decide automatically; an int to draft exactly that many tokens (0: plain decoding).
        learnt: what earlier calls of this kind learnt and later ones will; nothing yet by default.

    Attributes:
        passes: of a draft model, in this call.
    """

    def __init__(self, length: int | None = None, learnt: Learnt | None = None):
        self.length = length
        self.learnt = Learnt() if learnt is None else learnt
        self.passes = DraftPasses()
        self._pause = self._paused = 0  # rounds to sit out, rounds sat out
        self._trying = False  # this round drafts only to measure anew

    def apart(self, learnt: Learnt) -> Pacer:
        """For a proposer that drafts in some of the call's rounds. learnt: its own, `Learnt.apart` of the call's."""
        other = Pacer(self.length, learnt)
        other.passes = self.passes
        return other

    @property
    def verify(self) -> PassCost:
        return self.learnt.verify

    @property
    def acceptance(self) -> Acceptance:
        return self.learnt.acceptance

    @property
    def expected_rate(self) -> float:
        return self.learnt.expected_rate

    @property
    def limit(self) -> int:
        return LONGEST if self.length is None else self.length

    @property
    def measured(self) -> bool:
        return self.verify.known and self.learnt.pace[1] > 0

    @property
    def draft_step(self) -> float:
        """Seconds of one draft pass: the median of recent ones."""
        steps = self.learnt.draft_steps
        return median(steps) if steps else 0.0

    @property
    def seconds_per_token(self) -> float:
        seconds, tokens = self.learnt.pace
        return seconds / tokens

    def best_length(self, gains: Sequence[float], rows: int) -> int:
        """How many nodes per row to verify, where all chances are known beforehand and drafting is free or done.

        Args:
            gains: per node of a row, the expected number of accepted ones over all rows, falling.
            rows: in the target pass.
        """
        if self.length is not None or not self.measured:
            return min(self._first_length if self.length is None else self.length, len(gains))
        if self._trying:
            return min(TRIAL_LENGTH, len(gains))
        price = rows * self.verify.per_token / self.seconds_per_token
        worthy = [gain for gain in gains if gain > price]
        profit = (sum(worthy) - len(worthy) * price) * self.seconds_per_token
        return len(worthy) if profit > self._leaving_plain(rows) else 0

    def worth(self, chances: Sequence[float], drafted: int, draft_steps: int = 0) -> bool:
        """Is one more token for each row worth it?

        Args:
            chances: for each row of the pass, the probability that this token and all before it are accepted.
            drafted: tokens each row already has in this draft.
            draft_steps: draft passes still to be run for it.
        """
        if self.length is not None:
            return drafted < self.length
        if not self.measured:
            return drafted < self._first_length
        if self._trying:
            return drafted < TRIAL_LENGTH
        if drafted == 0:
            return self._outlook(sum(chances), len(chances), draft_steps) > 0
        return drafted < LONGEST and sum(chances) * self.seconds_per_token > self._cost(len(chances), draft_steps)

    def may_start(self, chances: Sequence[float], draft_steps: int, backlog: int = 0, tokens_left: int = 0) -> bool:
        """Is a draft worth starting? Where it is not, ask again after ever longer pauses: texts change.

        Args:
            backlog: tokens, over all rows, that the draft has to read first: a prompt, say.
            tokens_left: that a row may still gain. What a round wins counts for half of them: rows end early, and
                rounds gain more than one.
        """
        self._trying = False
        if self.length is not None or not self.measured:
            return (self._first_length if self.length is None else self.length) > 0
        reading = backlog * self._seconds_to_read
        if self._outlook(sum(chances), len(chances), draft_steps) * max(1, tokens_left / 2) > reading:
            self._pause = self._paused = 0
            return True
        if reading > 0.1 * tokens_left * len(chances) * self.seconds_per_token:
            return False  # too dear to try
        if self._paused >= self._pause:
            self._pause, self._paused = min(2 * self._pause + 1, 31), 0
            self._trying = True
            return True
        self._paused += 1
        return False

    @property
    def _seconds_to_read(self) -> float:
        """Of the draft, per token of a long text: as measured, unless that was far off.

        It reads as much faster than the target as it decodes, or half as much where its decoding is quantized.
        """
        likely = self.verify.reading * min(1.0, 2 * self.draft_step / self.verify.plain)
        return min(self.learnt.reading, likely) if self.learnt.reading else likely

    @property
    def _first_length(self) -> int:
        """Until both kinds of pass have been seen: draft, and when that is known, don't."""
        return FIRST_LENGTH if self.measured or not self.verify.drafted else 0

    def _cost(self, rows: int, draft_steps: int) -> float:
        return draft_steps * self.draft_step + rows * self.verify.per_token

    def _leaving_plain(self, rows: int) -> float:
        """What a pass with a draft costs more than one without, beside its tokens."""
        return max(0.0, self.verify(rows) - self.verify.plain)

    def _outlook(self, gain: float, rows: int, draft_steps: int) -> float:
        """Seconds a draft is going to win in all, if tokens after the first are accepted at the expected rate."""
        profit = -self._leaving_plain(rows)
        cost = self._cost(rows, draft_steps)
        for _ in range(LONGEST):
            if gain * self.seconds_per_token <= cost:
                break
            profit += gain * self.seconds_per_token - cost
            gain *= self.expected_rate
            cost = self._cost(rows, 1)
        return profit

    def observe_expectation(self, rate: float) -> None:
        """Book how likely a token just looked at was to be accepted, drafted or not."""
        self.learnt.expected_rate += Acceptance.STEP * (rate - self.learnt.expected_rate)

    def observe_draft_pass(self, seconds: float, tokens: int = 1, building: float = 0.0) -> None:
        """Book a pass of the draft model over so many tokens, and the seconds it took to make nodes of its logits."""
        self.passes.count += 1
        self.passes.seconds += seconds
        if tokens <= FEW_TOKENS:
            self.learnt.draft_steps = (*self.learnt.draft_steps[1 - STEPS :], seconds + building)
        else:
            self.learnt.reading = seconds / tokens

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Book how long the target took to read the prompts, padding included."""
        self.verify.reading = seconds / tokens

    def observe_round(self, size: int, rows: int, verify_seconds: float, seconds: float, gained: int) -> None:
        """Book a round.

        Args:
            size: nodes per row in the target pass, the root included. rows: in that pass.
            verify_seconds: of that pass. seconds: of the round.
            gained: tokens emitted over all rows.
        """
        if size > 1:
            self.verify.observe(size * rows, verify_seconds)
            usual = self.verify(size * rows)
        else:
            self.verify.observe_plain(verify_seconds)
            usual = self.verify.plain
        seconds = min(seconds, seconds - verify_seconds + PassCost.OUTLIER * usual)
        self.learnt.observe_pace(seconds, gained)

    def observe_keys(self, keys: Sequence[Hashable], accepted: int) -> None:
        """Book a row's drafted keys in order, of which the first `accepted` were accepted."""
        for i, key in enumerate(keys[: accepted + 1]):
            self.acceptance.observe(key, i < accepted)
