"""ZMTP as bulk speaks it: its bytes, our connections with raw ends and with libzmq's, and chunks read to their places."""

from __future__ import annotations

import errno
import logging
import random
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.auth.thread import ThreadAuthenticator

from kvtransfer.digest import combine, span_digest
from kvtransfer.transports import Drained, Landed
from kvtransfer.transports.connection import Connection, Incoming, Outgoing, Side, hurry_within_a_host
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.cuda import CudaMemory
from kvtransfer.transports.frame import (
    CHUNK_BYTES,
    LANDED,
    LATE,
    MAX_HEADER_BYTES,
    REFUSED,
    STRAIGHT_BYTES,
    pack_chunk,
    unpack_ack,
    unpack_chunk,
)
from kvtransfer.transports.inbound import Inbound
from kvtransfer.transports.memory import PIECE_BYTES, CpuMemory, Memory
from kvtransfer.transports.port import HANDSHAKE_S, Port
from kvtransfer.transports.seal import TAG_BYTES, Seal, new_secret
from kvtransfer.transports.zmtp import COMMAND, MORE, BadPeer, Handshake, TurnedAway, frame_head, read_head
from tests.transfer_rig import DRIVER, PATIENCE_S, HostStream, Place, header, small_arena, table, thread_transport
from tests.transfer_rig import Span as PageSpan

PASSWORD, WRONG = b"a password", b"another one"
MOST_BYTES = 4 << 20  # of a frame, here


# --- zmtp.py


@pytest.mark.parametrize("flags", [0, MORE, COMMAND])
@pytest.mark.parametrize(
    ("nbytes", "head"),
    [
        (0, b"\0\0"),
        (255, b"\0\xff"),
        (256, b"\2" + bytes(6) + b"\1\0"),
        (2**63, b"\2\x80" + bytes(7)),
    ],
    ids=["0", "255", "256", "2^63"],
)
def test_a_head_says_how_long_its_frame_is(nbytes: int, head: bytes, flags: int) -> None:
    made = frame_head(nbytes, flags)
    assert made == bytes([head[0] | flags]) + head[1:]
    assert [read_head(memoryview(made)[:cut]) for cut in range(len(made))] == [None] * len(made)
    assert read_head(memoryview(made + b"\7what follows")) == (flags, nbytes, len(made))


def test_a_short_frame_may_have_a_long_head() -> None:
    assert read_head(memoryview(struct.pack(">BQ", 3, 5))) == (MORE, 5, 9)


def test_flags_that_no_frame_has_are_noticed_at_once() -> None:
    for flags in range(256):
        if flags in (0, 1, 2, 3, 4, 6):
            assert read_head(memoryview(bytes([flags]))) is None
        else:
            with pytest.raises(BadPeer):
                read_head(memoryview(bytes([flags])))


