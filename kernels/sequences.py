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
import triton
import triton.language as tl
from torch import Tensor

from kernels import backend, workspace
from kernels.early import await_inputs, early
from kernels.jit import jit
from kernels.launch import launch
from kernels.ragged import Ragged
from kernels.sample import Parameters, Sampled

MOST_DRAFTS = 4
FORBIDDEN = 16  # stop ids of a sequence that may not stop yet
BIASES = 512
BLOCK = 1024  # words or pages of a step of a program
ROWS = 64  # rows of a program where a row is a few words
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
_GATHERED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "stream",
    "presence",
    "frequency",
    "repetition",
    "drafts",
    "forbidden_counts",
    "forbidden",
    "bias_counts",
    "bias_ids",
    "bias_values",
)  # fields of the table that are fields of `Parameters` too, in the order in which `_row_parameters` takes them


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
        """All zero, but for what "off" is for a greedy sequence: top_p and repetition 1, drafts -1. Raises ValueError when an
        int32 cannot name every word."""
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
        if sum(sizes.values()) >= 1 << 31:
            raise ValueError(f"a table of {slots} slots with {vocab} token counts each is too large; lower --num-slots")
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
    if not backend.active().triton:
        write_words_reference(table, pairs, count)
        return
    grid = (triton.cdiv(len(pairs), BLOCK),)
    launch(_write_words, grid, table.words, pairs, count, BLOCK=BLOCK, num_warps=4, **early())


def write_words_reference(table: SequenceTable, pairs: Tensor, count: int) -> None:
    table.words[pairs[:count, 0].long()] = pairs[:count, 1]


