"""The shape of one step: sequences of different lengths, packed token after token. A prefill chunk and a decode step
are the same thing; every kernel that reads history takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend
from kernels.early import await_inputs, early
from kernels.jit import jit
from kernels.launch import launch

DECODE_TOKENS = 5  # a window ring has 4 rows more than the window: the token itself and 4 drafts


@dataclass(slots=True)
class Ragged:
    """Device tensors, all int64. T new tokens of B sequences; of their values nothing is known on the host. A captured step
    is filled up with whole sequences of `longest` tokens: T = B * longest says that all of them are that long.

    positions [T]       absolute position of every new token
    sequence_ids [T]    which of the B sequences it belongs to
    starts [B]          position of a sequence's first new token = how many tokens its history has
    cu_tokens [B+1]     where a sequence's new tokens begin in [T]
    slots [B]           the slot that holds its rings
    page_table [B, P]   its pages in order, padded with 0
    longest             most new tokens of any sequence: a number, so part of the step's shape
    """

    positions: Tensor
    sequence_ids: Tensor
    starts: Tensor
    cu_tokens: Tensor
    slots: Tensor
    page_table: Tensor
    longest: int

    @property
    def is_decode(self) -> bool:
        """A step so short that its rows can join a ring before anybody reads it: no row still needed is overwritten."""
        return self.longest <= DECODE_TOKENS


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

    A row is a multiple of 4 bytes. Call it when everybody has read the history: the rows it overwrites are gone.
    """
    if not backend.active().triton:
        store_ring_reference(batch, ring, new)
        return
    words, new_words = ring.view(torch.int32), new.contiguous().view(torch.int32)
    lasting = min(batch.longest, ring.shape[1])
    launch(
        _store_ring,
        (len(batch.slots) * lasting,),
        new_words,
        words,
        batch.starts,
        batch.cu_tokens,
        batch.slots,
        lasting,
        words.stride(0),
        RING_ROWS=ring.shape[1],
        WORDS=words.shape[2],
        BLOCK=triton.next_power_of_2(words.shape[2]),
        num_warps=1,
        **early(),
    )


def store_ring_reference(batch: Ragged, ring: Tensor, new: Tensor) -> None:
    rows = ring.shape[1]
    positions, sequences = batch.positions, batch.sequence_ids
    if len(positions) > rows:
        ends = batch.starts + batch.cu_tokens.diff()
        lasting = positions >= (ends - rows)[sequences]
        positions, sequences, new = positions[lasting], sequences[lasting], new[lasting]
    ring[batch.slots[sequences], positions % rows] = new


@jit(do_not_specialize=["lasting"])
def _store_ring(
    new_ptr,
    ring_ptr,
    starts_ptr,
    cu_tokens_ptr,
    slots_ptr,
    lasting,
    slot_stride,
    RING_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program copies one of the last `lasting` rows of one sequence, if it has so many."""
    await_inputs(EARLY)
    sequence, back = tl.program_id(0) // lasting, tl.program_id(0) % lasting
    token = tl.load(cu_tokens_ptr + sequence + 1) - 1 - back
    if token >= tl.load(cu_tokens_ptr + sequence):
        position = tl.load(starts_ptr + sequence) + token - tl.load(cu_tokens_ptr + sequence)
        at = ring_ptr + tl.load(slots_ptr + sequence) * slot_stride + position % RING_ROWS * WORDS
        word = tl.arange(0, BLOCK)
        tl.store(at + word, tl.load(new_ptr + token * WORDS + word, word < WORDS, 0), word < WORDS)


def equal_length_groups(batch: Ragged) -> list[tuple[Tensor, int]]:
    """The sequences grouped by how many new tokens they have: (sequence numbers [G], tokens each). Host-side."""
    by_length: dict[int, list[int]] = {}
    for sequence, length in enumerate(batch.cu_tokens.diff().tolist()):
        by_length.setdefault(length, []).append(sequence)
    device = batch.cu_tokens.device
    return [(torch.tensor(group, device=device), length) for length, group in by_length.items() if length]
