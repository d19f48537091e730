"""Grants that have expired, and Grants that come again: real workers over the real transport. What is written under one that is
over is refused, its pages come back once, nobody else's are touched, and the next attempt gives the text."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import NoneType
from typing import Any, NamedTuple

import pytest
import torch

import prefill.worker
from kvtransfer.places import handoff_places
from kvtransfer.spans import Spans, num_bytes
from kvtransfer.transports import Event, Key, Transport, Wrote, open_transport
from kvtransfer.transports.faults import Faults, FaultyTransport
from tests.fake_runner import expected_text
from tests.scripted_cluster import until
from tests.test_kv_link import PROMPT, check, linked
from tests.test_workers import GREEDY, PATIENCE_S, Cluster, GatedRunner, LossyLink, Running, prompt
from tests.transfer_rig import wait
from wire.messages import Abort, Grant, Offer, unpack_ids

GRANT_S = 0.5  # for the whole of a request that is to miss it
ARRIVAL_S = 0.5  # the same from Ready to the last byte


class Courier(LossyLink):
    """Carries what a prefill and a decode worker say to each other, and keeps a copy of each Grant. `keeping`: no Grant gets
    through, nor the word that it is over, and decode is told that the request ends in `GRANT_S`."""

    def __init__(self, decode: str, keeping: bool = False) -> None:
        self.keeping = keeping
        self.grants: list[Grant] = []
        super().__init__(decode, NoneType)

    def _pass(self, address: str, message: Any) -> None:
        if isinstance(message, Grant):
            self.grants.append(message)
        if self.keeping and isinstance(message, Offer):
            message = replace(message, timeout_s=GRANT_S)
        if not (self.keeping and isinstance(message, (Grant, Abort))):
            super()._pass(address, message)


class _Kept(NamedTuple):
    peer: str
    key: Key
    spans: Spans
    seal: bytes


class KeepingTransport(FaultyTransport):
    """Keeps the writes of one request's attempts that are in `keeps`, as long as they are; the request is the first that comes.
    Of those in `pretends` it says at once that they are in place."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, Faults())
        self.keeps: set[int] = set()
        self.rid = 0
        self.pretends: set[int] = set()
        self.kept: list[_Kept] = []

    def write(self, peer: str, key: Key, spans: Spans, seal: bytes = b"") -> None:
        if self.keeps and not self.rid:
            self.rid = key[0]
        if key[0] != self.rid or key[1] not in self.keeps:
            super().write(peer, key, spans, seal)
            return
        self.kept.append(_Kept(peer, key, spans, seal))
        if key[1] in self.pretends:
            self._events.append(Wrote(key, len(spans), num_bytes(spans), 0))

    def poll(self) -> list[Event]:
        keeps, kept = set(self.keeps), self.kept  # which the test may change this very moment
        self.kept = [each for each in kept if each.key[1] in keeps]
        for each in kept:
            if each.key[1] not in keeps:
                super().write(*each)
        return super().poll()


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> list[KeepingTransport]:
    """The transports of prefill workers that are started from now on; none keeps anything yet."""
    opened: list[KeepingTransport] = []

    def wrapped(*arguments: Any) -> KeepingTransport:
        opened.append(KeepingTransport(open_transport(*arguments)))
        return opened[-1]

    monkeypatch.setattr(prefill.worker, "open_transport", wrapped)
    return opened


