"""Decode and prefill at the widths of DeepSeek-V4-Flash with as many layers as one GPU holds.

``python -m scripts.bench_decode`` makes the weights in memory (FP4 experts, the rest FP8), fills KV memory with finite random
rows, and prints: decode steps beside the bytes they cannot avoid; what a larger configured limit costs, and what it would with
an indexer sized by it; whether a sequence's logits depend on the batch; prefill; where the GPU's time goes; how many tokens KV
memory holds. Figures of vLLM stand beside ours where it was measured with the same widths on the same kind of GPU, in another
run.
"""

from __future__ import annotations

import gc
import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from kernels import backend
from kernels.check import compile_everything, groups, own_target
from kernels.workspace import Workspace
from model.batch import Batch, Row
from model.cache import kv_layout
from model.config import ModelConfig
from model.memory import tokens_in
from model.runner import Runner
from scripts.decode_floor import read_gb_per_s, step_bytes
from scripts.decode_forms import equal_rows
from scripts.decode_peer import DECODE_MS, KV_BYTES, KV_TOKENS, LIMIT_MS, PREFILL_TOKENS_PER_S
from scripts.decode_profile import recorded, summary
from scripts.decode_steps import MOST_STEPS, Steps, fill_memory, indexer_of_the_maximum, last_positions
from scripts.random_checkpoint import RandomCheckpoint, entries_of
from scripts.released_config import RELEASED, with_layers
from wire.options import option, parse, require_least, require_place, require_whole_numbers

SECTIONS = ("decode", "limit", "bits", "prefill", "profile", "capacity")
TINY_CONFIG = Path(__file__).parent.parent / "bundled" / "tiny" / "config.json"
WORKSPACE_BYTES = 2 << 30
RESERVED_BYTES = 20 << 30  # beside weights and KV memory: workspace, a chunk's activations, what graphs and libraries keep
BITS_TOKENS = 4  # of a sequence in a step, in the section of that name
CPU_PAGES = 64
PAGE_TOKENS = 256
WARM_STEPS = 4
CAPACITY_SEQUENCES = (64, 256, 1024)

Figures = dict[str, Any]


@dataclass(frozen=True)
class BenchConfig:
    """Decode and prefill of a model with few layers."""

    layers: str = option("8,28", help="numbers of layers; a model each, one after another")
    batches: str = option("1,8,32,64,128", help="sequences of a decode step")
    contexts: str = option("1024,8192,65536,524288", help="tokens of every sequence")
    limit: int = option(1_048_576, help="tokens of context that decode steps are configured for")
    short_limit: int = option(8192, help="the configured limit that `limit` is compared with")
    limit_context: int = option(4096, help="tokens of context in that comparison")
    prompts: str = option("8192,32768", help="prompt lengths of the prefill section")
    chunk: int = option(8192, help="tokens of a prefill chunk")
    profiled: str = option("1,64", help="batches of the profile section, at the second of `contexts`")
    only: str = option(",".join(SECTIONS), help="sections to run")
    replays: int = option(40, help="graph replays of one timing")
    steps: int = option(44, help="steps with the host in the loop of one timing")
    profiled_steps: int = option(8, help="steps of one profile")
    budget_s: float = option(0.0, help="seconds after which what is left is skipped; 0: none is")
    index_keys: str = option("auto", help="how the indexer's keys are stored, as of a worker", choices=("auto", "mxfp4"))
    widths: str = option("v4-flash", help="tiny: those of bundled/tiny", choices=("v4-flash", "tiny"))
    device: str = option("cuda", help="where to compute", choices=("cpu", "cuda"))
    json: str = option("", help="also write the figures to this file")

    def __post_init__(self) -> None:
        for name in ("layers", "batches", "contexts", "prompts", "profiled"):
            require_whole_numbers(f"--{name}", getattr(self, name))
        for name in ("limit", "short_limit", "limit_context", "chunk"):
            require_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        for name in ("replays", "steps", "profiled_steps"):
            if not 0 < getattr(self, name) <= MOST_STEPS - WARM_STEPS:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: from 1 to {MOST_STEPS - WARM_STEPS}")
        if unknown := sorted(set(self.only.split(",")) - set(SECTIONS)):
            raise ValueError(f"--only {unknown[0]}: the sections are {', '.join(SECTIONS)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch finds no GPU here; --device cpu --widths tiny shows that the program runs")
        require_place("--json", self.json)

    def numbers(self, name: str) -> list[int]:
        return [int(each) for each in getattr(self, name).split(",")]

    def released(self) -> Figures:
        """config.json of the widths that were asked for."""
        tiny: Figures = json.loads(TINY_CONFIG.read_text())
        return tiny if self.widths == "tiny" else RELEASED


