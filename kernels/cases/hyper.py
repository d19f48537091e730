"""Hyper-connections and the embedding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cases.case import TINY, V4_FLASH, Case, Widths
from kernels.embed import embed, embed_reference
from kernels.hyper import (
    HyperWeights,
    Mixed,
    hyper_head,
    hyper_head_reference,
    hyper_post,
    hyper_post_pre,
    hyper_post_reference,
    hyper_pre,
    mixed_reference,
)
from kernels.norm import rms_norm_reference

EPS = 1e-6
READ_GB_PER_S = 4660.0  # what `must` and `aim` in microseconds were computed with: 0.6 and 0.85 of the byte floor
TOLERANCE = 2e-3  # a few roundings that fall the other way, 2^-9 each in bf16 and 2^-4 in FP8: 5e-4 was seen


@dataclass(frozen=True, slots=True)
class Inputs:
    streams: Tensor
    out: Tensor
    post: Tensor
    comb: Tensor
    weights: HyperWeights
    norm_weight: Tensor
    into: Tensor  # where hyper_post writes, so that a repeated run finds its inputs again


def make(
    widths: Widths, tokens: int, outputs: int, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    n, width = widths.streams, widths.hidden
    generator = None
    if seed >= 0:
        generator = torch.Generator(device).manual_seed(seed)

    def filled(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0, deviation: float = 1.0) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made if generator is None else made.normal_(mean, deviation, generator=generator)

    fp32 = torch.float32
    return Inputs(
        streams=filled((tokens, n, width), dtype),
        out=filled((tokens, width), dtype),
        post=filled((tokens, n), fp32, 1.0, 0.3),
        comb=filled((tokens, n, n), fp32, 0.25, 0.1),
        weights=HyperWeights(
            filled((outputs, n * width), fp32, 0.0, (n * width) ** -0.5),
            filled((outputs,), fp32, 1.0, 0.2),
            filled((outputs,), fp32),
            n,
            widths.sinkhorn if outputs > n else 0,  # the head joins the streams and mixes none
            EPS,
        ),
        norm_weight=filled((width,), dtype, 1.0, 0.1),
        into=torch.empty(tokens, n, width, dtype=dtype, device=device),
    )


def expected_pre(inputs: Inputs, streams: Tensor) -> Mixed:
    weights = replace(inputs.weights, fn=inputs.weights.fn.double())
    return mixed_reference(streams, weights, inputs.norm_weight.double(), EPS, True)


def expected_post(inputs: Inputs) -> Tensor:
    return hyper_post_reference(inputs.out, inputs.streams, inputs.post, inputs.comb)


def expected_head(inputs: Inputs) -> Tensor:
    w = inputs.weights
    mixed = hyper_head_reference(inputs.streams, w.fn.double(), w.scale, w.base, EPS, EPS)
    return rms_norm_reference(mixed, inputs.norm_weight.double(), EPS)


def run_pre(inputs: Inputs) -> Mixed:
    return hyper_pre(inputs.streams, inputs.weights, inputs.norm_weight, EPS, True)


def run_post(inputs: Inputs) -> Tensor:
    return hyper_post(inputs.out, inputs.streams, inputs.post, inputs.comb, inputs.into)


def run_post_pre(inputs: Inputs) -> tuple[Tensor, Mixed]:
    i = inputs
    return hyper_post_pre(i.out, i.streams, i.post, i.comb, i.weights, i.norm_weight, EPS, True, i.into)


def run_head(inputs: Inputs) -> Tensor:
    return hyper_head(inputs.streams, inputs.weights, inputs.norm_weight, EPS)


def post_then_pre(inputs: Inputs) -> tuple[Tensor, Mixed]:
    """One boundary as two calls."""
    streams = run_post(inputs)
    return streams, hyper_pre(streams, inputs.weights, inputs.norm_weight, EPS, True)


def expected_post_pre(inputs: Inputs) -> tuple[Tensor, Mixed]:
    streams = expected_post(inputs)
    return streams, expected_pre(inputs, streams)


def boundary_bytes(widths: Widths, tokens: int) -> float:
    """Of a post and a pre: the streams read for each and written once, the sublayer's output read, the next one's input
    written in bf16 and FP8, the projection read once."""
    n, width = widths.streams, widths.hidden
    return tokens * width * (2 * (3 * n + 2) + 1) + 4 * (2 * n + n * n) * n * width


def cases(widths: Widths) -> list[Case]:
    mixes = 2 * widths.streams + widths.streams**2
    found = []
    for tokens in {V4_FLASH: (1, 16, 64, 300, 4096), TINY: (1, 37, 256)}.get(widths, (1, 37)):

        def make_mixes(device: torch.device, seed: int, tokens: int = tokens) -> Inputs:
            return make(widths, tokens, mixes, device, seed)

        floor = boundary_bytes(widths, tokens)
        us = floor / READ_GB_PER_S / 1e3
        listed = widths is V4_FLASH and tokens in (64, 4096)
        for name, run in (("post, pre", post_then_pre), ("post_pre", run_post_pre)):
            found.append(
                Case(
                    f"hyper {name}, {tokens} tokens",
                    make_mixes,
                    run,
                    expected_post_pre,
                    TOLERANCE,
                    floor,
                    must_us=us / 0.6 if listed else None,
                    aim_us=us / 0.85 if listed else None,
                    bench=listed,
                )
            )
    if widths is not V4_FLASH:  # checkpoints that are not quantised: the kernel that any dtype and width can take
        found.append(
            Case(
                "hyper post_pre, 5 tokens float32",
                lambda device, seed: make(widths, 5, mixes, device, seed, torch.float32),
                run_post_pre,
                expected_post_pre,
                5e-3,  # of FP8; the rest is right to 1e-6
            )
        )
    return found + head_cases(widths) + embed_cases(widths)


def head_cases(widths: Widths) -> list[Case]:
    def made(tokens: int) -> Case:
        return Case(
            f"hyper head, {tokens} tokens",
            lambda device, seed: make(widths, tokens, widths.streams, device, seed),
            run_head,
            expected_head,
            TOLERANCE,
            tokens * widths.hidden * 2 * (widths.streams + 1) + 4 * widths.streams**2 * widths.hidden,
        )

    return [made(tokens) for tokens in (1, 64)]


def embed_cases(widths: Widths) -> list[Case]:
    def inputs(device: torch.device, seed: int, tokens: int) -> tuple[Tensor, Tensor]:
        if seed < 0:
            table = torch.empty(widths.vocab, widths.hidden, dtype=torch.bfloat16, device=device)
            return torch.empty(tokens, dtype=torch.int64, device=device), table
        generator = torch.Generator(device).manual_seed(seed)
        ids = torch.randint(-1, widths.vocab + 1, (tokens,), generator=generator, device=device)
        table = torch.empty(widths.vocab, widths.hidden, dtype=torch.bfloat16, device=device)
        return ids, table.normal_(generator=generator)

    def made(tokens: int, streams: int) -> Case:
        return Case(
            f"embed, {tokens} tokens" if streams > 1 else f"embed a draft's token, {tokens} tokens",
            lambda device, seed: inputs(device, seed, tokens),
            lambda given: embed(given[0], given[1], streams),
            lambda given: embed_reference(given[0], given[1], streams),
            0.0,
            tokens * widths.hidden * 2 * (1 + streams),
        )

    return [made(tokens, streams) for tokens in (1, 64) for streams in (widths.streams, 1)]
