"""Which bytes go where: tables of whole numbers, in memory as on the wire, so that a span costs no object of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

KINDS = ("page", "slot")
PAGE, SLOT = range(len(KINDS))
KIND, NUMBER, OFFSET, NBYTES, SRC = range(5)  # the columns
Places = NDArray[np.uint32]  # [n, 4]: kind, number in an arena (the peer's, unless said), offset, nbytes
Spans = NDArray[np.uint32]  # [n, 5]: places in the peer's arena, and the number in ours whose bytes at that offset go there
Place = Sequence[int]  # a row of Places
SPAN_BYTES = 20
_WORD = np.dtype("<u4")
_SOURCE = np.array([KIND, SRC, OFFSET, NBYTES])


def places_of(spans: Spans) -> Places:
    return spans[:, :SRC]


def sources_of(spans: Spans) -> Places:
    """In our arena."""
    return spans.take(_SOURCE, axis=1)


def with_sources(places: Places, numbers: ArrayLike) -> Spans:
    """Spans from the rows `numbers` of our arena (or from one) to `places`."""
    spans = np.empty((len(places), SRC + 1), dtype=np.uint32)
    spans[:, :SRC], spans[:, SRC] = places, numbers
    return spans


def num_bytes(table: Places | Spans) -> int:
    return int(table[:, NBYTES].sum(dtype=np.int64))


def strays(places: Places, rows: Mapping[str, tuple[int, int]]) -> NDArray[np.bool_]:
    """[n]: which of them are not inside an arena of so many rows (of so many bytes) a kind. Their kinds are known ones."""
    kind, number, offset, nbytes = places.astype(np.int64).T  # as wide as their sums are
    count, row_bytes = np.array([rows[name] for name in KINDS])[kind].T
    outside: NDArray[np.bool_] = (number >= count) | (offset + nbytes > row_bytes)
    return outside


def spoken(place: ArrayLike) -> str:
    kind, number, offset, nbytes = np.asarray(place).tolist()
    return f"{KINDS[kind]} {number} bytes {offset}..{offset + nbytes - 1}"


def to_bytes(table: Places | Spans) -> bytes:
    return table.astype(_WORD, copy=False).tobytes()


def from_bytes(data: bytes | memoryview, columns: int) -> NDArray[np.uint32]:
    """A table that is not to be written. Raises ValueError for a part of a row."""
    return np.frombuffer(data, dtype=_WORD).reshape(-1, columns)
