"""Running sequences through the model: what the table holds as each one's next token in, the tokens behind it out.

`launch` starts a step and does not wait for it; `collect` gives the tokens of the oldest one. With one step in flight the
device has the next step before the host has seen the tokens of the one before: what a step reads of those is on the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decode.graphs import Graphs
from decode.sampling import Choice, Wishes, read_choices
from decode.sequence import Sequence
from decode.step import PLAIN, Shape
from decode.words import Words
from kernels.sequences import SequenceTable
from model.runner import device_failure


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched: whose it is, with how many guesses each, and where its results arrive on the host when
    `landed` has happened."""

    shape: Shape
    sequences: list[Sequence]
    drafts: list[int]
    report: Tensor
    tops: tuple[Tensor, Tensor]
    landed: torch.cuda.Event | None


class Engine:
    """Whatever `launch` raises concerns the sequences of that step only, unless the device is `lost`.

    spare_pages: entries of the table behind a sequence's last page that steps may look at (decode/words.py). depth: steps in
    flight while the next one is launched.
    """

    def __init__(self, table: SequenceTable, graphs: Graphs, spare_pages: int, depth: int) -> None:
        self.table, self.depth = table, depth
        self._device = table.words.device
        self._graphs = graphs
        self._words = Words(table, spare_pages)
        self._wishes = Wishes([])
        self._flights: deque[Flight] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def next_shape(self) -> Shape:
        """Of the step that `collect` gives next."""
        return self._flights[0].shape

    @torch.inference_mode()
    def launch(self, sequences: list[Sequence], shape: Shape = PLAIN) -> None:
        """Starts a step that feeds each sequence its next token, and as many guesses at those behind it as `shape` says."""
        if self._wishes.sequences != sequences:
            self._wishes = Wishes(list(sequences))
        asks = replace(self._wishes.asks(), stores=shape.stores)
        self._words.write(sequences, self._graphs.step(len(sequences), shape.tokens).rows)
        step = self._graphs.run(len(sequences), shape.tokens, asks)
        tops = (self._to_host(step.tops[0]), self._to_host(step.tops[1])) if asks.tops >= 0 else step.tops
        drafts = [min(sequence.drafts, shape.tokens - 1) for sequence in sequences]
        for sequence in sequences:
            sequence.drafts = shape.tokens - 1
        self._flights.append(Flight(shape, list(sequences), drafts, self._to_host(step.report), tops, self._mark()))

    def collect(self) -> tuple[list[Sequence], list[Choice]]:
        """The sequences of the oldest step in flight and what each of them gets; waits for it."""
        flight = self._flights.popleft()
        if flight.landed is not None:
            flight.landed.synchronize()
        choices = read_choices(flight.sequences, flight.report, flight.tops)
        for choice, drafts in zip(choices, flight.drafts, strict=True):
            choice.drafts = drafts
        return flight.sequences, choices

    def lost(self) -> str:
        """Why this process can not use its device any more; empty while it can. What was launched is over afterwards."""
        return device_failure(self._device)

    def _to_host(self, result: Tensor) -> Tensor:
        """A copy that the next step does not overwrite; from a GPU into pinned memory, and nobody waits for it."""
        return result.to("cpu", non_blocking=True, copy=True)

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record()
        return landed
