"""float32 to a narrower format on the device."""

from __future__ import annotations

import triton.language as tl

from kernels import backend
from kernels.jit import jit

INTERPRETED = tl.constexpr(backend.INTERPRETED)


@jit
def rounded(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest even. Triton's interpreter truncates for bf16 and loses the carry for e4m3, so there the
    value is put on the grid of the format first."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        if dtype == tl.float8e4nv:
            binade = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)  # 2^-6 is the least normal one
            shift = (binade - (3 << 23)).to(tl.float32, bitcast=True) * 12582912.0
            x = (x + shift) - shift
    return x.to(dtype)


@jit
def rounded_through(x, dtype: tl.constexpr):
    """float32 -> dtype -> float32. Two values share one conversion to bf16 and are taken apart by bits: the compiler would
    convert one by one, at a quarter of the rate."""
    if dtype == tl.float32:
        return x
    if INTERPRETED or dtype != tl.bfloat16:
        return rounded(x, dtype).to(tl.float32)
    bits = tl.inline_asm_elementwise(
        "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
        "=r,=r,f,f",
        [x],
        dtype=tl.int32,
        is_pure=True,
        pack=2,
    )
    return bits.to(tl.float32, bitcast=True)
