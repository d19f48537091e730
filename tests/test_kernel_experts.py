"""Routing and experts: the references against plain loops, the kernels against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels import backend, experts_plan
from kernels.experts import ExpertWeights, experts, experts_reference, route, route_reference, swiglu, swiglu_reference
from kernels.experts_portable import arrange_kernel
from kernels.experts_weights import fragments
from kernels.launch import launch
from kernels.quant import (
    FP4_VALUES,
    Quantised,
    dequantise_fp4,
    fp4_codes,
    pack_fp4,
    quantise_fp4,
    quantise_fp8,
    scale_from_byte,
    scale_to_byte,
    simulate_fp8,
)
from kernels.quantise import quantise_reference

torch.set_num_threads(1)
on_triton = pytest.mark.usefixtures(triton_backend.__name__)
Stored = tuple[Tensor, Tensor | None]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def test_routing_by_score() -> None:
    """The bias chooses but does not weigh; equal scores go to the lower id; weights add up to the factor."""
    x = torch.eye(3)
    gate = torch.tensor([[1.0, 0, -300], [1, 5, -300], [2, 0, -300], [1, 0, -300]], dtype=torch.bfloat16)
    rows = torch.arange(3)
    ids, weights = route(x, gate, torch.tensor([0.0, 0, 0, 10]), None, rows, 2, 1.5)
    assert ids.tolist() == [[3, 2], [3, 1], [3, 0]]
    score = torch.nn.functional.softplus(torch.tensor([1.0, 2.0])).sqrt()
    torch.testing.assert_close(weights[0], score / score.sum() * 1.5)
    assert route(x[:1], gate, None, None, rows, 3, 1.0)[0].tolist() == [[2, 0, 1]]
    assert weights.isfinite().all(), "scores that underflow to zero are no reason for NaN"
    fixed = torch.tensor([[1, 0], [3, 1]])
    ids, weights = route(x, gate, None, fixed, torch.tensor([1, 0, 0]), 2, 1.5)
    assert ids.tolist() == [[3, 1], [1, 0], [1, 0]] and weights[2].isfinite().all()
    torch.testing.assert_close(weights[:2].sum(1), torch.full((2,), 1.5))


@on_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "hidden", "count", "k"), [(1, 64, 6, 3), (5, 128, 16, 4), (19, 96, 70, 6)])
def test_route(dtype: torch.dtype, tokens: int, hidden: int, count: int, k: int) -> None:
    x, gate = random(tokens, hidden, dtype=dtype), random(count, hidden, seed=1, dtype=torch.bfloat16)
    gate[1] = gate[0]  # a tie
    bias = random(count, seed=2) / 8
    bias[1] = bias[0]
    at = torch.arange(tokens, device=DEVICE)
    ids, weights = route(x, gate, bias, None, at, k, 1.5)
    expected_ids, expected = route_reference(x, gate, bias, None, k, 1.5)
    assert ids.dtype is torch.int32 and torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7)
    table = torch.stack([torch.randperm(count)[:k] for _ in range(7)]).to(DEVICE)
    ids, weights = route(x, gate, None, table, at % 7, k, 2.5)
    expected_ids, expected = route_reference(x, gate, None, table[at % 7], k, 2.5)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7)


@on_triton
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_route_of_scores_that_vanish_and_of_large_ones() -> None:
    """softplus near zero keeps its last bits, a large logit does not overflow, rows of NaN leave the others alone."""
    x = torch.tensor([[-20.0], [-300.0], [90.0], [float("nan")]], device=DEVICE, dtype=torch.bfloat16)
    gate = torch.tensor([[1.0], [0.5], [2.0], [0.25]], device=DEVICE, dtype=torch.bfloat16)
    at = torch.zeros(4, dtype=torch.long, device=DEVICE)
    ids, weights = route(x, gate, None, None, at, 2, 1.5)
    expected_ids, expected = route_reference(x[:3], gate, None, None, 2, 1.5)
    assert torch.equal(ids[[0, 2]].long(), expected_ids[[0, 2]]) and ids.min() >= 0 and ids.max() < 4
    torch.testing.assert_close(weights[[0, 2]], expected[[0, 2]], rtol=3e-6, atol=0)
    assert weights[1].isfinite().all()


def test_swiglu_clamps_the_gate_from_above_and_the_other_on_both_sides() -> None:
    gate_up = torch.tensor([[5.0, -5.0, 1.0, 1.0, 9.0, -9.0]])
    got = swiglu_reference(gate_up, 3.0, torch.tensor([2.0]))
    gate, up = torch.tensor([3.0, -5.0, 1.0]), torch.tensor([1.0, 3.0, -3.0])
    torch.testing.assert_close(got, (torch.nn.functional.silu(gate) * up * 2)[None])


@on_triton
@pytest.mark.parametrize(("tokens", "inner"), [(1, 32), (5, 128), (3, 320)])
def test_swiglu(tokens: int, inner: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        gate_up = (random(tokens, 2 * inner + 16, dtype=dtype) * 4)[:, : 2 * inner]
        plain, expected = swiglu(gate_up, 3.0, quantised=False), swiglu_reference(gate_up, 3.0)
        assert isinstance(plain, Tensor) and plain.dtype is dtype
        got = plain
        torch.testing.assert_close(got, expected, rtol=2.0**-7 if dtype is torch.bfloat16 else 3e-6, atol=1e-6)
    rounded = swiglu(gate_up, 3.0, quantised=True)
    assert isinstance(rounded, Quantised)
    assert torch.equal(rounded.scales, quantise_reference(expected).scales)
    assert torch.equal(rounded.codes.float(), quantise_reference(got).codes.float())


def stored(kind: str, out: int, width: int, seed: int) -> tuple[Stored, Tensor]:
    """A random matrix as a checkpoint has it, and its values in float64."""
    exact = random(out, width, seed=seed).double() * 2.0 ** random(out, 1, seed=seed + 1000).round().double() / width**0.5
    if kind == "plain":
        return (exact.bfloat16(), None), exact.bfloat16().double()
    if kind == "fp4":
        values, scale = quantise_fp4(exact)
        wide = values * scale.repeat_interleave(32, -1)
        return (pack_fp4(fp4_codes(values)), scale_to_byte(scale)), wide
    blocks = exact.view(out // 128, 128, width // 128, 128).transpose(1, 2).flatten(2)
    codes, scale = quantise_fp8(blocks, 128 * 128)
    matrix = codes.view(out // 128, width // 128, 128, 128).transpose(1, 2).reshape(out, width)
    wide = matrix.double() * scale[..., 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (matrix, scale_to_byte(scale)[..., 0]), wide


def expert_weights(kind: str, count: int, hidden: int, inner: int) -> tuple[ExpertWeights, Tensor, Tensor]:
    """For the active backend, and the same in float64 as the reference takes it."""
    weights = ExpertWeights.allocate(kind, count, hidden, inner, DEVICE)
    w13, w2 = [], []
    for number in range(count):
        (one, one_wide), (three, three_wide), (two, two_wide) = (
            stored(kind, rows, width, 10 * number + at)
            for at, (rows, width) in enumerate([(inner, hidden), (inner, hidden), (hidden, inner)])
        )
        weights.fill(number, one, three, two)
        w13.append(torch.cat((one_wide, three_wide)).T)
        w2.append(two_wide.T)
    return weights, torch.stack(w13), torch.stack(w2)


def choices(tokens: int, count: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(tokens)])
    return ids.to(DEVICE), torch.rand(tokens, k, generator=generator).to(DEVICE)


SHAPES = [("plain", 16, 64, 32, 4), ("fp4", 6, 128, 128, 3), ("fp8", 5, 256, 128, 2), ("fp4", 4, 96, 64, 2)]


@pytest.mark.parametrize(("kind", "count", "hidden", "inner", "k"), SHAPES)
def test_reference_experts_against_a_loop(kind: str, count: int, hidden: int, inner: int, k: int) -> None:
    """The weight is multiplied in before the second rounding; the checkpoint's tensors become what they say."""
    before = backend.active()
    backend.use(backend.REFERENCE)
    weights, w13, w2 = expert_weights(kind, count, hidden, inner)
    assert torch.equal(weights.w13.values, w13) and torch.equal(weights.w2.values, w2)
    x, shared = random(9, hidden), random(9, hidden, seed=5)
    ids, gate_weights = choices(9, count, k)
    fp8 = kind != "plain"
    got = experts(x, weights, ids, gate_weights, 2.0, shared)
    if fp8:
        assert torch.equal(
            experts(quantise_reference(x.bfloat16()), weights, ids, gate_weights, 2.0, None),
            experts(x.bfloat16(), weights, ids, gate_weights, 2.0, None),
        )
    backend.use(before)
    for token in range(9):
        total = torch.zeros(hidden, dtype=torch.float64, device=DEVICE)
        for expert, weight in zip(ids[token].tolist(), gate_weights[token], strict=True):
            row = simulate_fp8(x[token : token + 1], 128) if fp8 else x[token : token + 1].double()
            rows = swiglu_reference((row @ w13[expert]).float(), 2.0, weight[None])
            rows = simulate_fp8(rows, 128) if fp8 else rows.double()
            total += (rows @ w2[expert]).float()[0].double()
        torch.testing.assert_close(got[token], total.float() + shared[token], rtol=1e-5, atol=1e-5)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@on_triton
