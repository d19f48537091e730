"""The linear layers' kernel for every card: FP8 x FP8, bf16 x bf16, float32 x bf16 in ieee arithmetic, bf16 x FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend
from kernels.jit import jit
from kernels.launch import launch
from kernels.quant import WEIGHT_BLOCK, inverse_power_of_two, power_of_two, ue8m0_for_fp8
from kernels.rounding import rounded

INTERPRETED = tl.constexpr(backend.INTERPRETED)
FEW_TOKENS = 64  # up to here a layer is bound by reading its weight
SOME_TOKENS = backend.INVARIANT_ROWS  # up to here K is cut into the weight's segments


class Operands(NamedTuple):
    """What every kernel of the linear layers takes.

    x [T, K] or [T, groups, K], e4m3 with x_scales uint8 [T, ceil(K / 128)], or bf16 or float32 without; weight
    [groups, N, K], e4m3 with weight_scales as of one matrix [groups * N, K], or bf16 without; out [T, groups * N], e4m3 with
    out_scales uint8 [T, groups * N / 128]. partials: float32 [segments, T, groups * N] for more than one segment of K;
    arrivals: int32 zeros, a counter a tile, left as zeros.
    """

    x: Tensor
    x_scales: Tensor | None
    weight: Tensor
    weight_scales: Tensor | None
    out: Tensor
    out_scales: Tensor | None
    partials: Tensor | None
    arrivals: Tensor | None


def kind_of(x: Tensor, weight_scales: Tensor | None) -> str:
    """fp8: both operands; dequantise: weights to bf16 on the way; plain: both bf16; exact: float32 activations."""
    if weight_scales is not None:
        return "fp8" if x.dtype == torch.float8_e4m3fn else "dequantise"
    return "plain" if x.dtype == torch.bfloat16 else "exact"


def segments_of(kind: str, outputs: int, width: int) -> int:
    """Into how many parts K is cut, a power of two: enough programs of 128 outputs to keep a card reading at few tokens, none
    with so little to read that adding the parts costs more. `outputs` over all groups."""
    if kind == "exact":
        return 1
    programs, shortest = {"fp8": (128, 8), "dequantise": (256, 8), "plain": (64, 4)}[kind]
    most = min(programs // triton.cdiv(outputs, 128), triton.cdiv(width, WEIGHT_BLOCK) // shortest)
    return 1 << max(int(most), 1).bit_length() - 1


class Tiling(NamedTuple):
    """How a launch cuts its work. tokens, outputs, depth: a program's tile and its step along K. split: every segment has a
    program of its own. weights_first: the weight is the matrix unit's left operand, so that few tokens make few columns."""

    tokens: int
    outputs: int
    depth: int
    warps: int
    stages: int
    split: bool = False
    weights_first: bool = False


def tiling_of(kind: str, tokens: int, outputs: int) -> Tiling:
    """For the portable kernel; found by measuring on sm_90. `outputs` of one group."""
    if kind == "exact":
        return Tiling(16, 16, 32, 4, 1) if tokens <= FEW_TOKENS else Tiling(64, 64, 32, 4, 1)
    few = max(16, triton.next_power_of_2(tokens))
    if kind == "dequantise":  # 128 outputs: a block of the quantised result
        if tokens <= FEW_TOKENS:
            return Tiling(few, 128, 128, 8, 3, split=True, weights_first=True)
        return Tiling(128, 128, 64, 8, 3, split=tokens <= 128, weights_first=True)
    if kind == "fp8":
        if tokens <= 16:
            return Tiling(16, 128, 128, 8, 4, split=True, weights_first=True)
        if tokens <= FEW_TOKENS:
            return Tiling(few, 64, 128, 4, 4, split=True, weights_first=True)
        return Tiling(64, 64 if tokens <= 256 else 128, 128, 4, 4, split=tokens <= 128)
    return _plain_tiling(tokens, outputs)


