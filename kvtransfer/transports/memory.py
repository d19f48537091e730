"""An arena's memory as a transport sees it: rows of bytes, on the CPU (of this process, or of a peer that was mapped) or on a
device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtransfer.sharing import SharedMemory
from kvtransfer.spans import KINDS, NBYTES, Place, Places, num_bytes

Bytes = NDArray[np.uint8]
Rows = dict[str, tuple[int, int]]  # kind -> (rows, bytes of one)
Look = Callable[[Place], Callable[[Bytes], None]]

PIECE_BYTES = 256 << 10  # of whole spans (sums.py); read and written, twice of it stays in a core's cache
_SHARED_BYTES = 8 << 20  # from here on two threads copy: for less, telling the other one costs what it gains


def no_look(place: Place) -> Callable[[Bytes], None]:
    return lambda piece: None


class DevicePeer:
    """A sender's device memory, opened by ours to be read from. It is let go with this object."""


class Begun(Protocol):
    """Work of a device that was started."""

    def over(self) -> bool:
        """Whether `result` would not have to wait."""
        ...

    def result(self) -> bytes:
        """Waits for it. Raises what the device raises."""
        ...


class DeviceMemory(ABC):
    """Memory that no host touches. Copies are begun, and end in that order; what a copy reads and writes is left alone until it
    is over. It comes to the sums of the places in this memory (sums.py), made by the device of what is there: a few numbers
    that stand for all bytes in a digest. Places that are not made of whole words raise ValueError.

    Used by the transport's thread, except `mark` and `handles`, which belong to the thread that computes.
    """

    @abstractmethod
    def enter(self) -> None:
        """The transport's thread begins: its first call."""

    @abstractmethod
    def mark(self) -> int:
        """Names a point in the computing thread's work; a copy that is given it starts after what was issued before."""

    @abstractmethod
    def reached(self, mark: int) -> bool:
        """Whether a copy that is given this mark would not have to wait."""

    @abstractmethod
    def buffer(self, nbytes: int) -> Bytes:
        """Host memory for `gather` and `scatter`, which may also be handed to a socket without a copy. It serves again when
        nobody refers to it any more."""

    @abstractmethod
    def gather(self, places: Places, out: Bytes, mark: int) -> Begun:
        """Starts to pack the bytes of `places`, one after the other, into `out`, a `buffer`."""

    @abstractmethod
    def scatter(self, source: Bytes, places: Places, mark: int) -> Begun:
        """Starts to put what is packed in `source`, a `buffer`, to `places`."""

    @abstractmethod
    def sums(self, places: Places, mark: int) -> Begun:
        """Starts nothing but the sums."""

    @abstractmethod
    def handles(self) -> bytes:
        """What leads another process of this host to this memory; b"" when nothing does."""

    @abstractmethod
    def open_peer(self, handles: bytes, rows: Rows) -> DevicePeer:
        """Raises OSError when it cannot be opened, ValueError when it is not what it is said to be."""

    @abstractmethod
    def fetch(self, peer: DevicePeer, sources: Places, places: Places, mark: int) -> Begun:
        """Starts to copy a peer's `sources` to our `places`."""

    @abstractmethod
    def read(self, peer: DevicePeer, sources: Places) -> None:
        """Reads a peer's `sources` to nowhere: only the speed counts."""


class CpuMemory:
    """Numpy views over rows: one copy a span, without torch's cost per slice.

    One thread copies and looks at no more than 5 GB/s, less than what the rest of a path can do, so a second one helps.
    """

    def __init__(self, rows: Mapping[str, Bytes]) -> None:
        self._rows = rows
        self._helper = ThreadPoolExecutor(1, "kv-copy")  # its thread begins with the first thing it is given

    def enter(self) -> None:
        return None

    def mark(self) -> int:
        return 0

    def reached(self, mark: int) -> bool:
        return True

    def direct(self, place: Place) -> Bytes:
        """The very bytes of a place, to be sent from or written to."""
        kind, number, offset, nbytes = place
        return self._rows[KINDS[kind]][number, offset : offset + nbytes]

    def gather(self, places: Places, out: Bytes) -> None:
        """Packs the bytes of `places`, one after the other, into `out`."""
        at = 0
        for place in places.tolist():
            out[at : at + place[NBYTES]] = self.direct(place)
            at += place[NBYTES]

    def scatter(self, places: Places, parts: Sequence[Bytes], look: Look = no_look) -> None:
        """Puts `parts` to `places`. What `look` gives for a place is shown the bytes that its digest is to be made of: the
        arena's own, so that it covers what really landed, in order, piece by piece, while they are in the cache. Several
        places may be shown at a time."""
        half = len(places) // 2 if num_bytes(places) >= _SHARED_BYTES else 0
        other = self._helper.submit(self._put, places[:half], parts[:half], look) if half else None
        try:
            self._put(places[half:], parts[half:], look)
        finally:  # also when ours failed: nothing may be written once this returns
            if other is not None:
                wait([other])
        if other is not None:
            other.result()

    def _put(self, places: Places, parts: Sequence[Bytes], look: Look) -> None:
        for place, part in zip(places.tolist(), parts, strict=True):
            target, show = self.direct(place), look(place)
            for begin in range(0, place[NBYTES], PIECE_BYTES):
                piece = target[begin : begin + PIECE_BYTES]
                piece[:] = part[begin : begin + PIECE_BYTES]
                show(piece)


Memory = CpuMemory | DeviceMemory


def shared_rows(memory: SharedMemory, rows: Rows) -> dict[str, Bytes]:
    """The pages and slots in a shared arena: uint8 [rows, row_bytes] of each kind, pages first."""
    views, at = {}, 0
    for kind in ("page", "slot"):
        count, row_bytes = rows[kind]
        flat: Any = np.frombuffer(memory.map, dtype=np.uint8, count=count * row_bytes, offset=at)
        views[kind] = flat.reshape(count, row_bytes)
        at += count * row_bytes
    return views
