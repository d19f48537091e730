"""The short form of scripts/bench_kvtransfer.py: real pages between two processes, beside the floors of the same run.

Prints the table (run pytest with -s); asserts that every byte arrived, and no speed: that belongs to a quiet machine.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.arena import Arena
from kvtransfer.transports import Landed, Span, Wrote
from scripts.bench_kvtransfer import HEADER, BenchConfig, digest_cost, line, run
from scripts.kv_ends import flash_layout
from scripts.kv_undigested import UndigestedTransport
from tests.transfer_rig import LAYOUT, collect, of_type


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_throughput(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = BenchConfig(contexts="8192", requests="1,8", lanes="2", paths=path, repeats=2)
    rows = run(config, show=False)
    assert [(row.path, row.context, row.requests) for row in rows] == [(path, 8192, 1), (path, 8192, 8)]
    layout = flash_layout()
    mbytes = (32 * layout.page_bytes + sum(nbytes for _, nbytes in layout.live_slot_spans(8192))) / 1e6
    for row in rows:
        assert row.mbytes_a_request == pytest.approx(mbytes)
        assert row.messages_a_request >= mbytes / (4.2 if path == "zeromq" else 16.8)
        assert min(row.to_tcp, row.to_packed, row.to_memcpy, row.cpu_s_per_gb) > 0
    with capsys.disabled():
        print("", HEADER, *map(line, rows), sep="\n")


def test_what_the_digest_costs(capsys: pytest.CaptureFixture[str]) -> None:
    digest_cost(BenchConfig(contexts="1024", requests="2", lanes="1", paths="shm", repeats=1, digest_cost=True))
    (row,) = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    digested, bare = float(row[3].rstrip(",")), float(row[4])
    assert row[:3] == ["shm", "1024", "2"] and min(digested, bare) > 0
    assert float(row[5].rstrip("%,")) == pytest.approx(100 * (1 - digested / bare), abs=10)


def test_an_engine_without_digests_makes_none() -> None:
    """Or the cost that is printed would be of nothing."""
    source, target = Arena(LAYOUT, 3, 2), Arena(LAYOUT, 3, 2)
    out, into = UndigestedTransport(source), UndigestedTransport(target)
    into.expect((1, 0), 1, [1])
    out.write(into.address(), (1, 0), [Span("page", 1, 1, 0, 100)])
    assert [event.digest for end in (out, into) for event in of_type(collect(end, len), (Wrote, Landed))] == [0, 0]
    out.close()
    into.close()


@pytest.mark.parametrize(
    ("options", "word"),
    [({"arena": "cuda:0"}, "must name two devices"), ({"digest_cost": True, "sealed": True}, "bulk that is not sealed")],
    ids=["arena", "sealed"],
)
def test_what_the_benchmark_cannot_do_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        BenchConfig(**options)
