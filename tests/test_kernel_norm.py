"""RMSNorm and rotary kernels against their references, rounding for rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels.norm import (
    query_norm_reference,
    query_norm_rope,
    rms_norm,
    rms_norm_quantise,
    rms_norm_quantise_reference,
    rms_norm_reference,
)
from kernels.rope import plain_frequencies, rope_reference, rotation, rotation_reference, yarn_frequencies

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures(triton_backend.__name__)
EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounds_alike(got: Tensor, expected: Tensor) -> None:
    """Equal but for a value in a thousand that lay at a rounding border and went to its neighbour."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    step = {torch.bfloat16: 2.0**-7, torch.float32: 1e-6}[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=step, atol=1e-6)
    if got.dtype is torch.bfloat16:
        assert (got != expected).double().mean() <= 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [48, 64, 1024, 4096])
def test_rms_norm(dtype: torch.dtype, channels: int) -> None:
    x = random(3, 2 * channels, dtype=dtype)[:, channels:]  # rows lie apart
    weight = random(channels, dtype=torch.bfloat16, seed=1)
    assert_rounds_alike(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    streams = x.contiguous().view(1, 3, channels)
    assert torch.equal(rms_norm(streams, weight.float(), EPS)[0], rms_norm(x, weight, EPS))


@pytest.mark.parametrize("channels", [64, 192, 256, 4096])
def test_rms_norm_quantise(channels: int) -> None:
    x = random(4, channels, dtype=torch.bfloat16) * torch.tensor([[1.0], [1e-6], [30], [0]]).to(DEVICE)
    x, weight = x.bfloat16(), random(channels, seed=1)
    quantised = rms_norm_quantise(x, weight, EPS)
    expected = rms_norm_quantise_reference(x, weight, EPS)
    assert quantised.codes.shape == x.shape and quantised.scales.shape == expected.scales.shape
    assert_rounds_alike(quantised.values().bfloat16(), expected.values().bfloat16())
    assert torch.equal(quantised.scales, expected.scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "channels", "rope_dim"), [(64, 512, 64), (4, 192, 64), (3, 16, 4)])
def test_query_norm_rope(
    dtype: torch.dtype,
    heads: int,
    channels: int,
    rope_dim: int,
) -> None:
    q = random(2, heads, channels, dtype=dtype)
    turn = rotation(torch.tensor([5, 99_999], device=DEVICE), plain_frequencies(rope_dim, 1e4).to(DEVICE))
    expected = rope_reference(query_norm_reference(q, EPS), turn, inverse=False)
    assert_rounds_alike(query_norm_rope(q, turn, EPS), expected)


def test_rotation_at_a_million() -> None:
    positions = torch.tensor([0, 1, 127, 65_535, 262_143, 999_999, 1_048_575, 3, 4, 5], device=DEVICE)
    frequencies = yarn_frequencies(64, 160_000.0, 16.0, 65_536, 32.0, 1.0).to(DEVICE)
    expected = rotation_reference(positions, frequencies)
    torch.testing.assert_close(rotation(positions, frequencies).double(), expected, rtol=0, atol=2e-7)
