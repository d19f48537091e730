"""The one place where a Triton kernel is started. `kernels.check` takes it over to compile without a GPU.

And the names of the parts of a step, for whoever watches it: kernels/trail.py says with them where a step failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Starter = Callable[..., None]
Watcher = Callable[[str], AbstractContextManager[None]]


def _start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)


_starter: Starter = _start


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Starts `kernel` on `grid` with its arguments; options are its constexprs, num_warps, num_stages."""
    _starter(kernel, grid, *args, **options)


@contextmanager
def launches_go_to(starter: Starter) -> Iterator[Starter]:
    """Inside, `starter(kernel, grid, *args, **options)` is called in place of every launch; gives what it takes over from."""
    global _starter
    before, _starter = _starter, starter
    try:
        yield before
    finally:
        _starter = before


_UNWATCHED = nullcontext()
_watcher: Watcher | None = None


def stage(name: str) -> AbstractContextManager[None]:
    """`with stage("layers.3.attn"): ...` names a part of a step. Stages follow each other, none lies in another."""
    return _UNWATCHED if _watcher is None else _watcher(name)


@contextmanager
def stages_go_to(watcher: Watcher) -> Iterator[None]:
    """Inside, every stage runs within `watcher(its name)`."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before
