"""Rotary embedding of the last channels, adjacent pairs (spec B.4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def plain_frequencies(rope_dim: int, theta: float) -> Tensor:
    """theta^(-2i / rope_dim), float32 [rope_dim / 2]."""
    return theta ** -(torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)


def yarn_frequencies(
    rope_dim: int, theta: float, factor: float, original_positions: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """YaRN: slow channels are stretched by `factor`, fast ones left alone, float32 [rope_dim / 2]. No amplitude."""
    frequencies = plain_frequencies(rope_dim, theta)

    def channel(rotations: float) -> float:
        return rope_dim * math.log(original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(beta_fast)), 0)
    high = min(math.ceil(channel(beta_slow)), rope_dim - 1)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / factor * ramp


def rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """positions int64 [...] -> (cos, sin) float64 [..., rope_dim/2, 2] of the float32 angle."""
    angle = (positions.float()[..., None] * frequencies).double()
    return torch.stack((angle.cos(), angle.sin()), -1)


def rope(x: Tensor, turn: Tensor, inverse: bool = False) -> Tensor:
    """Turns the last rope_dim channels of x [T, ..., C] by `turn` [T, rope_dim/2, 2] (or back); x's dtype, a new tensor."""
    return rope_reference(x, turn, inverse)


def rope_reference(x: Tensor, turn: Tensor, inverse: bool) -> Tensor:
    rope_dim = 2 * turn.shape[-2]
    factor = torch.view_as_complex(turn)
    if inverse:
        factor = factor.conj()
    factor = factor.view(-1, *(1,) * (x.dim() - 2), rope_dim // 2)
    rotary = x[..., -rope_dim:].double().contiguous()
    pairs = torch.view_as_complex(torch.unflatten(rotary, -1, (-1, 2)))
    turned = torch.view_as_real(pairs * factor).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-rope_dim], turned), -1)
