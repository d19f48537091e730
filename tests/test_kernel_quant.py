"""Number formats and cached rows: against stored values of the released kernels, and against brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import quant
from kernels.gemm import GroupedWeight, LinearWeight, grouped_linear, linear
from kernels.rows import IndexRow, KVRow
from model.config import ModelConfig
from model.weights import Checkpoint
from tests import golden


def test_fp8_units() -> None:
    unit = golden.units()
    for name, block in (("act128", 128), ("kv64", 64)):
        for dtype in (torch.float32, torch.bfloat16):
            codes, scale = quant.quantise_fp8(unit[f"{name}.x"].to(dtype), block)
            assert torch.equal(codes.view(torch.uint8), unit[f"{name}.e4m3"])
            assert torch.equal(quant.scale_to_byte(scale), unit[f"{name}.scale_byte"])
    assert torch.equal(quant.simulate_fp8(unit["kv64.x"], 64).float(), unit["kv64.y"])


def test_fp4_and_hadamard_units() -> None:
    unit = golden.units()
    values, scale = quant.quantise_fp4(unit["fp4_32.x"])
    assert torch.equal(quant.fp4_codes(values), unit["fp4_32.code"])
    assert torch.equal(quant.scale_to_byte(scale), unit["fp4_32.scale_byte"])
    assert torch.equal(quant.simulate_fp4(unit["fp4_32.x"]).float(), unit["fp4_32.y"])
    assert torch.equal(quant.hadamard(unit["hadamard.x"].bfloat16()).float(), unit["hadamard.y"])


def test_linear_units() -> None:
    """Weights of the checkpoint, dequantised here, times stored activations."""
    unit = golden.units()
    directory = golden.model_dir("tiny-fp8fp4")
    checkpoint = Checkpoint.open(directory, ModelConfig.load(directory))
    for name, shape in (
        ("layers.0.attn.wq_a", (128, 128)),
        ("layers.3.attn.wo_b", (128, 256)),
        ("layers.0.ffn.shared_experts.w2", (128, 128)),
    ):
        weight = checkpoint.take_linear([name], shape[:1], shape[1])
        assert torch.equal(weight.values[:4].float(), unit[f"linear.{name}.w_rows0_3"])
        got = linear(unit[f"linear.{name}.x"].bfloat16(), weight)
        assert torch.equal(got.float(), unit[f"linear.{name}.y"])


def nearest(x: Tensor, grid: Tensor) -> Tensor:
    """Brute force: the nearest grid value; of two equally near ones the one with an even place in the grid."""
    distance = (x[:, None] - grid).abs()
    odd = torch.arange(len(grid)) % 2
    return grid[torch.argmin(distance * 4 + odd * 1e-12, 1)]


def test_rounding_against_every_value_of_the_format() -> None:
    grid = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).double()
    x = torch.cat((torch.rand(500, dtype=torch.float64) * 447, (grid[1:] + grid[:-1]) / 2, grid[:40] * 1.01)).float().double()
    x = torch.cat((x, x.new_tensor([448.0]))).clamp(max=448)
    assert torch.equal(quant.simulate_fp8(x, len(x)), nearest(x, grid))

    grid = torch.tensor(quant.FP4_VALUES, dtype=torch.float64)
    x = torch.cat((torch.rand(23, dtype=torch.float64) * 6, (grid[1:] + grid[:-1]) / 2, grid[-1:], grid[-1:]))
    assert torch.equal(quant.simulate_fp4(x), nearest(x, grid))
    assert torch.equal(quant.simulate_fp4(-x), -nearest(x, grid))


def test_scales_at_the_edge() -> None:
    """A block whose largest value is exactly 448 * 2^k keeps that scale; the next number above takes the next one."""
    for exponent in (-20, -3, 0, 11):
        edge = torch.full((1, 128), 448.0 * 2.0**exponent)
        above = torch.nextafter(edge, torch.tensor(torch.inf))
        assert quant.quantise_fp8(edge, 128)[1].item() == 2.0**exponent
        assert quant.quantise_fp8(above, 128)[1].item() == 2.0 ** (exponent + 1)
    assert quant.quantise_fp8(torch.zeros(1, 128), 128)[1].item() == 2.0**-22  # the floor 1e-4
    powers = 2.0 ** torch.arange(-60, 60, dtype=torch.float64)
    assert torch.equal(quant.ceil_power_of_two(powers), powers)
    assert torch.equal(quant.ceil_power_of_two(powers * (1 + 2.0**-52)), powers * 2)


def test_fp4_bytes() -> None:
    """The even index is the low nibble; codes 8..15 are negative."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = quant.pack_fp4(codes)
    assert packed.view(torch.uint8).tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    values = quant.unpack_fp4(packed)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(quant.fp4_codes(values), codes)


