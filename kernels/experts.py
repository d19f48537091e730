"""Mixture of experts: who is asked, and the answers' weighted sum (spec B.8)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quant import ACTIVATION_BLOCK, simulate_fp8

WEIGHT_SUM_EPS = 1e-20  # a row whose scores all underflow gets zeros, not NaN


def route(
    x: Tensor, gate: Tensor, bias: Tensor | None, fixed: Tensor | None, experts_per_token: int, factor: float
) -> tuple[Tensor, Tensor]:
    """x [T, D], gate float64 [E, D] -> expert ids int64 [T, k] and weights float32 [T, k] that add up to `factor`.

    The k largest of sqrt(softplus(gate x)) + bias, the lowest id first among equals; or `fixed` [T, k] where the token
    id decides. The bias chooses only; weights come from the scores.
    """
    return route_reference(x, gate, bias, fixed, experts_per_token, factor)


def route_reference(
    x: Tensor, gate: Tensor, bias: Tensor | None, fixed: Tensor | None, experts_per_token: int, factor: float
) -> tuple[Tensor, Tensor]:
    logits = functional.linear(x.double(), gate).float().double()
    scores = functional.softplus(logits, threshold=40.0).sqrt_()
    if fixed is not None:
        ids = fixed
    else:
        chosen_by = scores if bias is None else scores + bias
        ids = torch.sort(chosen_by, descending=True, stable=True).indices[:, :experts_per_token]
    weights = scores.gather(1, ids)
    return ids, (weights * (factor / (weights.sum(-1, keepdim=True) + WEIGHT_SUM_EPS))).float()


def swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """[P, 2F] (gate, then up) -> silu(min(gate, limit)) * clip(up, +-limit) * weights [P], in gate_up's dtype."""
    return swiglu_reference(gate_up, limit, weights)


def swiglu_reference(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    hidden = functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
    return (hidden if weights is None else hidden.mul_(weights[:, None])).to(gate_up.dtype)


def experts(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, limit: float, fp8_activation: bool) -> Tensor:
    """x [T, D], w13 float64 [E, D, 2F], w2 float64 [E, F, D], ids and weights [T, k] -> the weighted sum, float32 [T, D].

    The weight multiplies before w2, so it is inside that activation's FP8 rounding.
    """
    return experts_reference(x, w13, w2, ids, weights, limit, fp8_activation)


def experts_reference(
    x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, limit: float, fp8_activation: bool
) -> Tensor:
    k = ids.shape[1]
    by_expert, order = torch.sort(ids.flatten(), stable=True)
    numbers, counts = torch.unique_consecutive(by_expert, return_counts=True)
    runs = list(zip(numbers.tolist(), counts.tolist(), strict=True))

    wide = simulate_fp8(x, ACTIVATION_BLOCK) if fp8_activation else x.double()
    gate_up = _by_expert(wide[order // k], w13, runs).to(x.dtype)
    hidden = swiglu_reference(gate_up, limit, weights.flatten()[order])
    hidden = simulate_fp8(hidden, ACTIVATION_BLOCK) if fp8_activation else hidden.double()
    answers = _by_expert(hidden, w2, runs).to(x.dtype)

    summed = torch.empty_like(answers, dtype=torch.float64)
    summed[order] = answers.double()
    return summed.view(-1, k, x.shape[1]).sum(1).float()


def _by_expert(rows: Tensor, weight: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """rows [P, K] sorted by expert times weight [E, K, N] -> float64 [P, N]."""
    out = rows.new_empty(len(rows), weight.shape[2])
    at = 0
    for expert, count in runs:
        torch.mm(rows[at : at + count], weight[expert], out=out[at : at + count])
        at += count
    return out
