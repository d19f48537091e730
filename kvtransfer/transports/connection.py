"""One TCP connection of the bulk engine: ZMTP that waits for nothing, out of the arena and into it without a copy in between.

What comes in is announced frame by frame, and whoever it is for says where its bytes go; they are read there by the kernel.
What goes out are views of where it lies. Bytes are shown to a digest piece by piece, right after they left or came: a piece is
in the core's cache then.
"""

from __future__ import annotations

import ipaddress
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

from kvtransfer.transports.crew import MOVE_S, Crew
from kvtransfer.transports.memory import PIECE_BYTES
from kvtransfer.transports.zmtp import (
    COMMAND,
    GREETING_BYTES,
    MAX_COMMAND_BYTES,
    MORE,
    BadPeer,
    Handshake,
    TurnedAway,
    frame_head,
    pong,
    read_head,
    refusal,
)

Show = Callable[[Any], object]
Part = tuple[Any, Show | None]  # bytes, and what is to see them once they have left
BURST_BYTES = 4 << 20  # read or written before others get their turn
MUCH_BYTES = 256 << 10  # for these a thread of the crew pays off
_SMALL_BYTES = 16 << 10  # what is read ahead of where it goes, and copied there
_MOST_ANSWERS = 256  # that the other end leaves unread: then nothing more is read of it
_MOST_VIEWS = 64  # in one call of the kernel
_MOMENT_MS = 1  # for which a thread of the crew waits for more, if nobody else waits for it
_CLOSED = "the other end has closed it"
_WASTE = bytearray(PIECE_BYTES)  # where bytes go that nobody wants
_NAMES = ThreadPoolExecutor(1, "kv-names")  # a name server may take its time

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Incoming(Protocol):
    """A message whose first frame is here."""

    def room(self, nbytes: int, more: bool) -> Iterable[Any]:
        """Where the bytes of its next frame go, views in order, `nbytes` together; `more`: there is another frame behind it."""
        ...

    def came(self, view: Any) -> None:
        """All bytes of one of those are there."""
        ...

    def end(self) -> None:
        """So is the message."""
        ...

    def lost(self) -> None:
        """It does not go on: its connection broke."""
        ...


class Nothing:
    """See `Incoming`; of no use to anybody. `then` is called when it is over."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self._then = then

    def room(self, nbytes: int, more: bool) -> Iterable[Any]:
        return waste(nbytes)

    def came(self, view: Any) -> None:
        return None

    def end(self) -> None:
        self._then()

    def lost(self) -> None:
        return None


def waste(nbytes: int) -> Iterable[Any]:
    whole, rest = divmod(nbytes, len(_WASTE))
    return [memoryview(_WASTE)] * whole + [memoryview(_WASTE)[:rest]] * bool(rest)


class Outgoing:
    """A message on its way out. `done`: none of its bytes is read any more."""

    def __init__(self) -> None:
        self.done = False


class _Leaving:
    """A piece of a message on its way out: all of it, what is left of it, and which message it is the last of."""

    __slots__ = ("ends", "show", "view", "whole")

    def __init__(self, whole: Any, show: Show | None = None) -> None:
        self.whole, self.view, self.show = whole, whole, show
        self.ends: Outgoing | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """What connections of one side have in common. `begin` is called with each message's first frame, `may_begin` before."""

    listens: bool
    password: bytes = field(repr=False)
    first_bytes: int  # of a message's first frame, at most; a longer one is read to nowhere, and begins as b""
    frame_bytes: int  # of any; a connection that announces more is closed
    begin: Callable[[Connection, bytes, bool], Incoming]
    may_begin: Callable[[], bool] = lambda: True
    crew: Crew | None = None


