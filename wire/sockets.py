"""One inbox per process (a bound PULL socket) and an outbox that pushes to other inboxes by address.

Nothing here blocks on a peer: a send either queues or is dropped and counted, and a frame that cannot be decoded is
counted and dropped. A message is one frame: of several, libzmq 4.3.5 ends the process when the connection breaks while the
socket is closed without lingering (session_base.cpp, `clean_pipes`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from wire.codec import BadMessage, decode, encode
from wire.curve import ClusterKey, RefusedPeers, be_server, secure

MAX_MESSAGE_BYTES = 16 << 20  # a 1M-token prompt is 4 MB
HARD_LIMIT_BYTES = 64 << 20  # libzmq closes the connection of a peer that announces more
SEND_QUEUE = 100_000
RECONNECT_MS = 50  # libzmq's first wait before it connects again; each is longer, up to the next number
RECONNECT_MOST_MS = 1000
CONNECT_MS = 2000  # without an answer, then it is tried afresh: TCP waits twice as long each time
# Of no acknowledgement, then a connection is made again, likewise: after a minute of silence TCP sits out most of another; of
# this, half at most. To TCP a peer that stands still without room is silent too: one that goes on earlier loses nothing.
UNACKNOWLEDGED_MS = 10_000
CONNECT_AGAIN_S = 10.0  # of no room in a peer's queue: libzmq has given up one that turned us away, and says it in no other way
MAX_PEERS = 2048  # connections an outbox holds: peers come and go under new addresses, and nobody says that one is gone
LOOK_S = 1.0  # at who was turned away: a warning may be due though no member says anything
MAX_SOCKETS = 2 * MAX_PEERS + 64  # of a process: an outbox, as many that are closed and not gone yet, the rest; else 1023


def bind_port(socket: zmq.Socket[bytes], host: str, port: int) -> int:
    """Binds ``tcp://host:port`` (port 0: any free one) and returns the real port. Raises zmq.ZMQError when taken."""
    socket.bind(f"tcp://{host}:{port or '*'}")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])


def reconnect_soon(socket: zmq.Socket[bytes]) -> None:
    """For a socket that connects, before it does: however long a link loses everything, seconds after it has healed what was
    queued goes through."""
    for option, value in (
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS),
        (zmq.CONNECT_TIMEOUT, CONNECT_MS),
        (zmq.TCP_MAXRT, UNACKNOWLEDGED_MS),
    ):
        socket.setsockopt(option, value)


def notice_the_vanished(socket: zmq.Socket[bytes]) -> None:
    """For a socket that listens, before it does: a host that is gone without a word does not hold its connection for ever."""
    for option, value in ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 30), (zmq.TCP_KEEPALIVE_INTVL, 10)):
        socket.setsockopt(option, value)


def open_context(cluster_key: str = "") -> zmq.Context[Any]:
    """A process's ZeroMQ context, with room for a socket per peer; its sockets speak CURVE with the key in that file.

    Raises ClusterKeyError for a file that is none.
    """
    key = ClusterKey.read(cluster_key) if cluster_key else None
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)  # counts only before the first socket
    if key is not None:
        secure(context, key)
    return context


class Inbox:
    """The process's only way in. Bound when built, so `address` is real before anybody is told of it."""

    def __init__(self, context: zmq.Context[Any], host: str = "127.0.0.1", port: int = 0, advertise: str = "") -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
        self.socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
        notice_the_vanished(self.socket)
        self._refused = RefusedPeers(context, self.socket) if be_server(self.socket) else None
        self.address = f"tcp://{advertise or host}:{bind_port(self.socket, host, port)}"
        self.bad_frames = 0
        self._detach: Callable[[], Any] = lambda: None

    @property
    def refused_peers(self) -> int:
        """Connections that were turned away because they do not hold the cluster's key."""
        return self._refused.count() if self._refused is not None else 0

    def drain(self, limit: int = 1000) -> Iterator[Any]:
        """The messages that are here now, at most `limit`; never waits."""
        if self._refused is not None:
            self._refused.count()  # what is counted often does not pile up
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1 or len(frames[0]) > MAX_MESSAGE_BYTES:
                    raise BadMessage(f"{len(frames)} frames, first of {len(frames[0])} bytes")
                yield decode(frames[0])
            except BadMessage:
                self.bad_frames += 1

    def wait(self, timeout_s: float) -> bool:
        """Waits until a message is here or the time is over; True when one is."""
        return bool(self.socket.poll(max(0, int(timeout_s * 1000))))  # a negative time would mean "for ever" to libzmq

    def attach(self, loop: asyncio.AbstractEventLoop, handle: Callable[[Any], None]) -> None:
        """Calls `handle` for every message from now on, on `loop`, without a task per message."""

        def look() -> None:
            if self._refused is not None and not self.socket.closed:
                self._refused.count()
                loop.call_later(LOOK_S, look)

        def readable() -> None:
            # The descriptor is edge-triggered: go on until it is empty, but let other callbacks in between.
            if self.socket.closed:
                return
            try:
                for message in self.drain(limit=256):
                    handle(message)
            finally:  # even when `handle` raised: what is left would not make the descriptor readable again
                if not self.socket.closed and self.socket.poll(0):
                    loop.call_soon(readable)

        descriptor = self.socket.fileno()
        loop.add_reader(descriptor, readable)
        loop.call_soon(readable)
        look()
        self._detach = lambda: loop.remove_reader(descriptor)

    def close(self) -> None:
        self._detach()
        if self._refused is not None:
            self._refused.close()
        self.socket.close()


class Outbox:
    """Pushes messages to inboxes by address. Not thread-safe: one per thread."""

    def __init__(self, context: zmq.Context[Any], linger_ms: int = 500) -> None:
        self._context = context
        self._linger_ms = linger_ms  # so that a last word (Status "gone") still leaves when the process ends
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._full_s: dict[str, float] = {}  # since when nothing can be queued, by address
        self.dropped = 0

    def send(self, address: str, message: Any) -> bool:
        """Queues `message` for `address`; False (and counted) when its queue is full or the address is not valid."""
        try:
            self._socket(address).send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped += 1
            now_s = time.monotonic()
            if address in self._sockets and now_s - self._full_s.setdefault(address, now_s) >= CONNECT_AGAIN_S:
                self.forget(address)
            return False
        if self._full_s:
            self._full_s.pop(address, None)
        return True

    def forget(self, address: str) -> None:
        """Drops the connection to a peer that is gone, with whatever was queued for it."""
        socket = self._sockets.pop(address, None)
        self._full_s.pop(address, None)
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=self._linger_ms)
        self._sockets.clear()

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        if address in self._sockets:
            self._sockets[address] = self._sockets.pop(address)  # the last used is the last in order
        else:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, self._linger_ms)  # the default is for ever, for a process that ends without close()
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            reconnect_soon(socket)
            try:
                socket.connect(address)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._sockets[address] = socket
            if len(self._sockets) > MAX_PEERS:
                oldest = next(iter(self._sockets))
                self._full_s.pop(oldest, None)
                self._sockets.pop(oldest).close(linger=self._linger_ms)
        return self._sockets[address]
