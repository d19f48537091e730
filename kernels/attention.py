"""Sparse attention with one KV head over the recent window and compressed rows, with a sink (spec B.5).

A decode step (its rows are in the ring already) runs here, a prefill chunk in attention_prefill.py. Every query token is a
row of its own: its tiles of rows, first the window's, then the compressed ones', are shared out among `splits` programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import attention_hopper, backend
from kernels.early import early
from kernels.jit import jit
from kernels.launch import launch
from kernels.quant import power_of_two
from kernels.ragged import Ragged
from kernels.rope import rope_reference
from kernels.rounding import INTERPRETED, rounded
from kernels.rows import KVRow, read_rows
from kernels.workspace import empty, frame

if TYPE_CHECKING:
    from kernels.indexer import Entries

QUERY_BLOCK = 64  # bounds the memory of a long chunk's gathered rows
LOG2_E = 1.4426950408889634
CHUNK = 64  # channels that are loaded and multiplied together, and that share a scale
SELECTED = -1  # in place of a ratio: rows are listed


def sparse_attention(
    q: Tensor,
    new_rows: Tensor,
    batch: Ragged,
    ring: Tensor,
    row: KVRow,
    window: int,
    sinks: Tensor,
    turn: Tensor,
    pages: Tensor | None = None,
    entries: Entries | int | None = None,
) -> Tensor:
    """q [T, H, d] -> [T, H, d] in q's dtype, its rotary channels turned back by `turn` [T, rope/2, 2].

    A token at position p attends to the rows of p-window+1..p and to compressed rows of `pages` uint8 [pages, rows, row_bytes]
    (planar): `entries` names them (-1: none), or is the compression ratio: all rows that p may see, or None: none at all.
    Window rows come from `ring` uint8 [slots, R, ring_bytes]; those of the step itself from there too in a decode step,
    from `new_rows` uint8 [T, ring_bytes] in a chunk. A row is key and value. sinks float32 [H] enter the denominator only.
    Softmax weights are cast to bf16 for the value product when q is bf16.
    """
    if not backend.active().triton:
        return sparse_attention_reference(q, new_rows, batch, ring, row, window, sinks, turn, pages, entries)
    if not batch.is_decode:
        from kernels.attention_prefill import prefill_attention

        return prefill_attention(q, new_rows, batch, ring, row, window, sinks, turn, pages, entries)
    return decode_attention(q, batch, ring, row, window, sinks, turn, pages, entries)


def sparse_attention_reference(
    q: Tensor,
    new_rows: Tensor,
    batch: Ragged,
    ring: Tensor,
    row: KVRow,
    window: int,
    sinks: Tensor,
    turn: Tensor,
    pages: Tensor | None,
    entries: Entries | int | None,
) -> Tensor:
    recent = row.unpack(torch.cat((ring.index_select(0, batch.slots).flatten(0, 1), new_rows)))
    out = torch.empty_like(q)
    for first in range(0, len(q), QUERY_BLOCK):
        tokens = torch.arange(first, min(first + QUERY_BLOCK, len(q)), device=q.device)
        rows, seen = _window_rows(batch, recent, tokens, ring.shape[1], window)
        if pages is not None and entries is not None:
            page, number, visible = _compressed_places(batch, pages.shape[1], tokens, entries)
            more = row.unpack(read_rows(pages, row, page, number)).masked_fill_(~visible[..., None], 0.0)
            rows, seen = torch.cat((rows, more), 1), torch.cat((seen, visible), 1)
        out[tokens] = _attend(q[tokens], rows, seen, sinks)
    return rope_reference(out, turn, inverse=True)


def _window_rows(batch: Ragged, recent: Tensor, tokens: Tensor, ring_rows: int, window: int) -> tuple[Tensor, Tensor]:
    """Rows float64 [M, window, d] of each token's window and whether they exist [M, window].

    `recent` holds the B rings, then the T new rows. A row from before the sequence is the token's own: valid, and masked.
    """
    sequences, new_at = batch.sequence_ids[tokens][:, None], len(batch.slots) * ring_rows
    wanted = batch.positions[tokens][:, None] + torch.arange(1 - window, 1, device=tokens.device)
    source = sequences * ring_rows + wanted % ring_rows
    if not batch.is_decode:
        starts = batch.starts[sequences]
        source = torch.where(wanted >= starts, new_at + batch.cu_tokens[sequences] + wanted - starts, source)
    seen = wanted >= 0
    own = sequences * ring_rows + batch.positions[tokens][:, None] % ring_rows if batch.is_decode else new_at + tokens[:, None]
    source = torch.where(seen, source, own)
    return torch.unflatten(recent.index_select(0, source.flatten()), 0, source.shape), seen


def _compressed_places(batch: Ragged, page_rows: int, tokens: Tensor, entries: Entries | int) -> tuple[Tensor, Tensor, Tensor]:
    """Page, row in it and whether there is one, [M, K] each, of the compressed rows that each token attends to."""
    if isinstance(entries, int):
        count = (batch.positions[tokens] + 1) // entries
        entry = torch.arange(int(count.max()), device=tokens.device)
        visible = entry < count[:, None]
        table = batch.page_table[batch.sequence_ids[tokens][:, None], torch.where(visible, entry // page_rows, 0)]
        return table, (entry % page_rows).expand(visible.shape), visible
    chosen = entries.rows[tokens].long()
    listed = torch.arange(chosen.shape[1], device=tokens.device) < entries.counts[tokens][:, None]
    visible = (chosen >= 0) & listed
    chosen = torch.where(visible, chosen, 0)
    return chosen // page_rows, chosen % page_rows, visible


def _attend(q: Tensor, rows: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """q [M, H, d] over rows float64 [M, L, d] where seen [M, L] (one at least)."""
    logits = torch.bmm(q.double(), rows.transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
    logits.masked_fill_(~seen[:, None], -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    share = logits.sub_(largest).exp_()
    total = share.sum(-1, keepdim=True) + (sinks[:, None] - largest).exp()
    if q.dtype is torch.bfloat16:
        share = share.bfloat16().double()
    return torch.bmm(share, rows).div_(total).to(q.dtype)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a decode step is cut. heads and rows: of a tile; splits: programs that share a token's rows; warps and stages as in
    triton; hopper: the kernel of attention_hopper.py, whose tiles are fixed."""

    heads: int
    rows: int
    splits: int
    warps: int
    stages: int
    hopper: bool = False


