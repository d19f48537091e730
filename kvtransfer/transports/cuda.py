"""CUDA memory as a transport sees it: packed on the device and over PCIe once a chunk through pinned memory, or, between
GPUs of one host, read straight out of the sender's arena.

The transport works in a thread of the owner's process here. torch's own bookkeeping is enough for what is allocated on the
side stream: it is used, freed and used again on that stream alone. The arenas live as long as the process.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvtransfer.transports import Place
from kvtransfer.transports.cuda_ipc import Extent, Opened, pack_extents, unpack_extents
from kvtransfer.transports.memory import Bytes, DeviceMemory, DevicePeer, Look, Rows, no_look

_MARKS = 65_536  # kept; a hand-off that waits for more others than that starts behind the last of them
_SUM_WORDS = 16_384  # of 4 bytes, in one sum
_SUM_ROWS = 256  # summed in one go: 32 MiB of products
_log = logging.getLogger("kvtransfer")


class Stream(Protocol):
    """Where copies run, beside the thread that computes."""

    def enter(self) -> None:
        """The thread that calls is the one that copies from now on."""
        ...

    def mark(self) -> int: ...

    def reached(self, mark: int) -> bool: ...

    def after(self, mark: int) -> Any:
        """A context: what it issues starts after the mark (0: at once), and is done when it is left, whichever way."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """A host uint8 tensor that copies reach without a detour."""
        ...


class Ipc(Protocol):
    """`CudaIpc`."""

    def export(self, rows: Tensor) -> Extent: ...

    def open(self, extent: Extent, nbytes: int) -> Opened: ...

    def close(self, opened: Opened) -> None: ...


class SideStream:
    """A CUDA stream of its own, and marks in the computing thread's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._numbers = count(1)
        self._newest = 0
        self._events: dict[int, torch.cuda.Event] = {}

    def enter(self) -> None:
        torch.cuda.set_device(self._device)  # else pinned memory would open a context on the first GPU too

    def mark(self) -> int:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        number = next(self._numbers)
        self._events[number] = event
        self._newest = number  # in this order: the other thread finds what it names
        self._events.pop(number - _MARKS, None)
        return number

    def reached(self, mark: int) -> bool:
        return bool(self._event(mark).query())  # type: ignore[no-untyped-call]

    @contextmanager
    def after(self, mark: int) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            if mark:
                self._stream.wait_event(self._event(mark))
            try:
                yield
            finally:  # also when a copy could not be issued: whoever hears of it takes back the memory of those that were
                self._stream.synchronize()

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _event(self, mark: int) -> torch.cuda.Event:
        """What a copy waits for. A mark that is forgotten is covered by any later one: one thread makes them, in order."""
        return self._events.get(mark) or self._events[self._newest]


@dataclass(eq=False)
class PeerRows(DevicePeer):
    """A sender's pages and slots, uint8 [rows, row_bytes], under addresses of our device. Not to be written."""

    rows: dict[str, Tensor]


