"""What a device makes of bytes for their digest, and the same made by a host for a peer that is one.

A place is cut into spans of SPAN_WORDS little-endian int32 words, the last one shorter. A span's sum is its words times
`sum_weights`, added modulo 2^64; a chunk's sums are those of its pages, in order, then those of its slots, 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtransfer.digest import SpanDigests, chunk_digest
from kvtransfer.spans import KIND, NBYTES, OFFSET, Place, Places
from kvtransfer.transports import Key
from kvtransfer.transports.memory import Bytes

SPAN_WORDS = 16_384
WORD_BYTES = 4


def sum_weights() -> NDArray[np.int64]:
    """int64 [SPAN_WORDS], odd and otherwise random, the same everywhere: splitmix64 of the index.

    No change of one word keeps its span's sum, since weights are odd; one of several does by chance, in one of 2^32 cases at
    most.
    """
    z = (np.arange(SPAN_WORDS, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31)) | np.uint64(1)).view(np.int64)


_WEIGHTS = sum_weights()


class HostSums:
    """See `SpanDigests`; of a whole chunk to these places, no two of them alike, each shown in pieces of whole spans. Raises
    ValueError for places that are not made of whole words."""

    def __init__(self, key: Key, places: Places) -> None:
        if ((places[:, OFFSET] | places[:, NBYTES]) % WORD_BYTES).any():
            raise ValueError("a GPU reads whole words, and a place is not made of them")
        self._key, self._places = key, places
        self._sums = {tuple(place): bytearray() for place in places.tolist()}

    def begin(self, place: Place) -> Callable[[Bytes], None]:
        sums = self._sums[tuple(place)]
        return lambda piece: sums.extend(_sums(piece))

    def combined(self) -> int:
        pages_first = sorted(self._sums, key=lambda place: place[KIND])
        return chunk_digest(self._key, self._places, b"".join(self._sums[place] for place in pages_first))


def host_digests(key: Key, places: Places, sums: bool) -> HostSums | SpanDigests:
    """For the bytes of a chunk to these places. `sums`: see `Chunk`.

    Raises ValueError for places that a device cannot make sums of.
    """
    return HostSums(key, places) if sums else SpanDigests(key)


def _sums(piece: Bytes) -> bytes:
    words = piece.view("<i4")
    whole = len(words) // SPAN_WORDS * SPAN_WORDS
    sums: bytes = np.einsum("ij,j->i", words[:whole].reshape(-1, SPAN_WORDS), _WEIGHTS, dtype=np.int64).tobytes()
    if whole < len(words):
        sums += np.einsum("j,j->", words[whole:], _WEIGHTS[: len(words) - whole], dtype=np.int64).tobytes()
    return sums
