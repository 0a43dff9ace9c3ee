"""How far to draft next, from what drafting and verifying cost here and how much gets accepted.

Owns the decisions of one call (`Pacer`), from what calls learn together (`Estimates`). Knows nothing of proposers: they
label their tokens with a *key* (how sure they were) and ask whether a token is worth its cost. Estimates use past
rounds only, and keys depend on the draft's distribution, never on the token sampled from it, so pacing cannot bias the
output.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdec.proposers.pacing.estimates import Acceptance, Estimates, PassCost

TRIAL_LENGTH = 1  # drafted to see whether it pays again
FEW_TOKENS = 16  # a draft's pass over so many takes about as long as one over a single token
CALL_SHARE, CALL_LENGTH = 0.02, 64  # of a call's passes that trials may cost; passes that every call is taken to have
LARGEST_BATCH = 1 << 20
LONGEST = 24  # drafted per row at most, when the length is automatic


@dataclass
class DraftPasses:
    """Forward passes of a draft model in one call, and the seconds they took.

    Attributes:
        reading: of the seconds, over long texts. launched: of the passes, those of this round whose seconds a device
            that works on its own has not told yet; long: of those, tokens of one over a long text.
    """

    count: int = 0
    seconds: float = 0.0
    reading: float = 0.0
    launched: int = 0
    long: int = 0


class Pacer:
    """Decides, in one call, how far to draft: the chance of more tokens to be accepted against the seconds they cost.

    Throughput is best where the marginal token's seconds equal the seconds a token costs at the present rate, so a
    token is worth `chance * seconds_per_token`. What does not pay by what is known is tried where `Budget` allows it:
    texts change, and costs are known from passes only.

    Args:
        length: None to decide automatically; an int to draft exactly that many tokens (0: plain decoding).
        estimates: what earlier calls of this kind learnt and later ones will; nothing yet by default.

    Attributes:
        passes: of a draft model, in this call. drafting: seconds of the last round's draft.
    """

    def __init__(self, length: int | None = None, estimates: Estimates | None = None):
        self.length = length
        self.estimates = Estimates() if estimates is None else estimates
        self.passes = DraftPasses()
        self.drafting = 0.0
        self._read = 0.0  # seconds of `passes.reading` that are booked
        self._ran = 0  # of `passes`, those whose rounds are booked
        self._rows = LARGEST_BATCH  # not finished, in the last round
        self._took = self._behind = 0.0  # passes of the target that the call took; that drafts made it longer
        self._exploring = False  # this round's draft is a trial

    def apart(self, estimates: Estimates) -> Pacer:
        """For a proposer that drafts in some of the call's rounds. estimates: its own, `Estimates.apart` of the call's."""
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
        return LONGEST if self.length is None else self.length

    def best_length(self, gains: Sequence[float], rows: int) -> int:
        """How many nodes per row to verify, where all chances are known beforehand and drafting is free or done.

        Args:
            gains: per node of a row, the expected number of accepted ones over all rows, falling.
            rows: in the target pass.
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
        """Is one more token for each row worth it?

        Args:
            chances: for each row of the pass, the probability that this token and all before it are accepted.
            drafted: tokens each row already has in this draft.
            draft_steps: draft passes still to be run for it.
        """
        if self.length is not None:
            return drafted < self.length
        if drafted < TRIAL_LENGTH and (self._exploring or self._tests()):
            return True
        return drafted < LONGEST and self._outlook(sum(chances), len(chances), drafted, draft_steps) > 0

    def may_start(self, chances: Sequence[float], draft_steps: int, backlog: int = 0, tokens_left: int = 0) -> bool:
        """Is a draft worth starting, or a trial?

        Args:
            backlog: tokens, over all rows, that the draft has to read first: a prompt, say.
            tokens_left: that a row may still gain. What a round wins counts for half of them: rows end early, and
                rounds gain more than one.
        """
        self._exploring = False
        if self.length is not None or not self.verify.known:
            return (self.length or 0) > 0
        reading = backlog * self.seconds_to_read
        outlook = self._outlook(sum(chances), len(chances), 0, draft_steps)
        if outlook * max(1, tokens_left / 2) > reading and not self._overdrawn:
            return True
        leaving_plain = self.verify(1 + TRIAL_LENGTH) - self.verify.plain
        self._exploring = self._affords(reading + draft_steps * self.estimates.draft_step + leaving_plain)
        return self._exploring

    @property
    def seconds_to_read(self) -> float:
        """Of the draft, per token of a long text: as measured, unless that was far off.

        It reads as much faster than the target as it decodes, or half as much where its decoding is quantized.
        """
        likely = self.verify.reading * min(1.0, 2 * self.estimates.draft_step / self.verify.plain)
        reading = self.estimates.draft.reading
        return min(reading, likely) if reading else likely

    def promise(self) -> float:
        """Tokens per row and second of drafts whose tokens are accepted as expected, of the best length."""
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
        """Seconds a token costs at the present rate, which is plain decoding's at worst."""
        plain = self.verify.plain / min(rows, self._rows)
        pace = self.estimates.seconds_per_token
        return plain if pace is None else min(pace, plain)

    @property
    def _overdrawn(self) -> bool:
        """Are drafts that should pay slower than plain decoding?"""
        pace, plain = self.estimates.seconds_per_token, self.verify.plain / min(self._rows, LARGEST_BATCH)
        return self.estimates.budget.overdrawn and (pace is None or pace > plain)

    def _affords(self, seconds: float) -> bool:
        """Is there so much in the budget, and does this call not fall far behind for it?"""
        passes = seconds / self.verify.plain
        return passes <= min(self.estimates.budget.left, CALL_SHARE * (CALL_LENGTH + self._took) - self._behind)

    def _tests(self) -> bool:
        """Are the draft's expectations still to be tested, now that it has run? One token tells something."""
        return not self.acceptance.tested and self._affords(self.verify(1 + TRIAL_LENGTH) - self.verify.plain)

    def _outlook(self, gain: float, rows: int, drafted: int, draft_steps: int) -> float:
        """Seconds that drafting on is going to win at best, if tokens after the next are accepted as expected."""
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
        """Book how likely a token just looked at was to be accepted, drafted or not."""
        self.estimates.observe_expectation(rate)

    def observe_draft_pass(self, seconds: float, tokens: int = 1, building: float = 0.0) -> None:
        """Book a pass of the draft model over so many tokens, and the seconds it took to make nodes of its logits."""
        self.passes.count += 1
        self.passes.seconds += seconds
        if tokens <= FEW_TOKENS:
            self.estimates.draft.observe(seconds + building)
        else:
            self.passes.reading += seconds
            self.estimates.draft.reading = seconds / tokens

    def observe_read_out(self, seconds: float) -> None:
        """Book what it took to read one more token out of a pass that drafted several."""
        self.estimates.draft.observe_read_out(seconds)

    def launched_draft_pass(self, tokens: int = 1) -> None:
        """A pass of the draft model was asked of a device: the round will tell what it took."""
        self.passes.count += 1
        self.passes.launched += 1
        if tokens > FEW_TOKENS:
            self.passes.long = tokens

    def observe_drafting(self, seconds: float) -> None:
        """Book how long this round's draft took: that is what its launched passes share."""
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
        """Book how long the target took to read the prompts, padding included."""
        self.verify.reading = seconds / tokens
        if self.verify.known:
            self._took = seconds / self.verify.plain

    def observe_round(self, size: int, rows: int, drafting: float, seconds: float, new_tokens: int) -> None:
        """Book a round.

        Args:
            size: nodes per row in the target pass, the root included. rows: that were not finished.
            drafting: seconds of the draft. seconds: of the round, the draft included, up to the verdict.
            gained: tokens emitted over all rows.
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
            behind = took - new_tokens / rows if size > 1 or ran else 0.0  # looking for a draft is no trial
            self._took, self._behind = self._took + took, max(0.0, self._behind + behind)
            self.estimates.budget.observe(took, -behind)

    def observe_confidence(self, confidence_bins: Sequence[Hashable], accepted: int) -> None:
        """Book a row's drafted keys in order, of which the first `accepted` were accepted."""
        for i, key in enumerate(confidence_bins[: accepted + 1]):
            self.acceptance.observe(key, i < accepted)
