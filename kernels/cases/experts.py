"""Routing and experts at the widths of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import backend
from kernels.cases.case import TINY, V4_FLASH, Case, Widths, invariant
from kernels.experts import ExpertWeights, experts, route, route_reference, swiglu, swiglu_reference
from kernels.experts_weights import Stored, dequantised
from kernels.quant import ACTIVATION_BLOCK, Quantised, simulate_fp8
from kernels.quantise import quantise, quantise_reference

BF16 = torch.bfloat16
FACTOR = 1.5
LIMIT = 10.0
ROUNDED = 6e-3  # an FP8 code at a rounding border goes to its neighbour, a sixteenth away
FEW_EXPERTS = 8  # where only correctness counts
MUST_US = {1: (45.0, 20.0), 64: (850.0, 715.0), 256: (1000.0, 863.0), 4096: (2600.0, 2130.0)}  # and aim


def cases(widths: Widths) -> list[Case]:
    found = []
    for tokens in (1, 5, 64, 300, 4096) if widths is V4_FLASH else (1, 5, 70):
        found += [_route(widths, tokens, hashed=False), _route(widths, tokens, hashed=True)]
    found += [invariant(_route(widths, tokens, hashed=False)) for tokens in (5, 150)]
    found += [_swiglu(widths, tokens, quantised) for tokens in (1, 33) for quantised in (True, False)]
    for tokens in (1, 7, 40, 150, 400) if widths is V4_FLASH else (1, 7, 90):
        found += [_experts(widths, "fp4", tokens, FEW_EXPERTS), _experts(widths, "fp8", tokens, FEW_EXPERTS)]
    found.append(_experts(widths, "plain", 5, FEW_EXPERTS))
    found.append(invariant(_experts(widths, "fp8", 150, FEW_EXPERTS)))
    if widths is TINY:
        found += [_experts(widths, "fp4", tokens, FEW_EXPERTS) for tokens in (16, 24, 40, 56, 256, 512)]
    if widths is V4_FLASH:
        found += [_experts(widths, "fp4", tokens, widths.experts) for tokens in (1, 8, 64, 256, 1024, 4096)]
    return found


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _random(device: torch.device, seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Only a shape where the seed is negative."""
    if seed < 0:
        return torch.empty(*shape, dtype=dtype, device=device)
    return torch.randn(*shape, dtype=dtype, device=device, generator=_generator(device, seed))


def _choices(device: torch.device, seed: int, tokens: int, count: int, k: int) -> Tensor:
    """int32 [tokens, k], no expert twice in a row."""
    if seed < 0:
        return torch.empty(tokens, k, dtype=torch.int32, device=device)
    scores = torch.rand(tokens, count, device=device, generator=_generator(device, seed))
    return scores.topk(k).indices.int()


@dataclass(frozen=True, slots=True)
class Routing:
    x: Tensor
    gate: Tensor
    bias: Tensor | None
    fixed: Tensor | None
    tokens: Tensor
    k: int


def _route(widths: Widths, tokens: int, hashed: bool) -> Case:
    count, k = widths.experts, widths.experts_per_token

    def make(device: torch.device, seed: int) -> Routing:
        x, gate = _random(device, seed, tokens, widths.hidden), _random(device, seed + 1, count, widths.hidden)
        gate = gate / widths.hidden**0.5
        at = torch.arange(tokens, device=device) % 7
        if hashed:
            return Routing(x, gate, None, _choices(device, seed, 7, count, k).long(), at, k)
        return Routing(x, gate, _random(device, seed + 2, count, dtype=torch.float32) / 8, None, at, k)

    def run(made: Routing) -> tuple[Tensor, Tensor]:
        return route(made.x, made.gate, made.bias, made.fixed, made.tokens, made.k, FACTOR)

    def expected(made: Routing) -> tuple[Tensor, Tensor]:
        chosen = None if made.fixed is None else made.fixed[made.tokens]
        ids, weights = route_reference(made.x, made.gate, made.bias, chosen, made.k, FACTOR)
        return ids.int(), weights

    moved = 2.0 * widths.hidden * (tokens + count)
    flops = 2.0 * tokens * count * widths.hidden
    name = f"route {'by table' if hashed else 'by score'} T={tokens}"
    return Case(name, make, run, expected, 1e-5, moved, flops)


def _swiglu(widths: Widths, tokens: int, quantised: bool) -> Case:
    def make(device: torch.device, seed: int) -> Tensor:
        return _random(device, seed, tokens, 2 * widths.moe_inner, dtype=BF16 if quantised else torch.float32)

    def expected(made: Tensor) -> Tensor | Quantised:
        hidden = swiglu_reference(made, LIMIT)
        return quantise_reference(hidden) if quantised else hidden

    moved = tokens * widths.moe_inner * (5.0 if quantised else 12.0)
    name = f"swiglu {'to FP8' if quantised else 'float32'} T={tokens}"
    return Case(name, make, lambda made: swiglu(made, LIMIT, quantised), expected, ROUNDED if quantised else 1e-6, moved)


