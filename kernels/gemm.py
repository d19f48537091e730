"""Linear layers: FP8 x FP8 with block scales, bf16 (or ieee float32) x bf16, and wo_a's bf16 x FP8, group by group.

The reference keeps dequantised weights in float64 and rounds a result once, so a row of the result does not depend on which
other rows are computed with it. The kernels keep weights as stored and sum in float32: block by block of 128 along K within a
segment, then segment by segment. How many segments there are follows from the weight alone (`segments_of`), so up to
SOME_TOKENS rows a row is the same bits whatever the number of rows and whichever kernel computes it (seen on sm_90). With more
rows K is one segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import backend, gemm_hopper, gemm_hopper_few, workspace
from kernels.gemm_portable import FEW_TOKENS, SOME_TOKENS, Operands, kind_of, multiply_portable, segments_of
from kernels.quant import ACTIVATION_BLOCK, Quantised, dequantise_fp8_weight, simulate_fp8
from kernels.quantise import quantise, quantise_reference

LARGEST_EXACT_SCALE = 134  # ue8m0: up to here an e4m3 weight becomes bf16 without overflow
MANY_TOKENS = 512  # above, the large tiles of the FP8 kernel for sm_90 pay
MOST_SPLIT_TILES = 8192  # counters of a weight: tiles of a split launch


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix [N, K]. On the reference backend `values` is float64 and `scales` None; on Triton `values` is as stored, e4m3
    with ue8m0 bytes of 128 x 128 blocks in `scales`, or bf16. `arrivals`: zeros to which every launch returns it."""

    values: Tensor
    scales: Tensor | None
    quantised: bool
    arrivals: Tensor | None = None

    @classmethod
    def fp8(cls, weight: Tensor, scale_bytes: Tensor) -> LinearWeight:
        """weight e4m3 [N, K], scale_bytes uint8 [ceil(N / 128), ceil(K / 128)]. Its input goes through FP8 (spec B.9)."""
        if not backend.active().triton:
            return cls(dequantise_fp8_weight(weight, scale_bytes), None, True)
        return cls(weight.contiguous(), scale_bytes.contiguous(), True, _arrivals(weight.device))

    @classmethod
    def plain(cls, weight: Tensor) -> LinearWeight:
        """weight bf16 [N, K]."""
        if not backend.active().triton:
            return cls(weight.double(), None, False)
        return cls(weight.contiguous(), None, False, _arrivals(weight.device))


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """`groups` matrices [N, K]; their input is not quantised (as in the released kernels). On the reference backend `values`
    is float64 [groups, K, N]; on Triton [groups, N, K], e4m3 with `scales` as of one matrix [groups * N, K], or bf16."""

    values: Tensor
    scales: Tensor | None
    arrivals: Tensor | None = None

    @classmethod
    def fp8(cls, weight: Tensor, scale_bytes: Tensor, groups: int) -> GroupedWeight:
        """weight e4m3 [groups * N, K], scale_bytes uint8 [ceil(groups * N / 128), ceil(K / 128)]."""
        largest = 0 if scale_bytes.is_meta else int(scale_bytes.max())
        if largest > LARGEST_EXACT_SCALE:
            raise ValueError(f"a weight scale is 2^{largest - 127}: up to 2^{LARGEST_EXACT_SCALE - 127} is supported here")
        if not backend.active().triton:
            wide = dequantise_fp8_weight(weight, scale_bytes).bfloat16().double()
            return cls(_by_group(wide, groups).transpose(1, 2).contiguous(), None)
        return cls(_by_group(weight.contiguous(), groups), scale_bytes.contiguous(), _arrivals(weight.device))

    @classmethod
    def plain(cls, weight: Tensor) -> GroupedWeight:
        """weight bf16 [groups, N, K]."""
        if not backend.active().triton:
            return cls(weight.double().transpose(1, 2).contiguous(), None)
        return cls(weight.contiguous(), None, _arrivals(weight.device))


def _by_group(weight: Tensor, groups: int) -> Tensor:
    return torch.unflatten(weight, 0, (groups, -1))


def _arrivals(device: torch.device) -> Tensor:
    return torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=device)


