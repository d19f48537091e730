"""Threads that move bytes for the engine: when they are asked, and what the engine waits for. test_transport.py runs with
them too ("crew")."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
import torch

from kvtransfer.arena import Arena
from kvtransfer.digest import SpanDigests
from kvtransfer.transports import Drained, Landed, Lost, Wrote
from kvtransfer.transports.channel import ChannelClosed
from kvtransfer.transports.connection import READ, WRITE, Connection, Nothing
from kvtransfer.transports.crew import Crew, crew_threads
from kvtransfer.transports.outbound import CREDIT
from kvtransfer.transports.zmtp import MORE, frame_head
from tests.test_zmtp_faults import greet
from tests.transfer_rig import (
    LAYOUT,
    PATIENCE_S,
    Span,
    ThreadTransport,
    collect,
    give_all_to_a_crew,
    header,
    small_arena,
    table,
    thread_transport,
    wait,
)

KEY = (7, 0)
SPANS = table(Span("page", page, page, 0, LAYOUT.page_bytes) for page in range(1, 9))


class Lane:
    """In place of a connection."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate, self.moved, self.came_back = gate, threading.Event(), 0

    def move(self, direction: int) -> None:
        self.moved.set()
        assert self.gate is None or self.gate.wait(PATIENCE_S)

    def returned(self, direction: int, future: Future[None]) -> None:
        self.came_back += 1


@pytest.fixture
def loop() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


def turns(selector: selectors.BaseSelector, enough: Callable[[], bool]) -> bool:
    def turn() -> bool:
        for key, events in selector.select(0.01):
            key.data(events)
        return enough()

    return wait(turn)


def test_a_connection_that_is_busy_alone_is_not_lent(loop: selectors.BaseSelector) -> None:
    with closing(Crew(loop, 2)) as crew:
        one, other = Lane(), Lane()
        assert [crew.take(one, READ) for _ in range(3)] == [None] * 3
        taken = [crew.take(lane, READ) for lane in (other, one, one)]
        assert None not in taken
        assert turns(loop, lambda: (one.came_back, other.came_back) == (2, 1))


