"""The device side of one step of fixed shape: what a graph captures, and what a CPU simply runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.launch import stage
from kernels.sample import sample
from kernels.sequences import SequenceTable, begin_step, finish_step, row_parameters
from model.batch import Batch
from model.runner import Runner


@dataclass(frozen=True, slots=True)
class Asks:
    """What the rows of a step want of the sampler together: less is faster. tops: log probabilities beside the chosen
    token's; -1 for none at all."""

    draws: bool
    edits: bool
    tops: int


class Step:
    """`rows` sequences with `tokens` new tokens each. Reads nothing but the table, and writes nothing but the table, the
    arena and its own tensors: `report` (kernels.sequences.Finished) and `tops`, of every row ids and log probabilities.
    """

    def __init__(self, runner: Runner, table: SequenceTable, rows: int, tokens: int) -> None:
        self._runner, self._table = runner, table
        self.rows, self.tokens = rows, tokens
        self.device = device = table.words.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._batch = Batch(
            tokens=zeros(rows * tokens),
            positions=zeros(rows * tokens),
            sequence_ids=torch.arange(rows, device=device).repeat_interleave(tokens),
            starts=zeros(rows),
            cu_tokens=torch.arange(rows + 1, device=device) * tokens,
            slots=zeros(rows),
            page_table=zeros(rows, table.pages.shape[1]),
            longest=tokens,
        )
        self.report, self.tops = zeros(0), (zeros(0), zeros(0))

    def forward(self) -> None:
        """From the table to logits."""
        with stage("begin"):
            begin_step(self._table, self._batch, self._batch.tokens, self._runner.layout.page_tokens)
        self._streams = self._runner.forward(self._batch)
        self._logits = self._runner.logits(self._streams)

    def finish(self, asks: Asks) -> None:
        """From logits to tokens, which are the table's next ones, and to what the host is told."""
        slots = self._batch.slots
        with stage("sample"):
            parameters = row_parameters(self._table, slots, self.tokens, edits=asks.edits)
            sampled = sample(self._logits, parameters, asks.draws, asks.edits, asks.tops)
        with stage("finish"):
            finished = finish_step(self._table, slots, sampled, self.tokens)
        self.report, self.tops = finished.report, (sampled.top_ids, sampled.top_logprobs)
