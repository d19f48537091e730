"""An arena's memory as a transport sees it: rows of bytes, on the CPU (of this process, or of a peer that was mapped) or on a
device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtransfer.sharing import SharedMemory
from kvtransfer.spans import KINDS, NBYTES, Place, Places

Bytes = NDArray[np.uint8]
Rows = dict[str, tuple[int, int]]  # kind -> (rows, bytes of one)
Look = Callable[[Place], Callable[[Bytes], None]]
T = TypeVar("T")

PIECE_BYTES = 1 << 20  # of whole spans (sums.py); less costs Python more turns, and more leaves the core's cache
TASK_BYTES = 4 << 20  # what a copying thread is told to do at once: for less, telling it costs what it gains
_THREADS = ThreadPoolExecutor(2, "kv-copy")  # of this process; one copies and looks at no more than 5 GB/s


def no_look(place: Place) -> Callable[[Bytes], None]:
    return lambda piece: None


class DevicePeer:
    """A sender's device memory, opened by ours to be read from. It is let go with this object."""


class Begun(Protocol):
    """Work of a device, or of other threads, that was started."""

    def over(self) -> bool:
        """Whether `result` would not have to wait."""
        ...

    def result(self) -> bytes:
        """Waits for it. Raises what the device raises."""
        ...


class Task(Generic[T]):
    """A call that one of the copying threads makes, or, if none has begun with it, who asks for its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._future = Future[T]()
        with suppress(RuntimeError):  # of a thread that cannot be started; another may come to it all the same
            _THREADS.submit(self._run)

    def over(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        """Asked for once."""
        return self._call() if self._future.cancel() else self._future.result()

    def _run(self) -> None:
        fulfil(self._future, self._call)


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """By a thread: unless it was cancelled before."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


class Behind:
    """See `Begun`: what a copying thread begins, behind work of its own."""

    def __init__(self, begin: Callable[[], Begun]) -> None:
        self._task = Task(begin)
        self._begun: Begun | None = None

    def over(self) -> bool:
        if self._begun is None and self._task.over():
            try:
                self._begun = self._task.result()
            except Exception:  # `result` says so
                return True
        return self._begun is not None and self._begun.over()

    def result(self) -> bytes:
        return (self._begun or self._task.result()).result()


class Copying:
    """See `Begun`: the tasks of one copy in the CPU's memory, of which there is nothing to be told."""

    def __init__(self, tasks: Sequence[Task[None]] = ()) -> None:
        self._tasks = tasks

    def over(self) -> bool:
        return all(task.over() for task in self._tasks)

    def result(self) -> bytes:
        with ExitStack() as all_of_them:  # the last one first; when one fails nothing may be written either once this returns
            for task in self._tasks:
                all_of_them.callback(task.result)
        return b""


class DeviceMemory(ABC):
    """Memory that no host touches. Copies are begun, and end in that order; what a copy reads and writes is left alone until it
    is over. It comes to the sums of the places in this memory (sums.py), made by the device of what is there: a few numbers
    that stand for all bytes in a digest. Places that are not made of whole words raise ValueError.

    Used by the transport's thread, except `mark` and `handles`, which belong to the thread that computes.
    """

    @abstractmethod
    def enter(self) -> None:
        """The transport's thread begins: its first call."""

    @abstractmethod
    def mark(self) -> int:
        """Names a point in the computing thread's work; a copy that is given it starts after what was issued before."""

    @abstractmethod
    def reached(self, mark: int) -> bool:
        """Whether a copy that is given this mark would not have to wait."""

    @abstractmethod
    def buffer(self, nbytes: int) -> Bytes:
        """Host memory for `gather` and `scatter`, which may also be handed to a socket without a copy. It serves again when
        nobody refers to it any more."""

    @abstractmethod
    def gather(self, places: Places, out: Bytes, mark: int) -> Begun:
        """Starts to pack the bytes of `places`, one after the other, into `out`, a `buffer`."""

    @abstractmethod
    def scatter(self, source: Bytes, places: Places, mark: int, fill: Callable[[], object] | None = None) -> Begun:
        """Starts to put what is packed in `source`, a `buffer`, to `places`; behind `fill`, which a copying thread calls to put
        it there."""

    @abstractmethod
    def sums(self, places: Places, mark: int) -> Begun:
        """Starts nothing but the sums."""

    @abstractmethod
    def handles(self) -> bytes:
        """What leads another process of this host to this memory; b"" when nothing does."""

    @abstractmethod
    def open_peer(self, handles: bytes, rows: Rows) -> DevicePeer:
        """Raises OSError when it cannot be opened, ValueError when it is not what it is said to be."""

    @abstractmethod
    def fetch(self, peer: DevicePeer, sources: Places, places: Places, mark: int) -> Begun:
        """Starts to copy a peer's `sources` to our `places`."""

    @abstractmethod
    def read(self, peer: DevicePeer, sources: Places) -> None:
        """Reads a peer's `sources` to nowhere: only the speed counts."""


class CpuMemory:
    """Numpy views over rows: one copy a span, without torch's cost per slice."""

    def __init__(self, rows: Mapping[str, Bytes]) -> None:
        self._rows = rows

    def enter(self) -> None:
        return None

    def mark(self) -> int:
        return 0

    def reached(self, mark: int) -> bool:
        return True

    def direct(self, place: Place) -> Bytes:
        """The very bytes of a place, to be sent from or written to."""
        kind, number, offset, nbytes = place
        return self._rows[KINDS[kind]][number, offset : offset + nbytes]

    def scatter(self, places: Places, parts: Sequence[Bytes], look: Look = no_look) -> Begun:
        """Starts to put `parts` to `places`. What `look` gives for a place is shown the bytes that its digest is to be made
        of: the arena's own, so that it covers what really landed, in order, piece by piece, while they are in the cache.
        Several places may be shown at a time."""
        looks = [look(place) for place in places.tolist()]
        cuts = np.flatnonzero(np.diff(np.cumsum(places[:, NBYTES], dtype=np.int64) // TASK_BYTES, prepend=-1)).tolist()
        parts_of = zip(cuts, [*cuts[1:], len(places)], strict=True)
        return Copying([Task(partial(self._put, places[i:j], parts[i:j], looks[i:j])) for i, j in parts_of])

    def _put(self, places: Places, parts: Sequence[Bytes], looks: Sequence[Callable[[Bytes], None]]) -> None:
        for place, part, show in zip(places.tolist(), parts, looks, strict=True):
            target = self.direct(place)
            for begin in range(0, place[NBYTES], PIECE_BYTES):
                piece = target[begin : begin + PIECE_BYTES]
                piece[:] = part[begin : begin + PIECE_BYTES]
                show(piece)


Memory = CpuMemory | DeviceMemory


def shared_rows(memory: SharedMemory, rows: Rows) -> dict[str, Bytes]:
    """The pages and slots in a shared arena: uint8 [rows, row_bytes] of each kind, pages first."""
    views, at = {}, 0
    for kind in ("page", "slot"):
        count, row_bytes = rows[kind]
        flat: Any = np.frombuffer(memory.map, dtype=np.uint8, count=count * row_bytes, offset=at)
        views[kind] = flat.reshape(count, row_bytes)
        at += count * row_bytes
    return views
