"""The receiving half of the bulk engine: windows that were granted, and the one place that writes into the arena."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kvtransfer.digest import SpanDigests, chunk_digest, combine
from kvtransfer.sharing import SharedMemory
from kvtransfer.spans import NBYTES, Places, places_of, sources_of, spoken, strays
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Drained, Event, Key, Landed
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.frame import (
    CORRUPT,
    LANDED,
    LATE,
    MAX_FRAMES,
    REFUSED,
    SPOKEN,
    Ack,
    BadFrame,
    Chunk,
    Hello,
    Welcome,
    pack_ack,
    pack_welcome,
    split_payload,
    unpack_chunk,
    unpack_hello,
)  # fmt: skip
from kvtransfer.transports.memory import Begun, CpuMemory, DeviceMemory, DevicePeer, Memory, Rows, shared_rows
from kvtransfer.transports.seal import NO_PAYLOAD, TAG_BYTES, BrokenSeal, Seal, tag_digest
from kvtransfer.transports.window import Window

_BURST = 4  # messages taken before sending gets its turn
_REMEMBERED = 4096  # closed windows: what is under way when one closes comes soon after
_MAX_MAPPED = 64  # arenas of living peers; one more travels over the network path
_LOOK_S = 1.0  # how often it is seen to that the owners of mapped arenas still live
_SCRATCH_BYTES = 4 << 20
_log = logging.getLogger("kvtransfer")


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A peer's arena in our address space, and when the process that it belongs to began."""

    hello: Hello
    memory: CpuMemory | DevicePeer
    began: str

    @property
    def owned(self) -> bool:
        """Whether that process is still there: without it this map alone keeps gigabytes from the host."""
        return bool(self.began) and _process_start(self.hello.pid) == self.began


@dataclass(slots=True, eq=False)
class _Fetch:
    """A chunk whose bytes our device is fetching: who sent it, on whichever connections, is answered when they are there."""

    chunk: Chunk
    wanted: Places
    window: Window
    source: DevicePeer  # which stays open as long as it is read
    begun: Begun
    identities: list[bytes]


