"""Tries that wait for a message that was lost on the way: no worker knows of them any more.

A try is with its prefill worker until decode has granted, and with its decode worker from then until its last row. So it
is lost when reports of prefill and, after those, reports of decode do not have it. Each worker is asked for two that show
different turns of its loop: what lay in its inbox at the first one, it has read by the second.
"""

from __future__ import annotations

import math

from router.pool import Worker
from router.request import Key, Try
from wire.messages import unpack_keys

PATIENCE_S = 1.0  # so long after the last sign of life a report without a try means nothing: messages are on their way
REPORTS = 2


class Losses:
    """Reports come in through `report`; `take` gives what they add up to, and is called when no message waits."""

    def __init__(self) -> None:
        self._watched: dict[Worker, dict[Key, Try]] = {}
        self._lost: dict[Key, Try] = {}
        self._calm_s = -math.inf  # since when reports and rows are taken as they come

    def watch(self, attempt: Try) -> None:
        for worker in (attempt.prefill, attempt.decode):
            self._watched.setdefault(worker, {})[attempt.key] = attempt

    def forget(self, attempt: Try) -> None:
        self._lost.pop(attempt.key, None)
        for worker in (attempt.prefill, attempt.decode):
            watched = self._watched.get(worker, {})
            if watched.pop(attempt.key, None) is not None and not watched:
                del self._watched[worker]

    def report(self, worker: Worker, live: bytes, now_s: float) -> None:
        """A new report of a worker: the keys that it holds. Raises ValueError when it is malformed."""
        keys = set(unpack_keys(live))
        for key, attempt in self._watched.get(worker, {}).items():
            legs = _legs(attempt)
            if key in keys:
                if worker in legs:
                    attempt.heard_s, attempt.misses = now_s, 0
                continue
            patient = now_s - max(attempt.sent_s, attempt.heard_s, self._calm_s) >= PATIENCE_S
            if patient and attempt.misses < len(legs) and worker is legs[attempt.misses]:
                attempt.misses += 1
                if attempt.misses == len(legs):
                    self._lost[key] = attempt

    def doubt(self, now_s: float) -> None:
        """The router stood still: what it reads now may be old, and not in the order in which it came."""
        self._calm_s = now_s
        for attempt in self._lost.values():
            attempt.misses = 0
        self._lost = {}

    def take(self) -> list[Try]:
        """The tries that are lost, once. What has come for one since the last report of it keeps it."""
        lost, self._lost = self._lost, {}
        return [attempt for attempt in lost.values() if attempt.misses and attempt.misses == len(_legs(attempt))]


def _legs(attempt: Try) -> tuple[Worker, ...]:
    """Whose reports must miss a try, in this order, before it is lost."""
    prefill, decode = attempt.prefill, attempt.decode
    if not attempt.samples:  # only the prompt's scores are still to come, if anything is
        return (prefill,) * REPORTS if attempt.request.wants_scores else ()
    return (decode,) * REPORTS if attempt.started else (prefill,) * REPORTS + (decode,) * REPORTS
