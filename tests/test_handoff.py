"""Sender and Receiver: over a real loopback transport, and any interleaving over one whose frames are delivered by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.digest import combine, span_digest
from kvtransfer.pages import PagePool
from kvtransfer.places import handoff_places, slot_places
from kvtransfer.receiver import Arrived, Broken, Receiver
from kvtransfer.sender import Sender, SendLost, Sent
from kvtransfer.spans import Spans, num_bytes
from kvtransfer.tombstones import Tombstones
from kvtransfer.transports import Drained, Event, Freed, Key, Landed, Lost, Wrote
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.frame import Chunk, pack_chunk
from kvtransfer.transports.inbound import Inbound
from kvtransfer.transports.memory import CpuMemory
from tests.transfer_rig import (
    LAYOUT,
    PAGE_TOKENS,
    Listener,
    Proxy,
    RawSender,
    Span,
    hear,
    refused,
    small_arena,
    table,
    thread_transport,
    wait,
)  # fmt: skip
from wire.messages import Grant, Ready, pack_ids

KEY = (7, 0)
TIMEOUT_S = 0.3  # of the test that waits for it; elsewhere nothing may be lost to a busy machine


class Pair:
    """A prefill and a decode side in one process, each with its arena and transport."""

    def __init__(self, num_pages: int = 64, num_slots: int = 16, stall_s: float = 30.0, timeout_s: float = 30.0) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.source, self.target = small_arena(num_pages, num_slots, seed=1), small_arena(num_pages, num_slots, seed=2)
        self.out = thread_transport(self.source, stall_s=stall_s)
        self.into = thread_transport(self.target)
        self.sender, self.receiver = Sender(self.source, self.out), Receiver(self.target, self.into, timeout_s)
        self.sent: dict[Key, Sent | SendLost | Freed] = {}
        self.ended: dict[Key, Arrived | Broken | Freed] = {}

    def step(self) -> None:
        for sent in self.sender.poll():
            assert self.sent.setdefault(sent.key, sent) is sent, "ended twice"
        for end in self.receiver.poll(time.monotonic()):
            assert self.ended.setdefault(end.key, end) is end, "ended twice"

    def until(self, condition: Callable[[], Any]) -> None:
        def look() -> Any:
            self.step()
            return condition()

        assert wait(look), (self.sent, self.ended)

    def ready(self, key: Key = KEY) -> Ready:
        self.until(lambda: key in self.sent)
        sent = self.sent[key]
        assert isinstance(sent, Sent), sent
        return sent.ready

    def end(self, key: Key = KEY) -> Arrived | Broken | Freed:
        self.until(lambda: key in self.ended)
        return self.ended[key]

    def broken(self, key: Key = KEY) -> str:
        end = self.end(key)
        assert isinstance(end, Broken), end
        return end.reason

    def close(self) -> None:
        self.out.close()
        self.into.close()
        self.context.destroy(linger=0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def pages_for(length: int) -> int:
    return LAYOUT.pages_for(length)


def assert_same_kv(pair: Pair, ours: Sequence[int], slot: int, theirs: Sequence[int], their_slot: int, length: int) -> None:
    for src, dst in zip(ours[: pages_for(length)], theirs, strict=False):
        assert torch.equal(pair.source.pages[src], pair.target.pages[dst])
    for offset, nbytes in LAYOUT.live_slot_spans(length):
        part = slice(offset, offset + nbytes)
        assert torch.equal(pair.source.slots[slot, part], pair.target.slots[their_slot, part])


def sent_of_slot(length: int) -> list[tuple[int, int]]:
    """(offset, nbytes): its live rows, and some between them."""
    return [(offset, nbytes) for _, _, offset, nbytes in slot_places(LAYOUT, 4, length).tolist()]


LENGTHS = [0, 1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS, 3 * PAGE_TOKENS + 5]


@pytest.mark.parametrize("grant_first", [True, False])
@pytest.mark.parametrize("chunk", [3, PAGE_TOKENS, 100])
@pytest.mark.parametrize("length", LENGTHS)
def test_what_was_computed_arrives_and_nothing_else_changes(pair: Pair, length: int, chunk: int, grant_first: bool) -> None:
    before_pages, before_slots = pair.target.pages.clone(), pair.target.slots.clone()
    ours, theirs = [5, 3, 9, 1], [11, 10, 2, 8]
    pair.sender.open(KEY)
    grant = pair.receiver.open(KEY, 6, theirs)
    if grant_first:
        assert pair.sender.granted(grant)
    done = 0
    while done < length or length == 0:
        done = min(length, done + chunk)
        pair.sender.push(KEY, ours[: pages_for(done)], 4, done, final=done == length)
        if done == length:
            break
    if not grant_first:
        assert pair.sender.poll() == []
        assert pair.sender.granted(grant)
    ready = pair.ready()
    assert (ready.rid, ready.attempt, ready.length) == (*KEY, length)
    assert ready.num_spans == pages_for(length) + len(sent_of_slot(length))
    assert pair.receiver.ready(ready)
    assert pair.end() == Arrived(KEY, length)
    assert_same_kv(pair, ours, 4, theirs, 6, length)
    for dst in theirs[: pages_for(length)]:
        before_pages[dst] = pair.target.pages[dst]
    for offset, nbytes in sent_of_slot(length):
        before_slots[6, offset : offset + nbytes] = pair.target.slots[6, offset : offset + nbytes]
    assert torch.equal(pair.target.pages, before_pages)
    assert torch.equal(pair.target.slots, before_slots)
    assert pair.into.counters()["bad_frames"] == 0


def test_full_pages_leave_while_the_rest_is_computed(pair: Pair) -> None:
    pair.sender.open(KEY)
    pair.sender.granted(pair.receiver.open(KEY, 6, [11, 10, 2]))
    pair.sender.push(KEY, [5, 3], 4, 2 * PAGE_TOKENS - 1, final=False)
    assert wait(lambda: torch.equal(pair.target.pages[11], pair.source.pages[5]))
    assert not torch.equal(pair.target.pages[10], pair.source.pages[3])  # not full: it will still change
    pair.source.pages[3].fill_(9)
    pair.sender.push(KEY, [5, 3], 4, 2 * PAGE_TOKENS, final=False)
    assert wait(lambda: int(pair.target.pages[10].min()) == 9)
    pair.sender.push(KEY, [5, 3], 4, 2 * PAGE_TOKENS, final=True)
    pair.receiver.ready(pair.ready())
    assert pair.end() == Arrived(KEY, 2 * PAGE_TOKENS)


def send(pair: Pair, key: Key = KEY, length: int = 20, address: str = "") -> Grant:
    """The whole of a hand-off from pages 5, 3, 9 and slot 4 to pages 11, 10, 2 and slot 6."""
    grant = pair.receiver.open(key, 6, [11, 10, 2])
    pair.sender.open(key)
    pair.sender.granted(replace(grant, address=address or grant.address))
    pair.sender.push(key, [5, 3, 9], 4, length, final=True)
    return grant


def test_ready_may_come_before_the_bytes(pair: Pair) -> None:
    proxy = Proxy(pair.into.address())
    proxy.open.clear()
    warm = (1, 0)
    pair.receiver.open(warm, 1, [1])
    send(pair, address=proxy.address)
    time.sleep(0.05)
    proxy.open.set()
    assert pair.receiver.ready(pair.ready())
    assert pair.end() == Arrived(KEY, 20)
    proxy.close()


def test_two_hundred_hand_offs_at_once() -> None:
    count = 200
    pair = Pair(num_pages=3 * count + 1, num_slots=count + 1)
    order = random.Random(5)
    pages, lengths = list(range(1, 3 * count + 1)), [order.randint(0, 3 * PAGE_TOKENS) for _ in range(count)]
    theirs = list(pages)
    order.shuffle(theirs)
    for i in range(count):
        pair.sender.open((i, 0))
        if i % 2:
            pair.sender.push((i, 0), pages[3 * i : 3 * i + 3], i + 1, lengths[i], final=True)
    for i in order.sample(range(count), count):
        pair.sender.granted(pair.receiver.open((i, 0), count - i, theirs[3 * i : 3 * i + 3]))
        if not i % 2:
            pair.sender.push((i, 0), pages[3 * i : 3 * i + 3], i + 1, lengths[i], final=True)
    told: set[Key] = set()

    def all_there() -> bool:
        for key, sent in pair.sent.items():
            if key not in told and isinstance(sent, Sent):
                told.add(key)
                pair.receiver.ready(sent.ready)
        return len(pair.ended) == count

    pair.until(all_there)
    for i in range(count):
        assert pair.ended[i, 0] == Arrived((i, 0), lengths[i])
        assert_same_kv(pair, pages[3 * i :], i + 1, theirs[3 * i :], count - i, lengths[i])
    pair.close()


# --- what is found out


def test_a_byte_flipped_in_flight_breaks_the_hand_off(pair: Pair) -> None:
    marker = b"\xab\xcd" * 20
    pair.source.pages[3, 700:740] = torch.tensor(list(marker), dtype=torch.uint8)
    proxy = Proxy(pair.into.address(), lambda data: data.replace(marker, b"\xab\xcf" + marker[2:]))
    send(pair, address=proxy.address)
    pair.receiver.ready(pair.ready())
    assert "digest" in pair.broken()
    proxy.close()


def test_missing_spans_break_it_after_the_timeout() -> None:
    pair = Pair(timeout_s=TIMEOUT_S)
    grant = pair.receiver.open(KEY, 6, [11, 10, 2])
    expected = sent_of_slot(20)
    num_bytes = 3 * LAYOUT.page_bytes + sum(nbytes for _, nbytes in expected)
    pair.out.write(
        grant.address, KEY, table([Span("page", 5, 11, 0, LAYOUT.page_bytes), Span("page", 5, 2, 0, LAYOUT.page_bytes)])
    )
    pair.until(lambda: pair.receiver._open[KEY].num_landed == 2)
    begin_s = time.monotonic()
    pair.receiver.ready(Ready(*KEY, 20, 3 + len(expected), num_bytes, 0))
    reason = pair.broken()
    assert TIMEOUT_S <= time.monotonic() - begin_s < TIMEOUT_S + 20
    assert f"{1 + len(expected)} of {3 + len(expected)} spans missing 0.3 s after Ready, page 10 " in reason
    pair.close()


def test_a_span_that_comes_twice_is_refused_and_the_first_stays(pair: Pair) -> None:
    send(pair)
    ready = pair.ready()
    pair.out.write(pair.into.address(), KEY, table([Span("page", 1, 11, 0, LAYOUT.page_bytes)]))
    assert wait(lambda: pair.into.counters()["bad_frames"] == 1)
    pair.receiver.ready(ready)
    assert pair.end() == Arrived(KEY, 20)
    assert torch.equal(pair.source.pages[5], pair.target.pages[11])


def test_a_replay_after_arrival_cannot_touch_the_memory(pair: Pair) -> None:
    send(pair)
    pair.receiver.ready(pair.ready())
    assert isinstance(pair.end(), Arrived)
    pair.target.pages[11].fill_(1)
    rogue = RawSender(pair.context, pair.into.address())
    rogue.send(KEY, [("page", 11, 0, LAYOUT.page_bytes)])
    assert wait(lambda: pair.into.counters()["late_frames"] == 1)
    assert int(pair.target.pages[11].min()) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_spans": 99}, "99 spans"),
        ({"num_bytes": 5}, "of 5 bytes were sent"),
        ({"length": 19}, "19 tokens need"),
        ({"length": 999}, "999 tokens need 125 pages, 3 were granted"),
        ({"length": -1}, "length of -1"),
        ({"digest": 1}, "digest"),
        ({"length": 0, "num_spans": 0, "num_bytes": 0, "digest": 0}, "is no part of 0 tokens"),
    ],
    ids=repr,
)
def test_a_ready_that_does_not_fit_breaks_it(pair: Pair, change: dict[str, Any], reason: str) -> None:
    send(pair)
    ready = pair.ready()
    pair.step()
    pair.receiver.ready(replace(ready, **change))
    assert reason in pair.broken()


def test_a_repeated_ready_is_harmless_and_a_second_one_is_not(pair: Pair) -> None:
    send(pair)
    ready = pair.ready()
    assert pair.receiver.ready(ready)
    assert pair.receiver.ready(ready)
    assert isinstance(pair.end(), Arrived)
    assert not pair.receiver.ready(ready)
    pair.receiver.open((8, 0), 7, [12])
    assert pair.receiver.ready(Ready(8, 0, 5, 0, 0, 0))
    assert pair.receiver.ready(Ready(8, 0, 1, 0, 0, 0))
    assert "two different" in pair.broken((8, 0))


# --- what is stale


def test_messages_of_other_attempts_are_ignored(pair: Pair) -> None:
    pair.sender.open(KEY)
    pair.receiver.open(KEY, 6, [11])
    for key in ((7, 1), (8, 0)):
        assert not pair.sender.granted(Grant(*key, 6, pack_ids([11]), pair.into.address()))
        assert not pair.receiver.ready(Ready(*key, 0, 0, 0, 0))
    assert pair.sender.poll() == []
    assert pair.receiver.poll(0.0) == []


def test_a_second_grant_and_a_late_one_are_ignored(pair: Pair) -> None:
    grant = send(pair)
    assert not pair.sender.granted(replace(grant, slot=9, pages=pack_ids([1, 2, 3])))
    pair.receiver.ready(pair.ready())
    assert isinstance(pair.end(), Arrived)
    assert not pair.sender.granted(grant)


def test_a_key_is_single_use(pair: Pair) -> None:
    send(pair)
    for _ in range(2):
        with pytest.raises(ValueError, match="new attempt"):
            pair.sender.open(KEY)
        with pytest.raises(ValueError, match="new attempt"):
            pair.receiver.open(KEY, 7, [12])
        pair.sender.close(KEY)
        pair.receiver.close(KEY)
        pair.sender.close(KEY)
        pair.receiver.close(KEY)


def test_pushes_after_the_end_are_ignored_and_impossible_ones_are_errors(pair: Pair) -> None:
    with pytest.raises(KeyError, match="never opened"):
        pair.sender.push(KEY, [1], 1, 1, final=True)
    pair.sender.open(KEY)
    with pytest.raises(ValueError, match="1 pages do not hold 9 tokens"):
        pair.sender.push(KEY, [1], 1, 9, final=True)
    pair.sender.push(KEY, [1], 1, 1, final=True)
    with pytest.raises(ValueError, match="complete already"):
        pair.sender.push(KEY, [1], 1, 2, final=True)
    pair.sender.close(KEY)
    pair.sender.push(KEY, [1], 1, 1, final=True)
    assert pair.sender.poll() == []


# --- how it is lost


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pages": b"12345"}, "whole number"),
        ({"pages": pack_ids([1])}, "20 tokens need 3 pages, 1 were granted"),
        ({"slot": -1}, "32 bits"),
        ({"slot": 2**32}, "32 bits"),
        ({"address": "nonsense"}, "cannot connect to 'nonsense'"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("grant_first", [True, False])
def test_a_grant_that_cannot_be_used_loses_that_hand_off(
    pair: Pair, change: dict[str, Any], reason: str, grant_first: bool
) -> None:
    pair.sender.open(KEY)
    bad = replace(Grant(*KEY, 6, pack_ids([11, 10, 2]), pair.into.address()), **change)
    if grant_first:
        assert pair.sender.granted(bad)
    pair.sender.push(KEY, [5, 3, 9], 4, 20, final=True)
    if not grant_first:
        assert pair.sender.granted(bad)
    pair.until(lambda: KEY in pair.sent)
    lost = pair.sent[KEY]
    assert isinstance(lost, SendLost)
    assert reason in lost.reason
    send(pair, (8, 0))
    pair.receiver.ready(pair.ready((8, 0)))
    assert isinstance(pair.end((8, 0)), Arrived)


def test_a_dead_decode_worker_loses_the_hand_off_and_its_pages_come_back() -> None:
    pair = Pair(stall_s=0.2)
    grant = pair.receiver.open(KEY, 6, [11, 10, 2])
    pair.into.close()
    assert wait(lambda: refused(grant.address))
    pair.sender.open(KEY)
    pair.sender.granted(grant)
    pair.sender.push(KEY, [5, 3, 9], 4, 20, final=True)

    def lost() -> list[Sent | SendLost]:
        return [end for end in pair.sender.poll() if isinstance(end, SendLost)]

    assert wait(lost)
    pair.close()


def test_an_abort_in_the_middle_and_the_next_owner_of_the_pages(pair: Pair) -> None:
    """Decode gives the pages of an aborted hand-off to the next one while the first one's bytes are still on their way."""
    proxy = Proxy(pair.into.address())
    proxy.open.clear()
    pair.source.pages[12].fill_(0xEE)
    pair.sender.open(KEY)
    grant = pair.receiver.open(KEY, 6, [11, 10, 2])
    pair.sender.granted(replace(grant, address=proxy.address))
    pair.sender.push(KEY, [12, 12, 12], 4, 24, final=False)  # 0xEE is on its way to pages 11, 10 and 2
    time.sleep(0.1)
    assert not pair.receiver.close(KEY)
    assert pair.end() == Freed(KEY)
    send(pair, (8, 0))
    pair.receiver.ready(pair.ready((8, 0)))
    assert isinstance(pair.end((8, 0)), Arrived)
    proxy.open.set()  # and here they come
    assert wait(lambda: pair.into.counters()["late_frames"] > 0)
    assert_same_kv(pair, [5, 3, 9], 4, [11, 10, 2], 6, 20)
    assert not pair.receiver.ready(Ready(*KEY, 24, 3, 1, 1))
    proxy.close()


