"""Hyper-connections and the embedding: the Triton kernels against the references in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels.cases import hyper as cases
from kernels.cases.case import TINY
from kernels.embed import embed, embed_reference
from kernels.hyper import (
    HyperWeights,
    hyper_head,
    hyper_head_reference,
    hyper_post,
    hyper_post_pre,
    hyper_post_reference,
    hyper_pre,
    hyper_pre_reference,
    hyper_weights,
)
from kernels.measure import relative_rms
from tests import golden

torch.set_num_threads(1)
on_triton = pytest.mark.usefixtures(triton_backend.__name__)
EPS = 1e-6


def inputs(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16, outputs: int = 24) -> cases.Inputs:
    made = cases.make(replace(TINY, hidden=width), tokens, outputs, DEVICE, seed=tokens + width)
    return replace(
        made,
        streams=made.streams.to(dtype),
        out=made.out.to(dtype),
        norm_weight=made.norm_weight.to(dtype),
        into=made.into.to(dtype),
    )


def close(got: Tensor, expected: Tensor, relative: float) -> None:
    error = (got.double() - expected.double().to(got.device)).norm() / expected.double().norm()
    assert float(error) <= relative, float(error)


def test_sinkhorn_units() -> None:
    unit = golden.units()
    scale = torch.repeat_interleave(unit["sinkhorn.scale"], torch.tensor([4, 4, 16]))
    got = hyper_weights(unit["sinkhorn.z"], scale, unit["sinkhorn.base"], 4, 20, 1e-6)
    for name, value in zip(("pre", "post", "comb"), got, strict=True):
        torch.testing.assert_close(value.float(), unit[f"sinkhorn.{name}"], rtol=1e-6, atol=2e-7)


def test_references_against_plain_sums() -> None:
    """comb mixes over its first index."""
    torch.manual_seed(3)
    streams, out = torch.randn(8, 4, 5).permute(2, 1, 0), torch.randn(5, 8)
    fn, scale, base = torch.randn(24, 32, dtype=torch.float64), torch.rand(24), torch.randn(24)
    x, post, comb = hyper_pre_reference(streams, fn, scale, base, 20, 1e-6, 1e-6)
    torch.testing.assert_close(comb.sum(1), torch.ones(5, 4, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    flat = streams.flatten(1).double()
    mixes = flat @ fn.T / (flat.square().mean(1, keepdim=True) + 1e-6).sqrt()
    pre = torch.sigmoid(mixes[:, :4] * scale[:4] + base[:4]) + 1e-6
    torch.testing.assert_close(x, torch.einsum("tj,tjd->td", pre, streams.double()).float())
    expected = torch.einsum("tjk,tjd->tkd", comb, streams.double()) + post[..., None] * out[:, None]
    torch.testing.assert_close(hyper_post_reference(out, streams, post, comb), expected.float())
    head = hyper_head_reference(streams, fn[:4], scale[:1], base[:4], 1e-6, 1e-6)
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + 1e-6
    torch.testing.assert_close(head, torch.einsum("tj,tjd->td", pre, streams.double()).float())


@on_triton
@pytest.mark.parametrize("tokens, width", [(1, 128), (3, 64), (17, 192), (40, 256)])
def test_pre_and_post_against_the_reference(tokens: int, width: int) -> None:
    """bf16 results may round the other way now and then; post and comb are float32 and hold to 1e-5."""
    given = inputs(tokens, width)
    mixed, expected = cases.run_pre(given), cases.expected_pre(given, given.streams)
    close(mixed.post, expected.post, 1e-5)
    close(mixed.comb, expected.comb, 1e-5)
    close(mixed.x, expected.x, 1e-3)
    assert mixed.quantised is not None and expected.quantised is not None
    close(mixed.quantised.values(), expected.quantised.values(), 5e-3)
    close(cases.run_post(given), cases.expected_post(given), 1e-3)


@on_triton
def test_float32_streams_need_no_rounding() -> None:
    given = inputs(5, 64, torch.float32)
    mixed, expected = cases.run_pre(given), cases.expected_pre(given, given.streams)
    for got, right in zip((mixed.x, mixed.post, mixed.comb), (expected.x, expected.post, expected.comb), strict=True):
        close(got, right, 1e-6)


@on_triton
def test_a_boundary_in_two_kernels_is_post_then_pre() -> None:
    given = inputs(6, 128)
    apart = cases.post_then_pre(given)
    work = given.streams.clone()
    streams, mixed = hyper_post_pre(given.out, work, given.post, given.comb, given.weights, given.norm_weight, EPS, True)
    assert streams is work, "by default the streams are changed in place"
    assert relative_rms((streams, mixed), apart) < 1e-3


@on_triton
def test_post_is_in_place_and_sums_over_the_first_index() -> None:
    streams = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    streams[0, 1] = 2.0
    comb = torch.zeros(1, 4, 4, device=DEVICE)
    comb[0, 1, 3] = 1.0
    out = torch.ones(1, 64, dtype=torch.bfloat16, device=DEVICE)
    post = torch.tensor([[0.0, 0.0, 4.0, 0.5]], device=DEVICE)
    assert hyper_post(out, streams, post, comb) is streams
    assert streams[0, :, 0].tolist() == [0.0, 0.0, 4.0, 2.5]


@on_triton
@pytest.mark.parametrize("tokens, width", [(1, 64), (19, 256)])
def test_head(tokens: int, width: int) -> None:
    given = inputs(tokens, width, outputs=4)
    close(hyper_head(given.streams, given.weights, given.norm_weight, EPS), cases.expected_head(given), 1e-3)


@on_triton
def test_a_token_does_not_see_the_others() -> None:
    """Bit-equal in any order, beside NaN, as long as the number of tokens is the same."""
    given = inputs(9, 128)
    order = torch.tensor([4, 0, 8, 2, 1, 7, 3, 6, 5], device=DEVICE)
    expected = cases.run_pre(given)
    moved = given.streams[order]
    moved[3] = torch.nan
    got = hyper_pre(moved, given.weights, given.norm_weight, EPS, True)
    kept = torch.arange(9, device=DEVICE) != 3
    for ours, theirs in zip((got.x, got.post, got.comb), (expected.x, expected.post, expected.comb), strict=True):
        assert torch.equal(ours[kept], theirs[order][kept])
    assert bool(got.x[3].isnan().all())


@on_triton
def test_sinkhorn_makes_comb_doubly_stochastic() -> None:
    given = inputs(33, 128)
    comb = cases.run_pre(given).comb
    assert bool((comb >= 0).all())
    torch.testing.assert_close(comb.sum(1), torch.ones(33, 4, device=DEVICE), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(33, 4, device=DEVICE), rtol=0, atol=2e-2)  # columns come last


@on_triton
def test_large_logits_of_comb_stay_finite() -> None:
    given = inputs(4, 64)
    w = given.weights
    extreme = HyperWeights(w.fn, w.scale * 40.0, w.base * 20.0, 4, 20, EPS)
    given = replace(given, weights=extreme)
    mixed, expected = cases.run_pre(given), cases.expected_pre(given, given.streams)
    close(mixed.comb, expected.comb, 1e-4)


@on_triton
def test_another_number_of_streams_is_refused() -> None:
    w = inputs(1, 64).weights
    weights = HyperWeights(w.fn[:8, :128].contiguous(), w.scale[:8], w.base[:8], 2, 20, EPS)
    streams = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="hc_mult is 2"):
        hyper_pre(streams, weights, torch.ones(64, device=DEVICE), EPS, False)


@on_triton
@pytest.mark.parametrize("width", [48, 256])
def test_embed_copies_rows_and_knows_its_bounds(width: int) -> None:
    table = torch.randn(11, width, device=DEVICE).bfloat16()
    tokens = torch.tensor([0, 10, -1, 11, 3, 1 << 40], device=DEVICE)
    got = embed(tokens, table, 4)
    assert torch.equal(got, embed_reference(tokens, table, 4))
    assert torch.equal(got[4, 2], table[3]) and not got[[2, 3, 5]].any()
