"""The sending half of the ZeroMQ transport: a queue and a PUSH socket per peer, so that a slow peer stalls only itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from kvtransfer.digest import combine, span_digest
from kvtransfer.transports import Event, Key, Lost, Span, Wrote
from kvtransfer.transports.frame import MAX_SPANS, pack_header
from kvtransfer.transports.memory import Bytes, Memory

MESSAGE_BYTES = 2 << 20  # payload of one message at most, unless one span is larger: less costs wake-ups, more cache
SEND_QUEUE = 8  # messages in libzmq's queue of one peer: with MESSAGE_BYTES, what a peer that does not read costs us
IDLE_S = 300.0  # an unused connection is closed: decode workers come and go


@dataclass(slots=True, eq=False)
class _Job:
    """One `write`, and how far it has got."""

    peer: str
    key: Key
    spans: Sequence[Span]
    mark: Any
    sent: int = 0  # spans
    num_bytes: int = 0  # sent
    digest: int = 0  # of what was sent
    cancelled: bool = False


@dataclass(slots=True)
class Lane:
    """One peer: its socket and the jobs that wait for it, first come first served."""

    socket: zmq.Socket[bytes]
    moved_s: float  # when the queue was last empty or got shorter
    jobs: deque[_Job] = field(default_factory=deque)


class Outbound:
    """`write` and `cancel` belong to the owner's thread, everything else to the transport's."""

    def __init__(
        self,
        context: zmq.Context[Any],
        memory: Memory,
        rows: dict[str, tuple[int, int]],
        stall_s: float,
        emit: Callable[[Event], None],
    ) -> None:
        self._context = context
        self._memory = memory
        self._rows = rows  # kind -> (rows in our arena, bytes of one)
        self._stall_s = stall_s
        self._emit = emit
        self._new: deque[_Job] = deque()
        self._jobs: dict[Key, list[_Job]] = {}  # not yet sent or dropped
        self._jobs_lock = threading.Lock()
        self._reading = threading.Lock()  # held while the arena is read: cancel() waits for it, and no read follows
        self._lanes: dict[str, Lane] = {}

    def write(self, peer: str, key: Key, spans: Sequence[Span]) -> None:
        if not (0 <= key[0] < 1 << 64 and 0 <= key[1] < 1 << 32):
            raise ValueError(f"{key}: a rid has 64 bits, an attempt 32")
        for span in spans:
            self._check(span)
        job = _Job(peer, key, list(spans), self._memory.mark())
        with self._jobs_lock:
            self._jobs.setdefault(key, []).append(job)
        self._new.append(job)

    def cancel(self, key: Key) -> None:
        with self._reading, self._jobs_lock:
            for job in self._jobs.pop(key, ()):
                job.cancelled = True

    def accept(self, now_s: float) -> None:
        """Puts what was written since the last turn into the queues."""
        while self._new:
            job = self._new.popleft()
            try:
                lane = self._lane(job.peer, now_s)
            except zmq.ZMQError as error:
                self._lose([job], f"cannot connect to {job.peer!r}: {error}")
                continue
            if not lane.jobs:
                lane.moved_s = now_s
            lane.jobs.append(job)

    def waiting(self) -> dict[zmq.Socket[bytes], Lane]:
        """The lanes that have something to send, by socket."""
        return {lane.socket: lane for lane in self._lanes.values() if lane.jobs}

    def send(self, lane: Lane, now_s: float) -> None:
        """Sends one message of the first job in a lane's queue, if it is still wanted and the pipe has room."""
        job = lane.jobs[0]
        try:
            sent = job.cancelled or self._send(lane.socket, job)
        except Exception as error:  # whatever it is (a device fault, no memory), it costs this hand-off and not the thread
            self._lose(self._jobs.get(job.key, [job]), f"cannot be sent: {type(error).__name__}: {error}")
            sent = True
        if sent:
            lane.moved_s = now_s
        if job.cancelled:
            lane.jobs.popleft()
        elif job.sent == len(job.spans):
            lane.jobs.popleft()
            self._finish(job)

    def expire(self, now_s: float) -> None:
        """Gives up on peers that took nothing for too long; closing the socket makes a later write connect afresh."""
        for peer, lane in list(self._lanes.items()):
            quiet_s = now_s - lane.moved_s
            if lane.jobs and quiet_s > self._stall_s:
                self._lose(lane.jobs, f"{peer} took nothing for {quiet_s:.1f} s")
            elif lane.jobs or quiet_s <= IDLE_S:
                continue
            lane.socket.close(linger=0)
            del self._lanes[peer]

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.socket.close(linger=0)
        self._lanes.clear()

    def _send(self, socket: zmq.Socket[bytes], job: _Job) -> bool:
        """Whether the next spans of `job`, as many as fit one message, went into the pipe or are not wanted any more."""
        spans = _first_message(job.spans, job.sent)
        with self._reading:
            if job.cancelled:
                return True
            message, digest = self._pack(job, spans)
        try:
            socket.send(message.data, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        job.sent += len(spans)
        job.num_bytes += sum(span.nbytes for span in spans)
        job.digest = combine((job.digest, digest))
        return True

    def _pack(self, job: _Job, spans: Sequence[Span]) -> tuple[Bytes, int]:
        """A message and the digest of its payload. It is a copy: once it is made the arena is not read for it again."""
        header = pack_header(job.key, [span.place for span in spans])
        message = self._memory.buffer(len(header) + sum(span.nbytes for span in spans))
        message[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        payload = message[len(header) :]
        self._memory.gather([(span.kind, span.src, span.offset, span.nbytes) for span in spans], payload, job.mark)
        digests, at = [], 0
        for span in spans:
            digests.append(span_digest(job.key, span.kind, span.dst, span.offset, payload[at : at + span.nbytes].data))
            at += span.nbytes
        return message, combine(digests)

    def _finish(self, job: _Job) -> None:
        with self._jobs_lock:
            mates = self._jobs.get(job.key, [])
            if job in mates:
                mates.remove(job)
            if not mates:
                self._jobs.pop(job.key, None)
        self._emit(Wrote(job.key, len(job.spans), job.num_bytes, job.digest))

    def _lose(self, jobs: Sequence[_Job] | deque[_Job], reason: str) -> None:
        """Drops every job of the keys that `jobs` belong to: a hand-off with a hole is of no use."""
        for key in {job.key for job in jobs if not job.cancelled}:
            with self._jobs_lock:
                for job in self._jobs.pop(key, ()):
                    job.cancelled = True
            self._emit(Lost(key, reason))

    def _lane(self, peer: str, now_s: float) -> Lane:
        if peer not in self._lanes:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing goes into the pipe of a peer that is not there: it waits here
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            try:
                socket.connect(peer)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._lanes[peer] = Lane(socket, now_s)
        return self._lanes[peer]

    def _check(self, span: Span) -> None:
        if span.kind not in self._rows:
            raise ValueError(f"{span}: kind is 'page' or 'slot'")
        count, row_bytes = self._rows[span.kind]
        if not 0 <= span.src < count or span.offset < 0 or span.nbytes < 1 or span.offset + span.nbytes > row_bytes:
            raise ValueError(f"{span} is not inside our {count} {span.kind}s of {row_bytes} bytes")
        if not 0 <= span.dst < 1 << 32:
            raise ValueError(f"{span}: a page or slot number has 32 bits")


def _first_message(spans: Sequence[Span], start: int) -> Sequence[Span]:
    """As many spans from `start` on as fit one message, one at least."""
    end, total = start + 1, spans[start].nbytes
    while end < len(spans) and end - start < MAX_SPANS and total + spans[end].nbytes <= MESSAGE_BYTES:
        total += spans[end].nbytes
        end += 1
    return spans[start:end]
