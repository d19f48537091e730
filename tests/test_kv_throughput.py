"""The short form of scripts/bench_kvtransfer.py: real pages between two processes, beside the floors of the same run.

Prints the table (run pytest with -s); asserts that every byte arrived, and no speed: that belongs to a quiet machine.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from kvtransfer.arena import Arena
from kvtransfer.places import slot_places
from kvtransfer.spans import num_bytes
from kvtransfer.transports import Landed, Wrote
from scripts.bench_kvtransfer import HEADER, BenchConfig, Row, digest_cost, line, run
from scripts.kv_ends import flash_layout
from scripts.kv_undigested import UndigestedTransport
from tests.ports import closed_port
from tests.transfer_rig import LAYOUT, Span, collect, of_type, table


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_throughput(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = BenchConfig(contexts="8192", requests="1,8", lanes="2", paths=path, repeats=2)
    rows = run(config, show=False)
    assert [(row.path, row.context, row.requests) for row in rows] == [(path, 8192, 1), (path, 8192, 8)]
    layout = flash_layout()
    mbytes = (32 * layout.page_bytes + num_bytes(slot_places(layout, 1, 8192))) / 1e6
    for row in rows:
        assert row.mbytes_a_request == pytest.approx(mbytes)
        assert row.messages_a_request >= mbytes / (4.2 if path == "zeromq" else 16.8)
        assert row.to_copy is None
        assert min(row.to_tcp, row.to_packed, row.to_memcpy, row.cpu_s_per_gb) > 0
    with capsys.disabled():
        print("", HEADER, *map(line, rows), sep="\n")


def test_what_the_digest_costs(capsys: pytest.CaptureFixture[str]) -> None:
    digest_cost(BenchConfig(contexts="1024", requests="2", lanes="1", paths="shm", repeats=1, digest_cost=True))
    (row,) = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    digested, bare = float(row[3].rstrip(",")), float(row[4])
    assert row[:3] == ["shm", "1024", "2"] and min(digested, bare) > 0
    rounding = 0.01 / bare * (1 + digested / bare)  # two digits say little of what a busy machine reaches
    assert float(row[5].rstrip("%,")) == pytest.approx(100 * (1 - digested / bare), abs=100 * rounding + 0.1)


def test_an_engine_without_digests_makes_none() -> None:
    """Or the cost that is printed would be of nothing."""
    source, target = Arena(LAYOUT, 3, 2), Arena(LAYOUT, 3, 2)
    out, into = UndigestedTransport(source), UndigestedTransport(target)
    into.expect((1, 0), 1, [1])
    out.write(into.address(), (1, 0), table([Span("page", 1, 1, 0, 100)]))
    assert [event.digest for end in (out, into) for event in of_type(collect(end, len), (Wrote, Landed))] == [0, 0]
    out.close()
    into.close()


def test_a_decode_side_that_is_not_there_is_one_line() -> None:
    with closed_port() as port, pytest.raises(SystemExit, match=f"answers at 127.0.0.1:{port}: Connection refused"):
        run(BenchConfig(contexts="256", requests="1", connect=f"127.0.0.1:{port}"), show=False)


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "scripts.bench_kvtransfer", "--serve", where]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"bench_kvtransfer: --serve {where}: ") and len(ended.stderr.splitlines()) == 1


def test_what_was_not_measured_is_left_empty() -> None:
    numbers = {each.name: 1.0 for each in fields(Row)} | {"path": "shm", "lanes": 1, "context": 256, "requests": 1}
    whole = line(Row(**numbers)).split()  # type: ignore[arg-type]
    without = line(Row(**numbers | {"to_copy": None, "control_p99_ms": None}))  # type: ignore[arg-type]
    assert len(without) == len(HEADER) and without.split() == whole[:8] + whole[9:-1]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"arena": "cuda:0"}, "must name two devices"),
        ({"arena": "cpu,cuda:0"}, "torch finds no GPU here"),
        ({"digest_cost": True, "sealed": True}, "bulk that is not sealed"),
        ({"paths": "shm,foo"}, "--paths foo: the paths are zeromq, shm"),
        ({"paths": "zeromq,cuda_ipc"}, "between GPUs"),
        ({"connect": "somewhere"}, "must be HOST:PORT"),
    ],
    ids=["arena", "gpu", "sealed", "path", "cuda_ipc", "connect"],
)
def test_what_the_benchmark_cannot_do_is_refused(options: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=word):
        BenchConfig(**options)