def short(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def kind(name: bytes, label: bytes = b"Socket-Type") -> bytes:
    """Properties that say what a socket is."""
    return short(label) + struct.pack(">I", len(name)) + name


HELLO = short(b"HELLO") + short(b"member") + short(PASSWORD)
WELCOME = short(b"WELCOME")
INITIATE, READY = short(b"INITIATE") + kind(b"DEALER"), short(b"READY") + kind(b"DEALER")
FROM_ROUTER = short(b"READY") + kind(b"ROUTER")


def command_of(data: bytes) -> bytes:
    """The one command that these bytes are."""
    head = read_head(memoryview(data))
    assert head is not None and head[0] == COMMAND and head[1] + head[2] == len(data)
    return data[head[2] :]


def shake(listener: Handshake, connector: Handshake) -> list[bytes]:
    """Passes what each says to the other until both are silent: the names of the commands."""
    names = []
    said = deque(
        [
            (connector, listener.greeted(connector.greeting())),
            (listener, connector.greeted(listener.greeting())),
        ]
    )
    while said:
        hearer, data = said.popleft()
        if data:
            command = command_of(data)
            names.append(command[1 : 1 + command[0]])
            said.append((connector if hearer is listener else listener, hearer.hear(command)))
    return names


@pytest.mark.parametrize(
    ("password", "names"),
    [(b"", [b"READY", b"READY"]), (PASSWORD, [b"HELLO", b"WELCOME", b"INITIATE", b"READY"])],
    ids=["NULL", "PLAIN"],
)
def test_both_sides_shake_hands(password: bytes, names: list[bytes]) -> None:
    listener, connector = Handshake(True, password), Handshake(False, password)
    assert shake(listener, connector) == names
    assert listener.over and connector.over


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("password", [b"", PASSWORD], ids=["NULL", "PLAIN"])
def test_a_greeting_is_that_of_the_specification(listens: bool, password: bytes) -> None:
    mechanism = b"PLAIN" if password else b"NULL"
    as_server = b"\1" if listens and password else b"\0"
    wanted = b"\xff" + bytes(7) + b"\1\x7f" + b"\3\0" + mechanism.ljust(20, b"\0") + as_server + bytes(31)
    assert Handshake(listens, password).greeting() == wanted


@pytest.mark.parametrize(
    "greeting",
    [
        b"\0" + Handshake(False, b"").greeting()[1:],
        Handshake(False, b"").greeting().replace(b"\x7f", b"\x7e"),
        Handshake(False, b"").greeting().replace(b"\x7f\3", b"\x7f\1"),
    ],
    ids=["signature's begin", "signature's end", "ZMTP 2"],
)
def test_what_is_no_greeting_is_refused(greeting: bytes) -> None:
    with pytest.raises(BadPeer):
        Handshake(True, b"").greeted(greeting)


def test_a_greeting_of_a_later_version_will_do() -> None:
    assert Handshake(True, b"").greeted(Handshake(False, b"").greeting().replace(b"\3\0NULL", b"\3\1NULL"))


@pytest.mark.parametrize("passwords", [(b"", PASSWORD), (PASSWORD, b"")], ids=["asks for none", "shows none"])
def test_who_has_no_password_and_who_has_one_turn_each_other_away(passwords: tuple[bytes, bytes]) -> None:
    listener, connector = Handshake(True, passwords[0]), Handshake(False, passwords[1])
    for hearer, other in ((listener, connector), (connector, listener)):
        with pytest.raises(TurnedAway):
            hearer.greeted(other.greeting())


def test_a_wrong_password_is_turned_away() -> None:
    listener = Handshake(True, PASSWORD)
    with pytest.raises(TurnedAway):
        shake(listener, Handshake(False, WRONG))
    assert not listener.over


def heard(listens: bool, password: bytes, commands: list[bytes]) -> Handshake:
    """A handshake that has heard these, none of which it minds."""
    handshake = Handshake(listens, password)
    handshake.greeted(Handshake(not listens, password).greeting())
    for command in commands:
        handshake.hear(command)
    return handshake


@pytest.mark.parametrize(
    ("listens", "password", "before", "command"),
    [
        (True, b"", [READY], READY),
        (True, b"", [], HELLO),
        (True, b"", [], INITIATE),
        (False, b"", [FROM_ROUTER], FROM_ROUTER),
        (True, PASSWORD, [], INITIATE),
        (True, PASSWORD, [], READY),
        (True, PASSWORD, [], WELCOME),
        (True, PASSWORD, [HELLO], HELLO),
        (True, PASSWORD, [HELLO], READY),
        (True, PASSWORD, [HELLO, INITIATE], INITIATE),
        (True, PASSWORD, [HELLO, INITIATE], HELLO),
        (False, PASSWORD, [], FROM_ROUTER),
        (False, PASSWORD, [], HELLO),
        (False, PASSWORD, [WELCOME], WELCOME),
        (False, PASSWORD, [WELCOME], INITIATE),
        (False, PASSWORD, [WELCOME, FROM_ROUTER], FROM_ROUTER),
        (True, b"", [], b""),
        (True, b"", [], b"\xffREADY"),
        (True, b"", [], short(b"ready") + kind(b"DEALER")),
    ],
    ids=str,
)
def test_a_command_out_of_order_is_refused(listens: bool, password: bytes, before: list[bytes], command: bytes) -> None:
    handshake = heard(listens, password, before)
    over = handshake.over
    with pytest.raises(BadPeer):
        handshake.hear(command)
    assert handshake.over == over


@pytest.mark.parametrize("before", [[], [WELCOME]], ids=["at once", "then"])
@pytest.mark.parametrize("error", [short(b"ERROR"), b"^RROR"], ids=["as it should be", "as libzmq spells it"])
def test_an_error_turns_us_away(before: list[bytes], error: bytes) -> None:
    with pytest.raises(TurnedAway):
        heard(False, PASSWORD, before).hear(error + short(b"400"))


FITS = {True: (b"DEALER",), False: (b"DEALER", b"ROUTER")}  # by who listens


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("name", [b"DEALER", b"ROUTER", b"REQ", b"PUB", b"dealer", b""], ids=repr)
def test_only_sockets_that_fit_shake_hands(listens: bool, name: bytes) -> None:
    """However the property's name is written."""
    for label in (b"Socket-Type", b"socket-type", b"SOCKET-TYPE"):
        for password, before, command in ((b"", [], b"READY"), (PASSWORD, [HELLO], b"INITIATE")):
            if password and not listens:
                before, command = [WELCOME], b"READY"
            handshake = heard(listens, password, before)
            with suppress(BadPeer):
                handshake.hear(short(command) + kind(b"no", b"X-Other") + kind(name, label))
            assert handshake.over == (name in FITS[listens])


def test_properties_that_are_cut_short_are_refused() -> None:
    longer = READY + kind(b"a value", b"X-Other")
    for cut in range(len(longer)):
        handshake = heard(True, b"", [])
        with suppress(BadPeer):
            handshake.hear(longer[:cut])
        assert handshake.over == (cut == len(READY))
    assert heard(True, b"", [longer]).over


some_command = st.binary(max_size=40) | st.builds(
    bytes.__add__,
    st.sampled_from([b"READY", b"HELLO", b"WELCOME", b"INITIATE", b"ERROR", b"PING"]).map(short),
    st.binary(max_size=40) | st.builds(lambda cut, at, byte: READY[6:cut][:at] + byte, *[st.integers(0, 40)] * 2, st.binary()),
)
some_greeting = st.binary(min_size=64, max_size=64) | st.builds(
    lambda password, at, byte: (greeting := Handshake(False, password).greeting())[:at] + byte + greeting[at + 1 :],
    st.sampled_from([b"", PASSWORD]),
    st.integers(0, 63),
    st.binary(min_size=1, max_size=1),
)


@given(st.booleans(), st.sampled_from([b"", PASSWORD]), some_greeting, st.lists(some_command, max_size=5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_bad_peer_at_worst(
    listens: bool, password: bytes, greeting: bytes, commands: list[bytes], member: bool
) -> None:
    """And nobody is a member who does not show the password."""
    handshake = heard(listens, password, [HELLO if listens else WELCOME] if password and member else [])
    with suppress(BadPeer):
        Handshake(listens, password).greeted(greeting)
    for command in commands:
        with suppress(BadPeer):
            handshake.hear(command)
        with suppress(BadPeer):
            read_head(memoryview(command))
    assert not handshake.over or member or not password


# --- what the tests of connections share


class Loop:
    """What an engine does for its connections."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.tends: list[Callable[[], object]] = []
        self.closes: list[Callable[[], object]] = [self.selector.close]

    def turn(self, timeout_s: float = 0.0) -> bool:
        """Whether there was anything to do."""
        ready = self.selector.select(timeout_s) if self.selector.get_map() else []
        for key, events in ready:
            key.data(events)
        for tend in self.tends:
            tend()
        return bool(ready)

    def until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, "in vain"
            self.turn(0.002)

    def quiet(self) -> None:
        """Turns until there is nothing to do."""
        self.until(lambda: not self.turn())

    def close(self) -> None:
        for close in reversed(self.closes):
            close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Heard:
    """An `Incoming` that keeps its frames, each in views of `view_bytes`."""

    def __init__(self, first: bytes, more: bool, view_bytes: int) -> None:
        self.frames: list[bytes | bytearray] = [first]
        self.view_bytes = view_bytes
        self.missing: deque[memoryview] = deque()
        self.more, self.diverted = more, False
        self.ends = self.losses = 0

    def room(self, nbytes: int, more: bool) -> list[memoryview]:
        assert self.more and not self.missing and not self.diverted
        self.more, frame = more, bytearray(nbytes)
        self.frames.append(frame)
        views = [memoryview(frame)[at : at + self.view_bytes] for at in range(0, nbytes, self.view_bytes)]
        self.missing += views
        return views

    def came(self, view: memoryview) -> None:
        assert not self.diverted and view is self.missing.popleft()

    def end(self) -> None:
        assert self.diverted or not (self.missing or self.more)
        self.ends += 1

    def lost(self) -> None:
        self.losses += 1


class Ear:
    """What the connections of a side bring, in order."""

    def __init__(self, listens: bool = True, password: bytes = b"", view_bytes: int = 100_000, first_bytes: int = MOST_BYTES):
        self.messages: list[Heard] = []
        self.speakers: list[Connection] = []  # whose they are
        self.open = True
        self._view_bytes = view_bytes
        self.side = Side(listens, password, first_bytes, MOST_BYTES, self._begin, lambda: self.open)

    @property
    def whole(self) -> list[list[bytes]]:
        return [[bytes(frame) for frame in message.frames] for message in self.messages if message.ends]

    def _begin(self, connection: Connection, first: bytes, more: bool) -> Incoming:
        assert self.open
        self.messages.append(Heard(first, more, self._view_bytes))
        self.speakers.append(connection)
        return self.messages[-1]


def said_by(handshake: Handshake) -> bytes:
    """All that one side says to shake hands without a password."""
    return handshake.greeting() + handshake.greeted(Handshake(True, b"").greeting())


def framed(frames: list[bytes], long: bool = False) -> bytes:
    """A message on the wire. `long`: with long heads, also where they need not be."""
    data = b""
    for index, frame in enumerate(frames, 1):
        more = index < len(frames)
        head = struct.pack(">BQ", 2 | more, len(frame)) if long or len(frame) > 255 else struct.pack(">BB", more, len(frame))
        data += head + frame
    return data


def command(data: bytes) -> bytes:
    return struct.pack(">BB", COMMAND, len(data)) + data


class Raw:
    """The other end of a connection of ours that listens, byte for byte. It greets, and says that it is a DEALER."""

    def __init__(self, loop: Loop, side: Side, end: type[socket.socket] = socket.socket, greets: bool = True) -> None:
        self.loop = loop
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.socket = socket.create_connection(listener.getsockname())
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what it is fed leaves at once
            accepted, _ = listener.accept()
        self.socket.setblocking(False)
        self.end = end(fileno=accepted.detach())
        self.connection = Connection(side, loop.selector)
        self.connection.adopt(self.end)
        self.received = bytearray()
        loop.closes += [self.socket.close, self.connection.close]
        if greets:
            self.feed(said_by(Handshake(False, b"")))
            loop.until(lambda: self.connection.up)

    def feed(self, data: bytes) -> None:
        unsent = memoryview(data)

        def sent() -> bool:
            nonlocal unsent
            with suppress(BlockingIOError):
                unsent = unsent[self.socket.send(unsent) :]
            return not unsent

        self.loop.until(sent)
        self.loop.turn()

    def take(self) -> bytearray:
        """All that has been said to it."""
        with suppress(BlockingIOError):
            while more := self.socket.recv(1 << 20):
                self.received += more
        return self.received

    def frames(self) -> list[bytes]:
        """What has been said to it behind the handshake."""
        self.take()
        at, found = len(said_by(Handshake(True, b""))), []
        while (head := read_head(memoryview(self.received)[at:])) and at + head[1] + head[2] <= len(self.received):
            found.append(bytes(self.received[at + head[2] : at + head[1] + head[2]]))
            at += head[1] + head[2]
        return found


# --- with libzmq


def letters() -> list[list[bytes]]:
    """Messages of 1, 2, and 65 frames."""
    data, sizes = random.Random(7).randbytes((3 << 20) + 64), (0, 1, 255, 256, 70_000, 3 << 20)
    ones = [[data[:nbytes]] for nbytes in sizes]
    twos = [[data[1 : 1 + nbytes], data[2 : 2 + other]] for nbytes in (1, 256) for other in sizes]
    many = [data[at : at + sizes[at % 5]] for at in range(64)] + [data[64:]]
    return [*ones, *twos, many, [b"the end"]]


def queue(connection: Connection, frames: list[bytes]) -> Outgoing:
    return connection.send(frames[0], [[(frame, None)] for frame in frames[1:]])


def dealer_to(context: zmq.Context[Any], port: int, password: bytes = b"") -> zmq.Socket[bytes]:
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    if password:
        dealer.setsockopt(zmq.PLAIN_USERNAME, b"member")
        dealer.setsockopt(zmq.PLAIN_PASSWORD, password)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    return dealer


def opened(loop: Loop, side: Side, counters: Counters | None = None) -> tuple[Port, int]:
    port = Port(side, loop.selector, counters or Counters())
    number = port.listen("127.0.0.1")
    loop.tends.append(lambda: port.tend(time.monotonic()))
    loop.closes.append(port.close)
    return port, number


@pytest.mark.parametrize("password", [b"", PASSWORD], ids=["NULL", "PLAIN"])
def test_a_dealer_of_libzmq_comes_in(loop: Loop, context: zmq.Context[Any], password: bytes) -> None:
    ear = Ear(password=password)
    _, number = opened(loop, ear.side)
    dealer, sent = dealer_to(context, number, password), letters()
    for frames in sent:
        dealer.send_multipart(frames)
    loop.until(lambda: len(ear.whole) == len(sent))
    assert ear.whole == sent and {*ear.speakers} == {ear.speakers[0]}
    messages, got = [queue(ear.speakers[0], frames) for frames in sent], list[list[bytes]]()
    while len(got) < len(sent):
        loop.until(lambda: dealer.poll(0))
        got.append(dealer.recv_multipart())
    assert got == sent and all(message.done for message in messages)


@pytest.fixture
def router(context: zmq.Context[Any]) -> Iterator[Callable[[bytes], tuple[zmq.Socket[bytes], str]]]:
    """Opens one, and says where it listens."""
    gate = ThreadAuthenticator(context)
    gate.start()
    gate.configure_plain(domain="*", passwords={"member": PASSWORD.decode()})

    def build(password: bytes) -> tuple[zmq.Socket[bytes], str]:
        router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.PLAIN_SERVER, bool(password))
        return router, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

    yield build
    gate.stop()


def connected(loop: Loop, ear: Ear, address: str) -> Connection:
    connection = Connection(ear.side, loop.selector)
    connection.connect(address)
    loop.tends.append(connection.tend)
    loop.closes.append(connection.close)
    return connection


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("password", [b"", PASSWORD], ids=["NULL", "PLAIN"])
def test_a_router_of_libzmq_is_connected_to(loop: Loop, router: Any, password: bytes, host: str) -> None:
    ear, (server, address) = Ear(False, password), router(password)
    connection, sent = connected(loop, ear, address.replace("127.0.0.1", host)), letters()
    messages, got = [queue(connection, frames) for frames in sent], list[list[bytes]]()
    while len(got) < len(sent):
        loop.until(lambda: server.poll(0))
        who, *frames = server.recv_multipart()
        got.append(frames)
    assert got == sent and all(message.done for message in messages)
    for frames in sent:
        server.send_multipart([who, *frames])
    loop.until(lambda: len(ear.whole) == len(sent))
    assert ear.whole == sent and connection.up and not connection.broken


@pytest.mark.parametrize("shown", [b"", WRONG], ids=["none", "another"])
def test_a_dealer_without_the_password_is_turned_away_counted_and_named(
    loop: Loop, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shown: bytes
) -> None:
    monkeypatch.setattr("wire.curve.WARN_AFTER_S", 0.0)
    ear, counters = Ear(password=PASSWORD), Counters()
    _, number = opened(loop, ear.side, counters)
    stranger = dealer_to(context, number, shown)
    stranger.send(b"let me in")
    with caplog.at_level(logging.WARNING):
        loop.until(lambda: counters.read()["refused_peers"] and caplog.messages)
    named = ", some from 127.0.0.1" if shown else ""  # without one it goes by itself, perhaps before we know why
    assert f"turned away at tcp://127.0.0.1:{number}: 1{named}" in caplog.messages[0]
    stranger.close(linger=0)
    friend = dealer_to(context, number, PASSWORD)
    friend.send(b"it is me")
    loop.until(lambda: ear.messages)
    assert ear.whole == [[b"it is me"]]


def test_who_is_turned_away_is_told_so_by_our_port(loop: Loop, context: zmq.Context[Any]) -> None:
    """By what libzmq takes for a refusal, and not for a connection that broke."""
    _, number = opened(loop, Ear(password=PASSWORD).side)
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    refusals = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # the latter, see `_ERROR_OF_LIBZMQ`
    events = dealer.get_monitor_socket(refusals)
    dealer.setsockopt(zmq.PLAIN_USERNAME, b"member")
    dealer.setsockopt(zmq.PLAIN_PASSWORD, WRONG)
    dealer.connect(f"tcp://127.0.0.1:{number}")
    loop.until(lambda: events.poll(0))
    dealer.disable_monitor()


def test_a_router_that_takes_another_password_turns_us_away(loop: Loop, router: Any) -> None:
    server, address = router(PASSWORD)
    connection = connected(loop, Ear(False, WRONG), address)
    message = connection.send(b"let me in")
    loop.until(lambda: connection.broken)
    assert connection.turned_away and not connection.up and message.done and not server.poll(0)


@pytest.mark.parametrize(("theirs", "ours"), [(PASSWORD, b""), (b"", PASSWORD)], ids=["asks for one", "asks for none"])
def test_a_router_and_we_do_not_talk_if_one_has_no_password(loop: Loop, router: Any, theirs: bytes, ours: bytes) -> None:
    """It closes the connection before it has said more than that it speaks ZMTP."""
    server, address = router(theirs)
    connection = connected(loop, Ear(False, ours), address)
    message = connection.send(b"let me in")
    loop.until(lambda: connection.broken)
    assert not connection.up and message.done and not server.poll(0)


HEARTBEAT_MS, DEAD_MS = 50, 700


def test_libzmq_does_not_take_a_quiet_connection_for_a_dead_one(loop: Loop, context: zmq.Context[Any], router: Any) -> None:
    """It asks with PING, and drops who does not answer; on either side."""
    listening, connecting = Ear(), Ear(False)
    _, number = opened(loop, listening.side)
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    server, address = router(b"")
    for each in (dealer, server):
        each.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        each.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_MS)
    server.bind_to_random_port("tcp://127.0.0.1")  # one whose options are these
    address = server.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    dealer.connect(f"tcp://127.0.0.1:{number}")
    connection = connected(loop, connecting, address)
    connection.send(b"first")
    dealer.send(b"first")
    loop.until(lambda: listening.messages and server.poll(0))
    quiet_until_s = time.monotonic() + 2.2 * DEAD_MS / 1000
    loop.until(lambda: time.monotonic() > quiet_until_s)
    dealer.send(b"second")
    connection.send(b"second")
    server.recv_multipart()
    loop.until(lambda: len(listening.messages) == 2 and server.poll(0))
    assert {*listening.speakers} == {listening.speakers[0]} and not listening.speakers[0].broken and not connection.broken
    server.send_multipart([server.recv_multipart()[0], b"third"])
    loop.until(lambda: connecting.whole == [[b"third"]])


# --- a connection and a raw end


def test_a_ping_is_answered_with_its_context_and_nothing_else_is(loop: Loop) -> None:
    raw = Raw(loop, Ear().side)
    for context, answer in ((b"", b""), (b"context", b"context"), (b"x" * 16, b"x" * 16), (b"x" * 17, b"x" * 16)):
        raw.received.clear()
        raw.feed(command(b"\4PING\0\5" + context) + command(b"\4PONG") + command(b"\4PINK\0\5") + command(b""))
        loop.quiet()
        loop.until(lambda: b"PONG" in raw.take())
        assert raw.received.endswith(command(b"\4PONG" + answer)) and raw.received.count(b"PONG") == 1


def test_who_asks_and_asks_and_reads_nothing_costs_no_memory(loop: Loop) -> None:
    raw = Raw(loop, Ear().side)
    raw.connection.send(b"", [[(bytes(64 << 20), None)]])  # more than lies between us
    loop.until(lambda: not loop.turn())
    waiting = len(raw.connection._leaving)
    raw.feed(command(b"\4PING\0\5") * 100)
    loop.quiet()
    assert 0 < len(raw.connection._leaving) <= waiting


frame_bytes = st.integers(0, 5) | st.integers(250, 260) | st.integers(0, 3000) | st.sampled_from([16 << 10, 16_385, 40_000])
some_messages = st.lists(st.lists(frame_bytes, min_size=1, max_size=5), min_size=1, max_size=5)
some_segments = st.lists(st.integers(1, 12) | st.integers(1, 20_000), min_size=1, max_size=8)


def filled(sizes: list[list[int]]) -> list[list[bytes]]:
    source = random.Random(str(sizes))
    return [[source.randbytes(nbytes) for nbytes in frames] for frames in sizes]


def cut(data: bytes, segments: list[int]) -> Iterator[bytes]:
    """In segments of these lengths, again and again, but not without end."""
    for nbytes in islice(cycle(segments), 300):
        yield data[:nbytes]
        data = data[nbytes:]
    yield data


@given(some_messages, some_segments, st.sampled_from([7, 256, 5000, 100_000]), st.booleans(), st.booleans())
@settings(max_examples=35, deadline=None)
def test_a_stream_gives_the_same_messages_wherever_it_is_cut(
    sizes: list[list[int]], segments: list[int], view_bytes: int, long: bool, asks: bool
) -> None:
    """`Heard` sees to it that views come once and in order."""
    loop, ear, messages = Loop(), Ear(view_bytes=view_bytes), filled(sizes)
    raw = Raw(loop, ear.side, greets=False)
    between = command(b"\4PING\0\5") if asks else b""
    stream = said_by(Handshake(False, b"")) + between.join(framed(frames, long) for frames in messages)
    for segment in cut(stream, segments):
        raw.feed(segment)
    loop.until(lambda: len(ear.whole) == len(messages))
    loop.quiet()
    assert ear.whole == messages and not raw.connection.broken
    assert all(message.ends == 1 and not message.losses for message in ear.messages)
    loop.close()


@pytest.mark.parametrize("then", [1, 1000], ids=["byte by byte", "all at once"])
def test_a_stream_may_be_cut_inside_whatever_there_is(loop: Loop, then: int) -> None:
    messages = filled([[3], [0], [2, 0, 5], [1, 300, 0], [2, 1]])
    stream = said_by(Handshake(False, b"")) + b"".join(map(framed, messages))
    ears = [Ear(view_bytes=3) for _ in range(0, len(stream), 1 if then > 1 else len(stream))]
    for first, ear in enumerate(ears):
        raw = Raw(loop, ear.side, greets=False)
        raw.feed(stream[:first])
        for at in range(first, len(stream), then):
            raw.feed(stream[at : at + then])
    loop.until(lambda: all(len(ear.whole) == len(messages) for ear in ears))
    assert all(ear.whole == messages for ear in ears)


@given(st.lists(frame_bytes, min_size=1, max_size=4), st.integers(0), some_segments, st.sampled_from([7, 256, 100_000]))
@settings(max_examples=35, deadline=None)
def test_what_is_diverted_is_written_nowhere_and_the_next_message_is_right(
    sizes: list[int], at: int, segments: list[int], view_bytes: int
) -> None:
    loop, ear = Loop(), Ear(view_bytes=view_bytes)
    raw, (frames, behind) = Raw(loop, ear.side), filled([[3, *sizes], [4, 1000, 0]])
    data = framed(frames)
    at = 5 + at % (len(data) - 5)  # somewhere behind the header, and not at the end
    raw.feed(data[:at])
    loop.until(lambda: ear.messages)
    loop.quiet()
    (message,) = ear.messages
    message.diverted, before = True, [bytes(frame) for frame in message.frames]
    raw.connection.divert()
    for segment in cut(data[at:] + framed(behind), segments):
        raw.feed(segment)
    loop.until(lambda: len(ear.whole) == 2)
    assert [bytes(frame) for frame in message.frames] == before and message.ends == 1 and not message.losses
    assert ear.whole[1] == behind
    loop.close()


@given(some_messages, st.lists(st.booleans(), max_size=20), some_segments)
@settings(max_examples=25, deadline=None)
def test_a_pause_loses_nothing_of_what_was_read_ahead(sizes: list[list[int]], opens: list[bool], segments: list[int]) -> None:
    loop, ear, messages = Loop(), Ear(), filled(sizes)
    raw = Raw(loop, ear.side)
    begin = ear.side.begin

    def begin_and_close(connection: Connection, first: bytes, more: bool) -> Incoming:
        message, ear.open = begin(connection, first, more), False
        return message

    raw.connection._side, ear.open = replace(ear.side, begin=begin_and_close), False
    opening = chain(opens, repeat(True))

    def go_on() -> bool:
        """Whether all of them are here. `Ear` sees to it that none begins that may not."""
        loop.quiet()  # it comes to an end: what is paused is not looked at
        if raw.connection.paused:
            ear.open = may = next(opening)
            raw.connection.resume()
            assert may or raw.connection.paused
        return len(ear.whole) == len(messages)

    for segment in cut(b"".join(map(framed, messages)), segments):
        raw.feed(segment)
        go_on()
    loop.until(go_on)
    assert ear.whole == messages and all(message.ends == 1 for message in ear.messages)
    loop.close()


@pytest.mark.parametrize("up", [True, False], ids=["up", "before the handshake is over"])
def test_what_is_on_its_way_when_a_connection_is_closed_is_over(loop: Loop, up: bool) -> None:
    ear, shown = Ear(), list[int]()
    raw = Raw(loop, ear.side, greets=up)
    raw.feed(framed([b"a", bytes(1000)])[:500] if up else b"")
    loop.quiet()
    large: Any = np.zeros(64 << 20, dtype=np.uint8)
    messages = [raw.connection.send(b"header", [[(large, lambda piece: shown.append(len(piece)))]]) for _ in range(3)]
    loop.quiet()
    left = sum(shown)
    assert not any(message.done for message in messages) and (0 < left < large.size if up else not left)
    raw.connection.close("enough")
    raw.connection.close("once more")
    assert all(message.done for message in messages) and raw.connection.broken == "enough" and not loop.selector.get_map()
    assert [message.losses for message in ear.messages] == [1] * up and not ear.whole
    late = raw.connection.send(b"header", [[(large, lambda piece: shown.append(len(piece)))]])
    assert late.done and sum(shown) == left


def test_a_message_is_lost_once_when_the_other_end_goes(loop: Loop) -> None:
    ear = Ear()
    raw = Raw(loop, ear.side)
    raw.feed(framed([b"whole", b"x"]) + framed([b"half", bytes(1000)])[:300])
    raw.take()  # otherwise it is an error that we are told
    raw.socket.close()
    loop.until(lambda: raw.connection.broken)
    assert [(message.ends, message.losses) for message in ear.messages] == [(1, 0), (0, 1)]


@pytest.mark.parametrize(
    ("greets", "data"),
    [
        (True, struct.pack(">BQ", 2, MOST_BYTES + 1)),
        (True, framed([b"a", b"b"])[:3] + struct.pack(">BQ", 2, MOST_BYTES + 1)),
        (True, struct.pack(">BQ", 6, 1025)),
        (True, b"\x08\0"),
        (True, b"\5\0"),
        (False, b"GET / HTTP/1.1\r\n\r\n"),
        (False, said_by(Handshake(False, b""))[:64] + framed([b"\0\0"])),
        (False, said_by(Handshake(False, b""))[:64] + command(b"\4PING\0\5")),
    ],
    ids=["frame", "frame behind", "command", "flags", "command with more", "HTTP", "message before", "command before"],
)
def test_a_connection_is_closed_that_says_what_it_may_not(loop: Loop, greets: bool, data: bytes) -> None:
    ear = Ear()
    raw = Raw(loop, ear.side, greets=greets)
    raw.feed(data)
    loop.until(lambda: raw.connection.broken)
    assert not ear.whole


def test_a_first_frame_that_is_too_long_is_read_to_nowhere(loop: Loop) -> None:
    """What begins is told of an empty one, which is no header."""
    ear = Ear(first_bytes=1000)
    raw, messages = Raw(loop, ear.side), filled([[1001, 40_000], [1000, 5], [300_000], [1]])
    raw.feed(b"".join(map(framed, messages)))
    loop.until(lambda: len(ear.whole) == len(messages))
    assert ear.whole == [[b"", messages[0][1]], messages[1], [b""], messages[3]]


class Reluctant(socket.socket):
    """Takes as many bytes at a time as it is told to; for 0, none now."""

    takes: Iterator[int] = repeat(1 << 30)
    taken = 0

    def sendmsg(self, *arguments: Any) -> int:
        nbytes = next(self.takes)
        if not nbytes:
            raise BlockingIOError
        sent = self.send(b"".join(arguments[0])[:nbytes])
        self.taken += sent
        return sent


part_bytes = st.integers(0, 300) | st.sampled_from([PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 600_000])
some_letters = st.lists(st.lists(st.lists(part_bytes, max_size=3), max_size=3), min_size=1, max_size=4)


@given(some_letters, st.lists(st.integers(0, 9) | st.integers(1, 300_000), max_size=8), st.booleans())
@settings(max_examples=35, deadline=None)
def test_a_message_is_done_and_a_piece_is_shown_when_it_has_left(
    letters: list[list[list[int]]], takes: list[int], early: bool
) -> None:
    """Not before, once, and in order. `early`: it is sent before the handshake is over."""
    loop, source = Loop(), random.Random(str(letters))
    raw = Raw(loop, Ear().side, Reluctant, greets=not early)
    end, base = raw.end, len(said_by(Handshake(True, b"")))
    assert isinstance(end, Reluctant)
    end.takes = chain(repeat(1 << 30, 0), cycle([*takes, 70_000]))
    stream, shown, wanted, ends, messages = b"", list[bytes](), list[bytes](), list[int](), list[Outgoing]()
    wanted_ends: list[int] = []  # where each piece ends in the stream
    taken_at: list[int] = []  # what had left when it was shown

    def show(piece: Any) -> None:
        shown.append(bytes(piece))
        taken_at.append(end.taken)

    for sizes in letters:
        frames = [[source.randbytes(nbytes) for nbytes in parts] for parts in sizes]
        plain = [b"header", *map(b"".join, frames)]
        at = base + len(stream) + len(framed(plain))
        for parts in reversed(frames):  # from the end, where nothing but heads is in between
            for part in reversed(parts):
                pieces = [part[i : i + PIECE_BYTES] for i in range(0, len(part), PIECE_BYTES)]
                for piece in reversed(pieces):
                    wanted.append(piece)
                    wanted_ends.append(at)
                    at -= len(piece)
            at -= len(framed([b"".join(parts)])) - sum(map(len, parts))
        stream += framed(plain)
        ends.append(base + len(stream))
        messages.append(raw.connection.send(b"header", [[(part, show) for part in parts] for parts in frames]))
        assert end.taken < base or messages[-1].done == (end.taken >= ends[-1])
    if early:
        raw.feed(said_by(Handshake(False, b"")))
    while not all(message.done for message in messages):
        loop.until(loop.turn)
        raw.take()
        assert [message.done for message in messages] == [end.taken >= at for at in ends]
    order = sorted(range(len(wanted)), key=wanted_ends.__getitem__)
    assert shown == [wanted[index] for index in order]
    assert all(left >= wanted_ends[index] for left, index in zip(taken_at, order, strict=True))
    loop.until(lambda: len(raw.take()) == ends[-1])
    assert raw.received[base:] == stream and not raw.connection.broken
    loop.close()


# --- where it listens


def test_a_stranger_who_says_nothing_is_closed_and_a_member_is_not(loop: Loop) -> None:
    ear, counters = Ear(), Counters()
    port = Port(ear.side, loop.selector, counters)
    loop.closes.append(port.close)
    address = ("127.0.0.1", port.listen("127.0.0.1"))
    silent, half, member = (socket.create_connection(address) for _ in range(3))
    half.sendall(said_by(Handshake(False, b""))[:70])
    member.sendall(said_by(Handshake(False, b"")) + framed([b"hello"]))
    loop.until(lambda: ear.messages and len(port._strangers) == 3)
    begun_s = time.monotonic()
    port.tend(begun_s)
    assert len(port._strangers) == 2 and port.wait_ms() <= 1000
    port.tend(begun_s + HANDSHAKE_S + 1)
    assert not port._strangers and not ear.speakers[0].broken and counters.read()["refused_peers"] == 0
    for each in (silent, half):
        each.settimeout(PATIENCE_S)
        with suppress(ConnectionResetError):
            while each.recv(100):
                pass
        each.close()
    member.sendall(framed([b"still here"]))
    loop.until(lambda: len(ear.messages) == 2)
    member.close()
    loop.until(lambda: ear.speakers[0].broken)
    port.tend(time.monotonic())
    assert not port._members


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOBUFS, errno.ECONNABORTED], ids=errno.errorcode.__getitem__)
def test_a_connection_that_cannot_be_taken_is_not_the_end(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    ear, faults, accept = Ear(), [OSError(error, "none left")], socket.socket.accept

    def faulty(listener: socket.socket) -> Any:
        if faults:
            raise faults.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", faulty)
    port, number = opened(loop, ear.side)
    with caplog.at_level(logging.WARNING), socket.create_connection(("127.0.0.1", number)) as raw:
        loop.until(lambda: not faults)
        raw.sendall(said_by(Handshake(False, b"")) + framed([b"here"]))
        loop.until(lambda: ear.whole == [[b"here"]])
    assert len(caplog.messages) == (error != errno.ECONNABORTED) and port.wait_ms() >= 1000


@pytest.mark.parametrize("host", ["*", "localhost", "127.0.0.1"])
def test_a_port_listens_where_it_is_told_to(loop: Loop, context: zmq.Context[Any], host: str) -> None:
    ear = Ear()
    port = Port(ear.side, loop.selector, Counters())
    loop.closes.append(port.close)
    dealer = dealer_to(context, port.listen(host))
    dealer.send(b"here")
    loop.until(lambda: ear.whole == [[b"here"]])
    assert port._listener is not None and port._listener.getsockname()[0] == ("0.0.0.0" if host == "*" else "127.0.0.1")


def test_a_host_that_is_not_ours_cannot_be_listened_on(loop: Loop) -> None:
    with pytest.raises(OSError):
        Port(Ear().side, loop.selector, Counters()).listen("203.0.113.1")


# --- chunks that come to their places

KEY = (7, 0)
PAGE = 2 << 20
SLOT = 64


class Target:
    """An arena that chunks come to, over as many connections as are asked for."""

    def __init__(self, loop: Loop, device: bool = False) -> None:
        self._loop = loop
        self.pages, self.slots = np.zeros((6, PAGE), dtype=np.uint8), np.zeros((4, SLOT), dtype=np.uint8)
        rows: dict[str, Any] = {"page": self.pages, "slot": self.slots}
        sizes = {name: each.shape for name, each in rows.items()}
        memory: Memory = CpuMemory(rows)
        if device:
            memory = CudaMemory({name: torch.from_numpy(each) for name, each in rows.items()}, HostStream(), DRIVER)
        self.counters, self.events = Counters(), list[Any]()
        self.inbound = Inbound(memory, sizes, "zeromq", self.counters, self.events.append)
        largest = STRAIGHT_BYTES + TAG_BYTES
        self._side = Side(True, b"", MAX_HEADER_BYTES, largest, self.inbound.begin, self.inbound.may_begin)

    def connect(self) -> Raw:
        return Raw(self._loop, self._side)

    def count(self, name: str) -> int:
        return self.counters.read()[name]

    def answers(self, raw: Raw, count: int = 1) -> list[tuple[int, int]]:
        """(number of the chunk, status) of each there was."""

        def enough() -> bool:
            self.inbound.settle(idle=True)
            return len(raw.frames()) >= count

        self._loop.until(enough)
        return [(ack.number, ack.status) for ack in map(unpack_ack, raw.frames())]

    def landed(self) -> list[Any]:
        return [event for event in self.events if isinstance(event, Landed)]


def page_chunk(number: int, fill: int, pages: tuple[int, ...] = (2, 3), offset: int = 0, nbytes: int = PAGE) -> list[bytes]:
    places: list[Place] = [("page", page, offset, nbytes) for page in pages]
    return [header(KEY, places, number), bytes([fill]) * (len(pages) * nbytes)]


HALF = PAGE + 1000  # of the first of two pages, with its header, and a little of the next: in the middle of a view


def test_a_chunk_that_comes_again_elsewhere_lands_once_and_the_first_goes_nowhere(loop: Loop) -> None:
    target = Target(loop)
    target.inbound.expect(KEY, 1, [2, 3], 0, b"")
    first, second = target.connect(), target.connect()
    data = framed(page_chunk(5, 1))
    first.feed(data[:HALF])
    loop.quiet()
    assert target.pages[2].all() and target.pages[3].any() and not target.pages[3].all()
    second.feed(framed(page_chunk(5, 2)))
    assert target.answers(second) == [(5, LANDED)]
    assert (target.pages[2:4] == 2).all() and target.count("repeated_frames") == 1
    assert target.landed()[0].digest == combine(span_digest(KEY, 0, page, 0, bytes([2]) * PAGE) for page in (2, 3))
    first.feed(data[HALF:])
    assert target.answers(first) == [(5, LATE)]
    assert (target.pages[2:4] == 2).all() and len(target.landed()) == 1
    assert target.count("late_frames") == 1 and target.count("bad_frames") == 0
    first.feed(framed(page_chunk(5, 3)))  # now its answer was lost
    assert target.answers(first, 2) == [(5, LATE), (5, LANDED)]
    assert (target.pages[2:4] == 2).all() and len(target.landed()) == 1 and target.count("repeated_frames") == 2
    assert not target.inbound._coming


def test_what_comes_for_a_window_that_is_closed_is_written_nowhere(loop: Loop) -> None:
    target = Target(loop)
    target.inbound.expect(KEY, 1, [2, 3], 0, b"")
    raw, data = target.connect(), framed(page_chunk(5, 1))
    raw.feed(data[:HALF])
    loop.quiet()
    target.inbound.revoke(KEY)
    assert target.events == [Drained(KEY)]
    target.pages.fill(9)  # somebody else's
    raw.feed(data[HALF:] + framed(page_chunk(6, 2)))
    assert target.answers(raw, 2) == [(5, LATE), (6, LATE)]
    assert (target.pages == 9).all() and target.events == [Drained(KEY)]
    assert target.count("late_frames") == 2 and target.count("bad_frames") == 0 and not target.inbound._coming


@pytest.mark.parametrize("pages", [[2, 3], [4, 5]], ids=["same", "others"])
def test_what_comes_for_a_window_that_is_granted_anew_is_written_nowhere(loop: Loop, pages: list[int]) -> None:
    target = Target(loop)
    target.inbound.expect(KEY, 1, [2, 3], 0, b"")
    raw, data = target.connect(), framed(page_chunk(5, 1))
    raw.feed(data[:HALF])
    loop.quiet()
    target.inbound.expect(KEY, 1, pages, 0, b"")
    target.pages.fill(9)
    raw.feed(data[HALF:])
    assert target.answers(raw) == [(5, LATE)]
    assert (target.pages == 9).all() and not target.events
    raw.feed(framed(page_chunk(5, 2, (pages[0], pages[1]))))
    assert target.answers(raw, 2)[1] == (5, LANDED)
    assert (target.pages[pages] == 2).all() and len(target.landed()) == 1


@pytest.mark.parametrize("number", [5, 6], ids=["the same chunk", "another"])
@pytest.mark.parametrize("nbytes", [1, HALF, 2 * PAGE])
def test_the_places_of_a_chunk_whose_connection_broke_may_be_written_again(loop: Loop, nbytes: int, number: int) -> None:
    target = Target(loop)
    target.inbound.expect(KEY, 1, [2, 3], 0, b"")
    first, second = target.connect(), target.connect()
    head, payload = page_chunk(5, 1)
    first.feed(framed([head, payload])[: -len(payload)] + payload[: nbytes - 1])
    loop.quiet()
    assert [*target.inbound._coming] == [(KEY, 5)]
    first.socket.close()
    loop.until(lambda: first.connection.broken)
    assert not target.inbound._coming and not target.events
    second.feed(framed(page_chunk(number, 2)))
    assert target.answers(second) == [(number, LANDED)]
    assert (target.pages[2:4] == 2).all() and len(target.landed()) == 1
    assert target.count("repeated_frames") == 0 and target.count("bad_frames") == 0


def test_nobody_else_may_write_where_a_chunk_is_coming(loop: Loop) -> None:
    target = Target(loop)
    target.inbound.expect(KEY, 1, [2, 3], 0, b"")
    first, second = target.connect(), target.connect()
    data = framed(page_chunk(5, 1))
    first.feed(data[:HALF])
    loop.quiet()
    second.feed(framed(page_chunk(6, 2, (3,), PAGE - 1, 1)))
    assert target.answers(second) == [(6, REFUSED)]
    first.feed(data[HALF:])
    assert target.answers(first) == [(5, LANDED)]
    assert (target.pages[2:4] == 1).all() and target.count("bad_frames") == 1


@pytest.mark.parametrize("extra", [-1, 1, PAGE], ids=["cut short", "a byte more", "a page more"])
def test_the_places_of_a_chunk_of_the_wrong_length_may_be_written_again(loop: Loop, extra: int) -> None:
    target = Target(loop)
    target.inbound.expect(KEY, 1, [2, 3], 0, b"")
    raw = target.connect()
    head, payload = page_chunk(5, 1)
    raw.feed(framed([head, payload[:extra] if extra < 0 else payload + bytes([1]) * extra]))
    assert target.answers(raw) == [(5, REFUSED)] and not target.pages.any() and not target.inbound._coming
    raw.feed(framed(page_chunk(6, 2)))
    assert target.answers(raw, 2)[1] == (6, LANDED)
    assert (target.pages[2:4] == 2).all()


def whole_chunk(number: int, pages: tuple[int, ...], secret: bytes) -> list[bytes]:
    """Sealed, or else for a device."""
    head, payload = page_chunk(number, 1, pages)
    if secret:
        return [head, bytes(Seal(secret).close(number, 0, payload, head))]
    return [pack_chunk(replace(unpack_chunk(head), sums=True)), payload]


@pytest.mark.parametrize("device", [False, True], ids=["sealed", "device"])
def test_a_chunk_that_needs_a_larger_buffer_than_any_is_refused(loop: Loop, device: bool) -> None:
    """One that is read to its places needs none."""
    target, secret = Target(loop, device), b"" if device else new_secret()
    target.inbound.expect(KEY, 1, [1, 2, 3, 4, 5], 0, secret)
    raw = target.connect()
    fits = (4, 5)
    assert target.inbound._buffer_bytes == CHUNK_BYTES
    target.inbound._buffer_bytes = PAGE * len(fits)
    raw.feed(framed(whole_chunk(5, (1, 2, 3), secret)))
    assert target.answers(raw) == [(5, REFUSED)] and not target.pages.any() and target.count("bad_frames") == 1
    raw.feed(framed(whole_chunk(6, fits, secret)))
    assert device or target.answers(raw, 2)[1] == (6, LANDED)
    target.answers(raw, 2)
    straight = Target(loop)
    straight.inbound.expect(KEY, 1, [1, 2, 3], 0, b"")
    raw = straight.connect()
    raw.feed(framed(page_chunk(5, 1, (1, 2, 3))))
    assert straight.answers(raw) == [(5, LANDED)] and straight.pages[1:4].all()


# --- within a host

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def congestion(end: socket.socket) -> bytes:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.skipif(not ALLOWED.exists() or "reno" not in ALLOWED.read_text().split(), reason="reno is not ours to choose")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_what_the_engine_sends_within_a_host_is_not_paced(host: str) -> None:
    out, into = thread_transport(small_arena(seed=1)), thread_transport(small_arena(seed=2))
    into.expect(KEY, 1, [5])
    out.write(into.address().replace("127.0.0.1", host), KEY, table([PageSpan("page", 1, 5, 0, 8)]))
    loop = Loop()
    loop.until(lambda: any(isinstance(event, Landed) for event in into.poll()))
    (peer,) = out.inner._outbound._peers.values()
    assert [congestion(lane.connection._socket) for lane in peer.lanes] == [b"reno"] * len(peer.lanes)
    out.close()
    into.close()
    loop.close()


def test_a_connection_to_another_host_keeps_what_the_kernel_chose() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as end:
        before = congestion(end)
        hurry_within_a_host(end, "203.0.113.1")
        assert congestion(end) == before
