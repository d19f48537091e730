"""One suite over every transport: order, integrity, windows, back-pressure, peers that die, frames that lie."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.arena import Arena
from kvtransfer.digest import combine, span_digest
from kvtransfer.layout import Field, KVLayout
from kvtransfer.transports import Landed, Lost, Place, Span, Transport, Wrote, open_transport
from kvtransfer.transports.frame import MAX_SPANS, BadFrame, pack_header, unpack
from kvtransfer.transports.outbound import MESSAGE_BYTES
from kvtransfer.transports.zeromq import ZeroMQTransport
from tests.transfer_rig import LAYOUT, Proxy, collect, of_type, raw_pull, raw_push, refused, small_arena, wait

PAGE, SLOT = LAYOUT.page_bytes, LAYOUT.slot_bytes
KEY = (7, 0)
Opener = Callable[..., Transport]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["zeromq"])
def opener(request: pytest.FixtureRequest, context: zmq.Context[Any]) -> Iterator[Opener]:
    """Opens transports of the kind under test, and closes them."""
    opened: list[Transport] = []

    def build(arena: Arena, stall_s: float = 30.0) -> Transport:
        kinds = {"zeromq": ZeroMQTransport}
        opened.append(kinds[request.param](context, arena, stall_s=stall_s))
        return opened[-1]

    yield build
    for each in opened:
        each.close()


def page_span(src: int, dst: int) -> Span:
    return Span("page", src, dst, 0, PAGE)


def landed_places(events: list[Any], key: tuple[int, int] = KEY) -> list[Place]:
    return [place for event in of_type(events, Landed) if event.key == key for place in event.places]


def frame(key: tuple[int, int], places: list[Place], payload: bytes | None = None) -> bytes:
    return pack_header(key, places) + (bytes(sum(place[3] for place in places)) if payload is None else payload)


# --- the good path


def test_bytes_land_where_they_should_and_nowhere_else(opener: Opener) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    before_pages, before_slots = target.pages.clone(), target.slots.clone()
    receiver.expect(KEY, 3, [5, 9])
    slot_spans = [Span("slot", 2, 3, offset, 40) for offset in range(0, SLOT - 40, 80)]
    sender.write(receiver.address(), KEY, [page_span(1, 9), page_span(2, 5), *slot_spans])
    spans = collect(receiver, lambda events: len(landed_places(events)) == 2 + len(slot_spans))
    assert landed_places(spans) == [page_span(1, 9).place, page_span(2, 5).place, *[span.place for span in slot_spans]]
    before_pages[9], before_pages[5] = source.pages[1], source.pages[2]
    for span in slot_spans:
        part = slice(span.offset, span.offset + 40)
        before_slots[3, part] = source.slots[2, part]
    assert torch.equal(target.pages, before_pages)
    assert torch.equal(target.slots, before_slots)
    assert (sender.bad_frames, receiver.bad_frames) == (0, 0)


def test_digests_agree_and_are_of_the_bytes(opener: Opener) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    receiver.expect(KEY, 3, [5])
    sender.write(receiver.address(), KEY, [page_span(1, 5), Span("slot", 2, 3, 64, 100)])
    wrote = collect(sender, len)
    landed = collect(receiver, lambda events: len(landed_places(events)) == 2)
    page, slot = bytes(source.pages[1].tolist()), bytes(source.slots[2, 64:164].tolist())
    digest = combine((span_digest(KEY, "page", 5, 0, page), span_digest(KEY, "slot", 3, 64, slot)))
    assert wrote == [Wrote(KEY, 2, PAGE + 100, digest)]
    assert combine(event.digest for event in of_type(landed, Landed)) == digest


def test_the_digest_is_of_what_landed_in_the_arena(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy into the arena that goes wrong is seen."""
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    memory = receiver._inbound._memory  # type: ignore[attr-defined]
    scatter = memory.scatter

    def faulty(places: Any, data: Any, mark: Any) -> Any:
        landed = scatter(places, data, mark)
        target.pages[5, 17] ^= 1
        return landed

    monkeypatch.setattr(memory, "scatter", faulty)
    receiver.expect(KEY, 3, [5])
    sender.write(receiver.address(), KEY, [page_span(1, 5)])
    assert of_type(collect(sender, len), Wrote)[0].digest != of_type(collect(receiver, len), Landed)[0].digest


