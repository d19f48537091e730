"""Ids to text and back: equal to `tokenizers`, never a broken character, stop strings wherever tokens cut them."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from router.text import StopStrings, TextStream, Tokenizer, TokenizerError
from scripts.tiny_tokenizer import VOCAB_SIZE, build

FOLDER = Path(__file__).parent / "data" / "tokenizer"
TOKENIZER = Tokenizer(FOLDER)
REFERENCE = Reference.from_file(str(FOLDER / "tokenizer.json"))
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
STORY = "naïve 日本語 😀👩‍👩‍👧 中文 the end\n"


def test_the_bundled_tokenizer_is_what_its_script_makes_and_fits_the_tiny_models() -> None:
    assert json.loads((FOLDER / "tokenizer.json").read_text()) == json.loads(build().to_str())
    assert TOKENIZER.size == VOCAB_SIZE == 320
    assert [TOKENIZER.token_id(name) for name in ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")] == [0, 1]
    for name in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜action｜>"):
        assert TOKENIZER.encode(name) == [TOKENIZER.token_id(name)]


@given(IDS)
@example([163, 183, 163])  # bytes that are no character, at the end and before another
@settings(max_examples=300, deadline=None)
def test_decoding_equals_tokenizers_for_any_ids(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == REFERENCE.decode(ids, skip_special_tokens=True)
    assert TOKENIZER.decode(ids, skip_special=False) == REFERENCE.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=30))
@example(STORY)
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_whole_characters_all_the_way(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == REFERENCE.encode(text, add_special_tokens=False).ids
    stream, shown = TextStream(TOKENIZER.shown), ""
    for token_id in ids:
        shown += stream.feed(token_id)
        assert text.startswith(shown)  # so no replacement character stood for a part of one
    assert shown + stream.finish() == text


def test_an_unfinished_character_at_the_end_becomes_a_replacement_character() -> None:
    ids = TOKENIZER.encode("a😀")[:-1]
    assert TOKENIZER.decode(ids) == "a\ufffd" == REFERENCE.decode(ids)


def test_a_special_token_between_the_bytes_of_a_character_does_not_break_it() -> None:
    first, *rest = TOKENIZER.encode("日")
    assert TOKENIZER.decode([first, 0, *rest]) == "日"


def test_an_id_beyond_the_tokenizer_has_no_text() -> None:
    assert TOKENIZER.decode([*TOKENIZER.encode("ab"), 5000]) == "ab"
    assert TOKENIZER.token_text(5000) == "token_id:5000"


def test_tokens_that_are_no_characters_are_shown_as_bytes() -> None:
    first = TOKENIZER.encode("日")[0]
    assert TOKENIZER.token_text(first) == "bytes:\\xe6"
    assert TOKENIZER.token_text(0) == "<｜begin▁of▁sentence｜>"


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, shown = StopStrings(stops), ""
    for piece in pieces:
        text, hit = matcher.feed(piece)
        shown += text
        if hit:
            return shown, True
    return shown + matcher.flush(), False


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_at_the_same_place_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert feed(stops, pieces) == feed(stops, list(text))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    shown, hit = feed(stops, pieces)
    assert hit == bool(ends)
    if hit:
        assert any(text[: min(ends)] == shown + stop for stop in stops)


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["END", "\n\n"])
    assert matcher.feed("the E") == ("the ", False)
    assert matcher.feed("N") == ("", False)
    assert matcher.feed("x") == ("ENx", False)
    assert matcher.feed("\n") == ("", False)
    assert matcher.feed("\n!") == ("", True)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}', "\xff"])
def test_a_broken_tokenizer_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a usable"):
        Tokenizer(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    spec = json.loads((FOLDER / "tokenizer.json").read_text()) | {"decoder": {"type": "Fuse"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TokenizerError, match="only byte-level"):
        Tokenizer(tmp_path)


SPEC = json.loads((FOLDER / "tokenizer.json").read_text())


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"added_tokens": [SPEC["added_tokens"][0] | {"lstrip": True}, *SPEC["added_tokens"][1:]]},
        {"truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}},
    ],
)
def test_a_tokenizer_that_may_drop_text_gives_no_bound_on_its_length(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(SPEC | change))
    assert Tokenizer(tmp_path).longest_bytes == math.inf
    (tmp_path / "tokenizer.json").write_text(json.dumps(SPEC | {"normalizer": {"type": "Sequence", "normalizers": []}}))
    assert Tokenizer(tmp_path).longest_bytes == TOKENIZER.longest_bytes < math.inf


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_text_is_longer_than_its_tokens_can_hold(text: str) -> None:
    assert len(text.encode()) <= len(TOKENIZER.encode(text)) * TOKENIZER.longest_bytes
