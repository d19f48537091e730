"""The one shared structure: what the bytes of a page and of a slot are.

A *page* is a contiguous byte struct that holds `page_tokens` tokens of history for every layer; it is appended to and
never changes once full. A *slot* is a byte struct that holds what a sequence needs once, however long it is: rings
whose row for a token is ``position % rows``, so rolling back is lowering a length. Integers only; what a `kind` means
is the model's business (`model/cache.py` writes the table).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIELD_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Field:
    """`rows` rows of `row_bytes` bytes at `offset` in a page or slot.

    In a page a row stands for `stride` tokens. In a slot (stride 0) the field is a ring over positions, and of a
    sequence of N tokens the last ``min(N, keep + N % modulo)`` rows can still be read by the future.
    """

    layer: int
    kind: str
    offset: int
    rows: int
    row_bytes: int
    stride: int = 0
    keep: int = 0
    modulo: int = 1

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def live_rows(self, tokens: int) -> int:
        return min(tokens, self.keep + tokens % self.modulo)


@dataclass(frozen=True)
class KVLayout:
    """The field tables of a page and a slot; equal on both sides or there is no hand-off."""

    page_tokens: int
    page: tuple[Field, ...]
    slot: tuple[Field, ...]
    page_bytes: int
    slot_bytes: int

    @classmethod
    def pack(cls, page_tokens: int, page: Sequence[Field], slot: Sequence[Field]) -> KVLayout:
        """Gives the fields (their `offset` is ignored) their places, each aligned to 64 bytes."""
        placed_page, page_bytes = _place(page)
        placed_slot, slot_bytes = _place(slot)
        return cls(page_tokens, placed_page, placed_slot, page_bytes, slot_bytes)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def find(self, layer: int, kind: str) -> Field:
        """The page or slot field of that name. Raises KeyError when the layer has none."""
        for field in (*self.page, *self.slot):
            if field.layer == layer and field.kind == kind:
                return field
        raise KeyError(f"layer {layer} has no {kind!r}")

    def live_slot_spans(self, tokens: int, gap_bytes: int = 0) -> NDArray[np.int64]:
        """[n, 2]: offset and nbytes of the slot bytes that a sequence of `tokens` tokens can still read; neighbours are merged,
        and those with a gap of up to `gap_bytes` between them too, with what lies there."""
        offset, rows, row_bytes, keep, modulo = self._rings
        live = np.minimum(tokens, keep + tokens % modulo)
        if not live.any():
            return np.empty((0, 2), dtype=np.int64)
        first = (tokens - live) % rows
        head = np.minimum(live, rows - first)
        runs = np.empty((len(live), 2, 2), dtype=np.int64)  # a wrapped ring is two, in offset order: where they begin and end
        runs[:, 0, 0], runs[:, 1, 0] = offset, offset + first * row_bytes
        runs[:, 0, 1], runs[:, 1, 1] = offset + (live - head) * row_bytes, offset + (first + head) * row_bytes
        begins, ends = runs[runs[:, :, 0] < runs[:, :, 1]].T
        apart = begins[1:] - ends[:-1] > gap_bytes
        begins, ends = begins[np.append(True, apart)], ends[np.append(apart, True)]
        return np.stack((begins, ends - begins), 1)

    @cached_property
    def _rings(self) -> NDArray[np.int64]:
        """[5, fields of a slot]: offset, rows, row_bytes, keep and modulo of each."""
        rings = [(field.offset, field.rows, field.row_bytes, field.keep, field.modulo) for field in self.slot]
        return np.array(rings, dtype=np.int64).reshape(-1, 5).T

    def identity(self) -> dict[str, Any]:
        """What both sides must agree on, field by field, in the words of an operator."""
        kinds: dict[str, list[int]] = {}
        for field in (*self.page, *self.slot):
            kinds.setdefault(f"{field.kind}_rows", [0, field.rows, field.row_bytes])[0] += 1
        return {
            "page_tokens": self.page_tokens,
            **{name: f"{count} x {rows} x {row_bytes} B" for name, (count, rows, row_bytes) in kinds.items()},
            "page_bytes": self.page_bytes,
            "slot_bytes": self.slot_bytes,
            "layout": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        """A digest of every field of the table."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The first field in which two identities differ, as "name: ours x, theirs y"; empty when they agree."""
    for name in [*ours, *(key for key in theirs if key not in ours)]:
        if ours.get(name) != theirs.get(name):
            return f"{name}: {ours.get(name)!r} and {theirs.get(name)!r}"
    return ""


def identity_fingerprint(identity: dict[str, Any]) -> str:
    """A digest of a whole identity (layout and model): what an Offer carries, so that each hand-off is checked too."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _place(fields: Sequence[Field]) -> tuple[tuple[Field, ...], int]:
    placed, offset = [], 0
    for field in fields:
        placed.append(replace(field, offset=offset))
        offset = -(-(offset + field.nbytes) // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
    return tuple(placed), offset
