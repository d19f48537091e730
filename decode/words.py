"""What the host tells the device of its sequences: words of a SequenceTable, and of them only those that are new.

A sequence is described once, when it first has a row. From then on the device moves it along by itself; the host says which
page comes next and which row is whose, when that changes. So a batch that stays the same costs no upload.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode.sampling import is_penalised
from decode.sequence import Sequence
from kernels.sample import noise_stream
from kernels.sequences import MOST_DRAFTS, SequenceTable, write_words

PAIRS = 1 << 14  # (word, value) pairs that are uploaded at once
ROUNDS = 4  # uploads that may be on their way
Numbers = NDArray[Any]
_ALWAYS = (  # fields that are written of every sequence, in the order in which `Words._join` has their values
    *("lengths", "tokens", "drafts", "stream", "may_stop_from"),
    *("temperature", "top_p", "min_p"),
    *("top_k", "forbidden_counts", "bias_counts"),
    *("presence", "frequency", "repetition"),
)


class Words:
    """Writes a table, and remembers what it has written.

    spare_pages: entries behind a sequence's last page that a step may look at, for guesses that nobody accepts. They are 0,
    the page of nobody, and not what the slot's owner before had there.
    """

    def __init__(self, table: SequenceTable, spare_pages: int) -> None:
        self._table = table
        self._uploads = Uploads(table)
        self._spare_pages = spare_pages
        views = [field.name for field in fields(table) if field.name != "words"]
        self._places = {name: table.place(name) for name in views}  # (first word, words of a slot or row)
        always = [self._places[name] for name in _ALWAYS]
        self._first_words = np.concatenate([np.arange(first, first + width) for first, width in always])
        self._strides = np.concatenate([np.full(width, width) for _, width in always])
        self._rows = np.zeros(len(table.rows), np.int64)  # as the table has them, like the next two
        self._owners: list[tuple[int, int] | None] = [None] * len(table.lengths)  # serials
        self._pages = [0] * len(table.lengths)
        self._seated: tuple[list[Sequence], int] = ([], 0)
        self._words: list[Numbers] = []  # what is to be uploaded: int64, and as many int32
        self._values: list[Numbers] = []

    def write(self, sequences: list[Sequence], rows: int) -> None:
        """Row r of the next step is sequences[r]; the others of its `rows` rows are nobody's."""
        self._words, self._values = [], []
        for sequence in sequences:
            slot = sequence.kv.slot
            if self._owners[slot] != sequence.serial:
                self._join(sequence, slot)
            elif self._pages[slot] != len(sequence.kv.pages):
                self._grow(sequence, slot)
        if self._seated != (sequences, rows):
            self._seat(sequences, rows)
        if self._words:
            pairs = np.stack((np.concatenate(self._words), np.concatenate(self._values)), 1)
            self._uploads.send(pairs.astype(np.int32))

    def _seat(self, sequences: list[Sequence], rows: int) -> None:
        wanted = np.zeros(rows, np.int64)
        wanted[: len(sequences)] = [sequence.kv.slot for sequence in sequences]
        moved = np.flatnonzero(self._rows[:rows] != wanted)
        self._rows[moved], self._seated = wanted[moved], (list(sequences), rows)
        first, width = self._places["rows"]
        self._add(first + width * moved, wanted[moved].astype(np.int32))  # the upper words are 0 and stay so

    def _join(self, sequence: Sequence, slot: int) -> None:
        """All of a sequence: before this the slot was another's."""
        self._owners[slot], self._pages[slot] = sequence.serial, 0
        params, tokens = sequence.sampling, sequence.tokens
        forbidden = [] if sequence.may_stop else list(dict.fromkeys(sequence.stopping_ids()))
        biases = _biases(params.logit_bias)
        stream = noise_stream(torch.tensor(_int64(params.seed)), torch.tensor(sequence.sample)).item()
        may_stop_from = sequence.prompt_tokens + min(params.min_tokens, params.max_tokens)  # any integer; the latter is not
        top_k = min(params.top_k, self._table.counts.shape[1])
        values = {
            np.int64: [len(tokens) - 1, tokens[-1], *[-1] * MOST_DRAFTS, stream, may_stop_from],
            np.float64: [params.temperature, params.top_p, params.min_p],
            np.int32: [top_k, len(forbidden), len(biases)],
            np.float32: [params.presence_penalty, params.frequency_penalty, params.repetition_penalty],
        }
        words = [np.array(numbers, dtype).view(np.int32) for dtype, numbers in values.items()]
        self._add(self._first_words + slot * self._strides, np.concatenate(words))
        self._grow(sequence, slot)
        self._put("forbidden", slot, np.array(forbidden, np.int32))
        self._put("bias_ids", slot, np.array(list(biases), np.int32))
        with np.errstate(over="ignore"):  # more than a float32 holds is infinite
            self._put("bias_values", slot, np.array(list(biases.values()), np.float64).astype(np.float32))
        if is_penalised(params):
            self._count(sequence, slot)

    def _grow(self, sequence: Sequence, slot: int) -> None:
        known, pages = self._pages[slot], sequence.kv.pages
        self._put("pages", slot, np.array(pages[known:] + [0] * self._spare_pages, np.int32), known)
        self._pages[slot] = len(pages)

    def _count(self, sequence: Sequence, slot: int) -> None:
        """The slot's row of `kernels.sample.Parameters.counts`. Without penalties nobody reads it, whatever is in it."""
        first, width = self._places["counts"]
        prompt, generated = sequence.tokens[: sequence.prompt_tokens], sequence.tokens[sequence.prompt_tokens :]
        counts = 2 * np.bincount(np.array(generated, np.int64), minlength=width)
        if sequence.sampling.repetition_penalty != 1.0:
            counts[np.unique(prompt)] += 1
        ids = np.flatnonzero(counts)
        self._table.counts[slot].zero_()
        self._add(first + width * slot + ids, counts[ids].astype(np.int32))

    def _put(self, name: str, slot: int, values: Numbers, at: int = 0) -> None:
        """Values of four bytes each, in a slot's part of a field from its entry `at` on."""
        first, width = self._places[name]
        begin = first + width * slot + at
        self._add(np.arange(begin, begin + len(values)), values.view(np.int32))

    def _add(self, words: Numbers, values: Numbers) -> None:
        if len(words):
            self._words.append(words)
            self._values.append(values)


