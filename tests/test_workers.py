"""Prefill and decode workers over real sockets and the real transport, driven by a scripted router.

Most tests run the workers in threads on a runner without weights, whose text shows every byte of KV that is wrong; the
last ones start the real processes on a golden checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
import zmq

from decode.config import DecodeConfig
from decode.worker import Worker as DecodeWorker
from model.batch import Batch
from prefill.config import PrefillConfig
from prefill.worker import Worker as PrefillWorker
from tests.fake_runner import EOS, FakeRunner, checksum, expected_text, fake_logits
from wire.messages import (
    ALL_SAMPLES,
    Abort,
    Failed,
    Grant,
    Offer,
    Prefill,
    PromptLogprobs,
    Ready,
    Refused,
    SamplingParams,
    Status,
    Tokens,
    pack_ids,
    unpack_keys,
)
from wire.sockets import Inbox, Outbox

GREEDY = SamplingParams(max_tokens=12, seed=1, temperature=0.0, ignore_eos=True)
PATIENCE_S = 50.0  # a machine may be busy with other things; less than requests may take
ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests/data/golden/tiny-bf16"


class ScriptedRouter:
    """A router's inbox and what came into it, by kind."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.inbox = Inbox(self.context)
        self.outbox = Outbox(self.context)
        self.status: dict[str, Status] = {}
        self.ids: dict[tuple[int, int, int], list[int]] = {}
        self.rows: dict[tuple[int, int, int], list[Any]] = {}
        self.firsts: dict[tuple[int, int, int], int] = {}  # tokens that the sample had before this attempt's
        self.finished: dict[tuple[int, int, int], str] = {}
        self.failed: list[Failed] = []
        self.scores: dict[tuple[int, int], PromptLogprobs] = {}
        self._rid = 100

    def close(self) -> None:
        self.outbox.close()
        self.inbox.close()
        self.context.destroy(linger=0)

    def receive(self, timeout_s: float = 0.02) -> None:
        self.inbox.wait(timeout_s)
        for message in self.inbox.drain():
            match message:
                case Status():
                    self.status[message.inbox] = message
                case Tokens():
                    self._take(message)
                case Failed():
                    self.failed.append(message)
                case PromptLogprobs():
                    self.scores[message.rid, message.attempt] = message
                case _:
                    raise AssertionError(f"a router got {message}")

    def _take(self, message: Tokens) -> None:
        for row in message.rows:
            rid, attempt, sample, first, ids, reason, _, _ = row
            key = (rid, attempt, sample)
            assert key not in self.finished, "a token after the end"
            self.firsts.setdefault(key, first)
            assert first == self.firsts[key] + len(self.ids.setdefault(key, [])), "a token is missing or came twice"
            self.ids[key].extend(ids)
            self.rows.setdefault(key, []).append(row)
            if reason:
                self.finished[key] = reason

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"never came: {what}; failed so far: {self.failed}"
            self.receive()

    def ask(self, prefill: str, decode: str, ids: list[int], params: SamplingParams, **changes: Any) -> int:
        """Sends a Prefill under a new rid (or the one given)."""
        self._rid += 1
        fields = {
            "rid": self._rid,
            "attempt": 0,
            "tokens": pack_ids(ids),
            "prompt_tokens": len(ids),
            "samples": (0,),
            "sampling": params,
            "decode_inbox": decode,
            "router_inbox": self.inbox.address,
            "timeout_s": 100.0,
        }
        message = Prefill(**{**fields, **changes})
        assert self.outbox.send(prefill, message)
        return message.rid

    def all_free(self, *inboxes: str) -> bool:
        """Whether the newest Status of each worker says that it holds nothing."""
        loads = [self.status[inbox].load for inbox in inboxes if inbox in self.status]
        return len(loads) == len(inboxes) and all(
            load["free_pages"] == load["total_pages"]
            and load["free_slots"] == load["total_slots"]
            and not load["queued"]
            and not load["running"]
            for load in loads
        )

    def counter(self, inbox: str, name: str) -> float:
        counters: dict[str, float] = self.status[inbox].metrics[0] if inbox in self.status else {}
        return counters.get(name, 0)


class Running:
    """One worker of either kind in a thread."""

    def __init__(self, worker: PrefillWorker | DecodeWorker) -> None:
        self.worker = worker
        self.address = worker.inbox.address
        self.exit_code: object = None
        self.turns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.turns += 1
                self.worker.turn(max_wait_ms=20)
        except SystemExit as exit:
            self.exit_code = exit.code

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.worker.close()


