"""Run by test_first_start.py in a process that does not interpret kernels; each function prints one JSON object. Without a GPU
to start a kernel is to have it compiled."""

import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.compiler
from triton import knobs
from triton.backends.nvidia.driver import make_launcher
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend
from triton.runtime import driver

import kernels.ahead
from decode.graphs import WAYS, run_within
from decode.step import Step
from kernels import backend
from kernels.ahead import _Compilers, _Scout, run_compiled
from kernels.compiled import AbsentGPU
from kernels.launch import launch, launches_go_to
from kernels.sequences import SequenceTable
from kernels.workspace import Ruler
from model.cache import kv_layout
from tests.compile_probe import _broken, _copy, _wide_product
from tests.test_capture_safety import META, ShapesRunner, prompts_of, shapes_of


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel.warmup(*args, grid=grid, **options)


def found(target: str) -> None:
    """The hashes of what steps compile, and of what processes would be given to compile."""
    chosen = backend.TARGETS[target]
    backend.use(chosen)
    driver.set_active(AbsentGPU(chosen.arch))
    hashes: set[str] = set()

    def compile(src: Any, target: Any, options: dict[str, Any]) -> Any:
        made = make_backend(target)
        parsed = made.parse_options(options | src.parse_options())
        key = get_cache_key(src, made, parsed, get_cache_invalidating_env_vars())
        key += make_launcher(src.constants, src.signature, None)
        hashes.add(hashlib.sha256(key.encode()).hexdigest()[:16])
        return SimpleNamespace()

    triton.compiler.compile = compile
    main, mtp, caches = shapes_of("tiny-fp8fp4", chosen)
    runner: Any = ShapesRunner(main, mtp, caches, kv_layout(main.config, "fp8"))
    table = SequenceTable.make(8, 9, 64, main.config.vocab_size, META)

    def steps() -> None:
        for lengths in ([1], [2], [300], [1] * 4, [1, 5], [40] * 4):
            batch = prompts_of(lengths, 16)
            streams = runner.forward(batch)
            runner.logits(streams[: len(lengths)])
            runner.store_draft_rows(streams, batch.tokens, batch)
        for rows in (1, 8):
            run_within(Step(runner, table, rows, 3), WAYS, Ruler(META), Ruler(META))

    scout, jobs = _Scout(), set()
    scout._compilers.give = lambda *job: jobs.add(job)  # type: ignore[method-assign]
    scout.misses = True
    with launches_go_to(scout._start):
        steps()
    assert not hashes, "nothing is compiled"
    for module, name, code in jobs:
        getattr(sys.modules[module], name).preload(code)
    given = set(hashes)
    for kernel in {(module, name): getattr(sys.modules[module], name) for module, name, _ in jobs}.values():
        kernel.device_caches.clear()
    hashes.clear()
    with launches_go_to(start):
        steps()
    print(json.dumps({"started": sorted(hashes), "given": sorted(given), "jobs": len(jobs)}))


class Noted(_Compilers):
    last: _Compilers

    def __init__(self, count: int) -> None:
        super().__init__(count)
        Noted.last = self


def first_start() -> None:
    """Runs of some kernels: the cache is empty, it is full, one kernel is wrong, there is one core. Of each: how often it was
    run, how many kernels this process compiled, how the others ended, and what was raised."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    backend.use(backend.TARGETS["sm_120"])
    driver.set_active(AbsentGPU(120))
    kernels.ahead._Compilers = Noted  # type: ignore[misc]
    x, matrix = torch.empty(1024), torch.empty(128, 512, dtype=torch.bfloat16)
    seen: dict[str, dict[str, Any]] = {}

    def run(name: str, cache: str, cores: int, wrong: bool) -> None:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / cache)
        os.sched_getaffinity = lambda _: set(range(cores))
        for kernel in (_copy, _wide_product, _broken):
            kernel.device_caches.clear()  # as in a process of its own
        told = seen[name] = {"runs": 0, "later": 0, "here": 0}

        def work() -> None:
            told["runs"] += 1
            for block in (64, 128, 256):
                launch(_copy, (4,), x, x, 1008, BLOCK=block)
            launch(_copy, (4,), x[1:], x, 1008, BLOCK=256)  # not aligned: other machine code
            launch(_wide_product, (1,), matrix, matrix, torch.empty(128, 128), SIZE=128, DEPTH=256, num_warps=8)
            if wrong:
                launch(_broken, (1,), x, BLOCK=64)

        def later() -> None:
            told["later"] += 1
            launch(_copy, (4,), x, x, 1008, BLOCK=512)

        def counting(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            listener = knobs.compilation.listener

            def count(*, cache_hit: bool, **rest: Any) -> None:
                told["here"] += not cache_hit
                if listener is not None:
                    listener(cache_hit=cache_hit, **rest)

            with knobs.compilation.scope():
                knobs.compilation.listener = count
                start(kernel, grid, *args, **options)

        try:
            with launches_go_to(counting):
                run_compiled(work, later)
        except Exception as error:
            told["error"] = type(error).__name__
        told["processes"] = [process.returncode for process in Noted.last.processes]

    folder = os.environ["TRITON_CACHE_DIR"]
    run("empty", "a", cores=2, wrong=False)
    run("full", "a", cores=2, wrong=False)
    run("broken", "a", cores=2, wrong=True)
    run("empty and broken", "b", cores=2, wrong=True)
    run("one core", "c", cores=1, wrong=False)
    print(json.dumps(seen))


def killed() -> None:
    """Dies with two compilers waiting for jobs; prints their numbers."""
    compilers = _Compilers(2)
    compilers.give("tests.compile_probe", "_copy", "{}")
    print(json.dumps([process.pid for process in compilers.processes]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    probes: dict[str, Callable[..., None]] = {"found": found, "first_start": first_start, "killed": killed}
    probes[sys.argv[1]](*sys.argv[2:])
