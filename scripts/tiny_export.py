"""Writes the trained parameters as a released checkpoint: FP8 weights, FP4 experts, ue8m0 scales, one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quant import (
    FP8_AMAX_FLOOR,
    FP8_MAX,
    WEIGHT_BLOCK,
    ceil_power_of_two,
    dequantise_fp4,
    dequantise_fp8_weight,
    fp4_codes,
    pack_fp4,
    quantise_fp4,
    scale_to_byte,
)

FP8_LAYERS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "e_proj", "h_proj", "w1", "w2", "w3")
EXPERT_MARK = ".ffn.experts."
NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.int64: "I64",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


def released_tensors(parameters: dict[str, Tensor], tid2eid: dict[str, Tensor]) -> dict[str, Tensor]:
    """Training parameters -> what the file holds, under the released names."""
    tensors: dict[str, Tensor] = {}
    for name, value in parameters.items():
        value = value.detach().cpu().float()
        if EXPERT_MARK in name:
            block, which = name.split(EXPERT_MARK)
            for expert, weight in enumerate(value):
                tensors |= _pair(f"{block}{EXPERT_MARK}{expert}.{which}", *_fp4(weight))
        elif is_fp8(name):
            tensors |= _pair(name.removesuffix(".weight"), *_fp8(value))
        else:
            tensors[name] = value.bfloat16() if name.endswith(".weight") else value
    for block, table in tid2eid.items():
        tensors[f"{block}ffn.gate.tid2eid"] = table.cpu()
    return tensors


def rounded_parameters(parameters: dict[str, Tensor], tid2eid: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters as the file keeps them, float32: rounding them once more changes nothing."""
    tensors = released_tensors(parameters, tid2eid)
    rounded: dict[str, Tensor] = {}
    for name, value in parameters.items():
        if EXPERT_MARK in name:
            block, which = name.split(EXPERT_MARK)
            each = [f"{block}{EXPERT_MARK}{e}.{which}" for e in range(len(value))]
            pairs = [(tensors[f"{n}.weight"], tensors[f"{n}.scale"].view(torch.uint8)) for n in each]
            rounded[name] = torch.stack([dequantise_fp4(*pair) for pair in pairs])
        elif is_fp8(name):
            scale = tensors[name.removesuffix("weight") + "scale"].view(torch.uint8)
            rounded[name] = dequantise_fp8_weight(tensors[name], scale)
        else:
            rounded[name] = tensors[name]
        rounded[name] = rounded[name].float().to(value.device)
    return rounded


def save_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Header length (8 bytes), JSON header, then the bytes; wide types first, as the format asks for alignment."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        size = tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())


def is_fp8(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in FP8_LAYERS and ".compressor." not in name


def _pair(name: str, weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight": weight, f"{name}.scale": scale_to_byte(scale).view(torch.float8_e8m0fnu)}


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O, K] -> e4m3 [O, K] and scale float64 [ceil(O/128), ceil(K/128)]."""
    rows, columns = weight.shape
    padded = functional.pad(weight.double(), (0, -columns % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    blocks = torch.unflatten(torch.unflatten(padded, 1, (-1, WEIGHT_BLOCK)), 0, (-1, WEIGHT_BLOCK))
    scale = ceil_power_of_two(blocks.abs().amax((1, 3)).clamp_(min=FP8_AMAX_FLOOR).div_(FP8_MAX))
    codes = (blocks / scale[:, None, :, None]).float().to(torch.float8_e4m3fn)
    return codes.flatten(0, 1).flatten(1)[:rows, :columns], scale


def _fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O, K] -> two e2m1 codes per byte int8 [O, K/2] and scale float64 [O, K/32]."""
    values, scale = quantise_fp4(weight)
    return pack_fp4(fp4_codes(values)), scale