class Decode:
    """What a decode worker has granted, what it has freed, and what its engine has met with."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.freed: Counter[int] = Counter()  # pages
        self.grants: list[Grant] = []
        pool, receiver = worker.scheduler.pool, worker._receiver
        drop_pages, open_window = pool.drop_pages, receiver.open

        def counted(pages: list[int]) -> None:
            self.freed.update(pages)
            drop_pages(pages)

        def noted(*arguments: Any) -> Grant:
            self.grants.append(open_window(*arguments))
            return self.grants[-1]

        pool.drop_pages, receiver.open = counted, noted

    def engine(self, name: str) -> int:
        count: int = self.worker._transport.counters()[name]
        return count


def memory(grant: Grant) -> tuple[int, list[int]]:
    return grant.slot, sorted(unpack_ids(grant.pages))


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_an_expired_grant_is_refused_and_the_next_owner_of_its_pages_is_untouched(path: str) -> None:
    """The Grant is on its way for longer than it is good for: when prefill writes, another request runs in its pages."""
    with Cluster() as cluster:
        router, runner = cluster.router, GatedRunner()
        slow, quick = cluster.prefill(transport=path), cluster.prefill(transport=path)
        running = cluster.decode(runner, transport=path)
        decode = Decode(running.worker)
        with Courier(running.address, keeping=True) as courier:
            late = router.ask(slow.address, courier.address, prompt(30), GREEDY)
            router.until(lambda: len(router.failed) == 1, "the end of the grant's time")
            assert (router.failed[0].rid, router.failed[0].cause, router.failed[0].role) == (late, "timeout", "decode")
            assert wait(lambda: courier.grants, PATIENCE_S)
            expired = courier.grants[0]
            freed_once = Counter(unpack_ids(expired.pages))
            assert wait(lambda: decode.freed == freed_once, PATIENCE_S), decode.freed

            other = router.ask(quick.address, running.address, prompt(30, salt=5), GREEDY)
            router.until(lambda: len(runner.steps) == 2, "the next owner, which now waits at the gate")
            assert memory(decode.grants[-1]) == memory(expired), "another's pages: the test shows nothing"
            before = runner.arena.pages.clone(), runner.arena.slots.clone()
            router.outbox.send(slow.address, expired)
            assert wait(lambda: decode.engine("late_frames") > 0, PATIENCE_S)
            router.until(lambda: router.all_free(slow.address), "prefill's pages")
            assert torch.equal(runner.arena.pages, before[0]) and torch.equal(runner.arena.slots, before[1])
            assert decode.freed == freed_once, "nothing of it is freed once more"
            runner.gate.set()
            router.until(lambda: (other, 0, 0) in router.finished, "the next owner's text")
            assert router.ids[other, 0, 0] == expected_text(prompt(30, salt=5), 12, stop=())

            courier.keeping = False
            router.ask(slow.address, courier.address, prompt(30), GREEDY, rid=late, attempt=1)
            router.until(lambda: (late, 1, 0) in router.finished, "the text under a new attempt")
            assert router.ids[late, 1, 0] == expected_text(prompt(30), 12, stop=())
        assert len(router.failed) == 1 and decode.engine("bad_frames") == 0
        assert router.counter(slow.address, "transfers_broken") == 0, "decode has closed it, and has said why"


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_bytes_behind_the_deadline_of_their_grant_are_refused_and_the_request_is_retried_and_answered(
    monkeypatch: pytest.MonkeyPatch, keeping: list[KeepingTransport], path: str
) -> None:
    """Whole system: prefill's Ready comes and its bytes do not. They come when the next attempt has their pages."""
    monkeypatch.setattr("decode.worker.ARRIVAL_TIMEOUT_S", ARRIVAL_S)

    async def test() -> None:
        async with linked(monkeypatch, path, probe_every_s=1000.0) as system:
            await until(lambda: system.idle)
            transport, decode = keeping[0], Decode(system.workers[1].worker)
            arena = decode.worker._transport._arena
            transport.keeps, transport.pretends = {0, 1}, {0}
            asked = asyncio.create_task(system.ask())
            await until(lambda: {each.key[1] for each in transport.kept} == {0, 1})
            first, second = (grant for grant in decode.grants if grant.rid == transport.rid)  # probes have others
            assert memory(first) == memory(second), "another's pages: the test shows nothing"
            slot, pages = memory(first)
            assert [decode.freed[page] for page in pages] == [1] * len(pages), "each of them has been freed once"
            before = arena.pages[pages], arena.slots[slot].clone()
            transport.keeps = {1}
            await until(lambda: decode.engine("late_frames") > 0)
            assert torch.equal(arena.pages[pages], before[0]) and torch.equal(arena.slots[slot], before[1])
            assert [decode.freed[page] for page in pages] == [1] * len(pages), "and not once more"
            transport.keeps = set()
            reply = await asked
            assert reply.status == 200 and reply.ids() == expected_text(PROMPT, 12, stop=())
            assert [system.count(name) for name in ("failures_transfer", "retries", "requests_failed")] == [1, 1, 0]
            await until(lambda: system.broken == 1)
            assert decode.engine("bad_frames") == 0

    check(test)


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_a_replayed_grant_moves_nothing(keeping: list[KeepingTransport], path: str) -> None:
    """While its hand-off is complete and not in place yet, when that is over, at a worker that has offered nothing, and when
    the request is at its next attempt."""
    with Cluster() as cluster:
        router, source, stranger = cluster.router, cluster.prefill(transport=path), cluster.prefill(transport=path)
        running, transport = cluster.decode(transport=path), keeping[0]
        decode = Decode(running.worker)
        with Courier(running.address) as courier:
            transport.keeps = {0, 1}
            rid = hand_over(cluster, source, courier.address)
            grant = courier.grants[0]
            for _ in range(3):
                router.outbox.send(source.address, grant)
            router.ask(source.address, courier.address, prompt(30), GREEDY, rid=rid)  # so that we know when they were read
            router.until(lambda: router.counter(source.address, "duplicates") == 1, "what was sent behind the three")
            transport.keeps = {1}
            router.until(lambda: (rid, 0, 0) in router.finished, "the text")

            router.outbox.send(source.address, grant)
            router.until(lambda: router.counter(running.address, "stale_readies") == 1, "prefill's last word once more")
            router.outbox.send(stranger.address, grant)
            router.until(lambda: router.counter(stranger.address, "stale_grants") == 1, "the count")

            hand_over(cluster, source, courier.address, rid=rid, attempt=1)
            router.outbox.send(source.address, grant)
            router.until(lambda: router.counter(running.address, "stale_readies") == 2, "and once more")
            transport.keeps = set()
            router.until(lambda: (rid, 1, 0) in router.finished, "the text of the next attempt")
        for attempt in (0, 1):
            assert router.ids[rid, attempt, 0] == expected_text(prompt(30), 12, stop=())
        assert not router.failed
        assert [decode.engine(name) for name in ("late_frames", "bad_frames", "repeated_frames")] == [0, 0, 0]
        each = num_bytes(handoff_places(decode.worker._transport._arena.layout, unpack_ids(grant.pages), grant.slot, 29))
        assert transport.counters()["bulk_bytes_sent"] == 2 * each


def hand_over(cluster: Cluster, source: Running, decode: str, **changes: Any) -> int:
    """Asks for a text, and waits until all of its KV is computed and granted."""
    rid = cluster.router.ask(source.address, decode, prompt(30), GREEDY, **changes)
    worker: Any = source.worker
    sending, key = worker.scheduler.sending, (rid, changes.get("attempt", 0))
    cluster.router.until(lambda: key in sending and sending[key].granted, "the hand-off")
    return rid
