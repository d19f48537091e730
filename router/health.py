"""Whether the cluster works: real traffic proves it; where there is none, small real requests do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.errors import ApiError
from router.pool import ROLES, Worker
from router.request import Request
from wire.messages import PromptLogprobs, SamplingParams

TICK_S = 0.05
PROBE_TIMEOUT_S = 4.0
RETRY_S = 1.0  # after a failure
PROBE_TOKENS = 3  # so that a page and a slot cross: the last token's KV is not handed over
NEVER_S = float("-inf")


class Health:
    """Probes every worker that has gone unproven too long, each with the counterpart that was proven last."""

    def __init__(self, config: RouterConfig, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self.ready = asyncio.Event()  # set by the first hand-off that works, for ever
        self.last_failure = ""  # of a probe; empty since one has worked
        self.probes: dict[Worker, Probe] = {}  # on their way, by the worker that is due
        self.dispatcher = dispatcher
        self._config = config
        self.clock = clock
        dispatcher.on_join = self.tick

    def reason(self) -> str:
        """Why requests would not be served now; "" when they would."""
        dispatcher, now = self.dispatcher, self.clock()
        missing = dispatcher.pool.missing()
        if missing:
            refusals = [f"{name} was refused: {refusal.reason}" for name, refusal in dispatcher.pool.refused.items()]
            return "; ".join([missing, *refusals])
        if now - dispatcher.served_s <= self._config.health_window_s or self._is_busy(now):
            return ""
        if dispatcher.served_s == NEVER_S:
            what = "no request has been served yet"
        else:
            what = f"no hand-off from prefill to decode has worked for {now - dispatcher.served_s:.1f} s"
        return f"{what} (last probe: {self.last_failure})" if self.last_failure else what

    def report(self) -> dict[str, Any]:
        """The /health body."""
        pool, now, reason = self.dispatcher.pool, self.clock(), self.reason()
        return {
            "status": "unavailable" if reason else "ok",
            "reason": reason or None,
            "workers": [self._worker(worker, now) for worker in pool.workers()],
            "refused": [{"name": name, "reason": refusal.reason} for name, refusal in pool.refused.items()],
        }

    def tick(self) -> None:
        """Starts the probes that are due."""
        if self.dispatcher.served_s > NEVER_S:
            self.ready.set()
        pool, now = self.dispatcher.pool, self.clock()
        if pool.has_pair():
            for worker in pool.workers():
                if worker not in self.probes and self._is_due(worker, now):
                    self._send(worker, now)

    async def run(self) -> None:
        """Ticks for ever; also does the dispatcher's timed work."""
        while True:
            self.dispatcher.sweep()
            self.tick()
            await asyncio.sleep(TICK_S)

    def _send(self, worker: Worker, now: float) -> None:
        """The counterpart is a worker that is known to work, if there is one: then a failure is the due worker's."""
        pool = self.dispatcher.pool
        others = pool.workers(next(role for role in ROLES if role != worker.role))
        partner = max(others, key=lambda other: (not other.failures, other.proven_s))
        trusted = not partner.failures and partner.proven_s > NEVER_S
        probe = Probe(self, worker, (worker,) if trusted else (worker, partner))
        prompt = [pool.bos_token_id, *range(2, PROBE_TOKENS + 1)]
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
        request = Request.new([token_id % max(pool.vocab_size, 1) for token_id in prompt], 1, sampling, probe)
        request.pinned = (worker, partner) if worker.role == "prefill" else (partner, worker)
        request.on_trial = probe.on_trial
        for each in request.pinned:
            if each in probe.on_trial or self._is_due(each, now):  # one probe for both
                each.checked_s = now
        self.probes[worker] = probe
        probe.request = request
        self.dispatcher.submit(request, PROBE_TIMEOUT_S)

    def _is_due(self, worker: Worker, now: float) -> bool:
        return now - worker.checked_s > (RETRY_S if worker.failures else self._config.probe_every_s)

    def _is_busy(self, now: float) -> bool:
        """Hand-offs have worked, none has failed since, and new ones just have to wait their turn: one of the pools is full
        and gets on with its work."""
        dispatcher, window_s = self.dispatcher, self._config.health_window_s
        if dispatcher.served_s == NEVER_S or dispatcher.transfer_failed_s > dispatcher.served_s:
            return False
        prefills, decodes = [dispatcher.pool.workers(role) for role in ROLES]
        flowing = now - dispatcher.tokens_s <= window_s
        computing = any(now - worker.stepped_s <= window_s for worker in prefills)
        full = [all(worker.is_full for worker in workers) for workers in (prefills, decodes)]
        return (full[0] and (flowing or computing)) or (full[1] and flowing)

    def _worker(self, worker: Worker, now: float) -> dict[str, Any]:
        proven = None if worker.proven_s == NEVER_S else round(now - worker.proven_s, 3)
        return {"role": worker.role, "name": worker.name, "seen_s_ago": round(now - worker.seen_s, 3), "proven_s_ago": proven}


@dataclass(slots=True, eq=False)
class Probe:
    """A small real request through one pair, and its listener."""

    health: Health
    worker: Worker  # the one that was due
    on_trial: tuple[Worker, ...]
    request: Request | None = None

    def tokens(self, sample: int, ids: list[int], finish: str, logprobs: Any, tops: Any) -> bool:
        if finish:
            self._end("")
            self.health.dispatcher.metrics.add("probes_ok")
            self.health.tick()
        return False

    def prompt_logprobs(self, message: PromptLogprobs) -> None:
        return None

    def failed(self, error: ApiError) -> None:
        """What a worker says is charged by the dispatcher. Here it is silence, which a saturated worker may keep."""
        request = self.request
        if request is not None and request.pinned and error.code == "timeout" and not request.failure:
            now = self.health.clock()
            if not any(worker.is_saturated(now) for worker in request.pinned):
                for worker in self.on_trial:
                    worker.failures += worker.proven_s <= request.submitted_s
        self._end((request.reason if request is not None else "") or error.message)
        self.health.dispatcher.metrics.add("probes_failed")

    def _end(self, failure: str) -> None:
        del self.health.probes[self.worker]
        self.health.last_failure = failure
