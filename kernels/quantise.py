"""Activations to FP8 (spec B.9), where no other kernel could do it on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend, workspace
from kernels.jit import jit
from kernels.launch import launch
from kernels.quant import ACTIVATION_BLOCK, Quantised, inverse_power_of_two, quantise_fp8, scale_to_byte, ue8m0_for_fp8
from kernels.rounding import rounded

MANY_BLOCKS = 16_384  # from here on a program takes more blocks, since the card is full anyway


def quantise(x: Tensor) -> Quantised:
    """x [T, K], bf16 or float32, rows may be apart -> e4m3 codes and a power-of-two scale per 128 of K."""
    if not backend.active().triton:
        return quantise_reference(x)
    tokens, width = x.shape
    blocks = triton.cdiv(width, ACTIVATION_BLOCK)
    codes = workspace.empty((tokens, width), torch.float8_e4m3fn, x.device)
    scales = workspace.empty((tokens, blocks), torch.uint8, x.device)
    rows = 64 if tokens * blocks >= MANY_BLOCKS else 8
    launch(
        _quantise_kernel,
        (triton.cdiv(tokens * blocks, rows),),
        x,
        codes,
        scales,
        tokens * blocks,
        x.stride(0),
        WIDTH=width,
        BLOCKS=blocks,
        BLOCK=ACTIVATION_BLOCK,
        ROWS=rows,
        num_warps=4,
    )
    return Quantised(codes, scales)


def quantise_reference(x: Tensor) -> Quantised:
    codes, scale = quantise_fp8(x, ACTIVATION_BLOCK)
    return Quantised(codes[:, : x.shape[1]], scale_to_byte(scale))


@jit(do_not_specialize=["count"])
def _quantise_kernel(
    x, codes, scales, count, x_stride, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """A program takes ROWS of all `count` blocks, which are numbered row by row of x."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, column = block // BLOCKS, (block % BLOCKS * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = (block < count)[:, None] & (column < WIDTH)
    values = tl.load(x + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    byte = ue8m0_for_fp8(tl.max(tl.abs(values), 1))
    codes_out = rounded(values * inverse_power_of_two(byte)[:, None], tl.float8e4nv)
    tl.store(codes + row[:, None] * WIDTH + column, codes_out, mask=inside)
    tl.store(scales + block, byte.to(tl.uint8), mask=block < count)