def test_two_busy_connections_do_not_stay_two_for_ever(loop: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("kvtransfer.transports.crew.time.monotonic", lambda: now_s[0])
    with closing(Crew(loop, 2)) as crew:
        one = Lane()
        assert crew.take(Lane(), READ) is None and crew.take(one, READ) is not None
        now_s[0] += 1.0
        assert crew.take(one, READ) is None
        assert one.moved.wait(PATIENCE_S)


def test_nobody_waits_in_place_while_another_waits_for_a_thread(loop: selectors.BaseSelector) -> None:
    gate = threading.Event()
    with closing(Crew(loop, 2)) as crew:
        lanes = [Lane(gate) for _ in range(4)]
        crew.take(lanes[0], WRITE)  # alone
        spare = [crew.take(lane, WRITE) and crew.spare for lane in lanes[1:]]
        gate.set()
        assert spare == [True, True, False]
        assert turns(loop, lambda: crew.spare)


def test_a_fault_in_one_connection_keeps_no_other_waiting(loop: selectors.BaseSelector) -> None:
    class Faulty(Lane):
        def returned(self, direction: int, future: Future[None]) -> None:
            raise MemoryError

    with closing(Crew(loop, 2)) as crew:
        one, other = Faulty(), Lane()
        crew.take(other, READ)  # alone
        for future in (crew.take(one, READ), crew.take(other, READ)):
            assert future is not None
            future.result()
        assert wait(lambda: len(crew._back) == 2)
        with pytest.raises(MemoryError):
            turns(loop, lambda: False)
        assert turns(loop, lambda: other.came_back == 1) and crew.spare


def test_a_thread_that_cannot_be_started_moves_nothing_later(
    loop: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with closing(Crew(loop, 2)) as crew:
        busy, other = Lane(threading.Event()), Lane()
        assert busy.gate is not None
        crew.take(other, READ)  # alone
        taken = crew.take(busy, READ)
        assert taken is not None and busy.moved.wait(PATIENCE_S)
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", no_thread)
            assert crew.take(other, READ) is None
        busy.gate.set()
        assert turns(loop, lambda: (busy.came_back, other.came_back) == (1, 1)) and not other.moved.is_set()


@pytest.mark.parametrize(("path", "most"), [("zeromq", [2, 2, 2, 2]), ("auto", [CREDIT])])
def test_lanes_share_the_credit_of_a_peer(path: str, most: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transports.engine.crew_threads", lambda: 4)
    with (
        closing(thread_transport(small_arena(seed=1), path, lanes=0)) as sender,
        closing(thread_transport(small_arena(), path)) as receiver,
    ):
        receiver.expect(KEY, 1, range(1, 9))
        sender.write(receiver.address(), KEY, SPANS)
        assert isinstance(collect(sender, len)[0], Wrote)
        (peer,) = sender.inner._outbound._peers.values()
        assert [lane.most for lane in peer.lanes] == most


@pytest.mark.parametrize(("cores", "threads"), [(1, 0), (2, 0), (7, 0), (8, 2), (12, 3), (16, 4), (192, 4)])
def test_who_has_few_cores_has_no_crew(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert crew_threads() == threads


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ThreadTransport, ThreadTransport]]:
    """A sender with bytes and a receiver without, whose window is open."""
    give_all_to_a_crew(monkeypatch)
    with closing(thread_transport(small_arena(seed=1))) as sender, closing(thread_transport(Arena(LAYOUT, 32, 16))) as receiver:
        receiver.expect(KEY, 1, range(1, 9))
        yield sender, receiver


@pytest.fixture
def met(ends: tuple[ThreadTransport, ThreadTransport]) -> tuple[ThreadTransport, ThreadTransport]:
    """They have exchanged greetings, and tested their link."""
    ends[0].write(ends[1].address(), (8, 0), SPANS)  # which nobody expects
    collect(ends[0], len)
    return ends


def test_a_digest_is_of_all_bytes_though_the_answer_is_here_before_the_last_was_looked_at(
    ends: tuple[ThreadTransport, ThreadTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(SpanDigests):
        def begin(self, place: Any) -> Callable[[Any], None]:
            show = super().begin(place)

            def look(piece: Any) -> None:
                time.sleep(0.03)
                show(piece)

            return look

    monkeypatch.setattr("kvtransfer.transports.packer.host_digests", lambda key, *_: Slow(key))
    sender, receiver = ends
    sender.write(receiver.address(), KEY, SPANS)
    (wrote,), (landed,) = collect(sender, len), collect(receiver, len)
    assert isinstance(wrote, Wrote) and isinstance(landed, Landed)
    assert wrote.digest == landed.digest


def test_what_is_sent_meanwhile_leaves_behind_what_the_crew_sends(
    met: tuple[ThreadTransport, ThreadTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, go_on = threading.Event(), threading.Event()

    def late(connection: Connection, nbytes: int) -> None:
        if threading.current_thread().name.startswith("kv-crew") and not connection._side.listens:
            sending.set()
            assert go_on.wait(PATIENCE_S)
        left(connection, nbytes)

    sender, receiver = met
    receiver.expect((9, 0), 2, range(9, 17))
    left = Connection._left
    monkeypatch.setattr(Connection, "_left", late)
    sender.write(receiver.address(), KEY, SPANS)
    assert sending.wait(PATIENCE_S)
    sender.write(receiver.address(), (9, 0), table(Span("page", page, page + 8, 0, LAYOUT.page_bytes) for page in range(1, 9)))
    (peer,) = sender.inner._outbound._peers.values()
    assert wait(lambda: peer.lanes[0].connection._waiting), "it is not put where the crew is at work"
    go_on.set()
    wrote = collect(sender, lambda events: len(events) == 2)
    landed = collect(receiver, lambda events: len(events) == 2)
    sent = {event.key: event.digest for event in wrote if isinstance(event, Wrote)}
    assert sent == {event.key: event.digest for event in landed if isinstance(event, Landed)}
    assert sent.keys() == {KEY, (9, 0)}


def close_window_once(
    met: tuple[ThreadTransport, ThreadTransport], reached: threading.Event, go_on: threading.Event
) -> tuple[ThreadTransport, ThreadTransport]:
    """While the crew, which has `reached` a place where it waits for `go_on`, has the connection."""
    sender, receiver = met
    sender.write(receiver.address(), KEY, SPANS)
    assert reached.wait(PATIENCE_S)
    receiver.revoke(KEY)
    threading.Timer(0.1, go_on.set).start()
    return met


def test_a_window_is_not_closed_before_the_crew_has_let_go_of_it(
    met: tuple[ThreadTransport, ThreadTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def late(connection: Connection) -> Any:
        room = next_room(connection)
        if threading.current_thread().name.startswith("kv-crew") and not isinstance(connection._message, Nothing):
            reading.set()
            assert go_on.wait(PATIENCE_S)
        return room

    next_room = Connection._next_room
    monkeypatch.setattr(Connection, "_next_room", late)
    _, receiver = close_window_once(met, reading, go_on)
    assert [type(event) for event in collect(receiver, len)] == [Drained]
    closed = receiver._arena.pages.clone()
    receiver.close()
    assert torch.equal(receiver._arena.pages, closed)


def test_a_window_that_is_closed_behind_its_last_byte_is_answered_for(
    met: tuple[ThreadTransport, ThreadTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crew has read it, and nothing more comes on that connection that would wake the engine."""
    last, go_on = threading.Event(), threading.Event()

    def late(connection: Connection, nbytes: int) -> None:
        arrived(connection, nbytes)
        if threading.current_thread().name.startswith("kv-crew") and connection._side.listens and not connection._coming:
            last.set()
            assert go_on.wait(PATIENCE_S)

    arrived = Connection._arrived
    monkeypatch.setattr(Connection, "_arrived", late)
    sender, receiver = close_window_once(met, last, go_on)
    (lost,) = collect(sender, len)
    assert isinstance(lost, Lost) and lost.closed
    assert receiver.address() in sender.links(), "the connection is as good as before"


def test_who_leaves_in_the_middle_of_a_chunk_is_noticed(ends: tuple[ThreadTransport, ThreadTransport]) -> None:
    _, receiver = ends
    host, port = receiver.address().removeprefix("tcp://").split(":")
    place = ("page", 5, 0, LAYOUT.page_bytes)
    head = header(KEY, [place])
    with socket.create_connection((host, int(port))) as end:
        greet(end)
        end.sendall(frame_head(len(head), MORE) + head + frame_head(LAYOUT.page_bytes) + b"some")
        assert wait(lambda: receiver.inner._inbound._coming)
    assert wait(lambda: not receiver.inner._port._members)


def test_an_engine_closes_its_port_and_its_crew_whatever_else_fails(
    ends: tuple[ThreadTransport, ThreadTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_listens() -> None:
        raise ChannelClosed

    _, receiver = ends
    engine = receiver.inner
    monkeypatch.setattr(engine._inbound, "close", nobody_listens)
    receiver.close()
    host, port = receiver.address().removeprefix("tcp://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port))).close()
    assert engine._crew is not None and engine._crew._pool._shutdown
