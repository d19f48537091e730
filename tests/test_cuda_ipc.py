"""From GPU to GPU on one host: which handles are believed, when the path is taken, and what is done when it cannot be.

Without a GPU the logic runs over the CPU's tensors, the driver being a stand-in; the last tests need one GPU or two.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kernels import backend
from kernels.spans import sum_spans
from kvtransfer.arena import Arena
from kvtransfer.layout import Field, KVLayout
from kvtransfer.transports import BulkOptions, Drained, Event, Landed, Lost, Wrote, open_transport
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.cuda import Ground, SideStream, span_table
from kvtransfer.transports.cuda_ipc import HANDLE_BYTES, CudaIpc, Extent, Opened, pack_extents, unpack_extents
from kvtransfer.transports.frame import (
    LANDED,
    LATE,
    REFUSED,
    BadFrame,
    Chunk,
    Hello,
    pack_chunk,
    pack_hello,
    unpack_ack,
    unpack_hello,
    unpack_welcome,
)  # fmt: skip
from kvtransfer.transports.inbound import Inbound, _Mapped
from kvtransfer.transports.memory import DeviceMemory, DevicePeer
from kvtransfer.transports.sums import sum_weights
from tests.transfer_rig import (
    DRIVER,
    LAYOUT,
    PATIENCE_S,
    DeviceTransport,
    HostStream,
    Listener,
    RawSender,
    Span,
    ThreadTransport,
    collect,
    hear,
    named_places,
    of_type,
    place_table,
    small_arena,
    sums_by_hand,
    table,
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


def sums_of(data: torch.Tensor) -> bytes:
    """Of the bytes of one place."""
    place = place_table([("page", 0, 0, data.numel())])
    begins, _, counts = torch.from_numpy(span_table(np.array([0]), np.array([0]), place))
    sums = torch.empty_like(counts)
    sum_spans(data.view(torch.int32), begins, counts, torch.from_numpy(sum_weights()), sums)
    return sums.numpy().tobytes()


@given(st.binary(min_size=4, max_size=300), st.integers(0, 3))
def test_the_sums_are_those_of_the_words(data: bytes, spans: int) -> None:
    data = data[: len(data) // 4 * 4].ljust(spans * 65_536 + len(data) // 4 * 4, b"\xfe")
    assert sums_of(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == sums_by_hand(data)


def test_a_place_is_cut_into_spans() -> None:
    """Of 16,384 words of four bytes, the last one shorter; in both memories, pages first, else in the order of the places."""
    sizes = [("slot", 4), ("page", 3 * 65_536 + 12), ("page", 65_536), ("slot", 8)]
    places = place_table([(kind, 1, 0, nbytes) for kind, nbytes in sizes])
    full = 16_384
    assert span_table(np.array([40, 400, 0, -80]), np.array([4, -800, 4_000_000, 0]), places).tolist() == [
        [100, 100 + full, 100 + 2 * full, 100 + 3 * full, 0, 10, -20],
        [-200, -200 + full, -200 + 2 * full, -200 + 3 * full, 1_000_000, 1, 0],
        [full, full, full, 3, full, 1, 2],
    ]


@pytest.mark.parametrize(("begin", "end_up", "nbytes"), [(2, 4, 4), (4, -2, 4), (4, 4, 3)])
def test_half_a_word_is_not_read(begin: int, end_up: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="whole words"):
        span_table(np.array([begin]), np.array([end_up]), place_table([("slot", 1, 0, nbytes)]))


def test_slots_have_their_place_beside_the_pages() -> None:
    """On either side of them."""
    both = torch.empty(4_000, dtype=torch.uint8)
    low, high = both[:1_200].view(3, 400), both[2_000:2_800].view(2, 400)
    places = place_table([("page", 2, 8, 4), ("slot", 1, 12, 4), ("page", 0, 0, 4)])
    for pages, slots, apart in ((low, high, 2_000), (high, low, -2_000)):
        ground = Ground.of({"page": pages, "slot": slots})
        assert ground.at(places).tolist() == [808, apart + 412, 0]
        assert ground.words.data_ptr() == pages.data_ptr() and ground.words.dtype == torch.int32


@pytest.mark.parametrize("change", ["a bit", "the highest bit", "two words", "two rows"])
def test_what_changed_changes_the_sums(change: str) -> None:
    packed = torch.randint(0, 256, (4 * 65_536,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = packed.clone()
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
    assert sums_of(before) != sums_of(packed)


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
    sender.write(receiver.address(), key, table([Span("page", 1, 5, 0, PAGE), Span("slot", 2, 3, 64, 100)]), seal)
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
        assert wait(lambda: gc.collect() >= 0 and not DRIVER.open_bases)


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
        sender.write(receiver.address(), KEY, table([Span("page", 1, 5, 0, 100)]))
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
                assert peer.socket.poll(1000 * PATIENCE_S)
                assert unpack_welcome(peer.socket.recv()).path == "cuda_ipc"
                assert len(DRIVER.open_bases) == 2
        assert wait(lambda: gc.collect() >= 0 and not DRIVER.open_bases)
    context.destroy(linger=0)


@pytest.mark.parametrize("path", ["cuda_ipc", "zeromq"])
def test_what_is_still_being_computed_holds_up_nobody_else(path: str) -> None:
    """Not another hand-off, not what the peers say; and the engine sleeps meanwhile."""
    with pair(path, path) as (sender, receiver, source, target):
        stream = HostStream()
        sender.inner._memory._stream = stream
        other = DeviceTransport(small_arena(seed=3), options=BulkOptions(path))
        stream.computed = 2
        turns, turn = [0], sender.inner._turn

        def counted() -> None:
            turns[0] += 1
            turn()

        sender.inner._turn = counted
        receiver.expect(KEY, 3, [5])
        other.expect((8, 0), 3, [6])
        sender.write(other.address(), (8, 0), table([Span("page", 2, 6, 0, PAGE)]))  # mark 1
        sender.write(receiver.address(), KEY, table([Span("page", 1, 5, 0, PAGE)]))  # mark 2
        assert [event.key for event in collect(sender, len)] == [(8, 0)]
        begin_s, begin = time.monotonic(), turns[0]
        time.sleep(0.3)
        assert wait(lambda: turns[0] - begin > 3), "it comes by again and again"
        count, passed_ms = turns[0] - begin, 1e3 * (time.monotonic() - begin_s)
        assert count < 1.2 * passed_ms + 20 and sender.poll() == [], "it comes by once a millisecond"
        stream.computed = 3
        assert [event.key for event in collect(sender, len)] == [KEY]
        assert torch.equal(target.pages[5], source.pages[1])
        other.close()


# --- while the device copies


@dataclass
class Copying:
    """A copy of a device, that a test ends."""

    done: bool = False
    fault: bool = False

    def over(self) -> bool:
        return self.done

    def result(self) -> bytes:
        self.done = True
        if self.fault:
            raise RuntimeError("device fault")
        return b"sums"


class Copier(DeviceMemory):
    """A device's memory with copies that take their time."""

    def __init__(self) -> None:
        self.copies: list[Copying] = []

    def enter(self) -> None:
        return None

    def mark(self) -> int:
        return 0

    def reached(self, mark: int) -> bool:
        return True

    def buffer(self, nbytes: int) -> Any:
        return np.empty(nbytes, dtype=np.uint8)

    def gather(self, places: Any, out: Any, mark: int) -> Copying:
        return self._begin()

    def scatter(self, source: Any, places: Any, mark: int, fill: Any = None) -> Copying:
        return self._begin()

    def sums(self, places: Any, mark: int) -> Copying:
        return Copying()

    def handles(self) -> bytes:
        return b""

    def open_peer(self, handles: bytes, rows: Any) -> DevicePeer:
        return DevicePeer()

    def fetch(self, peer: Any, sources: Any, places: Any, mark: int) -> Copying:
        return self._begin()

    def read(self, peer: Any, sources: Any) -> None:
        return None

    def _begin(self) -> Copying:
        self.copies.append(Copying())
        return self.copies[-1]


