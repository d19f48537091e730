"""A whole system whose KV goes over a link that changes bytes, or stands still: a router over HTTP, real workers with their
bulk engines, a runner without weights whose text shows every byte that is wrong."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import decode.worker
from decode.config import DecodeConfig
from kvtransfer.transports import BulkOptions
from kvtransfer.transports.bulk import BulkTransport
from kvtransfer.transports.unpacker import Arrival
from prefill.config import PrefillConfig
from prefill.worker import Worker as PrefillWorker
from router.config import RouterConfig
from router.server import Router
from tests.fake_runner import FakeRunner, expected_text
from tests.scripted_cluster import until
from tests.system import Reply, complete
from tests.test_workers import Running, prompt, sizes
from tests.transfer_rig import Proxy, ThreadTransport
from wire.curve import ClusterKey
from wire.sockets import open_context

PROMPT = prompt(30)
MARKER = array("q", PROMPT[8:11]).tobytes()  # of KV: a page of the fake runner holds its tokens
HEALED_S = 10.0  # from a link's healing to the answer to a request that comes then
ENOUGH_S = 30.0  # for the rest


class Tamper:
    """Changes a byte of KV, `left` times."""

    def __init__(self, left: float) -> None:
        self.left = left

    def marked(self, data: bytes) -> bytes:
        """Of what is sent in the clear."""
        if self.left <= 0 or MARKER not in data:
            return data
        self.left -= 1
        return data.replace(MARKER, MARKER[:-1] + b"\x01")

    def last(self, data: bytes) -> bytes:
        """Of what is sealed: a chunk ends with its tag."""
        at = data.rfind(b"pdK2")
        if self.left <= 0 or at < 0 or data[at + 4] & 2:  # a probe is for nobody
            return data
        self.left -= 1
        return data[:-1] + bytes([data[-1] ^ 1])

    def landed(self, transport: ThreadTransport, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of what has been copied, or read, into the arena."""
        memory = transport.inner._inbound._memory
        scatter, came = memory.scatter, Arrival.came

        def spoil(piece: Any) -> None:
            if self.left > 0:
                self.left -= 1
                piece[len(piece) // 2] ^= 4

        def faulty(places: Any, parts: Any, look: Any) -> Any:
            def spoilt(place: Any) -> Any:
                show = look(place)

                def seen(piece: Any) -> None:
                    spoil(piece)
                    show(piece)

                return seen

            return scatter(places, parts, spoilt)

        def faulty_read(arrival: Arrival, view: Any) -> None:
            spoil(view)
            came(arrival, view)

        memory.scatter = faulty
        monkeypatch.setattr(Arrival, "came", faulty_read)


@dataclass
class Linked:
    """One prefill and one decode worker, a proxy between their engines, and the router before them."""

    router: Router
    http: aiohttp.ClientSession
    workers: list[Running]
    proxy: Proxy

    async def ask(self, **changes: Any) -> Reply:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **changes}
        return await complete(self.http, **body)

    def count(self, name: str) -> float:
        return self.router.metrics.count(name)

    @property
    def broken(self) -> float:
        """Hand-offs, as the workers say."""
        workers = self.router.dispatcher.pool.workers()
        return sum(float(worker.metrics[0].get("transfers_broken", 0)) for worker in workers)

    def engines(self) -> list[int]:
        transports: list[Any] = [running.worker._transport for running in self.workers]
        return [os.getpid() if each._process is None else each._process.pid for each in transports]

    @property
    def idle(self) -> bool:
        """Whether every worker has said that it holds nothing."""
        loads = [worker.load for worker in self.router.dispatcher.pool.workers()]
        free = [load["free_pages"] == load["total_pages"] and load["free_slots"] == load["total_slots"] for load in loads]
        return len(loads) == 2 and all(free) and not any(load["queued"] or load["running"] for load in loads)


