"""The grouped product of FP4 experts on Hopper: e2m1 becomes e4m3 in registers, in the order in which wgmma reads them.

Weights are the product's left side (64 of their rows a warpgroup), tokens its right side, so few tokens waste little.
`experts_weights.fragments` puts the nibbles in order at load time: a thread loads 16 bytes at a time, straight to registers
and several steps ahead, and they are its own part of the operand. A step is 128 channels of K.

A table of the eight e2m1 magnitudes as e4m3 sits in two registers; PRMT looks four of them up at a time. The block's scale,
relative to its row's, is added to the exponents of the table: the product with e4m3 activations is exact, and is summed over
128 channels by the tensor core and beyond in float32.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.jit import gluon_jit

STEP = 128  # channels of K
BLOCK_ROWS = 64  # rows of a warpgroup
BLOCK_WORDS = BLOCK_ROWS * STEP // 8  # int32 words of a block of 64 rows and 128 channels
SCALE_STEPS = 11  # e4m3 holds 0.5 .. 6 times 2^-5 .. 2^6 exactly, all of them normal


@gluon_jit
def unpack(words, scale_words, LANES: gl.constexpr):
    """words int32 [R, 16]: word s * 4 + c of a row holds channels 32 s + {0, 16} + 4 c .. + 3 of a step; scale_words int32 [R]:
    byte s for the 32 channels of s -> two int32 [R, 16] of four e4m3 each: channels from 32 s + 4 c, and 16 further."""
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, LANES))
    raised = (gl.expand_dims(scale_words, 1) >> gl.expand_dims((column & 12) * 2, 0)) & 255
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 m, s, t;
        and.b32 m, $2, 0x77777777;
        prmt.b32 s, $3, $4, m;
        shr.u32 m, m, 16;
        prmt.b32 t, $3, $4, m;
        lop3.b32 $0, $2, 0x80808080, s, 0xEA;
        shl.b32 m, $2, 4;
        lop3.b32 $1, m, 0x80808080, t, 0xEA;
        }""",
        "=r,=r,r,r,r",
        [words, raised * 0x08080800 + 0x14100800, raised * 0x08080808 + 0x24201C18],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon_jit
def operand(first, second, OPERAND: gl.constexpr):
    """What `unpack` gave -> e4m3 [R, 128] as the product's left operand. No instruction: the registers get another type."""
    ROWS: gl.constexpr = first.shape[0]
    both = gl.join(_as_e4m3(first), _as_e4m3(second))  # [R, 16, 2, 2, 2]
    both = gl.permute(gl.reshape(both, [ROWS, 4, 4, 4, 2]), [0, 1, 4, 2, 3])
    return gl.convert_layout(gl.reshape(both, [ROWS, 128]), OPERAND, assert_trivial=True)


@gluon_jit
def _as_e4m3(words):
    """int32 [R, C] -> e4m3 [R, C, 2, 2]. The instruction wants as many arguments as it has results, so it gets copies."""
    words = gl.join(words, words)
    words = gl.join(words, words)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon_jit
def _load_words(pointer, step, STEPS: gl.constexpr, LANES: gl.constexpr):
    """int32 [64, 16]: the block of `step`; zeros beyond the last."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    word = gl.arange(0, 1024, layout=FLAT)
    words = gl.load(pointer + step * 1024 + word, mask=(word >= 0) & (step < STEPS), other=0)
    words = gl.reshape(words, [2, 4, 8, 4, 2, 2])  # half, warp, row, c, s, 8 rows below
    words = gl.reshape(gl.permute(words, [1, 5, 2, 0, 4, 3]), [64, 16])
    return gl.convert_layout(words, LANES, assert_trivial=True)


@gluon_jit
def _load_scales(pointer, step, STEPS: gl.constexpr, LANES: gl.constexpr):
    """int32 [64], one word a row of the block of `step`."""
    PAIRS: gl.constexpr = gl.DistributedLinearLayout([[1]], [[0], [0], [2], [4], [8]], [[16], [32]], [], [64])
    word = gl.arange(0, 64, layout=PAIRS)
    words = gl.load(pointer + step * 64 + word, mask=(word >= 0) & (step < STEPS), other=0)
    words = gl.reshape(gl.permute(gl.reshape(words, [4, 8, 2]), [0, 2, 1]), [64])  # warp, row, 8 rows below
    return gl.convert_layout(words, gl.SliceLayout(1, LANES), assert_trivial=True)


@gluon_jit
def _copy_rows(ring, x, source, live, step, STEPS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, LOAD: gl.constexpr):
    """Starts the copy of channels of `step` of the tile's live rows into its stage."""
    channel = gl.arange(0, 128, layout=gl.SliceLayout(0, LOAD))
    pointer = x + gl.expand_dims(source * K, 1) + gl.expand_dims(step * 128 + channel, 0)
    wanted = gl.expand_dims(live & (step < STEPS), 1) & gl.expand_dims(channel >= 0, 0)
    async_copy.async_copy_global_to_shared(ring.index(step % STAGES), pointer, mask=wanted)
    async_copy.commit_group()


