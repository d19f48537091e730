"""The state of running sequences on the device. Every number is moved as it is, so nothing may differ from the references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cases.case import V4_FLASH, Case, Widths
from kernels.ragged import Ragged
from kernels.sample import Parameters, Sampled
from kernels.sequences import (
    BIASES,
    FORBIDDEN,
    MOST_DRAFTS,
    SequenceTable,
    begin_draft,
    begin_draft_reference,
    begin_step,
    begin_step_reference,
    finish_step,
    finish_step_reference,
    keep_draft,
    keep_draft_reference,
    row_parameters,
    row_parameters_reference,
    write_words,
    write_words_reference,
)

PAGE_TOKENS = 256
WORDS = 2000


@dataclass(frozen=True, slots=True)
class Inputs:
    """A table whose last row fills up, a step's tensors, what the sampler said, and words to write."""

    table: SequenceTable
    batch: Ragged
    tokens: Tensor
    sampled: Sampled
    pairs: Tensor


def make(widths: Widths, rows: int, longest: int, device: torch.device, seed: int) -> Inputs:
    pages = 4096 if widths is V4_FLASH else 16
    table = SequenceTable.make(rows, rows + 1, pages, widths.vocab, device)

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    batch = Ragged(
        positions=zeros(rows * longest),
        sequence_ids=torch.arange(rows * longest, device=device) // longest,
        starts=zeros(rows),
        cu_tokens=torch.arange(rows + 1, device=device) * longest,
        slots=zeros(rows),
        page_table=zeros(rows, pages),
        longest=longest,
    )
    peak, score = torch.ones(2, rows * longest, device=device)
    sampled = Sampled(
        zeros(rows * longest), peak.clone(), peak, score, zeros(rows * longest, 0), zeros(rows * longest, 0).float()
    )
    inputs = Inputs(table, batch, zeros(rows * longest), sampled, zeros(WORDS, 2, dtype=torch.int32))
    if seed >= 0:
        fill(inputs, torch.Generator(device).manual_seed(seed))
    return inputs


def fill(inputs: Inputs, generator: torch.Generator) -> None:
    """Lists are as long as they can be, so that all of them can be compared."""
    table, sampled = inputs.table, inputs.sampled
    slots, pages = table.pages.shape
    vocab = table.counts.shape[1]
    table.rows.copy_(torch.arange(slots - 1, 0, -1, device=table.words.device))
    table.rows[1:].masked_fill_(table.rows[1:] == 1, 0)
    for name, low, high in (
        ("lengths", 0, pages * PAGE_TOKENS - MOST_DRAFTS - 1),
        ("tokens", 0, vocab),
        ("drafts", 0, 2),
        ("stream", -(2**62), 2**62),
        ("pages", 0, 1 << 20),
        ("top_k", 0, vocab),
        ("forbidden", 0, vocab),
        ("bias_ids", 0, vocab),
        ("counts", 0, 8),
    ):
        getattr(table, name)[1:].random_(low, high, generator=generator)
    for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition", "bias_values"):
        getattr(table, name)[1:].normal_(generator=generator)
    table.may_stop_from[1:] = 1 << 40
    table.forbidden_counts[1:] = FORBIDDEN
    table.bias_counts[1:] = BIASES
    sampled.ids.random_(0, 2, generator=generator)
    sampled.peak.masked_fill_(torch.rand(sampled.peak.shape, generator=generator, device=sampled.peak.device) < 0.1, torch.nan)
    sampled.logprob.normal_(generator=generator)
    words = torch.randperm(len(table.words), generator=generator, device=table.words.device)[:WORDS]
    inputs.pairs[: len(words), 0] = words.int()
    inputs.pairs[:, 1].random_(generator=generator)


def change(inputs: Inputs) -> None:
    """Other sequences, lengths, drafts and words in the same tensors."""
    fill(inputs, torch.Generator(inputs.tokens.device).manual_seed(99))


