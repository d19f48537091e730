"""Whether the cluster works: real traffic proves it; where there is none, small real requests do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from router.config import RouterConfig
from router.dispatch import Dispatcher, Request
from router.errors import ApiError
from router.pool import Worker
from wire.messages import PromptLogprobs, SamplingParams

TICK_S = 0.05
PROBE_TIMEOUT_S = 4.0
RETRY_S = 1.0  # after a probe that failed
PROBE_TOKENS = 3  # so that a page and a slot cross: the last token's KV is not handed over


class Health:
    """Probes the worker that has gone unproven longest, in both pools, one probe at a time."""

    def __init__(self, config: RouterConfig, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self.ready = asyncio.Event()  # set by the first hand-off that works, for ever
        self._config = config
        self._dispatcher = dispatcher
        self._clock = clock
        self._probe: Request | None = None
        self._not_before_s = float("-inf")
        self._last_failure = ""
        dispatcher.on_join = self.tick

    def reason(self) -> str:
        """Why requests would not be served now; "" when they would."""
        dispatcher, now = self._dispatcher, self._clock()
        missing = dispatcher.pool.missing()
        if missing:
            refusals = [f"{name} was refused: {refusal.reason}" for name, refusal in dispatcher.pool.refused.items()]
            return "; ".join([missing, *refusals])
        if now - dispatcher.served_s <= self._config.health_window_s or self._is_busy(now):
            return ""
        if dispatcher.served_s == float("-inf"):
            what = "no request has been served yet"
        else:
            what = f"no hand-off from prefill to decode has worked for {now - dispatcher.served_s:.1f} s"
        return f"{what} (last probe: {self._last_failure})" if self._last_failure else what

    def report(self) -> dict[str, Any]:
        """The /health body."""
        pool, now, reason = self._dispatcher.pool, self._clock(), self.reason()
        return {
            "status": "unavailable" if reason else "ok",
            "reason": reason or None,
            "workers": [self._worker(worker, now) for worker in pool.workers()],
            "refused": [{"name": name, "reason": refusal.reason} for name, refusal in pool.refused.items()],
        }

    def tick(self) -> None:
        """Starts a probe when one is due."""
        if self._dispatcher.served_s > float("-inf"):
            self.ready.set()
        pool, now = self._dispatcher.pool, self._clock()
        if self._probe is not None or now < self._not_before_s or not pool.has_pair():
            return
        pair = self._stalest("prefill"), self._stalest("decode")
        if any(self._is_due(worker, now) for worker in pair):
            self._send(pair)

    async def run(self) -> None:
        """Ticks for ever; also does the dispatcher's timed work."""
        while True:
            self._dispatcher.sweep()
            self.tick()
            await asyncio.sleep(TICK_S)

    # ---- the listener of a probe ----

    def tokens(self, sample: int, ids: list[int], finish: str, logprobs: Any, tops: Any) -> bool:
        if finish:
            self._probe = None
            self._last_failure = ""
            self._not_before_s = float("-inf")
            self._dispatcher.metrics.add("probes_ok")
            self.tick()
        return False

    def prompt_logprobs(self, message: PromptLogprobs) -> None:
        return None

    def failed(self, error: ApiError) -> None:
        if self._probe is not None and self._probe.pinned is not None:
            for worker in self._probe.pinned:
                worker.failures += 1
        self._probe = None
        self._last_failure = error.message
        self._not_before_s = self._clock() + RETRY_S
        self._dispatcher.metrics.add("probes_failed")

    def _send(self, pair: tuple[Worker, Worker]) -> None:
        pool = self._dispatcher.pool
        prompt = [pool.bos_token_id, *range(2, PROBE_TOKENS + 1)]
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
        request = Request.new([token_id % max(pool.vocab_size, 1) for token_id in prompt], 1, sampling, self)
        request.pinned = pair
        for worker in pair:
            worker.checked_s = self._clock()
        self._probe = request
        self._dispatcher.submit(request, PROBE_TIMEOUT_S)

    def _stalest(self, role: str) -> Worker:
        workers = self._dispatcher.pool.workers(role)
        return min(workers, key=lambda worker: worker.checked_s)

    def _is_due(self, worker: Worker, now: float) -> bool:
        return now - worker.checked_s > (RETRY_S if worker.failures else self._config.probe_every_s)

    def _is_busy(self, now: float) -> bool:
        """Tokens flow, every decode worker is full and no transfer has failed: a probe just has to wait its turn."""
        dispatcher, window_s = self._dispatcher, self._config.health_window_s
        flowing = now - dispatcher.tokens_s <= window_s
        broken = dispatcher.transfer_failed_s > dispatcher.served_s
        return flowing and not broken and all(worker.is_full for worker in dispatcher.pool.workers("decode"))

    def _worker(self, worker: Worker, now: float) -> dict[str, Any]:
        proven = None if worker.proven_s == float("-inf") else round(now - worker.proven_s, 3)
        return {"role": worker.role, "name": worker.name, "seen_s_ago": round(now - worker.seen_s, 3), "proven_s_ago": proven}