@jit(do_not_specialize=["count"])
def _write_words(words, pairs, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(pairs + 2 * pair, mask=pair < count, other=0)
    tl.store(words + word, tl.load(pairs + 2 * pair + 1, mask=pair < count, other=0), mask=pair < count)


def begin_step(table: SequenceTable, batch: Ragged, tokens: Tensor, page_tokens: int) -> None:
    """Lays out a step of B = len(batch.slots) rows and T = batch.longest tokens a row, in place: each row's next token and
    T - 1 drafts (0 where there is none) at the positions from its length on.

    Written: tokens [B * T], batch.positions, starts, slots, and of page_table the pages of length + T tokens; entries behind
    them stay and are nobody's. sequence_ids and cu_tokens are the same in every step.
    """
    if not backend.active().triton:
        begin_step_reference(table, batch, tokens, page_tokens)
        return
    launch(
        _begin_step,
        (len(batch.slots),),
        table.rows,
        table.lengths,
        table.tokens,
        table.drafts,
        table.pages,
        batch.slots,
        batch.starts,
        batch.positions,
        tokens,
        batch.page_table,
        table.pages.shape[1],
        batch.page_table.stride(0),
        min(table.pages.shape[1], batch.page_table.shape[1]),
        PAGE_TOKENS=page_tokens,
        TOKENS=batch.longest,
        PADDED=triton.next_power_of_2(batch.longest),
        DRAFTS=MOST_DRAFTS,
        BLOCK=BLOCK,
        num_warps=4,
        **early(),
    )


def begin_step_reference(table: SequenceTable, batch: Ragged, tokens: Tensor, page_tokens: int) -> None:
    count, longest = len(batch.slots), batch.longest
    slots = table.rows[:count]
    batch.slots.copy_(slots)
    batch.starts.copy_(table.lengths[slots])
    batch.positions.copy_((batch.starts[:, None] + torch.arange(longest, device=slots.device)).flatten())
    fed = torch.cat((table.tokens[slots, None], table.drafts[slots, : longest - 1].clamp(min=0)), 1)
    tokens.copy_(fed.flatten())
    live = -(-(batch.starts + longest) // page_tokens)
    width = min(int(live.max()), batch.page_table.shape[1], table.pages.shape[1])
    known = batch.page_table[:, :width]
    mine = torch.arange(width, device=slots.device) < live[:, None]
    known.copy_(torch.where(mine, table.pages[slots, :width], known))


@jit
def _begin_step(
    rows,
    lengths,
    next_tokens,
    drafts,
    pages,
    slots,
    starts,
    positions,
    tokens,
    page_table,
    pages_stride,
    table_stride,
    width,
    PAGE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    length = tl.load(lengths + slot)
    tl.store(slots + row, slot)
    tl.store(starts + row, length)
    behind = tl.arange(0, PADDED)
    real = behind < TOKENS
    guess = tl.load(drafts + slot * DRAFTS + behind - 1, mask=real & (behind > 0), other=0)
    fed = tl.where(behind == 0, tl.load(next_tokens + slot), tl.maximum(guess, 0))
    tl.store(tokens + row * TOKENS + behind, fed, mask=real)
    tl.store(positions + row * TOKENS + behind, length + behind, mask=real)
    live = tl.minimum(tl.cdiv(length + TOKENS, PAGE_TOKENS), width).to(tl.int32)
    for first in range(0, live, BLOCK):
        place = first + tl.arange(0, BLOCK)
        page = tl.load(pages + slot * pages_stride + place, mask=place < live, other=0)
        tl.store(page_table + row * table_stride + place, page.to(tl.int64), mask=place < live)


def row_parameters(table: SequenceTable, slots: Tensor, longest: int, drafted: int = 0, edits: bool = True) -> Parameters:
    """What the sampler reads of B rows with T = `longest` new tokens each: [B * T] rows, the t-th of a sequence for the token
    at position length + 1 + t, behind its first t drafts. drafted: behind so many more (T is 1 then).

    edits: as in `sample`; without them, what only they read (penalties, drafts, lists) has no rows.
    """
    if not backend.active().triton:
        return row_parameters_reference(table, slots, longest, drafted, edits)
    rows = len(slots) * longest
    edited = rows if edits else 0

    def made(like: Tensor, count: int) -> Tensor:
        return workspace.empty((count, *like.shape[1:]), like.dtype, like.device)

    found = Parameters(
        temperature=made(table.temperature, rows),
        top_k=made(table.top_k, rows),
        top_p=made(table.top_p, rows),
        min_p=made(table.min_p, rows),
        presence=made(table.presence, edited),
        frequency=made(table.frequency, edited),
        repetition=made(table.repetition, edited),
        slots=made(slots, rows),
        counts=table.counts,
        drafts=made(table.drafts, edited),
        forbidden=made(table.forbidden, edited),
        forbidden_counts=made(table.forbidden_counts, edited),
        bias_ids=made(table.bias_ids, edited),
        bias_values=made(table.bias_values, edited),
        bias_counts=made(table.bias_counts, edited),
        stream=made(table.stream, rows),
        position=made(table.lengths, rows),
    )
    launch(
        _row_parameters,
        (rows,),
        slots,
        table.lengths,
        table.may_stop_from,
        *(getattr(table, name) for name in _GATHERED),
        found.slots,
        found.position,
        *(getattr(found, name) for name in _GATHERED),
        drafted,
        TOKENS=longest,
        DRAFTS=MOST_DRAFTS,
        FORBIDDEN=FORBIDDEN,
        BIASES=BIASES,
        EDITS=edits,
        num_warps=4 if edits else 1,
        **early(),
    )
    return found


def row_parameters_reference(
    table: SequenceTable, slots: Tensor, longest: int, drafted: int = 0, edits: bool = True
) -> Parameters:
    device = slots.device
    by_row = slots.repeat_interleave(longest)
    edited = by_row if edits else by_row[:0]
    behind = torch.arange(longest, device=device).repeat(len(slots)) + drafted
    position = table.lengths[by_row] + 1 + behind
    before = torch.arange(MOST_DRAFTS, device=device) < behind[: len(edited), None]
    waits = position[: len(edited)] < table.may_stop_from[edited]
    return Parameters(
        temperature=table.temperature[by_row],
        top_k=table.top_k[by_row],
        top_p=table.top_p[by_row],
        min_p=table.min_p[by_row],
        presence=table.presence[edited],
        frequency=table.frequency[edited],
        repetition=table.repetition[edited],
        slots=by_row,
        counts=table.counts,
        drafts=torch.where(before, table.drafts[edited], -1),
        forbidden=table.forbidden[edited],
        forbidden_counts=torch.where(waits, table.forbidden_counts[edited], 0),
        bias_ids=table.bias_ids[edited],
        bias_values=table.bias_values[edited],
        bias_counts=table.bias_counts[edited],
        stream=table.stream[by_row],
        position=position,
    )


@jit(do_not_specialize=["drafted"])
def _row_parameters(
    slots,
    lengths,
    may_stop_from,
    temperature,
    top_k,
    top_p,
    min_p,
    stream,
    presence,
    frequency,
    repetition,
    drafts,
    forbidden_counts,
    forbidden,
    bias_counts,
    bias_ids,
    bias_values,
    row_slots,
    row_position,
    row_temperature,
    row_top_k,
    row_top_p,
    row_min_p,
    row_stream,
    row_presence,
    row_frequency,
    row_repetition,
    row_drafts,
    row_forbidden_counts,
    row_forbidden,
    row_bias_counts,
    row_bias_ids,
    row_bias_values,
    drafted,
    TOKENS: tl.constexpr,
    DRAFTS: tl.constexpr,
    FORBIDDEN: tl.constexpr,
    BIASES: tl.constexpr,
    EDITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row // TOKENS)
    behind = row % TOKENS + drafted
    position = tl.load(lengths + slot) + 1 + behind
    tl.store(row_slots + row, slot)
    tl.store(row_position + row, position)
    tl.store(row_temperature + row, tl.load(temperature + slot))
    tl.store(row_top_k + row, tl.load(top_k + slot))
    tl.store(row_top_p + row, tl.load(top_p + slot))
    tl.store(row_min_p + row, tl.load(min_p + slot))
    tl.store(row_stream + row, tl.load(stream + slot))
    if EDITS:
        tl.store(row_presence + row, tl.load(presence + slot))
        tl.store(row_frequency + row, tl.load(frequency + slot))
        tl.store(row_repetition + row, tl.load(repetition + slot))
        place = tl.arange(0, DRAFTS)
        tl.store(row_drafts + row * DRAFTS + place, tl.load(drafts + slot * DRAFTS + place, mask=place < behind, other=-1))
        count = tl.where(position < tl.load(may_stop_from + slot), tl.load(forbidden_counts + slot), 0)
        tl.store(row_forbidden_counts + row, count)
        place = tl.arange(0, FORBIDDEN)
        ids = tl.load(forbidden + slot * FORBIDDEN + place, mask=place < count, other=0)
        tl.store(row_forbidden + row * FORBIDDEN + place, ids, mask=place < count)
        count = tl.load(bias_counts + slot)
        tl.store(row_bias_counts + row, count)
        place = tl.arange(0, BIASES)
        ids = tl.load(bias_ids + slot * BIASES + place, mask=place < count, other=0)
        tl.store(row_bias_ids + row * BIASES + place, ids, mask=place < count)
        values = tl.load(bias_values + slot * BIASES + place, mask=place < count, other=0.0)
        tl.store(row_bias_values + row * BIASES + place, values, mask=place < count)


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
    counts; drafts are -1. No slot but 0 is there twice.
    """
    if not backend.active().triton:
        return finish_step_reference(table, slots, sampled, longest)
    count = len(slots)
    chosen = workspace.empty((count,), torch.int64, slots.device)
    report = workspace.empty((count, 2 + 2 * longest), torch.int32, slots.device)
    launch(
        _finish_step,
        (count,),
        slots,
        sampled.ids,
        sampled.model_peak,
        sampled.peak,
        sampled.logprob.view(torch.int32),
        table.lengths,
        table.tokens,
        table.drafts,
        table.counts,
        chosen,
        report,
        table.counts.shape[1],
        TOKENS=longest,
        PADDED=triton.next_power_of_2(longest),
        DRAFTS=MOST_DRAFTS,
        UNUSABLE=UNUSABLE,
        EXCLUDED=EXCLUDED,
        num_warps=1,
        **early(),
    )
    return Finished(chosen, report)


def finish_step_reference(table: SequenceTable, slots: Tensor, sampled: Sampled, longest: int) -> Finished:
    count, device = len(slots), slots.device
    ids = sampled.ids.view(count, longest)
    status = torch.where(sampled.peak.isfinite(), 0, EXCLUDED)
    status = torch.where(sampled.model_peak.isfinite(), status, UNUSABLE).view(count, longest)
    ends = status != 0
    ends[:, :-1] |= ids[:, :-1] != table.drafts[slots, : longest - 1]
    ends[:, -1] = True
    last = ends.int().argmax(1)  # the first row that ends the sequence's part of the step
    row = torch.arange(count, device=device)
    status, token = status[row, last], ids[row, last]
    tokens = last + (status == 0)
    scores = sampled.logprob.view(torch.int32).view(count, longest)
    report = torch.cat((tokens[:, None], status[:, None], ids, scores), 1).to(torch.int32)
    real = slots > 0
    slot = slots[real]
    table.lengths[slot] += tokens[real]
    table.tokens[slot] = token[real]
    table.drafts[slot] = -1
    taken = real[:, None] & (torch.arange(longest, device=device) < tokens[:, None])
    places = (slots[:, None].expand_as(ids)[taken], ids[taken])
    table.counts.index_put_(places, torch.full_like(places[0], 2, dtype=torch.int32), accumulate=True)
    return Finished(row * longest + last, report)


@jit
def _finish_step(
    slots,
    ids,
    model_peak,
    peak,
    logprob_bits,
    lengths,
    next_tokens,
    drafts,
    counts,
    chosen,
    report,
    vocab,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    DRAFTS: tl.constexpr,
    UNUSABLE: tl.constexpr,
    EXCLUDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    behind = tl.arange(0, PADDED)
    real = behind < TOKENS
    at = row * TOKENS + behind
    token = tl.load(ids + at, mask=real, other=0)
    usable = tl.abs(tl.load(model_peak + at, mask=real, other=0.0)) < float("inf")  # false for NaN too
    left = tl.abs(tl.load(peak + at, mask=real, other=0.0)) < float("inf")
    status = tl.where(usable, tl.where(left, 0, EXCLUDED), UNUSABLE)
    guess = tl.load(drafts + slot * DRAFTS + behind, mask=behind < TOKENS - 1, other=-1)
    last = tl.min(tl.where((status != 0) | (token != guess), behind, TOKENS - 1), 0)
    status = tl.sum(tl.where(behind == last, status, 0), 0)
    came = last + (status == 0).to(tl.int32)
    tl.store(chosen + row, row * TOKENS + last)
    told = report + row * (2 + 2 * TOKENS)
    tl.store(told, came)
    tl.store(told + 1, status)
    tl.store(told + 2 + behind, token.to(tl.int32), mask=real)
    tl.store(told + 2 + TOKENS + behind, tl.load(logprob_bits + at, mask=real, other=0), mask=real)
    if slot > 0:
        tl.store(lengths + slot, tl.load(lengths + slot) + came)
        tl.store(next_tokens + slot, tl.sum(tl.where(behind == last, token, 0), 0))
        tl.store(drafts + slot * DRAFTS + tl.arange(0, DRAFTS), tl.full([DRAFTS], -1, tl.int64))
        tl.atomic_add(counts + slot * vocab + token, tl.full([PADDED], 2, tl.int32), mask=behind < came, sem="relaxed")


def begin_draft(table: SequenceTable, batch: Ragged, tokens: Tensor, drafted: int) -> None:
    """Lays out a draft behind `drafted` >= 1 others, one token a row, in place: the newest draft and where the MTP layer has
    its row, one position before that of the draft. Of `batch` positions, starts and slots are written, page_table is not."""
    if not backend.active().triton:
        begin_draft_reference(table, batch, tokens, drafted)
        return
    count = len(batch.slots)
    launch(
        _begin_draft,
        (triton.cdiv(count, ROWS),),
        table.rows,
        table.lengths,
        table.drafts,
        batch.slots,
        batch.starts,
        batch.positions,
        tokens,
        count,
        drafted,
        DRAFTS=MOST_DRAFTS,
        ROWS=ROWS,
        num_warps=1,
        **early(),
    )


def begin_draft_reference(table: SequenceTable, batch: Ragged, tokens: Tensor, drafted: int) -> None:
    slots = table.rows[: len(batch.slots)]
    batch.slots.copy_(slots)
    batch.starts.copy_(table.lengths[slots] + drafted - 1)
    batch.positions.copy_(batch.starts)
    tokens.copy_(table.drafts[slots, drafted - 1].clamp(min=0))


@jit(do_not_specialize=["count", "drafted"])
def _begin_draft(
    rows,
    lengths,
    drafts,
    slots,
    starts,
    positions,
    tokens,
    count,
    drafted,
    DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < count
    slot = tl.load(rows + row, mask=real, other=0)
    position = tl.load(lengths + slot, mask=real, other=0) + drafted - 1
    tl.store(slots + row, slot, mask=real)
    tl.store(starts + row, position, mask=real)
    tl.store(positions + row, position, mask=real)
    newest = tl.load(drafts + slot * DRAFTS + drafted - 1, mask=real, other=0)
    tl.store(tokens + row, tl.maximum(newest, 0), mask=real)


def keep_draft(table: SequenceTable, slots: Tensor, ids: Tensor, drafted: int) -> None:
    """Stores the draft that comes behind `drafted` others. ids int64 [B]."""
    if not backend.active().triton:
        keep_draft_reference(table, slots, ids, drafted)
        return
    grid = (triton.cdiv(len(slots), ROWS),)
    launch(
        _keep_draft, grid, table.drafts, slots, ids, len(slots), drafted, DRAFTS=MOST_DRAFTS, ROWS=ROWS, num_warps=1, **early()
    )


def keep_draft_reference(table: SequenceTable, slots: Tensor, ids: Tensor, drafted: int) -> None:
    real = slots > 0
    table.drafts[slots[real], drafted] = ids[real]


@jit(do_not_specialize=["count", "drafted"])
def _keep_draft(drafts, slots, ids, count, drafted, DRAFTS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < count, other=0)
    tl.store(drafts + slot * DRAFTS + drafted, tl.load(ids + row, mask=row < count, other=0), mask=slot > 0)
