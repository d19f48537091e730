"""A real system for tests: router and workers as processes on loopback, and a small HTTP client for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from scripts.launch_local import LocalConfig, System

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/data/golden"
TINY = str(GOLDEN / "tiny-bf16/model")
TOKENIZER = str(ROOT / "tests/data/tokenizer")
DEVICE = os.environ.get("PDSERVE_TEST_DEVICE", "cpu")  # "cuda" runs the same tests on a GPU

PATIENCE_S = 60.0  # a machine may be busy with other things; workers report twice a second at best

Result = TypeVar("Result")


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Raises AssertionError when `condition` does not come true."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.1)


@contextmanager
def running(model: str = TINY, *, prefill: int = 1, decode: int = 1, **arguments: str) -> Iterator[Server]:
    """A served `model` on a free port; `arguments` are LocalConfig's (router_args, prefill_args, decode_args). No worker is
    taken for dead because a machine is busy: a test that ends one says after how long that is to be noticed."""
    timeout_s = 300 if DEVICE == "cpu" else 900  # a GPU compiles its kernels first
    if DEVICE == "cuda":  # as many pages as on a CPU: what is free is not a system's alone, tests run several
        for pool in ("prefill_args", "decode_args"):
            arguments[pool] = f"--num-pages 1024 {arguments.get(pool, '')}"
    arguments["router_args"] = f"--dead-after-s {PATIENCE_S} {arguments.get('router_args', '')}"
    config = LocalConfig(model, port=0, prefill=prefill, decode=decode, device=DEVICE, timeout_s=timeout_s, **arguments)
    with System(config) as system:
        yield Server(system.start(), system)


@dataclass
class Reply:
    """What came back: status, body (JSON, or the list of SSE events), and the texts and ids of each choice."""

    status: int
    body: Any
    events: list[Any] = field(default_factory=list)

    def ids(self, choice: int = 0) -> list[int]:
        """The token ids of one choice, of a plain or of a streamed answer (asked for with return_token_ids)."""
        if not self.events:
            return list(self.choice(choice)["token_ids"])
        mine = [c for event in self.events for c in event["choices"] if c["index"] == choice]
        return [token for c in mine for token in c.get("token_ids") or []]

    def choice(self, index: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = next(c for c in self.body["choices"] if c["index"] == index)
        return found


class Server:
    """Speaks HTTP to a running system."""

    def __init__(self, url: str, system: System) -> None:
        self.url = url
        self.system = system

    def run(self, work: Callable[[aiohttp.ClientSession], Awaitable[Result]]) -> Result:
        """`work` with a session, in an event loop of its own."""

        async def main() -> Result:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(self.url, connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
                return await work(session)

        return asyncio.run(main())

    def complete(self, **body: Any) -> Reply:
        return self.run(lambda session: complete(session, **body))

    def complete_all(self, bodies: list[dict[str, Any]]) -> list[Reply]:
        """All at once; answers in order."""

        async def work(session: aiohttp.ClientSession) -> list[Reply]:
            return list(await asyncio.gather(*(complete(session, **body) for body in bodies)))

        return self.run(work)

    def get(self, path: str) -> tuple[int, str]:
        async def work(session: aiohttp.ClientSession) -> tuple[int, str]:
            async with session.get(path) as response:
                return response.status, await response.text()

        return self.run(work)

    def metrics(self) -> dict[str, dict[str, float]]:
        """name -> worker -> value, of plain numbers; the router's own have worker ""."""
        out: dict[str, dict[str, float]] = {}
        for line in self.get("/metrics")[1].splitlines():
            found = re.fullmatch(r"pdserve_(\w+?)(?:\{(.*)\})? (\S+)", line)
            if found and not found[1].endswith("_bucket"):
                worker = re.search(r'worker="([^"]*)"', found[2] or "")
                out.setdefault(found[1], {})[worker[1] if worker else ""] = float(found[3])
        return out

    def total(self, name: str) -> float:
        return sum(self.metrics().get(name, {}).values())

    def wait_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until no worker holds a page, a slot or a request. Raises AssertionError with what is left."""
        deadline_s = time.monotonic() + timeout_s
        while left := self._held():
            assert time.monotonic() < deadline_s, f"still held after {timeout_s} s: {left}"
            time.sleep(0.05)

    def _held(self) -> dict[str, float]:
        metrics = self.metrics()
        held: dict[str, float] = {}
        for what in ("pages", "slots"):
            for worker, total in metrics[f"total_{what}"].items():
                held[f"{what} of {worker}"] = total - metrics[f"free_{what}"][worker]
        for name in ("queued", "running", "samples_in_flight"):
            held |= {f"{name} of {worker}": value for worker, value in metrics.get(name, {}).items()}
        return {name: value for name, value in held.items() if value}


async def complete(session: aiohttp.ClientSession, path: str = "/v1/completions", **body: Any) -> Reply:
    """POSTs `body` (token ids are asked for) and reads the whole answer, plain or streamed."""
    async with session.post(path, json={"return_token_ids": True, **body}) as response:
        if not response.content_type.startswith("text/event-stream"):
            return Reply(response.status, await response.json())
        events = []
        async for line in response.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                events.append(json.loads(line[6:]))
        return Reply(response.status, None, events)
