"""What the tests of KV transfer share: a small layout, waiting, raw sockets, and a TCP proxy that can tamper and stall."""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import zmq
from torch import Tensor

from kvtransfer.arena import Arena
from kvtransfer.layout import Field, KVLayout
from kvtransfer.spans import KINDS, Places, Spans
from kvtransfer.transports import BulkOptions, Event, Key, Transport
from kvtransfer.transports.bulk import BulkTransport
from kvtransfer.transports.cuda import CudaMemory, SideStream
from kvtransfer.transports.cuda_ipc import HANDLE_BYTES, Extent, Opened
from kvtransfer.transports.faults import Faults, FaultyTransport
from kvtransfer.transports.frame import (
    PATHS,
    VERSION,
    Ack,
    Chunk,
    Welcome,
    pack_ack,
    pack_chunk,
    pack_welcome,
    unpack_ack,
    unpack_chunk,
)
from kvtransfer.transports.inbound import Inbound
from kvtransfer.transports.memory import Memory

torch.set_num_threads(1)

DEVICE = "cpu"
PAGE_TOKENS = 8
LAYOUT = KVLayout.pack(
    PAGE_TOKENS,
    [Field(0, "csa", 0, 2, 1000, 4), Field(1, "hca", 0, 1, 500, 8)],
    [
        *[Field(layer, "window", 0, 12, 40, keep=8) for layer in range(5)],
        Field(8, "state", 0, 9, 1000, keep=0, modulo=8),  # whose dead rows are too many to be sent along
        Field(9, "state", 0, 9, 24, keep=0, modulo=8),
    ],
)


Place = tuple[str, int, int, int]  # kind, number in an arena, offset, nbytes


class Span(NamedTuple):
    """`nbytes` bytes at `offset` of our page or slot `src`, which go to the same offset of the peer's `dst`."""

    kind: str
    src: int
    dst: int
    offset: int
    nbytes: int

    @property
    def place(self) -> Place:
        return (self.kind, self.dst, self.offset, self.nbytes)


def table(spans: Iterable[Span]) -> Spans:
    rows = [(KINDS.index(kind), dst, offset, nbytes, src) for kind, src, dst, offset, nbytes in spans]
    return np.array(rows, dtype=np.uint32).reshape(-1, 5)


def place_table(places: Iterable[Place]) -> Places:
    rows = [(KINDS.index(kind), number, offset, nbytes) for kind, number, offset, nbytes in places]
    return np.array(rows, dtype=np.uint32).reshape(-1, 4)


def named_spans(spans: Spans) -> list[Span]:
    return [Span(KINDS[kind], src, dst, offset, nbytes) for kind, dst, offset, nbytes, src in spans.tolist()]


def named_places(places: Places) -> list[Place]:
    return [(KINDS[kind], number, offset, nbytes) for kind, number, offset, nbytes in places.tolist()]


def small_arena(num_pages: int = 32, num_slots: int = 16, seed: int = 0) -> Arena:
    """An arena of random bytes, on `DEVICE`."""
    arena = Arena(LAYOUT, num_pages, num_slots, DEVICE)
    generator = torch.Generator().manual_seed(seed)
    for rows in (arena.pages, arena.slots):
        rows.copy_(torch.empty(rows.shape, dtype=torch.uint8).random_(0, 256, generator=generator))
    return arena


def give_all_to_a_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are threads of this process have a crew of two from now on, whatever the host, and lend it every byte of
    messages, however few, and whether anybody else is busy or not."""
    monkeypatch.setattr("kvtransfer.transports.engine.crew_threads", lambda: 2)
    monkeypatch.setattr("kvtransfer.transports.connection.MUCH_BYTES", 1)
    monkeypatch.setattr("kvtransfer.transports.crew.Crew._alone", lambda crew, connection: False)


PATIENCE_S = 30  # a machine may be busy with other things


def wait(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> bool:
    """Whether `condition` became true in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True


def collect(transport: Transport, enough: Callable[[list[Event]], Any], timeout_s: float = PATIENCE_S) -> list[Event]:
    """What the transport reports until `enough` says so (or the time is over)."""
    events: list[Event] = []

    def look() -> Any:
        events.extend(transport.poll())
        return enough(events)

    assert wait(look, timeout_s), f"only {events[-5:]}"
    return events


