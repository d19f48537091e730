"""The grouped product of FP4 experts: short blocks, several on a multiprocessor, each with a ring of its own.

A block has 64 rows of an expert's matrix and one tile of tokens. Copies (TMA) run some steps of 128 channels ahead of the
product; while one block unpacks, as `experts_fp4` says, others multiply or wait for memory. With wgmma on Hopper, with
mma.sync where that does not exist.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.experts_fp4 import block_scales, block_words, operand, unpack
from kernels.jit import gluon_jit


@gluon_jit
def block_kernel(
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
    TOPK: gl.constexpr,
    GATHER: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    DIRECT: gl.constexpr,
    WGMMA: gl.constexpr,
):
    """As `experts_portable.grouped_kernel`, program (i, tile) for channels 64 i .. + 63 of N, but rows of x are places in
    `order` already. Descriptors of x e4m3 [P, K] in boxes [TILE, 128], of words int32 [.., 32] in [32, 32], of scales int32
    [.., 8] in [8, 8]; factors float32 [tile, K/128, TILE], the scales of x; row_scales float32 [E, N]; out bf16.

    DIRECT: tile i is pair i alone: order are the ids, tiles and tile_count None, x is not arranged, and factors are the ue8m0
    bytes of x [.., K/128]. Then the launch may be programmatic: the kernel before need only have begun, as weights and ids
    were there before that one."""
    STEPS: gl.constexpr = K // 128
    if WGMMA:
        PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 32])
    else:
        PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    tile = gl.program_id(1)
    if DIRECT:
        gdc_launch_dependents()
        expert = gl.load(order + tile)  # not waited for: route has written it, and what lies between does not start early
        first = tile
        rows = 1
    else:
        if tile >= gl.load(tile_count):
            return
        expert = gl.load(tiles + tile * 4)
        first = gl.load(tiles + tile * 4 + 1)
        rows = gl.load(tiles + tile * 4 + 2)
    source = first
    if DIRECT and GATHER:
        source = first // TOPK
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, 128], x.layout)
    word_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 32, 32], words.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 8, 8], scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(full.index(early), count=1)
    fence_async_shared()
    gl.thread_barrier()
    block = (expert * (N // 64) + gl.program_id(0)) * STEPS
    for early in gl.static_range(STAGES):
        mbarrier.expect(full.index(early), TILE * 128 + 4096 + 256)
        tma.async_copy_global_to_shared(words, [(block + early) * 32, 0], full.index(early), word_ring.index(early))
        tma.async_copy_global_to_shared(scales, [(block + early) * 8, 0], full.index(early), scale_ring.index(early))
    if DIRECT:
        gdc_wait()
    for early in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [source, early * 128], full.index(early), x_ring.index(early))

    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, PRODUCT))
    nothing = gl.zeros([64, TILE], gl.float32, PRODUCT)
    total = gl.zeros([64, TILE], gl.float32, PRODUCT)
    for step in range(STEPS):
        if DIRECT:
            byte = gl.load(factors + source * STEPS + step + column * 0).to(gl.int32)
            factor = (byte << 23).to(gl.float32, bitcast=True)
        else:
            factor = gl.load(factors + (tile * STEPS + step) * TILE + column)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        near, far = unpack(block_words(word_ring.index(stage), LANES), block_scales(scale_ring.index(stage), LANES), LANES)
        left, right = operand(near, far, OPERAND), x_ring.index(stage).permute([1, 0])
        if WGMMA:
            part = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
        else:
            part = mma_v2(left, right.load(gl.DotOperandLayout(1, PRODUCT, 4)), nothing)
        gl.thread_barrier()
        coming = step + STAGES
        more = coming < STEPS
        at = block + coming
        mbarrier.expect(full.index(stage), TILE * 128 + 4096 + 256, pred=more)
        tma.async_copy_global_to_shared(words, [at * 32, 0], full.index(stage), word_ring.index(stage), pred=more)
        tma.async_copy_global_to_shared(scales, [at * 8, 0], full.index(stage), scale_ring.index(stage), pred=more)
        tma.async_copy_global_to_shared(x, [source, coming * 128], full.index(stage), x_ring.index(stage), pred=more)
        total += part * gl.expand_dims(factor, 0)

    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    row = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, PRODUCT))
    total *= gl.expand_dims(gl.load(row_scales + expert.to(gl.int64) * N + row), 1)
    result = gl.convert_layout(total.to(out.dtype.element_ty), STORE)
    target = gl.arange(0, TILE, layout=gl.SliceLayout(0, STORE))
    live = target < rows
    target = first + target
    if not GATHER and not DIRECT:
        target = gl.load(order + target, mask=live, other=0)
    channel = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    where = gl.expand_dims(target.to(gl.int64) * N, 0) + gl.expand_dims(channel, 1)
    gl.store(out + where, result, mask=gl.expand_dims(live, 0) & gl.expand_dims(channel >= 0, 1))
