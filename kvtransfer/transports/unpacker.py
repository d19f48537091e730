"""How the bytes of a chunk, which came along or are to be fetched, get to their places, and their digest there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvtransfer.digest import SpanDigests, chunk_digest, combine
from kvtransfer.spans import NBYTES, num_bytes, places_of, sources_of
from kvtransfer.transports.frame import BadFrame, Chunk, split_payload
from kvtransfer.transports.memory import Begun, Bytes, Copying, CpuMemory, DeviceMemory, DevicePeer, Memory
from kvtransfer.transports.seal import NO_PAYLOAD, TAG_BYTES, Seal, tag_digest
from kvtransfer.transports.sums import HostSums


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A chunk that is being copied. `source` stays as it is until that is over; `made` comes to its digest then, of what the
    copy came to."""

    chunk: Chunk
    source: Any
    begun: Begun
    made: Callable[[bytes], int]

    def digest(self) -> int:
        """Waits for it. Raises what the device raises."""
        return self.made(self.begun.result())


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A chunk as it came. What is wrong with it raises BadFrame."""

    chunk: Chunk
    seal: Seal | None
    header: bytes
    frames: Sequence[memoryview]

    def check_reference(self) -> None:
        """Of a chunk whose bytes are to be fetched: nothing came along but a tag, if it is sealed."""
        if len(self.frames) != (0 if self.seal is None else 1):
            raise BadFrame("a chunk that is to be fetched, with bytes of its own or without its tag")
        if self.seal is not None:
            nothing: Bytes = np.empty(0, dtype=np.uint8)
            self.seal.open_into(self.chunk.number, NO_PAYLOAD, self.frames[0], self.header, nothing)

    def begin(self, memory: Memory, source: CpuMemory | DevicePeer | None, mark: int) -> Copy:
        """Starts to put the bytes, which came along or are in `source`, to their places."""
        if isinstance(memory, DeviceMemory):
            return self._to_device(memory, source, mark)
        assert not isinstance(source, DevicePeer)
        if source is None and self.seal is not None:  # not begun: bytes that are not true may come again, and then they may be
            tags = self._unseal(memory, self.seal)
            return Copy(self.chunk, None, Copying(), lambda _: tags)
        wanted = places_of(self.chunk.spans)
        parts = _arrays(split_payload(self.chunk.spans, self.frames)) if source is None else self._views(source)
        try:
            digests = HostSums(self.chunk.key, wanted) if self.chunk.sums else SpanDigests(self.chunk.key)
        except ValueError as error:
            raise BadFrame(str(error)) from error
        return Copy(self.chunk, parts, memory.scatter(wanted, parts, digests.begin), lambda _: digests.combined())

    def _to_device(self, memory: DeviceMemory, source: CpuMemory | DevicePeer | None, mark: int) -> Copy:
        if not self.chunk.sums:
            raise BadFrame("a digest of bytes that no host sees")
        wanted = places_of(self.chunk.spans)
        made = partial(chunk_digest, self.chunk.key, wanted)
        try:
            if isinstance(source, DevicePeer):
                return Copy(self.chunk, source, memory.fetch(source, sources_of(self.chunk.spans), wanted, mark), made)
            seal = self.seal if source is None else None
            parts = _arrays(self.frames) if source is None else self._views(source)
            packed = self._buffer(memory, parts, seal)
            if seal is None:
                fill = partial(np.concatenate, parts, out=packed)
                return Copy(self.chunk, parts, memory.scatter(packed, wanted, mark, fill), made)
            tags = self._unseal_packed(seal, packed)
            return Copy(self.chunk, packed, memory.scatter(packed, wanted, mark), lambda _: tags)
        except BadFrame:
            raise
        except ValueError as error:
            raise BadFrame(str(error)) from error

    def _buffer(self, memory: DeviceMemory, parts: Sequence[Bytes], seal: Seal | None) -> Bytes:
        """As large as what came, not as what is said."""
        total = num_bytes(self.chunk.spans)
        if sum(map(len, parts)) != total + (0 if seal is None else TAG_BYTES * len(parts)):
            raise BadFrame("payload and spans differ in length")
        return memory.buffer(total)

    def _views(self, source: CpuMemory) -> list[Bytes]:
        return [source.direct(place) for place in sources_of(self.chunk.spans).tolist()]

    def _unseal(self, memory: CpuMemory, seal: Seal) -> int:
        """Decrypts frame by frame: a large span straight into its place, small ones by way of a buffer."""
        inner = [frame[:-TAG_BYTES] if len(frame) > TAG_BYTES else frame[:0] for frame in self.frames]
        split_payload(self.chunk.spans, inner)  # only for its check
        wanted = places_of(self.chunk.spans)
        sizes, end = wanted[:, NBYTES].tolist(), 0
        for index, (sealed, data) in enumerate(zip(self.frames, inner, strict=True)):
            first, filled = end, 0
            while filled < len(data):
                filled += sizes[end]
                end += 1
            group = wanted[first:end]
            plain: Bytes = memory.direct(group[0].tolist()) if len(group) == 1 else np.empty(len(data), dtype=np.uint8)
            seal.open_into(self.chunk.number, index, sealed, self.header, plain)
            if len(group) > 1:
                memory.scatter(group, np.split(plain, np.cumsum(sizes[first : end - 1]))).result()
        return combine(map(tag_digest, self.frames))

    def _unseal_packed(self, seal: Seal, packed: Bytes) -> int:
        at = 0
        for index, frame in enumerate(self.frames):
            end = at + max(0, len(frame) - TAG_BYTES)
            seal.open_into(self.chunk.number, index, frame, self.header, packed[at:end])
            at = end
        return combine(map(tag_digest, self.frames))


def _arrays(parts: Sequence[memoryview]) -> list[Bytes]:
    return [np.frombuffer(part, dtype=np.uint8) for part in parts]
