"""Mixture of experts: who is asked, and the answers' weighted sum (spec B.8)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels import backend, experts_plan
from kernels.experts_weights import ExpertWeights
from kernels.quant import ACTIVATION_BLOCK, Quantised, simulate_fp8
from kernels.quantise import quantise, quantise_reference
from kernels.route import route, route_reference

__all__ = ["ExpertWeights", "experts", "experts_reference", "route", "route_reference", "swiglu", "swiglu_reference"]


def swiglu(gate_up: Tensor, limit: float, quantised: bool) -> Tensor | Quantised:
    """[T, 2F] (gate, then up; rows may be apart) -> silu(min(gate, limit)) * clip(up, +-limit), rounded to gate_up's dtype;
    in FP8 if `quantised`, as the next matrix wants it."""
    if not backend.active().triton:
        hidden = swiglu_reference(gate_up, limit)
        return quantise_reference(hidden) if quantised else hidden
    return experts_plan.swiglu(gate_up, limit, None, None, quantised)


def swiglu_reference(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """... * weights [P], in gate_up's dtype."""
    gate, up = gate_up.double().chunk(2, -1)
    hidden = functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
    return (hidden if weights is None else hidden.mul_(weights[:, None])).to(gate_up.dtype)


def experts(
    x: Tensor | Quantised, experts_weights: ExpertWeights, ids: Tensor, weights: Tensor, limit: float, shared: Tensor | None
) -> Tensor:
    """x [T, D], ids and weights [T, k] of `route`, shared [T, D] -> the experts' weighted sum and `shared` added up in
    float32, [T, D] in the activations' dtype (bf16 where x is quantised).

    Experts that are quantised see x in FP8. The weight multiplies before w2, so it is inside that activation's rounding.
    """
    if not backend.active().triton:
        w13, w2 = experts_weights.w13.values, experts_weights.w2.values
        total = experts_reference(x, w13, w2, ids, weights, limit, experts_weights.quantised)
        return (total if shared is None else total + shared).to(_activation_dtype(x))
    if experts_weights.quantised and isinstance(x, Tensor):
        x = quantise(x)
    plan = experts_plan.Plan(ids, experts_weights)
    gate_up = plan.product(x, experts_weights.w13, gather=True)
    hidden = plan.swiglu(gate_up, limit, weights, experts_weights.quantised)
    answers = plan.product(hidden, experts_weights.w2, gather=False)
    return plan.add_up(answers, shared)


def experts_reference(
    x: Tensor | Quantised, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, limit: float, fp8_activation: bool
) -> Tensor:
    """w13 float64 [E, D, 2F], w2 float64 [E, F, D] -> float32 [T, D], without the shared expert."""
    k = ids.shape[1]
    by_expert, order = torch.sort(ids.flatten(), stable=True)
    numbers, counts = torch.unique_consecutive(by_expert, return_counts=True)
    runs = list(zip(numbers.tolist(), counts.tolist(), strict=True))
    dtype = _activation_dtype(x)

    if isinstance(x, Quantised):
        wide = x.values()
    else:
        wide = simulate_fp8(x, ACTIVATION_BLOCK) if fp8_activation else x.double()
    gate_up = _by_expert(wide[order // k], w13, runs).to(dtype)
    hidden = swiglu_reference(gate_up, limit, weights.flatten()[order])
    hidden = simulate_fp8(hidden, ACTIVATION_BLOCK) if fp8_activation else hidden.double()
    answers = _by_expert(hidden, w2, runs).to(dtype)

    summed = torch.empty_like(answers, dtype=torch.float64)
    summed[order] = answers.double()
    return summed.view(-1, k, wide.shape[1]).sum(1).float()


def _by_expert(rows: Tensor, weight: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """rows [P, K] sorted by expert times weight [E, K, N] -> float64 [P, N]."""
    out = rows.new_empty(len(rows), weight.shape[2])
    at = 0
    for expert, count in runs:
        torch.mm(rows[at : at + count], weight[expert], out=out[at : at + count])
        at += count
    return out


def _activation_dtype(x: Tensor | Quantised) -> torch.dtype:
    return torch.bfloat16 if isinstance(x, Quantised) else x.dtype
