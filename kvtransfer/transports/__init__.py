"""Transports that move KV bytes between arenas; they know bytes and keys, no model and no message.

Push, into memory that the receiver has granted. A transport works beside its owner, in a process or a thread of its
own, so none of its methods waits on anything. That has one consequence which everything above is built on: memory that
a hand-off has used comes back to its owner when the transport says so (Wrote, Lost or Drained), never earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvtransfer.spans import Places, Spans

if TYPE_CHECKING:
    from kvtransfer.arena import Arena

Key = tuple[int, int]  # (rid, attempt), single-use


@dataclass(frozen=True, slots=True)
class Wrote:
    """All spans of one `write` are in the peer's memory, and ours is not read for it any more."""

    key: Key
    num_spans: int
    num_bytes: int
    digest: int  # combined over the spans


@dataclass(frozen=True, slots=True, eq=False)
class Landed:
    """These bytes are in our arena. `digest` is combined over the places."""

    key: Key
    places: Places
    digest: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing of `key` can be sent any more: what was queued is dropped, and our memory is not read for it any more.
    `corrupt`: other bytes arrived than were sent. `closed`: the peer's owner had closed the window, and knows why."""

    key: Key
    reason: str
    corrupt: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Drained:
    """The answer to `revoke` and `cancel`: nothing of `key` is written into, or read from, our memory any more."""

    key: Key


Event = Wrote | Landed | Lost | Drained


@dataclass(frozen=True, slots=True)
class Freed:
    """Said by Sender and Receiver: the memory of a hand-off that was closed is its owner's again."""

    key: Key


MAX_WRITE_SPANS = 4096  # of one `write`


@dataclass(frozen=True, slots=True)
class Link:
    """What was found out about a peer when it was first written to."""

    path: str  # "zeromq", "shm" or "cuda_ipc"; "" for a peer that speaks another version, or has another cluster key
    gb_per_s: float  # of the self-test
    reason: str  # why not the faster one, or why it is not used at all; "" when there is nothing to say
    usable: bool  # not slower than the floor that is configured
    lanes: int = 1  # connections


class Transport(Protocol):
    """One per process and arena. Methods may be called from one thread, beside the transport's own."""

    def address(self) -> str:
        """How a peer reaches this arena; goes into Grant."""
        ...

    def expect(self, key: Key, slot: int, pages: Sequence[int], seal: bytes = b"") -> None:
        """Opens the window of `key`: from now on bytes of it may land in this slot and these pages, nowhere else, and
        each only once. With a `seal` (16 or 32 secret bytes, for this key alone) only what is sealed with it.

        Raises ValueError for a number that is not a row of this arena, or is 0, and for a seal of another length.
        """
        ...

    def revoke(self, key: Key) -> None:
        """Closes the window. Drained follows, behind every Landed of `key`; also when there is no window."""
        ...

    def meet(self, peer: str, name: str) -> None:
        """Who it is that listens at `peer`: for the log, which otherwise knows its address alone."""
        ...

    def write(self, peer: str, key: Key, spans: Spans, seal: bytes = b"") -> None:
        """Queues spans for the arena that listens at `peer`; ends in one Wrote, or one Lost for all writes of `key`.

        Raises ValueError for a span outside this arena, more than MAX_WRITE_SPANS, or a seal that is none: nothing is queued
        then. A write of a key that was lost or cancelled is dropped; its Lost or Drained is the answer to it too.
        """
        ...

    def cancel(self, key: Key) -> None:
        """Drops what is queued of `key`. Drained follows, also when there is nothing; no Wrote and no Lost any more."""
        ...

    def poll(self) -> list[Event]:
        """What happened since the last call, in order. Raises RuntimeError when the transport itself has died."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something."""
        ...

    def counters(self) -> Mapping[str, int]:
        """bad_frames: dropped, because not of this protocol, never expected, or not inside their window. late_frames:
        dropped because their window had been closed, an abort's ordinary wake. refused_peers: connections that were turned
        away, for lack of the password. And what else a transport counts."""
        ...

    def links(self) -> Mapping[str, Link]:
        """By peer: those that were written to, as long as there is a connection."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """The links in numbers, for /metrics."""
        ...

    def close(self) -> None:
        """Ends the transport and frees the port. What is queued is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class BulkOptions:
    """How bulk travels. `path`: "auto" takes shared memory where the peer's arena can be mapped, or CUDA IPC where both
    arenas are on GPUs of one host, and the path passes its test."""

    path: str = "auto"  # "auto", "zeromq", "shm" or "cuda_ipc"
    lanes: int = 0  # connections to a peer over ZeroMQ; 0: as many as threads of this host can serve at a time (crew.py)
    floor_gb_per_s: float = 0.0  # a peer whose self-test is slower is not used; 0: any speed will do
    stall_s: float = 10.0  # a peer that takes nothing for so long loses what is queued for it


def open_transport(arena: Arena, host: str, advertise: str, options: BulkOptions, password: bytes = b"") -> Transport:
    """A transport for `arena`, listening on `host`; peers are told `advertise`, or `host` when that is empty. With a `password`
    only peers that show it are listened to.

    Memory of the CPU is moved by a process of its own, which the interpreter of this one cannot slow down.
    """
    from kvtransfer.transports.bulk import BulkTransport

    return BulkTransport(arena, host, advertise, options, password)
