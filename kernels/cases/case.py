"""Case: one kernel at one shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels import backend


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a model, as far as kernels see them; names as in config.json."""

    name: str
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    experts_per_token: int
    moe_inner: int
    vocab: int
    window: int = 128
    streams: int = 4
    sinkhorn: int = 20


V4_FLASH = Widths("V4-Flash", 4096, 64, 512, 64, 1024, 1024, 8, 64, 128, 512, 256, 6, 2048, 129_280)
TINY = Widths("tiny", 256, 4, 128, 64, 256, 128, 2, 8, 128, 32, 8, 2, 128, 1824)  # bundled/tiny
GOLDEN = Widths("golden fp8fp4", 128, 4, 192, 64, 128, 128, 2, 32, 128, 8, 6, 3, 128, 320)


@dataclass(frozen=True, slots=True)
class Case:
    """`make(device, seed)` builds inputs (weights too) on a device; `run(inputs)` calls the public function and gives a
    tensor or a tuple of them; `expected(inputs)` is the same from the references, in float64 where they are (move what
    they need). `change(inputs)` writes other lengths (and whatever follows from them) into the same tensors, for a
    replay of a captured graph; None where no length exists.

    tolerance: relative rms of every floating result; integer results must be equal. read_bytes and flops: what the
    operation cannot avoid (each input once, each output once), for its floor. matrix: whose rate the flops run at.
    """

    name: str
    make: Callable[[torch.device, int], Any]
    run: Callable[[Any], Any]
    expected: Callable[[Any], Any]
    tolerance: float
    moved_bytes: float = 0.0
    flops: float = 0.0
    matrix: str = "bf16"  # or "fp8", "fp32"
    change: Callable[[Any], None] | None = None
    must_us: float | None = None
    aim_us: float | None = None
    must_fraction: float | None = None  # of the floor, where the wish is put that way
    aim_fraction: float | None = None
    bench: bool = False  # a row of scripts/bench_kernels.py; otherwise only checked


def invariant(case: Case) -> Case:
    """The same as a batch-invariant worker runs it, which is cut otherwise."""

    def run(inputs: Any) -> Any:
        with backend.cutting(alike=True):
            return case.run(inputs)

    return replace(case, name=f"{case.name}, invariant", run=run)
