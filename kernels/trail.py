"""Where a step is: the stage, and the kernel that is being started. What is left of it when the step fails is the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.runtime.errors import OutOfResources

from kernels import backend
from kernels.compiled import compile_launch, first_line
from kernels.launch import launches_go_to, stages_go_to

BLOCK_REGISTERS = 65_536


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

    def place(self) -> str:
        """In words, for a message."""
        stage = self.stage or "between its stages"
        kernel = f"kernel {self.launch.name}" if self.launch is not None else "not at the start of a kernel"
        return f"{stage}, {kernel}, {backend.active().name}"

    def reason(self, error: BaseException) -> str:
        """What was asked for and what the card has, where that is the trouble; else what the error says."""
        card, said = backend.active(), first_line(error)
        if isinstance(error, OutOfResources):
            said = f"it needs {error.required} of {error.name}, the card has {error.limit}"
        if self.launch is None or not card.arch or backend.INTERPRETED:
            return said
        _, made = compile_launch(card.arch, self.launch.kernel, self.launch.grid, self.launch.args, self.launch.options)
        if made is None or made.error:
            return said if made is None or made.error == said else f"{said}; compiled anew: {made.error}"
        threads = 32 * made.warps
        return (
            f"{said}; it takes {made.shared_bytes} B of shared memory (a block has {card.shared_bytes})"
            f" and {made.registers} registers in {threads} threads (a block has {BLOCK_REGISTERS})"
        )
