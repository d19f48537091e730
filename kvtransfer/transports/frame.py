"""One bulk message: a header that says whose bytes these are and where they go, then the bytes, in one ZeroMQ frame.

Header, little-endian: magic, attempt u32, rid u64, number of spans u32; then per span kind u8 (0 page, 1 slot) and three
bytes of padding, destination number u32, offset u32, nbytes u32. One frame and not two, because a message costs 10-20 us
a frame and the sender packs anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from kvtransfer.transports import Key, Place
from kvtransfer.transports.memory import Bytes

MAX_SPANS = 4096
_MAGIC = b"pdK1"
_PREFIX = struct.Struct("<4sIQI")
_SPAN = struct.Struct("<BxxxIII")
_KINDS = ("page", "slot")
MAX_HEADER_BYTES = _PREFIX.size + MAX_SPANS * _SPAN.size


class BadFrame(ValueError):
    """Bytes that are not a bulk message, or one that nobody here has asked for."""


def pack_header(key: Key, places: Sequence[Place]) -> bytes:
    """The header of a message. Raises struct.error for a key or number that does not fit its field."""
    rid, attempt = key
    spans = [_SPAN.pack(_KINDS.index(kind), number, offset, nbytes) for kind, number, offset, nbytes in places]
    return _PREFIX.pack(_MAGIC, attempt, rid, len(spans)) + b"".join(spans)


def unpack(frame: memoryview) -> tuple[Key, tuple[Place, ...], Bytes]:
    """Key, places and payload (a view) of a message. Raises BadFrame, and only that, whatever the bytes are."""
    if len(frame) < _PREFIX.size:
        raise BadFrame(f"{len(frame)} bytes are no header")
    magic, attempt, rid, count = _PREFIX.unpack_from(frame)
    header_bytes = _PREFIX.size + count * _SPAN.size
    if magic != _MAGIC or not 0 < count <= MAX_SPANS or len(frame) < header_bytes:
        raise BadFrame("not a bulk message of this protocol")
    places = []
    for kind, number, offset, nbytes in _SPAN.iter_unpack(frame[_PREFIX.size : header_bytes]):
        if kind >= len(_KINDS) or nbytes == 0:
            raise BadFrame(f"a span of kind {kind} and {nbytes} bytes")
        places.append((_KINDS[kind], number, offset, nbytes))
    if len(frame) - header_bytes != sum(place[3] for place in places):
        raise BadFrame("payload and spans differ in length")
    return (rid, attempt), tuple(places), np.frombuffer(frame, dtype=np.uint8)[header_bytes:]
