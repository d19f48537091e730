"""What one cached row is, byte for byte: a KV row in FP8, BF16 or FP32, and an index row in these or MXFP4.

A row is its values, then its scales (none in the plain formats). A page keeps the two apart: `rows` times the values,
then `rows` times the scales (spec C.5), so that values are aligned to 16 bytes. A ring, whose rows travel one by one,
keeps them together and pads a row to 16 bytes; rows of a step that are not stored yet have the ring's form.

A quantised checkpoint was trained with its rows rounded (spec B.9), so for it the values are the same in all three
formats: the stored FP8 row is the rounding itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quant import (
    FP4_BLOCK,
    FP8_MAX,
    KV_BLOCK,
    ceil_power_of_two,
    dequantise_fp4,
    fp4_codes,
    fp8_values,
    hadamard,
    pack_fp4,
    quantise_fp4,
    quantise_fp8,
    scale_from_byte,
    scale_to_byte,
    simulate_fp4,
    simulate_fp8,
)

PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCALE_BYTES_ALIGNMENT = 8
RING_ALIGNMENT = 16


def planes(pages: Tensor, row: KVRow | IndexRow) -> tuple[Tensor, Tensor]:
    """A page field uint8 [pages, rows, row_bytes] as its values [pages, rows, value_bytes] and scales [pages, rows, ..]."""
    block, rows = pages.flatten(1), pages.shape[1]
    values = block[:, : rows * row.value_bytes].unflatten(1, (rows, row.value_bytes))
    return values, block[:, rows * row.value_bytes :].unflatten(1, (rows, row.scale_bytes))


def read_rows(pages: Tensor, row: KVRow | IndexRow, page: Tensor, number: Tensor) -> Tensor:
    """Rows `number` of the pages `page` (int64, broadcast together): uint8 [..., row_bytes], values then scales."""
    values, scales = planes(pages, row)
    return torch.cat((values[page, number], scales[page, number]), -1)


def write_rows(pages: Tensor, row: KVRow | IndexRow, page: Tensor, number: Tensor, packed: Tensor) -> None:
    """Stores packed rows [M, row_bytes or more] as rows `number` [M] of the pages `page` [M]."""
    values, scales = planes(pages, row)
    values[page, number] = packed[..., : row.value_bytes]
    scales[page, number] = packed[..., row.value_bytes : row.row_bytes]


@dataclass(frozen=True, slots=True)
class KVRow:
    """A KV row of `head_dim` channels, the last `rope_dim` of them rotary.

    "fp8": [channels before the rotary ones as e4m3][rotary as bf16][one ue8m0 byte per 64 of the former, padded to 8];
    584 bytes for head_dim 512 (spec C.5). `rounded`: plain formats round like FP8 too.
    """

    kind: str
    head_dim: int
    rope_dim: int
    rounded: bool

    @property
    def plain_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def value_bytes(self) -> int:
        if self.kind in PLAIN_DTYPES:
            return self.head_dim * PLAIN_DTYPES[self.kind].itemsize
        return self.plain_dim + 2 * self.rope_dim

    @property
    def scale_bytes(self) -> int:
        blocks = 0 if self.kind in PLAIN_DTYPES else -(-self.plain_dim // KV_BLOCK)
        return _round_up(blocks, SCALE_BYTES_ALIGNMENT)

    @property
    def row_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes

    @property
    def ring_bytes(self) -> int:
        return _round_up(self.row_bytes, RING_ALIGNMENT)

    def pack(self, x: Tensor) -> Tensor:
        """x [..., head_dim] -> uint8 [..., ring_bytes], padded with zeros."""
        row = torch.zeros(*x.shape[:-1], self.ring_bytes, dtype=torch.uint8, device=x.device)
        if self.kind in PLAIN_DTYPES:
            row[..., : self.value_bytes] = self._round(x).to(PLAIN_DTYPES[self.kind]).contiguous().view(torch.uint8)
            return row
        codes, scale = quantise_fp8(x[..., : self.plain_dim], KV_BLOCK)
        scales_at = self.value_bytes
        row[..., : self.plain_dim] = codes[..., : self.plain_dim].view(torch.uint8)
        row[..., self.plain_dim : scales_at] = x[..., self.plain_dim :].bfloat16().contiguous().view(torch.uint8)
        row[..., scales_at : scales_at + scale.shape[-1]] = scale_to_byte(scale)
        return row

    def unpack(self, row: Tensor) -> Tensor:
        """uint8 [..., row_bytes or ring_bytes] (last dim contiguous) -> float64 [..., head_dim]."""
        if self.kind in PLAIN_DTYPES:
            return row[..., : self.value_bytes].contiguous().view(PLAIN_DTYPES[self.kind]).double()
        values = torch.empty(*row.shape[:-1], self.head_dim, dtype=torch.float64, device=row.device)
        scales_at = self.value_bytes
        values[..., : self.plain_dim] = fp8_values(row[..., : self.plain_dim])
        values[..., self.plain_dim :] = row[..., self.plain_dim : scales_at].view(torch.bfloat16)
        for block, first in enumerate(range(0, self.plain_dim, KV_BLOCK)):
            scale = scale_from_byte(row[..., scales_at + block, None])
            values[..., first : min(first + KV_BLOCK, self.plain_dim)] *= scale
        return values

    def _round(self, x: Tensor) -> Tensor:
        if not self.rounded:
            return x
        return torch.cat((simulate_fp8(x[..., : self.plain_dim], KV_BLOCK).to(x.dtype), x[..., self.plain_dim :]), -1)


@dataclass(frozen=True, slots=True)
class IndexRow:
    """An indexer key of `dim` channels. `rounded`: Hadamard and FP4 first (spec B.7), the query alike.

    "fp8": [dim e4m3][one float32 power-of-two scale], 132 bytes for dim 128. FP4 values survive it exactly while the
    block scales of a row are within 2^14 of each other: 0.5 * smallest / (largest * 2^-6) >= 2^-9, e4m3's last bit.
    "mxfp4": [dim e2m1, the even channel in a byte's low half][one ue8m0 byte per 32], 68 bytes for dim 128: the rounding
    itself, so FP4 values always survive it.
    """

    kind: str
    dim: int
    rounded: bool

    @property
    def value_bytes(self) -> int:
        if self.kind == "mxfp4":
            return self.dim // 2
        return self.dim * (PLAIN_DTYPES[self.kind].itemsize if self.kind in PLAIN_DTYPES else 1)

    @property
    def scale_bytes(self) -> int:
        if self.kind == "mxfp4":
            return self.dim // FP4_BLOCK
        return 0 if self.kind in PLAIN_DTYPES else torch.float32.itemsize

    @property
    def row_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes

    def round(self, x: Tensor) -> Tensor:
        """x [..., dim] as the scores see it, in x's dtype."""
        return simulate_fp4(hadamard(x)).to(x.dtype) if self.rounded else x

    def pack(self, x: Tensor) -> Tensor:
        """x [..., dim] -> uint8 [..., row_bytes]."""
        if self.kind == "mxfp4":
            values, scale = quantise_fp4(hadamard(x) if self.rounded else x)
            return torch.cat((pack_fp4(fp4_codes(values)).view(torch.uint8), scale_to_byte(scale)), -1)
        x = self.round(x)
        if self.kind in PLAIN_DTYPES:
            return x.to(PLAIN_DTYPES[self.kind]).contiguous().view(torch.uint8)
        scale = ceil_power_of_two(x.double().abs().amax(-1, keepdim=True).clamp_(min=FP8_MAX * 2.0**-120) / FP8_MAX)
        codes = (x / scale).float().to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat((codes, scale.float().view(torch.uint8)), -1)

    def unpack(self, row: Tensor) -> Tensor:
        """uint8 [..., row_bytes] (last dim contiguous) -> float64 [..., dim]."""
        if self.kind in PLAIN_DTYPES:
            return row.view(PLAIN_DTYPES[self.kind]).double()
        if self.kind == "mxfp4":
            return dequantise_fp4(row[..., : self.value_bytes], row[..., self.value_bytes :])
        scale = row[..., self.dim :].view(torch.float32)
        return fp8_values(row[..., : self.dim]) * scale


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
