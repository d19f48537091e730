"""Number formats: FP8 and FP4 with power-of-two block scales (spec B.9, D), and the Hadamard rotation (B.7).

The references hold dequantised values in float64, in which every product of two quantised numbers is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.jit import jit

FP8_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4
FP4_MAX = 6.0
FP4_AMAX_FLOOR = 6.0 * 2.0**-126
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ACTIVATION_BLOCK = 128
KV_BLOCK = 64
FP4_BLOCK = 32
WEIGHT_BLOCK = 128
_MANTISSA_BITS = 52  # of a float64
_MANTISSA = (1 << _MANTISSA_BITS) - 1


@dataclass(frozen=True, slots=True)
class Quantised:
    """Activations in FP8: e4m3 codes [T, K] and one ue8m0 byte per 128 of K, uint8 [T, ceil(K / 128)] (spec B.9)."""

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """float64 [T, K]."""
        scale = scale_from_byte(self.scales).repeat_interleave(ACTIVATION_BLOCK, -1)
        return self.codes.double() * scale[..., : self.codes.shape[-1]]


def ceil_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x. x float64, positive and normal; exact, no logarithm."""
    return ((x.view(torch.int64) + _MANTISSA) & ~_MANTISSA).view(torch.float64)


def floor_power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is not above x. x float64, positive and normal."""
    return (x.view(torch.int64) & ~_MANTISSA).view(torch.float64)


def split_blocks(x: Tensor, block: int) -> Tensor:
    """[..., C] -> [..., ceil(C / block), block]; a partial last block is filled up with zeros."""
    if missing := -x.shape[-1] % block:
        x = functional.pad(x, (0, missing))
    return torch.unflatten(x, -1, (-1, block))


def quantise_fp8(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """x [..., C] -> (e4m3 [..., C'], scale float64 [..., C'/block]), C' = C rounded up to whole blocks.

    scale = 2^ceil(log2(max(amax, 1e-4) / 448)) of each block, round to nearest even (spec B.9).
    """
    codes, scale = _quantise_blocks(split_blocks(x.double(), block))
    return codes.flatten(-2), scale.squeeze(-1)


def _quantise_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks float64 [..., n, block] -> (e4m3 of the same shape, scale float64 [..., n, 1])."""
    largest = torch.linalg.vector_norm(blocks, torch.inf, -1, keepdim=True)
    scale = ceil_power_of_two(largest.clamp_(min=FP8_AMAX_FLOOR).div_(FP8_MAX))
    return (blocks / scale).float().to(torch.float8_e4m3fn), scale  # x / 2^k is exact: this rounds once


@cache
def _fp8_table(device: torch.device) -> Tensor:
    return torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn).double()


def fp8_values(codes: Tensor) -> Tensor:
    """The values of e4m3 bytes (uint8) as float64: a table is five times faster than torch's conversion on a CPU."""
    return _fp8_table(codes.device).index_select(0, codes.int().flatten()).view(codes.shape)


def simulate_fp8(x: Tensor, block: int) -> Tensor:
    """What is left of x [..., C] after FP8 in blocks: float64 [..., C]."""
    codes, scale = _quantise_blocks(split_blocks(x.double(), block))
    return codes.double().mul_(scale).flatten(-2)[..., : x.shape[-1]]


def quantise_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., C], C a multiple of 32 -> (e2m1 values as float64 [..., C], scale float64 [..., C/32]).

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)); a tie goes to the even code, which is round-half-even on the
    grid of the value's own binade (steps 0.5, 1, 2).
    """
    blocks = torch.unflatten(x.double(), -1, (-1, FP4_BLOCK))
    scale = ceil_power_of_two(blocks.abs().amax(-1).clamp_(min=FP4_AMAX_FLOOR).div_(FP4_MAX))
    scaled = blocks / scale[..., None]
    step = floor_power_of_two(scaled.abs().clamp_(min=1.0)).div_(2.0)
    return (scaled / step).round_().mul_(step).flatten(-2), scale


def simulate_fp4(x: Tensor) -> Tensor:
    """What is left of x [..., C] after FP4 in blocks of 32: float64 [..., C]."""
    values, scale = quantise_fp4(x)
    return (torch.unflatten(values, -1, (-1, FP4_BLOCK)) * scale[..., None]).flatten(-2)


def fp4_codes(values: Tensor) -> Tensor:
    """e2m1 values -> codes 0..15 (uint8); the sign is bit 3, kept for a negative zero."""
    table = torch.tensor(FP4_VALUES, dtype=torch.float64, device=values.device)
    return torch.searchsorted(table, values.double().abs()).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def pack_fp4(codes: Tensor) -> Tensor:
    """codes 0..15 [..., K] -> bytes int8 [..., K/2]; the even index is the low nibble (spec D)."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.int8)


