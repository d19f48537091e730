"""Prefill attention: chunks of several sizes over window, selected and all compressed rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention import sparse_attention_reference
from kernels.attention_prefill import prefill_attention
from kernels.cases.case import V4_FLASH, Case, Widths
from kernels.indexer import Entries
from kernels.ragged import DECODE_TOKENS, Ragged
from kernels.rows import KVRow

PAGE_TOKENS = 256
ROLLBACK = 4  # rows a ring has beyond the window
CSA, HCA = 4, 128


@dataclass(slots=True)
class Inputs:
    q: Tensor
    new_rows: Tensor
    batch: Ragged
    ring: Tensor
    row: KVRow
    window: int
    sinks: Tensor
    turn: Tensor
    pages: Tensor | None
    entries: Entries | int | None


@dataclass(frozen=True, slots=True)
class Shape:
    """sequences: (start, new tokens). ratio 4: a selection of the compressed rows, 128: all of them, 0: the window only."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    ratio: int
    kind: str = "fp8"


def cases(widths: Widths) -> list[Case]:
    shapes = [
        Shape("window, the shortest chunk", ((700, DECODE_TOKENS + 1),), 0),
        Shape("selected, start of a text", ((0, 40),), CSA),
        Shape("selected, three sequences", ((0, 9), (1031, 130), (127, 33)), CSA),
        Shape("selected, few tokens of a long text", ((40_000, 6),), CSA),
        Shape("all rows, three sequences", ((5_000, 40), (0, 129), (126, 3)), HCA),
        Shape("all rows, bf16", ((9_000, 20), (3, 20)), HCA, "bf16"),
    ]
    if widths is not V4_FLASH:
        plain = [Shape("selected, fp32", ((300, 20), (0, 9)), CSA, "fp32"), Shape("all rows, fp32", ((900, 20),), HCA, "fp32")]
        return [_case(widths, shape) for shape in shapes + plain]
    bench = Shape("4096 queries, 128 + 512 rows", ((28_672, 4096),), CSA)
    hca = Shape("4096 queries, 128 + up to 256 rows", ((28_672, 4096),), HCA)
    return [_case(widths, shape) for shape in shapes] + [
        _case(widths, bench, must_tflops=450, aim_tflops=550),
        _case(widths, Shape("512 queries, 128 + 512 rows", ((16_384, 512),), CSA), bench=True),
        _case(widths, hca, bench=True),
    ]


def _case(
    widths: Widths, shape: Shape, must_tflops: float | None = None, aim_tflops: float | None = None, bench: bool = False
) -> Case:
    flops = 4.0 * widths.heads * widths.head_dim * _keys(widths, shape)
    tokens = sum(new for _, new in shape.sequences)
    plain = shape.kind == "fp32"
    activation_bytes = 2.0 * tokens * widths.heads * widths.head_dim * (4 if plain else 2)

    def expected(inputs: Inputs) -> Tensor:
        return sparse_attention_reference(*_arguments(inputs))

    return Case(
        shape.name,
        lambda device, seed: _make(widths, shape, device, seed),
        lambda inputs: prefill_attention(*_arguments(inputs)),
        expected,
        tolerance=2e-6 if plain else 6e-3,
        moved_bytes=activation_bytes,
        flops=flops,
        matrix="fp32" if plain else "bf16",
        change=_change,
        must_us=flops / must_tflops / 1e6 if must_tflops else None,
        aim_us=flops / aim_tflops / 1e6 if aim_tflops else None,
        bench=bench or must_tflops is not None,
    )


def _arguments(i: Inputs) -> tuple[Any, ...]:
    return i.q, i.new_rows, i.batch, i.ring, i.row, i.window, i.sinks, i.turn, i.pages, i.entries


def _keys(widths: Widths, shape: Shape) -> int:
    """Rows seen, summed over the tokens."""
    total = 0
    for start, new in shape.sequences:
        for position in range(start, start + new):
            total += min(position + 1, widths.window)
            if shape.ratio:
                visible = (position + 1) // shape.ratio
                total += min(visible, widths.index_topk) if shape.ratio == CSA else visible
    return total


