"""Experts and hyper-connections against plain loops, and the stored Sinkhorn values."""

from __future__ import annotations

import torch

from kernels.experts import experts, route, swiglu
from kernels.hyper import hyper_head, hyper_post, hyper_pre, hyper_weights
from kernels.quant import simulate_fp8
from tests import golden


def test_sinkhorn_units() -> None:
    unit = golden.units()
    scale = torch.repeat_interleave(unit["sinkhorn.scale"], torch.tensor([4, 4, 16]))
    got = hyper_weights(unit["sinkhorn.z"], scale, unit["sinkhorn.base"], 4, 20, 1e-6)
    for name, value in zip(("pre", "post", "comb"), got, strict=True):
        torch.testing.assert_close(value.float(), unit[f"sinkhorn.{name}"], rtol=1e-6, atol=2e-7)


def test_streams_are_mixed_over_the_first_index() -> None:
    torch.manual_seed(3)
    streams, out = torch.randn(8, 4, 5).permute(2, 1, 0), torch.randn(5, 8)
    fn, scale, base = torch.randn(24, 32, dtype=torch.float64), torch.rand(24), torch.randn(24)
    x, post, comb = hyper_pre(streams, fn, scale, base, 20, 1e-6, 1e-6)
    torch.testing.assert_close(comb.sum(1), torch.ones(5, 4, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    flat = streams.flatten(1).double()
    mixes = flat @ fn.T / (flat.square().mean(1, keepdim=True) + 1e-6).sqrt()
    pre = torch.sigmoid(mixes[:, :4] * scale[:4] + base[:4]) + 1e-6
    torch.testing.assert_close(x, torch.einsum("tj,tjd->td", pre, streams.double()).float())
    expected = torch.einsum("tjk,tjd->tkd", comb, streams.double()) + post[..., None] * out[:, None]
    torch.testing.assert_close(hyper_post(out, streams, post, comb), expected.float())
    head = hyper_head(streams, fn[:4], scale[:1], base[:4], 1e-6, 1e-6)
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + 1e-6
    torch.testing.assert_close(head, torch.einsum("tj,tjd->td", pre, streams.double()).float())


def test_routing_by_score() -> None:
    """The bias chooses but does not weigh; equal scores go to the lower id; weights add up to the factor."""
    x = torch.eye(3)
    gate = torch.tensor([[1.0, 0, -300], [1, 5, -300], [2, 0, -300], [1, 0, -300]], dtype=torch.float64)
    ids, weights = route(x, gate, torch.tensor([0.0, 0, 0, 10]), None, 2, 1.5)
    assert ids.tolist() == [[3, 2], [3, 1], [3, 0]]
    score = torch.nn.functional.softplus(torch.tensor([1.0, 2.0])).sqrt()
    torch.testing.assert_close(weights[0], score / score.sum() * 1.5)
    assert route(x[:1], gate, None, None, 3, 1.0)[0].tolist() == [[2, 0, 1]]
    assert weights.isfinite().all(), "scores that underflow to zero are no reason for NaN"
    fixed = torch.tensor([[1, 0]] * 3)
    ids, weights = route(x, gate, None, fixed, 2, 1.5)
    assert torch.equal(ids, fixed) and weights[2].isfinite().all()
    torch.testing.assert_close(weights[:2].sum(1), torch.full((2,), 1.5))


def test_swiglu_clamps_the_gate_from_above_and_the_other_on_both_sides() -> None:
    gate_up = torch.tensor([[5.0, -5.0, 1.0, 1.0, 9.0, -9.0]])
    got = swiglu(gate_up, 3.0, torch.tensor([2.0]))
    gate, up = torch.tensor([3.0, -5.0, 1.0]), torch.tensor([1.0, 3.0, -3.0])
    torch.testing.assert_close(got, (torch.nn.functional.silu(gate) * up * 2)[None])


def test_experts_against_a_loop() -> None:
    """The weight is multiplied in before the second rounding."""
    torch.manual_seed(4)
    x = torch.randn(128, 9).T
    w13, w2 = torch.randn(5, 128, 64, dtype=torch.float64) / 8, torch.randn(5, 32, 128, dtype=torch.float64)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(9)])
    weights = torch.rand(9, 3)
    for rounded in (False, True):
        got = experts(x, w13, w2, ids, weights, 2.0, rounded)
        for token in range(9):
            total = torch.zeros(128, dtype=torch.float64)
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                row = simulate_fp8(x[token : token + 1], 128) if rounded else x[token : token + 1].double()
                hidden = swiglu((row @ w13[expert]).float(), 2.0, weight[None])
                hidden = simulate_fp8(hidden, 128) if rounded else hidden.double()
                total += (hidden @ w2[expert]).float()[0].double()
            torch.testing.assert_close(got[token], total.float(), rtol=1e-5, atol=1e-5)