@dataclass
class Bench:
    """One model at a time; the figures of all."""

    config: BenchConfig
    read_gb_per_s: float
    begin_s: float = field(default_factory=time.monotonic)
    figures: dict[str, list[Figures]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def run(self, layers: int) -> None:
        """Every section that needs a model of so many layers."""
        sections: dict[str, Callable[[], Iterator[Figures]]] = {
            "decode": self.decode,
            "limit": self.limit,
            "bits": self.bits,
            "prefill": self.prefill,
            "profile": self.profile,
        }
        wanted = [name for name in sections if name in self.config.only.split(",")]
        if not wanted or self._late(f"{layers} layers"):
            return
        self.layers, self.model = layers, ModelConfig.from_json(with_layers(self.config.released(), layers))
        self._build()
        for name in wanted:
            rows = self.figures.setdefault(name, [])
            for row in sections[name]():
                rows.append({"layers": layers} | row)
                show(rows[-1])
        del self.runner, self.workspace
        gc.collect()
        if self.config.device == "cuda":
            torch.cuda.empty_cache()

    def _build(self) -> None:
        begin_s, most = time.monotonic(), max(self.config.numbers("batches") + self.config.numbers("profiled"))
        pages = self._pages(most)
        checkpoint = RandomCheckpoint(self.model, self.config.device)
        self.runner = Runner(
            checkpoint,
            self.config.device,
            page_tokens=PAGE_TOKENS,
            index_keys=self.config.index_keys,
            num_pages=pages,
            num_slots=most + 1,
        )
        self.runner.make_invariant(most)  # as a worker
        fill_memory(self.runner)
        self.workspace = Workspace(WORKSPACE_BYTES, self.config.device) if backend.active().triton else None
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        print(f"{self.layers} layers and {pages} pages made in {time.monotonic() - begin_s:.0f} s", file=sys.stderr)

    def _pages(self, most: int) -> int:
        """As many as the largest step needs, if the memory holds them."""
        layout = kv_layout(self.model, index_keys=self.config.index_keys)
        longest = max(self.config.limit_context, *self.config.numbers("contexts")) + MOST_STEPS
        wanted = 1 + max(most * layout.pages_for(longest), layout.pages_for(max(self.config.numbers("prompts"))))
        if self.config.device == "cpu":
            return min(wanted, CPU_PAGES)
        weights = sum(entry.last for entry in entries_of(self.model).values())
        free = torch.cuda.mem_get_info()[0] - weights - (most + 1) * layout.slot_bytes - RESERVED_BYTES
        return max(2, min(wanted, free // layout.page_bytes))

    def decode(self) -> Iterator[Figures]:
        """Steps by batch and context, all configured for the limit."""
        steps = self._steps(self.config.limit, self.config.numbers("batches"))
        for batch in self.config.numbers("batches"):
            for context in self.config.numbers("contexts"):
                if self._fits(steps, batch, context):
                    yield self._decode_row(steps, batch, context)

    def _decode_row(self, steps: Steps, batch: int, context: int) -> Figures:
        asked = steps.experts_asked()
        times = self._times(steps)
        moved = step_bytes(self.model, (last_positions(batch, context) + 1).tolist(), asked, self.config.index_keys)
        floor_ms, step_floor_ms = (1e-6 * each / self.read_gb_per_s for each in (moved.forward, moved.step))
        peer = DECODE_MS.get((self.layers, batch, context)) if self._comparable() else None
        return {
            "batch": batch,
            "context": context,
            **times,
            "greedy_step_ms": steps.step_ms(self.config.replays, greedy=True),
            "tokens_per_s": 1000.0 * batch / times["wall_ms"],
            "floor_ms": floor_ms,
            "floor_of_forward": floor_ms / times["forward_ms"],
            "floor_of_step": step_floor_ms / times["step_ms"],
            "experts_asked": sum(asked) / len(asked),
            "pages_shared_by": steps.shared,
            "vllm_graph_ms": peer and peer[0],
            "vllm_wall_ms": peer and peer[1],
        }

    def limit(self) -> Iterator[Figures]:
        """The same context, configured for little and for much; and with an indexer that scores all it is configured for."""
        base_ms: dict[int, float] = {}
        for limit, indexer in ((self.config.short_limit, ""), (self.config.limit, ""), (self.config.limit, "ablation")):
            with indexer_of_the_maximum() if indexer else nullcontext():
                steps = self._steps(limit, self.config.numbers("batches"))
                for batch in self.config.numbers("batches"):
                    if self._fits(steps, batch, self.config.limit_context):
                        times = self._times(steps)
                        base_ms.setdefault(batch, times["step_ms"])
                        yield self._limit_row(batch, limit, indexer) | times | {"step_ratio": times["step_ms"] / base_ms[batch]}

    def _limit_row(self, batch: int, limit: int, indexer: str) -> Figures:
        peer = LIMIT_MS.get((self.layers, batch, limit)) if self._comparable() and not indexer else None
        named = {"batch": batch, "context": self.config.limit_context, "limit": limit, "indexer": indexer}
        return named | {"vllm_graph_ms": peer and peer[0], "vllm_wall_ms": peer and peer[1]}

    def bits(self) -> Iterator[Figures]:
        """Whether sequences get the same logits in a smaller batch as in the largest, and with four tokens of each in a step as
        token by token; and how long a step takes, as the engine cuts it and as would suit its number of rows."""
        *few, most = sorted(self.config.numbers("batches"))
        context, base_ms = self.config.numbers("contexts")[:2][-1], dict[int, float]()
        for form in ("by rows", "invariant"):
            with backend.cutting(alike=form == "invariant"):
                steps = self._steps(self.config.limit, [*few, most])
                if not self._fits(steps, most, context):
                    continue
                compared = {batch: self._bits_of(steps, batch, most) for batch in (*few, most)}
                for batch in (batch for batch in compared if self._fits(steps, batch, context)):
                    step_ms = steps.step_ms(self.config.replays)
                    base_ms.setdefault(batch, step_ms)
                    named = {"batch": batch, "context": context, "form": form}
                    yield named | {"step_ms": step_ms, "step_ratio": step_ms / base_ms[batch]} | compared[batch]

    def _bits_of(self, steps: Steps, batch: int, most: int) -> Figures:
        """Of a step that is prepared for `most` sequences."""
        singles = [steps.logits(batch, behind=behind) for behind in range(BITS_TOKENS)]
        figures: Figures = {}
        if batch < most:
            figures |= {
                f"beside {most}: {name}": each for name, each in equal_rows(singles[0], steps.logits(most)[:batch]).items()
            }
        if batch * BITS_TOKENS <= backend.INVARIANT_ROWS:
            found = equal_rows(steps.logits(batch, BITS_TOKENS), torch.stack(singles, 1).flatten(0, 1))
            figures |= {f"{BITS_TOKENS} tokens: {name}": each for name, each in found.items()}
        return figures

    def prefill(self) -> Iterator[Figures]:
        """Prompts alone, and two that queue: then the second one's first chunk starts while the GPU is at the first one's."""
        for length in self.config.numbers("prompts"):
            if self._late(f"{self.layers} layers, prompt of {length}"):
                continue
            if 1 + self.runner.layout.pages_for(length) > len(self.runner.arena.pages):
                self.skipped.append(f"{self.layers} layers, prompt of {length}: too few pages")
                continue
            self._prefill_s(length, 1)  # compiles
            alone_s, queued_s = min(self._prefill_s(length, 1) for _ in range(2)), self._prefill_s(length, 2)
            peer = PREFILL_TOKENS_PER_S.get((self.layers, length)) if self._comparable() else None
            yield {
                "prompt": length,
                "chunk": self.config.chunk,
                "tokens_per_s": length / alone_s,
                "queued_tokens_per_s": 2 * length / queued_s,
                "vllm_tokens_per_s": peer and peer[0],
                "vllm_queued_tokens_per_s": peer and peer[1],
            }

    def _prefill_s(self, length: int, prompts: int) -> float:
        """Seconds from the first chunk of the first prompt until the KV of the last one is there."""
        ids = torch.randint(self.model.vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        pages = list(range(1, 1 + self.runner.layout.pages_for(length)))
        begin_s = time.perf_counter()
        for _ in range(prompts):
            for start in range(0, length, self.config.chunk):
                chunk = ids[start : start + self.config.chunk]
                row = Row(chunk, start, 1, pages[: self.runner.layout.pages_for(start + len(chunk))])
                self.runner.forward(Batch.build([row], PAGE_TOKENS, self.runner.device))
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    def profile(self) -> Iterator[Figures]:
        """Steps with the host in the loop, as the profiler sees them."""
        steps = self._steps(self.config.limit, self.config.numbers("profiled"))
        context = self.config.numbers("contexts")[:2][-1]
        for batch in self.config.numbers("profiled"):
            if not self._fits(steps, batch, context):
                continue
            steps.rewind()
            steps.run(WARM_STEPS)
            count = self.config.profiled_steps
            works = recorded(lambda: steps.run(count), self.runner.device)  # noqa: B023
            try:
                found = asdict(summary(works, count))
            except ValueError as error:
                self.skipped.append(f"{self.layers} layers, profile of batch {batch}: {error}")
                continue
            shares = found.pop("shares")
            yield {"batch": batch, "context": context, **found, **{f"share: {name}": each for name, each in shares.items()}}

    def _steps(self, limit: int, batches: list[int]) -> Steps:
        return Steps(self.runner, self.workspace, limit, batches)

    def _fits(self, steps: Steps, batch: int, context: int) -> bool:
        """Prepares the step, unless there is no time or no memory for it."""
        what = f"{self.layers} layers, batch {batch}, {context} tokens"
        if self._late(what):
            return False
        try:
            steps.prepare(batch, context)
        except ValueError as error:
            self.skipped.append(f"{what}: {error}")
            return False
        return True

    def _times(self, steps: Steps) -> dict[str, float]:
        forward_ms, step_ms = steps.forward_ms(self.config.replays), steps.step_ms(self.config.replays)
        steps.rewind()
        steps.run(WARM_STEPS)
        return {
            "forward_ms": forward_ms,
            "step_ms": step_ms,
            "wall_ms": 1000.0 * steps.run(self.config.steps) / self.config.steps,
        }

    def _comparable(self) -> bool:
        return self.config.widths == "v4-flash" and self.config.device == "cuda"

    def _late(self, what: str) -> bool:
        late = bool(self.config.budget_s) and time.monotonic() - self.begin_s > self.config.budget_s
        if late:
            self.skipped.append(f"{what}: no time left")
        return late


def capacity(config: BenchConfig) -> list[Figures]:
    """Tokens of the whole model in as many bytes as vLLM was measured with, beside the slots of some numbers of sequences."""
    layout, rows = kv_layout(ModelConfig.from_json(config.released()), index_keys=config.index_keys), []
    for sequences in CAPACITY_SEQUENCES:
        tokens = tokens_in(int(KV_BYTES), layout, sequences)
        row = {"kv_gb": KV_BYTES / 1e9, "sequences": sequences, "tokens": tokens}
        row |= {"page_bytes_per_token": layout.page_bytes / layout.page_tokens, "slot_bytes": layout.slot_bytes}
        if config.widths == "v4-flash":
            row |= {f"vllm_tokens_limit_{limit}": tokens for limit, tokens in KV_TOKENS.items()}
        rows.append(row)
    return rows


def show(row: Figures) -> None:
    """As it comes: a run that is cut off has said what it found."""
    print(", ".join(f"{name} {cell(value)}" for name, value in row.items() if value is not None), file=sys.stderr, flush=True)


def table(rows: list[Figures]) -> str:
    """Markdown; a column for whatever any row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine(config: BenchConfig) -> str:
    where = torch.cuda.get_device_name() if config.device == "cuda" else f"CPU ({platform.machine()})"
    return f"{where}, torch {torch.__version__}, triton {triton.__version__}, widths {config.widths}"


def run(config: BenchConfig) -> Figures:
    if config.device == "cuda":
        backend.choose(torch.device("cuda"))
        compile_everything(own_target(), groups())  # in parallel; most of what is measured is found ready then
    bench = Bench(config, read_gb_per_s(torch.device(config.device)))
    for layers in config.numbers("layers"):
        bench.run(layers)
    if "capacity" in config.only.split(","):
        bench.figures["capacity"] = capacity(config)
    return {"machine": machine(config), "read_gb_per_s": bench.read_gb_per_s, **bench.figures, "skipped": bench.skipped}


def main() -> int:
    config = parse(BenchConfig, "bench_decode")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    figures = run(config)
    print(f"{figures['machine']}; reading {figures['read_gb_per_s']:.0f} GB/s; vLLM's figures are of another run")
    for section in SECTIONS:
        if figures.get(section):
            print(f"\n{section}\n\n{table(figures[section])}")
    for each in figures["skipped"]:
        print(f"skipped: {each}")
    if config.json:
        Path(config.json).write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
