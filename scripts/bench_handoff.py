"""From the last chunk of a prompt to decode's first step: a timeline of requests through real processes.

``python -m scripts.bench_handoff`` starts router, prefill and decode worker, sends one prompt after another, and reads from
what the processes say of it (--timeline) where its time went: chunks, KV on the way, Ready, decode's first step, the first
token at the client. Start-up is timed as well; a second start finds the kernels compiled.

``--layers N`` makes a checkpoint of random weights with the released widths first (3.5 GB a layer and 2.1 GB), in a
temporary folder, or in --model, where it is left and found again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from model.config import ModelConfig
from scripts.bench_serving import random_prompt
from scripts.handoff_timeline import LIMIT, Way, logged, way_of
from scripts.launch_local import BUNDLED_MODEL, LaunchError, LocalConfig, System
from scripts.random_checkpoint import write_checkpoint
from scripts.released_config import RELEASED, with_layers
from wire.options import option, parse, require_least, require_place, require_whole_numbers

LIMIT_TOKENS = 32_768  # the prompts that the limit is set for, on a GPU
START_LIMIT_S = 60.0  # of a worker that finds its kernels compiled
LOG_WAIT_S = 30.0  # for the last lines of a request
TOLD = re.compile(r"(?:compiled|started once|captured|KV memory|KV to)\b")  # what else of a worker's log is shown

Figures = dict[str, Any]


@dataclass(frozen=True)
class BenchConfig:
    """Timelines of hand-offs between real processes, and what a start takes."""

    model: str = option("", help="checkpoint folder; empty: the small model that ships with the project")
    layers: int = option(0, help="make a random checkpoint with so many layers of the released widths, 3 at least; 0: none")
    widths: str = option("v4-flash", help="of that checkpoint; tiny: those of bundled/tiny", choices=("v4-flash", "tiny"))
    device: str = option("cpu", help="where the workers compute", choices=("cpu", "cuda"))
    prompts: str = option("8192,32768", help="prompt lengths")
    output_tokens: int = option(64, help="tokens per answer")
    repeats: int = option(5, help="requests of each length, behind one that is not counted")
    chunk_tokens: int = option(0, help="tokens of a prefill chunk; 0: the worker's own choice")
    transport: str = option("auto", help="how KV travels; several with commas between them: one after another")
    starts: int = option(2, help="starts of the whole system at least; the first may compile")
    router_args: str = option("", help="further flags for the router, in one string, with =: --router-args='--timeline'")
    prefill_args: str = option("", help="further flags for the prefill worker, in one string, with =")
    decode_args: str = option("", help="further flags for the decode worker, in one string, with =")
    json: str = option("", help="also write the figures to this file")

    def __post_init__(self) -> None:
        require_whole_numbers("--prompts", self.prompts, least=2)
        for name, least in (("output_tokens", 2), ("repeats", 1), ("layers", 0), ("starts", 1)):
            require_least(f"--{name.replace('_', '-')}", getattr(self, name), least)
        if self.layers in (1, 2):
            raise ValueError(f"--layers {self.layers}: the first two layers have no pages to hand off; give 3 at least")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch finds no GPU here")
        require_place("--json", self.json)

    @property
    def lengths(self) -> list[int]:
        return [int(each) for each in self.prompts.split(",")]

    @property
    def transports(self) -> list[str]:
        """Of each start: what is left of `starts` comes first."""
        named = self.transport.split(",")
        return [named[0]] * (self.starts - len(named)) + named

    def local(self, model: Path, transport: str) -> LocalConfig:
        flags = f"--timeline --transport {transport} "
        chunk = f"--chunk-tokens {self.chunk_tokens} --step-tokens {self.chunk_tokens} " if self.chunk_tokens else ""
        return LocalConfig(
            str(model),
            port=0,
            device=self.device,
            router_args=f"--timeline {self.router_args}",
            prefill_args=flags + chunk + self.prefill_args,
            decode_args=flags + self.decode_args,
        )


@dataclass
class Answer:
    """What a client sees; seconds of `time.monotonic`."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