def cases(widths: Widths) -> list[Case]:
    return [case for rows in ((1, 64) if widths is V4_FLASH else (3,)) for case in cases_of(widths, rows)]


def cases_of(widths: Widths, rows: int) -> list[Case]:
    found = [case for longest in range(1, MOST_DRAFTS + 2) for case in step_cases(widths, rows, longest)]
    for drafted in (0, MOST_DRAFTS - 1):
        found += draft_cases(widths, rows, drafted)
    written = pair_of(write_words, write_words_reference, lambda i: (i.table, i.pairs, WORDS - 1), lambda i, _: i.table.words)
    return [*found, case(f"write_words, {rows} rows", widths, rows, 1, written, 12.0 * WORDS)]


Runs = tuple[Callable[[Inputs], Any], Callable[[Inputs], Any]]


def case(name: str, widths: Widths, rows: int, longest: int, runs: Runs, moved_bytes: float) -> Case:
    def made(device: torch.device, seed: int) -> Inputs:
        return make(widths, rows, longest, device, seed)

    return Case(name, made, *runs, 0.0, moved_bytes, change=change)


def pair_of(
    public: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Callable[[Inputs], tuple[Any, ...]],
    result: Callable[[Inputs, Any], Any],
) -> Runs:
    """A function and its reference, of the inputs; result(inputs, what it gave) is compared."""
    return lambda i: result(i, public(*arguments(i))), lambda i: result(i, reference(*arguments(i)))


def step_cases(widths: Widths, rows: int, longest: int) -> list[Case]:
    size = f"{rows} rows, {longest} tokens"
    laid_out = pair_of(
        begin_step, begin_step_reference, lambda i: (i.table, i.batch, i.tokens, PAGE_TOKENS), lambda i, _: (i.batch, i.tokens)
    )
    finished = pair_of(
        finish_step,
        finish_step_reference,
        lambda i: (i.table, i.table.rows, i.sampled, longest),
        lambda i, found: (found, i.table.words),
    )
    pages_bytes = rows * (4096 if widths is V4_FLASH else 16) / 2 * 12.0
    return [
        case(f"begin_step, {size}", widths, rows, longest, laid_out, pages_bytes),
        case(f"row_parameters, {size}", widths, rows, longest, gathered(longest, False), rows * longest * 120.0),
        case(
            f"row_parameters with lists, {size}",
            widths,
            rows,
            longest,
            gathered(longest, True),
            rows * longest * (200.0 + 16 * BIASES),
        ),
        case(f"finish_step, {size}", widths, rows, longest, finished, rows * longest * 40.0),
    ]


def gathered(longest: int, edits: bool) -> Runs:
    """Of real rows: the lists of one that fills up hold nothing that could be compared."""

    def arguments(i: Inputs) -> tuple[Any, ...]:
        rows = i.table.rows
        return i.table, rows[: max(1, len(rows) - 1)], longest, 0, edits

    def compared(i: Inputs, found: Parameters) -> Any:
        p = found
        return p if edits else (p.temperature, p.top_k, p.top_p, p.min_p, p.slots, p.stream, p.position)

    return pair_of(row_parameters, row_parameters_reference, arguments, compared)


def draft_cases(widths: Widths, rows: int, drafted: int) -> list[Case]:
    laid_out = pair_of(
        begin_draft,
        begin_draft_reference,
        lambda i: (i.table, i.batch, i.tokens, drafted + 1),
        lambda i, _: (i.batch, i.tokens),
    )
    kept = pair_of(
        keep_draft,
        keep_draft_reference,
        lambda i: (i.table, i.table.rows, i.sampled.ids, drafted),
        lambda i, _: i.table.drafts,
    )
    return [
        case(f"begin_draft {drafted + 1}, {rows} rows", widths, rows, 1, laid_out, rows * 56.0),
        case(f"keep_draft {drafted}, {rows} rows", widths, rows, 1, kept, rows * 24.0),
    ]
