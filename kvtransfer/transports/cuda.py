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
from functools import cached_property
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.spans import move_spans, sum_spans
from kvtransfer.spans import KIND, KINDS, NBYTES, OFFSET, PAGE, Places, num_bytes
from kvtransfer.transports.cuda_ipc import Extent, Opened, pack_extents, unpack_extents
from kvtransfer.transports.frame import CHUNK_BYTES
from kvtransfer.transports.memory import Begun, Behind, Bytes, DeviceMemory, DevicePeer, Rows
from kvtransfer.transports.outbound import CREDIT
from kvtransfer.transports.sums import SPAN_WORDS, WORD_BYTES, sum_weights

_MARKS = 65_536  # kept; a hand-off that waits for more others than that starts behind the last of them
_log = logging.getLogger("kvtransfer")


class Stream(Protocol):
    """Where copies run, beside the thread that computes."""

    def enter(self) -> None:
        """A thread that calls may copy from now on."""
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
    and not a connection that sends it or reads into it. So there are as many as were ever under way at once, `ready` at least:
    to make one may hold up the device."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """Pages and slots as a device sees them: one memory, though each is an allocation of its own, so that one table leads to
    both."""

    words: Tensor  # int32, from the first page on
    begins: NDArray[np.int64]  # by kind: bytes from there to the first row
    row_bytes: NDArray[np.int64]  # by kind

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> Ground:
        """Of uint8 [rows, row_bytes] of each kind, which have to be kept."""
        pages = rows["page"]
        begins = [rows[kind].data_ptr() - pages.data_ptr() for kind in KINDS]
        return cls(_flat(pages), np.array(begins), np.array([rows[kind].shape[1] for kind in KINDS]))

    def at(self, places: Places) -> NDArray[np.int64]:
        """[n]: bytes from the first page to each place."""
        kind, number, offset, _ = places.astype(np.int64).T
        at: NDArray[np.int64] = self.begins.take(kind) + number * self.row_bytes.take(kind) + offset
        return at


@dataclass(eq=False)
class PeerRows(DevicePeer):
    """A sender's pages and slots, uint8 [rows, row_bytes], under addresses of our device. Not to be written."""

    rows: dict[str, Tensor]

    @cached_property
    def ground(self) -> Ground:
        return Ground.of(self.rows)


class CudaMemory(DeviceMemory):
    """See `DeviceMemory`; `rows` are the arena's tensors, uint8 [rows, row_bytes]."""

    def __init__(self, rows: Mapping[str, Tensor], stream: Stream, ipc: Ipc | None) -> None:
        self._rows, self._ground = rows, Ground.of(rows)
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
        table = span_table(self._ground.at(places), _packed(places), places)

        def issue() -> Tensor:
            begins, ends_up, counts = self._upload(table)
            staging = torch.empty(len(out), dtype=torch.uint8, device=self._device)
            move_spans(self._ground.words, _flat(staging), begins, ends_up, counts)
            torch.from_numpy(out).copy_(staging, non_blocking=True)
            return self._sums(begins, counts)

        return self._stream.begin(mark, issue)

    def scatter(self, source: Bytes, places: Places, mark: int, fill: Callable[[], object] | None = None) -> Begun:
        table = span_table(_packed(places), self._ground.at(places), places)

        def issue() -> Tensor:
            staging = torch.from_numpy(source).to(self._device, non_blocking=True)
            return self._move(_flat(staging), table)

        if fill is None:
            return self._stream.begin(mark, issue)

        def filled() -> Begun:
            self._stream.enter()
            fill()
            return self._stream.begin(mark, issue)

        return Behind(filled)

    def sums(self, places: Places, mark: int) -> Begun:
        at = self._ground.at(places)
        table = span_table(at, at, places)
        return self._stream.begin(mark, lambda: self._sums(*self._upload(table)[1:]))

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
        words, table = peer.ground.words, span_table(peer.ground.at(sources), self._ground.at(places), places)
        return self._stream.begin(mark, lambda: self._move(words, table))

    def read(self, peer: DevicePeer, sources: Places) -> None:
        assert isinstance(peer, PeerRows)
        table = span_table(peer.ground.at(sources), sources[:, OFFSET].astype(np.int64), sources)  # of one row, over each other
        with self._stream.after(0):
            scratch = torch.empty(max(peer.ground.row_bytes), dtype=torch.uint8, device=self._device)
            move_spans(peer.ground.words, _flat(scratch), *self._upload(table))

    def _one_page(self) -> Places:
        """Which is nobody's."""
        return np.array([(PAGE, 0, 0, self._rows["page"].shape[1])], dtype=np.uint32)

    def _move(self, source: Tensor, table: NDArray[np.int64]) -> Tensor:
        """From words on the device to our rows; gives the sums of what is there then."""
        begins, ends_up, counts = self._upload(table)
        move_spans(source, self._ground.words, begins, ends_up, counts)
        return self._sums(ends_up, counts)

    def _upload(self, table: NDArray[np.int64]) -> Tensor:
        pinned = self._stream.pinned(table.nbytes).view(torch.int64).view(table.shape)
        pinned.copy_(torch.from_numpy(table))
        return pinned.to(self._device, non_blocking=True)

    def _sums(self, begins: Tensor, counts: Tensor) -> Tensor:
        """Of spans of ours in tables on the device, in a host tensor that has them when the stream gets there."""
        sums = torch.empty_like(counts)
        sum_spans(self._ground.words, begins, counts, self._weights, sums)
        return self._stream.pinned(sums.nbytes).view(torch.int64).copy_(sums, non_blocking=True)


def span_table(begins: NDArray[np.int64], ends_up: NDArray[np.int64], places: Places) -> NDArray[np.int64]:
    """int64 [3, n]: where each span begins in the source, where in the target, in words, and how many of them it has. Begins
    and ends_up int64 [places] say the same of whole places, in bytes. A place is cut into spans of SPAN_WORDS words, the last
    one shorter; those of pages come first. Raises ValueError for one not of whole words."""
    pages_first = places[:, KIND].argsort(kind="stable")
    cut = np.array((begins, ends_up, places[:, NBYTES]), dtype=np.int64)[:, pages_first]
    if (cut % WORD_BYTES).any():
        raise ValueError("a GPU reads whole words, and a place is not made of them")
    cut //= WORD_BYTES
    cuts = -(-cut[2] // SPAN_WORDS)
    cut_before = (np.cumsum(cuts) - cuts) * SPAN_WORDS  # words, as if every span were full
    cut[:2] -= cut_before
    cut[2] += cut_before
    table = np.repeat(cut, cuts, axis=1)
    at = np.arange(table.shape[1]) * SPAN_WORDS
    table[:2] += at
    table[2] = np.minimum(table[2] - at, SPAN_WORDS)
    return table


def _packed(places: Places) -> NDArray[np.int64]:
    """[n]: where each is, in bytes, when they lie one behind the other."""
    sizes = places[:, NBYTES].astype(np.int64)
    ends: NDArray[np.int64] = sizes.cumsum()
    return ends - sizes


def _flat(rows: Tensor) -> Tensor:
    """uint8 [rows, row_bytes] as int32 words."""
    return rows.view(-1).view(torch.int32)


def rows_at(address: int, device: torch.device, count: int, row_bytes: int) -> Tensor:
    """uint8 [count, row_bytes] over memory that somebody else owns, as `device` sees it."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, count * row_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count, row_bytes), (row_bytes, 1))
