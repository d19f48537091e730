"""How many drafts the next step carries. What pays is measured as it runs: the time of a step by its rows and shape, and how
often the draft at each position is the token that comes.

Whatever is chosen, a text is the same (kernels/sequences.py); only its speed is at stake. While it is paused a worker runs the
plain steps of one without speculation. They leave no rows of the MTP layer, and a draft that looks back on hardly any is a bad
guess; so behind a pause `WARM_STEPS` steps leave theirs before one with drafts comes.

What this costs is kept in an account, in seconds: every step pays in `SHARE` of its time, and one that is not plain gets or
pays the difference to what plain ones would have taken for its tokens. Nothing but the account allows steps that may not pay,
so in the long run a worker is slower than one without speculation by no more than `SHARE`, and at first by `LOOK_STEPS` steps
of each number of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from decode.step import PLAIN, STORING, Shape
from wire.metrics import Metrics

SHARE = 0.01
WARM_STEPS = 32  # that store before one with drafts: of the bundled model's, as many are right then as with all rows
LOOK_STEPS = 8  # with a number of tokens that is not the chosen one; the first of them has no drafts yet
LOOK_PERIOD = 256  # steps from one look to the next
PLAIN_STEPS = 5  # among steps with drafts, to measure what they are compared with: over half of `RECENT`
ENOUGH = 3  # measured steps that tell how long one takes
RECENT = 9  # of those that are measured the last so many count
FADE = 1 - 1 / 32  # what is left, a step later, of what a position's drafts came to
ADVANTAGE = 1.02  # what another number of tokens must promise to be chosen


class Costs:
    """Seconds of a step by its rows and shape. sizes: steps of that many rows, or fewer but more than the size before, are
    taken to be alike; ascending, the last one is the most there are."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._measured: defaultdict[tuple[int, Shape], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._medians: dict[tuple[int, Shape], float] = {}  # by (number of the size, shape)

    def add(self, rows: int, shape: Shape, seconds: float) -> None:
        key = self._size(rows), shape
        self._measured[key].append(seconds)
        if len(self._measured[key]) >= ENOUGH:
            self._medians[key] = median(self._measured[key])

    def seconds(self, rows: int, shape: Shape) -> float:
        """0 when it is not known. What is known of the nearest other size is taken over in proportion."""
        mine = self._size(rows)
        own = self._medians.get((mine, shape), 0.0)
        plain = self._medians.get((mine, PLAIN), 0.0)
        if own or not plain:
            return own
        for other in sorted(range(len(self._sizes)), key=lambda size: abs(size - mine)):
            if (other, shape) in self._medians and (other, PLAIN) in self._medians:
                return plain * self._medians[other, shape] / self._medians[other, PLAIN]
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
    """Chooses the shapes of steps, from a plain one (it is paused) to `most` drafts. sizes: as in Costs."""

    def __init__(self, most: int, sizes: Sequence[int]) -> None:
        self._all = [PLAIN, *(Shape(tokens, stores=True) for tokens in range(2, most + 2))]
        self._costs, self._acceptance = Costs(sizes), Acceptance(most)
        self._chosen = PLAIN
        self._looking, self._left = PLAIN, 0  # at another shape, for so many more steps
        self._looked = 1  # the newest number of tokens that was looked at in turn
        self._since_look = 0  # steps since that began
        self._warm = WARM_STEPS  # steps since a pause that stored; sequences come with the rows of their prompts
        self._credit_s: float | None = None  # the account; opened when a first plain step is measured
        self._overdrawn = False
        self._length = 1.0  # tokens a row that steps with drafts brought, faded

    def shape(self, rows: int) -> Shape:
        """Of the next step, of `rows` sequences."""
        if len(self._all) == 1 or not rows:
            return PLAIN
        self._since_look += 1
        plain = self._costs.seconds(rows, PLAIN)
        if not plain:
            return PLAIN
        if self._credit_s is not None and self._credit_s < 0:
            self._left = 0  # worse than was expected
        if not self._left:
            self._choose(rows)
            self._look_around(rows, plain)
        wanted = self._looking if self._left else self._chosen
        if wanted.stores and self._warm < WARM_STEPS:
            self._warm += 1
            return STORING
        if wanted == self._chosen == PLAIN:
            self._warm = 0
        self._left = max(0, self._left - 1)
        return wanted

    def landed(self, rows: int, shape: Shape, seconds: float, outcomes: Sequence[tuple[int, int]]) -> None:
        """A step of `rows` sequences has taken so long. outcomes: as in Acceptance, of the rows whose tokens are wanted."""
        self._costs.add(rows, shape, seconds)
        length = 1.0
        if shape.tokens > 1 and outcomes:
            self._acceptance.add(outcomes)
            length += sum(accepted for _, accepted in outcomes) / len(outcomes)
            self._length += (length - self._length) * (1 - FADE)
        plain = self._costs.seconds(rows, PLAIN)
        if plain:
            self._pay(seconds, shape, length, plain, self._costs.seconds(rows, shape), self._most(rows, plain))

    def _pay(self, seconds: float, shape: Shape, length: float, plain: float, usual: float, most: float) -> None:
        """length: tokens that a row has got. plain: the seconds of a plain step. usual: of one of this shape; 0 when it is not
        known. most: on the account."""
        credit = most if self._credit_s is None else self._credit_s + SHARE * seconds
        if shape != PLAIN:  # what took longer than this was not the drafts' doing
            credit += plain * length - min(seconds, max((shape.tokens + length) * plain, usual))
        self._credit_s = min(credit, most)
        self._overdrawn = self._credit_s < (most / 2 if self._overdrawn else 0)

    def _most(self, rows: int, plain: float) -> float:
        """Seconds on a full account: what looking once at all numbers of tokens costs, each as long as it may be to pay."""
        return LOOK_STEPS * (len(self._all) - 1) * plain + self._warming(rows, plain, WARM_STEPS)

    def _warming(self, rows: int, plain: float, steps: int) -> float:
        """Seconds that so many steps take longer when they store."""
        return steps * max(0.0, self._costs.seconds(rows, STORING) - plain)

    def report(self, metrics: Metrics) -> None:
        """For /metrics: the drafts of a step now, the tokens that steps with drafts bring a row, and what became of the drafts
        at each position."""
        metrics.set("drafts", self._chosen.tokens - 1)
        metrics.set("accepted_length", self._length)
        acceptance = self._acceptance
        for place, rate in enumerate(acceptance.rates()):
            metrics.set(f"draft_{place + 1}_acceptance", rate if acceptance.verified[place] else 0.0)
            metrics.total(f"draft_{place + 1}_verified", acceptance.verified[place])
            metrics.total(f"draft_{place + 1}_accepted", acceptance.accepted[place])

    def _choose(self, rows: int) -> None:
        """Stays with what is chosen until another is better by `ADVANTAGE`, or the account is empty."""
        speeds = {shape: self._speed(rows, shape) for shape in self._all}
        best = max(speeds, key=lambda shape: speeds[shape])
        if self._overdrawn:
            self._chosen = PLAIN
        elif speeds[best] > ADVANTAGE * speeds[self._chosen]:
            self._chosen = best

    def _speed(self, rows: int, shape: Shape) -> float:
        """Tokens a second of a row; 0 when it is not known."""
        seconds = self._costs.seconds(rows, shape)
        return self._acceptance.length(shape.tokens) / seconds if seconds else 0.0

    def _look_around(self, rows: int, plain: float) -> None:
        """Begins a look at what is not known, or, when it is time, at the next number of drafts in turn; halfway between two of
        those at plain steps, where there are no others. What the account can never afford is looked at when that is full, as it
        may have been measured at a bad time; nothing else waits for it."""
        if self._chosen != PLAIN and self._since_look % LOOK_PERIOD == LOOK_PERIOD // 2:
            self._looking, self._left = PLAIN, PLAIN_STEPS
            return
        others = [shape for shape in self._all[1:] if shape != self._chosen and self._may_pay(rows, shape, plain)]
        unknown = [shape for shape in others if not self._costs.seconds(rows, shape)]
        if self._credit_s is None or (not unknown and self._since_look < LOOK_PERIOD):
            return
        most = self._most(rows, plain)
        full = self._credit_s >= most
        warming = self._warming(rows, plain, WARM_STEPS - self._warm)
        for shape in sorted(unknown or others, key=lambda shape: shape.tokens <= self._looked):
            price = warming + LOOK_STEPS * (self._expected(rows, shape, plain) - plain)
            if full or price <= self._credit_s:
                self._looking, self._left = shape, LOOK_STEPS
                self._looked, self._since_look = shape.tokens, 0
            if full or price <= most:
                return

    def _may_pay(self, rows: int, shape: Shape, plain: float) -> bool:
        """Whether to look at it: at one draft always, as that tells how often a first one is right; at more where they would
        pay if all behind a right one were right too."""
        length = 1 + self._acceptance.rates()[0] * (shape.tokens - 1)
        return shape.tokens == 2 or length * plain > self._expected(rows, shape, plain)

    def _expected(self, rows: int, shape: Shape, plain: float) -> float:
        """Seconds of a step, in proportion to one of a token less while it is not known."""
        fewer = self._costs.seconds(rows, Shape(shape.tokens - 1, stores=shape.tokens > 2)) or plain
        return self._costs.seconds(rows, shape) or fewer * shape.tokens / (shape.tokens - 1)
