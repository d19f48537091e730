"""Decode workers that speculate: over real sockets on a runner without weights, and once as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import zmq
from torch import Tensor

from decode.config import DecodeConfig
from decode.scheduler import Scheduler
from decode.speculation import Speculation
from decode.step import STORING, Shape
from decode.worker import Worker
from kernels.sequences import MOST_DRAFTS
from model.batch import Batch
from tests import golden
from tests.fake_runner import FakeDrafter, FakeRunner, expected_text
from tests.system import Server, running, wait_for
from tests.test_workers import (
    GREEDY,
    Cluster,
    Running,
    ScriptedRouter,
    check_a_row_of_nan,
    check_texts_of_too_many,
    prompt,
    sizes,
)  # fmt: skip

DRAWN = replace(GREEDY, temperature=0.9, max_tokens=17)


@contextmanager
def pair(speculate: int, runner: FakeDrafter | None = None, depth: int = 0) -> Iterator[tuple[Cluster, str, Running]]:
    """A cluster of one prefill worker, whose inbox that is, and one decode worker with `depth` steps in flight."""
    with Cluster() as cluster:
        prefill = cluster.prefill(FakeDrafter())
        yield cluster, prefill.address, decode_worker(cluster, speculate, runner or FakeDrafter(), depth)


def decode_worker(cluster: Cluster, speculate: int, runner: FakeRunner, depth: int = 0, **options: Any) -> Running:
    config = DecodeConfig(model="fake", router=cluster.router.inbox.address, speculate=speculate, **sizes(runner), **options)
    return cluster._add(Worker(config, runner, cluster.context, depth))  # type: ignore[arg-type]


@pytest.fixture(params=["most", "any"])
def drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step with as many drafts as there may be, or of any shape, the next of another."""
    rng = Random(5)

    def shape(self: Speculation, rows: int) -> Shape:
        return self._all[-1] if request.param == "most" else rng.choice([*self._all, STORING])

    monkeypatch.setattr(Speculation, "shape", shape)


def accepted(router: ScriptedRouter, decode: Running) -> float:
    """Drafts at the first position."""
    return router.counter(decode.address, "draft_1_accepted")


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize("depth", [0, 1])
def test_text_is_the_solo_text_at_every_length(depth: int) -> None:
    """Prompts around the ends of pages, texts that end at any place in a step, by their length or a stop token."""
    with pair(MOST_DRAFTS, depth=depth) as (cluster, prefill, decode):
        router = cluster.router
        cases: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for length in [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33]:
            text = expected_text(prompt(length), 12, stop=())
            for most, stop in [(1, ()), (2, ()), (3, ()), (12, ()), (12, (text[6],)), (12, (text[9], text[10]))]:
                params = replace(GREEDY, max_tokens=most, stop_token_ids=stop)
                cases[router.ask(prefill, decode.address, prompt(length), params)] = (length, most, stop)
        router.until(lambda: len(router.finished) == len(cases), "all texts")
        for rid, (length, most, stop) in cases.items():
            assert router.ids[rid, 0, 0] == expected_text(prompt(length), most, stop=stop), (length, most, stop)
            assert router.finished[rid, 0, 0] == ("stop" if stop else "length")
        assert not router.failed
        router.until(lambda: accepted(router, decode) > 20, "drafts that were accepted")


