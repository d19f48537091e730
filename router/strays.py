"""Rows that nobody waits for, and how often their worker is told so."""

from __future__ import annotations

import math

PERIOD_S = 1.0
LIMIT = 4096

StrayKey = tuple[int, int, int]  # rid, attempt, sample


class Strays:
    """Remembers whom it was said to lately. A worker that was taken for dead generates on, many rows a second; one word
    in a while ends that, and it may get lost, so it is repeated."""

    def __init__(self) -> None:
        self._told: dict[StrayKey, float] = {}  # in the order of their times

    def is_due(self, key: StrayKey, now_s: float) -> bool:
        """Whether to say it (again) now; the caller then does."""
        if now_s - self._told.get(key, -math.inf) < PERIOD_S:
            return False
        self._told.pop(key, None)
        self._told[key] = now_s
        if len(self._told) > LIMIT:
            del self._told[next(iter(self._told))]
        return True
