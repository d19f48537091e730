"""Decode with steps in flight on a device that is late: texts are those of one step after the other."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import decode.worker
import wire.worker
from decode.config import DecodeConfig
from decode.engine import Engine
from decode.request import Limits
from decode.room import make_engine
from decode.scheduler import Scheduler
from decode.speculation import Speculation
from decode.step import Shape
from kvtransfer.pages import PagePool
from kvtransfer.receiver import Arrived
from tests.fake_runner import EOS, RING, FakeRunner, expected_text
from tests.late_engine import LateEngine
from tests.test_decode_scheduler import FakeReceiver
from tests.test_workers import GREEDY, PATIENCE_S, Cluster, check_a_row_of_nan, check_texts_of_too_many, prompt
from wire.messages import ALL_SAMPLES, Abort, Failed, Offer, SamplingParams, Tokens, pack_ids
from wire.metrics import Metrics

SHAPES = [(1, 1, 0), (1, 1, 3), (1, 3, 0), (2, 5, 2), (0, 4, 0)]  # depth, tokens of a step, rows of nobody


@pytest.fixture(params=SHAPES, ids=lambda shape: "depth{}-tokens{}-spare{}".format(*shape))
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Workers that are started now have late engines of one of the shapes; gives its depth."""
    steps_in_flight, tokens, spare = request.param
    monkeypatch.setattr(decode.worker, "make_engine", partial(LateEngine.make, spare_rows=spare))
    monkeypatch.setattr(Speculation, "shape", lambda self, rows: Shape(tokens))
    return int(steps_in_flight)


def test_mixed_requests_get_the_texts_of_one_step_after_the_other(depth: int) -> None:
    """Every parameter, forks, turns (more sequences than a step takes), stops and limits; a worker without steps in flight
    and guesses beside one with them."""
    first = expected_text(prompt(9), 8, stop=())
    variants = [
        GREEDY,
        replace(GREEDY, max_tokens=1),
        replace(GREEDY, max_tokens=0),
        replace(GREEDY, stop_token_ids=(first[5],)),
        replace(GREEDY, max_tokens=40, min_tokens=7, ignore_eos=False, stop_token_ids=(first[3], first[7])),
        replace(GREEDY, temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=-5),
        replace(GREEDY, temperature=1.3, presence_penalty=0.5, frequency_penalty=0.3, max_tokens=25),
        replace(GREEDY, repetition_penalty=1.3, max_tokens=30, logprobs=3),
        replace(GREEDY, temperature=0.8, logprobs=0, logit_bias=((5, 4.0), (9, -100.0)), max_tokens=17),
        replace(GREEDY, logit_bias=((EOS, 3.0),), ignore_eos=False, max_tokens=30),
    ]
    with Cluster() as cluster:
        router, prefill = cluster.router, cluster.prefill(FakeRunner(num_pages=800, num_slots=16))
        late = cluster.decode(FakeRunner(num_pages=800, num_slots=40), depth, max_batch=4)
        with pytest.MonkeyPatch.context() as plain:
            plain.setattr(decode.worker, "make_engine", make_engine)
            simple = cluster.decode(FakeRunner(num_pages=800, num_slots=40), max_batch=4)
        rids: list[tuple[int, int]] = []
        for params in variants:
            for length, samples in ((9, (0,)), (14, (0, 1, 2))):
                both = [
                    router.ask(prefill.address, each.address, prompt(length), params, samples=samples)
                    for each in (late, simple)
                ]
                rids.append((both[0], both[1]))
        router.until(lambda: len(router.finished) == 8 * len(variants), "all texts", 2 * PATIENCE_S)
        assert not router.failed
        for ours, theirs in rids:
            for sample in range(3):
                a, b = (ours, 0, sample), (theirs, 0, sample)
                assert router.ids.get(a) == router.ids.get(b) and router.finished.get(a) == router.finished.get(b)
                assert scores(router.rows.get(a, [])) == scores(router.rows.get(b, []))
        if depth:
            alone = router.ask(prefill.address, late.address, prompt(9), variants[3])
            router.until(lambda: (alone, 0, 0) in router.finished, "a text alone")
            router.until(lambda: router.counter(late.address, "tokens_dropped") > 0, "what was in flight when it ended")


def scores(rows: list[Any]) -> list[Any]:
    """Log probabilities and alternatives, a token after the other."""
    return [list(pair) for row in rows if row[6] is not None for pair in zip(row[6], row[7], strict=True)]


