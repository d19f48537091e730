"""How the bytes of a chunk, which came along or are to be fetched, get to their places, and their digest there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvtransfer.digest import SpanDigests, chunk_digest, combine
from kvtransfer.spans import NBYTES, places_of, sources_of
from kvtransfer.transports.connection import Show, pieces
from kvtransfer.transports.frame import MAX_FRAMES, BadFrame, Chunk
from kvtransfer.transports.memory import Begun, Bytes, Copying, CpuMemory, DeviceMemory, DevicePeer, Memory
from kvtransfer.transports.seal import NO_PAYLOAD, TAG_BYTES, Seal, tag_digest
from kvtransfer.transports.sums import HostSums, host_digests


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


class Arrival:
    """A chunk while it comes, for `memory`. What is wrong with it raises BadFrame.

    Bytes for the CPU's memory that are not sealed are read to their places, and looked at there. Others wait in a buffer until
    the chunk is whole.
    """

    def __init__(self, chunk: Chunk, seal: Seal | None, header: bytes, memory: Memory) -> None:
        self.chunk = chunk
        self._seal, self._header, self._memory = seal, header, memory
        self._wanted = places_of(chunk.spans)
        self._ends = np.cumsum(self._wanted[:, NBYTES], dtype=np.int64)
        self._at = 0  # payload that has been announced
        self._frames: list[Bytes] = []  # sealed ones, as they came
        self._spans_of: list[slice] = []  # by frame
        self._packed: Bytes | None = None  # for a device
        self._shows: deque[Show] = deque()  # by view that is to come
        self.straight = isinstance(memory, CpuMemory) and seal is None and not chunk.memory_name
        if isinstance(memory, DeviceMemory) and not chunk.sums:
            raise BadFrame("a digest of bytes that no host sees")
        self._digests = self._begin_digests() if self.straight else None

    def room(self, nbytes: int, more: bool) -> list[Any]:
        """Where the next frame goes; see `Incoming`."""
        if self.chunk.memory_name:
            return self._room_of_tag(nbytes, more)
        first = self._spans_of[-1].stop if self._spans_of else 0
        self._at += nbytes - (0 if self._seal is None else TAG_BYTES)
        end = int(self._ends.searchsorted(self._at)) + 1
        if end > len(self._ends) or self._at != self._ends[end - 1] or end == first or more == (end == len(self._ends)):
            raise BadFrame("payload and spans differ in length")
        if len(self._spans_of) == MAX_FRAMES:
            raise BadFrame(f"more than {MAX_FRAMES} frames of payload")
        self._spans_of.append(slice(first, end))
        if self._seal is not None:
            return [self._kept(nbytes)]
        if isinstance(self._memory, DeviceMemory):
            if self._packed is None:
                self._packed = self._memory.buffer(int(self._ends[-1]))
            return [self._packed[self._at - nbytes : self._at]]
        return self._places(self._memory, first, end)

    def came(self, view: Bytes) -> None:
        if self._shows:
            self._shows.popleft()(view)

    def read(self) -> Copy:
        """Of bytes that were read to their places: what is left to be done is their digest."""
        digests = self._digests
        assert digests is not None
        return Copy(self.chunk, None, Copying(), lambda _: digests.combined())

    def check_whole(self) -> None:
        """Nothing follows."""
        if self._at != (0 if self.chunk.memory_name else self._ends[-1]):
            raise BadFrame("a chunk without its bytes")
        if self.chunk.memory_name and len(self._frames) != (self._seal is not None):
            raise BadFrame("a chunk that is to be fetched, without its tag")

    def begin(self, source: CpuMemory | DevicePeer | None, mark: int) -> Copy:
        """Starts to put the bytes, which are in a buffer or in `source`, to their places."""
        if self.chunk.memory_name and self._seal is not None:
            nothing: Bytes = np.empty(0, dtype=np.uint8)
            self._seal.open_into(self.chunk.number, NO_PAYLOAD, self._frames[0].data, self._header, nothing)
        if isinstance(self._memory, DeviceMemory):
            return self._to_device(self._memory, source, mark)
        assert not isinstance(source, DevicePeer)
        if source is None:  # not begun: bytes that are not true may come again, and then they may be
            tags = self._unseal(self._memory)
            return Copy(self.chunk, None, Copying(), lambda _: tags)
        parts = self._views(source)
        digests = self._begin_digests()
        return Copy(self.chunk, parts, self._memory.scatter(self._wanted, parts, digests.begin), lambda _: digests.combined())

    def _begin_digests(self) -> HostSums | SpanDigests:
        try:
            return host_digests(self.chunk.key, self._wanted, self.chunk.sums)
        except ValueError as error:
            raise BadFrame(str(error)) from error

    def _room_of_tag(self, nbytes: int, more: bool) -> list[Any]:
        if self._seal is None or more or nbytes != TAG_BYTES:
            raise BadFrame("a chunk that is to be fetched, with bytes of its own")
        return [self._kept(nbytes)]

    def _kept(self, nbytes: int) -> Bytes:
        self._frames.append(np.empty(nbytes, dtype=np.uint8))
        return self._frames[-1]

    def _places(self, memory: CpuMemory, first: int, end: int) -> list[Any]:
        assert self._digests is not None
        views = []
        for place in self._wanted[first:end].tolist():
            new = pieces(memory.direct(place))
            views += new
            self._shows += [self._digests.begin(place)] * len(new)
        return views

    def _to_device(self, memory: DeviceMemory, source: CpuMemory | DevicePeer | None, mark: int) -> Copy:
        made = partial(chunk_digest, self.chunk.key, self._wanted)
        try:
            if isinstance(source, DevicePeer):
                begun = memory.fetch(source, sources_of(self.chunk.spans), self._wanted, mark)
                return Copy(self.chunk, source, begun, made)
            if source is not None:
                parts, packed = self._views(source), memory.buffer(int(self._ends[-1]))
                fill = partial(np.concatenate, parts, out=packed)
                return Copy(self.chunk, parts, memory.scatter(packed, self._wanted, mark, fill), made)
            if self._seal is None:
                assert self._packed is not None
                return Copy(self.chunk, self._packed, memory.scatter(self._packed, self._wanted, mark), made)
            packed = memory.buffer(int(self._ends[-1]))
            tags = self._unseal_packed(packed)
            return Copy(self.chunk, packed, memory.scatter(packed, self._wanted, mark), lambda _: tags)
        except BadFrame:
            raise
        except ValueError as error:
            raise BadFrame(str(error)) from error

    def _views(self, source: CpuMemory) -> list[Bytes]:
        return [source.direct(place) for place in sources_of(self.chunk.spans).tolist()]

    def _unseal(self, memory: CpuMemory) -> int:
        """Decrypts frame by frame: a large span straight into its place, small ones by way of a buffer."""
        for index, (sealed, spans) in enumerate(zip(self._frames, self._spans_of, strict=True)):
            group, nbytes = self._wanted[spans], len(sealed) - TAG_BYTES
            plain: Bytes = memory.direct(group[0].tolist()) if len(group) == 1 else np.empty(nbytes, dtype=np.uint8)
            self._open(index, sealed, plain)
            if len(group) > 1:
                memory.scatter(group, np.split(plain, np.cumsum(group[:-1, NBYTES], dtype=np.int64))).result()
        return combine(map(tag_digest, self._frames))

    def _unseal_packed(self, packed: Bytes) -> int:
        at = 0
        for index, sealed in enumerate(self._frames):
            end = at + len(sealed) - TAG_BYTES
            self._open(index, sealed, packed[at:end])
            at = end
        return combine(map(tag_digest, self._frames))

    def _open(self, index: int, sealed: Bytes, out: Bytes) -> None:
        assert self._seal is not None
        self._seal.open_into(self.chunk.number, index, sealed.data, self._header, out)
