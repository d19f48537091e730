"""The exact `topk` best scores of rows whose lengths only the device knows.

One program a row. It never reads a long row: of groups of neighbours it knows the largest score, and the K groups with the
largest of these hold the K best scores. So it chooses K groups, then K scores out of theirs. For a very long row, groups of
groups come first. A tie goes to the lower entry at every level, which keeps the choice exact: of the groups whose maximum
equals the K-th, those left out lie behind as many entries of that value as can be chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.early import await_inputs, early
from kernels.jit import jit
from kernels.launch import launch
from kernels.ragged import Ragged

GROUP = 8  # scores a stored maximum covers
WARPS = 8


def choose_rows(
    chosen: Tensor,
    counts: Tensor,
    scores: Tensor,
    maxima: Tensor,
    batch: Ragged,
    rows: int,
    ratio: int,
    first: int = 0,
) -> None:
    """Fills chosen int32 [T, topk] and counts int32 [T] (see indexer.Entries) for as many tokens from `first` on as scores
    float32 [n, capacity] and maxima [n, capacity / 8] have; rows a page."""
    topk = chosen.shape[1]
    few = triton.next_power_of_2(topk)
    launch(
        _choose_kernel,
        (len(scores),),
        scores,
        maxima,
        batch.positions,
        batch.sequence_ids,
        batch.page_table,
        chosen,
        counts,
        first,
        batch.page_table.stride(0),
        scores.shape[1],
        RATIO=ratio,
        ROWS=rows,
        TOPK=topk,
        FEW=few,
        FINE=max(1024, 4 * few),
        COARSE=max(1024, 16 * few),
        num_warps=WARPS,
        **early(),
    )


def unscored_rows(chosen: Tensor, counts: Tensor, batch: Ragged, rows: int, ratio: int) -> None:
    """The same where no token can see more than topk entries: all of them."""
    topk = chosen.shape[1]
    launch(
        _every_kernel,
        (len(chosen),),
        batch.positions,
        batch.sequence_ids,
        batch.page_table,
        chosen,
        counts,
        batch.page_table.stride(0),
        RATIO=ratio,
        ROWS=rows,
        TOPK=topk,
        FEW=triton.next_power_of_2(topk),
        num_warps=1,
    )


@jit
def _store_every(table, target, visible, ROWS, TOPK, FEW):
    entry = tl.arange(0, FEW)
    page = tl.load(table + entry // ROWS, mask=entry < visible, other=0)
    tl.store(target + entry, tl.where(entry < visible, page * ROWS + entry % ROWS, -1).to(tl.int32), mask=entry < TOPK)


@jit(do_not_specialize=["table_stride"])
def _every_kernel(
    positions,
    sequence_ids,
    page_table,
    chosen,
    counts,
    table_stride,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    TOPK: tl.constexpr,
    FEW: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    visible = ((tl.load(positions + token) + 1) // RATIO).to(tl.int32)
    tl.store(counts + token, visible)
    _store_every(page_table + tl.load(sequence_ids + token) * table_stride, chosen + token * TOPK, visible, ROWS, TOPK, FEW)


@jit
def _ordered(value):
    """float32 -> int32 that compares alike."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _value(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _narrow(value, low, high, TOPK, NEAR: tl.constexpr):
    """Closes in on the TOPK-th largest of the values [N] (-inf: none). low, high: ordered; at least `low` are TOPK or more,
    at least `high` fewer. Gives (low, high, more, exact): exact = TOPK are at least `low`; otherwise high = low + 1, and the
    tie at `low` has to be broken; more = how many are at least `high`.

    Two pivots a step, since a step costs the exchange between warps; N < 32768, so both counts travel in one integer. They
    divide the range of the numbers, which is quickest for scores, and every fourth time that of their bits, which ends.
    NEAR: `low` is a good guess, so begin close to it.
    """
    more, exact, step = 0, 0, 0
    while (exact == 0) & (low + 1 < high):
        if step % 4 == 3:
            half = (low & high) + ((low ^ high) >> 1)
            first, second = half, (half & high) + ((half ^ high) >> 1)
        else:
            bottom, size = _value(low), _value(high) - _value(low)
            near = NEAR & (step == 0)
            first = _ordered(bottom + size * tl.where(near, 0.0156, 0.3333))
            second = _ordered(bottom + size * tl.where(near, 0.0625, 0.6667))
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        above = tl.sum((value >= _value(first)).to(tl.int32) + ((value >= _value(second)).to(tl.int32) << 16))
        above_first, above_second = above & 0xFFFF, above >> 16
        if above_second >= TOPK:
            low = second
            exact = (above_second == TOPK).to(tl.int32)
        elif above_first >= TOPK:
            low, high, more = first, second, above_second
            exact = (above_first == TOPK).to(tl.int32)
        else:
            high, more = first, above_first
        step += 1
    return low, high, more, exact


