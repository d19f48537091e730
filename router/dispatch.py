"""Requests in flight: sending each to a pair of workers, its tokens back, and another try when a worker fails it.

A `Request` is one prompt with n samples. A `Try` is one (rid, attempt) of it on one pair of workers. Each open sample
belongs to exactly one try; rows of any other attempt are dropped. A sample that has to move (worker dead, retracted,
transfer broken) goes on elsewhere from the client's prompt + its tokens so far, so its text continues seamlessly.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from router.config import RouterConfig
from router.errors import ApiError, unavailable
from router.pool import MAX_WORKERS, ROLES, Pool, Refusal, Worker
from router.rows import holds_prompt, is_row
from wire.messages import (
    ALL_SAMPLES,
    Abort,
    Failed,
    Prefill,
    PromptLogprobs,
    Refused,
    SamplingParams,
    Status,
    Tokens,
    pack_ids,
)
from wire.metrics import Metrics

Key = tuple[int, int]


class Sender(Protocol):
    """`wire.sockets.Outbox`."""

    def send(self, address: str, message: Any) -> bool: ...

    def forget(self, address: str) -> None: ...


class Listener(Protocol):
    """Who wants a request's result. Called from the event loop; must not block."""

    def tokens(self, sample: int, ids: list[int], finish: str, logprobs: Any, tops: Any) -> bool:
        """New tokens of a sample; True ends it now (a stop string was found)."""

    def prompt_logprobs(self, message: PromptLogprobs) -> None: ...

    def failed(self, error: ApiError) -> None: ...


