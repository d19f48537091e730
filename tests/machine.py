"""Machines that are made up, for the choice of how many drafts a step carries: what their steps cost and what drafts they
accept is known, so it can be said what a choice costs beside none and beside the best one.

``python -m tests.machine [SEEDS STEPS]`` prints the table of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import sqrt
from random import Random
from statistics import median

from decode.graphs import batch_sizes
from decode.speculation import WARM_STEPS, Speculation
from decode.step import PLAIN, STORING, Shape

STORING_COST = 1.1  # of a step that stores, beside a plain one
COLD = 0.7  # of the drafts that would be right without any of the rows that they look back on
OUTLIER = 10  # times as long
Cost = Callable[[int, int], float]
Choice = Callable[[int], Shape]


@dataclass
class Machine:
    """Steps of `rows(step)` sequences. cost: seconds by rows and tokens; acceptance: of the draft at each position, by step,
    where the last WARM_STEPS steps of a sequence have stored. `run` may be called again and goes on."""

    cost: Cost
    acceptance: Callable[[int], Sequence[float]]
    rows: Callable[[int], int] = lambda step: 4
    noise: float = (
        0.03  # of the seconds that are measured; what a run is said to have taken is without it, and without outliers
    )
    in_flight: int = 1  # steps that are launched before a step's results are here
    pace: Callable[[int], float] = lambda step: 1.0  # what all steps take longer at a time
    outliers: float = 0.0  # share of the steps that are measured as OUTLIER times as long
    first: float = 1.0  # times as long the first step of each kind takes
    text: int = 0  # tokens of a sequence; 0: they do not end

    def __post_init__(self) -> None:
        self._plains = [0]  # of the steps so far, how many did not store
        self._texts: list[_Text] = []
        self._met: set[Shape] = set()

    def run(self, speculation: Speculation | Shape, steps: int, seed: int = 0) -> Run:
        """What is chosen, or the same shape always."""
        rng, run = Random(seed), Run()
        waiting: list[tuple[int, Shape, float, list[tuple[int, int]]]] = []
        for step in range(steps):
            rows = self.rows(step)
            shape = speculation if isinstance(speculation, Shape) else speculation.shape(rows)
            texts = self._running(rows, rng)
            outcomes, useful = self._outcomes(texts, shape, self.acceptance(step), rng)
            first = 1 if shape in self._met else self.first
            self._met.add(shape)
            plain = self.cost(rows, 1) * self.pace(step)
            seconds = self._seconds(rows, shape) * self.pace(step) * first
            run.add(shape, seconds, plain * useful / rows * (first if shape == PLAIN else 1))
            noise = rng.lognormvariate(0, self.noise) * (OUTLIER if rng.random() < self.outliers else 1)
            waiting.append((rows, shape, seconds * noise, outcomes))
            if len(waiting) > self.in_flight and isinstance(speculation, Speculation):
                speculation.landed(*waiting.pop(0))
        return run

    def _seconds(self, rows: int, shape: Shape) -> float:
        return STORING_COST * self.cost(rows, 1) if shape == STORING else self.cost(rows, shape.tokens)

    def _running(self, rows: int, rng: Random) -> list[_Text]:
        """The texts of the next step; one that is over has been a step too long in the batch, as the end is noticed late."""
        self._texts = [text for text in self._texts if text.late <= self.in_flight][:rows]
        while len(self._texts) < rows:
            begun = rng.randrange(self.text) if self.text and len(self._plains) == 1 else 0
            self._texts.append(_Text(len(self._plains), (self.text or sys.maxsize) - begun))
        return self._texts

    def _outcomes(
        self, texts: list[_Text], shape: Shape, rates: Sequence[float], rng: Random
    ) -> tuple[list[tuple[int, int]], int]:
        """What `landed` is told, and how many tokens there are that a plain step would have brought one by one."""
        outcomes, useful, step = [], 0, len(self._plains) - 1
        for text in texts:
            if text.left <= 0:
                text.late += 1
                useful += 1  # nor is a plain step of use
                continue
            since = max(text.first - 1, step - WARM_STEPS)
            warm = 1 - (1 - COLD) * (self._plains[step] - self._plains[since]) / WARM_STEPS
            had, text.drafts = min(text.drafts, shape.tokens - 1), shape.tokens - 1
            count = accepted(rng, [rate * warm for rate in rates[:had]])
            outcomes.append((min(had, text.left - 1), min(count, text.left - 1)))
            useful += min(count + 1, text.left)
            text.left -= count + 1
            text.late += text.left <= 0
        self._plains.append(self._plains[-1] + (not shape.stores))
        return outcomes, useful


@dataclass
class _Text:
    first: int  # number of its first step, from 1 on
    left: int  # tokens
    drafts: int = 0  # behind its last token
    late: int = 0  # steps since its last token, that one included


def accepted(rng: Random, rates: Sequence[float]) -> int:
    """Of as many drafts, right so often each."""
    return next((place for place, rate in enumerate(rates) if rng.random() >= rate), len(rates))


class Run:
    """What a run took, and what plain steps would have taken for the same tokens."""

    def __init__(self) -> None:
        self.seconds, self.plain_seconds = 0.0, 0.0
        self.shapes: list[Shape] = []

    def add(self, shape: Shape, seconds: float, plain_seconds: float) -> None:
        self.seconds += seconds
        self.plain_seconds += plain_seconds
        self.shapes.append(shape)

    @property
    def tokens(self) -> list[int]:
        return [shape.tokens for shape in self.shapes]

    @property
    def slower(self) -> float:
        return self.seconds / self.plain_seconds - 1

    @property
    def speed(self) -> float:
        """Beside plain steps."""
        return self.plain_seconds / self.seconds


def steady(*rates: float) -> Callable[[int], Sequence[float]]:
    return lambda step: rates


def linear(slope: float) -> Cost:
    """A step of another token of each row takes `slope` of a plain one more."""
    return lambda rows, tokens: (0.004 + 0.0001 * rows) * (1 + slope * (tokens - 1))


BUNDLED = (1, 1.30, 1.73, 2.00, 2.35)  # a step of the bundled model by its tokens, at batch 1 on a CPU
LONGEST = 20_000  # steps
MOST = 2  # drafts
ACCEPTED = {"0.98": (0.98, 0.96, 0.94, 0.92), "0.8": (0.8, 0.6, 0.4, 0.3), "0.3": (0.3,) * 4, "none": (0.0,) * 4}


def bundled(rows: int, tokens: int) -> float:
    return 0.023 * BUNDLED[tokens - 1]


def by_rows(rows: int, tokens: int) -> float:
    """As of the bundled model on a CPU: a token more costs nearly a token when there are many rows."""
    return (0.022 + 0.0018 * rows) * (1 + (0.33 + 0.57 * sqrt(rows / 64)) * (tokens - 1))


def slow_at_times(seed: int, slower: float, slow_steps: int, steps: int) -> Callable[[int], float]:
    """All steps take longer for about so many, and then do not for about so many."""
    rng = Random(seed)
    paces: list[float] = []
    while len(paces) < LONGEST:
        for pace, length in ((slower, slow_steps), (1.0, steps)):
            paces += [pace] * int(length * rng.uniform(0.5, 1.5))
    begin = rng.randrange(slow_steps + steps)
    return lambda step: paces[(begin + step) % LONGEST]


def wandering(seed: int) -> Callable[[int], int]:
    """Up and down between 1 and 64."""
    rng = Random(seed)
    rows = [rng.randrange(1, 65)]
    while len(rows) < LONGEST:
        rows += [max(1, min(64, rows[-1] + rng.randrange(-6, 7)))] * rng.randrange(2, 30)
    return rows.__getitem__


def one(step: int) -> int:
    return 1


@dataclass(frozen=True)
class Scenario:
    """At batch 1 with the costs of the bundled model, or with those by rows and a batch that wanders between 1 and 64."""

    name: str
    noise: float = 0.1
    outliers: float = 0.0
    first: float = 1.0
    text: int = 0
    slow: tuple[float, int, int] | None = None  # as in slow_at_times
    wanders: bool = False

    def machine(self, rates: Sequence[float], seed: int) -> Machine:
        return Machine(
            by_rows if self.wanders else bundled,
            steady(*rates),
            wandering(seed) if self.wanders else lambda step: 1,
            noise=self.noise,
            in_flight=seed % 2,
            pace=slow_at_times(seed, *self.slow) if self.slow else lambda step: 1.0,
            outliers=self.outliers,
            first=self.first,
            text=self.text,
        )

    def measured(self, seed: int, rates: Sequence[float], steps: int) -> tuple[float, float]:
        """The speed that is chosen, beside plain steps and beside the best of all shapes: the plain one if most drafts are
        wrong."""
        speed = self.machine(rates, seed).run(Speculation(MOST, batch_sizes(64)), steps, seed).speed
        shapes = [Shape(tokens, stores=True) for tokens in range(2, MOST + 2)] if rates[0] > 0.5 else []
        best = max([1.0, *(self.machine(rates, seed).run(shape, steps, seed).speed for shape in shapes)])
        return speed, speed / best


SCENARIOS = [
    Scenario("steps differ by 5 %", noise=0.05),
    UNSTEADY := Scenario("steps differ by 20 %", noise=0.2),
    Scenario("one in 100 seems ten times as long", noise=0.05, outliers=0.01),
    Scenario("the first of each shape takes ten times as long", noise=0.05, first=10),
    SLOW := Scenario("1.5 times as long for 200 steps of 600", slow=(1.5, 200, 400)),
    BURSTS := Scenario("twice as long for 30 steps of 150", slow=(2.0, 30, 120)),
    SHORT := Scenario("texts of 20 tokens", text=20),
    WANDERING := Scenario("batch between 1 and 64", wanders=True),
    LATE := Scenario("that, and texts of 100 tokens", wanders=True, text=100),
    Scenario("that, differ by 20 %, outliers, slow times", 0.2, 0.01, text=100, slow=(1.5, 200, 400), wanders=True),
]


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.machine", description="The table of docs/benchmarks.md.")
    parser.add_argument("seeds", type=int, nargs="?", default=100, help="runs of each machine (default: 100)")
    parser.add_argument("steps", type=int, nargs="?", default=1500, help="steps of each run (default: 1500)")
    given = parser.parse_args()
    seeds, steps = given.seeds, given.steps
    print("| machine | accepted | beside plain: worst, median | beside the best: worst, median |\n|---|---|---|---|")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for scenario, (name, rates) in product(SCENARIOS, ACCEPTED.items()):
            plain, best = zip(*pool.map(partial(scenario.measured, rates=rates, steps=steps), range(seeds)), strict=True)
            cells = [scenario.name, name, f"{min(plain):.3f}, {median(plain):.3f}", f"{min(best):.3f}, {median(best):.3f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
