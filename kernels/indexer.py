"""The lightning indexer: which compressed rows a token attends to (spec B.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ragged import Ragged, equal_length_groups
from kernels.rows import IndexRow

QUERY_BLOCK = 64  # bounds the memory of a long chunk's scores


def select_entries(
    queries: Tensor, head_weights: Tensor, batch: Ragged, pages: Tensor, row: IndexRow, ratio: int, topk: int
) -> Tensor:
    """queries [T, heads, dim] (turned and rounded as `row` says), head_weights [T, heads] -> entries int64 [T, k].

    score(w) = sum_h head_weight_h * relu(query_h . key_w), rounded to the queries' dtype. The `topk` best of the entries
    a token may see, w < (position + 1) // ratio, in ascending order and filled up with -1 at the end; the lower entry wins
    a tie. k is at most topk. pages uint8 [pages, rows, row_bytes]: entry w is row w % rows of page w // rows.
    """
    return select_entries_reference(queries, head_weights, batch, pages, row, ratio, topk)


def select_entries_reference(
    queries: Tensor, head_weights: Tensor, batch: Ragged, pages: Tensor, row: IndexRow, ratio: int, topk: int
) -> Tensor:
    visible = (batch.positions + 1) // ratio
    width = int(visible.max())
    if width <= topk:
        return every_entry_reference(batch, ratio)
    chosen = torch.empty(len(queries), topk, dtype=torch.int64, device=queries.device)
    for sequences, length in equal_length_groups(batch):
        tokens = batch.cu_tokens[sequences][:, None] + torch.arange(length, device=queries.device)
        keys = _keys(batch, pages, row, sequences, width)
        for block in torch.split(tokens, QUERY_BLOCK, 1):
            scores = _scores(queries[block], head_weights[block], keys)
            chosen[block] = _best(scores, visible[block], topk)
    return chosen


def every_entry(batch: Ragged, ratio: int) -> Tensor:
    """All entries that each token may see: int64 [T, K], filled up with -1; K is the largest number of them."""
    return every_entry_reference(batch, ratio)


def every_entry_reference(batch: Ragged, ratio: int) -> Tensor:
    visible = (batch.positions + 1) // ratio
    entries = torch.arange(int(visible.max()), device=visible.device)
    return torch.where(entries < visible[:, None], entries, -1)


def _keys(batch: Ragged, pages: Tensor, row: IndexRow, sequences: Tensor, width: int) -> Tensor:
    """The first `width` keys of each sequence, float64 [G, dim, width]."""
    rows = pages.shape[1]
    table = batch.page_table[sequences, : -(-width // rows)]
    return row.unpack(pages[table].flatten(1, 2)[:, :width]).transpose(1, 2)


def _scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """queries [G, n, heads, dim], keys [G, dim, W] -> [G, n, W] float64 that holds values of the queries' dtype."""
    dtype = queries.dtype
    dots = torch.bmm(queries.double().flatten(1, 2), keys).to(dtype).relu_()
    weighted = torch.unflatten(dots, 1, queries.shape[1:3]).mul_(head_weights[..., None])
    return weighted.double().sum(2).to(dtype).double()


def _best(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """The entries of the `topk` largest visible scores [G, n, W], ascending, then -1."""
    hidden = torch.arange(scores.shape[-1], device=scores.device) >= visible[..., None]
    order = torch.sort(scores.masked_fill(hidden, -torch.inf), descending=True, stable=True).indices[..., :topk]
    order = order.masked_fill(order >= visible[..., None], scores.shape[-1]).sort().values
    return order.masked_fill(order == scores.shape[-1], -1)