def unpack_fp4(packed: Tensor) -> Tensor:
    """bytes [..., K/2] -> values float64 [..., K]."""
    positive = torch.tensor(FP4_VALUES, dtype=torch.float64, device=packed.device)
    table = torch.cat((positive, -positive))
    codes = packed.view(torch.uint8).int()
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2)]


def scale_from_byte(byte: Tensor) -> Tensor:
    """ue8m0: byte -> 2^(byte - 127) as float64."""
    return ((byte.long() + (1023 - 127)) << _MANTISSA_BITS).view(torch.float64)


def scale_to_byte(scale: Tensor) -> Tensor:
    """A power of two as float64 -> its ue8m0 byte."""
    return ((scale.view(torch.int64) >> _MANTISSA_BITS) - (1023 - 127)).to(torch.uint8)


def dequantise_fp8_weight(weight: Tensor, scale_bytes: Tensor) -> Tensor:
    """e4m3 [O, K] with ue8m0 bytes [ceil(O/128), ceil(K/128)] -> float64 [O, K]; the last blocks may be partial."""
    scale = scale_from_byte(scale_bytes).repeat_interleave(WEIGHT_BLOCK, 0).repeat_interleave(WEIGHT_BLOCK, 1)
    return fp8_values(weight.view(torch.uint8)) * scale[: weight.shape[0], : weight.shape[1]]


def dequantise_fp4(packed: Tensor, scale_bytes: Tensor) -> Tensor:
    """Bytes [..., K/2] with ue8m0 bytes [..., K/32] -> float64 [..., K]."""
    values = unpack_fp4(packed)
    return (torch.unflatten(values, -1, (-1, FP4_BLOCK)) * scale_from_byte(scale_bytes)[..., None]).flatten(-2)


@cache
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Sylvester's orthonormal Walsh-Hadamard matrix, float64 [size, size]; size a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / math.sqrt(size)


def hadamard(x: Tensor) -> Tensor:
    """x [..., size] times the Hadamard matrix, in x's dtype."""
    return (x.double() @ hadamard_matrix(x.shape[-1], x.device)).to(x.dtype)


# Device functions. Scales are found with integers on the bits of a float32, so they are exact where a logarithm is not.


@jit
def ue8m0_for_fp8(amax):
    """float32 -> int32, the ue8m0 byte of 2^ceil(log2(max(amax, 1e-4) / 448)); 448 = 1.75 * 2^8."""
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) >> 23) - 8


@jit
def ue8m0_for_fp4(amax):
    """float32 -> int32, the ue8m0 byte of 2^ceil(log2(max(amax, 6 * 2^-126) / 6)); 6 = 1.5 * 2^2."""
    bits = tl.maximum(amax, 7.052966104933725e-38).to(tl.int32, bitcast=True)
    return ((bits + 0x3FFFFF) >> 23) - 2


@jit
def power_of_two(byte):
    """int32 ue8m0 byte, 1..254 -> float32 2^(byte - 127)."""
    return (byte << 23).to(tl.float32, bitcast=True)


@jit
def inverse_power_of_two(byte):
    """int32 ue8m0 byte, 1..253 -> float32 2^(127 - byte)."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@jit
def fp4_code(value, x):
    """e2m1 value, float32, that was made of x -> its code 0..15, int32. The sign is x's: that of a negative zero is kept."""
    size = tl.abs(value)
    magnitude = tl.where(size < 2.0, 2.0 * size, tl.where(size < 4.0, size + 2.0, 0.5 * size + 4.0)).to(tl.int32)
    return magnitude | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@jit
def round_fp4(x):
    """float32 in -6..6 -> the nearest e2m1 value, float32; ties to the even code. Adding 1.5 * 2^23 times the step of the
    value's binade rounds half to even on it."""
    size = tl.abs(x)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    shift = step * 12582912.0
    return (x + shift) - shift
