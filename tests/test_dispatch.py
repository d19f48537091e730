"""The dispatcher alone, with a clock and an outbox of the test's: choice, retries, losses, and whatever the wire brings."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.errors import ApiError
from router.health import Health
from router.pool import Ledger, Worker
from router.request import Key, Request
from router.strays import LIMIT as strays_limit
from router.strays import Strays
from wire.messages import (
    ALL_SAMPLES,
    Abort,
    Failed,
    Prefill,
    PromptLogprobs,
    Refused,
    SamplingParams,
    Status,
    Tokens,
    pack_keys,
    unpack_ids,
)
from wire.metrics import Metrics

IDENTITY = {"page_tokens": 256, "dtype": "bf16"}
LOAD = {"max_context": 1000, "vocab_size": 320, "max_batch": 8, "free_pages": 10, "total_pages": 10, "tokens_per_s": 1000.0}


class FakeOutbox:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.full: set[str] = set()

    def send(self, address: str, message: Any) -> bool:
        if address in self.full:
            return False
        self.sent.append((address, message))
        return True

    def forget(self, address: str) -> None:
        self.sent.append((address, "forgotten"))

    def of(self, kind: type) -> list[tuple[str, Any]]:
        return [(address, message) for address, message in self.sent if isinstance(message, kind)]


@dataclass
class Heard:
    """A listener that writes down what it hears."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    error: ApiError | None = None
    prompt: PromptLogprobs | None = None
    stop_at: int = -1

    def tokens(self, sample: int, ids: list[int], finish: str, logprobs: Any, tops: Any) -> bool:
        self.ids.setdefault(sample, []).extend(ids)
        if finish:
            self.finished[sample] = finish
        return self.stop_at in ids

    def prompt_logprobs(self, message: PromptLogprobs) -> None:
        self.prompt = message

    def failed(self, error: ApiError) -> None:
        self.error = error


