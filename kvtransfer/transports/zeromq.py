"""KV bytes over ZeroMQ: PULL bound, one PUSH per peer, and one thread that does all of it.

The default transport: from any host to any host, CPU or GPU memory. The owner's thread only ever takes a lock that is
held for one message's copy, at most.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq

from kvtransfer.transports import Event, Key, Span
from kvtransfer.transports.frame import MAX_HEADER_BYTES
from kvtransfer.transports.inbound import Inbound
from kvtransfer.transports.memory import memory_of
from kvtransfer.transports.outbound import MESSAGE_BYTES, SEND_QUEUE, Lane, Outbound
from wire.sockets import bind_port

if TYPE_CHECKING:
    from kvtransfer.arena import Arena

_log = logging.getLogger(__name__)
_BUSY_TICK_MS = 250  # how often a stalled peer's clock is looked at
_IDLE_TICK_MS = 10_000
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt(3)


class ZeroMQTransport:
    """See `Transport`. A peer that takes nothing for `stall_s` seconds loses what is queued for it."""

    def __init__(
        self, context: zmq.Context[Any], arena: Arena, host: str = "127.0.0.1", advertise: str = "", stall_s: float = 30.0
    ) -> None:
        _keep_freed_memory()
        rows = {kind: (tensor.shape[0], tensor.shape[1]) for kind, tensor in (("page", arena.pages), ("slot", arena.slots))}
        memory = memory_of(arena)
        self._events: deque[Event] = deque()
        self._has_events = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbound = Inbound(memory, rows, self._emit)
        self._outbound = Outbound(context, memory, rows, stall_s, self._emit)
        self._pull = _bound_socket(
            context, max(MESSAGE_BYTES, arena.layout.page_bytes, arena.layout.slot_bytes) + MAX_HEADER_BYTES
        )
        self._address = f"tcp://{advertise or host}:{bind_port(self._pull, host, 0)}"
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvtransfer", daemon=True)
        self._thread.start()

    @property
    def bad_frames(self) -> int:
        return self._inbound.bad_frames

    @property
    def late_frames(self) -> int:
        return self._inbound.late_frames

    def address(self) -> str:
        return self._address

    def expect(self, key: Key, slot: int, pages: Sequence[int]) -> None:
        self._inbound.expect(key, slot, pages)

    def revoke(self, key: Key) -> None:
        self._inbound.revoke(key)

    def write(self, peer: str, key: Key, spans: Sequence[Span]) -> None:
        self._outbound.write(peer, key, spans)
        os.eventfd_write(self._wake, 1)

    def cancel(self, key: Key) -> None:
        self._outbound.cancel(key)

    def poll(self) -> list[Event]:
        _clear(self._has_events)  # first: an event that comes after this line makes the descriptor readable again
        return [self._events.popleft() for _ in range(len(self._events))]

    def fileno(self) -> int:
        return self._has_events

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        os.close(self._has_events)

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._has_events, 1)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except zmq.ContextTerminated:
                break
            except Exception:  # one fault must not end the thread that every hand-off of this process depends on
                _log.exception("the bulk thread goes on after a fault")
                time.sleep(0.01)
        self._outbound.close()
        self._pull.close(linger=0)

    def _turn(self) -> None:
        """Waits until something can be done, and does a little of everything that can."""
        lanes = self._outbound.waiting()
        ready = self._wait(lanes)
        now_s = time.monotonic()
        if self._wake in ready:
            _clear(self._wake)
        self._outbound.accept(now_s)
        if self._pull in ready:
            self._inbound.receive(self._pull)
        for socket, lane in lanes.items():
            if socket in ready:
                self._outbound.send(lane, now_s)
        self._outbound.expire(now_s)

    def _wait(self, lanes: dict[zmq.Socket[bytes], Lane]) -> set[Any]:
        """The sockets and descriptors that are ready."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._pull, zmq.POLLIN)
        for socket in lanes:
            poller.register(socket, zmq.POLLOUT)
        return {source for source, _ in poller.poll(_BUSY_TICK_MS if lanes else _IDLE_TICK_MS)}


def _bound_socket(context: zmq.Context[Any], max_frame_bytes: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)  # libzmq closes the connection of a peer that announces more
    for option, value in ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 30), (zmq.TCP_KEEPALIVE_INTVL, 10)):
        socket.setsockopt(option, value)  # a host that vanished without a word does not hold its connection for ever
    return socket


def _clear(eventfd: int) -> None:
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        return  # nothing was set


def _keep_freed_memory() -> None:
    """Makes glibc keep what is freed up to 32 MiB a piece: libzmq allocates every frame it receives, and giving those
    pages back to the kernel each time costs 10,000 page faults for 64 MiB. No effect on other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
