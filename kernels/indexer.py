"""The lightning indexer: which compressed rows a token attends to (spec B.7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend, indexer_hopper, workspace
from kernels.indexer_fp4 import unpack_keys
from kernels.jit import jit
from kernels.launch import launch
from kernels.ragged import Ragged, equal_length_groups
from kernels.rounding import INTERPRETED
from kernels.rows import PLAIN_DTYPES, IndexRow, planes, read_rows
from kernels.topk import GROUP, choose_rows, unscored_rows

QUERY_BLOCK = 64  # bounds the memory of a long chunk's scores in the reference
SCRATCH_BYTES = 256 << 20  # the same for the kernels
TOKENS_A_GROUP = 4  # query tokens that share one reading of the keys
BLOCK_STEP = 16  # tokens scored at once are a multiple: one machine code for the first block of a chunk and the others


@dataclass(frozen=True, slots=True)
class Entries:
    """The compressed rows that each token attends to.

    rows int32 [T, topk]: physical, page * rows a page + row in the page, in ascending logical order, -1 after the last.
    counts int32 [T].
    """

    rows: Tensor
    counts: Tensor


def select_entries(
    queries: Tensor,
    scales: Tensor | None,
    head_weights: Tensor,
    batch: Ragged,
    pages: Tensor,
    row: IndexRow,
    ratio: int,
    topk: int,
    factor: float = 1.0,
) -> Entries:
    """queries [T, heads, dim] as kvrows.index_queries makes them (e4m3 with float32 scales [T, heads] for fp8 and mxfp4 keys,
    else plain), head_weights [T, heads].

    score(w) = sum_h head_weight_h * relu(query_h . key_w). The `topk` best of the entries a token may see,
    w < (position + 1) // ratio; the lower entry wins a tie. pages uint8 [pages, rows, row_bytes]: entry w is row w % rows of
    the sequence's page w // rows. Kernels score in float32; the reference rounds dots and scores to head_weights' dtype.
    `factor`, positive, multiplies the head weights: it changes no order, so only the reference, whose roundings it moves,
    looks at it.
    """
    if not backend.active().triton:
        return select_entries_reference(queries, scales, head_weights * factor, batch, pages, row, ratio, topk)
    tokens = len(queries)
    entries = Entries(
        workspace.empty((tokens, topk), torch.int32, queries.device), workspace.empty((tokens,), torch.int32, queries.device)
    )
    capacity = capacity_of(batch, pages)
    if capacity <= topk:
        unscored_rows(entries.rows, entries.counts, batch, pages.shape[1], ratio)
        return entries
    block = query_block(tokens, capacity)
    for first in range(0, tokens, block):
        with workspace.frame():
            count = min(block, tokens - first)
            scores = score_entries(queries, scales, head_weights, batch, pages, row, ratio, topk, first, count)
            choose_rows(entries.rows, entries.counts, scores.values, scores.maxima, batch, pages.shape[1], ratio, first)
    return entries


# The reference.


def select_entries_reference(
    queries: Tensor,
    scales: Tensor | None,
    head_weights: Tensor,
    batch: Ragged,
    pages: Tensor,
    row: IndexRow,
    ratio: int,
    topk: int,
) -> Entries:
    visible = (batch.positions + 1) // ratio
    logical = torch.arange(topk, device=queries.device).expand(len(queries), topk).clone()
    width = int(visible.max()) if len(visible) else 0
    if width > topk:
        values = queries.double() if scales is None else queries.double() * scales.double()[..., None]
        for sequences, length in equal_length_groups(batch):
            tokens = batch.cu_tokens[sequences][:, None] + torch.arange(length, device=queries.device)
            keys = _keys(batch, pages, row, sequences, width)
            for block in torch.split(tokens, QUERY_BLOCK, 1):
                logical[block] = best_reference(_scores(values[block], head_weights[block], keys), visible[block], topk)
    counts = visible.clamp(max=topk)
    return Entries(physical_rows(logical, counts, batch, pages.shape[1]), counts.int())


def physical_rows(logical: Tensor, counts: Tensor, batch: Ragged, rows: int) -> Tensor:
    """Entries int64 [T, K], the first counts [T] of them valid -> int32 page * rows + row, then -1."""
    seen = torch.arange(logical.shape[1], device=logical.device) < counts[:, None]
    logical = torch.where(seen, logical, 0)
    page = batch.page_table[batch.sequence_ids[:, None], logical // rows]
    return torch.where(seen, page * rows + logical % rows, -1).int()


def _keys(batch: Ragged, pages: Tensor, row: IndexRow, sequences: Tensor, width: int) -> Tensor:
    """The first `width` keys of each sequence, float64 [G, dim, width]."""
    rows = pages.shape[1]
    entries = torch.arange(width, device=pages.device)
    return row.unpack(read_rows(pages, row, batch.page_table[sequences][:, entries // rows], entries % rows)).transpose(1, 2)


def _scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """queries float64 [G, n, heads, dim], keys [G, dim, W] -> [G, n, W] float64 that holds values of head_weights' dtype."""
    dtype = head_weights.dtype
    dots = torch.bmm(queries.flatten(1, 2), keys).to(dtype).relu_()
    weighted = torch.unflatten(dots, 1, queries.shape[1:3]).mul_(head_weights[..., None])
    return weighted.double().sum(2).to(dtype).double()


