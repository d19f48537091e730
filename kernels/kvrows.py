"""Rows as they are cached, and the index queries in the same format: norm, rotary turn, rounding and packing in one pass.
What a row is, byte for byte, says kernels/rows.py."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend
from kernels.early import await_inputs, early
from kernels.jit import jit
from kernels.launch import launch
from kernels.norm import norm_factor, rms_norm_reference
from kernels.quant import fp4_code, hadamard_matrix, inverse_power_of_two, power_of_two, round_fp4, ue8m0_for_fp4, ue8m0_for_fp8
from kernels.ragged import Ragged, store_ring_reference
from kernels.rope import rope_reference, turn_of_token, turn_pairs
from kernels.rounding import rounded, rounded_through
from kernels.rows import PLAIN_DTYPES, IndexRow, KVRow
from kernels.workspace import empty

QUERY_HEADS = 64  # index heads that a program takes at once
QUERY_PROGRAMS = 3  # on a multiprocessor


def kv_rows(kv: Tensor, weight: Tensor, eps: float, turn: Tensor, row: KVRow, batch: Ragged, ring: Tensor | None) -> Tensor:
    """kv [T, d] -> its RMSNorm with weight [d], turned by `turn` [T, rope/2, 2] and packed: uint8 [T, ring_bytes].

    With `ring` uint8 [slots, R, ring_bytes] the rows are also stored there, at position % R of their sequences' slots: for a
    step in decode form (`batch.is_decode`), whose rows overwrite none that is needed.
    """
    if not backend.active().triton:
        return kv_rows_reference(kv, weight, eps, turn, row, batch, ring)
    packed = empty((len(kv), row.ring_bytes), torch.uint8, kv.device)
    block = row_block(row.head_dim)
    launch(
        _kv_rows,
        (len(kv),),
        kv,
        weight,
        eps,
        turn,
        packed,
        packed if ring is None else ring,
        batch.positions,
        batch.sequence_ids,
        batch.slots,
        kv.stride(0),
        0 if ring is None else ring.stride(0),
        RING_ROWS=0 if ring is None else ring.shape[1],
        KIND=row.kind,
        CHANNELS=row.head_dim,
        PAIRS=row.rope_dim // 2,
        ROUNDED=row.rounded,
        VALUE_BYTES=row.value_bytes,
        ROW_BYTES=row.ring_bytes,
        BLOCK=block,
        num_warps=1,
        **early(),
    )
    return packed


def kv_rows_reference(
    kv: Tensor, weight: Tensor, eps: float, turn: Tensor, row: KVRow, batch: Ragged, ring: Tensor | None
) -> Tensor:
    packed = row.pack(rope_reference(rms_norm_reference(kv, weight, eps), turn, inverse=False))
    if ring is not None:
        store_ring_reference(batch, ring, packed)
    return packed


def index_queries(q: Tensor, turn: Tensor, row: IndexRow) -> tuple[Tensor, Tensor | None]:
    """q [T, h, dim] -> the same turned by `turn` [T, rope/2, 2] and rounded as the keys in `row` are.

    fp8 and mxfp4 rows: (e4m3 [T, h, dim], float32 [T, h], a power of two a head); others: (q's dtype [T, h, dim], None).
    """
    if not backend.active().triton:
        return index_queries_reference(q, turn, row)
    tokens, heads, dim = q.shape
    plain = row.kind in PLAIN_DTYPES
    codes = empty(q.shape, q.dtype if plain else torch.float8_e4m3fn, q.device)
    scales = None if plain else empty((tokens, heads), torch.float32, q.device)
    block_heads = max(min(QUERY_HEADS, triton.next_power_of_2(heads)), 16)  # of the step's size it does not depend: equal sums
    blocks = tokens * triton.cdiv(heads, block_heads)
    launch(
        _index_queries,
        (min(blocks, QUERY_PROGRAMS * backend.active().multiprocessors),),
        q,
        turn,
        codes,
        codes if scales is None else scales,
        _signs(dim, torch.float32 if backend.INTERPRETED else q.dtype, q.device) if row.rounded else q,
        blocks,
        q.stride(0),
        HEADS=heads,
        DIM=dim,
        PAIRS=turn.shape[1],
        ROUNDED=row.rounded,
        PLAIN=plain,
        BLOCK_HEADS=block_heads,
        BLOCK=triton.next_power_of_2(dim),
        **early(),
    )
    return codes, scales


@cache
def _signs(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix without its factor, [dim, dim] of +-1. In float32 where the interpreter's dot would take bf16 for
    integers."""
    return torch.where(hadamard_matrix(dim, device) > 0, 1.0, -1.0).to(dtype)


def index_queries_reference(q: Tensor, turn: Tensor, row: IndexRow) -> tuple[Tensor, Tensor | None]:
    turned = rope_reference(q, turn, inverse=False)
    if row.kind in PLAIN_DTYPES:
        return row.round(turned), None
    packed = replace(row, kind="fp8").pack(turned)
    scales = packed[..., row.dim :].contiguous().view(torch.float32).squeeze(-1)
    return packed[..., : row.dim].contiguous().view(torch.float8_e4m3fn), scales


def row_block(channels: int) -> int:
    """The BLOCK with which the device functions here take a row of so many channels."""
    block: int = triton.next_power_of_2(max(channels, 64))
    return block


@jit
def store_kv_row(
    x,
    values_ptr,
    scales_ptr,
    KIND: tl.constexpr,
    CHANNELS: tl.constexpr,
    PLAIN: tl.constexpr,
    ROUNDED: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Packs a KV row x float32 [BLOCK] of `CHANNELS` channels, `PLAIN` of them before the rotary ones; bytes of the scales
    past the blocks there are become 0."""
    channel = tl.arange(0, BLOCK)
    blocks: tl.constexpr = BLOCK // 64
    scaled: tl.constexpr = (PLAIN + 63) // 64
    grouped = tl.reshape(tl.where(channel < PLAIN, x, 0.0), (blocks, 64))
    byte = ue8m0_for_fp8(tl.max(tl.abs(grouped), 1))
    codes = rounded(grouped * inverse_power_of_two(byte)[:, None], tl.float8e4nv)
    if KIND == "fp8":
        code_ptr = (values_ptr + channel).to(tl.pointer_type(tl.float8e4nv))
        tl.store(code_ptr, tl.reshape(codes, (BLOCK,)), channel < PLAIN)
        rotary_ptr = (values_ptr + PLAIN).to(tl.pointer_type(tl.bfloat16)) + (channel - PLAIN)
        tl.store(rotary_ptr, rounded(x, tl.bfloat16), (channel >= PLAIN) & (channel < CHANNELS))
        block = tl.arange(0, blocks)
        tl.store(scales_ptr + block, tl.where(block < scaled, byte, 0).to(tl.uint8), block < SCALE_BYTES)
        if blocks < SCALE_BYTES:
            padding = tl.arange(0, SCALE_BYTES)
            tl.store(scales_ptr + padding, tl.zeros([SCALE_BYTES], tl.uint8), padding >= blocks)
    else:
        if ROUNDED:
            simulated = tl.reshape(codes.to(tl.float32) * power_of_two(byte)[:, None], (BLOCK,))
            x = tl.where(channel < PLAIN, simulated, x)
        if KIND == "bf16":
            tl.store(values_ptr.to(tl.pointer_type(tl.bfloat16)) + channel, rounded(x, tl.bfloat16), channel < CHANNELS)
        else:
            tl.store(values_ptr.to(tl.pointer_type(tl.float32)) + channel, x, channel < CHANNELS)


@jit
def store_index_row(x, values_ptr, scales_ptr, KIND: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Packs an index key x float32 [BLOCK] of `DIM` channels, rounded already but for "mxfp4", which is the rounding."""
    channel = tl.arange(0, BLOCK)
    if KIND == "fp8":
        byte = ue8m0_for_index(tl.max(tl.abs(x), 0))
        codes = rounded(x * inverse_power_of_two(byte), tl.float8e4nv)
        tl.store((values_ptr + channel).to(tl.pointer_type(tl.float8e4nv)), codes, channel < DIM)
        tl.store(scales_ptr.to(tl.pointer_type(tl.float32)), power_of_two(byte))
    elif KIND == "mxfp4":
        values, byte, _ = fp4_blocks(x)
        even, odd = tl.split(tl.reshape(fp4_code(tl.reshape(values, (BLOCK,)), x), (BLOCK // 2, 2)))
        pair, block = tl.arange(0, BLOCK // 2), tl.arange(0, BLOCK // 32)
        tl.store(values_ptr + pair, (even | (odd << 4)).to(tl.uint8), pair < DIM // 2)
        tl.store(scales_ptr + block, tl.reshape(byte, (BLOCK // 32,)).to(tl.uint8), block < DIM // 32)
    elif KIND == "bf16":
        tl.store(values_ptr.to(tl.pointer_type(tl.bfloat16)) + channel, rounded(x, tl.bfloat16), channel < DIM)
    else:
        tl.store(values_ptr.to(tl.pointer_type(tl.float32)) + channel, x, channel < DIM)


@jit
def ue8m0_for_index(amax):
    """As `ue8m0_for_fp8`, with the lower floor of index rows, 448 * 2^-120: what FP4 left must survive."""
    bits = tl.maximum(amax, 3.3703774026776627e-34).to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) >> 23) - 8


@jit
def hadamard_signs(i, j):
    """Sylvester's matrix without its factor: float32 (-1)^popcount(i & j), i and j below 256."""
    both = i & j
    both ^= both >> 4
    return 1.0 - 2.0 * ((0x6996 >> (both & 15)) & 1).to(tl.float32)


@jit
def hadamard_row(x, DIM: tl.constexpr):
    """x float32 [DIM], DIM 32..256 a power of two, times the orthonormal Hadamard matrix: over the low 4 bits of a
    channel's number, then over the others."""
    high: tl.constexpr = DIM // 16
    low_signs = hadamard_signs(tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :])
    high_signs = hadamard_signs(tl.arange(0, high)[:, None], tl.arange(0, high)[None, :])
    low = tl.sum(tl.reshape(x, (high, 16))[:, :, None] * low_signs[None, :, :], 1)
    return tl.reshape(tl.sum(low[:, None, :] * high_signs[:, :, None], 0), (DIM,)) * DIM**-0.5


@jit
def fp4_blocks(x):
    """x float32 [..., C], C a multiple of 32 -> (e2m1 values [..., C / 32, 32], ue8m0 bytes of their scales [..., C / 32, 1],
    the largest size in each row after the scaling [...])."""
    grouped = tl.reshape(x, x.shape[:-1] + [x.shape[-1] // 32, 32])  # noqa: RUF005
    largest = tl.max(tl.abs(grouped), len(x.shape))
    byte = ue8m0_for_fp4(largest)
    inverse = inverse_power_of_two(byte)
    row_largest = tl.max(round_fp4(largest * inverse) * power_of_two(byte), len(x.shape) - 1)
    return round_fp4(grouped * tl.expand_dims(inverse, -1)), tl.expand_dims(byte, -1), row_largest


@jit
def simulate_fp4_blocks(x):
    """x float32 [..., C], C a multiple of 32: what FP4 with a scale per 32 leaves of it."""
    values, byte, _ = fp4_blocks(x)
    return tl.reshape(values * power_of_two(byte), x.shape)


@jit
def _kv_rows(
    kv_ptr,
    weight_ptr,
    eps,
    turn_ptr,
    packed_ptr,
    ring_ptr,
    positions_ptr,
    sequence_ids_ptr,
    slots_ptr,
    token_stride,
    slot_stride,
    RING_ROWS: tl.constexpr,
    KIND: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDED: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    plain: tl.constexpr = CHANNELS - 2 * PAIRS
    kv = tl.load(kv_ptr + token * token_stride + channel, channel < CHANNELS, 0.0)
    weight = tl.load(weight_ptr + channel, channel < CHANNELS, 0.0).to(tl.float32)
    cos, sin = turn_of_token(turn_ptr, token, channel, CHANNELS, PAIRS)
    wide = kv.to(tl.float32)
    normed = rounded_through(wide * norm_factor(wide, eps, CHANNELS) * weight, kv.dtype)
    x = rounded_through(turn_pairs(normed, cos, sin), kv.dtype)
    at = packed_ptr + token * ROW_BYTES
    store_kv_row(x, at, at + VALUE_BYTES, KIND, CHANNELS, plain, ROUNDED, ROW_BYTES - VALUE_BYTES, BLOCK)
    if RING_ROWS:
        slot = tl.load(slots_ptr + tl.load(sequence_ids_ptr + token))
        at = ring_ptr + slot * slot_stride + tl.load(positions_ptr + token) % RING_ROWS * ROW_BYTES
        store_kv_row(x, at, at + VALUE_BYTES, KIND, CHANNELS, plain, ROUNDED, ROW_BYTES - VALUE_BYTES, BLOCK)


@jit(do_not_specialize=["blocks"])
def _index_queries(
    q_ptr,
    turn_ptr,
    codes_ptr,
    scales_ptr,
    signs_ptr,
    blocks,
    token_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program reads the Hadamard matrix once and takes every so many-th of the `blocks` of `BLOCK_HEADS` heads."""
    await_inputs(EARLY)
    per_token: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    channel = tl.arange(0, BLOCK)[None, :]
    if ROUNDED:
        signs = tl.load(signs_ptr + tl.arange(0, BLOCK)[:, None] * BLOCK + channel)
    for number in range(tl.cdiv(blocks - tl.program_id(0), tl.num_programs(0))):
        block = tl.program_id(0) + number * tl.num_programs(0)
        token = (block // per_token).to(tl.int64)
        heads = block % per_token * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        head = heads[:, None]
        real = (head < HEADS) & (channel < DIM)
        q = tl.load(q_ptr + token * token_stride + head * DIM + channel, real, 0.0)
        cos, sin = turn_of_token(turn_ptr, token, channel, DIM, PAIRS)
        x = turn_pairs(q.to(tl.float32), cos, sin)
        if ROUNDED:
            mixed = tl.dot(rounded(x, dtype).to(signs.dtype), signs, input_precision="ieee") * DIM**-0.5
            x = rounded_through(mixed, dtype)
        at = codes_ptr + (token * HEADS + head) * DIM + channel
        if PLAIN:
            tl.store(at, rounded(simulate_fp4_blocks(x) if ROUNDED else x, dtype), real)
        else:
            if ROUNDED:
                values, byte, row_largest = fp4_blocks(x)
                row_byte = ue8m0_for_index(row_largest)
                scale = power_of_two(byte) * inverse_power_of_two(row_byte)[:, None, None]
                scaled = tl.reshape(values * scale, x.shape)
            else:
                x = rounded_through(x, dtype)
                row_byte = ue8m0_for_index(tl.max(tl.abs(x), 1))
                scaled = x * inverse_power_of_two(row_byte)[:, None]
            tl.store(at, rounded(scaled, tl.float8e4nv), real)
            tl.store(scales_ptr + token * HEADS + heads, power_of_two(row_byte), heads < HEADS)
