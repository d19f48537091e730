"""The decode engine's steps over KV that nobody computed: what scripts/bench_decode.py times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from decode.engine import Engine
from decode.graphs import GREEDY, CudaRecorder, Graphs
from decode.sampling import Wishes
from decode.sequence import Sequence
from decode.step import PLAIN, Shape
from kernels import experts, workspace
from kernels.indexer import Entries, select_entries
from kernels.ragged import Ragged
from kernels.rows import IndexRow, planes
from kernels.sequences import MOST_DRAFTS, SequenceTable
from kernels.timing import capture, repeated_us
from kernels.workspace import Workspace
from kvtransfer.pages import SeqKV
from model import indexer, moe
from model.batch import TABLE_STEP, Batch
from model.cache import index_row, kv_row
from model.runner import Runner
from wire.messages import SamplingParams

FILLED_AT_ONCE = 256  # pages or slots
FINITE = 0xBF  # bytes without bit 6 make no infinity, no NaN and nothing above 2, in e4m3, bf16 and float32
UE8M0_ONE = 127
STAGGER = 128  # tokens by which sequences of a step differ, so that as many close a window as in real batches
FIRST_BEHIND = 4  # the first sequence closes a CSA window, but not an HCA window, which is rare
ROUNDS = 5
MOST_STEPS = 256  # that sequences can advance before they are rewound


def fill_memory(runner: Runner, seed: int = 1) -> None:
    """Finite random rows in every page and slot, and scales of 1: what attention and indexer read is then as good as any."""
    arena, config = runner.arena, runner.config
    generator = torch.Generator(arena.pages.device).manual_seed(seed)
    for memory in (arena.pages, arena.slots):
        for part in torch.split(memory, FILLED_AT_ONCE):
            part.random_(0, 256, generator=generator).bitwise_and_(FINITE)
    entry, key = kv_row(config, runner.kv_dtype), index_row(config, runner.kv_dtype, runner.index_keys)
    for cache in runner.main_caches:
        cache.window[..., entry.value_bytes : entry.row_bytes] = UE8M0_ONE
        if cache.entries is not None:
            planes(cache.entries, entry)[1].fill_(UE8M0_ONE)
        if cache.index_entries is not None:
            scales = planes(cache.index_entries, key)[1]
            scales.fill_(UE8M0_ONE) if key.kind == "mxfp4" else scales.view(torch.float32).fill_(1.0)


def page_tables(batch: int, pages_each: int, written: int, num_pages: int, seed: int = 1) -> Tensor:
    """int64 [batch, pages_each] of pages 1 .. num_pages - 1, in random order. The last `written` pages of a sequence are its
    own; the others are too while there are enough, and otherwise belong to equally many sequences each. Raises ValueError
    when there are not enough even so."""
    written = min(written, pages_each)
    own, others = batch * written, batch * (pages_each - written)
    spare = num_pages - 1 - own
    if spare < min(others, 1):
        raise ValueError(f"{num_pages} pages are too few for {batch} sequences")
    generator = torch.Generator().manual_seed(seed)
    before = 1 + own + torch.randperm(others, generator=generator) % max(spare, 1)
    return torch.cat((before.view(batch, -1), 1 + torch.arange(own).view(batch, -1)), 1)


def sharing(pages: Tensor) -> float:
    """How many sequences the pages that belong to several belong to on average; 1 where none does."""
    counts = pages.flatten().bincount()
    shared = counts[counts > 1]
    return float(shared.double().mean()) if len(shared) else 1.0


def last_positions(batch: int, context: int) -> Tensor:
    """int64 [batch]: where each sequence's new token goes; the longest has `context` tokens then, or a few less."""
    behind = (torch.arange(batch) + FIRST_BEHIND) % STAGGER
    return (context - 1 - behind).clamp(min=0)


