"""Sparse attention of decode steps: window only, with selected rows, with all rows of a sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels.attention import sparse_attention, sparse_attention_reference
from kernels.cases.case import TINY, V4_FLASH, Case, Widths, invariant
from kernels.indexer import Entries
from kernels.ragged import Ragged
from kernels.rows import KVRow, write_rows

HCA = 128
PAGE_TOKENS = 256
DISTINCT_ROWS = 512  # rows repeat, so that large inputs are quickly made
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 3e-6}


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of `tokens` query tokens for each of `sequences`. rows: compressed rows each token sees at most.
    poison: everything that no token may read is NaN."""

    sequences: int
    tokens: int = 1
    rows: int = 0
    selected: bool = False
    kind: str = "fp8"
    dtype: torch.dtype = torch.bfloat16
    poison: bool = True


@dataclass(slots=True)
class Inputs:
    q: Tensor
    batch: Ragged
    ring: Tensor
    row: KVRow
    window: int
    sinks: Tensor
    turn: Tensor
    pages: Tensor | None
    entries: Entries | int | None


def make(widths: Widths, shape: Shape, device: torch.device, seed: int) -> Inputs:
    """Below 0 the seed asks for shapes only."""
    b, n = shape.sequences, shape.tokens
    row = KVRow(shape.kind, widths.head_dim, widths.rope_dim, rounded=shape.kind != "fp32")
    ring_rows = widths.window + 4
    ratio = 4 if shape.selected else HCA
    page_rows = PAGE_TOKENS // ratio
    pages_each = -(-max(8 * shape.rows if shape.selected else shape.rows, 1) // page_rows)
    block = -(-page_rows * row.row_bytes // 64) * 64
    total = b * n
    empty = partial(torch.empty, device=device)
    long = partial(torch.empty, dtype=torch.int64, device=device)
    batch = Ragged(long(total), long(total), long(b), long(b + 1), long(b), long(b, pages_each), n)
    inputs = Inputs(
        empty(total, widths.heads, widths.head_dim, dtype=shape.dtype),
        batch,
        empty(b + 1, ring_rows, row.ring_bytes, dtype=torch.uint8),
        row,
        widths.window,
        empty(widths.heads, dtype=torch.float32),
        empty(total, widths.rope_dim // 2, 2, dtype=torch.float32),
        None,
        None,
    )
    if shape.rows:
        arena = empty((1 + b * pages_each) * block, dtype=torch.uint8)
        inputs.pages = arena.as_strided((1 + b * pages_each, page_rows, row.row_bytes), (block, row.row_bytes, 1))
        inputs.entries = HCA
        if shape.selected:
            inputs.entries = Entries(empty(total, shape.rows, dtype=torch.int32), empty(total, dtype=torch.int32))
    if seed >= 0:
        fill(inputs, shape, seed)
    return inputs


def fill(inputs: Inputs, shape: Shape, seed: int, full: bool = True) -> None:
    """Random contents in the tensors of `inputs`. full: every token sees as many rows as it may; else fewer."""
    device = inputs.q.device
    random.seed(seed)
    torch.manual_seed(seed)
    batch, row = inputs.batch, inputs.row
    b, n = shape.sequences, shape.tokens
    ratio = 4 if shape.selected else HCA
    longest = max(ratio * 8 * shape.rows if shape.selected else ratio * shape.rows, 2 * inputs.window) + ratio - 1 - n
    starts = torch.tensor(
        [longest if full else random.choice((0, 1, longest // 7, random.randint(0, longest))) for _ in range(b)]
    )
    batch.starts.copy_(starts)
    batch.positions.copy_((starts[:, None] + torch.arange(n)).flatten())
    batch.sequence_ids.copy_(torch.arange(b).repeat_interleave(n))
    batch.cu_tokens.copy_(torch.arange(b + 1) * n)
    batch.slots.copy_(torch.randperm(b) + 1)
    batch.page_table.copy_(1 + torch.randperm(batch.page_table.numel()).view_as(batch.page_table))
    inputs.q.copy_(torch.randn(inputs.q.shape, device=device) * 2)
    inputs.sinks.copy_(torch.randn(inputs.sinks.shape))
    angle = torch.rand(inputs.turn.shape[:2], device=device) * 6.28
    inputs.turn.copy_(torch.stack((angle.cos(), angle.sin()), -1))
    packed = row.pack(torch.randn(DISTINCT_ROWS, row.head_dim).to(torch.bfloat16)).to(device)
    inputs.ring.copy_(packed[torch.randint(DISTINCT_ROWS, inputs.ring.shape[:2], device=device)])
    if inputs.pages is not None:
        count = inputs.pages.shape[0] * inputs.pages.shape[1]
        number = torch.arange(count, device=device)
        some = packed[torch.randint(DISTINCT_ROWS, (count,), device=device)]
        write_rows(inputs.pages, row, number // inputs.pages.shape[1], number % inputs.pages.shape[1], some)
    if isinstance(inputs.entries, Entries):
        select(inputs, full)
    if shape.poison:
        poison(inputs)


def select(inputs: Inputs, full: bool) -> None:
    """Distinct rows of what each token may see, ascending, sometimes with a -1 among them; fewer when not `full`."""
    assert isinstance(inputs.entries, Entries) and inputs.pages is not None
    page_rows, most = inputs.pages.shape[1], inputs.entries.rows.shape[1]
    inputs.entries.rows.fill_(-1)
    table = inputs.batch.page_table.cpu()
    for token, (position, sequence) in enumerate(
        zip(inputs.batch.positions.tolist(), inputs.batch.sequence_ids.tolist(), strict=True)
    ):
        visible = (position + 1) // 4
        count = min(most, visible) if full else random.randint(0, min(most, visible))
        entry = torch.randperm(visible)[:count].sort().values
        rows = table[sequence, entry // page_rows] * page_rows + entry % page_rows
        if not full and count > 2:
            rows[1] = -1
        inputs.entries.rows[token, :count] = rows.int().to(inputs.entries.rows.device)
        inputs.entries.counts[token] = count


def poison(inputs: Inputs) -> None:
    """NaN in every row of ring and pages that no token sees."""
    batch, row, ring_rows = inputs.batch, inputs.row, inputs.ring.shape[1]
    read = torch.zeros(inputs.ring.shape[:2], dtype=torch.bool)
    pages_read = torch.zeros(inputs.pages.shape[:2] if inputs.pages is not None else (0, 1), dtype=torch.bool)
    page_rows = pages_read.shape[1]
    for token, (position, sequence) in enumerate(zip(batch.positions.tolist(), batch.sequence_ids.tolist(), strict=True)):
        wanted = torch.arange(max(0, position - inputs.window + 1), position + 1)
        read[int(batch.slots[sequence]), wanted % ring_rows] = True
        if isinstance(inputs.entries, int):
            entry = torch.arange((position + 1) // inputs.entries)
            pages_read[batch.page_table[sequence].cpu()[entry // page_rows], entry % page_rows] = True
        elif inputs.entries is not None:
            rows = inputs.entries.rows[token].cpu()[: int(inputs.entries.counts[token])].long()
            rows = rows[rows >= 0]
            pages_read[rows // page_rows, rows % page_rows] = True
    inputs.ring[~read.to(inputs.ring.device)] = 0xFF
    if inputs.pages is not None:
        nan = torch.full((1, row.ring_bytes), 0xFF, dtype=torch.uint8, device=inputs.pages.device)
        page, number = torch.nonzero(~pages_read.to(inputs.pages.device), as_tuple=True)
        write_rows(inputs.pages, row, page, number, nan.expand(len(page), -1))


def run(inputs: Inputs) -> Tensor:
    i = inputs
    return sparse_attention(i.q, no_rows(i), i.batch, i.ring, i.row, i.window, i.sinks, i.turn, i.pages, i.entries)


def expected(inputs: Inputs) -> Tensor:
    i = inputs
    return sparse_attention_reference(i.q, no_rows(i), i.batch, i.ring, i.row, i.window, i.sinks, i.turn, i.pages, i.entries)


def no_rows(inputs: Inputs) -> Tensor:
    """A decode step's own rows are in the ring: they are not looked at here."""
    return inputs.ring[0, :0]


def case(widths: Widths, name: str, shape: Shape, must_us: float | None = None, aim_us: float | None = None) -> Case:
    row = KVRow(shape.kind, widths.head_dim, widths.rope_dim, rounded=True)
    total, rows = shape.sequences * shape.tokens, widths.window + shape.rows
    heads = widths.heads * widths.head_dim
    return Case(
        name,
        partial(make, widths, shape),
        run,
        expected,
        TOLERANCE[shape.dtype],
        moved_bytes=total * (rows if shape.selected else widths.window) * row.row_bytes
        + (0 if shape.selected else shape.sequences * shape.rows * row.row_bytes)
        + 2 * total * heads * shape.dtype.itemsize,
        flops=4.0 * total * heads * rows,
        change=lambda inputs: fill(inputs, shape, 77, full=False),
        must_us=must_us,
        aim_us=aim_us,
        bench=must_us is not None,
    )


def cases(widths: Widths) -> list[Case]:
    kinds = [("fp8", torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
    found = []
    for kind, dtype in kinds[:2] if widths is V4_FLASH else kinds:
        for name, rows, selected in (("window", 0, False), ("selected", widths.index_topk, True), ("all", 40, False)):
            for b, n in ((1, 1), (3, 4), (2, 5), (33, 1)) if kind == "fp8" else ((3, 4),):
                made = case(widths, f"{name} {kind} b={b} s_q={n}", Shape(b, n, rows, selected, kind, dtype))
                found += [invariant(made)] if kind == "fp8" and n > 1 else [invariant(made), made]
    if widths is TINY:
        found.append(case(widths, "selected fp8 b=64 s_q=1", Shape(64, 1, widths.index_topk, True)))
        found.append(case(widths, "all fp8 b=4 s_q=1, 2000 rows", Shape(4, 1, 2000, False)))
    if widths is not V4_FLASH:
        return found
    for name, rows, selected in (("selected", 512, True), ("all", 40, False)):
        shape = Shape(3, 2, rows, selected)
        found.append(invariant(case(replace(widths, heads=128), f"{name} fp8 b=3 s_q=2, 128 heads", shape)))
    for b, must, aim in ((1, 11, 10), (8, 15, 13), (32, 26, 22), (64, 36, 30), (128, 48, 40)):
        found.append(case(widths, f"128+512 b={b} s_q=1", Shape(b, 1, 512, True, poison=False), must, aim))
    for n, must, aim in ((2, 50, 40), (4, 85, 70)):
        found.append(case(widths, f"128+512 b=64 s_q={n}", Shape(64, n, 512, True, poison=False), must, aim))
    found.append(case(widths, "128+8192 b=64 s_q=1", Shape(64, 1, 8192, False, poison=False), 224, 180))
    return found
