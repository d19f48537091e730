"""The attention kernel of a prefill chunk for Hopper: head_dim 512, bf16, a multiple of 64 heads.

A persistent program takes one token (64 of its heads) after another. Keys come in pairs of tiles, 64 keys each; of every tile
there are two halves of 256 channels. Three warp groups:
  producer  brings query and keys into shared memory, half tile after half tile: rows that follow each other by the copy
            engine, the others one by one
  left      logits and weights of the even tiles, channels 0-255 of the result
  right     logits and weights of the odd tiles, channels 256-511 of the result
Weights and running maxima cross through shared memory, so that one group's softmax runs beside the other's products. Tile
after tile both groups scale their part of the result alike: it is the online softmax over single tiles.

There are barriers for "half tile full", "half tile free" and "weights of this tile there". They are enough: a group that sees
half tiles of the next pair full knows that the other has read what it is about to overwrite, for the producer waited for that.
A half tile is freed as early as can be (left finishes a pair before it looks at the next): loading it again takes as long as
the products of a tile.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels import backend
from kernels.attention_prefill import Scratch
from kernels.jit import gluon_jit
from kernels.launch import launch
from kernels.ragged import Ragged

LOG2_E = gl.constexpr(1.4426950408889634)
HEADS = gl.constexpr(64)  # of a program: the rows of a wgmma
KEYS = gl.constexpr(64)  # of a tile
HALF = gl.constexpr(256)  # channels
DIM = gl.constexpr(512)
NOTHING = gl.constexpr(-1e30)  # a maximum over no keys; finite, so that differences are
GROUP_THREADS = gl.constexpr(128)
RIGHT_REGISTERS, PRODUCER_REGISTERS = 224, 56


def attend_hopper(q: Tensor, batch: Ragged, window: int, sinks: Tensor, turn: Tensor, scratch: Scratch, out: Tensor) -> None:
    tokens, heads, dim = q.shape
    anything = scratch.rows
    work = tokens * (heads // HEADS.value)
    q_rows = q.stride(0) // dim  # from token to token
    launch(
        _attend_hopper,
        (min(work, backend.active().multiprocessors),),
        _half_tiles(q.as_strided((tokens * q_rows, dim), (dim, 1))),
        _half_tiles(scratch.rows),
        scratch.rows,
        batch.positions,
        batch.sequence_ids,
        anything if scratch.entries is None else scratch.entries,
        anything if scratch.counts is None else scratch.counts,
        anything if scratch.places is None else scratch.places,
        sinks,
        turn,
        _half_tiles(out.view(-1, dim)),
        dim**-0.5 * LOG2_E.value,
        work,
        heads,
        scratch.compressed_at,
        batch.page_table.shape[1] * scratch.page_rows,
        1 if scratch.entries is None else scratch.entries.shape[1],
        q_rows,
        RATIO=scratch.ratio,
        SELECTED=scratch.entries is not None,
        MAPPED=scratch.places is not None,
        PAGE_ROWS=scratch.page_rows,
        WINDOW=window,
        ROPE_DIM=2 * turn.shape[-2],
        RIGHT_REGISTERS=RIGHT_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
    )


def _half_tiles(rows: Tensor) -> TensorDescriptor:
    """Rows [N, 512] as the copy engine sees them: 64 rows and 256 channels at a time."""
    block = [KEYS.value, HALF.value]
    return TensorDescriptor.from_tensor(rows, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


@gluon_jit(do_not_specialize=["work", "heads", "compressed_at", "sequence_rows", "selected", "q_rows"])
def _attend_hopper(
    q,
    tiles,
    rows,
    positions,
    sequence_ids,
    entries,
    counts,
    places,
    sinks,
    turn,
    out,
    scale,
    work,
    heads,
    compressed_at,
    sequence_rows,
    selected,
    q_rows,
    RATIO: gl.constexpr,
    SELECTED: gl.constexpr,
    MAPPED: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    WINDOW: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, KEYS], gl.bfloat16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], half)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4, KEYS, HALF], half)  # even left, even right, odd left, odd right
    even_weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], square)
    odd_weights = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], square)
    even_largest = gl.allocate_shared_memory(gl.float32, [HEADS], plain)
    even_total = gl.allocate_shared_memory(gl.float32, [HEADS], plain)
    odd_largest = gl.allocate_shared_memory(gl.float32, [HEADS], plain)
    odd_total = gl.allocate_shared_memory(gl.float32, [HEADS], plain)
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())  # four half tiles, two halves of the query
    free = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    weighted = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # even, odd
    for number in gl.static_range(6):
        mbarrier.init(full.index(number), count=1 if number >= 4 else GROUP_THREADS + 1)
        mbarrier.init(free.index(number), count=2 if number >= 4 else 1)
    for number in gl.static_range(2):
        mbarrier.init(weighted.index(number), count=1)
    fence_async_shared()
    gl.thread_barrier()
    even = (even_weights, even_largest, even_total)
    odd = (odd_weights, odd_largest, odd_total)
    barriers = (full, free, weighted)
    lengths = (positions, counts)
    result = (sinks, turn, out)
    gl.warp_specialize(
        [
            (
                _left,
                (queries, keys, even, odd, barriers, lengths, result, scale, work, heads, RATIO, SELECTED, WINDOW, ROPE_DIM),
            ),
            (
                _right,
                (queries, keys, even, odd, barriers, lengths, result, scale, work, heads, RATIO, SELECTED, WINDOW, ROPE_DIM),
            ),
            (
                _producer,
                (
                    queries,
                    keys,
                    barriers,
                    lengths,
                    q,
                    tiles,
                    rows,
                    sequence_ids,
                    entries,
                    places,
                    work,
                    heads,
                    compressed_at,
                    sequence_rows,
                    selected,
                    q_rows,
                    RATIO,
                    SELECTED,
                    MAPPED,
                    PAGE_ROWS,
                    WINDOW,
                ),
            ),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon_jit
def _lengths(lengths, token, RATIO: gl.constexpr, SELECTED: gl.constexpr, WINDOW: gl.constexpr):
    """The first window row that exists, how many compressed rows are seen, and the pairs of tiles that makes."""
    positions, counts = lengths
    position = gl.load(positions + token).to(gl.int32)
    oldest = gl.maximum(WINDOW - 1 - position, 0)
    count = 0
    if SELECTED:
        count = gl.load(counts + token)
    elif RATIO > 0:
        count = (position + 1) // RATIO
    return oldest, count, WINDOW // (2 * KEYS) + (count + 2 * KEYS - 1) // (2 * KEYS)


@gluon_jit
def _copy(buffer, rows, first_column):
    """Row pointers [64] -> half a tile in shared memory, channels from `first_column`, asynchronously."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(buffer, rows[:, None] + (first_column + column)[None, :])