class Cluster:
    """A router and some workers in this process; on exit everything must be free again."""

    def __init__(self) -> None:
        self.router = ScriptedRouter()
        self.context: zmq.Context[Any] = zmq.Context()
        self.workers: list[Running] = []

    def __enter__(self) -> Cluster:
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                inboxes = [running.address for running in self.workers if running.exit_code is None]
                self.router.until(lambda: self.router.all_free(*inboxes), "all pages and slots back")
        finally:
            for running in self.workers:
                running.stop()
            self.context.destroy(linger=0)
            self.router.close()

    def prefill(self, runner: FakeRunner | None = None, **options: Any) -> Running:
        runner = runner or FakeRunner(num_pages=400, num_slots=16)
        values: dict[str, Any] = {"step_tokens": 16, "chunk_tokens": 8, **options}
        config = PrefillConfig(model="fake", router=self.router.inbox.address, **sizes(runner), **values)
        return self._add(PrefillWorker(config, runner, self.context))  # type: ignore[arg-type]

    def decode(self, runner: FakeRunner | None = None, depth: int = 0, **options: Any) -> Running:
        runner = runner or FakeRunner(num_pages=400, num_slots=16)
        config = DecodeConfig(model="fake", router=self.router.inbox.address, **sizes(runner), **options)
        return self._add(DecodeWorker(config, runner, self.context, depth))  # type: ignore[arg-type]

    def _add(self, worker: PrefillWorker | DecodeWorker) -> Running:
        self.workers.append(Running(worker))
        return self.workers[-1]


def sizes(runner: FakeRunner) -> dict[str, Any]:
    num_pages, num_slots = len(runner.arena.pages), len(runner.arena.slots)
    return {"page_tokens": runner.layout.page_tokens, "num_pages": num_pages, "num_slots": num_slots}


def prompt(length: int, salt: int = 0) -> list[int]:
    return [2 + (7 * n * n + 13 * n + salt) % 200 for n in range(length)]


def test_text_is_the_solo_text_at_every_length() -> None:
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        lengths = [*range(1, 14), 15, 16, 17, 33, 63, 64, 65]
        rids = {length: router.ask(prefill.address, decode.address, prompt(length), GREEDY) for length in lengths}
        router.until(lambda: len(router.finished) == len(lengths), "all texts")
        for length, rid in rids.items():
            assert router.ids[rid, 0, 0] == expected_text(prompt(length), 12, stop=()), length
            assert router.finished[rid, 0, 0] == "length"
        assert not router.failed


def test_samples_of_one_request_share_the_prompt_and_differ() -> None:
    params = replace(GREEDY, temperature=1.0, max_tokens=9)
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        together = {n: router.ask(prefill.address, decode.address, prompt(n), params, samples=(0, 1, 2)) for n in (1, 7, 8, 9)}
        single = {
            (n, i): router.ask(prefill.address, decode.address, prompt(n), params, samples=(i,))
            for n in together
            for i in range(3)
        }
        router.until(lambda: len(router.finished) == 24, "24 samples")
        for n, rid in together.items():
            texts = [router.ids[rid, 0, i] for i in range(3)]
            assert texts == [router.ids[single[n, i], 0, i] for i in range(3)]
            assert len({tuple(text) for text in texts}) == 3


def test_first_token_may_end_the_text() -> None:
    first = expected_text(prompt(9), 1, stop=())[0]
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        cases = {
            "stop": (replace(GREEDY, stop_token_ids=(first,)), [first], "stop"),
            "eos": (replace(GREEDY, ignore_eos=False, logit_bias=((EOS, 100.0),)), [EOS], "stop"),
            "ignored": (replace(GREEDY, max_tokens=2, logit_bias=((EOS, 100.0),)), [EOS, EOS], "length"),
            "one": (replace(GREEDY, max_tokens=1), [first], "length"),
            "none": (replace(GREEDY, max_tokens=0), [], "length"),
        }
        rids = {name: router.ask(prefill.address, decode.address, prompt(9), params) for name, (params, _, _) in cases.items()}
        router.until(lambda: len(router.finished) == len(cases), "all of them")
        for name, rid in rids.items():
            assert (router.ids[rid, 0, 0], router.finished[rid, 0, 0]) == cases[name][1:], name


def test_retry_continues_the_same_text() -> None:
    """What a router sends after a retraction: prompt and tokens so far, one sample, the next attempt."""
    params = replace(GREEDY, temperature=0.9, presence_penalty=0.5, repetition_penalty=1.2, max_tokens=20)
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        rid = router.ask(prefill.address, decode.address, prompt(10), params, samples=(2,))
        router.until(lambda: (rid, 0, 2) in router.finished, "the whole text")
        whole = router.ids[rid, 0, 2]
        for cut in (1, 6, 19):
            tokens = prompt(10) + whole[:cut]
            router.ask(prefill.address, decode.address, tokens, params, rid=rid, attempt=cut, samples=(2,), prompt_tokens=10)
            router.until(lambda cut=cut: (rid, cut, 2) in router.finished, "the rest")  # type: ignore[misc]
            assert whole[:cut] + router.ids[rid, cut, 2] == whole
            assert router.firsts[rid, cut, 2] == cut


