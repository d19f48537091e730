"""Sampling on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels.cases.case import V4_FLASH, Case, Widths
from kernels.sample import Parameters, Sampled, noise_stream, sample, sample_reference

READ_GB_PER_S = 4660.0


@dataclass(frozen=True, slots=True)
class Inputs:
    logits: Tensor
    parameters: Parameters
    again: Parameters  # what `change` copies into parameters


def make(widths: Widths, rows: int, temperature: float, top_p: float, device: torch.device, seed: int) -> Inputs:
    logits = torch.empty(rows, widths.vocab, device=device)
    if seed < 0:
        p = parameters(rows, widths.vocab, 0.0, 1.0, device, None)
        return Inputs(logits, p, p)
    generator = torch.Generator(device).manual_seed(seed)
    # A language model's spread: most ids far below a few likely ones.
    logits.normal_(0.0, 2.5, generator=generator)
    likely = torch.randint(0, widths.vocab, (rows, 20), generator=generator, device=device)
    heights = torch.linspace(22.0, 12.0, 20, device=device).expand(rows, 20)
    logits.scatter_(1, likely, heights)
    return Inputs(
        logits,
        parameters(rows, widths.vocab, temperature, top_p, device, generator),
        parameters(rows, widths.vocab, temperature and 0.7, min(top_p, 0.8), device, generator),
    )


def parameters(
    rows: int, vocab: int, temperature: float, top_p: float, device: torch.device, generator: torch.Generator | None
) -> Parameters:
    made = neutral(rows, vocab, 1 if generator is None else rows + 1, device)
    if generator is not None:
        seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator, device=device)
        made.stream.copy_(noise_stream(seeds, torch.zeros_like(seeds)))
        made.position.copy_(torch.randint(0, 1 << 20, (rows,), generator=generator, device=device))
        made.temperature.fill_(temperature)
        made.top_p.fill_(top_p)
    return made


def neutral(
    rows: int, vocab: int, slots: int, device: torch.device | str, forbidden: int = 16, biases: int = 512, drafts: int = 4
) -> Parameters:
    """Greedy rows without changes. forbidden, biases, drafts: what a row's lists can hold, powers of two."""

    def filled(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return Parameters(
        temperature=filled(rows, dtype=torch.float64),
        top_k=filled(rows),
        top_p=filled(rows, value=1, dtype=torch.float64),
        min_p=filled(rows, dtype=torch.float64),
        presence=filled(rows, dtype=torch.float32),
        frequency=filled(rows, dtype=torch.float32),
        repetition=filled(rows, value=1, dtype=torch.float32),
        slots=filled(rows, dtype=torch.int64),
        counts=filled(slots, vocab),
        drafts=filled(rows, drafts, value=-1, dtype=torch.int64),
        forbidden=filled(rows, forbidden),
        forbidden_counts=filled(rows),
        bias_ids=filled(rows, biases),
        bias_values=filled(rows, biases, dtype=torch.float32),
        bias_counts=filled(rows),
        stream=filled(rows, dtype=torch.int64),
        position=filled(rows, dtype=torch.int64),
    )


def edited(inputs: Inputs) -> Inputs:
    """Penalties, bias and forbidden ids on most rows, top-k or min-p on some."""
    for p in (inputs.parameters, inputs.again):
        rows = len(p.slots)
        number = torch.arange(rows, device=p.slots.device)
        p.slots.copy_(number + 1)
        p.counts[1:, ::7] = 3
        p.counts[1:, 3::11] = 1
        p.drafts[::2, :3] = torch.tensor([7, 8, 7], device=p.slots.device)
        p.repetition.copy_(torch.where(number % 3 == 1, 1.1, 1.0))
        p.presence.copy_(torch.where(number % 3 == 2, 0.5, 0.0))
        p.frequency.copy_(torch.where(number % 3 == 2, 0.25, 0.0))
        p.forbidden[:, :3] = torch.tensor([0, 1, 5], dtype=torch.int32, device=p.slots.device)
        p.forbidden_counts.copy_(number % 4)
        p.bias_ids[:, :100] = torch.arange(100, dtype=torch.int32, device=p.slots.device) * 3
        p.bias_values.fill_(1.5)
        p.bias_counts.copy_(torch.where(number % 2 == 1, 100, 0))
        p.top_k.copy_(torch.where(number % 5 == 3, 50, 0))
        p.min_p.copy_(torch.where(number % 5 == 4, 0.02, 0.0))
    return inputs


def change(inputs: Inputs) -> None:
    for field in fields(Parameters):
        getattr(inputs.parameters, field.name).copy_(getattr(inputs.again, field.name))


def compared(sampled: Sampled, tops: int) -> tuple[Tensor, ...]:
    scores = (sampled.logprob,) if tops >= 0 else ()
    best = (sampled.top_ids, sampled.top_logprobs) if tops > 0 else ()
    return sampled.ids, sampled.model_peak, sampled.peak, *scores, *best


def cases(widths: Widths) -> list[Case]:
    counts = (1, 64, 128) if widths is V4_FLASH else (3,)
    return [case for rows in counts for case in cases_of(widths, rows)]


def cases_of(widths: Widths, rows: int) -> list[Case]:
    read_bytes = 4.0 * rows * widths.vocab
    us = read_bytes / READ_GB_PER_S / 1e3

    def made(name: str, temperature: float, top_p: float, edits: bool, tops: int, must_us: float | None = None) -> Case:
        def inputs(device: torch.device, seed: int) -> Inputs:
            found = make(widths, rows, temperature, top_p, device, seed)
            return edited(found) if edits and seed >= 0 else found

        draws = temperature > 0
        listed = widths is V4_FLASH and rows == 64
        return Case(
            f"sample {name}, {rows} rows",
            inputs,
            lambda given: compared(sample(given.logits, given.parameters, draws, edits, tops), tops),
            lambda given: compared(sample_reference(given.logits, given.parameters, draws, edits, tops), tops),
            1e-5,
            read_bytes,
            change=change,
            must_us=must_us if listed else None,
            aim_us=us if listed and must_us else None,
            bench=listed,
        )

    return [
        made("greedy", 0.0, 1.0, False, -1),
        made("greedy, logprob", 0.0, 1.0, False, 0, 3 * us),
        made("greedy, 20 logprobs", 0.0, 1.0, False, 20),
        made("temperature", 1.0, 1.0, False, -1),
        made("top-p", 1.0, 0.9, False, -1, 60.0),
        made("everything", 1.0, 0.9, True, 20),
        made("everything, of a draft", 1.0, 0.9, True, -1),
    ]
