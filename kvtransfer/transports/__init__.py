"""Transports that move KV bytes between arenas; they know bytes and keys, no model and no message.

Push, into memory that the receiver has granted: that one shape fits sockets, shared memory and RDMA. A transport has
its own thread for bulk, so none of its methods waits on a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvtransfer.arena import Arena

Key = tuple[int, int]  # (rid, attempt), single-use
Place = tuple[str, int, int, int]  # kind ("page" or "slot"), number in the destination's arena, offset, nbytes


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` bytes at `offset` of our page or slot `src`, which go to the same offset of the peer's `dst`."""

    kind: str  # "page" or "slot"
    src: int
    dst: int
    offset: int
    nbytes: int

    @property
    def place(self) -> Place:
        return (self.kind, self.dst, self.offset, self.nbytes)


@dataclass(frozen=True, slots=True)
class Wrote:
    """All spans of one `write` have left the arena, which may change again. Not proof that they have landed."""

    key: Key
    num_spans: int
    num_bytes: int
    digest: int  # combined over the spans


@dataclass(frozen=True, slots=True)
class Landed:
    """These bytes are in our arena. `digest` is combined over the places."""

    key: Key
    places: tuple[Place, ...]
    digest: int


@dataclass(frozen=True, slots=True)
class Lost:
    """What was queued of `key` can not be sent and has been dropped."""

    key: Key
    reason: str


Event = Wrote | Landed | Lost


class Transport(Protocol):
    """One per process and arena. Methods may be called from one thread, beside the transport's own."""

    @property
    def bad_frames(self) -> int:
        """Frames that were dropped: not of this protocol, never expected, or not inside their window."""
        ...

    @property
    def late_frames(self) -> int:
        """Frames that were dropped because their window had been closed: an abort's ordinary wake."""
        ...

    def address(self) -> str:
        """How a peer reaches this arena; goes into Grant."""
        ...

    def expect(self, key: Key, slot: int, pages: Sequence[int]) -> None:
        """Opens the window of `key`: from now on bytes of it may land in this slot and these pages, nowhere else.

        Raises ValueError for a number that is not a row of this arena, or is 0.
        """
        ...

    def revoke(self, key: Key) -> None:
        """Closes the window; after it returns no byte of `key` can land any more. No error when there is none."""
        ...

    def write(self, peer: str, key: Key, spans: Sequence[Span]) -> None:
        """Queues spans for the arena that listens at `peer`; ends in one Wrote or Lost. Never waits.

        Raises ValueError for a span outside this arena: nothing is queued then.
        """
        ...

    def cancel(self, key: Key) -> None:
        """Drops what is queued of `key`; after it returns the arena is not read for it any more."""
        ...

    def poll(self) -> list[Event]:
        """What happened since the last call, in order."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something."""
        ...

    def close(self) -> None:
        """Ends the thread and frees the port. What is queued is dropped."""
        ...


def open_transport(name: str, context: Any, arena: Arena, host: str, advertise: str) -> Transport:
    """The transport called `name`, listening on `host`; peers are told `advertise`, or `host` when that is empty.

    Raises ValueError for a name that there is no transport of.
    """
    if name == "zeromq":
        from kvtransfer.transports.zeromq import ZeroMQTransport

        return ZeroMQTransport(context, arena, host, advertise)
    raise ValueError(f"no transport is called {name!r}; there is 'zeromq'")
