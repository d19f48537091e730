"""Memory for results and scratch: one block, handed out like a stack, so that a step allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes


class Workspace:
    """`with workspace.active(): ...` makes `empty` below take from it; `frame()` gives back what was taken inside. One that
    begins before the first flip may flip itself.

    Addresses depend only on the order of the calls, so a captured step finds its tensors where they were.
    """

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        self._block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._nbytes = nbytes
        self._used, self._end = 0, nbytes
        self._first = 0
        self._other_half: tuple[int, int] | None = None

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised. Raises MemoryError that names the size when the block is too small."""
        begin, end = self._reserve(math.prod(shape) * dtype.itemsize)
        return self._block[begin:end].view(dtype).view(*shape)

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        begin, end = self._used, self._used + nbytes
        if end > self._end:
            raise MemoryError(f"the workspace of {self._nbytes} bytes is {end - self._end} bytes too small for this step")
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return begin, end

    @contextmanager
    def frame(self) -> Iterator[None]:
        before = self._used, self._end, self._first, self._other_half
        try:
            yield
        finally:
            self._used, self._end, self._first, self._other_half = before

    def flip(self) -> None:
        """Goes on in the other half of what is left, emptied; what was taken since the last flip stays until the next.

        So a sublayer's result outlives its scratch by exactly one sublayer, the one that reads it. What must live longer
        (logits beside a draft) is taken before the first flip.
        """
        if self._other_half is None:
            middle = (self._used + self._end) // 2 // ALIGNMENT * ALIGNMENT
            self._other_half, self._end = (middle, self._end), middle
            self._first = self._used
        else:
            self._other_half, (self._used, self._end) = (self._first, self._end), self._other_half
            self._first = self._used

    @contextmanager
    def active(self) -> Iterator[None]:
        global _active
        before, _active = _active, self
        try:
            yield
        finally:
            _active = before
            self._used, self._end, self._other_half = 0, self._nbytes, None


class Ruler(Workspace):
    """Measures: the memory is torch's, and a Workspace of `needed_bytes` holds all that was taken while it was active."""

    _BOUNDLESS = 1 << 50

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(0, device)
        self._nbytes = self._end = self._BOUNDLESS
        self._device = device
        self.needed_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._reserve(math.prod(shape) * dtype.itemsize)
        needed = self._used
        if self._other_half is not None:  # two halves as large as the larger one, behind what was taken before them
            needed = min(self._first, self._other_half[0]) + 2 * (self._used - self._first)
        self.needed_bytes = max(self.needed_bytes, needed + 2 * ALIGNMENT)
        return torch.empty(*shape, dtype=dtype, device=self._device)


_active: Workspace | None = None


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An uninitialised tensor from the active workspace, or from torch when none is active."""
    if _active is not None:
        return _active.take(shape, dtype)
    return torch.empty(*shape, dtype=dtype, device=device)


@contextmanager
def frame() -> Iterator[None]:
    """Gives back at its end what `empty` handed out inside; nothing when no workspace is active."""
    if _active is None:
        yield
    else:
        with _active.frame():
            yield


def flip() -> None:
    """`Workspace.flip` of the active workspace, if there is one."""
    if _active is not None:
        _active.flip()
