"""FP4 weights as the left operand of an FP8 product, on the device: e2m1 becomes e4m3 in registers, in their order.

Weights are the product's left side (64 of their rows a warpgroup), tokens its right side, so few tokens waste little. A block
is 64 rows and 128 channels of K: `experts_weights.fragments` puts its nibbles in order at load time, so that 16 bytes at a
time are a thread's own part of the operand.

A table of the eight e2m1 magnitudes as e4m3 sits in two registers; PRMT looks four of them up at a time. The scale of 32
channels, relative to its row's, is added to the exponents of the table: the product with e4m3 activations is exact, and is
summed over 128 channels by the tensor core (in its own, narrower way) and beyond in float32.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from kernels.jit import gluon_jit

STEP = 128  # channels of a block
BLOCK_ROWS = 64
BLOCK_WORDS = BLOCK_ROWS * STEP // 8  # int32
SCALE_STEPS = 11  # e4m3 holds 0.5 .. 6 times 2^-5 .. 2^6 exactly, all of them normal

# how a block lies in shared memory: tokens [rows, 128], 32 x 32 words, 8 x 8 words of scales
TOKENS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
SCALES = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2)


@gluon_jit
def block_words(stage, LANES: gl.constexpr):
    """[32, 32] words of a block in shared memory -> int32 [64, 16], see `unpack`."""
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