@gluon_jit
def fp4_kernel(
    x,
    x_scales,
    weights,
    scales,
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
    AHEAD: gl.constexpr,
    DIRECT: gl.constexpr,
):
    """As `experts_portable.grouped_kernel`, for 64 of the N channels. x e4m3 [.., K], x_scales ue8m0 [.., K/128];
    weights int32 [E, N/64, K/128, 1024], scales int32 [E, N/64, K/128, 64], row_scales float32 [E, N].

    DIRECT: tile i is pair i alone, `order` its ids, tiles and tile_count None. Then the launch may be programmatic: the
    kernel before it need only have begun, since weights and ids were there before that one."""
    STEPS: gl.constexpr = K // 128
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
    LANES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
    # with a stage for every step all of x is fetched at once, and no step waits for other threads
    RESIDENT: gl.constexpr = STAGES == STEPS
    BYTES: gl.constexpr = 16 if RESIDENT or TILE >= 16 else 8  # of a copy
    ACROSS: gl.constexpr = 32 if RESIDENT and K >= 512 else 128 // BYTES
    LOAD: gl.constexpr = gl.BlockedLayout([1, BYTES], [32 // ACROSS, ACROSS], [4, 1], [1, 0])

    tile = gl.program_id(1)
    if DIRECT:
        gdc_launch_dependents()
        expert = gl.load(order + tile).to(gl.int64)
        first = tile
        rows = 1
    else:
        if tile >= gl.load(tile_count):
            return
        expert = gl.load(tiles + tile * 4).to(gl.int64)
        first = gl.load(tiles + tile * 4 + 1)
        rows = gl.load(tiles + tile * 4 + 2)
    block = expert * (N // 64) + gl.program_id(0)
    weights += block * (STEPS * 1024)
    scales += block * (STEPS * 64)

    words = (_load_words(weights, 0, STEPS, LANES),)
    words_scales = (_load_scales(scales, 0, STEPS, LANES),)
    for early in gl.static_range(1, AHEAD):
        words = words + (_load_words(weights, early, STEPS, LANES),)  # noqa: RUF005
        words_scales = words_scales + (_load_scales(scales, early, STEPS, LANES),)  # noqa: RUF005

    if DIRECT:
        gdc_wait()
    line = gl.arange(0, TILE, layout=gl.SliceLayout(1, LOAD))
    live = line < rows
    source = first + line
    if GATHER:
        if not DIRECT:
            source = gl.load(order + source, mask=live, other=0)
        source = source // TOPK
    source = source.to(gl.int64)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    if RESIDENT:
        whole = gl.allocate_shared_memory(gl.float8e4nv, [TILE, K], SHARED)
        channel = gl.arange(0, K, layout=gl.SliceLayout(0, LOAD))
        pointer = x + gl.expand_dims(source * K, 1) + gl.expand_dims(channel, 0)
        wanted = gl.expand_dims(live, 1) & gl.expand_dims(channel >= 0, 0)
        async_copy.async_copy_global_to_shared(whole, pointer, mask=wanted)
        async_copy.commit_group()
        ring = whole._reinterpret(gl.float8e4nv, [STEPS, TILE, 128], SHARED)  # swizzled, it lies in blocks of 128 channels
    else:
        ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, 128], SHARED)
        for early in gl.static_range(STAGES - 1):
            _copy_rows(ring, x, source, live, early, STEPS, K, STAGES, LOAD)

    TABLE: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_factors = gl.allocate_shared_memory(gl.float32, [STEPS, TILE], PLAIN)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(0, TABLE))
    known = place < rows
    place = first + place
    if GATHER:
        if not DIRECT:
            place = gl.load(order + place, mask=known, other=0)
        place = place // TOPK
    block_of_k = gl.arange(0, STEPS, layout=gl.SliceLayout(1, TABLE))
    byte = gl.load(
        x_scales + gl.expand_dims(place.to(gl.int64) * STEPS, 0) + gl.expand_dims(block_of_k, 1),
        mask=gl.expand_dims(known, 0) & gl.expand_dims(block_of_k >= 0, 1),
        other=0,
    )
    x_factors.store((byte.to(gl.int32) << 23).to(gl.float32, bitcast=True))

    x_factors = x_factors._reinterpret(gl.float32, [STEPS, 1, TILE], PLAIN)
    total = gl.zeros([64, TILE], gl.float32, PRODUCT)
    nothing = gl.zeros([64, TILE], gl.float32, PRODUCT)
    left = unpack(words[0], words_scales[0], LANES)
    if RESIDENT:
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
    for base in range(0, STEPS, AHEAD):
        for turn in gl.static_range(AHEAD):
            step = base + turn
            if not RESIDENT:
                async_copy.wait_group(STAGES - 2)
                fence_async_shared()
                gl.thread_barrier()
            right = ring.index(step % STAGES).permute([1, 0])
            part = warpgroup_mma(operand(left[0], left[1], OPERAND), right, nothing, use_acc=False, is_async=True)
            words = words[1:] + (_load_words(weights, step + AHEAD, STEPS, LANES),)  # noqa: RUF005
            words_scales = words_scales[1:] + (_load_scales(scales, step + AHEAD, STEPS, LANES),)  # noqa: RUF005
            coming = unpack(words[0], words_scales[0], LANES)
            if not RESIDENT:
                _copy_rows(ring, x, source, live, step + STAGES - 1, STEPS, K, STAGES, LOAD)
            factor = x_factors.index(step).load(PRODUCT)
            part = warpgroup_mma_wait(0, deps=[part])
            total += part * factor
            left = coming

    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    row = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, PRODUCT))
    total *= gl.expand_dims(gl.load(row_scales + expert * N + row), 1)
    result = gl.convert_layout(total.to(gl.bfloat16), STORE)
    target = gl.arange(0, TILE, layout=gl.SliceLayout(0, STORE))
    live = target < rows
    target = first + target
    if not GATHER and not DIRECT:
        target = gl.load(order + target, mask=live, other=0)
    channel = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
    where = gl.expand_dims(target.to(gl.int64) * N, 0) + gl.expand_dims(channel, 1)
    gl.store(out + where, result, mask=gl.expand_dims(live, 0) & gl.expand_dims(channel >= 0, 1))
