"""The line between a transport's owner and its engine: short msgpack lists over a socket pair, in order, never waiting.

Private to two ends that trust each other; nothing from the network comes through it undigested.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgpack

from kvtransfer.spans import NBYTES, from_bytes, to_bytes
from kvtransfer.transports import Drained, Event, Landed, Lost, Wrote

MAX_BYTES = 200_000  # of a message: what a socket pair takes in one piece with the kernel's default buffer
REASON_BYTES = 300  # of a Lost: an error's text may be of any length
BUFFER_BYTES = 4 << 20  # as far as the kernel allows
_READ_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end. `backlog` holds what the other end is too slow to take."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._backlog: deque[bytes] = deque()

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, *message: Any) -> None:
        """Queues a message; what cannot leave now leaves with a later call of `send` or `flush`."""
        data = msgpack.packb(message)
        if len(data) > MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes does not fit the channel")
        self._backlog.append(data)
        self.flush()

    def flush(self) -> None:
        try:
            while self._backlog:
                self._end.send(self._backlog[0])
                self._backlog.popleft()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # the other end is gone: who reads will find out
            self._backlog.clear()

    def receive(self) -> Iterator[list[Any]]:
        """The messages that are here now. Raises ChannelClosed."""
        while True:
            try:
                data = self._end.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            yield msgpack.unpackb(data, use_list=True)

    def first(self, timeout_s: float) -> list[Any] | None:
        """Waits, once, at the start, for the first message; None when none comes. Raises ChannelClosed."""
        poller = select.poll()  # unlike select, it takes any descriptor
        poller.register(self._end, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return None
        return next(self.receive())

    def close(self) -> None:
        self._end.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """The owner's end, and the socket of the engine's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return Channel(ours), theirs


def pack_event(event: Event) -> list[Any]:
    match event:
        case Wrote(key, num_spans, num_bytes, digest):
            return ["wrote", *key, num_spans, num_bytes, digest]
        case Landed(key, places, digest):
            return ["landed", *key, to_bytes(places), digest]
        case Lost(key, reason, corrupt, closed):
            return ["lost", *key, reason.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore"), corrupt, closed]
        case Drained(key):
            return ["drained", *key]


def unpack_event(message: list[Any]) -> Event:
    """Raises ValueError for a message that is no event."""
    match message:
        case ["wrote", rid, attempt, num_spans, num_bytes, digest]:
            return Wrote((rid, attempt), num_spans, num_bytes, digest)
        case ["landed", rid, attempt, places, digest]:
            return Landed((rid, attempt), from_bytes(places, NBYTES + 1), digest)
        case ["lost", rid, attempt, reason, corrupt, closed]:
            return Lost((rid, attempt), reason, corrupt, closed)
        case ["drained", rid, attempt]:
            return Drained((rid, attempt))
    raise ValueError(f"{message[0]!r} is no event")