class Bench:
    def __init__(self, **config: Any) -> None:
        self.now = 100.0
        self.outbox = FakeOutbox()
        self.metrics = Metrics()
        self.turns: Counter[str] = Counter()  # of the workers' loops
        self.live: dict[str, bytes] = {}  # what they hold, as they said last
        self.dispatcher = Dispatcher(
            RouterConfig(**config),
            self.outbox,
            "tcp://router",
            self.metrics,
            lambda flush: flush(),
            lambda: self.now,
        )

    def join(self, role: str, name: str, state: str = "serving", inbox: str = "", **load: Any) -> None:
        identity, metrics = load.pop("identity", IDENTITY), load.pop("metrics", [{}, {}, {}])
        live, turn = self.live.get(name, b""), self.turns[name]
        status = Status(role, name, state, inbox or f"tcp://{name}", identity, LOAD | load, metrics, live, turn)
        self.dispatcher.handle(status)

    def report(self, holding: Mapping[str, Collection[Key]], stuck: str = "") -> None:
        """Every worker says what it holds; one that is stuck repeats what it said last."""
        for worker in self.dispatcher.pool.workers():
            if worker.name != stuck:
                self.turns[worker.name] += 1
                self.live[worker.name] = pack_keys(holding.get(worker.name, ()))
            self.join(worker.role, worker.name)

    def reports(self, count: int, stuck: str = "", p0: Collection[Key] = (), d0: Collection[Key] = ()) -> None:
        """Half seconds go by, each with a report at its end that the router has looked at."""
        for _ in range(count):
            self.wait(0.5)
            self.report({"p0": p0, "d0": d0}, stuck)
            self.dispatcher.sweep()

    def pair(self) -> None:
        self.join("prefill", "p0")
        self.join("decode", "d0")

    def submit(self, n: int = 1, prompt: list[int] | None = None, **sampling: Any) -> tuple[Request, Heard]:
        heard = Heard()
        params = SamplingParams(**{"max_tokens": 10, "seed": 1, **sampling})
        request = Request.new(prompt or [5, 6, 7], n, params, heard)
        self.dispatcher.submit(request)
        return request, heard

    def wait(self, seconds: float, silent: Collection[str] = ()) -> None:
        """Time goes by as it does in a router that runs: with sweeps, and heartbeats of all workers but the silent ones."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(self.now + 0.25, end)
            for worker in self.dispatcher.pool.workers():
                if worker.name not in silent:
                    worker.seen_s = self.now
            self.dispatcher.sweep()

    def rows(
        self,
        request: Request,
        attempt: int,
        ids: list[int],
        finish: str = "",
        sample: int = 0,
        first: int = -1,
        worker: str = "d0",
    ) -> None:
        """A row of Tokens that goes on where the sample is, unless `first` says otherwise."""
        first = len(request.samples[sample].ids) if first < 0 else first
        self.dispatcher.handle(Tokens(worker, [[request.rid, attempt, sample, first, ids, finish, None, None]]))

    def fail(
        self,
        request: Request,
        attempt: int,
        cause: str,
        sample: int = ALL_SAMPLES,
        retryable: bool = True,
        role: str = "decode",
    ) -> None:
        self.dispatcher.handle(Failed(request.rid, attempt, sample, cause, f"it was {cause}", retryable, role))

    def prefills(self) -> list[tuple[str, Prefill]]:
        return self.outbox.of(Prefill)

    def is_empty(self) -> bool:
        """Nothing in flight, nothing accounted to any worker."""
        dispatcher = self.dispatcher
        totals = [(w.prompt_tokens.total, w.sequences.total, w.cache_tokens.total) for w in dispatcher.pool.workers()]
        return dispatcher.in_flight == 0 and not dispatcher._tries and all(total == (0, 0, 0) for total in totals)


def test_a_request_goes_to_a_pair_and_its_tokens_come_back() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit(n=2)
    [(address, message)] = bench.prefills()
    assert address == "tcp://p0" and message.decode_inbox == "tcp://d0" and message.router_inbox == "tcp://router"
    assert unpack_ids(message.tokens) == [5, 6, 7] and message.prompt_tokens == 3 and message.samples == (0, 1)
    bench.rows(request, 0, [1, 2])
    bench.rows(request, 0, [3], "length")
    bench.rows(request, 0, [9], "stop", sample=1)
    assert heard.ids == {0: [1, 2, 3], 1: [9]} and heard.finished == {0: "length", 1: "stop"}
    assert request.closed and bench.is_empty() and not bench.outbox.of(Abort)


def test_no_pair_or_no_room_is_refused_at_once() -> None:
    bench = Bench(max_requests=3)
    with pytest.raises(ApiError, match="no live prefill and no live decode worker") as caught:
        bench.dispatcher.check_room(1)
    assert caught.value.status == 503 and caught.value.retry_after_s
    bench.join("decode", "d0")
    with pytest.raises(ApiError, match="no live prefill worker"):
        bench.dispatcher.check_room(1)
    bench.join("prefill", "p0")
    bench.submit(n=2)
    bench.dispatcher.check_room(1)
    with pytest.raises(ApiError) as caught:
        bench.dispatcher.check_room(2)
    assert caught.value.status == 429 and caught.value.retry_after_s


def test_prefill_goes_to_the_worker_that_is_done_soonest() -> None:
    bench = Bench()
    bench.join("decode", "d0")
    bench.join("prefill", "slow", tokens_per_s=100.0)
    bench.join("prefill", "fast", tokens_per_s=1000.0)
    for _ in range(11):
        bench.submit(prompt=[5] * 100)
    counts = [address for address, _ in bench.prefills()]
    assert counts.count("tcp://fast") == 10 and counts.count("tcp://slow") == 1


def test_a_prefill_worker_that_is_not_measured_yet_gets_its_share() -> None:
    bench = Bench()
    bench.join("decode", "d0")
    bench.join("prefill", "old", tokens_per_s=41_300.0)
    bench.join("prefill", "slower", tokens_per_s=20_650.0)
    bench.join("prefill", "new", tokens_per_s=0.0)
    for _ in range(50):
        bench.submit(prompt=[5] * 900)
    counts = [address for address, _ in bench.prefills()]
    assert [counts.count(f"tcp://{name}") for name in ("old", "slower", "new")] == [20, 10, 20]


def test_decode_is_chosen_by_sequences_and_free_pages() -> None:
    bench = Bench()
    bench.join("prefill", "p0")
    bench.join("decode", "d0")
    bench.join("decode", "d1")
    for _ in range(6):
        bench.submit()
    inboxes = [message.decode_inbox for _, message in bench.prefills()]
    assert inboxes.count("tcp://d0") == inboxes.count("tcp://d1") == 3
    bench.join("decode", "d0", free_pages=1)  # nearly full, whatever this router knows of it
    bench.submit()
    assert bench.prefills()[-1][1].decode_inbox == "tcp://d1"


def test_a_prompt_goes_where_it_fits() -> None:
    bench = Bench()
    bench.join("prefill", "p0")
    bench.join("decode", "small", max_context=20)
    bench.join("decode", "large", max_context=500)
    assert bench.dispatcher.pool.context_tokens == 500
    for _ in range(3):
        bench.submit(prompt=[5] * 100)
    assert {message.decode_inbox for _, message in bench.prefills()} == {"tcp://large"}


def test_cancel_tells_both_workers_and_leaves_nothing() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit(n=3)
    bench.rows(request, 0, [1])
    bench.dispatcher.cancel(request)
    bench.dispatcher.cancel(request)
    assert [(a, m.sample) for a, m in bench.outbox.of(Abort)] == [("tcp://p0", ALL_SAMPLES), ("tcp://d0", ALL_SAMPLES)]
    bench.rows(request, 0, [2])
    assert heard.ids == {0: [1]} and bench.is_empty() and bench.metrics.count("rows_stale") == 1


def test_a_stop_string_ends_only_its_sample_on_decode() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit(n=2)
    heard.stop_at = 42
    bench.rows(request, 0, [41, 42])
    assert bench.outbox.of(Abort) == [("tcp://d0", Abort(request.rid, 0, 0))]
    bench.rows(request, 0, [43])  # was on its way
    bench.rows(request, 0, [44], "length", sample=1)
    assert heard.ids == {0: [41, 42], 1: [44]} and bench.is_empty()


def test_a_retracted_sample_goes_on_from_its_tokens_under_a_new_attempt() -> None:
    bench = Bench(max_attempts=1)
    bench.pair()
    request, heard = bench.submit(n=2)
    bench.rows(request, 0, [1, 2])
    for attempt in range(5):  # never counts as a failure
        bench.fail(request, attempt, "retracted", sample=0)
        message = bench.prefills()[-1][1]
        assert (message.attempt, message.samples, message.prompt_tokens) == (attempt + 1, (0,), 3)
        assert unpack_ids(message.tokens) == [5, 6, 7, 1, 2]
    bench.rows(request, 0, [99])  # a late row of the old attempt
    bench.rows(request, 0, [8], "length", sample=1)  # the other sample never moved
    bench.rows(request, 5, [3], "stop")
    assert heard.ids == {0: [1, 2, 3], 1: [8]} and bench.is_empty()


@pytest.mark.parametrize("cause", ["transfer", "internal"])
def test_a_failure_is_retried_elsewhere_and_only_so_often(cause: str) -> None:
    bench = Bench(max_attempts=3)
    for name in "012":
        bench.join("prefill", f"p{name}")
        bench.join("decode", f"d{name}")
    request, heard = bench.submit()
    for attempt in range(3):
        bench.fail(request, attempt, cause)
    assert [message.attempt for _, message in bench.prefills()] == [0, 1, 2]
    assert len({address for address, _ in bench.prefills()}) == 3  # an internal failure was decode's: prefill goes round
    assert len({message.decode_inbox for _, message in bench.prefills()}) == 3
    assert heard.error is not None and heard.error.status == 500 and "after 3 attempts: " in heard.error.message
    assert bench.is_empty()


@pytest.mark.parametrize(
    ("causes", "attempts"),
    [
        (["corrupt", "corrupt"], 2),
        (["corrupt", "retracted", "corrupt"], 3),
        (["transfer", "corrupt", "transfer"], 3),
        (["corrupt"] * 2 + ["transfer"], 2),
    ],
)
def test_bytes_that_changed_on_their_way_are_sent_once_more(causes: list[str], attempts: int) -> None:
    bench = Bench(max_attempts=3)
    bench.pair()
    request, heard = bench.submit(n=2)
    for attempt, cause in enumerate(causes):
        assert heard.error is None or attempt >= attempts
        bench.fail(request, attempt, cause)
    assert [message.attempt for _, message in bench.prefills()] == list(range(attempts))
    assert heard.error is not None and heard.error.status == 500 and heard.ids == {}
    assert bench.metrics.count("failures_corrupt") == causes[:attempts].count("corrupt") and bench.is_empty()


def test_each_sample_has_a_second_try_of_its_own() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit(n=2)
    bench.rows(request, 0, [1])
    bench.rows(request, 0, [2], sample=1)
    bench.fail(request, 0, "retracted", sample=0)
    bench.fail(request, 1, "corrupt")  # of sample 0
    bench.fail(request, 0, "retracted", sample=1)
    bench.fail(request, 3, "corrupt")  # of sample 1
    assert heard.error is None
    bench.rows(request, 2, [3], "stop")
    bench.rows(request, 4, [4], "stop", sample=1)
    assert heard.ids == {0: [1, 3], 1: [2, 4]} and bench.is_empty()


# ---- tokens that are lost, or come for nobody ----


@pytest.mark.parametrize(("first", "had"), [(4, [1, 2]), (1, [1, 2]), (3, [])])
def test_a_lost_message_never_leaves_a_hole_in_the_text(first: int, had: list[int]) -> None:
    bench = Bench(max_attempts=2)
    bench.pair()
    request, heard = bench.submit(n=2)
    if had:
        bench.rows(request, 0, had)
    bench.rows(request, 0, [9], first=first)
    assert heard.ids.get(0, []) == had and bench.metrics.count("gaps") == 1
    assert bench.outbox.of(Abort) == [("tcp://d0", Abort(request.rid, 0, 0))]
    message = bench.prefills()[-1][1]
    assert (message.attempt, message.samples, unpack_ids(message.tokens)) == (1, (0,), [5, 6, 7, *had])
    bench.rows(request, 0, [9])  # what else the old attempt says
    bench.rows(request, 1, [3])
    bench.rows(request, 0, [4], "stop", sample=1)  # the other sample stays where it is
    assert heard.ids == {0: [*had, 3], 1: [4]} and not request.closed
    bench.rows(request, 1, [9], first=9)  # it counts as a failed try
    assert heard.error is not None and heard.error.code == "tokens_lost" and bench.is_empty()


def test_a_prompt_that_never_came_to_prefill_is_sent_again() -> None:
    bench = Bench(max_attempts=2)
    bench.pair()
    _, heard = bench.submit(n=2)
    bench.reports(3)  # the first is too early to mean anything; two of prefill, then one of decode
    assert bench.metrics.count("tries_lost") == 0
    bench.reports(1)
    assert bench.metrics.count("tries_lost") == 1
    assert [address for address, _ in bench.outbox.of(Abort)] == ["tcp://p0", "tcp://d0"]
    message = bench.prefills()[-1][1]
    assert (message.attempt, message.samples, unpack_ids(message.tokens)) == (1, (0, 1), [5, 6, 7])
    bench.reports(4)  # it counts as a failed try
    assert heard.error is not None and heard.error.code == "try_lost" and "a message was lost" in heard.error.message
    assert bench.is_empty() and not bench.dispatcher._losses._watched


def test_the_worker_that_lost_a_prompt_is_not_asked_again_when_there_is_another() -> None:
    bench = Bench()
    bench.join("prefill", "p0")
    bench.join("decode", "d0")
    bench.submit()
    bench.join("prefill", "p1")
    bench.reports(5)
    assert bench.prefills()[-1][0] == "tcp://p1"


def test_an_end_that_never_came_is_generated_again() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit(n=2)
    key = (request.rid, 0)
    bench.rows(request, 0, [1, 2])
    bench.rows(request, 0, [3], "stop", sample=1)
    bench.reports(20, d0=[key])
    assert bench.metrics.count("tries_lost") == 0
    bench.reports(2)
    assert bench.metrics.count("tries_lost") == 0, "a row may still be on its way"
    bench.reports(1)
    message = bench.prefills()[-1][1]
    assert (message.attempt, message.samples, unpack_ids(message.tokens)) == (1, (0,), [5, 6, 7, 1, 2])
    bench.rows(request, 0, [9], "stop", first=2)  # it was only very late
    bench.rows(request, 1, [9], "stop")
    assert heard.ids == {0: [1, 2, 9], 1: [3]} and bench.is_empty() and not bench.dispatcher._losses._watched


def test_a_try_that_some_worker_holds_is_not_lost() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit()
    key = (request.rid, 0)
    bench.reports(10, p0=[key, (1, 1)])
    bench.reports(10, p0=[key], d0=[key])
    bench.reports(10, d0=[key])
    bench.reports(1)
    bench.rows(request, 0, [1])
    bench.reports(2)
    bench.rows(request, 0, [2])  # of what decode does not hold any more, but the row was slow
    bench.reports(2)
    bench.rows(request, 0, [3], "length")
    bench.reports(10)
    assert bench.metrics.count("tries_lost") == 0 and len(bench.prefills()) == 1 and heard.ids == {0: [1, 2, 3]}


def test_a_row_that_comes_before_the_router_looks_saves_its_try() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit()
    bench.rows(request, 0, [1])
    bench.reports(2)
    bench.wait(0.5)
    bench.report({})  # that would be it
    bench.rows(request, 0, [2])
    bench.dispatcher.sweep()
    assert bench.metrics.count("tries_lost") == 0 and not request.closed
    bench.reports(3)
    assert bench.metrics.count("tries_lost") == 1 and heard.ids == {0: [1, 2]}


@pytest.mark.parametrize("stuck", ["p0", "d0"])
def test_a_report_that_is_only_repeated_during_a_long_step_says_nothing(stuck: str) -> None:
    bench = Bench()
    bench.pair()
    request, _ = bench.submit()
    bench.reports(40, stuck)
    assert bench.metrics.count("tries_lost") == 0
    bench.turns[stuck] += 1  # after the step, and before it has read its inbox
    bench.reports(1, stuck)
    held = [(request.rid, 0)]
    bench.reports(4, p0=held if stuck == "p0" else (), d0=held if stuck == "d0" else ())
    assert bench.metrics.count("tries_lost") == 0


def test_reports_that_come_in_one_burst_are_one() -> None:
    bench = Bench()
    bench.pair()
    bench.submit()
    bench.wait(5)
    for _ in range(10):
        bench.report({})
    bench.dispatcher.sweep()
    assert bench.metrics.count("tries_lost") == 0


def test_what_a_router_reads_after_a_stall_loses_no_try() -> None:
    bench = Bench()
    bench.pair()
    request, _ = bench.submit()
    bench.rows(request, 0, [1])
    bench.reports(2)
    bench.now += 3.0
    bench.report({})  # the second one, but the rows that precede it may be read after it
    bench.dispatcher.sweep()
    bench.reports(2)
    assert bench.metrics.count("stalls") == 1 and bench.metrics.count("tries_lost") == 0
    bench.reports(1)
    assert bench.metrics.count("tries_lost") == 1


def test_scores_that_never_came_are_computed_again() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit(prompt_logprobs=0)
    bench.rows(request, 0, [1], "length")
    bench.reports(10, p0=[(request.rid, 0)])
    bench.reports(2, d0=[(request.rid, 0)])
    assert bench.metrics.count("tries_lost") == 0
    bench.reports(1)
    message = bench.prefills()[-1][1]
    assert bench.metrics.count("tries_lost") == 1 and (message.attempt, message.sampling.prompt_logprobs) == (1, 0)
    bench.dispatcher.handle(PromptLogprobs(request.rid, 1, 0, b"\0" * 8, b"", b""))
    assert heard.prompt is not None and bench.is_empty()


def test_a_probe_that_is_lost_stays_silent() -> None:
    """Silence is what a probe is there to find, and to hold against its worker."""
    bench = Bench()
    bench.pair()
    request = Request.new([5, 6], 1, SamplingParams(max_tokens=1, seed=0), Heard())
    request.pinned = (bench.dispatcher.pool.workers("prefill")[0], bench.dispatcher.pool.workers("decode")[0])
    bench.dispatcher.submit(request, 60)
    bench.reports(20)
    assert bench.metrics.count("tries_lost") == 0 and not request.closed


def test_a_malformed_list_of_keys_is_counted_and_ignored() -> None:
    bench = Bench()
    bench.pair()
    bench.submit()
    for _ in range(10):
        bench.wait(0.5)
        for worker in bench.dispatcher.pool.workers():
            bench.turns[worker.name] += 1
            bench.live[worker.name] = b"12345"
            bench.join(worker.role, worker.name)
        bench.dispatcher.sweep()
    assert bench.metrics.count("reports_malformed") == 20 and bench.metrics.count("tries_lost") == 0
    assert len(bench.dispatcher.pool.workers()) == 2, "it is a sign of life all the same"


def test_a_listener_that_raises_costs_only_its_own_request() -> None:
    bench = Bench()
    bench.pair()
    (bad, bad_heard), (good, heard) = bench.submit(), bench.submit()

    bad_heard.stop_at = None  # type: ignore[assignment]
    bad_heard.ids = None  # type: ignore[assignment]
    rows = [[request.rid, 0, 0, 0, [3], "", None, None] for request in (bad, good)]
    bench.dispatcher.handle(Tokens("d0", rows))
    assert heard.ids == {0: [3]} and bad.closed and bad_heard.error is not None and bad_heard.error.status == 500
    assert ("tcp://d0", Abort(bad.rid, 0)) in bench.outbox.sent


def test_a_worker_that_was_taken_for_dead_is_told_to_stop() -> None:
    bench = Bench()
    bench.pair()
    bench.join("decode", "d1")
    request, heard = bench.submit()
    bench.rows(request, 0, [7])
    bench.wait(3.5, silent=["d0"])
    bench.outbox.sent.clear()
    bench.rows(request, 0, [8], first=1)  # it is back, its Status is not yet: there is no telling it
    assert not bench.outbox.sent
    bench.join("decode", "d0")
    for first in range(2, 100):
        bench.rows(request, 0, [8], first=first)
    assert bench.outbox.of(Abort) == [("tcp://d0", Abort(request.rid, 0))]
    bench.wait(1.1)
    bench.rows(request, 0, [8], first=100)  # the word was lost: it is said again
    assert len(bench.outbox.of(Abort)) == 2
    bench.rows(request, 1, [9], "stop", worker="d1")
    assert heard.ids == {0: [7, 9]} and bench.is_empty()


def test_what_a_router_before_this_one_asked_for_is_stopped() -> None:
    bench = Bench()
    bench.pair()
    bench.dispatcher.handle(Tokens("d0", [[5, 3, 1, 200, [7], "", None, None], [6, 0, 0, 9, [7], "stop", None, None]]))
    assert bench.outbox.of(Abort) == [("tcp://d0", Abort(5, 3))]  # the other is over anyway
    request, _ = bench.submit(n=2)
    bench.rows(request, 0, [1], "stop")
    bench.rows(request, 0, [2], first=1)  # a sample that ended by the router's word only
    assert bench.outbox.of(Abort)[-1] == ("tcp://d0", Abort(request.rid, 0, 0))


def test_strays_are_remembered_up_to_a_limit() -> None:
    strays = Strays()
    assert all(strays.is_due((rid, 0, -1), 5.0) for rid in range(2 * strays_limit))
    assert not strays.is_due((2 * strays_limit - 1, 0, -1), 5.5) and strays.is_due((0, 0, -1), 5.5)
    assert len(strays._told) == strays_limit


# ---- whose fault ----


def failures(bench: Bench) -> dict[str, int]:
    return {worker.name: worker.failures for worker in bench.dispatcher.pool.workers()}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_internal_failure_is_charged_to_the_worker_that_says_it(role: str) -> None:
    bench = Bench()
    for name in "01":
        bench.join("prefill", f"p{name}")
        bench.join("decode", f"d{name}")
    request, _ = bench.submit()
    bench.fail(request, 0, "internal", role=role)
    bad = {"prefill": "p0", "decode": "d0"}[role]
    assert failures(bench) == {name: int(name == bad) for name in ("p0", "p1", "d0", "d1")}
    assert bench.prefills()[-1][0 if role == "prefill" else 1] != bench.prefills()[0][0 if role == "prefill" else 1]
    other, _ = bench.submit()
    bench.rows(other, 0, [1], "stop")
    bench.dispatcher.pool.find(role, bad).proven_s = bench.now + 1  # type: ignore[union-attr]
    bench.fail(request, 1, "internal", role="other")  # a role that is none charges nobody
    assert sum(failures(bench).values()) <= 1
    address, message = bench.prefills()[-1]
    assert f"tcp://{bad}" not in (address, message.decode_inbox)  # this request still goes elsewhere


def test_a_broken_hand_off_is_not_held_against_a_worker_that_works_with_others() -> None:
    bench = Bench()
    bench.join("prefill", "p0")
    bench.join("decode", "d0")
    bench.join("decode", "d1")
    (first, _), (second, _) = bench.submit(), bench.submit()
    bench.now += 0.1
    bench.rows(second, 0, [1], worker="d1")
    bench.fail(first, 0, "transfer")
    assert failures(bench) == {"p0": 0, "d0": 1, "d1": 0}
    bench.fail(first, 1, "transfer")  # on d1, which has not worked since that try was sent; nor has p0
    assert failures(bench) == {"p0": 1, "d0": 1, "d1": 1}
    bench.rows(second, 0, [1], "stop", worker="d1")
    third, _ = bench.submit()
    bench.now += 0.1
    bench.rows(third, 0, [1], "stop", worker=bench.prefills()[-1][1].decode_inbox[6:])
    assert failures(bench)["p0"] == 0


@pytest.mark.parametrize("cause", ["timeout", "retracted"])
def test_time_and_room_are_nobodys_fault(cause: str) -> None:
    bench = Bench(request_timeout_s=5.0)
    bench.pair()
    request, heard = bench.submit()
    bench.fail(request, 0, cause, retryable=cause == "retracted")
    assert failures(bench) == {"p0": 0, "d0": 0} and not request.avoid
    if cause == "timeout":
        assert heard.error is not None and heard.error.status == 504 and "it was timeout" in heard.error.message
        assert bench.metrics.count("requests_timed_out") == 1 and len(bench.prefills()) == 1
    else:
        assert heard.error is None


def test_workers_give_up_after_the_router_does() -> None:
    bench = Bench(request_timeout_s=5.0)
    bench.pair()
    bench.submit()
    assert 5.0 < bench.prefills()[0][1].timeout_s < 7.0


# ---- probes ----


class Probing(Bench):
    """With health on top. `broken` decode workers take everything and answer nothing; for clients they fail at once."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.health = Health(self.dispatcher._config, self.dispatcher, lambda: self.now)
        self.broken: set[str] = set()
        self.traffic: list[tuple[str, str]] = []  # (prefill, decode) of clients' requests
        self._seen = 0

    def turn(self, seconds: float, client_every_s: float = math.inf) -> None:
        next_client = self.now
        end = self.now + seconds
        while self.now < end:
            self.wait(0.05)
            self.health.tick()
            if self.now >= next_client and client_every_s < math.inf:
                next_client += client_every_s
                self.submit()
            self._answer()

    def _answer(self) -> None:
        while self._seen < len(self.prefills()):
            address, message = self.prefills()[self._seen]
            self._seen += 1
            prefill, decode = address[6:], message.decode_inbox[6:]
            if message.sampling.max_tokens > 1:
                self.traffic.append((prefill, decode))
            if decode not in self.broken:
                row = [message.rid, message.attempt, 0, 0, [7], "length", None, None]
                self.dispatcher.handle(Tokens(decode, [row]))
            elif message.sampling.max_tokens > 1:
                failed = Failed(message.rid, message.attempt, ALL_SAMPLES, "transfer", "x", True, "decode")
                self.dispatcher.handle(failed)


