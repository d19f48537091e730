"""What the tests of KV transfer share: a small layout, waiting, raw sockets, and a TCP proxy that can tamper and stall."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import zmq

from kvtransfer.arena import Arena
from kvtransfer.layout import Field, KVLayout
from kvtransfer.transports import Event, Transport

torch.set_num_threads(1)

PAGE_TOKENS = 8
LAYOUT = KVLayout.pack(
    PAGE_TOKENS,
    [Field(0, "csa", 0, 2, 1000, 4), Field(1, "hca", 0, 1, 500, 8)],
    [Field(layer, "window", 0, 12, 40, keep=8) for layer in range(5)] + [Field(9, "state", 0, 9, 24, keep=0, modulo=8)],
)


def small_arena(num_pages: int = 32, num_slots: int = 16, seed: int = 0) -> Arena:
    """An arena of random bytes."""
    arena = Arena(LAYOUT, num_pages, num_slots)
    generator = torch.Generator().manual_seed(seed)
    arena.pages.random_(0, 256, generator=generator)
    arena.slots.random_(0, 256, generator=generator)
    return arena


def wait(condition: Callable[[], Any], timeout_s: float = 10.0) -> bool:
    """Whether `condition` became true in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True


def collect(transport: Transport, enough: Callable[[list[Event]], Any], timeout_s: float = 10.0) -> list[Event]:
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


def raw_push(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    push.connect(address)
    return push


def raw_pull(context: zmq.Context[Any], address: str = "tcp://127.0.0.1:*") -> tuple[zmq.Socket[bytes], str]:
    """A peer that reads only when told to, and its address."""
    pull: zmq.Socket[bytes] = context.socket(zmq.PULL)
    pull.setsockopt(zmq.LINGER, 0)
    pull.setsockopt(zmq.RCVHWM, 1)
    pull.setsockopt(zmq.RCVBUF, 65536)
    pull.bind(address)
    endpoint = pull.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return pull, endpoint.rstrip(b"\0").decode()


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


def of_type(events: Iterable[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]
