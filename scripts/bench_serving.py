"""What the whole system costs: time per output token through HTTP against the bare decode loop in one process.

``python -m scripts.bench_serving`` starts a system of its own (or uses --url), runs the two in turn, many short rounds,
and prints the lower quartile of each side's token times and their ratio (a shared machine is slow for seconds at a time:
the lower quartile of many turns is what the work itself takes); then an open-loop load: TTFT, time between tokens, tokens
per second.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import aiohttp
import torch

from model.batch import Batch, Row
from model.runner import Runner
from scripts.launch_local import ROOT, LaunchError, LocalConfig, System
from wire.options import option, parse, require_least, require_place, require_whole_numbers

SMALLEST_MODEL = str(ROOT / "tests/data/golden/tiny-bf16/model")  # the less the model costs, the more everything else shows
LIMITS = {1: 1.25, 16: 1.15}  # batch -> what the ratio may be


@dataclass(frozen=True)
class BenchConfig:
    """Serving overhead and an open-loop load."""

    model: str = option(SMALLEST_MODEL, help="checkpoint folder")
    url: str = option("", help="a server that runs already (then no bare loop and no ratio); empty: start one")
    batches: str = option("1,16", help="batch sizes of the overhead measurement")
    rounds: int = option(12, help="how often the two sides take turns")
    prompt_tokens: int = option(64, help="prompt length")
    output_tokens: int = option(48, help="tokens per answer")
    rates: str = option("1,2", help="requests per second of the open-loop load")
    load_s: float = option(15.0, help="seconds of load per rate; 0: none")
    device: str = option("cpu", help="where the workers and the bare loop compute", choices=("cpu", "cuda"))
    json: str = option("", help="also write the figures to this file")

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url is {self.url!r}; it must begin with http:// or https://")
        require_whole_numbers("--batches", self.batches)
        for name, least in (("rounds", 1), ("prompt_tokens", 2), ("output_tokens", 2), ("load_s", 0)):
            require_least(f"--{name.replace('_', '-')}", getattr(self, name), least)
        if not all(_is_rate(each) for each in self.rates.split(",")):
            raise ValueError(f"--rates is {self.rates!r}; it must be positive numbers with commas between them")
        require_place("--json", self.json)


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


class BareLoop:
    """The decode loop and nothing else: batch, forward, logits, argmax."""

    def __init__(self, config: BenchConfig, max_batch: int) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.pages_each = -(-(config.prompt_tokens + config.output_tokens + 1) // 256)
        self.runner = Runner(config.model, config.device, num_pages=max_batch * self.pages_each + 1, num_slots=max_batch + 1)

    def step_seconds(self, prompts: list[list[int]]) -> list[float]:
        """The times of `output_tokens` steps for these prompts together."""
        tables = [list(range(1 + i * self.pages_each, 1 + (i + 1) * self.pages_each)) for i in range(len(prompts))]
        for i, prompt in enumerate(prompts):
            self._forward([Row(prompt[:-1], 0, i + 1, tables[i])])
        last = [prompt[-1] for prompt in prompts]
        times = []
        for step in range(self.config.output_tokens):
            begin_s = time.perf_counter()
            rows = [Row([token], len(prompts[i]) - 1 + step, i + 1, tables[i]) for i, token in enumerate(last)]
            last = self.runner.logits(self._forward(rows)).argmax(-1).tolist()
            times.append(time.perf_counter() - begin_s)
        return times

    def _forward(self, rows: list[Row]) -> torch.Tensor:
        return self.runner.forward(Batch.build(rows, self.runner.layout.page_tokens, self.config.device))


async def stream(session: aiohttp.ClientSession, prompt: list[int], output_tokens: int) -> list[float]:
    """Arrival times of the tokens of one streamed answer, and before them the time of sending."""
    body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    times = [time.perf_counter()]
    async with session.post("/v1/completions", json={**body, "return_token_ids": True}) as response:
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                times += [time.perf_counter()] * sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
    return times


async def reach(url: str) -> None:
    """Raises aiohttp.ClientError when nobody answers there."""
    async with aiohttp.ClientSession(url) as session, session.get("/v1/models"):
        pass


async def token_seconds(url: str, prompts: list[list[int]], output_tokens: int) -> list[float]:
    """The times between tokens of streams that are sent at once, while all of them run."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        runs = await asyncio.gather(*(stream(session, prompt, output_tokens) for prompt in prompts))
    begin_s, end_s = max(times[1] for times in runs), min(times[-1] for times in runs)
    return [b - a for times in runs for a, b in pairwise(times[1:]) if begin_s <= a and b <= end_s]


