"""A transport that wraps another and lets go wrong what can: for tests, and to see what a fault costs (--inject).

Each fault is drawn per `write`, by its probability, from a seeded generator, so that a run can be repeated.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from kvtransfer.digest import combine
from kvtransfer.spans import Spans, num_bytes
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Drained, Event, Key, Link, Lost, Transport, Wrote

FAULTS = ("drop", "delay", "corrupt", "stall", "cut")


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities 0..1, and how long a delay or a stall takes."""

    drop: float = 0.0  # the bytes never leave, and nobody is told
    delay: float = 0.0  # they leave `seconds` later
    corrupt: float = 0.0  # other bytes arrive than were sent
    stall: float = 0.0  # nothing leaves for `seconds`, these bytes and all behind them
    cut: float = 0.0  # the connection breaks for good: Lost
    seconds: float = 0.1
    seed: float = 0

    def __post_init__(self) -> None:
        for name in FAULTS:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name):g}; a probability is between 0 and 1")
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds:g}; it must be 0 or more")

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Of "drop=0.1,seconds=2". Raises ValueError for a name or number that is none."""
        known, faults = [field.name for field in fields(cls)], cls()
        for name, _, value in (part.partition("=") for part in text.split(",") if part):
            if name not in known:
                raise ValueError(f"{name!r} is no fault; there are {', '.join(known)}")
            faults = replace(faults, **{name: float(value)})
        return faults


@dataclass(frozen=True, slots=True)
class _Held:
    due_s: float
    peer: str
    key: Key
    spans: Spans
    seal: bytes


class FaultyTransport:
    """See `Transport`. Its `poll` has to be called for what is held back to leave."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._held: deque[_Held] = deque()  # in the order of their leaving
        self._stalled_until_s = 0.0
        self._events: list[Event] = []
        self._corrupt: set[Key] = set()
        self._cut: set[Key] = set()  # their Drained is asked for, and will be said to be Lost
        self._lost = Tombstones()
        self.injected = dict.fromkeys(FAULTS, 0)

    def write(self, peer: str, key: Key, spans: Spans, seal: bytes = b"") -> None:
        if key in self._cut or key in self._lost:
            return
        if self._hit("drop"):
            self._events.append(Wrote(key, len(spans), num_bytes(spans), 0))
            return
        if self._hit("cut"):
            self._cut.add(key)
            self._inner.cancel(key)
            return
        if self._hit("corrupt"):
            self._corrupt.add(key)
        if self._hit("stall"):
            self._stalled_until_s = time.monotonic() + self._faults.seconds
        delay_s = self._faults.seconds if self._hit("delay") else 0.0
        self._held.append(_Held(max(time.monotonic() + delay_s, self._stalled_until_s), peer, key, spans, seal))
        self._let_go()

    def cancel(self, key: Key) -> None:
        self._held = deque(held for held in self._held if held.key != key)
        if key in self._cut:
            self._cut.discard(key)  # its Drained is already asked for: it goes out as it comes
        else:
            self._inner.cancel(key)

    def poll(self) -> list[Event]:
        self._let_go()
        events, self._events = self._events, []
        return events + [self._changed(event) for event in self._inner.poll()]

    def expect(self, key: Key, slot: int, pages: Sequence[int], seal: bytes = b"") -> None:
        self._inner.expect(key, slot, pages, seal)

    def revoke(self, key: Key) -> None:
        self._inner.revoke(key)

    def meet(self, peer: str, name: str) -> None:
        self._inner.meet(peer, name)

    def address(self) -> str:
        return self._inner.address()

    def fileno(self) -> int:
        return self._inner.fileno()

    def counters(self) -> Mapping[str, int]:
        return {**self._inner.counters(), **{f"injected_{name}": count for name, count in self.injected.items()}}

    def links(self) -> Mapping[str, Link]:
        return self._inner.links()

    def gauges(self) -> Mapping[str, float]:
        return self._inner.gauges()

    def close(self) -> None:
        self._inner.close()

    def _hit(self, name: str) -> bool:
        probability: float = getattr(self._faults, name)
        hit = self._random.random() < probability
        self.injected[name] += hit
        return hit

    def _let_go(self) -> None:
        now_s = time.monotonic()
        waiting = deque(self._held)
        self._held.clear()
        for held in waiting:
            if held.due_s <= now_s:
                self._inner.write(held.peer, held.key, held.spans, held.seal)
            else:
                self._held.append(held)

    def _changed(self, event: Event) -> Event:
        match event:
            case Wrote() if event.key in self._corrupt:  # as if other bytes had been sent; two of these do not cancel out
                self._corrupt.discard(event.key)
                return replace(event, digest=combine((event.digest, 1)))
            case Drained() if event.key in self._cut:
                self._cut.discard(event.key)
                self._lost.add(event.key)
                return Lost(event.key, "the connection was cut (injected)")
        return event
