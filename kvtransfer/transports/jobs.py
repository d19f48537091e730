"""What is to be sent: one job per `write`, cut into chunks, and the account of who still needs which memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtransfer.digest import combine
from kvtransfer.spans import NBYTES, Spans
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Drained, Event, Key, Lost, Wrote
from kvtransfer.transports.frame import MAX_SPANS
from kvtransfer.transports.seal import Seal


@dataclass(slots=True, eq=False)
class Job:
    """One `write`, and how far it has got. `peer` is its address."""

    peer: str
    key: Key
    spans: Spans
    mark: int
    seal: Seal | None
    cut: int = 0  # spans that are in chunks
    landed: int = 0  # spans
    num_bytes: int = 0  # landed
    digest: int = 0
    ends: NDArray[np.int64] = field(init=False)  # of each span, among all bytes of the job

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.spans[:, NBYTES], dtype=np.int64)


@dataclass(slots=True, eq=False)
class Piece:
    """One chunk of a job: the unit of sending, of credit, and of being acknowledged."""

    job: Job
    number: int
    spans: Spans
    num_bytes: int
    sums: bool | None = None  # see `Chunk`; once it was sent
    fetched: bool = False  # by the peer, and not sent along; once it was sent
    made: Callable[[], int] = lambda: 0  # waits for the digest
    digest: int = 0
    landed: bool = False
    trackers: list[Any] = field(default_factory=list)  # of its messages, and of copies for connections that are gone


class Jobs:
    """Every job that is not over. A key ends once: with a Wrote per job, with one Lost, or with one Drained.

    After a Lost or a Drained the owner uses the memory for something else, so a `write` that crossed it is dropped unread.
    """

    def __init__(self, emit: Callable[[Event], None], numbers: Iterator[int]) -> None:
        self._emit = emit
        self._numbers = numbers
        self._queues: dict[str, deque[Job]] = {}  # by peer, first come first served
        self._again: dict[str, deque[Piece]] = {}  # by peer: pieces whose connection broke
        self._held: dict[Key, int] = {}  # pieces that are under way: our memory may be read for them
        self._closing: list[Piece] = []
        self._ending: dict[Key, Event] = {}  # keys that are given up, and what to say when nothing is held any more
        self._ended = Tombstones()  # keys that were given up, and it has been said

    def add(self, job: Job) -> None:
        if job.key in self._ending or job.key in self._ended:
            return  # one Lost or Drained is the answer to all writes of a key
        self._queues.setdefault(job.peer, deque()).append(job)

    def waiting(self, peer: str) -> bool:
        return bool(self._queues.get(peer) or self._again.get(peer))

    def peers(self) -> list[str]:
        """Those that something is waiting for."""
        for queues in (self._queues, self._again):
            for peer in [peer for peer, queue in queues.items() if not queue]:
                del queues[peer]
        return list({**self._queues, **self._again})

    def next_mark(self, peer: str) -> int | None:
        """What the next chunk for `peer` has to wait for; None for nothing."""
        queue = self._queues.get(peer)
        return None if self._again.get(peer) or not queue else queue[0].mark

    def next_piece(self, peer: str, chunk_bytes: Callable[[Job], int]) -> Piece | None:
        """The next chunk for `peer`: as many spans of its first job as fit, one at least."""
        again = self._again.get(peer)
        while again:
            piece = again.popleft()
            if piece.job.key in self._ending:
                self.release(piece)
            else:
                return piece
        queue = self._queues.get(peer)
        if not queue:
            return None
        job = queue[0]
        begin = int(job.ends[job.cut - 1]) if job.cut else 0
        fitting = int(job.ends.searchsorted(begin + chunk_bytes(job), side="right"))
        end = min(max(fitting, job.cut + 1), job.cut + MAX_SPANS)
        piece = Piece(job, next(self._numbers), job.spans[job.cut : end], int(job.ends[end - 1]) - begin)
        job.cut = end
        if end == len(job.spans):
            queue.popleft()
        self._held[job.key] = self._held.get(job.key, 0) + 1
        return piece

    def send_again(self, piece: Piece) -> None:
        """Its connection broke before it was acknowledged."""
        if piece.job.key in self._ending:  # whose hand-off was given up meanwhile
            self.release(piece)
            return
        self._again.setdefault(piece.job.peer, deque()).append(piece)

    def landed(self, piece: Piece) -> None:
        piece.landed = True
        self.release(piece)

    def release(self, piece: Piece) -> None:
        """`piece` is over: as soon as no connection has bytes of it any more, our memory is not read for it."""
        self._closing.append(piece)
        self.settle()

    def settle(self) -> None:
        """Looks again at what is over."""
        over = [piece for piece in self._closing if all(tracker.done for tracker in piece.trackers)]
        for piece in over:
            self._closing.remove(piece)
            self._free(piece)

    @property
    def closing(self) -> bool:
        return bool(self._closing)

    def lose(self, key: Key, reason: str, corrupt: bool = False, closed: bool = False) -> None:
        """A hand-off with a hole is of no use: drops all of it."""
        if key not in self._ending:
            self._end(key, Lost(key, reason, corrupt, closed))

    def lose_peer(self, peer: str, reason: str) -> None:
        """Drops every hand-off that something waits of for `peer`."""
        waiting = [job.key for job in self._queues.get(peer, ())] + [p.job.key for p in self._again.get(peer, ())]
        for key in dict.fromkeys(waiting):
            self.lose(key, reason)

    def cancel(self, key: Key) -> None:
        self._end(key, Drained(key))

    def _free(self, piece: Piece) -> None:
        job, key = piece.job, piece.job.key
        if piece.landed:
            job.landed += len(piece.spans)
            job.num_bytes += piece.num_bytes
            job.digest = combine((job.digest, piece.digest))
            if job.landed == len(job.spans) and key not in self._ending:
                self._emit(Wrote(key, job.landed, job.num_bytes, job.digest))
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
            if key in self._ending:
                self._say_end(key)

    def _end(self, key: Key, event: Event) -> None:
        for peer, queue in self._queues.items():
            if any(job.key == key for job in queue):
                self._queues[peer] = deque(job for job in queue if job.key != key)
        self._ending[key] = event
        for pieces in self._again.values():
            for piece in [piece for piece in pieces if piece.job.key == key]:
                pieces.remove(piece)
                self.release(piece)
        if key not in self._held and key in self._ending:
            self._say_end(key)

    def _say_end(self, key: Key) -> None:
        self._ended.add(key)
        self._emit(self._ending.pop(key))
