"""Counters, gauges and histograms of one process, and their Prometheus text.

A worker's `snapshot` rides in its Status; only the router serves ``/metrics``, so it renders everybody's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Named numbers. A name is created by its first use, a counter in `counters` at once; labels are not needed inside one
    process."""

    def __init__(self, counters: Iterable[str] = ()) -> None:
        self._counters: dict[str, float] = dict.fromkeys(counters, 0)
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, list[Any]] = {}  # name -> [buckets, counts, sum]

    def add(self, name: str, amount: float = 1) -> None:
        """Counts up; the Prometheus name is ``pdserve_<name>_total``."""
        self._counters[name] = self._counters.get(name, 0) + amount

    def total(self, name: str, amount: float) -> None:
        """Takes over a count that somebody else keeps."""
        self._counters[name] = amount

    def set(self, name: str, value: float) -> None:
        self._gauges[name] = value

    def observe(self, name: str, value: float, buckets: tuple[float, ...] = SECONDS) -> None:
        """Adds one observation to the histogram `name`; the unit belongs into the name."""
        if name not in self._histograms:
            self._histograms[name] = [list(buckets), [0] * (len(buckets) + 1), 0.0]
        entry = self._histograms[name]
        entry[1][bisect_left(entry[0], value)] += 1
        entry[2] += value

    def count(self, name: str) -> float:
        return self._counters.get(name, 0)

    def snapshot(self) -> list[Any]:
        """Plain lists and dicts, as Status carries them."""
        return [dict(self._counters), dict(self._gauges), {k: [v[0], list(v[1]), v[2]] for k, v in self._histograms.items()}]


def render(sources: Iterable[tuple[Mapping[str, str], list[Any]]]) -> str:
    """Prometheus text (format 0.0.4) of (labels, snapshot) pairs; one TYPE line a name, however many sources.

    A snapshot that does not have the shape of `Metrics.snapshot` raises ValueError; check it with `valid_snapshot`.
    """
    types: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    for labels, (counters, gauges, histograms) in sources:
        text = ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items())
        for name, value in counters.items():
            _put(types, lines, f"pdserve_{name}_total", "counter", [("", text, value)])
        for name, value in gauges.items():
            _put(types, lines, f"pdserve_{name}", "gauge", [("", text, value)])
        for name, entry in histograms.items():
            _put(types, lines, f"pdserve_{name}", "histogram", _histogram_rows(text, entry))
    out = []
    for name, kind in types.items():
        out += [f"# TYPE {name} {kind}", *lines[name]]
    return "\n".join(out) + "\n"


def valid_snapshot(snapshot: Any) -> bool:
    """Whether something that came off the wire may be given to `render`."""
    if not isinstance(snapshot, list) or len(snapshot) != 3 or not all(isinstance(part, dict) for part in snapshot):
        return False
    flat = [*snapshot[0].items(), *snapshot[1].items()]
    if not all(_is_name(k) and isinstance(v, (int, float)) for k, v in flat):
        return False
    return all(_is_name(k) and _is_histogram(v) for k, v in snapshot[2].items())


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) < 100 and name.isascii() and name.replace("_", "a").isalnum()


def _is_histogram(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[2], (int, float)):
        return False
    bounds, counts = entry[0], entry[1]
    if not isinstance(bounds, list) or not isinstance(counts, list) or len(counts) != len(bounds) + 1:
        return False
    return all(isinstance(x, (int, float)) for x in [*bounds, *counts])


def _put(types: dict[str, str], lines: dict[str, list[str]], name: str, kind: str, rows: list[tuple[str, str, float]]) -> None:
    if types.setdefault(name, kind) != kind:
        return  # two processes disagree on what a name is: the first one wins, the page stays valid
    for suffix, labels, value in rows:
        number = repr(float(value))  # all digits: a rate over a counter that is rounded to six is wrong
        lines.setdefault(name, []).append(f"{name}{suffix}{{{labels}}} {number}" if labels else f"{name}{suffix} {number}")


def _histogram_rows(labels: str, entry: list[Any]) -> list[tuple[str, str, float]]:
    bounds, counts, total = entry
    comma = "," if labels else ""
    rows: list[tuple[str, str, float]] = []
    running = 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        running += count
        rows.append(("_bucket", f'{labels}{comma}le="{bound}"', running))
    return [*rows, ("_sum", labels, total), ("_count", labels, running)]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