def refused(address: str) -> bool:
    """Whether nobody listens at `address` any more: libzmq closes sockets in its own time."""
    host, port = address.removeprefix("tcp://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it is closing this very moment
        return False
    return False


class ThreadTransport(BulkTransport):
    """The transport as it is over device memory, with its engine in a thread: it starts at once, and tests see into it."""

    def _own_process(self, arena: Arena) -> bool:
        return False

    @property
    def inner(self) -> Any:
        """The engine."""
        return self._engine


def thread_transport(arena: Arena, path: str = "zeromq", stall_s: float = 30.0, lanes: int = 1) -> ThreadTransport:
    return ThreadTransport(arena, options=BulkOptions(path, lanes, stall_s=stall_s))


@dataclass(eq=False)
class HostWork:
    """What a `HostStream` was told to do, and what it came to."""

    stream: HostStream
    issue: Callable[[], Tensor]
    on_host: Tensor | None = None

    def over(self) -> bool:
        self.stream.advance()
        return self.on_host is not None

    def result(self) -> bytes:
        assert self.stream.copies_end.wait(PATIENCE_S)
        self.stream.advance()
        assert self.on_host is not None
        return self.on_host.numpy().tobytes()


class HostStream:
    """Stands in for a CUDA stream where there is none: what is begun is done, in that order, once `copies_end` is set. Marks
    below `computed` are reached; tests move both."""

    def __init__(self) -> None:
        self.marks = 0
        self.computed = 1 << 32
        self.copies_end = threading.Event()
        self.copies_end.set()
        self.begun: deque[HostWork] = deque()
        self.advances = threading.RLock()  # copying threads begin work too

    def enter(self) -> None:
        return None

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def reached(self, mark: int) -> bool:
        return mark < self.computed

    def begin(self, mark: int, issue: Callable[[], Tensor]) -> HostWork:
        assert self.reached(mark), "the engine would wait for what is being computed"
        self.begun.append(work := HostWork(self, issue))
        self.advance()
        return work

    def advance(self) -> None:
        with self.advances:
            while self.begun and self.copies_end.is_set():
                work = self.begun.popleft()
                work.on_host = work.issue()

    def after(self, mark: int) -> contextlib.AbstractContextManager[None]:
        assert self.reached(mark), "the engine would wait for what is being computed"
        return contextlib.nullcontext()

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class OneProcess:
    """Stands in for the driver, which opens no memory of the process that asks: handles lead to tensors that are here."""

    def __init__(self) -> None:
        self.exported: dict[bytes, Tensor] = {}
        self.open_bases: list[int] = []

    def export(self, rows: Tensor) -> Extent:
        handle = os.urandom(HANDLE_BYTES)
        self.exported[handle] = rows
        return Extent(handle, 0)

    def open(self, extent: Extent, nbytes: int) -> Opened:
        if extent.handle not in self.exported:
            raise OSError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE")
        rows = self.exported[extent.handle]
        if extent.offset + nbytes > rows.numel():
            raise ValueError(f"{nbytes} bytes from {extent.offset} on are more than the {rows.numel()} that were opened")
        self.open_bases.append(rows.data_ptr())
        return Opened(rows.data_ptr(), rows.data_ptr() + extent.offset)

    def close(self, opened: Opened) -> None:
        self.open_bases.remove(opened.base)


DRIVER = OneProcess()


class DeviceTransport(ThreadTransport):
    """The transport of GPU workers, both of them in this process; without a GPU over the CPU's tensors."""

    def _device_memory(self, arena: Arena) -> Memory:
        stream = SideStream(arena.pages.device) if arena.pages.is_cuda else HostStream()
        return CudaMemory({"page": arena.pages, "slot": arena.slots}, stream, DRIVER)


class Faultless(FaultyTransport):
    """The wrapper that injects faults, which has none to inject."""

    def __init__(self, inner: ThreadTransport) -> None:
        super().__init__(inner, Faults())
        self.inner = inner.inner


def set_stall(transport: Any, stall_s: float) -> None:
    """From now on a peer may take nothing for so long. A test that waits for the end of it sets it when the peer has got as far
    as it is to get: before that, a busy machine may be as slow as it likes."""
    outbound = transport.inner._outbound
    outbound._options = replace(outbound._options, stall_s=stall_s)


def rigged_transport(arena: Arena, path: str, stall_s: float = 30.0, lanes: int = 1) -> ThreadTransport | Faultless:
    """Of a path, of "device" (between GPUs over ZeroMQ), of "faults", or of "crew" (see `give_all_to_a_crew`)."""
    if path == "faults":
        return Faultless(thread_transport(arena, "zeromq", stall_s, lanes))
    kind = DeviceTransport if path in ("device", "cuda_ipc") else ThreadTransport
    return kind(arena, options=BulkOptions(path if path in PATHS else "zeromq", lanes, stall_s=stall_s))


def sums_by_hand(data: bytes) -> bytes:
    """What a device makes of these bytes of a place for their digest, in Python's numbers."""
    mask, weights, sums = (1 << 64) - 1, [], []
    for index in range(1, 16_385):
        z = index * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        weights.append((z ^ z >> 31) | 1)
    for at in range(0, len(data), 65_536):
        words = struct.unpack("<16384i", data[at : at + 65_536].ljust(65_536, b"\0"))
        sums.append(sum(map(operator.mul, words, weights)) & mask)
    return struct.pack(f"<{len(sums)}Q", *sums)


def header(key: Key, places: list[Place], number: int = 1) -> bytes:
    """Of a chunk whose bytes come along."""
    return pack_chunk(Chunk(key, number, table(Span(kind, 0, dst, at, size) for kind, dst, at, size in places)))


class Listener:
    """In place of a connection: what is said to the other end."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.diverted = False
        self.send = self.heard.append

    def divert(self) -> None:
        self.diverted = True


def hear(inbound: Inbound, connection: Any, frames: list[bytes]) -> None:
    """A message comes, all of it."""
    message = inbound.begin(connection, frames[0], len(frames) > 1)
    for index, frame in enumerate(frames[1:], 2):
        at = 0
        for view in message.room(len(frame), index < len(frames)):
            view[:] = np.frombuffer(frame, dtype=np.uint8, count=len(view), offset=at)
            at += len(view)
            message.came(view)
    message.end()


class RawSender:
    """A peer that sends what it is told to, right or wrong."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._numbers = iter(range(1_000_000, 2_000_000))

    def send(self, key: Key, places: list[Place], payload: bytes | None = None) -> None:
        """A chunk; zeros without a `payload`."""
        data = bytes(sum(place[3] for place in places)) if payload is None else payload
        self.socket.send_multipart([header(key, places, next(self._numbers)), data])

    def status(self) -> int:
        """What the receiver answers to the next chunk."""
        assert self.socket.poll(1000 * PATIENCE_S)
        return unpack_ack(self.socket.recv()).status


class RawReceiver:
    """A peer that greets, and reads chunks and acknowledges them only when told to."""

    def __init__(self, context: zmq.Context[Any], address: str = "tcp://127.0.0.1:*") -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 65536)
        self.socket.bind(address)
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode()
        self.identity = b""  # of who sent the last message
        self.welcome = Welcome("zeromq", "a test")

    def take(self) -> None:
        """The next chunk that is for somebody, and no word of it."""
        assert self.chunk(None) is not None, "no chunk came"

    def chunk(self, status: int | None = 0, timeout_s: float = PATIENCE_S) -> tuple[Chunk, bytes] | None:
        """The next chunk that is for somebody, and its bytes; it is acknowledged with `status`. None: nothing came."""
        while self.socket.poll(int(timeout_s * 1000)):
            identity, head, *frames = self.socket.recv_multipart()
            self.identity = identity
            if head[:4] == VERSION:
                self.socket.send_multipart([identity, pack_welcome(self.welcome)])
                continue
            chunk = unpack_chunk(head)
            if chunk.probe or status is not None:
                self.socket.send_multipart([identity, pack_ack(Ack(chunk.number, 0 if chunk.probe else status or 0))])
            if not chunk.probe:
                return chunk, b"".join(frames)
        return None

    def next(self) -> tuple[Chunk, bytes]:
        got = self.chunk()
        assert got is not None, "no chunk came"
        return got

    def silent(self, timeout_s: float = 0.05) -> bool:
        return not self.socket.poll(int(timeout_s * 1000))


class Proxy:
    """Forwards TCP to `address`. `tamper` sees every piece that goes there; while `open` is not set nothing does."""

    def __init__(self, address: str, tamper: Callable[[bytes], bytes] = lambda data: data) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._tamper = tamper
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.open = threading.Event()
        self.open.set()
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def cut(self) -> None:
        """Breaks the connections there are; new ones are let through."""
        for each in self._sockets[1:]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.open.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            self._start(self._forward, client, server, self._tamper)
            self._start(self._forward, server, client, lambda data: data)

    def _forward(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        while data := source.recv(65536):
            self.open.wait()
            target.sendall(change(data))

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            with contextlib.suppress(OSError):
                function(*args)

        threading.Thread(target=run, daemon=True).start()


def of_type(events: Iterable[Any], kind: type | tuple[type, ...]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]
