"""A worker's Status, sent twice a second by a thread that a long step cannot starve.

The loop publishes what it is; the thread repeats the last word with a socket of its own. The router is told at once
when the worker starts, and once more, with state "gone", when it leaves. A loop that has published nothing for
`STALE_S` is stuck: its heartbeat falls silent, so that silence means dead here too, until it publishes again. A router
that no Status reaches, because it is not there or has another key, is logged.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

import zmq

from wire.codec import encode
from wire.messages import Status
from wire.sockets import reconnect_soon

PERIOD_S = 0.5
STALE_S = 30.0  # far longer than a step takes; a loop without work publishes every second
LAST_WORD_MS = 500  # how long "gone" may take to leave
UNHEARD_S = 5.0  # a router that nothing reaches for so long is worth a warning
WARN_EVERY_S = 60.0

_log = logging.getLogger("wire")


class Heartbeat:
    """Sends the newest published Status until it is closed. Raises zmq.ZMQError for an address that is none."""

    def __init__(
        self,
        context: zmq.Context[Any],
        router: str,
        status: Status,
        period_s: float = PERIOD_S,
        stale_s: float = STALE_S,
        unheard_s: float = UNHEARD_S,
    ) -> None:
        self._context, self._send_ms = context, int(min(period_s, PERIOD_S) * 1000)
        self._router, self._period_s, self._stale_s, self._unheard_s = router, period_s, stale_s, unheard_s
        self._socket = self._connect()
        self._unheard_since_s: float | None = None  # None: the last Status has left over a connection of members
        self._warn_at_s = self._connect_at_s = 0.0
        self._warned = False
        self._closing = threading.Event()
        self.publish(status)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def publish(self, status: Status) -> None:
        """Takes a new snapshot; any thread. It is encoded here, so that one that cannot be fails where it was made."""
        self._frame, self._last_word = encode(status), encode(replace(status, state="gone"))
        self._published_s = time.monotonic()

    def close(self) -> None:
        """Says "gone" and ends the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            if time.monotonic() - self._published_s <= self._stale_s:
                self._send(self._frame)
            self._closing.wait(self._period_s)
        self._send(self._last_word)
        self._socket.close(linger=LAST_WORD_MS)

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        # Nothing is queued for a router that is away: only the newest Status is worth sending, not the thousands before.
        # (CONFLATE would say the same, but closing such a socket loses its last message.)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, 2)
        socket.setsockopt(zmq.SNDTIMEO, self._send_ms)
        reconnect_soon(socket)
        try:
            socket.connect(self._router)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def _connect_again(self) -> None:
        try:
            socket = self._connect()
        except zmq.ZMQError as error:  # too many sockets, say: no reason to fall silent for good
            _log.warning("cannot connect to the router %s once more: %s", self._router, error)
            return
        self._socket.close(linger=0)
        self._socket = socket

    def _send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame)
            if self._warned:
                _log.info("the router %s is there again", self._router)
            self._unheard_since_s, self._warned = None, False
        except zmq.Again:  # there is no connection, or none that has passed the handshake; the next beat tries again
            self._unheard(time.monotonic())

    def _unheard(self, now_s: float) -> None:
        """Warns when the router has been out of reach for long, and again each `WARN_EVERY_S`. And connects once more: of a
        router that has a key, or none, where we have not, libzmq gives it up for good."""
        if self._unheard_since_s is None:
            self._unheard_since_s, self._warn_at_s = now_s, now_s + self._unheard_s
            self._connect_at_s = self._warn_at_s
        if now_s >= self._connect_at_s:
            self._connect_at_s = now_s + self._unheard_s
            self._connect_again()
        if now_s >= self._warn_at_s:
            self._warn_at_s, self._warned = now_s + WARN_EVERY_S, True
            _log.warning(
                "no answer from the router %s for %.0f s: is it there, is the address right, "
                "do both have the same --cluster-key?",
                self._router,
                now_s - self._unheard_since_s,
            )
