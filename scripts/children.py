"""Processes that end when the one that started them does."""

from __future__ import annotations

import ctypes
import signal

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # prctl(2), Linux


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """In a child, or before it begins (`preexec_fn`): that signal comes when the thread that started it ends, however it does.
    A process that may stand still needs SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
