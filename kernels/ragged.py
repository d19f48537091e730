"""The shape of one step: sequences of different lengths, packed token after token. A prefill chunk and a decode step
are the same thing; every kernel that reads history takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Ragged:
    """Device tensors, all int64. T new tokens of B sequences; nothing about them is known on the host.

    positions [T]       absolute position of every new token
    sequence_ids [T]    which of the B sequences it belongs to
    starts [B]          position of a sequence's first new token = how many tokens its history has
    cu_tokens [B+1]     where a sequence's new tokens begin in [T]
    slots [B]           the slot that holds its rings
    page_table [B, P]   its pages in order, padded with 0
    """

    positions: Tensor
    sequence_ids: Tensor
    starts: Tensor
    cu_tokens: Tensor
    slots: Tensor
    page_table: Tensor


def gather_history(batch: Ragged, ring: Tensor, new: Tensor, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Rows of `wanted` positions [M, L] of the sequences that `tokens` [M] belong to: [M, L, width].

    Positions of before the chunk come from `ring` [slots, R, width] (row = position % R), those of the chunk from
    `new` [T, width]. A position below 0 gives some valid row of the chunk: mask it.
    """
    sequences = batch.sequence_ids[tokens]
    from_chunk = wanted - (batch.starts - batch.cu_tokens[:-1])[sequences][:, None]
    in_ring = (wanted >= 0) & (wanted < batch.starts[sequences][:, None])
    fresh = new[torch.where(in_ring | (wanted < 0), tokens[:, None], from_chunk)]
    old = ring[batch.slots[sequences][:, None], wanted.clamp(min=0) % ring.shape[1]]
    return torch.where(in_ring[..., None], old, fresh)


def store_ring(batch: Ragged, ring: Tensor, new: Tensor) -> None:
    """Writes `new` [T, width] into `ring` [slots, R, width]; of a chunk longer than the ring only the last R rows.

    Call it when everybody has read the history: the rows it overwrites are gone.
    """
    rows = ring.shape[1]
    positions, sequences = batch.positions, batch.sequence_ids
    if len(positions) > rows:
        ends = batch.starts + batch.cu_tokens.diff()
        lasting = positions >= (ends - rows)[sequences]
        positions, sequences, new = positions[lasting], sequences[lasting], new[lasting]
    ring[batch.slots[sequences], positions % rows] = new


def equal_length_groups(batch: Ragged) -> list[tuple[Tensor, int]]:
    """The sequences grouped by how many new tokens they have: (sequence numbers [G], tokens each). Host-side."""
    by_length: dict[int, list[int]] = {}
    for sequence, length in enumerate(batch.cu_tokens.diff().tolist()):
        by_length.setdefault(length, []).append(sequence)
    device = batch.cu_tokens.device
    return [(torch.tensor(group, device=device), length) for length, group in by_length.items() if length]