def test_texts_with_aborts_turns_and_forks(depth: int) -> None:
    with Cluster() as cluster:
        router, prefill = cluster.router, cluster.prefill(FakeRunner(num_pages=200, num_slots=8))
        worker = cluster.decode(FakeRunner(num_pages=300, num_slots=12), depth, max_batch=5)
        asked: dict[int, int] = {}
        dropped: set[int] = set()
        for n in range(40):
            rid = router.ask(
                prefill.address, worker.address, prompt(1 + (n * 37) % 60, n), GREEDY, samples=tuple(range(1 + n % 3))
            )
            asked[rid] = n
            if n % 4 == 3:
                router.receive(0.002 * (n % 7))
                for address in (prefill.address, worker.address):
                    router.outbox.send(address, Abort(rid, 0))
                dropped.add(rid)
        wanted = {(rid, 0, i) for rid, n in asked.items() if rid not in dropped for i in range(1 + n % 3)}
        router.until(lambda: wanted <= router.finished.keys(), "all survivors", 2 * PATIENCE_S)
        assert not router.failed
        for rid, _, sample in wanted:
            n = asked[rid]
            assert router.ids[rid, 0, sample] == expected_text(prompt(1 + (n * 37) % 60, n), 12, stop=())


def test_retraction_with_steps_in_flight(depth: int) -> None:
    with Cluster() as cluster:
        router, prefill = cluster.router, cluster.prefill()
        worker = cluster.decode(FakeRunner(num_pages=15, num_slots=16), depth)
        check_texts_of_too_many(router, prefill.address, worker.address)


def test_a_step_that_raises_and_a_row_of_nan_end_only_what_is_theirs(depth: int) -> None:
    with Cluster() as cluster:
        router, runner = cluster.router, FakeRunner()
        prefill, worker = cluster.prefill(), cluster.decode(runner, depth)
        long = router.ask(prefill.address, worker.address, prompt(9), replace(GREEDY, max_tokens=1500))
        router.until(lambda: len(router.ids.get((long, 0, 0), [])) > 3, "some tokens")
        runner.fail_launches = 1
        router.until(lambda: len(router.failed) == 1, "the failure")
        assert (router.failed[0].rid, router.failed[0].cause, router.failed[0].retryable) == (long, "internal", True)
        runner.nan_slots = {2}
        check_a_row_of_nan(router, prefill.address, worker.address, cluster.decode(FakeRunner(), depth).address)


def test_parameters_at_their_limits_harm_nobody() -> None:
    """Numbers that fit into a message and not into a table: a client without max_tokens may send any min_tokens."""
    limits = [
        replace(GREEDY, min_tokens=2**63 - 1, ignore_eos=False, max_tokens=30),
        replace(GREEDY, min_tokens=2**64 - 1, ignore_eos=False, max_tokens=30),
        replace(GREEDY, seed=2**64 - 1),
        replace(GREEDY, top_k=2**31, seed=-(2**63)),
        replace(GREEDY, presence_penalty=1e6, frequency_penalty=-1e6, repetition_penalty=1e-6),
    ]
    with Cluster() as cluster:
        router, prefill, worker = cluster.router, cluster.prefill(), cluster.decode(FakeRunner(), depth=1)
        beside = router.ask(prefill.address, worker.address, prompt(9), replace(GREEDY, max_tokens=200))
        rids = [router.ask(prefill.address, worker.address, prompt(9), params) for params in limits]
        router.until(lambda: len(router.finished) + len(router.failed) == 1 + len(limits), "all texts")
        assert not router.failed
        assert router.ids[beside, 0, 0] == expected_text(prompt(9), 200, stop=())
        assert len(router.ids[rids[0], 0, 0]) == len(router.ids[rids[1], 0, 0]) == 30


def test_a_device_that_is_lost_ends_the_worker_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "lost", lambda engine: "CUDA error: an illegal memory access was encountered")
    with Cluster() as cluster:
        router, runner = cluster.router, FakeRunner()
        prefill, worker = cluster.prefill(), cluster.decode(runner, depth=1)
        runner.fail = 1
        router.ask(prefill.address, worker.address, prompt(9), GREEDY)
        worker.join(PATIENCE_S)
        assert worker.exit_code == wire.worker.LOST_EXIT
        [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("decode can not go on")]
        assert "illegal memory access" in line
        assert not router.failed, "its silence says it"
        router.outbox.send(prefill.address, Abort(101, 0))