class Uploads:
    """Brings pairs to the device without waiting for it. Each round has its own pinned buffer, which is written again only
    when its copy is done; the device's buffer is one, since copies and kernels of a stream come one after the other."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._rounds: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        if table.words.device.type == "cuda":
            self._landing = torch.empty(PAIRS, 2, dtype=torch.int32, device=table.words.device)
            write_words(table, self._landing, 0)  # none: it is compiled now, and no request waits for that
            for _ in range(ROUNDS):
                self._rounds.append((torch.empty(PAIRS, 2, dtype=torch.int32, pin_memory=True), torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def send(self, pairs: Numbers) -> None:
        """int32 [N, 2]: (word, value), each word once."""
        source = torch.from_numpy(pairs)
        if not self._rounds:
            write_words(self._table, source, len(source))
            return
        for begin in range(0, len(source), PAIRS):
            part = source[begin : begin + PAIRS]
            pinned, copied = self._rounds[0]
            self._rounds.rotate(-1)
            copied.synchronize()  # an event that was never recorded is over
            pinned[: len(part)].copy_(part)
            self._landing[: len(part)].copy_(pinned[: len(part)], non_blocking=True)
            copied.record()
            write_words(self._table, self._landing, len(part))


def _biases(pairs: tuple[tuple[int, float], ...]) -> dict[int, float]:
    """By token; one that is named twice gets both."""
    biases: dict[int, float] = {}
    for token, value in pairs:
        biases[token] = biases.get(token, 0.0) + value
    return biases


def _int64(seed: int) -> int:
    """Any integer as the int64 of the same low 64 bits."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
