"""Linear layers at the shapes of a model's layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.cases.case import TINY, V4_FLASH, Case, Widths
from kernels.gemm import (
    GroupedWeight,
    LinearWeight,
    grouped_linear,
    grouped_linear_quantised,
    grouped_linear_reference,
    linear,
    linear_reference,
)
from kernels.quant import Quantised, dequantise_fp8_weight
from kernels.quantise import quantise, quantise_reference

BF16 = torch.bfloat16
FLOAT32 = torch.float32
BF16_ROUNDING = 3e-3
FLOAT32_SUMS = 1e-5


def cases(widths: Widths) -> list[Case]:
    """A decode step of 1 and of 64 tokens, a batch between decode and prefill, and for V4-Flash a chunk of 4096 tokens. Of the
    tiny model all that its steps and chunks launch (tests/test_speculation_kernels.py)."""
    steps = {V4_FLASH: (1, 64), TINY: (8, 24, 40)}.get(widths, (8,))
    found = [_quantise(tokens, widths.hidden) for tokens in (1, 4096)]
    for name, outputs, width in _fp8_matrices(widths):
        found += [_fp8(name, tokens, outputs, width) for tokens in steps]
    for name, outputs, width in _plain_matrices(widths):
        found += [_plain(name, tokens, outputs, width) for tokens in steps]
    group_width = widths.heads * widths.head_dim // widths.o_groups
    for tokens in (1, 24, 64, 200) if widths is TINY else (1, 64, 200):
        found.append(_grouped("wo_a", tokens, widths.o_groups, widths.o_lora, group_width, True))
    found.append(_grouped("wo_a", 8, widths.o_groups, widths.o_lora, group_width, False))
    for tokens in (8, 32, 200):
        found.append(_fp8("wo_b", tokens, widths.hidden, widths.o_groups * widths.o_lora))
    found += [_fp8("h_proj of the draft layer", rows, widths.hidden, widths.hidden) for rows in (4, 1280)]  # of each stream
    found.append(_plain("CSA compressor", 200, 4 * widths.head_dim, widths.hidden))
    found.append(_exact("float32 activations", 5, widths.o_lora, widths.q_lora))
    if widths is TINY:
        found += [_fp8(name, tokens, *shape) for name, *shape in _fp8_matrices(widths) for tokens in (100, 512)]
        found += [_plain(name, 256, *shape) for name, *shape in _plain_matrices(widths)]
    if widths is V4_FLASH:
        found += [_fp8(name, 4096, outputs, width) for name, outputs, width in _fp8_matrices(widths)]
        found += [_grouped("wo_a", 4096, 8, 1024, 4096, True), _plain("CSA compressor", 4096, 2048, 4096)]
    return found


def _fp8_matrices(widths: Widths) -> list[tuple[str, int, int]]:
    """name, outputs, width of a layer's FP8 matrices."""
    hidden, inner = widths.hidden, widths.moe_inner
    return [
        ("wq_a and wkv", widths.q_lora + widths.head_dim, hidden),
        ("wq_b", widths.heads * widths.head_dim, widths.q_lora),
        ("index wq_b", widths.index_heads * widths.index_dim, widths.q_lora),
        ("wo_b", hidden, widths.o_groups * widths.o_lora),
        ("shared w1 and w3", 2 * inner, hidden),
        ("shared w2", hidden, inner),
    ]


def _plain_matrices(widths: Widths) -> list[tuple[str, int, int]]:
    return [
        ("CSA compressor", 4 * widths.head_dim, widths.hidden),
        ("HCA compressor", 2 * widths.head_dim, widths.hidden),
        ("index compressor", 4 * widths.index_dim, widths.hidden),
        ("index head weights", widths.index_heads, widths.hidden),
        ("lm_head", widths.vocab, widths.hidden),
    ]


def _random(device: torch.device, seed: int, *shape: int) -> Tensor:
    """bf16; only a shape where the seed is negative."""
    if seed < 0:
        return torch.empty(*shape, dtype=BF16, device=device)
    return torch.randn(*shape, dtype=BF16, device=device, generator=torch.Generator(device).manual_seed(seed))


