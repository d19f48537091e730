"""Metrics and their Prometheus text, which is parsed back here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch import _CAUSES
from router.errors import _TYPES
from wire.codec import decode, encode
from wire.counters import COUNTERS
from wire.messages import Status
from wire.metrics import Metrics, render, valid_snapshot

ROOT = Path(__file__).parents[1]
LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')


def parse(text: str) -> dict[tuple[str, str], float]:
    """Sample lines by (name, labels). Fails on a line that is neither a sample nor a TYPE line, and on a double."""
    assert text.endswith("\n")
    samples: dict[tuple[str, str], float] = {}
    types: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2]
            assert name not in types
            types.add(name)
            continue
        if not line:
            continue
        match = LINE.fullmatch(line)
        assert match, line
        assert (match[1], match[2] or "") not in samples, line
        samples[match[1], match[2] or ""] = float(match[3])
    return samples


def test_counters_and_gauges() -> None:
    metrics = Metrics()
    assert metrics.count("steps") == 0
    metrics.add("steps")
    metrics.add("steps", 2)
    metrics.set("queued", 7)
    metrics.set("queued", 3)
    assert metrics.count("steps") == 3
    samples = parse(render([({}, metrics.snapshot())]))
    assert samples == {("pdserve_steps_total", ""): 3, ("pdserve_queued", ""): 3}


def test_large_counters_keep_every_digit() -> None:
    metrics = Metrics()
    metrics.add("bytes", 1_234_567_891)
    metrics.observe("batch_tokens", 123_456_789.0, buckets=(1.0,))
    samples = parse(render([({}, metrics.snapshot())]))
    assert samples["pdserve_bytes_total", ""] == 1_234_567_891
    assert samples["pdserve_batch_tokens_sum", ""] == 123_456_789


def test_a_histogram_is_cumulative_and_bounds_are_inclusive() -> None:
    metrics = Metrics()
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        metrics.observe("step_s", value, buckets=(1.0, 2.0))
    samples = parse(render([({"worker": "p0"}, metrics.snapshot())]))
    assert samples == {
        ("pdserve_step_s_bucket", 'worker="p0",le="1.0"'): 2,
        ("pdserve_step_s_bucket", 'worker="p0",le="2.0"'): 4,
        ("pdserve_step_s_bucket", 'worker="p0",le="+Inf"'): 5,
        ("pdserve_step_s_sum", 'worker="p0"'): 104.0,
        ("pdserve_step_s_count", 'worker="p0"'): 5,
    }


def test_several_sources_share_one_type_line_and_samples_of_a_name_stand_together() -> None:
    first, second = Metrics(), Metrics()
    for metrics in (first, second):
        metrics.add("steps")
        metrics.set("queued", 1)
    text = render([({"worker": "a"}, first.snapshot()), ({"worker": "b"}, second.snapshot())])
    assert len(parse(text)) == 4
    assert [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")] == [
        "pdserve_steps_total", "pdserve_steps_total", "pdserve_queued", "pdserve_queued",
    ]  # fmt: skip


def test_labels_are_escaped() -> None:
    metrics = Metrics()
    metrics.set("up", 1)
    text = render([({"worker": 'a"b\\c\nd'}, metrics.snapshot())])
    assert parse(text) == {("pdserve_up", r'worker="a\"b\\c\nd"'): 1}


def test_two_sources_that_disagree_on_a_type_leave_a_valid_page() -> None:
    first, second = Metrics(), Metrics()
    first.set("lag", 1)
    second.observe("lag", 1.0)
    samples = parse(render([({"worker": "a"}, first.snapshot()), ({"worker": "b"}, second.snapshot())]))
    assert samples == {("pdserve_lag", 'worker="a"'): 1}


def test_a_snapshot_is_a_copy_and_survives_the_wire() -> None:
    metrics = Metrics()
    metrics.add("steps")
    metrics.observe("step_s", 0.1)
    snapshot = metrics.snapshot()
    metrics.add("steps")
    metrics.observe("step_s", 0.1)
    status = decode(encode(Status("decode", "d", "serving", "tcp://a:1", {}, {}, snapshot, b"", 1)))
    assert valid_snapshot(status.metrics)
    samples = parse(render([({}, status.metrics)]))
    assert samples["pdserve_steps_total", ""] == 1
    assert samples["pdserve_step_s_count", ""] == 1


@pytest.mark.parametrize(
    "snapshot",
    [
        None,
        [],
        [{}, {}],
        [{}, {}, []],
        [{"a b": 1}, {}, {}],
        [{"": 1}, {}, {}],
        [{1: 1}, {}, {}],
        [{"x\n# HELP": 1}, {}, {}],
        [{"ümlaut": 1}, {}, {}],
        [{"a" * 100: 1}, {}, {}],
        [{"a": "1"}, {}, {}],
        [{"a": None}, {}, {}],
        [{}, {}, {"h": [[1.0], [1], 0.0]}],
        [{}, {}, {"h": [[1.0], [1, "2"], 0.0]}],
        [{}, {}, {"h": [["1"], [1, 2], 0.0]}],
        [{}, {}, {"h": [[1.0], [1, 2], "0"]}],
        [{}, {}, {"h": 3}],
    ],
    ids=repr,
)
def test_what_is_no_snapshot_is_seen(snapshot: Any) -> None:
    assert not valid_snapshot(snapshot)


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats() | st.booleans()
NAMES = st.text(max_size=6) | st.sampled_from(["a", "b_2", "3"])
ODD = st.none() | NUMBERS | st.text(max_size=3) | st.lists(NUMBERS, max_size=3)
HISTOGRAMS = st.tuples(st.lists(NUMBERS, max_size=3, unique_by=str), st.lists(NUMBERS, max_size=4), NUMBERS).map(list) | ODD
SNAPSHOTS = st.tuples(
    st.dictionaries(NAMES, NUMBERS | ODD), st.dictionaries(NAMES, NUMBERS), st.dictionaries(NAMES, HISTOGRAMS)
)


@given(SNAPSHOTS.map(list))
@settings(max_examples=300, deadline=None)
def test_every_valid_snapshot_renders_to_a_valid_page(snapshot: list[Any]) -> None:
    if valid_snapshot(snapshot):
        parse(render([({"worker": "w"}, snapshot)]))


def test_total_takes_over_a_count() -> None:
    metrics = Metrics()
    for seen in (3, 5):
        metrics.total("bad_frames", seen)
    assert metrics.count("bad_frames") == 5


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_what_a_program_counts_is_there_before_it_happens(role: str) -> None:
    files = [*(ROOT / role).glob("*.py"), *([] if role == "router" else [ROOT / "wire/worker.py"])]
    counted = {name for file in files for name in re.findall(r'metrics\.add\("(\w+)"', file.read_text())}
    known = set(COUNTERS[role])
    assert counted and counted == {name for name in known if not name.startswith(("http_", "failures_"))} | (
        counted & {"http_400", "http_413", "http_500"}
    )
    if role == "router":
        assert {f"failures_{cause}" for cause in _CAUSES} < known and {f"http_{status}" for status in _TYPES} < known


def test_counters_that_are_named_begin_with_0() -> None:
    metrics = Metrics(["retries"])
    assert parse(render([({}, metrics.snapshot())])) == {("pdserve_retries_total", ""): 0}
    metrics.add("retries")
    assert metrics.count("retries") == 1
