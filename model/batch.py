"""Batch: the tensors of one step. A prefill chunk and a decode step are the same class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ragged import Ragged

TABLE_STEP = 16  # a page table is that many pages wide or a multiple: the compiler knows widths by what divides them


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's new tokens: `start` is the position of tokens[0], `pages` cover start + len(tokens) tokens."""

    tokens: Sequence[int]
    start: int
    slot: int
    pages: Sequence[int]


@dataclass(slots=True)
class Batch(Ragged):
    """A Ragged and its token ids, `tokens` int64 [T]."""

    tokens: Tensor

    @classmethod
    def build(cls, rows: Sequence[Row], page_tokens: int, device: str | torch.device = "cpu") -> Batch:
        """Packs the rows. Raises ValueError when a row is empty or its pages are too few: a write would go elsewhere."""
        if not rows:
            raise ValueError("a batch needs one row at least")
        for row in rows:
            needed = -(-(row.start + len(row.tokens)) // page_tokens)
            if not row.tokens or row.start < 0:
                raise ValueError(f"slot {row.slot}: a row needs one token at least and a start of 0 or more")
            if len(row.pages) < needed:
                raise ValueError(f"slot {row.slot}: {needed} pages are needed and {len(row.pages)} were given")
        lengths = [len(row.tokens) for row in rows]
        cu_tokens = [0]
        for length in lengths:
            cu_tokens.append(cu_tokens[-1] + length)
        widest = -(-max(len(row.pages) for row in rows) // TABLE_STEP) * TABLE_STEP

        def tensor(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

        return cls(
            tokens=tensor([token for row in rows for token in row.tokens]),
            positions=tensor([position for row in rows for position in range(row.start, row.start + len(row.tokens))]),
            sequence_ids=tensor([sequence for sequence, length in enumerate(lengths) for _ in range(length)]),
            starts=tensor([row.start for row in rows]),
            cu_tokens=tensor(cu_tokens),
            slots=tensor([row.slot for row in rows]),
            page_table=tensor([[*row.pages, *[0] * (widest - len(row.pages))] for row in rows]),
            longest=max(lengths),
        )
