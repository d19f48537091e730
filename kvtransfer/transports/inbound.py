"""The receiving half of the ZeroMQ transport: windows that were granted, and the one place that writes into the arena."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from kvtransfer.digest import combine, span_digest
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Event, Key, Landed, Place
from kvtransfer.transports.frame import BadFrame, unpack
from kvtransfer.transports.memory import Memory

_BURST = 8  # messages taken before sending gets its turn
_REMEMBERED = 4096  # closed windows: what is under way when one closes comes soon after


@dataclass(frozen=True, slots=True)
class _Window:
    slot: int
    pages: frozenset[int]
    mark: Any  # what the granted memory was last used for, on a device

    def holds(self, place: Place, rows: dict[str, tuple[int, int]]) -> bool:
        kind, number, offset, nbytes = place
        granted = number in self.pages if kind == "page" else number == self.slot
        return granted and offset + nbytes <= rows[kind][1]


class Inbound:
    """`expect` and `revoke` belong to the owner's thread, `receive` to the transport's."""

    def __init__(self, memory: Memory, rows: dict[str, tuple[int, int]], emit: Callable[[Event], None]) -> None:
        self.bad_frames = 0
        self.late_frames = 0
        self._memory = memory
        self._rows = rows  # kind -> (rows in our arena, bytes of one)
        self._emit = emit
        self._windows: dict[Key, _Window] = {}
        self._revoked = Tombstones(_REMEMBERED)
        self._landing = threading.Lock()  # held while bytes are copied: revoke() waits for the copy, and no copy follows

    def expect(self, key: Key, slot: int, pages: Sequence[int]) -> None:
        for kind, numbers in (("page", pages), ("slot", [slot])):
            if not all(0 < number < self._rows[kind][0] for number in numbers):
                raise ValueError(f"{kind}s {numbers} cannot be granted: ours are 1..{self._rows[kind][0] - 1}")
        self._windows[key] = _Window(slot, frozenset(pages), self._memory.mark())

    def revoke(self, key: Key) -> None:
        with self._landing:
            if self._windows.pop(key, None) is not None:
                self._revoked.add(key)

    def receive(self, socket: zmq.Socket[bytes]) -> None:
        """Lands the messages that are here now, a few at most. A bad one is counted and dropped."""
        for _ in range(_BURST):
            try:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            more = frame.more
            while more:  # ours have one part; the others of a message are always here already
                more = socket.recv(zmq.NOBLOCK, copy=False).more
            try:
                if frame.more:
                    raise BadFrame("more than one part")
                self._land(frame.buffer)
            except BadFrame:
                self.bad_frames += 1

    def _land(self, frame: memoryview) -> None:
        key, places, payload = unpack(frame)
        with self._landing:
            window = self._windows.get(key)
            if window is None and key in self._revoked:
                self.late_frames += 1
                return
            if window is None:
                raise BadFrame(f"nothing is expected of {key}")
            for place in places:
                if not window.holds(place, self._rows):
                    raise BadFrame(f"{place} was not granted to {key}")
            landed = self._memory.scatter(places, payload, window.mark)
        digests = (span_digest(key, *place[:3], data.data) for place, data in zip(places, landed, strict=True))
        self._emit(Landed(key, places, combine(digests)))