@pytest.mark.parametrize("client_every_s", [1.0, math.inf])
def test_a_bad_decode_worker_does_not_take_good_prefill_workers_with_it(client_every_s: float) -> None:
    bench = Probing()
    for name in ("p0", "p1"):
        bench.join("prefill", name)
    for name in ("d0", "d1"):
        bench.join("decode", name)
    bench.broken = {"d1"}
    bench.turn(20, client_every_s)
    bench.traffic.clear()
    for _ in range(40):
        bench.turn(1, client_every_s)
        assert {name for name, count in failures(bench).items() if count} == {"d1"}
    assert not bench.health.reason()
    if bench.traffic:
        assert {decode for _, decode in bench.traffic} == {"d0"}
        assert all(sum(prefill == name for prefill, _ in bench.traffic) >= 15 for name in ("p0", "p1"))
    bench.broken.clear()
    bench.turn(6)
    assert not any(failures(bench).values())
    assert bench.metrics.count("probes_failed") > 0
    assert bench.metrics.count("requests_failed") == bench.metrics.count("requests_timed_out") == 0


@pytest.mark.parametrize("how", ["silence", "transfer"])
def test_a_probe_that_fails_is_held_against_the_worker_that_was_to_be_proven(how: str) -> None:
    bench = Probing(probe_every_s=30.0)
    bench.pair()
    bench.turn(1)
    bench.broken = {"d1"}
    bench.join("decode", "d1")
    [probe] = bench.health.probes.values()
    if how == "silence":
        bench.turn(4.2)
        assert bench.health.last_failure == "not finished within 4 s, p0 to d1 had it"
    else:
        assert probe.request is not None
        bench.fail(probe.request, 0, "transfer")
    assert failures(bench) == {"p0": 0, "d0": 0, "d1": 1} and bench.metrics.count("probes_failed") == 1


