"""Manifold-constrained hyper-connections: n residual streams mixed before and after each sublayer (spec B.2, B.10)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def hyper_weights(
    mixes: Tensor, scale: Tensor, base: Tensor, n: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mixes, normalised projections [T, 2n + n*n], scale and base [2n + n*n] -> pre [T, n], post [T, n],
    comb [T, n, n], float64.

    comb is made doubly stochastic by Sinkhorn: softmax of the rows, then columns, then (rows, columns) again.
    """
    pre, post, comb = torch.split(mixes.double() * scale + base, [n, n, n * n], -1)
    comb = torch.softmax(torch.unflatten(comb, -1, (n, n)), -1).add_(eps)
    ones = comb.new_ones(1, 1, n).expand(len(comb), 1, n)  # sums as products: the loop is 39 launches of almost nothing
    comb.div_(torch.bmm(ones, comb).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(torch.bmm(comb, ones.mT).add_(eps))
        comb.div_(torch.bmm(ones, comb).add_(eps))
    return torch.sigmoid(pre).add_(eps), torch.sigmoid(post).mul_(2.0), comb


def hyper_pre(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, n, D] -> the sublayer's input [T, D] in their dtype, and post [T, n], comb [T, n, n] float64 for
    `hyper_post`. fn float64 [2n + n*n, n*D], scale and base float32 [2n + n*n]."""
    return hyper_pre_reference(streams, fn, scale, base, iterations, hc_eps, norm_eps)


def hyper_pre_reference(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = streams.double()
    pre, post, comb = hyper_weights(_mixes(wide, fn, norm_eps), scale, base, streams.shape[1], iterations, hc_eps)
    return torch.bmm(pre[:, None], wide).squeeze(1).to(streams.dtype), post, comb


def hyper_post(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """S'_k = post_k * out + sum_j comb[j, k] * S_j: the sum is over comb's FIRST index. [T, n, D] in streams' dtype."""
    return hyper_post_reference(out, streams, post, comb)


def hyper_post_reference(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.bmm(comb.transpose(1, 2), streams.double())
    return mixed.addcmul_(post[..., None], out.double()[:, None]).to(streams.dtype)


def hyper_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    """The streams as one vector before the last norm: [T, n, D] -> [T, D] in their dtype. fn float64 [n, n*D]."""
    return hyper_head_reference(streams, fn, scale, base, hc_eps, norm_eps)


def hyper_head_reference(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    wide = streams.double()
    pre = torch.sigmoid(_mixes(wide, fn, norm_eps) * scale + base).add_(hc_eps)
    return torch.bmm(pre[:, None], wide).squeeze(1).to(streams.dtype)


def _mixes(wide: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """fn times the streams end to end, divided by one RMS over all of them."""
    flat = wide.flatten(1)
    return functional.linear(flat, fn) * flat.square().mean(-1, keepdim=True).add_(norm_eps).rsqrt_()