FEW_TOKENS = 4  # up to here tiles of few heads are worth it: more programs, each gathers all rows
TYPICAL_TILES = 64  # of a token that sees all rows of its sequence: how many there are is not known on the host
MOST_SPLITS = 64


def tiling(q: Tensor, row: KVRow, most_rows: int | None) -> Tiling:
    """From shapes only, so that a row's result depends on nothing else. most_rows: None where it is not bounded."""
    tokens, heads, _ = q.shape
    if backend.active().hopper and attention_hopper.fits(q, row):
        splits = _splits(tokens, heads // attention_hopper.HEADS, most_rows, attention_hopper.ROWS)
        return Tiling(attention_hopper.HEADS, attention_hopper.ROWS, splits, 8, 1, hopper=True)
    wide = q.dtype is torch.float32
    block_heads = 16 if heads <= 16 or tokens <= FEW_TOKENS or wide else 32
    splits = _splits(tokens, triton.cdiv(heads, block_heads), most_rows, 32)
    return Tiling(block_heads, 32, splits, 8, 1 if wide else 2)


def _splits(tokens: int, programs: int, most_rows: int | None, rows: int) -> int:
    """The number of splits that takes least time, counted in tiles: a program's start and end cost about three, joining the
    splits two. programs: a token's. Where it must not depend on the tokens, one that is not far from the best for 1 nor for
    256 of them."""
    tiles = TYPICAL_TILES if most_rows is None else triton.cdiv(most_rows, rows)
    if backend.active().cuts_alike(tokens):
        return 4 if most_rows is None else 2 if tiles > 4 else 1

    def cost(splits: int) -> int:
        waves = triton.cdiv(tokens * programs * splits, backend.active().multiprocessors)
        return int(waves * (triton.cdiv(tiles, splits) + 3) + (2 if splits > 1 else 0))

    return min(range(1, min(tiles, MOST_SPLITS) + 1), key=cost)


def decode_attention(
    q: Tensor,
    batch: Ragged,
    ring: Tensor,
    row: KVRow,
    window: int,
    sinks: Tensor,
    turn: Tensor,
    pages: Tensor | None,
    entries: Entries | int | None,
    cut: Tiling | None = None,
) -> Tensor:
    """sparse_attention of a step whose rows are in the ring."""
    tokens, heads, dim = q.shape
    ratio, chosen, counts, most_rows = 0, batch.positions, batch.positions, window  # no choice: these are not read
    if pages is None or entries is None:
        pages = ring
    elif isinstance(entries, int):
        ratio, most_rows = entries, None
    else:
        ratio, chosen, counts, most_rows = SELECTED, entries.rows, entries.counts, window + entries.rows.shape[1]
    if cut is None:
        cut = tiling(q, row, most_rows)
    out = empty(q.shape, q.dtype, q.device)
    with frame():
        partial, sums = out, sinks
        if cut.splits > 1:
            partial = empty((tokens, cut.splits, heads, dim), torch.bfloat16 if cut.hopper else torch.float32, q.device)
            sums = empty((tokens, cut.splits, 2, heads), torch.float32, q.device)
        tensors = (
            q,
            ring,
            pages,
            batch.positions,
            batch.sequence_ids,
            batch.slots,
            batch.page_table,
            chosen,
            counts,
            sinks,
            turn,
            partial,
            sums,
            out,
        )
        if cut.hopper:
            attention_hopper.decode(*tensors, window, ratio, cut.splits)
        else:
            _launch_decode(*tensors, row, window, ratio, cut)
        if cut.splits > 1:
            combine(partial, sums, sinks, turn, out)
    return out


def _launch_decode(
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
    row: KVRow,
    window: int,
    ratio: int,
    cut: Tiling,
) -> None:
    tokens, heads, dim = q.shape
    launch(
        _decode,
        (tokens, triton.cdiv(heads, cut.heads), cut.splits),
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
        LOG2_E * dim**-0.5,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        ring.stride(0),
        pages.stride(0),
        page_table.stride(0),
        chosen.stride(0),
        KIND=row.kind,
        HEADS=heads,
        DIM=dim,
        PLAIN=row.plain_dim,
        WINDOW=window,
        RING_ROWS=ring.shape[1],
        RING_BYTES=ring.stride(1),
        VALUE_BYTES=row.value_bytes,
        SCALE_BYTES=row.scale_bytes,
        PAGE_ROWS=pages.shape[1],
        ALIGNMENT=math.gcd(16, row.value_bytes, ring.stride(1)),
        RATIO=ratio,
        WHOLE=cut.splits == 1,
        BLOCK_HEADS=cut.heads,
        BLOCK_ROWS=cut.rows,
        STAGES=cut.stages,
        EARLY=early()["EARLY"],
        num_warps=cut.warps,
    )


_SELECTED = tl.constexpr(SELECTED)
_CHUNK = tl.constexpr(CHUNK)
_LOG2_E = tl.constexpr(LOG2_E)
_LEAST = tl.constexpr(-1e30)  # a maximum of nothing: finite, so that it can be subtracted from itself


@jit(do_not_specialize=["table_width"])
def _decode(
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
    q_channel,
    slot_bytes,
    page_bytes,
    table_width,
    chosen_width,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PLAIN: tl.constexpr,
    WINDOW: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    RATIO: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token, BLOCK_HEADS heads, one split. partial [T, splits, H, d] not divided, sums [T, splits, 2, H]: maximum, sum."""
    if EARLY and not WHOLE:
        gdc_launch_dependents()  # the kernel that joins the splits may get ready
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split, splits = tl.program_id(2), tl.num_programs(2)
    part = token * splits + split
    CHUNKS: tl.constexpr = (DIM + _CHUNK - 1) // _CHUNK
    dtype = q_ptr.dtype.element_ty
    channel = tl.arange(0, _CHUNK)

    position = tl.load(positions_ptr + token).to(tl.int32)
    sequence = tl.load(sequence_ids_ptr + token)
    ring_ptr += tl.load(slots_ptr + sequence) * slot_bytes
    table_ptr += sequence * table_width
    chosen_ptr += token * chosen_width
    recent = tl.minimum(position + 1, WINDOW)
    compressed = 0
    if RATIO == _SELECTED:
        compressed = tl.load(counts_ptr + token)
    elif RATIO > 0:
        compressed = (position + 1) // RATIO
    recent_tiles = tl.cdiv(recent, BLOCK_ROWS)
    tiles = recent_tiles + tl.cdiv(compressed, BLOCK_ROWS)
    first, last = tiles * split // splits, tiles * (split + 1) // splits

    queries, sums = (), ()
    for chunk in tl.static_range(CHUNKS):
        here = (head < HEADS)[:, None] & (channel + chunk * _CHUNK < DIM)[None, :]
        at = q_ptr + token * q_token + head[:, None] * q_head + (channel + chunk * _CHUNK)[None, :] * q_channel
        queries = queries + (tl.load(at, here, 0.0),)  # noqa: RUF005 (Triton knows no other way)
        sums = sums + (tl.zeros([BLOCK_HEADS, _CHUNK], tl.float32),)  # noqa: RUF005
    largest = tl.full([BLOCK_HEADS], _LEAST, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)

    for tile in tl.range(first, last, num_stages=STAGES):
        values, scales, seen = _locate(
            tile, recent_tiles, position + 1 - recent, recent, compressed, ring_ptr, pages_ptr, table_ptr, chosen_ptr,
            page_bytes, RING_ROWS, RING_BYTES, VALUE_BYTES, SCALE_BYTES, PAGE_ROWS, ALIGNMENT, RATIO, BLOCK_ROWS,
        )  # fmt: skip
        rows = _unpack(values, scales, seen, dtype, KIND, DIM, PLAIN)
        logits = tl.zeros([BLOCK_HEADS, BLOCK_ROWS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            logits = _dot(queries[chunk], tl.trans(rows[chunk]), logits)
        logits = tl.where(seen[None, :], logits * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp2(largest - larger)
        weights = tl.exp2(logits - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        largest = larger
        weights = rounded(weights, dtype)
        grown = ()
        for chunk in tl.static_range(CHUNKS):
            grown = grown + (_dot(weights, rows[chunk], sums[chunk] * shrink[:, None]),)  # noqa: RUF005
        sums = grown

    if WHOLE:
        sink = tl.load(sinks_ptr + head, head < HEADS, 0.0) * _LOG2_E
        divisor = total + tl.exp2(sink - largest)
        turn_ptr += token * (DIM - PLAIN)
    else:
        at = sums_ptr + part * 2 * HEADS + head
        tl.store(at, largest, head < HEADS)
        tl.store(at + HEADS, total, head < HEADS)
    for chunk in tl.static_range(CHUNKS):
        here = (head < HEADS)[:, None] & (channel + chunk * _CHUNK < DIM)[None, :]
        offset = head[:, None] * DIM + (channel + chunk * _CHUNK)[None, :]
        if WHOLE:
            done = _turned_back(sums[chunk] / divisor[:, None], turn_ptr, chunk * _CHUNK, dtype, DIM, PLAIN)
            tl.store(out_ptr + token * HEADS * DIM + offset, done, here)
        else:
            tl.store(partial_ptr + part * HEADS * DIM + offset, sums[chunk], here & (first < last))


@jit
def _dot(a, b, sums):
    """float32 [M, N] sums + a [M, K] b [K, N]. Triton's interpreter multiplies the bits of bf16, so there they are widened."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@jit
def _locate(
    tile,
    recent_tiles,
    oldest,
    recent,
    compressed,
    ring_ptr,
    pages_ptr,
    table_ptr,
    chosen_ptr,
    page_bytes,
    RING_ROWS: tl.constexpr,
    RING_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Where the rows of a tile are: pointers to their values and scales [BLOCK_ROWS], and whether there is a row."""
    lane = tl.arange(0, BLOCK_ROWS)
    number = tile * BLOCK_ROWS + lane
    in_ring = tile < recent_tiles
    seen = number < recent
    value_offset = (oldest + number) % RING_ROWS * RING_BYTES
    scale_offset = value_offset + VALUE_BYTES
    base = ring_ptr
    block = tl.zeros([BLOCK_ROWS], tl.int64)
    if RATIO != 0:
        base = ring_ptr if in_ring else pages_ptr
        number = (tile - recent_tiles) * BLOCK_ROWS + lane
        listed = (number >= 0) & (number < compressed)
        if RATIO == _SELECTED:
            row = tl.load(chosen_ptr + number, listed, -1)
            listed = row >= 0
            page = (row // PAGE_ROWS).to(tl.int64)
        else:
            row = number
            page = tl.load(table_ptr + number // PAGE_ROWS, listed, 0)
        line = row % PAGE_ROWS
        block = tl.where(listed, page, 0) * page_bytes
        seen = tl.where(in_ring, seen, listed)
        value_offset = tl.where(in_ring, value_offset, line * VALUE_BYTES)
        scale_offset = tl.where(in_ring, scale_offset, PAGE_ROWS * VALUE_BYTES + line * SCALE_BYTES)
    block = tl.multiple_of(block, [ALIGNMENT])
    values = base + (block + tl.multiple_of(value_offset, [ALIGNMENT]))
    scales = base + (block + tl.multiple_of(scale_offset, [min(ALIGNMENT, 8)]))
    return values, scales, seen


@jit
def _unpack(values, scales, seen, dtype: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr, PLAIN: tl.constexpr):
    """The rows [R, CHUNK] of each chunk of channels, in `dtype`; zeros where there is no row."""
    channel = tl.arange(0, _CHUNK)
    rows = ()
    if KIND == "fp8":
        word = tl.load(scales.to(tl.pointer_type(tl.int64)), seen, 0)  # the scales of up to 8 chunks
    for chunk in tl.static_range((DIM + _CHUNK - 1) // _CHUNK):
        here = channel + chunk * _CHUNK
        if KIND == "fp8":
            part = tl.zeros([seen.shape[0], _CHUNK], dtype)
            if chunk * _CHUNK < PLAIN:
                codes = tl.load(values[:, None] + here[None, :], seen[:, None] & (here < PLAIN)[None, :], 0)
                part = _scaled(codes, (word >> (8 * chunk)).to(tl.int32) & 255).to(dtype)
            if (chunk + 1) * _CHUNK > PLAIN:
                at = (values + PLAIN).to(tl.pointer_type(tl.bfloat16))[:, None] + (here - PLAIN)[None, :]
                rotary = (here >= PLAIN) & (here < DIM)
                part = tl.where(rotary[None, :], tl.load(at, seen[:, None] & rotary[None, :], 0.0).to(dtype), part)
        elif KIND == "bf16":
            at = values.to(tl.pointer_type(tl.bfloat16))[:, None] + here[None, :]
            part = tl.load(at, seen[:, None] & (here < DIM)[None, :], 0.0).to(dtype)
        else:
            at = values.to(tl.pointer_type(tl.float32))[:, None] + here[None, :]
            part = rounded(tl.load(at, seen[:, None] & (here < DIM)[None, :], 0.0), dtype)
        rows = rows + (part,)  # noqa: RUF005
    return rows


@jit
def _scaled(codes, byte):
    """e4m3 codes uint8 [R, C] times 2^(byte - 127), byte int32 [R]: bf16, exact.

    A code's bits moved into place are a bf16 that is 2^120 too small; the scale makes up for it.
    """
    if INTERPRETED:
        scaled = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * power_of_two(byte)[:, None]
        return scaled.to(tl.bfloat16)
    scale = power_of_two(byte + 120).to(tl.bfloat16)
    codes, scale = tl.broadcast(codes, scale[:, None])
    return tl.inline_asm_elementwise(
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
        mul.rn.bf16x2 $1, high, $4;
        }""",
        "=r,=r,r,r,r",
        [codes, scale],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@jit
def _turned_back(x, turn_ptr, first, dtype: tl.constexpr, DIM: tl.constexpr, PLAIN: tl.constexpr):
    """x float32 [H, C], channels first..first+C of an output, its rotary ones turned back by `turn` [rope/2, 2]: dtype."""
    PAIRS: tl.constexpr = x.shape[1] // 2
    pair = first // 2 + tl.arange(0, PAIRS)
    rotary = (pair >= PLAIN // 2) & (pair < DIM // 2)
    cos = tl.load(turn_ptr + (pair - PLAIN // 2) * 2, rotary, 1.0)[None, :]
    sin = tl.load(turn_ptr + (pair - PLAIN // 2) * 2 + 1, rotary, 0.0)[None, :]
    x = rounded(x, dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))
    return rounded(tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), x.shape), dtype)


def combine(partial: Tensor, sums: Tensor, sinks: Tensor, turn: Tensor, out: Tensor) -> None:
    """The splits put together: partial [T, S, H, d] and sums [T, S, 2, H] of _decode -> out [T, H, d]."""
    tokens, splits, heads, dim = partial.shape
    block_heads, warps = (2, 4) if splits <= 16 else (1, 8)
    launch(
        _combine,
        (tokens, triton.cdiv(heads, block_heads)),
        partial,
        sums,
        sinks,
        turn,
        out,
        HEADS=heads,
        DIM=dim,
        PLAIN=dim - 2 * turn.shape[1],
        SPLITS=splits,
        BLOCK_HEADS=block_heads,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        BLOCK_DIM=triton.next_power_of_2(dim),
        num_warps=warps,
        **early(),
    )


@jit
def _combine(
    partial_ptr,
    sums_ptr,
    sinks_ptr,
    turn_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PLAIN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_HEADS heads of a token, all splits at once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split, channel = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DIM)
    real, wide = head < HEADS, channel < DIM
    there = real[:, None] & (split < SPLITS)[None, :]
    sink = tl.load(sinks_ptr + head, real, 0.0) * _LOG2_E
    if EARLY:
        gdc_wait()
    at = (token * SPLITS + split[None, :]) * HEADS + head[:, None]
    part = tl.load(partial_ptr + at[:, :, None] * DIM + channel[None, None, :], there[:, :, None] & wide[None, None, :], 0.0)
    at = sums_ptr + (token * SPLITS + split[None, :]) * 2 * HEADS + head[:, None]
    peak, total = tl.load(at, there, _LEAST), tl.load(at + HEADS, there, 0.0)
    largest = tl.maximum(tl.max(peak, 1), sink)
    weight = tl.exp2(peak - largest[:, None])
    divisor = tl.sum(total * weight, 1) + tl.exp2(sink - largest)
    idle = (total == 0.0)[:, :, None]  # a split without rows leaves its part unwritten
    whole = tl.sum(tl.where(idle, 0.0, part.to(tl.float32) * weight[:, :, None]), 1)
    turn_ptr += token * (DIM - PLAIN)
    done = _turned_back(whole / divisor[:, None], turn_ptr, 0, out_ptr.dtype.element_ty, DIM, PLAIN)
    tl.store(out_ptr + (token * HEADS + head[:, None]) * DIM + channel[None, :], done, real[:, None] & wide[None, :])
