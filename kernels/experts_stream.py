"""The grouped product of FP4 experts for tiles of 32 rows, on Hopper: a stream of tiles through shared memory.

A block of the grid stays on its multiprocessor and takes tile after tile. One warp copies (TMA): 128 channels of a tile's
tokens and of 256 rows of the weight at a time, as far ahead as the ring has stages, over the ends of tiles. Four warpgroups,
64 rows each, unpack and multiply as `experts_fp4` does, each at its own pace: while some unpack, another multiplies.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.experts_fp4 import block_scales, block_words, operand, unpack
from kernels.jit import gluon_jit

STREAM_ROWS = 256  # of the weight, that a block takes at a time


@gluon_jit
def stream_kernel(
    x,
    words,
    scales,
    factors,
    row_scales,
    order,
    tiles,
    tile_count,
    out,
    N: gl.constexpr,
    K: gl.constexpr,
    GATHER: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `experts_block.block_kernel`, for all tiles and 256 of the N channels at a time. The grid is as large as the card."""
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, 128], x.layout)
    word_ring = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 32, 32], words.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 8, 8], scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=4)
    fence_async_shared()
    count = gl.load(tile_count)
    rings = (x_ring, word_ring, scale_ring, full, empty)
    work = (factors, row_scales, order, tiles, count, out)
    copying = (x, words, scales, tiles, count, rings)
    gl.warp_specialize(
        [
            (_multiply, (work, rings, 0, N, K, GATHER, TILE, STAGES)),
            (_multiply, (work, rings, 1, N, K, GATHER, TILE, STAGES)),
            (_multiply, (work, rings, 2, N, K, GATHER, TILE, STAGES)),
            (_multiply, (work, rings, 3, N, K, GATHER, TILE, STAGES)),
            (_copy, (copying, N, K, TILE, STAGES)),
        ],
        [4, 4, 4, 1],
        [104, 104, 104, 24],
    )


@gluon_jit
def _copy(copying, N: gl.constexpr, K: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr):
    x, words, scales, tiles, count, rings = copying
    x_ring, word_ring, scale_ring, full, empty = rings
    STEPS: gl.constexpr = K // 128
    BLOCKS: gl.constexpr = N // 256
    turn = 0
    for item in range(gl.program_id(0), count * BLOCKS, gl.num_programs(0)):
        tile = item // BLOCKS
        first = gl.load(tiles + tile * 4 + 1)
        block = (gl.load(tiles + tile * 4) * BLOCKS + item % BLOCKS) * 4
        for step in range(STEPS):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), TILE * 128 + 4 * (4096 + 256))
            tma.async_copy_global_to_shared(x, [first, step * 128], full.index(stage), x_ring.index(stage))
            for side in gl.static_range(4):
                at = (block + side) * STEPS + step
                tma.async_copy_global_to_shared(words, [at * 32, 0], full.index(stage), word_ring.index(stage * 4 + side))
                tma.async_copy_global_to_shared(scales, [at * 8, 0], full.index(stage), scale_ring.index(stage * 4 + side))
            turn += 1


@gluon_jit
def _multiply(
    work,
    rings,
    SIDE: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GATHER: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    factors, row_scales, order, tiles, count, out = work
    x_ring, word_ring, scale_ring, full, empty = rings
    STEPS: gl.constexpr = K // 128
    BLOCKS: gl.constexpr = N // 256
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, PRODUCT))
    nothing = gl.zeros([64, TILE], gl.float32, PRODUCT)
    turn = 0
    for item in range(gl.program_id(0), count * BLOCKS, gl.num_programs(0)):
        tile = item // BLOCKS
        expert = gl.load(tiles + tile * 4).to(gl.int64)
        first = gl.load(tiles + tile * 4 + 1)
        rows = gl.load(tiles + tile * 4 + 2)
        total = gl.zeros([64, TILE], gl.float32, PRODUCT)
        mbarrier.wait(full.index(turn % STAGES), (turn // STAGES) & 1)
        some_words = block_words(word_ring.index(turn % STAGES * 4 + SIDE), LANES)
        some_scales = block_scales(scale_ring.index(turn % STAGES * 4 + SIDE), LANES)
        for step in range(STEPS):
            stage = turn % STAGES
            factor = gl.load(factors + (tile * STEPS + step) * TILE + column)
            near, far = unpack(some_words, some_scales, LANES)
            right = x_ring.index(stage).permute([1, 0])
            part = warpgroup_mma(operand(near, far, OPERAND), right, nothing, use_acc=False, is_async=True)
            turn += 1
            coming = turn % STAGES  # beyond the last step what is loaded is not used
            mbarrier.wait(full.index(coming), (turn // STAGES) & 1, pred=step + 1 < STEPS)
            some_words = block_words(word_ring.index(coming * 4 + SIDE), LANES)
            some_scales = block_scales(scale_ring.index(coming * 4 + SIDE), LANES)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            total += part * gl.expand_dims(factor, 0)

        top = item % BLOCKS * 256 + SIDE * 64
        row = top + gl.arange(0, 64, layout=gl.SliceLayout(1, PRODUCT))
        total *= gl.expand_dims(gl.load(row_scales + expert * N + row), 1)
        result = gl.convert_layout(total.to(gl.bfloat16), STORE)
        target = gl.arange(0, TILE, layout=gl.SliceLayout(0, STORE))
        live = target < rows
        target = first + target
        if not GATHER:
            target = gl.load(order + target, mask=live, other=0)
        channel = top + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
        where = gl.expand_dims(target.to(gl.int64) * N, 0) + gl.expand_dims(channel, 1)
        gl.store(out + where, result, mask=gl.expand_dims(live, 0) & gl.expand_dims(channel >= 0, 1))
