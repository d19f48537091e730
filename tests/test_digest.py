"""The digest of a hand-off: independent of order, sensitive to everything else."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.digest import SpanDigests, chunk_digest, combine, span_digest
from kvtransfer.spans import PAGE, SLOT

BASE: dict[str, Any] = {"key": (5, 1), "kind": PAGE, "number": 3, "offset": 64, "data": b"some bytes of a page"}


@pytest.mark.parametrize(
    "change",
    [
        {"key": (6, 1)},
        {"key": (5, 2)},
        {"key": (1, 5)},
        {"kind": SLOT},
        {"number": 4},
        {"offset": 0},
        {"data": b"some bytes of a pagf"},
        {"data": b"some bytes of a pag"},
        {"data": b"some bytes of a page\0"},
    ],
    ids=repr,
)
def test_everything_that_matters_changes_it(change: dict[str, Any]) -> None:
    assert span_digest(**{**BASE, **change}) != span_digest(**BASE)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4), st.binary(min_size=1, max_size=9))
def test_it_may_be_made_piece_by_piece(data: bytes, cuts: list[int], other: bytes) -> None:
    key, edges = (5, 1), sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    digests = SpanDigests(key)
    digests.begin((SLOT, 1, 8, len(other)))(other)
    show = digests.begin((PAGE, 3, 64, len(data)))
    for begin, end in itertools.pairwise(edges):
        show(np.frombuffer(data, dtype=np.uint8)[begin:end])
    expected = [span_digest(key, SLOT, 1, 8, other), span_digest(key, PAGE, 3, 64, data)]
    assert digests.combined() == combine(expected)


def test_two_pages_that_change_places_change_the_sum() -> None:
    right = combine(span_digest((1, 0), PAGE, number, 0, data) for number, data in ((1, b"one"), (2, b"two")))
    wrong = combine(span_digest((1, 0), PAGE, number, 0, data) for number, data in ((2, b"one"), (1, b"two")))
    assert right != wrong


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.randoms(use_true_random=False))
def test_order_and_grouping_do_not_matter(digests: list[int], shuffler: random.Random) -> None:
    shuffled = list(digests)
    shuffler.shuffle(shuffled)
    cut = shuffler.randint(0, len(digests))
    assert combine(digests) == combine(shuffled) == combine((combine(shuffled[:cut]), combine(shuffled[cut:])))
    assert 0 <= combine(digests) < 2**64
    assert combine(()) == 0


@given(st.integers(0, 999), st.integers(0, 7))
def test_any_flipped_bit_changes_it(position: int, bit: int) -> None:
    data = bytearray(range(250)) * 4
    before = span_digest((1, 0), PAGE, 1, 0, bytes(data))
    data[position] ^= 1 << bit
    assert span_digest((1, 0), PAGE, 1, 0, bytes(data)) != before


CHUNK: dict[str, Any] = {"key": (5, 1), "places": [(PAGE, 3, 0, 64), (SLOT, 1, 8, 12)], "sums": bytes(range(16))}


def test_what_stands_for_a_chunk_is_of_its_places_and_whose_it_is() -> None:
    def digest(**change: Any) -> int:
        chunk = {**CHUNK, **change}
        return chunk_digest(chunk["key"], np.array(chunk["places"], dtype=np.uint32), chunk["sums"])

    places = [
        CHUNK["places"][::-1],
        *([(PAGE, 3, 0, 64), changed] for changed in ((PAGE, 1, 8, 12), (SLOT, 2, 8, 12), (SLOT, 1, 0, 12), (SLOT, 1, 8, 16))),
    ]
    changes: list[dict[str, Any]] = [
        {"key": (6, 1)},
        {"key": (5, 2)},
        {"key": (1, 5)},
        {"sums": bytes(16)},
        *({"places": each} for each in places),
    ]
    assert len({digest(), *(digest(**change) for change in changes)}) == 1 + len(changes)


def test_it_is_xxh3_of_the_bytes_seeded_by_the_place_in_any_buffer() -> None:
    data = np.arange(200, dtype=np.uint8)
    place = (
        b"".join(n.to_bytes(8, "little") for n in (2**64 - 1, 1)) + b"\x01" + b"".join(n.to_bytes(8, "little") for n in (3, 64))
    )
    expected = xxhash.xxh3_64_intdigest(data.tobytes(), xxhash.xxh3_64_intdigest(place))
    assert span_digest((2**64 - 1, 1), PAGE, 3, 64, data.data) == expected
    assert span_digest((2**64 - 1, 1), PAGE, 3, 64, data.tobytes()) == expected
