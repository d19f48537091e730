"""python -m scripts.bench_kernels: every hot kernel at the shapes of DeepSeek-V4-Flash, on the GPU that is here.

Times are medians of replayed CUDA graphs over inputs that are not in the cache. Each is put beside its floor: the longer
of moving the bytes it cannot avoid and of doing the arithmetic, at the rates measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import torch
import triton

from kernels.cases.case import V4_FLASH
from kernels.check import compile_everything, own_target, wanted_groups
from kernels.measure import Measured, measure_everything


def table(measured: list[Measured]) -> str:
    """Markdown, as docs/benchmarks.md shows it."""
    lines = ["| operation | us | floor us | of floor | GB/s | TFLOP/s | must | aim |", "|---|---|---|---|---|---|---|---|"]
    for each in measured:
        wishes = [f"{wish:.0f}" if wish else "" for wish in (each.must_us, each.aim_us)]
        speed = f"{each.us:.1f} | {each.floor_us:.1f} | {each.fraction:.2f} | {each.gb_per_s:.0f} | {each.tflops:.0f}"
        lines.append(f"| {each.case} | {speed} | {wishes[0]} | {wishes[1]} |{' FAILED: ' + each.reason if each.reason else ''}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="only the kernel groups whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(
            "torch finds no GPU here: there is nothing to time (python -m kernels.check --arch sm_90 compiles without)"
        )
    wanted = wanted_groups(options.only, parser)
    compile_everything(own_target(), wanted)  # in parallel; what is measured then is found ready
    measured = measure_everything(wanted, [V4_FLASH], bench_only=True)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    out = sys.stderr if options.json else sys.stdout
    print(f"{machine}\n\n{table(measured)}", file=out)
    if options.json:
        json.dump({"machine": machine, "kernels": [asdict(each) for each in measured]}, sys.stdout)
    return 1 if any(each.reason for each in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
