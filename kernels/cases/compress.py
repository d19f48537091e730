"""The compressors of V4: CSA rows, HCA rows and index keys; steps in which entries close, and chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cases.case import TINY, V4_FLASH, Case, Widths
from kernels.cases.elementwise import fields, step
from kernels.compress import CompressorWeights, compress, compress_reference
from kernels.quant import Quantised, dequantise_fp4
from kernels.ragged import Ragged
from kernels.rope import plain_frequencies
from kernels.rows import PLAIN_DTYPES, IndexRow, KVRow, planes

EPS = 1e-6
PAGE_TOKENS = 256
ROLLBACK = 4


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the three compressors of a model."""

    name: str
    ratio: int
    row: KVRow | IndexRow
    width: int
    rope_dim: int
    dtype: torch.dtype  # of the activations
    tolerance: float  # of the rounded entries: a value at a border goes to its neighbour

    @property
    def columns(self) -> int:
        return (4 if self.ratio == 4 else 2) * self.width


@dataclass(frozen=True, slots=True)
class PackedKeys(Quantised):
    """MXFP4 index keys: compared as values, since a rounding may give a block another scale (kernels/measure.py)."""

    def values(self) -> Tensor:
        return dequantise_fp4(self.codes, self.scales)


@dataclass(frozen=True, slots=True)
class Inputs:
    projected: Tensor
    weights: CompressorWeights
    batch: Ragged
    ring: Tensor
    pages: Tensor


def kinds(widths: Widths, row_kind: str) -> list[Kind]:
    dtype = torch.float32 if row_kind == "fp32" else torch.bfloat16
    rounded = row_kind != "fp32"
    row = KVRow(row_kind, widths.head_dim, widths.rope_dim, rounded)
    keys = IndexRow(row_kind, widths.index_dim, rounded)
    name = "" if row_kind == "fp8" else f" {row_kind}"
    return [
        Kind(f"CSA{name}", 4, row, widths.head_dim, widths.rope_dim, dtype, 4e-3),
        Kind(f"HCA{name}", 128, row, widths.head_dim, widths.rope_dim, dtype, 4e-3),
        Kind(f"index{name}", 4, keys, widths.index_dim, widths.rope_dim, dtype, 2e-2),
    ]


def make(kind: Kind, tokens: int, chunk: int, closing: bool, device: torch.device, seed: int) -> Inputs:
    """A step of `tokens`, `chunk` of them a sequence. closing: the last token of every sequence closes an entry."""
    sequences, ring_rows = -(-tokens // chunk), (2 if kind.ratio == 4 else 1) * kind.ratio + ROLLBACK
    overlap = kind.ratio == 4

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=device)

    projected, ring = empty(tokens, kind.columns), empty(sequences + 1, ring_rows, kind.columns)
    ape, norm = empty(kind.ratio, kind.columns // 2), empty(kind.width).to(kind.dtype)  # as a checkpoint's is loaded
    windows = torch.zeros(sequences, dtype=torch.int64, device=device)
    rows = PAGE_TOKENS // kind.ratio
    if seed >= 0:
        generator = torch.Generator(device).manual_seed(seed)
        for each in (projected, ring, ape):
            each.normal_(generator=generator)
        norm.normal_(1.0, 0.2, generator=generator)
        windows.random_(1, 8, generator=generator)
    starts = windows * kind.ratio + (kind.ratio - chunk % kind.ratio) % kind.ratio + (0 if closing else 1)
    batch = step(tokens, chunk, starts)
    pages = 9 + chunk // PAGE_TOKENS
    batch.page_table = torch.arange(sequences * pages, device=device).flip(0).view(sequences, pages) + 1
    block = torch.zeros(sequences * pages + 1, -(-rows * kind.row.row_bytes // 64) * 64, dtype=torch.uint8, device=device)
    field = block[:, : rows * kind.row.row_bytes].unflatten(1, (rows, kind.row.row_bytes))
    weights = CompressorWeights(kind.ratio, overlap, ape, norm, EPS, plain_frequencies(kind.rope_dim, 1e4).to(device))
    return Inputs(projected, weights, batch, ring, field)


def change(inputs: Inputs) -> None:
    """The same tokens four windows later, in other slots and pages."""
    inputs.batch.starts.add_(4 * inputs.weights.ratio)
    inputs.batch.positions.add_(4 * inputs.weights.ratio)
    inputs.batch.slots.copy_(inputs.batch.slots.flip(0))
    inputs.batch.page_table.copy_(inputs.batch.page_table.flip(0))


def written(inputs: Inputs, row: KVRow | IndexRow) -> tuple[Tensor | Quantised, ...]:
    """Ring and pages as numbers."""
    values, scales = planes(inputs.pages, row)
    if row.kind in PLAIN_DTYPES:
        return inputs.ring, values.view(PLAIN_DTYPES[row.kind])
    if row.kind == "mxfp4":
        return inputs.ring, PackedKeys(values, scales)
    if isinstance(row, IndexRow):
        return inputs.ring, values.view(torch.float8_e4m3fn), scales.view(torch.float32)
    return inputs.ring, *fields(values, row)[:2], scales


def case(name: str, kind: Kind, tokens: int, chunk: int, closing: bool) -> Case:
    def run(i: Inputs) -> tuple[Tensor | Quantised, ...]:
        compress(i.projected, i.weights, i.batch, i.ring, i.pages, kind.row, kind.dtype)
        return written(i, kind.row)

    def expected(i: Inputs) -> tuple[Tensor | Quantised, ...]:
        compress_reference(i.projected, i.weights, i.batch, i.ring, i.pages, kind.row, kind.dtype)
        return written(i, kind.row)

    length = (2 if kind.ratio == 4 else 1) * kind.ratio
    sequences = -(-tokens // chunk)
    kept = min(chunk, length + ROLLBACK) * sequences
    read = tokens + (sequences * max(length - chunk, 0) if closing and chunk < kind.ratio else 0)
    closed = tokens // kind.ratio if chunk >= kind.ratio else sequences * closing
    moved = 4.0 * kind.columns * (read + kept) + closed * kind.row.row_bytes
    return Case(
        f"compress {kind.name}, {name}",
        lambda device, seed: make(kind, tokens, chunk, closing, device, seed),
        run,
        expected,
        kind.tolerance,
        moved,
        change=change,
    )


def cases(widths: Widths) -> list[Case]:
    found = []
    for kind in kinds(widths, "bf16") + kinds(widths, "fp32"):
        found.append(case("5 tokens, all close", kind, 5, 1, True))
    packed = IndexRow("mxfp4", widths.index_dim, rounded=True)
    keys = Kind("index mxfp4", 4, packed, widths.index_dim, widths.rope_dim, torch.bfloat16, 2e-2)
    for kind in [*kinds(widths, "fp8"), keys]:
        for tokens in (1, 64) if widths is V4_FLASH else (5,):
            found.append(case(f"{tokens} tokens, none closes", kind, tokens, 1, False))
            found.append(case(f"{tokens} tokens, all close", kind, tokens, 1, True))
        found.append(case("8 x 3 tokens", kind, 24, 3, True))
        if widths is TINY:
            found.append(case("2 x 50 tokens", kind, 100, 50, True))
        for tokens in (512, 4096) if widths is V4_FLASH else (300,):
            found.append(case(f"chunk of {tokens}", kind, tokens, tokens, True))
    return found
