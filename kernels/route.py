"""Which experts a token asks, and with what weight (spec B.8)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels import backend, workspace
from kernels.jit import jit
from kernels.launch import launch
from kernels.rounding import INTERPRETED

WEIGHT_SUM_EPS = 1e-20  # a row whose scores all underflow gets zeros, not NaN
_EXPERT_BLOCK = 64


def route(
    x: Tensor, gate: Tensor, bias: Tensor | None, fixed: Tensor | None, tokens: Tensor, experts_per_token: int, factor: float
) -> tuple[Tensor, Tensor]:
    """x [T, D], gate [E, D] -> expert ids [T, k] and weights float32 [T, k] that add up to `factor`.

    The k largest of sqrt(softplus(gate x)) + bias [E] float32, the lowest id first among equals; or, where the token id
    decides, the row of its `tokens` [T] in `fixed` int64 [V, k]. The bias chooses only; weights come from the scores.
    ids are int32 from the kernel, int64 from the reference.
    """
    if not backend.active().triton:
        chosen = None if fixed is None else fixed[tokens]
        return route_reference(x, gate, bias, chosen, experts_per_token, factor)
    count, width = x.shape
    experts = gate.shape[0]
    rows, splits, depth = _route_tiles(count, width)
    partial = workspace.empty((splits, count, experts), torch.float32, x.device)
    launch(
        _logits_kernel,
        (triton.cdiv(count, rows), triton.cdiv(experts, _EXPERT_BLOCK), splits),
        x,
        gate,
        partial,
        count,
        x.stride(0),
        EXPERTS=experts,
        WIDTH=width,
        SPLITS=splits,
        ROWS=rows,
        BLOCK_E=_EXPERT_BLOCK,
        BLOCK_K=depth,
        num_warps=4,
        num_stages=3,
    )
    ids = workspace.empty((count, experts_per_token), torch.int32, x.device)
    weights = workspace.empty((count, experts_per_token), torch.float32, x.device)
    launch(
        _route_kernel,
        (count,),
        partial,
        bias,
        fixed,
        tokens,
        ids,
        weights,
        count,
        0 if fixed is None else len(fixed),
        factor,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts),
        TOPK=experts_per_token,
        PADDED_K=triton.next_power_of_2(experts_per_token),
        SPLITS=splits,
        EPS=WEIGHT_SUM_EPS,
        num_warps=2,
    )
    return ids, weights


def _route_tiles(count: int, width: int) -> tuple[int, int, int]:
    """(tokens a program, splits of the width, width a step). Few tokens: the 2 MB of the gate need the whole card."""
    if backend.active().cuts_alike(count):
        return 16 if count <= 64 else 32, min(16, triton.cdiv(width, 64)), 64
    if count <= 64:
        return 16, min(32 if count <= 16 else 16, triton.cdiv(width, 64)), 64
    if count <= 1024:
        return 32, min(4, triton.cdiv(width, 64)), 64
    return 64, 1, 64


def route_reference(
    x: Tensor, gate: Tensor, bias: Tensor | None, fixed: Tensor | None, experts_per_token: int, factor: float
) -> tuple[Tensor, Tensor]:
    """As `route`, but `fixed` [T, k] has a row for every token of x."""
    logits = functional.linear(x.double(), gate.double()).float().double()
    scores = functional.softplus(logits, threshold=40.0).sqrt_()
    if fixed is not None:
        ids = fixed
    else:
        chosen_by = scores if bias is None else scores + bias
        ids = torch.sort(chosen_by, descending=True, stable=True).indices[:, :experts_per_token]
    weights = scores.gather(1, ids)
    return ids, (weights * (factor / (weights.sum(-1, keepdim=True) + WEIGHT_SUM_EPS))).float()


@jit(do_not_specialize=["count"])
def _logits_kernel(
    x,
    gate,
    partial,
    count,
    x_stride,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partial float32 [SPLITS, T, E]: program (i, j, s) sums its share of the width for ROWS tokens and BLOCK_E experts."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(2)
    STEPS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    total = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for step in range(SHARE):
        channel = (split * SHARE + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = channel < WIDTH
        rows = tl.load(
            x + token.to(tl.int64)[:, None] * x_stride + channel[None, :],
            mask=(token < count)[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            gate + expert[None, :] * WIDTH + channel[:, None], mask=(expert < EXPERTS)[None, :] & inside[:, None], other=0.0
        )
        if INTERPRETED:  # it cannot multiply bf16
            rows = rows.to(tl.float32)
        total = tl.dot(rows, weight.to(rows.dtype), total, input_precision="ieee")
    where = (split * count + token).to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(partial + where, total, mask=(token < count)[:, None] & (expert < EXPERTS)[None, :])


@jit(do_not_specialize=["count"])
def _route_kernel(
    partial,
    bias,
    fixed,
    tokens,
    ids,
    weights,
    count,
    vocab,
    factor,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOPK: tl.constexpr,
    PADDED_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EPS: tl.constexpr,
):
    """One token a program: adds the splits up in order, then k times the best of what is left."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    exists = expert < EXPERTS
    logit = tl.zeros((PADDED,), tl.float32)
    for split in tl.static_range(SPLITS):
        logit += tl.load(partial + (split * count + token) * EXPERTS + expert, mask=exists, other=0.0)
    score = tl.sqrt_rn(_softplus(logit))
    choice = tl.arange(0, PADDED_K)
    if fixed is not None:
        name = tl.load(tokens + token)
        known = (name >= 0) & (name < vocab)  # an id outside the table asks expert 0, as its embedding is zeros
        row = tl.load(fixed + name * TOPK + choice, mask=(choice < TOPK) & known, other=0).to(tl.int32)
    else:
        key = score
        if bias is not None:
            key += tl.load(bias + expert, mask=exists, other=0.0)
        key = tl.where(exists, key, float("-inf"))
        row = tl.zeros((PADDED_K,), tl.int32)
        for rank in tl.static_range(TOPK):
            best = tl.max(key, 0)
            number = tl.min(tl.where(key == best, expert, EXPERTS - 1), 0)  # the bound only matters for a row of NaN
            row = tl.where(choice == rank, number, row)
            key = tl.where(expert == number, float("-inf"), key)
    chosen = tl.sum(tl.where(expert[None, :] == row[:, None], score[None, :], 0.0), 1)
    chosen = tl.where(choice < TOPK, chosen, 0.0)
    tl.store(ids + token * TOPK + choice, row, mask=choice < TOPK)
    tl.store(weights + token * TOPK + choice, chosen * (factor / (tl.sum(chosen, 0) + EPS)), mask=choice < TOPK)


@jit
def _softplus(x):
    """log(1 + e^x) without overflow, and right to the last bits where e^x is small: log1p by the rounding error of 1 + y."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    log1p = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p