def _plain_tiling(tokens: int, outputs: int) -> Tiling:
    if outputs > 16_384:  # the head's: long runs of reading, and results by the megabyte
        if tokens > FEW_TOKENS:
            return Tiling(128, 256, 64, 8, 3)
        few = max(16, triton.next_power_of_2(tokens))
        return Tiling(few, 128, 128 if tokens <= 16 else 64, 8, 4, weights_first=True)
    if tokens <= 16:
        return Tiling(16, 64, 128, 8, 4, split=True, weights_first=True)
    if tokens <= 128:
        return Tiling(64, 32, 128, 4, 4, split=True)
    if tokens <= SOME_TOKENS:
        return Tiling(64, 128, 64, 4, 4, split=True)
    for tiling in (
        Tiling(128, 256, 64, 8, 3),
        Tiling(128, 128, 64, 4, 4),
        Tiling(64, 128, 64, 4, 4),
        Tiling(64, 64, 128, 4, 4),
    ):
        if triton.cdiv(tokens, tiling.tokens) * triton.cdiv(outputs, tiling.outputs) >= 120:  # programs for a whole card
            return tiling
    return Tiling(64, 32, 128, 4, 4)


def _stages(tiling: Tiling, x_bytes: int, weight_bytes: int) -> int:
    """As many as wanted and as fit: a sixth of the shared memory stays for what the compiler puts there."""
    step = (tiling.tokens * x_bytes + tiling.outputs * weight_bytes) * tiling.depth
    return max(1, min(tiling.stages, backend.active().shared_bytes * 5 // 6 // step))


def multiply_portable(operands: Operands, segments: int, tiling: Tiling | None = None) -> None:
    x, weight = operands.x, operands.weight
    groups, outputs, width = weight.shape
    tokens, kind = len(x), kind_of(x, operands.weight_scales)
    tiling = tiling or tiling_of(kind, tokens, outputs)
    split = tiling.split and segments > 1
    tiles = triton.cdiv(tokens, tiling.tokens) * triton.cdiv(outputs, tiling.outputs)
    assert not split or operands.arrivals is None or tiles * groups <= len(operands.arrivals)
    launch(
        _linear_kernel,
        (tiles, segments if split else 1, groups),
        *operands,
        tokens,
        x.stride(0),
        OUTPUTS=outputs,
        WIDTH=width,
        GROUPS=groups,
        KIND=kind,
        SEGMENTS=segments,
        SPLIT=split,
        ONE_SCALE=WEIGHT_BLOCK % tiling.outputs == 0 and (groups == 1 or outputs % tiling.outputs == 0),
        TOKENS_TILE=tiling.tokens,
        OUTPUTS_TILE=tiling.outputs,
        DEPTH=tiling.depth,
        WEIGHTS_FIRST=tiling.weights_first,
        num_warps=tiling.warps,
        num_stages=_stages(tiling, x.element_size(), weight.element_size()),
    )


@jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x, x_scales, weight, weight_scales, out, out_scales, partials, arrivals, tokens, x_stride,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, SEGMENTS: tl.constexpr,
    SPLIT: tl.constexpr, ONE_SCALE: tl.constexpr, TOKENS_TILE: tl.constexpr, OUTPUTS_TILE: tl.constexpr, DEPTH: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """out [tokens, GROUPS, OUTPUTS]; partials float32 [SEGMENTS, tokens, GROUPS, OUTPUTS]."""
    group = tl.program_id(2)
    tile_t, tile_n = _tile(tokens, OUTPUTS, TOKENS_TILE, OUTPUTS_TILE)
    t = tile_t * TOKENS_TILE + tl.arange(0, TOKENS_TILE)
    n = tile_n * OUTPUTS_TILE + tl.arange(0, OUTPUTS_TILE)
    # Rows past the end read others (all the same one would be slow): nothing of theirs is stored.
    x_row = t % tokens
    w_row = group * OUTPUTS + tl.minimum(n, OUTPUTS - 1)
    x_rows = x + x_row.to(tl.int64) * x_stride + group * WIDTH
    w_rows = weight + w_row.to(tl.int64) * WIDTH
    blocks: tl.constexpr = (WIDTH + 127) // 128
    x_scale_rows = x_scales
    w_scale_rows = weight_scales
    if KIND == "fp8":
        x_scale_rows = x_scales + x_row * blocks
    if KIND == "fp8" or KIND == "dequantise":
        if ONE_SCALE:
            w_scale_rows = weight_scales + (group * OUTPUTS + tile_n * OUTPUTS_TILE) // 128 * blocks
        else:
            w_scale_rows = weight_scales + w_row // 128 * blocks

    segment = tl.program_id(1)
    total = _sums(
        x_rows, x_scale_rows, w_rows, w_scale_rows, segment,
        WIDTH, KIND, SEGMENTS, SPLIT, ONE_SCALE, TOKENS_TILE, OUTPUTS_TILE, DEPTH, WEIGHTS_FIRST,
    )  # fmt: skip
    if WEIGHTS_FIRST:
        total = tl.trans(total)

    inside = (t < tokens)[:, None] & (n < OUTPUTS)[None, :]
    row_place = t.to(tl.int64) * (GROUPS * OUTPUTS) + group * OUTPUTS
    place = row_place[:, None] + n[None, :]
    scale_place = (row_place + tile_n * OUTPUTS_TILE) // 128
    if SPLIT:
        step = tokens.to(tl.int64) * (GROUPS * OUTPUTS)
        tl.store(partials + segment * step + place, total, mask=inside)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        counter = arrivals + group * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SEGMENTS - 1:
            tl.store(counter, 0)
            total = tl.load(partials + place, mask=inside, other=0.0, cache_modifier=".cg")
            for number in tl.static_range(1, SEGMENTS):
                total += tl.load(partials + number * step + place, mask=inside, other=0.0, cache_modifier=".cg")
            _store(out, out_scales, total, place, inside, scale_place, t < tokens, OUTPUTS_TILE)
    else:
        _store(out, out_scales, total, place, inside, scale_place, t < tokens, OUTPUTS_TILE)


@jit
def _tile(tokens, OUTPUTS: tl.constexpr, TOKENS_TILE: tl.constexpr, OUTPUTS_TILE: tl.constexpr):
    """Programs in an order in which those that run together share rows of both operands: 8 tiles of tokens side by side."""
    tiles_t = tl.cdiv(tokens, TOKENS_TILE)
    tiles_n: tl.constexpr = (OUTPUTS + OUTPUTS_TILE - 1) // OUTPUTS_TILE
    number = tl.program_id(0)
    band = number // (8 * tiles_n)
    height = tl.minimum(tiles_t - band * 8, 8)
    within = number - band * 8 * tiles_n
    return band * 8 + within % height, within // height


@jit
def _sums(
    x_rows, x_scale_rows, w_rows, w_scale_rows, segment,
    WIDTH: tl.constexpr, KIND: tl.constexpr, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, ONE_SCALE: tl.constexpr,
    TOKENS_TILE: tl.constexpr, OUTPUTS_TILE: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    """Over one segment of K if SPLIT, else over all, segment by segment: float32 [OUTPUTS_TILE, TOKENS_TILE] if WEIGHTS_FIRST,
    else transposed."""
    blocks: tl.constexpr = (WIDTH + 127) // 128
    length: tl.constexpr = (blocks + SEGMENTS - 1) // SEGMENTS * 128
    even: tl.constexpr = WIDTH % DEPTH == 0
    chained: tl.constexpr = SEGMENTS > 1 and not SPLIT
    first = segment * length
    last = tl.minimum(first + length, WIDTH) if SPLIT else WIDTH
    k = tl.arange(0, DEPTH)
    if WEIGHTS_FIRST:
        total = tl.zeros([OUTPUTS_TILE, TOKENS_TILE], tl.float32)
    else:
        total = tl.zeros([TOKENS_TILE, OUTPUTS_TILE], tl.float32)
    whole = total
    x_scale, w_scale = _scales(x_scale_rows, w_scale_rows, first, KIND, blocks)
    for at in tl.range(first, last, DEPTH):
        if even:
            rows = tl.load(x_rows[:, None] + (at + k)[None, :])
            codes = tl.load(w_rows[:, None] + (at + k)[None, :])
        else:
            live = (at + k < WIDTH)[None, :]
            rows = tl.load(x_rows[:, None] + (at + k)[None, :], mask=live, other=0.0)
            codes = tl.load(w_rows[:, None] + (at + k)[None, :], mask=live, other=0.0)
        # The next step's scales are asked for now: nothing then waits for them.
        next_x_scale, next_w_scale = _scales(x_scale_rows, w_scale_rows, at + DEPTH, KIND, blocks)
        if KIND == "fp8":
            if WEIGHTS_FIRST:
                product = tl.dot(codes, tl.trans(rows))
                total += product * (_weight_factor(w_scale, ONE_SCALE, 1) * power_of_two(x_scale)[None, :])
            else:
                product = tl.dot(rows, tl.trans(codes))
                total += product * (power_of_two(x_scale)[:, None] * _weight_factor(w_scale, ONE_SCALE, 0))
        else:
            if KIND == "dequantise":
                codes = bf16_of_e4m3(codes, _weight_factor(w_scale, ONE_SCALE, 1))
            if KIND == "exact" or INTERPRETED:  # the interpreter multiplies the bits of a bf16
                rows = rows.to(tl.float32)
                codes = codes.to(tl.float32)
            if WEIGHTS_FIRST:
                total = tl.dot(codes, tl.trans(rows), total, input_precision="ieee")
            else:
                total = tl.dot(rows, tl.trans(codes), total, input_precision="ieee")
        x_scale = next_x_scale
        w_scale = next_w_scale
        if chained:  # noqa: SIM102 (decided while compiling, unlike the next)
            if (at + DEPTH) % length == 0 or at + DEPTH >= WIDTH:
                whole += total
                total = tl.zeros_like(total)
    if chained:
        total = whole
    return total


@jit
def _scales(x_scale_rows, w_scale_rows, at, KIND: tl.constexpr, blocks: tl.constexpr):
    """ue8m0 bytes, int32, of the block of K that `at` is in; of the last one past the end."""
    block = tl.minimum(at // 128, blocks - 1)
    x_scale = 0
    w_scale = 0
    if KIND == "fp8":
        x_scale = tl.load(x_scale_rows + block).to(tl.int32)
    if KIND == "fp8" or KIND == "dequantise":
        w_scale = tl.load(w_scale_rows + block).to(tl.int32)
    return x_scale, w_scale


@jit
def _weight_factor(byte, ONE: tl.constexpr, AXIS: tl.constexpr):
    """float32: one number, or one an output with an axis for the tokens put in."""
    factor = power_of_two(byte)
    if not ONE:
        factor = tl.expand_dims(factor, AXIS)
    return factor


@jit
def bf16_of_e4m3(codes, scale):
    """e4m3 times a power of two up to 2^7 -> bf16, exactly. A bf16 with e4m3's exponent and mantissa bits in place is 2^-120
    of the value, subnormal or not; one multiplication makes up for that and applies the scale."""
    if INTERPRETED:
        result = (codes.to(tl.float32) * scale).to(tl.bfloat16)
    else:
        result = _moved(codes) * (scale * 1.329227995784916e36).to(tl.bfloat16)
    return result


@jit
def _moved(codes):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, size;
        prmt.b32 low, 0, $2, 0x5040;
        prmt.b32 high, 0, $2, 0x7060;
        shr.u32 size, low, 4;
        and.b32 size, size, 0x07f007f0;
        lop3.b32 $0, low, 0x80008000, size, 0xea;
        shr.u32 size, high, 4;
        and.b32 size, size, 0x07f007f0;
        lop3.b32 $1, high, 0x80008000, size, 0xea;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@jit
def _store(out, out_scales, total, place, inside, scale_place, live, OUTPUTS_TILE: tl.constexpr):
    """total [TOKENS_TILE, OUTPUTS_TILE] at `place` of out; quantised per 128 outputs where out_scales is given."""
    if out_scales is None:
        tl.store(out + place, rounded(total, out.dtype.element_ty), mask=inside)
    else:
        tl.static_assert(OUTPUTS_TILE == 128)
        values = rounded(total, tl.bfloat16).to(tl.float32)
        byte = ue8m0_for_fp8(tl.max(tl.abs(values), 1))
        tl.store(out + place, rounded(values * inverse_power_of_two(byte)[:, None], tl.float8e4nv), mask=inside)
        tl.store(out_scales + scale_place, byte.to(tl.uint8), mask=live)