async def open_loop(url: str, config: BenchConfig, rate: float, vocabulary: int) -> dict[str, float]:
    """Poisson arrivals at `rate` for `load_s`, whatever the server does; latencies in milliseconds."""
    generator = random.Random(int(rate * 1000))
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks, begin_s, due_s = [], time.perf_counter(), 0.0
        while (due_s := due_s + generator.expovariate(rate)) < config.load_s:
            await asyncio.sleep(max(0.0, begin_s + due_s - time.perf_counter()))
            prompt = random_prompt(generator, config.prompt_tokens, vocabulary)
            tasks.append(asyncio.create_task(stream(session, prompt, config.output_tokens)))
        runs = await asyncio.gather(*tasks)
        wall_s = time.perf_counter() - begin_s
    first = [times[1] - times[0] for times in runs]
    gaps = [b - a for times in runs for a, b in pairwise(times[1:])]
    return {
        "rate_per_s": rate,
        "requests": len(runs),
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p99_ms": percentile(first, 99),
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
        "tokens_per_s": sum(len(times) - 1 for times in runs) / wall_s,
    }


def percentile(seconds: list[float], percent: int) -> float:
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def random_prompt(generator: random.Random, length: int, vocabulary: int) -> list[int]:
    return [generator.randrange(2, vocabulary) for _ in range(length)]


def overhead(url: str, config: BenchConfig) -> list[dict[str, float]]:
    """One row a batch size, from all token times of all rounds."""
    batches = [int(text) for text in config.batches.split(",")]
    bare = BareLoop(config, max(batches))
    generator = random.Random(1)
    rows = []
    for batch in batches:
        prompts = [random_prompt(generator, config.prompt_tokens, bare.runner.config.vocab_size) for _ in range(batch)]
        alone: list[float] = []
        served: list[float] = []
        for _ in range(config.rounds):
            served += asyncio.run(token_seconds(url, prompts, config.output_tokens))
            alone += bare.step_seconds(prompts)
        bare_ms, served_ms = percentile(alone, 25), percentile(served, 25)
        row = {"batch": batch, "bare_ms": bare_ms, "served_ms": served_ms, "ratio": served_ms / bare_ms}
        row |= {"ratio_of_medians": percentile(served, 50) / percentile(alone, 50), "limit": LIMITS.get(batch, float("nan"))}
        rows.append(row)
    return rows


def table(rows: list[dict[str, float]]) -> str:
    names = list(rows[0])
    lines = [" | ".join(f"{name:>16}" for name in names)]
    lines += [" | ".join(f"{row[name]:>16.4g}" for name in names) for row in rows]
    return "\n".join(lines)


def main() -> int:
    config = parse(BenchConfig, "bench_serving")
    figures: dict[str, list[dict[str, float]]] = {}
    slow = False
    try:
        with ExitStack() as opened:
            url = config.url
            if url:
                asyncio.run(reach(url))
            else:
                system = opened.enter_context(System(LocalConfig(model=config.model, port=0, device=config.device)))
                url = system.start()
                figures["overhead"] = overhead(url, config)
                print("time per output token, whole system against the bare decode loop in one process")
                print(table(figures["overhead"]))
                slow = any(row["ratio"] > row["limit"] for row in figures["overhead"])
                if slow:
                    system.keep_logs()
            if config.load_s:
                rates = [float(text) for text in config.rates.split(",")]
                vocabulary = json.loads(Path(config.model, "config.json").read_text())["vocab_size"]
                figures["load"] = [asyncio.run(open_loop(url, config, rate, vocabulary)) for rate in rates]
                print(f"\nopen loop, {config.prompt_tokens} + {config.output_tokens} tokens")
                print(table(figures["load"]))
    except (LaunchError, aiohttp.ClientError) as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 2
    if config.json:
        Path(config.json).write_text(json.dumps(figures, indent=1))
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
