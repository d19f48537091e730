"""Linear layers for few rows on sm_90, bound by reading the weights: FP8 x FP8, bf16 x bf16, and bf16 x FP8 group by group.

The weight is the left operand of the matrix unit, so that 16 rows of activations make 16 columns. A producer warp fills a ring
of weight tiles through the bulk copy engine before the kernel ahead has ended (so that kernel must not write weights), then
waits for it and fetches the activations; one warpgroup multiplies.
"""

from __future__ import annotations

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gemm_portable import Operands, kind_of
from kernels.jit import gluon_jit
from kernels.launch import launch

OUTPUTS, DEPTH = 128, 128  # a program's outputs, and its step along K
CODES = gl.NVMMASharedLayout.get_default_for([128, DEPTH], gl.float8e4nv)
WIDE = gl.NVMMASharedLayout.get_default_for([128, DEPTH], gl.bfloat16)
PAIRS = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 64], gl.int16))


def fits(outputs: int, width: int) -> bool:
    """outputs: of one group."""
    return outputs % OUTPUTS == 0 and width % DEPTH == 0


def multiply_few(operands: Operands, segments: int) -> None:
    """FP8 x FP8 and bf16 x bf16 up to 64 tokens, bf16 x FP8 for any number of them."""
    x, x_scales, weight, w_scales, out, out_scales, partials, arrivals = operands
    groups, outputs, width = weight.shape
    tokens, quantised = len(x), x_scales is not None
    tile = min(128, max(16, triton.next_power_of_2(tokens)))
    split = segments > 1 and tokens <= 128
    if segments > 1 and not split:
        tile = 64  # there are registers for a segment's sums and for the whole's
    stage_bytes = DEPTH * (OUTPUTS * weight.element_size() + tile * x.element_size())
    stages, registers = _depth(kind_of(x, w_scales), stage_bytes, width // DEPTH // segments)
    launch(
        _multiply_few,
        (groups * outputs // OUTPUTS, triton.cdiv(tokens, tile), segments if split else 1),
        TensorDescriptor.from_tensor(x.view(tokens, groups * width), [tile, DEPTH], CODES if quantised else WIDE),
        TensorDescriptor.from_tensor(weight.flatten(0, 1), [OUTPUTS, DEPTH], WIDE if w_scales is None else CODES),
        x_scales,
        w_scales,
        out,
        out_scales,
        partials if split else None,
        arrivals,
        tokens,
        OUTPUTS=outputs,
        GROUPS=groups,
        WIDTH=width,
        SEGMENTS=segments,
        SPLIT=split,
        TILE=tile,
        STAGES=stages,
        num_warps=4,
        maxnreg=registers,
        launch_pdl=True,
    )


def _depth(kind: str, stage_bytes: int, blocks: int) -> tuple[int, int]:
    """Stages of the ring, and registers a thread: for two programs on a multiprocessor, or one that reads a long run alone.
    Found by measuring."""
    if kind == "plain" or (kind == "fp8" and blocks >= 16):
        return min(9, 215_000 // stage_bytes), 168
    if kind == "fp8":
        return min(6, 110_000 // stage_bytes), 128
    return 3 if stage_bytes < 22_000 else 2, 128


@gluon_jit(do_not_specialize=["tokens"])
def _multiply_few(
    x, weight, x_scales, w_scales, out, out_scales, partials, arrivals, tokens,
    OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, SEGMENTS: gl.constexpr, SPLIT: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, 128, 128], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, TILE, 128], x.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    rings = (x_ring, w_ring, filled, free)
    scales = (x_scales, w_scales)
    results = (out, out_scales, partials, arrivals)
    gl.warp_specialize(
        [
            (_consume, (rings, scales, results, tokens, OUTPUTS, GROUPS, WIDTH, SEGMENTS, SPLIT, TILE, STAGES)),
            (_produce, (rings, x, weight, OUTPUTS, WIDTH, SEGMENTS, SPLIT, TILE, STAGES)),
        ],
        [1],
        [24],
    )


@gluon_jit
def _produce(
    rings, x, weight,
    OUTPUTS: gl.constexpr, WIDTH: gl.constexpr, SEGMENTS: gl.constexpr, SPLIT: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    x_ring, w_ring, filled, free = rings
    blocks: gl.constexpr = WIDTH // 128
    length: gl.constexpr = (blocks + SEGMENTS - 1) // SEGMENTS if SPLIT else blocks
    early: gl.constexpr = min(STAGES, length)
    bytes_a_step: gl.constexpr = 16 * (128 * weight.dtype.primitive_bitwidth + TILE * x.dtype.primitive_bitwidth)
    row = gl.program_id(0) * 128
    x_column = row // OUTPUTS * WIDTH
    first = gl.program_id(2) * length
    token = gl.program_id(1) * TILE
    count = gl.minimum(blocks - first, length)
    for step in gl.static_range(early):
        if step < count:
            mbarrier.expect(filled.index(step), bytes_a_step)
            tma.async_copy_global_to_shared(weight, [row, (first + step) * 128], filled.index(step), w_ring.index(step))
    gdc_launch_dependents()
    gdc_wait()
    for step in gl.static_range(early):
        if step < count:
            tma.async_copy_global_to_shared(x, [token, x_column + (first + step) * 128], filled.index(step), x_ring.index(step))
    for step in range(early, count):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(filled.index(stage), bytes_a_step)
        tma.async_copy_global_to_shared(weight, [row, (first + step) * 128], filled.index(stage), w_ring.index(stage))
        tma.async_copy_global_to_shared(x, [token, x_column + (first + step) * 128], filled.index(stage), x_ring.index(stage))


@gluon_jit
def _consume(
    rings, scales, results, tokens,
    OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, SEGMENTS: gl.constexpr, SPLIT: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The sums of 128 outputs and TILE tokens over one segment of K, or over all; then to where they belong."""
    out, out_scales, partials, arrivals = results
    width: gl.constexpr = GROUPS * OUTPUTS
    quantised: gl.constexpr = scales[0] is not None
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 32 if quantised else 16]
    )
    token = gl.program_id(1) * TILE
    column = token + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    row = gl.program_id(0) * 128
    gdc_wait()
    if quantised:
        upper, lower = _sums_fp8(rings, scales, gl.minimum(column, tokens - 1), layout, WIDTH, SEGMENTS, SPLIT, TILE, STAGES)
    else:
        total = _sums_bf16(rings, scales[1], layout, WIDTH, SEGMENTS, SPLIT, TILE, STAGES)
    if SPLIT:
        part = partials + gl.program_id(2).to(gl.int64) * tokens * width
        if quantised:
            _leave(upper, part, row, column, tokens, layout, width)
            _leave(lower, part, row + 64, column, tokens, layout, width)
        else:
            _leave(total, part, row, column, tokens, layout, width)
        _meet(out, out_scales, partials, arrivals, tokens, width, SEGMENTS, TILE)
    elif quantised:
        _store(upper.permute([1, 0]), out, out_scales, token, row, tokens, width, TILE, 64)
        _store(lower.permute([1, 0]), out, out_scales, token, row + 64, tokens, width, TILE, 64)
    else:
        _store(total.permute([1, 0]), out, out_scales, token, row, tokens, width, TILE, 128)


@gluon_jit
def _sums_fp8(
    rings, scales, x_row, layout: gl.constexpr,
    WIDTH: gl.constexpr, SEGMENTS: gl.constexpr, SPLIT: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of the upper and the lower 64 outputs: float32 [64, TILE] each. Every block of K is scaled, then added."""
    gl.static_assert(SPLIT or SEGMENTS == 1)
    x_ring, w_ring, filled, free = rings
    blocks: gl.constexpr = WIDTH // 128
    length: gl.constexpr = (blocks + SEGMENTS - 1) // SEGMENTS
    first = gl.program_id(2) * length
    last = gl.minimum(first + length, blocks)
    x_scales = scales[0] + x_row * blocks
    w_scales = scales[1] + gl.program_id(0) * blocks
    x_byte = gl.load(x_scales + first).to(gl.int32)
    w_byte = gl.load(w_scales + first).to(gl.int32)
    nothing = gl.zeros([64, TILE], gl.float32, layout)
    upper = gl.zeros([64, TILE], gl.float32, layout)
    lower = gl.zeros([64, TILE], gl.float32, layout)
    for block in range(first, last):
        step = block - first
        stage = step % STAGES
        w_tile = w_ring.index(stage)
        x_tile = x_ring.index(stage).permute([1, 0])
        factor = (_power(w_byte) * _power(x_byte))[None, :]
        # The next block's scales are asked for now: nothing then waits for them.
        following = gl.minimum(block + 1, last - 1)
        x_byte = gl.load(x_scales + following).to(gl.int32)
        w_byte = gl.load(w_scales + following).to(gl.int32)
        mbarrier.wait(filled.index(stage), (step // STAGES) & 1)
        product = warpgroup_mma(w_tile.slice(0, 64), x_tile, nothing, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        upper += product * factor
        product = warpgroup_mma(w_tile.slice(64, 64), x_tile, nothing, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        gl.thread_barrier()  # all have read the stage
        mbarrier.arrive(free.index(stage), count=1)
        lower += product * factor
    return upper, lower


@gluon_jit
def _sums_bf16(
    rings, w_scales, layout: gl.constexpr,
    WIDTH: gl.constexpr, SEGMENTS: gl.constexpr, SPLIT: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """float32 [128, TILE]. A weight in bf16 is multiplied where it lies, one in e4m3 becomes bf16 in registers."""
    x_ring, w_ring, filled, free = rings
    blocks: gl.constexpr = WIDTH // 128
    length: gl.constexpr = (blocks + SEGMENTS - 1) // SEGMENTS
    stored: gl.constexpr = w_scales is None
    chained: gl.constexpr = SEGMENTS > 1 and not SPLIT  # one program adds all segments
    first = gl.program_id(2) * length
    last = gl.minimum(first + length, blocks) if SPLIT else blocks
    total = gl.zeros([128, TILE], gl.float32, layout)
    whole = total
    if not stored:
        w_scales += gl.program_id(0) * blocks
    for block in range(first, last):
        step = block - first
        stage = step % STAGES
        x_tile = x_ring.index(stage).permute([1, 0])
        more = not chained or step % length != 0
        if stored:
            mbarrier.wait(filled.index(stage), (step // STAGES) & 1)
            total = warpgroup_mma(w_ring.index(stage), x_tile, total, use_acc=more, is_async=True)
        else:
            byte = gl.load(w_scales + block)
            mbarrier.wait(filled.index(stage), (step // STAGES) & 1)
            wide = _wide(w_ring.index(stage), byte, layout)
            total = warpgroup_mma(wide, x_tile, total, use_acc=more, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        gl.thread_barrier()  # all have read the stage
        mbarrier.arrive(free.index(stage), count=1)
        if chained:
            whole += gl.where((step + 1) % length == 0 or block + 1 == last, total, 0.0)
    if chained:
        total = whole
    return total


@gluon_jit
def _leave(sums, part, where, column, tokens, layout: gl.constexpr, WIDTH: gl.constexpr):
    """sums [outputs, tokens] into one segment's part of the partial sums."""
    output = where + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
    gl.store(part + column.to(gl.int64)[None, :] * WIDTH + output[:, None], sums, mask=(column < tokens)[None, :])


@gluon_jit
def _meet(
    out, out_scales, partials, arrivals, tokens, WIDTH: gl.constexpr, SEGMENTS: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Of the programs of one tile the one that arrives last adds the segments, in their order."""
    gl.thread_barrier()  # every thread's part is written before one of them says so
    counter = arrivals + gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
    if gl.atomic_add(counter, 1, sem="acq_rel") == SEGMENTS - 1:
        gl.store(counter, 0)
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        ROWS: gl.constexpr = TILE if TILE < 32 else 32
        output = gl.program_id(0) * 128 + gl.arange(0, 128, gl.SliceLayout(0, layout))
        for first in range(gl.program_id(1) * TILE, gl.minimum(gl.program_id(1) * TILE + TILE, tokens), ROWS):
            token = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            place = partials + token.to(gl.int64)[:, None] * WIDTH + output[None, :]
            live = (token < tokens)[:, None]
            total = gl.load(place, mask=live, other=0.0, cache_modifier=".cg")
            for _ in gl.static_range(1, SEGMENTS):
                place += tokens.to(gl.int64) * WIDTH
                total += gl.load(place, mask=live, other=0.0, cache_modifier=".cg")
            _store(total, out, out_scales, first, gl.program_id(0) * 128, tokens, WIDTH, ROWS, 128)


@gluon_jit
def _store(
    sums, out, out_scales, first, where, tokens, WIDTH: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr
):  # fmt: skip
    """sums [ROWS, OUTPUTS] of the tokens from `first` and the outputs from `where` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    result = gl.convert_layout(sums, layout)
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    output = where + gl.arange(0, OUTPUTS, gl.SliceLayout(0, layout))
    place = token.to(gl.int64)[:, None] * WIDTH + output[None, :]
    live = (token < tokens)[:, None]
    if out_scales is None:
        gl.store(out + place, result.to(out.dtype.element_ty), mask=live)
    else:
        values = result.to(gl.bfloat16).to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(values), axis=1), 1e-4)
        byte = ((largest.to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
        codes = values * ((254 - byte) << 23).to(gl.float32, bitcast=True)[:, None]
        gl.store(out + place, codes.to(gl.float8e4nv), mask=live)
        gl.store(out_scales + token * (WIDTH // 128) + where // 128, byte.to(gl.uint8), mask=token < tokens)


@gluon_jit
def _power(byte):
    return (byte << 23).to(gl.float32, bitcast=True)


@gluon_jit
def _wide(w_tile, scale_byte, layout: gl.constexpr):
    """e4m3 [128, 128] in shared memory -> bf16, as the left operand in registers."""
    pairs = w_tile._reinterpret(gl.int16, [128, 64], PAIRS).load(gl.DotOperandLayout(0, layout, 1))
    return bf16_of_e4m3_pairs(pairs, scale_byte.to(gl.int32), gl.DotOperandLayout(0, layout, 2))


@gluon_jit
def bf16_of_e4m3_pairs(pairs, scale_byte, layout: gl.constexpr):
    """int16 [M, K / 2], two e4m3 each, times 2^(scale_byte - 127) -> bf16 [M, K] (gemm_portable.bf16_of_e4m3). The pair is a
    register of the matrix unit's operand, so nothing moves between threads."""
    scale = (scale_byte + 120) * 0x00800080  # twice, as bf16: times 2^120
    left, right = gl.inline_asm_elementwise(
        """{
        .reg .b32 both, size;
        prmt.b32 both, $2, 0, 0x4140;
        shl.b32 size, both, 4;
        and.b32 size, size, 0x07f007f0;
        shl.b32 both, both, 8;
        lop3.b32 both, both, 0x80008000, size, 0xea;
        mul.bf16x2 both, both, $3;
        mov.b32 {$0, $1}, both;
        }""",
        "=h,=h,r,r",
        [pairs.to(gl.int32), scale],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    joined = gl.join(left, right)
    return gl.convert_layout(joined.reshape([joined.shape[0], 2 * joined.shape[1]]), layout, assert_trivial=True)
