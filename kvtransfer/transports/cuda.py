"""CUDA memory as a transport sees it: packed on the device and over PCIe once a chunk through a ring of pinned buffers, or,
between GPUs of one host, read straight out of the sender's arena.

The transport works in a thread of the owner's process here. torch's own bookkeeping is enough for what is allocated on the
side stream: it is used, freed and used again on that stream alone. The arenas live as long as the process.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.spans import move_spans, sum_spans
from kvtransfer.spans import KIND, KINDS, NBYTES, NUMBER, OFFSET, PAGE, Places, num_bytes
from kvtransfer.transports.cuda_ipc import Extent, Opened, pack_extents, unpack_extents
from kvtransfer.transports.memory import Begun, Behind, Bytes, DeviceMemory, DevicePeer, Rows
from kvtransfer.transports.outbound import CHUNK_BYTES, CREDIT
from kvtransfer.transports.sums import SPAN_WORDS, WORD_BYTES, sum_weights

_MARKS = 65_536  # kept; a hand-off that waits for more others than that starts behind the last of them
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

    def begin(self, mark: int, issue: Callable[[], Tensor]) -> Begun:
        """What `issue` issues starts after the mark (0: at once); this does not wait for it. Comes to the bytes of the host
        tensor that it gives."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """A host uint8 tensor that copies reach without a detour."""
        ...


class Ipc(Protocol):
    """`CudaIpc`."""

    def export(self, rows: Tensor) -> Extent: ...

    def open(self, extent: Extent, nbytes: int) -> Opened: ...

    def close(self, opened: Opened) -> None: ...


@dataclass(frozen=True, slots=True)
class Issued:
    """See `Begun`. `event`: behind the last copy."""

    event: torch.cuda.Event
    on_host: Tensor

    def over(self) -> bool:
        try:
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # of a device that has failed: `result` says so
            return True

    def result(self) -> bytes:
        self.event.synchronize()
        return self.on_host.numpy().tobytes()


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
        try:
            return bool(self._event(mark).query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # of a device that has failed: what is begun then says so
            return True

    @contextmanager
    def after(self, mark: int) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            if mark:
                self._stream.wait_event(self._event(mark))
            try:
                yield
            finally:  # also when a copy could not be issued: whoever hears of it takes back the memory of those that were
                self._stream.synchronize()

    def begin(self, mark: int, issue: Callable[[], Tensor]) -> Begun:
        with torch.cuda.stream(self._stream):
            if mark:
                self._stream.wait_event(self._event(mark))
            try:
                on_host = issue()
            except BaseException:  # as in `after`
                self._stream.synchronize()
                raise
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # who waits leaves the core to others
            event.record(self._stream)
        return Issued(event, on_host)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _event(self, mark: int) -> torch.cuda.Event:
        """What a copy waits for. A mark that is forgotten is covered by any later one, as one thread makes them in order. Not
        by the newest, where there is an older: who asks again and again might never find that reached."""
        events, old = self._events, self._newest - _MARKS // 2
        return events.get(mark) or events.get(old) or events[self._newest]


class Ring:
    """Pinned buffers that serve again and again. One is free when nobody refers to it any more: not a copy that is under way,
    and not libzmq, which holds on to what it sends. So there are as many as were ever under way at once, `ready` at least: to
    make one may hold up the device."""

    def __init__(self, pinned: Callable[[int], Tensor], ready: int) -> None:
        self._pinned = pinned
        self._free = [pinned(CHUNK_BYTES) for _ in range(ready)]  # the last one that was used first: it is in the cache

    def take(self, nbytes: int) -> Bytes:
        """The first `nbytes` bytes of one, in an array that nobody else refers to yet; of more than a chunk, of a fresh one."""
        if nbytes > CHUNK_BYTES:
            fresh: Bytes = self._pinned(nbytes).numpy()
            return fresh
        buffer = self._free.pop() if self._free else self._pinned(CHUNK_BYTES)
        whole: Bytes = buffer.numpy()
        weakref.finalize(whole, self._free.append, buffer).atexit = False
        return whole[:nbytes]


@dataclass(eq=False)
class PeerRows(DevicePeer):
    """A sender's pages and slots, uint8 [rows, row_bytes], under addresses of our device. Not to be written."""

    rows: dict[str, Tensor]


