"""From a GPU over ZeroMQ: copies that take their time beside the wire, the buffers they go through, and the digest that both
ends make, whichever of them is a GPU's. Over the CPU's tensors, with a stand-in for the stream; test_transport.py and
test_cuda_ipc.py have what runs on a GPU too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.spans import SPAN_WORDS, move_spans
from kvtransfer.arena import Arena
from kvtransfer.digest import chunk_digest, combine
from kvtransfer.layout import Field, KVLayout
from kvtransfer.spans import NUMBER
from kvtransfer.transports import BulkOptions, Drained, Landed, Lost, Wrote, sums
from kvtransfer.transports.cuda import Ring
from kvtransfer.transports.frame import CHUNK_BYTES, LANDED, LATE, REFUSED, Ack, Chunk, Welcome, pack_ack, pack_chunk
from kvtransfer.transports.memory import PIECE_BYTES
from kvtransfer.transports.outbound import CREDIT
from kvtransfer.transports.seal import Seal
from kvtransfer.transports.unpacker import Arrival
from tests.transfer_rig import (
    LAYOUT,
    PATIENCE_S,
    DeviceTransport,
    HostStream,
    Place,
    Proxy,
    RawReceiver,
    RawSender,
    Span,
    ThreadTransport,
    collect,
    of_type,
    place_table,
    set_stall,
    small_arena,
    sums_by_hand,
    table,
    wait,
)  # fmt: skip

KEY, OTHER = (7, 0), (8, 0)
PAGE = LAYOUT.page_bytes
SECRET = b"k" * 16
MIB = 1 << 20
Opener = Callable[..., Any]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def opener() -> Iterator[Opener]:
    """Opens transports over an arena, as if it were a device's ("d") or as the CPU's ("c"), and closes them."""
    opened: list[ThreadTransport] = []

    def build(arena: Arena, kind: str = "d", path: str = "zeromq") -> ThreadTransport:
        opened.append(
            (DeviceTransport if kind == "d" else ThreadTransport)(arena, options=BulkOptions(path, lanes=1, stall_s=30.0))
        )
        return opened[-1]

    yield build
    for each in opened:
        if isinstance(each, DeviceTransport):
            stream_of(each).copies_end.set()
        each.close()


def memory_of(transport: Any) -> Any:
    return transport.inner._inbound._memory


def stream_of(transport: Any) -> HostStream:
    stream: HostStream = memory_of(transport)._stream
    return stream


def never_idle(transport: Any) -> Any:
    """Gives its engine always something else to do, so that it waits for no copy."""
    inbound, outbound = transport.inner._inbound, transport.inner._outbound
    settle, send = inbound.settle, outbound._send_parcels
    inbound.settle = lambda idle: settle(False)
    outbound._send_parcels = lambda idle: send(False)
    return transport


def digest_of(events: list[Any]) -> int:
    return combine(event.digest for event in of_type(events, (Wrote, Landed)))


def large_arena(num_pages: int, seed: int = 0) -> Arena:
    """Pages of a mebibyte of random bytes."""
    layout = KVLayout.pack(8, [Field(0, "a", 0, 1, MIB, 8)], [Field(0, "b", 0, 16, 64, keep=1)])
    arena = Arena(layout, num_pages, 2)
    arena.pages.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return arena


def page_span(src: int, dst: int, nbytes: int = PAGE) -> Span:
    return Span("page", src, dst, 0, nbytes)


MIXED = [page_span(1, 5), Span("slot", 2, 3, 64, 100), page_span(9, 6), Span("slot", 2, 3, 240, 4)]


def summed_header(places: list[Place], number: int) -> bytes:
    spans = [Span(kind, 0, dst, at, size) for kind, dst, at, size in places]
    return pack_chunk(Chunk(KEY, number, table(spans), sums=True))


# --- the digest that both ends make


@pytest.mark.parametrize("seal", [b"", SECRET], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    ("kinds", "path"), [("dd", "zeromq"), ("dc", "zeromq"), ("cd", "zeromq"), ("cd", "shm")], ids=lambda value: value
)
def test_bytes_and_digests_agree_between_any_two_memories(opener: Opener, kinds: str, path: str, seal: bytes) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source, kinds[0], path), opener(target, kinds[1], "auto")
    pages, slots = target.pages.clone(), target.slots.clone()
    receiver.expect(KEY, 3, [5, 6], seal)
    sender.write(receiver.address(), KEY, table(MIXED), seal)
    (wrote,), (landed,) = collect(sender, len), collect(receiver, len)
    assert isinstance(wrote, Wrote) and isinstance(landed, Landed) and wrote.digest == landed.digest
    pages[5], pages[6] = source.pages[1], source.pages[9]
    slots[3, 64:164], slots[3, 240:244] = source.slots[2, 64:164], source.slots[2, 240:244]
    assert torch.equal(target.pages, pages) and torch.equal(target.slots, slots)
    assert sender.links()[receiver.address()].path == path
    if path == "shm" or not seal:  # what is sealed and comes along has its tags
        in_order = [source.pages[1], source.pages[9], source.slots[2, 64:164], source.slots[2, 240:244]]
        by_hand = b"".join(sums_by_hand(bytes(part.tolist())) for part in in_order)
        assert wrote.digest == chunk_digest(KEY, place_table(span.place for span in MIXED), by_hand)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2), st.integers(1, 300), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_a_host_makes_the_sums_of_a_device(pieces: int, words: int, offset: int, seed: int) -> None:
    """Shown piece by piece, a slot before a page."""
    data = np.random.default_rng(seed).integers(0, 256, pieces * PIECE_BYTES + 4 * words, dtype=np.uint8)
    places = place_table([("slot", 1, 4 * offset, len(data)), ("page", 2, 0, 8)])
    made = sums.HostSums(KEY, places)
    show = made.begin(places[0].tolist())
    for begin in range(0, len(data), PIECE_BYTES):
        show(data[begin : begin + PIECE_BYTES])
    made.begin(places[1].tolist())(data[:8])
    by_hand = sums_by_hand(data[:8].tobytes()) + sums_by_hand(data.tobytes())
    assert made.combined() == chunk_digest(KEY, places, by_hand)


def test_a_span_of_a_sum_is_what_a_kernel_takes() -> None:
    assert SPAN_WORDS == sums.SPAN_WORDS and PIECE_BYTES % (sums.SPAN_WORDS * sums.WORD_BYTES) == 0


def flip(data: Any) -> None:
    data[len(data) // 2] ^= 8


@pytest.mark.parametrize("kinds", ["dd", "dc", "cd"])
@pytest.mark.parametrize("seal", [b"", SECRET], ids=["plain", "sealed"])
def test_a_byte_that_changes_on_the_wire_is_found(opener: Opener, kinds: str, seal: bytes) -> None:
    sender, receiver = opener(small_arena(seed=1), kinds[0]), opener(small_arena(seed=2), kinds[1])

    def tamper(data: bytes) -> bytes:
        at = data.rfind(b"pdK2")
        return data if at < 0 or data[at + 4] & 2 else data[:-1] + bytes([data[-1] ^ 1])  # a probe is for nobody

    proxy = Proxy(receiver.address(), tamper)
    receiver.expect(KEY, 3, [5, 6], seal)
    sender.write(proxy.address, KEY, table(MIXED), seal)
    (end,) = collect(sender, len)
    if seal:
        assert isinstance(end, Lost) and end.corrupt
    else:
        assert digest_of([end]) != digest_of(collect(receiver, len))
    proxy.close()


@pytest.mark.parametrize(
    ("kinds", "where"),
    [("dd", "move"), ("dd", "gather"), ("dc", "gather"), ("dd", "scatter"), ("cd", "scatter"), ("dc", "came")],
)
def test_a_byte_that_changes_in_a_copy_is_found(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, kinds: str, where: str
) -> None:
    """On a device, out of it, into one, or into the arena of a host."""
    sender, receiver = opener(small_arena(seed=1), kinds[0]), opener(small_arena(seed=2), kinds[1])
    memory = memory_of(sender if where == "gather" else receiver)
    copy: Any = move_spans if where == "move" else getattr(Arrival if where == "came" else memory, where)

    def move(source: torch.Tensor, target: torch.Tensor, *spans: torch.Tensor) -> None:
        copy(source, target, *spans)
        if target.data_ptr() not in (memory._rows["page"].data_ptr(), memory._rows["slot"].data_ptr()):  # packed
            flip(target)

    def gather(places: Any, out: Any, mark: int) -> Any:
        begun = copy(places, out, mark)
        flip(out)
        return begun

    def scatter(packed: Any, places: Any, mark: int) -> Any:
        flip(packed)
        return copy(packed, places, mark)

    def came(arrival: Any, view: Any) -> None:
        view ^= np.uint8(16)
        copy(arrival, view)

    if where == "move":
        monkeypatch.setattr("kvtransfer.transports.cuda.move_spans", move)
    elif where == "came":
        monkeypatch.setattr(Arrival, where, came)
    else:
        monkeypatch.setattr(memory, where, {"gather": gather, "scatter": scatter}[where])
    receiver.expect(KEY, 3, [5, 6])
    sender.write(receiver.address(), KEY, table(MIXED))
    assert digest_of(collect(sender, len)) != digest_of(collect(receiver, len))


def test_what_a_device_cannot_read_or_prove_is_refused(opener: Opener, context: zmq.Context[Any]) -> None:
    """Half a word, at either memory; a digest of bytes at a device; frames of another size than is said."""
    target = small_arena(seed=2)
    before = target.pages.clone()
    for kind in "dc":
        receiver = opener(target, kind)
        receiver.expect(KEY, 3, [5, 6])
        peer = RawSender(context, receiver.address())
        frames: list[tuple[list[Place], int, bytes]] = [([("page", 5, 0, 6)], 6, b"")]
        frames += [([("page", 5, 2, 8)], 8, b""), ([("page", 5, 0, 8)], 9, b""), ([("page", 5, 0, 8)], 7, b"")]
        if kind == "d":
            frames.append(([("page", 5, 0, 8)], 8, b"\0"))
        for number, (places, nbytes, flags) in enumerate(frames, 1):
            head = summed_header(places, number)
            peer.socket.send_multipart([head[:4] + (flags or head[4:5]) + head[5:], b"x" * nbytes])
            assert peer.status() == REFUSED and receiver.counters()["bad_frames"] == number
        assert torch.equal(target.pages, before) and receiver.poll() == []
        peer.socket.send_multipart([summed_header([("page", 5, 0, 8)], 99), b"12345678"])
        assert peer.status() == LANDED and bytes(target.pages[5, :8].tolist()) == b"12345678"
        target.pages.copy_(before)


def test_half_a_word_of_ours_is_lost_at_once(opener: Opener) -> None:
    sender, receiver = opener(small_arena()), opener(small_arena())
    receiver.expect(KEY, 3, [5])
    sender.write(receiver.address(), KEY, table([page_span(1, 5, 6)]))
    (lost,) = collect(sender, len)
    assert isinstance(lost, Lost) and "whole words" in lost.reason


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_sealed_frames_of_another_size_do_not_reach_a_device(opener: Opener, context: zmq.Context[Any], cut: int) -> None:
    """As many bytes in all, or too few; the true ones land."""
    target = small_arena(seed=2)
    receiver, peer = opener(target), None
    receiver.expect(KEY, 3, [5], SECRET)
    peer = RawSender(context, receiver.address())
    truth = bytes(range(200)) * 2
    head = summed_header([("page", 5, 0, 400)], 1)
    sealed = bytes(Seal(SECRET).close(1, 0, truth, head))
    frames = [sealed[:cut], sealed[cut:] + bytes(16)] if cut >= 0 else [sealed[:-1]]
    peer.socket.send_multipart([head, *frames])
    assert peer.status() != LANDED
    peer.socket.send_multipart([head, sealed])
    assert peer.status() == LANDED and bytes(target.pages[5, :400].tolist()) == truth


# --- while the sender's device copies


def answer_until(peer: RawReceiver, condition: Callable[[], Any]) -> Any:
    """The peer answers greetings and tests, whenever they come; no chunk does. Gives what the condition gave."""
    end_s = time.monotonic() + PATIENCE_S
    while not (outcome := condition()):
        assert time.monotonic() < end_s
        assert peer.chunk(timeout_s=0.02) is None
    return outcome


def test_a_chunk_leaves_when_its_copy_is_over_and_the_next_ones_are_begun(opener: Opener, context: zmq.Context[Any]) -> None:
    source = large_arena(40, seed=1)
    sender, peer = never_idle(opener(source)), RawReceiver(context)
    stream = stream_of(sender)
    stream.copies_end.clear()
    sender.write(peer.address, KEY, table([page_span(page, page, MIB) for page in range(1, 33)]))
    answer_until(peer, lambda: len(stream.begun) == CREDIT)
    time.sleep(0.1)
    assert len(stream.begun) == CREDIT, "as much as may be under way, and no more"
    assert sender.inner._outbound.wait_ms() == 0, "it looks after them"
    stream.copies_end.set()
    pages: list[int] = []
    while len(pages) < 32:
        chunk, payload = peer.next()
        pages += chunk.spans[:, NUMBER].tolist()
        assert payload == bytes(source.pages[pages[-len(chunk.spans) :]].numpy())
    assert pages == list(range(1, 33))
    assert [type(event) for event in collect(sender, len)] == [Wrote]


def test_an_engine_does_what_else_there_is_while_the_device_copies(opener: Opener) -> None:
    """In both directions: it hears its owner, and its peers."""
    us, them = never_idle(opener(small_arena(seed=1))), opener(small_arena(seed=2), "c")
    stream = stream_of(us)
    stream.copies_end.clear()
    us.expect(OTHER, 3, [5])
    them.expect(KEY, 3, [5])
    us.write(them.address(), KEY, table([page_span(1, 5)]))
    them.write(us.address(), OTHER, table([page_span(1, 5)]))
    assert wait(lambda: len(stream.begun) == 2)
    us.cancel((9, 0))
    assert collect(us, len) == [Drained((9, 0))]
    stream.copies_end.set()
    assert {type(event) for event in collect(us, lambda events: len(events) == 2)} == {Wrote, Landed}


def test_an_abort_in_the_middle_of_a_copy_gives_the_page_back_when_it_is_over(opener: Opener) -> None:
    """And what is then written there does not arrive under the old name."""
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = never_idle(opener(source)), opener(target)
    truth = source.pages[1].clone()
    stream_of(sender).copies_end.clear()
    receiver.expect(KEY, 3, [5])
    sender.write(receiver.address(), KEY, table([page_span(1, 5)]))
    assert wait(lambda: stream_of(sender).begun)
    sender.cancel(KEY)
    time.sleep(0.1)
    assert sender.poll() == [], "the device reads the page"
    stream_of(sender).copies_end.set()
    assert collect(sender, len) == [Drained(KEY)]
    source.pages[1].fill_(7)
    receiver.revoke(KEY)
    collect(receiver, lambda events: Drained(KEY) in events)
    assert torch.equal(target.pages[5], truth)
    receiver.expect(OTHER, 3, [5])
    sender.write(receiver.address(), OTHER, table([page_span(1, 5)]))
    assert digest_of(collect(sender, len)) == digest_of(collect(receiver, len))
    assert int(target.pages[5].min()) == int(target.pages[5].max()) == 7


def test_a_peer_that_is_cut_off_in_the_middle_of_a_copy_gets_everything_once(opener: Opener) -> None:
    source, target = large_arena(40, seed=1), large_arena(40, seed=2)
    sender, receiver = never_idle(opener(source)), opener(target)
    proxy = Proxy(receiver.address())
    receiver.expect(KEY, 1, list(range(1, 40)))
    sender.write(proxy.address, KEY, table([page_span(page, page, MIB) for page in range(1, 5)]))
    landed = collect(receiver, len)
    stream_of(sender).copies_end.clear()
    sender.write(proxy.address, KEY, table([page_span(page, page, MIB) for page in range(5, 40)]))
    assert wait(lambda: stream_of(sender).begun)
    proxy.cut()
    time.sleep(0.3)
    stream_of(sender).copies_end.set()
    landed += collect(receiver, lambda events: sum(len(event.places) for event in of_type(events, Landed)) == 35)
    wrote = collect(sender, lambda events: len(events) == 2)
    assert torch.equal(target.pages[1:], source.pages[1:])
    assert digest_of(wrote) == digest_of(landed)
    proxy.close()


def test_what_was_to_be_fetched_is_not_sent_in_one_piece(opener: Opener, context: zmq.Context[Any]) -> None:
    """To a peer that greets again and cannot open our memory any more: no receiver takes frames of that size."""
    source = large_arena(40, seed=1)
    sender, peer = opener(source, path="auto"), RawReceiver(context)
    proxy, peer.welcome = Proxy(peer.address), Welcome("cuda_ipc", "")
    sender.write(proxy.address, KEY, table([page_span(page, page, MIB) for page in range(1, 33)]))
    chunk = peer.chunk(status=None)
    assert chunk is not None and len(chunk[0].spans) == 32 and not chunk[1]
    peer.welcome = Welcome("zeromq", "no more descriptors")
    proxy.cut()
    (lost,) = answer_until(peer, sender.poll)
    assert isinstance(lost, Lost) and "changed the path" in lost.reason
    sender.write(proxy.address, OTHER, table([page_span(page, page, MIB) for page in range(1, 17)]))
    assert [len(payload) for _, payload in (peer.next(), peer.next())] == [CHUNK_BYTES, CHUNK_BYTES]
    assert [(type(event), event.key) for event in collect(sender, len)] == [(Wrote, OTHER)]
    proxy.close()


def test_what_is_lost_in_the_middle_of_a_copy_is_said_when_that_is_over(opener: Opener, context: zmq.Context[Any]) -> None:
    """Its memory is somebody else's then."""
    sender, peer = never_idle(opener(small_arena())), RawReceiver(context)
    stream_of(sender).copies_end.clear()
    sender.write(peer.address, KEY, table([page_span(1, 5)]))
    answer_until(peer, lambda: stream_of(sender).begun)
    set_stall(sender, 0.5)
    assert wait(lambda: not sender.inner._outbound._peers), "it is given up"
    time.sleep(0.05)
    assert not of_type(sender.poll(), Lost)
    stream_of(sender).copies_end.set()
    (lost,) = collect(sender, len)
    assert isinstance(lost, Lost) and "took nothing" in lost.reason


