"""The first kernel of a hyper-connection, on the matrix units, with streams that never leave registers.

A bf16 matrix product multiplies the same k of both sides whatever order the k come in, so each thread loads consecutive
channels of the streams as its share of a fragment: `hyper_post` is arithmetic on fragments, and its result is multiplied
where it is. The projection comes through shared memory, a step ahead.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.jit import gluon_jit


@gluon_jit(do_not_specialize=["tokens"])
def mix_fragments_kernel(
    streams,
    out,
    post,
    comb,
    into,
    parts,
    partial,
    tokens,
    WIDTH: gl.constexpr,
    SPAN: gl.constexpr,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOKENS: gl.constexpr,
    CHANNELS: gl.constexpr,
    VECTOR: gl.constexpr,
    POST: gl.constexpr,
    EARLY: gl.constexpr,
    num_warps: gl.constexpr,
):
    """As `kernels.hyper._mix_kernel`, with fn as two bf16 parts [2, OUTPUTS, 4 * WIDTH]. VECTOR: channels of a load."""
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, VECTOR)
    right: gl.constexpr = gl.DotOperandLayout(1, product, VECTOR)
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [256 // CHANNELS, CHANNELS // 8], [num_warps, 1], [1, 0])
    # Four threads read 4 * VECTOR channels of one output, so that is what the rows of outputs take turns in.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4 * VECTOR, 64 // CHANNELS, CHANNELS // (4 * VECTOR), [1, 0])
    STEPS: gl.constexpr = SPAN // CHANNELS
    SLOTS: gl.constexpr = 2 if STEPS > 1 else 1
    weights = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 8 * COLUMNS, CHANNELS], swizzled)

    split = gl.program_id(0)
    start = split * SPAN
    line = gl.arange(0, 8 * COLUMNS, gl.SliceLayout(1, copies))  # of each stream, of both parts, the outputs
    column = gl.minimum(line % COLUMNS, OUTPUTS - 1)  # what is beyond is not stored
    from_part = line // COLUMNS % 2 * OUTPUTS + column
    wanted = parts + from_part[:, None] * (4 * WIDTH) + (line // (2 * COLUMNS) * WIDTH + start)[:, None]
    wanted += gl.arange(0, CHANNELS, gl.SliceLayout(0, copies))[None, :]
    async_copy.async_copy_global_to_shared(weights.index(0), wanted)
    async_copy.commit_group()
    if EARLY:  # weights do not depend on the kernel before
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    rows = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, left))
    live = (rows < tokens)[:, None]
    wide = rows.to(gl.int64)[:, None]
    within = gl.arange(0, CHANNELS, gl.SliceLayout(0, left))[None, :]
    place = wide * (4 * WIDTH) + start + within
    out_place = out + wide * WIDTH + start + within
    if POST:
        p = _four(post + wide * 4, 1, live)
        a, b = _four(comb + wide * 16, 1, live), _four(comb + wide * 16 + 4, 1, live)
        c, d = _four(comb + wide * 16 + 8, 1, live), _four(comb + wide * 16 + 12, 1, live)
    total = gl.zeros([TOKENS, COLUMNS], gl.float32, product)
    squares = gl.zeros([TOKENS], gl.float32, gl.SliceLayout(1, left))
    for step in range(STEPS):
        slot = step % SLOTS
        s0, s1, s2, s3 = _four(streams + place + step * CHANNELS, WIDTH, live)
        if POST:
            value = gl.load(out_place + step * CHANNELS, mask=live, other=0.0)
        if STEPS > 1:
            if step + 1 < STEPS:
                async_copy.async_copy_global_to_shared(weights.index((step + 1) % SLOTS), wanted + (step + 1) * CHANNELS)
                async_copy.commit_group()
                async_copy.wait_group(1)
            else:
                async_copy.wait_group(0)
        else:
            async_copy.wait_group(0)
        gl.thread_barrier()
        some = gl.zeros([TOKENS, COLUMNS], gl.float32, product)  # short sums: the matrix units truncate as they add
        old = (s0, s1, s2, s3)
        for k in gl.static_range(4):
            x = old[k]
            if POST:
                x = _mixed(value, s0, s1, s2, s3, p[k], a[k], b[k], c[k], d[k])
                gl.store(into + place + (k * WIDTH + step * CHANNELS), x, mask=live)
            some, squares = _add(x, weights.index(slot), 2 * k, COLUMNS, right, some, squares)
        total += some
        if STEPS > 1:
            gl.thread_barrier()
    rows = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, product))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, product))
    places = partial + (split * tokens + rows[:, None]) * COLUMNS + columns[None, :]
    gl.store(places, total, mask=(rows < tokens)[:, None] & (columns < OUTPUTS)[None, :])
    rows = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, left))
    gl.store(partial + (split * tokens + rows) * COLUMNS + OUTPUTS, squares, mask=rows < tokens)


@gluon_jit
def _mixed(value, s0, s1, s2, s3, p, a, b, c, d):
    mixed = p * value.to(gl.float32) + a * s0.to(gl.float32) + b * s1.to(gl.float32)
    mixed = mixed + c * s2.to(gl.float32) + d * s3.to(gl.float32)
    # Two share a conversion, as in rounding.rounded_through: one by one they run at a quarter of the rate.
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [mixed], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon_jit
def _add(x, weights, FIRST: gl.constexpr, COLUMNS: gl.constexpr, right: gl.constexpr, some, squares):
    high = weights.slice(FIRST * COLUMNS, COLUMNS).permute((1, 0)).load(right)
    low = weights.slice((FIRST + 1) * COLUMNS, COLUMNS).permute((1, 0)).load(right)
    some = mma_v2(x, high, mma_v2(x, low, some))
    return some, squares + gl.sum(x.to(gl.float32) * x.to(gl.float32), 1)


@gluon_jit
def _four(pointer, STEP: gl.constexpr, mask):
    return (
        gl.load(pointer, mask=mask, other=0.0),
        gl.load(pointer + STEP, mask=mask, other=0.0),
        gl.load(pointer + 2 * STEP, mask=mask, other=0.0),
        gl.load(pointer + 3 * STEP, mask=mask, other=0.0),
    )
