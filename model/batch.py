"""Batch: the tensors of one step. A prefill chunk and a decode step are the same class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ragged import Ragged

ALIGNED = 16  # numbers; each part of an upload begins where the compiler takes it for aligned
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
        lengths = torch.tensor([len(row.tokens) for row in rows])
        starts = torch.tensor([row.start for row in rows])
        widest = -(-max(len(row.pages) for row in rows) // TABLE_STEP) * TABLE_STEP
        sequence_ids = torch.arange(len(rows)).repeat_interleave(lengths)
        cu_tokens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        parts = {
            "tokens": torch.tensor([token for row in rows for token in row.tokens]),
            "positions": torch.arange(len(sequence_ids)) + (starts - cu_tokens[:-1])[sequence_ids],
            "sequence_ids": sequence_ids,
            "starts": starts,
            "cu_tokens": cu_tokens,
            "slots": torch.tensor([row.slot for row in rows]),
            "page_table": torch.tensor([[*row.pages, *[0] * (widest - len(row.pages))] for row in rows]),
        }
        return cls(**upload(parts, torch.device(device)), longest=int(lengths.max()))


def upload(parts: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """int64 host tensors on `device`, in one copy. For a GPU through pinned memory, so that nobody waits for it; torch keeps
    that memory until it is read."""
    packed = torch.zeros(sum(map(_room, parts.values())), dtype=torch.int64, pin_memory=device.type == "cuda")
    for part, place in zip(parts.values(), _places(packed, parts), strict=True):
        place.copy_(part)
    return dict(zip(parts, _places(packed.to(device, non_blocking=True), parts), strict=True))


def _places(packed: Tensor, parts: dict[str, Tensor]) -> list[Tensor]:
    places = torch.split(packed, [_room(part) for part in parts.values()])
    return [place[: part.numel()].view(part.shape) for part, place in zip(parts.values(), places, strict=True)]


def _room(part: Tensor) -> int:
    return -(-part.numel() // ALIGNED) * ALIGNED
