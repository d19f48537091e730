"""The digest of a chunk's bytes on a host, made while they come or leave.

By the engine's thread, piece by piece, while its core has them in the cache: that costs the least. Where cores are free, by the
copying threads a few megabytes behind it: that costs a little more, and the engine does not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvtransfer.digest import SpanDigests
from kvtransfer.spans import Place, Places, num_bytes
from kvtransfer.transports import Key
from kvtransfer.transports.connection import Show
from kvtransfer.transports.memory import TASK_BYTES, Bytes, Task
from kvtransfer.transports.sums import HostSums

CORES_FREE = len(os.sched_getaffinity(0)) >= 6  # two engines of one host, two copying threads each


class Digests(Protocol):
    def begin(self, place: Place) -> Show:
        """What the bytes of one place are to be shown to, piece by piece, in order, before those of another."""
        ...

    def combined(self) -> int:
        """0..2^64-1, of all that was shown."""
        ...


def plain_digests(key: Key, places: Places, sums: bool) -> HostSums | SpanDigests:
    """Made by who shows the bytes. `sums`: see `Chunk`. Raises ValueError for places that a device cannot make sums of."""
    return HostSums(key, places) if sums else SpanDigests(key)


class Looks:
    """See `Digests`; of a chunk to these places. Raises ValueError as `plain_digests` does. As work of other threads (see
    `Begun`) there is nothing to be told of it."""

    def __init__(self, key: Key, places: Places, sums: bool) -> None:
        self._digests: Digests = plain_digests(key, places, sums)
        self._by_threads = CORES_FREE
        self._missing = num_bytes(places)
        self._shown: list[tuple[Show, Bytes]] = []  # and nobody told to look at
        self._shown_bytes = 0
        self._tasks: list[Task[None]] = []

    def begin(self, place: Place, whole: Bytes) -> Show:
        """What `whole`, the bytes of one place, is to be shown to, piece by piece, in order."""
        show = self._digests.begin(place)
        return _Wait(whole, partial(self._keep, show)) if self._by_threads else show

    def combined(self) -> int:
        self.result()
        return self._digests.combined()

    def over(self) -> bool:
        return all(task.over() for task in self._tasks)

    def result(self) -> bytes:
        for task in self._tasks:
            task.result()
        self._tasks.clear()
        return b""

    def _keep(self, show: Show, whole: Bytes) -> None:
        self._shown.append((show, whole))
        self._shown_bytes += len(whole)
        self._missing -= len(whole)
        if self._shown_bytes >= TASK_BYTES or not self._missing:
            self._tell()

    def _tell(self) -> None:
        self._tasks.append(Task(partial(_look, self._shown)))
        self._shown, self._shown_bytes = [], 0


class _Wait:
    """Passes on what is shown when all of it has been: to a thread each piece alone would cost as much as the whole."""

    def __init__(self, whole: Bytes, then: Callable[[Bytes], None]) -> None:
        self._whole, self._then = whole, then
        self._missing = len(whole)

    def __call__(self, piece: Bytes) -> None:
        self._missing -= len(piece)
        if not self._missing:
            self._then(self._whole)


def _look(shown: Sequence[tuple[Show, Bytes]]) -> None:
    for show, whole in shown:
        show(whole)