@gluon_jit
def _copy_run(buffer, tiles, first_row, first_column, barrier):
    """64 rows that follow each other -> half a tile, by the copy engine. One arrival at the barrier."""
    mbarrier.expect(barrier, KEYS * HALF * 2)
    tma.async_copy_global_to_shared(tiles, [first_row, first_column], barrier, buffer)


@gluon_jit
def _fill(buffer, tiles, rows, place, first, column, in_window, barrier, COMPRESSED: gl.constexpr):
    """Half a tile of the window, whose rows follow each other, or of the rows `place` [64]. One arrival at the barrier."""
    if COMPRESSED:
        if in_window:
            _copy_run(buffer, tiles, first, column, barrier)
        else:
            _copy(buffer, rows + place.to(gl.int64) * DIM, column)
            mbarrier.arrive(barrier)
    else:
        _copy_run(buffer, tiles, first, column, barrier)


@gluon_jit
def _producer(
    queries, keys, barriers, lengths, q, tiles, rows, sequence_ids, entries, places, work, heads, compressed_at,
    sequence_rows, selected, q_rows,
    RATIO: gl.constexpr, SELECTED: gl.constexpr, MAPPED: gl.constexpr, PAGE_ROWS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    full, free, _ = barriers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    COMPRESSED: gl.constexpr = SELECTED or RATIO > 0
    groups = heads // HEADS
    done = 0  # pairs of tiles
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        token = item // groups
        _oldest, count, pairs = _lengths(lengths, token, RATIO, SELECTED, WINDOW)
        sequence = gl.load(sequence_ids + token).to(gl.int32)
        window_at = token + sequence * WINDOW + 1
        query = token * q_rows + item % groups * HEADS
        even_entry = _entry(entries, token, selected, 0, lane, count, SELECTED and MAPPED)
        odd_entry = _entry(entries, token, selected, KEYS, lane, count, SELECTED and MAPPED)
        for part in gl.static_range(2):
            mbarrier.wait(free.index(4 + part), (item // gl.num_programs(0) & 1) ^ 1)
            _copy_run(queries.index(part), q, query, part * HALF, full.index(4 + part))
        for pair in range(pairs):
            even_key = pair * (2 * KEYS) + lane
            odd_key = even_key + KEYS
            in_window = pair * (2 * KEYS) < WINDOW
            if in_window:
                even_place, odd_place = lane, lane  # not used
            elif MAPPED:
                even_place = compressed_at + gl.load(places + even_entry // PAGE_ROWS) * PAGE_ROWS + even_entry % PAGE_ROWS
                odd_place = compressed_at + gl.load(places + odd_entry // PAGE_ROWS) * PAGE_ROWS + odd_entry % PAGE_ROWS
                ahead = (pair + 1) * (2 * KEYS) - WINDOW
                even_entry = _entry(entries, token, selected, ahead, lane, count, True)
                odd_entry = _entry(entries, token, selected, ahead + KEYS, lane, count, True)
            else:
                first = compressed_at + (token * selected if SELECTED else sequence * sequence_rows) - WINDOW
                even_place = first + gl.minimum(even_key, WINDOW + count - 1)
                odd_place = first + gl.minimum(odd_key, WINDOW + count - 1)
            for number in gl.static_range(4):
                place = even_place if number < 2 else odd_place
                mbarrier.wait(free.index(number), (done & 1) ^ 1)
                first = window_at + pair * (2 * KEYS) + number // 2 * KEYS
                column = number % 2 * HALF
                _fill(keys.index(number), tiles, rows, place, first, column, in_window, full.index(number), COMPRESSED)
                async_copy.mbarrier_arrive(full.index(number), increment_count=False)
            done += 1
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon_jit
def _entry(entries, token, selected, first, lane, count, WANTED: gl.constexpr):
    """Physical rows of a token's selection number `first` and on."""
    if WANTED:
        number = gl.maximum(gl.minimum(first + lane, count - 1), 0)
        return gl.load(entries + token.to(gl.int64) * selected + number)
    return lane


@gluon_jit
def _logits(queries, keys, full, SIDE: gl.constexpr, done, turn):
    """Starts the products of query number `turn` with tile `SIDE` of pair number `done`, when they are there, half after half.

    `origin` is 0, but only we know: the compiler would keep all 64 matrix descriptors of the loop in registers.
    """
    origin, phase = done >> 30, done & 1
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    logits = gl.zeros([HEADS, KEYS], gl.float32, layout)
    for part in gl.static_range(2):
        mbarrier.wait(full.index(4 + part), turn & 1)
        mbarrier.wait(full.index(2 * SIDE + part), phase)
        fence_async_shared()
        tile = keys.index(2 * SIDE + part + origin).permute([1, 0])
        logits = warpgroup_mma(queries.index(part + origin), tile, logits, use_acc=part == 1, is_async=True)
    return logits


@gluon_jit
def _weights(logits, largest, scale, first, end):
    """Logits [64, 64] of which columns first..end-1 count -> (weights, new largest [64]), to base 2."""
    if (first > 0) | (end < KEYS):
        column = gl.arange(0, KEYS, gl.SliceLayout(0, logits.type.layout))
        seen = (column >= first) & (column < end)
        logits = gl.where(seen[None, :], logits, -float("inf"))
    highest = gl.maximum(largest, gl.max(logits, 1) * scale)
    return gl.exp2(logits * scale - highest[:, None]), highest


@gluon_jit
def _hand_over(side, weights, largest, total, barrier):
    """Weights, maxima and sums into shared memory, for both groups."""
    to_weights, to_largest, to_total = side
    to_weights.store(weights.to(gl.bfloat16))
    to_largest.store(largest)
    to_total.store(total)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(barrier)


@gluon_jit
def _scaled(acc, factor):
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon_jit
def _release(barrier, condition):
    gl.thread_barrier()
    mbarrier.arrive(barrier, pred=condition)


@gluon_jit
def _release_query(free, condition):
    """After a barrier of the group."""
    mbarrier.arrive(free.index(4), pred=condition)
    mbarrier.arrive(free.index(5), pred=condition)


@gluon_jit
def _left(
    queries, keys, even, odd, barriers, lengths, result, scale, work, heads,
    RATIO: gl.constexpr, SELECTED: gl.constexpr, WINDOW: gl.constexpr, ROPE_DIM: gl.constexpr,
):  # fmt: skip
    full, free, weighted = barriers
    odd_weights, odd_largest, odd_total = odd
    even_weights = even[0]
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    by_head: gl.constexpr = gl.SliceLayout(1, narrow)
    sinks, rotation, out = result
    groups = heads // HEADS
    done = 0
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        token = item // groups
        oldest, count, pairs = _lengths(lengths, token, RATIO, SELECTED, WINDOW)
        sink = gl.load(sinks + item % groups * HEADS + gl.arange(0, HEADS, by_head)).to(gl.float32)
        turn = item // gl.num_programs(0)
        theirs = gl.full([HEADS], NOTHING, gl.float32, by_head)
        total = gl.zeros([HEADS], gl.float32, by_head)
        other = gl.zeros([HEADS], gl.float32, by_head)
        acc = gl.zeros([HEADS, HALF], gl.float32, wide)
        for pair in range(pairs):
            logits = _logits(queries, keys, full, 0, done, turn)
            logits = warpgroup_mma_wait(0, deps=[logits])
            first = oldest - pair * (2 * KEYS)
            end = WINDOW + count - pair * (2 * KEYS)
            weights, largest = _weights(logits, theirs, scale, first, end)
            shrink = gl.exp2(theirs - largest)
            total = total * shrink + gl.sum(weights, 1)
            _hand_over(even, weights, largest, total, weighted.index(0))
            _release_query(free, pair + 1 == pairs)
            acc = _scaled(acc, shrink)
            acc = warpgroup_mma(even_weights, keys.index(0), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _release(free.index(0), True)
            mbarrier.wait(weighted.index(1), done & 1)
            theirs = odd_largest.load(by_head)
            other = odd_total.load(by_head)
            shrink = gl.exp2(largest - theirs)
            total = total * shrink
            acc = _scaled(acc, shrink)
            acc = warpgroup_mma(odd_weights, keys.index(2), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _release(free.index(2), pair + 1 < pairs)
            done += 1
        row = token * heads + item % groups * HEADS
        _finish(acc, theirs, total + other, sink, keys.index(2), out, rotation, token, row, 0, ROPE_DIM)
        _release(free.index(2), True)


@gluon_jit
def _right(
    queries, keys, even, odd, barriers, lengths, result, scale, work, heads,
    RATIO: gl.constexpr, SELECTED: gl.constexpr, WINDOW: gl.constexpr, ROPE_DIM: gl.constexpr,
):  # fmt: skip
    full, free, weighted = barriers
    odd_weights = odd[0]
    even_weights, even_largest, even_total = even
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    by_head: gl.constexpr = gl.SliceLayout(1, narrow)
    sinks, rotation, out = result
    groups = heads // HEADS
    done = 0
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        token = item // groups
        oldest, count, pairs = _lengths(lengths, token, RATIO, SELECTED, WINDOW)
        sink = gl.load(sinks + item % groups * HEADS + gl.arange(0, HEADS, by_head)).to(gl.float32)
        turn = item // gl.num_programs(0)
        largest = gl.full([HEADS], NOTHING, gl.float32, by_head)
        total = gl.zeros([HEADS], gl.float32, by_head)
        other = gl.zeros([HEADS], gl.float32, by_head)
        acc = gl.zeros([HEADS, HALF], gl.float32, wide)
        for pair in range(pairs):
            started = _logits(queries, keys, full, 1, done, turn)
            started = warpgroup_mma_wait(1, deps=[started])
            _release(free.index(4), pair + 1 == pairs)
            logits = warpgroup_mma_wait(0, deps=[started])
            _release(free.index(5), pair + 1 == pairs)
            mbarrier.wait(weighted.index(0), done & 1)
            theirs = even_largest.load(by_head)
            other = even_total.load(by_head)
            acc = _scaled(acc, gl.exp2(largest - theirs))
            adding = warpgroup_mma(even_weights, keys.index(1), acc, is_async=True)
            first = oldest - pair * (2 * KEYS) - KEYS
            end = WINDOW + count - pair * (2 * KEYS) - KEYS
            weights, highest = _weights(logits, theirs, scale, first, end)
            total = total * gl.exp2(largest - highest) + gl.sum(weights, 1)
            largest = highest
            _hand_over(odd, weights, largest, total, weighted.index(1))
            acc = warpgroup_mma_wait(0, deps=[adding])
            _release(free.index(1), True)
            shrink = gl.exp2(theirs - largest)
            acc = _scaled(acc, shrink)
            other = other * shrink
            acc = warpgroup_mma(odd_weights, keys.index(3), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _release(free.index(3), pair + 1 < pairs)
            done += 1
        row = token * heads + item % groups * HEADS
        _finish(acc, largest, total + other, sink, keys.index(3), out, rotation, token, row, 1, ROPE_DIM)
        _release(free.index(3), True)


@gluon_jit
def _finish(acc, largest, total, sink, buffer, out, turn, token, row, SIDE: gl.constexpr, ROPE_DIM: gl.constexpr):
    """Divides by the sum with the sink's share, turns the rotary channels back and stores rows `row` and on of the result,
    through `buffer`, a half tile that everybody has done with."""
    acc = _scaled(acc, 1.0 / (total + gl.exp2(sink * LOG2_E - largest)))
    values = acc.to(gl.bfloat16)
    if SIDE == 1:
        left, right = _halves(values, HALF)
        third, fourth = _halves(right, HALF // 2)
        even, odd = fourth.to(gl.float32).reshape([HEADS, 32, 2]).split()
        angle = gl.arange(0, 32, gl.SliceLayout(0, even.type.layout)) - (32 - ROPE_DIM // 2)
        at = turn + token * ROPE_DIM + 2 * angle
        cosine = gl.load(at, mask=angle >= 0, other=1.0)[None, :]
        sine = gl.load(at + 1, mask=angle >= 0, other=0.0)[None, :]
        turned = gl.join(even * cosine + odd * sine, odd * cosine - even * sine)
        fourth = turned.reshape([HEADS, HALF // 4]).to(gl.bfloat16)
        narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF // 4, 16])
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF // 2, 16])
        buffer.slice(0, HALF // 2, dim=1).store(gl.convert_layout(left, half))
        buffer.slice(HALF // 2, HALF // 4, dim=1).store(gl.convert_layout(third, narrow))
        buffer.slice(HALF // 4 * 3, HALF // 4, dim=1).store(gl.convert_layout(fourth, narrow))
    else:
        buffer.store(values)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [row, SIDE * HALF], buffer)
    tma.store_wait(0)


@gluon_jit
def _halves(x, COLUMNS: gl.constexpr):
    """[64, COLUMNS] -> its left and its right half."""
    return x.reshape([HEADS, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
