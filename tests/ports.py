"""TCP ports of this host for tests: one to listen on again, one where nobody ever listens.

Never one that was free a moment ago: the kernel gives those to whoever asks next, and other tests run beside this one.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from wire.sockets import Inbox

OWN_PORTS = range(20_000, 30_000)  # the kernel gives out none of these by itself: its own begin at 32768


def own_port() -> int:
    """One that nobody listens on, nor comes to do unless it is told to."""
    while True:
        port = random.SystemRandom().choice(OWN_PORTS)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


@contextmanager
def closed_port() -> Iterator[int]:
    """One that refuses connections, and is taken as long as this lasts."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # and does not listen
        yield holder.getsockname()[1]


def inbox_again(context: zmq.Context[Any], port: int, patience_s: float = 30.0) -> Inbox:
    """An Inbox on a port that another one is giving up: libzmq closes sockets in its own time."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            return Inbox(context, port=port)
        except zmq.ZMQError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)