class Connection:
    """`broken` says why it is over, "" while it is not. What is sent before its handshake is over waits for that."""

    def __init__(self, side: Side, selector: selectors.BaseSelector) -> None:
        self.broken = ""
        self.turned_away = False  # for lack of the password, here or there
        self.up = False  # its handshake is over
        self.paused = False  # see `Side.may_begin` and _MOST_ANSWERS
        self.host = ""  # of who came in
        self._side, self._selector = side, selector
        self._socket: socket.socket | None = None
        self._name: Future[Any] | None = None  # being looked up
        self._handshake = Handshake(side.listens, side.password)
        self._greeted = False
        self._interest = 0
        self._leaving: deque[_Leaving] = deque()
        self._waiting: deque[_Leaving] = deque()  # for the handshake, or for what the crew writes
        self._lent: dict[int, Future[None]] = {}  # by direction: what the crew does
        self._small = memoryview(bytearray(_SMALL_BYTES))
        self._have = 0, 0  # of it: bytes that came and were not looked at
        self._coming: deque[tuple[memoryview, memoryview]] = deque()  # of this frame: each view, and what is missing of it
        self._message: Incoming | None = None
        self._then: Callable[[], None] | None = None  # when this frame is whole

    # --- its life

    def connect(self, address: str) -> None:
        """Raises ValueError for what is no address."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not address.startswith("tcp://") or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError("an address is tcp://HOST:PORT")
        try:
            self._open((str(ipaddress.IPv4Address(host)), int(port)))
        except ipaddress.AddressValueError:
            self._name = _NAMES.submit(socket.getaddrinfo, host, int(port), socket.AF_INET, socket.SOCK_STREAM)

    def tend(self) -> bool:
        """To be called while it is not up: the name of the other end may be known by now. Whether it is still looked up."""
        if self._name is not None and self._name.done() and not self.broken:
            found, self._name = self._name, None
            try:
                self._open(found.result()[0][4])
            except (OSError, ValueError) as error:
                self.close(f"its host is not known: {error}")
        return self._name is not None

    def adopt(self, end: socket.socket) -> None:
        """Takes over a connection that has been accepted. Raises OSError."""
        self._socket = end
        self.host = str(end.getpeername()[0])
        end.setblocking(False)
        self._begin()

    def close(self, why: str = "closed") -> None:
        """What is on its way in or out is dropped."""
        if self.broken:
            return
        self.recall(READ | WRITE)
        self.broken = why
        if self._name is not None:
            self._name.cancel()  # others wait behind it
            self._name = None
        if self._socket is not None:
            self._watch(0)
            self._socket.close()
        for leaving in (*self._leaving, *self._waiting):
            if leaving.ends is not None:
                leaving.ends.done = True
        self._leaving.clear()
        self._waiting.clear()
        self._coming.clear()
        message, self._message = self._message, None
        if message is not None:
            message.lost()

    def ready(self, events: int) -> None:
        """It can be read, or written to: does so, for as long as there is something but no longer than a burst."""
        if events & WRITE and not self.broken:
            self._safely(self._write)
        if events & READ and not self.broken and READ not in self._lent:
            self._safely(self._read)

    def _safely(self, step: Callable[[], None]) -> None:
        """What is wrong with the other end closes it."""
        try:
            step()
        except TurnedAway as error:
            self.turned_away = True
            if self._side.listens and self._greeted:
                with suppress(OSError):
                    self._end.send(refusal())
            self.close(str(error))
        except (BadPeer, OSError) as error:
            self.close(str(error) or type(error).__name__)

    def resume(self) -> bool:
        """Goes on with what it was paused for. Whether it could."""
        if not self.paused or self.broken or not self._may_begin():
            return False
        self.paused = False
        self._watch(self._interest | READ)
        self.ready(READ)
        return True

    @property
    def leaving(self) -> bool:
        """Whether something is on its way out that could not leave yet."""
        return bool(self._leaving) or WRITE in self._lent

    def _may_begin(self) -> bool:
        return self._side.may_begin() and not (self._side.listens and len(self._leaving) + len(self._waiting) >= _MOST_ANSWERS)

    def _open(self, where: tuple[str, int]) -> None:
        try:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            with suppress(BlockingIOError):
                self._socket.connect(where)
            hurry_within_a_host(self._socket, where[0])
            self._begin()
        except OSError as error:
            self.close(str(error))

    def _begin(self) -> None:
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch(READ)
        self._push(self._handshake.greeting())

    @property
    def _end(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _watch(self, events: int) -> None:
        if events == self._interest:
            return
        if not self._interest:
            self._selector.register(self._end, events, self.ready)
        elif not events:
            self._selector.unregister(self._end)
        else:
            self._selector.modify(self._end, events, self.ready)
        self._interest = events

    # --- with the crew

    def _lend(self, direction: int) -> bool:
        """Whether the crew moves what is next in this direction: it is much, its place is known, and the crew takes it."""
        crew = self._side.crew
        if crew is None or not self.up or direction in self._lent or self._next_bytes(direction) < MUCH_BYTES:
            return direction in self._lent
        future = crew.take(self, direction)
        if future is None:
            return False
        self._lent[direction] = future
        self._watch(self._interest & ~direction)
        return True

    def _next_bytes(self, direction: int) -> int:
        """Of the first few views, which are large where it matters."""
        if direction == WRITE:
            return sum(len(leaving.view) for leaving in islice(self._leaving, 4))
        return sum(len(missing) for _, missing in islice(self._coming, 4))

    def move(self, direction: int) -> None:
        """By a thread of the crew: bytes alone, in one direction. Raises what `returned` closes it for."""
        assert self._side.crew is not None
        until_s = time.monotonic() + MOVE_S
        end = select.poll()
        end.register(self._end, select.POLLOUT if direction == WRITE else select.POLLIN)
        while time.monotonic() < until_s and (self._write_on() if direction == WRITE else self._read_on()):
            if not self._side.crew.spare or not end.poll(_MOMENT_MS):
                return

    def returned(self, direction: int, future: Future[None]) -> None:
        """Goes on behind what the crew has moved. What was recalled meanwhile may be a whole frame, too."""
        if self._lent.get(direction) is future:
            self._take_back(direction)
            self._safely(future.result)
        if direction == READ and READ not in self._lent and not self.broken and not self.paused:
            self._safely(self._parse)

    def recall(self, directions: int) -> None:
        """Waits for the crew, MOVE_S at most."""
        for direction, future in list(self._lent.items()):
            if direction & directions:
                if not future.cancel():
                    future.exception()
                self._take_back(direction)

    def _take_back(self, direction: int) -> None:
        del self._lent[direction]
        if direction == WRITE:
            self._leaving += self._waiting
            self._waiting.clear()
        self._watch(self._interest | (READ if direction == READ else WRITE if self._leaving else 0))

    # --- out

    def send(self, header: bytes, frames: Sequence[Sequence[Part]] = ()) -> Outgoing:
        """Queues a message, its frames in parts; what can leave now leaves now. Parts are left as they are until it is done."""
        message = Outgoing()
        if self.broken:
            message.done = True
            return message
        queue = self._leaving if self.up and WRITE not in self._lent else self._waiting
        head = frame_head(len(header), MORE if frames else 0) + header
        for index, parts in enumerate(frames, 1):
            head += frame_head(sum(len(data) for data, _ in parts), MORE if index < len(frames) else 0)
            queue.append(_Leaving(memoryview(head)))
            queue += [_Leaving(piece, show) for data, show in parts for piece in (pieces(data) if show else [_view(data)])]
            head = b""
        if head:
            queue.append(_Leaving(memoryview(head)))
        queue[-1].ends = message
        if queue is self._leaving:
            self.ready(WRITE)
        return message

    def _push(self, data: bytes) -> None:
        """Of the handshake."""
        if data:
            self._leaving.append(_Leaving(memoryview(data)))
            self._write()

    def _write(self) -> None:
        if not self._lend(WRITE):
            self._write_on()
            self._watch(self._interest & ~WRITE | (WRITE if self._leaving else 0))

    def _write_on(self) -> bool:
        """A burst. Whether there is more."""
        budget = BURST_BYTES
        while self._leaving and budget > 0:
            views, size = [], 0
            for leaving in islice(self._leaving, _MOST_VIEWS):
                views.append(leaving.view)
                size += len(leaving.view)
                if size >= PIECE_BYTES:
                    break
            try:
                sent = self._end.sendmsg(views)
            except BlockingIOError:
                break
            budget -= sent
            self._left(sent)
            if sent < size:
                break
        return bool(self._leaving)

    def _left(self, nbytes: int) -> None:
        while self._leaving and nbytes >= len(self._leaving[0].view):
            leaving = self._leaving.popleft()
            nbytes -= len(leaving.view)
            if leaving.show is not None:
                leaving.show(leaving.whole)
            if leaving.ends is not None:
                leaving.ends.done = True
        if nbytes:
            self._leaving[0].view = self._leaving[0].view[nbytes:]

    # --- in

    def divert(self) -> None:
        """Nothing more of the message that comes in is wanted: its room is not written to any more. Its `end` is called all the
        same."""
        self.recall(READ)
        assert self._message is not None
        self._message = Nothing(self._message.end)
        self._expect(waste(sum(len(missing) for _, missing in self._coming)))

    def _expect(self, views: Iterable[Any]) -> None:
        self._coming = deque((view, memoryview(view)) for view in views if len(view))

    def _read(self) -> None:
        self._parse()  # what a pause left
        budget = BURST_BYTES
        while budget > 0 and not self.broken and not self.paused and not self._lend(READ):
            begin, end = self._have
            views, room = self._next_room()
            if begin:
                self._small[: end - begin] = bytes(self._small[begin:end])
            self._have = 0, end - begin
            views.append(self._small[end - begin :])
            try:
                came = self._end.recvmsg_into(views if len(views) > len(self._coming) else views[:-1])[0]
            except BlockingIOError:
                return
            if not came:
                raise BadPeer(_CLOSED)
            budget -= came if came >= MUCH_BYTES else BURST_BYTES // 4  # of small messages it is their number that takes time
            direct = min(came, room)
            self._have = 0, end - begin + came - direct
            self._arrived(direct)
            self._parse()
            if came < room:
                return

    def _read_on(self) -> bool:
        """A burst, of this frame at most. Whether there is more of it."""
        budget = BURST_BYTES
        while budget > 0 and self._coming:
            try:
                came = self._end.recvmsg_into(self._next_room()[0])[0]
            except BlockingIOError:
                break
            if not came:
                raise BadPeer(_CLOSED)
            budget -= came
            self._arrived(came)
        return bool(self._coming)

    def _next_room(self) -> tuple[list[memoryview], int]:
        """Of this frame: where the next bytes go, a piece or a little more, and how many they are."""
        views, room = [], 0
        for _, missing in islice(self._coming, _MOST_VIEWS):
            views.append(missing)
            room += len(missing)
            if room >= PIECE_BYTES:
                break
        return views, room

    def _arrived(self, nbytes: int) -> None:
        while nbytes:
            view, missing = self._coming[0]
            if nbytes < len(missing):
                self._coming[0] = view, missing[nbytes:]
                return
            nbytes -= len(missing)
            self._coming.popleft()
            if self._message is not None:
                self._message.came(view)

    def _parse(self) -> None:
        """What was read ahead."""
        while not self.broken:
            begin, end = self._have
            if self._coming:
                missing = self._coming[0][1]
                here = min(end - begin, len(missing))
                if not here:
                    return
                missing[:here] = self._small[begin : begin + here]
                self._have = begin + here, end
                self._arrived(here)
            elif self._then is not None:
                then, self._then = self._then, None
                then()
            elif not self._look(self._small[begin:end]):
                return

    def _look(self, data: memoryview) -> bool:
        """At what comes next, a greeting or a frame; False when more of it is needed."""
        if not self._greeted:
            return self._look_at_greeting(data)
        if data and self.up and self._message is None and not self._may_begin():
            self.paused = True
            self._watch(self._interest & ~READ)
            return False
        head = read_head(data)
        if head is None:
            return False
        flags, nbytes, head_bytes = head
        self._skip(head_bytes)
        if nbytes > (MAX_COMMAND_BYTES if flags & COMMAND else self._side.frame_bytes):
            raise BadPeer(f"a frame of {nbytes} bytes")
        if flags & COMMAND:
            self._whole(nbytes, self._command)
        elif not self.up:
            raise BadPeer("a message before the handshake is over")
        elif self._message is not None:
            self._expect(self._message.room(nbytes, bool(flags & MORE)))
            self._then = partial(self._frame_over, bool(flags & MORE))
        elif nbytes <= self._side.first_bytes:
            self._whole(nbytes, partial(self._begun, bool(flags & MORE)))
        else:
            self._expect(waste(nbytes))
            self._then = partial(self._begun, bool(flags & MORE), b"")
        return True

    def _look_at_greeting(self, data: memoryview) -> bool:
        if data and data[0] != 0xFF:
            raise BadPeer("no greeting of ZMTP")
        if len(data) < GREETING_BYTES:
            return False
        self._skip(GREETING_BYTES)
        reply = self._handshake.greeted(bytes(data[:GREETING_BYTES]))
        self._greeted = True
        self._push(reply)
        return True

    def _skip(self, nbytes: int) -> None:
        self._have = self._have[0] + nbytes, self._have[1]

    def _whole(self, nbytes: int, then: Callable[[bytes], None]) -> None:
        """`then` is called with all bytes of this frame."""
        data = bytearray(nbytes)
        self._expect([data])
        self._then = lambda: then(bytes(data))

    def _command(self, command: bytes) -> None:
        if self.up:
            if not self.leaving:  # else that answers too; who asks and reads nothing costs no memory
                self._push(pong(command))
            return
        self._push(self._handshake.hear(command))
        if self._handshake.over:
            self.up = True
            self._leaving += self._waiting
            self._waiting.clear()
            self._write()

    def _begun(self, more: bool, header: bytes) -> None:
        self._message = self._side.begin(self, header, more)
        if not more:
            self._frame_over(more)

    def _frame_over(self, more: bool) -> None:
        if not more and self._message is not None:
            message, self._message = self._message, None
            message.end()


def hurry_within_a_host(end: socket.socket, host: str) -> None:
    """For a connection that is being made to `host`, an IPv4 address: BBR, where that is the kernel's choice, would pace it to
    half of what loopback could carry."""
    if end.getsockname()[0] == host:
        with suppress(OSError):  # where it is not allowed to choose
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def pieces(data: Any) -> list[Any]:
    """Views of `data`, as long as digests like them."""
    view = _view(data)
    return [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]


def _view(data: Any) -> Any:
    """That copies nothing when it is cut."""
    return memoryview(data) if isinstance(data, (bytes, bytearray)) else data