@dataclass(frozen=True, slots=True)
class Mixture:
    x: Tensor | Quantised
    weights: ExpertWeights
    ids: Tensor
    gate_weights: Tensor
    shared: Tensor
    seed: int


def _experts(widths: Widths, kind: str, tokens: int, count: int) -> Case:
    hidden, inner, k = widths.hidden, widths.moe_inner, min(widths.experts_per_token, 3 if count == FEW_EXPERTS else 99)
    dtype = torch.float32 if kind == "plain" else BF16

    def make(device: torch.device, seed: int) -> Mixture:
        weights = ExpertWeights.allocate(kind, count, hidden, inner, device)
        if seed >= 0:
            for number in range(count):
                weights.fill(number, *_expert(kind, hidden, inner, device, seed, number))
        plain = _random(device, seed, tokens, hidden, dtype=dtype)
        x = plain if kind == "plain" else _quantised(plain, seed)
        gate_weights = _random(device, seed, tokens, k, dtype=torch.float32).abs()
        shared = _random(device, seed + 1, tokens, hidden, dtype=dtype)
        return Mixture(x, weights, _choices(device, seed, tokens, count, k), gate_weights, shared, seed)

    def run(made: Mixture) -> Tensor:
        return experts(made.x, made.weights, made.ids, made.gate_weights, LIMIT, made.shared)

    def expected(made: Mixture) -> Tensor:
        return _expected(made, kind, hidden, inner, dtype)

    bits = {"fp4": 4.25, "fp8": 8.0, "plain": 16.0}[kind]
    busy = count * (1.0 - (1.0 - k / count) ** tokens)
    moved = busy * 3 * hidden * inner * bits / 8 + tokens * hidden * 5.0
    must, aim = MUST_US.get(tokens, (None, None)) if count == V4_FLASH.experts else (None, None)
    name = f"experts {kind} {count}/{k} T={tokens}"
    matrix = "fp32" if kind == "plain" else "fp8" if kind == "fp4" and backend.active().hopper else "bf16"
    flops = 6.0 * tokens * k * hidden * inner
    bench = count == V4_FLASH.experts
    return Case(name, make, run, expected, ROUNDED, moved, flops, matrix, must_us=must, aim_us=aim, bench=bench)


def _quantised(x: Tensor, seed: int) -> Quantised:
    if seed >= 0:
        return quantise(x)
    blocks = -(-x.shape[1] // ACTIVATION_BLOCK)
    return Quantised(torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(x.shape[0], blocks, dtype=torch.uint8))


def _expert(kind: str, hidden: int, inner: int, device: torch.device, seed: int, number: int) -> tuple[Stored, Stored, Stored]:
    """w1, w3 and w2 of one expert, the same whenever it is asked for."""
    generator = _generator(device, 1000 * seed + number)

    def matrix(out: int, width: int) -> Stored:
        if kind == "plain":
            return torch.randn(out, width, dtype=BF16, device=device, generator=generator) / width**0.5, None
        blocks = (out, width // 32) if kind == "fp4" else (-(-out // 128), -(-width // 128))
        scales = torch.randint(117, 121, blocks, dtype=torch.uint8, device=device, generator=generator)
        if kind == "fp4":
            return torch.randint(-128, 128, (out, width // 2), dtype=torch.int8, device=device, generator=generator), scales
        return torch.randn(out, width, device=device, generator=generator).to(torch.float8_e4m3fn), scales

    return matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)


def _expected(made: Mixture, kind: str, hidden: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Expert by expert, so that one at a time is in float64."""
    x = made.x.values() if isinstance(made.x, Quantised) else made.x.double()
    summed = torch.zeros(*made.ids.shape, hidden, dtype=torch.float64, device=x.device)
    for number in made.ids.unique().tolist():
        w1, w3, w2 = _expert(kind, hidden, inner, x.device, made.seed, number)
        at = (made.ids == number).nonzero(as_tuple=True)
        gate_up = functional.linear(x[at[0]], torch.cat((dequantised(*w1), dequantised(*w3)))).to(dtype)
        rows = swiglu_reference(gate_up, LIMIT, made.gate_weights[at])
        wide = rows.double() if kind == "plain" else simulate_fp8(rows, ACTIVATION_BLOCK)
        summed[at] = functional.linear(wide, dequantised(*w2)).to(dtype).double()
    return (summed.sum(1).float() + made.shared).to(dtype)
