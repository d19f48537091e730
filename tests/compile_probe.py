"""Run by test_kernel_check.py in a process that does not interpret kernels: compiles three kernels for two architectures."""

import json
import sys
from dataclasses import asdict

import torch
import triton.language as tl

from kernels import backend
from kernels.compiled import compiling
from kernels.jit import jit
from kernels.launch import launch


@jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@jit
def _wide_product(left, right, target, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Holds two SIZE x DEPTH tiles of bf16 in shared memory."""
    row, column, inner = tl.arange(0, SIZE), tl.arange(0, SIZE), tl.arange(0, DEPTH)
    product = tl.dot(tl.load(left + row[:, None] * DEPTH + inner), tl.load(right + inner[:, None] + column * DEPTH))
    tl.store(target + row[:, None] * SIZE + column, product)


@jit
def _broken(source, BLOCK: tl.constexpr):
    tl.store(source + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))


def main() -> None:
    found = []
    for target in ("sm_90", "sm_120"):
        chosen = backend.TARGETS[target]
        with compiling(chosen.arch) as compiled:
            x, matrix = torch.empty(1024), torch.empty(128, 512, dtype=torch.bfloat16)
            launch(_copy, (4,), x, x, 1008, BLOCK=256)
            launch(_copy, (4,), x, x, 1024, BLOCK=256)  # another number that is a multiple of 16: the same code
            launch(_wide_product, (1,), matrix, matrix, torch.empty(128, 128), SIZE=128, DEPTH=256, num_warps=8)
            launch(_broken, (1,), x, BLOCK=64)
        found += [asdict(each) | {"reason": each.reason(chosen.shared_bytes)} for each in compiled]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