def test_tombstones_are_bounded_and_forget_the_oldest() -> None:
    stones = Tombstones(limit=3)
    for rid in range(5):
        stones.add((rid, 0))
        stones.add((rid, 0))
    assert len(stones) == 3
    assert [rid for rid in range(5) if (rid, 0) in stones] == [2, 3, 4]


# --- any interleaving


class HandTransport:
    """Both halves of a transport in one thread: the real window check, and bytes, commands and answers that take effect
    when the test says so."""

    def __init__(self, source: Any, target: Any) -> None:
        self._memory = CpuMemory(rows_of(source))
        self.events: list[Event] = []
        self.inbound_events: list[Event] = []
        sizes = {"page": tuple(target.pages.shape), "slot": tuple(target.slots.shape)}
        self.inbound = Inbound(CpuMemory(rows_of(target)), sizes, "zeromq", Counters(), self.inbound_events.append)
        self.on_the_way: list[list[bytes]] = []
        self.waiting: list[tuple[Key, Spans]] = []
        self.cancelled: list[Key] = []  # not yet obeyed
        self.revoked: list[Key] = []  # not yet obeyed
        self._number = 0

    def write(self, peer: str, key: Key, spans: Spans, secret: bytes = b"") -> None:
        self.waiting.append((key, spans))

    def meet(self, peer: str, name: str) -> None: ...

    def cancel(self, key: Key) -> None:
        self.cancelled.append(key)

    def obey_cancel(self, index: int) -> None:
        key = self.cancelled.pop(index)
        self.waiting = [each for each in self.waiting if each[0] != key]
        self.events.append(Drained(key))

    def transmit(self, index: int) -> None:
        key, spans = self.waiting.pop(index)
        digests = []
        for i, (kind, dst, offset, nbytes, src) in enumerate(spans.tolist()):
            data = bytes(self._memory.direct((kind, src, offset, nbytes)))
            digests.append(span_digest(key, kind, dst, offset, data))
            self._number += 1
            self.on_the_way.append([pack_chunk(Chunk(key, self._number, spans[i : i + 1])), data])
        self.events.append(Wrote(key, len(spans), num_bytes(spans), combine(digests)))

    def deliver(self, frames: list[bytes]) -> None:
        hear(self.inbound, Listener(), frames)  # its answers take effect with `transmit`
        self.inbound.settle(idle=True)

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events


