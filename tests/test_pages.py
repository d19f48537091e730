"""PagePool: nothing is lost, nothing is given twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.pages import PagePool, SeqKV


def test_zero_is_never_given_out() -> None:
    pool = PagePool(5, 4)
    assert (pool.total_pages, pool.total_slots) == (4, 3)
    assert sorted(pool.take_pages(4) or []) == [1, 2, 3, 4]
    assert sorted(pool.take_slot() or 0 for _ in range(3)) == [1, 2, 3]
    assert pool.take_slot() is None
    assert pool.take_pages(1) is None
    assert pool.take_pages(0) == []


@pytest.mark.parametrize(("pages", "slots"), [(1, 5), (5, 1), (0, 0)])
def test_a_pool_too_small_is_refused(pages: int, slots: int) -> None:
    with pytest.raises(ValueError, match="reserved"):
        PagePool(pages, slots)


def test_take_is_all_or_nothing() -> None:
    pool = PagePool(5, 2)
    assert pool.take(5) is None
    assert (pool.free_pages, pool.free_slots) == (4, 1)
    kv = pool.take(1)
    assert kv is not None
    assert pool.take(1) is None  # no slot
    assert pool.free_pages == 3
    pool.drop(kv)
    assert (pool.free_pages, pool.free_slots) == (4, 1)
    assert kv == SeqKV(0)


def test_double_release_is_an_error_and_changes_nothing() -> None:
    pool = PagePool(5, 3)
    pages, slot = pool.take_pages(2), pool.take_slot()
    assert pages is not None and slot is not None
    pool.drop_pages(pages)
    pool.drop_slot(slot)
    with pytest.raises(ValueError, match="twice"):
        pool.drop_pages(pages)
    with pytest.raises(ValueError, match="twice"):
        pool.drop_slot(slot)
    with pytest.raises(ValueError, match="free"):
        pool.share_pages(pages)
    assert (pool.free_pages, pool.free_slots) == (4, 2)


def test_a_shared_page_is_free_after_the_last_drop() -> None:
    pool = PagePool(3, 3)
    pages = pool.take_pages(1)
    assert pages is not None
    pool.share_pages(pages)
    assert pool.references(pages[0]) == 2
    pool.drop_pages(pages)
    assert pool.free_pages == 1
    pool.drop_pages(pages)
    assert pool.free_pages == 2


class PoolMachine(RuleBasedStateMachine):
    """Any order of takes, forks and drops against a model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9, 5)
        self.held: list[SeqKV] = []

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        fits = count <= self.pool.free_pages and self.pool.free_slots > 0
        kv = self.pool.take(count)
        assert (kv is not None) == fits
        if kv is not None:
            self.held.append(kv)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if not self.held:
            return
        parent = data.draw(st.sampled_from(self.held))
        slot = self.pool.take_slot()
        if slot is not None:
            self.pool.share_pages(parent.pages)
            self.held.append(SeqKV(slot, list(parent.pages)))

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        if self.held and (pages := self.pool.take_pages(1)):
            data.draw(st.sampled_from(self.held)).pages += pages

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.drop(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        references = [0] * 9
        for kv in self.held:
            for page in kv.pages:
                references[page] += 1
        assert references == [self.pool.references(page) for page in range(9)]
        assert self.pool.free_pages == sum(count == 0 for count in references[1:])
        slots = [kv.slot for kv in self.held]
        assert len(set(slots)) == len(slots)
        assert 0 not in slots
        assert self.pool.free_slots == self.pool.total_slots - len(slots)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
