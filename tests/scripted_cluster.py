"""A router with scripted workers in the test's own event loop, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from router.config import RouterConfig
from router.server import Router
from tests.scripted import Script, ScriptedDecode, ScriptedPrefill

TOKENIZER = str(Path(__file__).parent / "data" / "tokenizer")


@dataclass
class ScriptedCluster:
    router: Router
    http: aiohttp.ClientSession
    prefills: list[ScriptedPrefill] = field(default_factory=list)
    decodes: list[ScriptedDecode] = field(default_factory=list)

    def add_prefill(self, **kwargs: Any) -> ScriptedPrefill:
        worker = ScriptedPrefill(self.router.inbox.address, **kwargs)
        worker.start()
        self.prefills.append(worker)
        return worker

    def add_decode(self, script: Script | None = None, **kwargs: Any) -> ScriptedDecode:
        worker = ScriptedDecode(self.router.inbox.address, script=script, **kwargs)
        worker.start()
        self.decodes.append(worker)
        return worker

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(f"/v1/{path}", json=body) as response:
            return response.status, json.loads(await response.text())

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.post("completions", body)
        assert status == 200, answer
        return answer

    async def chat(self, text: str = "hi", **body: Any) -> dict[str, Any]:
        status, answer = await self.post("chat/completions", {"messages": [{"role": "user", "content": text}], **body})
        assert status == 200, answer
        return answer

    async def refusal(self, path: str, body: Any) -> dict[str, Any]:
        """The error object of a request that must be answered with 400."""
        status, answer = await self.post(path, body)
        assert status == 400, (status, answer)
        error: dict[str, Any] = answer["error"]
        return error

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The parsed events of a streamed answer; "[DONE]" stays text."""
        async with self.http.post(f"/v1/{path}", json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return events(await response.text())

    def count(self, name: str) -> float:
        return self.router.metrics.count(name)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Waits for something that another part of the loop brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def scripted_cluster(
    prefills: int = 1, decodes: int = 1, script: Script | None = None, **config: Any
) -> AsyncIterator[ScriptedCluster]:
    """Serving when it is entered; everything is closed when it is left."""
    # Nobody is taken for dead because a machine is busy: where somebody is to be, the test says so.
    settings = {"port": 0, "tokenizer": TOKENIZER, "model_name": "m", "dead_after_s": 30.0, "recovery_wait_s": 1.0, **config}
    router = Router(RouterConfig(**settings))
    await router.start()
    async with aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(60)) as http:
        cluster = ScriptedCluster(router, http)
        for _ in range(prefills):
            cluster.add_prefill()
        for _ in range(decodes):
            cluster.add_decode(script)
        if prefills and decodes:
            await until(lambda: len(router.dispatcher.pool.workers()) == prefills + decodes)
            await asyncio.wait_for(router.health.ready.wait(), 30)
        try:
            yield cluster
        finally:
            for worker in [*cluster.prefills, *cluster.decodes]:
                await worker.stop()
            await router.stop()
