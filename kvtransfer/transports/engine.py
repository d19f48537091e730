"""The bulk engine: one loop that moves bytes between this arena and those of peers, in a process or thread of its own.

As a process (``python -m kvtransfer.transports.engine FD``) it is told what it needs over the channel; it ends when its
owner's end is closed, for whatever reason.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, field
from typing import Any

from kvtransfer.sharing import NAME_BYTES, SharedMemory
from kvtransfer.spans import SRC, from_bytes
from kvtransfer.transports import BulkOptions, Event, Landed, Link, Lost
from kvtransfer.transports.channel import REASON_BYTES, Channel, ChannelClosed, pack_event
from kvtransfer.transports.connection import READ, Side
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.crew import Crew, crew_threads
from kvtransfer.transports.frame import MAX_HEADER_BYTES, STRAIGHT_BYTES, Hello
from kvtransfer.transports.inbound import Inbound
from kvtransfer.transports.jobs import Job
from kvtransfer.transports.memory import CpuMemory, Memory, Rows, shared_rows
from kvtransfer.transports.outbound import Outbound
from kvtransfer.transports.port import Port
from kvtransfer.transports.seal import TAG_BYTES, Seal

START_S = 10.0
_PLACES = 1024  # in one message, and MAX_SPANS more at most, of 16 bytes each: it has to fit channel.MAX_BYTES
_log = logging.getLogger("kvtransfer")


@dataclass(frozen=True, slots=True)
class Site:
    """Where an engine works: its arena, and the host it listens on. `shared` leads peers to that arena by `path`."""

    memory: Memory
    rows: Rows
    shared: SharedMemory | None
    path: str
    host: str
    options: BulkOptions
    counters: Counters
    password: bytes = field(default=b"", repr=False)  # that peers have to show


class Engine:
    """Says ["bound", port] when it listens, or ["failed", reason]; then does as it is told until the channel closes."""

    def __init__(self, channel: Channel, site: Site) -> None:
        self._channel = channel
        self._events: list[list[Any]] = []
        self._places = 0  # in them
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.fileno(), READ, None)
        counters, memory = site.counters, site.memory
        self._inbound = Inbound(memory, site.rows, site.options.path, counters, self._emit, self._obey)
        largest = max(STRAIGHT_BYTES, *(row_bytes for _, row_bytes in site.rows.values())) + TAG_BYTES
        threads = crew_threads()
        self._crew = Crew(self._selector, threads) if threads else None
        side = Side(True, site.password, MAX_HEADER_BYTES, largest, self._inbound.begin, self._inbound.may_begin, self._crew)
        self._port = Port(side, self._selector, counters)
        self._outbound = Outbound(
            self._selector, site.password, memory, _hello(site), site.options, counters, self._emit, self._report, self._crew
        )
        self._memory, self._host = memory, site.host

    def run(self) -> None:
        try:
            self._memory.enter()
            if self._listen():
                while True:
                    self._turn_safely()
        except ChannelClosed:
            return
        finally:
            self._close()

    def _close(self) -> None:
        """All of it, whatever fails."""
        with suppress(ChannelClosed), ExitStack() as ends:
            for each in (self._channel, self._selector, self._crew, self._port, self._outbound, self._inbound):  # backwards
                if each is not None:
                    ends.callback(each.close)

    def _listen(self) -> bool:
        try:
            self._channel.send("bound", self._port.listen(self._host))
        except OSError as error:
            self._channel.send("failed", f"cannot listen on {self._host!r}: {error}")
            return False
        return True

    def _turn_safely(self) -> None:
        try:
            self._turn()
        except ChannelClosed:
            raise
        except Exception:  # one fault must not end the engine that every hand-off of this worker depends on
            _log.exception("the bulk engine goes on after a fault")
            time.sleep(0.01)

    def _turn(self) -> None:
        """Waits until something can be done, and does a little of everything that can."""
        wait_ms = 5 if self._channel.backlog else min(each.wait_ms() for each in (self._inbound, self._outbound, self._port))
        ready = self._selector.select(wait_ms / 1000)
        self._obey()
        for key, events in ready:
            if key.data is not None:
                key.data(events)
        now_s = time.monotonic()
        self._inbound.settle(idle=not ready)
        self._inbound.tend(now_s)
        self._port.tend(now_s)
        self._outbound.turn(now_s, idle=not ready)
        self._tell()

    def _obey(self) -> None:
        for command in self._channel.receive():
            match command:
                case ["expect", rid, attempt, slot, pages, mark, secret]:
                    self._inbound.expect((rid, attempt), slot, pages, mark, secret)
                case ["revoke", rid, attempt]:
                    self._inbound.revoke((rid, attempt))
                case ["write", rid, attempt, peer, spans, mark, secret]:
                    seal = Seal(secret) if secret else None
                    self._outbound.write(Job(peer, (rid, attempt), from_bytes(spans, SRC + 1), mark, seal))
                case ["cancel", rid, attempt]:
                    self._outbound.cancel((rid, attempt))

    def _emit(self, event: Event) -> None:
        self._events.append(pack_event(event))
        self._places += _weight(event)
        if self._places >= _PLACES:
            self._tell()

    def _tell(self) -> None:
        """What happened in a turn goes out in one message: each one wakes the owner."""
        if self._events:
            events, self._events, self._places = self._events, [], 0  # first: what cannot be sent must not be in the way
            self._channel.send("events", events)
        self._channel.flush()

    def _report(self, peer: str, link: Link | None) -> None:
        self._channel.send("link", peer, None if link is None else astuple(link))


def _weight(event: Event) -> int:
    """How much room an event takes in a message, in places."""
    match event:
        case Landed():
            return 1 + len(event.places)
        case Lost():
            return 1 + REASON_BYTES // 16
    return 1


def _hello(site: Site) -> Hello:
    if site.shared is None:
        return Hello(0, 0, 0, bytes(NAME_BYTES), site.rows)
    return Hello(os.getpid(), site.shared.fd, site.shared.size_bytes, site.shared.name, site.rows, site.path)


def main(channel_fd: int) -> None:
    """The process: the first message says which memory and which options."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals the whole group; the owner decides when we end
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=channel_fd))
    start = channel.first(START_S)
    assert start is not None, "nobody says what is to be done"
    _, memory_fd, size_bytes, pages, slots, counters_fd, host, options, password = start
    shared = SharedMemory.inherit(memory_fd, size_bytes)
    rows: Rows = {"page": (pages[0], pages[1]), "slot": (slots[0], slots[1])}
    memory = CpuMemory(shared_rows(shared, rows))
    site = Site(memory, rows, shared, "shm", host, BulkOptions(*options), Counters(counters_fd), password)
    Engine(channel, site).run()


if __name__ == "__main__":
    if not (len(sys.argv) == 2 and sys.argv[1].isdecimal()):
        said = "kvtransfer.transports.engine is a process of a worker's KV transport, and is started by that only"
        print(said, file=sys.stderr)
        sys.exit(2)
    main(int(sys.argv[1]))
