"""Before any test imports a kernel: without a GPU they are interpreted. And each test begins on the references."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernels import backend

# No test is about how fast its examples are: the machine may be busy with other things.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def references() -> None:
    """As a process does, whatever ran before in this one: a model that a test loads, or has from tests/golden.py, chooses its
    backend, and a fake on the CPU has none to choose."""
    backend.use(backend.REFERENCE)


@pytest.fixture(params=sorted(backend.TARGETS))
def target(request: pytest.FixtureRequest) -> Iterator[backend.Backend]:
    """The backend of each GPU generation, one after another."""
    before = backend.active()
    backend.use(backend.TARGETS[request.param])
    yield backend.active()
    backend.use(before)
