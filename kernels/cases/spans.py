"""Spans of words, as KV transfer moves and sums them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cases.case import V4_FLASH, Case, Widths
from kernels.spans import SPAN_WORDS, move_spans, sum_spans


@dataclass(frozen=True, slots=True)
class Inputs:
    source: Tensor
    target: Tensor
    begins: Tensor
    ends_up: Tensor
    counts: Tensor
    weights: Tensor
    sums: Tensor


def make(spans: int, device: torch.device, seed: int) -> Inputs:
    """Spans of every length, the first ones full, that lie in another order in the target, some words apart."""
    source = torch.empty(spans * SPAN_WORDS, dtype=torch.int32, device=device)
    weights = torch.empty(SPAN_WORDS, dtype=torch.int64, device=device)
    counts = torch.full((spans,), SPAN_WORDS, device=device)
    if seed >= 0:
        generator = torch.Generator(device).manual_seed(seed)
        source.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        weights.random_(generator=generator)
        counts[spans // 2 :].random_(1, SPAN_WORDS, generator=generator)
    begins = torch.arange(spans, device=device) * SPAN_WORDS
    return Inputs(source, torch.zeros_like(source), begins, begins.flip(0), counts, weights, torch.empty_like(begins))


def moved(i: Inputs) -> tuple[Tensor, Tensor]:
    move_spans(i.source, i.target, i.begins, i.ends_up, i.counts)
    sum_spans(i.target, i.ends_up, i.counts, i.weights, i.sums)
    return i.target, i.sums


def moved_in_torch(i: Inputs) -> tuple[Tensor, Tensor]:
    spans = i.source.view(-1, SPAN_WORDS)
    spans = torch.where(torch.arange(SPAN_WORDS, device=spans.device) < i.counts[:, None], spans, 0)
    return spans.flip(0).flatten(), (spans * i.weights).sum(1)


def cases(widths: Widths) -> list[Case]:
    spans = 2048 if widths is V4_FLASH else 7
    return [
        Case(
            f"move and sum {spans} spans",
            lambda device, seed: make(spans, device, seed),
            moved,
            moved_in_torch,
            0.0,
            3 * 4.0 * spans * SPAN_WORDS,
        )
    ]