def best_reference(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """The entries of the `topk` largest visible scores [..., W], ascending; of fewer, all of them first."""
    hidden = torch.arange(scores.shape[-1], device=scores.device) >= visible[..., None]
    order = torch.sort(scores.masked_fill(hidden, -torch.inf), descending=True, stable=True).indices[..., :topk]
    return order.masked_fill(order >= visible[..., None], scores.shape[-1]).sort().values


# The kernels' side: scores of a block of tokens, then the choice (topk.py).


@dataclass(frozen=True, slots=True)
class Scores:
    """values float32 [n, capacity]; maxima float32 [n, capacity / 8]: of 8 visible neighbours each. Beyond what a token sees,
    and of a token that sees no more than it may choose, both hold anything."""

    values: Tensor
    maxima: Tensor


def capacity_of(batch: Ragged, pages: Tensor) -> int:
    """Entries that the page table has room for, rounded up to whole groups."""
    return -(-batch.page_table.shape[1] * pages.shape[1] // GROUP) * GROUP


def query_block(tokens: int, capacity: int) -> int:
    """Tokens scored at once: all of a decode step, of a long chunk what fits the scratch memory."""
    fitting = SCRATCH_BYTES // (4 * (capacity + capacity // GROUP))
    return min(tokens, max(64, fitting // BLOCK_STEP * BLOCK_STEP))


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the portable kernel is built: keys a tile, warps, pipeline stages, programs a multiprocessor."""

    tile: int
    warps: int
    stages: int
    programs: int


def tiling(kind: str, tokens: int, shared_bytes: int) -> Tiling:
    """`tokens` that share the keys, as padded; found on an H200."""
    if kind == "fp32":
        return Tiling(32, 4, 1, 2)
    if kind == "bf16":
        return Tiling(64, 4, 2, 2)
    small = shared_bytes < 200_000
    if kind == "mxfp4":
        return Tiling(64 if tokens > 1 else 128, 4, 3 if small else 5, 2 if tokens > 1 or small else 3)
    if small:
        return Tiling(128 if tokens < 4 else 64, 4, 3, 1)
    return Tiling(128 if tokens < 4 else 64, 4, 5, 3 if tokens == 1 else 2)


def score_entries(
    queries: Tensor,
    scales: Tensor | None,
    head_weights: Tensor,
    batch: Ragged,
    pages: Tensor,
    row: IndexRow,
    ratio: int,
    topk: int,
    first: int,
    count: int,
) -> Scores:
    """Scores of the tokens first .. first + count - 1, float32. Arguments as of select_entries."""
    capacity, device = capacity_of(batch, pages), queries.device
    scores = Scores(
        workspace.empty((count, capacity), torch.float32, device),
        workspace.empty((count, capacity // GROUP), torch.float32, device),
    )
    heads, dim = queries.shape[1:]
    members, uniform = _grouping(batch, row.kind, count)
    chosen: Tiling | indexer_hopper.Tiling
    if backend.active().hopper and indexer_hopper.fits(row.kind, pages.shape[1], heads, dim):
        chosen = indexer_hopper.tiling(members, capacity)
    else:
        chosen = tiling(row.kind, triton.next_power_of_2(members), backend.active().shared_bytes)
    programs = chosen.programs * backend.active().multiprocessors
    groups = triton.cdiv(count, members)
    keys, key_scales = _planes(pages, row)
    numbers = (batch.longest, batch.page_table.stride(0), capacity, queries.stride(0), head_weights.stride(0))
    shared = {"RATIO": ratio, "MEMBERS": members, "UNIFORM": uniform, "TOPK": topk}
    shared["GROUPS_PADDED"] = triton.next_power_of_2(groups)
    asked = (queries, queries if scales is None else scales, head_weights)
    where = (batch.page_table, batch.positions, batch.sequence_ids, scores.values, scores.maxima, first, count, programs)
    if isinstance(chosen, indexer_hopper.Tiling):
        described = (indexer_hopper.descriptor(keys), key_scales)
        indexer_hopper.start(chosen, programs, (*asked, *described, *where, *numbers, key_scales.stride(0)), shared)
        return scores
    launch(
        _score_kernel,
        (programs,),
        *asked,
        keys,
        key_scales,
        *where,
        *numbers,
        batch.page_table.shape[1],
        keys.stride(0),
        key_scales.stride(0),
        ROWS=pages.shape[1],
        HEADS=heads,
        HEADS_PADDED=max(16, triton.next_power_of_2(heads)),
        DIM=dim,
        SCALED=scales is not None,
        PACKED=row.kind == "mxfp4",
        TOKENS=triton.next_power_of_2(members),
        TILE=chosen.tile,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        WIDEN=_widens(row.kind, queries.dtype),
        **shared,
    )
    return scores


def _grouping(batch: Ragged, kind: str, count: int) -> tuple[int, bool]:
    """(tokens that share one reading of the keys, whether such a group never holds two sequences)."""
    members = 1 if kind == "fp32" else min(batch.longest, TOKENS_A_GROUP)
    return members, len(batch.positions) == len(
        batch.starts
    ) * batch.longest and count % members == 0 == batch.longest % members


def _widens(kind: str, asked: torch.dtype) -> bool:
    """Whether both sides become float32 first: keys that are not stored in the queries' dtype, and bf16 in the interpreter,
    which cannot multiply it."""
    kept = PLAIN_DTYPES.get(kind)
    return kept is not None and (kept != asked or (backend.INTERPRETED and kept is torch.bfloat16))


def _planes(pages: Tensor, row: IndexRow) -> tuple[Tensor, Tensor]:
    """The keys [pages, rows, dim] in their dtype and the scales float32 [pages, rows] (the keys again where there are none).
    mxfp4: bytes of both, [pages, rows, dim / 2] and [pages, rows, dim / 32]."""
    values, scales = planes(pages, row)
    if row.kind in PLAIN_DTYPES:
        keys = values.view(PLAIN_DTYPES[row.kind])
        return keys, keys
    if row.kind == "mxfp4":
        return values, scales
    return values.view(torch.float8_e4m3fn), scales.view(torch.float32)[..., 0]


@jit
def _group_tiles(positions, first, count, RATIO, MEMBERS, TOKENS, GROUPS_PADDED, TILE, TOPK):
    """Tiles of keys that each group of tokens has to score, int32 [GROUPS_PADDED]: none where no token must choose."""
    group = tl.arange(0, GROUPS_PADDED)
    member = tl.arange(0, TOKENS)
    token = group[:, None] * MEMBERS + member[None, :]
    real = (member[None, :] < MEMBERS) & (token < count)
    position = tl.load(positions + first + token, mask=real, other=-1)
    visible = tl.max(((position + 1) // RATIO).to(tl.int32), 1)
    return tl.where(visible > TOPK, tl.cdiv(visible, TILE), 0)


@jit
def _quota(tiles, programs):
    """Tiles a unit of work may have, the least (nearly) for which there are not more units than programs.

    A unit belongs to one group, so the key loads of a program are one unbroken pipeline. With more groups than programs no
    quota is enough: then units are long.
    """
    quota = tl.maximum(tl.cdiv(tl.sum(tiles), programs), 1)
    step = 1 + quota // 32
    longest = tl.maximum(tl.max(tiles), 1)
    while (tl.sum(tl.cdiv(tiles, quota)) > programs) & (quota < longest):
        quota += step
    return quota


@jit
def _weighted_sum(dots, weight, TOKENS: tl.constexpr):
    """dots float32 [K, N * H], weight [N * H] -> sum over the heads of weight * relu(dot), [K, N]; H 16, 32, ... 256.

    Two numbers at a time, and products that no addition is joined to but the one that is meant: else the bits would follow
    from which threads hold what, and that from N. First come neighbours and heads 16 and more apart, which a thread holds
    itself, then what the rest of its warp does.
    """
    K: tl.constexpr = dots.shape[0]
    FAR: tl.constexpr = dots.shape[1] // TOKENS // 16
    left, right = tl.split(tl.reshape(dots, (K, TOKENS, FAR, 2, 2, 2, 2)))
    left_weight, right_weight = tl.split(tl.reshape(weight, (1, TOKENS, FAR, 2, 2, 2, 2)))
    x = _two_heads(left, left_weight, right, right_weight)
    for halved in tl.static_range(4):
        if FAR >> halved > 1:
            x = tl.sum(tl.reshape(x, (K, TOKENS, 2, FAR >> (halved + 1), 2, 2, 2)), 2)
    x = tl.reshape(x, (K, TOKENS, 2, 2, 2))
    return tl.sum(tl.sum(tl.sum(x, 4), 3), 2)


@jit
def _two_heads(left, left_weight, right, right_weight):
    if INTERPRETED:
        return tl.maximum(left, 0.0) * left_weight + tl.maximum(right, 0.0) * right_weight
    left, left_weight = tl.broadcast(left, left_weight)
    right, right_weight = tl.broadcast(right, right_weight)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 a, b;
        max.f32 a, $1, 0f00000000;
        max.f32 b, $3, 0f00000000;
        mul.rn.f32 a, a, $2;
        fma.rn.f32 $0, b, $4, a;
        }""",
        "=f,f,f,f,f",
        [left, left_weight, right, right_weight],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit(do_not_specialize=["count", "longest", "table_stride", "columns"])
def _score_kernel(
    queries,
    query_scales,
    head_weights,
    keys,
    key_scales,
    page_table,
    positions,
    sequence_ids,
    scores,
    maxima,
    first,
    count,
    programs,
    longest,
    table_stride,
    capacity,
    query_stride,
    weight_stride,
    columns,
    page_stride,
    scale_stride,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNIFORM: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    TOPK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A fixed number of programs shares out the key tiles of all groups; the lengths are read here, so the time follows
    them. A score depends on its own key and token only: however the tiles are shared out, the bits are the same."""
    GROUP: tl.constexpr = 8
    tiles = _group_tiles(positions, first, count, RATIO, MEMBERS, TOKENS, GROUPS_PADDED, TILE, TOPK)
    quota = _quota(tiles, programs)
    splits = tl.cdiv(tiles, quota)
    ends = tl.cumsum(splits, 0)
    units = tl.sum(splits)
    numbers = tl.arange(0, GROUPS_PADDED)
    for unit in range(tl.program_id(0), units, programs):
        group = tl.sum((ends <= unit).to(tl.int32))
        mine = numbers == group
        group_tiles, group_splits = tl.sum(tl.where(mine, tiles, 0)), tl.sum(tl.where(mine, splits, 0))
        split = unit - (tl.sum(tl.where(mine, ends, 0)) - group_splits)
        begin, end = split * group_tiles // group_splits, (split + 1) * group_tiles // group_splits

        # What the group's tokens ask for: columns n = (token, head).
        column = tl.arange(0, TOKENS * HEADS_PADDED)
        local = group * MEMBERS + column // HEADS_PADDED
        head = column % HEADS_PADDED
        real = (column // HEADS_PADDED < MEMBERS) & (local < count) & (head < HEADS)
        token = (first + local).to(tl.int64)
        channel = tl.arange(0, DIM)
        query = tl.load(
            queries + token[:, None] * query_stride + head[:, None] * DIM + channel[None, :], mask=real[:, None], other=0.0
        )
        weight = tl.load(head_weights + token * weight_stride + head, mask=real, other=0.0).to(tl.float32)
        if SCALED:
            weight *= tl.load(query_scales + token * HEADS + head, mask=real, other=0.0)
        if WIDEN:
            query = query.to(tl.float32)
        if PACKED:
            even_query, odd_query = tl.split(tl.reshape(query, (TOKENS * HEADS_PADDED, DIM // 2, 2)))

        member = tl.arange(0, TOKENS)
        member_local = group * MEMBERS + member
        member_real = (member < MEMBERS) & (member_local < count)
        member_sequence = tl.load(sequence_ids + first + member_local, mask=member_real, other=-1)
        position = tl.load(positions + first + member_local, mask=member_real, other=-1)
        member_visible = ((position + 1) // RATIO).to(tl.int32)
        score_rows = scores + member_local.to(tl.int64)[None, :] * capacity
        maximum_rows = maxima + member_local.to(tl.int64)[None, :] * (capacity // GROUP)

        last_sequence = tl.max(member_sequence)
        others = 0  # sequences that the group holds besides
        if not UNIFORM:
            others = last_sequence - tl.min(tl.where(member_real, member_sequence, last_sequence))
        for back in range(others + 1):
            sequence = last_sequence - back
            visible = tl.where(member_sequence == sequence, member_visible, 0)
            table = page_table + sequence * table_stride
            for tile in range(begin, tl.minimum(end, tl.cdiv(tl.max(visible), TILE))):
                key = tile * TILE + tl.arange(0, TILE)
                page = tl.load(table + tl.minimum(key // ROWS, columns - 1))
                if PACKED:
                    pair, block = tl.arange(0, DIM // 2), tl.arange(0, DIM // 32)
                    packed = tl.load(keys + (page * page_stride + key % ROWS * (DIM // 2))[:, None] + pair[None, :])
                    scale_at = page * scale_stride + key % ROWS * (DIM // 32)
                    even, odd, factor = unpack_keys(packed, tl.load(key_scales + scale_at[:, None] + block[None, :]))
                    dots = tl.dot(odd, tl.trans(odd_query), tl.dot(even, tl.trans(even_query)))
                else:
                    values = tl.load(keys + (page * page_stride + key % ROWS * DIM)[:, None] + channel[None, :])
                    if WIDEN:
                        values = values.to(tl.float32)
                    dots = tl.dot(values, tl.trans(query), input_precision="ieee")
                score = _weighted_sum(dots, weight, TOKENS)
                if PACKED:
                    score *= factor[:, None]
                elif SCALED:
                    score *= tl.load(key_scales + page * scale_stride + key % ROWS)[:, None]
                seen = key[:, None] < visible[None, :]
                tl.store(score_rows + key[:, None], score, mask=seen)
                best = tl.max(tl.reshape(tl.where(seen, score, float("-inf")), (TILE // GROUP, GROUP, TOKENS)), 1)
                start = tile * TILE + tl.arange(0, TILE // GROUP) * GROUP
                tl.store(maximum_rows + start[:, None] // GROUP, best, mask=start[:, None] < visible[None, :])
