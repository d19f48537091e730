"""Where a step is: the stage, and the kernel that is being started. What is left of it when the step fails is the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from traceback import extract_tb
from typing import Any

from triton.runtime.errors import OutOfResources

from kernels import backend
from kernels.compiled import Compiled, cause_line, compile_launch
from kernels.launch import launches_go_to, stages_go_to

BLOCK_REGISTERS = 65_536
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything it is started with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__).strip("_")


class Trail:
    """`with trail.followed(): ...` keeps up with a step. After an exception `stage` is the one that raised, `launch` the
    kernel that could not be started: None when it was something else. `kernels` counts what was started."""

    def __init__(self) -> None:
        self.stage = ""
        self.launch: Launch | None = None
        self.kernels = 0

    @contextmanager
    def followed(self) -> Iterator[None]:
        with launches_go_to(self._start) as self._starter, stages_go_to(self.within):
            yield

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        before, self.stage = self.stage, name
        yield
        self.stage = before  # not after an exception

    def _start(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.launch = Launch(kernel, grid, args, options)
        self._starter(kernel, grid, *args, **options)
        self.launch = None
        self.kernels += 1

    def place(self, error: BaseException) -> str:
        """Where it was raised, in words: the stage, the kernel or else the line, and the card."""
        kernel = f"kernel {self.launch.name}" if self.launch is not None else _line(error)
        return f"{self.stage or 'between its stages'}, {kernel}, {backend.active().name}"

    def reason(self, error: BaseException) -> str:
        """What was asked for and what the card has, where that is the trouble; else what the error says."""
        card, said = backend.active(), cause_line(error)
        if isinstance(error, OutOfResources):
            said = f"it needs {error.required} of {error.name}, the card has {error.limit}"
        if self.launch is None or not card.arch or backend.INTERPRETED:
            return said
        made = _compiled(self.launch, card.arch)
        if made is None or made.error:
            return said if made is None or made.error == said else f"{said}; compiled anew: {made.error}"
        threads = 32 * made.warps
        return (
            f"{said}; it takes {made.shared_bytes} B of shared memory (a block has {card.shared_bytes})"
            f" and {made.registers} registers in {threads} threads (a block has {BLOCK_REGISTERS})"
        )


def _compiled(launch: Launch, arch: int) -> Compiled | None:
    """None where the program that reads machine code is missing."""
    try:
        return compile_launch(arch, launch.kernel, launch.grid, launch.args, launch.options)[1]
    except (OSError, CalledProcessError):
        return None


def _line(error: BaseException) -> str:
    """The innermost line of ours; an environment may lie in a hidden folder beside it."""
    frames = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
    inside = [(path.relative_to(ROOT), line) for path, line in frames if path.is_relative_to(ROOT)]
    ours = [f"{path}:{line}" for path, line in inside if not path.parts[0].startswith(".")]
    return ours[-1] if ours else "outside any kernel"
