"""Linear layers. The reference keeps dequantised weights in float64 and rounds a result once, so a row of the result does
not depend on which other rows are computed with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quant import ACTIVATION_BLOCK, simulate_fp8


def linear(x: Tensor, weight: Tensor, fp8_activation: bool, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] times weight float64 [N, K] transposed -> [T, N] in `out_dtype` (x's if None).

    fp8_activation: x goes through FP8 in blocks of 128 first, as before every FP8 and FP4 weight (spec B.9).
    """
    return linear_reference(x, weight, fp8_activation, out_dtype)


def linear_reference(x: Tensor, weight: Tensor, fp8_activation: bool, out_dtype: torch.dtype | None = None) -> Tensor:
    wide = simulate_fp8(x, ACTIVATION_BLOCK) if fp8_activation else x.double()
    return functional.linear(wide, weight).to(out_dtype or x.dtype)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, groups, K] times weight float64 [groups, K, N], group by group -> [T, groups, N] in x's dtype."""
    return grouped_linear_reference(x, weight)


def grouped_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x.double().transpose(0, 1), weight).transpose(0, 1).to(x.dtype)
