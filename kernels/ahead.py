"""A first start: what it would compile one after another, as it comes to it, is compiled by all cores before.

A run starts its kernels until triton has to compile one. From there on it only says what it would start; processes compile
that into triton's cache, and the run is made again. Where the cache has everything it is made once, and nothing else is done.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

from kernels import backend
from kernels.compiled import AbsentGPU
from kernels.launch import launches_go_to

MOST_COMPILERS = 32  # with more, all wait for the kernel that takes longest
JOB_BYTES = 1 << 17  # one is a few thousand
ROOT = Path(__file__).resolve().parent.parent
_log = logging.getLogger("kernels")


def run_compiled(run: Callable[[], None], later: Callable[[], None] = lambda: None) -> None:
    """Calls `run`, which starts kernels with `launch`: once, or again from its beginning when some had to be compiled. It must
    bear that, and that nothing is computed from some kernel on: it reads no results. A kernel that cannot be compiled raises
    where it is started. later: starts what will be asked for next, and is compiled along, but not called for its own sake."""
    scout = _Scout()
    with scout.followed():
        try:
            run()
            if scout.misses:
                later()
        except Exception:
            if not scout.misses:
                raise  # else it will be raised again by the run that counts
    if scout.misses:
        run()


class _Scout:
    """Starts kernels as long as all are there; from then on has those compiled that are not."""

    def __init__(self) -> None:
        self.misses = False  # triton had to compile
        self._seen: set[tuple[Any, ...]] = set()
        self._compilers = _Compilers(min(len(os.sched_getaffinity(0)), MOST_COMPILERS))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """At the end everything is compiled."""
        begin_s = time.monotonic()
        with launches_go_to(self._start) as self._starter, knobs.compilation.scope(), self._compilers.ended():
            knobs.compilation.listener = self._notice
            yield
        if self._compilers.jobs:
            processes = sum(process.returncode == 0 for process in self._compilers.processes)
            seconds, kernels = time.monotonic() - begin_s, len(self._compilers.jobs)
            _log.info("%d kernels compiled by %d processes in %.1f s", kernels, processes, seconds)

    def _notice(self, *, cache_hit: bool, **_: Any) -> None:
        """Triton found machine code, or made it. One process is no faster than this one."""
        self.misses |= not cache_hit and self._compilers.count > 1

    def _start(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if not self.misses:
            self._starter(kernel, grid, *args, **options)
            return
        code = id(kernel), *map(_looked_at, args), *options.items()
        if code not in self._seen:  # triton's own look takes ten times as long
            self._seen.add(code)
            with knobs.runtime.scope():
                knobs.runtime.jit_cache_hook = self._hand_over
                kernel.warmup(*args, grid=grid, **options)

    def _hand_over(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton is about to look for machine code and to compile it: it need not."""
        self._compilers.give(fn.module, fn.name, compile["specialization_data"])
        return True


def _looked_at(argument: Any) -> Any:
    """What machine code may depend on, and perhaps more."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):  # a tensor descriptor
        return argument.base.dtype, *argument.block_shape
    return argument


class _Compilers:
    """`count` processes that compile for the card of this one, without using it; none before there is a job. They take jobs
    from one socket, each when it has done its last, and end when that is closed, as it is when this process dies."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.jobs: set[tuple[str, ...]] = set()
        self.processes: list[subprocess.Popen[bytes]] = []

    def give(self, *job: str) -> None:
        """job: module and name of a kernel, and what triton calls its specialisation data. Waits while many are waiting."""
        if job in self.jobs:
            return
        if not self.jobs:
            self._begin()
        self.jobs.add(job)
        with suppress(OSError):  # nobody is left to take it: then it is compiled where it is started
            self._socket.send(json.dumps(job).encode())

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command, environment = [sys.executable, "-m", __name__, str(backend.active().arch)], {**os.environ, "PYTHONPATH": path}
        quiet = subprocess.DEVNULL  # what is wrong with a kernel is said by this process, when it starts it
        with theirs, suppress(OSError):
            for _ in range(self.count):
                self.processes.append(
                    subprocess.Popen(command, stdin=theirs.fileno(), stdout=quiet, stderr=quiet, env=environment)
                )

    @contextmanager
    def ended(self) -> Iterator[None]:
        """At the end all jobs are done; after an exception they are not waited for."""
        try:
            yield
            if self.jobs:
                self._socket.close()
            for process in self.processes:
                process.wait()
        finally:
            for process in self.processes:
                process.kill()
                process.wait()


def main(arch: int) -> None:
    """One of the processes: compiles the jobs that come by stdin."""
    os.nice(10)  # other workers of this host may be serving
    gc.disable()  # it takes an eighth of the time to find that the compiler's trees are still in use
    driver.set_active(AbsentGPU(arch))
    jobs = socket.socket(fileno=0)
    while job := jobs.recv(JOB_BYTES):
        module, name, code = json.loads(job)
        with suppress(Exception):  # whatever a compiler says; it will say it again
            made = getattr(import_module(module), name).preload(code)
            CudaLauncher(made.src, made.metadata)  # that C, too, is compiled into the cache


if __name__ == "__main__":
    if not (len(sys.argv) == 2 and sys.argv[1].isdecimal()):
        print("kernels.ahead is a process of a worker that compiles its kernels, and is started by that only", file=sys.stderr)
        sys.exit(2)
    main(int(sys.argv[1]))
