"""The one place where a Triton kernel is started. `kernels.check` takes it over to compile without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Starter = Callable[..., None]


def _start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


_starter: Starter = _start


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Starts `kernel` on `grid` with its arguments; options are its constexprs, num_warps, num_stages."""
    _starter(kernel, grid, *args, **options)


@contextmanager
def launches_go_to(starter: Starter) -> Iterator[None]:
    """Inside, `starter(kernel, grid, *args, **options)` is called in place of every launch."""
    global _starter
    before, _starter = _starter, starter
    try:
        yield
    finally:
        _starter = before
