"""From GPU to GPU on one host: which handles are believed, when the path is taken, and what is done when it cannot be.

Without a GPU the logic runs over the CPU's tensors, the driver being a stand-in; the last tests need one GPU or two.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.arena import Arena
from kvtransfer.layout import Field, KVLayout
from kvtransfer.transports import BulkOptions, Event, Landed, Lost, Span, Wrote, open_transport
from kvtransfer.transports.cuda import SideStream, sum_weights, weighted_sums
from kvtransfer.transports.cuda_ipc import HANDLE_BYTES, CudaIpc, Extent, Opened, pack_extents, unpack_extents
from kvtransfer.transports.frame import BadFrame, Hello, pack_hello, unpack_hello, unpack_welcome
from tests.transfer_rig import (
    DRIVER,
    LAYOUT,
    DeviceTransport,
    HostStream,
    RawSender,
    ThreadTransport,
    collect,
    of_type,
    small_arena,
    sums_by_hand,
    wait,
)  # fmt: skip

KEY = (7, 0)
PAGE = LAYOUT.page_bytes
ROOT = Path(__file__).resolve().parent.parent
GOOD = {"page": Extent(b"p" * HANDLE_BYTES, 0), "slot": Extent(b"s" * HANDLE_BYTES, 512)}
HANDLE, OTHER = b"p" * HANDLE_BYTES, b"s" * HANDLE_BYTES


def test_handles_cross_as_they_are() -> None:
    assert unpack_extents(pack_extents(GOOD)) == GOOD


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps(GOOD["page"].handle),
        msgpack.packb([[HANDLE, 0]]),
        msgpack.packb([[HANDLE, 0], [OTHER, 0], [OTHER, 0]]),
        msgpack.packb([[HANDLE, 0], [OTHER[:-1], 0]]),
        msgpack.packb([[HANDLE, 0], [OTHER, -64]]),
        msgpack.packb([[HANDLE, 0], [OTHER, 8]]),
        msgpack.packb([[HANDLE, 0], [OTHER, 1 << 50]]),
        msgpack.packb([[HANDLE, 0], [OTHER, 0.0]]),
        msgpack.packb([["p" * HANDLE_BYTES, 0], [OTHER, 0]]),
        msgpack.packb({"page": [HANDLE, 0], "slot": [OTHER, 0]}),
        msgpack.packb([[HANDLE, 0], [OTHER, 0]]) + b"x",
        msgpack.packb([[HANDLE, 0], [OTHER, 0]])[:-1],
    ],
    ids=range(13),
)
def test_handles_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"handle"):
        unpack_extents(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpack_extents(data)


def test_a_hello_with_too_many_bytes_of_handles_is_none() -> None:
    hello = Hello(1, 3, 1024, b"n" * 16, {"page": (2, 100), "slot": (2, 100)}, "cuda_ipc")
    assert unpack_hello(pack_hello(hello)) == hello
    with pytest.raises(BadFrame, match="1025 bytes of handles"):
        unpack_hello(pack_hello(Hello(1, 3, 1025, b"n" * 16, hello.rows, "cuda_ipc")))


# --- the digest that a device makes


@given(st.binary(min_size=1, max_size=300), st.integers(0, 3))
def test_the_sums_are_those_of_the_words(data: bytes, rows: int) -> None:
    data = data.ljust(rows * 65_536 + len(data), b"\xfe")
    packed = torch.frombuffer(bytearray(data.ljust(-(-len(data) // 65_536) * 65_536, b"\0")), dtype=torch.uint8)
    assert weighted_sums(packed, sum_weights()).numpy().tobytes() == sums_by_hand(data)


@pytest.mark.parametrize("change", ["a bit", "the highest bit", "two words", "two rows"])
def test_what_changed_changes_the_sums(change: str) -> None:
    packed = torch.randint(0, 256, (4 * 65_536,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before, weights = packed.clone(), sum_weights()
    words = packed.view(torch.int32)
    match change:
        case "a bit":
            packed[100_001] ^= 16
        case "the highest bit":  # of two words in one row: odd weights alone would not show it
            words[5] ^= -(1 << 31)
            words[9] ^= -(1 << 31)
        case "two words":
            words[[7, 8]] = words[[8, 7]]
        case "two rows":
            words.view(4, -1)[[1, 2]] = words.view(4, -1)[[2, 1]]
    assert not torch.equal(before, packed)
    assert not torch.equal(weighted_sums(before, weights), weighted_sums(packed, weights))


# --- when the path is taken


@contextlib.contextmanager
def pair(out: str = "auto", into: str = "auto", kinds: str = "dd") -> Iterator[tuple[Any, Any, Arena, Arena]]:
    """Two ends, each of device memory ("d") or of the CPU's ("c")."""
    source, target = small_arena(seed=1), small_arena(seed=2)
    kind = {"d": DeviceTransport, "c": ThreadTransport}
    ends = [
        kind[of](arena, options=BulkOptions(path)) for of, arena, path in zip(kinds, (source, target), (out, into), strict=True)
    ]
    yield ends[0], ends[1], source, target
    for each in ends:
        each.close()