def test_a_probe_ends_in_its_own_time_whatever_else_is_in_flight() -> None:
    bench = Probing()
    bench.broken = {"d0"}
    old, heard = bench.submit()  # waits for its workers
    bench.pair()
    [probe] = bench.health.probes.values()
    bench.rows(old, 0, [7])
    bench._seen = 2
    bench.turn(3.8)
    assert bench.metrics.count("probes_failed") == 0
    bench.turn(0.4)
    assert probe.request is not None and probe.request.closed and bench.metrics.count("probes_failed") == 1
    assert heard.error is None and not old.closed


def test_a_probe_that_waits_at_a_saturated_worker_is_held_against_nobody() -> None:
    bench = Probing()
    bench.pair()
    bench.turn(1)
    bench.broken = {"d0"}  # nothing new gets through
    request, _ = bench.submit(prompt=[5] * 900)
    bench.rows(request, 0, [7])
    bench._seen = len(bench.prefills())
    for _ in range(30):
        bench.join("prefill", "p0", queued=9, free_pages=0)
        bench.join("decode", "d0", running=3)
        bench.rows(request, 0, [7])
        bench.turn(0.5)
        assert failures(bench) == {"p0": 0, "d0": 0}
    assert bench.metrics.count("probes_failed") and not bench.health.reason()
    bench.join("prefill", "p0", queued=0, free_pages=9)  # it has room now: silence means something again
    bench.turn(10)
    assert any(failures(bench).values()) and "no hand-off" in bench.health.reason()