class CudaMemory(DeviceMemory):
    """See `Memory`; `rows` are the arena's tensors, uint8 [rows, row_bytes]."""

    def __init__(self, rows: Mapping[str, Tensor], stream: Stream, ipc: Ipc | None) -> None:
        self._rows = rows
        self._device = rows["page"].device
        self._stream = stream
        self._ipc = ipc
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._weights = sum_weights().to(self._device)

    def enter(self) -> None:
        self._stream.enter()

    def mark(self) -> int:
        return self._stream.mark()

    def reached(self, mark: int) -> bool:
        return self._stream.reached(mark)

    def direct(self, place: Place, mark: int) -> None:
        return None

    def buffer(self, nbytes: int) -> Bytes:
        pinned: Bytes = self._stream.pinned(nbytes).numpy()
        return pinned

    def gather(self, places: Sequence[Place], out: Bytes, mark: int) -> None:
        with self._stream.after(mark):
            packed = torch.cat(_views(self._rows, places))
            torch.from_numpy(out).copy_(packed, non_blocking=True)

    def scatter(self, places: Sequence[Place], parts: Sequence[Bytes], mark: int, look: Look = no_look) -> None:
        sizes = [place[3] for place in places]
        total = sum(sizes)
        if self._staging.numel() < total:
            self._staging = self._stream.pinned(total)
        pinned: Bytes = self._staging[:total].numpy()
        np.concatenate(parts, out=pinned)
        with self._stream.after(mark):
            packed = self._staging[:total].to(self._device, non_blocking=True)
            for target, source in zip(_views(self._rows, places), torch.split(packed, sizes), strict=True):
                target.copy_(source)
        for place, part in zip(places, np.split(pinned, np.cumsum(sizes[:-1])), strict=True):
            look(place)(part)

    def handles(self) -> bytes:
        if self._ipc is None:
            return b""
        try:
            return pack_extents({kind: self._ipc.export(rows) for kind, rows in self._rows.items()})
        except OSError as error:
            _log.warning("other processes of this host cannot read this GPU's KV, so it goes over the network path: %s", error)
            return b""

    def open_peer(self, handles: bytes, rows: Rows) -> PeerRows:
        if self._ipc is None:
            raise OSError("there is no driver to open it with")
        peer = PeerRows({})
        for kind, extent in unpack_extents(handles).items():
            count, row_bytes = rows[kind]
            if row_bytes != self._rows[kind].shape[1]:
                raise ValueError(f"its {kind}s have {row_bytes} bytes, ours {self._rows[kind].shape[1]}")
            opened = self._ipc.open(extent, count * row_bytes)
            weakref.finalize(peer, self._ipc.close, opened).atexit = False  # a process that ends has closed everything
            peer.rows[kind] = _at(opened.address, self._device, count, row_bytes)
        return peer

    def fetch(self, peer: DevicePeer, sources: Sequence[Place], places: Sequence[Place], mark: int) -> bytes:
        assert isinstance(peer, PeerRows)
        page_bytes = self._rows["page"].shape[1]
        whole = [i for i, place in enumerate(places) if place[0] == "page" and place[3] == page_bytes]
        rest = [i for i, place in enumerate(places) if place[0] != "page" or place[3] != page_bytes]
        with self._stream.after(mark):
            if whole:  # one kernel reads them all, 8 bytes a thread: a copy each costs more than a page takes
                ours, theirs = (rows["page"].view(torch.int64) for rows in (self._rows, peer.rows))
                ours[[places[i][1] for i in whole]] = theirs[[sources[i][1] for i in whole]]
            for i in rest:
                (target,), (source,) = _views(self._rows, [places[i]]), _views(peer.rows, [sources[i]])
                target.copy_(source)
            return self._sums(places)

    def read(self, peer: DevicePeer, sources: Sequence[Place]) -> None:
        assert isinstance(peer, PeerRows)
        with self._stream.after(0):
            torch.cat(_views(peer.rows, sources))

    def sums(self, places: Sequence[Place], mark: int) -> bytes:
        with self._stream.after(mark):
            return self._sums(places)

    def _sums(self, places: Sequence[Place]) -> bytes:
        num_bytes = sum(place[3] for place in places)
        padding = torch.zeros(-num_bytes % (4 * _SUM_WORDS), dtype=torch.uint8, device=self._device)
        packed = torch.cat([*_views(self._rows, places), padding])
        return weighted_sums(packed, self._weights).cpu().numpy().tobytes()


def sum_weights() -> Tensor:
    """int64 [_SUM_WORDS], odd and otherwise random, the same everywhere: splitmix64 of the index."""
    z = (np.arange(_SUM_WORDS, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((z ^ (z >> np.uint64(31)) | np.uint64(1)).view(np.int64))


def weighted_sums(packed: Tensor, weights: Tensor) -> Tensor:
    """int64 [n] of uint8 [n * 4 * _SUM_WORDS]: the 32-bit words of each row times `weights`, added modulo 2^64.

    No change of one word keeps its sum, since weights are odd; one of several does by chance, in one of 2^32 cases at most.
    """
    words = packed.view(torch.int32).view(-1, _SUM_WORDS)
    return torch.cat([(part * weights).sum(1) for part in torch.split(words, _SUM_ROWS)])


def _views(rows: Mapping[str, Tensor], places: Sequence[Place]) -> list[Tensor]:
    return [rows[kind][number, offset : offset + nbytes] for kind, number, offset, nbytes in places]


def _at(address: int, device: torch.device, count: int, row_bytes: int) -> Tensor:
    """uint8 [count, row_bytes] over memory that somebody else owns."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, count * row_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count, row_bytes), (row_bytes, 1))
