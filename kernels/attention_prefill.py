"""Sparse attention of a prefill chunk: its rows are unpacked once into scratch, then every token gathers from there.

Scratch holds rows of q's dtype. First, sequence after sequence, the window before its chunk and the chunk itself, so that a
token's window is one run of rows; then compressed rows, in one of two forms, whichever bound is smaller:
  whole     all compressed rows of every sequence, in order (a map from page to its place finds a selected row)
  selected  the selected rows of token 0, those of token 1, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend, workspace
from kernels.jit import jit
from kernels.launch import launch
from kernels.quant import KV_BLOCK, power_of_two
from kernels.ragged import Ragged
from kernels.rows import PLAIN_DTYPES, KVRow

if TYPE_CHECKING:
    from kernels.indexer import Entries

UNPACK_ROWS = 16  # rows a program unpacks at a time
LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(backend.INTERPRETED)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the attention kernels read. rows [N, d]; `compressed_at`: the first compressed row of them.

    entries int32 [T, K] physical rows and counts int32 [T], when a token has a selection. places int32 [pages]: where a
    page stands in `whole` scratch (number of its row block); None in the form `selected`. ratio: tokens a compressed row
    stands for when a token sees all rows of its sequence, else 0.
    """

    rows: Tensor
    compressed_at: int
    ratio: int = 0
    page_rows: int = 1
    entries: Tensor | None = None
    counts: Tensor | None = None
    places: Tensor | None = None