def check_texts_of_too_many(router: ScriptedRouter, prefill: str, decode: str) -> None:
    """Eight sequences of up to 9 pages in a pool of 14: the router resubmits what comes back, and all texts are right."""
    for attempt in range(10):  # on a busy machine one may be over before the next is there
        if texts_of_eight(router, prefill, decode, range(8 * attempt, 8 * attempt + 8)):
            return
    pytest.fail("the pool was large enough: the test shows nothing")


def texts_of_eight(router: ScriptedRouter, prefill: str, decode: str, salts: range) -> int:
    """How many came back. As a router does, it takes one word on each attempt: prefill may find the window closed, and say so,
    before or after decode has said why."""
    params = replace(GREEDY, max_tokens=24)
    salt_of = {router.ask(prefill, decode, prompt(9, salt), params): salt for salt in salts}
    texts: dict[int, list[int]] = {rid: [] for rid in salt_of}
    seen, retracted = len(router.failed), 0
    attempt, done, deadline = dict.fromkeys(texts, 0), set[int](), time.monotonic() + PATIENCE_S
    while len(done) < 8:
        assert time.monotonic() < deadline, (texts, router.failed)
        router.receive()
        for failed in router.failed[seen:]:
            assert failed.retryable and (failed.cause == "retracted" or "has closed the window" in failed.reason), failed
            rid, retracted = failed.rid, retracted + (failed.cause == "retracted")
            if failed.attempt != attempt[rid]:
                continue
            texts[rid] += router.ids.get((rid, attempt[rid], 0), [])
            attempt[rid] += 1
            tokens = prompt(9, salt_of[rid]) + texts[rid]
            router.ask(prefill, decode, tokens, params, rid=rid, attempt=attempt[rid], prompt_tokens=9)
        seen = len(router.failed)
        for rid in [rid for rid in texts if rid not in done and (rid, attempt[rid], 0) in router.finished]:
            texts[rid] += router.ids[rid, attempt[rid], 0]
            done.add(rid)
    for rid, salt in salt_of.items():
        assert texts[rid] == expected_text(prompt(9, salt), 24, stop=())
    return retracted


def test_retraction_gives_back_what_does_not_fit_and_the_text_is_the_same() -> None:
    with Cluster() as cluster:
        router, prefill = cluster.router, cluster.prefill()
        decode = cluster.decode(FakeRunner(num_pages=15, num_slots=16))
        check_texts_of_too_many(router, prefill.address, decode.address)


def test_prompt_logprobs_are_those_of_the_clients_tokens() -> None:
    params = replace(GREEDY, prompt_logprobs=2, max_tokens=2)
    tokens = prompt(21)
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        rid = router.ask(prefill.address, decode.address, tokens, params, prompt_tokens=18)
        short = router.ask(prefill.address, decode.address, tokens[:1], params)
        router.until(lambda: len(router.scores) == 2 and len(router.finished) == 2, "scores and texts")
        sums = torch.tensor([checksum(tokens[:n]) for n in range(1, 18)])
        expected = torch.log_softmax(fake_logits(sums), dim=-1)
        chosen = expected.gather(1, torch.tensor(tokens[1:18])[:, None])[:, 0]
        score = router.scores[rid, 0]
        assert array("f", score.logprobs).tolist() == pytest.approx(chosen.tolist(), abs=1e-5)
        values, ids = expected.topk(2, dim=-1)
        assert array("I", score.top_ids).tolist() == ids.flatten().tolist()
        assert array("f", score.top_logprobs).tolist() == pytest.approx(values.flatten().tolist(), abs=1e-5)
        assert (router.scores[short, 0].logprobs, router.scores[short, 0].top_ids) == (b"", b"")


