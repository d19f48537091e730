"""The short form of scripts/bench_kvtransfer.py: real pages between two processes, beside the floors of the same run.

Prints the table (run pytest with -s); asserts that every byte arrived, and no speed: that belongs to a quiet machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kernels.spans import sum_spans
from kvtransfer.arena import Arena
from kvtransfer.digest import chunk_digest
from kvtransfer.places import slot_places
from kvtransfer.spans import KINDS, Spans, num_bytes
from kvtransfer.transports import BulkOptions, Landed, Wrote
from kvtransfer.transports.bulk import BulkTransport
from kvtransfer.transports.cuda import Ground
from scripts.bench_kvtransfer import HEADER, BenchConfig, PeerRow, Row, Source, _target, digest_cost, header, line, main, run
from scripts.kv_ends import NUM_SLOTS, BadOrder, Target, admit, busy_python, flash_layout, prove
from scripts.kv_floors import mover
from scripts.kv_undigested import UndigestedTransport
from tests.ports import closed_port
from tests.system import ROOT
from tests.transfer_rig import (
    LAYOUT,
    DeviceTransport,
    Span,
    ThreadTransport,
    collect,
    of_type,
    place_table,
    small_arena,
    table,
    wait,
)  # fmt: skip
from wire.curve import ClusterKey


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_throughput(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = BenchConfig(contexts="8192", requests="1,8", lanes="2", paths=path, repeats=2)
    rows = run(config, show=False)
    assert [(row.path, row.context, row.requests) for row in rows] == [(path, 8192, 1), (path, 8192, 8)]
    layout = flash_layout()
    mbytes = (32 * layout.page_bytes + num_bytes(slot_places(layout, 1, 8192))) / 1e6
    for row in rows:
        assert row.mbytes_a_request == pytest.approx(mbytes)
        assert row.messages_a_request >= mbytes / 16.8
        assert row.to_copy is row.kernel_gb_per_s is row.kernel_to_copy is None
        assert min(row.to_tcp, row.to_packed, row.to_memcpy, row.cpu_s_per_gb) > 0
    with capsys.disabled():
        print("", HEADER, *map(line, rows), sep="\n")


def test_what_the_digest_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = ["--contexts=1024", "--requests=2", "--lanes=1", "--paths=shm", "--repeats=1"]
    monkeypatch.setattr(sys, "argv", ["bench_kvtransfer", "--digest-cost", *case, f"--json={tmp_path}/rows.json"])
    main()
    (row,) = [row.split() for row in capsys.readouterr().out.splitlines()[2:]]
    (written,) = json.loads((tmp_path / "rows.json").read_text())
    assert [*written.items()][:4] == [("path", "shm"), ("lanes", 1), ("context", 1024), ("requests", 2)]
    assert (f"{written['gb_per_s']:.2f},", f"{written['bare_gb_per_s']:.2f}") == (row[3], row[4])
    assert f"{written['cpu_s_per_gb'] - written['bare_cpu_s_per_gb']:.3f}" == row[6]
    digested, bare = float(row[3].rstrip(",")), float(row[4])
    assert row[:3] == ["shm", "1024", "2"] and min(digested, bare) > 0
    rounding = 0.01 / bare * (1 + digested / bare)  # two digits say little of what a busy machine reaches
    assert float(row[5].rstrip("%,")) == pytest.approx(100 * (1 - digested / bare), abs=100 * rounding + 0.1)


class UndigestedDevice(UndigestedTransport, DeviceTransport):
    """Over the CPU's tensors as if they were a device's."""


@pytest.mark.parametrize("path", ["zeromq", "cuda_ipc"])
def test_a_device_without_digests_starts_no_sums(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At neither end, though the same process has transports with digests."""
    sums = mock.Mock(wraps=sum_spans)
    monkeypatch.setattr("kvtransfer.transports.cuda.sum_spans", sums)
    spans, key = [Span("page", 1, 2, 0, 100), Span("slot", 1, 1, 40, 8)], (1, 0)
    for kind in (UndigestedDevice, DeviceTransport):
        source, target = small_arena(seed=1), small_arena(seed=2)
        with contextlib.ExitStack() as opened:
            out, into = (
                opened.enter_context(contextlib.closing(kind(arena, options=BulkOptions(path)))) for arena in (source, target)
            )
            into.expect(key, 1, [2])
            out.write(into.address(), key, table(spans))
            digests = {event.digest for end in (out, into) for event in of_type(collect(end, len), (Wrote, Landed))}
            assert out.links()[into.address()].path == path
        bare = {chunk_digest(key, place_table(span.place for span in spans), b"")}
        assert (not sums.called, digests == bare) == (kind is UndigestedDevice,) * 2 and len(digests) == 1
        assert torch.equal(target.pages[2, :100], source.pages[1, :100])


