"""What one hand-off may write: the memory that was granted to it, each byte once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvtransfer.transports import Place
from kvtransfer.transports.memory import Rows
from kvtransfer.transports.seal import Seal


class Ground:
    """Bytes that are taken: disjoint intervals in order, per page or slot."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def overlaps(self, place: Place) -> bool:
        kind, number, begin, nbytes = place
        taken = self._taken.get((kind, number))
        if taken is None:
            return False
        before = bisect_left(taken, (begin + nbytes,))  # those that begin before the place ends; the last reaches furthest
        return before > 0 and taken[before - 1][1] > begin

    def add(self, place: Place) -> None:
        """Of a place that overlaps nothing."""
        kind, number, begin, nbytes = place
        insort(self._taken.setdefault((kind, number), []), (begin, begin + nbytes))


@dataclass(slots=True)
class Window:
    slot: int
    pages: frozenset[int]
    mark: int  # what the granted memory was last used for, on a device
    seal: Seal | None
    numbers: set[int] = field(default_factory=set)  # of the chunks that landed
    _landed: Ground = field(default_factory=Ground)

    def refused(self, wanted: Sequence[Place], rows: Rows) -> Place | None:
        """The first of a chunk's places that may not be written: not granted, over the end, or on bytes that landed.

        Not one byte of those may be touched again: a sealed chunk is decrypted in place, before it is known to be true.
        """
        chunk: dict[tuple[str, int], list[tuple[int, Place]]] = {}
        for place in wanted:
            kind, number, offset, nbytes = place
            granted = number in self.pages if kind == "page" else number == self.slot
            if not granted or offset + nbytes > rows[kind][1] or self._landed.overlaps(place):
                return place
            chunk.setdefault((kind, number), []).append((offset, place))
        for spans in chunk.values():
            spans.sort()
            for (begin, (_, _, _, nbytes)), (next_begin, place) in pairwise(spans):
                if begin + nbytes > next_begin:
                    return place
        return None

    def land(self, number: int, wanted: Sequence[Place]) -> None:
        """The chunk of that number is in these places."""
        self.numbers.add(number)
        for place in wanted:
            self._landed.add(place)
