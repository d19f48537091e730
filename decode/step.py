"""The device side of one step of fixed shape: what a graph captures, and what a CPU simply runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.launch import stage
from kernels.sample import Sampled, sample
from kernels.sequences import SequenceTable, begin_draft, begin_step, finish_step, keep_draft, row_parameters
from kernels.streams import take_rows
from kernels.workspace import frame
from model.batch import Batch
from model.runner import Runner


class Shape(NamedTuple):
    """What a step does for each of its sequences. tokens: new ones, of which all but the first are drafts. stores: as in Asks;
    a step with drafts always does."""

    tokens: int = 1
    stores: bool = False


PLAIN, STORING = Shape(), Shape(stores=True)


@dataclass(frozen=True, slots=True)
class Asks:
    """What is asked of a step beside tokens: less is faster. draws, edits, tops: what its rows want of the sampler together;
    tops: log probabilities beside the chosen token's, -1 for none at all. stores: every token leaves its row of the MTP
    layer, and the step ends with drafts behind the last one."""

    draws: bool
    edits: bool
    tops: int
    stores: bool = False


class Step:
    """`rows` sequences with `tokens` new tokens each. Reads nothing but the table, and writes nothing but the table, the
    arena and its own tensors: `report` (kernels.sequences.Finished) and `tops`, of every row ids and log probabilities.

    One that stores ends with `tokens` - 1 drafts in the table. With one token that is none, but those that are made later look
    back on its row. For a position whose step stored nothing the ring still has what lay there before: the row of a position a
    ring earlier, one of the slot's last owner, or the zeros that an arena begins with. A draft that looks back on it is a worse
    guess and is verified like any other; the row is gone when the ring comes round.
    """

    def __init__(self, runner: Runner, table: SequenceTable, rows: int, tokens: int) -> None:
        self._runner, self._table = runner, table
        self.rows, self.tokens = rows, tokens
        self.device = device = table.words.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def batch(longest: int, page_table: Tensor) -> Batch:
            return Batch(
                tokens=zeros(rows * longest),
                positions=zeros(rows * longest),
                sequence_ids=torch.arange(rows, device=device).repeat_interleave(longest),
                starts=zeros(rows),
                cu_tokens=torch.arange(rows + 1, device=device) * longest,
                slots=zeros(rows),
                page_table=page_table,
                longest=longest,
            )

        self._batch = batch(tokens, zeros(rows, table.pages.shape[1]))
        if tokens > 2:
            self._behind = batch(1, self._batch.page_table)  # a draft that comes behind another
            self._kept = runner.make_streams(rows)  # the MTP streams that it starts from
        self.report, self.tops = zeros(0), (zeros(0), zeros(0))

    def forward(self) -> None:
        """From the table to logits."""
        with stage("begin"):
            begin_step(self._table, self._batch, self._batch.tokens, self._runner.layout.page_tokens)
        self._streams = self._runner.forward(self._batch)
        self._logits = self._runner.logits(self._streams)

    def finish(self, asks: Asks) -> None:
        """From logits to tokens, which are the table's next ones, to what the host is told, and to the drafts behind them."""
        with stage("sample"):
            sampled = self._sample(self._logits, asks, asks.tops)
        with stage("finish"):
            finished = finish_step(self._table, self._batch.slots, sampled, self.tokens)
        self.report, self.tops = finished.report, (sampled.top_ids, sampled.top_logprobs)
        if asks.stores and self.tokens == 1:
            with frame():
                self._runner.store_draft_rows(self._streams, sampled.ids, self._batch)
        elif asks.stores:
            self._draft(sampled.ids, finished.chosen, asks)

    def _draft(self, ids: Tensor, chosen: Tensor, asks: Asks) -> None:
        """ids [B * T]: the token behind each of the step's. chosen [B]: the rows of the last ones that count. KV rows behind
        them are of tokens that were not taken; the step that comes to their positions writes them again before it reads."""
        with frame():
            every = self._runner.draft_streams(self._streams, ids, self._batch)
            with stage("draft 1"):
                self._keep(take_rows(every, chosen), 0, asks)
        for drafted in range(1, self.tokens - 1):
            with frame():
                with stage(f"draft {drafted + 1}: begin"):
                    begin_draft(self._table, self._behind, self._behind.tokens, drafted)
                streams = self._runner.draft_streams(self._kept, self._behind.tokens, self._behind)
                with stage(f"draft {drafted + 1}"):
                    self._keep(streams, drafted, asks)

    def _keep(self, streams: Tensor, drafted: int, asks: Asks) -> None:
        """From MTP streams [B, n, hidden] to the draft that comes behind `drafted` others."""
        sampled = self._sample(self._runner.draft_logits(streams), asks, -1, drafted)
        keep_draft(self._table, self._batch.slots, sampled.ids, drafted)
        if drafted + 2 < self.tokens:
            self._kept.copy_(streams)

    def _sample(self, logits: Tensor, asks: Asks, tops: int, drafted: int = 0) -> Sampled:
        """A draft is drawn as the token that it stands for, noise and all: so the two agree as often as they can."""
        slots = self._batch.slots
        parameters = row_parameters(self._table, slots, len(logits) // len(slots), drafted, asks.edits)
        return sample(logits, parameters, asks.draws, asks.edits, tops)