@dataclass(slots=True, eq=False)
class Sample:
    index: int
    ids: list[int] = field(default_factory=list)  # generated so far
    failures: int = 0  # tries that count against max_attempts
    done: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way. `pinned` names the pair a probe has to use."""

    prompt: list[int]
    sampling: SamplingParams
    listener: Listener
    samples: list[Sample]
    pinned: tuple[Worker, Worker] | None = None
    rid: int = 0
    attempts: int = 0  # attempt numbers given out
    submitted_s: float = 0.0
    deadline_s: float = 0.0
    answered: bool = False  # its first token is back
    closed: bool = False
    tries: list[Try] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    reason: str = ""  # of the last failure

    @classmethod
    def new(cls, prompt: list[int], n: int, sampling: SamplingParams, listener: Listener) -> Request:
        return cls(prompt, sampling, listener, [Sample(i) for i in range(n)])


@dataclass(slots=True, eq=False)
class Try:
    key: Key
    request: Request
    samples: dict[int, Sample]  # those still open here
    prefill: Worker
    decode: Worker
    started: bool = False  # a token came back


@dataclass(slots=True, eq=False)
class Parked:
    """Samples that wait for a worker to come back."""

    request: Request
    samples: list[Sample]
    until_s: float


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
        self.tokens_s = float("-inf")  # last time any token came
        self.transfer_failed_s = float("-inf")
        self.on_join: Callable[[], None] = lambda: None
        self._config = config
        self._outbox = outbox
        self._inbox_address = inbox_address
        self._clock = clock
        self._defer = defer
        self._outgoing: list[tuple[str, Any]] = []
        self._requests: dict[int, Request] = {}  # in order of arrival, so in order of deadline
        self._tries: dict[Key, Try] = {}
        self._parked: list[Parked] = []
        self._next_rid = secrets.randbits(46) << 16  # so that a restarted router does not reuse what workers remember
        self._in_flight = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Tokens: self._take_tokens,
            Status: self._take_status,
            Failed: self._take_failed,
            PromptLogprobs: self._take_prompt_logprobs,
        }

    # ---- from the HTTP side ----

    def check_room(self, samples: int) -> None:
        """Raises ApiError 503 when no pair of workers is there, 429 when `samples` more would be too many."""
        missing = self.pool.missing()
        if missing:
            raise unavailable(f"{missing}; try again in a moment")
        if self._in_flight + samples > self._config.max_requests:
            self.metrics.add("requests_rejected_full")
            message = f"{self._in_flight} samples are in flight, the limit is {self._config.max_requests}; try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=1)

    def submit(self, request: Request, timeout_s: float = 0.0) -> None:
        """Sends a new request off. Its listener hears of everything else."""
        self._next_rid += 1
        request.rid = self._next_rid
        request.submitted_s = self._clock()
        request.deadline_s = request.submitted_s + (timeout_s or self._config.request_timeout_s)
        self._requests[request.rid] = request
        if request.pinned is None:  # probes take no client's place
            self._in_flight += len(request.samples)
        self._send(request, request.samples)

    def cancel(self, request: Request) -> None:
        """Drops a request wherever it is; both workers are told. Harmless when it is over already."""
        if not request.closed and request.rid:
            self._close(request)

    def fail_all(self, error: ApiError) -> None:
        for request in list(self._requests.values()):
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
        for row in message.rows:
            if not is_row(row):
                self.metrics.add("rows_malformed")
                continue
            rid, attempt, index, ids, finish, logprobs, tops = row
            attempt_ = self._tries.get((rid, attempt))
            sample = attempt_.samples.get(index) if attempt_ is not None else None
            if attempt_ is None or sample is None:
                self.metrics.add("rows_stale")
                continue
            if not attempt_.started:
                self._start(attempt_)
            sample.ids += ids
            stop = attempt_.request.listener.tokens(index, ids, finish, logprobs, tops)
            if finish or stop:
                self._finish(attempt_, sample, tell_decode=not finish)
        self.tokens_s = self._clock()

    def _take_prompt_logprobs(self, message: PromptLogprobs) -> None:
        attempt = self._tries.get((message.rid, message.attempt))
        request = attempt.request if attempt is not None else self._requests.get(message.rid)
        wanted = request.sampling.prompt_logprobs if request is not None else -1
        if request is None or wanted < 0 or not holds_prompt(message, len(request.prompt) - 1):
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
            samples = [attempt.samples.pop(message.sample)]
            self._update_load(attempt)
            if not attempt.samples:
                self._drop_try(attempt, tell=())
        else:
            return
        self.metrics.add(f"failures_{message.cause}" if message.cause in _CAUSES else "failures_other")
        if message.cause == "refused":
            self._fail(request, ApiError(400, message.reason, code="refused_by_worker"))
            return
        if message.cause != "retracted":
            self._blame(attempt, samples, message)
        if message.retryable and self._may_retry(request, samples):
            self._resend(request, samples)
        else:
            self._fail(request, ApiError(500, f"the request failed: {message.reason}", code="worker_failed"))

    def _take_status(self, status: Status) -> None:
        if status.role not in ROLES or not status.name or not status.inbox.startswith("tcp://"):
            self.metrics.add("messages_unexpected")
            return
        known = self.pool.find(status.role, status.name)
        if status.state == "gone":
            if known is not None and known.inbox == status.inbox:
                self._lose(known, "left")
            return
        if known is not None and known.inbox == status.inbox and known.identity == status.identity:
            known.update(status, self._clock())
            self.pool.changed()
            return
        objection = self.pool.objection(status)
        if objection:
            self._refuse(status, objection)
            return
        self.pool.add(Worker(status, self._clock()))
        if known is not None:
            self._lose(known, "was replaced by a new process of its name")
        self.metrics.add("workers_joined")
        self._unpark()
        self.on_join()

    def sweep(self) -> None:
        """Everything that time does; call it a few times a second."""
        now = self._clock()
        for worker in self.pool.workers():
            if now - worker.seen_s > self._config.dead_after_s:
                self._lose(worker, f"was silent for {now - worker.seen_s:.1f} s")
        for name, refusal in list(self.pool.refused.items()):
            if now - refusal.seen_s > self._config.dead_after_s:
                del self.pool.refused[name]
                self._outbox.forget(refusal.inbox)
        for request in list(self._requests.values()):
            if request.deadline_s > now and not request.pinned:
                break
            if request.deadline_s <= now:
                self.metrics.add("requests_timed_out")
                self._fail(request, ApiError(504, f"not finished in time{_because(request.reason)}", code="timeout"))
        self._unpark()
        for parked in self._parked:
            if now >= parked.until_s:
                self._fail(parked.request, unavailable(f"{self.pool.missing()}{_because(parked.request.reason)}"))
        self._parked = [parked for parked in self._parked if not parked.request.closed]

    # ---- a try's life ----

    def _send(self, request: Request, samples: list[Sample]) -> None:
        """One new attempt for samples that have the same tokens so far; parks them when no pair is there."""
        tokens = request.prompt + samples[0].ids if samples[0].ids else request.prompt
        pair = request.pinned or self._pair(request, len(samples), len(tokens), len(samples[0].ids))
        if pair is None:
            self._parked.append(Parked(request, samples, self._clock() + self._config.recovery_wait_s))
            return
        prefill, decode = pair
        key = request.rid, request.attempts
        request.attempts += 1
        attempt = Try(key, request, {sample.index: sample for sample in samples}, prefill, decode)
        self._tries[key] = attempt
        request.tries.append(attempt)
        prefill.prompt_tokens.put(key, len(tokens))
        self._update_load(attempt)
        timeout_s = max(request.deadline_s - self._clock(), 0.1)
        message = Prefill(
            *key, pack_ids(tokens), len(request.prompt), tuple(attempt.samples), request.sampling, decode.inbox,
            self._inbox_address, timeout_s,
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
                    self._take_failed(Failed(message.rid, message.attempt, ALL_SAMPLES, "internal", reason, True))

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
        if attempt.request.pinned is None and not attempt.request.answered:
            attempt.request.answered = True
            self.metrics.observe("ttft_seconds", now - attempt.request.submitted_s)
        for worker in (attempt.prefill, attempt.decode):
            worker.proven_s = worker.checked_s = now
            worker.failures = 0

    def _finish(self, attempt: Try, sample: Sample, tell_decode: bool) -> None:
        """A sample is complete: by its worker's word, or by a stop string that decode does not know of."""
        sample.done = True
        del attempt.samples[sample.index]
        if tell_decode:
            self._post(attempt.decode.inbox, Abort(*attempt.key, sample.index))
        if attempt.samples or attempt.request.sampling.prompt_logprobs >= 0:
            self._update_load(attempt)
        else:
            self._drop_try(attempt, tell=())
        self._settle(attempt.request)

    def _settle(self, request: Request) -> None:
        """Closes a request that has everything: all samples, and the prompt's logprobs when it asked for them."""
        if not request.closed and request.sampling.prompt_logprobs < 0 and all(sample.done for sample in request.samples):
            self._close(request)

    def _drop_try(self, attempt: Try, tell: Iterable[Worker]) -> None:
        self._tries.pop(attempt.key, None)
        attempt.request.tries.remove(attempt)
        attempt.prefill.prompt_tokens.drop(attempt.key)
        attempt.decode.sequences.drop(attempt.key)
        attempt.decode.cache_tokens.drop(attempt.key)
        for worker in tell:
            if self.pool.find(worker.role, worker.name) is worker:  # a lost one must not get a new connection
                self._post(worker.inbox, Abort(*attempt.key))

    def _close(self, request: Request) -> None:
        request.closed = True
        del self._requests[request.rid]
        if request.pinned is None:
            self._in_flight -= len(request.samples)
            self.metrics.observe("request_seconds", self._clock() - request.submitted_s)
        for attempt in list(request.tries):
            self._drop_try(attempt, tell=(attempt.prefill, attempt.decode))

    def _fail(self, request: Request, error: ApiError) -> None:
        if not request.closed:
            self._close(request)
            self.metrics.add("requests_failed")
            request.listener.failed(error)

    # ---- another try ----

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

    def _may_retry(self, request: Request, samples: list[Sample]) -> bool:
        return request.pinned is None and all(sample.failures < self._config.max_attempts for sample in samples)

    def _blame(self, attempt: Try, samples: list[Sample], failed: Failed) -> None:
        """The message does not say which leg it was, so both are avoided by this request and proven again by a probe."""
        for sample in samples:
            sample.failures += 1
        attempt.request.reason = failed.reason
        attempt.request.avoid |= {attempt.prefill.name, attempt.decode.name}
        attempt.prefill.failures += 1
        attempt.decode.failures += 1
        if failed.cause == "transfer":
            self.transfer_failed_s = self._clock()

    def _lose(self, worker: Worker, why: str) -> None:
        """A worker is no more: its requests go elsewhere, the other leg is told to forget them."""
        if self.pool.find(worker.role, worker.name) is worker:
            self.pool.remove(worker)
        self._outgoing = [(address, message) for address, message in self._outgoing if address != worker.inbox]
        self._outbox.forget(worker.inbox)
        self.metrics.add("workers_lost")
        for attempt in [attempt for attempt in self._tries.values() if worker in (attempt.prefill, attempt.decode)]:
            if attempt.key not in self._tries:  # closed by an earlier one of this loop
                continue
            request = attempt.request
            if worker is attempt.prefill and attempt.started and request.sampling.prompt_logprobs < 0:
                continue  # its part is done
            other = attempt.decode if worker is attempt.prefill else attempt.prefill
            samples = list(attempt.samples.values())
            self._drop_try(attempt, tell=(other,))
            request.reason = f"{worker.role} worker {worker.name} {why}"
            for sample in samples:
                sample.failures += 1
            if samples and self._may_retry(request, samples):
                self._resend(request, samples)
            else:
                self._fail(request, ApiError(500, request.reason, code="worker_lost"))

    def _refuse(self, status: Status, objection: str) -> None:
        self.metrics.add("workers_refused")
        if status.name in self.pool.refused or len(self.pool.refused) < MAX_WORKERS:
            self.pool.refused[status.name] = Refusal(objection, status.inbox, self._clock())
            self._post(status.inbox, Refused(objection))


_CAUSES = {"retracted", "transfer", "timeout", "refused", "internal"}


def _because(reason: str) -> str:
    return f" (last failure: {reason})" if reason else ""
