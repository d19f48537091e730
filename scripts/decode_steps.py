"""Decode steps over KV that nobody computed: what scripts/bench_decode.py times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import experts, workspace
from kernels.indexer import Entries, select_entries
from kernels.ragged import Ragged
from kernels.rows import IndexRow, planes
from kernels.sample import Parameters, noise_stream, sample
from kernels.timing import capture, repeated_us
from kernels.workspace import Workspace
from model import indexer, moe
from model.batch import TABLE_STEP, Batch
from model.cache import index_row, kv_row
from model.runner import Runner

FILLED_AT_ONCE = 256  # pages or slots
FINITE = 0xBF  # bytes without bit 6 make no infinity, no NaN and nothing above 2, in e4m3, bf16 and float32
UE8M0_ONE = 127
STAGGER = 128  # tokens by which sequences of a step differ, so that as many close a window as in real batches
FIRST_BEHIND = 4  # the first sequence closes a CSA window, but not an HCA window, which is rare
ROUNDS = 5


def fill_memory(runner: Runner, seed: int = 1) -> None:
    """Finite random rows in every page and slot, and scales of 1: what attention and indexer read is then as good as any."""
    arena, config = runner.arena, runner.config
    generator = torch.Generator(arena.pages.device).manual_seed(seed)
    for memory in (arena.pages, arena.slots):
        for part in torch.split(memory, FILLED_AT_ONCE):
            part.random_(0, 256, generator=generator).bitwise_and_(FINITE)
    entry, key = kv_row(config, runner.kv_dtype), index_row(config, runner.kv_dtype)
    for cache in runner.main_caches:
        cache.window[..., entry.value_bytes : entry.row_bytes] = UE8M0_ONE
        if cache.entries is not None:
            planes(cache.entries, entry)[1].fill_(UE8M0_ONE)
        if cache.index_entries is not None:
            planes(cache.index_entries, key)[1].view(torch.float32).fill_(1.0)


def page_tables(batch: int, pages_each: int, num_pages: int, seed: int = 1) -> Tensor:
    """int64 [batch, pages_each] of pages 1 .. num_pages - 1 in random order. The last page of a sequence, which a step writes
    to, is its own; the others are too while there are enough, and otherwise belong to equally many sequences each. Raises
    ValueError when there are not enough even so."""
    others, spare = batch * (pages_each - 1), num_pages - 1 - batch
    if spare < min(others, 1):
        raise ValueError(f"{num_pages} pages are too few for {batch} sequences")
    generator = torch.Generator().manual_seed(seed)
    last = 1 + torch.arange(batch)
    before = 1 + batch + torch.randperm(others, generator=generator) % max(spare, 1)
    return torch.cat((before.view(batch, -1), last[:, None]), 1)


def sharing(batch: int, pages_each: int, num_pages: int) -> float:
    """How many sequences a page belongs to in `page_tables`, apart from last ones; 1 where memory is enough."""
    return max(1.0, batch * (pages_each - 1) / max(num_pages - 1 - batch, 1))


def last_positions(batch: int, context: int) -> Tensor:
    """int64 [batch]: where each sequence's new token goes; the longest has `context` tokens then, or a few less."""
    behind = (torch.arange(batch) + FIRST_BEHIND) % STAGGER
    return (context - 1 - behind).clamp(min=0)


