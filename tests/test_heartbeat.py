"""The heartbeat: told at once, twice a second whatever the loop does, "gone" last, and never a backlog."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.ports import closed_port, inbox_again, own_port
from wire.curve import ClusterKey, secure
from wire.heartbeat import Heartbeat
from wire.messages import Status
from wire.sockets import Inbox


def status(queued: int = 0) -> Status:
    return Status(
        "prefill", "p1", "serving", "tcp://127.0.0.1:1", {"page_tokens": 256}, {"queued": queued}, [{}, {}, {}], b"", 1
    )


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


PATIENCE_S = 30.0  # a machine may be busy with other things


def collect(inbox: Inbox, seconds: float) -> list[Status]:
    """What comes within that time."""
    found: list[Status] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        inbox.wait(max(0.0, end_s - time.monotonic()))
        found += inbox.drain()
    return found


def await_word(inbox: Inbox, enough: Callable[[Status], bool]) -> list[Status]:
    """What comes up to the word that is waited for."""
    found: list[Status] = []
    end_s = time.monotonic() + PATIENCE_S
    while not (found and enough(found[-1])):
        assert time.monotonic() < end_s, f"it never came, but {found[-5:]}"
        inbox.wait(0.1)
        found += inbox.drain(limit=1)
    return found


def is_gone(status: Status) -> bool:
    return status.state == "gone"


def test_first_word_is_immediate_and_the_last_one_is_gone(context: zmq.Context[Any]) -> None:
    inbox = Inbox(context)
    heartbeat = Heartbeat(context, inbox.address, status(1))
    assert inbox.wait(PATIENCE_S)
    first = next(inbox.drain(limit=1))
    assert (first.state, first.load) == ("serving", {"queued": 1})
    heartbeat.publish(status(2))
    heartbeat.close()
    assert await_word(inbox, is_gone)[-1].load == {"queued": 2}
    assert not collect(inbox, 0.2)
    inbox.close()


def test_a_loop_that_publishes_nothing_falls_silent_until_it_does_again(context: zmq.Context[Any]) -> None:
    inbox = Inbox(context)
    heartbeat = Heartbeat(context, inbox.address, status(1), period_s=0.02, stale_s=0.5)
    end_s = time.monotonic() + PATIENCE_S
    while not inbox.wait(0.1):  # on a busy machine it may be stale before there is a connection
        assert time.monotonic() < end_s, "it beats"
        heartbeat.publish(status(1))
    time.sleep(0.6)  # from now on it is silent, but for what is on its way
    while collect(inbox, 0.3):
        assert time.monotonic() < end_s, "it goes on for ever"
    heartbeat.publish(status(2))
    assert [beat.load for beat in await_word(inbox, lambda beat: True)] == [{"queued": 2}]
    heartbeat.close()
    inbox.close()


class Counted(Heartbeat):
    """Knows how many words it has sent: when they come is not its own affair."""

    sent = 0

    def _send(self, frame: bytes) -> None:
        self.sent += 1
        super()._send(frame)


def test_it_beats_while_the_loop_computes_and_repeats_the_last_word(context: zmq.Context[Any]) -> None:
    inbox = Inbox(context)
    heartbeat = Counted(context, inbox.address, status(7), period_s=0.05)
    assert inbox.wait(PATIENCE_S)
    before = heartbeat.sent
    number, end_s = 0, time.thread_time() + 0.6  # of this thread: others may have the processor meanwhile
    while time.thread_time() < end_s:
        number += 1  # a loop that never lets go of the interpreter by itself
    beats = heartbeat.sent - before
    heartbeat.close()
    assert beats >= 6
    assert all(word.load == {"queued": 7} for word in collect(inbox, 0.2))
    inbox.close()


def test_a_router_that_comes_back_gets_the_newest_word_only(context: zmq.Context[Any]) -> None:
    inbox = Inbox(context, port=own_port())
    port = int(inbox.address.rsplit(":", 1)[1])
    heartbeat = Heartbeat(context, inbox.address, status(0), period_s=0.01)
    assert inbox.wait(PATIENCE_S)
    inbox.close()
    time.sleep(0.3)
    for number in range(50):
        heartbeat.publish(status(number))
        time.sleep(0.01)
    heartbeat.publish(status(1000))
    time.sleep(0.05)
    back = inbox_again(context, port)
    assert back.wait(PATIENCE_S)
    messages = await_word(back, lambda message: message.load["queued"] == 1000)
    assert len(messages) <= 2, "one may have been on the way"
    assert all(message.load["queued"] == 1000 for message in collect(back, 0.2))
    heartbeat.close()
    back.close()


def test_what_cannot_be_encoded_fails_where_it_is_published(context: zmq.Context[Any]) -> None:
    inbox = Inbox(context)
    heartbeat = Heartbeat(context, inbox.address, status())
    bad = Status("prefill", "p1", "serving", "", {}, {"queued": object()}, [], b"", 1)
    with pytest.raises(TypeError):
        heartbeat.publish(bad)
    heartbeat.close()
    await_word(inbox, is_gone)
    inbox.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_router_that_is_not_there_is_warned_of_once(context: zmq.Context[Any], caplog: pytest.LogCaptureFixture) -> None:
    with closed_port() as port:
        begin_s = time.monotonic()
        heartbeat = Heartbeat(context, f"tcp://127.0.0.1:{port}", status(), period_s=0.02, unheard_s=0.2)
        await_warning(caplog)
        assert time.monotonic() - begin_s > 0.19, "it waits before it warns"
        time.sleep(0.2)  # ten more beats
        heartbeat.close()
    (line,) = warnings_of(caplog)
    assert f"tcp://127.0.0.1:{port} " in line and "--cluster-key" in line


def await_warning(caplog: pytest.LogCaptureFixture) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not warnings_of(caplog):
        assert time.monotonic() < end_s, "it never warns"
        time.sleep(0.01)


@pytest.mark.parametrize("worker_has", ["another key", "no key", "the key"])
def test_only_a_router_with_another_key_is_warned_of(worker_has: str, caplog: pytest.LogCaptureFixture) -> None:
    """The connection is made either way: it is the handshake that fails."""
    ours, router, worker = ClusterKey.generate(), zmq.Context[Any](), zmq.Context[Any]()
    secure(router, ours)
    if worker_has != "no key":
        secure(worker, ours if worker_has == "the key" else ClusterKey.generate())
    inbox = Inbox(router)
    unheard_s = 1.5 if worker_has == "the key" else 0.5
    heartbeat = Heartbeat(worker, inbox.address, status(), period_s=0.02, unheard_s=unheard_s)
    if worker_has == "the key":
        assert inbox.wait(PATIENCE_S)
        caplog.clear()  # on a busy machine the handshake may take that long
    else:
        await_warning(caplog)
    heard = collect(inbox, unheard_s + 0.2)
    heartbeat.close()
    inbox.close()
    for each in (router, worker):
        each.destroy(linger=0)
    assert bool(heard) == (worker_has == "the key")
    assert len(warnings_of(caplog)) == (worker_has != "the key")


def test_a_connection_that_cannot_be_made_again_leaves_the_old_one(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, tried = own_port(), threading.Event()
    heartbeat = Heartbeat(context, f"tcp://127.0.0.1:{port}", status(), period_s=0.02, unheard_s=0.05)

    def too_many_sockets() -> None:
        tried.set()
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(heartbeat, "_connect", too_many_sockets)
    assert tried.wait(PATIENCE_S)
    inbox = inbox_again(context, port)
    assert inbox.wait(PATIENCE_S), "it beats on"
    heartbeat.close()
    inbox.close()


def test_a_router_that_was_warned_of_and_is_there_again_is_said_once(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wire")
    port = own_port()
    heartbeat = Heartbeat(context, f"tcp://127.0.0.1:{port}", status(), period_s=0.02, unheard_s=0.2)
    await_warning(caplog)
    inbox = inbox_again(context, port)
    assert inbox.wait(PATIENCE_S)
    collect(inbox, 0.2)
    heartbeat.close()
    inbox.close()
    assert caplog.messages.count(f"the router tcp://127.0.0.1:{port} is there again") == 1


def test_an_address_that_is_none_raises(context: zmq.Context[Any]) -> None:
    with pytest.raises(zmq.ZMQError):
        Heartbeat(context, "tcp://nothing", status())
