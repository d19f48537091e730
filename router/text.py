"""Between text and token ids: the byte-level tokenizer, text that grows token by token, and stop strings."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class TokenizerError(ValueError):
    """The tokenizer file cannot be used; the text says why."""


_Utf8 = codecs.getincrementaldecoder("utf-8")


class Table:
    """id -> bytes, and id -> text for the ids whose bytes are whole characters (None for the others)."""

    __slots__ = ("pieces", "texts")

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.texts = [_whole_characters(piece) for piece in pieces]


class Tokenizer:
    """A byte-level BPE `tokenizer.json`. Encoding is the `tokenizers` library's, decoding our own table."""

    def __init__(self, path: Path) -> None:
        """Raises TokenizerError when the file is missing, broken or not byte-level."""
        from tokenizers import Tokenizer as Encoder

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            raw = file.read_text(encoding="utf-8")
            spec = json.loads(raw)
            self._encoder: Any = Encoder.from_str(raw)
        except Exception as error:  # `tokenizers` raises plain Exception on a file it cannot read
            raise TokenizerError(f"{file}: not a usable tokenizer.json: {error}") from error
        if (spec.get("decoder") or {}).get("type") != "ByteLevel":
            raise TokenizerError(f"{file}: only byte-level tokenizers are supported (decoder type ByteLevel)")
        self.special = frozenset(token["id"] for token in spec["added_tokens"] if token["special"])
        vocabulary: dict[str, int] = self._encoder.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1
        pieces = [b""] * self.size
        for symbols, token_id in vocabulary.items():
            pieces[token_id] = _piece(symbols)
        self.shown = Table(pieces)
        # A token stands for at most that much of a text; infinite when the tokenizer may drop parts of it.
        self.longest_bytes: float = max(map(len, pieces)) if _keeps_all(spec, vocabulary) else math.inf
        self.skipped = Table([b"" if i in self.special else piece for i, piece in enumerate(pieces)])

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; names of added tokens in it become those tokens, nothing is put in front."""
        # The batch form releases the GIL, so that a long text in a thread does not stop the event loop.
        ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def token_id(self, name: str) -> int | None:
        found: int | None = self._encoder.token_to_id(name)
        return found

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        stream = TextStream(self.skipped if skip_special else self.shown)
        return "".join(map(stream.feed, ids)) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """How one token is shown in logprobs: its text, or ``bytes:\\xe2\\x80`` when it is a part of a character."""
        if token_id >= self.size:
            return f"token_id:{token_id}"
        text = self.shown.texts[token_id]
        return text if text is not None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.shown.pieces[token_id])


class TextStream:
    """The text of ids that arrive one at a time; never a broken character, equal in sum to decoding all at once.

    Bytes that can still become a character are held back; bytes that cannot become one are U+FFFD.
    """

    __slots__ = ("_decoder", "_pending", "_pieces", "_size", "_texts")

    def __init__(self, table: Table) -> None:
        self._texts = table.texts
        self._pieces = table.pieces
        self._size = len(table.pieces)
        self._decoder: codecs.IncrementalDecoder | None = None  # made for the first token that is not whole characters
        self._pending = False

    def feed(self, token_id: int) -> str:
        """The text that this token completes; an id beyond the tokenizer's has none."""
        if token_id >= self._size:
            return ""
        if not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        if self._decoder is None:
            self._decoder = _Utf8("replace")
        text = self._decoder.decode(self._pieces[token_id])
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        self._pending = False
        return self._decoder.decode(b"", True) if self._decoder is not None else ""


class StopStrings:
    """Finds the first of some strings in text that arrives in pieces; the place does not depend on the pieces.

    Of the text only the longest suffix that could still become a stop string is held back.
    """

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was found right after it)."""
        text = self._held + text
        hits = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if hits:
            self._held = ""
            return text[: min(hits)[1]], True
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _open_suffix(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0


def _keeps_all(spec: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Whether every byte of a text is in some token: nothing normalises, strips, removes or truncates, no byte is unknown."""
    steps = (spec.get("normalizer") or {"normalizers": []}).get("normalizers")
    strips = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
    plain = steps == [] and not strips and not spec.get("truncation")
    return plain and '"Removed"' not in json.dumps(spec.get("pre_tokenizer")) and vocabulary.keys() >= _BYTES.keys()


def _whole_characters(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _byte_symbols() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_symbols()


def _piece(symbols: str) -> bytes:
    """A vocabulary entry's bytes; one with a symbol outside the alphabet (an added token) is its own UTF-8."""
    try:
        return bytes([_BYTES[symbol] for symbol in symbols])
    except KeyError:
        return symbols.encode("utf-8")
