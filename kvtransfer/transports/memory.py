"""CPU memory as a transport sees it: rows of bytes, of this process or of a peer that was mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.sharing import SharedMemory
from kvtransfer.transports import Place

Bytes = NDArray[np.uint8]
Rows = dict[str, tuple[int, int]]  # kind -> (rows, bytes of one)


class Memory(Protocol):
    """Used by the transport's thread, except `mark`, which belongs to the thread that computes."""

    def mark(self) -> int:
        """Names a point in the computing thread's work; a copy that is given it starts after what was issued before."""
        ...

    def direct(self, place: Place, mark: int) -> Bytes | None:
        """The very bytes of a place, to be sent from or written to; None where a host cannot touch them."""
        ...

    def buffer(self, nbytes: int) -> Bytes:
        """A fresh uint8 host buffer that `gather` writes to fast; it may be handed to a socket without a copy."""
        ...

    def gather(self, places: Sequence[Place], out: Bytes, mark: int) -> None:
        """Packs the bytes of `places`, one after the other, into `out`; done when it returns."""
        ...

    def scatter(self, places: Sequence[Place], parts: Sequence[Bytes], mark: int) -> Iterator[Bytes]:
        """Puts `parts` to `places`; done when it is exhausted. Gives per place the bytes that a digest is to be made of,
        one by one, so that they are still in the cache.

        In CPU memory these are the arena's own bytes, so that the digest covers what really landed. From a device they
        would have to come back over PCIe: there they are the received bytes, and the copy is trusted.
        """
        ...


class CpuMemory:
    """Numpy views over rows: one copy a span, without torch's cost per slice."""

    def __init__(self, rows: Mapping[str, Bytes]) -> None:
        self._rows = rows

    def mark(self) -> int:
        return 0

    def direct(self, place: Place, mark: int) -> Bytes:
        kind, number, offset, nbytes = place
        return self._rows[kind][number, offset : offset + nbytes]

    def buffer(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, dtype=np.uint8)

    def gather(self, places: Sequence[Place], out: Bytes, mark: int) -> None:
        at = 0
        for place in places:
            out[at : at + place[3]] = self.direct(place, mark)
            at += place[3]

    def scatter(self, places: Sequence[Place], parts: Sequence[Bytes], mark: int) -> Iterator[Bytes]:
        for place, part in zip(places, parts, strict=True):
            target = self.direct(place, mark)
            target[:] = part
            yield target


def shared_rows(memory: SharedMemory, rows: Rows) -> dict[str, Bytes]:
    """The pages and slots in a shared arena: uint8 [rows, row_bytes] of each kind, pages first."""
    views, at = {}, 0
    for kind in ("page", "slot"):
        count, row_bytes = rows[kind]
        flat: Any = np.frombuffer(memory.map, dtype=np.uint8, count=count * row_bytes, offset=at)
        views[kind] = flat.reshape(count, row_bytes)
        at += count * row_bytes
    return views
