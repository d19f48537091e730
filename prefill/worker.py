"""The prefill worker: one loop that receives, schedules, computes and hands over.

While there is something to compute it never waits; otherwise it sleeps on its inbox and its transport. A GPU is kept one
step ahead: what a step computes is handed to the transport, which waits for it, when the step has been started.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import zmq

import wire.worker
from kvtransfer.layout import identity_fingerprint
from kvtransfer.pages import PagePool
from kvtransfer.sender import Sender
from kvtransfer.transports import BulkOptions, open_transport
from model.runner import Runner
from prefill.config import PrefillConfig
from prefill.engine import Engine
from prefill.pace import Pace, marks_of
from prefill.prompt import Chunk
from prefill.room import make_runner
from prefill.scheduler import Limits, Scheduler
from wire.curve import password_of
from wire.messages import Abort, Grant, Prefill, Refused
from wire.worker import Presence

BUSY_WAIT_MS = 1
_log = logging.getLogger("prefill")


class Worker:
    """Everything a prefill process owns. `turn` is the loop's body."""

    def __init__(self, config: PrefillConfig, runner: Runner, context: zmq.Context[Any]) -> None:
        self._presence = Presence("prefill", config, context)
        self.name, self.inbox, self.metrics = self._presence.name, self._presence.inbox, self._presence.metrics
        options = BulkOptions(config.transport, config.lanes, config.kv_floor)
        self._transport = open_transport(runner.arena, config.host, config.advertise, options, password_of(config.cluster_key))
        self._sender = Sender(runner.arena, self._transport, sealed=bool(config.cluster_key))
        identity, model = runner.identity(), runner.config
        pool = PagePool(len(runner.arena.pages), len(runner.arena.slots))
        limits = Limits(
            model.vocab_size,
            config.longest(model.max_position_embeddings),
            config.page_tokens,
            config.step_tokens,
            config.chunk_tokens,
        )
        self.scheduler = Scheduler(
            pool,
            self._sender,
            limits,
            identity_fingerprint(identity),
            self.inbox.address,
            self._presence.outbox.send,
            self.metrics,
        )
        self._engine = Engine(runner)
        self._pace = Pace(marks_of(runner.arena.pages.device))
        self._presence.join(identity, model, pool.total_slots, self._counts, self.scheduler.live, self._transport)

    def run(self) -> None:
        """Until a signal or a Refused ends the process (SystemExit)."""
        while True:
            self.turn()

    def turn(self, max_wait_ms: int | None = None) -> None:
        """Receive, schedule, run, reply; waits only when there is nothing to run."""
        now_s = time.monotonic()
        self._receive(now_s)
        self._report()
        self.scheduler.settle(self._sender.poll(), now_s)
        self.scheduler.expire(now_s)
        self.scheduler.admit(now_s)
        if self._pace.full:
            self._presence.nap(BUSY_WAIT_MS)
        elif chunks := self.scheduler.next_chunks():
            self._step(chunks)
        else:
            self._presence.wait(self.scheduler.idle and self._pace.still, max_wait_ms)

    def close(self) -> None:
        """Says "gone" and lets go of sockets and threads."""
        self._presence.leave()
        self._transport.close()

    def _receive(self, now_s: float) -> None:
        for message in self.inbox.drain():
            match message:
                case Prefill():
                    self.scheduler.submit(message, now_s)
                case Grant():
                    self.scheduler.grant(message)
                case Abort():
                    self.scheduler.abort(message)
                case Refused():
                    wire.worker.leave_refused(message)
                case _:
                    self.metrics.add("misdirected")

    def _step(self, chunks: list[Chunk]) -> None:
        try:
            with self._pace.step(chunks):
                self._engine.compute(chunks)
        except Exception as error:  # whatever the model raises ends these prompts, not the worker
            _log.exception("a step of %d prompts failed", len(chunks))
            self._leave_if_lost()
            self.scheduler.fail_step(chunks, f"prefill failed: {type(error).__name__}: {error}")
            return
        self.scheduler.computed(chunks, time.monotonic())
        self._report()

    def _leave_if_lost(self) -> None:
        reason = self._engine.lost()
        if reason:
            wire.worker.leave_lost("prefill", reason)

    def _report(self) -> None:
        """Tells of the steps that are over; what they ran into shows here too."""
        try:
            ended = self._pace.over()
        except RuntimeError:
            self._leave_if_lost()
            raise
        for chunks, begin_s, end_s in ended:
            self.scheduler.ended(chunks, begin_s, end_s)
            self._presence.stepped(sum(chunk.count for chunk in chunks), begin_s, end_s)

    def _counts(self) -> dict[str, int]:
        scheduler = self.scheduler
        queued, running = len(scheduler.waiting), len(scheduler.computing) + len(scheduler.sending)
        return {**scheduler.pool.counts(), "queued": queued, "running": running}


def serve(config: PrefillConfig) -> int:
    """Loads the model and runs the worker (wire/worker.py)."""
    torch.set_num_threads(config.threads)

    def build(context: zmq.Context[Any]) -> Worker:
        return Worker(config, make_runner(config), context)

    return wire.worker.serve("prefill", config, build)
