"""What the draft layer starts from and goes on with: the Triton kernels against torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels import backend
from kernels.streams import join_streams, join_streams_reference, take_rows

torch.set_num_threads(1)
DTYPES = (torch.bfloat16, torch.float32)
BOTH = pytest.mark.parametrize("kernels", [True, False])


@pytest.fixture(autouse=True)
def chosen_backend(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params.get("kernels", True):
        request.getfixturevalue(triton_backend.__name__)
    else:
        assert not backend.active().triton


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "streams", "width"), [(1, 4, 256), (5, 4, 48), (3, 4, 1536), (2, 2, 64)])
def test_join_streams(dtype: torch.dtype, tokens: int, streams: int, width: int) -> None:
    """The sum of the two, rounded once; equal numbers of other signs give zero, and the inputs stay."""
    token, before = random(tokens, width, dtype=dtype), random(tokens, streams, width, dtype=dtype, seed=1)
    before[0, 0] = -token[0]
    kept = before.clone()
    got = join_streams(token, before)
    assert torch.equal(got, join_streams_reference(token, before)) and got.dtype is dtype
    assert torch.equal(got.double(), (token.double()[:, None] + before.double()).to(dtype).double())
    assert not got[0, 0].any() and torch.equal(before, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_join_streams_whose_rows_and_streams_lie_apart(dtype: torch.dtype) -> None:
    token = random(3, 160, dtype=dtype)[:, 64:128]
    streams = random(3, 6, 96, dtype=dtype, seed=1)[:, 1:5, 16:80]
    assert torch.equal(join_streams(token, streams), join_streams_reference(token.clone(), streams.clone()))


@BOTH
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
def test_take_rows(dtype: torch.dtype, kernels: bool) -> None:
    """In any order, one of them twice, at the first and the last."""
    source = random(11, 4, 80, dtype=torch.float32).mul(100).to(dtype)
    index = torch.tensor([10, 0, 3, 3, 7], device=DEVICE)
    assert torch.equal(take_rows(source, index), source[index])


@BOTH
def test_take_rows_that_lie_apart_and_rows_that_are_not_there(kernels: bool) -> None:
    source = random(12, 2, 48, dtype=torch.bfloat16)[1::3]
    got = take_rows(source, torch.tensor([3, 4, -1, 1 << 40, 0], device=DEVICE))
    assert torch.equal(got[[0, 4]], source[[3, 0]]) and not got[1:4].any()