def _make(widths: Widths, shape: Shape, device: torch.device, seed: int) -> Inputs:
    """With a seed below 0 shapes only. Every row of ring and pages is valid, so that lengths may change."""
    known = seed >= 0
    generator = torch.Generator(device).manual_seed(max(seed, 0))
    dtype = torch.float32 if shape.kind == "fp32" else torch.bfloat16
    row = KVRow(shape.kind, widths.head_dim, widths.rope_dim, rounded=False)
    batch = _batch(shape, device)
    tokens, sequences = len(batch.positions), len(batch.slots)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device) if known else torch.empty(size, device=device)

    def packed(*size: int) -> Tensor:
        if not known:
            return torch.empty(*size, row.ring_bytes, dtype=torch.uint8, device=device)
        return row.pack(normal(*size, widths.head_dim))

    pages = None
    if shape.ratio:
        page_rows = PAGE_TOKENS // shape.ratio
        count = int(batch.page_table.max()) + 1
        pages = torch.empty(count, page_rows, row.row_bytes, dtype=torch.uint8, device=device)
        if known:
            values = packed(count, page_rows)
            edge = page_rows * row.value_bytes
            pages.flatten(1)[:, :edge] = values[..., : row.value_bytes].flatten(1)
            pages.flatten(1)[:, edge:] = values[..., row.value_bytes : row.row_bytes].flatten(1)
    entries: Entries | int | None = HCA if shape.ratio == HCA else None
    if shape.ratio == CSA:
        entries = Entries(
            torch.full((tokens, widths.index_topk), -1, dtype=torch.int32, device=device),
            torch.zeros(tokens, dtype=torch.int32, device=device),
        )
    angle = normal(tokens, widths.rope_dim // 2)
    inputs = Inputs(
        q=normal(tokens, widths.heads, widths.head_dim).to(dtype),
        new_rows=packed(tokens),
        batch=batch,
        ring=packed(sequences + 1, widths.window + ROLLBACK),
        row=row,
        window=widths.window,
        sinks=normal(widths.heads),
        turn=torch.stack((angle.cos(), angle.sin()), -1),
        pages=pages,
        entries=entries,
    )
    if known:
        _select(inputs, generator)
    return inputs


def _batch(shape: Shape, device: torch.device) -> Ragged:
    """Pages are dealt out to the sequences in turn, from page 1 on."""
    starts, news = zip(*shape.sequences, strict=True)
    width = max(-(-(start + new) // PAGE_TOKENS) for start, new in shape.sequences)
    count = len(starts)
    table = torch.arange(width)[None, :] * count + torch.arange(count)[:, None] + 1
    lengths = torch.tensor(news)
    cu_tokens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    ids = torch.arange(count).repeat_interleave(lengths)
    positions = torch.arange(int(cu_tokens[-1])) - cu_tokens[ids] + torch.tensor(starts)[ids]
    slots = torch.arange(1, count + 1)
    positions, ids, first, cu, slots, table = (
        tensor.to(device) for tensor in (positions, ids, torch.tensor(starts), cu_tokens, slots, table)
    )
    return Ragged(positions, ids, first, cu, slots, table, longest=max(news))


def _select(inputs: Inputs, generator: torch.Generator) -> None:
    """Fills in a random selection for every token, in ascending order."""
    entries, batch, pages = inputs.entries, inputs.batch, inputs.pages
    if not isinstance(entries, Entries) or pages is None:
        return
    tokens, topk = entries.rows.shape
    device = entries.rows.device
    visible = (batch.positions + 1) // CSA
    most = batch.page_table.shape[1] * pages.shape[1]
    noise = torch.rand(tokens, most, generator=generator, device=device)
    noise.masked_fill_(torch.arange(most, device=device) >= visible[:, None], 2.0)
    counts = visible.clamp(max=topk)
    chosen = noise.argsort(1)[:, :topk]
    number = torch.arange(chosen.shape[1], device=device)
    chosen = chosen.masked_fill(number >= counts[:, None], most).sort(1).values
    page = batch.page_table[batch.sequence_ids[:, None], (chosen // pages.shape[1]).clamp(max=batch.page_table.shape[1] - 1)]
    physical = page * pages.shape[1] + chosen % pages.shape[1]
    entries.rows.fill_(-1)
    entries.rows[:, : chosen.shape[1]] = torch.where(number < counts[:, None], physical, -1).int()
    entries.counts.copy_(counts)


def _change(inputs: Inputs) -> None:
    """Every sequence a third shorter before its chunk."""
    batch = inputs.batch
    shorter = batch.starts // 3
    batch.starts.sub_(shorter)
    batch.positions.sub_(shorter[batch.sequence_ids])
    _select(inputs, torch.Generator(inputs.q.device).manual_seed(99))
