"""python -m kernels.check: can every kernel run, on this card or on one that is not here?

    python -m kernels.check --arch sm_90 --arch sm_120    compiles for these, needs no GPU
    python -m kernels.check                               on a GPU: also runs, captures, replays and times each kernel

Prints a table and exits with 1 when a kernel cannot run or is wrong. What an operator runs first on a new card.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import pkgutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context

import torch

from kernels import backend, cases
from kernels.cases.case import GOLDEN, TINY, V4_FLASH, Case, Widths
from kernels.compiled import Compiled, compiling

COMPILED_WIDTHS = (V4_FLASH, TINY)
WIDTHS = (V4_FLASH, TINY, GOLDEN)
UNTOUCHED = -1  # the seed for which inputs are only shapes


def groups() -> list[str]:
    """The case files: one per kernel file."""
    names = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
    return [name for name in names if name != "case"]


def wanted_groups(only: str, parser: argparse.ArgumentParser) -> list[str]:
    """Those whose name contains `only`; that none does is a usage error."""
    wanted = [group for group in groups() if only in group]
    if not wanted:
        parser.error(f"--only {only}: no case file has that in its name; there are {', '.join(groups())}")
    return wanted


def cases_of(group: str, widths: Widths) -> list[Case]:
    found: list[Case] = importlib.import_module(f"kernels.cases.{group}").cases(widths)
    return found


def compile_part(group: str, target: str, part: int, parts: int) -> list[Compiled]:
    """The kernels that every `parts`-th case of `group` starts, compiled for `target` (a name of backend.TARGETS)."""
    chosen = backend.TARGETS[target]
    backend.use(chosen)
    with compiling(chosen.arch) as compiled:
        for widths in COMPILED_WIDTHS:
            for case in cases_of(group, widths)[part::parts]:
                case.run(case.make(torch.device("cpu"), UNTOUCHED))
    return compiled


def own_target() -> list[str]:
    """The GPU that is here, if `backend.TARGETS` has it: compiled in parallel first, its kernels are then found ready."""
    target = f"sm_{backend.of_gpu(torch.device('cuda')).arch}" if torch.cuda.is_available() else ""
    return [target] if target in backend.TARGETS else []


def compile_everything(targets: list[str], only: list[str]) -> list[tuple[str, Compiled]]:
    """The kernels of the case files `only`, each once, with a process per core."""
    cores = os.cpu_count() or 1
    parts = max(1, 2 * cores // max(1, len(only)))
    jobs = [(target, group, part) for target in targets for group in only for part in range(parts)]
    found: dict[tuple[str, str, str], Compiled] = {}
    # Without the collector, which takes an eighth of the time to find that the compiler's trees are still in use.
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        made = [pool.submit(compile_part, group, target, part, parts) for target, group, part in jobs]
        for (target, _, _), job in zip(jobs, made, strict=True):
            for each in job.result():
                found.setdefault((target, each.kernel, each.variant), each)
    return [(target, each) for (target, _, _), each in found.items()]


def print_compiled(results: list[tuple[str, Compiled]]) -> int:
    """The table; how many kernels cannot run."""
    gaps = 0
    print(f"{'kernel':34} {'arch':7} {'shared':>7} {'regs':>5} {'spill':>6}  result   variant")
    for target, made in results:
        reason = made.reason(backend.TARGETS[target].shared_bytes)
        gaps += bool(reason)
        numbers = f"{made.shared_bytes:7d} {made.registers:5d} {made.spilled_bytes:6d}"
        print(f"{made.kernel:34} {target:7} {numbers}  {'ok      ' if not reason else 'GAP     '} {made.variant}")
        if reason:
            print(f"{'':34} {reason}")
    print(f"{len(results)} kernels compiled, {gaps} cannot run")
    return gaps


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.check", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", choices=sorted(backend.TARGETS), help="compile for it; may be repeated")
    parser.add_argument("--only", default="", help="only the case files whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the tables")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if backend.INTERPRETED:
        parser.error("TRITON_INTERPRET is set, so nothing would be compiled: unset it")
    wanted = wanted_groups(options.only, parser)
    if not options.arch and not torch.cuda.is_available():
        parser.error("torch finds no GPU here: name the architectures to compile for, --arch sm_90 --arch sm_120")

    compiled = compile_everything(options.arch or own_target(), wanted)
    measured = []
    if torch.cuda.is_available():
        from kernels.measure import measure_everything  # needs a GPU to be of use

        measured = measure_everything(wanted, WIDTHS)
    if options.json:
        json.dump(
            {"compiled": [asdict(each) for _, each in compiled], "measured": [asdict(each) for each in measured]}, sys.stdout
        )
        reasons = [made.reason(backend.TARGETS[target].shared_bytes) for target, made in compiled]
        return 1 if any(reasons) or any(each.reason for each in measured) else 0
    gaps = print_compiled(compiled) if compiled else 0
    if measured:
        from kernels.measure import print_measured

        gaps += print_measured(measured)
    return 1 if gaps else 0


if __name__ == "__main__":
    sys.exit(main())
