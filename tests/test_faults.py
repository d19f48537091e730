"""Hand-offs over a transport that fails: whatever is injected, a hand-off arrives whole or is known to be broken, every
page comes back once, and the next attempt works."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvtransfer.pages import PagePool, SeqKV
from kvtransfer.receiver import Arrived, Broken, Receiver
from kvtransfer.sender import Sender, SendLost, Sent
from kvtransfer.transports import Drained, Freed, Key, Landed, Lost, Wrote
from kvtransfer.transports.faults import Faults, FaultyTransport
from kvtransfer.transports.frame import PATHS
from tests.transfer_rig import PAGE_TOKENS, Span, collect, of_type, rigged_transport, small_arena, table, thread_transport, wait

LENGTH = 2 * PAGE_TOKENS + 3


class Ends:
    """Two ends with real pools over a faulty transport, as the two schedulers use them."""

    def __init__(self, path: str, faults: Faults) -> None:
        timeout_s = 0.3 if faults.drop else 30.0  # where nothing is dropped nothing may be lost to a busy machine
        self.source, self.target = small_arena(32, 8, seed=1), small_arena(32, 8, seed=2)
        self.out = FaultyTransport(rigged_transport(self.source, path), faults)
        self.into = rigged_transport(self.target, path)
        self.sender, self.receiver = Sender(self.source, self.out), Receiver(self.target, self.into, timeout_s)
        self.ours, self.theirs = PagePool(32, 8), PagePool(32, 8)
        self.sending: dict[Key, SeqKV] = {}
        self.receiving: dict[Key, SeqKV] = {}
        self.ended: dict[Key, str] = {}

    def start(self, key: Key) -> None:
        ours, theirs = self.ours.take(3), self.theirs.take(3)
        assert ours is not None and theirs is not None
        self.sending[key], self.receiving[key] = ours, theirs
        self.sender.open(key)
        self.sender.granted(self.receiver.open(key, theirs.slot, theirs.pages))
        for done in (PAGE_TOKENS, 2 * PAGE_TOKENS):
            self.sender.push(key, ours.pages, ours.slot, done, final=False)
        self.sender.push(key, ours.pages, ours.slot, LENGTH, final=True)

    def step(self) -> None:
        for event in self.sender.poll():
            match event:
                case Sent():
                    self.receiver.ready(event.ready)
                case SendLost():
                    self.abort_receiver(event.key)
            if event.key in self.sending:
                self.ours.drop(self.sending.pop(event.key))
        for end in self.receiver.poll(time.monotonic()):
            kv = self.receiving.pop(end.key)
            match end:
                case Arrived():
                    self.ended[end.key] = "arrived"
                case Broken():
                    self.ended[end.key] = end.reason
                case Freed():
                    self.ended[end.key] = "lost"
            self.theirs.drop(kv)

    def abort_receiver(self, key: Key) -> None:
        if key in self.receiving and self.receiver.close(key):
            self.theirs.drop(self.receiving.pop(key))

    def run(self, key: Key) -> str:
        """How a hand-off ends."""
        self.start(key)

        def over() -> bool:
            self.step()
            return key in self.ended

        assert wait(over), "it never ends"
        return self.ended[key]

    def nothing_held(self) -> bool:
        self.step()
        pools = (self.ours, self.theirs)
        return all((pool.free_pages, pool.free_slots) == (31, 7) for pool in pools)

    def close(self) -> None:
        self.out.close()
        self.into.close()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize(
    ("faults", "end"),
    [
        (Faults(), "arrived"),
        (Faults(delay=1, seconds=0.1), "arrived"),
        (Faults(stall=1, seconds=0.2), "arrived"),
        (Faults(drop=1), "spans missing 0.3 s after Ready"),
        (Faults(corrupt=1), "digest"),
        (Faults(cut=1), "lost"),
    ],
    ids=["none", "delay", "stall", "drop", "corrupt", "cut"],
)
def test_a_fault_is_survived_or_known_and_every_page_comes_back(path: str, faults: Faults, end: str) -> None:
    ends = Ends(path, faults)
    for rid in range(3):
        assert end in ends.run((rid, 0))
        assert wait(ends.nothing_held)
    ends.close()


def test_a_broken_attempt_is_followed_by_one_that_works(path: str) -> None:
    """As the router does it: a new attempt, of which the old one's bytes know nothing."""
    ends = Ends(path, Faults(corrupt=0.15, drop=0.1, cut=0.1, delay=0.2, seconds=0.02, seed=3))
    attempts = 0
    for rid in range(12):
        for attempt in range(20):
            attempts += 1
            if ends.run((rid, attempt)) == "arrived":
                break
        else:
            pytest.fail("twenty attempts failed")
        assert wait(ends.nothing_held)
    assert 12 < attempts < 80
    assert sum(ends.out.injected.values()) > 5
    assert ends.out.counters()["injected_corrupt"] == ends.out.injected["corrupt"]
    ends.close()


def test_the_same_seed_injects_the_same_faults() -> None:
    counts = []
    for _ in range(2):
        transport = FaultyTransport(thread_transport(small_arena()), Faults(drop=0.5, seed=9))
        for rid in range(50):
            transport.write("tcp://127.0.0.1:1", (rid, 0), table([Span("page", 1, 1, 0, 10)]))
        counts.append([event.key for event in transport.poll() if isinstance(event, Wrote)])
        transport.close()
    assert counts[0] == counts[1]
    assert 10 < len(counts[0]) < 40


def test_two_corrupt_writes_of_a_hand_off_do_not_cancel_out() -> None:
    """Whatever their digests are: they are added up."""
    source, target = small_arena(seed=1), small_arena(seed=2)
    out, into = FaultyTransport(thread_transport(source), Faults(corrupt=1)), thread_transport(target)
    for rid in range(20):
        sums = [0, 0]
        into.expect((rid, 0), 1, [1, 2])
        for page in (1, 2):
            out.write(into.address(), (rid, 0), table([Span("page", page, page, 0, 10)]))
            sums[0] += sum(event.digest for event in of_type(collect(out, len), Wrote))
            sums[1] += sum(event.digest for event in of_type(collect(into, len), Landed))
        assert (sums[0] - sums[1]) % (1 << 64) == 2
        into.revoke((rid, 0))
        assert collect(into, len) == [Drained((rid, 0))]
    out.close()
    into.close()


def test_a_cancel_of_what_was_cut_is_answered_and_it_stays_lost() -> None:
    out, into = FaultyTransport(thread_transport(small_arena()), Faults(cut=1)), thread_transport(small_arena())
    span = table([Span("page", 1, 1, 0, 10)])
    out.write(into.address(), (7, 0), span)
    assert isinstance(collect(out, len)[0], Lost)
    out.write(into.address(), (7, 0), span)
    out.cancel((7, 0))
    assert collect(out, len) == [Drained((7, 0))]
    assert out.injected["cut"] == 1
    out.close()
    into.close()


@pytest.mark.parametrize(("text", "word"), [("dorp=1", "'dorp' is no fault"), ("drop=x", "could not convert")])
def test_a_fault_that_is_none_is_refused(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Faults.parse(text)


def test_faults_from_text() -> None:
    assert Faults.parse("drop=0.25,seconds=2,seed=7") == Faults(drop=0.25, seconds=2.0, seed=7)
    assert Faults.parse("") == Faults()
