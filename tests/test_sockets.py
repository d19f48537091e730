"""Inbox and Outbox over real sockets: nothing blocks, nothing kills the receiver."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
import zmq

from tests.ports import own_port
from wire.codec import encode
from wire.heartbeat import Heartbeat
from wire.messages import Abort, Failed, Status
from wire.sockets import HARD_LIMIT_BYTES, MAX_MESSAGE_BYTES, MAX_PEERS, SEND_QUEUE, Inbox, Outbox, open_context

STILL_S = 6.0  # longer than a router is silent because of anything but a fault


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def take(inbox: Inbox, count: int, timeout_s: float = 30.0) -> list[Any]:
    """`count` messages, or what came within the time."""
    got: list[Any] = []
    end_s = time.monotonic() + timeout_s
    while len(got) < count and time.monotonic() < end_s:
        inbox.wait(0.05)
        got += inbox.drain()
    return got


def until(condition: Callable[[], object], inbox: Inbox, timeout_s: float = 30.0) -> bool:
    """Drains until `condition` is true."""
    end_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end_s:
        inbox.wait(0.02)
        assert list(inbox.drain()) == []
    return bool(condition())


def pusher(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    push: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    push.connect(address)
    return push


def test_many_messages_arrive_in_order(context: zmq.Context[Any]) -> None:
    inbox, outbox = Inbox(context), Outbox(context)
    sent = [Abort(i, 0) for i in range(3000)]
    assert all(outbox.send(inbox.address, message) for message in sent)
    assert take(inbox, len(sent)) == sent
    assert outbox.dropped == 0


def test_address_is_real_and_can_be_advertised(context: zmq.Context[Any]) -> None:
    first, second = Inbox(context), Inbox(context, advertise="worker.example")
    assert not first.address.endswith(":0")
    assert first.address != second.address
    assert second.address.startswith("tcp://worker.example:")


def test_a_taken_port_is_an_error(context: zmq.Context[Any]) -> None:
    first = Inbox(context)
    with pytest.raises(zmq.ZMQError):
        Inbox(context, port=int(first.address.rsplit(":", 1)[1]))


def test_drain_never_waits_and_respects_its_limit(context: zmq.Context[Any]) -> None:
    inbox, outbox = Inbox(context), Outbox(context)
    assert list(inbox.drain()) == []
    assert inbox.wait(-5.0) is False  # a deadline that is past must not become "for ever"
    for i in range(10):
        outbox.send(inbox.address, Abort(i, 0))
    assert inbox.wait(30)
    time.sleep(0.1)  # most often all of them are there by now
    counts: list[int] = []
    while sum(counts) < 10:
        counts.append(len(list(inbox.drain(limit=4))))
        assert sum(counts) == 10 or inbox.wait(30)
    assert max(counts) <= 4


def test_bad_frames_are_counted_and_good_ones_still_arrive(context: zmq.Context[Any]) -> None:
    inbox = Inbox(context)
    push = pusher(context, inbox.address)
    for frames in (
        [b"junk"],
        [b""],
        [encode(Abort(1, 0)), b"second"],
        [bytes(MAX_MESSAGE_BYTES + 1)],
        [encode(Abort(1, 0))[:-1]],
    ):
        push.send_multipart(frames)
    assert until(lambda: inbox.bad_frames == 5, inbox)
    push.send(encode(Abort(2, 0)))
    assert take(inbox, 1) == [Abort(2, 0)]


def test_an_oversize_announcement_closes_that_connection_only(context: zmq.Context[Any]) -> None:
    inbox, outbox = Inbox(context), Outbox(context)
    host, port = inbox.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 4) + b"PUSH"
        raw.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        raw.sendall(b"\x02" + struct.pack(">Q", HARD_LIMIT_BYTES + 1))
        raw.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    outbox.send(inbox.address, Abort(1, 0))
    assert take(inbox, 1) == [Abort(1, 0)]


def test_raw_tcp_junk_does_not_hurt(context: zmq.Context[Any]) -> None:
    inbox, outbox = Inbox(context), Outbox(context)
    host, port = inbox.address.removeprefix("tcp://").split(":")
    for junk in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(100), b"\xff" * 100):
        with socket.create_connection((host, int(port))) as raw, contextlib.suppress(OSError):
            raw.sendall(junk)
    outbox.send(inbox.address, Abort(1, 0))
    assert take(inbox, 1) == [Abort(1, 0)]


def test_an_impossible_address_is_dropped_and_counted(context: zmq.Context[Any]) -> None:
    outbox = Outbox(context)
    for address in ("", "nonsense", "tcp://", "tcp://127.0.0.1:notaport", "http://127.0.0.1:1"):
        assert outbox.send(address, Abort(1, 0)) is False
    assert outbox.dropped == 5


def test_a_full_queue_drops_and_counts_instead_of_blocking(context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert SEND_QUEUE >= 10_000
    monkeypatch.setattr("wire.sockets.SEND_QUEUE", 10)
    outbox = Outbox(context)
    results = [outbox.send("tcp://127.0.0.1:1", Abort(i, 0)) for i in range(50)]
    assert results == [True] * 10 + [False] * 40
    assert outbox.dropped == 40


def test_forget_drops_what_was_queued_for_a_dead_peer(context: zmq.Context[Any]) -> None:
    outbox, port = Outbox(context), own_port()
    address = f"tcp://127.0.0.1:{port}"
    outbox.send(address, Abort(1, 0))
    outbox.forget(address)
    outbox.forget("tcp://127.0.0.1:1")
    time.sleep(0.1)  # closing happens in libzmq's thread
    again = Inbox(context, port=port)
    outbox.send(again.address, Abort(2, 0))
    assert take(again, 1) == [Abort(2, 0)]
    assert not again.wait(0.5)


_FORGETTING = """
import random, socket, threading, time, zmq
from wire.messages import PromptLogprobs
from wire.sockets import Outbox
context, listener = zmq.Context(), socket.create_server(("127.0.0.1", 0))
outbox, address = Outbox(context), "tcp://127.0.0.1:%d" % listener.getsockname()[1]
greeting = b"\\xff" + bytes(8) + b"\\x7f\\3\\0" + b"NULL".ljust(20, b"\\0") + bytes(32)
large = PromptLogprobs(1, 0, 0, bytes(4 << 20), b"", b"")
for _ in range(150):
    for _ in range(4):
        outbox.send(address, large)
    peer, _ = listener.accept()
    peer.sendall(greeting + b"\\4\\x1a\\5READY\\x0bSocket-Type\\0\\0\\0\\4PULL")
    peer.recv(200_000)
    time.sleep(random.choice([0, 0.003]))
    early_s = random.uniform(-1e-4, 1e-4)
    closing = threading.Timer(max(0.0, early_s), peer.close)
    closing.start()
    time.sleep(max(0.0, -early_s))
    outbox.forget(address)
    closing.join()
