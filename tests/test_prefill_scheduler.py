"""The prefill scheduler alone: who is admitted, how a step is shared out, and that nothing is lost however it ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.pages import PagePool
from kvtransfer.sender import SendLost, Sent
from kvtransfer.transports import Freed
from prefill.prompt import Chunk, Prompt
from prefill.scheduler import Limits, Scheduler
from prefill.shares import share_out
from wire.messages import ALL_SAMPLES, Abort, Failed, Grant, Offer, Prefill, Ready, SamplingParams, pack_ids
from wire.metrics import Metrics

PAGE_TOKENS = 4
Key = tuple[int, int]


class FakeSender:
    """Knows which hand-offs are open and what was pushed of them."""

    def __init__(self) -> None:
        self.open_keys: set[Key] = set()
        self.drains = False  # what is closed comes back only with a Freed, as it does when its memory may still be read
        self.pushed: dict[Key, tuple[int, bool]] = {}

    def open(self, key: Key) -> None:
        assert key not in self.open_keys and key not in self.pushed
        self.open_keys.add(key)

    def push(self, key: Key, pages: list[int], slot: int, length: int, final: bool) -> None:
        before, was_final = self.pushed.get(key, (0, False))
        assert key in self.open_keys and not was_final and slot > 0
        assert length > before or (length == 0 and final)
        assert len(pages) * PAGE_TOKENS >= length
        self.pushed[key] = (length, final)

    def close(self, key: Key) -> bool:
        was_open = key in self.open_keys
        self.open_keys.discard(key)
        return not (self.drains and was_open)

    def granted(self, grant: Grant) -> bool:
        return (grant.rid, grant.attempt) in self.open_keys


class Bench:
    """A scheduler with fakes around it; `sent` holds its messages by address. Every Offer is granted at once, but for
    those to an address in `saturated`; nothing can be sent to one in `unreachable`."""

    def __init__(self, num_pages: int = 101, num_slots: int = 11, step_tokens: int = 64, chunk_tokens: int = 64) -> None:
        self.sender = FakeSender()
        self.pool = PagePool(num_pages, num_slots)
        self.sent: list[tuple[str, Any]] = []
        self.metrics = Metrics()
        self.unreachable: set[str] = set()
        self.saturated: set[str] = set()
        limits = Limits(100, 1000, PAGE_TOKENS, step_tokens, chunk_tokens)
        sender: Any = self.sender
        self.scheduler = Scheduler(self.pool, sender, limits, "print", "inbox", self._send, self.metrics)

    def _send(self, address: str, message: Any) -> bool:
        self.sent.append((address, message))
        if isinstance(message, Offer) and address not in self.unreachable | self.saturated:
            self.grant(message.rid, message.attempt)
        return address not in self.unreachable

    def grant(self, rid: int, attempt: int = 0) -> None:
        self.scheduler.grant(Grant(rid, attempt, 1, b"", "there"))

    def submit(self, rid: int, length: int, now_s: float = 0.0, **changes: Any) -> None:
        """A prompt with `length` tokens of KV."""
        fields: dict[str, Any] = {
            "rid": rid,
            "attempt": 0,
            "tokens": pack_ids([5] * (length + 1)),
            "prompt_tokens": length + 1,
            "samples": (0,),
            "sampling": SamplingParams(max_tokens=4, seed=0),
            "decode_inbox": "decode",
            "router_inbox": "router",
            "timeout_s": 100.0,
        }
        self.scheduler.submit(Prefill(**{**fields, **changes}), now_s)

    def step(self, now_s: float = 0.0) -> dict[int, int]:
        """One turn; gives what each prompt got, by rid."""
        self.scheduler.admit(now_s)
        chunks = self.scheduler.next_chunks()
        assert sum(chunk.count for chunk in chunks) <= self.scheduler.limits.step_tokens
        assert all(0 < chunk.count <= self.scheduler.limits.chunk_tokens for chunk in chunks)
        self.scheduler.computed(chunks, now_s)
        return {chunk.prompt.key[0]: chunk.count for chunk in chunks}

    def finish_sending(self) -> None:
        done = [key for key, (_, final) in self.sender.pushed.items() if final and key in self.sender.open_keys]
        for key in done:
            self.sender.close(key)
        self.scheduler.settle([Sent(key, Ready(*key, 0, 1, 1, 1)) for key in done], 0.0)

    def messages(self, kind: type) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def nothing_held(self) -> bool:
        pool = self.pool
        free = (pool.free_pages, pool.free_slots) == (pool.total_pages, pool.total_slots)
        return free and self.scheduler.idle and not self.sender.open_keys


def test_pages_of_an_abort_are_nobodys_until_nothing_reads_them() -> None:
    bench = Bench(num_pages=4, num_slots=3)
    bench.sender.drains = True
    bench.submit(1, 3 * PAGE_TOKENS)
    bench.step()
    bench.scheduler.abort(Abort(1, 0))
    bench.submit(2, 3 * PAGE_TOKENS)
    assert bench.step() == {}
    assert (bench.pool.free_pages, bench.pool.free_slots) == (0, 1)
    bench.scheduler.settle([Freed((1, 0))], 0.0)
    assert bench.step() == {2: 3 * PAGE_TOKENS}
    bench.scheduler.settle([Freed((1, 0))], 0.0)  # once more changes nothing
    bench.finish_sending()
    assert bench.nothing_held()


def test_the_oldest_gets_half_and_the_rest_goes_on_in_order() -> None:
    bench = Bench()
    for rid, length in enumerate((90, 80, 9, 3)):
        bench.submit(rid, length)
    assert bench.step() == {0: 32 + 4, 1: 16, 2: 9, 3: 3}  # 4 tokens that nobody wanted go back to the oldest
    assert bench.step() == {0: 48, 1: 16}
    assert bench.step() == {0: 6, 1: 48}


def test_a_prompt_alone_gets_the_whole_step_up_to_its_chunk() -> None:
    bench = Bench(step_tokens=64, chunk_tokens=40)
    bench.submit(0, 90)
    assert [bench.step() for _ in range(4)] == [{0: 40}, {0: 40}, {0: 10}, {}]


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    bench = Bench(num_slots=40)
    bench.submit(1000, 320)
    for turn in range(10):
        for n in range(4):
            bench.submit(4 * turn + n, 16)
        assert bench.step()[1000] >= 32
        bench.finish_sending()
    assert (1000, 0) not in bench.scheduler.computing


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(2, 600),
    st.integers(1, 600),
)
@settings(max_examples=80, deadline=None)
def test_every_prompt_is_in_one_of_as_many_steps_as_there_are_prompts(
    ahead: list[int], arrivals: list[int], step_tokens: int, chunk_tokens: int
) -> None:
    """However long the prompts ahead, and whatever comes after; and the oldest has half of every step."""
    chunk_tokens = min(chunk_tokens, step_tokens)
    prompts = [prompt_of(length) for length in ahead]
    waited, among_of = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0)
    for step in range(len(ahead) + 80):
        new = [prompt_of(4000) for _ in range(arrivals[step] if step < len(arrivals) else 0)]
        prompts, waited = prompts + new, {**waited, **dict.fromkeys(new, 0)}
        chunks = share_out(prompts, step_tokens, chunk_tokens)
        counts = {chunk.prompt: chunk.count for chunk in chunks}
        assert sum(counts.values()) <= step_tokens and len(counts) == len(chunks)
        assert all(0 < count <= min(chunk_tokens, prompt.remaining) for prompt, count in counts.items())
        if prompts:
            assert counts[prompts[0]] >= min(prompts[0].remaining, chunk_tokens, (step_tokens + 1) // 2)
        for prompt in prompts:
            among = len(prompts) if not waited[prompt] else among_of[prompt]  # when it came, or after it was last in a step
            among_of[prompt], waited[prompt] = among, 0 if prompt in counts else waited[prompt] + 1
            assert waited[prompt] < among, f"passed over {waited[prompt]} times among {among}"
            prompt.computed += counts.get(prompt, 0)
        prompts = [prompt for prompt in prompts if prompt.remaining]


def prompt_of(length: int) -> Prompt:
    message: Any = None
    return Prompt((0, 0), message, [5] * (length + 1), [0], 0.0, 100.0, None)


def test_a_short_prompt_behind_a_dozen_long_ones_is_soon_done() -> None:
    bench = Bench(num_pages=2001, num_slots=40, step_tokens=512, chunk_tokens=256)
    for rid in range(12):
        bench.submit(rid, 600)
    for _ in range(2):
        bench.step()
    bench.submit(99, 10)
    steps = 1
    while 99 not in bench.step():
        steps += 1
    assert steps <= 3


def test_admission_is_in_order_and_the_head_is_not_overtaken() -> None:
    bench = Bench(num_pages=11, num_slots=11)
    bench.submit(0, 24)
    bench.submit(1, 24)
    bench.submit(2, 4)
    bench.scheduler.admit(0.0)
    assert [key[0] for key in bench.scheduler.computing] == [0]
    assert [offer.rid for offer in bench.messages(Offer)] == [0]
    bench.step()
    bench.finish_sending()
    bench.scheduler.admit(0.0)
    assert [offer.rid for offer in bench.messages(Offer)] == [0, 1, 2]


def test_admission_waits_for_slots_too() -> None:
    bench = Bench(num_slots=3)
    for rid in range(3):
        bench.submit(rid, 4)
    bench.scheduler.admit(0.0)
    assert len(bench.scheduler.computing) == 2 and len(bench.scheduler.waiting) == 1


def test_one_token_is_handed_over_without_a_step() -> None:
    bench = Bench()
    bench.submit(0, 0)
    assert bench.step() == {}
    assert bench.sender.pushed == {(0, 0): (0, True)}
    bench.finish_sending()
    assert [type(m) for _, m in bench.sent] == [Offer, Ready] and bench.nothing_held()


def test_ready_goes_to_decode_and_frees_the_pages() -> None:
    bench = Bench()
    bench.submit(0, 9)
    bench.step()
    assert bench.pool.free_pages == bench.pool.total_pages - 3
    bench.finish_sending()
    assert bench.sent[-1][0] == "decode" and isinstance(bench.sent[-1][1], Ready)
    assert bench.nothing_held()


def test_a_decode_that_never_grants_leaves_room_for_the_others() -> None:
    bench = Bench(num_pages=41, num_slots=21)
    bench.saturated = {"full"}
    for rid in range(30):
        bench.submit(rid, 15, decode_inbox="full")
    bench.submit(100, 15, decode_inbox="idle")
    bench.step()
    assert 100 in [offer.rid for offer in bench.messages(Offer)]
    held = [prompt.key[0] for prompt in [*bench.scheduler.computing.values(), *bench.scheduler.sending.values()]]
    assert held.count(100) == 1 and len(held) == 1 + 5  # 5 of 4 pages each are half of the pool
    for rid in range(5):
        bench.grant(rid)
    bench.step()
    assert [offer.rid for offer in bench.messages(Offer)] == [*range(5), 100, *range(5, 9)]  # then the pool is used up


def test_short_prompts_for_a_decode_that_never_grants_leave_slots() -> None:
    bench = Bench(num_pages=101, num_slots=9)
    bench.saturated = {"full"}
    for rid in range(8):
        bench.submit(rid, 3, decode_inbox="full")
    bench.submit(100, 3, decode_inbox="idle")
    bench.step()
    assert [offer.rid for offer in bench.messages(Offer)] == [0, 1, 2, 3, 100]


def test_one_prompt_larger_than_half_the_pool_may_wait_for_its_grant() -> None:
    bench = Bench(num_pages=11)
    bench.saturated = {"full"}
    bench.submit(0, 36, decode_inbox="full")
    bench.step()
    assert [offer.rid for offer in bench.messages(Offer)] == [0]


def test_an_offer_is_repeated_until_there_is_a_grant() -> None:
    bench = Bench()
    bench.saturated = {"decode"}
    bench.submit(0, 9, samples=(0, 1))
    bench.step()
    bench.scheduler.abort(Abort(0, 0, 1))
    for tenth in range(1, 45):
        bench.scheduler.expire(tenth / 10)
    offers = bench.messages(Offer)
    assert [(offer.samples, offer.timeout_s) for offer in offers] == [((0, 1), 100.0), ((0,), 98.0), ((0,), 96.0)]
    bench.grant(0)
    bench.scheduler.expire(60.0)
    assert len(bench.messages(Offer)) == 3


def test_a_grant_for_what_is_over_is_answered_with_the_last_word() -> None:
    bench = Bench()
    for rid in range(3):
        bench.submit(rid, 9)
    bench.step()
    bench.scheduler.abort(Abort(1, 0))
    bench.scheduler.fail_step([Chunk(bench.scheduler.sending[2, 0], 1)], "boom")
    bench.finish_sending()
    ready = bench.messages(Ready)[0]
    for rid, word in ((0, ready), (1, Abort(1, 0)), (2, Abort(2, 0))):
        bench.grant(rid)
        assert bench.sent[-1] == ("decode", word)
    before = len(bench.sent)
    bench.grant(7)
    assert len(bench.sent) == before and bench.metrics.count("stale_grants") == 1


def test_a_ready_that_cannot_be_sent_fails_the_transfer() -> None:
    bench = Bench()
    bench.submit(0, 9)
    bench.step()
    bench.unreachable = {"decode"}
    bench.finish_sending()
    assert [(f.cause, f.retryable, f.role) for f in bench.messages(Failed)] == [("transfer", True, "prefill")]
    assert bench.metrics.count("transfers_ok") == 0 and bench.nothing_held()


def test_abort_between_chunks_frees_at_once_and_a_late_prefill_is_dropped() -> None:
    bench = Bench(chunk_tokens=8)
    bench.submit(0, 30)
    bench.step()
    bench.scheduler.abort(Abort(0, 0))
    assert bench.nothing_held()
    bench.submit(0, 30)
    assert bench.scheduler.idle
    bench.scheduler.abort(Abort(1, 0))
    bench.submit(1, 30)  # its abort came first
    assert bench.scheduler.idle and not bench.messages(Failed)


def test_abort_of_one_sample_leaves_the_others() -> None:
    bench = Bench()
    bench.submit(0, 9, samples=(0, 1, 2))
    bench.scheduler.abort(Abort(0, 0, 1))
    bench.scheduler.admit(0.0)
    assert bench.messages(Offer)[0].samples == (0, 2)
    bench.scheduler.abort(Abort(0, 0, 0))
    assert bench.sent[-1] == ("decode", Abort(0, 0, 0))  # the Offer had named it
    assert not bench.scheduler.idle
    bench.scheduler.abort(Abort(0, 0, 2))
    assert bench.nothing_held()


def test_timeout_frees_everything_and_tells_both() -> None:
    bench = Bench()
    bench.submit(0, 9, timeout_s=5.0)
    bench.submit(1, 9, timeout_s=50.0)
    bench.step()
    bench.scheduler.expire(4.9)
    assert not bench.messages(Failed)
    bench.scheduler.expire(5.1)
    failed = bench.messages(Failed)
    assert [(f.rid, f.cause, f.retryable) for f in failed] == [(0, "timeout", False)]
    assert ("decode", Abort(0, 0)) in bench.sent
    bench.finish_sending()
    assert bench.nothing_held()


def test_what_is_live_is_told_in_every_state() -> None:
    bench = Bench(step_tokens=8, chunk_tokens=8)
    assert bench.scheduler.live() == []
    bench.submit(3, 9)
    assert bench.scheduler.waiting and bench.scheduler.live() == [(3, 0)]
    bench.step()
    assert bench.scheduler.computing and bench.scheduler.live() == [(3, 0)]
    bench.step()
    assert bench.scheduler.sending and bench.scheduler.live() == [(3, 0)]
    bench.submit(4, 9, attempt=2)
    assert sorted(bench.scheduler.live()) == [(3, 0), (4, 2)]
    bench.finish_sending()
    assert bench.scheduler.live() == [(4, 2)]
    bench.scheduler.abort(Abort(4, 2))
    assert bench.scheduler.live() == []


def test_time_left_travels_with_the_offer() -> None:
    bench = Bench()
    bench.submit(0, 9, now_s=10.0, timeout_s=5.0)
    bench.scheduler.admit(12.0)
    assert bench.messages(Offer)[0].timeout_s == 3.0


@pytest.mark.parametrize(("corrupt", "cause"), [(False, "transfer"), (True, "corrupt")])
def test_a_lost_transfer_is_retryable(corrupt: bool, cause: str) -> None:
    bench = Bench()
    bench.submit(0, 9)
    bench.step()
    bench.scheduler.settle([SendLost((0, 0), "peer stalled", corrupt), SendLost((9, 9), "unknown")], 0.0)
    failed = bench.messages(Failed)[0]
    assert (failed.cause, failed.retryable, failed.sample) == (cause, True, ALL_SAMPLES)
    assert "the decode worker at decode: peer stalled" in failed.reason and bench.nothing_held()


def test_what_decode_has_closed_is_let_go_without_a_word_to_the_router() -> None:
    """Its word is decode's own; decode is told that nothing comes, once, and again when it asks."""
    bench = Bench()
    bench.submit(0, 9)
    bench.step()
    bench.scheduler.settle([SendLost((0, 0), "the window is closed", closed=True)], 0.0)
    assert bench.nothing_held() and bench.scheduler.live() == []
    assert not bench.messages(Failed) and bench.messages(Abort) == [Abort(0, 0)]
    bench.grant(0)
    assert bench.messages(Abort) == [Abort(0, 0)] * 2
    bench.scheduler.abort(Abort(0, 0))  # decode's word comes after all
    bench.submit(0, 9)
    assert bench.metrics.count("aborts") == bench.metrics.count("duplicates") == 1 and bench.nothing_held()


