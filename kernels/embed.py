"""Token ids to residual streams (spec B.1)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend, workspace
from kernels.jit import jit
from kernels.launch import launch


def embed(tokens: Tensor, table: Tensor, streams: int) -> Tensor:
    """tokens int64 [T], table [V, D], rows may be apart -> [T, streams, D], equal copies, in the table's dtype; zeros for an
    id that is not in the table."""
    if not backend.active().triton:
        return embed_reference(tokens, table, streams)
    vocab, width = table.shape
    result = workspace.empty((len(tokens), streams, width), table.dtype, table.device)
    block = min(2048, triton.next_power_of_2(width))
    grid = (len(tokens), triton.cdiv(width, block))
    launch(_embed_kernel, grid, tokens, table, result, vocab, table.stride(0), width, streams, block, num_warps=4)
    return result


def embed_reference(tokens: Tensor, table: Tensor, streams: int) -> Tensor:
    inside = (tokens >= 0) & (tokens < len(table))
    rows = table.index_select(0, tokens.clamp(0, len(table) - 1))
    rows = torch.where(inside[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
    return rows[:, None].repeat(1, streams, 1)


@jit(do_not_specialize=["vocab"])
def _embed_kernel(tokens, table, result, vocab, row_stride, width: tl.constexpr, STREAMS: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < width
    token = tl.load(tokens + row)
    known = inside & (token >= 0) & (token < vocab)
    values = tl.load(table + token * row_stride + channels, mask=known, other=0.0)
    for stream in tl.static_range(STREAMS):
        tl.store(result + (row * STREAMS + stream) * width + channels, values, mask=inside)
