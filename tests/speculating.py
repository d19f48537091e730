"""Sequences on one runner for tests of speculation: prefilled, each in a slot and pages of its own, and stepped by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from decode.engine import Engine
from decode.graphs import Graphs
from decode.sequence import Sequence
from decode.step import Shape
from kernels import backend
from kernels.rows import read_rows
from kernels.sequences import MOST_DRAFTS, SequenceTable
from kvtransfer.pages import SeqKV
from model.runner import Runner
from tests import golden
from wire.messages import SamplingParams

WIDTH = 16  # entries of a page table
SPARE_PAGES = 1


def sequence_of(slot: int, ids: Many[int], sampling: SamplingParams, sample: int = 0) -> Sequence:
    """A sequence that is about to get its first token; `serial` is its slot, so a slot is told of it once."""
    return Sequence(
        key=(slot, 0),
        sample=sample,
        serial=(slot, sample),
        tokens=list(ids),
        prompt_tokens=len(ids),
        sampling=sampling,
        eos_token_id=1,
        kv=SeqKV(slot, golden.pages_of(slot)),
        router_inbox="",
        deadline_s=math.inf,
        arrived_s=0.0,
    )


def make_engine(model: Runner, rows: int, tokens: Many[int] = range(1, MOST_DRAFTS + 2)) -> Engine:
    """An engine over a table of its own. tokens: as in Graphs; more than one is speculation."""
    backend.make_invariant()
    table = SequenceTable.make(rows, len(model.arena.slots), WIDTH, model.config.vocab_size, model.device)
    return Engine(table, Graphs(model, table, rows, tokens), SPARE_PAGES, depth=0)


class Said:
    """What the sequences of a run came to."""

    def __init__(self, sequences: Many[Sequence]) -> None:
        self.sequences = list(sequences)
        self.logprobs: list[list[float]] = [[] for _ in sequences]
        self.tops: list[list[list[list[float]]]] = [[] for _ in sequences]
        self.ends = ["" for _ in sequences]
        self.counts: list[list[int]] = [[] for _ in sequences]  # tokens of each step

    @property
    def texts(self) -> list[list[int]]:
        return [sequence.tokens[sequence.prompt_tokens :] for sequence in self.sequences]

    def advance(self, engine: Engine, tokens: int, stores: bool = True) -> None:
        """One step of everything that is not over."""
        running = [row for row, end in enumerate(self.ends) if not end]
        engine.launch([self.sequences[row] for row in running], Shape(tokens, stores))
        _, choices = engine.collect()
        for row, choice in zip(running, choices, strict=True):
            assert choice.tokens and not choice.error
            count, self.ends[row] = self.sequences[row].extend(choice.tokens)
            self.counts[row].append(len(choice.tokens))
            self.logprobs[row] += (choice.logprobs or [])[:count]
            self.tops[row] += (choice.tops or [])[:count]


def say(model: Runner, sequences: Many[Sequence], tokens: Callable[[int], int], engine: Engine | None = None) -> Said:
    """Decodes sequences that are prefilled together to their ends. tokens: of step n of each, drafts and all."""
    said, step = Said(sequences), 0
    engine = engine or make_engine(model, len(sequences))
    while not all(said.ends):
        said.advance(engine, tokens(step))
        step += 1
    return said


def live_rows(model: Runner, slot: int, length: int) -> dict[tuple[int, str], Tensor]:
    """All bytes that the future of a sequence of `length` tokens can read, by (layer, kind): ring rows by position, and the
    rows of its pages, whose values and scales lie apart."""
    found: dict[tuple[int, str], Tensor] = {}
    for field in model.layout.slot:
        live = field.live_rows(length)
        positions = [position % field.rows for position in range(length - live, length)]
        found[field.layer, field.kind] = model.arena.slot_field(field)[slot, positions].clone()
    return found | page_rows(model, slot, length)


def page_rows(model: Runner, slot: int, length: int) -> dict[tuple[int, str], Tensor]:
    found: dict[tuple[int, str], Tensor] = {}
    for field in model.layout.page:
        row = golden.row_of(model, field.kind)
        number = torch.arange(length // field.stride)
        page = torch.tensor(golden.pages_of(slot))[number // field.rows]
        found[field.layer, field.kind] = read_rows(model.arena.page_field(field), row, page, number % field.rows)
    return found
