"""The decode worker: one loop that receives, schedules, steps and replies.

While there is something to run it never waits; otherwise it sleeps on its inbox and its transport.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import zmq

import wire.worker
from decode.config import DecodeConfig
from decode.graphs import batch_sizes
from decode.request import Limits
from decode.room import make_engine
from decode.sampling import MOST_TOPS
from decode.scheduler import Scheduler
from decode.sequence import Sequence
from decode.speculation import Speculation
from decode.step import Shape
from kvtransfer.layout import identity_fingerprint
from kvtransfer.pages import PagePool
from kvtransfer.receiver import Receiver
from kvtransfer.transports import BulkOptions, open_transport
from kvtransfer.transports.seal import new_secret as make_secret
from model.memory import TRIAL, first_arena, given_room
from model.runner import Runner
from wire.curve import password_of
from wire.messages import Abort, Offer, Ready, Refused
from wire.worker import Presence

ARRIVAL_TIMEOUT_S = 10.0  # from Ready to the last byte
_log = logging.getLogger("decode")


class Worker:
    """Everything a decode process owns. `turn` is the loop's body."""

    def __init__(self, config: DecodeConfig, runner: Runner, context: zmq.Context[Any], depth: int = 0) -> None:
        """depth: steps in flight while the next one is launched (decode/engine.py)."""
        self._engine = make_engine(config, runner, depth)  # first: it may give the runner its arena, and a capture is alone
        self._presence = Presence("decode", config, context)
        self.name, self.inbox, self.metrics = self._presence.name, self._presence.inbox, self._presence.metrics
        options = BulkOptions(config.transport)
        self._transport = open_transport(runner.arena, config.host, config.advertise, options, password_of(config.cluster_key))
        new_secret = make_secret if config.cluster_key else bytes
        self._receiver = Receiver(runner.arena, self._transport, ARRIVAL_TIMEOUT_S, new_secret, self.name)
        identity, model = runner.identity(), runner.config
        pool = PagePool(len(runner.arena.pages), len(runner.arena.slots))
        limits = Limits(
            model.vocab_size,
            config.longest(model.max_position_embeddings),
            model.eos_token_id,
            config.page_tokens,
            pool.total_pages,
            pool.total_slots,
            config.max_batch,
            model.vocab_size if config.device == "cpu" else MOST_TOPS,
        )
        self.scheduler = Scheduler(
            pool,
            self._receiver,
            runner.arena,
            limits,
            identity_fingerprint(identity),
            self.name,
            self._presence.outbox.send,
            self.metrics,
        )
        self._max_batch = config.max_batch
        self._speculation = Speculation(config.speculate, batch_sizes(config.max_batch))
        self._busy_since_s = 0.0  # when the engine began with the oldest step in flight
        self._presence.join(identity, model, config.max_batch, self._counts, self.scheduler.live, self._transport)

    def run(self) -> None:
        """Until a signal or a Refused ends the process (SystemExit)."""
        while True:
            self.turn()

    def turn(self, max_wait_ms: int | None = None) -> None:
        """Receive, schedule, launch the next step, reply with the one before; waits only when there is nothing to run."""
        now_s = time.monotonic()
        self._receive(now_s)
        self.scheduler.settle(self._receiver.poll(now_s), now_s)
        self.scheduler.expire(now_s)
        self.scheduler.admit(now_s)
        shape = self._speculation.shape(min(len(self.scheduler.running), self._max_batch))
        shape = shape._replace(tokens=self.scheduler.affordable(shape.tokens))
        batch = self.scheduler.next_batch(shape.tokens)
        if batch:
            self._launch(batch, shape, now_s)
        if self._engine.in_flight > (self._engine.depth if batch else 0):
            self._collect()
        elif not batch:
            self._presence.wait(self.scheduler.idle, max_wait_ms)

    def close(self) -> None:
        """Says "gone" and lets go of sockets and threads."""
        self._presence.leave()
        self._transport.close()

    def _receive(self, now_s: float) -> None:
        for message in self.inbox.drain():
            match message:
                case Offer():
                    self.scheduler.offer(message, now_s)
                case Ready():
                    self.scheduler.ready(message)
                case Abort():
                    self.scheduler.abort(message)
                case Refused():
                    wire.worker.leave_refused(message)
                case _:
                    self.metrics.add("misdirected")

    def _launch(self, batch: list[Sequence], shape: Shape, now_s: float) -> None:
        if not self._engine.in_flight:
            self._busy_since_s = now_s
        try:
            self._engine.launch(batch, shape)
        except Exception as error:  # whatever the model raises ends these sequences, not the worker
            _log.exception("a step of %d sequences failed", len(batch))
            self._leave_if_lost()
            self.scheduler.fail_step(batch, f"decode failed: {type(error).__name__}: {error}")
            return
        self.scheduler.launched(batch)

    def _collect(self) -> None:
        shape = self._engine.next_shape
        try:
            batch, choices = self._engine.collect()
        except RuntimeError:
            self._leave_if_lost()
            raise
        now_s, known = time.monotonic(), [sequence.generated for sequence in batch]
        self.scheduler.advance(batch, choices, now_s)
        outcomes = []
        for sequence, choice, before in zip(batch, choices, known, strict=True):
            behind = sequence.generated - before - 1  # its next token; -1: nobody wants even that
            if behind >= 0:
                outcomes.append((min(choice.drafts, behind) if sequence.over else choice.drafts, behind))
        self._speculation.landed(len(batch), shape, now_s - self._busy_since_s, outcomes)
        self._presence.stepped(sum(len(choice.tokens) for choice in choices), self._busy_since_s, now_s)
        self._busy_since_s = now_s

    def _leave_if_lost(self) -> None:
        reason = self._engine.lost()
        if reason:
            wire.worker.leave_lost("decode", reason)

    def _counts(self) -> dict[str, int]:
        scheduler = self.scheduler
        self._speculation.report(self.metrics)
        queued, running = len(scheduler.queued) + len(scheduler.arriving), len(scheduler.running)
        return {**scheduler.pool.counts(), "queued": queued, "running": running}


def serve(config: DecodeConfig) -> int:
    """Loads the model and runs the worker (wire/worker.py)."""
    torch.set_num_threads(config.threads)

    def build(context: zmq.Context[Any]) -> Worker:
        sizes = first_arena(config.num_pages, config.num_slots, config.device)
        runner = Runner(
            config.model, config.device, config.kv_dtype, config.page_tokens, index_keys=config.index_keys,
            max_context=config.max_context, **sizes,
        )  # fmt: skip
        if sizes is not TRIAL:
            _log.info("%s", given_room(runner.layout, sizes))
        return Worker(config, runner, context, depth=int(config.device == "cuda"))

    return wire.worker.serve("decode", config, build)