def test_a_worker_short_of_pages_carries_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps still leave their rows, for those to come."""
    stored: list[int] = []
    store = FakeDrafter.store_draft_rows

    def noted(self: FakeDrafter, streams: Tensor, next_tokens: Tensor, batch: Batch) -> None:
        stored.append(len(next_tokens))
        store(self, streams, next_tokens, batch)

    monkeypatch.setattr(FakeDrafter, "store_draft_rows", noted)
    monkeypatch.setattr(Speculation, "shape", lambda self, rows: self._all[-1])
    monkeypatch.setattr(Scheduler, "affordable", lambda self, tokens: 1)
    with pair(MOST_DRAFTS) as (cluster, prefill, decode):
        router = cluster.router
        router.ask(prefill, decode.address, prompt(9), GREEDY)
        router.until(lambda: len(router.finished) == 1, "the text")
        assert [len(row[4]) for rows in router.rows.values() for row in rows] == [1] * GREEDY.max_tokens
        assert stored[-GREEDY.max_tokens :] == [1] * GREEDY.max_tokens


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_drafts_behind_the_end_of_a_text_do_not_count(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step of a text of three tokens has four, of which one is wanted. Some of the others would be right."""
    monkeypatch.setattr(Speculation, "shape", lambda self, rows: self._all[-1])
    with pair(MOST_DRAFTS) as (cluster, prefill, decode):
        router, texts = cluster.router, {length: expected_text(prompt(length), 3, stop=()) for length in range(5, 14)}
        lengths = [length for length, text in texts.items() if text[2] not in text[:2]]
        for length in lengths:
            stop = {"max_tokens": 12, "stop_token_ids": (texts[length][2],)}
            params = replace(GREEDY, **(stop if ends == "stop" else {"max_tokens": 3}))
            router.ask(prefill, decode.address, prompt(length), params)
        router.until(lambda: len(router.finished) == len(lengths), "the texts")
        assert {(len(ids), router.finished[key]) for key, ids in router.ids.items()} == {(3, ends)}
        router.until(lambda: router.counter(decode.address, "draft_1_verified") == len(lengths), "a draft each")
        assert router.counter(decode.address, "draft_1_accepted") >= 3
        assert router.counter(decode.address, "draft_2_verified") == 0


@pytest.mark.usefixtures("drafts")
def test_samples_are_those_without_drafts() -> None:
    texts: list[dict[tuple[int, int], list[int]]] = []
    for speculate in (0, MOST_DRAFTS):
        with pair(speculate) as (cluster, prefill, decode):
            router = cluster.router
            asked = {router.ask(prefill, decode.address, prompt(n, n), DRAWN, samples=(0, 1, 2)): n for n in (1, 6, 8, 9)}
            router.until(lambda: len(router.finished) == 12, "12 samples")  # noqa: B023
            texts.append({(asked[rid], sample): ids for (rid, _, sample), ids in router.ids.items()})
    assert texts[0] == texts[1] and len({tuple(text) for text in texts[0].values()}) == 12


@pytest.mark.usefixtures("drafts")
def test_what_is_retracted_comes_back_with_the_same_text() -> None:
    """Steps ask for pages ahead."""
    with pair(MOST_DRAFTS, FakeDrafter(num_pages=15, num_slots=16)) as (cluster, prefill, decode):
        check_texts_of_too_many(cluster.router, prefill, decode.address)


@pytest.mark.usefixtures("drafts")
def test_a_text_may_fill_the_context_and_the_memory() -> None:
    """The last tokens of a sequence that ends at the longest context, in a pool that holds just that: drafts behind them have
    no page."""
    with Cluster() as cluster:
        router, prefill = cluster.router, cluster.prefill(FakeDrafter())
        decode = decode_worker(cluster, MOST_DRAFTS, FakeDrafter(num_pages=11, num_slots=3), max_context=41)
        for length in (1, 20, 33, 40):
            params = replace(GREEDY, max_tokens=41 - length)
            rid = router.ask(prefill.address, decode.address, prompt(length), params)
            router.until(lambda rid=rid: (rid, 0, 0) in router.finished, "the text")  # type: ignore[misc]
            assert router.ids[rid, 0, 0] == expected_text(prompt(length), 41 - length, stop=())


@pytest.mark.usefixtures("drafts")
def test_a_row_of_nan_fails_alone() -> None:
    runner = FakeDrafter()
    with pair(MOST_DRAFTS, runner) as (cluster, prefill, decode):
        runner.nan_slots = {2}
        healthy = decode_worker(cluster, MOST_DRAFTS, FakeDrafter())
        check_a_row_of_nan(cluster.router, prefill, decode.address, healthy.address)


