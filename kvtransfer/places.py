"""Which places of a destination a hand-off of so many tokens fills: the one thing sender and receiver compute alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtransfer.layout import KVLayout
from kvtransfer.spans import NBYTES, NUMBER, OFFSET, PAGE, SLOT, Places


def page_places(layout: KVLayout, pages: Sequence[int]) -> Places:
    """Whole pages, the last, partly filled one too: one span is cheaper than one per field."""
    places = np.empty((len(pages), 4), dtype=np.uint32)
    places[:] = (PAGE, 0, 0, layout.page_bytes)
    places[:, NUMBER] = pages
    return places


def slot_places(layout: KVLayout, slot: int, length: int) -> Places:
    """The rows of the slot that a sequence of `length` tokens can still read."""
    runs = layout.live_slot_spans(length)
    places = np.empty((len(runs), 4), dtype=np.uint32)
    places[:] = (SLOT, slot, 0, 0)
    places[:, [OFFSET, NBYTES]] = runs
    return places


def handoff_places(layout: KVLayout, pages: Sequence[int], slot: int, length: int) -> Places:
    """Everything that must land for `length` tokens. Raises ValueError when `pages` are too few."""
    needed = layout.pages_for(length)
    if needed > len(pages):
        raise ValueError(f"{length} tokens need {needed} pages, {len(pages)} were granted")
    return np.concatenate((page_places(layout, pages[:needed]), slot_places(layout, slot, length)))