class Steps:
    """Steps of as many sequences as `prepare` is told, in memory that `fill_memory` has filled, configured for `limit` tokens.

    A step embeds, runs the layers and draws one token a row at temperature 1. On a GPU it is a graph, and so is its forward
    pass alone, as which other engines' graphs are measured; on a CPU both are called. Lengths stay where they are between
    steps, so every replay does the same work.
    """

    def __init__(self, runner: Runner, workspace: Workspace | None, limit: int) -> None:
        self._runner, self._workspace = runner, workspace
        self._columns = -(-runner.layout.pages_for(limit) // TABLE_STEP) * TABLE_STEP
        self._cuda = runner.device.type == "cuda"
        self._batch = _batch(0, self._columns, runner)

    def prepare(self, batch: int, context: int) -> None:
        """Admits `batch` sequences of `context` tokens by writing their lengths and page tables; captures when the batch is
        another than before. Raises ValueError when the memory or the limit is too small."""
        pages_each = self._runner.layout.pages_for(context)
        if pages_each > self._columns:
            raise ValueError(f"{context} tokens are more than these steps are configured for")
        pages = page_tables(batch, pages_each, len(self._runner.arena.pages))
        changed = batch != len(self._batch.slots)
        if changed:
            self._batch = _batch(batch, self._columns, self._runner)
            self._parameters = _parameters(self._batch, self._runner)
            self._ids = self._batch.tokens.clone()
            self._host = torch.empty(2, batch, dtype=torch.int64, pin_memory=self._cuda)
        positions = last_positions(batch, context)
        for tensor in (self._batch.positions, self._batch.starts, self._parameters.position):
            tensor.copy_(positions)
        self._batch.page_table.zero_()
        self._batch.page_table[:, :pages_each] = pages.to(self._runner.device)
        if changed:
            self._launch_forward, self._launch_step = self._ready(self._forward), self._ready(self._step)

    def forward_ms(self, replays: int) -> float:
        """Of one forward pass on the device: no vocabulary, no sampling."""
        return self._device_ms(self._launch_forward, replays)

    def step_ms(self, replays: int) -> float:
        """Of one whole step on the device."""
        return self._device_ms(self._launch_step, replays)

    def run(self, steps: int) -> float:
        """Seconds that so many steps take with the host in the loop: the tokens of a step are read while the next one runs."""
        begin_s = time.perf_counter()
        before: Callable[[], list[int]] | None = None
        for step in range(steps):
            self._launch_step()
            after = self._send_tokens(step % 2)
            if before is not None:
                before()
            before = after
        if before is not None:
            before()
        return time.perf_counter() - begin_s

    def experts_asked(self) -> list[int]:
        """How many different experts each layer asks in this step."""
        with routes_recorded() as asked:
            self._forward()
        return [len(set(ids.flatten().tolist())) for ids in asked]

    @torch.inference_mode()
    def _forward(self) -> Tensor:
        with self._scratch():
            return self._runner.forward(self._batch)

    @torch.inference_mode()
    def _step(self) -> None:
        with self._scratch():
            logits = self._runner.logits(self._runner.forward(self._batch))
            self._ids.copy_(sample(logits, self._parameters, edits=False).ids)

    def _scratch(self) -> AbstractContextManager[None]:
        return nullcontext() if self._workspace is None else self._workspace.active()

    def _ready(self, work: Callable[[], object]) -> Callable[[], object]:
        return capture(work).replay if self._cuda else work

    def _device_ms(self, launch: Callable[[], object], replays: int) -> float:
        """The median of some rounds of `replays` launches, back to back."""
        return statistics.median(self._round_ms(launch, replays) for _ in range(ROUNDS))

    def _round_ms(self, launch: Callable[[], object], replays: int) -> float:
        if self._cuda:
            return repeated_us(launch, replays) / 1000.0
        begin_s = time.perf_counter()
        for _ in range(replays):
            launch()
        return 1000.0 * (time.perf_counter() - begin_s) / replays

    def _send_tokens(self, place: int) -> Callable[[], list[int]]:
        """Starts the copy of the drawn tokens to the host; gives what waits for them."""
        if not self._cuda:
            return self._ids.tolist
        host = self._host[place]
        host.copy_(self._ids, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def wait() -> list[int]:
            arrived.synchronize()
            return host.tolist()

        return wait


def _batch(batch: int, columns: int, runner: Runner) -> Batch:
    """Random tokens of so many sequences, a slot each, at position 0."""
    device, generator = runner.device, torch.Generator().manual_seed(batch)
    numbers = torch.arange(batch + 1, device=device)
    return Batch(
        tokens=torch.randint(runner.config.vocab_size, (batch,), generator=generator).to(device),
        positions=torch.zeros_like(numbers[1:]),
        sequence_ids=numbers[:-1].clone(),
        starts=torch.zeros_like(numbers[1:]),
        cu_tokens=numbers,
        slots=numbers[1:].clone(),
        page_table=torch.zeros(batch, columns, dtype=torch.int64, device=device),
        longest=1,
    )


def _parameters(batch: Batch, runner: Runner) -> Parameters:
    """Temperature 1, and noise of its own for each row."""
    made = Parameters.neutral(len(batch.slots), runner.config.vocab_size, len(batch.slots) + 1, runner.device)
    made.temperature.fill_(1.0)
    made.slots.copy_(batch.slots)
    made.stream.copy_(noise_stream(batch.slots, torch.zeros_like(batch.slots)))
    return made


@contextmanager
def routes_recorded() -> Iterator[list[Tensor]]:
    """The experts' numbers [T, k] that every layer asks inside, in order."""
    asked: list[Tensor] = []
    route = experts.route

    def recording(*arguments: Any) -> tuple[Tensor, Tensor]:
        ids, weights = route(*arguments)
        asked.append(ids.clone())
        return ids, weights

    with patch.object(moe, "route", recording):
        yield asked


def select_among_everything(
    queries: Tensor,
    scales: Tensor | None,
    head_weights: Tensor,
    batch: Ragged,
    pages: Tensor,
    row: IndexRow,
    ratio: int,
    topk: int,
    factor: float = 1.0,
) -> Entries:
    """`select_entries` of an indexer whose work is sized by the configured maximum: first it scores, and chooses among, all
    entries that the page table has room for, which nobody uses; then those that are there. Room that no page fills has page
    0, whose keys come out of the cache: memory that is read in earnest would cost more."""
    last = batch.page_table.shape[1] * pages.shape[1] * ratio - 1
    everything = replace(batch, positions=torch.full_like(batch.positions, last))
    with workspace.frame():
        select_entries(queries, scales, head_weights, everything, pages, row, ratio, topk, factor)
    return select_entries(queries, scales, head_weights, batch, pages, row, ratio, topk, factor)


@contextmanager
def indexer_of_the_maximum() -> Iterator[None]:
    """Steps captured inside have an indexer that scores the configured maximum."""
    with patch.object(indexer, "select_entries", select_among_everything):
        yield
