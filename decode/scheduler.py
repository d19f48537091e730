"""Which hand-offs are granted, which sequences run next, who holds which page, and how each of them ends.

A request is `queued` until there is room, `arriving` while its KV comes in, and then its sequences are `running`.
Admission is first come first served. When a running sequence needs a page and there is none, the newest of what was
admitted gives up its pages and goes back through prefill; the oldest never does, so something always finishes. Nobody does
so for a guess: where pages are short, steps carry none.

A step may still be in flight when the next one is chosen, so a sequence has pages for the most tokens that may have come by
then, and one that will be complete sits out. What is over while a step holds it is `leaving`: its pages and slot are nobody's
until that step is done, since until then it writes into them. Its last tokens are dropped.

A message may be lost with its connection. So prefill repeats an Offer until there is a Grant, and the Grant is repeated
here until there is a Ready; what prefill still offers or keeps of an attempt that is over here is answered with Abort.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

from decode.request import Limits, Request, pages_at_grant, refusal
from decode.sampling import EXCLUDED, Choice
from decode.sequence import Sequence
from kvtransfer.arena import Arena
from kvtransfer.pages import PagePool, SeqKV
from kvtransfer.receiver import Arrived, Broken, Receiver
from kvtransfer.tombstones import LIMIT, Tombstones
from kvtransfer.transports import Freed, Key
from wire.messages import ALL_SAMPLES, Abort, Failed, Offer, Ready, Tokens, unpack_ids
from wire.metrics import Metrics
from wire.timeline import Timeline

DEADLINE_PERIOD_S = 0.1
GRANT_PERIOD_S = 2.0  # without a Ready for so long the Grant is repeated
_timeline = Timeline("decode")


class Scheduler:
    """All that a decode worker has been offered. Replies go out through `send(address, message)`."""

    def __init__(
        self,
        pool: PagePool,
        receiver: Receiver,
        arena: Arena,
        limits: Limits,
        fingerprint: str,
        name: str,
        send: Callable[[str, Any], bool],
        metrics: Metrics,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.queued: OrderedDict[Key, Request] = OrderedDict()
        self.arriving: dict[Key, Request] = {}
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []  # over, but a step in flight may still write into its pages
        self.draining: dict[Key, SeqKV] = {}  # over, but bytes may still land in it: ours again when it is Freed
        self._receiver = receiver
        self._arena = arena
        self._fingerprint = fingerprint
        self._name = name
        self._send = send
        self._metrics = metrics
        self._serials = count(1)
        self._closed = Tombstones(4 * LIMIT)  # more than the receiver's: keys that never reached it are in here too
        self._next_expiry_s = 0.0

    @property
    def idle(self) -> bool:
        return not (self.queued or self.arriving or self.running)

    def live(self) -> list[Key]:
        """The attempts in hand, each once."""
        return [*self.queued, *self.arriving, *dict.fromkeys(sequence.key for sequence in self.running)]

    # --- messages

    def offer(self, offer: Offer, now_s: float) -> None:
        """Queues a hand-off, or answers Failed("refused") at once when it could never be served."""
        key = (offer.rid, offer.attempt)
        if self._known(key):
            self._metrics.add("duplicates")
            return
        if key in self._closed:  # aborted before it came, or prefill has not heard: it must not hold its pages for us
            self._metrics.add("stale_offers")
            self._send(offer.prefill_inbox, Abort(*key))
            return
        self._metrics.add("offers")
        reason = refusal(offer, self._fingerprint, self.limits)
        if reason:
            self._metrics.add("refused")
            self._closed.add(key)
            self._send(offer.prefill_inbox, Abort(*key))
            self._send(offer.router_inbox, Failed(*key, ALL_SAMPLES, "refused", reason, False, "decode"))
            return
        tokens, samples = unpack_ids(offer.tokens), list(offer.samples)
        self.queued[key] = Request(key, offer, tokens, samples, now_s, now_s + offer.timeout_s)
        _timeline.note(key, "offered", now_s, tokens=len(tokens))

    def ready(self, ready: Ready) -> None:
        request = self.arriving.get((ready.rid, ready.attempt))
        if request is None or not self._receiver.ready(ready):
            self._metrics.add("stale_readies")
            return
        request.num_bytes, request.grant_again_s = ready.num_bytes, math.inf
        _timeline.note(request.key, "ready", bytes=ready.num_bytes)

    def abort(self, message: Abort) -> None:
        """Forgets an attempt or one sample of it, wherever it is; its pages are free when nothing lands in them any more."""
        key = (message.rid, message.attempt)
        if not self._known(key):
            self._metrics.add("stale_aborts")
            if message.sample == ALL_SAMPLES:
                self._closed.add(key)  # its Offer may still be on the way
            return
        self._metrics.add("aborts")
        request = self.queued.get(key) or self.arriving.get(key)
        if request is not None:
            self._drop_sample(request, message.sample)
        for sequence in [s for s in self.running if s.key == key and message.sample in (s.sample, ALL_SAMPLES)]:
            self._release_sequence(sequence)

    # --- one turn of the loop

    def settle(self, events: list[Arrived | Broken | Freed], now_s: float) -> None:
        """Starts what has arrived and fails what can not arrive any more."""
        for event in events:
            if event.key in self.draining:
                self.pool.drop(self.draining.pop(event.key))
            request = self.arriving.get(event.key)
            if request is None or isinstance(event, Freed):
                continue
            if isinstance(event, Broken):
                self._break(request, event.reason, event.corrupt)
            elif event.length != request.length:
                self._break(request, f"{event.length} tokens of KV came, {request.length} were offered")
            else:
                self._start(request, now_s)

    def expire(self, now_s: float) -> None:
        """Fails what is past its deadline and repeats Grants that may be lost; looks ten times a second, however often it
        is called."""
        if now_s < self._next_expiry_s:
            return
        self._next_expiry_s = now_s + DEADLINE_PERIOD_S
        for stage in (self.queued, self.arriving):
            for request in [r for r in stage.values() if r.deadline_s <= now_s]:
                self._metrics.add("timeouts")
                self._fail_request(request, "timeout", f"not started within {request.offer.timeout_s:g} s", retryable=False)
        for sequence in [s for s in self.running if s.deadline_s <= now_s]:
            self._metrics.add("timeouts")
            self._fail_sequence(sequence, "timeout", f"not finished in time, {sequence.generated} tokens are", retryable=False)
        for request in [r for r in self.arriving.values() if r.grant_again_s <= now_s]:
            self._metrics.add("grants_repeated")
            self._send_grant(request, now_s)

    def admit(self, now_s: float) -> None:
        """Grants in the order of arrival as long as there is room; the head waits, nobody overtakes it."""
        while self.queued:
            request = next(iter(self.queued.values()))
            if not self._has_room(request):
                return
            partial = 1 if request.length % self.limits.page_tokens else 0
            sizes = [self.limits.pages_for(request.length), *[partial] * (len(request.samples) - 1)]
            request.kvs = [self._reserve(size) for size in sizes]
            request.serial, request.granted_s = next(self._serials), now_s
            _timeline.note(request.key, "granted", now_s, pages=len(request.kvs[0].pages))
            self._metrics.observe("queue_seconds", now_s - request.queued_s)
            self.arriving[request.key] = self.queued.pop(request.key)
            request.grant = self._receiver.open(request.key, request.kvs[0].slot, request.kvs[0].pages)
            if not self._send_grant(request, now_s):
                self._break(request, f"nothing can be sent to the prefill worker at {request.offer.prefill_inbox!r}")

    def affordable(self, tokens: int) -> int:
        """`tokens` of each sequence in the next step, or 1 where so many want more pages than are free: guesses are not worth
        that somebody is retracted for them."""
        if tokens == 1:
            return 1
        batch = self._ready()[: self.limits.max_batch]
        wanted = sum(max(0, self.limits.pages_for(s.kv_tokens(tokens)) - len(s.kv.pages)) for s in batch)
        return tokens if wanted <= self.pool.free_pages else 1

    def next_batch(self, tokens: int = 1) -> list[Sequence]:
        """The sequences of the next step, each with pages for the `tokens` tokens that it is fed at most. They are in flight
        from now on: `advance` or `fail_step` ends that."""
        size = self.limits.max_batch
        ready = self._ready()
        batch = ready[:size]
        if len(ready) > size:  # they take turns: the ones that waited longest come first
            chosen = set(batch)
            self.running = [s for s in self.running if s not in chosen] + batch
        short = [s for s in batch if self._is_short(s, tokens)]
        for sequence in sorted(short, key=lambda s: s.serial):
            self._grow(sequence, tokens)
        if short:
            batch = [s for s in batch if not s.over and not self._is_short(s, tokens)]
        for sequence in batch:
            sequence.in_flight.append(tokens)
        return batch

    def launched(self, batch: list[Sequence]) -> None:
        """The step that was chosen last is started; a CPU has computed it by now."""
        for sequence in batch:
            if not sequence.first_token_s and len(sequence.in_flight) == 1:
                _timeline.note(sequence.key, "first_step", sample=sequence.sample)

    def _ready(self) -> list[Sequence]:
        return [s for s in self.running if not s.surely_complete]

    def advance(self, batch: list[Sequence], choices: list[Choice], now_s: float) -> None:
        """Takes the tokens of the oldest step in flight, ends what is complete, and sends one Tokens per router."""
        rows: defaultdict[str, list[Any]] = defaultdict(list)
        bad: list[tuple[Sequence, str]] = []
        self._land(batch)
        for sequence, choice in zip(batch, choices, strict=True):
            if sequence.over:
                self._metrics.add("tokens_dropped", len(choice.tokens))
                continue
            reason = self._take(sequence, choice, rows[sequence.router_inbox], now_s) if choice.tokens else ""
            if choice.error and not reason:
                bad.append((sequence, choice.error))
        for router, router_rows in rows.items():
            self._metrics.add("decode_tokens", sum(len(row[4]) for row in router_rows))
            self._send(router, Tokens(self._name, router_rows))
        for sequence, error in bad:
            self._metrics.add("bad_logits")
            cause = "refused" if error == EXCLUDED else "internal"  # the client's own doing, not the model's
            self._fail_sequence(sequence, cause, f"{error} (position {len(sequence.tokens)})", retryable=False)

    def fail_step(self, batch: list[Sequence], reason: str) -> None:
        """The newest step has raised: its sequences end, and nothing else."""
        self._metrics.add("step_failures")
        self._land(batch, newest=True)
        for sequence in [s for s in batch if not s.over]:
            self._fail_sequence(sequence, "internal", reason, retryable=True)

    # --- room

    def _has_room(self, request: Request) -> bool:
        """Room for what arrives, and one page to grow by for everything admitted; what is alone needs no reserve."""
        samples = len(request.samples)
        others = len(self.running) + sum(len(r.samples) for r in self.arriving.values())
        needed = pages_at_grant(request.length, samples, self.limits)
        reserve = others + samples if others else 0
        return samples <= self.pool.free_slots and needed + reserve <= self.pool.free_pages

    def _reserve(self, pages: int) -> SeqKV:
        kv = self.pool.take(pages)
        assert kv is not None, "_has_room counted wrong"
        return kv

    def _is_short(self, sequence: Sequence, tokens: int) -> bool:
        return sequence.kv_tokens(tokens) > len(sequence.kv.pages) * self.limits.page_tokens

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Gives a sequence its next pages, retracting the newest until there are any. It may be retracted itself, and it has
        to sit out a step while the pages that were taken from another are not free yet, or while it has guesses in flight,
        which may not come."""
        while not sequence.over and self._is_short(sequence, tokens):
            page = self.pool.take_pages(1)
            if page is not None:
                sequence.kv.pages += page
            elif (
                any(kv.pages for kv in self.draining.values())
                or self.leaving
                or sum(sequence.in_flight) > len(sequence.in_flight)
            ):
                return
            else:
                self._retract_newest()

    def _retract_newest(self) -> None:
        newest = max(self.running, key=lambda s: s.serial)
        arriving = max(self.arriving.values(), key=lambda r: r.serial, default=None)
        self._metrics.add("retractions")
        if arriving is not None and arriving.serial > newest.serial[0]:
            self._fail_request(arriving, "retracted", "decode ran out of pages before it started", retryable=True)
        else:
            self._fail_sequence(newest, "retracted", f"decode ran out of pages after {newest.generated} tokens", retryable=True)

    # --- how requests move and end

    def _start(self, request: Request, now_s: float) -> None:
        """Forks the arrived KV for every sample: full pages are shared, the partial page and the slot are copied."""
        del self.arriving[request.key]
        self._closed.add(request.key)
        _timeline.note(request.key, "arrived", now_s)
        self._metrics.add("transfers_ok")
        self._metrics.add("kv_received_bytes", request.num_bytes)
        self._metrics.add("kv_received_pages", self.limits.pages_for(request.length))
        self._metrics.observe("kv_seconds", now_s - request.granted_s)
        source, full = request.kvs[0], request.length // self.limits.page_tokens
        for kv in request.kvs[1:]:
            self._fork(source, kv, full)
        for sample, kv in zip(request.samples, request.kvs, strict=True):
            sequence = self._sequence(request, sample, kv, now_s)
            self.running.append(sequence)
            if sequence.generated >= sequence.sampling.max_tokens:  # nothing was asked for but the prompt
                row: list[Any] = [*request.key, sample, sequence.generated, [], "length", None, None]
                self._send(sequence.router_inbox, Tokens(self._name, [row]))
                self._finish(sequence)

    def _fork(self, source: SeqKV, kv: SeqKV, full_pages: int) -> None:
        shared = source.pages[:full_pages]
        if kv.pages:
            self._arena.copy_page(source.pages[full_pages], kv.pages[0])
        self._arena.copy_slot(source.slot, kv.slot)
        self.pool.share_pages(shared)
        kv.pages = shared + kv.pages

    def _sequence(self, request: Request, sample: int, kv: SeqKV, now_s: float) -> Sequence:
        offer = request.offer
        return Sequence(
            key=request.key,
            sample=sample,
            serial=(request.serial, sample),
            tokens=list(request.tokens),
            prompt_tokens=offer.prompt_tokens,
            sampling=offer.sampling,
            eos_token_id=self.limits.eos_token_id,
            kv=kv,
            router_inbox=offer.router_inbox,
            deadline_s=request.deadline_s,
            arrived_s=now_s,
        )

    def _take(self, sequence: Sequence, choice: Choice, rows: list[Any], now_s: float) -> str:
        """Takes a sequence's new tokens up to the one that ends it. Gives the finish reason, "" while it runs."""
        first = sequence.generated
        count, reason = sequence.extend(choice.tokens)
        self._metrics.add("tokens_dropped", len(choice.tokens) - count)
        if not sequence.first_token_s:
            sequence.first_token_s = now_s
            _timeline.note(sequence.key, "first_token", now_s, sample=sequence.sample)
            self._metrics.observe("first_token_seconds", now_s - sequence.arrived_s)
        scores = None if choice.logprobs is None else choice.logprobs[:count]
        tops = None if choice.tops is None else choice.tops[:count]
        rows.append([*sequence.key, sequence.sample, first, choice.tokens[:count], reason, scores, tops])
        if reason:
            self._metrics.observe("decode_seconds", now_s - sequence.arrived_s)
            self._finish(sequence)
        return reason

    def _land(self, batch: list[Sequence], newest: bool = False) -> None:
        """The oldest step in flight, or the newest, is done: what was over and waited for it gives back its pages and slot."""
        for sequence in batch:
            del sequence.in_flight[-1 if newest else 0]
            if sequence.over and not sequence.in_flight:
                self.leaving.remove(sequence)
                self.pool.drop(sequence.kv)

    def _send_grant(self, request: Request, now_s: float) -> bool:
        request.grant_again_s = now_s + GRANT_PERIOD_S
        return self._send(request.offer.prefill_inbox, request.grant)

    def _drop_sample(self, request: Request, sample: int) -> None:
        if sample != ALL_SAMPLES and request.samples != [sample]:
            if sample in request.samples:
                request.samples.remove(sample)
                if request.kvs:
                    self.pool.drop(request.kvs.pop())  # never the first, where the KV lands
            return
        self._release_request(request)
        self._send(request.offer.prefill_inbox, Abort(*request.key))  # the router's word to it may be lost or late

    def _break(self, request: Request, reason: str, corrupt: bool = False) -> None:
        self._metrics.add("transfers_broken")
        self._fail_request(request, "corrupt" if corrupt else "transfer", f"the hand-off is broken: {reason}", retryable=True)

    def _finish(self, sequence: Sequence) -> None:
        _timeline.note(sequence.key, "finished", sample=sequence.sample, tokens=sequence.generated)
        self._metrics.add("finished")
        self._release_sequence(sequence)

    def _fail_request(self, request: Request, cause: str, reason: str, retryable: bool) -> None:
        """Ends a request that does not run yet, with a message to both of its other parties."""
        self._release_request(request)
        self._send(request.offer.prefill_inbox, Abort(*request.key))
        self._send(request.offer.router_inbox, Failed(*request.key, ALL_SAMPLES, cause, reason, retryable, "decode"))

    def _fail_sequence(self, sequence: Sequence, cause: str, reason: str, retryable: bool) -> None:
        self._release_sequence(sequence)
        self._send(sequence.router_inbox, Failed(*sequence.key, sequence.sample, cause, reason, retryable, "decode"))

    def _release_request(self, request: Request) -> None:
        self.queued.pop(request.key, None)
        self.arriving.pop(request.key, None)
        self._closed.add(request.key)
        if not self._receiver.close(request.key) and request.kvs:
            self.draining[request.key] = request.kvs.pop(0)  # where the KV lands
        for kv in request.kvs:
            self.pool.drop(kv)
        request.kvs = []

    def _release_sequence(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.over = True
        if sequence.in_flight:
            self.leaving.append(sequence)
        else:
            self.pool.drop(sequence.kv)

    def _known(self, key: Key) -> bool:
        return key in self.queued or key in self.arriving or any(s.key == key for s in self.running)
