"""The decode scheduler alone: admission, forks, growth, retraction, turns, and that nothing is lost however it ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.request import Limits
from decode.sampling import EXCLUDED, Choice
from decode.scheduler import Scheduler
from decode.sequence import Sequence
from kvtransfer.pages import PagePool
from kvtransfer.receiver import Arrived, Broken
from kvtransfer.transports import Freed
from wire.messages import ALL_SAMPLES, Abort, Failed, Grant, Offer, Ready, SamplingParams, Tokens, pack_ids, unpack_ids
from wire.metrics import Metrics

PAGE_TOKENS = 4
EOS = 1
Key = tuple[int, int]


class FakeReceiver:
    """`drains`: what is closed comes back only with a Freed, as it does when bytes may still land."""

    def __init__(self) -> None:
        self.open_keys: dict[Key, list[int]] = {}
        self.drains = False

    def open(self, key: Key, slot: int, pages: list[int]) -> Grant:
        assert key not in self.open_keys
        self.open_keys[key] = list(pages)
        return Grant(*key, slot, pack_ids(pages), "here")

    def ready(self, ready: Ready) -> bool:
        return (ready.rid, ready.attempt) in self.open_keys

    def close(self, key: Key) -> bool:
        was_open = self.open_keys.pop(key, None) is not None
        return not (self.drains and was_open)


class FakeArena:
    """Notes the copies of a fork."""

    def __init__(self) -> None:
        self.pages: list[tuple[int, int]] = []
        self.slots: list[tuple[int, int]] = []

    def copy_page(self, src: int, dst: int) -> None:
        self.pages.append((src, dst))

    def copy_slot(self, src: int, dst: int) -> None:
        self.slots.append((src, dst))


@dataclass
class Row:
    """A sequence in a step, and the slot and pages that the step was launched with."""

    sequence: Sequence
    token: int
    count: int
    slot: int
    pages: list[int]


@dataclass
class Flight:
    batch: list[Sequence]
    rows: list[Row]


class Bench:
    """A scheduler with fakes around it. Every token that is generated is 7, unless `tokens` names another.

    depth: steps that stay in flight. `step_tokens`: what a step feeds each sequence; it gets one to that many tokens.
    """

    def __init__(
        self, num_pages: int = 101, num_slots: int = 17, max_batch: int = 8, depth: int = 0, step_tokens: int = 1
    ) -> None:
        self.depth, self.step_tokens = depth, step_tokens
        self.flights: deque[Flight] = deque()
        self.receiver, self.arena, self.metrics = FakeReceiver(), FakeArena(), Metrics()
        self.pool = PagePool(num_pages, num_slots)
        self.sent: list[tuple[str, Any]] = []
        self.clock_s = 0.0
        limits = Limits(100, 1000, EOS, PAGE_TOKENS, self.pool.total_pages, self.pool.total_slots, max_batch, 20)
        receiver: Any = self.receiver
        arena: Any = self.arena
        self.scheduler = Scheduler(self.pool, receiver, arena, limits, "print", "decode-1", self._send, self.metrics)

    def _send(self, address: str, message: Any) -> bool:
        self.sent.append((address, message))
        return True

    def offer(self, rid: int, length: int, max_tokens: int = 4, now_s: float = 0.0, **changes: Any) -> None:
        """A request with `length` tokens of KV to hand over."""
        fields: dict[str, Any] = {
            "rid": rid,
            "attempt": 0,
            "tokens": pack_ids([5] * (length + 1)),
            "prompt_tokens": length + 1,
            "samples": (0,),
            "sampling": SamplingParams(max_tokens=max_tokens, seed=0),
            "prefill_inbox": "prefill",
            "router_inbox": "router",
            "fingerprint": "print",
            "timeout_s": 100.0,
        }
        self.scheduler.offer(Offer(**{**fields, **changes}), now_s)

    def arrive(self, *rids: int) -> None:
        """Everything granted (or only `rids`) arrives."""
        keys = [key for key in self.receiver.open_keys if not rids or key[0] in rids]
        for key in keys:
            self.receiver.close(key)
        arriving = self.scheduler.arriving
        self.scheduler.settle([Arrived(key, arriving[key].length) for key in keys], self.clock_s)

    def step(self, tokens: dict[int, int] | None = None) -> list[int]:
        """One turn without arrivals; gives the rids that ran."""
        self.scheduler.admit(self.clock_s)
        batch = self.launch(tokens)
        while len(self.flights) > (self.depth if batch else 0):
            self.land()
        return [s.key[0] for s in batch]

    def launch(self, tokens: dict[int, int] | None = None, failing: int = 0) -> list[Sequence]:
        """Starts a step, but for the first `failing` sequences of it."""
        batch = self.scheduler.next_batch(self.step_tokens)
        assert len(batch) <= self.scheduler.limits.max_batch
        self.scheduler.fail_step(batch[:failing], "boom")
        batch = batch[failing:]
        if batch:
            self.flights.append(Flight(batch, [self.run_row(s, (tokens or {}).get(s.key[0], 7)) for s in batch]))
        return batch

    def run_row(self, sequence: Sequence, token: int) -> Row:
        """What a device does: `count` tokens, whose KV is written behind what the steps before it have made of the text."""
        before = [row for flight in self.flights for row in flight.rows if row.sequence is sequence]
        start = len(sequence.tokens) - 1 + sum(row.count for row in before)
        count = 1 + (sequence.key[0] + start) % self.step_tokens
        needed = min(start + self.step_tokens, sequence.prompt_tokens + sequence.sampling.max_tokens - 1)
        assert sequence.kv.slot and len(sequence.kv.pages) * PAGE_TOKENS >= needed
        return Row(sequence, token, count, sequence.kv.slot, list(sequence.kv.pages))

    def land(self) -> None:
        flight = self.flights.popleft()
        choices = [Choice([row.token] * row.count) for row in flight.rows]
        self.scheduler.advance(flight.batch, choices, self.clock_s)

    def run(self, steps: int = 500) -> None:
        for _ in range(steps):
            self.step()
            self.arrive()

    def messages(self, kind: type) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def granted(self) -> list[int]:
        return [grant.rid for grant in self.messages(Grant)]

    def text(self, rid: int, sample: int = 0) -> list[int]:
        rows = [row for message in self.messages(Tokens) for row in message.rows]
        return [token for row in rows if (row[0], row[2]) == (rid, sample) for token in row[4]]

    def nothing_held(self) -> bool:
        pool = self.pool
        while self.flights:
            self.land()
        free = (pool.free_pages, pool.free_slots) == (pool.total_pages, pool.total_slots)
        return free and self.scheduler.idle and not self.receiver.open_keys

    def check_books(self) -> None:
        """Every page and slot is free or held, references are what the page tables say, and what a step in flight writes into
        is held by the sequence that it writes for."""
        kvs = [s.kv for s in self.scheduler.running] + [kv for r in self.scheduler.arriving.values() for kv in r.kvs]
        kvs += [s.kv for s in self.scheduler.leaving]
        for row in [row for flight in self.flights for row in flight.rows]:
            assert row.sequence.kv.slot == row.slot and row.sequence.kv.pages[: len(row.pages)] == row.pages
            assert row.sequence.over == (row.sequence in self.scheduler.leaving)
        assert all(s.in_flight for s in self.scheduler.leaving)
        held = [page for kv in kvs for page in kv.pages]
        for page in set(held):
            assert self.pool.references(page) == held.count(page)
        assert self.pool.free_pages + len(set(held)) == self.pool.total_pages
        slots = [kv.slot for kv in kvs]
        assert len(set(slots)) == len(slots) and self.pool.free_slots + len(slots) == self.pool.total_slots
        assert set(self.receiver.open_keys) == set(self.scheduler.arriving)


def test_a_request_from_offer_to_length() -> None:
    bench = Bench()
    bench.offer(3, 9, max_tokens=3)
    assert bench.step() == [] and bench.granted() == [3]
    assert len(unpack_ids(bench.messages(Grant)[0].pages)) == 3
    bench.arrive()
    assert [bench.step(), bench.step(), bench.step()] == [[3], [3], [3]]
    rows = [message.rows for message in bench.messages(Tokens)]
    assert rows == [[[3, 0, 0, n, [7], reason, None, None]] for n, reason in enumerate(("", "", "length"))]
    assert bench.nothing_held()


def test_what_is_live_is_told_in_every_state() -> None:
    bench = Bench()
    assert bench.scheduler.live() == []
    bench.offer(3, 9, max_tokens=2, samples=(0, 1))
    assert bench.scheduler.queued and bench.scheduler.live() == [(3, 0)]
    bench.step()
    assert bench.scheduler.arriving and bench.scheduler.live() == [(3, 0)]
    bench.arrive()
    assert len(bench.scheduler.running) == 2 and bench.scheduler.live() == [(3, 0)]
    bench.offer(4, 9, attempt=1)
    bench.step()
    assert sorted(bench.scheduler.live()) == [(3, 0), (4, 1)]
    bench.step()
    assert bench.scheduler.live() == [(4, 1)]
    bench.scheduler.abort(Abort(4, 1))
    assert bench.scheduler.live() == []


def test_one_message_per_router_and_step() -> None:
    bench = Bench()
    for rid in range(6):
        bench.offer(rid, 5, router_inbox=f"router{rid % 2}")
    bench.step()
    bench.arrive()
    bench.step()
    tokens = [(address, [row[0] for row in m.rows]) for address, m in bench.sent if isinstance(m, Tokens)]
    assert tokens == [("router0", [0, 2, 4]), ("router1", [1, 3, 5])]


def test_grants_are_in_order_and_the_head_is_not_overtaken() -> None:
    bench = Bench(num_pages=21)
    bench.offer(0, 40)
    bench.offer(1, 40)
    bench.offer(2, 4)
    bench.step()
    assert bench.granted() == [0]
    bench.arrive()
    for _ in range(4):
        bench.step()
    bench.step()
    assert bench.granted() == [0, 1, 2]


def test_admission_keeps_a_page_to_grow_by_for_everything_admitted() -> None:
    bench = Bench(num_pages=11)  # 10 pages: 0 takes 4; 1 takes 3 and reserves 2; 2 would need 1 and reserve 3
    bench.offer(0, 16, max_tokens=4)
    bench.offer(1, 12, max_tokens=4)
    bench.offer(2, 4, max_tokens=4)
    bench.step()
    assert bench.granted() == [0, 1]


def test_what_is_alone_needs_no_reserve() -> None:
    bench = Bench(num_pages=5)
    bench.offer(0, 15, max_tokens=1)
    bench.step()
    assert bench.granted() == [0]
    bench.run()
    assert bench.text(0) == [7] and bench.nothing_held()


def test_fork_shares_full_pages_and_copies_the_partial_one_and_the_slot() -> None:
    bench = Bench()
    bench.offer(0, 10, samples=(0, 1, 2))
    bench.step()
    assert bench.pool.free_pages == bench.pool.total_pages - 5  # 3, and a partial one for each of two copies
    bench.arrive()
    first, second, third = (s.kv for s in bench.scheduler.running)
    assert first.pages[:2] == second.pages[:2] == third.pages[:2]
    assert len({first.pages[2], second.pages[2], third.pages[2]}) == 3
    assert bench.arena.pages == [(first.pages[2], second.pages[2]), (first.pages[2], third.pages[2])]
    assert bench.arena.slots == [(first.slot, second.slot), (first.slot, third.slot)]
    bench.check_books()
    bench.run()
    assert [bench.text(0, n) for n in range(3)] == [[7] * 4] * 3 and bench.nothing_held()


def test_samples_that_want_no_token_are_forked_and_over() -> None:
    bench = Bench()
    bench.offer(0, 10, max_tokens=0, samples=(0, 1, 2))
    bench.step()
    bench.arrive()
    rows = [row for message in bench.messages(Tokens) for row in message.rows]
    assert [row[2:6] for row in rows] == [[n, 0, [], "length"] for n in range(3)] and bench.nothing_held()


def test_fork_at_a_page_boundary_copies_no_page() -> None:
    bench = Bench()
    bench.offer(0, 8, samples=(0, 1))
    bench.step()
    bench.arrive()
    bench.step()
    assert bench.arena.pages == [] and len(bench.arena.slots) == 1
    first, second = (s.kv.pages for s in bench.scheduler.running)
    assert first[:2] == second[:2] and first[2] != second[2]


def test_retraction_takes_the_newest_and_never_the_oldest() -> None:
    bench = Bench(num_pages=9)
    bench.offer(0, 7, max_tokens=20)
    bench.offer(1, 7, max_tokens=20)
    bench.step()
    bench.arrive()
    while not bench.messages(Failed):
        bench.step()
    failed = bench.messages(Failed)[0]
    assert (failed.rid, failed.sample, failed.cause, failed.retryable) == (1, 0, "retracted", True)
    assert bench.text(1) and bench.sent.index(("router", failed)) > 0
    bench.check_books()
    bench.run()
    assert len(bench.text(0)) == 20 and len(bench.messages(Failed)) == 1 and bench.nothing_held()


def test_pages_of_an_abort_are_nobodys_until_nothing_can_land_in_them() -> None:
    bench = Bench(num_pages=5, num_slots=4)
    bench.receiver.drains = True
    bench.offer(1, 3 * PAGE_TOKENS, samples=(0, 1))
    bench.step()
    bench.scheduler.abort(Abort(1, 0))
    bench.offer(2, 3 * PAGE_TOKENS)
    bench.step()
    assert bench.granted() == [1]
    assert (bench.pool.free_pages, bench.pool.free_slots) == (1, 2), "the second sample's slot is free at once"
    bench.scheduler.settle([Freed((1, 0))], 0.0)
    assert (bench.pool.free_pages, bench.pool.free_slots) == (4, 3)
    bench.step()
    assert bench.granted() == [1, 2]
    bench.scheduler.settle([Freed((1, 0))], 0.0)  # once more changes nothing
    bench.receiver.drains = False
    bench.run(20)
    assert bench.nothing_held()


def test_one_retraction_is_enough_while_its_pages_are_draining() -> None:
    """What is retracted while it arrives gives its pages back later: nobody else is retracted meanwhile."""
    bench = Bench(num_pages=8, num_slots=6)
    bench.offer(1, PAGE_TOKENS, max_tokens=3 * PAGE_TOKENS)
    bench.offer(2, PAGE_TOKENS, max_tokens=3 * PAGE_TOKENS)
    bench.step()
    bench.arrive()
    bench.receiver.drains = True
    bench.offer(3, PAGE_TOKENS)
    bench.step()
    assert bench.granted() == [1, 2, 3]
    for _ in range(4 * PAGE_TOKENS):
        bench.step()
        if bench.scheduler.draining:
            break
    assert [(f.rid, f.cause) for f in bench.messages(Failed)] == [(3, "retracted")]
    for _ in range(5):
        bench.step()
    assert len(bench.messages(Failed)) == 1
    bench.scheduler.settle([Freed((3, 0))], 0.0)
    bench.run(60)
    assert bench.nothing_held()


def test_retraction_of_what_is_still_arriving_comes_first_when_that_is_newer() -> None:
    bench = Bench(num_pages=9)
    bench.offer(0, 7, max_tokens=20)
    bench.step()
    bench.arrive()
    bench.offer(1, 12, max_tokens=1)
    bench.step()
    assert bench.granted() == [0, 1]
    bench.run(0)
    while not bench.messages(Failed):
        bench.step()
    failed = bench.messages(Failed)[0]
    assert (failed.rid, failed.sample, failed.cause, failed.retryable) == (1, ALL_SAMPLES, "retracted", True)
    assert ("prefill", Abort(1, 0)) in bench.sent and not bench.receiver.open_keys
    bench.run()
    assert len(bench.text(0)) == 20 and bench.nothing_held()


def test_four_that_fill_the_pool_all_finish_when_the_router_resubmits() -> None:
    """No livelock: what was retracted waits until it fits, and the oldest goes on."""
    bench = Bench(num_pages=13, num_slots=5)
    attempts = dict.fromkeys(range(4), 0)
    for rid in attempts:
        bench.offer(rid, 11, max_tokens=36)
    seen = 0
    for _ in range(500):
        bench.step()
        bench.arrive()
        bench.check_books()
        failures, seen = [m for _, m in bench.sent[seen:] if isinstance(m, Failed)], len(bench.sent)
        for failed in failures:
            assert failed.cause == "retracted"
            attempts[failed.rid] += 1
            tokens = pack_ids([5] * 12 + bench.text(failed.rid))
            bench.offer(failed.rid, 0, 36, attempt=attempts[failed.rid], tokens=tokens, prompt_tokens=12)
    assert bench.nothing_held()
    assert all(bench.text(rid) == [7] * 36 for rid in attempts)
    assert 1 <= sum(attempts.values()) <= 12


def test_more_than_max_batch_take_turns() -> None:
    bench = Bench(max_batch=3)
    for rid in range(7):
        bench.offer(rid, 5, max_tokens=9)
    bench.step()
    bench.arrive()
    ran = [bench.step() for _ in range(7)]
    counts = {rid: sum(rid in step for step in ran) for rid in range(7)}
    assert set(counts.values()) == {3}
    bench.run()
    assert all(len(bench.text(rid)) == 9 for rid in range(7)) and bench.nothing_held()


def test_abort_in_every_state() -> None:
    bench = Bench(num_pages=11)
    bench.offer(0, 12, samples=(0, 1))
    bench.step()
    bench.arrive()
    bench.step()
    bench.offer(1, 8)
    bench.offer(2, 30)
    bench.step()
    assert (len(bench.scheduler.running), list(bench.scheduler.arriving), list(bench.scheduler.queued)) == (
        2,
        [(1, 0)],
        [(2, 0)],
    )
    bench.scheduler.abort(Abort(0, 0, 1))
    bench.step()
    assert len(bench.scheduler.running) == 1
    for rid in (2, 1, 0, 0, 77):
        bench.scheduler.abort(Abort(rid, 0))
        bench.check_books()
    assert bench.nothing_held() and not bench.messages(Failed)
    for rid in (0, 1, 2, 77):
        bench.offer(rid, 4)
    assert bench.scheduler.idle


def test_prefill_is_told_when_what_it_makes_is_not_wanted_any_more() -> None:
    """Otherwise it would keep its pages, waiting for a grant, until the deadline."""
    bench = Bench(num_pages=11)
    bench.scheduler.abort(Abort(0, 0))
    bench.offer(0, 4)  # its abort came first
    assert bench.sent == [("prefill", Abort(0, 0))]
    bench.offer(1, 20)
    bench.step()
    bench.offer(2, 20, samples=(0, 1))
    assert list(bench.scheduler.arriving) == [(1, 0)] and list(bench.scheduler.queued) == [(2, 0)]
    bench.scheduler.abort(Abort(1, 0))
    bench.scheduler.abort(Abort(2, 0, 1))
    assert bench.messages(Abort) == [Abort(0, 0), Abort(1, 0)]
    bench.scheduler.abort(Abort(2, 0, 0))
    assert bench.messages(Abort)[-1] == Abort(2, 0)
    for _ in range(2):
        bench.offer(2, 20)  # repeated by prefill, which has not heard
    assert bench.messages(Abort).count(Abort(2, 0)) == 3 and bench.nothing_held()


def test_a_grant_is_repeated_until_ready_is_here() -> None:
    bench = Bench()
    bench.offer(0, 9)
    bench.step()
    bench.offer(0, 9)  # repeated by prefill before it had our grant
    assert bench.metrics.count("duplicates") == 1
    for tenth in range(45):
        bench.scheduler.expire(tenth / 10)
    first, *repeated = bench.messages(Grant)
    assert repeated == [first, first]
    bench.scheduler.ready(Ready(0, 0, 9, 1, 1, 1))
    bench.scheduler.expire(60.0)
    assert len(bench.messages(Grant)) == 3


def test_rows_say_how_many_tokens_the_sample_had_and_who_sends_them() -> None:
    bench = Bench()
    bench.offer(0, 11, max_tokens=5, prompt_tokens=9)  # three tokens were generated by an earlier attempt
    bench.offer(1, 4, max_tokens=0, router_inbox="other")
    bench.step()
    bench.arrive()
    bench.run()
    assert [(m.worker, [row[:5] for row in m.rows]) for m in bench.messages(Tokens)] == [
        ("decode-1", [[1, 0, 0, 0, []]]),
        ("decode-1", [[0, 0, 0, 3, [7]]]),
        ("decode-1", [[0, 0, 0, 4, [7]]]),
    ]


def test_abort_of_a_sample_that_is_queued_or_arriving() -> None:
    bench = Bench()
    bench.offer(0, 6, samples=(0, 1, 2))
    bench.scheduler.abort(Abort(0, 0, 0))
    bench.step()
    bench.scheduler.abort(Abort(0, 0, 2))
    bench.check_books()
    bench.arrive()
    assert [s.sample for s in bench.scheduler.running] == [1]
    bench.offer(1, 6, samples=(4, 5))
    bench.step()
    for sample in (4, 5):
        bench.scheduler.abort(Abort(1, 0, sample))
    assert not bench.scheduler.arriving and not bench.receiver.open_keys
    bench.run()
    assert bench.nothing_held()


def test_a_broken_or_short_hand_off_is_retryable_and_its_pages_come_back() -> None:
    bench = Bench()
    bench.offer(0, 9)
    bench.offer(1, 9)
    bench.offer(2, 9)
    bench.step()
    bench.receiver.open_keys.clear()
    broken = [Broken((0, 0), "spans missing"), Broken((2, 0), "digest", corrupt=True), Broken((9, 9), "unknown")]
    bench.scheduler.settle([*broken[:1], Arrived((1, 0), 8), *broken[1:]], 0.0)
    failed = [(f.rid, f.cause, f.retryable) for f in bench.messages(Failed)]
    assert failed == [(0, "transfer", True), (1, "transfer", True), (2, "corrupt", True)]
    assert bench.messages(Abort) == [Abort(0, 0), Abort(1, 0), Abort(2, 0)] and bench.nothing_held()


def test_timeouts_in_every_state() -> None:
    bench = Bench(num_pages=11)
    bench.offer(0, 12, timeout_s=5.0)
    bench.step()
    bench.arrive()
    bench.offer(1, 16, timeout_s=5.0)
    bench.step()
    bench.offer(2, 30, timeout_s=5.0)
    bench.offer(3, 3, timeout_s=50.0)
    assert [len(x) for x in (bench.scheduler.running, bench.scheduler.arriving, bench.scheduler.queued)] == [1, 1, 2]
    bench.scheduler.expire(5.0)
    assert {(f.rid, f.cause, f.retryable) for f in bench.messages(Failed)} == {(n, "timeout", False) for n in range(3)}
    bench.check_books()
    bench.run()
    assert bench.nothing_held() and len(bench.text(3)) == 4


def test_failed_step_and_bad_row_end_only_themselves() -> None:
    bench = Bench(max_batch=2)
    for rid in range(4):
        bench.offer(rid, 5)
    bench.step()
    bench.arrive()
    bench.scheduler.fail_step(bench.scheduler.next_batch(), "boom")
    batch = bench.scheduler.next_batch()
    bench.scheduler.advance(batch, [Choice([], "logits are NaN"), Choice([7])], 0.0)
    assert [(f.rid, f.cause, f.retryable) for f in bench.messages(Failed)] == [
        (0, "internal", True),
        (1, "internal", True),
        (2, "internal", False),
    ]
    assert bench.metrics.count("decode_tokens") == 1  # a row that failed has no token
    assert {f.role for f in bench.messages(Failed)} == {"decode"}
    assert "NaN" in bench.messages(Failed)[2].reason and "position 6" in bench.messages(Failed)[2].reason
    bench.run()
    assert len(bench.text(3)) == 4 and bench.nothing_held()


def test_refusals_tell_prefill_too_and_hold_nothing() -> None:
    bench = Bench(num_pages=11, num_slots=4)
    bench.offer(0, 5, fingerprint="other")
    bench.offer(1, 5, max_tokens=100)
    bench.offer(2, 5, samples=(0, 1, 2, 3))
    bench.offer(3, 34, samples=(0, 1, 2))
    bench.offer(4, 990, max_tokens=20)
    reasons = [f.reason for f in bench.messages(Failed)]
    words = ("fingerprint", "memory", "lower n", "lower n", "1000 positions")
    assert all(word in reason for word, reason in zip(words, reasons, strict=True)), reasons
    assert {f.cause for f in bench.messages(Failed)} == {"refused"}
    assert bench.messages(Abort) == [Abort(n, 0) for n in range(5)] and bench.nothing_held()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200)), min_size=1, max_size=80),
    st.integers(8, 30),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(1, 5),
)
@settings(max_examples=250, deadline=None)
def test_any_order_of_events_ends_every_sample_once_and_frees_everything(
    events: list[tuple[int, int]], num_pages: int, max_batch: int, depth: int, step_tokens: int
) -> None:
    bench = Bench(num_pages, num_slots=7, max_batch=max_batch, depth=depth, step_tokens=step_tokens)
    offered: dict[Key, tuple[int, ...]] = {}
    aborted: set[int] = set()
    for kind, number in events:
        if kind <= 3:
            rid, samples = len(offered), tuple(range(1 + number % 3))
            offered[rid, 0] = samples
            bench.offer(rid, number % 23, max_tokens=1 + number % 9, samples=samples)
        elif kind == 4 and offered:
            rid = number % len(offered)
            aborted.add(rid)
            bench.scheduler.abort(Abort(rid, 0, number % 3 if number % 2 else ALL_SAMPLES))
        elif kind == 5 and bench.receiver.open_keys:
            key = list(bench.receiver.open_keys)[number % len(bench.receiver.open_keys)]
            bench.receiver.close(key)
            bench.scheduler.settle([Broken(key, "lost")], 0.0)
        elif kind == 6:
            bench.launch(failing=number % 2)
        elif kind == 7 and bench.receiver.open_keys:
            bench.arrive(next(iter(bench.receiver.open_keys))[0])
        oldest = min(bench.scheduler.running, key=lambda s: s.serial, default=None)
        before = len(bench.sent)
        bench.step({number % 10: EOS})
        assert_not_retracted(oldest, [m for _, m in bench.sent[before:]])
        bench.check_books()
    bench.run(300)
    assert bench.nothing_held()
    check_ends(bench, offered, aborted)


def assert_not_retracted(oldest: Sequence | None, messages: list[Any]) -> None:
    """Of what was running, the oldest keeps its pages: whatever goes is newer (or older and still arriving)."""
    if oldest is not None:
        retracted = {(m.rid, m.sample) for m in messages if isinstance(m, Failed) and m.cause == "retracted" and m.sample >= 0}
        if (oldest.key[0], oldest.sample) in retracted:
            assert oldest.serial[0] > 1  # something admitted earlier was still arriving


def check_ends(bench: Bench, offered: dict[Key, tuple[int, ...]], aborted: set[int]) -> None:
    ends: list[tuple[int, int]] = []
    for message in [m for _, m in bench.sent]:
        if isinstance(message, Failed):
            samples = offered[message.rid, 0] if message.sample == ALL_SAMPLES else (message.sample,)
            ends += [(message.rid, sample) for sample in samples]
        if isinstance(message, Tokens):
            ends += [(row[0], row[2]) for row in message.rows if row[5]]
    for (rid, _), samples in offered.items():
        if rid not in aborted:
            assert sorted(end for end in ends if end[0] == rid) == [(rid, sample) for sample in samples]


def test_a_row_that_the_clients_own_parameters_exclude_is_refused() -> None:
    bench = Bench()
    bench.offer(1, 9)
    bench.step()
    bench.arrive()
    bench.scheduler.advance(bench.scheduler.next_batch(), [Choice([], EXCLUDED)], 0.0)
    [failed] = bench.messages(Failed)
    assert (failed.cause, failed.retryable) == ("refused", False) and "no token is left" in failed.reason
    assert bench.nothing_held()


# --- steps in flight


def test_a_sequence_that_will_be_complete_is_not_fed_again() -> None:
    bench = Bench(depth=1)
    bench.offer(0, 9, max_tokens=3)
    bench.offer(1, 9, max_tokens=5)
    bench.step()
    bench.arrive()
    assert [bench.step() for _ in range(6)] == [[0, 1], [0, 1], [0, 1], [1], [1], []]
    assert bench.text(0) == [7] * 3 and bench.text(1) == [7] * 5
    assert bench.metrics.count("tokens_dropped") == 0 and bench.nothing_held()


def test_a_stop_is_noticed_one_step_late_and_its_extra_token_is_dropped() -> None:
    bench = Bench(depth=1)
    bench.offer(0, 9, max_tokens=30)
    bench.step()
    bench.arrive()
    bench.step()
    bench.step({0: EOS})
    bench.step()
    assert [row[4:6] for message in bench.messages(Tokens) for row in message.rows] == [[[7], ""], [[EOS], "stop"]]
    assert bench.scheduler.idle and len(bench.scheduler.leaving) == 1, "a step still writes into its pages"
    assert bench.pool.free_slots == bench.pool.total_slots - 1
    bench.check_books()
    assert bench.step() == [] and bench.metrics.count("tokens_dropped") == 1
    assert not bench.scheduler.leaving and bench.text(0) == [7, EOS] and bench.nothing_held()


def test_pages_of_what_is_aborted_timed_out_or_failed_in_flight_wait_for_the_step() -> None:
    for end in ("abort", "expire", "fail_step"):
        bench = Bench(depth=1)
        bench.offer(0, 9, max_tokens=30, samples=(0, 1))
        bench.step()
        bench.arrive()
        bench.step()
        bench.step()
        if end == "abort":
            bench.scheduler.abort(Abort(0, 0))
        elif end == "expire":
            bench.scheduler.expire(1000.0)
        else:
            bench.launch(failing=2)
        assert not bench.scheduler.running and len(bench.scheduler.leaving) == 2, end
        assert bench.pool.free_slots == bench.pool.total_slots - 2
        bench.check_books()
        sent = len(bench.sent)
        assert bench.nothing_held() and not [m for _, m in bench.sent[sent:] if isinstance(m, Tokens)], end


def test_a_page_for_what_is_in_flight_is_there_before_its_tokens_are() -> None:
    bench = Bench(depth=2, step_tokens=5)
    bench.offer(0, PAGE_TOKENS, max_tokens=60)
    bench.step()
    bench.arrive()
    bench.launch()
    bench.launch()
    bench.launch()
    [sequence] = bench.scheduler.running
    assert sequence.in_flight == [5, 5, 5] and len(sequence.kv.pages) == 5  # 4 + 3 * 5 tokens
    bench.land()
    assert sequence.in_flight == [5, 5] and 1 <= sequence.generated <= 5
    bench.run(40)
    assert len(bench.text(0)) == 60 and bench.nothing_held()


def test_nobody_is_retracted_for_a_guess() -> None:
    bench = Bench(num_pages=7, step_tokens=5)  # 6 pages
    for rid in range(2):
        bench.offer(rid, 6, max_tokens=12)
    bench.step()
    bench.arrive()
    scheduler = bench.scheduler
    assert len(scheduler.running) == 2 and bench.pool.free_pages == 2
    assert [scheduler.affordable(tokens) for tokens in (1, 3, 5)] == [1, 3, 5]
    anothers = bench.pool.take_pages(1)
    assert anothers is not None
    assert [scheduler.affordable(tokens) for tokens in (1, 2, 3, 5)] == [1, 2, 1, 1]  # 6 + 2 tokens are in two pages each
    scheduler.abort(Abort(1, 0))
    assert [scheduler.affordable(tokens) for tokens in (1, 3, 5)] == [1, 3, 5]


def test_nobody_is_retracted_for_a_guess_in_flight() -> None:
    """Seven tokens of KV each, and the first step's guesses take the last pages; when it lands, few of them came."""
    bench = Bench(num_pages=7)
    for rid in range(2):
        bench.offer(rid, 7, max_tokens=16)
    bench.step()
    bench.arrive()
    scheduler = bench.scheduler
    batch = scheduler.next_batch(scheduler.affordable(5))
    assert [s.in_flight for s in batch] == [[5], [5]] and bench.pool.free_pages == 0
    assert scheduler.affordable(5) == 1 and scheduler.next_batch(1) == [], "they sit out"
    scheduler.advance(batch, [Choice([7]) for _ in batch], 0.0)
    assert len(scheduler.next_batch(scheduler.affordable(5))) == 2 and not bench.messages(Failed)