@pytest.mark.parametrize(("kind", "count", "hidden", "inner", "k"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_experts(kind: str, count: int, hidden: int, inner: int, k: int, tokens: int) -> None:
    weights, w13, w2 = expert_weights(kind, count, hidden, inner)
    dtype = torch.float32 if kind == "plain" else torch.bfloat16
    x, shared = random(tokens, hidden, dtype=dtype), random(tokens, hidden, seed=5, dtype=dtype)
    ids, gate_weights = choices(tokens, count, k)
    got = experts(x, weights, ids.int(), gate_weights, 2.0, shared)
    expected = experts_reference(x, w13, w2, ids, gate_weights, 2.0, kind != "plain") + shared
    assert got.dtype is dtype
    # FP8 codes that sit at a rounding border make the difference: one of them is a sixteenth off
    assert relative_error(got, expected) < (1e-6 if kind == "plain" else 5e-3)


@on_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, about NaN
@pytest.mark.parametrize(("kind", "count", "hidden", "inner", "k"), SHAPES[:2])
def test_a_row_does_not_depend_on_the_others(kind: str, count: int, hidden: int, inner: int, k: int) -> None:
    """Permuted tokens give the same bits; rows of NaN stay among themselves; everybody may ask the same expert."""
    weights, _, _ = expert_weights(kind, count, hidden, inner)
    dtype = torch.float32 if kind == "plain" else torch.bfloat16
    x = random(21, hidden, dtype=dtype)
    ids, gate_weights = choices(21, count, k)
    ids[:, 0], ids[:, 1:] = 2, torch.where(ids[:, 1:] == 2, 0, ids[:, 1:])
    got = experts(x, weights, ids.int(), gate_weights, 2.0, None)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    again = experts(x[order], weights, ids.int()[order], gate_weights[order], 2.0, None)
    # In the interpreter numpy multiplies: on some CPUs its BLAS sums a block's edge in another order than what is inside.
    most = 1e-6 if kind == "plain" and backend.INTERPRETED else 0.0
    assert relative_error(again, got[order]) <= most
    x[3] = float("nan")
    poisoned = experts(x, weights, ids.int(), gate_weights, 2.0, None)
    others = torch.arange(21, device=DEVICE) != 3
    assert relative_error(poisoned[others], got[others]) <= most


@on_triton
@pytest.mark.parametrize("pairs", [1, 70, 300])
def test_sorting_by_one_kernel_or_two(monkeypatch: pytest.MonkeyPatch, pairs: int) -> None:
    """Every pair once, by expert and ascending; the tiles cover each expert's rows and nothing else."""
    weights = ExpertWeights.allocate("plain", 9, 32, 32, DEVICE)
    ids = torch.randint(0, 9, (pairs, 1), generator=torch.Generator().manual_seed(pairs)).clamp(2).to(DEVICE)
    for many in (0, 10_000):
        monkeypatch.setattr(experts_plan, "MANY_PAIRS", many)
        plan = experts_plan.Plan(ids, weights)
        assert plan.order is not None
        assert torch.equal(plan.order.long(), torch.sort(ids[:, 0], stable=True).indices)
        covered = []
        for expert, first, rows, _ in plan.tiles[: int(plan.tile_count)].tolist():
            covered += list(range(first, first + rows))
            assert set(ids[plan.order[first : first + rows].long(), 0].tolist()) == {expert}
        assert covered == list(range(pairs)) and len(plan.tiles) >= int(plan.tile_count)


def test_fragments_hold_what_the_checkpoint_says() -> None:
    """Read back word by word, as the lanes of `experts_fp4` do. Scales within 2^11 of a row's largest are exact, and a
    block of zeros may have any; smaller ones are rounded, to a part in 2^15 of the largest value."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (64, 128), dtype=torch.int8, generator=generator)
    scales = torch.randint(110, 122, (64, 8), dtype=torch.uint8, generator=generator)
    packed[5, :16], scales[5, 0] = 0, 200
    scales[7, 3] = 100
    got, exact = values_of_fragments(*fragments(packed, scales)), dequantise_fp4(packed, scales)
    exact[5, :32] = 0
    off = got != exact
    assert not off[:7].any() and not off[8:].any() and not off[7, :96].any() and not off[7, 128:].any()
    assert off[7].any() and (got - exact)[7].abs().max() <= exact[7].abs().max() * 2.0**-15


def values_of_fragments(words: Tensor, scales: Tensor, row_scales: Tensor) -> Tensor:
    """float64 [64, K] of 64 rows."""
    got = torch.zeros(64, 128 * words.shape[1], dtype=torch.float64)
    for step in range(words.shape[1]):
        for at, word in enumerate((words[0, step].long() & 0xFFFFFFFF).tolist()):
            half, warp, lane, place = at >> 9, (at >> 7) & 3, (at >> 2) & 31, at & 3
            row, block = 16 * warp + 8 * (place & 1) + lane // 4, 2 * half + (place >> 1)
            byte = (int(scales[0, step, 16 * warp + 2 * (lane // 4) + (place & 1)]) >> (8 * block)) & 255
            for channel in range(8):
                value = FP4_VALUES[(word >> (4 * channel)) & 7] * 2.0 ** (byte - 5) * float(row_scales[row])
                sign = (word >> (8 * (channel % 4) + (7 if channel < 4 else 3))) & 1
                column = 128 * step + 32 * block + 16 * (channel // 4) + 4 * (lane % 4) + channel % 4
                got[row, column] = -value if sign else value
    return got


@on_triton
def test_rows_are_copied_to_their_tiles() -> None:
    """With their scales as factors, a column a row; what lies beyond a tile's rows is never read."""
    x = quantise_reference(random(3, 256) * torch.tensor([[1.0], [8], [64]], device=DEVICE))
    order = torch.tensor([5, 0, 3, 1, 2, 4], dtype=torch.int32, device=DEVICE)
    tiles = torch.tensor([[0, 0, 2, 0], [1, 2, 4, 0]], dtype=torch.int32, device=DEVICE)
    result = torch.zeros(6, 256, dtype=torch.float8_e4m3fn, device=DEVICE)
    factors = torch.zeros(2, 2, 4, device=DEVICE)
    count = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    tensors = (x.codes, x.scales, order, tiles, count, result, factors)
    launch(arrange_kernel, (2, 2), *tensors, K=256, TOPK=2, TILE=4, BLOCK=128, num_warps=4)
    tokens = order.long() // 2
    assert torch.equal(result.view(torch.uint8), x.codes.view(torch.uint8)[tokens])
    scales = scale_from_byte(x.scales[tokens]).float()
    assert torch.equal(factors[0, :, :2], scales[:2].T) and torch.equal(factors[1], scales[2:].T)


def test_kinds_and_widths_that_no_kernel_takes_are_named() -> None:
    with pytest.raises(ValueError, match="not as int4"):
        ExpertWeights.allocate("int4", 2, 64, 64, "cpu")
    with pytest.raises(ValueError, match="multiples of 32"):
        ExpertWeights.allocate("fp4", 2, 64, 48, "cpu")