def test_spans_of_one_hand_off_land_in_the_order_they_were_written(opener: Opener) -> None:
    source, target = small_arena(), small_arena(num_pages=400)
    sender, receiver = opener(source), opener(target)
    receiver.expect(KEY, 1, list(range(1, 400)))
    for dst in range(1, 400):
        sender.write(receiver.address(), KEY, [page_span(dst % 30, dst)])
    events = collect(receiver, lambda events: len(landed_places(events)) == 399)
    assert [place[1] for place in landed_places(events)] == list(range(1, 400))


def test_small_spans_share_a_message(opener: Opener, context: zmq.Context[Any]) -> None:
    sender = opener(small_arena())
    pull, address = raw_pull(context)
    spans = [Span("slot", 1, 2, offset, 3) for offset in range(0, SLOT - 3, 7)]
    assert len(spans) > 300
    sender.write(address, KEY, spans)
    assert pull.poll(5000)
    key, places, payload = unpack(memoryview(pull.recv()))
    assert (key, list(places), payload.nbytes) == (KEY, [span.place for span in spans], 3 * len(spans))


def test_large_writes_are_cut_into_messages_of_bounded_size(opener: Opener, context: zmq.Context[Any]) -> None:
    layout = KVLayout.pack(8, [Field(0, "a", 0, 1, 1 << 20, 8)], [Field(0, "b", 0, MAX_SPANS + 10, 64, keep=1)])
    sender = opener(Arena(layout, 10, 2))
    pull, address = raw_pull(context)
    spans = [Span("page", page, page, 0, 1 << 20) for page in range(1, 10)]
    spans += [Span("slot", 1, 1, row * 64, 64) for row in range(MAX_SPANS + 10)]
    sender.write(address, KEY, spans)
    got: list[Place] = []
    while len(got) < len(spans):
        assert pull.poll(5000)
        _, places, payload = unpack(memoryview(pull.recv()))
        assert payload.nbytes <= MESSAGE_BYTES
        got += places
    assert got == [span.place for span in spans]


def test_two_hundred_hand_offs_at_once(opener: Opener) -> None:
    count = 200
    source, target = small_arena(num_pages=count + 1, seed=1), small_arena(num_pages=2 * count + 1, num_slots=count + 1)
    senders, receiver = [opener(source) for _ in range(2)], opener(target)
    for i in range(count):
        receiver.expect((i, 0), i + 1, [2 * i + 1, 2 * i + 2])
    for i in range(count):
        spans = [page_span(i + 1, 2 * i + 2), page_span(count - i, 2 * i + 1)]
        senders[i % 2].write(receiver.address(), (i, 0), spans)
    events = collect(receiver, lambda events: len(events) == count)
    assert sorted(event.key for event in events) == [(i, 0) for i in range(count)]
    for i in range(count):
        assert torch.equal(target.pages[2 * i + 2], source.pages[i + 1])
        assert torch.equal(target.pages[2 * i + 1], source.pages[count - i])
    assert receiver.bad_frames == 0


def test_the_descriptor_is_readable_exactly_while_there_are_events(opener: Opener) -> None:
    sender, receiver = opener(small_arena()), opener(small_arena())
    receiver.expect(KEY, 1, [1])
    assert not select.select([receiver.fileno()], [], [], 0)[0]
    sender.write(receiver.address(), KEY, [page_span(1, 1)])
    assert select.select([receiver.fileno()], [], [], 5)[0]
    assert len(receiver.poll()) == 1
    assert not select.select([receiver.fileno()], [], [], 0)[0]
    assert receiver.poll() == []


def test_close_ends_the_thread_and_frees_the_port(opener: Opener) -> None:
    transport = opener(small_arena())
    port = int(transport.address().rsplit(":", 1)[1])
    transport.close()
    transport.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtransfer"]

    def free() -> bool:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True

    assert wait(free, 2)


def test_open_transport_by_name(context: zmq.Context[Any]) -> None:
    transport = open_transport("zeromq", context, small_arena(), "127.0.0.1", "worker.example")
    assert transport.address().startswith("tcp://worker.example:")
    transport.close()
    with pytest.raises(ValueError, match="'pigeon'"):
        open_transport("pigeon", context, small_arena(), "127.0.0.1", "")


# --- what the caller may not do


