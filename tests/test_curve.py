"""With a cluster key only members get through; without one nothing listens beyond this host unless that is said."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from router.config import RouterConfig
from scripts import make_keys
from wire.curve import ClusterKey, require_key
from wire.heartbeat import Heartbeat
from wire.messages import Abort, Status
from wire.sockets import Inbox, Outbox, open_context
from wire.worker import WorkerConfig

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = str(tmp_path / "cluster.key")
    ClusterKey.generate().write(path)
    return path


@pytest.fixture
def contexts() -> Iterator[Callable[[str], zmq.Context[Any]]]:
    opened: list[zmq.Context[Any]] = []

    def build(key: str) -> zmq.Context[Any]:
        opened.append(open_context(key))
        return opened[-1]

    yield build
    for context in opened:
        context.destroy(linger=0)


def received(inbox: Inbox, timeout_s: float = 30.0) -> list[Any]:
    inbox.wait(timeout_s)
    return list(inbox.drain())


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def stranger(who: str, contexts: Callable[[str], zmq.Context[Any]], key_file: str, folder: Path) -> zmq.Context[Any]:
    """Somebody's context who has no key, or not this cluster's."""
    context = contexts("")
    if who == "another key":
        ClusterKey.generate().write(str(folder / "other.key"))
        context = contexts(str(folder / "other.key"))
    elif who == "knows the public half":
        own = ClusterKey.generate()
        context.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        context.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        context.setsockopt(zmq.CURVE_SERVERKEY, ClusterKey.read(key_file).public)
    return context


def test_members_talk(contexts: Callable[[str], zmq.Context[Any]], key_file: str) -> None:
    inbox, outbox = Inbox(contexts(key_file)), Outbox(contexts(key_file))
    outbox.send(inbox.address, Abort(1, 2))
    assert received(inbox) == [Abort(1, 2)]
    status = Status("decode", "d", "serving", "tcp://x", {}, {}, [{}, {}, {}], b"", 1)
    heartbeat = Heartbeat(contexts(key_file), inbox.address, status)
    assert received(inbox)[0] == status  # and again every half second
    heartbeat.close()
    assert inbox.refused_peers == 0


@pytest.mark.parametrize("who", ["no key", "another key", "knows the public half"])
def test_who_is_no_member_is_refused_and_counted_and_members_still_talk(
    contexts: Callable[[str], zmq.Context[Any]], key_file: str, tmp_path: Path, who: str
) -> None:
    inbox, outsider = Inbox(contexts(key_file)), Outbox(stranger(who, contexts, key_file, tmp_path))
    outsider.send(inbox.address, Abort(6, 6))
    assert until(lambda: inbox.refused_peers > 0)
    member = Outbox(contexts(key_file))
    member.send(inbox.address, Abort(1, 2))
    assert received(inbox) == [Abort(1, 2)]
    outsider.close()
    member.close()


@pytest.mark.parametrize("who", ["no key", "another key", "knows the public half"])
def test_who_is_turned_away_is_named_in_a_line_now_and_then(
    contexts: Callable[[str], zmq.Context[Any]],
    key_file: str,
    tmp_path: Path,
    who: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By an inbox to which nobody else says anything, as a router's when all its workers have another key."""
    monkeypatch.setattr("wire.curve.WARN_AFTER_S", 0.2)
    monkeypatch.setattr("wire.sockets.LOOK_S", 0.05)
    inbox, outsider = Inbox(contexts(key_file)), Outbox(stranger(who, contexts, key_file, tmp_path))
    member = Outbox(contexts(key_file))

    async def lines(count: int) -> list[str]:
        end_s = time.monotonic() + 30
        while len(caplog.messages) < count and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        return caplog.messages

    async def run() -> None:
        got: list[Any] = []
        inbox.attach(asyncio.get_running_loop(), got.append)
        member.send(inbox.address, Abort(1, 2))
        while not got:
            await asyncio.sleep(0.01)
        outsider.send(inbox.address, Abort(6, 6))
        [line] = await lines(1)
        told = r"connections turned away at (\S+): (\d+)(.*)\. They do not show this cluster's key: do all processes .*"
        where, count, hosts = re.fullmatch(told, line).groups()  # type: ignore[union-attr]
        assert (where, hosts) == (inbox.address, ", some from 127.0.0.1" if who == "knows the public half" else "")
        assert 0 < int(count) <= inbox.refused_peers
        before = inbox.refused_peers
        while inbox.refused_peers == before:
            outsider.forget(inbox.address)
            outsider.send(inbox.address, Abort(6, 6))
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)  # longer than the first line waited
        assert len(caplog.messages) == 1
        assert inbox._refused is not None
        assert inbox._refused._refusals is not None
        inbox._refused._refusals._warn_at_s = 0.0  # a minute later
        _, line = await lines(2)
        where, more, again = re.fullmatch(told, line).groups()  # type: ignore[union-attr]
        assert (where, again) == (inbox.address, hosts) and 0 < int(more) <= inbox.refused_peers - int(count)
        inbox.close()

    with caplog.at_level(logging.WARNING, "wire"):
        asyncio.run(run())
    assert len(caplog.messages) == 2
    outsider.close()
    member.close()


