"""Spans of 32-bit words: moved between two memories, of which one may be another GPU's, and summed up for a digest.

A table of spans, three int64 vectors [n] on the device, says where each begins in the source and in the target and how many
words it has, 1..SPAN_WORDS: one program each. A memory is named by a tensor that lies in it, and positions count from where
that begins: they may be outside of it, in another allocation on either side.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernels import backend
from kernels.jit import jit
from kernels.launch import launch

SPAN_WORDS = 16_384
_BLOCK = 2048


def move_spans(source: Tensor, target: Tensor, begins: Tensor, ends_up: Tensor, counts: Tensor) -> None:
    """source, target int32, contiguous. The words of every span go from `begins` in source to `ends_up` in target; spans of
    the target do not overlap."""
    if not backend.active().triton:
        for begin, to, count in zip(begins.tolist(), ends_up.tolist(), counts.tolist(), strict=True):
            _words(target, to, count).copy_(_words(source, begin, count))
        return
    launch(_move_kernel, (len(counts),), source, target, begins, ends_up, counts, _BLOCK, num_warps=8)


def sum_spans(memory: Tensor, begins: Tensor, counts: Tensor, weights: Tensor, sums: Tensor) -> None:
    """memory int32, weights int64 [SPAN_WORDS]; writes sums, int64 [n]: each span's words times `weights`, added modulo 2^64.

    No result from the workspace, which belongs to the thread that computes: this is called by the one that moves bytes.
    """
    if not backend.active().triton:
        for i, (begin, count) in enumerate(zip(begins.tolist(), counts.tolist(), strict=True)):
            sums[i] = (_words(memory, begin, count) * weights[:count]).sum()
        return
    launch(_sum_kernel, (len(counts),), memory, begins, counts, weights, sums, _BLOCK, num_warps=8)


def _words(memory: Tensor, begin: int, count: int) -> Tensor:
    """int32 [count] of a memory, as the kernels see it."""
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr() + 4 * begin, memory.device, 4 * count)
    return torch.empty(0, dtype=torch.int32, device=memory.device).set_(storage, 0, (count,), (1,))


@jit(do_not_specialize_on_alignment=["begins", "ends_up", "counts"])
def _move_kernel(source, target, begins, ends_up, counts, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    begin, to = tl.load(begins + span), tl.load(ends_up + span)
    count = tl.load(counts + span).to(tl.int32)
    if (begin | to | count) % 4 == 0:  # 16 bytes at a time; the compiler sees by the products that it may
        _move_span(source + begin // 4 * 4, target + to // 4 * 4, count // 4 * 4, BLOCK)
    else:
        _move_span(source + begin, target + to, count, BLOCK)


@jit
def _move_span(source, target, count, BLOCK: tl.constexpr):
    for begin in range(0, count, BLOCK):
        words = begin + tl.arange(0, BLOCK)
        tl.store(target + words, tl.load(source + words, mask=words < count), mask=words < count)


@jit(do_not_specialize_on_alignment=["begins", "counts", "sums"])
def _sum_kernel(memory, begins, counts, weights, sums, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    memory += tl.load(begins + span)
    count = tl.load(counts + span).to(tl.int32)
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, count, BLOCK):
        words = begin + tl.arange(0, BLOCK)
        total += tl.load(memory + words, mask=words < count, other=0).to(tl.int64) * tl.load(weights + words)
    tl.store(sums + span, tl.sum(total, 0))
