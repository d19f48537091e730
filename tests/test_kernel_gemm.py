"""Linear layers: kernels against the float64 references, which start from the same quantised numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # isort: skip

from kernels import backend
from kernels.gemm import (
    GroupedWeight,
    LinearWeight,
    grouped_linear,
    grouped_linear_quantised,
    grouped_linear_reference,
    linear,
    linear_reference,
)
from kernels.gemm_portable import Operands, Tiling, multiply_portable, segments_of
from kernels.quant import Quantised
from kernels.quantise import quantise, quantise_reference

torch.set_num_threads(1)
__all__ = ["triton_backend"]
pytestmark = pytest.mark.usefixtures("triton_backend")

BF16_ROUNDING = 3e-3  # relative rms of one rounding to bf16, and of float32 sums in another order before it
FLOAT32_SUMS = 2e-6
FP8_SUMS = 1e-3  # the FP8 matrix units of Hopper keep some 14 bits of the sum over a block of 128
Weight = TypeVar("Weight")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def fp8_matrix(outputs: int, width: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    shape = (-(-outputs // 128), -(-width // 128))
    scales = torch.randint(112, 122, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return random(outputs, width, seed=seed).to(torch.float8_e4m3fn), scales.to(DEVICE)


def for_reference(make: Callable[[], Weight]) -> Weight:
    """The same weight as the references want it."""
    before = backend.active()
    backend.use(backend.REFERENCE)
    try:
        return make()
    finally:
        backend.use(before)


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


def same(left: Quantised, right: Quantised) -> bool:
    return torch.equal(left.codes.float(), right.codes.float()) and torch.equal(left.scales, right.scales)


@pytest.mark.parametrize("tokens, width", [(1, 128), (5, 300), (9, 4096), (3, 64)])
def test_quantise_is_exact(tokens: int, width: int) -> None:
    x = random(tokens, width) * torch.logspace(-7, 3, tokens, device=DEVICE)[:, None].bfloat16()
    x[-1] = 0
    assert same(quantise(x), quantise_reference(x))
    apart = random(tokens, 2 * width)[:, :width]
    assert same(quantise(apart), quantise_reference(apart))


@pytest.mark.parametrize(
    "tokens, outputs, width",
    [(1, 64, 128), (3, 320, 384), (17, 200, 300), (70, 136, 1024), (2, 129, 48), (1, 64, 2048), (130, 128, 256)],
)
def test_fp8_linear(tokens: int, outputs: int, width: int) -> None:
    stored, x = fp8_matrix(outputs, width), random(tokens, width)
    weight, wide = LinearWeight.fp8(*stored), for_reference(lambda: LinearWeight.fp8(*stored))
    got = linear(x, weight)
    assert got.dtype == torch.bfloat16
    assert error(got, linear_reference(x, wide, torch.float64)) < BF16_ROUNDING
    assert torch.equal(linear(quantise(x), weight), got)
    assert error(linear(x, weight, torch.float32), linear_reference(x, wide, torch.float64)) < FP8_SUMS
    assert weight.arrivals is not None and not weight.arrivals.any(), "a launch leaves its counters as it found them"


@pytest.mark.parametrize("tokens, outputs, width", [(1, 64, 1024), (3, 50, 48), (33, 129, 200), (80, 64, 512)])
def test_plain_linear(tokens: int, outputs: int, width: int) -> None:
    stored, x = random(outputs, width, seed=1), random(tokens, 2 * width)[:, :width]
    weight, right = LinearWeight.plain(stored), x.double() @ stored.double().T
    assert error(linear(x, weight, torch.float32), right) < 1e-5
    assert error(linear(x, weight), right) < BF16_ROUNDING
    narrow = x.float() * 1.001  # no bf16
    assert error(linear(narrow, weight), narrow.double() @ stored.double().T) < FLOAT32_SUMS


@pytest.mark.parametrize(
    "tokens, groups, outputs, width", [(1, 2, 128, 256), (5, 2, 128, 1024), (70, 2, 64, 320), (3, 3, 100, 100)]
)
def test_grouped_linear(tokens: int, groups: int, outputs: int, width: int) -> None:
    weight, scales = fp8_matrix(groups * outputs, width)
    x = random(tokens, groups, width)
    ours, wide = GroupedWeight.fp8(weight, scales, groups), for_reference(lambda: GroupedWeight.fp8(weight, scales, groups))
    got = grouped_linear(x, ours)
    assert error(got, grouped_linear_reference(x.double(), wide)) < BF16_ROUNDING
    assert same(grouped_linear_quantised(x, ours), quantise_reference(got.flatten(1)))
    plain = random(groups, outputs, width, seed=2)
    exact = grouped_linear(x.float(), GroupedWeight.plain(plain))
    right = grouped_linear_reference(x.double(), for_reference(lambda: GroupedWeight.plain(plain)))
    assert error(exact, right) < FLOAT32_SUMS


def test_every_code_becomes_its_bf16() -> None:
    """One-hot rows read the weights out: all 254 finite codes, at the smallest and largest scales that bf16 can hold."""
    codes = torch.arange(256, device=DEVICE).to(torch.uint8)
    codes[[127, 255]] = 0
    matrix = codes.view(2, 128).view(torch.float8_e4m3fn)
    hot = torch.eye(128, device=DEVICE).bfloat16()[:, None, :]
    for byte in (10, 100, 119, 127, 134):
        scales = torch.full((1, 1), byte, dtype=torch.uint8, device=DEVICE)
        got = grouped_linear(hot, GroupedWeight.fp8(matrix, scales, 1))[:, 0].T
        assert torch.equal(got.double(), matrix.double() * 2.0 ** (byte - 127))
    with pytest.raises(ValueError, match=r"weight scale is 2\^8"):
        GroupedWeight.fp8(matrix, torch.full((1, 1), 135, dtype=torch.uint8, device=DEVICE), 1)


def layers() -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Each with K cut into segments; x [T, 4096]."""
    weight, plain = LinearWeight.fp8(*fp8_matrix(128, 4096)), LinearWeight.plain(random(128, 4096, seed=1))
    odd, grouped = LinearWeight.fp8(*fp8_matrix(72, 4096)), GroupedWeight.fp8(*fp8_matrix(256, 2048), 2)
    return [
        ("fp8", lambda x: linear(x, weight)),
        ("fp8 odd", lambda x: linear(x, odd)),
        ("plain", lambda x: linear(x, plain, torch.float32)),
        ("grouped", lambda x: grouped_linear(x.unflatten(1, (2, 2048)), grouped).flatten(1)),
        ("quantised", lambda x: grouped_linear_quantised(x.unflatten(1, (2, 2048)), grouped).codes.float()),
    ]