SIZES = {"page": (32, PAGE), "slot": (16, 64)}


class Fetching:
    """An inbound half over a `Copier`, and what it says to whom. Chunk `number` is of page `number`."""

    def __init__(self) -> None:
        self.memory = cast(Any, Copier())
        self.events: list[Event] = []
        self.waiting: list[tuple[str, Listener]] = []
        self.answers: list[tuple[str, int, int]] = []
        self.inbound = Inbound(self.memory, dict(SIZES), "cuda_ipc", Counters(), self.events.append)
        hello = Hello(1, 3, 100, b"n" * 16, SIZES, "cuda_ipc")
        self.inbound._mapped[hello.memory_name] = _Mapped(hello, DevicePeer(), "")
        self.inbound.expect(KEY, 3, range(1, 9), 0, b"")

    def chunk(self, number: int, sender: str = "one") -> int | None:
        return self.send(Chunk(KEY, number, table([Span("page", 20, number, 0, PAGE)]), b"n" * 16, sums=True), sender)

    def send(self, chunk: Chunk, sender: str = "one") -> int | None:
        """The answer, if it comes at once."""
        connection = Listener()
        hear(self.inbound, connection, [pack_chunk(chunk)])
        if connection.heard:
            return unpack_ack(connection.heard[0]).status
        self.waiting.append((sender, connection))
        return None

    def settle(self, idle: bool = False) -> None:
        self.inbound.settle(idle)
        for sender, connection in self.waiting:
            acks = [unpack_ack(answer) for answer in connection.heard]
            self.answers += [(sender, ack.number, ack.status) for ack in acks]
            connection.heard.clear()