class Inbound:
    """`path` is what this side agrees to: "auto" for any, or one of PATHS."""

    def __init__(self, memory: Memory, rows: Rows, path: str, counters: Counters, emit: Callable[[Event], None]) -> None:
        self._memory = memory
        self._rows = rows
        self._path = path
        self._counters = counters
        self._emit = emit
        self._windows: dict[Key, Window] = {}
        self._revoked = Tombstones(_REMEMBERED)
        self._mapped: dict[bytes, _Mapped] = {}  # by the memory's name
        self._looked_s = 0.0
        self._fetches: deque[_Fetch] = deque()  # in the order in which they end
        self._draining: list[Key] = []  # revoked, while something is fetched for them
        self._scratch = np.empty(_SCRATCH_BYTES, dtype=np.uint8)

    def expect(self, key: Key, slot: int, pages: Sequence[int], mark: int, secret: bytes) -> None:
        self._windows[key] = Window(slot, pages, self._rows, mark, Seal(secret) if secret else None)

    def revoke(self, key: Key) -> None:
        if self._windows.pop(key, None) is not None:
            self._revoked.add(key)
        if any(fetch.chunk.key == key for fetch in self._fetches):
            self._draining.append(key)
        else:
            self._emit(Drained(key))

    def tend(self, now_s: float) -> None:
        """Lets go of the arenas of processes that are gone."""
        if self._mapped and now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._drop_orphans()

    def wait_ms(self) -> int:
        """How long the engine may sleep."""
        if self._fetches:
            return 0
        return int(_LOOK_S * 1000) if self._mapped else 10_000

    def settle(self, socket: zmq.Socket[bytes], idle: bool) -> None:
        """Answers the fetches that are over; when there is nothing else to do, it waits for one. While the engine looks after
        one chunk, the device copies those behind it."""
        while self._fetches and (idle or self._fetches[0].begun.over()):
            idle = False
            fetch = self._fetches.popleft()
            answer = pack_ack(Ack(fetch.chunk.number, self._end(fetch)))
            for identity in fetch.identities:
                socket.send_multipart([identity, answer], zmq.NOBLOCK)
            for key in [key for key in self._draining if all(key != other.chunk.key for other in self._fetches)]:
                self._draining.remove(key)
                self._emit(Drained(key))

    def close(self) -> None:
        """Waits for what the device still writes."""
        while self._fetches:
            self._end(self._fetches.popleft())

    def receive(self, socket: zmq.Socket[bytes], before_landing: Callable[[], None]) -> None:
        """Takes the messages that are here now, a few at most. A bad one is counted, dropped, and answered so that an
        honest sender of it need not wait. `before_landing` brings the windows up to date: what is received may have been
        granted a moment ago."""
        for _ in range(_BURST):
            try:
                identity, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            before_landing()
            reply = self._answer([frame.buffer for frame in frames], identity.bytes)
            if reply:
                socket.send_multipart([identity.bytes, reply], zmq.NOBLOCK)

    def _answer(self, frames: list[memoryview], identity: bytes) -> bytes:
        """The reply to one message, b"" when it deserves none, or not yet."""
        header = bytes(frames[0]) if frames else b""
        try:
            if header[:4] == b"pdH3":
                return pack_welcome(self._welcome(unpack_hello(header)))
            chunk = unpack_chunk(header)
        except BadFrame:
            self._counters.add("bad_frames")
            return b""
        try:
            if len(frames) > 1 + MAX_FRAMES:
                raise BadFrame(f"{len(frames) - 1} frames of payload")
            status = self._probe(chunk, frames[1:]) if chunk.probe else self._land(chunk, header, frames[1:], identity)
        except BadFrame as error:
            self._counters.add("bad_frames")
            status = CORRUPT if isinstance(error, BrokenSeal) else REFUSED
        except Exception:  # a device fault, no memory: it costs this hand-off, whose sender must not wait for an answer
            _log.exception("a chunk of hand-off %s cannot be landed", chunk.key)
            status = REFUSED
        return b"" if status is None else pack_ack(Ack(chunk.number, status))

    def _welcome(self, hello: Hello) -> Welcome:
        """Which path a new peer's bytes are to take: the fast one when its memory can be mapped."""
        if self._path not in ("auto", hello.path):
            return Welcome("zeromq", f"{SPOKEN[hello.path]} is switched off at the receiver")
        if not hello.fd:
            return Welcome("zeromq", "the sender has no memory to share")
        self._drop_orphans()
        if len(self._mapped) >= _MAX_MAPPED and hello.memory_name not in self._mapped:
            return Welcome(
                "zeromq", f"the receiver has mapped {_MAX_MAPPED} arenas of living senders, which is the most it does"
            )
        try:
            memory = self._open(hello)
        except (OSError, ValueError) as error:
            return Welcome("zeromq", f"the sender's memory cannot be mapped: {error}")
        self._mapped[hello.memory_name] = _Mapped(hello, memory, _process_start(hello.pid))
        return Welcome(hello.path, "")

    def _open(self, hello: Hello) -> CpuMemory | DevicePeer:
        """A peer's arena, to read from. Raises OSError or ValueError."""
        try:
            foreign = SharedMemory.open_foreign(hello.pid, hello.fd, hello.memory_bytes, hello.memory_name)
        except (OSError, ValueError) as error:
            advice = "run both workers as one user in one PID namespace of one host, or with --transport zeromq"
            raise OSError(f"{error}; {advice}") from error
        foreign.close_descriptor()
        if hello.path == "shm":
            return CpuMemory(shared_rows(foreign, hello.rows))
        if not isinstance(self._memory, DeviceMemory):
            raise ValueError("it is on a GPU, and the receiver's is not")
        return self._memory.open_peer(foreign.map[: foreign.size_bytes], hello.rows)

    def _drop_orphans(self) -> None:
        for name in [name for name, mapped in self._mapped.items() if not mapped.owned]:
            del self._mapped[name]

    def _probe(self, chunk: Chunk, frames: list[memoryview]) -> int:
        """A copy as good as any, to memory that is nobody's."""
        if not chunk.memory_name:
            parts = [np.frombuffer(frame, dtype=np.uint8) for frame in frames]
        elif isinstance(memory := self._source(chunk), CpuMemory):
            parts = [memory.direct(source, 0) for source in sources_of(chunk.spans).tolist()]
        else:
            assert isinstance(self._memory, DeviceMemory)
            self._memory.read(memory, sources_of(chunk.spans))
            return LANDED
        for part in parts:
            room = self._scratch[: len(part)]
            room[:] = part[: len(room)]
        return LANDED

    def _land(self, chunk: Chunk, header: bytes, frames: list[memoryview], identity: bytes) -> int | None:
        """What becomes of a chunk; None when that is not known yet."""
        for fetch in self._fetches:
            if (fetch.chunk.key, fetch.chunk.number) == (chunk.key, chunk.number):
                self._counters.add("repeated_frames")
                fetch.identities.append(identity)
                return None
        window = self._windows.get(chunk.key)
        if window is None:
            if chunk.key not in self._revoked:
                raise BadFrame(f"nothing is expected of {chunk.key}")
            self._counters.add("late_frames")
            return LATE
        if chunk.number in window.numbers:  # sent again because our answer was lost
            self._counters.add("repeated_frames")
            return LANDED
        wanted = places_of(chunk.spans)
        ground = window.claim(wanted)
        source = self._source_of(window, chunk, header, frames)
        if isinstance(source, DevicePeer):
            assert isinstance(self._memory, DeviceMemory)
            try:
                begun = self._memory.fetch(source, sources_of(chunk.spans), wanted, window.mark)
            except ValueError as error:
                raise BadFrame(str(error)) from error
            window.land(chunk.number, ground)  # now: nobody else may write there meanwhile
            self._fetches.append(_Fetch(chunk, wanted, window, source, begun, [identity]))
            return None
        digest = self._write(window, chunk, source, wanted, header, frames)
        window.land(chunk.number, ground)
        self._emit(Landed(chunk.key, wanted, digest))
        return LANDED

    def _end(self, fetch: _Fetch) -> int:
        """Of a fetch that is over, or is waited for: what is answered."""
        try:
            digest = chunk_digest(fetch.chunk.key, fetch.wanted, fetch.begun.result())
        except Exception:  # a device fault costs this hand-off
            _log.exception("a chunk of hand-off %s cannot be fetched", fetch.chunk.key)
            fetch.window.numbers.discard(fetch.chunk.number)  # sent again, it is refused again
            return REFUSED
        self._emit(Landed(fetch.chunk.key, fetch.wanted, digest))
        return LANDED

    def _source_of(
        self, window: Window, chunk: Chunk, header: bytes, frames: list[memoryview]
    ) -> CpuMemory | DevicePeer | None:
        """The memory that a chunk's bytes are to be fetched from; None when they come along."""
        if not chunk.memory_name:
            return None
        if window.seal is not None:
            _check_header(window.seal, chunk, header, frames)
        elif frames:
            raise BadFrame("a chunk that is to be fetched, with bytes of its own")
        return self._source(chunk)

    def _write(
        self,
        window: Window,
        chunk: Chunk,
        source: CpuMemory | None,
        wanted: Places,
        header: bytes,
        frames: list[memoryview],
    ) -> int:
        """Puts a chunk's bytes, which a host can touch, in their places; gives their digest."""
        if source is not None:
            parts = [source.direct(place, 0) for place in sources_of(chunk.spans).tolist()]
        elif window.seal is not None:
            return self._unseal(window, chunk, wanted, header, frames)
        else:
            parts = [np.frombuffer(part, dtype=np.uint8) for part in split_payload(chunk.spans, frames)]
        digests = SpanDigests(chunk.key)
        self._memory.scatter(wanted, parts, window.mark, digests.begin)
        return digests.combined()

    def _source(self, chunk: Chunk) -> CpuMemory | DevicePeer:
        """The memory that a chunk's bytes are to be fetched from; its spans are inside."""
        if chunk.memory_name not in self._mapped:
            raise BadFrame("a chunk of memory that is not mapped here")
        mapped = self._mapped[chunk.memory_name]
        sources = sources_of(chunk.spans)
        outside = strays(sources, mapped.hello.rows)
        if outside.any():
            raise BadFrame(f"{spoken(sources[outside][0])} is not inside the sender's memory")
        return mapped.memory

    def _unseal(self, window: Window, chunk: Chunk, wanted: Places, header: bytes, frames: list[memoryview]) -> int:
        """Decrypts frame by frame: a large span straight into its place, small ones by way of a buffer."""
        assert window.seal is not None
        inner = [frame[:-TAG_BYTES] if len(frame) > TAG_BYTES else frame[:0] for frame in frames]
        split_payload(chunk.spans, inner)  # only for its check
        sizes, end = wanted[:, NBYTES].tolist(), 0
        for index, (sealed, data) in enumerate(zip(frames, inner, strict=True)):
            first, filled = end, 0
            while filled < len(data):
                filled += sizes[end]
                end += 1
            group = wanted[first:end]
            target = self._memory.direct(group[0].tolist(), window.mark) if len(group) == 1 else None
            plain = target if target is not None else np.empty(len(data), dtype=np.uint8)
            window.seal.open_into(chunk.number, index, sealed, header, plain)
            if target is None:
                parts = np.split(plain, np.cumsum(sizes[first : end - 1]))
                self._memory.scatter(group, parts, window.mark)
        return combine(tag_digest(frame) for frame in frames)


def _process_start(pid: int) -> str:
    """When a process of this host began, in clock ticks since the host did: with its number that names it. "" for none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # its state; field 22 of proc(5), counted from behind the name


def _check_header(seal: Seal, chunk: Chunk, header: bytes, frames: Sequence[memoryview]) -> None:
    if len(frames) != 1:
        raise BadFrame("a sealed chunk that is to be fetched has one tag")
    nothing: Any = np.empty(0, dtype=np.uint8)
    seal.open_into(chunk.number, NO_PAYLOAD, frames[0], header, nothing)
