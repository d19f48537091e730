"""What a chunk's bytes look like on the wire: frames, seals and digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvtransfer.digest import chunk_digest, combine, span_digest
from kvtransfer.transports import Key, Span
from kvtransfer.transports.jobs import Job, Piece
from kvtransfer.transports.memory import DeviceMemory, Memory
from kvtransfer.transports.seal import NO_PAYLOAD, tag_digest

DIRECT_BYTES = 128 << 10  # a span from this size on is a frame by itself; below, packing is cheaper than a frame
Group = tuple[list[Span], Any]  # spans, and their bytes one after the other
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
            sums = self._memory.sums([span.source for span in spans], job.mark)
            if not self._memory.reached(job.mark):  # our stream waits for what computes these pages; the peer's cannot
                sums.result()
            return frames, lambda: chunk_digest(job.key, [span.place for span in spans], sums.result())
        return frames, partial(_digest, job.key, [([span], self._direct(span, job)) for span in spans])

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
        job, groups, small = piece.job, [], []
        for span in piece.spans:
            data = self._direct(span, job) if span.nbytes >= DIRECT_BYTES else None
            if data is None:
                small.append(span)
                continue
            if small:
                groups.append((small, self._pack(small, job)))
                small = []
            groups.append(([span], data))
        if small:
            groups.append((small, self._pack(small, job)))
        return groups

    def _direct(self, span: Span, job: Job) -> Any:
        return self._memory.direct(span.source, job.mark)

    def _pack(self, spans: list[Span], job: Job) -> Any:
        packed = self._memory.buffer(sum(span.nbytes for span in spans))
        self._memory.gather([span.source for span in spans], packed, job.mark)
        return packed


def _digest(key: Key, groups: Sequence[Group]) -> int:
    digests = []
    for spans, data in groups:
        at = 0
        for span in spans:
            digests.append(span_digest(key, *span.place[:3], data[at : at + span.nbytes].data))
            at += span.nbytes
    return combine(digests)
