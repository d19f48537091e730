"""What one hand-off may write: the memory that was granted to it, each byte once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtransfer.spans import SLOT, Places, spoken
from kvtransfer.transports.frame import BadFrame
from kvtransfer.transports.memory import Rows
from kvtransfer.transports.seal import Seal

Runs = tuple[NDArray[np.int64], NDArray[np.int64]]  # where each begins and where it ends, disjoint and in order


class Window:
    """A byte's address is counted through pages and then slots, as if there were 2^32 of them: what is no row of this arena
    is then nobody's bytes. `mark`: what the granted memory was last used for, on a device."""

    def __init__(self, slot: int, pages: Sequence[int], rows: Rows, mark: int, seal: Seal | None) -> None:
        self.mark, self.seal = mark, seal
        self.numbers: set[int] = set()  # of the chunks that landed, or are coming
        (_, page_bytes), (_, slot_bytes) = rows["page"], rows["slot"]
        self._row_bytes, self._bases = np.array([page_bytes, slot_bytes]), np.array([0, page_bytes << 32])
        granted = np.array(sorted({*pages}), dtype=np.int64) * page_bytes
        at_slot = self._bases[SLOT] + slot * slot_bytes
        # What is missing; the first run is nobody's, so that there is one in front of every byte.
        self._begins = np.concatenate(([-2], granted, [at_slot]))
        self._ends = np.concatenate(([-1], granted + page_bytes, [at_slot + slot_bytes]))

    def claim(self, places: Places) -> Runs:
        """The bytes of a chunk's places. Raises BadFrame when one may not be written: not granted, over the end of its page or
        slot, or on bytes that have landed or are another's of this chunk.

        Not one byte of those may be touched again: a sealed chunk is decrypted in place, before it is known to be true.
        """
        kind, number, offset, nbytes = places.astype(np.int64).T
        row_bytes = self._row_bytes.take(kind)
        begins = self._bases.take(kind) + number * row_bytes + offset
        ends = begins + nbytes
        run = self._begins.searchsorted(begins, side="right") - 1
        wrong = (offset + nbytes > row_bytes) | (ends > self._ends.take(run))
        if wrong.any():
            raise BadFrame(f"{spoken(places[wrong][0])} was not granted, or is not missing any more")
        begins.sort()
        ends.sort()
        if (begins[1:] < ends[:-1]).any():
            raise BadFrame("two spans of a chunk overlap")
        return begins, ends

    def land(self, number: int, ground: Runs) -> None:
        """The chunk of that number is on the ground that it has claimed, or nobody else's is."""
        self.numbers.add(number)
        begins, ends = np.concatenate((self._begins, ground[1])), np.concatenate((self._ends, ground[0]))
        begins.sort()
        ends.sort()  # as many have begun as have ended, or one more: there, bytes are missing
        missing = begins < ends
        self._begins, self._ends = begins[missing], ends[missing]

    def give_back(self, number: int, ground: Runs) -> None:
        """It is not: its bytes are missing again."""
        self.numbers.discard(number)
        begins, ends = np.concatenate((self._begins, ground[0])), np.concatenate((self._ends, ground[1]))
        begins.sort()
        ends.sort()
        apart = begins[1:] != ends[:-1]  # what touches is one
        self._begins, self._ends = begins[np.append(True, apart)], ends[np.append(apart, True)]
