"""Norms, rotary turns, packed KV rows, index queries and the window ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cases.case import V4_FLASH, Case, Widths
from kernels.kvrows import index_queries, index_queries_reference, kv_rows, kv_rows_reference
from kernels.norm import (
    query_norm_reference,
    query_norm_rope,
    rms_norm,
    rms_norm_quantise,
    rms_norm_quantise_reference,
    rms_norm_reference,
)
from kernels.ragged import Ragged, store_ring, store_ring_reference
from kernels.rope import plain_frequencies, rope_reference, rotation, rotation_reference
from kernels.rows import PLAIN_DTYPES, IndexRow, KVRow

EPS = 1e-6
TOLERANCE = 3e-4  # bf16 results: a rounding or two that fall the other way
FP8_TOLERANCE = 4e-3  # the same where the rounding is to e4m3
RING_ROWS = 132
DRAFTS = 4


@dataclass(frozen=True, slots=True)
class Inputs:
    """x, a weight per channel, the turn of every token, a decode step of one token a sequence, its rings."""

    x: Tensor
    weight: Tensor
    batch: Ragged
    turn: Tensor
    frequencies: Tensor
    ring: Tensor


def make(
    shape: tuple[int, ...], dtype: torch.dtype, rope_dim: int, ring_bytes: int, chunk: int, device: torch.device, seed: int
) -> Inputs:
    """A step of shape[0] tokens, `chunk` of them a sequence (the last one may have fewer)."""
    x = torch.empty(*shape, dtype=dtype, device=device)
    weight = torch.empty(shape[-1], dtype=torch.bfloat16, device=device)
    starts = torch.zeros(-(-shape[0] // chunk), dtype=torch.int64, device=device)
    frequencies = plain_frequencies(rope_dim, 1e4).to(device)
    if seed >= 0:
        generator = torch.Generator(device).manual_seed(seed)
        x.normal_(generator=generator)
        weight.normal_(1.0, 0.3, generator=generator)
        starts.random_(0, 1 << 20, generator=generator)
    batch = step(shape[0], chunk, starts)
    turn = rotation_reference(batch.positions, frequencies).float()
    ring = torch.zeros(len(starts) + 1, RING_ROWS, ring_bytes, dtype=torch.uint8, device=device)
    return Inputs(x, weight, batch, turn, frequencies, ring)


def step(tokens: int, chunk: int, starts: Tensor) -> Ragged:
    device, sequences = starts.device, len(starts)
    token = torch.arange(tokens, device=device)
    return Ragged(
        positions=starts[token // chunk] + token % chunk,
        sequence_ids=token // chunk,
        starts=starts,
        cu_tokens=(torch.arange(sequences + 1, device=device) * chunk).clamp(max=tokens),
        slots=torch.arange(sequences, device=device).flip(0) + 1,
        page_table=torch.zeros(sequences, 1, dtype=torch.int64, device=device),
        longest=min(chunk, tokens),
    )


def change(inputs: Inputs) -> None:
    """Other positions and slots in the same tensors."""
    inputs.batch.starts.add_(77)
    inputs.batch.positions.add_(77)
    inputs.batch.slots.copy_(inputs.batch.slots.flip(0))
    inputs.turn.copy_(rotation_reference(inputs.batch.positions, inputs.frequencies))


def fields(packed: Tensor, row: KVRow) -> tuple[Tensor, ...]:
    """Packed rows as numbers where they are numbers."""
    at = row.value_bytes
    if row.kind in PLAIN_DTYPES:
        return (packed[..., :at].view(PLAIN_DTYPES[row.kind]),)
    codes, rotary = packed[..., : row.plain_dim], packed[..., row.plain_dim : at]
    return codes.view(torch.float8_e4m3fn), rotary.view(torch.bfloat16), packed[..., at:]


def cases(widths: Widths) -> list[Case]:
    found: list[Case] = []
    for tokens in (1, 64, 4096) if widths is V4_FLASH else (1, 37):
        found += [*norm_cases(widths, tokens), *turn_cases(widths, tokens), *row_cases(widths, tokens)]
    return found


def case(
    name: str,
    shape: tuple[int, ...],
    widths: Widths,
    run: Any,
    expected: Any,
    tolerance: float,
    moved_bytes: float,
    ring_bytes: int = 16,
    chunk: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    def made(device: torch.device, seed: int) -> Inputs:
        return make(shape, dtype, widths.rope_dim, ring_bytes, chunk, device, seed)

    return Case(name, made, run, expected, tolerance, moved_bytes, change=change)


def norm_cases(widths: Widths, tokens: int) -> list[Case]:
    found = []
    for channels in (widths.hidden, widths.q_lora):
        name, shape, count = f"{channels}, {tokens} tokens", (tokens, channels), tokens * channels
        found.append(
            case(
                f"rms_norm {name}",
                shape,
                widths,
                lambda i: rms_norm(i.x, i.weight, EPS),
                lambda i: rms_norm_reference(i.x, i.weight, EPS),
                TOLERANCE,
                4.0 * count,
            )
        )
        found.append(
            case(
                f"rms_norm_quantise {name}",
                shape,
                widths,
                lambda i: rms_norm_quantise(i.x, i.weight, EPS),
                lambda i: rms_norm_quantise_reference(i.x, i.weight, EPS),
                FP8_TOLERANCE,
                3.0 * count,
            )
        )
    return found


def turn_cases(widths: Widths, tokens: int) -> list[Case]:
    queries = (tokens, widths.heads, widths.head_dim)
    moved = 4.0 * tokens * widths.heads * widths.head_dim
    return [
        case(
            f"query_norm_rope, {tokens} tokens",
            queries,
            widths,
            lambda i: query_norm_rope(i.x, i.turn, EPS),
            lambda i: rope_reference(query_norm_reference(i.x, EPS), i.turn, inverse=False),
            TOLERANCE,
            moved,
        ),
        case(
            f"rotation, {tokens} tokens",
            (tokens, 1),
            widths,
            lambda i: rotation(i.batch.positions, i.frequencies),
            lambda i: rotation_reference(i.batch.positions, i.frequencies),
            1e-6,
            tokens * (8 + 4.0 * widths.rope_dim),
        ),
    ]


def row_cases(widths: Widths, tokens: int) -> list[Case]:
    keys = IndexRow("fp8", widths.index_dim, rounded=True)
    row = KVRow("fp8", widths.head_dim, widths.rope_dim, rounded=True)
    found = [
        kv_case(widths, tokens, row, torch.bfloat16),
        query_case(widths, tokens, keys, torch.bfloat16),
        ring_case(widths, tokens),
    ]
    if tokens == 1:  # a prefill step's, which go into their ring later, and the other formats
        found.append(kv_case(widths, tokens, row, torch.bfloat16, into_ring=False))
        for kind, dtype, rounded in (("bf16", torch.bfloat16, True), ("fp32", torch.float32, False)):
            found.append(kv_case(widths, tokens, KVRow(kind, widths.head_dim, widths.rope_dim, rounded), dtype))
            found.append(query_case(widths, tokens, IndexRow(kind, widths.index_dim, rounded), dtype))
    return found


def kv_case(widths: Widths, tokens: int, row: KVRow, dtype: torch.dtype, into_ring: bool = True) -> Case:
    def stored(i: Inputs) -> tuple[Tensor, ...]:
        packed = kv_rows(i.x, i.weight, EPS, i.turn, row, i.batch, i.ring if into_ring else None)
        return *fields(packed, row), *fields(i.ring, row)

    def stored_reference(i: Inputs) -> tuple[Tensor, ...]:
        packed = kv_rows_reference(i.x, i.weight, EPS, i.turn, row, i.batch, i.ring if into_ring else None)
        return *fields(packed, row), *fields(i.ring, row)

    return case(
        f"kv_rows {row.kind}, {tokens} tokens{'' if into_ring else ', no ring'}",
        (tokens, widths.head_dim),
        widths,
        stored,
        stored_reference,
        FP8_TOLERANCE,
        tokens * (dtype.itemsize * widths.head_dim + 2.0 * row.ring_bytes),
        row.ring_bytes,
        min(2, tokens),
        dtype,
    )


def query_case(widths: Widths, tokens: int, keys: IndexRow, dtype: torch.dtype) -> Case:
    def queries(i: Inputs) -> tuple[Tensor, ...]:
        codes, scales = index_queries(i.x, i.turn, keys)
        return (codes,) if scales is None else (codes, scales)

    def queries_reference(i: Inputs) -> tuple[Tensor, ...]:
        codes, scales = index_queries_reference(i.x, i.turn, keys)
        return (codes,) if scales is None else (codes, scales)

    count, packed = widths.index_heads * widths.index_dim, keys.dim if keys.kind == "fp8" else keys.dim * dtype.itemsize
    return case(
        f"index_queries {keys.kind}, {tokens} tokens",
        (tokens, widths.index_heads, widths.index_dim),
        widths,
        queries,
        queries_reference,
        2e-2,  # a value at a rounding border moves by a whole FP4 step
        tokens * (dtype.itemsize * count + widths.index_heads * (packed + 4.0)),
        dtype=dtype,
    )


def ring_case(widths: Widths, tokens: int) -> Case:
    row_bytes = KVRow("fp8", widths.head_dim, widths.rope_dim, rounded=True).ring_bytes
    chunk = min(1024, tokens)

    def ring_after(i: Inputs) -> Tensor:
        store_ring(i.batch, i.ring, i.x.view(torch.uint8))
        return i.ring

    def ring_after_reference(i: Inputs) -> Tensor:
        store_ring_reference(i.batch, i.ring, i.x.view(torch.uint8))
        return i.ring

    return case(
        f"store_ring, {tokens} tokens",
        (tokens, row_bytes // 2),
        widths,
        ring_after,
        ring_after_reference,
        0.0,
        2.0 * min(RING_ROWS, chunk) * -(-tokens // chunk) * row_bytes,
        row_bytes,
        chunk,
    )
