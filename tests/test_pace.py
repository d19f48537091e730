"""A device that the host is ahead of: made up here, with a clock of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

import prefill.worker
from model.batch import Batch, Row
from prefill.engine import Engine
from prefill.pace import STEPS_AHEAD, HostMark, Pace
from prefill.prompt import Chunk
from tests.fake_runner import FakeRunner, expected_text
from tests.test_prefill_scheduler import prompt_of
from tests.test_workers import GREEDY, PATIENCE_S, Cluster, prompt
from wire.messages import Abort
from wire.worker import LOST_EXIT, Presence


class Device:
    """Each step takes `step_s` of `clock`, one after another. Its marks come in pairs, begin and end."""

    def __init__(self, step_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.step_s, self.clock = step_s, clock
        self.marks: list[Point] = []

    def mark(self) -> Point:
        free_s = self.marks[-1].at_s if self.marks else 0.0
        begins = len(self.marks) % 2 == 0
        self.marks.append(Point(self.clock, max(self.clock(), free_s) if begins else free_s + self.step_s))
        return self.marks[-1]


class Point:
    def __init__(self, clock: Callable[[], float], at_s: float) -> None:
        self._clock, self.at_s = clock, at_s
        self.made_s = clock()

    def passed(self) -> bool:
        return self._clock() >= self.at_s

    def seconds_since(self, earlier: Point) -> float:
        return self.at_s - earlier.at_s


def test_a_pace_counts_what_is_under_way_and_times_it_on_the_device() -> None:
    now_s = 7.0
    device = Device(0.05, lambda: now_s)
    pace = Pace(device.mark, lambda: now_s)
    assert [pace.still, pace.full, *pace.over()] == [True, False]
    first, second = [Chunk(prompt_of(200), 100)], [Chunk(prompt_of(9), 7)]
    for chunks in (first, second):
        with pace.step(chunks):
            pass
    assert [pace.still, pace.full, *pace.over()] == [False, True], "both were started at once, neither is over"
    now_s += 0.06
    ((chunks, *times),) = pace.over()
    assert chunks is first and not pace.full and times == pytest.approx([7.0, 7.05])
    now_s += 0.06
    ((chunks, *times),) = pace.over()
    assert chunks is second and times == pytest.approx([7.05, 7.1]), "the second began when the first had ended"
    now_s = 9.0
    with pace.step(first):
        pass
    now_s = 10.0
    ((_, *times),) = pace.over()
    assert times == pytest.approx([9.0, 9.05]), "a pause is nobody's time, nor is how late it was noticed"


@pytest.mark.parametrize(
    ("rate", "first", "second"),
    [(0.5, [6.0, 8.0], [12.5, 14.5]), (1.0, [7.0, 9.0], [20.0, 22.0]), (2.0, [7.0, 9.0], [33.0, 35.0])],
)
def test_two_clocks_may_drift(rate: float, first: list[float], second: list[float]) -> None:
    """While a second passes on the device `rate` pass on the host. No step ends after it was seen to be over, and what has
    added up is forgotten in a pause."""
    now_s = 7.0
    device = Device(2.0, lambda: now_s)
    pace = Pace(device.mark, lambda: 7.0 + (now_s - 7.0) * rate)
    for begin_s, expected in ((7.0, first), (20.0, second)):
        now_s = begin_s
        with pace.step([]):
            pass
        now_s += 2.0
        ((_, *times),) = pace.over()
        assert times == expected


@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_drift_does_not_add_up_on_a_device_without_a_pause(rate: float) -> None:
    """Looked at ten times a step, it is known to a tenth of a step when each ended, however many came before."""
    now_s = 0.0
    device = Device(1.0, lambda: now_s)
    pace = Pace(device.mark, lambda: now_s * rate)
    ends = []
    for turn in range(200):
        now_s = turn / 10
        ends += [end_s for _, _, end_s in pace.over()]
        if not pace.full:
            with pace.step([]):
                pass
    assert len(ends) == 19 and ends == pytest.approx([rate * number for number in range(1, 20)], abs=0.1 * rate + 1e-9)


def test_a_step_that_raises_is_not_waited_for() -> None:
    pace = Pace(Device(60.0).mark)
    with pytest.raises(RuntimeError, match="broke"), pace.step([]):
        raise RuntimeError("the model broke")
    assert pace.still and pace.over() == []


def test_on_a_cpu_a_step_is_over_when_it_returns() -> None:
    pace = Pace(HostMark)
    before_s = time.monotonic()
    with pace.step([]):
        time.sleep(0.02)
    after_s = time.monotonic()
    ((_, begin_s, end_s),) = pace.over()
    assert before_s <= begin_s <= end_s - 0.02 and end_s <= after_s and pace.still


def test_an_upload_is_one_tensor_whose_parts_are_aligned() -> None:
    """One copy does not wait for another, and kernels are compiled for aligned pointers."""
    batch = Batch.build([Row([5, 6, 7], 9, 2, [4, 8, 1]), Row([3], 0, 1, [6])], 4)
    parts = [batch.tokens, batch.positions, batch.sequence_ids, batch.starts, batch.cu_tokens, batch.slots, batch.page_table]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert [part.storage_offset() % 16 for part in parts] == [0] * len(parts)
    assert [part.tolist() for part in parts[:-1]] == [
        [5, 6, 7, 3], [9, 10, 11, 0], [0, 0, 0, 1], [9, 0], [0, 3, 4], [2, 1]
    ]  # fmt: skip
    assert batch.page_table[:, :4].tolist() == [[4, 8, 1, 0], [6, 0, 0, 0]] and batch.longest == 3


def test_a_prefill_worker_keeps_its_device_busy_and_is_never_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of several chunks: the next is started while one computes, no third waits, and the rate is the device's."""
    device = Device(0.25)  # a host may be late by so much
    monkeypatch.setattr(prefill.worker, "marks_of", lambda of: device.mark)
    told: list[tuple[int, float]] = []

    def stepped(presence: Presence, tokens: int, start_s: float, now_s: float) -> None:
        if presence.name.startswith("prefill"):
            told.append((tokens, now_s - start_s))

    monkeypatch.setattr(Presence, "stepped", stepped)
    with Cluster() as cluster:
        router, worker, decode = cluster.router, cluster.prefill(), cluster.decode()
        rid = router.ask(worker.address, decode.address, prompt(65), GREEDY)
        router.until(lambda: len(router.finished) == 1, "the text")
        assert router.ids[rid, 0, 0] == expected_text(prompt(65), 12, stop=())
        steps = list(zip(device.marks[::2], device.marks[1::2], strict=True))
        assert len(steps) == 8
        for number, (begin, _) in enumerate(steps):
            ahead = sum(end.at_s > begin.made_s for _, end in steps[:number])
            assert ahead < STEPS_AHEAD, "a third step was started"
        gaps = [begin.at_s - end.at_s for (_, end), (begin, _) in itertools.pairwise(steps)]
        assert sum(gap == 0.0 for gap in gaps) >= 5, f"the device waited for the host: {gaps}"
        router.until(lambda: len(told) == 8, "all steps reported")
        assert [tokens for tokens, _ in told] == [8] * 8
        _, counts, seconds = worker.worker.metrics.snapshot()[2]["prefill_seconds"]
        assert sum(counts) == 1 and seconds >= 8 * 0.25, "a prompt is computed when its last step is over"
        assert [seconds for _, seconds in told] == pytest.approx([0.25] * 8), (
            "launches take no time, steps do: the router's rates follow"
        )


@pytest.mark.parametrize("shows", ["when a step is started", "when it should be over"])
def test_a_device_that_is_lost_ends_the_worker_with_one_line(
    shows: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would fail every prompt from then on. Its silence tells the router, which sends them elsewhere."""
    monkeypatch.setattr(Engine, "lost", lambda engine: "CUDA error: an illegal memory access was encountered")
    with Cluster() as cluster:
        router, runner = cluster.router, FakeRunner()
        if shows == "when a step is started":
            runner.fail = 1
        else:
            monkeypatch.setattr(HostMark, "passed", lambda mark: (_ for _ in ()).throw(RuntimeError("CUDA error")))
        worker, decode = cluster.prefill(runner), cluster.decode()
        router.ask(worker.address, decode.address, prompt(9), GREEDY)
        worker.join(PATIENCE_S)
        assert worker.exit_code == LOST_EXIT and not router.failed
        [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("prefill can not go on")]
        assert "illegal memory access" in line
        router.outbox.send(decode.address, Abort(101, 0))