def test_a_row_does_not_depend_on_the_others() -> None:
    """Not on their order, their number or a NaN in them, bit for bit."""
    x = random(7, 4096)
    order = torch.tensor([3, 6, 0, 5, 1, 4, 2], device=DEVICE)
    poisoned = x.clone()
    poisoned[4] = float("nan")
    many = torch.cat((x, random(65, 4096, seed=9)))
    others = [0, 1, 2, 3, 5, 6]
    for name, layer in layers():
        whole = layer(x)
        assert torch.equal(layer(x[order]), whole[order]), name
        assert torch.equal(layer(x[2:3]), whole[2:3]), name
        if name.startswith("fp8") or not backend.INTERPRETED:  # numpy's sums of inexact products depend on the shape
            assert torch.equal(layer(many)[:7], whole), name
        assert torch.equal(layer(poisoned)[others], whole[others]), name


def test_no_rows() -> None:
    for _, layer in layers():
        assert layer(random(0, 4096)).shape[0] == 0


def test_segments_by_many_programs_or_by_one_are_the_same() -> None:
    """Small whole numbers, so that a block's sum is exact in any order, also a BLAS's; scales far apart, so that the sum of
    blocks is not."""
    generator = torch.Generator().manual_seed(1)
    values, codes = (torch.randint(-2, 3, (n, 2048), generator=generator).to(DEVICE).to(torch.float8_e4m3fn) for n in (64, 20))
    rows = Quantised(codes, torch.randint(107, 148, (20, 16), generator=generator).to(torch.uint8).to(DEVICE))
    weight = LinearWeight.fp8(values, fp8_matrix(64, 2048)[1])
    segments = segments_of("fp8", 64, 2048)
    assert segments > 1
    partials = torch.empty(segments, 20, 64, device=DEVICE)
    results = []
    for tiling in (Tiling(16, 64, 128, 4, 3, True, True), Tiling(64, 32, 128, 4, 3), Tiling(32, 64, 128, 4, 3, False, True)):
        out = torch.empty(20, 64, dtype=torch.float32, device=DEVICE)
        operands = Operands(rows.codes, rows.scales, weight.values[None], weight.scales, out, None, partials, weight.arrivals)
        multiply_portable(operands, segments, tiling)
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_reference_keeps_its_sums_in_float64() -> None:
    stored, x = fp8_matrix(130, 300), random(4, 300)
    wide = for_reference(lambda: LinearWeight.fp8(*stored))
    rows = quantise_reference(x)
    assert wide.values.dtype == torch.float64
    assert torch.equal(linear_reference(rows, wide), linear_reference(x, wide))
    assert torch.equal(linear_reference(x, wide), (rows.values() @ wide.values.T).bfloat16())
