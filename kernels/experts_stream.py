"""The grouped product of FP4 experts for many rows, on Hopper: a stream of tiles through shared memory.

A block of the grid stays on its multiprocessor and takes tile after tile. One warp copies (TMA): 128 channels of a tile's
tokens and of 128 rows of the weight at a time, as far ahead as the ring has stages, over the ends of tiles. Two warpgroups,
64 rows each, unpack and multiply as `experts_hopper` does, each at its own pace: while one unpacks, the other multiplies.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from kernels.experts_hopper import operand, unpack
from kernels.jit import gluon_jit

# how a stage lies in shared memory; a block of 64 rows and 128 channels is 32 x 32 words and 8 x 8 words of scales
TOKENS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
SCALES = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2)


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
    SIDES: gl.constexpr,
):
    """As `experts_portable.grouped_kernel`, but rows of x are places in `order` already: descriptors of x e4m3 [P, K] in boxes
    [TILE, 128], of words int32 [.., 32] in [32, 32], of scales int32 [.., 8] in [8, 8]; factors float32 [tile, K/128, TILE];
    row_scales float32 [E, N]."""
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, 128], x.layout)
    word_ring = gl.allocate_shared_memory(gl.int32, [SIDES * STAGES, 32, 32], words.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [SIDES * STAGES, 8, 8], scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=SIDES)
    count = gl.load(tile_count)
    rings = (x_ring, word_ring, scale_ring, full, empty)
    work = (factors, row_scales, order, tiles, count, out)
    copying = (x, words, scales, tiles, count, rings)
    if SIDES == 2:
        gl.warp_specialize(
            [
                (_multiply, (work, rings, 0, N, K, GATHER, TILE, STAGES, SIDES)),
                (_multiply, (work, rings, 1, N, K, GATHER, TILE, STAGES, SIDES)),
                (_copy, (copying, N, K, TILE, STAGES, SIDES)),
            ],
            [4, 1],
            [208, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (work, rings, 0, N, K, GATHER, TILE, STAGES, SIDES)),
                (_multiply, (work, rings, 1, N, K, GATHER, TILE, STAGES, SIDES)),
                (_multiply, (work, rings, 2, N, K, GATHER, TILE, STAGES, SIDES)),
                (_multiply, (work, rings, 3, N, K, GATHER, TILE, STAGES, SIDES)),
                (_copy, (copying, N, K, TILE, STAGES, SIDES)),
            ],
            [4, 4, 4, 1],
            [104, 104, 104, 24],
        )


@gluon_jit
def _copy(copying, N: gl.constexpr, K: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, SIDES: gl.constexpr):
    x, words, scales, tiles, count, rings = copying
    x_ring, word_ring, scale_ring, full, empty = rings
    STEPS: gl.constexpr = K // 128
    BLOCKS: gl.constexpr = N // (64 * SIDES)
    turn = 0
    for item in range(gl.program_id(0), count * BLOCKS, gl.num_programs(0)):
        tile = item // BLOCKS
        first = gl.load(tiles + tile * 4 + 1)
        block = (gl.load(tiles + tile * 4) * BLOCKS + item % BLOCKS) * SIDES
        for step in range(STEPS):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), TILE * 128 + SIDES * (4096 + 256))
            tma.async_copy_global_to_shared(x, [first, step * 128], full.index(stage), x_ring.index(stage))
            for side in gl.static_range(SIDES):
                at = (block + side) * STEPS + step
                tma.async_copy_global_to_shared(words, [at * 32, 0], full.index(stage), word_ring.index(stage * SIDES + side))
                tma.async_copy_global_to_shared(scales, [at * 8, 0], full.index(stage), scale_ring.index(stage * SIDES + side))
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
    SIDES: gl.constexpr,
):
    factors, row_scales, order, tiles, count, out = work
    x_ring, word_ring, scale_ring, full, empty = rings
    STEPS: gl.constexpr = K // 128
    BLOCKS: gl.constexpr = N // (64 * SIDES)
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
        some_words = block_words(word_ring.index(turn % STAGES * SIDES + SIDE), LANES)
        some_scales = block_scales(scale_ring.index(turn % STAGES * SIDES + SIDE), LANES)
        for step in range(STEPS):
            stage = turn % STAGES
            factor = gl.load(factors + (tile * STEPS + step) * TILE + column)
            near, far = unpack(some_words, some_scales, LANES)
            right = x_ring.index(stage).permute([1, 0])
            part = warpgroup_mma(operand(near, far, OPERAND), right, nothing, use_acc=False, is_async=True)
            turn += 1
            coming = turn % STAGES  # beyond the last step what is loaded is not used
            mbarrier.wait(full.index(coming), (turn // STAGES) & 1, pred=step + 1 < STEPS)
            some_words = block_words(word_ring.index(coming * SIDES + SIDE), LANES)
            some_scales = block_scales(scale_ring.index(coming * SIDES + SIDE), LANES)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            total += part * gl.expand_dims(factor, 0)

        top = item % BLOCKS * (64 * SIDES) + SIDE * 64
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


@gluon_jit
def block_words(stage, LANES: gl.constexpr):
    """[32, 32] words of a block in shared memory -> int32 [64, 16], see `experts_hopper.unpack`."""
    FLAT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [32, 32]
    )
    words = gl.reshape(stage.load(FLAT), [2, 4, 8, 4, 2, 2])  # half, warp, row, c, s, 8 rows below
    words = gl.reshape(gl.permute(words, [1, 5, 2, 0, 4, 3]), [64, 16])
    return gl.convert_layout(words, LANES, assert_trivial=True)


@gluon_jit
def block_scales(stage, LANES: gl.constexpr):
    """[8, 8] scale words of a block in shared memory -> int32 [64]."""
    FLAT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]], [[0, 0], [0, 0], [0, 2], [0, 4], [1, 0]], [[2, 0], [4, 0]], [], [8, 8]
    )
    words = gl.reshape(stage.load(FLAT), [4, 8, 2])  # warp, row, 8 rows below
    words = gl.reshape(gl.permute(words, [0, 2, 1]), [64])
    return gl.convert_layout(words, gl.SliceLayout(1, LANES), assert_trivial=True)