def test_an_answer_to_what_has_not_been_sent_is_none(opener: Opener, context: zmq.Context[Any]) -> None:
    source = small_arena(seed=1)
    sender, peer = never_idle(opener(source)), RawReceiver(context)
    sender.write(peer.address, OTHER, table([page_span(1, 1)]))
    number = peer.next()[0].number
    collect(sender, len)
    stream_of(sender).copies_end.clear()
    sender.write(peer.address, KEY, table([page_span(1, 5)]))
    assert wait(lambda: stream_of(sender).begun)
    peer.socket.send_multipart([peer.identity, pack_ack(Ack(number + 1, LANDED))])
    assert wait(lambda: sender.counters()["bad_frames"] == 1)
    assert sender.poll() == []
    stream_of(sender).copies_end.set()
    assert peer.next()[1] == bytes(source.pages[1].tolist())
    assert [type(event) for event in collect(sender, len)] == [Wrote]


@pytest.mark.parametrize("at_once", [True, False], ids=["when it begins", "when it ends"])
def test_a_copy_that_fails_costs_one_hand_off(opener: Opener, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    source, target = small_arena(seed=1), small_arena(seed=2)
    sender, receiver = opener(source), opener(target)
    stream, faults = stream_of(sender), [True]
    begin = stream.begin

    def faulty(mark: int, issue: Any) -> Any:
        if faults and at_once:
            faults.clear()
            raise RuntimeError("device fault")
        work: Any = begin(mark, issue)
        if faults:
            faults.clear()
            work.result = fail
        return work

    def fail() -> bytes:
        raise RuntimeError("device fault")

    monkeypatch.setattr(stream, "begin", faulty)
    receiver.expect(OTHER, 3, [6])
    sender.write(receiver.address(), KEY, table([page_span(1, 5)]))
    sender.write(receiver.address(), OTHER, table([page_span(2, 6)]))
    lost, wrote = collect(sender, lambda events: len(events) == 2)
    assert isinstance(lost, Lost) and lost.key == KEY and "device fault" in lost.reason
    assert isinstance(wrote, Wrote) and torch.equal(target.pages[6], source.pages[2])
    assert not sender.inner._outbound._peers[receiver.address()].busy


def test_an_engine_that_ends_waits_for_what_its_device_reads(opener: Opener, context: zmq.Context[Any]) -> None:
    sender, peer = never_idle(opener(small_arena())), RawReceiver(context)
    stream = stream_of(sender)
    stream.copies_end.clear()
    sender.write(peer.address, KEY, table([page_span(1, 5)]))
    answer_until(peer, lambda: stream.begun)
    sender._channel.close()
    sender._thread.join(0.3)
    assert sender._thread.is_alive()
    stream.copies_end.set()
    sender._thread.join(PATIENCE_S)
    assert not sender._thread.is_alive() and not stream.begun


# --- while the receiver's device copies


def test_several_chunks_are_copied_and_answered_when_they_are_there(opener: Opener, context: zmq.Context[Any]) -> None:
    """Also an abort in the middle: the window is drained behind them."""
    target = small_arena(seed=2)
    before = target.pages.clone()
    receiver = never_idle(opener(target))
    peer, stream = RawSender(context, receiver.address()), stream_of(receiver)
    stream.copies_end.clear()
    receiver.expect(KEY, 3, [5, 6, 7])
    for page in (5, 6, 7):
        peer.socket.send_multipart([summed_header([("page", page, 0, PAGE)], page), bytes([page]) * PAGE])
    assert wait(lambda: len(stream.begun) == 3)
    receiver.revoke(KEY)
    assert not peer.socket.poll(100) and receiver.poll() == []
    assert torch.equal(target.pages, before)
    stream.copies_end.set()
    assert [peer.status() for _ in range(3)] == [LANDED] * 3
    events = collect(receiver, lambda events: Drained(KEY) in events)
    assert [type(event) for event in events] == [Landed] * 3 + [Drained]
    assert all(int(target.pages[page].min()) == int(target.pages[page].max()) == page for page in (5, 6, 7))


def test_memory_that_is_still_read_holds_up_its_own_hand_off_alone(opener: Opener, context: zmq.Context[Any]) -> None:
    """What a step in flight reads was granted to one: its chunks wait, and those behind them do not. Sent again meanwhile, they
    land once all the same."""
    target = small_arena(seed=2)
    before = target.pages.clone()
    receiver = opener(target)
    stream, peers = stream_of(receiver), [RawSender(context, receiver.address()) for _ in range(2)]
    receiver.expect(OTHER, 4, [7])
    receiver.expect(KEY, 3, [5, 6])
    stream.computed = stream.marks  # all but what was granted last
    for peer in peers:
        for page in (5, 6):
            peer.socket.send_multipart([summed_header([("page", page, 0, PAGE)], page), bytes([page]) * PAGE])
    spans = table([page_span(0, 7)])
    peers[0].socket.send_multipart([pack_chunk(Chunk(OTHER, 7, spans, sums=True)), bytes([7]) * PAGE])
    assert peers[0].status() == LANDED and [event.key for event in collect(receiver, len)] == [OTHER]
    assert int(target.pages[7].min()) == int(target.pages[7].max()) == 7
    assert torch.equal(target.pages[5:7], before[5:7]) and receiver.inner._inbound.wait_ms() == 1
    assert not peers[0].socket.poll(50)
    stream.computed = 1 << 32
    assert [peer.status() for peer in peers for _ in range(2)] == [LANDED] * 4
    receiver.revoke(KEY)
    events = collect(receiver, lambda events: Drained(KEY) in events)
    assert [type(event) for event in events] == [Landed, Landed, Drained]
    assert [place[1] for event in of_type(events, Landed) for place in event.places.tolist()] == [5, 6]
    assert receiver.counters()["repeated_frames"] == 2
    assert all(int(target.pages[page].min()) == int(target.pages[page].max()) == page for page in (5, 6))


def test_a_window_that_is_closed_while_its_memory_is_still_read_is_drained_at_once(
    opener: Opener, context: zmq.Context[Any]
) -> None:
    target = small_arena(seed=2)
    before = target.pages.clone()
    receiver = opener(target)
    stream, peer = stream_of(receiver), RawSender(context, receiver.address())
    receiver.expect(KEY, 3, [5])
    stream.computed = stream.marks
    peer.socket.send_multipart([summed_header([("page", 5, 0, PAGE)], 1), bytes(PAGE)])
    assert wait(lambda: receiver.inner._inbound._early)
    receiver.revoke(KEY)
    assert collect(receiver, len) == [Drained(KEY)] and peer.status() == LATE
    assert torch.equal(target.pages, before) and not stream.begun


def test_who_keeps_to_no_credit_waits_for_memory_in_its_socket(
    opener: Opener, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the engine sends does not wait with it."""
    monkeypatch.setattr("kvtransfer.transports.inbound._MOST_EARLY", 3)
    source = small_arena(seed=2)
    receiver = opener(source)
    stream, peer, reader = stream_of(receiver), RawSender(context, receiver.address()), RawReceiver(context)
    receiver.write(reader.address, OTHER, table([page_span(31, 1)]))
    receiver.expect(KEY, 3, list(range(1, 31)))
    stream.computed = stream.marks
    for page in range(1, 31):
        peer.socket.send_multipart([summed_header([("page", page, 0, PAGE)], page), bytes([page]) * PAGE])
    assert wait(lambda: len(receiver.inner._inbound._early) == 3)
    assert reader.next()[1] == bytes(source.pages[31].tolist()) and collect(receiver, len)[0].key == OTHER
    assert len(receiver.inner._inbound._early) == 3 and not peer.socket.poll(0)
    stream.computed = 1 << 32
    assert [peer.status() for _ in range(30)] == [LANDED] * 30
    assert all(int(source.pages[page].min()) == int(source.pages[page].max()) == page for page in range(1, 31))


def test_who_keeps_to_no_credit_occupies_a_bounded_number_of_buffers(
    opener: Opener, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.transports.inbound._MOST_LANDINGS", 3)
    target = small_arena(seed=2)
    receiver = opener(target)
    inbound = receiver.inner._inbound
    settle = inbound.settle
    inbound.settle = lambda idle: settle(idle and len(inbound._landings) >= 3)  # there is always more to do
    peer, stream = RawSender(context, receiver.address()), stream_of(receiver)
    stream.copies_end.clear()
    receiver.expect(KEY, 3, list(range(1, 31)))
    for page in range(1, 31):
        peer.socket.send_multipart([summed_header([("page", page, 0, PAGE)], page), bytes([page]) * PAGE])
    assert wait(lambda: len(stream.begun) == 3)
    time.sleep(0.1)
    assert len(stream.begun) == 3
    stream.copies_end.set()
    assert [peer.status() for _ in range(30)] == [LANDED] * 30
    assert all(int(target.pages[page].min()) == int(target.pages[page].max()) == page for page in range(1, 31))


# --- the buffers


def test_a_buffer_serves_again_when_nobody_refers_to_it() -> None:
    made: list[torch.Tensor] = []

    def pinned(nbytes: int) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    ring = Ring(pinned, 1)
    first = ring.take(100)
    assert len(made) == 1 and first.shape == (100,)
    part: Any = first[10:20]
    address = first.ctypes.data
    del first
    second = ring.take(CHUNK_BYTES)
    assert len(made) == 2 and second.ctypes.data != address, "a part of it is referred to"
    del part
    third = ring.take(7)
    assert len(made) == 2 and third.ctypes.data == address
    assert len(ring.take(CHUNK_BYTES + 1)) == CHUNK_BYTES + 1


def test_what_is_still_sent_is_not_written_over(opener: Opener, context: zmq.Context[Any]) -> None:
    """A peer that takes nothing holds its buffers, though all copies are over; what goes to another has others."""
    source, target = large_arena(40, seed=1), large_arena(40, seed=2)
    sender, slow, receiver = opener(source), RawReceiver(context), opener(target)
    sender.write(slow.address, KEY, table([page_span(page, page, MIB) for page in range(1, 33)]))
    came = [slow.chunk(status=None)]
    assert came[0] is not None and wait(lambda: sender.counters()["chunks_sent"] == CREDIT)
    receiver.expect(OTHER, 1, list(range(1, 40)))
    sender.write(receiver.address(), OTHER, table([page_span(40 - page, page, MIB) for page in range(1, 40)]))
    collect(sender, len)
    assert torch.equal(target.pages[1:], source.pages[1:].flip(0))
    slow.socket.send_multipart([slow.identity, pack_ack(Ack(came[0][0].number, LANDED))])
    came += [slow.next() for _ in range(32 * MIB // CHUNK_BYTES - 1)]
    assert all(payload == bytes(source.pages[chunk.spans[:, NUMBER].tolist()].numpy()) for chunk, payload in filter(None, came))
    assert collect(sender, len)[0].key == KEY
    assert wait(lambda: len(memory_of(sender)._ring._free) == 2 * CREDIT), "and all of them come back"