print("alive")
"""


def test_a_peer_that_dies_while_it_is_forgotten_does_not_take_us_along() -> None:
    """What libzmq 4.3.5 does with a message of several frames, of which it has sent a part."""
    done = subprocess.run([sys.executable, "-c", _FORGETTING], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "alive\n", done.stderr


def test_an_outbox_lets_go_of_the_peer_it_used_least_lately(context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.sockets.MAX_PEERS", 2)
    inboxes, outbox = [Inbox(context) for _ in range(3)], Outbox(context, linger_ms=30_000)
    for number in (0, 1, 0, 2):
        assert outbox.send(inboxes[number].address, Abort(number, 0))
    assert list(outbox._sockets) == [inboxes[0].address, inboxes[2].address]
    for number, count in ((0, 2), (1, 1), (2, 1)):  # and what was queued for it leaves all the same
        assert take(inboxes[number], count) == [Abort(number, 0)] * count
    outbox.close()
    for inbox in inboxes:
        inbox.close()


def test_a_process_may_have_a_socket_per_worker_of_a_full_cluster() -> None:
    context = open_context()
    outbox = Outbox(context, linger_ms=0)
    assert MAX_PEERS >= 1024
    assert context.get(zmq.MAX_SOCKETS) >= MAX_PEERS
    outbox.close()
    context.destroy(linger=0)


def test_a_link_that_has_healed_is_waited_for_ten_seconds_at_most(context: zmq.Context[Any]) -> None:
    """Whatever it lost, and for how long: no data waits longer to be acknowledged, no attempt to connect waits longer for its
    answer, and the next one begins when libzmq's own wait is over. tests/test_kv_hosts.py sees it happen."""
    inbox, outbox = Inbox(context), Outbox(context)
    outbox.send(inbox.address, Abort(1, 0))
    status = Status("prefill", "p1", "serving", inbox.address, {}, {}, [], b"", 1)
    heartbeat = Heartbeat(context, inbox.address, status)
    for connecting in (outbox._sockets[inbox.address], heartbeat._socket):
        waits_ms = [int(connecting.getsockopt(each)) for each in (zmq.TCP_MAXRT, zmq.CONNECT_TIMEOUT, zmq.RECONNECT_IVL_MAX)]
        assert all(waits_ms), "0 is for as long as TCP likes"
        unacknowledged_ms, *again_ms = waits_ms
        # TCP's waits double, so of one that is cut off at the first number half is left at most when the link heals within it.
        assert unacknowledged_ms / 2 + sum(again_ms) < 10_000
    heartbeat.close()
    outbox.close()
    inbox.close()