@pytest.mark.parametrize(
    "span",
    [
        Span("page", 99, 1, 0, 1),
        Span("page", -1, 1, 0, 1),
        Span("page", 1, 1, 0, 0),
        Span("page", 1, 1, -1, 5),
        Span("page", 1, 1, 1, PAGE),
        Span("slot", 1, 1, 0, SLOT + 1),
        Span("page", 1, 2**32, 0, 1),
        Span("page", 1, -1, 0, 1),
        Span("block", 1, 1, 0, 1),
    ],
    ids=repr,
)
def test_a_span_that_cannot_be_is_refused_and_nothing_is_queued(opener: Opener, context: zmq.Context[Any], span: Span) -> None:
    sender = opener(small_arena())
    pull, address = raw_pull(context)
    with pytest.raises(ValueError, match="Span"):
        sender.write(address, KEY, [page_span(1, 1), span])
    assert not pull.poll(50)


@pytest.mark.parametrize("key", [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_a_key_that_does_not_fit_is_refused(opener: Opener, key: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        opener(small_arena()).write("tcp://127.0.0.1:1", key, [page_span(1, 1)])


@pytest.mark.parametrize(("slot", "pages"), [(0, [1]), (99, [1]), (1, [0]), (1, [1, 32])])
def test_a_window_outside_the_arena_is_refused(opener: Opener, slot: int, pages: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot be granted"):
        opener(small_arena()).expect(KEY, slot, pages)


# --- frames that lie


BAD_FRAMES: dict[str, list[bytes]] = {
    "nothing": [b""],
    "one byte": [b"x"],
    "junk": [os.urandom(5000)],
    "http": [b"GET / HTTP/1.1\r\n\r\n"],
    "truncated header": [frame(KEY, [("page", 5, 0, 100)])[:30]],
    "truncated payload": [frame(KEY, [("page", 5, 0, 100)])[:-1]],
    "payload too long": [frame(KEY, [("page", 5, 0, 100)]) + b"x"],
    "wrong magic": [b"pdK0" + frame(KEY, [("page", 5, 0, 100)])[4:]],
    "no spans": [frame(KEY, [])],
    "too many spans": [struct.pack("<4sIQI", b"pdK1", 0, 7, 2**32 - 1)],
    "wrong rid": [frame((8, 0), [("page", 5, 0, 100)])],
    "wrong attempt": [frame((7, 1), [("page", 5, 0, 100)])],
    "wrong page": [frame(KEY, [("page", 6, 0, 100)])],
    "page zero": [frame(KEY, [("page", 0, 0, 100)])],
    "page far outside": [frame(KEY, [("page", 2**32 - 1, 0, 100)])],
    "wrong slot": [frame(KEY, [("slot", 4, 0, 100)])],
    "slot number as page": [frame(KEY, [("page", 3, 0, 100)])],
    "over the end": [frame(KEY, [("page", 5, PAGE - 99, 100)])],
    "offset outside": [frame(KEY, [("page", 5, 2**32 - 1, 100)])],
    "slot over the end": [frame(KEY, [("slot", 3, SLOT, 1)])],
    "empty span": [frame(KEY, [("page", 5, 0, 0), ("page", 5, 0, 10)])],
    "unknown kind": [struct.pack("<4sIQIBxxxIII", b"pdK1", 0, 7, 1, 2, 5, 0, 4) + b"1234"],
    "good span, then bad one": [frame(KEY, [("page", 5, 0, 100), ("page", 6, 0, 100)])],
    "two parts": [frame(KEY, [("page", 5, 0, 100)]), b"more"],
    "many parts": [frame(KEY, [("page", 5, 0, 100)])] * 50,
}


@pytest.mark.parametrize("frames", BAD_FRAMES.values(), ids=list(BAD_FRAMES))
def test_a_bad_frame_is_counted_dropped_and_touches_nothing(
    opener: Opener, context: zmq.Context[Any], frames: list[bytes]
) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    before_pages, before_slots = target.pages.clone(), target.slots.clone()
    receiver.expect(KEY, 3, [5])
    push = raw_push(context, receiver.address())
    push.send_multipart(frames)
    assert wait(lambda: receiver.bad_frames == 1)
    assert torch.equal(target.pages, before_pages)
    assert torch.equal(target.slots, before_slots)
    assert receiver.poll() == []
    sender.write(receiver.address(), KEY, [page_span(1, 5)])  # and the good ones still land
    collect(receiver, len)
    assert torch.equal(target.pages[5], source.pages[1])


@given(st.binary(max_size=120))
@settings(max_examples=300, deadline=None)
def test_unpack_raises_nothing_but_bad_frame(data: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(memoryview(data))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_unpack_of_a_changed_header_is_consistent_or_bad(data: st.DataObject) -> None:
    raw = bytearray(frame(KEY, [("page", 5, 0, 40), ("slot", 3, 64, 2)]))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, places, payload = unpack(memoryview(raw))
    except BadFrame:
        return
    assert payload.nbytes == sum(place[3] for place in places) == 42


def zmtp(address: str) -> socket.socket:
    """A TCP connection that has done ZeroMQ's greeting as a PUSH socket."""
    host, port = address.removeprefix("tcp://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=5)
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 4) + b"PUSH"
    raw.sendall(
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04" + bytes([len(ready)]) + ready
    )
    return raw


def closed_by_peer(raw: socket.socket) -> bool:
    try:
        while raw.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_an_oversize_frame_ends_that_connection_only(opener: Opener) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    receiver.expect(KEY, 3, [5])
    with zmtp(receiver.address()) as raw:
        raw.sendall(b"\x02" + struct.pack(">Q", MESSAGE_BYTES * 2))
        assert closed_by_peer(raw)
    sender.write(receiver.address(), KEY, [page_span(1, 5)])
    collect(receiver, len)
    assert torch.equal(target.pages[5], source.pages[1])


def test_a_connection_that_ends_inside_a_frame_leaves_nothing(opener: Opener) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    before = target.pages[5].clone()
    receiver.expect(KEY, 3, [5])
    whole = frame(KEY, [("page", 5, 0, PAGE)])
    for cut in (1, 10, 25, 500, len(whole) - 1):
        with zmtp(receiver.address()) as raw:
            raw.sendall(b"\x02" + struct.pack(">Q", len(whole)) + whole[:cut])
            time.sleep(0.01)
    time.sleep(0.05)
    assert torch.equal(target.pages[5], before)
    sender.write(receiver.address(), KEY, [page_span(1, 5)])
    collect(receiver, len)
    assert torch.equal(target.pages[5], source.pages[1])


def test_a_fault_inside_the_thread_costs_one_message_only(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    memory = receiver._inbound._memory  # type: ignore[attr-defined]
    scatter, faults = memory.scatter, [RuntimeError("device fault")]

    def faulty(places: Any, data: Any, mark: Any) -> Any:
        if faults:
            raise faults.pop()
        return scatter(places, data, mark)

    monkeypatch.setattr(memory, "scatter", faulty)
    receiver.expect(KEY, 3, [5, 6])
    with caplog.at_level(logging.ERROR):
        sender.write(receiver.address(), KEY, [page_span(1, 5)])
        assert wait(lambda: not faults)
        sender.write(receiver.address(), KEY, [page_span(2, 6)])
        collect(receiver, len)
    assert "device fault" in caplog.text
    assert torch.equal(target.pages[6], source.pages[2])


def test_a_fault_while_packing_loses_that_hand_off_and_no_other(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    memory = sender._outbound._memory  # type: ignore[attr-defined]
    gather = memory.gather

    def faulty(places: Any, out: Any, mark: Any) -> None:
        if places[0][1] == 1:
            raise RuntimeError("device fault")
        gather(places, out, mark)

    monkeypatch.setattr(memory, "gather", faulty)
    receiver.expect((8, 0), 3, [5])
    sender.write(receiver.address(), KEY, [page_span(1, 5)])
    sender.write(receiver.address(), KEY, [page_span(3, 6)])  # of the same hand-off: of no use any more
    sender.write(receiver.address(), (8, 0), [page_span(2, 5)])
    events = collect(sender, lambda events: len(events) == 2)
    assert [type(event) for event in events] == [Lost, Wrote]
    assert of_type(events, Lost)[0].key == KEY
    assert "device fault" in of_type(events, Lost)[0].reason
    collect(receiver, len)
    assert torch.equal(target.pages[5], source.pages[2])
    assert receiver.bad_frames == 0


# --- ends: revoke, cancel


def test_nothing_lands_after_revoke(opener: Opener, context: zmq.Context[Any]) -> None:
    """The pages of an aborted hand-off are given to another one at once, while frames of the first still pour in."""
    target = small_arena(num_pages=8)
    receiver = opener(target)
    push = raw_push(context, receiver.address())
    stop = threading.Event()

    def pour() -> None:
        poison = {attempt: frame((7, attempt), [("page", 5, 0, PAGE)], b"\xee" * PAGE) for attempt in range(40)}
        while not stop.is_set():
            for each in poison.values():
                push.send(each)

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        hit = 0
        for attempt in range(40):
            receiver.expect((7, attempt), 3, [5])
            landed = collect(receiver, len)
            hit += len(landed)
            receiver.revoke((7, attempt))
            target.pages[5].fill_(1)
            for _ in range(5):
                time.sleep(0.001)
                assert int(target.pages[5].max()) == 1, "a late frame landed in memory that was taken back"
        assert hit >= 40
    finally:
        stop.set()
        thread.join()
    assert receiver.late_frames > 0


def test_a_replayed_frame_of_a_closed_key_is_dropped(opener: Opener, context: zmq.Context[Any]) -> None:
    target = small_arena()
    receiver = opener(target)
    push = raw_push(context, receiver.address())
    receiver.expect(KEY, 3, [5])
    push.send(frame(KEY, [("page", 5, 0, PAGE)]))
    collect(receiver, len)
    receiver.revoke(KEY)
    receiver.expect((9, 0), 3, [5])  # the same memory, another owner
    target.pages[5].fill_(1)
    for _ in range(3):
        push.send(frame(KEY, [("page", 5, 0, PAGE)]))
    assert wait(lambda: receiver.late_frames == 3)
    assert receiver.bad_frames == 0, "an abort's wake is nothing to worry about"
    push.send(frame((77, 0), [("page", 5, 0, PAGE)]))
    assert wait(lambda: receiver.bad_frames == 1), "what was never expected is"
    assert int(target.pages[5].min()) == 1
    assert receiver.poll() == []


def test_the_arena_is_not_read_after_cancel(opener: Opener, context: zmq.Context[Any]) -> None:
    layout = KVLayout.pack(8, [Field(0, "a", 0, 1, 1 << 20, 8)], [Field(0, "b", 0, 1, 64, keep=1)])
    source = Arena(layout, 64, 2)
    source.pages.fill_(1)
    sender = opener(source)
    pull, address = raw_pull(context)  # takes nothing yet: most of it waits in the transport
    sender.write(address, KEY, [Span("page", page, page, 0, 1 << 20) for page in range(1, 64)])
    sender.write(address, KEY, [Span("page", 1, 1, 0, 1 << 20)])
    assert pull.poll(5000)
    sender.cancel(KEY)
    source.pages.fill_(2)
    sender.write(address, (8, 0), [Span("page", 1, 1, 0, 1 << 20)])
    of_first, key = 0, KEY
    while key == KEY:
        assert pull.poll(5000)
        key, places, payload = unpack(memoryview(pull.recv()))
        assert int(payload.max()) == int(payload.min()) == (1 if key == KEY else 2)
        of_first += len(places) if key == KEY else 0
    assert of_first < 63
    assert [event.key for event in sender.poll()] == [(8, 0)]


def test_cancel_and_revoke_of_the_unknown_do_nothing(opener: Opener) -> None:
    transport = opener(small_arena())
    transport.cancel((1, 1))
    transport.revoke((1, 1))
    assert transport.poll() == []


# --- peers that are slow, dead, or come back


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_peer_that_does_not_drain_costs_bounded_memory_and_no_time(opener: Opener, context: zmq.Context[Any]) -> None:
    layout = KVLayout.pack(8, [Field(0, "a", 0, 1, 1 << 20, 8)], [Field(0, "b", 0, 1, 64, keep=1)])
    sender = opener(Arena(layout, 3, 2))
    pull, address = raw_pull(context)
    before = resident_bytes()
    begin_s = time.monotonic()
    for _ in range(400):
        sender.write(address, KEY, [Span("page", 1, 1, 0, 1 << 20)])
    assert time.monotonic() - begin_s < 0.5
    assert pull.poll(5000)
    time.sleep(0.5)
    assert resident_bytes() - before < 80 << 20  # of 400
    assert 0 < len(sender.poll()) < 100
    got = 0
    while got < 400:
        assert pull.poll(5000)
        got += len(unpack(memoryview(pull.recv()))[1])


def test_a_slow_peer_does_not_stall_another(opener: Opener, context: zmq.Context[Any]) -> None:
    layout = KVLayout.pack(8, [Field(0, "a", 0, 1, 1 << 20, 8)], [Field(0, "b", 0, 1, 64, keep=1)])
    sender, receiver = opener(Arena(layout, 3, 2)), opener(Arena(layout, 3, 2))
    _pull, slow = raw_pull(context)
    sender.write(slow, KEY, [Span("page", 1, 1, 0, 1 << 20)] * 200)
    receiver.expect((8, 0), 1, [2])
    for _ in range(20):
        sender.write(receiver.address(), (8, 0), [Span("page", 1, 2, 0, 1 << 20)])
    collect(receiver, lambda events: len(landed_places(events, (8, 0))) == 20, timeout_s=5)
    assert KEY not in {event.key for event in sender.poll()}


def test_an_impossible_address_is_lost_at_once(opener: Opener) -> None:
    sender = opener(small_arena())
    for address in ("", "nonsense", "tcp://127.0.0.1:notaport"):
        sender.write(address, KEY, [page_span(1, 1)])
        (lost,) = collect(sender, len)
        assert isinstance(lost, Lost)
        assert repr(address) in lost.reason


def test_an_unreachable_peer_is_lost_after_the_stall_time_and_a_later_write_connects_afresh(
    opener: Opener, context: zmq.Context[Any]
) -> None:
    sender, source = opener(small_arena(seed=1), stall_s=0.3), small_arena(seed=1)
    pull, address = raw_pull(context)
    pull.close()
    assert wait(lambda: refused(address))
    begin_s = time.monotonic()
    sender.write(address, KEY, [page_span(1, 1)])
    sender.write(address, (8, 0), [page_span(1, 1)])
    events = collect(sender, lambda events: len(events) == 2, timeout_s=5)
    assert 0.3 < time.monotonic() - begin_s < 2
    assert {(type(event), event.key) for event in events} == {(Lost, KEY), (Lost, (8, 0))}
    assert "took nothing for 0." in of_type(events, Lost)[0].reason
    pull, _ = raw_pull(context, address)  # it is back
    sender.write(address, (9, 0), [page_span(2, 1)])
    assert pull.poll(5000)
    key, _, payload = unpack(memoryview(pull.recv()))
    assert key == (9, 0)
    assert bytes(payload) == bytes(source.pages[2].tolist())
    assert [type(event) for event in collect(sender, len)] == [Wrote]


def test_a_link_that_is_down_for_a_moment_heals_by_itself(opener: Opener) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source, stall_s=20), opener(target)
    proxy = Proxy(receiver.address())
    receiver.expect(KEY, 3, [5, 6])
    sender.write(proxy.address, KEY, [page_span(1, 5)])
    collect(receiver, len)
    proxy.open.clear()
    sender.write(proxy.address, KEY, [page_span(2, 6)])
    time.sleep(0.3)
    assert receiver.poll() == []
    proxy.open.set()
    collect(receiver, len)
    assert torch.equal(target.pages[6], source.pages[2])
    proxy.close()


VICTIM = """
import sys, zmq
pull = zmq.Context().socket(zmq.PULL)
pull.setsockopt(zmq.RCVHWM, 1)
print(pull.bind_to_random_port("tcp://127.0.0.1"), flush=True)
for _ in range(2):
    pull.recv()
print("got two", flush=True)
sys.stdin.read()
"""


def test_a_peer_killed_in_the_middle_is_lost_and_others_go_on(opener: Opener) -> None:
    layout = KVLayout.pack(8, [Field(0, "a", 0, 1, 1 << 20, 8)], [Field(0, "b", 0, 1, 64, keep=1)])
    sender, receiver = opener(Arena(layout, 3, 2), stall_s=0.5), opener(Arena(layout, 3, 2))
    command = [sys.executable, "-c", VICTIM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        address = f"tcp://127.0.0.1:{victim.stdout.readline().strip()}"
        sender.write(address, KEY, [Span("page", 1, 1, 0, 1 << 20)] * 300)
        assert victim.stdout.readline() == "got two\n"
        victim.send_signal(signal.SIGKILL)
    receiver.expect((8, 0), 1, [2])
    sender.write(receiver.address(), (8, 0), [Span("page", 1, 2, 0, 1 << 20)])
    collect(receiver, len)
    events = collect(sender, lambda events: of_type(events, Lost), timeout_s=5)
    assert [event.key for event in of_type(events, Lost)] == [KEY]
    assert (8, 0) in [event.key for event in of_type(events, Wrote)]