@asynccontextmanager
async def linked(
    monkeypatch: pytest.MonkeyPatch, path: str, tamper: Tamper | None = None, way: str = "", key: str = "", **options: Any
) -> AsyncIterator[Linked]:
    proxies: list[Proxy] = []

    def behind_proxy(arena: Any, host: str, advertise: str, options: BulkOptions, password: bytes) -> BulkTransport:
        kind = ThreadTransport if way == "landed" else BulkTransport
        transport = kind(arena, host, advertise, options, password)
        change = getattr(tamper, way) if way in ("marked", "last") else lambda data: data
        proxies.append(Proxy(transport.address(), change))
        transport._address = proxies[0].address
        if way == "landed" and tamper is not None:
            assert isinstance(transport, ThreadTransport)
            tamper.landed(transport, monkeypatch)
        return transport

    monkeypatch.setattr(decode.worker, "open_transport", behind_proxy)
    options = {"dead_after_s": 60.0, **options}  # a retry must have one reason
    router = Router(RouterConfig(port=0, model_name="m", cluster_key=key, **options))
    await router.start()
    context, runners = open_context(key), [FakeRunner(), FakeRunner()]
    common: dict[str, Any] = {"model": "fake", "router": router.inbox.address, "transport": path, "cluster_key": key}
    common |= sizes(runners[0])
    workers = [
        Running(PrefillWorker(PrefillConfig(**common, step_tokens=16, chunk_tokens=8), runners[0], context)),  # type: ignore[arg-type]
        Running(decode.worker.Worker(DecodeConfig(**common), runners[1], context)),  # type: ignore[arg-type]
    ]
    async with aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(300)) as http:
        system = Linked(router, http, workers, proxies[0])
        try:
            await asyncio.wait_for(router.health.ready.wait(), 60)
            yield system
            await until(lambda: system.idle)
        finally:
            await router.stop()
            for worker in workers:
                await asyncio.to_thread(worker.stop)
            context.destroy(linger=0)
            proxies[0].close()


def check(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize(("path", "way"), [("zeromq", "marked"), ("zeromq", "last"), ("zeromq", "landed"), ("shm", "landed")])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_flipped_byte_is_found_sent_once_more_and_never_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, path: str, way: str, stream: bool
) -> None:
    """`last` runs with a cluster key: there it is the seal that finds it, and the sender that hears of it."""
    tamper, key = Tamper(0), ""
    if way == "last":
        key = str(tmp_path / "key")
        ClusterKey.generate().write(key)

    async def test() -> None:
        async with linked(monkeypatch, path, tamper, way, key, probe_every_s=1000.0) as system:
            tamper.left = 1
            reply = await system.ask(stream=stream)
            assert reply.status == 200 and reply.ids() == expected_text(PROMPT, 12, stop=())
            assert tamper.left == 0, "nothing was changed: the test shows nothing"
            assert [system.count(name) for name in ("failures_corrupt", "retries", "requests_failed")] == [1, 1, 0]
            await until(lambda: system.broken == 1)

            tamper.left = float("inf")
            reply = await system.ask(stream=stream)
            assert reply.status == 500 and "token_ids" not in str(reply.body)
            found = "other bytes than were sealed" if way == "last" else "digest"
            assert "after 2 attempts: KV transfer failed" in reply.body["error"]["message"] and found in caplog.text
            assert [system.count(name) for name in ("retries", "requests_failed")] == [2, 1]
            assert system.count("failures_corrupt") >= 3  # a probe's may be among them

            tamper.left = 0
            reply = await system.ask(stream=stream)
            assert reply.status == 200 and reply.ids() == expected_text(PROMPT, 12, stop=())

    check(test)


def test_a_link_that_stood_still_serves_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For 2 s, which a request outlives, and for 60 s, which it does not. The first request behind it is answered within ten
    seconds, and nobody restarts anything."""

    async def test() -> None:
        async with linked(monkeypatch, "zeromq") as system:
            before = (system.engines(), [worker.name for worker in system.router.dispatcher.pool.workers()])
            for stalled_s in (2, 60):
                system.proxy.open.clear()
                begin_s = time.monotonic()
                waiting = asyncio.create_task(system.ask())
                await asyncio.sleep(stalled_s)
                assert waiting.done() == (stalled_s == 60)
                system.proxy.open.set()
                healed_s = time.monotonic()
                reply = await system.ask()
                assert reply.status == 200 and reply.ids() == expected_text(PROMPT, 12, stop=())
                assert time.monotonic() - healed_s < HEALED_S
                reply = await waiting
                if stalled_s == 60:
                    assert reply.status == 500 and "KV transfer failed" in reply.body["error"]["message"]
                    assert "took nothing for" in caplog.text
                else:
                    assert reply.status == 200 and reply.ids() == expected_text(PROMPT, 12, stop=())
                    assert system.count("retries") == 0
                assert time.monotonic() - begin_s < stalled_s + ENOUGH_S
                await until(lambda: not system.router.health.reason(), ENOUGH_S)
            assert before == (system.engines(), [worker.name for worker in system.router.dispatcher.pool.workers()])

    check(test)
