"""The kernels of the experts that run on every card: who works on which rows, the grouped product, the gate, the sum.

A step has P = T * k pairs (token, choice), numbered pair = token * k + choice. `segments_kernel` (or, of many,
`order_kernel`) sorts them by expert (stable, so the result does not depend on timing) and cuts each expert's rows into tiles
of TILE; both products run over those tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.jit import jit
from kernels.quant import inverse_power_of_two, power_of_two, ue8m0_for_fp8
from kernels.rounding import INTERPRETED, rounded


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """An upper bound of the number of tiles, from shapes alone: every expert with rows has one that is not full."""
    return min(pairs, experts + pairs // tile)


@jit(do_not_specialize=["pairs"])
def segments_kernel(ids, order, tiles, tile_count, pairs, PADDED: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Program e writes expert e's part. ids int32 or int64 [P]; order int32 [P]: the pairs sorted by expert; tiles int32
    [most, 4]: (expert, first place in `order`, rows, 0) of each tile; tile_count int32 [1].

    Every program counts all experts' pairs itself, so none waits for another.
    """
    expert = tl.program_id(0)
    number = tl.arange(0, PADDED)
    counts = tl.zeros((PADDED,), tl.int32)
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=0).to(tl.int32)
        counts += tl.histogram(chosen, PADDED, mask=pair < pairs)
    needed = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(number < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(number < expert, needed, 0), 0)
    count = tl.sum(tl.where(number == expert, counts, 0), 0)
    if expert == 0:
        tl.store(tile_count, tl.sum(needed, 0))
    _write_tiles(tiles, expert, first, count, first_tile, TILE)
    if count > 0:
        _write_order(ids, order, pairs, expert, first, CHUNK)


@jit(do_not_specialize=["pairs"])
def order_kernel(ids, order, segments, pairs, CHUNK: tl.constexpr):
    """The half of `segments_kernel` that grows with P, for a large one: program e writes expert e's part of `order`, and
    (first place, pairs) to segments int32 [E, 2]."""
    expert = tl.program_id(0)
    before = tl.zeros((CHUNK,), tl.int32)
    equal = tl.zeros((CHUNK,), tl.int32)
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=0x7FFFFFFF).to(tl.int32)
        before += (chosen < expert).to(tl.int32)
        equal += (chosen == expert).to(tl.int32)
    first, count = tl.sum(before, 0), tl.sum(equal, 0)
    tl.store(segments + expert * 2, first)
    tl.store(segments + expert * 2 + 1, count)
    if count > 0:
        _write_order(ids, order, pairs, expert, first, CHUNK)