class Bench:
    """Scheduler, late engine and fake runner without sockets. KV lands the moment that it arrives, whatever is in flight."""

    def __init__(self, num_pages: int, max_batch: int, depth: int, tokens: int) -> None:
        self.runner = FakeRunner(num_pages=num_pages, num_slots=7)
        self.receiver, self.metrics, self.tokens = FakeReceiver(), Metrics(), tokens
        self.pool = PagePool(num_pages, 7)
        options: dict[str, Any] = {"num_pages": num_pages, "num_slots": 7, "page_tokens": self.runner.layout.page_tokens}
        config = DecodeConfig(model="", router="tcp://127.0.0.1:1", max_batch=max_batch, **options)
        self.engine = LateEngine.make(config, self.runner, depth, spare_rows=0)
        self.texts: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], str] = {}
        self.prompts: dict[int, list[int]] = {}
        model, page_tokens = self.runner.config, self.runner.layout.page_tokens
        limits = Limits(model.vocab_size, 4096, EOS, page_tokens, self.pool.total_pages, 6, max_batch, model.vocab_size)
        receiver: Any = self.receiver
        self.scheduler = Scheduler(self.pool, receiver, self.runner.arena, limits, "", "", self._send, self.metrics)

    def _send(self, address: str, message: Any) -> bool:
        if isinstance(message, Failed):
            for sample in range(3) if message.sample == ALL_SAMPLES else (message.sample,):
                self.ends.setdefault((message.rid, sample), message.cause)
        for row in message.rows if isinstance(message, Tokens) else []:
            key = row[0], row[2]
            assert key not in self.ends and row[3] == len(self.texts.setdefault(key, []))
            self.texts[key] += row[4]
            if row[5]:
                self.ends[key] = row[5]
        return True

    def offer(self, length: int, samples: int, sampling: SamplingParams) -> None:
        rid = len(self.prompts)
        tokens = self.prompts[rid] = prompt(length + 1, rid)
        self.scheduler.offer(
            Offer(rid, 0, pack_ids(tokens), len(tokens), tuple(range(samples)), sampling, "p", "r", "", math.inf), 0.0
        )

    def arrive(self) -> None:
        """The KV of the first that waits for it: position by position, as bytes from outside."""
        for key in list(self.receiver.open_keys)[:1]:
            request = self.scheduler.arriving[key]
            kv, tokens = request.kvs[0], self.prompts[key[0]][:-1]
            for position, token in enumerate(tokens):
                page, place = divmod(position, self.runner.layout.page_tokens)
                self.runner._tokens[kv.pages[page], place] = token
                self.runner._ring[kv.slot, position % RING] = token
            self.receiver.close(key)
            self.scheduler.settle([Arrived(key, len(tokens))], 0.0)

    def turn(self) -> None:
        self.scheduler.admit(0.0)
        tokens = self.scheduler.affordable(self.tokens)
        batch = self.scheduler.next_batch(tokens)
        if batch:
            self.engine.launch(batch, Shape(tokens))
        if self.engine.in_flight > (self.engine.depth if batch else 0):
            self.scheduler.advance(*self.engine.collect(), 0.0)

    def check_books(self) -> None:
        """Every page and slot is free or held, by as many as its references say."""
        scheduler, pool = self.scheduler, self.pool
        kvs = [s.kv for s in [*scheduler.running, *scheduler.leaving]] + [
            kv for r in scheduler.arriving.values() for kv in r.kvs
        ]
        held = [page for kv in kvs for page in kv.pages]
        assert all(pool.references(page) == held.count(page) for page in set(held))
        assert pool.free_pages + len(set(held)) == pool.total_pages
        slots = [kv.slot for kv in kvs]
        assert len(set(slots)) == len(slots) and pool.free_slots + len(slots) == pool.total_slots


def test_a_step_that_raises_leaves_the_one_before_in_flight() -> None:
    """What a worker reads of that when it lands: the tokens that it was begun with."""
    bench = Bench(num_pages=20, max_batch=4, depth=1, tokens=5)
    bench.offer(9, 1, replace(GREEDY, max_tokens=30))
    bench.scheduler.admit(0.0)
    bench.arrive()
    [sequence] = bench.scheduler.next_batch(5)
    bench.scheduler.fail_step(bench.scheduler.next_batch(1), "it raised")
    assert sequence.over and sequence.in_flight == [5] and bench.scheduler.leaving == [sequence]


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 200)), min_size=1, max_size=60),
    st.integers(9, 24),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
@torch.inference_mode()
def test_no_page_changes_hands_while_a_step_may_write_it(
    events: list[tuple[int, int]], num_pages: int, max_batch: int, depth: int, tokens: int
) -> None:
    """Whatever is aborted, timed out or retracted: every text that ends is right (`LateEngine.wrote` looks at each write)."""
    bench = Bench(num_pages, max_batch, depth, tokens)
    for kind, number in events:
        if kind <= 1:
            stops = (number % 200,) if number % 3 else ()
            bench.offer(number % 19, 1 + number % 3, replace(GREEDY, max_tokens=1 + number % 13, stop_token_ids=stops))
        elif kind == 2 and bench.prompts:
            bench.scheduler.abort(Abort(number % len(bench.prompts), 0, number % 3 if number % 2 else ALL_SAMPLES))
        elif kind == 3:
            bench.arrive()
        elif kind == 4 and bench.scheduler.running:
            running = bench.scheduler.running
            running[number % len(running)].deadline_s = -1.0
            bench.scheduler._next_expiry_s = 0.0
            bench.scheduler.expire(0.0)
        bench.turn()
        bench.check_books()
    for _ in count():
        if bench.scheduler.idle and not bench.engine.in_flight:
            break
        bench.arrive()
        bench.turn()
        bench.check_books()
    assert not bench.scheduler.leaving
    assert (bench.pool.free_pages, bench.pool.free_slots) == (bench.pool.total_pages, bench.pool.total_slots)
    for (rid, sample), text in bench.texts.items():
        assert text == expected_text(bench.prompts[rid], len(text), stop=()), (rid, sample)