def rows_of(arena: Any) -> dict[str, Any]:
    return {"page": arena.pages.numpy(), "slot": arena.slots.numpy()}


class Inward:
    """The receiving half of a HandTransport, as the Transport that the Receiver sees."""

    def __init__(self, hand: HandTransport) -> None:
        self._hand = hand
        self.revoke = hand.revoked.append

    def expect(self, key: Key, slot: int, pages: Sequence[int], secret: bytes = b"") -> None:
        self._hand.inbound.expect(key, slot, pages, 0, secret)

    def address(self) -> str:
        return "tcp://hand"

    def poll(self) -> list[Event]:
        events = list(self._hand.inbound_events)
        self._hand.inbound_events.clear()
        return events


def test_what_lands_at_the_last_moment_counts_too() -> None:
    """A span that was not promised, and lands after the receiver has looked and before the window is shut."""
    source, target = small_arena(seed=1), small_arena(seed=2)
    hand = HandTransport(source, target)
    transport: Any = hand
    inward: Any = Inward(hand)
    sender, receiver = Sender(source, transport), Receiver(target, inward, timeout_s=10.0)
    sender.open(KEY)
    sender.granted(receiver.open(KEY, 6, [11, 12]))
    sender.push(KEY, [5], 4, PAGE_TOKENS, final=True)
    hand.transmit(0)
    for frames in hand.on_the_way:
        hand.deliver(frames)
    (sent,) = sender.poll()
    assert isinstance(sent, Sent)
    receiver.ready(sent.ready)
    assert receiver.poll(0.0) == []
    assert hand.revoked == [KEY]
    late = Chunk(KEY, 999, table([Span("page", 1, 12, 0, LAYOUT.page_bytes)]))
    hand.deliver([pack_chunk(late), bytes(LAYOUT.page_bytes)])
    hand.inbound.revoke(hand.revoked.pop())
    (end,) = receiver.poll(0.0)
    assert isinstance(end, Broken)
    assert "page 12 bytes 0..2559 is no part of" in end.reason


