"""Streams on their way into the draft layer, and from it into its next pass (spec B.11)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import backend, workspace
from kernels.early import await_inputs, early
from kernels.embed import embed
from kernels.jit import jit
from kernels.launch import launch
from kernels.rounding import rounded


def join_streams(token: Tensor, streams: Tensor) -> Tensor:
    """token [T, D] added to each of a token's streams [T, n, D] -> [T, n, D] in their dtype, rounded once. Rows and streams
    may lie apart."""
    if not backend.active().triton:
        return join_streams_reference(token, streams)
    count, n, width = streams.shape
    joined = workspace.empty(streams.shape, streams.dtype, streams.device)
    block = min(1024, triton.next_power_of_2(width))
    launch(
        _join_streams,
        (count, triton.cdiv(width, block)),
        token,
        streams,
        joined,
        token.stride(0),
        streams.stride(0),
        streams.stride(1),
        WIDTH=width,
        STREAMS=n,
        BLOCK=block,
        num_warps=max(1, min(4, block // 256)),
        **early(),
    )
    return joined


def join_streams_reference(token: Tensor, streams: Tensor) -> Tensor:
    return streams + token[:, None]


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """Rows `index` int64 [B] of source [R, ...] -> [B, ...]; zeros for a number that is not one of its rows. A row is
    contiguous, rows may lie apart."""
    return embed(index, source.view(len(source), -1), 1).view(len(index), *source.shape[1:])


@jit
def _join_streams(
    token_ptr,
    streams_ptr,
    joined_ptr,
    token_stride,
    row_stride,
    stream_stride,
    WIDTH: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program makes BLOCK channels of one token's streams."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < WIDTH
    token = tl.load(token_ptr + row * token_stride + channel, real, 0.0).to(tl.float32)
    for stream in tl.static_range(STREAMS):
        x = tl.load(streams_ptr + row * row_stride + stream * stream_stride + channel, real, 0.0)
        joined = rounded(x.to(tl.float32) + token, x.dtype)
        tl.store(joined_ptr + (row * STREAMS + stream) * WIDTH + channel, joined, real)
