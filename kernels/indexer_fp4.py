"""MXFP4 index keys as one side of an FP8 product, on the device: e2m1 becomes e5m2 in registers.

A Hopper GPU multiplies no FP4, and bf16, which would hold a key with its scales, at half the rate of FP8. e5m2 holds one too:
e2m1 has one bit of mantissa, and the scale of a block of 32 channels, relative to the row's largest, is added to the
exponents. That is exact while the scales of a row are within 2^26 of each other; a smaller block counts as if it were 2^-26,
which moves a key by less than float32 resolves. What the product is multiplied by is then one number a row, as with FP8 keys.
The queries are those of FP8 keys too: e4m3 with a scale a head, exact while the scales of its blocks are within 2^14.

What limits it there is not the bytes of the keys: a word of 8 channels takes 11 instructions, most of them integer ones at
half the rate of float32, and that is as much as the sum over 64 heads takes.
"""

from __future__ import annotations

import triton.language as tl

from kernels.jit import jit
from kernels.quant import power_of_two
from kernels.rounding import INTERPRETED

_SPREAD = tl.constexpr(26)  # e5m2 has 30 binades of normal numbers, of which e2m1 itself takes four
_LEAST = tl.constexpr(14)  # smallest scale byte of a row for which the row's factor is a normal float32


@jit
def unpack_keys(packed, scale):
    """packed uint8 [R, C / 2], scale uint8 [R, C / 32] -> (the even channels as e5m2 [R, C / 2], the odd ones, float32 [R] by
    which a row is to be multiplied)."""
    byte = scale.to(tl.int32)
    largest = tl.maximum(tl.max(byte, 1), _LEAST)
    raised = tl.maximum(byte - largest[:, None] + _SPREAD, 0)
    each = tl.broadcast_to(raised[:, :, None], (scale.shape[0], scale.shape[1], 16))
    even, odd = _as_e5m2(packed, tl.reshape(each, packed.shape))
    return even, odd, power_of_two(largest - 13)


@jit
def _as_e5m2(packed, raised):
    """Bytes of two e2m1 codes, uint8, and what is added to the exponents of both, int32 -> (low halves as e5m2, high halves).

    Four bytes at a time, which are neighbours in a row, so of one block: PRMT looks up e2m1 * 2^-13 as e5m2, raised; zero is
    not.
    """
    if INTERPRETED:
        return _nibble_as_e5m2(packed & 15, raised), _nibble_as_e5m2(packed >> 4, raised)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 small, large, t, a, b;
        mad.lo.u32 small, $3, 0x04040400, 0x0A080400;
        mad.lo.u32 large, $3, 0x04040404, 0x12100E0C;
        and.b32 t, $2, 0x77777777;
        prmt.b32 a, small, large, t;
        shr.u32 t, t, 16;
        prmt.b32 b, small, large, t;
        shl.b32 t, $2, 4;
        prmt.b32 small, a, b, 0x6420;
        prmt.b32 large, a, b, 0x7531;
        lop3.b32 $0, t, 0x80808080, small, 0xEA;
        lop3.b32 $1, $2, 0x80808080, large, 0xEA;
        }""",
        "=&r,=r,r,r,r,r,r",
        [packed, raised],
        dtype=(tl.float8e5, tl.float8e5),
        is_pure=True,
        pack=4,
    )


@jit
def _nibble_as_e5m2(code, raised):
    """The same of one code, by arithmetic. The exponent of e5m2 begins at bit 2."""
    size = (code & 7).to(tl.int32)
    bits = tl.where(size == 0, 0, tl.where(size == 1, 4, 2 * size + 4) + 4 * raised)
    return (bits | ((code.to(tl.int32) & 8) << 4)).to(tl.uint8).to(tl.float8e5, bitcast=True)