async def ask(url: str, prompt: list[int], output_tokens: int) -> Answer:
    """One streamed answer, greedy."""
    body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"return_token_ids": True})
    async with aiohttp.ClientSession(url) as session:
        answer = Answer(time.monotonic())
        async with session.post("/v1/completions", data=data, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise LaunchError(f"the server answered {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    ids = [token for choice in json.loads(line[6:])["choices"] for token in choice.get("token_ids") or ()]
                    answer.token_s += [time.monotonic()] * len(ids)
                    answer.ids += ids
    if len(answer.ids) != output_tokens:
        raise LaunchError(f"{output_tokens} tokens were asked for, {len(answer.ids)} came")
    return answer


def follow(system: System, url: str, prompt: list[int], output_tokens: int) -> tuple[Way, list[int]]:
    """Sends a prompt; its way and the ids of its answer."""
    answer = asyncio.run(ask(url, prompt, output_tokens))
    deadline_s = time.monotonic() + LOG_WAIT_S
    while time.monotonic() < deadline_s:
        way = way_of(logged(child.log for child in system.children), len(prompt), answer.sent_s, answer.token_s)
        if way is not None:
            return way, answer.ids
        time.sleep(0.02)
    raise LaunchError(f"the timeline of a request is not in the logs after {LOG_WAIT_S:g} s; they are in {system.log_dir}")


def measure(
    system: System, url: str, config: BenchConfig, vocabulary: int, texts: dict[int, list[int]]
) -> Iterator[tuple[Figures, Way]]:
    """Of each prompt length a row, and the way of the request in the middle. texts: the first answer to each, over whatever
    path and after whatever start."""
    for length in config.lengths:
        prompt = random_prompt(random.Random(length), length, vocabulary)
        first, ids = follow(system, url, prompt, config.output_tokens)
        text = texts.setdefault(length, ids)
        runs = [follow(system, url, prompt, config.output_tokens) for _ in range(config.repeats)]
        ways = sorted((way for way, _ in runs), key=lambda way: way.ratio)
        rows = [way.figures() for way in ways]
        limited = config.device == "cuda" and length >= LIMIT_TOKENS
        yield (
            {
                "prompt": length,
                **{name: statistics.median(row[name] for row in rows) for name in rows[0]},
                "worst_ratio": ways[-1].ratio,
                "limit": LIMIT if limited else None,
                "first_ttft_ms": 1e3 * first.ttft_s,
                "same_text": ids == text and all(each == text for _, each in runs),
            },
            ways[len(ways) // 2],
        )


def start_row(number: int, transport: str, system: System, ready_s: float, limited: bool) -> Figures:
    """From the start of each process until it served, and of the first one until a request had passed. The limit is a
    worker's."""
    router, prefill, decode = system.children
    return {
        "start": number,
        "transport": transport,
        "router_s": router.seconds_until("inbox "),
        "prefill_s": prefill.seconds_until("serving "),
        "decode_s": decode.seconds_until("serving "),
        "ready_s": ready_s,
        "limit_s": START_LIMIT_S if limited else None,
    }


def told(system: System) -> list[str]:
    """What the workers' logs say of compiling, capturing, memory and paths."""
    lines = ((child.name, line) for child in system.children for line in child.log.read_text(errors="replace").splitlines())
    return [f"{name}: {line.split(' INFO ', 1)[-1]}" for name, line in lines if " INFO " in line and TOLD.search(line)]


@contextmanager
def checkpoint(config: BenchConfig) -> Iterator[Path]:
    """The folder to serve, made first where that was asked for."""
    if not config.layers:
        yield Path(config.model) if config.model else BUNDLED_MODEL
        return
    with tempfile.TemporaryDirectory(prefix="pdserve-model-") as temporary:
        folder = Path(config.model or temporary)
        if not (folder / "config.json").exists():
            tiny = json.loads((BUNDLED_MODEL / "config.json").read_text())
            begin_s = time.monotonic()
            write_checkpoint(with_layers(tiny if config.widths == "tiny" else RELEASED, config.layers), folder, config.device)
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"{size / 1e9:.1f} GB of weights written in {time.monotonic() - begin_s:.1f} s", file=sys.stderr, flush=True)
            gc.collect()
            if config.device == "cuda":
                torch.cuda.empty_cache()  # the workers measure what is free
        yield folder


def run(config: BenchConfig) -> Figures:
    """Shows what it finds as it comes. Raises LaunchError, or ValueError for prompts that the model does not take
    and for a request whose way cannot be told."""
    figures: Figures = {"machine": machine(config), "starts": [], "handoffs": [], "timelines": []}
    texts: dict[int, list[int]] = {}
    with checkpoint(config) as model:
        served = ModelConfig.load(model)
        prompt, output, most = max(config.lengths), config.output_tokens, served.max_position_embeddings
        if prompt + output > most:
            raise ValueError(f"--prompts {prompt} with --output-tokens {output}: the model takes {most} tokens together")
        for number, transport in enumerate(config.transports, 1):
            limited = config.device == "cuda" and number > 1
            with System(config.local(model, transport)) as system:
                begin_s = time.monotonic()
                url = system.start()
                figures["starts"].append(start_row(number, transport, system, time.monotonic() - begin_s, limited))
                show(figures["starts"][-1])
                if number > len(config.transports) - len(config.transport.split(",")):
                    for row, way in measure(system, url, config, served.vocab_size, texts):
                        figures["handoffs"].append({"transport": transport} | row)
                        figures["timelines"].append({"transport": transport, "prompt": row["prompt"], "lines": way.lines()})
                        show(figures["handoffs"][-1])
                print("\n".join(told(system)), file=sys.stderr, flush=True)
                if missed(figures):
                    system.keep_logs()
    return figures


def machine(config: BenchConfig) -> str:
    where = torch.cuda.get_device_name() if config.device == "cuda" else f"CPU ({platform.machine()})"
    model = f"{config.layers} layers of {config.widths} widths" if config.layers else config.model or "the bundled model"
    return f"{where}, torch {torch.__version__}, {model}"


def show(row: Figures) -> None:
    """As it comes: a run that is cut off has said what it found."""
    print(", ".join(f"{name} {cell(value)}" for name, value in row.items() if value is not None), file=sys.stderr, flush=True)


def table(rows: list[Figures]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(map(cell, row.values())) + " |" for row in rows)])


def cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    config = parse(BenchConfig, "bench_handoff")
    try:
        figures = run(config)
    except (LaunchError, ValueError) as error:
        print(f"bench_handoff: {error}", file=sys.stderr)
        return 2
    print(f"{figures['machine']}\n\nstarts\n\n{table(figures['starts'])}")
    for each in figures["timelines"]:
        print(f"\n{each['transport']}, {each['prompt']} tokens, the request in the middle\n")
        print("\n".join(each["lines"]))
    print(f"\nmedians; ratio: last chunk's end to decode's first step, of the prefill time\n\n{table(figures['handoffs'])}")
    if config.json:
        Path(config.json).write_text(json.dumps(figures, indent=1))
    return int(bool(missed(figures)))


def missed(figures: Figures) -> list[Figures]:
    """The rows that are over their limit, and answers that were not always the same."""
    slow = [row for row in figures["starts"] if row["limit_s"] and max(row["prefill_s"], row["decode_s"]) > row["limit_s"]]
    late = [row for row in figures["handoffs"] if row["limit"] and row["ratio"] > row["limit"]]
    return [*slow, *late, *(row for row in figures["handoffs"] if not row["same_text"])]


if __name__ == "__main__":
    sys.exit(main())
