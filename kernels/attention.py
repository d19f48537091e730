"""Sparse attention with one KV head over the recent window and compressed rows, with a sink (spec B.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ragged import Ragged
from kernels.rope import rope_reference
from kernels.rows import KVRow

QUERY_BLOCK = 64  # bounds the memory of a long chunk's gathered rows


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
    entries: Tensor | None = None,
) -> Tensor:
    """q [T, H, d] -> [T, H, d] in q's dtype, its rotary channels turned back by `turn` [T, rope/2, 2].

    A token at position p attends to the rows of p-window+1..p (from `ring` uint8 [slots, R, row_bytes] before the chunk, from
    `new_rows` uint8 [T, row_bytes] in it) and to `entries` int64 [T, K] (-1: none; equal or different per token) of its
    sequence's `pages` uint8 [pages, rows, row_bytes]. A row is key and value. sinks float32 [H] enter the denominator only.
    Softmax weights are cast to bf16 for the value product when q is bf16. `ring` must not hold the chunk yet where the chunk
    is longer than R - window.
    """
    return sparse_attention_reference(q, new_rows, batch, ring, row, window, sinks, turn, pages, entries)


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
    entries: Tensor | None,
) -> Tensor:
    recent = row.unpack(torch.cat((ring.index_select(0, batch.slots).flatten(0, 1), new_rows)))
    out = torch.empty_like(q)
    for first in range(0, len(q), QUERY_BLOCK):
        tokens = torch.arange(first, min(first + QUERY_BLOCK, len(q)), device=q.device)
        rows, seen = _window_rows(batch, recent, tokens, ring.shape[1], window)
        if pages is not None and entries is not None and entries.shape[1]:
            more, visible = _compressed_rows(batch, pages, row, tokens, entries[tokens])
            rows, seen = torch.cat((rows, more), 1), torch.cat((seen, visible), 1)
        out[tokens] = _attend(q[tokens], rows, seen, sinks)
    return rope_reference(out, turn, inverse=True)


def _window_rows(batch: Ragged, recent: Tensor, tokens: Tensor, ring_rows: int, window: int) -> tuple[Tensor, Tensor]:
    """Rows float64 [M, window, d] of each token's window and whether they exist [M, window].

    `recent` holds the B rings, then the T new rows. A row from before the sequence is the token's own: valid, and masked.
    """
    sequences, new_at = batch.sequence_ids[tokens][:, None], len(batch.slots) * ring_rows
    wanted = batch.positions[tokens][:, None] + torch.arange(1 - window, 1, device=tokens.device)
    starts = batch.starts[sequences]
    source = torch.where(
        wanted >= starts, new_at + batch.cu_tokens[sequences] + wanted - starts, sequences * ring_rows + wanted % ring_rows
    )
    seen = wanted >= 0
    source = torch.where(seen, source, new_at + tokens[:, None])
    return torch.unflatten(recent.index_select(0, source.flatten()), 0, source.shape), seen


def _compressed_rows(batch: Ragged, pages: Tensor, row: KVRow, tokens: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Rows float64 [M, K, d] of `entries` [M, K] and whether there is one; where there is none, zeros."""
    visible, rows = entries >= 0, pages.shape[1]
    entries = entries.clamp(min=0)
    page = batch.page_table[batch.sequence_ids[tokens][:, None], entries // rows]
    return row.unpack(pages[page, entries % rows]).masked_fill_(~visible[..., None], 0.0), visible


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
