"""What once made a connection of the bulk engine lose a hand-off, stand still, or hold up the others."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvtransfer.transports import BulkOptions, Drained, Lost, Wrote
from kvtransfer.transports.connection import READ, Connection, Nothing, Side
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.frame import (
    VERSION,
    Ack,
    Hello,
    Welcome,
    pack_ack,
    pack_hello,
    pack_welcome,
    unpack_chunk,
    unpack_welcome,
)
from kvtransfer.transports.jobs import Job
from kvtransfer.transports.outbound import CONNECT_S
from kvtransfer.transports.port import Port
from kvtransfer.transports.zmtp import GREETING_BYTES, Handshake, frame_head, read_head
from tests.test_gpu_link import MIB, large_arena, page_span
from tests.transfer_rig import RawReceiver, Span, ThreadTransport, collect, small_arena, table, thread_transport, wait

SPAN = Span("page", 1, 2, 0, 1000)


@pytest.fixture
def receiver() -> Iterator[ThreadTransport]:
    yield (transport := thread_transport(small_arena()))
    transport.close()


@contextlib.contextmanager
def open_sender(stall_s: float = 30.0, lanes: int = 1) -> Iterator[ThreadTransport]:
    yield (transport := thread_transport(small_arena(seed=1), stall_s=stall_s, lanes=lanes))
    transport.close()


def greet(end: socket.socket) -> None:
    """As who connects without a password; everything of the handshake has come and gone."""
    handshake = Handshake(False, b"")
    end.sendall(handshake.greeting())
    end.sendall(handshake.greeted(read(end, GREETING_BYTES)))
    next_frame(end)  # READY


def read(end: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += (more := end.recv(nbytes - len(data)))
        assert more, "closed"
    return data


def next_frame(end: socket.socket) -> bytes:
    data = read(end, 2)
    while (head := read_head(memoryview(data))) is None:
        data += read(end, 1)
    return read(end, head[1])


def test_a_connection_that_cannot_be_had_costs_no_other_peer(
    receiver: ThreadTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_more(*_: Any) -> socket.socket:
        raise OSError(24, "Too many open files")

    with open_sender(stall_s=2.0) as sender:
        receiver.expect((1, 0), 1, [2])
        sender.write(receiver.address(), (1, 0), table([SPAN]))
        collect(sender, len)
        monkeypatch.setattr("kvtransfer.transports.connection.socket.socket", no_more)
        sender.write("tcp://127.0.0.1:9", (2, 0), table([SPAN]))
        assert wait(lambda: "tcp://127.0.0.1:9" in sender.inner._outbound._peers)
        receiver.expect((3, 0), 1, [3])
        sender.write(receiver.address(), (3, 0), table([SPAN._replace(dst=3)]))
        first, second = collect(sender, lambda events: len(events) == 2)
        monkeypatch.undo()
    assert isinstance(first, Wrote) and first.key == (3, 0)
    assert isinstance(second, Lost) and second.key == (2, 0)
    assert "fault" not in caplog.text


def test_a_name_server_may_take_its_time(receiver: ThreadTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def look_up(host: str, *rest: Any) -> Any:
        asked.append(host)
        time.sleep(CONNECT_S + 0.5)
        return known(host, *rest)

    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with open_sender() as sender:
        receiver.expect((1, 0), 1, [2])
        sender.write(receiver.address().replace("127.0.0.1", "localhost"), (1, 0), table([SPAN]))
        assert isinstance(collect(sender, len)[0], Wrote)
    assert asked == ["localhost"]


def test_a_name_that_is_not_needed_any_more_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, goes_on = [], threading.Event()

    def look_up(host: str, *_: Any) -> Any:
        asked.append(host)
        goes_on.wait()
        raise OSError("nobody")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    connections = [Connection(answering([]), selectors.DefaultSelector()) for _ in range(3)]
    for index, connection in enumerate(connections):
        connection.connect(f"tcp://host{index}:1")
    assert wait(lambda: asked)
    connections[1].close()
    goes_on.set()
    assert wait(lambda: not connections[2].tend())
    assert connections[2].broken and asked == ["host0", "host2"]


def test_what_is_no_name_of_a_host_breaks_that_connection_only() -> None:
    connection = Connection(answering([]), selectors.DefaultSelector())
    connection.connect("tcp://a\0b:1")
    assert wait(lambda: not connection.tend())
    assert "host is not known" in connection.broken


def test_a_connection_that_breaks_while_it_is_idle_loses_nothing(receiver: ThreadTransport) -> None:
    with open_sender(stall_s=1.0) as sender:
        receiver.expect((1, 0), 1, [2, 3])
        sender.write(receiver.address(), (1, 0), table([SPAN]))
        collect(sender, len)
        outbound, (peer,) = sender.inner._outbound, sender.inner._outbound._peers.values()
        write = outbound.write

        def write_and_break(job: Job) -> None:
            write(job)
            peer.lanes[0].connection.close("cut")

        outbound.write = write_and_break
        peer.moved_s -= 60.0  # as long nothing has been written
        sender.write(receiver.address(), (1, 0), table([SPAN._replace(dst=3)]))
        (event,) = collect(sender, len)
    assert isinstance(event, Wrote)


def test_lanes_have_their_time_to_connect_however_late_the_welcome_comes() -> None:
    context: zmq.Context[Any] = zmq.Context()
    receiver, done = RawReceiver(context), threading.Event()

    def answer() -> None:
        while not done.is_set():
            if receiver.socket.poll(10):
                identity, head, *_ = receiver.socket.recv_multipart()
                if head[:4] == VERSION:
                    time.sleep(CONNECT_S + 0.1)
                reply = pack_welcome(receiver.welcome) if head[:4] == VERSION else pack_ack(Ack(unpack_chunk(head).number, 0))
                receiver.socket.send_multipart([identity, reply])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with open_sender(stall_s=3 * CONNECT_S, lanes=2) as sender:
            sender.write(receiver.address, (1, 0), table([SPAN]))
            assert isinstance(collect(sender, len)[0], Wrote)
    finally:
        done.set()
        thread.join()
        context.destroy(linger=0)


def answering(begun: list[bytes]) -> Side:
    def begin(connection: Connection, header: bytes, more: bool) -> Nothing:
        begun.append(header)
        return Nothing()

    return Side(True, b"", 100, 100, begin)


def read_until(connection: Connection, selector: selectors.BaseSelector, enough: Callable[[], bool]) -> None:
    def look() -> bool:
        for _, events in selector.select(0):
            connection.ready(events)
        return enough()

    assert wait(look)


def test_a_flood_of_small_messages_lets_others_get_their_turn() -> None:
    begun: list[bytes] = []
    selector = selectors.DefaultSelector()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        with socket.create_connection(listener.getsockname()) as flood:
            connection = Connection(answering(begun), selector)
            connection.adopt(listener.accept()[0])
            thread = threading.Thread(target=greet, args=(flood,))
            thread.start()
            read_until(connection, selector, lambda: connection.up)
            thread.join()
            flood.sendall(frame_head(0) * 75_000)
            time.sleep(0.05)
            connection.ready(READ)
            assert 0 < len(begun) <= 40_000
            read_until(connection, selector, lambda: len(begun) == 75_000)
            connection.close()


def test_who_does_not_read_answers_is_not_read_and_loses_none(receiver: ThreadTransport) -> None:
    hello = pack_hello(Hello(0, 0, 0, bytes(16), {"page": (1, 1), "slot": (1, 1)}))
    count, port = 60_000, int(receiver.address().rsplit(":", 1)[1])
    with socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.connect(("127.0.0.1", port))
        greet(end)
        thread = threading.Thread(target=end.sendall, args=((frame_head(len(hello)) + hello) * count,))
        thread.start()
        port_of = receiver.inner._port
        assert wait(lambda: any(each.paused for each in port_of._members))
        (connection,) = port_of._members
        time.sleep(0.2)
        assert connection.paused and len(connection._leaving) < 1000
        with end.makefile("rb", 1 << 16) as answers:
            for _ in range(count):
                assert unpack_welcome(answers.read(answers.read(2)[1])).path == "zeromq"
        thread.join()


def test_where_there_is_room_for_one_message_at_a_time_everybody_gets_it_in_turn() -> None:
    rooms, begun = [0], Counter[Connection]()

    def begin(connection: Connection, header: bytes, more: bool) -> Nothing:
        rooms[0] -= 1
        begun[connection] += 1
        return Nothing()

    side = Side(True, b"", 100, 100, begin, lambda: rooms[0] > 0)
    selector, counters = selectors.DefaultSelector(), Counters()
    port = Port(side, selector, counters)
    number = port.listen("127.0.0.1")
    with contextlib.ExitStack() as ends:
        ends.callback(port.close)

        def turn() -> int:
            for key, events in selector.select(0):
                key.data(events)
            port.tend(time.monotonic())
            return sum(each.paused for each in port._members)

        for _ in range(4):
            end = ends.enter_context(socket.create_connection(("127.0.0.1", number)))
            thread = threading.Thread(target=greet, args=(end,))
            thread.start()
            while thread.is_alive():
                turn()
            end.sendall(frame_head(0) * 100)
        assert wait(lambda: turn() == 4)
        for _ in range(40):
            rooms[0] = 1
            turn()
    assert len(begun) == 4 and set(begun.values()) == {10}


def test_a_port_that_can_take_no_connection_says_so_once(
    receiver: ThreadTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def full(_: socket.socket) -> None:
        tries.append(1)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", full)
    with socket.create_connection(("127.0.0.1", int(receiver.address().rsplit(":", 1)[1]))) as end:
        assert wait(lambda: len(tries) > 3)
        monkeypatch.undo()
        greet(end)
    assert caplog.text.count("no connection can be taken") == 1


@pytest.mark.parametrize("host", ["lo", "*", "0.0.0.0", "localhost"])
def test_a_port_listens_wherever_the_other_port_of_a_worker_does(host: str) -> None:
    receiver = ThreadTransport(small_arena(), host=host, advertise="127.0.0.1", options=BulkOptions("zeromq"))
    with contextlib.closing(receiver), open_sender() as sender:
        receiver.expect((1, 0), 1, [2])
        sender.write(receiver.address(), (1, 0), table([SPAN]))
        assert isinstance(collect(sender, len)[0], Wrote)


@pytest.mark.parametrize("cancel", [False, True])
def test_memory_that_a_peer_has_answered_for_and_does_not_take_comes_back(cancel: bool) -> None:
    done = threading.Event()

    def serve() -> None:
        end = listener.accept()[0]
        with end:
            handshake = Handshake(True, b"")
            end.sendall(handshake.greeting() + handshake.greeted(read(end, GREETING_BYTES)))
            next_frame(end)  # READY
            while True:
                header = next_frame(end)
                if header[:4] == VERSION:
                    reply = pack_welcome(Welcome("zeromq", ""))
                else:
                    chunk = unpack_chunk(header)
                    reply = pack_ack(Ack(chunk.number, 0))
                    if not chunk.probe:
                        end.sendall(frame_head(len(reply)) + reply)
                        done.wait()
                        return
                    for _ in chunk.spans:
                        next_frame(end)
                end.sendall(frame_head(len(reply)) + reply)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        contextlib.closing(ThreadTransport(large_arena(20), options=BulkOptions("zeromq", lanes=1, stall_s=1.0))) as sender,
    ):
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            spans = table(page_span(page, page, MIB) for page in range(1, 14))
            sender.write(f"tcp://127.0.0.1:{listener.getsockname()[1]}", (1, 0), spans)
            assert wait(lambda: sender.inner._outbound._jobs.closing)
            if cancel:
                sender.cancel((1, 0))
            assert isinstance(collect(sender, len)[0], Drained if cancel else Wrote)
        finally:
            done.set()
            thread.join()
