"""RMSNorm (spec B), alone and with what always follows it: FP8 activations, or the rotary turn of the queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend
from kernels.early import await_inputs, early
from kernels.jit import jit
from kernels.launch import launch
from kernels.quant import ACTIVATION_BLOCK, Quantised, inverse_power_of_two, quantise_fp8, scale_to_byte, ue8m0_for_fp8
from kernels.rope import rope_reference, turn_of_token, turn_pairs
from kernels.rounding import rounded, rounded_through
from kernels.workspace import empty

QUERY_HEADS = 4  # heads of one program, a warp each


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] over its last dim, times weight [C]; in x's dtype, rounded once."""
    if not backend.active().triton:
        return rms_norm_reference(x, weight, eps)
    normed = empty(x.shape, x.dtype, x.device)
    _launch_rms_norm(x, weight, eps, normed, None)
    return normed


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return (wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(weight).to(x.dtype)


def rms_norm_quantise(x: Tensor, weight: Tensor, eps: float) -> Quantised:
    """x [T, C] -> its norm, rounded to x's dtype and then to FP8: all that a quantised weight wants of it."""
    if not backend.active().triton:
        return rms_norm_quantise_reference(x, weight, eps)
    codes = empty(x.shape, torch.float8_e4m3fn, x.device)
    scales = empty((len(x), triton.cdiv(x.shape[1], ACTIVATION_BLOCK)), torch.uint8, x.device)
    _launch_rms_norm(x, weight, eps, codes, scales)
    return Quantised(codes, scales)


def rms_norm_quantise_reference(x: Tensor, weight: Tensor, eps: float) -> Quantised:
    codes, scale = quantise_fp8(rms_norm_reference(x, weight, eps), ACTIVATION_BLOCK)
    return Quantised(codes[..., : x.shape[-1]].contiguous(), scale_to_byte(scale))


def query_norm_reference(x: Tensor, eps: float) -> Tensor:
    """x [..., C] over its last dim, without a weight. The released code does this one in the activation dtype: squares,
    mean, mean + eps and root are each rounded to it, and the golden values show that."""
    mean = x.square().double().mean(-1, keepdim=True).to(x.dtype)
    return x * (mean + eps).double().rsqrt_().to(x.dtype)


def query_norm_rope(q: Tensor, turn: Tensor, eps: float) -> Tensor:
    """q [T, H, d]: its norm as in `query_norm_reference`, turned by `turn` [T, rope/2, 2]. The kernel works in place and
    gives q."""
    if not backend.active().triton:
        return rope_reference(query_norm_reference(q, eps), turn, inverse=False)
    tokens, heads, channels = q.shape
    block_heads = min(QUERY_HEADS, triton.next_power_of_2(heads))
    launch(
        _query_norm_rope,
        (tokens * triton.cdiv(heads, block_heads),),
        q,
        turn,
        eps,
        q.stride(0),
        q.stride(1),
        HEADS=heads,
        CHANNELS=channels,
        PAIRS=turn.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK=triton.next_power_of_2(channels),
        num_warps=block_heads,
        **early(),
    )
    return q


def _launch_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None) -> None:
    """out: in x's dtype, or with scales e4m3."""
    channels = x.shape[-1]
    rows = x if x.dim() == 2 else x.view(-1, channels)
    block = max(triton.next_power_of_2(channels), ACTIVATION_BLOCK)
    launch(
        _rms_norm,
        (len(rows),),
        rows,
        weight,
        out,
        scales,
        eps,
        rows.stride(0),
        CHANNELS=channels,
        BLOCK=block,
        num_warps=min(max(block // 1024, 1), 8),
        **early(),
    )


@jit
def norm_factor(x, eps, CHANNELS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row x float32 [BLOCK] that is 0 past its `CHANNELS`."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / CHANNELS + eps)


@jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    eps,
    row_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    real = channel < CHANNELS
    weight = tl.load(weight_ptr + channel, real, 0.0).to(tl.float32)
    x = tl.load(x_ptr + row * row_stride + channel, real, 0.0)
    wide = x.to(tl.float32)
    normed = wide * norm_factor(wide, eps, CHANNELS) * weight
    if scales_ptr is None:
        tl.store(out_ptr + row * CHANNELS + channel, rounded(normed, x.dtype), real)
    else:
        blocks: tl.constexpr = BLOCK // 128
        scales: tl.constexpr = (CHANNELS + 127) // 128
        grouped = tl.reshape(rounded_through(normed, x.dtype), (blocks, 128))
        byte = ue8m0_for_fp8(tl.max(tl.abs(grouped), 1))
        codes = rounded(grouped * inverse_power_of_two(byte)[:, None], tl.float8e4nv)
        tl.store(out_ptr + row * CHANNELS + channel, tl.reshape(codes, (BLOCK,)), real)
        block = tl.arange(0, blocks)
        tl.store(scales_ptr + row * scales + block, byte.to(tl.uint8), block < scales)


@jit
def _query_norm_rope(
    q_ptr,
    turn_ptr,
    eps,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    real = (head < HEADS) & (channel < CHANNELS)
    at = q_ptr + token * token_stride + head * head_stride + channel
    x = tl.load(at, real, 0.0)
    wide = x.to(tl.float32)
    cos, sin = turn_of_token(turn_ptr, token, channel + 0 * head, CHANNELS, PAIRS)
    squares = rounded_through(wide * wide, x.dtype)
    mean = rounded(tl.sum(squares, 1, keep_dims=True) / CHANNELS, x.dtype).to(tl.float32)
    factor = rounded(1.0 / tl.sqrt_rn(rounded(mean + eps, x.dtype).to(tl.float32)), x.dtype).to(tl.float32)
    normed = rounded_through(wide * factor, x.dtype)
    tl.store(at, rounded(turn_pairs(normed, cos, sin), x.dtype), real)