def linear(x: Tensor | Quantised, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K], rows may be apart, times weight [N, K] transposed -> [T, N] in `out_dtype` (if None x's; bf16 for Quantised).

    An FP8 weight takes FP8 activations: a Tensor is quantised first, as before every FP8 and FP4 weight (spec B.9).
    """
    if not backend.active().triton:
        return linear_reference(x, weight, out_dtype)
    out_dtype = out_dtype or (torch.bfloat16 if isinstance(x, Quantised) else x.dtype)
    if isinstance(x, Tensor):
        x = x if x.stride(1) == 1 else x.contiguous()
        out = workspace.empty((len(x), len(weight.values)), out_dtype, x.device)
        if not weight.quantised:
            _multiply(x, None, weight, out)
            return out
        x = quantise(x)
    else:
        assert weight.quantised, "FP8 activations want an FP8 weight"
        out = workspace.empty((len(x.codes), len(weight.values)), out_dtype, x.codes.device)
    _multiply(x.codes, x.scales, weight, out)
    return out


def linear_reference(x: Tensor | Quantised, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    if isinstance(x, Quantised):
        return functional.linear(x.values(), weight.values).to(out_dtype or torch.bfloat16)
    wide = simulate_fp8(x, ACTIVATION_BLOCK) if weight.quantised else x.double()
    return functional.linear(wide, weight.values).to(out_dtype or x.dtype)


def grouped_linear(x: Tensor, weight: GroupedWeight) -> Tensor:
    """x [T, groups, K] times weight [groups, N, K], group by group -> [T, groups, N] in x's dtype."""
    if not backend.active().triton:
        return grouped_linear_reference(x, weight)
    tokens, groups, _ = x.shape
    out = workspace.empty((tokens, groups, weight.values.shape[1]), x.dtype, x.device)
    _multiply(x.contiguous(), None, weight, out)
    return out


def grouped_linear_quantised(x: Tensor, weight: GroupedWeight) -> Quantised:
    """`grouped_linear`, then its bf16 result [T, groups * N] quantised, in the same kernel where N is a multiple of 128."""
    if not backend.active().triton:
        return quantise_reference(grouped_linear_reference(x, weight).flatten(1))
    tokens, groups, _ = x.shape
    outputs = weight.values.shape[1]
    if outputs % ACTIVATION_BLOCK:
        return quantise(grouped_linear(x, weight).flatten(1))
    codes = workspace.empty((tokens, groups * outputs), torch.float8_e4m3fn, x.device)
    scales = workspace.empty((tokens, groups * outputs // ACTIVATION_BLOCK), torch.uint8, x.device)
    _multiply(x.contiguous(), None, weight, codes, scales)
    return Quantised(codes, scales)


def grouped_linear_reference(x: Tensor, weight: GroupedWeight) -> Tensor:
    return torch.bmm(x.double().transpose(0, 1), weight.values).transpose(0, 1).to(x.dtype)


def _multiply(
    x: Tensor, scales: Tensor | None, weight: LinearWeight | GroupedWeight, out: Tensor, out_scales: Tensor | None = None
) -> None:
    """x [T, K] with a LinearWeight or [T, groups, K] with a GroupedWeight. With out_scales the result is quantised into `out`
    and them."""
    values = weight.values if isinstance(weight, GroupedWeight) else weight.values[None]
    groups, outputs, width = values.shape
    tokens, kind = len(x), kind_of(x, weight.scales)
    segments = segments_of(kind, groups * outputs, width) if tokens <= SOME_TOKENS else 1
    chosen = _kernel_for(kind, x, outputs, width, segments, out.dtype)
    with workspace.frame():
        partials = None
        if segments > 1:
            partials = workspace.empty((segments, tokens, groups * outputs), torch.float32, x.device)
        operands = Operands(x, scales, values, weight.scales, out, out_scales, partials, weight.arrivals)
        chosen(operands, segments)


def _kernel_for(
    kind: str, x: Tensor, outputs: int, width: int, segments: int, out_dtype: torch.dtype
) -> Callable[[Operands, int], None]:
    """`outputs` of one group. What the bulk copy engine reads begins at, and has rows of, multiples of 16 bytes."""
    tokens, aligned = len(x), (x.data_ptr() | x.stride(0) * x.element_size()) % 16 == 0
    if not backend.active().hopper or kind == "exact" or tokens == 0 or not aligned:
        return multiply_portable
    few = kind == "dequantise" or tokens <= (FEW_TOKENS if kind == "fp8" else 16)  # beyond, the portable kernel is as fast
    if few and outputs <= 65_536 and gemm_hopper_few.fits(outputs, width):  # so it is for the head
        return gemm_hopper_few.multiply_few
    full = tokens > MANY_TOKENS or gemm_hopper.tiles_of(tokens, outputs, 256) >= 128
    if kind == "fp8" and full and segments == 1 and out_dtype == torch.bfloat16 and gemm_hopper.fits(outputs, width):
        return gemm_hopper.multiply_many
    return multiply_portable