@pytest.mark.parametrize("here", [True, False], ids=["sender has a key", "listener has a key"])
def test_who_was_turned_away_gets_through_once_the_other_side_is_started_again_as_it_should_be(
    contexts: Callable[[str], zmq.Context[Any]], key_file: str, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """With a key at one side only libzmq gives the connection up for good."""
    monkeypatch.setattr("wire.sockets.CONNECT_AGAIN_S", 0.2)
    ours, wrong = (key_file, "") if here else ("", key_file)
    outbox, inbox = Outbox(contexts(ours)), Inbox(contexts(wrong))
    address, port = inbox.address, int(inbox.address.rpartition(":")[2])
    status = Status("decode", "d", "serving", "tcp://x", {}, {}, [{}, {}, {}], b"", 1)
    heartbeat = Heartbeat(contexts(ours), address, status, period_s=0.02, unheard_s=1.0)
    assert until(lambda: not outbox.send(address, Abort(1, 1))), "it is turned away"
    assert until(lambda: heartbeat._unheard_since_s is not None)
    inbox.close()
    context, opened = contexts(ours), list[Inbox]()

    def opens() -> bool:  # libzmq closes the other in its own time
        with contextlib.suppress(zmq.ZMQError):
            opened.append(Inbox(context, port=port))
        return bool(opened)

    assert until(opens)
    assert until(lambda: status in received(opened[0], 0.1))
    assert until(lambda: outbox.send(address, Abort(2, 2)) and Abort(2, 2) in received(opened[0], 0.1))
    heartbeat.close()
    outbox.close()
    opened[0].close()


def test_nothing_is_readable_on_the_wire(contexts: Callable[[str], zmq.Context[Any]], key_file: str) -> None:
    """A stranger that listens where a member sends gets nothing: the member wants proof first."""
    inbox, outbox = Inbox(contexts("")), Outbox(contexts(key_file))
    outbox.send(inbox.address, Abort(1, 2))
    assert received(inbox, 0.3) == []


def test_junk_during_the_greeting_ends_that_connection_only(contexts: Callable[[str], zmq.Context[Any]], key_file: str) -> None:
    import socket

    inbox, outbox = Inbox(contexts(key_file)), Outbox(contexts(key_file))
    host, port = inbox.address.removeprefix("tcp://").split(":")
    for junk in (b"x", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(junk)
    outbox.send(inbox.address, Abort(1, 2))
    assert received(inbox) == [Abort(1, 2)]


@pytest.mark.parametrize("content", [b"", b"junk", b"a b c", b"x" * 40 + b"\n" + b"y" * 40])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is no cluster key: make one with"):
        open_context(str(path))


def test_a_key_that_others_can_read_or_that_is_not_there_is_refused(key_file: str) -> None:
    os.chmod(key_file, 0o640)
    with pytest.raises(ValueError, match="can be read by others: chmod 600"):
        open_context(key_file)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        open_context(key_file + ".not")


def test_a_secret_is_never_printed(key_file: str) -> None:
    key = ClusterKey.read(key_file)
    assert key.secret.decode() not in repr(key)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "worker.example"])
def test_listening_beyond_this_host_takes_a_key_or_a_word(host: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="can be reached from other hosts: give every process --cluster-key"):
        WorkerConfig(model="m", router="tcp://r:1", host=host, advertise="me")
    with pytest.raises(ValueError, match="can be reached from other hosts"):
        RouterConfig(inbox_host=host, advertise="me")
    WorkerConfig(model="m", router="tcp://r:1", host=host, advertise="me", cluster_key="file")
    RouterConfig(inbox_host=host, advertise="me", cluster_key="file")
    with caplog.at_level(logging.WARNING):
        WorkerConfig(model="m", router="tcp://r:1", host=host, advertise="me", insecure=True)
    assert "INSECURE" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    require_key("--host", host, "", False)


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--out"], 2), ([], 2), (["one", "two"], 2)])
def test_make_keys_writes_no_file_for_an_option(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        make_keys.main(arguments)
    assert stop.value.code == code
    assert "usage: python -m scripts.make_keys" in "".join(capsys.readouterr())
    assert not list(tmp_path.iterdir())


def test_make_keys_makes_one_and_never_overwrites(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.make_keys", str(tmp_path / "k")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first = ClusterKey.read(str(tmp_path / "k"))
    assert first.secret.decode() not in done.stdout
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "is never replaced: give another name" in done.stderr) == (1, True)
    assert ClusterKey.read(str(tmp_path / "k")) == first
