"""What the draft layer starts from, and the rows that it goes on with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cases.case import V4_FLASH, Case, Widths
from kernels.streams import join_streams, join_streams_reference, take_rows


@dataclass(frozen=True, slots=True)
class Inputs:
    token: Tensor
    streams: Tensor
    index: Tensor


def make(
    widths: Widths, sequences: int, tokens: int, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    """A step of `tokens` rows a sequence, of which each sequence goes on with one."""
    count = sequences * tokens
    token = torch.empty(count, widths.hidden, dtype=dtype, device=device)
    streams = torch.empty(count, widths.streams, widths.hidden, dtype=dtype, device=device)
    index = torch.empty(sequences, dtype=torch.int64, device=device)
    if seed >= 0:
        generator = torch.Generator(device).manual_seed(seed)
        token.normal_(generator=generator)
        streams.normal_(generator=generator)
        index.random_(0, count, generator=generator)
    return Inputs(token, streams, index)


def cases(widths: Widths) -> list[Case]:
    found: list[Case] = []
    for sequences, tokens in ((1, 1), (1, 5), (64, 2), (1, 127)) if widths is V4_FLASH else ((1, 1), (7, 3)):
        found += step_cases(widths, sequences, tokens, torch.bfloat16)
    if widths is not V4_FLASH:  # checkpoints that are not quantised
        found += step_cases(widths, 2, 2, torch.float32)
    return found


def step_cases(widths: Widths, sequences: int, tokens: int, dtype: torch.dtype) -> list[Case]:
    name = f"{sequences} x {tokens} tokens" + (" float32" if dtype == torch.float32 else "")
    stream_bytes = float(dtype.itemsize * widths.hidden)

    def made(device: torch.device, seed: int) -> Inputs:
        return make(widths, sequences, tokens, device, seed, dtype)

    return [
        Case(
            f"join_streams, {name}",
            made,
            lambda i: join_streams(i.token, i.streams),
            lambda i: join_streams_reference(i.token, i.streams),
            0.0,
            sequences * tokens * (1 + 2 * widths.streams) * stream_bytes,
        ),
        Case(
            f"take_rows, {name}",
            made,
            lambda i: take_rows(i.streams, i.index),
            lambda i: i.streams[i.index],
            0.0,
            sequences * 2 * widths.streams * stream_bytes,
        ),
    ]
