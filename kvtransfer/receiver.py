"""All inbound hand-offs of a decode worker.

One hand-off: `open` grants memory -> bytes land, Ready comes, in any order -> everything that `Ready.length` tokens need
is there, once, and the digests agree -> Arrived. Or it ends early: `close`, or Broken.

    GRANTED --complete, faulty, or too late--> SHUTTING --Drained--> Arrived or Broken
       |                                          |
       '--`close`--> DRAINING --Drained--> Freed  '--`close`--> DRAINING

Whichever way, the transport has shut the window before anybody is told, so the memory is the caller's alone from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.digest import combine
from kvtransfer.layout import KVLayout
from kvtransfer.places import handoff_places
from kvtransfer.spans import Places, num_bytes, spoken
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Drained, Freed, Key, Landed, Transport
from wire.messages import Grant, Ready, pack_ids

if TYPE_CHECKING:
    from kvtransfer.arena import Arena


NOTHING: Places = np.empty((0, 4), dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Arrived:
    """`length` tokens of KV are in the granted pages and slot, byte for byte as they were sent."""

    key: Key
    length: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The hand-off cannot be completed; the memory may be reused. `corrupt`: other bytes arrived than were sent."""

    key: Key
    reason: str
    corrupt: bool = False


class Stage(Enum):
    GRANTED = auto()
    SHUTTING = auto()
    DRAINING = auto()


@dataclass(slots=True)
class _Handoff:
    """One hand-off that is open; with `ready` set it waits for `expected` to have landed."""

    key: Key
    slot: int
    pages: list[int]
    stage: Stage = Stage.GRANTED
    landed: list[Places] = field(default_factory=list)
    num_landed: int = 0
    digest: int = 0
    ready: Ready | None = None
    expected: Places = field(default_factory=lambda: NOTHING)
    deadline_s: float | None = None  # set by the first poll after Ready
    fault: str = ""

    @property
    def complete(self) -> bool:
        return self.ready is not None and self.num_landed >= len(self.expected)


class Receiver:
    """Call `poll` once a loop turn, and whenever the transport's `fileno` is readable. Not thread-safe.

    new_secret: makes the secret that goes into a Grant; bulk then has to be sealed with it.
    worker: our name, for the sender's log.
    """

    def __init__(
        self,
        arena: Arena,
        transport: Transport,
        timeout_s: float,
        new_secret: Callable[[], bytes] = lambda: b"",
        worker: str = "",
    ) -> None:
        self._layout: KVLayout = arena.layout
        self._transport = transport
        self._timeout_s = timeout_s
        self._new_secret = new_secret
        self._worker = worker
        self._open: dict[Key, _Handoff] = {}
        self._closed = Tombstones()

    def open(self, key: Key, slot: int, pages: Sequence[int]) -> Grant:
        """Grants memory to a hand-off. Raises ValueError for a key that was used before: it is single-use."""
        if key in self._open or key in self._closed:
            raise ValueError(f"hand-off {key} was opened before: retry under a new attempt")
        secret = self._new_secret()
        self._transport.expect(key, slot, pages, secret)
        self._open[key] = _Handoff(key, slot, list(pages))
        return Grant(*key, slot, pack_ids(pages), self._transport.address(), secret, self._worker)

    def ready(self, ready: Ready) -> bool:
        """Takes the sender's account of what it sent. False: no such hand-off is open, ignored."""
        handoff = self._open.get((ready.rid, ready.attempt))
        if handoff is None or handoff.stage is Stage.DRAINING:
            return False
        if handoff.ready is None:
            handoff.ready = ready
            handoff.fault = handoff.fault or self._mismatch(handoff, ready)
        elif handoff.ready != ready:
            handoff.fault = f"two different Ready: {handoff.ready} and {ready}"
        return True

    def close(self, key: Key) -> bool:
        """Aborts. True: the memory is free now, as it is for a hand-off that is over; False: Freed will follow."""
        handoff = self._open.get(key)
        if handoff is None:
            return True
        if handoff.stage is Stage.GRANTED:
            self._transport.revoke(key)
        handoff.stage = Stage.DRAINING
        return False

    def poll(self, now_s: float) -> list[Arrived | Broken | Freed]:
        """The hand-offs that ended. `now_s` is any clock that only goes forward."""
        ended: list[Arrived | Broken | Freed] = []
        for event in self._transport.poll():
            handoff = self._open.get(event.key)
            if handoff is None:
                continue
            if isinstance(event, Landed):
                self._landed(handoff, event)
            elif isinstance(event, Drained) and handoff.stage is not Stage.GRANTED:
                del self._open[event.key]
                self._closed.add(event.key)
                ended.append(Freed(event.key) if handoff.stage is Stage.DRAINING else self._verdict(handoff))
        for handoff in self._open.values():
            if handoff.stage is Stage.GRANTED and self._over(handoff, now_s):
                handoff.stage = Stage.SHUTTING
                self._transport.revoke(handoff.key)
        return ended

    def _landed(self, handoff: _Handoff, event: Landed) -> None:
        handoff.landed.append(event.places)
        handoff.num_landed += len(event.places)
        handoff.digest = combine((handoff.digest, event.digest))

    def _mismatch(self, handoff: _Handoff, ready: Ready) -> str:
        """What in `ready` cannot be, given the length it states; "" when it is consistent."""
        if ready.length < 0:
            return f"a length of {ready.length} tokens"
        try:
            expected = handoff_places(self._layout, handoff.pages, handoff.slot, ready.length)
        except ValueError as error:
            return str(error)
        handoff.expected = expected
        if (ready.num_spans, ready.num_bytes) != (len(expected), num_bytes(expected)):
            sent, needed = f"{ready.num_spans} spans of {ready.num_bytes} bytes", f"{len(expected)} of {num_bytes(expected)}"
            return f"{sent} were sent, {ready.length} tokens need {needed}"
        return ""

    def _over(self, handoff: _Handoff, now_s: float) -> bool:
        """Whether a hand-off is complete, or has a fault by now."""
        if handoff.ready is None or handoff.fault:
            return bool(handoff.fault)
        if handoff.deadline_s is None:
            handoff.deadline_s = now_s + self._timeout_s
        if not handoff.complete and now_s >= handoff.deadline_s:
            missing = _rows(handoff.expected) - _rows(*handoff.landed)
            count, one = f"{len(missing)} of {len(handoff.expected)} spans", spoken(min(missing))
            handoff.fault = f"{count} missing {self._timeout_s:g} s after Ready, {one} is one"
        return handoff.complete or bool(handoff.fault)

    def _verdict(self, handoff: _Handoff) -> Arrived | Broken:
        """How a hand-off ends whose window is shut: what landed until then counts."""
        key, ready = handoff.key, handoff.ready
        if handoff.fault or ready is None:
            return Broken(key, handoff.fault)
        landed, expected = np.concatenate((NOTHING, *handoff.landed)), handoff.expected
        if not np.array_equal(_in_order(landed), _in_order(expected)):
            strange = min(_rows(landed) - _rows(expected), default=None)
            what = "a span came twice" if strange is None else f"{spoken(strange)} is no part of {ready.length} tokens"
            return Broken(key, what)
        if handoff.digest != ready.digest:
            return Broken(key, f"digest {handoff.digest:016x} landed, {ready.digest:016x} was sent", corrupt=True)
        return Arrived(key, ready.length)


def _in_order(places: Places) -> Places:
    return places[np.lexsort(places.T)]


def _rows(*tables: Places) -> set[tuple[int, ...]]:
    return {tuple(row) for places in tables for row in places.tolist()}
