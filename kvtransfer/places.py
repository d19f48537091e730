"""Which places of a destination a hand-off of so many tokens fills: the one thing sender and receiver compute alike."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.layout import KVLayout
from kvtransfer.transports import Place


def page_places(layout: KVLayout, pages: Sequence[int]) -> list[Place]:
    """Whole pages, the last, partly filled one too: one span is cheaper than one per field."""
    return [("page", page, 0, layout.page_bytes) for page in pages]


def slot_places(layout: KVLayout, slot: int, length: int) -> list[Place]:
    """The rows of the slot that a sequence of `length` tokens can still read."""
    return [("slot", slot, offset, nbytes) for offset, nbytes in layout.live_slot_spans(length)]


def handoff_places(layout: KVLayout, pages: Sequence[int], slot: int, length: int) -> list[Place]:
    """Everything that must land for `length` tokens. Raises ValueError when `pages` are too few."""
    needed = layout.pages_for(length)
    if needed > len(pages):
        raise ValueError(f"{length} tokens need {needed} pages, {len(pages)} were granted")
    return page_places(layout, pages[:needed]) + slot_places(layout, slot, length)
