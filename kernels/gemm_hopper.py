"""FP8 linear for many rows on sm_90: a producer warp keeps a ring of tiles filled through the bulk copy engine, two
warpgroups multiply, each half of a tile's rows. While one of them scales and adds a block's products, the other's keep the
matrix unit busy; a tile's results leave through the copy engine while the next tile is multiplied."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels import backend
from kernels.gemm_portable import Operands
from kernels.jit import gluon_jit
from kernels.launch import launch

OUTPUTS, DEPTH = 128, 128  # of a tile, and its step along K
BAND = 16  # tiles of tokens that follow each other on the same outputs: what is read together stays in the L2 cache
CODES = gl.NVMMASharedLayout.get_default_for([128, DEPTH], gl.float8e4nv)
RESULTS = gl.NVMMASharedLayout.get_default_for([64, OUTPUTS], gl.bfloat16)


def fits(outputs: int, width: int) -> bool:
    return outputs % OUTPUTS == 0 and width % (4 * DEPTH) == 0


def multiply_many(operands: Operands, segments: int) -> None:
    """FP8 x FP8 to bf16, in one segment."""
    x, x_scales, weight, w_scales, out, *_ = operands
    assert x_scales is not None and w_scales is not None and segments == 1
    tokens, width = x.shape
    outputs = weight.shape[1]
    rows = _rows(tokens, outputs)
    tiles = tiles_of(tokens, outputs, rows)
    launch(
        _multiply_many,
        (min(tiles, backend.active().multiprocessors),),
        TensorDescriptor.from_tensor(x, [rows, DEPTH], CODES),
        TensorDescriptor.from_tensor(weight[0], [OUTPUTS, DEPTH], CODES),
        TensorDescriptor.from_tensor(out, [64, OUTPUTS], RESULTS),
        x_scales.view(torch.int32),
        w_scales.view(torch.int32),
        tokens,
        OUTPUTS=outputs,
        WIDTH=width,
        ROWS=rows,
        STAGES=4 if rows == 256 else 6,
        BAND=BAND,
        num_warps=4,
    )


def tiles_of(tokens: int, outputs: int, rows: int) -> int:
    return -(-tokens // rows) * (outputs // OUTPUTS)


def _rows(tokens: int, outputs: int) -> int:
    """Of a tile: 256, or 128 (a little slower) where the last round of programs would leave more of the card idle."""
    programs = backend.active().multiprocessors
    large, small = (triton.cdiv(tiles_of(tokens, outputs, rows), programs) for rows in (256, 128))
    return 256 if 2.0 * large <= 1.1 * small else 128


@gluon_jit(do_not_specialize=["tokens"])
def _multiply_many(
    x, weight, out, x_scales, w_scales, tokens,
    OUTPUTS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th tile of ROWS tokens and 128 outputs."""
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 128], x.layout)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], weight.layout)
    results = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], out.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    rings = (x_ring, w_ring, filled, free)
    gl.warp_specialize(
        [
            (_consume, (rings, results, out, x_scales, w_scales, tokens, 0, OUTPUTS, WIDTH, ROWS, STAGES, BAND)),
            (_consume, (rings, results, out, x_scales, w_scales, tokens, 1, OUTPUTS, WIDTH, ROWS, STAGES, BAND)),
            (_produce, (rings, x, weight, tokens, OUTPUTS, WIDTH, ROWS, STAGES, BAND)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon_jit
def _tiles(tokens, OUTPUTS: gl.constexpr, ROWS: gl.constexpr):
    return gl.cdiv(tokens, ROWS) * (OUTPUTS // 128)


@gluon_jit
def _place(number, tokens, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, BAND: gl.constexpr):
    """Tile of tokens and tile of outputs of that number: bands of BAND tiles of tokens, and in a band the tiles of tokens next
    to each other."""
    across: gl.constexpr = OUTPUTS // 128
    tiles = gl.cdiv(tokens, ROWS)
    band = number // (BAND * across)
    height = gl.minimum(tiles - band * BAND, BAND)
    within = number - band * (BAND * across)
    return band * BAND + within % height, within // height


@gluon_jit
def _produce(
    rings, x, weight, tokens,
    OUTPUTS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    x_ring, w_ring, filled, free = rings
    step = 0
    for number in range(gl.program_id(0), _tiles(tokens, OUTPUTS, ROWS), gl.num_programs(0)):
        tile_t, tile_n = _place(number, tokens, OUTPUTS, ROWS, BAND)
        for block in range(WIDTH // 128):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(filled.index(stage), (ROWS + 128) * 128)
            tma.async_copy_global_to_shared(x, [tile_t * ROWS, block * 128], filled.index(stage), x_ring.index(stage))
            tma.async_copy_global_to_shared(weight, [tile_n * 128, block * 128], filled.index(stage), w_ring.index(stage))
            step += 1


@gluon_jit
def _consume(
    rings, results, out, x_scales, w_scales, tokens, WHICH: gl.constexpr,
    OUTPUTS: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    """One half of the rows of every tile, 64 or two times 64. Scales come as int32, four blocks' bytes in each."""
    x_ring, w_ring, filled, free = rings
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    mine: gl.constexpr = WHICH * (ROWS // 2)
    blocks: gl.constexpr = WIDTH // 128
    nothing = gl.zeros([64, 128], gl.float32, layout)
    words: gl.constexpr = blocks // 4
    tiles = _tiles(tokens, OUTPUTS, ROWS)
    tile_t, tile_n = _place(gl.program_id(0), tokens, OUTPUTS, ROWS, BAND)
    row = tile_t * ROWS + mine + gl.arange(0, 64, gl.SliceLayout(1, layout))
    w_bytes = gl.load(w_scales + tile_n * words)
    upper_bytes = gl.load(x_scales + row * words, mask=row < tokens, other=0)
    if ROWS == 256:
        lower_bytes = gl.load(x_scales + (row + 64) * words, mask=row < tokens - 64, other=0)
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_scales = x_scales + row * words
        tile_scales = w_scales + tile_n * words
        upper = gl.zeros([64, 128], gl.float32, layout)
        if ROWS == 256:
            lower = gl.zeros([64, 128], gl.float32, layout)
        for block in range(blocks):
            w_factor = _power(w_bytes, block)
            upper_factor = w_factor * _power(upper_bytes, block)
            if ROWS == 256:
                lower_factor = w_factor * _power(lower_bytes, block)
            # When four bytes are used up the next four are asked for: they have a whole step to come.
            ends = (block % 4 == 3) & (block + 1 < blocks)
            word = (block + 1) // 4
            w_bytes = gl.load(tile_scales + word, mask=ends, other=w_bytes)
            upper_bytes = gl.load(row_scales + word, mask=ends & (row < tokens), other=upper_bytes)
            if ROWS == 256:
                lower_bytes = gl.load(row_scales + 64 * words + word, mask=ends & (row < tokens - 64), other=lower_bytes)
            stage = step % STAGES
            x_tile = x_ring.index(stage)
            w_tile = w_ring.index(stage).permute([1, 0])
            mbarrier.wait(filled.index(stage), (step // STAGES) & 1)
            product = warpgroup_mma(x_tile.slice(mine, 64), w_tile, nothing, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            if ROWS == 256:
                upper += product * upper_factor[:, None]
                product = warpgroup_mma(x_tile.slice(mine + 64, 64), w_tile, nothing, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=[product])
            gl.thread_barrier()  # of this warpgroup: all of it has read the stage
            mbarrier.arrive(free.index(stage), count=1)
            if ROWS == 256:
                lower += product * lower_factor[:, None]
            else:
                upper += product * upper_factor[:, None]
            step += 1
        # The next tile's first scales come while this one's sums leave.
        place, column = tile_t * ROWS + mine, tile_n * 128
        tile_t, tile_n = _place(gl.minimum(number + gl.num_programs(0), tiles - 1), tokens, OUTPUTS, ROWS, BAND)
        row = tile_t * ROWS + mine + gl.arange(0, 64, gl.SliceLayout(1, layout))
        w_bytes = gl.load(w_scales + tile_n * words)
        upper_bytes = gl.load(x_scales + row * words, mask=row < tokens, other=0)
        if ROWS == 256:
            lower_bytes = gl.load(x_scales + (row + 64) * words, mask=row < tokens - 64, other=0)
        _leave(out, results.index(WHICH), upper, place, column)
        if ROWS == 256:
            _leave(out, results.index(WHICH), lower, place + 64, column)
    tma.store_wait(0)


@gluon_jit
def _power(bytes, block):
    """float32 2^(byte - 127) of the byte of `block` in an int32, which holds four."""
    return (((bytes >> (block % 4 * 8)) & 0xFF) << 23).to(gl.float32, bitcast=True)


@gluon_jit
def _leave(out, shared, sums, row, column):
    """Through shared memory, which the store before must have left."""
    tma.store_wait(0)
    gl.thread_barrier()
    shared.store(sums.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [row, column], shared)