def _fp8_random(device: torch.device, seed: int, outputs: int, width: int) -> tuple[Tensor, Tensor]:
    blocks = (-(-outputs // 128), -(-width // 128))
    if seed < 0:
        return torch.empty(outputs, width, dtype=torch.float8_e4m3fn), torch.full(blocks, 120, dtype=torch.uint8)
    weight = _random(device, seed, outputs, width).to(torch.float8_e4m3fn)
    generator = torch.Generator(device).manual_seed(seed)
    return weight, torch.randint(114, 122, blocks, dtype=torch.uint8, device=device, generator=generator)


@dataclass(frozen=True, slots=True)
class Inputs:
    x: Any
    weight: Any
    stored: Any


def _on_reference(make: Callable[[], Any]) -> Any:
    before = backend.active()
    backend.use(backend.REFERENCE)
    try:
        return make()
    finally:
        backend.use(before)


def _quantise(tokens: int, width: int) -> Case:
    def fields(quantised: Quantised) -> tuple[Tensor, Tensor]:
        return quantised.codes, quantised.scales

    return Case(
        f"quantise {tokens} x {width}",
        lambda device, seed: _random(device, seed, tokens, width),
        lambda x: fields(quantise(x)),
        lambda x: fields(quantise_reference(x)),
        0.0,
        moved_bytes=3.0 * tokens * width,
    )


def _fp8(name: str, tokens: int, outputs: int, width: int) -> Case:
    def make(device: torch.device, seed: int) -> Inputs:
        weight, scales = _fp8_random(device, seed, outputs, width)
        return Inputs(quantise(_random(device, seed, tokens, width)), LinearWeight.fp8(weight, scales), (weight, scales))

    def expected(inputs: Inputs) -> Tensor:
        wide = _on_reference(lambda: LinearWeight.fp8(*inputs.stored))
        return linear_reference(inputs.x, wide, torch.float64)

    limit = name == "wq_b" and tokens == 4096
    return Case(
        f"{name} {tokens} x {outputs} x {width} fp8",
        make,
        lambda inputs: linear(inputs.x, inputs.weight),
        expected,
        BF16_ROUNDING,
        moved_bytes=float(outputs * width + tokens * (width + 2 * outputs)),
        flops=2.0 * tokens * outputs * width,
        matrix="fp8",
        bench=limit or tokens in (1, 64),
        must_us=255.0 if limit else None,
        aim_us=212.0 if limit else None,
    )


def _plain(name: str, tokens: int, outputs: int, width: int) -> Case:
    out_dtype = BF16 if name == "index head weights" else FLOAT32

    def make(device: torch.device, seed: int) -> Inputs:
        weight = _random(device, seed, outputs, width)
        return Inputs(_random(device, seed + 1, tokens, width), LinearWeight.plain(weight), (weight, None))

    return Case(
        f"{name} {tokens} x {outputs} x {width} bf16",
        make,
        lambda inputs: linear(inputs.x, inputs.weight, out_dtype),
        lambda inputs: inputs.x.double() @ inputs.stored[0].double().T,
        BF16_ROUNDING if out_dtype == BF16 else FLOAT32_SUMS,
        moved_bytes=2.0 * (outputs * width + tokens * width) + out_dtype.itemsize * tokens * outputs,
        flops=2.0 * tokens * outputs * width,
        bench=tokens in (1, 64),
    )


def _exact(name: str, tokens: int, outputs: int, width: int) -> Case:
    def make(device: torch.device, seed: int) -> Inputs:
        weight = _random(device, seed, outputs, width)
        return Inputs(_random(device, seed, tokens, width).float(), LinearWeight.plain(weight), (weight, None))

    return Case(
        f"{name} {tokens} x {outputs} x {width}",
        make,
        lambda inputs: linear(inputs.x, inputs.weight),
        lambda inputs: inputs.x.double() @ inputs.stored[0].double().T,
        FLOAT32_SUMS,
        moved_bytes=2.0 * outputs * width,
        flops=2.0 * tokens * outputs * width,
        matrix="fp32",
    )


def _grouped(name: str, tokens: int, groups: int, outputs: int, width: int, quantised: bool) -> Case:
    """The quantised form is compared with the exact result: what FP8 costs is in its tolerance."""

    def make(device: torch.device, seed: int) -> Inputs:
        weight, scales = _fp8_random(device, seed, groups * outputs, width)
        x = _random(device, seed, tokens, groups, width)
        return Inputs(x, GroupedWeight.fp8(weight, scales, groups), (weight, scales))

    def run(inputs: Inputs) -> Tensor:
        if not quantised:
            return grouped_linear(inputs.x, inputs.weight)
        return grouped_linear_quantised(inputs.x, inputs.weight).codes.view(tokens, groups, outputs)

    def expected(inputs: Inputs) -> Tensor:
        wide = dequantise_fp8_weight(*inputs.stored).unflatten(0, (groups, outputs)).transpose(1, 2)
        exact = grouped_linear_reference(inputs.x.double(), GroupedWeight(wide, None, None))
        if not quantised:
            return exact
        return quantise_reference(exact.flatten(1).bfloat16()).codes.view(tokens, groups, outputs)

    return Case(
        f"{name} {tokens} x {groups} x {outputs} x {width}{' quantised' if quantised else ''}",
        make,
        run,
        expected,
        1e-2 if quantised else BF16_ROUNDING,
        moved_bytes=float(groups * (outputs * width + tokens * (2 * width + (1 if quantised else 2) * outputs))),
        flops=2.0 * tokens * groups * outputs * width,
        bench=quantised and tokens in (1, 64, 4096),
    )
