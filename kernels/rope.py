"""Rotary embedding of the last channels, adjacent pairs (spec B.4)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend
from kernels.early import await_inputs, early
from kernels.jit import jit
from kernels.launch import launch
from kernels.workspace import empty

ROTATION_BLOCK = 256  # angles of one program


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
    """positions int64 [...] -> (cos, sin) [..., rope_dim/2, 2] of the float32 angle; float64, or float32 from the kernel."""
    if not backend.active().triton:
        return rotation_reference(positions, frequencies)
    turn = empty((*positions.shape, len(frequencies), 2), torch.float32, positions.device)
    grid = (triton.cdiv(turn.numel() // 2, ROTATION_BLOCK),)
    launch(
        _rotation,
        grid,
        positions,
        frequencies,
        turn,
        positions.numel(),
        PAIRS=len(frequencies),
        BLOCK=ROTATION_BLOCK,
        **early(),
    )
    return turn


def rotation_reference(positions: Tensor, frequencies: Tensor) -> Tensor:
    angle = (positions.float()[..., None] * frequencies).double()
    return torch.stack((angle.cos(), angle.sin()), -1)


def rope_reference(x: Tensor, turn: Tensor, inverse: bool) -> Tensor:
    """Turns the last rope_dim channels of x [T, ..., C] by `turn` [T, rope_dim/2, 2] (or back); x's dtype, a new tensor."""
    rope_dim = 2 * turn.shape[-2]
    factor = torch.view_as_complex(turn.double())
    if inverse:
        factor = factor.conj()
    factor = factor.view(-1, *(1,) * (x.dim() - 2), rope_dim // 2)
    rotary = x[..., -rope_dim:].double().contiguous()
    pairs = torch.view_as_complex(torch.unflatten(rotary, -1, (-1, 2)))
    turned = torch.view_as_real(pairs * factor).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-rope_dim], turned), -1)


@jit
def cos_sin(position, frequency):
    """cos and sin of the angle float32(position) * frequency, float32 within 1e-7 for any position: quarter turns are taken
    off in float64, and on what is left, -pi/4..pi/4, Taylor's series end soon."""
    quarters = (position.to(tl.float32) * frequency).to(tl.float64) * 0.6366197723675814
    whole = tl.floor(quarters + 0.5)
    angle = ((quarters - whole) * 1.5707963267948966).to(tl.float32)
    square = angle * angle
    sin = 1.0 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880))))
    cos = 1.0 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320 - square * (1 / 3628800)))))
    sin *= angle
    quarter = whole.to(tl.int32) & 3
    swapped, negative = (quarter & 1) == 1, quarter >= 2
    turned_cos, turned_sin = tl.where(swapped, -sin, cos), tl.where(swapped, cos, sin)
    return tl.where(negative, -turned_cos, turned_cos), tl.where(negative, -turned_sin, turned_sin)


@jit
def turn_of_token(turn_ptr, token, channel, CHANNELS: tl.constexpr, PAIRS: tl.constexpr):
    """(cos, sin) float32 [..., C / 2] for `channel` [..., C], the numbers of a row's channels: (1, 0) before the rotary
    ones. Loaded in the layout of the row itself, so that nothing has to move between threads."""
    rotary = channel - (CHANNELS - 2 * PAIRS)
    other = 1.0 - (channel % 2).to(tl.float32)
    turn = tl.load(turn_ptr + token * (2 * PAIRS) + rotary, (rotary >= 0) & (channel < CHANNELS), other)
    return tl.split(tl.reshape(turn.to(tl.float32), turn.shape[:-1] + [turn.shape[-1] // 2, 2]))  # noqa: RUF005


@jit
def turn_of_position(position, frequencies_ptr, CHANNELS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """As `turn_of_token` for one row of BLOCK channels, from the position itself: [BLOCK / 2]."""
    pair = tl.arange(0, BLOCK // 2) - (CHANNELS // 2 - PAIRS)
    frequency = tl.load(frequencies_ptr + pair, (pair >= 0) & (pair < PAIRS), 0.0)
    return cos_sin(position, frequency)


@jit
def turn_pairs(x, cos, sin):
    """x float32 [..., C] with adjacent channels (a, b) -> (a cos - b sin, a sin + b cos); cos, sin [..., C / 2]."""
    first, second = tl.split(tl.reshape(x, x.shape[:-1] + [x.shape[-1] // 2, 2]))  # noqa: RUF005
    return tl.reshape(tl.join(first * cos - second * sin, first * sin + second * cos), x.shape)


@jit(do_not_specialize=["tokens"])
def _rotation(positions_ptr, frequencies_ptr, turn_ptr, tokens, PAIRS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    count = tokens * PAIRS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    position = tl.load(positions_ptr + at // PAIRS, real, 0)
    cos, sin = cos_sin(position, tl.load(frequencies_ptr + at % PAIRS, real, 0.0))
    both = 2 * (tl.program_id(0) * BLOCK).to(tl.int64) + tl.arange(0, 2 * BLOCK)
    tl.store(turn_ptr + both, tl.reshape(tl.join(cos, sin), (2 * BLOCK,)), both < 2 * count)
