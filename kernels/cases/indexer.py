"""The indexer: scores of decode steps and of a chunk, the choice among them, and both together."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.cases.case import V4_FLASH, Case, Widths
from kernels.indexer import (
    Entries,
    best_reference,
    physical_rows,
    score_entries,
    select_entries,
    select_entries_reference,
)
from kernels.quant import FP4_BLOCK
from kernels.ragged import Ragged
from kernels.rows import PLAIN_DTYPES, IndexRow, planes, read_rows
from kernels.topk import GROUP, choose_rows

RATIO = 4
PAGE_ROWS = 64
DISTINCT_PAGES = 512  # pages repeat, so that large inputs are quickly made
SCORE_TOLERANCE = 1e-3  # FP8 products: a Hopper GPU keeps 14 bits of their sum


@dataclass(frozen=True, slots=True)
class Shape:
    """`sequences` with `tokens` query tokens each, which see `keys` entries; room for `capacity`. whole: small whole numbers,
    whose scores are exact in any order of summation, and often equal."""

    sequences: int
    tokens: int
    keys: int
    capacity: int = 0
    kind: str = "fp8"
    whole: bool = False


@dataclass(slots=True)
class Inputs:
    queries: Tensor
    scales: Tensor | None
    head_weights: Tensor
    batch: Ragged
    pages: Tensor
    row: IndexRow
    topk: int


@dataclass(slots=True)
class Choice:
    """scores [T, capacity] and their maxima, and where the choice goes."""

    scores: Tensor
    maxima: Tensor
    batch: Ragged
    entries: Entries


def ragged(sequences: int, tokens: int, columns: int, device: torch.device) -> Ragged:
    """Uninitialised."""
    long = partial(torch.empty, dtype=torch.int64, device=device)
    total = sequences * tokens
    return Ragged(
        long(total), long(total), long(sequences), long(sequences + 1), long(sequences), long(sequences, columns), tokens
    )


def fill_batch(batch: Ragged, tokens: int, visible: list[int], pages: int) -> None:
    """`visible` entries for the last token of each sequence; a random table of pages 1 .. pages - 1."""
    sequences = len(visible)
    starts = torch.tensor([max(RATIO * each + RATIO - 1 - tokens, 0) for each in visible])
    batch.starts.copy_(starts)
    batch.positions.copy_((starts[:, None] + torch.arange(tokens)).flatten())
    batch.sequence_ids.copy_(torch.arange(sequences).repeat_interleave(tokens))
    batch.cu_tokens.copy_(torch.arange(sequences + 1) * tokens)
    batch.slots.copy_(torch.arange(sequences))
    device = batch.page_table.device
    numbers = 1 + torch.arange(batch.page_table.numel(), device=device) % (pages - 1)
    batch.page_table.copy_(numbers[torch.randperm(len(numbers), device=device)].view_as(batch.page_table))


def make(widths: Widths, shape: Shape, device: torch.device, seed: int) -> Inputs:
    row = IndexRow(shape.kind, widths.index_dim, rounded=False)
    total = shape.sequences * shape.tokens
    columns = -(-max(shape.capacity, shape.keys) // PAGE_ROWS)
    count = 1 + shape.sequences * -(-shape.keys // PAGE_ROWS)
    block = -(-PAGE_ROWS * row.row_bytes // 64) * 64
    arena = torch.empty(count * block, dtype=torch.uint8, device=device)
    plain = PLAIN_DTYPES.get(shape.kind)
    heads = widths.index_heads
    inputs = Inputs(
        torch.empty(total, heads, row.dim, dtype=plain or torch.float8_e4m3fn, device=device),
        None if plain else torch.empty(total, heads, dtype=torch.float32, device=device),
        torch.empty(total, heads, dtype=plain or torch.bfloat16, device=device),
        ragged(shape.sequences, shape.tokens, columns, device),
        arena.as_strided((count, PAGE_ROWS, row.row_bytes), (block, row.row_bytes, 1)),
        row,
        widths.index_topk,
    )
    if seed >= 0:
        fill(inputs, shape, seed, [shape.keys] * shape.sequences)
    return inputs


def fill(inputs: Inputs, shape: Shape, seed: int, visible: list[int]) -> None:
    torch.manual_seed(seed)
    fill_batch(inputs.batch, shape.tokens, visible, len(inputs.pages))
    device, row = inputs.queries.device, inputs.row

    def values(*size: int) -> Tensor:
        if shape.whole:
            return torch.randint(-2, 3, size, device=device).float()
        return torch.randn(*size, device=device) * 16

    inputs.queries.copy_(values(*inputs.queries.shape).to(inputs.queries.dtype))
    weights = torch.randint(-3, 4, inputs.head_weights.shape, device=device) / 4 if shape.whole else None
    inputs.head_weights.copy_(torch.randn(inputs.head_weights.shape, device=device) if weights is None else weights)
    keys, scales = planes(inputs.pages, row)
    distinct = min(DISTINCT_PAGES, len(keys))
    some = values(distinct, PAGE_ROWS, row.dim)
    if row.kind == "mxfp4":
        blocks = 2.0 ** torch.randint(0, 2, (distinct, PAGE_ROWS, row.dim // FP4_BLOCK), device=device)
        some, page_scales = row.pack(some * blocks.repeat_interleave(FP4_BLOCK, -1)).split(
            [row.value_bytes, row.scale_bytes], -1
        )
    else:
        some = some.to(inputs.queries.dtype).view(torch.uint8)
        page_scales = (2.0 ** torch.randint(-2, 3, (distinct, PAGE_ROWS, 1), device=device)).view(torch.uint8)
    for first in range(0, len(keys), distinct):
        part = slice(first, min(first + distinct, len(keys)))
        keys[part] = some[: part.stop - first]
        if inputs.scales is not None:
            scales[part] = page_scales[: part.stop - first]
    if inputs.scales is not None:
        inputs.scales.copy_(2.0 ** torch.randint(-2, 3, inputs.scales.shape, device=device))


def some_lengths(shape: Shape) -> list[int]:
    lengths = [random.choice((0, 1, 127, 128, 129, 511, 512, 513, shape.keys, shape.keys // 2)) for _ in range(shape.sequences)]
    return [min(each, shape.keys) for each in lengths]


def scores_of(inputs: Inputs, keys: int, tokens: int) -> Tensor:
    a = inputs
    scores = score_entries(a.queries, a.scales, a.head_weights, a.batch, a.pages, a.row, RATIO, a.topk, 0, tokens)
    return scores.values[:, : keys - keys % GROUP]


def scores_expected(inputs: Inputs, keys: int, tokens: int) -> Tensor:
    batch, keys = inputs.batch, keys - keys % GROUP
    found = torch.empty(tokens, keys, dtype=torch.float64, device=inputs.pages.device)
    entry = torch.arange(keys, device=inputs.pages.device)
    for token in range(tokens):
        page = batch.page_table[batch.sequence_ids[token], entry // PAGE_ROWS]
        values = inputs.row.unpack(read_rows(inputs.pages, inputs.row, page, entry % PAGE_ROWS))
        query, weights = inputs.queries[token].double(), inputs.head_weights[token].double()
        if inputs.scales is not None:
            weights = weights * inputs.scales[token].double()
        found[token] = (values @ query.T).relu_() @ weights
    return found


def scores_case(widths: Widths, name: str, shape: Shape, must: float | None, aim: float | None, tokens: int = 0) -> Case:
    """tokens: of a chunk, how many are scored at once (all where 0); the last of them sees all keys."""
    count = tokens or shape.sequences * shape.tokens
    seen = shape.keys - (shape.tokens - 1 + RATIO) // RATIO if shape.tokens > 1 else shape.keys
    row = IndexRow(shape.kind, widths.index_dim, rounded=False)
    readings = shape.sequences * shape.keys * row.row_bytes
    return Case(
        name,
        partial(make, widths, shape),
        lambda inputs: scores_of(inputs, seen, count),
        lambda inputs: scores_expected(inputs, seen, count),
        SCORE_TOLERANCE,
        moved_bytes=readings + 4 * count * shape.keys,
        flops=2.0 * count * shape.keys * widths.index_heads * widths.index_dim,
        matrix="fp8",
        must_us=must,
        aim_us=aim,
        bench=True,
    )


def select_case(widths: Widths, name: str, shape: Shape) -> Case:
    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        a = inputs
        found = select_entries(a.queries, a.scales, a.head_weights, a.batch, a.pages, a.row, RATIO, a.topk)
        return found.rows, found.counts

    def expected(inputs: Inputs) -> tuple[Tensor, Tensor]:
        a = inputs
        weights = a.head_weights.float()  # the reference rounds to their dtype
        found = select_entries_reference(a.queries, a.scales, weights, a.batch, a.pages, a.row, RATIO, a.topk)
        return found.rows, found.counts

    def change(inputs: Inputs) -> None:
        random.seed(3)
        fill(inputs, shape, 3, some_lengths(shape))

    row = IndexRow(shape.kind, widths.index_dim, rounded=False)
    moved = shape.sequences * shape.keys * row.row_bytes
    flops = 2.0 * shape.sequences * shape.tokens * shape.keys * widths.index_heads * widths.index_dim
    matrix = shape.kind if shape.kind in PLAIN_DTYPES else "fp8"
    return Case(
        name, partial(make, widths, shape), run, expected, 0.0, moved_bytes=moved, flops=flops, matrix=matrix, change=change
    )


def make_choice(topk: int, sequences: int, keys: int, device: torch.device, seed: int) -> Choice:
    capacity = -(-keys // PAGE_ROWS) * PAGE_ROWS
    choice = Choice(
        torch.empty(sequences, capacity, dtype=torch.float32, device=device),
        torch.empty(sequences, capacity // GROUP, dtype=torch.float32, device=device),
        ragged(sequences, 1, capacity // PAGE_ROWS, device),
        Entries(
            torch.empty(sequences, topk, dtype=torch.int32, device=device),
            torch.empty(sequences, dtype=torch.int32, device=device),
        ),
    )
    if seed >= 0:
        fill_choice(choice, seed, [keys] * sequences)
    return choice


def fill_choice(choice: Choice, seed: int, visible: list[int]) -> None:
    torch.manual_seed(seed)
    sequences, capacity = choice.scores.shape
    fill_batch(choice.batch, 1, visible, 1 + choice.batch.page_table.numel())
    choice.scores.copy_(torch.randn(choice.scores.shape, device=choice.scores.device))
    hidden = torch.arange(capacity, device=choice.scores.device) >= torch.tensor(visible, device=choice.scores.device)[:, None]
    choice.scores.masked_fill_(hidden, -torch.inf)
    choice.maxima.copy_(choice.scores.view(sequences, -1, GROUP).amax(2))


def choice_case(widths: Widths, name: str, sequences: int, keys: int, must: float | None, aim: float | None) -> Case:
    topk = widths.index_topk

    def run(choice: Choice) -> tuple[Tensor, Tensor]:
        choose_rows(choice.entries.rows, choice.entries.counts, choice.scores, choice.maxima, choice.batch, PAGE_ROWS, RATIO)
        return choice.entries.rows, choice.entries.counts

    def expected(choice: Choice) -> tuple[Tensor, Tensor]:
        visible = (choice.batch.positions + 1) // RATIO
        logical = best_reference(choice.scores.double(), visible, topk)
        counts = visible.clamp(max=topk)
        return physical_rows(logical, counts, choice.batch, PAGE_ROWS), counts.int()

    def change(choice: Choice) -> None:
        random.seed(5)
        fill_choice(choice, 5, some_lengths(Shape(sequences, 1, keys)))

    read = 4 * (keys // GROUP + topk * GROUP) + 4 * topk
    return Case(
        name,
        partial(make_choice, topk, sequences, keys),
        run,
        expected,
        0.0,
        moved_bytes=sequences * read,
        change=change,
        must_us=must,
        aim_us=aim,
        bench=True,
    )


def cases(widths: Widths) -> list[Case]:
    selected = [
        ("select b=3", Shape(3, 1, 2051, whole=True)),
        ("select b=3, 2 tokens", Shape(3, 2, 700, whole=True)),
        ("select b=2, 3 tokens", Shape(2, 3, 700, whole=True)),
        ("select b=2, 4 tokens", Shape(2, 4, 700, whole=True)),
        ("select b=2, 5 tokens", Shape(2, 5, 700, whole=True)),
        ("select a chunk of 130", Shape(1, 130, 900, whole=True)),
        ("select mxfp4 b=3", Shape(3, 1, 2051, kind="mxfp4", whole=True)),
        ("select mxfp4 b=3, 2 tokens", Shape(3, 2, 700, kind="mxfp4", whole=True)),
        ("select mxfp4 b=2, 3 tokens", Shape(2, 3, 700, kind="mxfp4", whole=True)),
        ("select mxfp4 b=2, 4 tokens", Shape(2, 4, 700, kind="mxfp4", whole=True)),
        ("select mxfp4 b=2, 5 tokens", Shape(2, 5, 700, kind="mxfp4", whole=True)),
        ("select mxfp4, a chunk of 130", Shape(1, 130, 900, kind="mxfp4", whole=True)),
        ("select bf16", Shape(2, 1, 700, kind="bf16", whole=True)),
        ("select fp32", Shape(2, 1, 700, kind="fp32", whole=True)),
        ("select fp32 chunk", Shape(1, 20, 700, kind="fp32", whole=True)),
    ]
    found = [select_case(widths, name, shape) for name, shape in selected]
    if widths is V4_FLASH:
        found += bench_cases(widths)
    return found


def bench_cases(widths: Widths) -> list[Case]:
    k = 1024
    scored = [
        ("scores b=64, 4K keys", Shape(64, 1, 4 * k), 14.0, 13.4),
        ("scores b=64, 16K keys", Shape(64, 1, 16 * k), 42.0, 40.0),
        ("scores b=64, 64K keys", Shape(64, 1, 64 * k), 150.0, 142.0),
        ("scores b=64, 256K keys", Shape(64, 1, 256 * k), 560.0, 541.0),
        ("scores b=64, 1K keys, room for 1K", Shape(64, 1, k), None, None),
        ("scores b=64, 1K keys, room for 256K", Shape(64, 1, k, capacity=256 * k), None, None),
        ("scores b=64, 2 tokens, 16K keys", Shape(64, 2, 16 * k), 50.0, 43.0),
        ("scores b=32, 4 tokens, 16K keys", Shape(32, 4, 16 * k), None, None),
        ("scores b=1, 64K keys", Shape(1, 1, 64 * k), None, None),
        ("scores mxfp4 b=64, 4K keys", Shape(64, 1, 4 * k, kind="mxfp4"), None, None),
        ("scores mxfp4 b=64, 16K keys", Shape(64, 1, 16 * k, kind="mxfp4"), None, None),
        ("scores mxfp4 b=64, 64K keys", Shape(64, 1, 64 * k, kind="mxfp4"), None, None),
        ("scores mxfp4 b=64, 256K keys", Shape(64, 1, 256 * k, kind="mxfp4"), None, None),
        ("scores mxfp4 b=64, 2 tokens, 16K keys", Shape(64, 2, 16 * k, kind="mxfp4"), None, None),
        ("scores mxfp4 b=32, 4 tokens, 16K keys", Shape(32, 4, 16 * k, kind="mxfp4"), None, None),
    ]
    chosen = [
        ("top-512 b=64, 16K scores", 64, 16 * k, 12.0, 6.2),
        ("top-512 b=64, 64K scores", 64, 64 * k, 20.0, 12.6),
        ("top-512 b=64, 256K scores", 64, 256 * k, 45.0, 29.0),
        ("top-512 b=1, 64K scores", 1, 64 * k, None, None),
    ]
    chunks = [
        scores_case(
            widths, f"scores {name}of 512 tokens of a chunk, 64K keys", Shape(1, 2048, 64 * k, kind=kind), None, None, 512
        )
        for name, kind in (("", "fp8"), ("mxfp4 ", "mxfp4"))
    ]
    return [
        *(scores_case(widths, name, shape, must, aim) for name, shape, must, aim in scored),
        *(choice_case(widths, name, sequences, keys, must, aim) for name, sequences, keys, must, aim in chosen),
        *chunks,
    ]
