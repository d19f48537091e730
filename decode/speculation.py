"""How many drafts the next step carries. What pays is measured as it runs: how long a step takes beside a plain one, by its
rows and shape, and how often the draft at each position is the token that comes.

Whatever is chosen, a text is the same (kernels/sequences.py); only its speed is at stake. While it is paused a worker runs the
plain steps of one without speculation. They leave no rows of the MTP layer, and a draft that looks back on hardly any is a bad
guess; so behind a pause `WARM_STEPS` steps leave theirs before one with drafts comes.

What this costs is kept in an account, in plain steps: every step pays in `SHARE` of its time, and one that is not plain gets
the tokens that it brings and pays for the time that its kind was measured to take. What is chosen was measured well, by chance
too: it pays about an error of that more. Nothing but the account allows steps that may not pay, so in the long run a worker is
slower than one without speculation by no more than `SHARE`, and at first by `OPENING` plain steps, as far as that is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from math import inf, sqrt
from statistics import median, median_low

from decode.step import PLAIN, STORING, Shape
from wire.metrics import Metrics

SHARE = 0.01
OPENING = 8  # plain steps, on the account at first
WARM_STEPS = 32  # that store before one with drafts: of the bundled model's, as many are right then as with all rows
PAIRS = 3  # of a plain step and one of another shape, which a look begins with to compare the two
LOOK_STEPS = 8  # behind those, to see what is accepted; the first of them has no drafts yet
LOOK_PERIOD = 256  # steps from one look to the next
FIRST_PERIOD = 16  # from the first look at a shape; four times as many from the second, and so on
ENOUGH = 5  # comparisons that tell how long a step takes: one that was stalled is in two of them; as many steps the pace
RECENT = 6 * PAIRS  # of them the last so many count
PACED = 9  # steps that tell the pace: how long plain ones are now
FADE = 1 - 1 / 32  # what is left, a step later, of what a position's drafts came to
LEAST = 1.05  # plain steps that one with drafts takes; what says less is noise
STORED = 1.1  # what one that only stores is taken for until that is known
ADVANTAGE = 1.02  # what another number of drafts must promise to be chosen
RESUMING = 1.05  # what one must promise to end a pause
EVERY = 4  # steps from one thought of what pays to the next: it changes slowly, and thinking takes a percent of a short step
MOST_ERROR = 0.05  # plain steps that what is chosen pays more; where less is known than that, looking tells, not paying


class Costs:
    """How long a step takes beside a plain one, by its rows and shape. sizes: steps of that many rows, or fewer but more than
    the size before, are taken to be alike; ascending, the last one is the most there are.

    A machine that others use too, or that grows hot, is slower by half for a hundred steps and then as fast as before. So a
    step is compared with a plain one right before or behind it, and with nothing else.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._compared: defaultdict[tuple[int, Shape], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._estimates: dict[tuple[int, Shape], tuple[float, float]] = {}  # by (number of the size, shape), from all those
        self._last = 0, PLAIN, 0.0  # size, shape and seconds of the last step

    def add(self, rows: int, shape: Shape, seconds: float) -> None:
        (before, other, other_s), self._last = self._last, (self.size(rows), shape, seconds)
        if before == self.size(rows) and other_s and (other == PLAIN) != (shape == PLAIN):
            kind, ratio = (other, other_s / seconds) if shape == PLAIN else (shape, seconds / other_s)
            self._compared[before, kind].append(ratio)
            self._estimates.clear()

    def ratio(self, rows: int, shape: Shape) -> float:
        """At least 1; 0 when it is not known."""
        return self.estimate(rows, shape)[0]

    def estimate(self, rows: int, shape: Shape) -> tuple[float, float]:
        """The ratio, and about what it may be off by. Where a size has few comparisons those of the sizes beside it count too,
        and where there are hardly any, those of the nearest."""
        if shape == PLAIN:
            return 1.0, 0.0
        size = self.size(rows)
        if (size, shape) not in self._estimates:
            found: list[float] = []
            for other in sorted(range(len(self._sizes)), key=lambda other: abs(other - size)):
                if len(found) < (RECENT if abs(other - size) <= 1 else ENOUGH):
                    found += self._compared[other, shape]
            known, least = len(found) >= ENOUGH, LEAST if shape.tokens > 1 else 1.0
            middle = median(found) if known else 0.0
            error = 1.86 * median(abs(each - middle) for each in found) / sqrt(len(found)) if known else 0.0
            self._estimates[size, shape] = max(least, middle) if known else 0.0, error
        return self._estimates[size, shape]

    def known(self, rows: int, shape: Shape) -> bool:
        """Whether it was measured at this size."""
        return len(self._compared[self.size(rows), shape]) >= ENOUGH

    def size(self, rows: int) -> int:
        return bisect_left(self._sizes, rows)


class Acceptance:
    """How often the draft at each position is accepted when all before it are."""

    def __init__(self, most: int) -> None:
        self.verified = [0] * most
        self.accepted = [0] * most
        self._recent = [(1.0, 1.0)] * most  # (verified, accepted), faded; nothing known: worth a look
        self._new = 0.0  # share of the rows that have no drafts, faded

    def add(self, outcomes: Sequence[tuple[int, int]], follows: bool) -> None:
        """Of each row of a step: the drafts that it had, and how many were accepted. follows: the step before had drafts too,
        so the rows without any are new in the batch, or at the end of their texts."""
        alike = Counter(outcomes).items()
        if follows:
            new = sum(rows for (had, _), rows in alike if not had) / len(outcomes)
            self._new += (new - self._new) * (1 - FADE)
        for place in range(len(self.verified)):
            verified = sum(rows for (had, right), rows in alike if had > place and right >= place)
            accepted = sum(rows for (had, right), rows in alike if had > place and right > place)
            self.verified[place] += verified
            self.accepted[place] += accepted
            if verified:
                before = self._recent[place]
                self._recent[place] = before[0] * FADE + verified, before[1] * FADE + accepted

    def rates(self) -> list[float]:
        return [accepted / verified for verified, accepted in self._recent]

    def length(self, tokens: int) -> float:
        """Tokens that a step of `tokens` a row brings a row."""
        length, reached = 1.0, 1.0 - self._new
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
        self._plan: deque[Shape] = deque()  # of a look, the steps to come
        self._looks = dict.fromkeys(self._all, 0)  # so far
        self._looked = PLAIN  # at what the newest was
        self._since_look = 0  # steps since it began
        self._worth: dict[int, tuple[dict[Shape, float], list[Shape]]] = {}  # as in _measured, by number of the size
        self._thought = (-1, 0)  # for which size it was thought of what pays, and how many steps ago
        self._warm = WARM_STEPS  # of so many steps how many stored; sequences come with the rows of their prompts
        self._credit = float(OPENING)  # the account, in plain steps of now
        self._plain_s: deque[float] = deque(maxlen=PACED)  # what plain steps would have taken, of late
        self._pace_s = 0.0  # the median of those; 0 as long as they are not ENOUGH
        self._landed = PLAIN  # the last step that has
        self._length = 1.0  # tokens a row that steps with drafts brought, faded

    def shape(self, rows: int) -> Shape:
        """Of the next step, of `rows` sequences."""
        if len(self._all) == 1 or not rows:
            return PLAIN
        self._since_look += 1
        if self._credit < 0:
            self._plan.clear()  # worse than was expected
        if self._time_to_think(rows):
            self._choose(rows)
            if not self._plan:
                self._look_around(rows)
        shape = self._plan.popleft() if self._plan else self._chosen
        self._warm = min(WARM_STEPS, self._warm + 1) if shape.stores else max(0, self._warm - 1)
        return shape

    def _time_to_think(self, rows: int) -> bool:
        size, steps = self._thought
        now = self._costs.size(rows)
        due = not self._plan and (now != size or steps + 1 >= EVERY or self._credit < 0)
        self._thought = (now, 0) if due else (size, steps + 1)
        return due

    def landed(self, rows: int, shape: Shape, seconds: float, outcomes: Sequence[tuple[int, int]]) -> None:
        """A step of `rows` sequences has taken so long. outcomes: as in Acceptance, of the rows whose tokens are wanted."""
        self._costs.add(rows, shape, seconds)
        length, ratio = 1.0, self._expected(rows, shape)
        if shape.tokens > 1 and outcomes:
            self._acceptance.add(outcomes, self._landed.tokens > 1)
            length += sum(accepted for _, accepted in outcomes) / len(outcomes)
            self._length += (length - self._length) * (1 - FADE)
        if shape != PLAIN or self._landed != PLAIN:
            self._worth.clear()  # something was measured
        self._landed = shape
        error = min(self._costs.estimate(rows, shape)[1], MOST_ERROR) if shape == self._chosen else 0.0
        self._pay(rows, seconds / ratio, SHARE * ratio + length - ratio - error)

    def _pay(self, rows: int, plain_s: float, steps: float) -> None:
        """plain_s: what a plain step would have taken. steps: so many get on the account. While few steps tell the pace the
        account does not follow it: beside the first one, in which the host has most to do, it would be many steps more."""
        self._plain_s.append(plain_s)
        if len(self._plain_s) >= ENOUGH:
            before_s, self._pace_s = self._pace_s, median_low(self._plain_s)
            self._credit *= (before_s or self._pace_s) / self._pace_s
        self._credit = min(self._credit + steps, self._most(rows))

    def _most(self, rows: int) -> float:
        """What a full account holds."""
        return LOOK_STEPS * (len(self._all) - 1) + WARM_STEPS * (self._expected(rows, STORING) - 1)

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
        """Stays with what is chosen until another number of drafts is better by `ADVANTAGE`, none at all is as good, or the
        account is empty."""
        speeds, _ = self._measured(rows)
        best = max(speeds, key=lambda shape: speeds[shape])
        missing = WARM_STEPS - self._warm if self._chosen == PLAIN else 0
        if self._credit < 0 or speeds[PLAIN] >= speeds[self._chosen]:
            self._chosen = PLAIN
        wanted = (RESUMING if self._chosen == PLAIN else ADVANTAGE) * speeds[self._chosen]
        if speeds[best] > wanted and self._credit >= self._entry(rows, best, missing):
            self._chosen = best
            self._plan.extend([STORING] * missing)

    def _measured(self, rows: int) -> tuple[dict[Shape, float], list[Shape]]:
        """Tokens in the time of a plain step, by shape, and the shapes with drafts that are worth a look. In a pause neither
        changes, and a host that has many rows has no time to lose with a short step."""
        size = self._costs.size(rows)
        if size not in self._worth:
            length, ratio = self._acceptance.length, self._costs.ratio
            speeds = {shape: length(shape.tokens) / (ratio(rows, shape) or inf) for shape in self._all}
            self._worth[size] = speeds, [shape for shape in self._all[1:] if self._may_pay(rows, shape)]
        return self._worth[size]

    def _entry(self, rows: int, shape: Shape, missing: int) -> float:
        """What it takes to come to steps with drafts: so many that store, one that has none yet, and another in flight."""
        return missing * (self._expected(rows, STORING) - 1) + 2 * (self._expected(rows, shape) - 1)

    def _look_around(self, rows: int) -> None:
        """Begins a look at another number of drafts in turn, when it is time. Where there are drafts every other look is one at
        what they are compared with, and so is the first one at a size."""
        others = [shape for shape in self._measured(rows)[1] if shape != self._chosen]
        known = self._costs.known(rows, self._chosen)
        if self._chosen == PLAIN or (self._looked == self._chosen and others and known):
            self._look_at_one(rows, others)
        elif self._since_look >= (self._wait(self._chosen) if known else FIRST_PERIOD):
            self._look(self._chosen, [PLAIN, self._chosen] * PAIRS)

    def _look_at_one(self, rows: int, others: Sequence[Shape]) -> None:
        """If the account can afford it. What it never can is looked at when it is full, as it may have been measured at a bad
        time; nothing else waits for that."""
        missing = WARM_STEPS - self._warm if self._chosen == PLAIN else 0
        warming = [STORING, PLAIN] * PAIRS + [STORING] * missing if missing else []
        most = self._most(rows)
        for shape in sorted(others, key=lambda shape: (self._wait(shape), shape.tokens <= self._looked.tokens)):
            if self._since_look < self._wait(shape):
                return
            ratio = self._expected(rows, shape)
            price = PAIRS * (ratio - 1) + self._entry(rows, shape, missing)
            price += LOOK_STEPS * max(0.0, ratio - self._acceptance.length(shape.tokens))
            if self._credit >= min(price, most):
                self._look(shape, [shape, PLAIN] * PAIRS + warming + [shape] * LOOK_STEPS)
            if self._credit >= most or price <= most:
                return

    def _look(self, shape: Shape, plan: Sequence[Shape]) -> None:
        self._plan.extend(plan)
        self._looked, self._since_look = shape, 0
        self._looks[shape] += 1

    def _wait(self, shape: Shape) -> int:
        """Steps from the newest look to the next one at this shape."""
        looks = self._looks[shape]
        return min(LOOK_PERIOD, FIRST_PERIOD << 2 * (looks - 1)) if looks else 1

    def _may_pay(self, rows: int, shape: Shape) -> bool:
        """Whether to look at it: at one draft always, as that tells how often a first one is right; at more where they would
        pay if all behind a right one were right too."""
        return shape.tokens == 2 or 1 + self._acceptance.rates()[0] * (shape.tokens - 1) > self._expected(rows, shape)

    def _expected(self, rows: int, shape: Shape) -> float:
        """Its ratio, in proportion to that of a token less while it is not known; a step is not taken to store for nothing."""
        ratio = self._costs.ratio(rows, shape)
        if ratio or shape.tokens == 1:
            return ratio or (STORED if shape.stores else 1.0)
        return self._expected(rows, Shape(shape.tokens - 1, stores=shape.tokens > 2)) * shape.tokens / (shape.tokens - 1)
