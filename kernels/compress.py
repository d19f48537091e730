"""The CSA and HCA compressors: a window of tokens becomes one row (spec B.6, C.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend
from kernels.early import await_inputs, early
from kernels.jit import jit
from kernels.kvrows import hadamard_row, row_block, simulate_fp4_blocks, store_index_row, store_kv_row
from kernels.launch import launch
from kernels.norm import norm_factor, rms_norm_reference
from kernels.ragged import Ragged, gather_history, store_ring_reference
from kernels.rope import rope_reference, rotation_reference, turn_of_position, turn_pairs
from kernels.rounding import rounded_through
from kernels.rows import IndexRow, KVRow, write_rows
from kernels.workspace import empty

TILE = 4096  # state values that one program pools at once, of each kind
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """ape float32 [ratio, f*c]; norm float32 [c]; frequencies of the layer's rotary table. f = 2 when windows overlap."""

    ratio: int
    overlap: bool
    ape: Tensor
    norm: Tensor
    norm_eps: float
    frequencies: Tensor

    @property
    def length(self) -> int:
        """How many tokens take part in an entry."""
        return 2 * self.ratio if self.overlap else self.ratio


def compress(
    projected: Tensor,
    weights: CompressorWeights,
    batch: Ragged,
    ring: Tensor,
    pages: Tensor,
    row: KVRow | IndexRow,
    dtype: torch.dtype,
) -> None:
    """Writes the entries that this step's tokens close into `pages`, and the tokens' state rows into `ring`.

    projected float32 [T, 2*f*c]: values, then scores without ape. ring float32 [slots, R, 2*f*c], row = position % R,
    scores with ape; R >= f*ratio, plus what may be rolled back. pages uint8 [pages, rows, row_bytes], planar as
    kernels/rows.py says: entry w of a sequence is row w % rows of its page w // rows. An entry is rounded to `dtype` where
    the activations are.

    One launch does it all where the ring has room for a step's new rows beside those that an entry needs; a longer chunk's
    rows are stored by a second one.
    """
    if not backend.active().triton:
        compress_reference(projected, weights, batch, ring, pages, row, dtype)
        return
    at_once = weights.length + batch.longest - 1 <= ring.shape[1]
    _launch_compress(projected, weights, batch, ring, pages, row, dtype, at_once)
    if not at_once:
        _launch_store_state(projected, weights, batch, ring)


