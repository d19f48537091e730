"""What proves that the bytes of a hand-off are the ones that were sent, each in its place.

Per span: xxh3_64 over its bytes, seeded by whose it is and where it goes; over the hand-off: the sum mod 2^64, so spans
may be sent, and land, in any order. A span that is swapped, shifted, replayed from another attempt or altered changes
the sum. This guards against faults, not against an adversary.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import xxhash

from kvtransfer.spans import NBYTES, PAGE, Place, Places, to_bytes

_KEY = struct.Struct("<QQ")
_PLACE = struct.Struct("<QQ?QQ")
_MASK = (1 << 64) - 1


def span_digest(key: tuple[int, int], kind: int, number: int, offset: int, data: bytes | memoryview) -> int:
    """Of the contiguous bytes `data` that go to `offset` in the destination's page or slot `number`; 0..2^64-1."""
    return xxhash.xxh3_64_intdigest(data, _seed(key, kind, number, offset))


def _seed(key: tuple[int, int], kind: int, number: int, offset: int) -> int:
    return xxhash.xxh3_64_intdigest(_PLACE.pack(*key, kind == PAGE, number, offset))


class SpanDigests:
    """The same of spans whose bytes come piece by piece, each span's in order."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key
        self._spans: list[xxhash.xxh3_64] = []

    def begin(self, place: Place) -> Callable[[Any], None]:
        """What the pieces of one span, any buffers, are to be shown to."""
        span = xxhash.xxh3_64(seed=_seed(self._key, *place[:NBYTES]))
        self._spans.append(span)
        return span.update

    def combined(self) -> int:
        return combine(span.intdigest() for span in self._spans)


def chunk_digest(key: tuple[int, int], places: Places, sums: bytes) -> int:
    """The same of a whole chunk whose bytes no host has seen: `sums` stand for them (`DeviceMemory.sums`)."""
    return xxhash.xxh3_64_intdigest(sums, xxhash.xxh3_64_intdigest(_KEY.pack(*key) + to_bytes(places)))


def combine(digests: Iterable[int]) -> int:
    """The digest of several spans, or of several groups of them, in any order."""
    return sum(digests) & _MASK
