"""Which places of a destination a hand-off of so many tokens fills: the one thing sender and receiver compute alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtransfer.layout import KVLayout
from kvtransfer.spans import NBYTES, NUMBER, OFFSET, PAGE, SLOT, Places

# Dead rows between live ones that are sent along: reading, putting and digesting one more span took 5 to 8 us of the CPU where
# it was measured, over shared memory as over ZeroMQ, and that moves 6 to 8 KiB. They hold what an earlier request left there,
# as the tail of a last page does, on a worker from which decode takes any request's KV; nobody reads either of them.
GAP_BYTES = 4096


def page_places(layout: KVLayout, pages: Sequence[int]) -> Places:
    """Whole pages, the last, partly filled one too: one span is cheaper than one per field."""
    places = np.empty((len(pages), 4), dtype=np.uint32)
    places[:] = (PAGE, 0, 0, layout.page_bytes)
    places[:, NUMBER] = pages
    return places


def slot_places(layout: KVLayout, slot: int, length: int) -> Places:
    """The rows of the slot that a sequence of `length` tokens can still read, and short gaps between them."""
    runs = layout.live_slot_spans(length, GAP_BYTES)
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
