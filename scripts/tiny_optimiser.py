"""Muon for matrices, AdamW for the rest: two optimisers behind one step."""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.tiny_export import EXPERT_MARK, is_fp8

MATRIX_RATE = 0.01
RATE = 2e-3
SMALL_RATE = 4e-4  # matrices outside Muon whose inputs are wide: one step of a high rate would saturate a sigmoid
SMALL = ("hc_attn_fn", "hc_ffn_fn", "hc_head_fn", "gate.weight", "weights_proj.weight")
MOMENTUM = 0.95
MATRIX_DECAY = 0.05
QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients that push singular values towards 1 quickly


def orthogonal(matrices: Tensor) -> Tensor:
    """[M, O, K] -> about the nearest matrices with equal singular values, by five Newton-Schulz steps in bf16."""
    x = matrices.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    straight: Tensor = x.mT if wide else x
    return straight.float()


class Optimiser:
    """One step over named float32 parameters with gradients."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._matrices: dict[tuple[int, int], list[Tensor]] = {}
        plain: list[Tensor] = []
        small: list[Tensor] = []
        for name, value in parameters.items():
            if _is_matrix(name):
                view = value.shape if not name.endswith("wo_a.weight") else (2, value.shape[0] // 2, value.shape[1])
                self._matrices.setdefault((view[-2], view[-1]), []).append(value)
            elif not name.endswith("gate.bias"):
                (small if name.endswith(SMALL) else plain).append(value)
        self._momentum = {shape: torch.zeros_like(self._stacked(shape, values)) for shape, values in self._matrices.items()}
        self._share = torch.ones((), device=parameters["embed.weight"].device)
        self._adam = torch.optim.AdamW(
            [{"params": plain, "lr": RATE * self._share}, {"params": small, "lr": SMALL_RATE * self._share}],
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=True,
            capturable=self._share.is_cuda,
        )

    def set_rate(self, share: float) -> None:
        """Scales every rate. The rates are tensors, so a recorded step sees the change."""
        self._share.fill_(share)
        for group, full in zip(self._adam.param_groups, (RATE, SMALL_RATE), strict=True):
            group["lr"].fill_(full * share)

    @torch.no_grad()
    def step(self) -> None:
        self._adam.step()
        for (rows, columns), values in self._matrices.items():
            gradient = self._stacked((rows, columns), [_gradient(value) for value in values])
            momentum = self._momentum[rows, columns].lerp_(gradient, 1 - MOMENTUM)
            rate = self._share * (MATRIX_RATE * max(1.0, rows / columns) ** 0.5)
            update = orthogonal(gradient.lerp(momentum, MOMENTUM)) * -rate
            pieces = update.split([value.numel() // (rows * columns) for value in values])
            torch._foreach_mul_(values, 1 - rate * MATRIX_DECAY)
            torch._foreach_add_(values, [piece.view_as(value) for piece, value in zip(pieces, values, strict=True)])
        for values in (*self._matrices.values(), *(group["params"] for group in self._adam.param_groups)):
            for value in values:
                value.grad = None

    @staticmethod
    def _stacked(shape: tuple[int, int], values: list[Tensor]) -> Tensor:
        return torch.cat([value.detach().view(-1, *shape) for value in values])


def _is_matrix(name: str) -> bool:
    return EXPERT_MARK in name or is_fp8(name) or name.endswith((".wkv.weight", ".wgate.weight"))


def _gradient(value: Tensor) -> Tensor:
    if value.grad is None:
        raise ValueError("a matrix has no gradient: a part of the model is not trained")
    return value.grad
