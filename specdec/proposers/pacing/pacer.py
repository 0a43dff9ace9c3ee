"""`Pacer`: decides how far to draft next, from measured costs and acceptance rates (`Estimates`).

Proposers label each token with a *confidence bin* (how sure the draft was), and the pacer estimates whether the token
is worth its cost. Estimates use past rounds only. Bins depend on the draft's distribution, never on the token sampled
from it. Pacing therefore cannot bias the output.

All costs are in target passes over one node per row, at the speed that the machine has at that time. Sensitivity of the
speed-up to each constant here, in `estimates` and in `pass_cost`: benchmarks/results/pacing-constants.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from statistics import fmean, median

from specdec.proposers.pacing.balance import Balance
from specdec.proposers.pacing.draft_passes import DraftPasses
from specdec.proposers.pacing.estimates import Acceptance, Estimates
from specdec.proposers.pacing.pass_cost import PassCost

LARGEST_BATCH = 1 << 20
LONGEST = 24  # most tokens drafted per row when the length is automatic
OUTLIER = 1.25  # times the expected cost of a draft, cut off above: another program was running
ROUNDS = 15  # recent drafts in the running median of their costs


class Pacer:
    """Decides in one call how far to draft, by comparing expected accepted tokens with their cost.

    Throughput is highest where the last drafted token costs as much as a token costs on average. An additional token is
    therefore worth `chance * cost_per_token`. Drafts that are not expected to pay are explored as far as
    `Budget` allows, because texts change and costs are only known from passes.

    Args:
        length: None to decide automatically, or an int to draft exactly that many tokens (0: plain decoding).
        estimates: the estimates shared with other calls of this kind. New ones by default.

    Attributes:
        passes: the passes of a draft model in this call.
        balance: what drafting cost and saved in this call.
        drafting: the cost of the last round's draft.
    """

    def __init__(self, length: int | None = None, estimates: Estimates | None = None):
        self.length = length
        self.estimates = Estimates() if estimates is None else estimates
        self.passes = DraftPasses()
        self.drafting = 0.0
        self._rows = LARGEST_BATCH  # unfinished rows in the last round
        self.balance = Balance()
        self._plain = (0.0, 0)  # seconds that a pass over one node would have taken in each round, and the rounds
        self._prefill = (0.0, 0)  # seconds and tokens of a prefill whose cost is not known yet
        self._drafts: tuple[float, ...] = ()  # costs of recent drafts
        self._drafted, self._reading = False, 0.0  # this round: is there a draft; its cost of reading long texts
        self._exploring = False  # this round's draft is for exploration

    def apart(self, estimates: Estimates) -> Pacer:
        """A pacer for a proposer that drafts in some of the call's rounds. estimates: from `Estimates.apart`."""
        other = Pacer(self.length, estimates)
        other.passes, other.balance = self.passes, self.balance
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
    def plain_seconds(self) -> float:
        """Mean seconds that a target pass over one node per row would have taken in this call's rounds."""
        seconds, rounds = self._plain
        return seconds / rounds if rounds else 0.0

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
        if not gains or not self.verify.known or self._needs_plain:
            return 0
        price = self._price(rows)
        sums = accumulate(gain * price for gain in gains[: self.verify.explored - 1])
        profits = [won - self.verify(2 + i) + 1 for i, won in enumerate(sums)]
        best = max(range(len(profits)), key=profits.__getitem__)
        if profits[best] > 0 and not self._losing:
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
        if self._needs_plain:
            return False
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
        if self._needs_plain:
            return False
        reading = backlog * self.cost_to_read
        outlook = self._outlook(sum(chances), len(chances), 0, draft_steps)
        if outlook * max(1, tokens_left / 2) > reading and not self._losing:
            return True
        self._exploring = self._affords(reading + draft_steps * self.estimates.draft_step + self.verify(2) - 1)
        return self._exploring

    @property
    def cost_to_read(self) -> float:
        """Cost of the draft per token of a long text: as measured, but not more than expected from the target.

        The draft is expected to read as much faster than the target as it decodes, or half as much, since its decoding
        may be quantized.
        """
        likely = self.verify.reading * min(1.0, 2 * self.estimates.draft_step)
        reading = self.estimates.draft.reading
        return min(reading, likely) if reading else likely

    def promise(self) -> float:
        """Expected tokens per row and unit of cost of a draft of the best length; plain decoding has 1."""
        verify, drafting, best, new_tokens, chance = self.verify, self.estimates.draft_step, 1.0, 1.0, 1.0
        for length in range(1, 1 + LONGEST):
            chance *= self.expected_rate
            new_tokens += chance
            best = max(best, new_tokens / (verify(1 + length) + drafting))
            drafting += self.estimates.further_token
        return best

    def _price(self, rows: int) -> float:
        """Cost per token in recent rounds, at most that of plain decoding."""
        plain = 1 / min(rows, self._rows)
        pace = self.estimates.cost_per_token
        return plain if pace is None else min(pace, plain)

    @property
    def _losing(self) -> bool:
        """True if this call has lost its share by drafting, and recent rounds were not faster than plain decoding."""
        pace = self.estimates.cost_per_token
        return self.balance.may_lose <= 0 and (pace is None or pace > 1 / self._rows)

    @property
    def _needs_plain(self) -> bool:
        """True if this round should decode plainly, to learn what passes with drafts cost in comparison."""
        return self.verify.needs_plain(1 / (self._price(self._rows) * self._rows))

    def _affords(self, cost: float) -> bool:
        """Return whether the exploration budget and this call's balance allow such a loss."""
        return cost <= min(self.estimates.budget.left, self.balance.may_try)

    def _tests(self) -> bool:
        """Return whether to verify a first token to test the draft's confidence, which has not been tested yet."""
        return not self.acceptance.tested and self._affords(self.verify(2) - 1)

    def _outlook(self, gain: float, rows: int, drafted: int, draft_steps: int) -> float:
        """Cost that further drafting saves at best, if tokens after the next are accepted as expected."""
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
        self.passes.observe(seconds, tokens, building)

    def observe_read_out(self, seconds: float) -> None:
        """Record the seconds to read one more token out of a pass that drafts several."""
        self.passes.read_outs.append(seconds)

    def launched_draft_pass(self, tokens: int = 1) -> None:
        """Record a draft pass enqueued on a device. Its duration follows with `observe_passes`."""
        self.passes.launch(tokens)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record the target's prefill. tokens: of all rows, including padding."""
        self.verify.begin()
        self._prefill = seconds, tokens

    def observe_passes(self, size: int, drafting: float, verifying: float) -> None:
        """Record the passes of a round.

        Args:
            size: nodes per row in the target pass, including the root.
            drafting: seconds of the draft.
            verifying: seconds of the target pass up to its result on the host.
        """
        self.verify.observe(size, verifying)
        plain = verifying / self.verify(size)  # seconds that a pass over one node would have taken
        self._plain = self._plain[0] + plain, self._plain[1] + 1
        seconds, tokens = self._prefill
        if tokens:
            self._prefill = 0.0, 0
            self.balance.took = min(seconds / plain, tokens)
            self.verify.reading = self.balance.took / tokens
        self._observe_draft(size, drafting, plain)

    def _observe_draft(self, size: int, seconds: float, plain: float) -> None:
        """Record the cost of this round's draft. plain: seconds of a target pass over one node at that time."""
        draft, passes = self.estimates.draft, self.passes
        passes.share(seconds, draft.step * plain)
        if passes.steps:
            draft.observe(fmean(passes.steps) / plain)
        if passes.read_outs:
            draft.observe_read_out(fmean(passes.read_outs) / plain)
        for reading, tokens in passes.texts:
            draft.observe_text(reading / plain, tokens)
        self._reading = sum(tokens for _, tokens in passes.texts) * draft.reading
        self._drafted = size > 1 or bool(passes.steps or passes.texts)
        self.drafting = seconds / plain
        expected = max(self._reading + len(passes.steps) * draft.step, median(self._drafts) if self._drafts else 0.0)
        if self._drafted and expected:
            self.drafting = min(self.drafting, OUTLIER * expected)
        if self._drafted:
            self._drafts = (*self._drafts[1 - ROUNDS :], self.drafting)
        passes.end_round()

    def observe_round(self, size: int, rows: int, new_tokens: int) -> None:
        """Record the result of a round, after `observe_passes`.

        Args:
            size: nodes per row in the target pass, including the root.
            rows: the number of unfinished rows.
            new_tokens: new tokens over all rows.
        """
        self._rows = rows
        took = self.verify(size) + self.drafting
        self.estimates.observe_pace(max(self.verify(size), took - self._reading), new_tokens)
        behind = took - new_tokens / rows if self._drafted else 0.0  # a lookup without a draft loses nothing
        self.balance.took += took
        self.balance.saved += self._reading - behind
        self.estimates.budget.observe(took, -behind)

    def observe_confidence(self, confidence_bins: Sequence[Hashable], accepted: int) -> None:
        """Record the confidence bins of a row's drafted tokens in order; the first `accepted` ones were accepted."""
        for i, key in enumerate(confidence_bins[: accepted + 1]):
            self.acceptance.observe(key, i < accepted)
