"""All outbound hand-offs of a prefill worker.

One hand-off: `open` -> pages are pushed while the prompt is computed -> the grant comes, before or after -> the last push
carries the rest of the pages and the slot -> every byte is in place -> Sent. Or it ends early: `close`, or SendLost.

    OFFERED --granted--> GRANTED --every write done, the last one final--> Sent
       |                    |------the transport loses it----------------> SendLost
       |                    '------`close`, or a grant that cannot be----> DRAINING --Drained--> Freed or SendLost
       '--`close`, nothing was ever given to the transport: over at once

While the transport may still read a hand-off's memory, that memory is nobody else's: DRAINING lasts until it has said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.digest import combine
from kvtransfer.layout import KVLayout
from kvtransfer.places import page_places, slot_places
from kvtransfer.spans import Spans, with_sources
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import MAX_WRITE_SPANS, Drained, Freed, Key, Lost, Transport, Wrote
from kvtransfer.transports.seal import check_secret
from wire.messages import Grant, Ready, unpack_ids
from wire.timeline import Timeline

if TYPE_CHECKING:
    from kvtransfer.arena import Arena

_timeline = Timeline("kvtransfer")


@dataclass(frozen=True, slots=True)
class Sent:
    """Every byte of `key` is in place: its pages and slot are free. `ready` goes to decode."""

    key: Key
    ready: Ready


@dataclass(frozen=True, slots=True)
class SendLost:
    """The hand-off cannot be completed; its pages and slot are free. `corrupt`: other bytes arrived than were sent. `closed`:
    decode has closed it, and says itself why."""

    key: Key
    reason: str
    corrupt: bool = False
    closed: bool = False


class Stage(Enum):
    OFFERED = auto()
    GRANTED = auto()
    DRAINING = auto()


@dataclass(slots=True)
class _Handoff:
    """One hand-off that is open; complete when `final`."""

    key: Key
    stage: Stage = Stage.OFFERED
    reason: str = ""  # why it is DRAINING; "" when the caller wanted it
    address: str = ""
    secret: bytes = b""
    granted_slot: int = 0
    granted_pages: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # ours, as far as they were pushed
    slot: int = 0
    length: int = 0
    final: bool = False
    queued_pages: int = 0  # given to the transport
    writes_open: int = 0  # given to the transport and not yet written
    num_spans: int = 0  # written
    num_bytes: int = 0
    digest: int = 0

    def ready(self) -> Ready:
        return Ready(*self.key, self.length, self.num_spans, self.num_bytes, self.digest)


class Sender:
    """Call `poll` once a loop turn, and whenever the transport's `fileno` is readable. Not thread-safe.

    sealed: only grants that come with a secret are taken, and bulk is sealed with it.
    """

    def __init__(self, arena: Arena, transport: Transport, sealed: bool = False) -> None:
        self._layout: KVLayout = arena.layout
        self._transport = transport
        self._sealed = sealed
        self._open: dict[Key, _Handoff] = {}
        self._closed = Tombstones()
        self._ended: list[Sent | SendLost | Freed] = []  # since the last poll

    def open(self, key: Key) -> None:
        """Starts a hand-off. Raises ValueError for a key that was used before: it is single-use."""
        if key in self._open or key in self._closed:
            raise ValueError(f"hand-off {key} was opened before: retry under a new attempt")
        self._open[key] = _Handoff(key)

    def granted(self, grant: Grant) -> bool:
        """Takes decode's grant and lets go what was pushed before it. False: not waiting for one, ignored."""
        handoff = self._open.get((grant.rid, grant.attempt))
        if handoff is None or handoff.stage is not Stage.OFFERED:
            return False
        handoff.stage = Stage.GRANTED
        try:
            handoff.granted_pages = unpack_ids(grant.pages)
            if not 0 <= grant.slot < 1 << 32:
                raise ValueError(f"slot {grant.slot}: a number has 32 bits")
            check_secret(grant.secret)
        except ValueError as error:
            self._lose(handoff, f"grant: {error}")
            return True
        if self._sealed and not grant.secret:
            self._lose(
                handoff, "grant: it has no secret, and nothing leaves here unsealed; start both sides with the cluster key"
            )
            return True
        handoff.granted_slot, handoff.address, handoff.secret = grant.slot, grant.address, grant.secret
        self._transport.meet(grant.address, grant.worker)
        self._flush(handoff)
        return True

    def push(self, key: Key, pages: Sequence[int], slot: int, length: int, final: bool) -> None:
        """`length` tokens of `pages` and `slot` are computed. Queues the full pages among them that are not yet queued;
        with `final` everything else too. The memory may not change, but for appending, until Sent, SendLost or `close`.

        Ignored for a hand-off that is over. Raises KeyError for one that never was opened, ValueError for too few pages.
        """
        handoff = self._open.get(key)
        if handoff is None:
            if key in self._closed:
                return
            raise KeyError(f"hand-off {key} was never opened")
        if handoff.stage is Stage.DRAINING:
            return
        if handoff.final:
            raise ValueError(f"hand-off {key} was complete already")
        if self._layout.pages_for(length) > len(pages):
            raise ValueError(f"hand-off {key}: {len(pages)} pages do not hold {length} tokens")
        handoff.pages, handoff.slot, handoff.length, handoff.final = list(pages), slot, length, final
        if handoff.stage is Stage.GRANTED:
            self._flush(handoff)

    def close(self, key: Key) -> bool:
        """Aborts. True: the memory is free now, as it is for a hand-off that is over; False: Freed will follow."""
        handoff = self._open.get(key)
        if handoff is None:
            return True
        handoff.reason = ""
        return self._drain(handoff)

    def poll(self) -> list[Sent | SendLost | Freed]:
        """The hand-offs that ended since the last call."""
        for event in self._transport.poll():
            handoff = self._open.get(event.key)
            if handoff is None:
                continue
            match event, handoff.stage:
                case Wrote(), Stage.GRANTED:
                    self._wrote(handoff, event)
                case Lost(), Stage.GRANTED:
                    self._end(handoff, SendLost(event.key, event.reason, event.corrupt, event.closed))
                case Drained(), Stage.DRAINING:
                    self._end(handoff, SendLost(event.key, handoff.reason) if handoff.reason else Freed(event.key))
        ended, self._ended = self._ended, []
        return ended

    def _flush(self, handoff: _Handoff) -> None:
        """Gives the transport whatever of a granted hand-off is computed and not yet given."""
        layout, length = self._layout, handoff.length
        first, last = handoff.queued_pages, layout.pages_for(length) if handoff.final else length // layout.page_tokens
        if last > len(handoff.granted_pages):
            self._lose(handoff, f"{length} tokens need {last} pages, {len(handoff.granted_pages)} were granted")
            return
        spans = with_sources(page_places(layout, handoff.granted_pages[first:last]), handoff.pages[first:last])
        if handoff.final:
            of_slot = with_sources(slot_places(layout, handoff.granted_slot, length), handoff.slot)
            spans = np.concatenate((spans, of_slot))
        handoff.queued_pages = last
        if self._write(handoff, spans):
            self._check_end(handoff)

    def _write(self, handoff: _Handoff, spans: Spans) -> bool:
        for start in range(0, len(spans), MAX_WRITE_SPANS):
            part = spans[start : start + MAX_WRITE_SPANS]
            try:
                self._transport.write(handoff.address, handoff.key, part, handoff.secret)
            except ValueError as error:  # the grant names what cannot be, or we push what is not ours
                self._lose(handoff, str(error))
                return False
            handoff.writes_open += 1
        return True

    def _wrote(self, handoff: _Handoff, event: Wrote) -> None:
        _timeline.note(handoff.key, "in_place", spans=event.num_spans, bytes=event.num_bytes)
        handoff.writes_open -= 1
        handoff.num_spans += event.num_spans
        handoff.num_bytes += event.num_bytes
        handoff.digest = combine((handoff.digest, event.digest))
        self._check_end(handoff)

    def _check_end(self, handoff: _Handoff) -> None:
        if handoff.final and not handoff.writes_open:
            self._end(handoff, Sent(handoff.key, handoff.ready()))

    def _lose(self, handoff: _Handoff, reason: str) -> None:
        handoff.reason = reason
        if self._drain(handoff):
            self._ended.append(SendLost(handoff.key, reason))

    def _drain(self, handoff: _Handoff) -> bool:
        """Takes back what the transport has. Whether that is nothing; else the hand-off is DRAINING."""
        if handoff.stage is Stage.DRAINING:
            return False
        if handoff.writes_open:
            handoff.stage = Stage.DRAINING
            self._transport.cancel(handoff.key)
            return False
        del self._open[handoff.key]
        self._closed.add(handoff.key)
        return True

    def _end(self, handoff: _Handoff, how: Sent | SendLost | Freed) -> None:
        del self._open[handoff.key]
        self._closed.add(handoff.key)
        self._ended.append(how)