def test_chunks_are_copied_one_behind_the_other_and_answered_as_they_end() -> None:
    rig = Fetching()
    assert [rig.chunk(number) for number in (1, 2, 3)] == [None] * 3 and len(rig.memory.copies) == 3
    rig.settle()
    assert not rig.answers and not rig.events and rig.inbound.wait_ms() == 0
    rig.memory.copies[0].done = True
    rig.settle()
    assert rig.answers == [("one", 1, LANDED)]
    rig.settle(idle=True)  # nothing else to do: it waits for one, and no more
    assert rig.answers[1:] == [("one", 2, LANDED)] and not rig.memory.copies[2].done
    rig.inbound.close()
    assert rig.memory.copies[2].done
    places = [named_places(event.places) for event in of_type(rig.events, Landed)]
    assert places == [[("page", number, 0, PAGE)] for number in (1, 2, 3)]


def test_a_revoked_window_is_drained_when_nothing_is_copied_into_it_any_more() -> None:
    rig = Fetching()
    rig.chunk(1)
    rig.chunk(2)
    rig.inbound.revoke(KEY)
    rig.inbound.revoke((9, 9))
    assert rig.events == [Drained((9, 9))]
    rig.settle(idle=True)
    assert [type(event) for event in rig.events[1:]] == [Landed]
    rig.settle(idle=True)
    assert [type(event) for event in rig.events[1:]] == [Landed, Landed, Drained]
    assert rig.chunk(3) == LATE


def test_a_chunk_that_comes_again_while_it_is_copied_is_answered_when_it_is_there() -> None:
    """To the new connection too; and no byte of it is copied twice."""
    rig = Fetching()
    rig.chunk(1, "one")
    assert rig.chunk(1, "two") is None and len(rig.memory.copies) == 1
    rig.inbound.revoke(KEY)
    assert rig.chunk(1, "six") is None, "its sender's memory is still read"
    rig.settle(idle=True)
    assert rig.answers == [(sender, 1, LANDED) for sender in ("one", "two", "six")]
    assert rig.inbound._counters.read()["repeated_frames"] == 2


def test_memory_that_is_copied_to_is_nobody_elses() -> None:
    rig = Fetching()
    rig.chunk(1)
    other = Chunk(KEY, 7, table([Span("page", 20, 1, 0, 4)]), b"n" * 16, sums=True)
    assert rig.send(other) == REFUSED and len(rig.memory.copies) == 1


@pytest.mark.parametrize("span", [Span("page", 32, 1, 0, PAGE), Span("slot", 16, 3, 0, 4), Span("slot", 1, 3, 61, 4)], ids=repr)
def test_nothing_is_read_beside_the_senders_memory(span: Span) -> None:
    rig = Fetching()
    rig.inbound._rows["slot"] = (17, 65)  # ours are larger
    rig.inbound.expect(KEY, 3, [1], 0, b"")
    assert rig.send(Chunk(KEY, 1, table([span]), b"n" * 16, sums=True)) == REFUSED and not rig.memory.copies
    assert rig.inbound._counters.read()["bad_frames"] == 1


def test_a_copy_that_fails_is_refused_and_so_is_what_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    rig = Fetching()
    rig.chunk(1)
    rig.memory.copies[0].fault = True
    with caplog.at_level(logging.ERROR):
        rig.settle(idle=True)
    assert rig.answers == [("one", 1, REFUSED)] and not rig.events and "device fault" in caplog.text
    assert rig.chunk(1) == REFUSED