def test_a_prefill_pool_full_of_long_prompts_is_healthy_while_it_computes() -> None:
    bench = Probing()
    bench.pair()
    bench.turn(1)
    bench.broken = {"d0"}
    for step in range(40):
        bench.join("prefill", "p0", queued=9, metrics=[{"steps": step + 1}, {}, {}])
        bench.turn(0.5)
        assert not bench.health.reason() and not any(failures(bench).values())
    for _ in range(40):  # no step any more, although it says that it lives
        bench.join("prefill", "p0", queued=9, metrics=[{"steps": 40}, {}, {}])
        bench.turn(0.5)
    assert "no hand-off" in bench.health.reason()


def test_rows_that_nobody_waits_for_prove_nothing() -> None:
    bench = Probing()
    bench.pair()
    bench.turn(1)
    bench.broken = {"d0"}
    for _ in range(30):
        bench.join("decode", "d0", queued=1)
        bench.dispatcher.handle(Tokens("d0", []))
        bench.dispatcher.handle(Tokens("d0", [[1, 2, 3, 4, [5], "", None, None], "junk"]))
        bench.turn(0.5)
    assert "no hand-off" in bench.health.reason()


def test_a_pool_that_has_never_served_is_not_just_busy() -> None:
    bench = Probing()
    bench.broken = {"d0"}
    bench.pair()
    for step in range(10):
        bench.join("prefill", "p0", queued=9, metrics=[{"steps": step + 1}, {}, {}])
        bench.turn(0.5)
    assert "no request has been served yet" in bench.health.reason()