def test_what_can_never_work_is_refused_at_once_with_advice() -> None:
    with Cluster() as cluster:
        router = cluster.router
        prefill = cluster.prefill(FakeRunner(num_pages=40, num_slots=16))
        decode = cluster.decode(FakeRunner(num_pages=30, num_slots=4))
        cases: list[tuple[list[int], SamplingParams, dict[str, Any], str]] = [
            (prompt(300), GREEDY, {}, "prefill worker has memory"),
            (prompt(5000), GREEDY, {}, "the model takes 4096"),
            ([3, 999], GREEDY, {}, "token id 999"),
            ([], GREEDY, {"prompt_tokens": 0}, "empty"),
            ([3, 4], GREEDY, {"tokens": b"123"}, "empty"),
            ([3, 4], GREEDY, {"prompt_tokens": 3}, "prompt_tokens"),
            ([3, 4], GREEDY, {"samples": ()}, "n must be"),
            (prompt(100), replace(GREEDY, max_tokens=100), {}, "decode worker has memory"),
            (prompt(9), GREEDY, {"samples": (0, 1, 2, 3)}, "lower n"),
            (prompt(9), GREEDY, {"samples": (0, 0)}, "samples"),
            (prompt(9), replace(GREEDY, max_tokens=4090), {}, "max_tokens"),
            (prompt(9), replace(GREEDY, temperature=-1.0), {}, "temperature"),
        ]
        for tokens, params, changes, words in cases:
            before = len(router.failed)
            rid = router.ask(prefill.address, decode.address, tokens, params, **changes)
            router.until(lambda before=before: len(router.failed) > before, words)  # type: ignore[misc]
            failed = router.failed[-1]
            assert (failed.rid, failed.cause, failed.retryable, failed.sample) == (rid, "refused", False, ALL_SAMPLES)
            assert words in failed.reason, failed.reason
        good = router.ask(prefill.address, decode.address, prompt(9), GREEDY)
        router.until(lambda: (good, 0, 0) in router.finished, "a good one after the bad ones")


def test_another_model_is_refused_by_its_fingerprint() -> None:
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(FakeRunner(name="other")), cluster.decode()
        router.ask(prefill.address, decode.address, prompt(9), GREEDY)
        router.until(lambda: len(router.failed) == 1, "the refusal")
        assert router.failed[0].cause == "refused" and "fingerprint" in router.failed[0].reason
        assert not router.ids


def test_a_step_that_raises_ends_its_requests_and_nothing_else() -> None:
    with Cluster() as cluster:
        router = cluster.router
        sick_prefill, sick_decode = FakeRunner(), FakeRunner()
        prefill, decode = cluster.prefill(sick_prefill), cluster.decode(sick_decode)
        for runner in (sick_prefill, sick_decode):
            runner.fail = 1
            rid = router.ask(prefill.address, decode.address, prompt(9), GREEDY)
            router.until(lambda rid=rid: any(f.rid == rid for f in router.failed), "the failure")  # type: ignore[misc]
            failed = router.failed[-1]
            assert (failed.cause, failed.retryable) == ("internal", True) and "told to fail" in failed.reason
            good = router.ask(prefill.address, decode.address, prompt(9), GREEDY)
            router.until(lambda good=good: (good, 0, 0) in router.finished, "the next one")  # type: ignore[misc]
        for running in (prefill, decode):
            router.until(lambda running=running: router.counter(running.address, "step_failures") == 1, "the counter")  # type: ignore[misc]


def check_a_row_of_nan(router: ScriptedRouter, prefill: str, decode: str, healthy: str) -> None:
    """Three samples, which take their slots at once, one of them on a slot that is poisoned; `healthy` has none."""
    params, before = replace(GREEDY, temperature=1.0, max_tokens=30), len(router.failed)
    sick, whole = (router.ask(prefill, each, prompt(9), params, samples=(0, 1, 2)) for each in (decode, healthy))
    router.until(lambda: sum(key[0] in (sick, whole) for key in router.finished) == 5, "five texts")
    router.until(lambda: len(router.failed) > before, "the failure")
    (failed,) = router.failed[before:]
    assert "not usable" in failed.reason and (failed.rid, failed.cause, failed.retryable) == (sick, "internal", False)
    assert len({tuple(router.ids[whole, 0, sample]) for sample in range(3)}) == 3
    for sample in {0, 1, 2} - {failed.sample}:
        assert router.ids[sick, 0, sample] == router.ids[whole, 0, sample]


def test_a_row_of_nan_fails_alone() -> None:
    with Cluster() as cluster:
        runner = FakeRunner()
        prefill, decode, healthy = cluster.prefill(), cluster.decode(runner), cluster.decode()
        runner.nan_slots = {2}
        check_a_row_of_nan(cluster.router, prefill.address, decode.address, healthy.address)


def test_abort_in_every_state_gives_everything_back() -> None:
    with Cluster() as cluster:
        router = cluster.router
        prefill = cluster.prefill(FakeRunner(num_pages=40, num_slots=4))
        decode = cluster.decode(FakeRunner(num_pages=170, num_slots=6))  # nothing is retracted, however late the aborts are
        params = replace(GREEDY, max_tokens=60)
        for round_number in range(12):
            rids = [
                router.ask(prefill.address, decode.address, prompt(20 + 9 * n, n), params, samples=(0, 1)) for n in range(6)
            ]
            router.receive(0.004 * round_number)
            for n, rid in enumerate(rids):
                for address in (prefill.address, decode.address):
                    router.outbox.send(address, Abort(rid, 0, 1 if n == 5 else ALL_SAMPLES))
            survivor = (rids[5], 0, 0)
            router.until(lambda survivor=survivor: survivor in router.finished, "the sample that was not aborted")  # type: ignore[misc]
            assert router.ids[survivor] == expected_text(prompt(65, 5), 60, stop=())
            router.until(lambda: router.all_free(prefill.address, decode.address), "everything back")


