"""Lines of a timeline: what is written is what is read, and nothing is until somebody wants it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from wire.timeline import Moment, Timeline, read_moment, show_timelines


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a worker's handler writes, which shows INFO and up of everybody else."""
    written, root, ours = io.StringIO(), logging.getLogger(), logging.getLogger("timeline")
    handler, before = logging.StreamHandler(written), (root.level, ours.level)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield written
    root.removeHandler(handler)
    root.setLevel(before[0])
    ours.setLevel(before[1])


def test_nothing_is_logged_until_it_is_wanted(log: io.StringIO) -> None:
    timeline = Timeline("prefill")
    timeline.note((17, 0), "begun", 1.0)
    assert log.getvalue() == ""
    show_timelines()
    timeline.note((17, 2), "computed", 4711.1234564, tokens=8192, pages=32)
    logging.getLogger("prefill").debug("not this")
    (line,) = log.getvalue().splitlines()
    assert read_moment(line) == Moment("prefill", "computed", 4711.123456, {"tokens": 8192, "pages": 32}, 17, 2)


def test_without_a_time_it_is_now(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.timeline.time.monotonic", lambda: 12.5)
    show_timelines()
    Timeline("decode").note((2**63, 0), "first_step")
    assert read_moment(log.getvalue().rstrip()) == Moment("decode", "first_step", 12.5, {}, 2**63, 0)


def test_the_name_that_a_client_knows_is_no_moment(log: io.StringIO) -> None:
    timeline = Timeline("router")
    timeline.name(17, "cmpl-0")
    assert log.getvalue() == ""
    show_timelines()
    timeline.name(17, "cmpl-5ae1/9")
    (line,) = log.getvalue().splitlines()
    assert line.endswith("timeline.router DEBUG 17 is cmpl-5ae1/9") and read_moment(line) is None


@pytest.mark.parametrize(
    "line",
    ["", "2026-11-30 05:00:00,000 prefill INFO KV memory: 3 pages at 4.5", "timeline.decode DEBUG 1/0 first step at 1.5"],
)
def test_other_lines_are_none(line: str) -> None:
    assert read_moment(line) is None