def prefill_attention(
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
    """sparse_attention of kernels/attention.py for steps whose rows are not in the ring: q [T, H, d] -> [T, H, d].

    page_table may be as wide as the longest sequence needs: compressed rows of all its pages are unpacked.
    """
    out = workspace.empty(q.shape, q.dtype, q.device)
    with workspace.frame():
        scratch = unpack(q, new_rows, batch, ring, row, window, pages, entries)
        if _runs_on_hopper(q, window, turn):
            from kernels.attention_prefill_hopper import attend_hopper

            attend_hopper(q, batch, window, sinks, turn, scratch, out)
        else:
            attend(q, batch, window, sinks, turn, scratch, out)
    return out


def _runs_on_hopper(q: Tensor, window: int, turn: Tensor) -> bool:
    heads, dim = q.shape[1:]
    rows = q.stride(2) == 1 and q.stride(1) == dim and q.stride(0) % dim == 0  # whole rows, for the copy engine
    fits = heads % 64 == 0 and dim == 512 and window % 128 == 0 and turn.shape[1] == 32
    return backend.active().hopper and q.dtype is torch.bfloat16 and rows and fits


def unpack(
    q: Tensor,
    new_rows: Tensor,
    batch: Ragged,
    ring: Tensor,
    row: KVRow,
    window: int,
    pages: Tensor | None,
    entries: Entries | int | None,
) -> Scratch:
    """Fills the scratch of a step."""
    tokens, sequences, dim = len(q), len(batch.slots), q.shape[-1]
    recent = tokens + sequences * window
    form, compressed, ratio, page_rows = "none", 0, 0, 1
    chosen = counts = places = None
    table = batch.page_table
    if pages is not None and entries is not None and table.shape[1]:
        page_rows = pages.shape[1]
        form, compressed = "whole", sequences * table.shape[1] * page_rows
        if isinstance(entries, int):
            ratio = entries
        else:
            chosen, counts = entries.rows, entries.counts
            if chosen.numel() < compressed:
                form, compressed = "selected", chosen.numel()
            else:
                places = workspace.empty((len(pages),), torch.int32, q.device)
    rows = workspace.empty((recent + compressed, dim), q.dtype, q.device)
    recent_programs = triton.cdiv(recent, UNPACK_ROWS)
    more_programs = 0 if form == "none" else min(triton.cdiv(compressed, UNPACK_ROWS), 8 * backend.active().multiprocessors)
    anything = new_rows  # stands where a form has no such tensor
    launch(
        _unpack_rows,
        (recent_programs + more_programs,),
        rows,
        new_rows,
        ring,
        anything if pages is None else pages,
        batch.sequence_ids,
        batch.starts,
        batch.cu_tokens,
        batch.slots,
        table,
        anything if chosen is None else chosen,
        anything if counts is None else counts,
        anything if places is None else places,
        tokens,
        sequences,
        recent_programs,
        table.shape[1],
        1 if chosen is None else chosen.shape[1],
        new_rows.stride(0),
        ring.stride(0),
        ring.stride(1),
        0 if pages is None else pages.stride(0),
        FORM=form,
        KIND=row.kind,
        MAPPED=places is not None,
        RATIO=ratio,
        WINDOW=window,
        RING_ROWS=ring.shape[1],
        PAGE_ROWS=page_rows,
        DIM=dim,
        PLAIN_DIM=row.plain_dim if row.kind not in PLAIN_DTYPES else 0,
        VALUE_BYTES=row.value_bytes,
        SCALE_BYTES=row.scale_bytes,
        BLOCKS=triton.next_power_of_2(triton.cdiv(row.plain_dim, KV_BLOCK)),
        COLUMNS=triton.next_power_of_2(dim if row.kind in PLAIN_DTYPES else row.rope_dim),
        ROWS=UNPACK_ROWS,
        num_warps=8,
    )
    return Scratch(rows, recent, ratio, page_rows, chosen, counts, places)


@jit(do_not_specialize=["tokens", "sequences", "recent_programs", "table_width", "selected"])
def _unpack_rows(
    scratch,
    new_rows,
    ring,
    pages,
    sequence_ids,
    starts,
    cu_tokens,
    slots,
    page_table,
    entries,
    counts,
    places,
    tokens,
    sequences,
    recent_programs,
    table_width,
    selected,
    new_stride,
    slot_stride,
    ring_stride,
    page_stride,
    FORM: tl.constexpr,
    KIND: tl.constexpr,
    MAPPED: tl.constexpr,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    RING_ROWS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The first `recent_programs` programs unpack the windows and the chunk, the others compressed rows."""
    program = tl.program_id(0)
    lanes = tl.arange(0, ROWS)
    recent = tokens + sequences * WINDOW
    if program < recent_programs:
        number = program * ROWS + lanes
        is_new = number < tokens
        exists = number < recent
        token = tl.where(is_new, number, 0)
        before = tl.where(is_new | (number >= recent), 0, number - tokens)  # of the rows before the chunks
        sequence = tl.where(is_new, tl.load(sequence_ids + token).to(tl.int32), before // WINDOW)
        place = tl.where(
            is_new,
            token + (sequence + 1) * WINDOW,
            tl.load(cu_tokens + sequence).to(tl.int32) + before + 0 * sequence,
        )
        position = tl.load(starts + sequence) - WINDOW + before % WINDOW
        in_ring = tl.load(slots + sequence) * slot_stride + (position % RING_ROWS) * ring_stride
        there = is_new | (exists & (position >= 0))
        values = tl.where(is_new, new_rows + token.to(tl.int64) * new_stride, ring + tl.where(there, in_ring, 0))
        _unpack(scratch, place, values, values + VALUE_BYTES, exists, there, KIND, DIM, PLAIN_DIM, SCALE_BYTES, BLOCKS, COLUMNS)
    else:
        programs = tl.num_programs(0) - recent_programs
        if FORM == "selected":
            total = tokens * selected
            for first in range((program - recent_programs) * ROWS, total, programs * ROWS):
                number = first + lanes
                token = tl.minimum(number // selected, tokens - 1)
                there = (number < total) & (number % selected < tl.load(counts + token))
                entry = tl.load(entries + number, mask=there, other=0)
                block = pages + (entry // PAGE_ROWS).to(tl.int64) * page_stride
                values = block + (entry % PAGE_ROWS) * VALUE_BYTES
                scales = block + PAGE_ROWS * VALUE_BYTES + (entry % PAGE_ROWS) * SCALE_BYTES
                _unpack(
                    scratch, recent + number, values, scales, there, there, KIND, DIM, PLAIN_DIM, SCALE_BYTES, BLOCKS, COLUMNS
                )
        if FORM == "whole":
            for owner in range(sequences):
                live = table_width * PAGE_ROWS
                if RATIO > 0:
                    end = tl.load(starts + owner) + tl.load(cu_tokens + owner + 1) - tl.load(cu_tokens + owner)
                    live = tl.minimum(live, (end // RATIO).to(tl.int32))
                for first in range((program - recent_programs) * ROWS, live, programs * ROWS):
                    number = first + lanes
                    slot = owner * table_width + number // PAGE_ROWS  # of the page in the table
                    there = number < live  # page 0 too: steps that only warm up select rows of it
                    page = tl.load(page_table + slot, mask=there, other=0)
                    block = pages + page * page_stride
                    values = block + (number % PAGE_ROWS) * VALUE_BYTES
                    scales = block + PAGE_ROWS * VALUE_BYTES + (number % PAGE_ROWS) * SCALE_BYTES
                    if MAPPED:
                        tl.store(places + page, slot, mask=there)
                    place = recent + owner * table_width * PAGE_ROWS + number
                    _unpack(scratch, place, values, scales, there, there, KIND, DIM, PLAIN_DIM, SCALE_BYTES, BLOCKS, COLUMNS)


@jit
def _unpack(
    scratch,
    place,
    values,
    scales,
    stored,
    there,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows at byte pointers `values` and `scales` [ROWS] -> rows `place` of scratch where `stored`, zeros unless `there`."""
    out = scratch + place.to(tl.int64) * DIM
    column = tl.arange(0, COLUMNS)
    if KIND == "fp8":
        block = tl.arange(0, BLOCKS)
        channel = block[:, None] * 64 + tl.arange(0, 64)[None, :]  # KV_BLOCK
        inside = channel < PLAIN_DIM
        codes = tl.load(values[:, None, None] + channel[None], mask=there[:, None, None] & inside[None], other=0)
        byte = tl.load(scales[:, None] + block[None, :], mask=there[:, None] & (block * 64 < PLAIN_DIM)[None, :], other=127)
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * power_of_two(byte.to(tl.int32))[:, :, None]
        tl.store(
            out[:, None, None] + channel[None],
            value.to(scratch.dtype.element_ty),
            mask=stored[:, None, None] & inside[None],
        )
        tail = (values + PLAIN_DIM).to(tl.pointer_type(tl.bfloat16))
    elif KIND == "bf16":
        tail = values.to(tl.pointer_type(tl.bfloat16))
    else:
        tail = values.to(tl.pointer_type(tl.float32))
    inside = column < DIM - PLAIN_DIM
    value = tl.load(tail[:, None] + column[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    tl.store(
        out[:, None] + PLAIN_DIM + column[None, :],
        value.to(scratch.dtype.element_ty),
        mask=stored[:, None] & inside[None, :],
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """Heads and keys of one tile of the portable kernel."""

    heads: int
    keys: int
    warps: int
    stages: int


FP32_TILES = Tiles(16, 16, 4, 1)
FEW_HEADS_TILES = Tiles(16, 32, 4, 1)
PORTABLE_TILES = Tiles(32, 32, 8, 2)


def _tiles(q: Tensor) -> Tiles:
    if q.dtype is torch.float32:
        return FP32_TILES
    return FEW_HEADS_TILES if q.shape[1] <= FEW_HEADS_TILES.heads else PORTABLE_TILES


def attend(q: Tensor, batch: Ragged, window: int, sinks: Tensor, turn: Tensor, scratch: Scratch, out: Tensor) -> None:
    """The portable kernel: a program takes one token and a tile of its heads."""
    tokens, heads, dim = q.shape
    tiles = _tiles(q)
    anything = scratch.rows
    launch(
        _attend,
        (triton.cdiv(heads, tiles.heads), tokens),
        q,
        scratch.rows,
        batch.positions,
        batch.sequence_ids,
        anything if scratch.entries is None else scratch.entries,
        anything if scratch.counts is None else scratch.counts,
        anything if scratch.places is None else scratch.places,
        sinks,
        turn,
        out,
        dim**-0.5,
        heads,
        scratch.compressed_at,
        batch.page_table.shape[1] * scratch.page_rows,
        1 if scratch.entries is None else scratch.entries.shape[1],
        q.stride(0),
        q.stride(1),
        RATIO=scratch.ratio,
        SELECTED=scratch.entries is not None,
        MAPPED=scratch.places is not None,
        PAGE_ROWS=scratch.page_rows,
        WINDOW=window,
        DIM=dim,
        ROPE_DIM=2 * turn.shape[-2],
        COLUMNS=triton.next_power_of_2(dim),
        HEADS=tiles.heads,
        KEYS=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@jit(do_not_specialize=["heads", "compressed_at", "sequence_rows", "selected"])
def _attend(
    q,
    rows,
    positions,
    sequence_ids,
    entries,
    counts,
    places,
    sinks,
    turn,
    out,
    scale,
    heads,
    compressed_at,
    sequence_rows,
    selected,
    q_stride,
    head_stride,
    RATIO: tl.constexpr,
    SELECTED: tl.constexpr,
    MAPPED: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    is_head, inside = head < heads, column < DIM
    position = tl.load(positions + token)
    sequence = tl.load(sequence_ids + token).to(tl.int32)
    query = tl.load(
        q + token.to(tl.int64) * q_stride + head[:, None] * head_stride + column[None, :],
        mask=is_head[:, None] & inside[None, :],
        other=0.0,
    )
    scale = scale * LOG2_E
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)

    oldest = tl.maximum(WINDOW - 1 - position, 0).to(tl.int32)
    window_at = token + sequence * WINDOW + 1
    for first in range(oldest // KEYS * KEYS, WINDOW, KEYS):
        key = first + tl.arange(0, KEYS)
        seen = (key >= oldest) & (key < WINDOW)
        place = window_at + tl.minimum(tl.maximum(key, oldest), WINDOW - 1)
        acc, largest, total = _add_tile(query, rows, place, seen, inside, column, scale, acc, largest, total, DIM)
    if SELECTED or RATIO > 0:
        if SELECTED:
            count = tl.load(counts + token)
        else:
            count = ((position + 1) // RATIO).to(tl.int32)
        for first in range(0, count, KEYS):
            key = first + tl.arange(0, KEYS)
            seen = key < count
            key = tl.minimum(key, count - 1)
            if MAPPED:
                entry = tl.load(entries + token.to(tl.int64) * selected + key)
                place = tl.load(places + entry // PAGE_ROWS) * PAGE_ROWS + entry % PAGE_ROWS
            elif SELECTED:
                place = token * selected + key
            else:
                place = sequence * sequence_rows + key
            acc, largest, total = _add_tile(
                query, rows, compressed_at + place, seen, inside, column, scale, acc, largest, total, DIM
            )

    sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
    total += tl.exp2(sink * LOG2_E - largest)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    _store_turned(result, turn, out, token, heads, head, is_head, DIM, ROPE_DIM, COLUMNS, HEADS)


@jit
def _add_tile(query, rows, place, seen, inside, column, scale, acc, largest, total, DIM: tl.constexpr):
    """One step of the online softmax over the scratch rows `place` [KEYS], those that are `seen`; logits to base 2."""
    key = tl.load(rows + place.to(tl.int64)[:, None] * DIM + column[None, :], mask=inside[None, :], other=0.0)
    if INTERPRETED:  # whose dot takes bfloat16 for integers
        query, key = query.to(tl.float32), key.to(tl.float32)
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    logits = tl.where(seen[None, :], logits, -float("inf"))
    highest = tl.maximum(largest, tl.max(logits, 1))
    shrink = tl.exp2(largest - highest)
    share = tl.exp2(logits - highest[:, None])
    total = total * shrink + tl.sum(share, 1)
    share = share.to(rows.dtype.element_ty).to(key.dtype)
    acc = tl.dot(share, key, acc * shrink[:, None], input_precision="ieee")
    return acc, highest, total


@jit
def _store_turned(
    result,
    turn,
    out,
    token,
    heads,
    head,
    is_head,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Turns the last ROPE_DIM channels back (adjacent pairs) and stores. Channels before them turn by nothing."""
    pair = tl.arange(0, COLUMNS // 2)
    angle = pair - (DIM - ROPE_DIM) // 2
    rotary = (angle >= 0) & (pair < DIM // 2)
    at = turn + token * ROPE_DIM + 2 * angle
    cosine = tl.load(at, mask=rotary, other=1.0).to(tl.float32)
    sine = tl.load(at + 1, mask=rotary, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(result.to(tl.float32), [HEADS, COLUMNS // 2, 2]))
    turned = tl.join(even * cosine[None, :] + odd * sine[None, :], odd * cosine[None, :] - even * sine[None, :])
    turned = tl.reshape(turned, [HEADS, COLUMNS])
    column = tl.arange(0, COLUMNS)
    tl.store(
        out + (token.to(tl.int64) * heads + head[:, None]) * DIM + column[None, :],
        turned.to(out.dtype.element_ty),
        mask=is_head[:, None] & (column < DIM)[None, :],
    )
