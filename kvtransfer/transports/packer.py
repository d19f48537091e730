"""What a chunk's bytes look like on the wire: frames, seals and digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvtransfer.digest import chunk_digest, combine, span_digest
from kvtransfer.spans import NBYTES, Place, Spans, num_bytes, places_of, sources_of
from kvtransfer.transports import Key
from kvtransfer.transports.jobs import Job, Piece
from kvtransfer.transports.memory import DeviceMemory, Memory
from kvtransfer.transports.seal import NO_PAYLOAD, tag_digest

DIRECT_BYTES = 128 << 10  # a span from this size on is a frame by itself; below, packing is cheaper than a frame
Group = tuple[Spans, Any]  # spans, and their bytes one after the other
Digest = Callable[[], int]  # to be made when the bytes are on their way: then the peer does not wait for it


class Packer:
    """Over one arena's memory. Raises what a device raises."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def reference(self, piece: Piece, header: bytes) -> tuple[list[Any], Digest]:
        """The frames (none, or a tag over the header) and the digest of a chunk that the peer fetches."""
        job, spans = piece.job, piece.spans
        frames = [] if job.seal is None else [job.seal.close(piece.number, NO_PAYLOAD, b"", header)]
        if isinstance(self._memory, DeviceMemory):
            sums = self._memory.sums(sources_of(spans), job.mark)
            if not self._memory.reached(job.mark):  # our stream waits for what computes these pages; the peer's cannot
                sums.result()
            return frames, lambda: chunk_digest(job.key, places_of(spans), sums.result())
        parts = [self._memory.direct(source, job.mark) for source in sources_of(spans).tolist()]
        return frames, partial(_digest, job.key, [(spans[i : i + 1], part) for i, part in enumerate(parts)])

    def payload(self, piece: Piece, header: bytes) -> tuple[list[Any], Digest]:
        """The frames of a chunk and their digest; large spans are the arena's own bytes."""
        job, seal = piece.job, piece.job.seal
        groups = self._frames(piece)
        if seal is not None:
            sealed = [seal.close(piece.number, i, data.data, header) for i, (_, data) in enumerate(groups)]
            return sealed, partial(combine, map(tag_digest, sealed))
        return [data for _, data in groups], partial(_digest, job.key, groups)

    def _frames(self, piece: Piece) -> list[Group]:
        """The chunk's spans, by the frame they go in, and that frame's bytes."""
        job, spans, groups, packed = piece.job, piece.spans, [], 0
        for large in np.flatnonzero(spans[:, NBYTES] >= DIRECT_BYTES).tolist():
            source: Place = sources_of(spans[large : large + 1])[0].tolist()
            data = self._memory.direct(source, job.mark)
            if data is None:
                continue
            if packed < large:
                groups.append(self._pack(spans[packed:large], job))
            groups.append((spans[large : large + 1], data))
            packed = large + 1
        if packed < len(spans):
            groups.append(self._pack(spans[packed:], job))
        return groups

    def _pack(self, spans: Spans, job: Job) -> Group:
        packed = self._memory.buffer(num_bytes(spans))
        self._memory.gather(sources_of(spans), packed, job.mark)
        return spans, packed


def _digest(key: Key, groups: Sequence[Group]) -> int:
    digests = []
    for spans, data in groups:
        at = 0
        for kind, number, offset, nbytes in places_of(spans).tolist():
            digests.append(span_digest(key, kind, number, offset, data[at : at + nbytes].data))
            at += nbytes
    return combine(digests)