def test_what_the_digest_costs_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both paths, over the CPU's tensors in this process."""
    monkeypatch.setattr(BulkTransport, "_own_process", ThreadTransport._own_process)
    monkeypatch.setattr(BulkTransport, "_device_memory", DeviceTransport._device_memory)
    monkeypatch.setattr("scripts.kv_ends.no_interrupts", contextlib.nullcontext)  # signals are the main thread's
    monkeypatch.setattr("scripts.bench_kvtransfer._target", target_here)
    monkeypatch.setattr("scripts.bench_kvtransfer.SILENCE_S", 1)
    monkeypatch.setattr("scripts.bench_kvtransfer._filled", lambda layout, pages, _: Arena(layout, pages + 1, NUM_SLOTS))
    rows = digest_cost(BenchConfig(contexts="1024", requests="2", lanes="1", paths="zeromq,shm,auto", repeats=1))
    assert [row.path for row in rows] == ["zeromq", "cuda_ipc"]
    assert all(min(row.gb_per_s, row.bare_gb_per_s) > 0 for row in rows)
    printed = capsys.readouterr()
    assert [row.split()[:3] for row in printed.out.splitlines()[1:]] == [[path, "1024", "2"] for path in ("zeromq", "cuda_ipc")]
    assert "bench_kvtransfer: --paths shm: " in printed.err


@contextlib.contextmanager
def target_here(config: BenchConfig) -> Iterator[tuple[str, int]]:
    """As `_target`, in a thread: a stand-in for a device can be seen from its process only."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            assert admit(connection, "")
            Target(flash_layout(), "127.0.0.1", "", "", False).serve(connection)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield listener.getsockname()
        serving.join()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_the_digest_costs_gpus() -> None:
    last = f"cuda:{torch.cuda.device_count() - 1}"
    paths = ["zeromq", "cuda_ipc"]
    rows = digest_cost(
        BenchConfig(contexts="8192", requests="2", lanes="1", paths=",".join(paths), arena=f"cuda:0,{last}", repeats=1)
    )
    assert [row.path for row in rows] == paths and all(min(row.gb_per_s, row.bare_gb_per_s) > 0 for row in rows)


def test_an_engine_without_digests_makes_none() -> None:
    """Or the cost that is printed would be of nothing."""
    source, target = Arena(LAYOUT, 3, 2), Arena(LAYOUT, 3, 2)
    out, into = UndigestedTransport(source), UndigestedTransport(target)
    into.expect((1, 0), 1, [1])
    out.write(into.address(), (1, 0), table([Span("page", 1, 1, 0, 100)]))
    assert [event.digest for end in (out, into) for event in of_type(collect(end, len), (Wrote, Landed))] == [0, 0]
    out.close()
    into.close()


def test_the_kernel_is_measured_with_the_spans_of_a_hand_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are written to the transport, the pages of both sides scattered; what moves them moves every byte."""
    written = []
    write = BulkTransport.write

    def keep(transport: BulkTransport, peer: str, key: Any, spans: Spans, seal: bytes = b"") -> None:
        written.append(spans)
        write(transport, peer, key, spans, seal)

    monkeypatch.setattr(BulkTransport, "write", keep)
    config = BenchConfig(contexts="1024", paths="shm")
    with _target(config) as address, contextlib.closing(Source(config, "shm", 1, 16, address)) as source:
        for length in (1024, 700, 1000):
            source.hand_off(length, 2)
        spans = source.last_spans(1000)
        assert any(np.array_equal(spans, each) for each in written[-2:])
        ours = {"page": source.arena.pages, "slot": source.arena.slots}
        theirs = {kind: torch.zeros_like(rows) for kind, rows in ours.items()}
        expected = {kind: rows.clone() for kind, rows in theirs.items()}
        for kind, number, offset, nbytes, src in spans.tolist():
            expected[KINDS[kind]][number, offset : offset + nbytes] = ours[KINDS[kind]][src, offset : offset + nbytes]
        mover(Ground.of(ours), Ground.of(theirs), spans)()
        assert all(torch.equal(theirs[kind], expected[kind]) for kind in KINDS)


