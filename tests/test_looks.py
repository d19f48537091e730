"""Digests that copying threads make behind the engine, as where cores are free: the same as its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.digest import combine
from kvtransfer.transports import Landed, Wrote, looks
from kvtransfer.transports.connection import pieces
from kvtransfer.transports.looks import Looks, plain_digests
from kvtransfer.transports.memory import TASK_BYTES
from tests.test_gpu_link import MIB, large_arena, page_span
from tests.transfer_rig import collect, of_type, place_table, table, thread_transport

KEY = (7, 0)
SIZES = [MIB, 4, 300_000, TASK_BYTES + 8, 12, MIB]  # in whole words; a task's and more, and pieces of several


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "CORES_FREE", True)


@pytest.mark.usefixtures("free_cores")
@pytest.mark.parametrize("sums", [False, True], ids=["bytes", "sums"])
def test_threads_come_to_the_same_digest(sums: bool) -> None:
    places = place_table(("page", number, 0, size) for number, size in enumerate(SIZES, 1))
    generator = np.random.default_rng(1)
    data = [generator.integers(0, 256, size, dtype=np.uint8) for size in SIZES]
    plain, threaded = plain_digests(KEY, places, sums), Looks(KEY, places, sums)
    for place, whole in zip(places.tolist(), data, strict=True):
        plain.begin(place)(whole)
        show = threaded.begin(place, whole)
        for piece in pieces(whole):
            show(piece)
    threaded.result()
    assert threaded.over() and threaded.combined() == plain.combined()


@pytest.mark.usefixtures("free_cores")
@pytest.mark.parametrize("flip", [False, True], ids=["right", "flipped"])
def test_a_hand_off_is_looked_at_by_threads(monkeypatch: pytest.MonkeyPatch, flip: bool) -> None:
    source, target = large_arena(20, seed=1), large_arena(20, seed=2)
    sender, receiver = thread_transport(source), thread_transport(target)
    told, look = list[int](), looks._look

    def spoilt(shown: Any) -> None:
        told.append(len(shown))
        if flip and 0 <= shown[0][1].ctypes.data - target.pages[1].data_ptr() < MIB:
            target.pages[1, 5] = 77
        look(shown)

    source.pages[1, 5] = 1
    monkeypatch.setattr(looks, "_look", spoilt)
    receiver.expect(KEY, 1, list(range(1, 20)))
    sender.write(receiver.address(), KEY, table([page_span(page, page, MIB) for page in range(1, 20)]))
    (wrote,) = collect(sender, len)
    landed = collect(receiver, lambda events: sum(len(event.places) for event in of_type(events, Landed)) == 19)
    assert isinstance(wrote, Wrote) and sum(told) == 2 * 19, "each page at each end"
    same = combine(event.digest for event in of_type(landed, Landed)) == wrote.digest
    assert torch.equal(source.pages[1:], target.pages[1:]) != flip and same != flip
    sender.close()
    receiver.close()