def test_a_decode_worker_without_an_address_is_a_failure_at_once() -> None:
    bench = Bench()
    bench.unreachable = {"nowhere"}
    bench.submit(0, 9, decode_inbox="nowhere")
    bench.submit(1, 9)
    assert bench.step() == {1: 9}
    assert [(f.rid, f.cause, f.retryable) for f in bench.messages(Failed)] == [(0, "transfer", True)]


def test_a_failed_step_ends_only_its_own_prompts() -> None:
    bench = Bench(step_tokens=16, chunk_tokens=16)
    for rid in range(4):
        bench.submit(rid, 30)
    bench.scheduler.admit(0.0)
    chunks = bench.scheduler.next_chunks()
    assert [chunk.prompt.key[0] for chunk in chunks] == [0, 1]
    bench.scheduler.fail_step(chunks, "boom")
    assert [(f.rid, f.cause, f.retryable) for f in bench.messages(Failed)] == [(0, "internal", True), (1, "internal", True)]
    while bench.step():
        pass
    bench.finish_sending()
    assert {ready.rid for ready in bench.messages(Ready)} == {2, 3} and bench.nothing_held()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), min_size=1, max_size=60), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_ends_every_prompt_once_and_frees_everything(events: list[tuple[int, int]], chunk: int) -> None:
    bench = Bench(num_pages=21, num_slots=6, step_tokens=40, chunk_tokens=chunk)
    submitted = 0
    for kind, number in events:
        if kind <= 2:
            bench.submit(submitted, number)
            submitted += 1
        elif kind == 3:
            bench.scheduler.abort(Abort(number % (submitted + 1), 0))
            submitted = max(submitted, number % (submitted + 1) + 1)
        elif kind == 4:
            bench.finish_sending()
        elif kind == 5:
            open_keys = sorted(bench.sender.open_keys)
            bench.scheduler.settle([SendLost(key, "gone", closed=number > 5) for key in open_keys[: number % 3]], 0.0)
        elif kind == 6:
            bench.scheduler.admit(0.0)
            bench.scheduler.fail_step(bench.scheduler.next_chunks()[: number % 2], "boom")
        bench.step()
        live = [*bench.scheduler.computing.values(), *bench.scheduler.sending.values()]
        held = sum(len(p.kv.pages) for p in live if p.kv is not None)
        assert bench.pool.free_pages + held == bench.pool.total_pages
        assert bench.pool.free_slots + len(live) == bench.pool.total_slots
        assert bench.sender.open_keys == {p.key for p in live}
    for _ in range(60 * 60):  # as many steps as there are tokens, when they are computed one by one
        if bench.scheduler.idle:
            break
        bench.step()
        bench.finish_sending()
    assert bench.nothing_held()
    assert {m.role for m in bench.messages(Failed)} <= {"prefill"}
    ends = [m.rid for m in bench.messages(Failed)] + [m.rid for m in bench.messages(Ready)]
    assert len(ends) == len(set(ends))
