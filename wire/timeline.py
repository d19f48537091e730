"""When requests pass their stages: log lines on one clock, so that those of all processes of a host can be laid side by side.

    timeline.prefill DEBUG 17/0 computed tokens=8192 at 4711.123456

is request 17, attempt 0, and seconds of `time.monotonic`, which every process of a host reads alike. 17 is its number in
errors, too; what answers call it is in a line of the router:

    timeline.router DEBUG 17 is cmpl-29b14ba0c7c7d4a900000003

Nothing is logged, and next to nothing done, until `show_timelines`.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass

_ROOT = logging.getLogger("timeline")
_LINE = re.compile(r"timeline\.(\w+) DEBUG (\d+)/(\d+) (\w+)((?: \w+=\d+)*) at (\d+\.\d+)$")


@dataclass(frozen=True, slots=True)
class Moment:
    """A request passes a stage. `where`: the process or part that says so."""

    where: str
    event: str
    at_s: float
    counts: dict[str, int]
    rid: int = 0
    attempt: int = 0


class Timeline:
    """What one part of a process says of the requests that pass it."""

    def __init__(self, where: str) -> None:
        self._log = _ROOT.getChild(where)

    def note(self, key: tuple[int, int], event: str, at_s: float | None = None, **counts: int) -> None:
        """at_s: of `time.monotonic`; None: now."""
        if self._log.isEnabledFor(logging.DEBUG):
            numbers = "".join(f" {name}={count}" for name, count in counts.items())
            self._log.debug("%d/%d %s%s at %.6f", *key, event, numbers, time.monotonic() if at_s is None else at_s)

    def name(self, rid: int, api_id: str) -> None:
        """What clients call this request. An answer to several prompts is as many requests."""
        self._log.debug("%d is %s", rid, api_id)


def show_timelines() -> None:
    """From now on this process logs them, whatever else it logs."""
    _ROOT.setLevel(logging.DEBUG)


def read_moment(line: str) -> Moment | None:
    """What a log line says; None when it is no part of a timeline."""
    found = _LINE.search(line)
    if found is None:
        return None
    where, rid, attempt, event, counts, at_s = found.groups()
    numbers = {name: int(count) for name, count in (each.split("=") for each in counts.split())}
    return Moment(where, event, float(at_s), numbers, int(rid), int(attempt))
