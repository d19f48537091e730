"""The experts' matrices as the kernels want them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import backend
from kernels.experts_fp4 import BLOCK_ROWS, BLOCK_WORDS, SCALE_STEPS, STEP
from kernels.quant import FP4_BLOCK, FP4_VALUES, WEIGHT_BLOCK, dequantise_fp4, dequantise_fp8_weight, fp4_codes

Stored = tuple[Tensor, Tensor | None]  # a matrix [out, in] as the checkpoint has it, and its ue8m0 bytes


@dataclass(frozen=True, slots=True)
class Matrices:
    """One matrix [N, K] for each of E experts.

    kind      values                    scales
    wide      float64 [E, K, N]         None                        the references'
    plain     bf16 [E, N, K]            None
    fp8       e4m3 [E, N, K]            ue8m0 [E, N/128, K/128]
    fp4       uint8 [E, N, K/2]         ue8m0 [E, N, K/32]          the even channel is the low nibble
    fragments int32 [E, N/64, K/128,    int32 [E, N/64, K/128, 64]  FP4 for experts_fp4; row_scales float32 [E, N]
              1024]
    """

    kind: str
    values: Tensor
    scales: Tensor | None
    row_scales: Tensor | None
    n: int
    k: int

    @classmethod
    def allocate(cls, kind: str, count: int, n: int, k: int, device: torch.device | str) -> Matrices:
        """Not filled yet."""

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(count, *shape, dtype=dtype, device=device)

        if not backend.active().triton:
            return cls("wide", empty(torch.float64, k, n), None, None, n, k)
        if kind == "plain":
            return cls(kind, empty(torch.bfloat16, n, k), None, None, n, k)
        if kind == "fp8":
            blocks = (-(-n // WEIGHT_BLOCK), -(-k // WEIGHT_BLOCK))
            return cls(kind, empty(torch.float8_e4m3fn, n, k), empty(torch.uint8, *blocks), None, n, k)
        if backend.active().arch >= 90 and n % BLOCK_ROWS == 0 and k % STEP == 0:
            blocks = (n // BLOCK_ROWS, k // STEP)
            words, scales = empty(torch.int32, *blocks, BLOCK_WORDS), empty(torch.int32, *blocks, BLOCK_ROWS)
            return cls("fragments", words, scales, empty(torch.float32, n), n, k)
        return cls(kind, empty(torch.uint8, n, k // 2), empty(torch.uint8, n, k // FP4_BLOCK), None, n, k)

    def fill(self, number: int, parts: list[Stored]) -> None:
        """Expert `number`: the parts on top of each other."""
        if self.kind == "wide":
            self.values[number] = torch.cat([dequantised(*part) for part in parts]).T
            return
        if self.kind == "plain":
            self.values[number] = torch.cat([values for values, _ in parts])
            return
        values, scales = torch.cat([values for values, _ in parts]), torch.cat([_known(scales) for _, scales in parts])
        assert self.scales is not None
        if self.row_scales is None:
            self.values[number], self.scales[number] = values.view(self.values.dtype), scales
        else:
            self.values[number], self.scales[number], self.row_scales[number] = fragments(values, scales)


def fragments(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """packed int8 [N, K/2] and ue8m0 [N, K/32] -> the words and scale words of one expert in the order of
    `experts_fp4`, and row_scales float32 [N]; N a multiple of 64, K of 128.

    A value is e2m1 * 2^(scale byte - 5) * row scale, the byte 0..11: the largest block of a row gets 11. That is exact where
    the scales of a row lie within 2^11; in a smaller block values are rounded to the grid of byte 0, so by less than 2^-15
    of the row's largest possible value.
    """
    codes = packed.view(torch.uint8)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    blocks = codes.unflatten(1, (-1, FP4_BLOCK))
    used = (blocks & 7).amax(-1) > 0
    top = torch.where(used, scales, 1).amax(1, keepdim=True).int()
    raised = scales.int() - top + SCALE_STEPS
    raised = torch.where(used, raised, 0)
    codes = torch.where((raised < 0)[..., None], _shifted_codes(blocks, raised), blocks).flatten(1)
    row_scales = torch.exp2((top[:, 0] - 127 - (SCALE_STEPS - 5)).double()).float()
    return _word_order(codes), _scale_order(raised.clamp(min=0)), row_scales


def _shifted_codes(blocks: Tensor, raised: Tensor) -> Tensor:
    """The codes of values times 2^raised, raised negative where it matters: rounded to e2m1."""
    magnitude = torch.tensor(FP4_VALUES, device=blocks.device)[(blocks & 7).int()] * torch.exp2(raised.float())[..., None]
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return fp4_codes((magnitude / step).round() * step) | (blocks & 8)


def _word_order(codes: Tensor) -> Tensor:
    """codes 0..15 [N, K] -> int32 [N/64, K/128, 1024]. Of a word's eight magnitudes the low half are four channels, the high
    half those 16 further; the signs of the former are bits 7, 15, 23, 31, of the latter 3, 11, 19, 27."""
    n, k = codes.shape
    # block, warp, 8 rows below, row, step, half, 32 channels, 16 further, thread of a row, channel
    parts = codes.view(n // 64, 4, 2, 8, k // 128, 2, 2, 2, 4, 4).permute(0, 4, 5, 1, 3, 8, 6, 2, 7, 9)
    magnitudes, signs = (parts & 7).flatten(-2), parts >> 3
    octets = magnitudes[..., 0::2] | (magnitudes[..., 1::2] << 4) | (signs[..., 0, :] << 7) | (signs[..., 1, :] << 3)
    return octets.contiguous().view(torch.int32).view(n // 64, k // 128, BLOCK_WORDS)


def _scale_order(raised: Tensor) -> Tensor:
    """int32 0..11 [N, K/32] -> int32 [N/64, K/128, 64], four bytes of a row a word; rows 8 apart are neighbours."""
    n, groups = raised.shape
    parts = raised.to(torch.uint8).view(n // 64, 4, 2, 8, groups // 4, 4).permute(0, 4, 1, 3, 2, 5)
    return parts.contiguous().view(torch.int32).view(n // 64, groups // 4, BLOCK_ROWS)


def _known(scales: Tensor | None) -> Tensor:
    assert scales is not None, "a quantised matrix without scales"
    return scales


def dequantised(values: Tensor, scales: Tensor | None) -> Tensor:
    """float64 [out, in], whatever it is stored as."""
    if scales is None:
        return values.double()
    return (dequantise_fp4 if values.dtype is torch.int8 else dequantise_fp8_weight)(values, scales)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """All experts of a layer, E of them: w13 [2F, D] (w1, the gate, over w3) and w2 [D, F] each.

    `allocate`, then `fill` expert by expert: beside the whole, memory holds one expert as the checkpoint has it.
    """

    kind: str  # "fp4", "fp8" or "plain"
    w13: Matrices
    w2: Matrices

    @classmethod
    def allocate(cls, kind: str, count: int, hidden: int, inner: int, device: torch.device | str) -> ExpertWeights:
        """For the active backend. Raises ValueError for a kind or a width that no kernel takes."""
        if kind not in ("fp4", "fp8", "plain"):
            raise ValueError(f"experts are stored as fp4, fp8 or plain, not as {kind}")
        if kind == "fp4" and (hidden % FP4_BLOCK or inner % FP4_BLOCK):
            raise ValueError(f"FP4 experts need widths that are multiples of {FP4_BLOCK}, not {hidden} and {inner}")
        if kind == "fp8" and inner % WEIGHT_BLOCK:
            raise ValueError(f"FP8 experts need an inner width that is a multiple of {WEIGHT_BLOCK}, not {inner}")
        w13 = Matrices.allocate(kind, count, 2 * inner, hidden, device)
        return cls(kind, w13, Matrices.allocate(kind, count, hidden, inner, device))

    def fill(self, number: int, w1: Stored, w3: Stored, w2: Stored) -> None:
        """w1, w3 [F, D] and w2 [D, F] as the checkpoint has them: (int8 or e4m3, ue8m0 bytes), or (bf16, None)."""
        self.w13.fill(number, [w1, w3])
        self.w2.fill(number, [w2])

    @property
    def quantised(self) -> bool:
        """Whether activations go through FP8 before each matrix."""
        return self.kind != "plain"
