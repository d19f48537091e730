"""All outbound hand-offs of a prefill worker.

One hand-off: `open` -> pages are pushed while the prompt is computed -> the grant comes, before or after -> the last push
carries the rest of the pages and the slot -> every byte has left -> Sent. Or it ends early: `close`, or SendLost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.digest import combine
from kvtransfer.layout import KVLayout
from kvtransfer.places import page_places, slot_places
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Key, Lost, Place, Span, Transport, Wrote
from wire.messages import Grant, Ready, unpack_ids

if TYPE_CHECKING:
    from kvtransfer.arena import Arena


@dataclass(frozen=True, slots=True)
class Sent:
    """Every byte of `key` has left the arena: its pages and slot are free. `ready` goes to decode."""

    key: Key
    ready: Ready


@dataclass(frozen=True, slots=True)
class SendLost:
    """The hand-off cannot be completed; its pages and slot are free."""

    key: Key
    reason: str


@dataclass(slots=True)
class _Handoff:
    """One hand-off that is open. It is granted when `address` is set, complete when `final`."""

    key: Key
    address: str = ""
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
    """Call `poll` once a loop turn, and whenever the transport's `fileno` is readable. Not thread-safe."""

    def __init__(self, arena: Arena, transport: Transport) -> None:
        self._layout: KVLayout = arena.layout
        self._transport = transport
        self._open: dict[Key, _Handoff] = {}
        self._closed = Tombstones()
        self._lost: list[SendLost] = []
        self._complete: list[Key] = []  # hand-offs that may have become Sent since the last poll

    def open(self, key: Key) -> None:
        """Starts a hand-off. Raises ValueError for a key that was used before: it is single-use."""
        if key in self._open or key in self._closed:
            raise ValueError(f"hand-off {key} was opened before: retry under a new attempt")
        self._open[key] = _Handoff(key)

    def granted(self, grant: Grant) -> bool:
        """Takes decode's grant and lets go what was pushed before it. False: not waiting for one, ignored."""
        handoff = self._open.get((grant.rid, grant.attempt))
        if handoff is None or handoff.address:
            return False
        try:
            pages = unpack_ids(grant.pages)
        except ValueError as error:
            self._lose(handoff.key, f"grant: {error}")
            return True
        handoff.granted_pages, handoff.granted_slot, handoff.address = pages, grant.slot, grant.address
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
        if handoff.final:
            raise ValueError(f"hand-off {key} was complete already")
        if self._layout.pages_for(length) > len(pages):
            raise ValueError(f"hand-off {key}: {len(pages)} pages do not hold {length} tokens")
        handoff.pages, handoff.slot, handoff.length, handoff.final = list(pages), slot, length, final
        if handoff.address:
            self._flush(handoff)

    def close(self, key: Key) -> None:
        """Aborts; when it returns, the memory is not read any more. No error for a hand-off that is over."""
        self._transport.cancel(key)
        if self._open.pop(key, None) is not None:
            self._closed.add(key)

    def poll(self) -> list[Sent | SendLost]:
        """The hand-offs that ended since the last call, other than by `close`."""
        for event in self._transport.poll():
            handoff = self._open.get(event.key)
            if handoff is not None and isinstance(event, Wrote):
                self._wrote(handoff, event)
            elif handoff is not None and isinstance(event, Lost):
                self._lose(event.key, event.reason)
        ended: list[Sent | SendLost] = [*self._lost]
        for key in self._complete:
            handoff = self._open.pop(key, None)
            if handoff is not None:
                self._closed.add(key)
                ended.append(Sent(key, handoff.ready()))
        self._lost, self._complete = [], []
        return ended

    def _flush(self, handoff: _Handoff) -> None:
        """Gives the transport whatever of a granted hand-off is computed and not yet given."""
        layout, length = self._layout, handoff.length
        first, last = handoff.queued_pages, layout.pages_for(length) if handoff.final else length // layout.page_tokens
        if last > len(handoff.granted_pages):
            self._lose(handoff.key, f"{length} tokens need {last} pages, {len(handoff.granted_pages)} were granted")
            return
        ours = page_places(layout, handoff.pages[first:last])
        spans = [_span(place, to) for place, to in zip(ours, handoff.granted_pages[first:last], strict=True)]
        if handoff.final:
            spans += [_span(place, handoff.granted_slot) for place in slot_places(layout, handoff.slot, length)]
        handoff.queued_pages = last
        if not self._write(handoff, spans):
            return
        if handoff.final and not handoff.writes_open:
            self._complete.append(handoff.key)

    def _write(self, handoff: _Handoff, spans: list[Span]) -> bool:
        if spans:
            try:
                self._transport.write(handoff.address, handoff.key, spans)
            except ValueError as error:  # the grant names what cannot be, or we push what is not ours
                self._lose(handoff.key, str(error))
                return False
            handoff.writes_open += 1
        return True

    def _wrote(self, handoff: _Handoff, event: Wrote) -> None:
        handoff.writes_open -= 1
        handoff.num_spans += event.num_spans
        handoff.num_bytes += event.num_bytes
        handoff.digest = combine((handoff.digest, event.digest))
        if handoff.final and not handoff.writes_open:
            self._complete.append(handoff.key)

    def _lose(self, key: Key, reason: str) -> None:
        self.close(key)
        self._lost.append(SendLost(key, reason))


def _span(ours: Place, to: int) -> Span:
    kind, number, offset, nbytes = ours
    return Span(kind, number, to, offset, nbytes)