def test_what_python_keeps_is_of_what_it_did_with_nothing_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end by its own clock: here 100 and 1000 rounds a second before, 50 and 900 while hand-offs take a second."""
    seen = [[(0, 0.0), (0, 70.0)], [(100, 1.0), (2000, 72.0)], [(150, 2.0), (2900, 73.0)]]
    source = mock.Mock(Source, _rounds=mock.Mock(side_effect=seen))
    monkeypatch.setattr("scripts.bench_kvtransfer.KEPT_S", 0.01)
    assert Source.python_kept(source, lambda: 0, 1024, 2) == (0.5, 0.9)
    assert source.hand_off.call_args_list[0] == mock.call(1024, 2)


def test_busy_python_says_how_often_it_went_round() -> None:
    with busy_python(2) as rounds:
        assert wait(lambda: rounds() > 2)
    ended = rounds()
    time.sleep(0.01)
    assert rounds() == ended


def test_what_python_keeps_beside_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run(BenchConfig(**CASE | {"requests": "1"}, busy=1))
    assert row.python_kept_prefill is not None and row.python_kept_decode is not None
    assert min(row.python_kept_prefill, row.python_kept_decode) > 0
    assert row.messages_a_request == 1, "hand-offs beside which Python is counted are not measured"
    assert capsys.readouterr().out.rstrip().endswith(f"  {row.python_kept_prefill:.2f}, {row.python_kept_decode:.2f}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_alone_is_faster_than_a_hand_off() -> None:
    last = f"cuda:{torch.cuda.device_count() - 1}"
    (row,) = run(BenchConfig(contexts="8192", requests="1", paths="cuda_ipc", arena=f"cuda:0,{last}", repeats=1), show=False)
    assert row.kernel_gb_per_s is not None and row.kernel_to_copy is not None
    assert row.kernel_gb_per_s > row.gb_per_s and 0.2 < row.kernel_to_copy < 2


MOONCAKE = """
import ctypes, os, socket, struct, threading

def read(connection, address, count):
    view = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
    while view:
        view = view[connection.recv_into(view):]

class TransferEngine:
    def initialize(self, host, metadata, protocol, device):
        assert (host, metadata, protocol, device) == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.serve, daemon=True).start()
        return 0

    def serve(self):
        connection, header = self.listener.accept()[0], bytearray(16)
        while connection.recv_into(header, 16, socket.MSG_WAITALL):
            read(connection, *struct.unpack("QQ", header))
            connection.sendall(b"!")

    def register_memory(self, address, count):
        self.start, self.end = address, address + count
        return 0

    def get_rpc_port(self):
        return self.listener.getsockname()[1]

    def batch_transfer_async_write(self, name, here, there, sizes):
        if not hasattr(self, "out"):
            host, port = name.split(":")
            self.out = socket.create_connection((host, int(port)))
        for source, target, size in zip(here, there, sizes, strict=True):
            assert self.start <= source <= self.end - size
            if size == int(os.environ.get("LOSE_PIECES_OF", "0")):
                continue
            self.out.sendall(struct.pack("QQ", target, size) + ctypes.string_at(source, size))
            assert self.out.recv(1) == b"!"
        return 1

    def get_batch_transfer_status(self, batches):
        return 0
