"""The arena: views of fields are the bytes of the page or slot, and copies stay inside their page or slot."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.arena import Arena
from kvtransfer.layout import Field, KVLayout

LAYOUT = KVLayout.pack(
    256,
    page=[Field(2, "csa", 0, 64, 584, stride=4), Field(2, "csa_index", 0, 64, 132, stride=4)],
    slot=[Field(0, "window", 0, 132, 584, keep=127), Field(2, "csa_state", 0, 12, 8192, keep=4, modulo=4)],
)


def test_a_field_view_is_the_bytes_of_the_page() -> None:
    arena = Arena(LAYOUT, num_pages=4, num_slots=3)
    index = LAYOUT.find(2, "csa_index")
    view = arena.page_field(index)
    assert view.shape == (4, 64, 132) and view.dtype is torch.uint8
    view[3, 5] = 7
    start = index.offset + 5 * 132
    assert arena.pages[3, start : start + 132].eq(7).all()
    assert int(arena.pages.count_nonzero()) == 132

    state = LAYOUT.find(2, "csa_state")
    arena.slot_field(state)[2, 11, -1] = 9
    assert int(arena.slots[2, state.offset + state.nbytes - 1]) == 9
    assert int(arena.slots.count_nonzero()) == 1


def test_copies_touch_only_their_destination() -> None:
    arena = Arena(LAYOUT, num_pages=4, num_slots=3)
    arena.pages.copy_(torch.arange(4, dtype=torch.uint8)[:, None].expand_as(arena.pages))
    arena.slots.copy_(torch.arange(3, dtype=torch.uint8)[:, None].expand_as(arena.slots))
    arena.copy_page(3, 1)
    arena.copy_slot(1, 2)
    assert [int(page[0]) for page in arena.pages] == [0, 3, 2, 3]
    assert [int(slot[-1]) for slot in arena.slots] == [0, 1, 1]
    assert arena.pages[1].eq(3).all() and arena.slots[2].eq(1).all()


@pytest.mark.parametrize(("pages", "slots"), [(1, 2), (2, 1)])
def test_a_pool_of_only_the_reserved_number_is_refused(pages: int, slots: int) -> None:
    with pytest.raises(ValueError, match="reserved"):
        Arena(LAYOUT, pages, slots)