def hand_off(sender: Any, receiver: Any, key: tuple[int, int] = KEY, seal: bytes = b"") -> Any:
    """How it ends for the sender."""
    receiver.expect(key, 3, [5], seal)
    sender.write(receiver.address(), key, [Span("page", 1, 5, 0, PAGE), Span("slot", 2, 3, 64, 100)], seal)
    (end,) = collect(sender, len)
    receiver.revoke(key)
    return end


@pytest.mark.parametrize("seal", [b"", b"k" * 16], ids=["plain", "sealed"])
def test_two_gpus_of_a_host_take_it_by_themselves(seal: bytes) -> None:
    with pair() as (sender, receiver, source, target):
        before = target.pages.clone()
        end = hand_off(sender, receiver, seal=seal)
        (landed,) = of_type(collect(receiver, lambda events: len(events) == 2), Landed)
        assert isinstance(end, Wrote) and end.digest == landed.digest
        before[5] = source.pages[1]
        assert torch.equal(target.pages, before) and torch.equal(target.slots[3, 64:164], source.slots[2, 64:164])
        (link,) = sender.links().values()
        assert (link.path, link.reason, link.usable) == ("cuda_ipc", "", True)
        assert sender.gauges()["kv_links_cuda_ipc"] == 1
        assert not sender.inner._outbound._peers[receiver.address()].lanes[0].under_way


def too_small(extent: Extent, nbytes: int) -> Opened:
    raise ValueError(f"{nbytes} bytes from 0 on are more than the 2 that were opened")


def refused(extent: Extent, nbytes: int) -> Opened:
    raise OSError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")


