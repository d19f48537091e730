"""RMSNorm (spec B)."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] over its last dim, times weight float64 [C]; in x's dtype, rounded once."""
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return (wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(weight).to(x.dtype)


def query_norm(x: Tensor, eps: float) -> Tensor:
    """x [..., C] over its last dim, without a weight. The released code does this one in the activation dtype: squares,
    mean, mean + eps and root are each rounded to it, and the golden values show that."""
    return query_norm_reference(x, eps)


def query_norm_reference(x: Tensor, eps: float) -> Tensor:
    mean = x.square().double().mean(-1, keepdim=True).to(x.dtype)
    return x * (mean + eps).double().rsqrt_().to(x.dtype)
