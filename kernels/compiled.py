"""Compiles kernels for a GPU that is not there: what each needs of it, read off the machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.launch import launches_go_to

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as compiled for one architecture. error: the compiler's words where it could not be."""

    kernel: str
    variant: str
    arch: int
    shared_bytes: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    warps: int = 0
    error: str = ""

    def reason(self, shared_limit_bytes: int) -> str:
        """Why the kernel cannot run on such a card; empty when it can."""
        if self.error:
            return self.error
        if self.shared_bytes > shared_limit_bytes:
            return f"needs {self.shared_bytes} B of shared memory, a block has {shared_limit_bytes}"
        if 32 * self.warps * self.registers > 65_536:
            return f"needs {self.registers} registers in {32 * self.warps} threads, a block has 65536"
        return ""


class AbsentGPU:
    """What triton asks a driver for while it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int) -> Iterator[list[Compiled]]:
    """Inside, `launch` compiles for `arch` and starts nothing; gives the list that fills up."""
    seen: set[str] = set()
    results: list[Compiled] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key, compiled = compile_launch(arch, kernel, grid, args, options, seen)
        if compiled is not None:
            seen.add(key)
            results.append(compiled)

    before = driver._active
    driver.set_active(AbsentGPU(arch))
    try:
        with launches_go_to(compile_only):
            yield results
    finally:
        driver._active = before


def compile_launch(
    arch: int, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], seen: Container[str] = ()
) -> tuple[str, Compiled | None]:
    """What tells this compilation from others, and what the kernel needs; None for one of `seen`."""
    name, variant = kernel.fn.__name__.strip("_"), _variant(kernel, args, options)
    try:
        made = kernel.warmup(*args, grid=grid, **options)
    except Exception as error:  # whatever the compiler says is what the table reports
        key = name + variant
        return key, None if key in seen else Compiled(name, variant, arch, error=cause_line(error))
    return made.hash, None if made.hash in seen else _resources(made, name, variant, arch)


def _variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What tells this compilation from others of the same kernel: constexprs, dtypes, warps."""
    named = dict(zip(kernel.arg_names, args, strict=False)) | options
    words = []
    for name, value in named.items():
        if hasattr(value, "dtype"):
            words.append(str(value.dtype).removeprefix("torch."))
        elif isinstance(value, (bool, int, str)):
            words.append(f"{name}={value}")
    return " ".join(words)


def _resources(made: Any, name: str, variant: str, arch: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        printed = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers = max((int(count) for count in re.findall(r"REG:(\d+)", printed)), default=0)
    spilled = max((int(count) for count in re.findall(r"STACK:(\d+)", printed)), default=0)
    warps = getattr(made.metadata, "total_num_warps", None) or made.metadata.num_warps
    return Compiled(name, variant, arch, made.metadata.shared, registers, spilled, warps)


def cause_line(error: BaseException) -> str:
    """Its type and the line that says what is wrong: torch begins with it, compilers end with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0 if isinstance(error, RuntimeError) else -1] if lines else ""
    return f"{type(error).__name__}: {said[:200]}"