@pytest.mark.parametrize(("open_", "reason"), [(refused, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"), (too_small, "more than the 2")])
def test_what_cannot_be_opened_goes_over_the_network_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, open_: Callable[..., Opened], reason: str
) -> None:
    monkeypatch.setattr(DRIVER, "open", open_)
    with caplog.at_level(logging.INFO), pair() as (sender, receiver, source, target):
        assert isinstance(hand_off(sender, receiver), Wrote)
        assert torch.equal(target.pages[5], source.pages[1])
        (link,) = sender.links().values()
        assert link.path == "zeromq" and reason in link.reason and reason in caplog.text


def test_the_second_of_two_handles_that_cannot_be_opened_closes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    really, calls = DRIVER.open, iter([True, False])
    monkeypatch.setattr(DRIVER, "open", lambda *args: really(*args) if next(calls) else refused(*args))
    with pair() as (sender, receiver, _, _):
        assert isinstance(hand_off(sender, receiver), Wrote)
        gc.collect()
        assert DRIVER.open_bases == []


def test_a_gpu_whose_memory_the_driver_does_not_share_says_so_and_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def export(rows: torch.Tensor) -> Extent:
        raise OSError("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(DRIVER, "export", export)
    with caplog.at_level(logging.WARNING), pair() as (sender, receiver, _, _):
        assert isinstance(hand_off(sender, receiver), Wrote)
        assert sender.links()[receiver.address()].path == "zeromq"
    assert "CUDA_ERROR_NOT_SUPPORTED" in caplog.text


@pytest.mark.parametrize(
    ("kinds", "into", "path", "reason"),
    [
        ("dc", "auto", "zeromq", "it is on a GPU, and the receiver's is not"),
        ("cd", "auto", "shm", ""),
        ("dd", "shm", "zeromq", "CUDA IPC is switched off at the receiver"),
        ("dd", "zeromq", "zeromq", "CUDA IPC is switched off at the receiver"),
    ],
)
def test_other_pairs_find_another_path(kinds: str, into: str, path: str, reason: str) -> None:
    with pair(into=into, kinds=kinds) as (sender, receiver, source, target):
        assert isinstance(hand_off(sender, receiver), Wrote)
        assert torch.equal(target.pages[5], source.pages[1])
        (link,) = sender.links().values()
        assert link.path == path and reason in link.reason


def test_what_is_asked_for_and_cannot_be_had_is_an_error() -> None:
    with pair(out="cuda_ipc", kinds="dc") as (sender, receiver, _, _):
        lost = hand_off(sender, receiver)
        assert isinstance(lost, Lost)
        said = "CUDA IPC is asked for and cannot be had: the sender's memory cannot be mapped: it is on a GPU"
        assert said in lost.reason and "PID namespace" not in lost.reason, "advice for what is not at fault"


def test_pages_of_another_size_are_not_read() -> None:
    with pair() as (_, receiver, _, _):
        layout = KVLayout.pack(8, [Field(0, "a", 0, 1, 1 << 10, 8)], [Field(0, "b", 0, 4, 64, keep=1)])
        sender = DeviceTransport(Arena(layout, 3, 2))
        receiver.expect(KEY, 3, [5])
        sender.write(receiver.address(), KEY, [Span("page", 1, 5, 0, 100)])
        collect(sender, len)
        link = sender.links()[receiver.address()]
        assert link.path == "zeromq" and "its pages have 1024 bytes, ours 2560" in link.reason
        sender.close()


OWNER = """
import os, sys
from kvtransfer.sharing import SharedMemory
handles = bytes.fromhex(sys.argv[1])
memory = SharedMemory.create(len(handles))
memory.map[: len(handles)] = handles
print(os.getpid(), memory.fd, memory.name.hex(), flush=True)
sys.stdin.read()
"""


def test_who_greets_again_leaves_nothing_open_and_nor_do_the_dead() -> None:
    context: zmq.Context[Any] = zmq.Context()
    source = small_arena()
    handles = pack_extents({"page": DRIVER.export(source.pages), "slot": DRIVER.export(source.slots)})
    with pair() as (_, receiver, _, _):
        peer = RawSender(context, receiver.address())
        command = [sys.executable, "-c", OWNER, handles.hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            pid, fd, name = process.stdout.readline().split()
            rows = {"page": (32, PAGE), "slot": (16, LAYOUT.slot_bytes)}
            hello = Hello(int(pid), int(fd), len(handles), bytes.fromhex(name), rows, "cuda_ipc")
            for _ in range(2):
                peer.socket.send(pack_hello(hello))
                assert peer.socket.poll(5000)
                assert unpack_welcome(peer.socket.recv()).path == "cuda_ipc"
                assert len(DRIVER.open_bases) == 2
        assert wait(lambda: gc.collect() >= 0 and not DRIVER.open_bases, 5)
    context.destroy(linger=0)


@pytest.mark.parametrize("path", ["cuda_ipc", "zeromq"])
def test_what_is_still_being_computed_holds_up_nobody_else(path: str) -> None:
    """Not another hand-off, not what the peers say; and the engine sleeps meanwhile."""
    with pair(path, path) as (sender, receiver, source, target):
        stream = HostStream()
        sender.inner._memory._stream = stream
        other = DeviceTransport(small_arena(seed=3), options=BulkOptions(path))
        stream.computed = 2
        turns, turn = itertools.count(), sender.inner._turn
        sender.inner._turn = lambda: (next(turns), turn())
        sender.write(other.address(), (8, 0), [Span("page", 2, 6, 0, PAGE)])  # mark 1
        receiver.expect(KEY, 3, [5])
        other.expect((8, 0), 3, [6])
        sender.write(receiver.address(), KEY, [Span("page", 1, 5, 0, PAGE)])  # mark 2
        assert [event.key for event in collect(sender, len)] == [(8, 0)]
        begin, begin_s = next(turns), time.monotonic()
        time.sleep(0.3)
        count, passed_ms = next(turns) - begin, 1e3 * (time.monotonic() - begin_s)
        assert 3 < count < 1.2 * passed_ms + 20 and sender.poll() == [], "it comes by once a millisecond"
        stream.computed = 3
        assert [event.key for event in collect(sender, len)] == [KEY]
        assert torch.equal(target.pages[5], source.pages[1])
        other.close()


# --- what has no stand-in


class RecordedStream:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.calls.append(event)

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_a_copy_that_could_not_be_issued_waits_for_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the memory would be somebody else's while it is still written to."""
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    stream, recorded = SideStream.__new__(SideStream), RecordedStream()
    stream._stream, stream._events, stream._newest = recorded, {1: "event"}, 1  # type: ignore[assignment, dict-item]
    with pytest.raises(RuntimeError, match="no memory"), stream.after(1):
        raise RuntimeError("no memory")
    with stream.after(0):
        recorded.calls.append("copy")
    assert recorded.calls == ["event", "synchronize", "copy", "synchronize"]


class FakeDriver:
    """libcuda's calls as ctypes sees them, over an allocation of 4096 bytes at 0x10000, that is opened at 0x90000."""

    def __init__(self) -> None:
        address, size = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
        handle = ctypes.c_ubyte * HANDLE_BYTES
        struct = type("Handle", (ctypes.Structure,), {"_fields_": [("reserved", handle)]})
        self.closed: list[int] = []

        def get_range(base: Any, length: Any, at: int) -> int:
            begin = next((b for b in (0x10000, 0x90000) if b <= at < b + 4096), 0)
            base[0], length[0] = begin, 4096
            return 0 if begin else 1

        def get_handle(out: Any, at: int) -> int:
            out[0].reserved[:] = HANDLE
            return 0 if at == 0x10000 else 1

        def open_handle(out: Any, given: Any, flags: int) -> int:
            if bytes(given.reserved) != HANDLE or flags != 1:
                return 1
            out[0] = 0x90000
            return 0

        def error_name(code: int, out: Any) -> int:
            out[0] = b"CUDA_ERROR_INVALID_VALUE"
            return 0

        def close(at: int) -> int:
            self.closed.append(at)
            return 0

        self.cuMemGetAddressRange_v2 = ctypes.CFUNCTYPE(ctypes.c_int, address, size, ctypes.c_uint64)(get_range)
        self.cuIpcGetMemHandle = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(struct), ctypes.c_uint64)(get_handle)
        self.cuIpcOpenMemHandle_v2 = ctypes.CFUNCTYPE(ctypes.c_int, address, struct, ctypes.c_uint)(open_handle)
        self.cuIpcCloseMemHandle = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(close)
        self.cuGetErrorName = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))(error_name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": fake}[name])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return fake


def test_rows_are_exported_as_a_place_in_their_allocation(driver: FakeDriver) -> None:
    ipc = CudaIpc(torch.device("cuda", 1))
    rows: Any = SimpleNamespace(data_ptr=lambda: 0x10000 + 512)
    assert ipc.export(rows) == Extent(HANDLE, 512)
    with pytest.raises(OSError, match="cuMemGetAddressRange_v2: CUDA_ERROR_INVALID_VALUE"):
        ipc.export(SimpleNamespace(data_ptr=lambda: 0x20000))  # type: ignore[arg-type]


def test_what_is_opened_is_held_against_what_was_said(driver: FakeDriver) -> None:
    ipc = CudaIpc(torch.device("cuda", 1))
    opened = ipc.open(Extent(HANDLE, 512), 4096 - 512)
    assert opened == Opened(0x90000, 0x90000 + 512)
    ipc.close(opened)
    assert driver.closed == [0x90000]
    with pytest.raises(ValueError, match="3585 bytes from 512 on are more than the 4096"):
        ipc.open(Extent(HANDLE, 512), 4096 - 511)
    assert driver.closed == [0x90000] * 2
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE"):
        ipc.open(Extent(OTHER, 0), 1)


# --- on a machine with GPUs

SOURCE = """
import sys, torch
import tests.transfer_rig as rig
from kvtransfer.transports import BulkOptions, Span, open_transport
rig.DEVICE = sys.argv[1]
arena = rig.small_arena(64, 8, seed=1)
transport = open_transport(arena, "127.0.0.1", "", BulkOptions(sys.argv[2]))
for line in sys.stdin:
    address, rid = line.split()
    spans = [Span("page", page, 64 - page, 0, rig.LAYOUT.page_bytes) for page in range(1, 64)]
    spans += [Span("slot", 2, 3, at, 40) for at in range(0, 400, 80)]
    arena.pages[1:] += 1  # on the computing stream, which the copies have to wait for
    transport.write(address, (int(rid), 0), spans)
    (end,) = rig.collect(transport, len)
    print(type(end).__name__, getattr(end, "digest", 0), transport.links()[address].path, flush=True)
transport.close()
"""


def num_places(events: list[Event]) -> int:
    return sum(len(event.places) for event in of_type(events, Landed))


@pytest.mark.parametrize("path", ["auto", "zeromq"])
@pytest.mark.parametrize(("out", "into"), [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_between_two_processes_with_gpus(monkeypatch: pytest.MonkeyPatch, out: str, into: str, path: str) -> None:
    """Real handles, real streams; the bytes, their digest, and that a second hand-off sees what was computed since."""
    needed = 1 + (out != into)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs in one host, here are {torch.cuda.device_count()}")
    monkeypatch.setattr("tests.transfer_rig.DEVICE", into)
    target = small_arena(64, 8, seed=2)
    receiver = open_transport(target, "127.0.0.1", "", BulkOptions())
    expected = small_arena(64, 8, seed=1)
    command = [sys.executable, "-c", SOURCE, out, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as source:
        assert source.stdin is not None and source.stdout is not None
        for rid in range(1, 4):
            receiver.expect((rid, 0), 3, list(range(1, 64)))
            source.stdin.write(f"{receiver.address()} {rid}\n")
            source.stdin.flush()
            landed = of_type(collect(receiver, lambda events: num_places(events) == 68, timeout_s=60), Landed)
            kind, digest, taken = source.stdout.readline().split()
            assert (kind, taken) == ("Wrote", "cuda_ipc" if path == "auto" else "zeromq")
            assert int(digest) == sum(event.digest for event in landed) % (1 << 64)
            expected.pages[1:] += 1
            assert torch.equal(target.pages[1:].flip(0), expected.pages[1:])
            assert all(torch.equal(target.slots[3, at : at + 40], expected.slots[2, at : at + 40]) for at in range(0, 400, 80))
            receiver.revoke((rid, 0))
        source.stdin.close()
    receiver.close()
