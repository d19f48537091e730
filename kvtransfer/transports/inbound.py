"""The receiving half of the bulk engine: windows that were granted, and the one place that writes into the arena."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zmq

from kvtransfer.sharing import SharedMemory
from kvtransfer.spans import Places, places_of, sources_of, spoken, strays
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
    VERSION,
    Ack,
    BadFrame,
    Chunk,
    Hello,
    Welcome,
    pack_ack,
    pack_other,
    pack_welcome,
    unpack_chunk,
    unpack_hello,
    version_of,
    versions,
)  # fmt: skip
from kvtransfer.transports.memory import CpuMemory, DeviceMemory, DevicePeer, Memory, Rows, shared_rows
from kvtransfer.transports.seal import BrokenSeal, Seal
from kvtransfer.transports.unpacker import Arrival, Copy
from kvtransfer.transports.window import Window

_BURST = 4  # messages taken before sending gets its turn
_MOST_LANDINGS = 16  # under way: with a chunk's bytes, what peers cost that keep to no credit
_MOST_EARLY = 32  # chunks for memory that is still read: what a sender of eight connections has under way
_STILL_READ_MS = 1  # to look again whether it is
_REMEMBERED = 4096  # closed windows: what is under way when one closes comes soon after
_MAX_MAPPED = 64  # arenas of living peers; one more travels over the network path
_LOOK_S = 1.0  # how often it is seen to that the owners of mapped arenas still live
_SCRATCH_BYTES = 4 << 20
_WARN_EVERY_S = 60.0
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
class _Landing:
    """A chunk whose bytes are being copied: who sent it, on whichever connections, is answered when they are there."""

    wanted: Places
    window: Window
    copy: Copy
    identities: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _Early:
    """A chunk for memory that our device is not done with: what came, from whom, and its window."""

    frames: list[memoryview]
    identity: zmq.Frame
    key: Key
    window: Window


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
        self._landings: deque[_Landing] = deque()  # in the order in which they end
        self._early: deque[_Early] = deque()
        self._draining: list[Key] = []  # revoked, while something is copied for them
        self._warned_s = -math.inf
        self._scratch = np.empty(_SCRATCH_BYTES, dtype=np.uint8)

    def expect(self, key: Key, slot: int, pages: Sequence[int], mark: int, secret: bytes) -> None:
        self._windows[key] = Window(slot, pages, self._rows, mark, Seal(secret) if secret else None)

    def revoke(self, key: Key) -> None:
        if self._windows.pop(key, None) is not None:
            self._revoked.add(key)
        if any(landing.copy.chunk.key == key for landing in self._landings):
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
        if self._landings:
            return 0
        if self._early:
            return _STILL_READ_MS
        return int(_LOOK_S * 1000) if self._mapped else 10_000

    def settle(self, socket: zmq.Socket[bytes], idle: bool) -> None:
        """Answers the copies that are over; when there is nothing else to do, it waits for one. While the engine looks after
        one chunk, those behind it are copied."""
        self._take_up(socket)
        while self._landings and (idle or self._landings[0].copy.begun.over()):
            idle = False
            landing = self._landings.popleft()
            answer = pack_ack(Ack(landing.copy.chunk.number, self._end(landing)))
            for identity in landing.identities:
                socket.send_multipart([identity, answer], zmq.NOBLOCK)
            landing_keys = {other.copy.chunk.key for other in self._landings}
            for key in [key for key in self._draining if key not in landing_keys]:
                self._draining.remove(key)
                self._emit(Drained(key))

    def _take_up(self, socket: zmq.Socket[bytes]) -> None:
        """The chunks whose memory is free by now, as if they came now: begun before, they would hold up what is copied behind
        them."""
        for _ in range(min(len(self._early), _MOST_LANDINGS - len(self._landings))):
            early = self._early.popleft()
            if self._windows.get(early.key) is early.window and not self._memory.reached(early.window.mark):
                self._early.append(early)
            else:
                self._reply(socket, early.frames, early.identity)

    def close(self) -> None:
        """Waits for what is still written."""
        while self._landings:
            self._end(self._landings.popleft())

    def receive(self, socket: zmq.Socket[bytes], before_landing: Callable[[], None]) -> None:
        """Takes the messages that are here now, a few at most. A bad one is counted, dropped, and answered so that an
        honest sender of it need not wait. `before_landing` brings the windows up to date: what is received may have been
        granted a moment ago."""
        for _ in range(_BURST):
            if len(self._landings) >= _MOST_LANDINGS:
                self.settle(socket, idle=True)
            if len(self._early) >= _MOST_EARLY:  # what else came waits in the socket
                time.sleep(_STILL_READ_MS / 1000)
                return
            try:
                identity, *frames = _message(socket)
            except zmq.Again:
                return
            before_landing()
            self._reply(socket, [frame.buffer for frame in frames], identity)

    def _reply(self, socket: zmq.Socket[bytes], frames: list[memoryview], identity: zmq.Frame) -> None:
        reply = self._answer(frames, identity)
        if reply:
            socket.send_multipart([identity.bytes, reply], zmq.NOBLOCK)

    def _answer(self, frames: list[memoryview], identity: zmq.Frame) -> bytes:
        """The reply to one message, b"" when it deserves none, or not yet."""
        header = bytes(frames[0]) if frames else b""
        try:
            version = version_of(header)
            if version == VERSION:
                welcome = self._welcome(unpack_hello(header))
                return pack_welcome(replace(welcome, device=isinstance(self._memory, DeviceMemory)))
            if version:
                return self._turn_away(version, identity)
            chunk = unpack_chunk(header)
        except BadFrame:
            self._counters.add("bad_frames")
            return b""
        try:
            if len(frames) > 1 + MAX_FRAMES:
                raise BadFrame(f"{len(frames) - 1} frames of payload")
            if chunk.probe:
                status: int | None = self._probe(chunk, frames[1:])
            elif (window := self._windows.get(chunk.key)) is not None and not self._memory.reached(window.mark):
                self._early.append(_Early(frames, identity, chunk.key, window))
                status = None
            else:
                status = self._land(chunk, header, frames[1:], identity.bytes)
        except BadFrame as error:
            self._counters.add("bad_frames")
            status = CORRUPT if isinstance(error, BrokenSeal) else REFUSED
        except Exception:  # a device fault, no memory: it costs this hand-off, whose sender must not wait for an answer
            _log.exception("a chunk of hand-off %s cannot be landed", chunk.key)
            status = REFUSED
        return b"" if status is None else pack_ack(Ack(chunk.number, status))

    def _turn_away(self, version: bytes, identity: zmq.Frame) -> bytes:
        """A sender of another version is told so, instead of leaving it to wait for a WELCOME."""
        self._counters.add("bad_frames")
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:  # it greets again and again
            self._warned_s = now_s
            _log.warning("no KV is taken from a sender at %s: it speaks %s", identity.get("Peer-Address"), versions(version))
        return pack_other()

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
            parts = [memory.direct(source) for source in sources_of(chunk.spans).tolist()]
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
        for landing in self._landings:
            if (landing.copy.chunk.key, landing.copy.chunk.number) == (chunk.key, chunk.number):
                self._counters.add("repeated_frames")
                landing.identities.append(identity)
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
        arrival, source = Arrival(chunk, window.seal, header, frames), None
        if chunk.memory_name:
            arrival.check_reference()
            source = self._source(chunk)
        copy = arrival.begin(self._memory, source, window.mark)
        window.land(chunk.number, ground)  # now: nobody else may write there meanwhile
        self._landings.append(_Landing(wanted, window, copy, [identity]))
        return None

    def _end(self, landing: _Landing) -> int:
        """Of one whose copy is over, or is waited for: what is answered."""
        chunk = landing.copy.chunk
        try:
            digest = landing.copy.digest()
        except Exception:  # a device fault costs this hand-off
            _log.exception("a chunk of hand-off %s cannot be landed", chunk.key)
            landing.window.numbers.discard(chunk.number)  # sent again, it is refused again
            return REFUSED
        self._emit(Landed(chunk.key, landing.wanted, digest))
        return LANDED

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


def _message(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The next one, behind who sent it; of what has too many frames for a chunk, no more than show that. Raises zmq.Again."""
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    more = frames[0].more
    while more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        more = frame.more
        if len(frames) < MAX_FRAMES + 3:
            frames.append(frame)
    return frames


def _process_start(pid: int) -> str:
    """When a process of this host began, in clock ticks since the host did: with its number that names it. "" for none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # its state; field 22 of proc(5), counted from behind the name
