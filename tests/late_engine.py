"""A device that is as late as a GPU may be: nothing that is launched happens before its results are collected.

Uploads and steps wait in one queue, as they do in a stream. So whatever the host does too early (giving pages away that a
step still writes into, counting on a token that is not there) shows in the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decode.config import DecodeConfig
from decode.engine import Engine
from decode.graphs import Graphs
from decode.room import make_engine
from decode.sampling import Choice
from decode.sequence import Sequence
from decode.step import PLAIN, Asks, Shape, Step
from kernels.sequences import MOST_DRAFTS
from tests.fake_runner import FakeRunner, checksum, fake_logits


class LateStep:
    """A Step whose results are promises."""

    def __init__(self, engine: LateEngine, step: Step, sequences: list[Sequence]) -> None:
        self._engine, self._step, self._sequences = engine, step, sequences
        self.rows = step.rows
        self.report, self.tops = torch.zeros(step.rows, 2 + 2 * step.tokens, dtype=torch.int32), (Tensor(), Tensor())

    def forward(self) -> None:
        self._engine.queue.append(self._step.forward)

    def finish(self, asks: Asks) -> None:
        size = self._step.rows * self._step.tokens, max(asks.tops, 0)
        self.tops = torch.zeros(size, dtype=torch.int64), torch.zeros(size)
        self._engine.queue.append(lambda: self._finish(asks))

    def _finish(self, asks: Asks) -> None:
        self._step.finish(asks)
        self.report.copy_(self._step.report)
        if asks.tops >= 0:
            self.tops[0].copy_(self._step.tops[0])
            self.tops[1].copy_(self._step.tops[1])
        self._engine.wrote(self._sequences)


class LateGraphs:
    """Steps with `spare_rows` rows of nobody, each a LateStep of whoever asked for it."""

    def __init__(self, graphs: Graphs, spare_rows: int) -> None:
        self._graphs, self._spare_rows = graphs, spare_rows
        self.engine: LateEngine
        self.sequences: list[Sequence] = []

    def step(self, rows: int, tokens: int) -> Step:
        return self._graphs.step(rows + self._spare_rows, tokens)

    def run(self, rows: int, tokens: int, asks: Asks) -> LateStep:
        step = LateStep(self.engine, self.step(rows, tokens), self.sequences)
        step.forward()
        step.finish(asks)
        return step


class LateEngine(Engine):
    """With more than one token a step every sequence gets guesses that are right at two places of three."""

    def __init__(self, engine: Engine, graphs: LateGraphs, runner: FakeRunner) -> None:
        super().__init__(engine.table, graphs, engine._words._spare_pages, engine.depth)  # type: ignore[arg-type]
        graphs.engine = self
        self._late = graphs
        self.queue: deque[Callable[[], Any]] = deque()
        self.runner = runner
        self._done = self._launched = 0
        send, uploads = self._words._uploads.send, self._words._uploads
        uploads.send = lambda pairs: self.queue.append(lambda: send(pairs))  # type: ignore[method-assign]

    @classmethod
    def make(cls, config: DecodeConfig, runner: Any, depth: int, spare_rows: int) -> LateEngine:
        """In place of decode.room.make_engine."""
        engine = make_engine(replace(config, max_batch=config.max_batch + spare_rows), runner, depth)
        return cls(engine, LateGraphs(engine._graphs, spare_rows), runner)

    @torch.inference_mode()
    def launch(self, sequences: list[Sequence], shape: Shape = PLAIN) -> None:
        if self.runner.fail_launches:
            self.runner.fail_launches -= 1
            raise RuntimeError("the fake runner was told to fail")
        self._late.sequences = list(sequences)
        super().launch(sequences, shape)
        self.queue.append(self._end)
        self._launched += 1

    def _end(self) -> None:
        self._done += 1

    @torch.inference_mode()
    def collect(self) -> tuple[list[Sequence], list[Choice]]:
        oldest = self._launched - self.in_flight
        while self._done <= oldest:
            self.queue.popleft()()
        return super().collect()

    def _to_host(self, result: Tensor) -> Tensor:
        return result

    def wrote(self, sequences: list[Sequence]) -> None:
        """After every step: it wrote into what its sequences hold, and guesses behind a text's end into the page of nobody."""
        tokens = self.runner.steps[-1][0]
        for place, (slot, page) in enumerate(self.runner.writes[-1]):
            row = place // tokens
            if row >= len(sequences):
                assert (slot, page) == (0, 0)
                continue
            kv, is_guess = sequences[row].kv, place % tokens or sequences[row].over
            assert slot == kv.slot and (page in kv.pages or (page == 0 and is_guess)), (slot, page, kv)
        if tokens > 1:
            for slot in {sequence.kv.slot for sequence in sequences}:
                self.table.drafts[slot] = torch.tensor(self._guesses(slot))

    def _guesses(self, slot: int) -> list[int]:
        length, pages = int(self.table.lengths[slot]), self.table.pages[slot].long()
        history = [*self.runner._tokens[pages].flatten()[:length].tolist(), int(self.table.tokens[slot])]
        guesses = []
        for _ in range(MOST_DRAFTS):
            token = int(fake_logits(torch.tensor([checksum(history)])).argmax())
            history.append(token)
            guesses.append(token if len(history) % 3 else 3)
        return guesses