"""


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that is called as Mooncake is and puts bytes into the other process, since CI has no Mooncake."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "engine.py").write_text(MOONCAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


CASE: dict[str, Any] = {"contexts": "1024", "requests": "12", "lanes": "1", "paths": "shm", "repeats": 1}  # 9 slots


@pytest.mark.usefixtures("mooncake")
def test_a_peer_beside_the_table() -> None:
    (row,) = run(BenchConfig(**CASE, peers="mooncake"), show=False)
    (peer,) = row.peers.values()
    assert peer.to_it == pytest.approx(row.gb_per_s / peer.gb_per_s)
    assert min(peer.p50_ms, peer.cpu_s_per_gb) > 0 and peer.p99_ms >= peer.p50_ms
    assert json.loads(json.dumps(asdict(row)))["peers"] == {"mooncake": asdict(peer)}
    assert line(row).split()[-3] == f"{peer.to_it:.2f}"


@pytest.mark.usefixtures("mooncake")
def test_a_peer_that_leaves_something_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages: what a slot's rows leave out may have been there before, by chance."""
    monkeypatch.setenv("LOSE_PIECES_OF", str(flash_layout().page_bytes))
    with pytest.raises(RuntimeError, match="what has landed is not what was sent"):
        run(BenchConfig(**CASE, peers="mooncake"), show=False)


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setattr(sys, "argv", ["bench_kvtransfer", "--peers", "nixl"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("pip install nixl")


@pytest.mark.usefixtures("mooncake")
def test_a_peer_that_is_not_installed_at_the_decode_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = BenchConfig(**CASE, peers="mooncake")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the other process
    with pytest.raises(SystemExit) as ended:
        run(config, show=False)
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "the decode side says: --peers mooncake" in said and said.endswith("pip install mooncake-transfer-engine-non-cuda")


def test_with_a_cluster_key_both_sides_show_its_password(tmp_path: Path) -> None:
    key = tmp_path / "key"
    ClusterKey.generate().write(str(key))
    (row,) = run(BenchConfig(**CASE | {"paths": "zeromq", "requests": "1"}, cluster_key=str(key)), show=False)
    assert row.gb_per_s > 0


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


@contextlib.contextmanager
def own_group(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """The benchmark as a terminal starts it: Ctrl-C reaches it and what it has started, and nobody else."""
    command = [sys.executable, "-m", "scripts.bench_kvtransfer", *flags]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background, which ignores it
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def interrupt(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")


LONG = ("--contexts", "1024", "--requests", "8", "--lanes", "1", "--paths", "zeromq", "--repeats", "100000")


def alive(group: int) -> int:
    """Processes of a group that have not ended."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
            found += int(its_group) == group and state not in "ZX"
    return found


def test_nothing_outlives_a_bench_that_is_killed() -> None:
    """As `timeout` does it: the decode side served on for ever, with --busy on cores of its own."""
    with own_group(*LONG, "--busy", "1") as bench:
        assert wait(lambda: alive(bench.pid) == 4), "it, the decode side, and an engine each"
        bench.kill()
        assert wait(lambda: not alive(bench.pid))


@pytest.mark.parametrize("wait_s", [0.0, 1.0, 4.0])  # as processes start; as engines start; as bytes move
def test_ctrl_c_is_quiet_on_one_host(wait_s: float) -> None:
    with own_group(*LONG) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline().startswith("TCP congestion control here: ")
        assert bench.stdout.readline() == HEADER + "\n"
        time.sleep(wait_s)
        interrupt(bench)


def test_ctrl_c_is_quiet_at_both_sides_and_the_decode_side_outlives_the_others() -> None:
    with own_group("--serve", "127.0.0.1:0") as server:
        assert server.stdout is not None
        where = server.stdout.readline().split()[1]
        host, port = where.split(":")
        with socket.create_connection((host, int(port))) as stray:
            stray.sendall(b"x" * 64)
            said = server.stdout.readline()
            assert said.startswith("refused a source that is no prefill side of this benchmark, or has a --cluster-key, which")
        for orders in ((b"junk\n",), (json.dumps(START).encode() + b"\n", b"{}\n")):
            with socket.create_connection((host, int(port))) as admitted:
                challenge = admitted.recv(100).decode().strip()
                admitted.sendall(prove("", challenge).encode())
                for order in orders:
                    admitted.sendall(order)
                    admitted.recv(1000)  # an answer, or the end
            assert server.stdout.readline().startswith("dropped a source: ")
        with own_group(*LONG, "--connect", where) as bench:
            assert bench.stdout is not None and [bench.stdout.readline() for _ in range(2)]
            time.sleep(3.0)
            interrupt(bench)
        (row,) = run(BenchConfig(**CASE | {"requests": "1"}, connect=where), show=False)
        assert row.gb_per_s > 0
        interrupt(server)


START = {"pages": 1, "device": "cpu", "options": ["shm", 1], "digest": True, "timeout_s": 1, "sealed": False, "busy": 0}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"junk", "that is no line of JSON: Expecting value"),
        (b"\xff", "that is no line of JSON: 'utf-8'"),
        (b"[" * 30_000, "that is no line of JSON: maximum recursion"),
        (b"[" + b"1," * 15_000 + b"1]", "that is no line of JSON"),
        (b"[1]", r"\[1\] is no order"),
        (b"{}", "pages is None"),
        ({"pages": "1"}, "pages is '1'"),
        ({"pages": True}, "pages is True"),
        ({"pages": 0}, "pages is 0"),
        ({"pages": 10**15}, "more than this host's memory"),
        ({"device": "foo"}, "torch finds no 'foo' here"),
        ({"device": "cuda:99"}, "torch finds no 'cuda:99' here"),
        ({"options": ["shm", 1, 0, 10, 5]}, "options are"),
        ({"options": ["carrier pigeon"]}, "'carrier pigeon' is no path"),
        ({"options": ["shm", 0]}, "lanes is 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"digest": 1}, "digest is 1"),
        ({"busy": -1}, "busy is -1"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(
    line: bytes | dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.kv_ends.MAX_ORDER_BYTES", 30_000)
    here, there = socket.socketpair()
    sent = (json.dumps(START | line).encode() if isinstance(line, dict) else line) + b"\n"
    there.sendall(sent)
    with there, pytest.raises(BadOrder, match=word):
        Target(flash_layout(), "127.0.0.1", "", "", False).serve(here)


@pytest.mark.parametrize(
    ("order", "word"),
    [
        ({}, "do is None"),
        ({"do": "what"}, "'what' is nothing that can be done"),
        ({"do": "turn", "name": "nixl", "begins": True}, "'nixl' is no peer that was opened"),
        ({"do": "peer", "name": 1}, "name is 1"),
        ({"do": "floor", "order": [0, 3], "streams": 1, "packed": False}, "order has what is no page of 3"),
        ({"do": "floor", "order": [0], "streams": 0, "packed": False}, "streams is 0"),
        ({"do": "floor", "order": [0], "streams": 1}, "packed is None"),
    ],
)
def test_nor_does_a_later_one(order: dict[str, Any], word: str) -> None:
    target = Target(flash_layout(), "127.0.0.1", "", "", False)
    target._host_pages = np.zeros((3, 8), dtype=np.uint8)
    here, there = socket.socketpair()
    with here, there, pytest.raises(BadOrder, match=word):
        target._obey(order, here)


def test_bbr_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In the first line; other warnings of transports are still told."""
    for module in ("kvtransfer.transports.bulk", "scripts.bench_kvtransfer"):
        monkeypatch.setattr(f"{module}.congestion_control", lambda: "bbr")
    log, said = logging.getLogger("kvtransfer"), list[str]()

    def run(config: BenchConfig) -> list[Row]:
        log.warning("another")
        UndigestedTransport(Arena(LAYOUT, 3, 2)).close()
        return []

    monkeypatch.setattr("scripts.bench_kvtransfer.run", run)
    monkeypatch.setattr(sys, "argv", ["bench_kvtransfer"])
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(log, "filters", [])
    monkeypatch.setattr(log, "handlers", [handler])
    main()
    assert "TCP congestion control here: bbr" in capsys.readouterr().out
    assert said == ["another"]
    UndigestedTransport(Arena(LAYOUT, 3, 2)).close()
    assert len(said) == 2, "the transport warns, so it was the filter, and nobody else is without"


def test_what_was_not_measured_is_a_dash() -> None:
    numbers: dict[str, Any] = {each.name: 1.0 for each in fields(Row)}
    numbers |= {"path": "shm", "lanes": 1, "context": 256, "requests": 1, "peers": {}}
    whole = line(Row(**numbers)).split()
    without = line(
        Row(**numbers | {"to_copy": None, "kernel_to_copy": None, "control_p99_ms": None, "python_kept_prefill": None})
    )
    assert len(without) == len(HEADER) and without.split() == [*whole[:8], "-", "-", *whole[10:-3], "-", "-"]
    peers = {"mooncake": PeerRow(1.0, 1.0, 1.0, 1.0, 1.0), "nixl": PeerRow(1.0, 1.0, 1.0, 1.0, 1.0)}
    assert len(line(Row(**numbers | {"peers": peers}))) == len(header([*peers]))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"arena": "cuda:0"}, "must name two devices"),
        ({"arena": "cpu,cuda:0"}, "torch finds no cuda:0 here"),
        ({"arena": "cpu,foo"}, "--arena foo: the devices are cpu, cuda, cuda:0"),
        ({"arena": "cpu,cuda:x", "connect": "127.0.0.1:1"}, "--arena cuda:x: the devices are"),
        ({"digest_cost": True, "sealed": True}, "bulk that is not sealed"),
        ({"digest_cost": True, "connect": "127.0.0.1:1"}, "of two processes of this host"),
        (
            {"digest_cost": True, "arena": "cpu,cuda:0"},
            "two arenas of the CPU, or two of GPUs; with one of each, as --arena cpu,cuda:0",
        ),
        ({"digest_cost": True, "arena": "cuda:0,cuda"}, "torch finds no cuda:0 here"),
        ({"digest_cost": True, "busy": 1}, "--busy adds to the table"),
        ({"paths": "shm,foo"}, "--paths foo: the paths are zeromq, shm"),
        ({"paths": "zeromq,cuda_ipc"}, "between GPUs"),
        ({"connect": "somewhere"}, "must be HOST:PORT"),
        ({"connect": "127.0.0.1:65536"}, "must be HOST:PORT"),
        ({"serve": "127.0.0.1:65536"}, "must be HOST:PORT"),
        ({"repeats": 0}, "--repeats is 0; it must be at least 1"),
        ({"connect": "10.0.0.1:7000"}, "another host, which cannot reach 127.0.0.1: --host must be an address"),
        ({"contexts": "1024,many"}, "--contexts is '1024,many'; it must be positive whole numbers"),
        ({"requests": "0"}, "--requests is '0'"),
        ({"peers": "foo"}, "--peers foo: the peers are mooncake, nixl"),
        (
            {"peers": "nixl", "arena": "cpu,cuda:0", "connect": "127.0.0.1:1"},
            "--peers is for arenas in the memory of the CPU only",
        ),
        ({"peers": "nixl", "serve": "127.0.0.1:0"}, "give it at the side with --connect"),
        ({"peers": "nixl", "digest_cost": True}, "and --digest-cost prints another"),
        ({"serve": "127.0.0.1:0", "connect": "127.0.0.1:0"}, "give one of them"),
        ({"peers": "nixl", "host": "10.0.0.1", "cluster_key": "file"}, "needs --insecure at both sides"),
        ({"inject": "dorp=0.1"}, "--inject dorp=0.1: 'dorp' is no fault; there are drop"),
        ({"inject": "drop=often"}, "--inject drop=often: could not convert"),
        ({"inject": "drop=2"}, "--inject drop=2: drop is 2; a probability is between 0 and 1"),
        ({"inject": "cut=nan"}, "cut is nan; a probability"),
        ({"inject": "stall=-0.1"}, "stall is -0.1; a probability"),
        ({"inject": "delay=0.1,seconds=-1"}, "seconds is -1; it must be 0 or more"),
        ({"inject": "delay=0.1,seconds=inf"}, "seconds is inf"),
    ],
    ids=[
        "arena",
        "gpu",
        "device",
        "device there",
        "sealed",
        "digest of two hosts",
        "digest of a mixture",
        "digest of gpus",
        "busy and digest",
        "path",
        "cuda_ipc",
        "connect",
        "connect port",
        "serve port",
        "repeats",
        "unreachable",
        "contexts",
        "requests",
        "peer",
        "peer gpu",
        "peer at decode",
        "peer and digest",
        "both sides",
        "peer open",
        "fault",
        "probability",
        "above 1",
        "nan",
        "below 0",
        "seconds",
        "endless",
    ],
)
def test_what_the_benchmark_cannot_do_is_refused(options: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=word):
        BenchConfig(**options)
