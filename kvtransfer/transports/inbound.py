"""The receiving half of the bulk engine: windows that were granted, and the one place that writes into the arena."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvtransfer.sharing import SharedMemory
from kvtransfer.spans import NBYTES, Places, num_bytes, places_of, sources_of, spoken, strays
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Drained, Event, Key, Landed
from kvtransfer.transports.connection import Connection, Incoming, Nothing, pieces, waste
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.frame import (
    CHUNK_BYTES,
    CORRUPT,
    LANDED,
    LATE,
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
from kvtransfer.transports.window import Runs, Window

_MOST_LANDINGS = 16  # under way: with a chunk's bytes, what peers cost that keep to no credit
_MOST_EARLY = 32  # chunks for memory that is still read: twice what a sender of eight connections has under way
_STILL_READ_MS = 1  # to look again whether it is
_REMEMBERED = 4096  # closed windows: what is under way when one closes comes soon after
_MAX_MAPPED = 64  # arenas of living peers; one more travels over the network path
_LOOK_S = 1.0  # how often it is seen to that the owners of mapped arenas still live
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
class _Coming:
    """See `Incoming`: a chunk. `status`: what is wrong with it, once that is known."""

    inbound: Inbound
    connection: Connection
    chunk: Chunk
    window: Window | None = None
    arrival: Arrival | None = None  # None: its bytes are not wanted
    ground: Runs | None = None  # that it is read to
    status: int | None = None

    def room(self, nbytes: int, more: bool) -> Iterable[Any]:
        if self.arrival is not None:
            try:
                return self.arrival.room(nbytes, more)
            except Exception as error:
                self.inbound.spoil(self, error)
        return waste(nbytes)

    def came(self, view: Any) -> None:
        if self.arrival is not None:
            self.arrival.came(view)

    def end(self) -> None:
        self.inbound.ended(self)

    def lost(self) -> None:
        self.inbound.drop(self)


@dataclass(slots=True, eq=False)
class _Landing:
    """A chunk whose bytes are being copied, or looked at. Who sent it, on whichever connections, is answered after that."""

    wanted: Places
    window: Window
    copy: Copy
    senders: list[Connection] = field(default_factory=list)


class Inbound:
    """`path` is what this side agrees to: "auto" for any, or one of PATHS. `before_landing` brings the windows up to date: what
    is received may have been granted a moment ago."""

    def __init__(
        self,
        memory: Memory,
        rows: Rows,
        path: str,
        counters: Counters,
        emit: Callable[[Event], None],
        before_landing: Callable[[], None] = lambda: None,
    ) -> None:
        self._memory = memory
        self._rows = rows
        self._buffer_bytes = max(CHUNK_BYTES, *(row_bytes for _, row_bytes in rows.values()))
        self._path = path
        self._counters = counters
        self._emit = emit
        self._before_landing = before_landing
        self._windows: dict[Key, Window] = {}
        self._revoked = Tombstones(_REMEMBERED)
        self._mapped: dict[bytes, _Mapped] = {}  # by the memory's name
        self._looked_s = 0.0
        self._landings: deque[_Landing] = deque()  # in the order in which they end
        self._coming: dict[tuple[Key, int], _Coming] = {}  # to their places, by number
        self._early: deque[_Coming] = deque()  # for memory that our device is not done with
        self._draining: list[Key] = []  # revoked, while something is copied for them
        self._warned_s = -math.inf

    def expect(self, key: Key, slot: int, pages: Sequence[int], mark: int, secret: bytes) -> None:
        self._leave_alone(key)
        self._windows[key] = Window(slot, pages, self._rows, mark, Seal(secret) if secret else None)

    def revoke(self, key: Key) -> None:
        self._leave_alone(key)
        if self._windows.pop(key, None) is not None:
            self._revoked.add(key)
        if any(landing.copy.chunk.key == key for landing in self._landings):
            self._draining.append(key)
        else:
            self._emit(Drained(key))

    def _leave_alone(self, key: Key) -> None:
        """What comes for it is not read to its memory any more."""
        for coming in [each for each in self._coming.values() if each.chunk.key == key]:
            coming.status = LATE
            coming.connection.divert()
            self.drop(coming)

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

    def settle(self, idle: bool) -> None:
        """Answers the copies that are over; when there is nothing else to do, it waits for one. While the engine looks after
        one chunk, those behind it are copied."""
        self._take_up()
        while self._landings and (idle or self._landings[0].copy.begun.over()):
            idle = False
            landing = self._landings.popleft()
            answer = pack_ack(Ack(landing.copy.chunk.number, self._end(landing)))
            for sender in landing.senders:
                sender.send(answer)
            landing_keys = {other.copy.chunk.key for other in self._landings}
            for key in [key for key in self._draining if key not in landing_keys]:
                self._draining.remove(key)
                self._emit(Drained(key))

    def _take_up(self) -> None:
        """The chunks whose memory is free by now, as if they came now: begun before, they would hold up what is copied behind
        them."""
        for _ in range(min(len(self._early), _MOST_LANDINGS - len(self._landings))):
            self.ended(self._early.popleft())

    def close(self) -> None:
        """Waits for what is still written."""
        while self._landings:
            self._end(self._landings.popleft())

    def may_begin(self) -> bool:
        """Whether there is room for a chunk more; otherwise it waits in its connection."""
        return len(self._landings) < _MOST_LANDINGS and len(self._early) < _MOST_EARLY

    def begin(self, connection: Connection, header: bytes, more: bool) -> Incoming:
        """A message comes. A bad one is counted, dropped, and answered once it is over, so that an honest sender of it need not
        wait."""
        self._before_landing()
        try:
            version = version_of(header)
            if version:
                return Nothing(partial(connection.send, self._greet(version, header, connection)))
            chunk = unpack_chunk(header)
        except BadFrame:
            self._counters.add("bad_frames")
            return Nothing()
        coming = _Coming(self, connection, chunk)
        try:
            self._admit(coming, header)
        except Exception as error:
            self.spoil(coming, error)
        return coming

    def _greet(self, version: bytes, header: bytes, connection: Connection) -> bytes:
        if version != VERSION:
            return self._turn_away(version, connection)
        welcome = self._welcome(unpack_hello(header))
        return pack_welcome(replace(welcome, device=isinstance(self._memory, DeviceMemory)))

    def _admit(self, coming: _Coming, header: bytes) -> None:
        """Finds out where the bytes of a chunk are to go, if they are wanted. Raises BadFrame."""
        chunk = coming.chunk
        other = self._coming.get((chunk.key, chunk.number))
        if other is not None:  # its connection is broken, and we do not know yet
            self._counters.add("repeated_frames")
            other.status = LATE
            other.connection.divert()
            self.drop(other)
        window = self._windows.get(chunk.key)
        if chunk.probe or window is None or chunk.number in window.numbers:
            return
        arrival, ground = Arrival(chunk, window.seal, header, self._memory), window.claim(places_of(chunk.spans))
        if not (arrival.straight or chunk.memory_name) and num_bytes(chunk.spans) > self._buffer_bytes:
            raise BadFrame(f"{num_bytes(chunk.spans)} bytes in one chunk")
        coming.window, coming.arrival = window, arrival
        if arrival.straight:
            window.land(chunk.number, ground)  # now: nobody else may write there meanwhile
            coming.ground = ground
            self._coming[chunk.key, chunk.number] = coming

    def spoil(self, coming: _Coming, error: Exception) -> None:
        """Something is wrong with a chunk: it costs its hand-off, whose sender must not wait for an answer."""
        self.drop(coming)
        coming.arrival, coming.status = None, REFUSED
        if isinstance(error, BadFrame):
            self._counters.add("bad_frames")
            coming.status = CORRUPT if isinstance(error, BrokenSeal) else REFUSED
        else:  # a device fault, no memory
            _log.error("a chunk of hand-off %s cannot be landed", coming.chunk.key, exc_info=error)

    def drop(self, coming: _Coming) -> None:
        """No byte of it is read to its place any more."""
        if coming.ground is not None and coming.window is not None:
            coming.window.give_back(coming.chunk.number, coming.ground)
            coming.ground = None
            del self._coming[coming.chunk.key, coming.chunk.number]

    def ended(self, coming: _Coming) -> None:
        """All of a chunk is here: answers it, if that can be done now."""
        if coming.status is None:
            try:
                coming.status = self._finish(coming)
            except Exception as error:
                self.spoil(coming, error)
        elif coming.status == LATE:
            self._counters.add("late_frames")
        if coming.status is not None:
            coming.connection.send(pack_ack(Ack(coming.chunk.number, coming.status)))

    def _finish(self, coming: _Coming) -> int | None:
        """What becomes of a chunk; None when that is not known yet. Raises BadFrame, and what a device raises."""
        chunk, arrival = coming.chunk, coming.arrival
        if chunk.probe:
            return self._probe(chunk)
        for landing in self._landings:
            if (landing.copy.chunk.key, landing.copy.chunk.number) == (chunk.key, chunk.number):
                self._counters.add("repeated_frames")
                landing.senders.append(coming.connection)
                return None
        window = self._windows.get(chunk.key)
        if window is None or (arrival is not None and window is not coming.window):
            if window is None and chunk.key not in self._revoked:
                raise BadFrame(f"nothing is expected of {chunk.key}")
            self._counters.add("late_frames")
            return LATE
        if arrival is not None and coming.ground is not None:
            self._arrived(coming, arrival)
            return None
        if chunk.number in window.numbers:  # sent again because our answer was lost
            self._counters.add("repeated_frames")
            return LANDED
        if arrival is None:
            raise BadFrame("its bytes were not wanted when they came")
        arrival.check_whole()
        if not self._memory.reached(window.mark):
            self._early.append(coming)
            return None
        self._land(coming, arrival, window)
        return None

    def _arrived(self, coming: _Coming, arrival: Arrival) -> None:
        """A chunk that was read to its places."""
        assert coming.window is not None
        arrival.check_whole()
        coming.ground = None
        del self._coming[coming.chunk.key, coming.chunk.number]
        self._landings.append(_Landing(places_of(coming.chunk.spans), coming.window, arrival.read(), [coming.connection]))

    def _land(self, coming: _Coming, arrival: Arrival, window: Window) -> None:
        """Begins to copy a chunk to its places."""
        chunk, wanted = coming.chunk, places_of(coming.chunk.spans)
        ground = window.claim(wanted)
        copy = arrival.begin(self._source(chunk) if chunk.memory_name else None, window.mark)
        window.land(chunk.number, ground)  # now: nobody else may write there meanwhile
        self._landings.append(_Landing(wanted, window, copy, [coming.connection]))

    def _turn_away(self, version: bytes, connection: Connection) -> bytes:
        """A sender of another version is told so, instead of leaving it to wait for a WELCOME."""
        self._counters.add("bad_frames")
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:  # it greets again and again
            self._warned_s = now_s
            _log.warning("no KV is taken from a sender at %s: it speaks %s", connection.host, versions(version))
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

    def _probe(self, chunk: Chunk) -> int:
        """Bytes that came along have been read to nowhere; others are now."""
        if chunk.memory_name:
            memory, sources = self._source(chunk), sources_of(chunk.spans)
            if isinstance(memory, CpuMemory):
                for source in sources.tolist():
                    for view, room in zip(pieces(memory.direct(source)), waste(source[NBYTES]), strict=True):
                        room[:] = view
            else:
                assert isinstance(self._memory, DeviceMemory)
                self._memory.read(memory, sources)
        return LANDED

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


def _process_start(pid: int) -> str:
    """When a process of this host began, in clock ticks since the host did: with its number that names it. "" for none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # its state; field 22 of proc(5), counted from behind the name