class Steps:
    """Steps of the decode engine, for as many sequences as `prepare` is told (one of `batches`), in memory that `fill_memory`
    has filled, with a table of sequences for `limit` tokens.

    Tokens are drawn at temperature 1. The forward pass is a graph of its own beside the engine's, without the vocabulary, as
    other engines' graphs are measured. Without a GPU there are no graphs: everything is called.
    """

    def __init__(
        self,
        runner: Runner,
        workspace: Workspace | None,
        limit: int,
        batches: Iterable[int],
        tokens: Iterable[int] = (1,),
    ) -> None:
        """tokens: of each sequence in a step, as in decode.graphs.Graphs."""
        self._runner, self._workspace = runner, workspace
        self._cuda = runner.device.type == "cuda"
        self._columns = -(-runner.layout.pages_for(limit) // TABLE_STEP) * TABLE_STEP
        sizes, vocab = sorted(set(batches)), runner.config.vocab_size
        self._table = SequenceTable.make(sizes[-1], len(runner.arena.slots), self._columns, vocab, runner.device)
        recorder = CudaRecorder(runner.device) if self._cuda else None
        self._graphs = Graphs(runner, self._table, sizes[-1], list(tokens), recorder, sizes)
        self._engine = Engine(self._table, self._graphs, spare_pages=1, depth=int(self._cuda))
        self._admitted = 0  # how often sequences were
        self._batch = _batch(0, self._columns, runner)

    def prepare(self, batch: int, context: int) -> None:
        """Admits `batch` sequences of `context` tokens. Raises ValueError when the memory or the limit is too small."""
        layout = self._runner.layout
        pages_each = layout.pages_for(context + MOST_STEPS)
        if pages_each >= self._columns:
            raise ValueError(f"{context} tokens are more than these steps are configured for")
        pages = page_tables(batch, pages_each, 1 + layout.pages_for(MOST_STEPS), len(self._runner.arena.pages))
        self.shared = sharing(pages)
        self._positions, self._admitted = last_positions(batch, context), self._admitted + 1
        if batch != len(self._batch.slots):
            self._batch = _batch(batch, self._columns, self._runner)
            self._place(pages)
            self._launch_forward = capture(self._forward).replay if self._cuda else self._forward
        self._place(pages)
        self._sequences = [self._sequence(row, table) for row, table in enumerate(pages.tolist())]
        self.run(1)  # what the table has to know of them is uploaded once
        self.rewind()

    def forward_ms(self, replays: int) -> float:
        """Of one forward pass on the device: no vocabulary, no sampling."""
        return self._device_ms(self._launch_forward, replays)

    def step_ms(self, replays: int, greedy: bool = False, shape: Shape = PLAIN) -> float:
        """Of one whole step on the device, as the engine captured it."""
        asks = replace(GREEDY if greedy else Wishes(self._sequences).asks(), stores=shape.stores)
        return self._device_ms(lambda: self._graphs.run(len(self._sequences), shape.tokens, asks), replays)

    def run(self, steps: int) -> float:
        """Seconds that so many more steps of the engine take with the host in the loop, from the launch of the first until the
        tokens of the last are there."""
        begin_s = time.perf_counter()
        for _ in range(steps):
            self._engine.launch(self._sequences)
            if self._engine.in_flight > self._engine.depth:
                self._collect()
        while self._engine.in_flight:
            self._collect()
        return time.perf_counter() - begin_s

    def rewind(self) -> None:
        """Every sequence is at its beginning again, so that measured steps are the same; they must not be more than MOST_STEPS
        until the next time. Waits for the device."""
        for sequence, position in zip(self._sequences, self._positions.tolist(), strict=True):
            del sequence.tokens[position + 1 :]
        slots = slice(1, 1 + len(self._sequences))
        self._table.lengths[slots] = self._positions.to(self._runner.device)
        self._table.tokens[slots] = self._batch.tokens
        if self._cuda:
            torch.cuda.synchronize(self._runner.device)

    @torch.inference_mode()
    def logits(self, rows: int, tokens: int = 1, behind: int = 0) -> Tensor:
        """float32 [rows * tokens, vocab]: what comes behind each of some tokens of the first sequences, in a step of those
        alone. behind: how many of a sequence's new tokens, which are random, come before them."""
        device, shape = self._runner.device, (len(self._batch.slots), MOST_DRAFTS + 1)
        every = torch.randint(self._runner.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
        starts = self._batch.starts[:rows] + behind
        few = Batch(
            tokens=every[:rows, behind : behind + tokens].flatten().to(device),
            positions=(starts[:, None] + torch.arange(tokens, device=device)).flatten(),
            sequence_ids=torch.arange(rows, device=device).repeat_interleave(tokens),
            starts=starts,
            cu_tokens=torch.arange(rows + 1, device=device) * tokens,
            slots=self._batch.slots[:rows],
            page_table=self._batch.page_table[:rows],
            longest=tokens,
        )
        with nullcontext() if self._workspace is None else self._workspace.active():
            return self._runner.logits(self._runner.forward(few)).clone()

    def experts_asked(self) -> list[int]:
        """How many different experts each layer asks in this step."""
        with routes_recorded() as asked:
            self._forward()
        return [len(set(ids.flatten().tolist())) for ids in asked]

    @torch.inference_mode()
    def experts_verified(self, tokens: int) -> list[int]:
        """The same of a step that verifies `tokens` - 1 drafts of each sequence, here random ids."""
        slots = slice(1, 1 + len(self._sequences))
        self.rewind()
        self._table.drafts[slots] = torch.randint_like(self._table.drafts[slots], self._table.counts.shape[1])
        with routes_recorded() as asked, nullcontext() if self._workspace is None else self._workspace.active():
            self._graphs.step(len(self._sequences), tokens).forward()
        return [len(set(ids.flatten().tolist())) for ids in asked]

    def _collect(self) -> None:
        for sequence, choice in zip(*self._engine.collect(), strict=True):
            if choice.error:
                raise RuntimeError(choice.error)
            sequence.extend(choice.tokens)

    def _sequence(self, row: int, pages: list[int]) -> Sequence:
        """A sequence of which the last token is to be fed: what the others were, only its KV says."""
        position = int(self._positions[row])
        return Sequence(
            key=(self._admitted, 0),
            sample=0,
            serial=(self._admitted, row),
            tokens=[0] * position + [int(self._batch.tokens[row])],
            prompt_tokens=position + 1,
            sampling=SamplingParams(max_tokens=1 << 30, seed=row, temperature=1.0, ignore_eos=True),
            eos_token_id=self._runner.config.eos_token_id,
            kv=SeqKV(row + 1, pages),
            router_inbox="",
            deadline_s=math.inf,
            arrived_s=0.0,
        )

    def _place(self, pages: Tensor) -> None:
        """Where the forward pass finds the same sequences."""
        for tensor in (self._batch.positions, self._batch.starts):
            tensor.copy_(self._positions)
        self._batch.page_table.zero_()
        self._batch.page_table[:, : pages.shape[1]] = pages.to(self._runner.device)

    @torch.inference_mode()
    def _forward(self) -> Tensor:
        with nullcontext() if self._workspace is None else self._workspace.active():
            return self._runner.forward(self._batch)

    def _device_ms(self, launch: Callable[[], object], replays: int) -> float:
        """The median of some rounds of `replays` launches, back to back."""
        return statistics.median(self._round_ms(launch, replays) for _ in range(ROUNDS))

    def _round_ms(self, launch: Callable[[], object], replays: int) -> float:
        self.rewind()
        if self._cuda:
            return repeated_us(launch, replays) / 1000.0
        begin_s = time.perf_counter()
        for _ in range(replays):
            launch()
        return 1000.0 * (time.perf_counter() - begin_s) / replays


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