@jit
def _store_best(target, value, item, low, high, TOPK, NEAR: tl.constexpr):
    """Stores the items [N] of the TOPK largest values in the order of their index; gives the value of the last, ordered."""
    low, high, more, exact = _narrow(value, low, high, TOPK, NEAR)
    if exact != 0:
        chosen = value >= _value(low)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(target + place, item, mask=chosen)
    else:
        sure, tied = value >= _value(high), value == _value(low)
        running = tl.cumsum(sure.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
        ties = running >> 16
        place = (running & 0xFFFF) + tl.minimum(ties, TOPK - more) - 1
        tl.store(target + place, item, mask=sure | (tied & (ties <= TOPK - more)))
    tl.debug_barrier()
    return low


@jit
def _span_maximum(maxima, span, groups, size):
    """The largest of the `size` maxima from group span * size on, for each span."""
    best = tl.load(maxima + span * size, mask=span * size < groups, other=float("-inf"))
    for step in range(1, size):
        at = span * size + step
        best = tl.maximum(best, tl.load(maxima + at, mask=at < groups, other=float("-inf")))
    return best


@jit
def _first_level(value, target, spans, TOPK):
    """The TOPK best of the values [N] of so many spans, ascending, into target. Gives the ordered value of the last of them
    and the successor of the best."""
    span = tl.arange(0, value.shape[0])
    real = span < spans
    value = tl.where(real, value, float("-inf"))
    low = _ordered(tl.min(tl.where(real, value, float("inf"))))
    high = _ordered(tl.max(value) + 0.0) + 1  # 0.0: -0 becomes 0, which it equals
    return _store_best(target, value, span, low, high, TOPK, False), high


@jit(do_not_specialize=["table_stride"])
def _choose_kernel(
    scores,
    maxima,
    positions,
    sequence_ids,
    page_table,
    chosen,
    counts,
    first,
    table_stride,
    capacity,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    TOPK: tl.constexpr,
    FEW: tl.constexpr,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`target`, the row of the result, holds the spans that are left until the entries are known."""
    await_inputs(EARLY)
    GROUP: tl.constexpr = 8
    BRANCH: tl.constexpr = 4  # spans that a span of the next coarser level has
    local = tl.program_id(0).to(tl.int64)
    token = first + local
    scores += local * capacity
    maxima += local * (capacity // GROUP)
    fine = tl.arange(0, FINE)
    value = tl.load(maxima + fine, mask=fine < capacity // GROUP, other=0.0)  # asked for before the length is known
    visible = ((tl.load(positions + token) + 1) // RATIO).to(tl.int32)
    table = page_table + tl.load(sequence_ids + token) * table_stride
    target = chosen + token * TOPK
    tl.store(counts + token, tl.minimum(visible, TOPK))
    if visible <= TOPK:
        _store_every(table, target, visible, ROWS, TOPK, FEW)
        return
    groups = tl.cdiv(visible, GROUP)
    slot = tl.arange(0, FEW)
    low, high = 0, 0
    if groups <= TOPK:
        tl.store(target + slot, slot, mask=slot < TOPK)
        tl.debug_barrier()
    elif groups <= FINE:
        low, high = _first_level(value, target, groups, TOPK)
    else:
        size = 1
        while tl.cdiv(groups, size) > COARSE:
            size *= BRANCH
        span = tl.arange(0, COARSE)
        if size == 1:
            coarse = tl.load(maxima + span, mask=span < groups, other=float("-inf"))
        else:
            coarse = _span_maximum(maxima, span, groups, size)
        low, high = _first_level(coarse, target, tl.cdiv(groups, size), TOPK)
        while size > 1:
            size //= BRANCH
            parent = tl.load(target + slot, mask=slot < TOPK, other=groups)
            tl.debug_barrier()
            child = tl.reshape(parent[:, None] * BRANCH + tl.arange(0, BRANCH)[None, :], (FEW * BRANCH,))
            low = _store_best(target, _span_maximum(maxima, child, groups, size), child, low, high, TOPK, True)

    left = tl.minimum(groups, TOPK)
    group = tl.load(target + slot, mask=slot < left, other=0)
    entry = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    real = (slot[:, None] < left) & (entry < visible)
    score = tl.load(scores + entry, mask=real, other=float("-inf"))
    if ROWS % GROUP == 0:  # a group lies in one page
        page = tl.load(table + group * GROUP // ROWS)
        row = (page * ROWS + group * GROUP % ROWS).to(tl.int32)[:, None] + tl.arange(0, GROUP)[None, :]
    else:
        row = (tl.load(table + entry // ROWS, mask=real, other=0) * ROWS + entry % ROWS).to(tl.int32)
    tl.debug_barrier()
    if groups <= TOPK:
        low = _ordered(tl.min(tl.where(real, score, float("inf"))))
        high = _ordered(tl.max(score) + 0.0) + 1
    _store_best(target, tl.reshape(score, (FEW * GROUP,)), tl.reshape(row, (FEW * GROUP,)), low, high, TOPK, True)