def compress_reference(
    projected: Tensor,
    weights: CompressorWeights,
    batch: Ragged,
    ring: Tensor,
    pages: Tensor,
    row: KVRow | IndexRow,
    dtype: torch.dtype,
) -> None:
    ratio = weights.ratio
    state = projected.clone()
    state[:, projected.shape[1] // 2 :] += weights.ape[batch.positions % ratio]
    closing = ((batch.positions + 1) % ratio == 0).nonzero().squeeze(1)
    if len(closing):
        entries = _pool(state, weights, batch, ring, closing)
        windows = batch.positions[closing] // ratio
        normed = rms_norm_reference(entries.to(dtype), weights.norm, weights.norm_eps)
        turned = rope_reference(normed, rotation_reference(windows * ratio, weights.frequencies), inverse=False)
        page = batch.page_table[batch.sequence_ids[closing], windows // pages.shape[1]]
        write_rows(pages, row, page, windows % pages.shape[1], row.pack(turned))
    store_ring_reference(batch, ring, state)


def _pool(state: Tensor, weights: CompressorWeights, batch: Ragged, ring: Tensor, closing: Tensor) -> Tensor:
    """One softmax over tokens per channel, of the window that each `closing` token ends: float64 [M, c].

    With overlap the window before takes part with its tokens' first halves, this one with the second halves.
    """
    ratio, length = weights.ratio, weights.length
    wanted = batch.positions[closing][:, None] + torch.arange(1 - length, 1, device=closing.device)
    values, scores = gather_history(batch, ring, state, closing, wanted).double().chunk(2, -1)
    if weights.overlap:
        values, scores = _halves(values, ratio), _halves(scores, ratio)
    absent = (wanted < 0)[..., None]
    share = torch.softmax(scores.masked_fill(absent, -torch.inf), 1)
    return (share * values.masked_fill(absent, 0.0)).sum(1)


def _halves(x: Tensor, ratio: int) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((x[:, :ratio, :half], x[:, ratio:, half:]), 1)


def _launch_compress(
    projected: Tensor,
    weights: CompressorWeights,
    batch: Ragged,
    ring: Tensor,
    pages: Tensor,
    row: KVRow | IndexRow,
    dtype: torch.dtype,
    at_once: bool,
) -> None:
    width, (tokens, columns), sequences = len(weights.norm), projected.shape, len(batch.slots)
    programs = tokens if at_once else tokens // weights.ratio + sequences
    rows = triton.next_power_of_2(weights.length)
    channels = min(max(TILE // rows, 16), triton.next_power_of_2(width))
    splits = triton.cdiv(width, channels)
    entries = empty((programs, width) if splits > 1 else (1, 1), torch.float32, projected.device)
    launch(
        _compress,
        (programs * splits,),
        projected,
        weights.ape,
        weights.norm,
        weights.norm_eps,
        weights.frequencies,
        ring,
        pages,
        batch.positions,
        batch.sequence_ids,
        batch.starts,
        batch.cu_tokens,
        batch.slots,
        batch.page_table,
        entries,
        _tickets(triton.next_power_of_2(max(programs, 4096)), projected.device),
        sequences,
        ring.stride(0),
        pages.stride(0),
        batch.page_table.stride(0),
        AT_ONCE=at_once,
        RATIO=weights.ratio,
        OVERLAP=weights.overlap,
        WIDTH=width,
        COLUMNS=columns,
        PAIRS=len(weights.frequencies),
        RING_ROWS=ring.shape[1],
        PAGE_ROWS=pages.shape[1],
        INDEX=isinstance(row, IndexRow),
        KIND=row.kind,
        ROUNDED=row.rounded,
        VALUE_BYTES=row.value_bytes,
        SCALE_BYTES=row.scale_bytes,
        DTYPE=TRITON_DTYPES[dtype],
        SPLITS=splits,
        ROWS=rows,
        CHANNELS=channels,
        BLOCK=row_block(width),
        COLUMN_BLOCK=triton.next_power_of_2(columns),
        SEQUENCES=1 if at_once else triton.next_power_of_2(sequences),
        num_warps=min(max(rows * channels // 1024, 1), 4),
        **early(),
    )


def _launch_store_state(projected: Tensor, weights: CompressorWeights, batch: Ragged, ring: Tensor) -> None:
    lasting = min(batch.longest, ring.shape[1])
    launch(
        _store_state,
        (len(batch.slots) * lasting,),
        projected,
        weights.ape,
        ring,
        batch.starts,
        batch.cu_tokens,
        batch.slots,
        lasting,
        ring.stride(0),
        RATIO=weights.ratio,
        COLUMNS=projected.shape[1],
        RING_ROWS=ring.shape[1],
        COLUMN_BLOCK=triton.next_power_of_2(projected.shape[1]),
        num_warps=4,
        **early(),
    )


@cache
def _tickets(count: int, device: torch.device) -> Tensor:
    """Zeros, int32 [count]. A program that pools part of an entry takes a ticket; the last one packs the entry and puts the
    zero back. Made once: launches that share it follow each other on a stream."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@jit
def state_row(projected_ptr, ape_ptr, token, position, column, real, RATIO: tl.constexpr, COLUMNS: tl.constexpr):
    """A token's row as the ring keeps it, the scores with ape: `column` [C] of it where `real`."""
    half: tl.constexpr = COLUMNS // 2
    state = tl.load(projected_ptr + token * COLUMNS + column, real, 0.0)
    return state + tl.load(ape_ptr + position % RATIO * half + column - half, real & (column >= half), 0.0)


@jit(do_not_specialize=["lasting"])
def _store_state(
    projected_ptr,
    ape_ptr,
    ring_ptr,
    starts_ptr,
    cu_tokens_ptr,
    slots_ptr,
    lasting,
    slot_stride,
    RATIO: tl.constexpr,
    COLUMNS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program stores one of the last `lasting` rows of one sequence, if it has so many."""
    await_inputs(EARLY)
    sequence, back = tl.program_id(0) // lasting, tl.program_id(0) % lasting
    first = tl.load(cu_tokens_ptr + sequence)
    token = tl.load(cu_tokens_ptr + sequence + 1) - 1 - back
    if token >= first:
        position = tl.load(starts_ptr + sequence) + token - first
        at = ring_ptr + tl.load(slots_ptr + sequence) * slot_stride + position % RING_ROWS * COLUMNS
        column = tl.arange(0, COLUMN_BLOCK)
        state = state_row(projected_ptr, ape_ptr, token, position, column, column < COLUMNS, RATIO, COLUMNS)
        tl.store(at + column, state, column < COLUMNS)


@jit
def find_window(candidate, sequences, starts_ptr, cu_tokens_ptr, RATIO: tl.constexpr, SEQUENCES: tl.constexpr):
    """(sequence, position of the token that closes it) of window number `candidate` of all that this step closes, sequence
    after sequence; the position is -1 when there are fewer."""
    each = tl.arange(0, SEQUENCES)
    real = each < sequences
    start = tl.load(starts_ptr + each, real, 0)
    length = tl.load(cu_tokens_ptr + each + 1, real, 0) - tl.load(cu_tokens_ptr + each, real, 0)
    closed = (start + length) // RATIO - start // RATIO
    until = tl.cumsum(closed, 0)
    sequence = tl.sum((until <= candidate).to(tl.int32), 0)
    window = candidate + tl.sum(tl.where(each == sequence, start // RATIO - until + closed, 0), 0)
    return sequence.to(tl.int64), tl.where(sequence < sequences, (window + 1) * RATIO - 1, -1)


@jit
def pool_window(
    projected_ptr,
    ape_ptr,
    ring_ptr,
    token,
    position,
    start,
    channel,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The entry that `token` at `position` closes, for `channel` [C]: one softmax over the window's tokens per channel,
    float32 [C]. Rows from before `start` come from the sequence's ring, which holds scores with ape."""
    half: tl.constexpr = COLUMNS // 2
    length: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    row = tl.arange(0, ROWS)[:, None]
    wanted = position - (length - 1) + row
    exists = (wanted >= 0) & (row < length)
    fresh = wanted >= start
    column = channel[None, :] + (row // RATIO * WIDTH if OVERLAP else 0)
    real = exists & (channel < WIDTH)[None, :]
    fresh_ptr = projected_ptr + (token - (length - 1) + row) * COLUMNS
    kept_ptr = ring_ptr + (wanted + RING_ROWS) % RING_ROWS * COLUMNS
    at = tl.where(fresh, fresh_ptr, kept_ptr) + column
    values = tl.load(at, real, 0.0)
    scores = tl.load(at + half, real, 0.0)
    ape_at = ape_ptr + (wanted + length) % RATIO * half + column
    scores = tl.where(exists, scores + tl.load(ape_at, real & fresh, 0.0), float("-inf"))
    share = tl.exp(scores - tl.max(scores, 0)[None, :])
    return tl.sum(share * values, 0) / tl.sum(share, 0)


@jit(do_not_specialize=["sequences", "table_stride"])
def _compress(
    projected_ptr,
    ape_ptr,
    norm_ptr,
    eps,
    frequencies_ptr,
    ring_ptr,
    pages_ptr,
    positions_ptr,
    sequence_ids_ptr,
    starts_ptr,
    cu_tokens_ptr,
    slots_ptr,
    page_table_ptr,
    entries_ptr,
    tickets_ptr,
    sequences,
    slot_stride,
    page_stride,
    table_stride,
    AT_ONCE: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    INDEX: tl.constexpr,
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program pools `CHANNELS` channels of one entry; the last one of an entry packs it. AT_ONCE: an entry may be any
    token's, whose state row is stored in passing. Otherwise windows that close are found by number."""
    await_inputs(EARLY)
    candidate, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    if AT_ONCE:
        position = tl.load(positions_ptr + candidate)
        if (split != 0) & ((position + 1) % RATIO != 0):
            return
        sequence = tl.load(sequence_ids_ptr + candidate)
    else:
        sequence, position = find_window(candidate, sequences, starts_ptr, cu_tokens_ptr, RATIO, SEQUENCES)
        if position < 0:
            return
    start = tl.load(starts_ptr + sequence)
    token = candidate.to(tl.int64) if AT_ONCE else tl.load(cu_tokens_ptr + sequence) + position - start
    slot_ptr = ring_ptr + tl.load(slots_ptr + sequence) * slot_stride
    window = position // RATIO
    if AT_ONCE:
        column = tl.arange(0, COLUMN_BLOCK)
        stored = (column < COLUMNS) & (split == 0)
        state = state_row(projected_ptr, ape_ptr, token, position, column, stored, RATIO, COLUMNS)
        state_at = slot_ptr + position % RING_ROWS * COLUMNS + column
        if (position + 1) % RATIO != 0:
            tl.store(state_at, state, stored)
            return
    channel = tl.arange(0, BLOCK)
    # what follows the pooling is asked for before it
    weight = tl.load(norm_ptr + channel, channel < WIDTH, 0.0).to(tl.float32)
    page = tl.load(page_table_ptr + sequence * table_stride + window // PAGE_ROWS)
    if SPLITS == 1:
        entry = pool_window(
            projected_ptr,
            ape_ptr,
            slot_ptr,
            token,
            position,
            start,
            channel,
            RATIO,
            OVERLAP,
            WIDTH,
            COLUMNS,
            RING_ROWS,
            ROWS,
        )
        if AT_ONCE:
            tl.store(state_at, state, stored)
    else:
        part = split * CHANNELS + tl.arange(0, CHANNELS)
        pooled = pool_window(
            projected_ptr, ape_ptr, slot_ptr, token, position, start, part, RATIO, OVERLAP, WIDTH, COLUMNS, RING_ROWS, ROWS
        )
        if AT_ONCE:
            tl.store(state_at, state, stored)
        entry_ptr = entries_ptr + candidate.to(tl.int64) * WIDTH
        tl.store(entry_ptr + part, pooled, part < WIDTH)
        tl.debug_barrier()  # every thread's part is written before the ticket says so
        if tl.atomic_add(tickets_ptr + candidate, 1) != SPLITS - 1:
            return
        tl.store(tickets_ptr + candidate, 0)
        entry = tl.load(entry_ptr + channel, channel < WIDTH, 0.0, cache_modifier=".cg")
    entry = rounded_through(tl.where(channel < WIDTH, entry, 0.0), DTYPE)
    normed = rounded_through(entry * norm_factor(entry, eps, WIDTH) * weight, DTYPE)
    cos, sin = turn_of_position(window * RATIO, frequencies_ptr, WIDTH, PAIRS, BLOCK)
    turned = rounded_through(turn_pairs(normed, cos, sin), DTYPE)
    page_ptr = pages_ptr + page * page_stride
    at = page_ptr + window % PAGE_ROWS * VALUE_BYTES
    scales_at = page_ptr + PAGE_ROWS * VALUE_BYTES + window % PAGE_ROWS * SCALE_BYTES
    if INDEX:
        if ROUNDED:
            turned = rounded_through(hadamard_row(turned, WIDTH), DTYPE)
            if KIND != "mxfp4":
                turned = simulate_fp4_blocks(turned)
        store_index_row(turned, at, scales_at, KIND, WIDTH, BLOCK)
    else:
        store_kv_row(turned, at, scales_at, KIND, WIDTH, WIDTH - 2 * PAIRS, ROUNDED, SCALE_BYTES, BLOCK)
