"""Running sequences through the model: what the table holds as each one's next token in, the tokens behind it out.

`launch` starts a step and does not wait for it; `collect` gives the tokens of the oldest one. With one step in flight the
device has the next step before the host has seen the tokens of the one before: what a step reads of those is on the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.sampling import Choice, Wishes, read_choices
from decode.sequence import Sequence
from decode.step import Step
from decode.words import Words
from kernels.sequences import MOST_DRAFTS, SequenceTable
from model.batch import TABLE_STEP
from model.runner import Runner


class Steps:
    """Steps of exactly the size that is asked for, made when it first is."""

    def __init__(self, runner: Runner, table: SequenceTable) -> None:
        self._runner, self._table = runner, table
        self._made: dict[tuple[int, int], Step] = {}

    def take(self, rows: int, tokens: int) -> Step:
        """A step of `rows` rows or more, with `tokens` tokens each."""
        size = rows, tokens
        if size not in self._made:
            self._made[size] = Step(self._runner, self._table, *size)
        return self._made[size]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched: whose it is, and where its results arrive on the host when `landed` has happened."""

    sequences: list[Sequence]
    report: Tensor
    tops: tuple[Tensor, Tensor]
    landed: torch.cuda.Event | None


class Engine:
    """Whatever `launch` raises concerns the sequences of that step only, unless the device is `lost`.

    max_batch: most sequences of a step. depth: steps in flight while the next one is launched.
    """

    def __init__(self, runner: Runner, max_batch: int, depth: int = 0) -> None:
        self.depth = depth
        self._device = runner.arena.pages.device
        pages_for = runner.layout.pages_for
        spare_pages = pages_for((depth + 2) * (MOST_DRAFTS + 1))  # steps in flight, this one, and guesses behind it
        pages = min(pages_for(runner.config.max_position_embeddings), len(runner.arena.pages) - 1) + spare_pages
        wide = -(-pages // TABLE_STEP) * TABLE_STEP
        self.table = SequenceTable.make(max_batch, len(runner.arena.slots), wide, runner.config.vocab_size, self._device)
        self._words = Words(self.table, spare_pages)
        self._steps = Steps(runner, self.table)
        self._wishes = Wishes([])
        self._flights: deque[Flight] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @torch.inference_mode()
    def launch(self, sequences: list[Sequence], tokens: int = 1) -> None:
        """Starts a step that feeds each sequence its next token, and the first `tokens` - 1 guesses at those behind it."""
        if self._wishes.sequences != sequences:
            self._wishes = Wishes(list(sequences))
        asks, step = self._wishes.asks(), self._steps.take(len(sequences), tokens)
        self._words.write(sequences, step.rows)
        step.forward()
        step.finish(asks)
        tops = (self._to_host(step.tops[0]), self._to_host(step.tops[1])) if asks.tops >= 0 else step.tops
        self._flights.append(Flight(list(sequences), self._to_host(step.report), tops, self._mark()))

    def collect(self) -> tuple[list[Sequence], list[Choice]]:
        """The sequences of the oldest step in flight and what each of them gets; waits for it."""
        flight = self._flights.popleft()
        if flight.landed is not None:
            flight.landed.synchronize()
        return flight.sequences, read_choices(flight.sequences, flight.report, flight.tops)

    def lost(self) -> str:
        """Why this process can not use its device any more; empty while it can. What was launched is over afterwards."""
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                return str(error).splitlines()[0]
        return ""

    def _to_host(self, result: Tensor) -> Tensor:
        """A copy that the next step does not overwrite; from a GPU into pinned memory, and nobody waits for it."""
        return result.to("cpu", non_blocking=True, copy=True)

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record()
        return landed