def test_a_router_that_stood_still_takes_nobody_for_dead() -> None:
    bench = Bench(dead_after_s=3)
    bench.pair()
    request, _ = bench.submit()
    bench.wait(1, silent=["d0"])
    bench.now += 3.6  # nothing ran, so nothing was heard
    bench.dispatcher.sweep()
    assert bench.metrics.count("workers_lost") == 0 and len(bench.dispatcher.pool.workers()) == 2 and not request.closed
    bench.wait(1.5, silent=["d0"])
    assert bench.metrics.count("workers_lost") == 0
    bench.wait(1, silent=["d0"])  # but its silence before and after the stall counts
    assert bench.metrics.count("workers_lost") == 1


# ---- ends ----

DETAILS = "The server's log has the details under that number"
AGAIN = "Send it again; the server's log has the details under that number"


def test_refused_is_the_clients_fault_and_not_retryable_is_final(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit()
    bench.fail(request, 0, "refused", retryable=False)
    assert heard.error is not None and heard.error.status == 400 and heard.error.message == "it was refused"
    request, heard = bench.submit()
    bench.fail(request, 0, "internal", retryable=False)
    assert heard.error is not None and heard.error.status == 500 and len(bench.prefills()) == 2
    assert heard.error.message == f"request {request.rid} ended: it was internal. {DETAILS}"
    assert f"request {request.rid} ended with status 500: it was internal (says decode; p0 to d0)" in caplog.messages


def test_a_bug_of_the_routers_costs_one_request_and_the_log_has_its_number(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.pair()
    (request, heard), (other, _) = bench.submit(), bench.submit()
    heard.ids = None  # type: ignore[assignment]  # so it raises
    bench.rows(request, 0, [1])
    assert heard.error is not None and (heard.error.status, heard.error.code) == (500, "internal")
    assert heard.error.message == f"request {request.rid} ended: internal error. {DETAILS}"
    assert f"request {request.rid}" in caplog.messages and not other.closed


def transfer_fails(bench: Bench, request: Request) -> None:
    reason = "the KV could not be sent to the decode worker at tcp://d0: link"
    bench.dispatcher.handle(Failed(request.rid, 0, ALL_SAMPLES, "transfer", reason, True, "prefill"))


def step_raises(bench: Bench, request: Request) -> None:
    bench.dispatcher.handle(Failed(request.rid, 0, ALL_SAMPLES, "internal", "OSError: tcp://d0", True, "decode"))


def tokens_are_lost(bench: Bench, request: Request) -> None:
    bench.rows(request, 0, [9], first=4)


def all_of_it_is_lost(bench: Bench, request: Request) -> None:
    bench.reports(4)


def prefill_takes_nothing(bench: Bench, request: Request) -> None:
    bench.outbox.full = {"tcp://p0"}
    bench.fail(request, 0, "retracted")


def decode_falls_silent(bench: Bench, request: Request) -> None:
    bench.wait(3.5, silent=["d0"])


@pytest.mark.parametrize(
    ("happens", "code", "told", "logged"),
    [
        (transfer_fails, "worker_failed", "KV transfer failed", "at tcp://d0: link (says prefill; p0 to d0)"),
        (step_raises, "worker_failed", "a worker failed", "OSError: tcp://d0 (says decode; p0 to d0)"),
        (tokens_are_lost, "tokens_lost", "tokens were lost on the way", "tokens 0 to 4 of decode worker d0"),
        (all_of_it_is_lost, "try_lost", "a message was lost on the way", "p0 and d0 know nothing of it"),
        (prefill_takes_nothing, "worker_failed", "a worker failed", "tcp://p0 takes no messages (says prefill; p0 to d0)"),
        (decode_falls_silent, "worker_lost", "a decode worker was lost", "decode worker d0 was silent for "),
    ],
)
def test_the_client_is_told_what_failed_and_the_log_who(
    happens: Callable[[Bench, Request], None], code: str, told: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(max_attempts=1, dead_after_s=3)
    bench.pair()
    request, heard = bench.submit()
    happens(bench, request)
    assert heard.error is not None and (heard.error.status, heard.error.code) == (500, code)
    assert heard.error.message == f"request {request.rid} ended after 1 attempt: {told}. {AGAIN}"
    [line] = [text for text in caplog.messages if text.startswith(f"request {request.rid} ended with status 500: ")]
    assert logged in line


@pytest.mark.parametrize(("wait_s", "status"), [(2.0, 503), (60.0, 504)])
def test_a_request_that_ends_waiting_for_a_worker_names_none_either(
    wait_s: float, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(recovery_wait_s=wait_s, request_timeout_s=8.0, dead_after_s=3)
    bench.pair()
    request, heard = bench.submit()
    bench.wait(9, silent=["d0"])
    assert heard.error is not None and heard.error.status == status
    what, then = ("no live decode worker", AGAIN) if status == 503 else ("not finished in time", DETAILS)
    assert heard.error.message == f"request {request.rid} ended: {what} (last failure: a decode worker was lost). {then}"
    late = "not finished within 8 s, no worker had it; before: " if status == 504 else ""
    assert f"request {request.rid} ended with status {status}: {late}decode worker d0 was silent for " in caplog.text


def test_a_silent_decode_worker_is_routed_around_in_mid_stream() -> None:
    bench = Bench(dead_after_s=3)
    bench.join("prefill", "p0")
    bench.join("decode", "d0")
    request, heard = bench.submit(n=3)
    bench.rows(request, 0, [1], sample=0)
    bench.rows(request, 0, [2], "length", sample=1)
    bench.wait(2, silent=["d0"])
    bench.join("decode", "d1")
    bench.wait(1.5, silent=["d0"])
    assert bench.metrics.count("workers_lost") == 1
    assert ("tcp://d0", "forgotten") in bench.outbox.sent and ("tcp://p0", Abort(request.rid, 0)) in bench.outbox.sent
    retries = [message for _, message in bench.prefills()[1:]]
    assert [(m.samples, unpack_ids(m.tokens), m.decode_inbox) for m in retries] == [
        ((2,), [5, 6, 7], "tcp://d1"),
        ((0,), [5, 6, 7, 1], "tcp://d1"),
    ]
    bench.rows(request, retries[0].attempt, [7], "stop", sample=2)
    bench.rows(request, retries[1].attempt, [8], "stop", sample=0)
    assert heard.ids == {0: [1, 8], 1: [2], 2: [7]} and bench.is_empty()


def test_a_lost_prefill_worker_matters_only_until_the_first_token() -> None:
    bench = Bench()
    bench.pair()
    bench.join("prefill", "p1")
    started, heard = bench.submit()
    bench.rows(started, 0, [1])
    waiting = [bench.submit()[0] for _ in range(2)]
    bench.join("prefill", "p0", state="gone")
    assert len(bench.prefills()) >= 4 and all(address == "tcp://p1" for address, _ in bench.prefills()[3:])
    bench.rows(started, 0, [2], "stop")
    assert heard.finished == {0: "stop"}
    for request in waiting:
        bench.rows(request, request.attempts - 1, [1], "stop")
    assert bench.is_empty()


def test_an_accepted_request_waits_a_while_for_a_worker_to_come_back(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(recovery_wait_s=5, dead_after_s=3)
    bench.pair()
    request, heard = bench.submit()
    bench.join("decode", "d0", state="gone")
    other, unlucky = bench.submit()
    bench.wait(2)
    assert heard.error is None and bench.metrics.count("workers_lost") == 0 and bench.metrics.count("workers_left") == 1
    bench.join("decode", "d0", inbox="tcp://d0-again")
    assert [m.decode_inbox for _, m in bench.prefills()[-2:]] == ["tcp://d0-again"] * 2
    bench.dispatcher.cancel(request)
    bench.join("decode", "d0", state="gone", inbox="tcp://d0-again")
    late, never_sent = bench.submit()
    bench.wait(5.1)
    assert unlucky.error is not None and unlucky.error.status == 503 and "no live decode" in unlucky.error.message
    assert never_sent.error is not None and never_sent.error.status == 503
    assert never_sent.error.message == f"request {late.rid} ended: no live decode worker. {AGAIN}"
    assert f"request {late.rid} ended with status 503: no live decode worker" in caplog.messages
    assert bench.is_empty() and other.closed


def test_a_worker_that_comes_back_under_its_name_replaces_the_old_one() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit()
    bench.join("decode", "d0", inbox="tcp://new")
    assert ("tcp://d0", "forgotten") in bench.outbox.sent and bench.prefills()[-1][1].decode_inbox == "tcp://new"
    assert len(bench.dispatcher.pool.workers("decode")) == 1
    bench.rows(request, 1, [4], "stop")
    assert heard.ids == {0: [4]}


def test_the_log_says_who_joins_leaves_is_lost_and_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pdserve.router")
    bench = Bench(dead_after_s=3)
    bench.join("prefill", "p0")
    bench.join("decode", "d0")
    for _ in range(2):  # it tells again, and is not logged again
        bench.join("decode", "d1", identity=IDENTITY | {"dtype": "fp8"})
    bench.wait(3.5, silent=["d0"])
    bench.join("prefill", "p0", state="gone")
    assert [record.getMessage() for record in caplog.records] == [
        "prefill worker p0 joined, at tcp://p0",
        "decode worker d0 joined, at tcp://d0",
        "decode worker d1 was refused: dtype differs: 'bf16' on p0, 'fp8' on d1",
        "decode worker d0 was silent for 3.2 s: taken for dead",
        "prefill worker p0 left",
    ]


def test_a_different_identity_is_refused_with_the_field() -> None:
    bench = Bench()
    bench.join("prefill", "p0")
    bench.join("decode", "d0", identity=IDENTITY | {"dtype": "fp8"})
    [(address, refused)] = bench.outbox.of(Refused)
    assert address == "tcp://d0" and refused.reason == "dtype differs: 'bf16' on p0, 'fp8' on d0"
    assert not bench.dispatcher.pool.has_pair()
    health = Health(RouterConfig(), bench.dispatcher, lambda: bench.now)
    assert "d0 was refused: dtype differs" in health.reason()
    bench.join("decode", "d1", identity={"page_tokens": 256})
    assert "dtype differs: 'bf16' on p0, 'missing' on d1" in bench.outbox.of(Refused)[-1][1].reason
    # Once the old cluster is gone a new kind may form one.
    bench.join("prefill", "p0", state="gone")
    bench.join("decode", "d0", identity=IDENTITY | {"dtype": "fp8"})
    assert [worker.name for worker in bench.dispatcher.pool.workers()] == ["d0"]


def test_a_full_outbox_counts_as_a_failure_of_that_worker() -> None:
    bench = Bench()
    bench.pair()
    bench.outbox.full = {"tcp://p0"}
    bench.join("prefill", "p1")
    for _ in range(2):
        _, heard = bench.submit()
        assert heard.error is None
    assert {address for address, _ in bench.prefills()} == {"tcp://p1"}


def test_deadlines_end_requests(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(request_timeout_s=10)
    bench.pair()
    request, heard = bench.submit()
    bench.wait(10.1)
    assert heard.error is not None and heard.error.status == 504 and len(bench.outbox.of(Abort)) == 2 and bench.is_empty()
    assert heard.error.message == f"request {request.rid} ended: not finished in time. {DETAILS}"
    assert f"request {request.rid} ended with status 504: not finished within 10 s, p0 to d0 had it" in caplog.messages


def test_a_deadline_is_why_a_request_ended_that_had_lost_a_worker_before(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(request_timeout_s=10)
    bench.pair()
    bench.join("decode", "d1")
    request, heard = bench.submit()
    bench.wait(3.5, silent=["d0"])
    bench.wait(7)
    assert heard.error is not None and "a decode worker was lost" in heard.error.message
    assert (
        f"request {request.rid} ended with status 504: not finished within 10 s, p0 to d1 had it; before: "
        "decode worker d0 was silent for"
    ) in caplog.text


def test_a_deadline_while_no_worker_has_the_request_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(request_timeout_s=10, recovery_wait_s=60)
    bench.join("prefill", "p0")
    request, _ = bench.submit()
    bench.wait(10.1)
    assert f"request {request.rid} ended with status 504: not finished within 10 s, no worker had it" in caplog.messages


def test_prompt_logprobs_come_once_and_are_waited_for() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit(prompt_logprobs=0)
    bench.rows(request, 0, [1], "length")
    assert not request.closed
    bench.dispatcher.handle(PromptLogprobs(request.rid, 0, 0, b"\0" * 4, b"", b""))  # too short: not the prompt's
    assert bench.metrics.count("rows_stale") == 1
    bench.dispatcher.handle(PromptLogprobs(request.rid, 0, 0, b"\0" * 8, b"", b""))
    assert heard.prompt is not None and bench.is_empty()


@pytest.mark.parametrize("how", ["failed", "lost"])
def test_scores_that_do_not_come_are_computed_once_more_and_only_so_often(how: str) -> None:
    bench = Bench(max_attempts=3)
    bench.pair()
    request, heard = bench.submit(n=2, prompt_logprobs=1)
    bench.rows(request, 0, [1], "length")
    bench.rows(request, 0, [2], "length", sample=1)
    for attempt in range(2):
        assert not request.closed
        if how == "failed":
            bench.fail(request, attempt, "internal", role="prefill")
        else:
            bench.join("prefill", f"p{attempt}", state="gone")
            bench.join("prefill", f"p{attempt + 1}")
        message = bench.prefills()[-1][1]
        assert (message.attempt, message.samples, message.sampling.prompt_logprobs) == (attempt + 1, (0,), 1)
        assert unpack_ids(message.tokens) == [5, 6, 7]
        bench.rows(request, attempt + 1, [1], first=0)  # its tokens are here already
    assert heard.ids == {0: [1], 1: [2]}
    if how == "failed":
        bench.fail(request, 2, "internal", role="prefill")
        assert heard.error is not None and heard.error.status == 500
    else:
        bench.dispatcher.handle(PromptLogprobs(request.rid, 2, 1, b"\0" * 8, b"\0" * 8, b"\0" * 8))
        assert heard.prompt is not None and heard.error is None
    assert request.closed and bench.is_empty()


def test_prompt_tokens_in_flight_are_bounded() -> None:
    bench = Bench(max_prompt_tokens=10)
    bench.pair()
    request, _ = bench.submit(prompt=[5] * 7)
    bench.dispatcher.check_room(1, 3)
    with pytest.raises(ApiError, match="7 prompt tokens are in flight") as caught:
        bench.dispatcher.check_room(1, 4)
    assert caught.value.status == 429
    bench.dispatcher.cancel(request)
    bench.dispatcher.check_room(1, 10)


JUNK_ROWS: list[Any] = [
    None,
    [],
    [1] * 8,
    ["a", 0, 0, 0, [1], "", None, None],
    ["RID", 0, 0, 0, 5, "", None, None],
    ["RID", 0, 0, 0, [-1], "", None, None],
    ["RID", 0, 0, 0, [1.5], "", None, None],
    ["RID", 0, 0, 0, [True], "", None, None],
    ["RID", 0, 0, 0, [1 << 40], "", None, None],
    ["RID", 0, 0, 0, [1], "tired", None, None],
    ["RID", 0, 0, 0, [1], ["stop"], None, None],
    ["RID", 0, 0, 0, [1], "", [], None],
    ["RID", 0, 0, 0, [1], "", ["x"], None],
    ["RID", 0, 0, 0, [1], "", [0.5], [[["x", 1.0]]]],
    ["RID", 0, 0, 0, [1], "", [0.5], [3]],
    ["RID", 0, 0, 0, [1], "", None, [[]]],
    ["RID", 0, [], 0, [1], "", None, None],
    ["RID", 0, 0, None, [1], "", None, None],
    ["RID", 0, 0, [1], "", None, None],
]


def test_malformed_rows_are_counted_and_the_rest_of_their_message_still_counts() -> None:
    bench = Bench()
    bench.pair()
    request, heard = bench.submit()
    rows = [[request.rid, *row[1:]] if row and row[0] == "RID" else row for row in JUNK_ROWS]
    bench.dispatcher.handle(
        Tokens("d0", [*rows, [request.rid, 0, 0, 0, [3], "", None, None], [request.rid, 0, 9, 0, [3], "", None, None]])
    )
    assert heard.ids == {0: [3]}
    assert bench.metrics.count("rows_malformed") == len(JUNK_ROWS) and bench.metrics.count("rows_stale") == 1


def test_messages_that_make_no_sense_here_are_counted() -> None:
    bench = Bench()
    for message in (Abort(1, 2), Refused("x"), object()):
        bench.dispatcher.handle(message)
    for change in ({"role": "boss"}, {"name": ""}, {"inbox": "file:///x"}):
        status = Status("prefill", "p", "serving", "tcp://x", {}, {}, [], b"", 1)
        bench.dispatcher.handle(replace(status, **change))  # type: ignore[arg-type]
    assert bench.metrics.count("messages_unexpected") == 6
    bench.dispatcher.handle(Failed(1, 2, 3, "transfer", "x", True, "decode"))
    bench.dispatcher.handle(PromptLogprobs(1, 2, 3, b"", b"", b""))
    load = {"max_batch": "many", "tokens_per_s": -1}
    bench.dispatcher.handle(Status("prefill", "p", "serving", "tcp://x", {}, load, [1], b"", 1))
    bench.join("decode", "d", identity={})
    bench.submit()
    assert len(bench.prefills()) == 1


@pytest.mark.parametrize("counters", [{}, {"steps": 0}], ids=str)
def test_a_full_worker_before_its_first_step_counts_as_at_work(counters: dict[str, int]) -> None:
    status = Status("prefill", "p0", "serving", "tcp://p0", {}, {"queued": 1}, [counters, {}, {}], b"", 1)
    assert Worker(status, 0.0).is_saturated(100.0)


def test_a_ledger_never_goes_negative() -> None:
    ledger: Ledger[int] = Ledger()
    ledger.put(1, 5)
    ledger.put(1, 3)
    ledger.drop(2)
    ledger.drop(1)
    ledger.drop(1)
    assert ledger.total == 0


@pytest.mark.parametrize("seed", range(5))
def test_counters_stay_right_while_workers_flap(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(max_attempts=1000, recovery_wait_s=1e9, request_timeout_s=1e9)
    bench.pair()
    requests: list[tuple[Request, Heard]] = []
    for step in range(400):
        action = rng.random()
        live = [pair for pair in requests if not pair[0].closed]
        if action < 0.3:
            requests.append(bench.submit(n=rng.randint(1, 3)))
        elif action < 0.45:
            role, name = rng.choice([("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"), ("decode", "d1")])
            state = rng.choice(["gone", "serving"])
            bench.join(role, name, state=state, inbox=f"tcp://{name}-{step if state == 'serving' else 0}")
        elif live:
            request, _ = rng.choice(live)
            tries = [attempt for attempt in request.tries if attempt.samples]
            if action < 0.5:
                bench.dispatcher.cancel(request)
            elif tries:
                attempt = rng.choice(tries)
                sample = rng.choice(list(attempt.samples))
                if action < 0.6:
                    bench.fail(request, attempt.key[1], "transfer", sample=rng.choice([sample, ALL_SAMPLES]))
                else:
                    bench.rows(request, attempt.key[1], [step], rng.choice(["", "stop"]), sample)
        for worker in bench.dispatcher.pool.workers():
            assert min(worker.prompt_tokens.total, worker.sequences.total, worker.cache_tokens.total) >= 0
        assert bench.dispatcher.in_flight == sum(len(r.samples) for r, _ in requests if not r.closed)
    for request, _ in requests:
        bench.dispatcher.cancel(request)
    assert bench.is_empty()
