"""The KV memory of one process: two uint8 tensors, and the strided views of a layout's fields in them.

On the CPU both lie in shared memory, so that the process which moves bulk bytes, and a peer on the same host, work on
the very pages that the model writes.
"""

from __future__ import annotations

import os
import weakref

import torch
from torch import Tensor

from kvtransfer.layout import Field, KVLayout
from kvtransfer.sharing import SharedMemory


class Arena:
    """`pages` uint8 [num_pages, page_bytes] and `slots` uint8 [num_slots, slot_bytes], zero-filled, on `device`.

    Whoever moves bytes sees whole pages and slots; the model sees `page_field` and `slot_field`. `shared` is the memory
    under both on the CPU, pages first; None on other devices.
    """

    def __init__(self, layout: KVLayout, num_pages: int, num_slots: int, device: str | torch.device = "cpu") -> None:
        if num_pages < 2 or num_slots < 2:
            raise ValueError("an arena needs two pages and two slots at least: number 0 of each is reserved")
        self.layout = layout
        self.shared: SharedMemory | None = None
        self._copies: torch.cuda.Stream | None = None
        if torch.device(device).type == "cpu":
            self.pages, self.slots = self._share(num_pages, num_slots)
        else:
            self.pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
            self.slots = torch.zeros(num_slots, layout.slot_bytes, dtype=torch.uint8, device=device)
        if torch.device(device).type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def page_field(self, field: Field) -> Tensor:
        """uint8 view [num_pages, rows, row_bytes] of one field of every page (strided: no copy)."""
        return _field_view(self.pages, field)

    def slot_field(self, field: Field) -> Tensor:
        """uint8 view [num_slots, rows, row_bytes] of one field of every slot (strided: no copy)."""
        return _field_view(self.slots, field)

    def copy_page(self, src: int, dst: int) -> None:
        _copy_row(self.pages, src, dst, self._copies)

    def copy_slot(self, src: int, dst: int) -> None:
        _copy_row(self.slots, src, dst, self._copies)

    def _share(self, num_pages: int, num_slots: int) -> tuple[Tensor, Tensor]:
        page_bytes, slot_bytes = num_pages * self.layout.page_bytes, num_slots * self.layout.slot_bytes
        self.shared = SharedMemory.create(page_bytes + slot_bytes)
        weakref.finalize(self, os.close, self.shared.fd)
        pages = torch.frombuffer(self.shared.map, dtype=torch.uint8, count=page_bytes)
        slots = torch.frombuffer(self.shared.map, dtype=torch.uint8, count=slot_bytes, offset=page_bytes)
        return pages.view(num_pages, -1), slots.view(num_slots, -1)


def _copy_row(memory: Tensor, src: int, dst: int, stream: torch.cuda.Stream | None) -> None:
    """Done when it returns, since both rows may be somebody else's soon. On a GPU in a stream of its own: no step in flight
    reads or writes them, so the copy need not wait for one."""
    if stream is None:
        memory[dst].copy_(memory[src])
        return
    with torch.cuda.stream(stream):
        memory[dst].copy_(memory[src])
    stream.synchronize()


def _field_view(memory: Tensor, field: Field) -> Tensor:
    row = memory[:, field.offset : field.offset + field.nbytes]
    return row.view(memory.shape[0], field.rows, field.row_bytes)
