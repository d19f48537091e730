"""What a chunk's bytes look like on the wire: frames, seals and digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtransfer.digest import chunk_digest, combine
from kvtransfer.spans import NBYTES, Places, Spans, places_of, sources_of
from kvtransfer.transports import Key
from kvtransfer.transports.connection import Part
from kvtransfer.transports.jobs import Piece
from kvtransfer.transports.memory import Begun, Bytes, CpuMemory, DeviceMemory, Memory, Task
from kvtransfer.transports.seal import NO_PAYLOAD, Seal, tag_digest
from kvtransfer.transports.sums import host_digests

DIRECT_BYTES = 128 << 10  # a span from this size on is a frame by itself; below, spans share one
Digest = Callable[[], int]  # waits for it
Packed = tuple[Sequence[Sequence[Part]], Callable[[], Digest]]  # a chunk's frames; what begins its digest once they are sent


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A chunk that is to be sent once it is `done`. `pack` is called once, then, and raises what a device raises."""

    piece: Piece
    header: bytes
    pack: Callable[[], Packed]
    begun: Begun | None = None  # the copy out of a device

    @property
    def done(self) -> bool:
        return self.begun is None or self.begun.over()

    def wait(self) -> None:
        if self.begun is not None:
            self.begun.result()


class Packer:
    """Over one arena's memory. Raises what a device raises, and ValueError for what one cannot read."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def reference(self, piece: Piece, header: bytes, sums: bool) -> Parcel:
        """Of a chunk that the peer fetches: no frames, or a tag over the header."""
        return Parcel(piece, header, partial(self._reference, piece, header, sums))

    def payload(self, piece: Piece, header: bytes, sums: bool) -> Parcel:
        """Of a chunk whose bytes go along. Large spans of the CPU's memory are the arena's own bytes; out of a device's the
        copy begins now. `sums`: see `Chunk`."""
        if isinstance(self._memory, CpuMemory):
            return Parcel(piece, header, partial(_payload, self._memory, piece, header, sums))
        packed = self._memory.buffer(piece.num_bytes)
        begun = self._memory.gather(sources_of(piece.spans), packed, piece.job.mark)
        return Parcel(piece, header, partial(_from_device, piece, header, packed, begun), begun)

    def _reference(self, piece: Piece, header: bytes, sums: bool) -> Packed:
        job, spans = piece.job, piece.spans
        frames = [] if job.seal is None else [[(job.seal.close(piece.number, NO_PAYLOAD, b"", header), None)]]
        if isinstance(self._memory, CpuMemory):
            parts = [self._memory.direct(source) for source in sources_of(spans).tolist()]
            return frames, partial(_digest, job.key, spans, parts, sums)
        if not self._memory.reached(job.mark):  # our stream waits for what computes these pages; the peer's cannot
            self._memory.sums(sources_of(spans), job.mark).result()
        return frames, partial(_digest_by_device, self._memory, piece)


def _digest_by_device(memory: DeviceMemory, piece: Piece) -> Digest:
    """Of what is in place there."""
    begun = memory.sums(sources_of(piece.spans), piece.job.mark)
    return lambda: chunk_digest(piece.job.key, places_of(piece.spans), begun.result())


def _payload(memory: CpuMemory, piece: Piece, header: bytes, sums: bool) -> Packed:
    """Straight out of the arena, in one frame. Of a sealed chunk large spans are frames by themselves: they are decrypted to
    their places."""
    key, spans = piece.job.key, piece.spans
    parts = [memory.direct(source) for source in sources_of(spans).tolist()]
    if piece.job.seal is not None:
        return _sealed(piece.job.seal, piece.number, header, [_joined(parts[group]) for group in _groups(spans)])
    digests = host_digests(key, places_of(spans), sums)
    shows = map(digests.begin, places_of(spans).tolist())
    return [list(zip(parts, shows, strict=True))], lambda: digests.combined


def _from_device(piece: Piece, header: bytes, packed: Bytes, begun: Begun) -> Packed:
    """In one frame."""
    sums = begun.result()
    if piece.job.seal is not None:
        return _sealed(piece.job.seal, piece.number, header, [packed])
    return [[(packed, None)]], lambda: partial(chunk_digest, piece.job.key, places_of(piece.spans), sums)


def _sealed(seal: Seal, number: int, header: bytes, frames: Sequence[Bytes]) -> Packed:
    sealed = [seal.close(number, index, data.data, header) for index, data in enumerate(frames)]
    return [[(frame, None)] for frame in sealed], lambda: partial(combine, map(tag_digest, sealed))


def _groups(spans: Spans) -> list[slice]:
    """A chunk's spans, by the frame they go in."""
    groups, begin = [], 0
    for large in np.flatnonzero(spans[:, NBYTES] >= DIRECT_BYTES).tolist():
        groups += [slice(begin, large)] * (begin < large) + [slice(large, large + 1)]
        begin = large + 1
    return groups + [slice(begin, len(spans))] * (begin < len(spans))


def _joined(parts: Sequence[Bytes]) -> Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _digest(key: Key, spans: Spans, parts: Sequence[Bytes], sums: bool) -> Digest:
    """Made by a thread of the host, while the peer fetches the bytes."""
    return Task(partial(_digest_of, key, places_of(spans), parts, sums)).result


def _digest_of(key: Key, places: Places, parts: Sequence[Bytes], sums: bool) -> int:
    digests = host_digests(key, places, sums)
    for place, part in zip(places.tolist(), parts, strict=True):
        digests.begin(place)(part)
    return digests.combined()
