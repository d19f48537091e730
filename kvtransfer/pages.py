"""Who owns which page and slot. Page 0 and slot 0 are never given out: padded rows of a captured step live there."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SeqKV:
    """A sequence's whole KV: one slot and its page table."""

    slot: int
    pages: list[int] = field(default_factory=list)


class PagePool:
    """Free pages (with reference counts) and free slots. Raises ValueError on a double release: that is a bug."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        if num_pages < 2 or num_slots < 2:
            raise ValueError("a pool needs two pages and two slots at least: number 0 of each is reserved")
        self.total_pages = num_pages - 1
        self.total_slots = num_slots - 1
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._free_slots = list(range(num_slots - 1, 0, -1))
        self._references = [0] * num_pages
        self._slot_taken = [False] * num_slots

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def counts(self) -> dict[str, int]:
        """The numbers a worker reports."""
        return {
            "free_pages": self.free_pages,
            "total_pages": self.total_pages,
            "free_slots": self.free_slots,
            "total_slots": self.total_slots,
        }

    def take_pages(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing taken) when there are not enough."""
        if count > len(self._free_pages):
            return None
        pages = [self._free_pages.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share_pages(self, pages: list[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} is free: it cannot be shared")
            self._references[page] += 1

    def drop_pages(self, pages: list[int]) -> None:
        """One reference less to each page; a page without references is free."""
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} was dropped twice")
            self._references[page] -= 1
            if not self._references[page]:
                self._free_pages.append(page)

    def references(self, page: int) -> int:
        return self._references[page]

    def take_slot(self) -> int | None:
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._slot_taken[slot] = True
        return slot

    def drop_slot(self, slot: int) -> None:
        if not self._slot_taken[slot]:
            raise ValueError(f"slot {slot} was dropped twice")
        self._slot_taken[slot] = False
        self._free_slots.append(slot)

    def take(self, tokens_pages: int) -> SeqKV | None:
        """A slot and `tokens_pages` pages, or nothing."""
        if tokens_pages > self.free_pages or not self.free_slots:
            return None
        slot, pages = self.take_slot(), self.take_pages(tokens_pages)
        assert slot is not None and pages is not None
        return SeqKV(slot, pages)

    def drop(self, kv: SeqKV) -> None:
        """Gives back a sequence's slot and its references to pages; `kv` is empty afterwards."""
        self.drop_pages(kv.pages)
        self.drop_slot(kv.slot)
        kv.pages, kv.slot = [], 0
