"""How many drafts the next step carries. What pays is measured as it runs: the time of a step by its rows and tokens, and how
often the draft at each position is the token that comes.

Whatever is chosen, a text is the same (kernels/sequences.py); only its speed is at stake. That is kept in an account, in
seconds: every step pays in `SHARE` of its time, and one with drafts gets or pays the difference to what steps without any
would have taken for its tokens. Nothing but the account allows steps that may not pay, so in the long run a worker is slower
than a paused one by no more than `SHARE`, and at first by `LOOK_STEPS` steps of each number of tokens. A paused step differs
from one of a worker without speculation by the rows of the MTP layer that it leaves (decode/step.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from wire.metrics import Metrics

SHARE = 0.01
LOOK_STEPS = 8  # with a number of tokens that is not the chosen one; the first of them has no drafts yet
LOOK_PERIOD = 256  # steps from one look to the next
ENOUGH = 3  # measured steps that tell how long one takes
RECENT = 9  # of those that are measured the last so many count
FADE = 1 - 1 / 32  # what is left, a step later, of what a position's drafts came to
ADVANTAGE = 1.02  # what another number of tokens must promise to be chosen


class Costs:
    """Seconds of a step by its rows and tokens. sizes: steps of that many rows, or fewer but more than the size before, are
    taken to be alike; ascending, the last one is the most there are."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._measured: defaultdict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._medians: dict[tuple[int, int], float] = {}  # by (number of the size, tokens)

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        key = self._size(rows), tokens
        self._measured[key].append(seconds)
        if len(self._measured[key]) >= ENOUGH:
            self._medians[key] = median(self._measured[key])

    def seconds(self, rows: int, tokens: int) -> float:
        """0 when it is not known. What is known of the nearest other size is taken over in proportion."""
        mine = self._size(rows)
        own = self._medians.get((mine, tokens), 0.0)
        plain = self._medians.get((mine, 1), 0.0)
        if own or not plain:
            return own
        for other in sorted(range(len(self._sizes)), key=lambda size: abs(size - mine)):
            if (other, tokens) in self._medians and (other, 1) in self._medians:
                return plain * self._medians[other, tokens] / self._medians[other, 1]
        return 0.0

    def _size(self, rows: int) -> int:
        return bisect_left(self._sizes, rows)


class Acceptance:
    """How often the draft at each position is accepted when all before it are."""

    def __init__(self, most: int) -> None:
        self.verified = [0] * most
        self.accepted = [0] * most
        self._recent = [(1.0, 1.0)] * most  # (verified, accepted), faded; nothing known: worth a look

    def add(self, outcomes: Sequence[tuple[int, int]]) -> None:
        """Of each row of a step: the drafts that it had, and how many were accepted."""
        for place in range(len(self.verified)):
            verified = sum(had > place and accepted >= place for had, accepted in outcomes)
            accepted = sum(had > place and accepted > place for had, accepted in outcomes)
            self.verified[place] += verified
            self.accepted[place] += accepted
            if verified:
                before = self._recent[place]
                self._recent[place] = before[0] * FADE + verified, before[1] * FADE + accepted

    def rates(self) -> list[float]:
        return [accepted / verified for verified, accepted in self._recent]

    def length(self, tokens: int) -> float:
        """Tokens that a step of `tokens` a row brings a row."""
        length, reached = 1.0, 1.0
        for rate in self.rates()[: tokens - 1]:
            reached *= rate
            length += reached
        return length


