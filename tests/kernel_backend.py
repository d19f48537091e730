"""Which kernels a test runs: compiled on a GPU, interpreted on a CPU. Import this before any kernel.

    from tests.kernel_backend import DEVICE, triton_backend   # the fixture is used by name

The environment variable must be set before a kernel is defined, so a test process either interprets every kernel or none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from kernels import backend  # noqa: E402
from kernels.workspace import Workspace  # noqa: E402

WORKSPACE_BYTES = 1 << 30  # of an address space: only what is taken is touched


class Poisoned(Workspace):
    """Hands out memory full of NaN and -1: a kernel that leaves a place unwritten, or reads one that is, shows."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        taken = super().take(shape, dtype)
        taken.view(torch.uint8).fill_(0xFF)
        return taken


@pytest.fixture
def triton_backend() -> Iterator[backend.Backend]:
    """The Triton kernels, with results and scratch from poisoned memory."""
    before = backend.active()
    backend.use(backend.of_gpu(DEVICE) if DEVICE.type == "cuda" else backend.INTERPRETER)
    with Poisoned(WORKSPACE_BYTES, DEVICE).active():
        yield backend.active()
    backend.use(before)
