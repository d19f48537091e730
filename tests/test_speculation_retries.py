"""Drafts of an attempt that is not the first are those of one process that has seen the whole text: the rows of the draft layer
cross again. Real workers over real sockets, and the bundled model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

import decode.sequence
import prefill.worker
from decode.engine import Engine
from decode.sampling import Choice
from decode.speculation import Speculation
from decode.step import Shape
from kvtransfer.transports import Key, open_transport
from kvtransfer.transports.faults import Faults, FaultyTransport
from model.batch import Batch, Row
from model.runner import Runner
from scripts.tiny_data import HELD_OUT_SEED, World
from tests.speculating import say, sequence_of
from tests.system import ROOT
from tests.test_draft_rows import live
from tests.test_speculating_workers import decode_worker
from tests.test_workers import Cluster, Running
from wire.messages import SamplingParams

BUNDLED = ROOT / "bundled/tiny"
DRAFTS = 2
TOLD = 32  # tokens behind a hand-off
STEPS = 10  # of them the first, that are looked at
PAGE_TOKENS = 128
GREEDY = SamplingParams(max_tokens=TOLD, seed=0, temperature=0.0, ignore_eos=True)


@dataclass
class Attempt:
    """What decode had of it when it began, and what it made of its steps: drafts, and how many were accepted."""

    rows: Tensor  # of the draft layer's ring, oldest first
    steps: list[tuple[int, int]] = field(default_factory=list)


@pytest.fixture(scope="module")
def prefiller() -> Runner:
    return Runner(str(BUNDLED), page_tokens=PAGE_TOKENS, num_pages=40, num_slots=6)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> dict[Key, Attempt]:
    """Of all decode engines; every step has as many drafts as it may."""
    found: dict[Key, Attempt] = {}
    launch, collect = Engine.launch, Engine.collect

    def noted(self: Engine, sequences: list[decode.sequence.Sequence], shape: Shape) -> None:
        for each in sequences:
            if each.key not in found:
                found[each.key] = Attempt(live(self._graphs._runner, each.kv.slot, len(each.tokens) - 1).clone())
        launch(self, sequences, shape)

    def counted(self: Engine) -> tuple[list[decode.sequence.Sequence], list[Choice]]:
        sequences, choices = collect(self)
        for sequence, choice in zip(sequences, choices, strict=True):
            found[sequence.key].steps.append((choice.drafts, len(choice.tokens) - 1))
        return sequences, choices

    monkeypatch.setattr(Engine, "launch", noted)
    monkeypatch.setattr(Engine, "collect", counted)
    monkeypatch.setattr(Speculation, "shape", lambda self, rows: self._all[-1])
    return found


@contextmanager
def workers(prefiller: Runner, num_pages: int) -> Iterator[tuple[Cluster, str, Running]]:
    """A cluster of one prefill worker, whose inbox that is, and one decode worker."""
    decoder: Any = Runner(str(BUNDLED), page_tokens=PAGE_TOKENS, num_pages=num_pages, num_slots=4)
    with Cluster() as cluster:
        source = cluster.prefill(prefiller, step_tokens=512, chunk_tokens=100)  # type: ignore[arg-type]
        yield cluster, source.address, decode_worker(cluster, DRAFTS, decoder)


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Held-out texts of so many tokens."""
    world, rng = World(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), HELD_OUT_SEED, 600), Random(11)
    return [world.story_sequence(rng, tokens + 50).ids.tolist()[:tokens] for _ in range(count)]


def alone(model: Runner, texts: Sequence[list[int]]) -> list[Key]:
    """The attempts of one process that has made every row of these texts itself."""
    sequences = [sequence_of(slot, ids, GREEDY) for slot, ids in enumerate(texts, 1)]
    for sequence in sequences:
        slot, ids = sequence.kv.slot, sequence.tokens
        sequence.kv.pages = list(range(6 * slot - 5, 6 * slot + 1))
        batch = Batch.build([Row(ids[:-1], 0, slot, sequence.kv.pages)], PAGE_TOKENS, model.device)
        model.draft_streams(model.forward(batch), torch.tensor(ids[1:]), batch)
    say(model, sequences, lambda step: DRAFTS + 1)
    return [sequence.key for sequence in sequences]


def check_same(attempts: dict[Key, Attempt], keys: Sequence[Key], wanted: Sequence[Key]) -> None:
    """The same rows to the byte, so the very same drafts are accepted in the first steps."""
    for got, expected in ((attempts[key], attempts[other]) for key, other in zip(keys, wanted, strict=True)):
        assert torch.equal(got.rows, expected.rows) and len(got.rows) == 127
        assert got.steps[:STEPS] == expected.steps[:STEPS] and len(expected.steps) >= STEPS
    drafts, accepted = map(sum, zip(*[step for key in wanted for step in attempts[key].steps[:STEPS]], strict=True))
    assert accepted > 0.7 * drafts


def test_acceptance_behind_a_hand_off_that_failed_once(
    prefiller: Runner, attempts: dict[Key, Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes arrive than were sent: the next attempt's do, the draft layer's among them."""
    opened: list[FaultyTransport] = []

    def faulty(*arguments: Any) -> FaultyTransport:
        opened.append(FaultyTransport(open_transport(*arguments), Faults(corrupt=1.0)))
        return opened[-1]

    monkeypatch.setattr(prefill.worker, "open_transport", faulty)
    texts = prompts(3, 150)
    with workers(prefiller, num_pages=40) as (cluster, source, target):
        router = cluster.router
        asked = {router.ask(source, target.address, ids, GREEDY): ids for ids in texts}
        router.until(lambda: {failed.rid for failed in router.failed} == asked.keys(), "the failures")
        assert {failed.cause for failed in router.failed} == {"corrupt"} and not attempts
        opened[0]._faults = Faults()
        for rid, ids in asked.items():
            router.ask(source, target.address, ids, GREEDY, rid=rid, attempt=1)
        router.until(lambda: len(router.finished) == len(asked), "the texts")
    check_same(attempts, [(rid, 1) for rid in asked], alone(prefiller, texts))


def test_acceptance_behind_a_retraction(prefiller: Runner, attempts: dict[Key, Attempt]) -> None:
    """Two texts of which the pool holds one: the newer one goes back through prefill with what it has said, and goes on."""
    params = replace(GREEDY, max_tokens=180)
    texts = prompts(2, 250)
    with workers(prefiller, num_pages=7) as (cluster, source, target):
        router = cluster.router
        asked = {router.ask(source, target.address, ids, params): ids for ids in texts}
        router.until(lambda: len(router.failed) == 1, "a retraction")
        failed = router.failed[0]
        assert failed.cause == "retracted"
        text = asked[failed.rid] + router.ids[failed.rid, 0, 0]
        assert len(text) > 250 + 100
        router.ask(source, target.address, text, params, rid=failed.rid, attempt=1, prompt_tokens=250)
        router.until(lambda: len(router.finished) == 2, "the texts")
    check_same(attempts, [(failed.rid, 1)], alone(prefiller, [text]))
