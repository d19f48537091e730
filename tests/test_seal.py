"""Sealed bulk: a hand-off arrives as ever, and what was forged, changed or replayed does not land."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.receiver import Arrived, Receiver
from kvtransfer.sender import Sender, SendLost, Sent
from kvtransfer.transports import Drained, Landed, Lost, Wrote
from kvtransfer.transports.frame import LANDED, REFUSED, BadFrame, pack_chunk
from kvtransfer.transports.seal import TAG_BYTES, Seal, new_secret
from kvtransfer.transports.window import Runs, Window
from tests.transfer_rig import (
    LAYOUT,
    PAGE_TOKENS,
    Place,
    Proxy,
    RawReceiver,
    RawSender,
    Span,
    collect,
    header,
    place_table,
    small_arena,
    table,
    thread_transport,
    wait,
)  # fmt: skip

KEY, OTHER = (7, 0), (8, 0)
PAGE = LAYOUT.page_bytes
SECRET = new_secret()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def hand_over(sender: Sender, receiver: Receiver) -> list[Any]:
    """Passes on what the sender has sent until the receiver says how it ended."""
    ended: list[Any] = []

    def step() -> bool:
        for sent in sender.poll():
            assert isinstance(sent, Sent)
            receiver.ready(sent.ready)
        ended.extend(receiver.poll(0.0))
        return bool(ended)

    assert wait(step)
    return ended


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_a_sealed_hand_off_arrives(path: str) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    out, into = thread_transport(source, path), thread_transport(target, path)
    sender, receiver = Sender(source, out, sealed=True), Receiver(target, into, 5.0, new_secret)
    sender.open(KEY)
    sender.granted(receiver.open(KEY, 6, [11, 10, 2]))
    sender.push(KEY, [5, 3, 9], 4, 20, final=True)
    assert hand_over(sender, receiver) == [Arrived(KEY, 20)]
    for src, dst in zip([5, 3, 9], [11, 10, 2], strict=True):
        assert torch.equal(source.pages[src], target.pages[dst])
    for offset, nbytes in LAYOUT.live_slot_spans(20):
        assert torch.equal(source.slots[4, offset : offset + nbytes], target.slots[6, offset : offset + nbytes])
    assert into.counters()["bad_frames"] == 0
    out.close()
    into.close()


def test_nothing_leaves_in_the_clear(context: zmq.Context[Any]) -> None:
    source = small_arena(seed=1)
    sender, peer = thread_transport(source), RawReceiver(context)
    sender.write(peer.address, KEY, table([Span("page", 1, 1, 0, PAGE), Span("slot", 1, 1, 0, 40)]), SECRET)
    _, payload = peer.next()
    assert len(payload) == PAGE + 40 + TAG_BYTES
    assert bytes(source.pages[1, :16].tolist()) not in payload
    sender.close()


def test_a_chunk_that_is_sent_again_is_the_same_bytes_again_whoever_asks(context: zmq.Context[Any]) -> None:
    """Two tags under one nonce, of other headers, would give away the key that tags are made with."""
    sender, peer = thread_transport(small_arena(seed=1)), RawReceiver(context)
    meddler = Proxy(peer.address)
    sender.write(meddler.address, KEY, table([Span("page", 1, 1, 0, PAGE)]), SECRET)
    first = peer.chunk(status=None)
    peer.welcome = replace(peer.welcome, device=True)
    meddler.cut()
    again = peer.chunk(status=None)
    assert first is not None and again is not None
    assert pack_chunk(first[0]) == pack_chunk(again[0]) and first[1] == again[1]
    meddler.close()
    sender.close()


@pytest.mark.parametrize("paths", [("auto", "zeromq"), ("zeromq", "auto")], ids=["to zeromq", "to shm"])
def test_a_sealed_chunk_whose_path_changes_is_lost_and_not_called_corrupt(paths: tuple[str, str]) -> None:
    """It landed, its answer was lost, and the receiver takes another path when it is greeted again: the digest of what landed
    is of bytes or of tags, that of a second try would be of the other."""
    sender, receiver = thread_transport(small_arena(seed=1), "auto"), thread_transport(small_arena(seed=2), paths[0])
    proxy, inbound = Proxy(receiver.address()), receiver.inner._inbound
    settle = inbound.settle

    def answer_nobody(idle: bool) -> None:
        for landing in inbound._landings:
            landing.senders.clear()
        settle(idle)

    inbound.settle = answer_nobody
    receiver.expect(KEY, 3, [5], SECRET)
    sender.write(proxy.address, KEY, table([Span("page", 1, 5, 0, PAGE)]), SECRET)
    collect(receiver, len)
    inbound.settle, inbound._path = settle, paths[1]
    proxy.cut()
    (end,) = collect(sender, len)
    assert isinstance(end, Lost) and not end.corrupt and "changed the path" in end.reason
    receiver.expect(OTHER, 4, [6], SECRET)
    sender.write(proxy.address, OTHER, table([Span("page", 1, 6, 0, PAGE)]), SECRET)
    (wrote,), (landed,) = collect(sender, len), collect(receiver, len)
    assert isinstance(wrote, Wrote) and isinstance(landed, Landed) and wrote.digest == landed.digest
    proxy.close()
    sender.close()
    receiver.close()


def sealed(number: int, data: bytes, secret: bytes = SECRET, key: tuple[int, int] = KEY, page: int = 5) -> list[bytes]:
    """A chunk as its rightful sender would make it, or with one thing wrong."""
    head = header(key, [("page", page, 0, PAGE)], number)
    return [head, bytes(Seal(secret).close(number, 0, data, head))]


def changed(frames: list[bytes], frame: int, byte: int) -> list[bytes]:
    data = bytearray(frames[frame])
    data[byte] ^= 1
    return [bytes(data) if i == frame else each for i, each in enumerate(frames)]


ROGUES: dict[str, list[bytes]] = {
    "not sealed": [header(KEY, [("page", 5, 0, PAGE)]), bytes(PAGE)],
    "not sealed, of the right size": [header(KEY, [("page", 5, 0, PAGE)]), bytes(PAGE + TAG_BYTES)],
    "another secret": sealed(1, bytes(PAGE), new_secret()),
    "a bit of the bytes": changed(sealed(1, bytes(PAGE)), 1, 700),
    "a bit of the tag": changed(sealed(1, bytes(PAGE)), 1, -1),
    "the number": changed(sealed(1, bytes(PAGE)), 0, 24),
    "the span's page": [header(KEY, [("page", 6, 0, PAGE)]), sealed(1, bytes(PAGE))[1]],
    "the span's offset": [header(KEY, [("page", 5, 1, PAGE - 1), ("page", 6, 0, 1)]), sealed(1, bytes(PAGE))[1]],
    "of another attempt": [header(KEY, [("page", 5, 0, PAGE)]), sealed(1, bytes(PAGE), key=(7, 1))[1]],
    "cut short": [sealed(1, bytes(PAGE))[0], sealed(1, bytes(PAGE))[1][:-1]],
    "a tag alone": [sealed(1, bytes(PAGE))[0], sealed(1, bytes(PAGE))[1][-TAG_BYTES:]],
    "no payload": [sealed(1, bytes(PAGE))[0]],
}


@pytest.mark.parametrize("rogue", ROGUES.values(), ids=list(ROGUES))
def test_a_rogue_chunk_does_not_land_and_the_true_one_does(context: zmq.Context[Any], rogue: list[bytes]) -> None:
    target = small_arena()
    receiver = thread_transport(target)
    receiver.expect(KEY, 3, [5, 6], SECRET)
    peer = RawSender(context, receiver.address())
    peer.socket.send_multipart(rogue)
    assert wait(lambda: receiver.counters()["bad_frames"] == 1)
    assert receiver.poll() == []
    truth = os.urandom(PAGE)
    peer.socket.send_multipart(sealed(9, truth))
    (landed,) = collect(receiver, len)
    assert isinstance(landed, Landed)
    assert bytes(target.pages[5].tolist()) == truth
    receiver.close()


OVERLAPS = [
    (PAGE // 2, PAGE // 2, 0, PAGE),  # around what landed
    (0, PAGE, 0, PAGE - 1),
    (0, PAGE, 1, PAGE - 1),
    (0, PAGE, 500, 9),
    (400, 200, 0, 401),
    (400, 200, 599, 100),
]


@pytest.mark.parametrize("landed", OVERLAPS, ids=str)
def test_a_stranger_cannot_touch_what_has_landed(context: zmq.Context[Any], landed: tuple[int, int, int, int]) -> None:
    """Decrypting in place writes before it knows, so not one byte of a true chunk may be a target again."""
    at, nbytes, rogue_at, rogue_bytes = landed
    source, target = small_arena(seed=1), small_arena(seed=2)
    receiver = thread_transport(target)
    receiver.expect(KEY, 3, [5], SECRET)
    peer = RawSender(context, receiver.address())
    truth = bytes(source.pages[1, at : at + nbytes].tolist())
    head = header(KEY, [("page", 5, at, nbytes)], 9)
    peer.socket.send_multipart([head, bytes(Seal(SECRET).close(9, 0, truth, head))])
    assert peer.status() == LANDED
    peer.socket.send_multipart([header(KEY, [("page", 5, rogue_at, rogue_bytes)], 10), bytes(rogue_bytes + TAG_BYTES)])
    assert peer.status() == REFUSED
    assert bytes(target.pages[5, at : at + nbytes].tolist()) == truth
    receiver.close()


def test_a_hand_off_that_a_stranger_meddled_with_arrives_whole(context: zmq.Context[Any]) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    out, into = thread_transport(source), thread_transport(target)
    sender, receiver = Sender(source, out, sealed=True), Receiver(target, into, 5.0, new_secret)
    sender.open(KEY)
    sender.granted(receiver.open(KEY, 6, [11, 10]))
    sender.push(KEY, [5, 3], 4, PAGE_TOKENS, final=False)

    def something_landed() -> bool:
        receiver.poll(0.0)
        window = into.inner._inbound._windows.get(KEY)  # opened by the engine's thread, in its own time
        return window is not None and bool(window.numbers)

    assert wait(something_landed)
    rogue = RawSender(context, into.address())
    rogue.socket.send_multipart([header(KEY, [("page", 11, 0, PAGE - 1)], 10**6), bytes(PAGE - 1 + TAG_BYTES)])
    assert rogue.status() == REFUSED
    sender.push(KEY, [5, 3], 4, 2 * PAGE_TOKENS, final=True)
    assert hand_over(sender, receiver) == [Arrived(KEY, 2 * PAGE_TOKENS)]
    for src, dst in zip([5, 3], [11, 10], strict=True):
        assert torch.equal(source.pages[src], target.pages[dst])
    out.close()
    into.close()


WIDTH = 20  # bytes of a row of the arena below, which has 4 pages and 3 slots
numbers = st.sampled_from([0, 1, 2, 2, 3, 4, 5, 6, 2**32 - 1])
a_place = st.tuples(st.sampled_from(["page", "page", "slot"]), numbers, st.integers(0, WIDTH), st.integers(1, 8))
anywhere = st.tuples(st.sampled_from(["page", "slot"]), numbers, st.integers(0, 2**32 - 1), st.integers(1, 2**32 - 1))


a_chunk = st.lists(a_place | anywhere, min_size=1, max_size=3)
which = st.integers(0, 29)  # of the chunks that are on their ground: it is given back


@given(st.sets(st.integers(1, 3)), st.lists(a_chunk | a_chunk | which, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_a_window_knows_every_byte_that_may_still_be_written(
    pages: set[int], steps: list[list[Place] | int], order: random.Random
) -> None:
    """Also of chunks that were given back, whose bytes may come again, in whatever chunks."""
    window = Window(2, list(pages), {"page": (4, WIDTH), "slot": (3, WIDTH)}, 0, None)
    rows = [*[("page", page) for page in pages], ("slot", 2)]
    missing = {(*row, at) for row in rows for at in range(WIDTH)}
    claimed: dict[int, tuple[Runs, list[tuple[str, int, int]]]] = {}

    def take(number: int, chunk: list[Place], bytes_of_it: list[tuple[str, int, int]]) -> None:
        claimed[number] = window.claim(place_table(chunk)), bytes_of_it
        window.land(number, claimed[number][0])
        missing.difference_update(bytes_of_it)

    def give_back(number: int) -> None:
        ground, bytes_of_it = claimed.pop(number)
        window.give_back(number, ground)
        missing.update(bytes_of_it)

    for number, step in enumerate(steps):
        if isinstance(step, int):
            if claimed:
                give_back([*claimed][step % len(claimed)])
        else:
            wanted = [
                (kind, row, at) for kind, row, begin, nbytes in step for at in range(begin, begin + min(nbytes, WIDTH + 1))
            ]
            if missing.issuperset(wanted) and len(set(wanted)) == len(wanted):
                take(number, step, wanted)
            else:
                with pytest.raises(BadFrame):
                    window.claim(place_table(step))
        assert window.numbers == claimed.keys()
    single = order.sample(sorted(missing), len(missing))
    for at in range(0, len(single), 5):
        take(100 + at, [(*byte, 1) for byte in single[at : at + 5]], single[at : at + 5])
    with pytest.raises(BadFrame):
        window.claim(place_table([("slot", 2, order.randrange(WIDTH), 1)]))
    for number in order.sample([*claimed], len(claimed)):
        give_back(number)
    window.claim(place_table((*row, 0, WIDTH) for row in rows))


@pytest.mark.parametrize("offset", [4095 << 20, 2**32 - (1 << 20)], ids=["on it", "and past 32 bits"])
def test_another_pages_bytes_are_not_had_by_way_of_a_granted_one(offset: int) -> None:
    """By an offset that is larger than a page."""
    window = Window(1, [1, 4096], {"page": (5000, 1 << 20), "slot": (2, 64)}, 0, None)
    with pytest.raises(BadFrame, match="page 1 "):
        window.claim(place_table([("page", 1, offset, 1 << 20)]))


def test_a_replayed_chunk_does_not_land_again(context: zmq.Context[Any]) -> None:
    target = small_arena()
    receiver = thread_transport(target)
    peer = RawSender(context, receiver.address())
    receiver.expect(KEY, 3, [5], SECRET)
    frames = sealed(9, bytes(PAGE))
    peer.socket.send_multipart(frames)
    collect(receiver, len)
    target.pages[5].fill_(1)
    peer.socket.send_multipart(frames)
    assert wait(lambda: receiver.counters()["repeated_frames"] == 1)
    receiver.revoke(KEY)
    assert collect(receiver, len) == [Drained(KEY)]
    receiver.expect((8, 0), 3, [5], new_secret())
    peer.socket.send_multipart(frames)
    assert wait(lambda: receiver.counters()["late_frames"] == 1)
    assert int(target.pages[5].min()) == 1
    receiver.close()


def test_one_secret_for_each_grant() -> None:
    receiver = Receiver(small_arena(), thread := thread_transport(small_arena()), 1.0, new_secret)
    secrets = {receiver.open((rid, 0), 1 + rid, [1 + rid]).secret for rid in range(10)}
    assert len(secrets) == 10
    thread.close()


def test_a_grant_without_a_secret_is_not_taken_by_who_seals() -> None:
    arena = small_arena()
    out, into = thread_transport(arena), thread_transport(small_arena())
    sender, receiver = Sender(arena, out, sealed=True), Receiver(small_arena(), into, 1.0)
    sender.open(KEY)
    assert sender.granted(receiver.open(KEY, 3, [5]))
    sender.push(KEY, [1], 1, PAGE_TOKENS, final=True)
    (lost,) = sender.poll()
    assert isinstance(lost, SendLost)
    assert "nothing leaves here unsealed" in lost.reason
    out.close()
    into.close()


@pytest.mark.parametrize("secret", [b"x", b"x" * 15, b"x" * 24, b"x" * 33], ids=len)
def test_a_secret_of_another_length_is_refused_where_it_comes_in(secret: bytes) -> None:
    arena = small_arena()
    out, into = thread_transport(arena), thread_transport(small_arena())
    sender, receiver = Sender(arena, out), Receiver(small_arena(), into, 1.0)
    sender.open(KEY)
    sender.push(KEY, [1], 1, PAGE_TOKENS, final=True)
    assert sender.granted(replace(receiver.open(KEY, 3, [5]), secret=secret))
    (lost,) = sender.poll()
    assert isinstance(lost, SendLost)
    assert f"grant: a secret of {len(secret)} bytes; it has 16 or 32" in lost.reason
    with pytest.raises(ValueError, match="16 or 32"):
        out.write(into.address(), (8, 0), table([Span("page", 1, 5, 0, PAGE)]), secret)
    with pytest.raises(ValueError, match="16 or 32"):
        into.expect((8, 0), 4, [6], secret)
    out.close()
    into.close()


def test_a_sender_without_the_secret_is_refused() -> None:
    out, into = thread_transport(small_arena()), thread_transport(small_arena())
    into.expect(KEY, 3, [5], SECRET)
    out.write(into.address(), KEY, table([Span("page", 1, 5, 0, PAGE)]))
    (lost,) = collect(out, len)
    assert isinstance(lost, Lost)
    assert "refuses the bytes" in lost.reason
    out.write(into.address(), (8, 0), table([Span("page", 1, 5, 0, PAGE)]), new_secret())
    into.expect((8, 0), 3, [5])  # and bytes that are sealed do not fit where none are expected to be
    assert not [event for event in collect(out, len) if isinstance(event, Wrote)]
    out.close()
    into.close()


def test_a_seal_that_does_not_fit_is_a_bad_frame() -> None:
    import numpy as np

    seal, out = Seal(SECRET), np.empty(10, dtype=np.uint8)
    good = memoryview(seal.close(1, 2, b"0123456789", b"head"))
    seal.open_into(1, 2, good, b"head", out)
    assert out.tobytes() == b"0123456789"
    for number, index, frame, head in (
        (2, 2, good, b"head"),
        (1, 3, good, b"head"),
        (1, 2, good[1:], b"head"),
        (1, 2, good, b"x"),
    ):
        with pytest.raises(BadFrame):
            seal.open_into(number, index, frame, head, out)