@pytest.mark.parametrize(("slope", "chosen"), [(0.1, 2), (0.9, 0)])
def test_the_choice_follows_what_is_measured(slope: float, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that cost hardly anything, or nearly as much as tokens: texts are the same, and the router is told the choice."""
    landed = Speculation.landed

    def timed(self: Speculation, rows: int, shape: Shape, seconds: float, outcomes: list[tuple[int, int]]) -> None:
        landed(self, rows, shape, 0.01 * (1 + slope * (shape.tokens - 1)), outcomes)

    monkeypatch.setattr(Speculation, "landed", timed)
    with pair(2) as (cluster, prefill, decode):
        router = cluster.router
        rid = router.ask(prefill, decode.address, prompt(9), replace(GREEDY, max_tokens=600))
        router.until(lambda: (rid, 0, 0) in router.finished, "a long text")
        assert router.ids[rid, 0, 0] == expected_text(prompt(9), 600, stop=())
        router.until(lambda: router.counter(decode.address, "finished") == 1, "the last numbers")
        counters, gauges, _ = router.status[decode.address].metrics
        assert gauges["drafts"] == chosen
        guessed = counters["draft_1_accepted"] + counters["draft_2_accepted"]
        assert guessed > 250 if chosen else 0 < guessed < 60


def test_a_checkpoint_without_the_layer_is_refused() -> None:
    context: zmq.Context[Any] = zmq.Context()
    config = DecodeConfig(model="fake", router="tcp://127.0.0.1:1", speculate=2)
    with pytest.raises(ValueError, match="--speculate 2 needs a checkpoint with an MTP layer"):
        Worker(config, FakeRunner(), context)  # type: ignore[arg-type]
    context.destroy()


def test_the_number_of_drafts_is_checked() -> None:
    for speculate in (-1, 5):
        with pytest.raises(ValueError, match="--speculate is"):
            DecodeConfig(model="fake", router="tcp://127.0.0.1:1", speculate=speculate)


def test_processes_give_the_texts_without_drafts() -> None:
    """Through HTTP, prefill and decode: greedy texts are the golden ones, drawn and penalised ones those without drafts."""
    name, which = "tiny-bf16", ("len1", "len5", "len129", "len300")
    prompts = {each: golden.prompt(name, each) for each in which}
    bodies = [{"prompt": ids, "max_tokens": 32, "temperature": 0, "ignore_eos": True} for ids, _ in prompts.values()]
    drawn = {"prompt": prompts["len5"][0], "max_tokens": 40, "temperature": 0.9, "seed": 4, "n": 2, "logprobs": 2}
    bodies += [drawn, {**drawn, "presence_penalty": 1.0, "frequency_penalty": 0.5, "n": 1}]
    answers = []
    for decode_args in ("", "--speculate 2"):
        with running(decode_args=decode_args) as server:
            replies = server.complete_all(bodies)
            answers.append([reply.ids(choice) for reply in replies for choice in range(len(reply.body["choices"]))])
            if decode_args:
                check_metrics(server, most=2)
            else:
                metrics = server.metrics()
                assert set(metrics["drafts"].values()) == {0} and "draft_1_acceptance" not in metrics
    assert answers[0] == answers[1] and answers[1][: len(which)] == [text for _, text in prompts.values()]


def check_metrics(server: Server, most: int) -> None:
    """What an operator reads in /metrics of the decode worker, and of nobody else, after some texts."""
    wait_for(lambda: server.total("draft_1_accepted_total") > 0 and server.total("accepted_length") > 1, "accepted drafts")
    metrics = server.metrics()
    told = {name: values for name, values in metrics.items() if name.startswith(("draft", "accepted_length"))}
    (worker,) = {worker for values in told.values() for worker in values}
    assert worker.startswith("decode-")
    value = {name: values[worker] for name, values in told.items()}
    kinds = ("acceptance", "verified_total", "accepted_total")
    places = range(1, most + 1)
    assert value.keys() == {"drafts", "accepted_length", *(f"draft_{place}_{kind}" for place in places for kind in kinds)}
    assert value["drafts"] in range(most + 1) and 1 < value["accepted_length"] <= most + 1
    behind = metrics["decode_tokens_total"][worker]  # no more drafts are right than there are tokens
    for place in places:
        verified, accepted = value[f"draft_{place}_verified_total"], value[f"draft_{place}_accepted_total"]
        assert accepted <= verified <= behind
        assert 0 < value[f"draft_{place}_acceptance"] <= 1 if verified else value[f"draft_{place}_acceptance"] == 0
        behind = accepted