def test_spans_may_land_in_any_order() -> None:
    """As they do over several connections."""
    source, target = small_arena(seed=1), small_arena(seed=2)
    hand = HandTransport(source, target)
    transport: Any = hand
    inward: Any = Inward(hand)
    sender, receiver = Sender(source, transport), Receiver(target, inward, timeout_s=10.0)
    sender.open(KEY)
    sender.granted(receiver.open(KEY, 6, [11, 12, 13]))
    sender.push(KEY, [5, 3, 4], 4, 2 * PAGE_TOKENS + 5, final=True)
    hand.transmit(0)
    for frames in random.Random(3).sample(hand.on_the_way, len(hand.on_the_way)):
        hand.deliver(frames)
    (sent,) = sender.poll()
    assert isinstance(sent, Sent)
    receiver.ready(sent.ready)
    assert receiver.poll(0.0) == []
    hand.inbound.revoke(hand.revoked.pop())
    assert receiver.poll(0.0) == [Arrived(KEY, 2 * PAGE_TOKENS + 5)]


def test_a_span_that_a_transport_says_twice_does_not_stand_for_another() -> None:
    hand = HandTransport(small_arena(), small_arena())
    inward: Any = Inward(hand)
    receiver = Receiver(small_arena(), inward, timeout_s=10.0)
    receiver.open(KEY, 6, [11])
    expected = handoff_places(LAYOUT, [11], 6, PAGE_TOKENS)
    receiver.ready(Ready(*KEY, PAGE_TOKENS, len(expected), num_bytes(expected), 0))
    hand.inbound_events += [Landed(KEY, expected[:1], 0)] * len(expected)
    assert receiver.poll(0.0) == []
    hand.inbound.revoke(hand.revoked.pop())
    (end,) = receiver.poll(0.0)
    assert isinstance(end, Broken) and not end.corrupt
    assert "came twice" in end.reason