class Speculation:
    """Chooses the tokens of steps, from 1 (it is paused) to `most` drafts more. sizes: as in Costs."""

    def __init__(self, most: int, sizes: Sequence[int]) -> None:
        self._all = range(1, most + 2)
        self._costs, self._acceptance = Costs(sizes), Acceptance(most)
        self._chosen = 1
        self._looking, self._left = 1, 0  # at another number of tokens, for so many more steps
        self._since_look = 0
        self._credit_s: float | None = None  # the account; opened when a first step without drafts is measured
        self._overdrawn = False
        self._length = 1.0  # tokens a row that steps with drafts brought, faded

    def tokens(self, rows: int) -> int:
        """Of each of the `rows` sequences of the next step."""
        if len(self._all) == 1 or not rows:
            return 1
        self._since_look += 1
        plain = self._costs.seconds(rows, 1)
        if not plain:
            return 1
        if self._credit_s is not None and self._credit_s < 0:
            self._left = 0  # worse than was expected
        if not self._left:
            self._choose(rows)
            self._look_around(rows, plain)
        if self._left:
            self._left -= 1
            return self._looking
        return self._chosen

    def landed(self, rows: int, tokens: int, seconds: float, outcomes: Sequence[tuple[int, int]]) -> None:
        """A step of `rows` sequences has taken so long. outcomes: as in Acceptance, of the rows whose tokens are wanted."""
        self._costs.add(rows, tokens, seconds)
        length = 1.0
        if tokens > 1 and outcomes:
            self._acceptance.add(outcomes)
            length += sum(accepted for _, accepted in outcomes) / len(outcomes)
            self._length += (length - self._length) * (1 - FADE)
        plain = self._costs.seconds(rows, 1)
        if plain:
            self._pay(seconds, tokens, length, plain, self._costs.seconds(rows, tokens))

    def _pay(self, seconds: float, tokens: int, length: float, plain: float, usual: float) -> None:
        """length: tokens that a row has got. plain: the seconds of a step without drafts. usual: of one of so many tokens; 0
        when it is not known."""
        most = self._most(plain)
        credit = most if self._credit_s is None else self._credit_s + SHARE * seconds
        if tokens > 1:  # what took longer than this was not the drafts' doing
            credit += plain * length - min(seconds, max((tokens + length) * plain, usual))
        self._credit_s = min(credit, most)
        self._overdrawn = self._credit_s < (most / 2 if self._overdrawn else 0)

    def _most(self, plain: float) -> float:
        """Seconds on a full account: what looking once at all numbers of tokens costs, each as long as it may be to pay."""
        return LOOK_STEPS * (len(self._all) - 1) * plain

    def report(self, metrics: Metrics) -> None:
        """For /metrics: the drafts of a step now, the tokens that steps with drafts bring a row, and what became of the drafts
        at each position."""
        metrics.set("drafts", self._chosen - 1)
        metrics.set("accepted_length", self._length)
        acceptance = self._acceptance
        for place, rate in enumerate(acceptance.rates()):
            metrics.set(f"draft_{place + 1}_acceptance", rate if acceptance.verified[place] else 0.0)
            metrics.total(f"draft_{place + 1}_verified", acceptance.verified[place])
            metrics.total(f"draft_{place + 1}_accepted", acceptance.accepted[place])

    def _choose(self, rows: int) -> None:
        """Stays with what is chosen until another is better by `ADVANTAGE`, or the account is empty."""
        speeds = {tokens: self._speed(rows, tokens) for tokens in self._all}
        best = max(speeds, key=lambda tokens: speeds[tokens])
        if self._overdrawn:
            self._chosen = 1
        elif speeds[best] > ADVANTAGE * speeds[self._chosen]:
            self._chosen = best

    def _speed(self, rows: int, tokens: int) -> float:
        """Tokens a second of a row; 0 when it is not known."""
        seconds = self._costs.seconds(rows, tokens)
        return self._acceptance.length(tokens) / seconds if seconds else 0.0

    def _look_around(self, rows: int, plain: float) -> None:
        """Begins a look at what is not known, or, when it is time, at the next number of tokens in turn. One that the account
        can never afford is looked at when that is full, as it may have been measured at a bad time; no other waits for it."""
        unknown = [tokens for tokens in self._all if not self._costs.seconds(rows, tokens)]
        if self._credit_s is None or (not unknown and self._since_look < LOOK_PERIOD):
            return
        most = self._most(plain)
        full = self._credit_s >= most
        others = [tokens for tokens in (unknown or self._all) if tokens != self._chosen]
        for tokens in sorted(others, key=lambda tokens: tokens <= self._looking):
            price = LOOK_STEPS * (self._expected(rows, tokens, plain) - plain)
            if full or price <= self._credit_s:
                self._looking, self._left, self._since_look = tokens, LOOK_STEPS, 0
            if full or price <= most:
                return

    def _expected(self, rows: int, tokens: int, plain: float) -> float:
        """Seconds of a step, in proportion to one of a token less while it is not known."""
        fewer = self._costs.seconds(rows, tokens - 1) or plain
        return self._costs.seconds(rows, tokens) or fewer * tokens / max(tokens - 1, 1)
