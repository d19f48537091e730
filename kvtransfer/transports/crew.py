"""Threads that move bytes while the engine's own thread looks after everything else.

One thread carries 3 to 4 GB/s. Where several connections have much to move and cores are free, each is lent to a thread of the
crew for a burst, which reads to, or writes from, places that are known, and shows the bytes to their digest. What a message
means, and every decision, stays with the engine's thread.
"""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from kvtransfer.transports.memory import fulfil

MOVE_S = 0.005  # of one burst, at most: it may be waited for, and others may be waiting for a thread
_TOGETHER_S = 0.05  # two connections that had much to move within so long are busy at the same time
_MOST_THREADS = 4
_CORES_A_THREAD = 4  # the other end may be on this host too, and so are other workers


def crew_threads() -> int:
    """How many pay off on this host: 2 at least, or 0."""
    threads = min(len(os.sched_getaffinity(0)) // _CORES_A_THREAD, _MOST_THREADS)
    return threads if threads > 1 else 0


class Lent(Protocol):
    """A connection, as the crew sees it."""

    def move(self, direction: int) -> None:
        """By a thread of the crew: one burst."""
        ...

    def returned(self, direction: int, future: Future[None]) -> None:
        """By the engine's thread once that is over, also when it was waited for or cancelled meanwhile."""
        ...


class Crew:
    """Belongs to the engine's thread, and wakes its selector."""

    def __init__(self, selector: selectors.BaseSelector, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "kv-crew")
        self._lent = 0  # bursts that have not come back
        self._back: deque[tuple[Lent, int, Future[None]]] = deque()
        self._last = 0  # the connection that had much to move, by id
        self._together_s = -_TOGETHER_S  # when that was last another one than before
        self._selector = selector
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        selector.register(self._bell, selectors.EVENT_READ, self._rung)

    @property
    def spare(self) -> bool:
        """Whether no burst waits for a thread; asked by any thread."""
        return self._lent <= self.threads

    def take(self, connection: Lent, direction: int) -> Future[None] | None:
        """A connection has much to move: by a thread, or, while it is the only one, by who asks (None)."""
        if self._alone(connection):
            return None
        self._lent += 1
        future = Future[None]()
        future.add_done_callback(partial(self._ring, connection, direction))
        try:
            self._pool.submit(fulfil, future, partial(connection.move, direction))
        except RuntimeError:  # no thread can be started; one that is there may have come to it all the same
            if future.cancel():
                return None
        return future

    def close(self) -> None:
        """Behind the connections."""
        self._pool.shutdown()
        self._selector.unregister(self._bell)
        os.close(self._bell)

    def _alone(self, connection: Lent) -> bool:
        now_s = time.monotonic()
        if id(connection) != self._last:
            if self._last:
                self._together_s = now_s
            self._last = id(connection)
        return now_s - self._together_s >= _TOGETHER_S

    def _ring(self, connection: Lent, direction: int, future: Future[None]) -> None:
        self._back.append((connection, direction, future))
        os.eventfd_write(self._bell, 1)

    def _rung(self, _: int) -> None:
        while self._back:
            connection, direction, future = self._back.popleft()
            self._lent -= 1
            connection.returned(direction, future)  # a fault in it leaves the bell ringing, for those behind it
        os.eventfd_read(self._bell)
        if self._back:  # it rang again in between
            os.eventfd_write(self._bell, 1)
