"""The choice of how many drafts a step carries, on machines that are made up: their costs and what they accept are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from random import Random

import pytest

from decode.graphs import batch_sizes
from decode.speculation import LOOK_PERIOD, LOOK_STEPS, PLAIN_STEPS, SHARE, WARM_STEPS, Acceptance, Costs, Speculation
from decode.step import PLAIN, STORING, Shape
from wire.metrics import Metrics

MOST = 4
ROOM = 0.005  # by which a mean of noisy steps may miss what it is of
STORING_COST = 1.1  # of a step that stores, beside a plain one
COLD = 0.7  # of the drafts that would be right without any of the rows that they look back on
Cost = Callable[[int, int], float]


@dataclass
class Machine:
    """Steps of `rows(step)` sequences. cost: seconds by rows and tokens; acceptance: of the draft at each position, by step,
    where the last WARM_STEPS steps have stored. `run` may be called again and goes on."""

    cost: Cost
    acceptance: Callable[[int], Sequence[float]]
    rows: Callable[[int], int] = lambda step: 4
    noise: float = 0.03
    in_flight: int = 1  # steps that are launched before a step's results are here

    def __post_init__(self) -> None:
        self.stored = deque([True] * WARM_STEPS, WARM_STEPS)

    def run(self, speculation: Speculation, steps: int, seed: int = 0) -> Run:
        rng, run = Random(seed), Run()
        drafts, waiting = 0, []
        for step in range(steps):
            rows = self.rows(step)
            shape = speculation.shape(rows)
            had, drafts = min(drafts, shape.tokens - 1), shape.tokens - 1
            warm = COLD + (1 - COLD) * sum(self.stored) / WARM_STEPS
            rates = [rate * warm for rate in self.acceptance(step)]
            outcomes = [(had, accepted(rng, rates[:had])) for _ in range(rows)]
            self.stored.append(shape.stores)
            plain = self.cost(rows, 1)
            seconds = STORING_COST * plain if shape == STORING else self.cost(rows, shape.tokens)
            seconds *= rng.lognormvariate(0, self.noise)
            run.seconds += seconds
            run.plain_seconds += plain * (1 + sum(count for _, count in outcomes) / rows)
            run.shapes.append(shape)
            waiting.append((rows, shape, seconds, outcomes))
            if len(waiting) > self.in_flight:
                speculation.landed(*waiting.pop(0))
        return run


def accepted(rng: Random, rates: Sequence[float]) -> int:
    """Of as many drafts, right so often each."""
    return next((place for place, rate in enumerate(rates) if rng.random() >= rate), len(rates))


class Run:
    """What a run took, and what plain steps would have taken for the same tokens."""

    def __init__(self) -> None:
        self.seconds, self.plain_seconds = 0.0, 0.0
        self.shapes: list[Shape] = []

    @property
    def tokens(self) -> list[int]:
        return [shape.tokens for shape in self.shapes]

    @property
    def slower(self) -> float:
        return self.seconds / self.plain_seconds - 1


def linear(slope: float) -> Cost:
    """A step of another token of each row takes `slope` of a plain one more."""
    return lambda rows, tokens: (0.004 + 0.0001 * rows) * (1 + slope * (tokens - 1))


def steady(*rates: float) -> Callable[[int], Sequence[float]]:
    return lambda step: rates


@pytest.mark.parametrize(("most", "in_flight"), [(1, 1), (4, 0), (4, 1)])
@pytest.mark.parametrize("slope", [0.02, 0.15, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_never_much_slower_than_off(rate: float, slope: float, in_flight: int, most: int) -> None:
    """Whatever drafts cost and bring: at most 2 % in the long run, however long that is; and the account of the beginning."""
    machine = Machine(linear(slope), steady(rate, rate, rate, rate), in_flight=in_flight)
    run = machine.run(Speculation(most, batch_sizes(64)), 8000)
    assert run.slower <= 0.02
    start = (LOOK_STEPS * most + WARM_STEPS * (STORING_COST - 1)) * machine.cost(4, 1)
    assert run.seconds - run.plain_seconds <= start + (SHARE + ROOM) * run.seconds


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(
    ("slope", "rates"),
    [(0.1, (0.8, 0.7, 0.6, 0.5)), (0.05, (0.9, 0.9, 0.9, 0.9)), (0.3, (0.7, 0.5, 0.3, 0.1)), (0.5, (0.9, 0.2, 0.1, 0.0))],
)
def test_what_pays_is_found(slope: float, rates: tuple[float, ...], rows: int) -> None:
    """At least 0.94 of the speed of the best number of tokens; nobody says which that is."""
    machine = Machine(linear(slope), steady(*rates), lambda step: rows)
    best = 0.0
    for tokens in range(1, MOST + 2):
        length = reached = 1.0
        for rate in rates[: tokens - 1]:
            reached *= rate
            length += reached
        best = max(best, length / (1 + slope * (tokens - 1)))
    assert best > 1.2
    run = machine.run(Speculation(MOST, batch_sizes(64)), 6000)
    assert run.plain_seconds / run.seconds >= 0.94 * best


def test_it_follows_the_text() -> None:
    """Text that is easy to guess, then text that is not, then easy text again."""
    speculation = Speculation(2, batch_sizes(8))
    length = 6000
    machine = Machine(linear(0.3), lambda step: (0.9, 0.9) if step // length % 2 == 0 else (0.05, 0.05), lambda step: 1)
    tokens = machine.run(speculation, 3 * length).tokens
    easy, hard, again = tokens[:length], tokens[length : 2 * length], tokens[2 * length :]
    assert sum(count == 3 for count in easy) >= 0.9 * length
    assert hard.index(1) < 100 and sum(count == 1 for count in hard[100:]) >= 0.9 * (length - 100)
    assert 3 in again[: 8 * LOOK_PERIOD] and sum(count == 3 for count in again[-length // 2 :]) >= 0.9 * length / 2


def test_it_follows_the_batch() -> None:
    """A draft is nearly free for 2 rows and costs more than it brings for 32, and the batch changes between the two."""

    def cost(rows: int, tokens: int) -> float:
        return 0.004 * (1 + (0.05 if rows < 16 else 0.9) * (tokens - 1))

    machine = Machine(cost, steady(0.7, 0.5), lambda step: 2 if step // 500 % 2 == 0 else 32)
    run = machine.run(Speculation(2, batch_sizes(32)), 10_000)
    few = [count for step, count in enumerate(run.tokens) if step // 500 % 2 == 0]
    many = [count for step, count in enumerate(run.tokens) if step // 500 % 2]
    assert sum(count == 3 for count in few) >= 0.85 * len(few)
    assert sum(count == 1 for count in many) >= 0.85 * len(many)


def test_what_is_too_dear_does_not_end_the_looks() -> None:
    """Four drafts cost more than the account ever holds; three are nearly free, and begin to be right late."""
    costs = (1.0, 1.1, 1.2, 1.3, 6.0)
    rates = ((0.0,) * MOST, (0.9,) * MOST)
    machine = Machine(lambda rows, tokens: 0.004 * costs[tokens - 1], lambda step: rates[step >= 3000])
    run = machine.run(Speculation(MOST, batch_sizes(8)), 9000)
    assert sum(count == 4 for count in run.tokens[-2000:]) >= 0.8 * 2000


@pytest.mark.parametrize("most", [1, 4])
def test_a_first_look_at_a_bad_time_is_not_the_last(most: int) -> None:
    """The first steps with drafts take ten times as long as those that come later."""
    slow = iter(range(LOOK_STEPS))

    def cost(rows: int, tokens: int) -> float:
        return 0.004 * (1 + 0.1 * (tokens - 1)) * (10 if tokens > 1 and next(slow, None) is not None else 1)

    run = Machine(cost, steady(0.9, 0.9, 0.9, 0.9)).run(Speculation(most, batch_sizes(8)), 16_000)
    assert sum(count > 1 for count in run.tokens[-2000:]) >= 0.9 * 2000


def test_a_pause_is_of_plain_steps_and_drafts_come_behind_steps_that_store() -> None:
    """Drafts that are hardly ever right. Behind the looks of the beginning nothing stores but what comes right before one."""
    run = Machine(linear(0.3), steady(0.1), noise=0.01).run(Speculation(1, batch_sizes(8)), 8000)
    settled = run.shapes[1000:]
    assert settled.count(PLAIN) >= 0.9 * len(settled)
    kinds = [(shape, len(list(those))) for shape, those in groupby(settled)]
    looks = [at for at, (shape, _) in enumerate(kinds) if shape.tokens > 1 and at > 1]
    assert len(looks) >= 5
    for at in looks:
        assert kinds[at - 2][0] == PLAIN and kinds[at - 1] == (STORING, WARM_STEPS), "a look begins warm"
        assert kinds[at][1] <= LOOK_STEPS
    assert settled.count(STORING) <= WARM_STEPS * (len(looks) + 1), "nothing else stores"


def test_many_drafts_are_not_looked_at_where_the_first_is_never_right() -> None:
    """A look at one tells; and when that begins to be right, the others are looked at too."""
    machine = Machine(linear(0.15), lambda step: (0.9,) * MOST if step >= 4000 else (0.0,) * MOST)
    tokens = machine.run(Speculation(MOST, batch_sizes(8)), 9000).tokens
    assert max(tokens[:4000]) == 2 and tokens[:4000].count(2) >= 8 * LOOK_STEPS
    assert sum(count == MOST + 1 for count in tokens[-2000:]) >= 0.8 * 2000


def test_what_looks_back_on_hardly_any_rows_is_not_counted() -> None:
    """Drafts pay warm, and would not cold: a look that began at once would never end a pause."""
    easy = 3000
    machine = Machine(linear(0.75), lambda step: (0.95,) if step >= easy else (0.0,))
    tokens = machine.run(Speculation(1, batch_sizes(8)), 4 * easy).tokens
    assert sum(count == 1 for count in tokens[:easy]) >= 0.9 * easy
    assert COLD * 0.95 < 0.75 and sum(count == 2 for count in tokens[-easy:]) >= 0.9 * easy


def test_what_drafts_are_compared_with_is_measured_anew() -> None:
    """A plain step becomes cheaper, of the same rows (their contexts are shorter now); one with drafts does not."""
    speculation, before = Speculation(2, batch_sizes(8)), Machine(lambda rows, tokens: 0.006, steady(0.8, 0.8))
    assert before.run(speculation, 2000).tokens[-500:].count(3) >= 450
    after = Machine(lambda rows, tokens: 0.002 if tokens == 1 else 0.006, steady(0.8, 0.8))
    tokens = after.run(speculation, 4 * LOOK_PERIOD).tokens
    assert 1 in tokens[: LOOK_PERIOD + PLAIN_STEPS] and tokens[LOOK_PERIOD + 50 :].count(1) >= 0.9 * (3 * LOOK_PERIOD - 50)


def test_it_does_not_waver_between_equals() -> None:
    """One draft brings exactly what it costs more or less; measured with noise, the choice changes now and then only."""
    machine = Machine(linear(0.45), steady(0.5), noise=0.05)
    tokens = machine.run(Speculation(1, batch_sizes(8)), 8000).tokens
    assert sum(one != other for one, other in pairwise(tokens)) <= 8000 / LOOK_PERIOD * 4


def test_stalls_are_not_the_drafts_doing() -> None:
    """One step in fifty takes a hundred times as long, whatever it carries: drafts still pay."""
    rng = Random(5)
    machine = Machine(lambda rows, tokens: linear(0.1)(rows, tokens) * (100 if rng.random() < 0.02 else 1), steady(0.8, 0.8))
    tokens = machine.run(Speculation(2, batch_sizes(8)), 6000).tokens
    assert sum(count == 3 for count in tokens[1000:]) >= 0.8 * 5000


def test_what_does_not_run_is_not_looked_at() -> None:
    """A worker asks in every turn, also while nothing runs."""
    speculation, machine = Speculation(1, batch_sizes(8)), Machine(linear(0.1), steady(0.8), lambda step: 1)
    machine.run(speculation, 4)
    assert {speculation.shape(0) for _ in range(1000)} == {PLAIN}
    assert machine.run(speculation, LOOK_STEPS).tokens[1:] == [2] * (LOOK_STEPS - 1), "the look is still to come"


def test_off_is_off() -> None:
    speculation = Speculation(0, batch_sizes(8))
    assert set(Machine(linear(0.1), steady()).run(speculation, 500).shapes) == {PLAIN}


def test_acceptance_is_counted_by_position() -> None:
    acceptance = Acceptance(3)
    acceptance.add([(3, 3), (3, 1), (1, 1), (0, 0), (2, 0)])
    assert acceptance.verified == [4, 2, 1] and acceptance.accepted == [3, 1, 1]
    for _ in range(500):
        acceptance.add([(3, 1)] * 8)
    assert acceptance.rates() == pytest.approx([1.0, 0.0, 1.0], abs=0.01)
    assert acceptance.length(1) == 1 and acceptance.length(3) == pytest.approx(2.0, abs=0.02)


def test_costs_of_a_size_that_is_not_measured_are_in_proportion_to_the_nearest() -> None:
    costs, drafted = Costs([1, 2, 4, 8]), Shape(2, stores=True)
    for _ in range(3):
        costs.add(1, PLAIN, 1.0)
        costs.add(1, STORING, 1.25)
        costs.add(1, drafted, 1.5)
        costs.add(8, PLAIN, 4.0)
    assert costs.seconds(1, drafted) == 1.5 and costs.seconds(7, drafted) == pytest.approx(6.0)
    assert costs.seconds(1, STORING) == 1.25 and costs.seconds(7, STORING) == pytest.approx(5.0)
    assert costs.seconds(1, Shape(3, stores=True)) == 0 and costs.seconds(2, drafted) == 0, "nobody knows"
    for seconds in (10.0, 12.0, 11.0):
        costs.add(5, drafted, seconds)
    assert costs.seconds(8, drafted) == 11.0


def test_what_is_told() -> None:
    speculation, metrics = Speculation(2, batch_sizes(8)), Metrics()
    Machine(linear(0.05), steady(0.8, 0.5)).run(speculation, 3000)
    speculation.report(metrics)
    counters, gauges, _ = metrics.snapshot()
    assert gauges["drafts"] == 2 and gauges["accepted_length"] == pytest.approx(2.2, abs=0.3)
    assert gauges["draft_1_acceptance"] == pytest.approx(0.8, abs=0.2)
    assert counters["draft_2_accepted"] / counters["draft_2_verified"] == pytest.approx(0.5, abs=0.05)
    assert counters["draft_2_verified"] == pytest.approx(counters["draft_1_accepted"], rel=0.1)
