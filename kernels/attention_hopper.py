"""Sparse attention of a decode step on Hopper (spec B.5): FP8 rows of 512 channels, 64 heads a program.

Eight producer warps gather a tile of rows, widen it to bf16 and put it into shared memory; eight consumer warps multiply it
with wgmma while the producers work on the next. A row is gathered once for all 64 heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.jit import gluon_jit
from kernels.launch import launch
from kernels.rows import KVRow

HEADS, DIM, PLAIN = 64, 512, 448  # of one program; channels of a row; those of them in FP8
ROWS = 64  # rows of a tile
LOG2_E = gl.constexpr(1.4426950408889634)
LEAST = gl.constexpr(-1e30)  # a maximum of nothing: finite, so that it can be subtracted from itself
_HEADS, _DIM, _PLAIN = gl.constexpr(HEADS), gl.constexpr(DIM), gl.constexpr(PLAIN)
_ROWS = gl.constexpr(ROWS)
_WARPS, _REGISTERS = gl.constexpr(8), gl.constexpr(80)  # of the producers


def fits(q: Tensor, row: KVRow) -> bool:
    """Whether this is the kernel for these queries and rows; on other shapes the portable one runs."""
    whole = q.shape[1] % HEADS == 0 and q.stride(2) == 1
    return whole and q.dtype is torch.bfloat16 and (row.kind, row.head_dim, row.plain_dim) == ("fp8", DIM, PLAIN)


def decode(
    q: Tensor,
    ring: Tensor,
    pages: Tensor,
    positions: Tensor,
    sequence_ids: Tensor,
    slots: Tensor,
    page_table: Tensor,
    chosen: Tensor,
    counts: Tensor,
    sinks: Tensor,
    turn: Tensor,
    partial: Tensor,
    sums: Tensor,
    out: Tensor,
    window: int,
    ratio: int,
    splits: int,
) -> None:
    """As _decode in attention.py, for bf16 queries [T, 64 n, 512]; partial is bf16."""
    tokens, heads, dim = q.shape
    launch(
        _decode_hopper,
        (tokens, heads // HEADS, splits),
        q,
        ring,
        pages,
        positions,
        sequence_ids,
        slots,
        page_table,
        chosen,
        counts,
        sinks,
        turn,
        partial,
        sums,
        out,
        LOG2_E.value * dim**-0.5,
        q.stride(0),
        q.stride(1),
        ring.stride(0),
        pages.stride(0),
        page_table.stride(0),
        chosen.stride(0),
        ALL_HEADS=heads,
        WINDOW=window,
        RING_ROWS=ring.shape[1],
        RING_BYTES=ring.stride(1),
        PAGE_ROWS=pages.shape[1],
        RATIO=ratio,
        WHOLE=splits == 1,
        num_warps=8,
    )


@gluon_jit(do_not_specialize=["table_width"])
def _decode_hopper(
    q_ptr,
    ring_ptr,
    pages_ptr,
    positions_ptr,
    sequence_ids_ptr,
    slots_ptr,
    table_ptr,
    chosen_ptr,
    counts_ptr,
    sinks_ptr,
    turn_ptr,
    partial_ptr,
    sums_ptr,
    out_ptr,
    scale,
    q_token,
    q_head,
    slot_bytes,
    page_bytes,
    table_width,
    chosen_width,
    ALL_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    RING_ROWS: gl.constexpr,
    RING_BYTES: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    RATIO: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """One token, 64 heads, one split."""
    if not WHOLE:
        gdc_launch_dependents()  # the kernel that joins the splits may get ready
    token = gl.program_id(0).to(gl.int64)
    group = gl.program_id(1)
    part = token * gl.num_programs(2) + gl.program_id(2)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _DIM], gl.bfloat16)  # of the queries too
    SHARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HEADS, _ROWS], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, _DIM], TILE)
    hidden = gl.allocate_shared_memory(gl.float32, [2, _ROWS], FLAT)
    queries = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _DIM], TILE)
    peaks = gl.allocate_shared_memory(gl.float32, [2 * _HEADS], FLAT)
    weights = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, _ROWS], SHARE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.thread_barrier()
    head = group * _HEADS
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_ptr + token * q_token + head * q_head,
                    q_head,
                    queries,
                    rows,
                    hidden,
                    peaks,
                    weights,
                    full,
                    empty,
                    token,
                    positions_ptr,
                    counts_ptr,
                    scale,
                    sinks_ptr + head,
                    turn_ptr + token * (_DIM - _PLAIN),
                    partial_ptr + (part * ALL_HEADS + head) * _DIM,
                    sums_ptr + 2 * part * ALL_HEADS + head,
                    out_ptr + (token * ALL_HEADS + head) * _DIM,
                    ALL_HEADS,
                    WINDOW,
                    RATIO,
                    WHOLE,
                ),
            ),
            (
                _produce,
                (
                    token,
                    positions_ptr,
                    counts_ptr,
                    sequence_ids_ptr,
                    slots_ptr,
                    ring_ptr,
                    slot_bytes,
                    pages_ptr,
                    page_bytes,
                    table_ptr,
                    table_width,
                    chosen_ptr + token * chosen_width,
                    rows,
                    hidden,
                    full,
                    empty,
                    WINDOW,
                    RING_ROWS,
                    RING_BYTES,
                    PAGE_ROWS,
                    RATIO,
                ),
            ),
        ],
        [_WARPS],
        [_REGISTERS],
    )


@gluon_jit
def _extent(token, positions_ptr, counts_ptr, WINDOW: gl.constexpr, RATIO: gl.constexpr):
    """Of a token: its oldest window row's position, how many window rows, tiles of them and compressed rows; the tiles
    first..last of the program."""
    split, splits = gl.program_id(2), gl.num_programs(2)
    position = gl.load(positions_ptr + token).to(gl.int32)
    recent = gl.minimum(position + 1, WINDOW)
    compressed = 0
    if RATIO < 0:
        compressed = gl.load(counts_ptr + token)
    elif RATIO > 0:
        compressed = (position + 1) // RATIO
    recent_tiles = (recent + _ROWS - 1) // _ROWS
    tiles = recent_tiles + (compressed + _ROWS - 1) // _ROWS
    return position + 1 - recent, recent, recent_tiles, compressed, tiles * split // splits, tiles * (split + 1) // splits


@gluon_jit
def _produce(
    token,
    positions_ptr,
    counts_ptr,
    sequence_ids_ptr,
    slots_ptr,
    ring_ptr,
    slot_bytes,
    pages_ptr,
    page_bytes,
    table_ptr,
    table_width,
    chosen_ptr,
    rows,
    hidden,
    full,
    empty,
    WINDOW: gl.constexpr,
    RING_ROWS: gl.constexpr,
    RING_BYTES: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    RATIO: gl.constexpr,
):
    """While a tile is widened the next one is on its way from memory, and the row numbers of the one after it."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    LINE: gl.constexpr = gl.SliceLayout(1, CODES)
    words = rows._reinterpret(gl.int32, [2, _ROWS, _DIM // 2], WIDE)
    sequence = gl.load(sequence_ids_ptr + token)
    oldest, recent, recent_tiles, compressed, first, last = _extent(token, positions_ptr, counts_ptr, WINDOW, RATIO)
    ring_ptr += gl.load(slots_ptr + sequence) * slot_bytes
    lists = (last, recent_tiles, oldest, recent, compressed, table_ptr + sequence * table_width, chosen_ptr)
    places = (recent_tiles, ring_ptr, pages_ptr, page_bytes)
    row, seen = _number(first, lists, RING_ROWS, PAGE_ROWS, RATIO, LINE)
    raw = _gather(first, row, seen, places, RING_BYTES, PAGE_ROWS, RATIO, CODES)
    row, seen_next = _number(first + 1, lists, RING_ROWS, PAGE_ROWS, RATIO, LINE)
    for tile in range(first, last):
        stage = (tile - first) % 2
        mbarrier.wait(empty.index(stage), ((tile - first) // 2 & 1) ^ 1)
        hidden.index(stage).store(gl.where(seen, 0.0, float("-inf")))
        words.index(stage).store(_widened(raw))
        seen = seen_next
        raw = _gather(tile + 1, row, seen, places, RING_BYTES, PAGE_ROWS, RATIO, CODES)
        row, seen_next = _number(tile + 2, lists, RING_ROWS, PAGE_ROWS, RATIO, LINE)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)


@gluon_jit
def _number(tile, lists, RING_ROWS: gl.constexpr, PAGE_ROWS: gl.constexpr, RATIO: gl.constexpr, LINE: gl.constexpr):
    """Row numbers int32 [ROWS] of a tile, in the ring or (page * PAGE_ROWS + row) in the pages, and which there are."""
    limit, recent_tiles, oldest, recent, compressed, table_ptr, chosen_ptr = lists
    number = tile * _ROWS + gl.arange(0, _ROWS, LINE)
    row = (oldest + number) % RING_ROWS
    seen = (number < recent) & (tile < limit)
    if RATIO != 0:
        number -= recent_tiles * _ROWS
        listed = (number >= 0) & (number < compressed) & (tile < limit)
        if RATIO < 0:
            compressed_row = gl.load(chosen_ptr + number, listed, -1)
        else:
            page = gl.load(table_ptr + number // PAGE_ROWS, listed, 0).to(gl.int32)
            compressed_row = page * PAGE_ROWS + number % PAGE_ROWS
        in_ring = tile < recent_tiles
        seen = gl.where(in_ring, seen, listed & (compressed_row >= 0))
        row = gl.where(in_ring, row, compressed_row)
    return row, seen


@gluon_jit
def _gather(
    tile, row, seen, places, RING_BYTES: gl.constexpr, PAGE_ROWS: gl.constexpr, RATIO: gl.constexpr, CODES: gl.constexpr
):
    """What a tile consists of: seven chunks of codes int32 [ROWS, 16], rotary channels int32 [ROWS, 32], scales int64."""
    TURNED: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], CODES.warps_per_cta, [1, 0])
    VALUE_BYTES: gl.constexpr = 2 * _DIM - _PLAIN
    recent_tiles, ring_ptr, pages_ptr, page_bytes = places
    base = ring_ptr
    values = row * RING_BYTES
    scales = values + VALUE_BYTES
    block = gl.zeros_like(row).to(gl.int64)
    if RATIO != 0:
        in_ring = tile < recent_tiles
        if not in_ring:
            base = pages_ptr
        line = row % PAGE_ROWS
        block = gl.where(in_ring, 0, row // PAGE_ROWS).to(gl.int64) * page_bytes
        values = gl.where(in_ring, values, line * VALUE_BYTES)
        scales = gl.where(in_ring, scales, PAGE_ROWS * VALUE_BYTES + line * 8)
    start = base + (block + gl.multiple_of(values, [16]))
    at = start.to(gl.pointer_type(gl.int32))[:, None] + gl.arange(0, 16, gl.SliceLayout(0, CODES))[None, :]
    there = seen[:, None]
    codes = ()
    for chunk in gl.static_range(_PLAIN // 64):
        codes = codes + (gl.load(at + 16 * chunk, there, 0),)  # noqa: RUF005 (Triton knows no other way)
    turned_at = gl.convert_layout(start, gl.SliceLayout(1, TURNED)).to(gl.pointer_type(gl.int32))[:, None] + 112
    turned_there = gl.convert_layout(seen, gl.SliceLayout(1, TURNED))[:, None]
    turned = gl.load(turned_at + gl.arange(0, 32, gl.SliceLayout(0, TURNED))[None, :], turned_there, 0)
    word = gl.load((base + (block + gl.multiple_of(scales, [8]))).to(gl.pointer_type(gl.int64)), seen, 0)
    return codes + (turned, word)  # noqa: RUF005


@gluon_jit
def _widened(raw):
    """What _gather gives as bf16 pairs int32 [ROWS, 256]."""
    word = raw[8]
    first = gl.join(_chunk(raw[0], word, 0), _chunk(raw[1], word, 1))
    low = gl.join(first, gl.join(_chunk(raw[2], word, 2), _chunk(raw[3], word, 3)))
    last = _chunk(raw[6], word, 6)
    turned = gl.convert_layout(raw[7], last.type.layout)
    high = gl.join(gl.join(_chunk(raw[4], word, 4), _chunk(raw[5], word, 5)), gl.join(last, turned))
    return gl.join(low, high).permute([0, 4, 3, 2, 1]).reshape([_ROWS, _DIM // 2])


@gluon_jit
def _chunk(codes, word, NUMBER: gl.constexpr):
    """64 channels: e4m3 codes int32 [ROWS, 16] times their scale, byte NUMBER of word int64 [ROWS]: pairs int32 [ROWS, 32].

    A code's bits moved into place are a bf16 that is 2^120 too small; the scale makes up for it.
    """
    byte = ((word >> (8 * NUMBER)) & 255).to(gl.int32) + 120
    codes, scale = gl.broadcast(codes, ((byte << 7) | (byte << 23))[:, None])
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, low_bits, high_bits;
        prmt.b32 low, 0, $2, 0x5040;
        prmt.b32 high, 0, $2, 0x7060;
        and.b32 low_bits, low, 0x7fff7fff;
        and.b32 high_bits, high, 0x7fff7fff;
        shr.b32 low_bits, low_bits, 4;
        shr.b32 high_bits, high_bits, 4;
        lop3.b32 low, low_bits, 0x80008000, low, 0xf8;
        lop3.b32 high, high_bits, 0x80008000, high, 0xf8;
        mul.rn.bf16x2 $0, low, $3;
        mul.rn.bf16x2 $1, high, $3;
        }""",
        "=r,=r,r,r",
        [codes, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high).reshape([_ROWS, 32])


@gluon_jit
def _consume(
    q_ptr,
    q_head,
    queries,
    rows,
    hidden,
    peaks,
    weights,
    full,
    empty,
    token,
    positions_ptr,
    counts_ptr,
    scale,
    sinks_ptr,
    turn_ptr,
    partial_ptr,
    sums_ptr,
    out_ptr,
    ALL_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    RATIO: gl.constexpr,
    WHOLE: gl.constexpr,
):
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, _ROWS // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 128, 16])
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    head = gl.arange(0, _HEADS, gl.SliceLayout(1, BY_ROW))
    channel = gl.arange(0, _DIM, gl.SliceLayout(0, BY_ROW))
    q = gl.load(q_ptr + head[:, None] * q_head + channel[None, :])
    _, _, _, _, first, last = _extent(token, positions_ptr, counts_ptr, WINDOW, RATIO)
    queries.store(q)
    fence_async_shared()
    gl.thread_barrier()
    BY_HEAD: gl.constexpr = gl.SliceLayout(1, LOGITS)
    largest = gl.full([_HEADS], LEAST, gl.float32, BY_HEAD)
    sums = gl.zeros([_HEADS, _DIM], gl.float32, SUMS)
    nothing = gl.zeros([_HEADS, _ROWS], gl.float32, LOGITS)
    total = gl.sum(nothing.reshape([_HEADS, 2, _ROWS // 2]), 2)
    for tile in range(last - first):
        stage = tile % 2
        mbarrier.wait(full.index(stage), tile // 2 & 1)
        keys = rows.index(stage)
        logits = warpgroup_mma(queries, keys.permute([1, 0]), nothing, use_acc=False, is_async=True)
        mask = hidden.index(stage).load(gl.SliceLayout(0, LOGITS))
        logits = warpgroup_mma_wait(0, deps=[logits]) * scale + mask[None, :]
        peaks.store(gl.max(logits.reshape([_HEADS, 2, _ROWS // 2]), 2).permute([1, 0]).reshape([2 * _HEADS]))
        gl.thread_barrier()
        larger = gl.maximum(peaks.slice(0, _HEADS, dim=0).load(BY_HEAD), peaks.slice(_HEADS, _HEADS, dim=0).load(BY_HEAD))
        larger = gl.maximum(larger, largest)
        shrink = gl.exp2(largest - larger)
        share = gl.exp2(logits - larger[:, None])
        ours = gl.sum(share.reshape([_HEADS, 2, _ROWS // 2]), 2)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, ours.type.layout))[:, None] + ours
        largest = larger
        weights.store(share.to(gl.bfloat16))
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        fence_async_shared()
        gl.thread_barrier()
        sums = warpgroup_mma(weights, keys, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    head = gl.arange(0, _HEADS, BY_HEAD)
    if WHOLE:
        turn = _turn(turn_ptr)
        sink = gl.load(sinks_ptr + head) * LOG2_E
        total = gl.convert_layout(gl.sum(total, 1), BY_HEAD)
        share = 1.0 / (total + gl.exp2(sink - largest))
        queries.store((sums * gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]).to(gl.bfloat16))
        gl.thread_barrier()
        _store_turned(queries, out_ptr, turn)
    else:
        total = gl.convert_layout(gl.sum(total, 1), BY_HEAD)
        gl.store(sums_ptr + head, largest)
        gl.store(sums_ptr + ALL_HEADS + head, total)
        queries.store(sums.to(gl.bfloat16))
        gl.thread_barrier()
        _store_channels(queries, partial_ptr, 0, 256)
        _store_channels(queries, partial_ptr, 256, 256)


@gluon_jit
def _store_channels(staged, out_ptr, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Channels FIRST..FIRST+COUNT of `staged` [64, 512] in shared memory to `out` [64, 512]."""
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COUNT, COUNT // 8], [8, 1], [1, 0])
    head = gl.arange(0, _HEADS, gl.SliceLayout(1, BY_ROW))
    channel = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, BY_ROW))
    gl.store(out_ptr + head[:, None] * _DIM + channel[None, :], staged.slice(FIRST, COUNT, dim=1).load(BY_ROW))


@gluon_jit
def _turn(turn_ptr):
    """cos and sin float32 [32] of the rotary pairs of channels, laid out as _store_turned wants them."""
    pair = gl.arange(0, (_DIM - _PLAIN) // 2, gl.SliceLayout(0, gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0])))
    return gl.load(turn_ptr + 2 * pair), gl.load(turn_ptr + 2 * pair + 1)


@gluon_jit
def _store_turned(staged, out_ptr, turn):
    """`staged` bf16 [64, 512] in shared memory to `out`, its rotary channels turned back by `turn`."""
    _store_channels(staged, out_ptr, 0, 256)
    _store_channels(staged, out_ptr, 256, 128)
    _store_channels(staged, out_ptr, 384, 64)
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    x = staged.slice(_PLAIN, _DIM - _PLAIN, dim=1).load(BY_ROW).to(gl.float32)
    even, odd = gl.split(x.reshape([_HEADS, (_DIM - _PLAIN) // 2, 2]))
    cos = gl.convert_layout(turn[0], gl.SliceLayout(0, even.type.layout))[None, :]
    sin = gl.convert_layout(turn[1], gl.SliceLayout(0, even.type.layout))[None, :]
    turned = gl.convert_layout(gl.join(even * cos + odd * sin, odd * cos - even * sin).reshape(x.shape), BY_ROW)
    head = gl.arange(0, _HEADS, gl.SliceLayout(1, BY_ROW))
    channel = _PLAIN + gl.arange(0, _DIM - _PLAIN, gl.SliceLayout(0, BY_ROW))
    gl.store(out_ptr + head[:, None] * _DIM + channel[None, :], turned.to(gl.bfloat16))
