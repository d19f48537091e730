"""What proves that the bytes of a hand-off are the ones that were sent, each in its place.

Per span: xxh3_64 over its bytes, seeded by whose it is and where it goes; over the hand-off: the sum mod 2^64, so spans
may be sent, and land, in any order. A span that is swapped, shifted, replayed from another attempt or altered changes
the sum. This guards against faults, not against an adversary.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

_PLACE = struct.Struct("<QQ?QQ")
_MASK = (1 << 64) - 1


def span_digest(key: tuple[int, int], kind: str, number: int, offset: int, data: bytes | memoryview) -> int:
    """Of the contiguous bytes `data` that go to `offset` in the destination's page or slot `number`; 0..2^64-1."""
    place = _PLACE.pack(*key, kind == "page", number, offset)
    return xxhash.xxh3_64_intdigest(data, xxhash.xxh3_64_intdigest(place))


def combine(digests: Iterable[int]) -> int:
    """The digest of several spans, or of several groups of them, in any order."""
    return sum(digests) & _MASK
