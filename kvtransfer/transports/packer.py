"""What a chunk's bytes look like on the wire: frames, seals and digests."""

from __future__ import annotations

from typing import Any

from kvtransfer.digest import chunk_digest, combine, span_digest
from kvtransfer.transports import Span
from kvtransfer.transports.jobs import Job, Piece
from kvtransfer.transports.memory import DeviceMemory, Memory
from kvtransfer.transports.seal import NO_PAYLOAD, tag_digest

DIRECT_BYTES = 128 << 10  # a span from this size on is a frame by itself; below, packing is cheaper than a frame


class Packer:
    """Over one arena's memory. Raises what a device raises."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def reference(self, piece: Piece, header: bytes) -> tuple[list[Any], int]:
        """The frames (none, or a tag over the header) and the digest of a chunk that the peer fetches."""
        job, spans = piece.job, piece.spans
        if isinstance(self._memory, DeviceMemory):
            sums = self._memory.sums([span.source for span in spans], job.mark)
            digest = chunk_digest(job.key, [span.place for span in spans], sums)
        else:
            digest = combine(span_digest(job.key, *span.place[:3], self._direct(span, job).data) for span in spans)
        return [] if job.seal is None else [job.seal.close(piece.number, NO_PAYLOAD, b"", header)], digest

    def payload(self, piece: Piece, header: bytes) -> tuple[list[Any], int]:
        """The frames of a chunk and their digest; large spans are the arena's own bytes."""
        job, seal = piece.job, piece.job.seal
        groups = self._frames(piece)
        if seal is not None:
            sealed = [seal.close(piece.number, i, data.data, header) for i, (_, data) in enumerate(groups)]
            return sealed, combine(map(tag_digest, sealed))
        digests = []
        for spans, data in groups:
            at = 0
            for span in spans:
                digests.append(span_digest(job.key, *span.place[:3], data[at : at + span.nbytes].data))
                at += span.nbytes
        return [data for _, data in groups], combine(digests)

    def _frames(self, piece: Piece) -> list[tuple[list[Span], Any]]:
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