def test_a_peer_that_stands_still_for_seconds_loses_nothing(context: zmq.Context[Any]) -> None:
    """As a router that is stopped while its workers' tokens come: they fill what TCP holds for it, and wait."""
    count = 20_000
    reads = f"""
import time
from wire.sockets import Inbox, open_context
inbox, got = Inbox(open_context()), []
print(inbox.address, flush=True)
end_s = time.monotonic() + 60
while len(got) < {count} and time.monotonic() < end_s:
    inbox.wait(1.0)
    got += [message.rid for message in inbox.drain()]
print(got == list(range({count})), flush=True)
"""
    outbox = Outbox(context)
    with subprocess.Popen([sys.executable, "-c", reads], stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdout is not None
            address = peer.stdout.readline().strip()
            outbox.send(address, Failed(0, 0, 0, "internal", "", False, "decode"))
            time.sleep(0.5)
            peer.send_signal(signal.SIGSTOP)
            for rid in range(1, count):
                outbox.send(address, Failed(rid, 0, 0, "internal", 100 * "-", False, "decode"))
                if not rid % 100:
                    time.sleep(0.01)
            time.sleep(STILL_S)
            peer.send_signal(signal.SIGCONT)
            assert peer.stdout.readline().strip() == "True"
        finally:
            peer.kill()
            outbox.close()


def test_the_last_word_leaves_though_the_outbox_closes(context: zmq.Context[Any]) -> None:
    inbox, own = Inbox(context), zmq.Context[Any]()
    outbox = Outbox(own, linger_ms=30_000)  # a connection may take longer than the half second that a worker gives it
    outbox.send(inbox.address, Abort(1, 0))
    outbox.close()
    own.term()
    assert take(inbox, 1) == [Abort(1, 0)]


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@LOOPS
def test_attach_delivers_everything_though_a_handler_raises(context: zmq.Context[Any], new_loop: Any) -> None:
    loop: asyncio.AbstractEventLoop = new_loop()
    inbox, outbox = Inbox(context), Outbox(context)
    faults: list[Any] = []
    loop.set_exception_handler(lambda _, details: faults.append(details))
    got: list[int] = []
    done = asyncio.Event()

    def handle(message: Abort) -> None:
        got.append(message.rid)
        if len(got) == 1000:
            done.set()
        if message.rid % 100 == 7:
            raise RuntimeError("a bug in a handler")

    for i in range(1000):
        outbox.send(inbox.address, Abort(i, 0))
    time.sleep(0.2)  # all of them are there before anybody looks: only one edge
    inbox.attach(loop, handle)
    loop.run_until_complete(asyncio.wait_for(done.wait(), 30))
    assert got == list(range(1000))
    assert len(faults) == 10
    inbox.close()
    loop.run_until_complete(asyncio.sleep(0.05))
    assert len(faults) == 10  # nothing of it is left in the loop
    loop.close()


@LOOPS
def test_attach_wakes_for_messages_that_come_later_and_survives_junk(context: zmq.Context[Any], new_loop: Any) -> None:
    async def main() -> list[int]:
        inbox, outbox = Inbox(context), Outbox(context)
        push = pusher(context, inbox.address)
        got: list[int] = []
        inbox.attach(asyncio.get_running_loop(), lambda message: got.append(message.rid))
        for i in range(30):
            push.send(b"junk")
            outbox.send(inbox.address, Abort(i, 0))
            await asyncio.sleep(0.005)
        end_s = time.monotonic() + 30
        while (len(got) < 30 or inbox.bad_frames < 30) and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        assert inbox.bad_frames == 30
        inbox.close()
        return got

    loop: asyncio.AbstractEventLoop = new_loop()
    assert loop.run_until_complete(main()) == list(range(30))
    loop.close()


@LOOPS
def test_close_after_the_loop_is_gone(context: zmq.Context[Any], new_loop: Any) -> None:
    loop: asyncio.AbstractEventLoop = new_loop()
    inbox = Inbox(context)
    inbox.attach(loop, lambda message: None)
    loop.close()
    inbox.close()
    assert inbox.socket.closed
