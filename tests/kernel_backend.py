"""Which kernels a test runs: compiled on a GPU, interpreted on a CPU. Import this before any kernel.

    from tests.kernel_backend import DEVICE, triton_backend   # the fixture is used by name

The environment variable must be set before a kernel is defined, so a test process either interprets every kernel or none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from kernels import backend  # noqa: E402


@pytest.fixture
def triton_backend() -> Iterator[backend.Backend]:
    before = backend.active()
    backend.use(backend.of_gpu(DEVICE) if DEVICE.type == "cuda" else backend.INTERPRETER)
    yield backend.active()
    backend.use(before)
