"""`Pacer`: how far to draft next, from what drafting and verifying cost here and how much gets accepted.

Owns the costs and the acceptance estimates. Knows nothing of proposers: they label their tokens with a *key* (how sure
they were) and ask whether a token is worth its cost. Estimates use past rounds only, and keys depend on the draft's
distribution, never on the token sampled from it, so pacing cannot bias the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

FIRST_LENGTH = 4  # drafted per row until a round has been measured
TRIAL_LENGTH = 2  # drafted to see whether it pays again: enough to time a draft pass
FEW_TOKENS = 16  # a draft's pass over so many takes about as long as one over a single token
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
        self._n = self._t = self._nn = self._nt = self._w = 0.0
        self._plain = self._plain_w = 0.0
        self.reading = 0.0  # seconds per token of a long text

    def observe(self, tokens: int, seconds: float) -> None:
        """Book a pass that verified a draft."""
        keep = self.FORGET
        if self.drafted:
            seconds = min(seconds, self.OUTLIER * self(tokens))
        self._w = keep * self._w + 1
        self._n = keep * self._n + tokens
        self._t = keep * self._t + seconds
        self._nn = keep * self._nn + tokens * tokens
        self._nt = keep * self._nt + tokens * seconds

    def observe_plain(self, seconds: float) -> None:
        """Book a pass without a draft."""
        if self._plain_w:
            seconds = min(seconds, self.OUTLIER * self.plain)
        self._plain_w = self.FORGET * self._plain_w + 1
        self._plain = self.FORGET * self._plain + seconds

    @property
    def drafted(self) -> bool:
        """Has a pass with a draft been seen?"""
        return self._w > 0

    @property
    def undrafted(self) -> bool:
        """Has a pass without a draft been seen?"""
        return self._plain_w > 0

    @property
    def known(self) -> bool:
        """Has a pass of each kind been seen?"""
        return self.drafted and self.undrafted

    @property
    def plain(self) -> float:
        """Seconds of a pass without a draft."""
        return self._plain / self._plain_w

    @property
    def per_token(self) -> float:
        """Seconds one more token adds to a pass with a draft."""
        mean_n, mean_t = self._n / self._w, self._t / self._w
        spread = self._nn - self._n * mean_n
        covariance = self._nt - self._t * mean_n
        prior = self.PRIOR_SLOPE * mean_t
        slope = (covariance + self.PRIOR_WEIGHT * prior) / (spread + self.PRIOR_WEIGHT)
        return max(slope, 0.1 * prior)

    def __call__(self, tokens: float) -> float:
        """Seconds of a pass over `tokens` tokens, drafted ones among them."""
        mean_n, mean_t = self._n / self._w, self._t / self._w
        return max(mean_t + self.per_token * (tokens - mean_n), 0.25 * mean_t)


@dataclass
class DraftPasses:
    """Forward passes of a draft model, and the seconds they took, in all."""

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


class Pacer:
    """Decides how far to draft: the chance of more tokens to be accepted against the seconds they cost.

    Throughput is best where the marginal token's seconds equal the seconds a token costs at the present rate, so a
    token is worth `chance * seconds_per_token`.

    Args:
        length: None to decide automatically; an int to draft exactly that many tokens (0: plain decoding).
    """

    def __init__(self, length: int | None = None):
        self.length = length
        self.verify = PassCost()
        self.acceptance = Acceptance()
        self.expected_rate = 0.8  # of a token not yet looked at, moving average
        self.passes = DraftPasses()
        self._draft_steps: deque[float] = deque(maxlen=15)  # seconds
        self._reading = 0.0  # seconds per token of a long text
        self._seconds = self._tokens = 0.0  # of recent rounds, moving sums
        self._pause = self._paused = 0  # rounds to sit out, rounds sat out
        self._trying = False  # this round drafts only to measure anew

    def apart(self) -> Pacer:
        """For a proposer that drafts in some of the rounds: with the same costs of the target, the same acceptance and
        counts, but a rate of its own, booked by `observe_pace`."""
        other = Pacer(self.length)
        other.verify, other.acceptance, other.passes = self.verify, self.acceptance, self.passes
        return other

    @property
    def limit(self) -> int:
        return LONGEST if self.length is None else self.length

    @property
    def measured(self) -> bool:
        return self.verify.known and self._tokens > 0

    @property
    def draft_step(self) -> float:
        """Seconds of one draft pass: the median of recent ones."""
        return median(self._draft_steps) if self._draft_steps else 0.0

    @property
    def seconds_per_token(self) -> float:
        return self._seconds / self._tokens

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
        return min(self._reading, likely) if self._reading else likely

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
        self.expected_rate += Acceptance.STEP * (rate - self.expected_rate)

    def observe_draft_pass(self, seconds: float, tokens: int = 1, building: float = 0.0) -> None:
        """Book a pass of the draft model over so many tokens, and the seconds it took to make nodes of its logits."""
        self.passes.count += 1
        self.passes.seconds += seconds
        if tokens <= FEW_TOKENS:
            self._draft_steps.append(seconds + building)
        else:
            self._reading = seconds / tokens

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
        self.observe_pace(seconds, gained)

    def observe_pace(self, seconds: float, gained: int) -> None:
        """Book what a round took and gained alone: what a token costs at the present rate."""
        self._seconds = 0.9 * self._seconds + seconds
        self._tokens = 0.9 * self._tokens + gained

    def observe_keys(self, keys: Sequence[Hashable], accepted: int) -> None:
        """Book a row's drafted keys in order, of which the first `accepted` were accepted."""
        for i, key in enumerate(keys[: accepted + 1]):
            self.acceptance.observe(key, i < accepted)
