"""KVLayout: places, live spans by brute force, identity."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout import FIELD_ALIGNMENT, Field, KVLayout, difference, identity_fingerprint

PAGE = [Field(0, "csa", 0, 64, 584, 4), Field(1, "hca", 0, 2, 584, 128)]
SLOT = [Field(0, "window", 0, 132, 584, keep=128), Field(1, "state", 0, 132, 48, keep=0, modulo=128)]
LAYOUT = KVLayout.pack(256, PAGE, SLOT)


@st.composite
def ring(draw: st.DrawFn) -> Field:
    """A slot field whose ring holds all rows that may be alive, as the model's tables must."""
    keep, modulo = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    rows = draw(st.integers(max(1, keep + modulo - 1), keep + modulo + 4))
    return Field(
        draw(st.integers(0, 3)), draw(st.sampled_from("abc")), 0, rows, draw(st.integers(1, 70)), keep=keep, modulo=modulo
    )


def live_bytes(layout: KVLayout, tokens: int) -> set[int]:
    """Byte by byte: every position that is still alive writes its row."""
    alive: set[int] = set()
    for field in layout.slot:
        for position in range(tokens):
            if position >= tokens - (field.keep + tokens % field.modulo):
                start = field.offset + position % field.rows * field.row_bytes
                alive.update(range(start, start + field.row_bytes))
    return alive


@given(st.lists(ring(), max_size=4), st.integers(0, 60))
@settings(max_examples=400, deadline=None)
def test_live_slot_spans_are_the_live_bytes(fields: list[Field], tokens: int) -> None:
    layout = KVLayout.pack(4, [], fields)
    spans = layout.live_slot_spans(tokens)
    covered = [byte for offset, nbytes in spans for byte in range(offset, offset + nbytes)]
    assert sorted(covered) == sorted(set(covered)), "a byte is sent twice"
    assert set(covered) == live_bytes(layout, tokens)
    assert all(nbytes > 0 for _, nbytes in spans)
    assert all(offset + nbytes <= layout.slot_bytes for offset, nbytes in spans)
    assert all(a + n != b for (a, n), (b, _) in pairwise(spans)), "neighbours are merged"


@given(st.lists(ring(), max_size=4), st.integers(0, 60), st.integers(0, 400))
@settings(max_examples=400, deadline=None)
def test_short_gaps_are_closed_and_no_others(fields: list[Field], tokens: int, gap_bytes: int) -> None:
    layout = KVLayout.pack(4, [], fields)
    live, joined = live_bytes(layout, tokens), layout.live_slot_spans(tokens, gap_bytes).tolist()
    covered = {byte for offset, nbytes in joined for byte in range(offset, offset + nbytes)}
    assert live <= covered
    edges = sorted(live)
    gaps = {byte for a, b in pairwise(edges) if b - a - 1 <= gap_bytes for byte in range(a + 1, b)}
    assert covered == live | gaps
    assert all(b - a - n > gap_bytes for (a, n), (b, _) in pairwise(joined))


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 131, 132, 133, 255, 256, 257, 1000, 131_072])
def test_live_slot_spans_at_the_models_sizes(tokens: int) -> None:
    spans = LAYOUT.live_slot_spans(tokens)
    covered = [byte for offset, nbytes in spans for byte in range(offset, offset + nbytes)]
    assert len(covered) == len(set(covered))
    low = max(0, tokens - 1000)  # rows of older positions are overwritten by newer ones
    expected: set[int] = set()
    for field in LAYOUT.slot:
        for position in range(low, tokens):
            if position >= tokens - field.live_rows(tokens):
                start = field.offset + position % field.rows * field.row_bytes
                expected.update(range(start, start + field.row_bytes))
    assert set(covered) == expected


@given(st.lists(ring(), max_size=5))
def test_fields_are_aligned_and_do_not_overlap(fields: list[Field]) -> None:
    layout = KVLayout.pack(4, fields, fields)
    assert layout.page == layout.slot
    end = 0
    for field in layout.page:
        assert field.offset % FIELD_ALIGNMENT == 0
        assert field.offset >= end
        end = field.offset + field.nbytes
    assert layout.page_bytes >= end
    assert layout.page_bytes % FIELD_ALIGNMENT == 0


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert LAYOUT.pages_for(tokens) == pages


def test_find() -> None:
    assert LAYOUT.find(1, "hca").row_bytes == 584
    assert LAYOUT.find(0, "window") is LAYOUT.slot[0]
    with pytest.raises(KeyError, match="layer 7 has no 'window'"):
        LAYOUT.find(7, "window")


CHANGES = [{"rows": 65}, {"row_bytes": 585}, {"stride": 8}, {"keep": 1}, {"modulo": 2}, {"kind": "x"}, {"layer": 5}]


@pytest.mark.parametrize("change", CHANGES, ids=repr)
def test_fingerprint_sees_every_property_of_every_field(change: dict[str, object]) -> None:
    for which in range(2):
        page = [replace(field, **change) if i == which else field for i, field in enumerate(PAGE)]  # type: ignore[arg-type]
        slot = [replace(field, **change) if i == which else field for i, field in enumerate(SLOT)]  # type: ignore[arg-type]
        prints = {layout.fingerprint() for layout in (LAYOUT, KVLayout.pack(256, page, SLOT), KVLayout.pack(256, PAGE, slot))}
        assert len(prints) == 3
    assert KVLayout.pack(128, PAGE, SLOT).fingerprint() != LAYOUT.fingerprint()
    assert KVLayout.pack(256, PAGE, SLOT).fingerprint() == LAYOUT.fingerprint()


def test_difference_names_the_field_and_both_values() -> None:
    ours = LAYOUT.identity()
    assert difference(ours, LAYOUT.identity()) == ""
    theirs = KVLayout.pack(128, PAGE, SLOT).identity()
    assert difference(ours, theirs) == "page_tokens: 256 and 128"
    fewer = KVLayout.pack(256, PAGE[:1], SLOT).identity()
    assert difference(ours, fewer).startswith("hca_rows: '1 x 2 x 584 B' and None")
    assert difference(fewer, ours) != ""
    narrow = KVLayout.pack(256, [replace(PAGE[0], row_bytes=512), PAGE[1]], SLOT).identity()
    assert difference(ours, narrow).startswith("csa_rows: '1 x 64 x 584 B' and '1 x 64 x 512 B'")


def test_difference_sees_what_only_they_have() -> None:
    assert difference({"a": 1}, {"a": 1, "b": 2}) == "b: None and 2"


def test_identity_fingerprint_follows_the_identity() -> None:
    identity = LAYOUT.identity()
    assert identity_fingerprint(identity) == identity_fingerprint(dict(reversed(identity.items())))
    assert identity_fingerprint(identity) != identity_fingerprint({**identity, "kv_dtype": "fp8"})