def test_weight_blocks_may_be_partial() -> None:
    weight = torch.randn(192, 200).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 130], [120, 125]], dtype=torch.uint8)
    got = quant.dequantise_fp8_weight(weight, scale)
    for row, column in ((0, 0), (127, 128), (128, 127), (191, 199)):
        exponent = int(scale[row // 128, column // 128]) - 127
        assert got[row, column] == weight[row, column].double() * 2.0**exponent


@pytest.mark.parametrize(("head_dim", "rope_dim", "row_bytes"), [(512, 64, 584), (192, 64, 264), (64, 16, 88)])
def test_kv_row_bytes(head_dim: int, rope_dim: int, row_bytes: int) -> None:
    """[e4m3][bf16 rotary][ue8m0, padded to 8]; what comes back is the FP8 rounding, from any strides and past any NaN."""
    row = KVRow("fp8", head_dim, rope_dim, rounded=True)
    assert row.row_bytes == row_bytes
    x = (torch.randn(head_dim, 6) * 2.0 ** torch.randint(-8, 8, (head_dim, 1))).bfloat16().T
    assert not x.is_contiguous()
    packed = row.pack(x)
    assert packed.shape == (6, -(-row_bytes // 16) * 16) and torch.equal(packed, row.pack(x.contiguous()))
    assert row.ring_bytes == packed.shape[1] and not packed[:, row_bytes:].any(), "padded with zeros"
    plain = head_dim - rope_dim
    assert torch.equal(packed[:, plain : plain + 2 * rope_dim].contiguous().view(torch.bfloat16), x[:, plain:])
    expected = torch.cat((quant.simulate_fp8(x[:, :plain], 64), x[:, plain:].double()), 1)
    assert torch.equal(row.unpack(packed), expected)
    assert torch.equal(row.unpack(row.pack(row.unpack(packed).bfloat16())), expected)  # rounding twice is rounding once
    memory = torch.full((6, row_bytes + 64), 0xFF, dtype=torch.uint8)
    memory[:, :row_bytes] = packed[:, :row_bytes]
    assert torch.equal(row.unpack(memory[:, :row_bytes]), expected)
    for kind in ("bf16", "fp32"):
        wide = KVRow(kind, head_dim, rope_dim, rounded=True)
        assert torch.equal(wide.unpack(wide.pack(x)), expected)


def test_index_row_is_lossless_for_fp4_within_a_spread() -> None:
    """Block scales 2^14 apart survive; 2^17 apart the small block does not."""
    row = IndexRow("fp8", 128, rounded=False)
    assert row.row_bytes == 132
    for spread, same in ((0, True), (14, True), (17, False)):
        for top in quant.FP4_VALUES[5:]:
            x = torch.tensor(quant.FP4_VALUES * 16).double()
            x[:32].clamp_(max=top)
            x[32:] = -x[32:] * 2.0**-spread
            x[:32] = torch.where(x[:32] > 0, x[:32], top)
            assert torch.equal(row.unpack(row.pack(x[None].float()))[0], x) is same
    assert torch.equal(row.unpack(row.pack(torch.zeros(1, 128))), torch.zeros(1, 128, dtype=torch.float64))


def test_mxfp4_index_rows_are_the_released_rounding() -> None:
    """Codes and scale bytes of the released kernels: what FP4 leaves comes back, however far the blocks are apart."""
    unit, row = golden.units(), IndexRow("mxfp4", 128, rounded=False)
    assert row.row_bytes == 68 and (row.value_bytes, row.scale_bytes) == (64, 4)
    x = unit["fp4_32.x"].reshape(-1, 128)
    codes, scales = unit["fp4_32.code"].reshape(-1, 128), unit["fp4_32.scale_byte"].reshape(-1, 4)
    packed = row.pack(x)
    assert torch.equal(packed[:, :64], codes[:, 0::2] | codes[:, 1::2] << 4) and torch.equal(packed[:, 64:], scales)
    assert torch.equal(row.unpack(packed), quant.simulate_fp4(x))
    spread = torch.exp2(torch.tensor([0.0, -14.0, -60.0, 40.0])).repeat_interleave(32)
    x = quant.simulate_fp4(torch.randn(50, 128) * spread)
    packed = row.pack(x)
    assert torch.equal(row.unpack(packed), x) and torch.equal(row.unpack(row.pack(row.unpack(packed))), x)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_index_rows_are_rotated_and_rounded(kind: str) -> None:
    x = torch.randn(128, 5).bfloat16().T
    row = IndexRow(kind, 128, rounded=True)
    expected = quant.simulate_fp4(quant.hadamard(x))
    assert torch.equal(row.unpack(row.pack(x)), expected)
    assert torch.equal(row.round(x).double(), expected)
    assert torch.equal(IndexRow("bf16", 128, rounded=True).unpack(IndexRow("bf16", 128, rounded=True).pack(x)), expected)


def test_linear_takes_any_strides_and_rounds_the_activation_only_if_asked() -> None:
    x, weight = torch.randn(256, 7).bfloat16().T, torch.randn(30, 256, dtype=torch.float64)
    rounding, plain = LinearWeight(weight, None, True, None), LinearWeight(weight, None, False, None)
    assert torch.equal(linear(x, rounding), linear(x.contiguous(), rounding))
    assert not torch.equal(linear(x, rounding), linear(x, plain))
    assert torch.equal(linear(x, plain), (x.double() @ weight.T).bfloat16())
    grouped = torch.randn(7, 4, 16)
    weights = torch.randn(4, 16, 3, dtype=torch.float64)
    got = grouped_linear(grouped, GroupedWeight(weights, None, None))
    assert torch.equal(got[:, 2], (grouped[:, 2].double() @ weights[2]).float())
