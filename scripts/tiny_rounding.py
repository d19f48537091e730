"""Rounding as in serving, with the gradient of the identity (spec B.9). Fast forms of the references in kernels/quant.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant import (
    ACTIVATION_BLOCK,
    FP4_AMAX_FLOOR,
    FP4_BLOCK,
    FP4_MAX,
    FP8_AMAX_FLOOR,
    FP8_MAX,
    WEIGHT_BLOCK,
)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded - x).detach()


def power_of_two_scale(amax: Tensor, largest: float, floor: float) -> Tensor:
    """2^ceil(log2(amax / largest)) of a block."""
    return torch.exp2(torch.ceil(torch.log2(amax.detach().clamp(min=floor) / largest)))


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return straight_through(x, (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale)


def fp8(x: Tensor, block: int = ACTIVATION_BLOCK) -> Tensor:
    """x [..., C] as FP8 blocks of `block` channels keep it, bf16 (B.9)."""
    blocks = torch.unflatten(x.float(), -1, (-1, block))
    scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True), FP8_MAX, FP8_AMAX_FLOOR)
    return to_e4m3(blocks, scale).flatten(-2).bfloat16()


def fp4(x: Tensor) -> Tensor:
    """x [..., C] as FP4 blocks of 32 channels keep it, bf16."""
    blocks = torch.unflatten(x.float(), -1, (-1, FP4_BLOCK))
    scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True), FP4_MAX, FP4_AMAX_FLOOR)
    scaled = blocks / scale
    size = scaled.detach().abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return straight_through(blocks, torch.round(scaled / step) * step * scale).flatten(-2).bfloat16()


def fp8_weight(weight: Tensor) -> Tensor:
    """[..., O, K], whole blocks of 128 x 128 -> bf16, exact."""
    blocks = torch.unflatten(torch.unflatten(weight, -1, (-1, WEIGHT_BLOCK)), -3, (-1, WEIGHT_BLOCK))
    scale = power_of_two_scale(blocks.abs().amax((-3, -1), keepdim=True), FP8_MAX, FP8_AMAX_FLOOR)
    return to_e4m3(blocks, scale).flatten(-4, -3).flatten(-2).bfloat16()