def test_the_peer_fetches_while_the_sender_makes_its_digest() -> None:
    """Not only once that is begun: a host takes as long to begin it as a device to copy."""
    with pair() as (sender, receiver, source, target):
        memory, landed = sender.inner._outbound._memory, threading.Event()
        begin = memory.sums

        def late(places: Any, mark: int) -> Any:
            assert landed.wait(PATIENCE_S)
            return begin(places, mark)

        memory.sums = late
        receiver.expect(KEY, 3, [5])
        sender.write(receiver.address(), KEY, table([Span("page", 1, 5, 0, PAGE)]))
        (there,) = collect(receiver, len)
        assert isinstance(there, Landed) and torch.equal(target.pages[5], source.pages[1])
        landed.set()
        (wrote,) = collect(sender, len)
        assert isinstance(wrote, Wrote) and wrote.digest == there.digest


@pytest.mark.parametrize("at_once", [True, False], ids=["when they are begun", "when they end"])
def test_a_fault_after_a_chunk_has_left_costs_its_hand_off_only(
    at_once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sums are begun and waited for when the header is on its way: its answer still comes."""
    with pair() as (sender, receiver, source, target):
        memory = sender.inner._outbound._memory
        begin = memory._stream.begin

        def faulty(mark: int, issue: Any) -> Any:
            begin(mark, issue)
            if at_once:
                raise RuntimeError("device fault")
            return Copying(fault=True)

        monkeypatch.setattr(memory._stream, "begin", faulty)
        lost = hand_off(sender, receiver)
        assert isinstance(lost, Lost) and "device fault" in lost.reason
        monkeypatch.undo()
        receiver.expect((8, 0), 3, [6])
        sender.write(receiver.address(), (8, 0), table([Span("page", 2, 6, 0, PAGE)]))
        assert isinstance(collect(sender, len)[0], Wrote)
        assert torch.equal(target.pages[6], source.pages[2])
        assert sender.counters()["bad_frames"] == 0, "the answer was waited for: until then the peer reads"
    assert "goes on after a fault" not in caplog.text


# --- what has no stand-in


class RecordedStream:
    """A side stream, and the only event that is made."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def record(self, stream: Any) -> None:
        assert stream is self
        self.calls.append("record")

    def query(self) -> bool:
        return "reached" in self.calls

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


def test_what_is_begun_is_over_when_its_event_is_and_waits_if_it_could_not_be_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    stream, recorded = SideStream.__new__(SideStream), RecordedStream()
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: recorded)
    stream._stream, stream._events, stream._newest = recorded, {1: "event"}, 1  # type: ignore[assignment, dict-item]
    on_host = torch.tensor([1, -1])

    def issue() -> torch.Tensor:
        recorded.calls.append("copy")
        return on_host

    def faulty() -> torch.Tensor:
        raise RuntimeError("no memory")

    begun = stream.begin(1, issue)
    assert recorded.calls == ["event", "copy", "record"] and not begun.over(), "nobody waits"
    on_host[1] = 2  # as the device does
    assert begun.result() == (1).to_bytes(8, "little") + (2).to_bytes(8, "little") and recorded.calls[3:] == ["synchronize"]
    recorded.calls.append("reached")
    assert begun.over()
    monkeypatch.setattr(recorded, "query", faulty)
    assert begun.over(), "what is wrong comes with its result"
    with pytest.raises(RuntimeError, match="no memory"):
        stream.begin(0, faulty)
    assert recorded.calls[5:] == ["synchronize"]


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
from kernels import backend
from kvtransfer.transports import BulkOptions, open_transport
rig.DEVICE = sys.argv[1]
arena = rig.small_arena(64, 8, seed=1)
backend.choose(arena.pages.device)
transport = open_transport(arena, "127.0.0.1", "", BulkOptions(sys.argv[2]))
for line in sys.stdin:
    address, rid = line.split()
    spans = [rig.Span("page", page, 64 - page, 0, rig.LAYOUT.page_bytes) for page in range(1, 64)]
    spans += [rig.Span("slot", 2, 3, at, 40) for at in range(0, 400, 80)]
    arena.pages[1:] += 1  # on the computing stream, which the copies have to wait for
    transport.write(address, (int(rid), 0), rig.table(spans))
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
    backend.choose(target.pages.device)
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