def test_prefill_lets_go_at_once_of_what_decode_was_told_to_forget() -> None:
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        for rid in range(1, 4):  # the router's word to decode comes before the offer, that to prefill never
            router.outbox.send(decode.address, Abort(rid, 0))
        router.until(lambda: router.counter(decode.address, "stale_aborts") == 3, "the aborts")
        for rid in range(1, 4):
            router.ask(prefill.address, decode.address, prompt(30), GREEDY, rid=rid)
        router.until(lambda: router.counter(decode.address, "stale_offers") >= 3, "the offers")  # an offer may be repeated
        router.until(lambda: router.all_free(prefill.address, decode.address), "everything back")
        assert not router.failed


def test_prompts_for_a_decode_that_never_grants_do_not_starve_the_others() -> None:
    with Cluster() as cluster:
        router, prefill = cluster.router, cluster.prefill(FakeRunner(num_pages=41, num_slots=9))
        decode, full = cluster.decode(), Inbox(cluster.context)
        stuck = [router.ask(prefill.address, full.address, prompt(30, n), GREEDY) for n in range(20)]
        good = [router.ask(prefill.address, decode.address, prompt(30, n), GREEDY) for n in range(20)]
        router.until(lambda: len(router.finished) == 20, "the texts of the other")
        assert {key[0] for key in router.finished} == set(good) and not router.failed
        for rid in stuck:
            router.outbox.send(prefill.address, Abort(rid, 0))
        router.until(lambda: router.all_free(prefill.address), "everything back")
        full.close()


def test_workers_keep_saying_what_they_hold() -> None:
    with Cluster() as cluster:
        router, prefill, decode, full = cluster.router, cluster.prefill(), cluster.decode(), Inbox(cluster.context)

        def holds(worker: Running, *rids: int) -> bool:
            status = router.status.get(worker.address)
            return status is not None and unpack_keys(status.live) == [(rid, 0) for rid in rids]

        rid = router.ask(prefill.address, full.address, prompt(30), GREEDY)
        router.until(lambda: holds(prefill, rid), "prefill's word")
        assert full.wait(PATIENCE_S)
        offer = next(full.drain())
        router.outbox.send(decode.address, replace(offer, prefill_inbox=full.address))  # its Grant goes nowhere
        router.until(lambda: holds(decode, rid), "decode's word")
        turn = router.status[decode.address].turn
        router.until(lambda: router.status[decode.address].turn > turn and holds(decode, rid), "the next turn")
        for worker in (prefill, decode):
            router.outbox.send(worker.address, Abort(rid, 0))
        router.until(lambda: holds(prefill) and holds(decode), "that it is over")
        full.close()


class LossyLink:
    """Stands between a prefill and a decode worker, both ways, and loses the first message of one kind."""

    def __init__(self, decode: str, lost: type) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._to_decode, self._to_prefill, self._outbox = Inbox(self._context), Inbox(self._context), Outbox(self._context)
        self.address = self._to_decode.address
        self.lost = 0
        self._decode, self._prefill, self._kind = decode, "", lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for each in (self._to_decode, self._to_prefill, self._outbox):
            each.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._to_decode.wait(0.002)
            for message in self._to_decode.drain():
                if isinstance(message, Offer):
                    self._prefill = message.prefill_inbox
                    message = replace(message, prefill_inbox=self._to_prefill.address)
                self._pass(self._decode, message)
            for message in self._to_prefill.drain():
                self._pass(self._prefill, message)

    def _pass(self, address: str, message: Any) -> None:
        if isinstance(message, self._kind) and not self.lost:
            self.lost += 1
        else:
            self._outbox.send(address, message)


