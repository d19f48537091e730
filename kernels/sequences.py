"""What a captured step knows of the running sequences: a table on the device, one entry a slot, and what reads and moves it.

The host writes words of it (`write_words`) when a sequence joins, gets a page or changes its row. Everything else happens on
the device: `begin_step` lays out the rows of a step, `row_parameters` what the sampler reads, `finish_step` takes the tokens,
`begin_draft` and `keep_draft` go round once for every draft. Slot 0 belongs to nobody: rows that fill up a batch have it, and
nothing of it ever changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ragged import Ragged
from kernels.sample import Parameters, Sampled

MOST_DRAFTS = 4
FORBIDDEN = 16  # stop ids of a sequence that may not stop yet
BIASES = 512
UNUSABLE, EXCLUDED = 1, 2  # status of a row without a token: the model's logits are not finite; the client excludes all ids
_DTYPES = {
    "rows": torch.int64,
    "lengths": torch.int64,
    "tokens": torch.int64,
    "drafts": torch.int64,
    "stream": torch.int64,
    "may_stop_from": torch.int64,
    "temperature": torch.float64,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "pages": torch.int32,
    "top_k": torch.int32,
    "presence": torch.float32,
    "frequency": torch.float32,
    "repetition": torch.float32,
    "forbidden_counts": torch.int32,
    "forbidden": torch.int32,
    "bias_counts": torch.int32,
    "bias_ids": torch.int32,
    "bias_values": torch.float32,
    "counts": torch.int32,
}  # eight bytes first: each view is aligned


@dataclass(frozen=True, slots=True)
class SequenceTable:
    """Views of one block of memory, `words` int32 [N]. S slots, P pages of a sequence, V ids of the vocabulary.

    rows [R]                    the slot of each row of the step; 0 fills up
    lengths [S]                 tokens whose KV is written: the position of the next one
    tokens [S]                  the token that is fed next, at that position
    drafts [S, MOST_DRAFTS]     guesses at the tokens after it; -1: none
    pages [S, P]                page numbers; behind a sequence's last page 0, as far as drafts may reach
    may_stop_from [S]           the first position at which a new token may be one of `forbidden`
    counts [S, V]               as in `kernels.sample.Parameters`; the others too, by slot
    """

    words: Tensor
    rows: Tensor
    lengths: Tensor
    tokens: Tensor
    drafts: Tensor
    stream: Tensor
    may_stop_from: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    pages: Tensor
    top_k: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    forbidden_counts: Tensor
    forbidden: Tensor
    bias_counts: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    counts: Tensor

    @classmethod
    def make(cls, rows: int, slots: int, pages: int, vocab: int, device: torch.device | str) -> SequenceTable:
        """All zero, but for what "off" is for a greedy sequence: top_p and repetition 1, drafts -1."""
        wide = {
            "rows": (rows,),
            "drafts": (slots, MOST_DRAFTS),
            "pages": (slots, pages),
            "forbidden": (slots, FORBIDDEN),
            "bias_ids": (slots, BIASES),
            "bias_values": (slots, BIASES),
            "counts": (slots, vocab),
        }
        shapes = {name: wide.get(name, (slots,)) for name in _DTYPES}
        sizes = {name: math.prod(shape) * _DTYPES[name].itemsize // 4 for name, shape in shapes.items()}
        words = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        parts = dict(zip(sizes, torch.split(words, list(sizes.values())), strict=True))
        table = cls(words, **{name: part.view(_DTYPES[name]).view(shapes[name]) for name, part in parts.items()})
        table.top_p.fill_(1)
        table.repetition.fill_(1)
        table.drafts.fill_(-1)
        return table

    def place(self, name: str) -> tuple[int, int]:
        """(the first word of a field, the words of one slot in it; of one row for "rows")."""
        view: Tensor = getattr(self, name)
        first = (view.data_ptr() - self.words.data_ptr()) // 4
        return first, view[0].numel() * view.itemsize // 4


def write_words(table: SequenceTable, pairs: Tensor, count: int) -> None:
    """pairs int32 [N, 2]: (word, its new value), of which the first `count` are written. Different words each."""
    table.words[pairs[:count, 0].long()] = pairs[:count, 1]


def begin_step(table: SequenceTable, batch: Ragged, tokens: Tensor) -> None:
    """Lays out a step of B = len(batch.slots) rows and T = batch.longest tokens a row, in place: each row's next token and
    T - 1 drafts (0 where there is none) at the positions from its length on.

    Written: tokens [B * T], batch.positions, starts, slots, page_table (the pages of length + T tokens). sequence_ids and
    cu_tokens are the same in every step.
    """
    count, longest = len(batch.slots), batch.longest
    slots = table.rows[:count]
    batch.slots.copy_(slots)
    batch.starts.copy_(table.lengths[slots])
    batch.positions.copy_((batch.starts[:, None] + torch.arange(longest, device=slots.device)).flatten())
    fed = torch.cat((table.tokens[slots, None], table.drafts[slots, : longest - 1].clamp(min=0)), 1)
    tokens.copy_(fed.flatten())
    width = min(batch.page_table.shape[1], table.pages.shape[1])
    batch.page_table[:, :width] = table.pages[slots, :width]


def row_parameters(table: SequenceTable, slots: Tensor, longest: int, drafted: int = 0) -> Parameters:
    """What the sampler reads of B rows with T = `longest` new tokens each: [B * T] rows, the t-th of a sequence for the token
    at position length + 1 + t, behind its first t drafts. drafted: behind so many more (T is 1 then)."""
    device = slots.device
    by_row = slots.repeat_interleave(longest)
    behind = torch.arange(longest, device=device).repeat(len(slots)) + drafted
    position = table.lengths[by_row] + 1 + behind
    drafts = torch.where(torch.arange(MOST_DRAFTS, device=device) < behind[:, None], table.drafts[by_row], -1)
    return Parameters(
        temperature=table.temperature[by_row],
        top_k=table.top_k[by_row],
        top_p=table.top_p[by_row],
        min_p=table.min_p[by_row],
        presence=table.presence[by_row],
        frequency=table.frequency[by_row],
        repetition=table.repetition[by_row],
        slots=by_row,
        counts=table.counts,
        drafts=drafts,
        forbidden=table.forbidden[by_row],
        forbidden_counts=torch.where(position < table.may_stop_from[by_row], table.forbidden_counts[by_row], 0),
        bias_ids=table.bias_ids[by_row],
        bias_values=table.bias_values[by_row],
        bias_counts=table.bias_counts[by_row],
        stream=table.stream[by_row],
        position=position,
    )


@dataclass(frozen=True, slots=True)
class Finished:
    """chosen int64 [B]: of each sequence the row of [B * T] behind which its next token comes. report int32 [B, 2 + 2 T]: how
    many tokens came, the status of the one after them (0, UNUSABLE or EXCLUDED), T token ids, the bits of T log
    probabilities; of both only the first so many mean something."""

    chosen: Tensor
    report: Tensor


def finish_step(table: SequenceTable, slots: Tensor, sampled: Sampled, longest: int) -> Finished:
    """Takes the tokens of B sequences with T = `longest` rows each: up to the first that is not the draft behind it.

    A draft is accepted when the sampler draws that very token at its place, so a text does not depend on how many were
    guessed. A row whose peak is not finite has no token: the sequence ends before it. The table is moved on: lengths, tokens,
    counts; drafts are -1.
    """
    count = len(slots)
    ids = sampled.ids.view(count, longest)
    guessed = table.drafts[slots, : longest - 1]
    agree = (ids[:, : longest - 1] == guessed).long().cumprod(1).sum(1)  # drafts accepted
    status = torch.where(sampled.peak.isfinite(), 0, EXCLUDED)
    status = torch.where(sampled.model_peak.isfinite(), status, UNUSABLE).view(count, longest)
    good = (status == 0).long().cumprod(1).sum(1)  # rows before the first without a token
    tokens = torch.minimum(agree + 1, good)
    last = torch.minimum(agree, good.clamp(max=longest - 1))
    status = torch.where(good <= agree, status.gather(1, last[:, None])[:, 0], 0)
    chosen = torch.arange(count, device=slots.device) * longest + last
    scores = sampled.logprob.view(count, longest).view(torch.int32)
    report = torch.cat((tokens[:, None], status[:, None], ids, scores), 1).to(torch.int32)
    for row, slot in enumerate(slots.tolist()):
        if slot:
            taken = ids[row, : int(tokens[row])]
            table.lengths[slot] += len(taken)
            table.tokens[slot] = ids[row, last[row]]
            table.counts[slot].index_add_(0, taken, torch.full_like(taken, 2, dtype=torch.int32))
            table.drafts[slot] = -1
    return Finished(chosen, report)


def begin_draft(table: SequenceTable, batch: Ragged, tokens: Tensor, drafted: int) -> None:
    """Lays out a draft behind `drafted` >= 1 others, one token a row, in place: the newest draft and where the MTP layer has
    its row, one position before that of the draft. Of `batch` positions, starts and slots are written, page_table is not."""
    slots = table.rows[: len(batch.slots)]
    batch.slots.copy_(slots)
    batch.starts.copy_(table.lengths[slots] + drafted - 1)
    batch.positions.copy_(batch.starts)
    tokens.copy_(table.drafts[slots, drafted - 1].clamp(min=0))


def keep_draft(table: SequenceTable, slots: Tensor, ids: Tensor, drafted: int) -> None:
    """Stores the draft that comes behind `drafted` others. ids int64 [B]."""
    real = slots > 0
    table.drafts[slots[real], drafted] = ids[real]
