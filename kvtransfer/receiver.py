"""All inbound hand-offs of a decode worker.

One hand-off: `open` grants memory -> bytes land, Ready comes, in any order -> everything that `Ready.length` tokens need
is there, once, and the digests agree -> Arrived. Or it ends early: `close`, or Broken. Whichever way, the window is shut
before anybody is told, so the memory is the caller's alone from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.digest import combine
from kvtransfer.layout import KVLayout
from kvtransfer.places import handoff_places
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Key, Landed, Place, Transport
from wire.messages import Grant, Ready, pack_ids

if TYPE_CHECKING:
    from kvtransfer.arena import Arena


@dataclass(frozen=True, slots=True)
class Arrived:
    """`length` tokens of KV are in the granted pages and slot, byte for byte as they were sent."""

    key: Key
    length: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The hand-off cannot be completed; the memory may be reused."""

    key: Key
    reason: str


@dataclass(slots=True)
class _Handoff:
    """One hand-off that is open; with `ready` set it waits for `expected` to have landed."""

    key: Key
    slot: int
    pages: list[int]
    landed: set[Place] = field(default_factory=set)
    digest: int = 0
    ready: Ready | None = None
    expected: set[Place] = field(default_factory=set)
    deadline_s: float | None = None  # set by the first poll after Ready
    fault: str = ""

    @property
    def complete(self) -> bool:
        return self.ready is not None and len(self.landed) >= len(self.expected)


class Receiver:
    """Call `poll` once a loop turn, and whenever the transport's `fileno` is readable. Not thread-safe."""

    def __init__(self, arena: Arena, transport: Transport, timeout_s: float) -> None:
        self._layout: KVLayout = arena.layout
        self._transport = transport
        self._timeout_s = timeout_s
        self._open: dict[Key, _Handoff] = {}
        self._closed = Tombstones()

    def open(self, key: Key, slot: int, pages: Sequence[int]) -> Grant:
        """Grants memory to a hand-off. Raises ValueError for a key that was used before: it is single-use."""
        if key in self._open or key in self._closed:
            raise ValueError(f"hand-off {key} was opened before: retry under a new attempt")
        self._transport.expect(key, slot, pages)
        self._open[key] = _Handoff(key, slot, list(pages))
        return Grant(*key, slot, pack_ids(pages), self._transport.address())

    def ready(self, ready: Ready) -> bool:
        """Takes the sender's account of what it sent. False: no such hand-off is open, ignored."""
        handoff = self._open.get((ready.rid, ready.attempt))
        if handoff is None:
            return False
        if handoff.ready is None:
            handoff.ready = ready
            handoff.fault = handoff.fault or self._mismatch(handoff, ready)
        elif handoff.ready != ready:
            handoff.fault = f"two different Ready: {handoff.ready} and {ready}"
        return True

    def close(self, key: Key) -> None:
        """Aborts; when it returns, nothing of `key` can land any more. No error for a hand-off that is over."""
        self._transport.revoke(key)
        if self._open.pop(key, None) is not None:
            self._closed.add(key)

    def poll(self, now_s: float) -> list[Arrived | Broken]:
        """The hand-offs that ended, other than by `close`. `now_s` is any clock that only goes forward."""
        self._absorb()
        complete = [handoff.key for handoff in self._open.values() if handoff.complete]
        for key in complete:
            self._transport.revoke(key)
        if complete:
            self._absorb()  # what landed between the look above and the revocation counts too
        ended = [end for handoff in self._open.values() if (end := self._verdict(handoff, now_s))]
        for end in ended:
            self.close(end.key)
        return ended

    def _absorb(self) -> None:
        for event in self._transport.poll():
            handoff = self._open.get(event.key)
            if handoff is not None and isinstance(event, Landed):
                for place in event.places:
                    if place in handoff.landed:
                        handoff.fault = handoff.fault or f"{_name(place)} came twice"
                    handoff.landed.add(place)
                handoff.digest = combine((handoff.digest, event.digest))

    def _mismatch(self, handoff: _Handoff, ready: Ready) -> str:
        """What in `ready` cannot be, given the length it states; "" when it is consistent."""
        if ready.length < 0:
            return f"a length of {ready.length} tokens"
        try:
            expected = handoff_places(self._layout, handoff.pages, handoff.slot, ready.length)
        except ValueError as error:
            return str(error)
        handoff.expected = set(expected)
        num_bytes = sum(place[3] for place in expected)
        if (ready.num_spans, ready.num_bytes) != (len(expected), num_bytes):
            sent, needed = f"{ready.num_spans} spans of {ready.num_bytes} bytes", f"{len(expected)} of {num_bytes}"
            return f"{sent} were sent, {ready.length} tokens need {needed}"
        return ""

    def _verdict(self, handoff: _Handoff, now_s: float) -> Arrived | Broken | None:
        """How a hand-off ends, if it does now."""
        ready = handoff.ready
        if not handoff.fault and ready is not None and (strange := handoff.landed - handoff.expected):
            handoff.fault = f"{_name(min(strange))} is no part of {ready.length} tokens"
        if handoff.fault:
            return Broken(handoff.key, handoff.fault)
        if ready is None:
            return None
        if handoff.complete:
            if handoff.digest != ready.digest:
                return Broken(handoff.key, f"digest {handoff.digest:016x} landed, {ready.digest:016x} was sent")
            return Arrived(handoff.key, ready.length)
        if handoff.deadline_s is None:
            handoff.deadline_s = now_s + self._timeout_s
        if now_s < handoff.deadline_s:
            return None
        missing = handoff.expected - handoff.landed
        count = f"{len(missing)} of {len(handoff.expected)} spans"
        return Broken(handoff.key, f"{count} missing {self._timeout_s:g} s after Ready, {_name(min(missing))} is one")


def _name(place: Place) -> str:
    kind, number, offset, nbytes = place
    return f"{kind} {number} bytes {offset}..{offset + nbytes - 1}"