@jit
def tiles_kernel(segments, tiles, tile_count, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """The other half: `tiles` and tile_count from segments. Program e writes expert e's tiles."""
    expert = tl.program_id(0)
    number = tl.arange(0, PADDED)
    counts = tl.load(segments + number * 2 + 1, mask=number < EXPERTS, other=0)
    needed = (counts + TILE - 1) // TILE
    if expert == 0:
        tl.store(tile_count, tl.sum(needed, 0))
    first_tile = tl.sum(tl.where(number < expert, needed, 0), 0)
    first, count = tl.load(segments + expert * 2), tl.load(segments + expert * 2 + 1)
    _write_tiles(tiles, expert, first, count, first_tile, TILE)


@jit
def _write_tiles(tiles, expert, first, count, first_tile, TILE: tl.constexpr):
    field = tl.arange(0, 4)
    for tile in range((count + TILE - 1) // TILE):
        begin = tile * TILE
        value = tl.where(field == 0, expert, tl.where(field == 1, first + begin, tl.minimum(TILE, count - begin)))
        tl.store(tiles + (first_tile + tile) * 4 + field, tl.where(field == 3, 0, value))


@jit
def _write_order(ids, order, pairs, expert, first, CHUNK: tl.constexpr):
    """The pairs of `expert`, ascending, from order[first] on."""
    place = first
    for at in range(0, pairs, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        mine = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, pair, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)


@jit
def _fp4_values(codes):
    """int32 0..15 -> the e2m1 value in bf16: its bits are those of a tiny bf16, 2^126 times smaller."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 6)
    if INTERPRETED:  # it cannot multiply bf16
        return (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True) * 8.507059173023462e37


@jit
def _fp4_tile(weight, scales, row, step, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[rows, BLOCK_K] of one expert's FP4 matrix [N, K] from channel step * BLOCK_K: bf16, exact."""
    at = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    inside = (row < N)[:, None] & (at < K // 2)[None, :]
    packed = tl.load(weight + row[:, None] * (K // 2) + at[None, :], mask=inside, other=0).to(tl.int32)
    group = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
    known = (row < N)[:, None] & (group < K // 32)[None, :]
    byte = tl.load(scales + row[:, None] * (K // 32) + group[None, :], mask=known, other=127).to(tl.int32)
    values = tl.join(_fp4_values(packed & 15), _fp4_values(packed >> 4))
    values = tl.reshape(values, (row.shape[0], BLOCK_K // 32, 32)) * power_of_two(byte).to(values.dtype)[:, :, None]
    return tl.reshape(values, (row.shape[0], BLOCK_K))


@jit
def _wide_tile(weight, scales, row, step, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same of a matrix in bf16 (scales None), or in FP8 with a scale per 128 x 128."""
    channel = step * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (row < N)[:, None] & (channel < K)[None, :]
    values = tl.load(weight + row[:, None] * K + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    if scales is not None:
        byte = tl.load(scales + row // 128 * ((K + 127) // 128) + step * BLOCK_K // 128, mask=row < N, other=127)
        values *= power_of_two(byte.to(tl.int32))[:, None]
    return values.to(tl.bfloat16)


@jit
def grouped_kernel(
    x,
    x_scales,
    weights,
    scales,
    order,
    tiles,
    tile_count,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    TOPK: tl.constexpr,
    GATHER: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[row] = weights[expert of the row] x[row], for one tile of rows and BLOCK_N of the N channels.

    GATHER: rows of x are tokens, rows of out places in `order`. Otherwise rows of x are places, rows of out pairs.
    x e4m3 [.., K] with ue8m0 x_scales [.., K/128], or float32 with x_scales None. A tile has TILE <= ROWS rows.
    """
    tile = tl.program_id(1)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tiles + tile * 4).to(tl.int64)
    place = tl.load(tiles + tile * 4 + 1) + tl.arange(0, ROWS)
    live = tl.arange(0, ROWS) < tl.load(tiles + tile * 4 + 2)
    pair = tl.load(order + place, mask=live, other=0)
    source = ((pair // TOPK) if GATHER else place).to(tl.int64)
    target = (place if GATHER else pair).to(tl.int64)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if KIND == "fp4":
        weights += expert * (N * (K // 2))
        scales += expert * (N * (K // 32))
    else:
        weights += expert * (N * K)
        if scales is not None:
            scales += expert * (((N + 127) // 128) * ((K + 127) // 128))
    WIDE: tl.constexpr = (K + 127) // 128
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for step in range((K + BLOCK_K - 1) // BLOCK_K):
        channel = step * BLOCK_K + tl.arange(0, BLOCK_K)
        values = tl.load(x + source[:, None] * K + channel[None, :], mask=live[:, None] & (channel < K)[None, :], other=0.0)
        if KIND == "fp4":
            matrix = _fp4_tile(weights, scales, row, step, N, K, BLOCK_K)
        else:
            matrix = _wide_tile(weights, scales, row, step, N, K, BLOCK_K)
        if INTERPRETED or x_scales is None:  # the interpreter cannot multiply bf16
            part = tl.dot(values.to(tl.float32), tl.trans(matrix.to(tl.float32)), input_precision="ieee")
        else:
            part = tl.dot(values.to(tl.bfloat16), tl.trans(matrix))
        if x_scales is not None:
            byte = tl.load(x_scales + source * WIDE + step * BLOCK_K // 128, mask=live, other=127).to(tl.int32)
            part *= power_of_two(byte)[:, None]
        total += part
    where = target[:, None] * N + row[None, :]
    tl.store(out + where, rounded(total, out.dtype.element_ty), mask=live[:, None] & (row < N)[None, :])


@jit
def arrange_kernel(
    x,
    x_scales,
    order,
    tiles,
    tile_count,
    arranged,
    factors,
    K: tl.constexpr,
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (tile, i) copies BLOCK channels of the tokens of a tile, e4m3 [T, K], to their places in `arranged` [P, K]; i 0
    also turns their ue8m0 bytes [T, K/128] into factors float32 [tile, K/128, TILE]. arranged None: x has rows in that order
    already, only the factors are wanted. K is a multiple of 128."""
    tile = tl.program_id(0)
    if tile >= tl.load(tile_count):
        return
    STEPS: tl.constexpr = K // 128
    PADDED: tl.constexpr = triton.next_power_of_2(STEPS)
    line = tl.arange(0, TILE)
    live = line < tl.load(tiles + tile * 4 + 2)
    place = (tl.load(tiles + tile * 4 + 1) + line).to(tl.int64)
    source = place
    if arranged is not None:
        source = tl.load(order + place, mask=live, other=0).to(tl.int64) // TOPK
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = live[:, None] & (channel < K)[None, :]
        values = tl.load(x + source[:, None] * K + channel[None, :], mask=inside)
        tl.store(arranged + place[:, None] * K + channel[None, :], values, mask=inside)
    if tl.program_id(1) == 0:
        step = tl.arange(0, PADDED)
        known = live[:, None] & (step < STEPS)[None, :]
        byte = tl.load(x_scales + source[:, None] * STEPS + step[None, :], mask=known, other=0).to(tl.int32)
        where = (tile * STEPS + step)[None, :] * TILE + line[:, None]
        tl.store(factors + where, power_of_two(byte), mask=(step < STEPS)[None, :] & (line >= 0)[:, None])


@jit(do_not_specialize=["count"])
def swiglu_kernel(
    gate_up,
    order,
    weights,
    out,
    out_scales,
    count,
    limit,
    stride,
    INNER: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """silu(min(gate, limit)) * clip(up, +-limit) * weight, ROWS blocks of 128 channels a program; blocks are numbered row by
    row. With out_scales the result becomes e4m3; before that it is rounded to gate_up's dtype, as everything between two
    matrices is. weights None: every weight is 1; order None: row i is pair i."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, channel = block // BLOCKS, (block % BLOCKS * 128)[:, None] + tl.arange(0, 128)[None, :]
    inside = (block < count * BLOCKS)[:, None] & (channel < INNER)
    at = row[:, None] * stride + channel
    gate = tl.minimum(tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(gate_up + at + INNER, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    if weights is not None:
        pair = row
        if order is not None:
            pair = tl.load(order + row, mask=block < count * BLOCKS, other=0).to(tl.int64)
        hidden *= tl.load(weights + pair, mask=block < count * BLOCKS, other=0.0)[:, None]
    hidden = rounded(hidden, gate_up.dtype.element_ty)
    where = row[:, None] * INNER + channel
    if out_scales is None:
        tl.store(out + where, hidden, mask=inside)
    else:
        hidden = hidden.to(tl.float32)
        byte = ue8m0_for_fp8(tl.max(tl.abs(hidden), 1))
        tl.store(out + where, rounded(hidden * inverse_power_of_two(byte)[:, None], tl.float8e4nv), mask=inside)
        tl.store(out_scales + block, byte.to(tl.uint8), mask=block < count * BLOCKS)


@jit
def sum_kernel(
    answers,
    shared,
    out,
    shared_stride,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[t] = answers[t * k] + ... + answers[t * k + k - 1] (+ shared[t]), in that order, float32, rounded once."""
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOPK):
        total += tl.load(answers + (token * TOPK + choice) * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * shared_stride + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + channel, rounded(total, out.dtype.element_ty), mask=inside)