@pytest.mark.parametrize("lost", [Offer, Grant, Ready])
def test_a_lost_message_costs_seconds_and_no_request(lost: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill.scheduler.OFFER_PERIOD_S", 0.3)
    monkeypatch.setattr("decode.scheduler.GRANT_PERIOD_S", 0.3)
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        with LossyLink(decode.address, lost) as link:
            rid = router.ask(prefill.address, link.address, prompt(30), GREEDY)
            router.until(lambda: (rid, 0, 0) in router.finished, "the text")
        assert router.ids[rid, 0, 0] == expected_text(prompt(30), 12, stop=())
        assert link.lost == 1 and not router.failed


def test_a_lost_abort_costs_seconds_of_decodes_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill fails after the grant, and its word to decode is lost: decode asks, and hears it again."""
    monkeypatch.setattr("decode.scheduler.GRANT_PERIOD_S", 0.3)
    with Cluster() as cluster:
        router, runner = cluster.router, FakeRunner()
        runner.fail = 1
        prefill, decode = cluster.prefill(runner), cluster.decode()
        with LossyLink(decode.address, Abort) as link:
            router.ask(prefill.address, link.address, prompt(30), GREEDY)
            router.until(lambda: len(router.failed) == 1, "the failure")
            router.until(lambda: router.counter(decode.address, "offers") == 1, "the offer")
            router.until(lambda: router.all_free(prefill.address, decode.address), "everything back")
            assert link.lost == 1


class GatedRunner(FakeRunner):
    """Its third step and all behind it wait for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def forward(self, batch: Batch) -> torch.Tensor:
        assert len(self.steps) < 2 or self.gate.wait(PATIENCE_S)
        return super().forward(batch)


def test_prefill_leaves_it_to_decode_to_say_why_decode_closed_a_hand_off() -> None:
    """Also when it hears of that from the transport alone: decode's word to it is lost. A retraction is no failed try."""
    with Cluster() as cluster:
        router, runner = cluster.router, GatedRunner()
        prefill, decode = cluster.prefill(runner), cluster.decode()
        with LossyLink(decode.address, Abort) as link:
            rid = router.ask(prefill.address, link.address, prompt(80), GREEDY)
            router.until(lambda: router.counter(decode.address, "offers") == 1, "the offer")
            router.until(lambda: not router.all_free(decode.address), "the grant")
            router.outbox.send(decode.address, Abort(rid, 0))
            router.until(lambda: link.lost == 1 and router.all_free(decode.address), "the end at decode")
            runner.gate.set()
            router.until(lambda: router.all_free(prefill.address), "everything back")
            router.until(lambda: router.counter(decode.address, "stale_aborts") == 1, "prefill's last word")
        assert not router.failed and router.counter(prefill.address, "aborts") == 1
        assert router.counter(prefill.address, "transfers_broken") == 0


def test_the_log_names_the_worker_that_kv_goes_to(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        rid = router.ask(prefill.address, decode.address, prompt(30), GREEDY)
        router.until(lambda: (rid, 0, 0) in router.finished, "the text")
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("KV to ")]
    assert line.startswith(f"KV to {decode.worker.name} at tcp://127.0.0.1:")


def test_a_worker_on_every_interface_is_reached_by_its_advertised_name() -> None:
    everywhere: dict[str, Any] = {"host": "0.0.0.0", "advertise": "127.0.0.1", "insecure": True}
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(**everywhere), cluster.decode(**everywhere)
        assert prefill.address.startswith("tcp://127.0.0.1:") and decode.address.startswith("tcp://127.0.0.1:")
        rid = router.ask(prefill.address, decode.address, prompt(30), GREEDY)
        router.until(lambda: (rid, 0, 0) in router.finished, "the text")
        assert router.ids[rid, 0, 0] == expected_text(prompt(30), 12, stop=())


def test_deadline_fails_the_request_wherever_it_is() -> None:
    with Cluster() as cluster:
        router, prefill = cluster.router, cluster.prefill()
        decode = cluster.decode(FakeRunner(num_pages=1010, num_slots=3))
        deaf = Inbox(router.context)  # a decode worker that never grants
        waiting = router.ask(prefill.address, deaf.address, prompt(30), GREEDY, timeout_s=0.3)
        running = router.ask(prefill.address, decode.address, prompt(5), replace(GREEDY, max_tokens=4000), timeout_s=0.3)
        router.until(lambda: {f.rid for f in router.failed} == {waiting, running}, "two timeouts")  # by either worker, or both
        assert {f.cause for f in router.failed} == {"timeout"}
        said: list[Any] = []
        while len(said) < 2 and deaf.wait(PATIENCE_S):
            said += deaf.drain()
        assert [type(message) for message in said] == [Offer, Abort]
        deaf.close()


def test_duplicates_and_late_messages_are_ignored() -> None:
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        rid = router.ask(prefill.address, decode.address, prompt(9), GREEDY)
        router.ask(prefill.address, decode.address, prompt(8), GREEDY, rid=rid)
        router.until(lambda: (rid, 0, 0) in router.finished, "the text")
        router.ask(prefill.address, decode.address, prompt(9), GREEDY, rid=rid)
        for stale in (Ready(rid, 0, 8, 1, 1, 1), Grant(rid, 0, 1, b"", "tcp://127.0.0.1:1"), Abort(rid, 0)):
            router.outbox.send(decode.address, stale)
            router.outbox.send(prefill.address, stale)
        router.until(lambda: router.counter(prefill.address, "duplicates") == 2, "the counter")
        router.until(lambda: router.counter(decode.address, "stale_readies") >= 2, "ours and prefill's last word")
        assert router.ids[rid, 0, 0] == expected_text(prompt(9), 12, stop=())
        assert not router.failed


def test_junk_in_the_inbox_is_counted_and_service_goes_on() -> None:
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        for running in (prefill, decode):
            raw: zmq.Socket[bytes] = router.context.socket(zmq.PUSH)
            raw.connect(running.address)
            for frame in (b"", b"\x00", b"\x80\x04pickle", os.urandom(300), pack_ids(range(100))):
                raw.send(frame)
            raw.send_multipart([b"two", b"frames"])
            raw.close(linger=10_000)
            router.until(lambda running=running: router.counter(running.address, "bad_frames") == 6, "the counter")  # type: ignore[misc]
        rid = router.ask(prefill.address, decode.address, prompt(9), GREEDY)
        router.until(lambda: (rid, 0, 0) in router.finished, "a text after the junk")


def test_short_prompt_behind_long_ones_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster() as cluster:
        router, runner = cluster.router, FakeRunner(num_pages=1100, num_slots=16)
        prefill = cluster.prefill(runner, step_tokens=64, chunk_tokens=32)
        scheduler: Any = prefill.worker.scheduler
        next_chunks, metrics = scheduler.next_chunks, prefill.worker.metrics
        monkeypatch.setattr(scheduler, "next_chunks", lambda: next_chunks() if metrics.count("prompts") == 3 else [])
        decode = cluster.decode(FakeRunner(num_pages=1000, num_slots=16))
        long = [router.ask(prefill.address, decode.address, prompt(1000, n), replace(GREEDY, max_tokens=1)) for n in range(2)]
        short = router.ask(prefill.address, decode.address, prompt(9), replace(GREEDY, max_tokens=1))
        router.until(lambda: len(router.finished) == 3, "three texts")
        assert len(runner.steps[0]) == 3 and 8 in runner.steps[0], "the first step is of all three, and all of the short one"
        assert {key[0] for key in router.finished} == {short, *long}
        assert max(sum(step) for step in runner.steps) <= 64
        assert max(count for step in runner.steps for count in step) <= 32


def test_prompt_logits_that_are_not_numbers_fail_the_request() -> None:
    with Cluster() as cluster:
        router, runner = cluster.router, FakeRunner()
        runner.nan_slots = {1}
        prefill, decode = cluster.prefill(runner), cluster.decode()
        router.ask(prefill.address, decode.address, prompt(9), replace(GREEDY, prompt_logprobs=0))
        router.until(lambda: len(router.failed) == 1, "the failure")
        runner.nan_slots = set()
        other = router.ask(prefill.address, decode.address, prompt(9), replace(GREEDY, prompt_logprobs=0))
        router.until(lambda: (other, 0, 0) in router.finished, "the next text")
        router.until(lambda: bool(router.scores), "its scores")  # from prefill, the text is from decode
        assert "not numbers" in router.failed[0].reason and list(router.scores) == [(other, 0)]


def test_workers_without_work_sleep() -> None:
    with Cluster() as cluster:
        router, prefill, decode = cluster.router, cluster.prefill(), cluster.decode()
        rid = router.ask(prefill.address, decode.address, prompt(30), GREEDY)
        router.until(lambda: (rid, 0, 0) in router.finished, "a text")
        router.until(lambda: router.all_free(prefill.address, decode.address), "everything back")
        begin_s, before = time.monotonic(), (prefill.turns, decode.turns)
        time.sleep(0.4)
        turns = prefill.turns - before[0], decode.turns - before[1]
        assert max(turns) < (time.monotonic() - begin_s) / 0.02 + 10  # the thread's own wait is 20 ms


def test_mixed_load_over_two_pairs_with_clients_that_leave() -> None:
    """Every survivor's text is its solo text, though a fifth is dropped on the way and pages change hands all the time."""
    with Cluster() as cluster:
        router = cluster.router
        prefills = [cluster.prefill(FakeRunner(num_pages=80, num_slots=6)) for _ in range(2)]
        decodes = [cluster.decode(FakeRunner(num_pages=300, num_slots=9), max_batch=5) for _ in range(2)]
        params = replace(GREEDY, max_tokens=9)
        asked: dict[int, tuple[int, int]] = {}
        dropped: set[int] = set()
        for n in range(120):
            length, samples = 1 + (n * 37) % 90, 1 + n % 3
            pair = (prefills[n % 2].address, decodes[n // 2 % 2].address)
            rid = router.ask(*pair, prompt(length, n), params, samples=tuple(range(samples)))
            asked[rid] = (length, n)
            if n % 5 == 4:
                router.receive(0.002 * (n % 7))
                for address in pair:
                    router.outbox.send(address, Abort(rid, 0))
                dropped.add(rid)
        wanted = {(rid, 0, i) for rid, (_, n) in asked.items() if rid not in dropped for i in range(1 + n % 3)}
        router.until(lambda: wanted <= router.finished.keys(), "all survivors", 2 * PATIENCE_S)
        assert not router.failed
        for rid, _, sample in wanted:
            length, n = asked[rid]
            assert router.ids[rid, 0, sample] == expected_text(prompt(length, n), 9, stop=())


def test_refused_ends_the_worker_with_code_3(capfd: pytest.CaptureFixture[str]) -> None:
    with Cluster() as cluster:
        for running in (cluster.prefill(), cluster.decode()):
            cluster.router.outbox.send(running.address, Refused("page_tokens: 4 and 8"))
            running.join(PATIENCE_S)
            assert running.exit_code == 3
        assert capfd.readouterr().err == "refused: page_tokens: 4 and 8\n" * 2


# --- real processes, real model


@contextmanager
def process(role: str, router: ScriptedRouter, *options: str) -> Iterator[subprocess.Popen[str]]:
    sizes = ["--num-pages", "40", "--num-slots", "17"]
    command = [sys.executable, "-m", role, "--router", router.inbox.address, *sizes, *options]
    child = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def serving_inbox(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    word, _, inbox = child.stdout.readline().split()
    assert word == "serving"
    return inbox


def golden_cases() -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((GOLDEN / "expected/expected.json").read_text())["prompts"]
    return cases


def test_processes_give_the_golden_tokens_and_leave_with_gone() -> None:
    router = ScriptedRouter()
    model = ["--model", str(GOLDEN / "model")]
    with process("prefill", router, *model, "--chunk-tokens", "64") as prefill, process("decode", router, *model) as decode:
        inboxes = (serving_inbox(prefill), serving_inbox(decode))
        cases = {name: case for name, case in golden_cases().items() if name in ("len1", "len3", "len129", "len257", "len300")}
        params = SamplingParams(max_tokens=32, seed=0, temperature=0.0)
        rids = {name: router.ask(*inboxes, case["ids"], params) for name, case in cases.items()}
        router.until(lambda: len(router.finished) == len(cases), "the golden texts", 120.0)
        for name, rid in rids.items():
            assert router.ids[rid, 0, 0] == cases[name]["tokens"], name
        router.until(lambda: router.all_free(*inboxes), "everything back")
        for child, number in ((prefill, signal.SIGTERM), (decode, signal.SIGINT)):
            child.send_signal(number)
            assert child.wait(PATIENCE_S) == 0
        router.until(lambda: all(status.state == "gone" for status in router.status.values()), "gone")
    router.close()


def test_a_model_that_is_not_there_is_one_line_and_exit_1(tmp_path: Path) -> None:
    router = ScriptedRouter()
    for role in ("prefill", "decode"):
        with process(role, router, "--model", str(tmp_path)) as child:
            out, err = child.communicate(timeout=120)
        assert (child.returncode, out) == (1, "")
        assert err.count("\n") == 1 and "config.json" in err
    router.close()


def test_a_longer_context_than_the_models_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    router = ScriptedRouter()
    (tmp_path / "config.json").write_bytes((GOLDEN / "model/config.json").read_bytes())  # and no weights
    said = "--max-context 4097 is more than the 4096 tokens that this model takes (max_position_embeddings in its config.json)"
    for role in ("prefill", "decode"):
        with process(role, router, "--model", str(tmp_path), "--max-context", "4097") as child:
            out, err = child.communicate(timeout=120)
        assert (child.returncode, out, err.count("\n")) == (1, "", 1)
        assert f"{said}: give 4096 or less, or leave it out" in err
    with process("prefill", router, "--model", str(tmp_path), "--max-context", "4096") as child:
        assert "--max-context" not in child.communicate(timeout=120)[1]
    router.close()


def test_a_port_that_is_taken_is_one_line_and_exit_1() -> None:
    router = ScriptedRouter()
    port = router.inbox.address.rsplit(":", 1)[1]
    with process("decode", router, "--model", str(GOLDEN / "model"), "--port", port) as child:
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (1, "")
    (line,) = [line for line in err.splitlines() if " INFO " not in line]
    assert f"--port {port}: Address already in use" in line
    router.close()
