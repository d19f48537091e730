"""Requests in flight: sending each to a pair of workers, its tokens back, and another try when a worker fails it.

Each open sample of a `Request` belongs to exactly one `Try` or is parked; rows of any other attempt are dropped and their
worker is told. A sample that has to move (worker dead, retracted, transfer broken, tokens lost) goes on elsewhere from
the client's prompt + its tokens so far, so its text continues seamlessly.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from router.config import RouterConfig
from router.errors import ApiError, gave_up, hopeless, internal, no_worker_came, timed_out, unavailable
from router.losses import Losses
from router.pool import MAX_WORKERS, ROLES, Pool, Refusal, Worker
from router.request import Key, Parked, Request, Sample, Try
from router.rows import holds_prompt, is_row
from router.strays import Strays
from wire.messages import (
    ALL_SAMPLES,
    Abort,
    Failed,
    Prefill,
    PromptLogprobs,
    Refused,
    Status,
    Tokens,
    pack_ids,
)
from wire.metrics import Metrics
from wire.timeline import Timeline

_LOG = logging.getLogger("pdserve.router")
_timeline = Timeline("router")
STALL_S = 0.5  # a sweep that comes this much late says that the router stood still, not the workers
CORRUPT_TRIES = 2  # bytes that change on their way twice will do so again
WORKER_GRACE_S = 1.0  # workers give up this much after the router, which then is the one that says so


class Sender(Protocol):
    """`wire.sockets.Outbox`."""

    def send(self, address: str, message: Any) -> bool: ...

    def forget(self, address: str) -> None: ...


class Dispatcher:
    def __init__(
        self,
        config: RouterConfig,
        outbox: Sender,
        inbox_address: str,
        metrics: Metrics,
        defer: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`defer` runs a callback soon, after the handlers that are due now (`loop.call_soon`)."""
        self.pool = Pool()
        self.metrics = metrics
        self.served_s = float("-inf")  # last time a hand-off worked
        self.tokens_s = float("-inf")  # last time a token came that somebody waits for
        self.transfer_failed_s = float("-inf")
        self.on_join: Callable[[], None] = lambda: None
        self._config = config
        self._outbox = outbox
        self._inbox_address = inbox_address
        self._clock = clock
        self._defer = defer
        self._outgoing: list[tuple[str, Any]] = []
        self._requests: dict[int, Request] = {}  # clients', in order of arrival, so in order of deadline
        self._probes: dict[int, Request] = {}  # these have deadlines of their own
        self._tries: dict[Key, Try] = {}
        self._parked: list[Parked] = []
        self._next_rid = secrets.randbits(46) << 16  # so that a restarted router does not reuse what workers remember
        self._in_flight = 0  # clients' samples
        self._prompt_tokens = 0  # of clients' requests
        self._strays = Strays()
        self._losses = Losses()
        self._swept_s = clock()
        self._handlers: dict[type, Callable[[Any], None]] = {
            Tokens: self._take_tokens,
            Status: self._take_status,
            Failed: self._take_failed,
            PromptLogprobs: self._take_prompt_logprobs,
        }

    # ---- from the HTTP side ----

    def check_room(self, samples: int, prompt_tokens: int = 0) -> None:
        """Raises ApiError 503 when no pair of workers is there, 429 when so much more would be too much."""
        self.check_pair()
        if self._in_flight + samples > self._config.max_requests:
            what = f"{self._in_flight} samples are in flight, the limit is {self._config.max_requests}"
        elif self._prompt_tokens + prompt_tokens > self._config.max_prompt_tokens:
            what = f"{self._prompt_tokens} prompt tokens are in flight, the limit is {self._config.max_prompt_tokens}"
        else:
            return
        self.metrics.add("requests_rejected_full")
        raise ApiError(429, f"{what}; try again later", code="queue_full", retry_after_s=1)

    def check_pair(self) -> None:
        if not self.pool.has_pair():
            raise unavailable(f"{self.pool.missing()}; try again in a moment")

    def submit(self, request: Request, timeout_s: float = 0.0) -> None:
        """Sends a new request off. Its listener hears of everything else."""
        self._next_rid += 1
        request.rid = self._next_rid
        request.submitted_s = self._clock()
        request.deadline_s = request.submitted_s + (timeout_s or self._config.request_timeout_s)
        if request.pinned is None:
            self._requests[request.rid] = request
            self._in_flight += len(request.samples)
            self._prompt_tokens += len(request.prompt)
        else:  # probes take no client's place
            self._probes[request.rid] = request
        self._send(request, request.samples)

    def cancel(self, request: Request) -> None:
        """Drops a request wherever it is; both workers are told. Harmless when it is over already."""
        if not request.closed and request.rid:
            self._close(request)

    def fail_all(self, error: ApiError) -> None:
        for request in [*self._requests.values(), *self._probes.values()]:
            self._fail(request, error)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    # ---- from the workers ----

    def handle(self, message: Any) -> None:
        """One message of the inbox, whatever it is."""
        handler = self._handlers.get(type(message))
        if handler is None:
            self.metrics.add("messages_unexpected")
        else:
            handler(message)

    def _take_tokens(self, message: Tokens) -> None:
        wanted, now = False, self._clock()
        for row in message.rows:
            if is_row(row):
                wanted |= self._take_row(row, message.worker, now)
            else:
                self.metrics.add("rows_malformed")
        if wanted:
            self.tokens_s = now

    def _take_row(self, row: list[Any], worker: str, now: float) -> bool:
        """Whether somebody waited for it."""
        rid, number, index, first, ids, finish, logprobs, tops = row
        attempt = self._tries.get((rid, number))
        sample = attempt.samples.get(index) if attempt is not None else None
        if attempt is None or sample is None:
            self.metrics.add("rows_stale")
            if not finish:
                self._turn_away(worker, (rid, number), ALL_SAMPLES if attempt is None else index)
            return False
        if first != len(sample.ids):
            self._close_gap(attempt, sample, first)
            return False
        if not attempt.started:
            self._start(attempt)
        attempt.heard_s, attempt.misses = now, 0
        sample.ids += ids
        try:
            stop = attempt.request.listener.tokens(index, ids, finish, logprobs, tops)
        except Exception:  # a bug of ours costs the request it shows in, not the other rows of the message
            _LOG.exception("request %d", rid)
            self._fail(attempt.request, internal(rid))
            return True
        if finish or stop:
            self._finish(attempt, sample, tell_decode=not finish)
        return True

    def _turn_away(self, name: str, key: Key, sample: int) -> None:
        """Tells a decode worker that nobody waits for what it generates: it was taken for dead, or the router is new."""
        worker = self.pool.find("decode", name)
        if worker is not None and self._strays.is_due((*key, sample), self._clock()):
            self.metrics.add("strays_aborted")
            self._post(worker.inbox, Abort(*key, sample))

    def _close_gap(self, attempt: Try, sample: Sample, first: int) -> None:
        """A message with tokens of this sample was lost: it goes on from what is here, under a new attempt."""
        self.metrics.add("gaps")
        request, decode = attempt.request, attempt.decode
        request.failure = "tokens were lost on the way"
        request.reason = f"tokens {len(sample.ids)} to {first} of decode worker {decode.name} were lost on the way"
        self._leave(attempt, sample)
        self._post(decode.inbox, Abort(*attempt.key, sample.index))
        self._retry(request, [sample], "tokens_lost")

    def _take_prompt_logprobs(self, message: PromptLogprobs) -> None:
        request = self._requests.get(message.rid)
        if request is None or not request.wants_scores or not holds_prompt(message, len(request.prompt) - 1):
            self.metrics.add("rows_stale")
            return
        request.sampling = replace(request.sampling, prompt_logprobs=-1)  # a retry need not compute them again
        request.listener.prompt_logprobs(message)
        self._settle(request)

    def _take_failed(self, message: Failed) -> None:
        attempt = self._tries.get((message.rid, message.attempt))
        if attempt is None:
            self.metrics.add("rows_stale")
            return
        request = attempt.request
        if message.sample == ALL_SAMPLES:
            samples = list(attempt.samples.values())
            self._drop_try(attempt, tell=(attempt.prefill, attempt.decode))
        elif message.sample in attempt.samples:
            samples = [attempt.samples[message.sample]]
            self._leave(attempt, samples[0])
        else:
            return
        self.metrics.add(f"failures_{message.cause}" if message.cause in _CAUSES else "failures_other")
        request.failure = _FAILURES.get(message.cause, "a worker failed") if message.retryable else message.reason
        request.reason = f"{message.reason} (says {message.role}; {attempt.prefill.name} to {attempt.decode.name})"
        if message.cause == "refused":
            self._fail(request, ApiError(400, message.reason, code="refused_by_worker"))
            return
        if message.cause == "timeout":  # the time that the router gave it is over: nobody's fault, no more tries
            self._time_out(request)
            return
        if message.cause != "retracted":
            self._blame(attempt, message)
        if message.retryable:
            self._retry(request, samples, "worker_failed", cause=message.cause)
        else:
            self._fail(request, hopeless(request.rid, message.reason))

    def _take_status(self, status: Status) -> None:
        if status.role not in ROLES or not status.name or not status.inbox.startswith("tcp://"):
            self.metrics.add("messages_unexpected")
            return
        known = self.pool.find(status.role, status.name)
        if status.state == "gone":
            if known is not None and known.inbox == status.inbox:
                self.metrics.add("workers_left")
                _LOG.info("%s worker %s left", known.role, known.name)
                self._lose(known, "left")
            return
        if known is not None and known.inbox == status.inbox and known.identity == status.identity:
            self._take_report(known, status, self._clock())
            return
        objection = self.pool.objection(status)
        if objection:
            self._refuse(status, objection)
            return
        self.pool.add(Worker(status, self._clock()))
        if known is not None:
            self.metrics.add("workers_lost")
            self._lose(known, "was replaced by a new process of its name")
        self.metrics.add("workers_joined")
        _LOG.info("%s worker %s joined, at %s", status.role, status.name, status.inbox)
        self._unpark()
        self.on_join()

    def _take_report(self, worker: Worker, status: Status, now: float) -> None:
        worker.update(status, now)
        self.pool.changed()
        if worker.is_news(status.turn, now):
            try:
                self._losses.report(worker, status.live, now)
            except ValueError:
                self.metrics.add("reports_malformed")

    def sweep(self) -> None:
        """Everything that time does; call it a few times a second."""
        now = self._clock()
        self._forgive_stall(now)
        for worker in self.pool.workers():
            if now - worker.seen_s > self._config.dead_after_s:
                self.metrics.add("workers_lost")
                why = f"was silent for {now - worker.seen_s:.1f} s"
                _LOG.warning("%s worker %s %s: taken for dead", worker.role, worker.name, why)
                self._lose(worker, why)
        for name, refusal in list(self.pool.refused.items()):
            if now - refusal.seen_s > self._config.dead_after_s:
                del self.pool.refused[name]
                self._outbox.forget(refusal.inbox)
        self._retry_lost(now)
        for request in list(self._probes.values()):
            if request.deadline_s <= now:
                self._time_out(request)
        for request in list(self._requests.values()):
            if request.deadline_s > now:
                break
            self._time_out(request)
        self._unpark()
        for parked in self._parked:
            if now >= parked.until_s:
                request, missing = parked.request, self.pool.missing()
                request.reason = request.reason or missing  # so that the log has its number
                self._fail(request, no_worker_came(request.rid, f"{missing}{_because(request.failure)}"))
        self._parked = [parked for parked in self._parked if not parked.request.closed]

    def _forgive_stall(self, now: float) -> None:
        """While the router itself stood still it heard nobody: that time is nobody's silence."""
        late_s = now - self._swept_s
        self._swept_s = now
        if late_s > STALL_S:
            self.metrics.add("stalls")
            self._losses.doubt(now)
            for worker in self.pool.workers():
                worker.seen_s = min(worker.seen_s + late_s, now)

    # ---- a try's life ----

    def _send(self, request: Request, samples: list[Sample]) -> None:
        """One new attempt for samples that have the same tokens so far; parks them when no pair is there.

        A sample that is done only carries the prompt to prefill once more; what it generates is turned away.
        """
        done = [] if samples[0].done else samples[0].ids
        tokens = request.prompt + done if done else request.prompt
        pair = request.pinned or self._pair(request, len(samples), len(tokens), len(done))
        now = self._clock()
        if pair is None:
            self._parked.append(Parked(request, samples, now + self._config.recovery_wait_s))
            return
        prefill, decode = pair
        key = request.rid, request.attempts
        request.attempts += 1
        attempt = Try(key, request, {sample.index: sample for sample in samples if not sample.done}, prefill, decode, now)
        self._tries[key] = attempt
        if request.pinned is None:  # a probe's silence is what it is there to find
            self._losses.watch(attempt)
        request.tries.append(attempt)
        prefill.prompt_tokens.put(key, len(tokens))
        _timeline.note(key, "sent", now, tokens=len(tokens))
        self._update_load(attempt)
        message = Prefill(
            *key, pack_ids(tokens), len(request.prompt), tuple([sample.index for sample in samples]), request.sampling,
            decode.inbox, self._inbox_address, max(request.deadline_s - now, 0.0) + WORKER_GRACE_S,
        )  # fmt: skip
        self._post(prefill.inbox, message)

    def _post(self, address: str, message: Any) -> None:
        """Sends with everything else that this turn of the event loop has to send: waking the socket's thread for each
        message costs more than the message."""
        self._outgoing.append((address, message))
        if len(self._outgoing) == 1:
            self._defer(self._flush)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for address, message in outgoing:
            if not self._outbox.send(address, message):
                self.metrics.add("sends_failed")
                if isinstance(message, Prefill):
                    reason = f"{address} takes no messages"
                    self._take_failed(Failed(message.rid, message.attempt, ALL_SAMPLES, "internal", reason, True, "prefill"))

    def _pair(self, request: Request, samples: int, tokens: int, done: int) -> tuple[Worker, Worker] | None:
        prefill = self.pool.choose_prefill(tokens, request.avoid)
        decode = self.pool.choose_decode(samples, tokens, request.sampling.max_tokens - done, request.avoid)
        return (prefill, decode) if prefill is not None and decode is not None else None

    def _update_load(self, attempt: Try) -> None:
        request, decode = attempt.request, attempt.decode
        decode.sequences.put(attempt.key, len(attempt.samples))
        worst = len(request.prompt) + request.sampling.max_tokens
        decode.cache_tokens.put(attempt.key, worst * len(attempt.samples))

    def _start(self, attempt: Try) -> None:
        """The first token of a try is back: this pair's hand-off works."""
        attempt.started = True
        attempt.prefill.prompt_tokens.drop(attempt.key)
        self.served_s = now = self._clock()
        _timeline.note(attempt.key, "answered", now)
        if attempt.request.pinned is None and not attempt.request.answered:
            attempt.request.answered = True
            self.metrics.observe("ttft_seconds", now - attempt.request.submitted_s)
        for worker in (attempt.prefill, attempt.decode):
            worker.proven_s = worker.checked_s = now
            worker.failures = 0

    def _finish(self, attempt: Try, sample: Sample, tell_decode: bool) -> None:
        """A sample is complete: by its worker's word, or by a stop string that decode does not know of."""
        sample.done = True
        if tell_decode:
            self._post(attempt.decode.inbox, Abort(*attempt.key, sample.index))
        self._leave(attempt, sample)
        self._settle(attempt.request)

    def _leave(self, attempt: Try, sample: Sample) -> None:
        """A sample is no longer a part of its try, which ends with its last one unless scores are still to come."""
        del attempt.samples[sample.index]
        attempt.misses = 0  # it may wait for the other worker now
        if attempt.samples or attempt.request.wants_scores:
            self._update_load(attempt)
        else:
            self._drop_try(attempt, tell=())

    def _settle(self, request: Request) -> None:
        """Closes a request that has everything: all samples, and the prompt's logprobs when it asked for them."""
        if not request.closed and not request.wants_scores and request.is_generated:
            self._close(request)

    def _drop_try(self, attempt: Try, tell: Iterable[Worker]) -> None:
        self._tries.pop(attempt.key, None)
        attempt.request.tries.remove(attempt)
        self._losses.forget(attempt)
        attempt.prefill.prompt_tokens.drop(attempt.key)
        attempt.decode.sequences.drop(attempt.key)
        attempt.decode.cache_tokens.drop(attempt.key)
        for worker in tell:
            if self.pool.find(worker.role, worker.name) is worker:  # a lost one must not get a new connection
                self._post(worker.inbox, Abort(*attempt.key))

    def _close(self, request: Request) -> None:
        request.closed = True
        if request.pinned is None:
            del self._requests[request.rid]
            self._in_flight -= len(request.samples)
            self._prompt_tokens -= len(request.prompt)
            self.metrics.observe("request_seconds", self._clock() - request.submitted_s)
        else:
            del self._probes[request.rid]
        for attempt in list(request.tries):
            self._drop_try(attempt, tell=(attempt.prefill, attempt.decode))

    def _fail(self, request: Request, error: ApiError) -> None:
        if not request.closed:
            self._close(request)
            if request.pinned is None:
                self.metrics.add("requests_failed")
                if request.reason and error.status >= 500:
                    _LOG.warning("request %d ended with status %d: %s", request.rid, error.status, request.reason)
            request.listener.failed(error)

    def _time_out(self, request: Request) -> None:
        if request.pinned is None and not request.closed:
            self.metrics.add("requests_timed_out")
        pairs = ", ".join([f"{attempt.prefill.name} to {attempt.decode.name}" for attempt in request.tries])
        late = f"not finished within {request.deadline_s - request.submitted_s:g} s, {pairs or 'no worker'} had it"
        request.reason = f"{late}; before: {request.reason}" if request.reason else late
        self._fail(request, timed_out(request.rid, _because(request.failure)))

    # ---- another try ----

    def _retry(self, request: Request, samples: list[Sample], code: str, cause: str = "") -> None:
        """Samples that lost their try go on elsewhere; when they have had all their tries, the request ends with a 500."""
        if not samples:  # only the prompt's scores were still to come
            if request.tries or not request.is_generated:
                return  # another try brings them
            samples = request.samples[:1]
        for sample in samples:
            sample.failures += cause != "retracted"
            sample.corrupt += cause == "corrupt"
        if request.pinned is None and all(map(self._may_try, samples)):
            self._resend(request, samples)
        else:
            tries = max([1, *(sample.failures for sample in samples)])
            self._fail(request, gave_up(request.rid, request.failure, tries, code))

    def _may_try(self, sample: Sample) -> bool:
        return sample.failures < self._config.max_attempts and sample.corrupt < CORRUPT_TRIES

    def _retry_lost(self, now: float) -> None:
        """What no worker knows of any more goes on under a new attempt, as after a gap."""
        for attempt in self._losses.take():
            if attempt.key not in self._tries:  # closed by an earlier one of this loop
                continue
            self.metrics.add("tries_lost")
            request, legs, samples = attempt.request, (attempt.prefill, attempt.decode), list(attempt.samples.values())
            if not attempt.started:  # the way to one of them may be cut
                request.avoid.update(dict.fromkeys(legs, now))
            request.failure = "a message was lost on the way"
            request.reason = f"{attempt.prefill.name} and {attempt.decode.name} know nothing of it: a message was lost"
            self._drop_try(attempt, tell=legs)
            self._retry(request, samples, "try_lost")

    def _resend(self, request: Request, samples: list[Sample]) -> None:
        """Samples without tokens go together again, the others one by one: their contexts differ."""
        fresh = [sample for sample in samples if not sample.ids]
        groups = [fresh] if fresh else []
        groups += [[sample] for sample in samples if sample.ids]
        for group in groups:
            if not request.closed:
                self.metrics.add("retries")
                self._send(request, group)

    def _unpark(self) -> None:
        if self._parked and self.pool.has_pair():
            parked, self._parked = self._parked, []
            for each in parked:
                if not each.request.closed:
                    self._send(each.request, each.samples)

    def _blame(self, attempt: Try, failed: Failed) -> None:
        """An internal failure is its sender's. A broken hand-off may be either leg's: both are suspected, less those that
        have worked in another pair since this try was sent, and a suspect is cleared by the next hand-off that works."""
        request, now = attempt.request, self._clock()
        if failed.cause == "internal":
            for worker in (attempt.prefill, attempt.decode):
                if worker.role == failed.role:
                    worker.failures += 1
                    request.avoid[worker] = math.inf  # whatever else it does, this request it fails
            return
        self.transfer_failed_s = now
        legs = request.on_trial or (attempt.prefill, attempt.decode)
        suspects = [worker for worker in legs if worker.proven_s <= attempt.sent_s]
        for worker in suspects:
            worker.failures += 1
        for worker in suspects or legs:
            request.avoid[worker] = now

    def _lose(self, worker: Worker, why: str) -> None:
        """A worker is no more: its requests go elsewhere, the other leg is told to forget them."""
        if self.pool.find(worker.role, worker.name) is worker:
            self.pool.remove(worker)
        self._outgoing = [(address, message) for address, message in self._outgoing if address != worker.inbox]
        self._outbox.forget(worker.inbox)
        for attempt in [attempt for attempt in self._tries.values() if worker in (attempt.prefill, attempt.decode)]:
            if attempt.key not in self._tries:  # closed by an earlier one of this loop
                continue
            request = attempt.request
            if worker is attempt.prefill and attempt.started and not request.wants_scores:
                continue  # its part is done
            if worker is attempt.decode and not attempt.samples:
                continue  # the same
            other = attempt.decode if worker is attempt.prefill else attempt.prefill
            samples = list(attempt.samples.values())
            self._drop_try(attempt, tell=(other,))
            request.failure = f"a {worker.role} worker was lost"
            request.reason = f"{worker.role} worker {worker.name} {why}"
            self._retry(request, samples, "worker_lost")

    def _refuse(self, status: Status, objection: str) -> None:
        self.metrics.add("workers_refused")
        if status.name in self.pool.refused or len(self.pool.refused) < MAX_WORKERS:
            if status.name not in self.pool.refused:  # it asks again until it hears of it
                _LOG.warning("%s worker %s was refused: %s", status.role, status.name, objection)
            self.pool.refused[status.name] = Refusal(objection, status.inbox, self._clock())
            self._post(status.inbox, Refused(objection))


_CAUSES = {"retracted", "transfer", "corrupt", "timeout", "refused", "internal"}
_FAILURES = {"transfer": "KV transfer failed", "corrupt": "KV transfer failed", "retracted": "memory for its KV ran out"}


def _because(failure: str) -> str:
    return f" (last failure: {failure})" if failure else ""