def test_memory_is_not_free_before_the_transport_has_said_so() -> None:
    hand = HandTransport(small_arena(), small_arena())
    transport: Any = hand
    sender = Sender(small_arena(), transport)
    for key in (KEY, (8, 0)):
        sender.open(key)
        sender.granted(Grant(*key, 6, pack_ids([11]), "tcp://hand"))
        sender.push(key, [5], 4, PAGE_TOKENS, final=True)
    assert not sender.close(KEY)
    assert not sender.close(KEY)
    assert sender.poll() == []
    hand.transmit(0)  # what had left already: no Sent comes of it
    hand.obey_cancel(0)
    assert sender.poll() == [Freed(KEY)]
    assert sender.close(KEY)
    assert [key for key, _ in hand.waiting] == [(8, 0)]


class HandoffMachine(RuleBasedStateMachine):
    """Two workers with small pools; messages, bytes and commands take effect in any order, late, or twice. A double free
    raises in the pool; a byte outside an open window shows in the shadow copy."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = small_arena(12, 6, seed=1), small_arena(12, 6, seed=2)
        self.hand = HandTransport(self.source, self.target)
        transport: Any = self.hand
        inward: Any = Inward(self.hand)
        self.sender, self.receiver = Sender(self.source, transport), Receiver(self.target, inward, timeout_s=10.0)
        self.ours, self.theirs = PagePool(12, 6), PagePool(12, 6)
        self.sending: dict[Key, Any] = {}  # what each side holds, draining ones too
        self.receiving: dict[Key, Any] = {}
        self.closing: set[Key] = set()  # of `sending`: the scheduler has let go of it
        self.lengths: dict[Key, int] = {}
        self.pushed: dict[Key, int] = {}
        self.grants: list[Grant] = []
        self.readies: list[Ready] = []
        self.old_frames: list[list[bytes]] = []
        self.shadow = self.target.pages.clone(), self.target.slots.clone()
        self.contents: dict[Key, tuple[Any, Any]] = {}
        self.clock_s = 0.0
        self.rid = 0

    @rule(length=st.integers(0, 3 * PAGE_TOKENS))
    def open(self, length: int) -> None:
        kv = self.ours.take(pages_for(length))
        if kv is None:
            return
        key = (self.rid, 0)
        self.rid += 1
        self.source.pages[kv.pages] = torch.randint(0, 256, (len(kv.pages), LAYOUT.page_bytes), dtype=torch.uint8)
        self.contents[key] = self.source.pages[kv.pages].clone(), self.source.slots[kv.slot].clone()
        self.sender.open(key)
        self.sending[key], self.lengths[key], self.pushed[key] = kv, length, -1

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        granted = {(g.rid, g.attempt) for g in self.grants}
        keys = [key for key in self.lengths if key not in self.receiving and key not in granted]
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        kv = self.theirs.take(pages_for(self.lengths[key]))
        if kv is not None:
            self.receiving[key] = kv
            self.grants.append(self.receiver.open(key, kv.slot, kv.pages))

    @rule(data=st.data())
    def tell_grant(self, data: st.DataObject) -> None:
        """Late, twice, or of a hand-off that is over: all of them may come."""
        if self.grants:
            self.sender.granted(data.draw(st.sampled_from(self.grants)))

    @rule(data=st.data(), step=st.integers(0, 10))
    def push(self, data: st.DataObject, step: int) -> None:
        keys = [key for key in self.sending if self.pushed[key] < self.lengths[key] and key not in self.closing]
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        done = min(self.lengths[key], max(0, self.pushed[key]) + step)
        kv, final = self.sending[key], done == self.lengths[key]
        self.pushed[key] = done
        self.sender.push(key, kv.pages, kv.slot, done, final)

    @rule(data=st.data())
    def transmit(self, data: st.DataObject) -> None:
        if self.hand.waiting:
            self.hand.transmit(data.draw(st.integers(0, len(self.hand.waiting) - 1)))

    @rule(data=st.data(), count=st.integers(1, 20))
    def land(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.hand.on_the_way))):
            frames = self.hand.on_the_way.pop(data.draw(st.integers(0, len(self.hand.on_the_way) - 1)))
            self.old_frames.append(frames)
            self._land(frames)

    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        if self.old_frames:
            self._land(data.draw(st.sampled_from(self.old_frames)))

    @rule(data=st.data())
    def tell_ready(self, data: st.DataObject) -> None:
        if self.readies:
            self.receiver.ready(data.draw(st.sampled_from(self.readies)))

    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        """The engine gets round to one of the commands it was given."""
        first: bool = data.draw(st.booleans())
        if self.hand.cancelled and first:
            self.hand.obey_cancel(data.draw(st.integers(0, len(self.hand.cancelled) - 1)))
        elif self.hand.revoked:
            self.hand.inbound.revoke(self.hand.revoked.pop(data.draw(st.integers(0, len(self.hand.revoked) - 1))))

    @rule(length=st.integers(0, 3 * PAGE_TOKENS))
    def start(self, length: int) -> None:
        """A hand-off that is granted and computed as it should be."""
        key, theirs = (self.rid, 0), self.theirs.free_pages >= pages_for(length) and self.theirs.free_slots
        self.open(length)
        if key in self.sending and theirs:
            kv = self.theirs.take(pages_for(length))
            assert kv is not None
            self.receiving[key] = kv
            self.grants.append(self.receiver.open(key, kv.slot, kv.pages))
            self.sender.granted(self.grants[-1])
            self.sender.push(key, self.sending[key].pages, self.sending[key].slot, length, final=True)
            self.pushed[key] = length

    @rule(shuffler=st.randoms(use_true_random=False), part=st.sampled_from([1.0, 1.0, 0.5]))
    def flush(self, shuffler: random.Random, part: float) -> None:
        """Everything that was pushed leaves, all or half of it lands, in any order, decode is told, and windows shut."""
        while self.hand.waiting:
            self.hand.transmit(0)
        shuffler.shuffle(self.hand.on_the_way)
        for _ in range(int(part * len(self.hand.on_the_way))):
            self.old_frames.append(self.hand.on_the_way.pop())
            self._land(self.old_frames[-1])
        self.poll(0.0)
        for ready in self.readies[-4:]:
            self.receiver.ready(ready)
        self.poll(0.0)
        self._obey_all()
        self.poll(0.0)

    @rule(data=st.data())
    def close_sender(self, data: st.DataObject) -> None:
        """Also twice, while it drains."""
        if self.sending:
            key = data.draw(st.sampled_from(list(self.sending)))
            if self.sender.close(key):
                self._free_ours(key)
            else:
                self.closing.add(key)

    @rule(data=st.data())
    def close_receiver(self, data: st.DataObject) -> None:
        if self.receiving:
            key = data.draw(st.sampled_from(list(self.receiving)))
            if self.receiver.close(key):
                self.theirs.drop(self.receiving.pop(key))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.hand.waiting:
            key = data.draw(st.sampled_from(self.hand.waiting))[0]
            self.hand.waiting = [each for each in self.hand.waiting if each[0] != key]
            self.hand.events.append(Lost(key, "the peer is gone"))

    @rule(seconds=st.sampled_from([0.0, 0.0, 20.0]))
    def poll(self, seconds: float) -> None:
        for sent in self.sender.poll():
            if sent.key in self.sending:
                self._free_ours(sent.key)
            if isinstance(sent, Sent):
                self.readies.append(sent.ready)
        self.clock_s += seconds
        for end in self.receiver.poll(self.clock_s):
            kv = self.receiving.pop(end.key)
            if isinstance(end, Arrived):
                pages, slot = self.contents[end.key]
                assert end.length == self.lengths[end.key]
                assert torch.equal(self.target.pages[kv.pages], pages)
                for offset, nbytes in LAYOUT.live_slot_spans(end.length):
                    assert torch.equal(self.target.slots[kv.slot, offset : offset + nbytes], slot[offset : offset + nbytes])
            self.theirs.drop(kv)

    def _land(self, frames: list[bytes]) -> None:
        self.hand.deliver(frames)
        self.nothing_changed_outside_open_windows()

    def _obey_all(self) -> None:
        while self.hand.cancelled:
            self.hand.obey_cancel(0)
        while self.hand.revoked:
            self.hand.inbound.revoke(self.hand.revoked.pop(0))

    def _free_ours(self, key: Key) -> None:
        kv = self.sending.pop(key)
        self.closing.discard(key)
        self.source.pages[kv.pages] = 0xEE  # the next owner writes at once
        self.ours.drop(kv)

    @invariant()
    def nothing_changed_outside_open_windows(self) -> None:
        pages, slots = self.shadow
        for kv in self.receiving.values():
            pages[kv.pages] = self.target.pages[kv.pages]
            slots[kv.slot] = self.target.slots[kv.slot]
        assert torch.equal(self.target.pages, pages)
        assert torch.equal(self.target.slots, slots)

    @invariant()
    def memory_that_is_free_is_not_going_to_be_read(self) -> None:
        assert {key for key, _ in self.hand.waiting} <= set(self.sending)

    @invariant()
    def no_page_has_two_owners(self) -> None:
        for held in (self.sending, self.receiving):
            pages = [page for kv in held.values() for page in kv.pages]
            assert len(pages) == len(set(pages))

    def teardown(self) -> None:
        """Everything is aborted, the engine does as it was told: every page is free, once."""
        for key in list(self.sending):
            if self.sender.close(key):
                self._free_ours(key)
        for key in list(self.receiving):
            if self.receiver.close(key):
                self.theirs.drop(self.receiving.pop(key))
        self._obey_all()
        self.poll(0.0)
        for frames in self.hand.on_the_way + self.old_frames:
            self._land(frames)
        self.nothing_changed_outside_open_windows()
        assert not self.sending
        assert not self.receiving
        assert (self.ours.free_pages, self.theirs.free_pages) == (11, 11)
        assert (self.ours.free_slots, self.theirs.free_slots) == (5, 5)


HandoffMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestInterleavings = HandoffMachine.TestCase
