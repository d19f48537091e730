"""Which of the two runs: the torch references or the Triton kernels. Decided once in a process, and said."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from triton.runtime import driver

log = logging.getLogger(__name__)

INVARIANT_ROWS = 256  # tokens of a step; with more the dense layers are cut by their number (kernels/gemm_portable.py)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # as triton reads it: when a kernel is defined


@dataclass(frozen=True, slots=True)
class Backend:
    """What the public functions of this package look at.

    arch is the compute capability times ten (90, 120; 0 where nothing is compiled), shared_bytes what one block may use.
    invariant: in steps of up to INVARIANT_ROWS tokens no sum is cut by how many there are, so a token's result has the same
    bits whatever else is in the step.
    """

    triton: bool
    name: str
    arch: int = 0
    multiprocessors: int = 1
    shared_bytes: int = 0
    invariant: bool = False

    def cuts_alike(self, tokens: int) -> bool:
        """Whether a step of so many tokens is cut as every one of up to INVARIANT_ROWS is."""
        return self.invariant and tokens <= INVARIANT_ROWS

    @property
    def hopper(self) -> bool:
        """Whether the kernels tuned for wgmma run; every one of them has a portable counterpart."""
        return self.arch == 90


REFERENCE = Backend(False, "torch references")
INTERPRETER = Backend(True, "triton interpreter", multiprocessors=4, shared_bytes=1 << 30)
TARGETS = {
    "sm_90": Backend(True, "triton for sm_90", 90, 132, 232_448),  # H100, H200
    "sm_120": Backend(True, "triton for sm_120", 120, 188, 101_376),  # RTX PRO 6000 Blackwell; GeForce 50
}

_active = REFERENCE


def active() -> Backend:
    return _active


def use(backend: Backend) -> None:
    """Sets the backend of this process. Weights made for one backend do not fit the other."""
    global _active
    if backend != _active:
        log.info("kernels: %s", backend.name)
    _active = backend


def choose(device: torch.device) -> Backend:
    """The backend for tensors on `device`, made the active one: Triton on a GPU, the references on a CPU."""
    use(of_gpu(device) if device.type == "cuda" else REFERENCE)
    return _active


def make_invariant() -> None:
    """From here on. The references are anyway: they round their sums once."""
    if _active.triton and not _active.invariant:
        use(replace(_active, invariant=True, name=f"{_active.name}, batch-invariant"))


@contextmanager
def cutting(alike: bool) -> Iterator[None]:
    """Inside, what is run or captured is cut as after `make_invariant`, or as suits its number of tokens."""
    global _active
    before, _active = _active, replace(_active, invariant=alike and _active.triton)
    try:
        yield
    finally:
        _active = before


def of_gpu(device: torch.device) -> Backend:
    """Raises ValueError for a GPU that the kernels cannot run on."""
    properties = torch.cuda.get_device_properties(device)
    arch = 10 * properties.major + properties.minor
    if arch < 89:
        raise ValueError(f"{properties.name} is sm_{arch}: the kernels need FP8 matrix units, sm_89 or newer")
    shared = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return Backend(True, f"triton on {properties.name} (sm_{arch})", arch, properties.multi_processor_count, shared)