def test_guesses_behind_the_last_token_need_no_page() -> None:
    bench = Bench(num_pages=4, step_tokens=5)  # 3 pages: 12 tokens of KV
    bench.offer(0, 9, max_tokens=3)
    bench.run(10)
    assert bench.text(0) == [7] * 3 and not bench.messages(Failed) and bench.nothing_held()


def test_one_retraction_is_enough_while_a_step_holds_its_pages() -> None:
    bench = Bench(num_pages=10, depth=1)
    for rid in range(3):
        bench.offer(rid, 5, max_tokens=20)
    bench.step()
    bench.arrive()
    bench.launch()
    bench.launch()
    while not bench.messages(Failed):
        bench.land()
        bench.launch()
    assert [(f.rid, f.cause) for f in bench.messages(Failed)] == [(2, "retracted")], "the others sit out"
    assert [s.key[0] for s in bench.scheduler.leaving] == [2]
    bench.check_books()
    bench.run()
    assert len(bench.text(0)) == 20 and bench.nothing_held()


def test_tokens_of_one_step_go_in_one_row_and_end_where_the_text_ends() -> None:
    bench = Bench()
    bench.offer(0, 9, max_tokens=30)
    bench.offer(1, 9, max_tokens=2)
    bench.step()
    bench.arrive()
    batch = bench.scheduler.next_batch(4)
    tops = [[[n, -1.0]] for n in range(4)]
    choices = [
        Choice([7, EOS, 8, 9], "logits are NaN", [-1.0, -2.0, -3.0, -4.0], tops),
        Choice([3, 4, 5], "", [-1.0, -2.0, -3.0]),
    ]
    bench.scheduler.advance(batch, choices, 0.0)
    assert [row for message in bench.messages(Tokens) for row in message.rows] == [
        [0, 0, 0, 0, [7, EOS], "stop", [-1.0, -2.0], tops[:2]],
        [1, 0, 0, 0, [3, 4], "length", [-1.0, -2.0], None],
    ]
    assert not bench.messages(Failed), "what is behind the end does not matter"
    assert bench.metrics.count("tokens_dropped") == 3 and bench.metrics.count("decode_tokens") == 4 and bench.nothing_held()


def test_tokens_before_a_bad_row_are_sent_before_its_failure() -> None:
    bench = Bench()
    bench.offer(0, 9, max_tokens=30)
    bench.step()
    bench.arrive()
    bench.scheduler.advance(bench.scheduler.next_batch(3), [Choice([7, 8], "logits are NaN")], 0.0)
    [tokens], [failed] = bench.messages(Tokens), bench.messages(Failed)
    assert bench.sent.index(("router", tokens)) < bench.sent.index(("router", failed))
    assert tokens.rows[0][4] == [7, 8] and "position 12" in failed.reason and bench.nothing_held()
