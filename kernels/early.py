"""Programmatic dependent launch for kernels of a microsecond or two: the next one is started while one still runs, and waits
itself before it touches what another kernel writes. A chain of six of them, one token: 8.7 us in place of 11.6 on an H200."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import backend
from kernels.jit import jit


def early(wanted: bool = True) -> dict[str, Any]:
    """Launch options of a kernel that waits itself where its EARLY says so, as with `await_inputs`."""
    if not wanted or backend.active().arch < 90:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@jit
def await_inputs(EARLY: tl.constexpr):
    """Waits until the kernels before are done and what they wrote is there; lets the next one get ready. Whatever is
    ordered by whole kernels stays so: each waits for the one before, which waited too."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