class CudaMemory(DeviceMemory):
    """See `DeviceMemory`; `rows` are the arena's tensors, uint8 [rows, row_bytes]."""

    def __init__(self, rows: Mapping[str, Tensor], stream: Stream, ipc: Ipc | None) -> None:
        self._rows = rows
        self._device = rows["page"].device
        self._stream = stream
        self._ipc = ipc
        self._weights = torch.from_numpy(sum_weights()).to(self._device)

    def enter(self) -> None:
        self._stream.enter()
        self._ring = Ring(self._stream.pinned, 2 * CREDIT)
        page, filled = self._one_page(), self._stream.mark()  # the owner waits for us: until then the mark is ours to make
        buffer = self.buffer(num_bytes(page))
        self.gather(page, buffer, filled).result()  # compiled before anybody waits for it
        self.scatter(buffer, page, filled).result()

    def mark(self) -> int:
        return self._stream.mark()

    def reached(self, mark: int) -> bool:
        return self._stream.reached(mark)

    def buffer(self, nbytes: int) -> Bytes:
        return self._ring.take(nbytes)

    def gather(self, places: Places, out: Bytes, mark: int) -> Begun:
        tables = self._tables(_packed(places), places)

        def issue() -> Tensor:
            on_device = {kind: self._upload(table) for kind, table in tables.items()}
            staging = torch.empty(len(out), dtype=torch.uint8, device=self._device)
            for kind, (begins, ends_up, counts) in on_device.items():
                move_spans(_flat(self._rows[kind]), _flat(staging), ends_up, begins, counts)
            torch.from_numpy(out).copy_(staging, non_blocking=True)
            return self._sums(on_device)

        return self._stream.begin(mark, issue)

    def scatter(self, source: Bytes, places: Places, mark: int, fill: Callable[[], object] | None = None) -> Begun:
        tables = self._tables(_packed(places), places)

        def issue() -> Tensor:
            staging = torch.from_numpy(source).to(self._device, non_blocking=True)
            return self._move(dict.fromkeys(tables, staging), tables)

        if fill is None:
            return self._stream.begin(mark, issue)

        def filled() -> Begun:
            fill()
            return self._stream.begin(mark, issue)

        return Behind(filled)

    def sums(self, places: Places, mark: int) -> Begun:
        tables = self._tables(places, places)
        return self._stream.begin(mark, lambda: self._sums({kind: self._upload(table) for kind, table in tables.items()}))

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
            peer.rows[kind] = rows_at(opened.address, self._device, count, row_bytes)
        self.read(peer, self._one_page())  # for the first time: the test is of the link
        return peer

    def fetch(self, peer: DevicePeer, sources: Places, places: Places, mark: int) -> Begun:
        assert isinstance(peer, PeerRows)
        rows, tables = peer.rows, self._tables(sources, places)
        return self._stream.begin(mark, lambda: self._move(rows, tables))

    def read(self, peer: DevicePeer, sources: Places) -> None:
        assert isinstance(peer, PeerRows)
        nowhere = sources.copy()
        nowhere[:, NUMBER] = 0
        with self._stream.after(0):
            for kind, table in self._tables(sources, nowhere).items():
                scratch = torch.empty(peer.rows[kind].shape[1], dtype=torch.uint8, device=self._device)
                move_spans(_flat(peer.rows[kind]), _flat(scratch), *self._upload(table))

    def _one_page(self) -> Places:
        """Which is nobody's."""
        return np.array([(PAGE, 0, 0, self._rows["page"].shape[1])], dtype=np.uint32)

    def _tables(self, sources: Places, places: Places) -> dict[str, NDArray[np.int64]]:
        """By kind, what `span_table` gives."""
        tables = {}
        for number, kind in enumerate(KINDS):
            chosen = places[:, KIND] == number
            if chosen.any():
                tables[kind] = span_table(sources[chosen], places[chosen], self._rows[kind].shape[1])
        return tables

    def _move(self, sources: Mapping[str, Tensor], tables: Mapping[str, NDArray[np.int64]]) -> Tensor:
        """Of each kind from its source to our rows; gives the sums of what is there then."""
        on_device = {kind: self._upload(table) for kind, table in tables.items()}
        for kind, table in on_device.items():
            move_spans(_flat(sources[kind]), _flat(self._rows[kind]), *table)
        return self._sums(on_device)

    def _upload(self, table: NDArray[np.int64]) -> Tensor:
        pinned = self._stream.pinned(table.nbytes).view(torch.int64).view(table.shape)
        pinned.copy_(torch.from_numpy(table))
        return pinned.to(self._device, non_blocking=True)

    def _sums(self, tables: Mapping[str, Tensor]) -> Tensor:
        """Of the spans of ours in tables on the device, in a host tensor that has them when the stream gets there."""
        sizes = [table.shape[1] for table in tables.values()]
        sums = torch.empty(sum(sizes), dtype=torch.int64, device=self._device)
        for (kind, (_, ends_up, counts)), part in zip(tables.items(), torch.split(sums, sizes), strict=True):
            sum_spans(_flat(self._rows[kind]), ends_up, counts, self._weights, part)
        return self._stream.pinned(sums.nbytes).view(torch.int64).copy_(sums, non_blocking=True)


def span_table(sources: Places, places: Places, row_bytes: int) -> NDArray[np.int64]:
    """int64 [3, n], of places of one kind: where each span begins in the source, in the target, and how many words it has.
    A place is cut into spans of SPAN_WORDS words, the last one shorter. Raises ValueError for one not of whole words."""
    _, src, src_offset, _ = sources.astype(np.int64).T
    _, dst, offset, nbytes = places.astype(np.int64).T
    if ((src_offset | offset | nbytes | row_bytes) % WORD_BYTES).any():
        raise ValueError("a GPU reads whole words, and a place is not made of them")
    words = nbytes // WORD_BYTES
    cuts = -(-words // SPAN_WORDS)
    cut_before = (np.cumsum(cuts) - cuts) * SPAN_WORDS  # words, as if every span were full
    begins, ends_up = (first // WORD_BYTES for first in (src * row_bytes + src_offset, dst * row_bytes + offset))
    table = np.repeat(np.stack((begins - cut_before, ends_up - cut_before, words + cut_before)), cuts, axis=1)
    at = np.arange(table.shape[1]) * SPAN_WORDS
    table[:2] += at
    table[2] = np.minimum(table[2] - at, SPAN_WORDS)
    return table


def _packed(places: Places) -> Places:
    """Where they are when they lie one behind the other."""
    packed = places.copy()
    packed[:, NUMBER] = 0
    packed[1:, OFFSET] = np.cumsum(places[:-1, NBYTES])
    packed[0, OFFSET] = 0
    return packed


def _flat(rows: Tensor) -> Tensor:
    """uint8 [rows, row_bytes] as int32 words."""
    return rows.view(-1).view(torch.int32)


def rows_at(address: int, device: torch.device, count: int, row_bytes: int) -> Tensor:
    """uint8 [count, row_bytes] over memory that somebody else owns, as `device` sees it."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, count * row_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count, row_bytes), (row_bytes, 1))
