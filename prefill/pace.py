"""How far the host is ahead of the device, and when each step ran there."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from prefill.prompt import Chunk

STEPS_AHEAD = 2  # one computes, one waits behind it; more would only choose their prompts too early


class Mark(Protocol):
    """A point in the work of a device."""

    def passed(self) -> bool: ...

    def seconds_since(self, earlier: Any) -> float: ...


class HostMark:
    """On a CPU work is done when it returns."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()

    def passed(self) -> bool:
        return True

    def seconds_since(self, earlier: HostMark) -> float:
        return self._at_s - earlier._at_s


class CudaMark:
    """Behind all that was started on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: CudaMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def marks_of(device: torch.device) -> Callable[[], Mark]:
    return (lambda: CudaMark(device)) if device.type == "cuda" else HostMark


class Pace:
    """Of the steps that are started and not yet over: `with pace.step(chunks): ...` starts one, `over` gives those that are
    done. A step's time runs on the device, from the end of the one before where that is later.

    Marks tell times apart, not what time it is. That comes from `clock`: a mark that passed when it was made, the first one
    after a pause, and from then on the end of the step before. So nothing adds up on a device that has no pause for days.
    """

    def __init__(self, mark: Callable[[], Mark], clock: Callable[[], float] = time.monotonic) -> None:
        self._mark, self._clock = mark, clock
        self._steps: deque[tuple[list[Chunk], Mark, Mark]] = deque()  # with begin and end
        self._known: tuple[Mark, float] | None = None  # a mark and when it passed
        self._awaited_s = -math.inf  # a step was not over yet when it was looked at last

    @property
    def full(self) -> bool:
        return len(self._steps) >= STEPS_AHEAD

    @property
    def still(self) -> bool:
        return not self._steps

    @contextmanager
    def step(self, chunks: list[Chunk]) -> Iterator[None]:
        """One that raises is forgotten."""
        begin = self._mark()
        if self.still:
            self._known = begin, self._clock()
        yield
        self._steps.append((chunks, begin, self._mark()))

    def over(self) -> list[tuple[list[Chunk], float, float]]:
        """(chunks, begin, end) of the steps that have ended since the last call, in order. Times are the clock's."""
        ended = []
        while self._steps:
            chunks, begin, end = self._steps[0]
            asked_s = self._clock()
            if not end.passed():
                self._awaited_s = asked_s
                break
            self._steps.popleft()
            end_s = self._when(end)
            self._known = end, end_s
            ended.append((chunks, end_s - end.seconds_since(begin), end_s))
        return ended

    def _when(self, passed: Mark) -> float:
        """The two clocks drift apart: never later than now, nor before it was seen not to have passed."""
        assert self._known is not None
        mark, at_s = self._known
        return min(self._clock(), max(self._awaited_s, at_s + passed.seconds_since(mark)))
