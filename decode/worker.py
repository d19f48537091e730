"""The decode worker: one loop that receives, schedules, steps and replies.

While there is something to run it never waits; otherwise it sleeps on its inbox and its transport.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import torch
import zmq

import wire.worker
from decode.config import DecodeConfig
from decode.engine import Engine
from decode.request import Limits
from decode.scheduler import Scheduler
from decode.sequence import Sequence
from kvtransfer.layout import identity_fingerprint
from kvtransfer.pages import PagePool
from kvtransfer.receiver import Receiver
from kvtransfer.transports import open_transport
from model.runner import Runner
from wire.heartbeat import Heartbeat
from wire.messages import Abort, Offer, Ready, Refused, Status
from wire.metrics import Metrics
from wire.sockets import Inbox, Outbox

ARRIVAL_TIMEOUT_S = 10.0  # from Ready to the last byte
PUBLISH_PERIOD_S = 0.25
LIVE_WAIT_MS = 100  # with requests in hand deadlines are looked at ten times a second
_log = logging.getLogger("decode")


class Worker:
    """Everything a decode process owns. `turn` is the loop's body."""

    def __init__(self, config: DecodeConfig, runner: Runner, context: zmq.Context[Any]) -> None:
        self.name = f"decode-{secrets.token_hex(4)}"
        self.metrics = Metrics()
        self.inbox = Inbox(context, config.host, config.port, config.advertise)
        self._outbox = Outbox(context)
        self._transport = open_transport(config.transport, context, runner.arena, config.host, config.advertise)
        self._receiver = Receiver(runner.arena, self._transport, ARRIVAL_TIMEOUT_S)
        self._identity = runner.identity()
        self._model = runner.config
        self._tokens_per_s = 0.0
        pool = PagePool(config.num_pages, config.num_slots)
        limits = Limits(
            runner.config.vocab_size,
            runner.config.max_position_embeddings,
            runner.config.eos_token_id,
            config.page_tokens,
            pool.total_pages,
            pool.total_slots,
            config.max_batch,
        )
        self.scheduler = Scheduler(
            pool, self._receiver, runner.arena, limits, identity_fingerprint(self._identity), self._outbox.send, self.metrics
        )
        self._engine = Engine(runner)
        self._poller = zmq.Poller()
        self._poller.register(self.inbox.socket, zmq.POLLIN)
        self._poller.register(self._transport.fileno(), zmq.POLLIN)
        self._next_publish_s = 0.0
        self._heartbeat = Heartbeat(context, config.router, self._status())

    def run(self) -> None:
        """Until a signal or a Refused ends the process (SystemExit)."""
        while True:
            self.turn()

    def turn(self, max_wait_ms: int | None = None) -> None:
        """Receive, schedule, run, reply; waits only when there is nothing to run."""
        now_s = time.monotonic()
        self._receive(now_s)
        self.scheduler.settle(self._receiver.poll(now_s), now_s)
        self.scheduler.expire(now_s)
        self.scheduler.admit(now_s)
        batch = self.scheduler.next_batch()
        if batch:
            self._step(batch, now_s)
        else:
            self._wait(max_wait_ms)

    def close(self) -> None:
        """Says "gone" and lets go of sockets and threads."""
        self._heartbeat.close()
        self._transport.close()
        self._outbox.close()
        self.inbox.close()

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

    def _step(self, batch: list[Sequence], start_s: float) -> None:
        try:
            choices = self._engine.step(batch)
        except Exception as error:  # whatever the model raises ends these sequences, not the worker
            _log.exception("a step of %d sequences failed", len(batch))
            self.scheduler.fail_step(batch, f"decode failed: {type(error).__name__}: {error}")
            return
        now_s = time.monotonic()
        self.scheduler.advance(batch, choices, now_s)
        self.metrics.add("steps")
        self.metrics.observe("step_seconds", now_s - start_s)
        rate = len(batch) / (now_s - start_s)
        self._tokens_per_s += 0.1 * (rate - self._tokens_per_s) if self._tokens_per_s else rate
        if now_s >= self._next_publish_s:
            self._publish(now_s)

    def _wait(self, max_wait_ms: int | None) -> None:
        self._publish(time.monotonic())
        longest_ms = None if self.scheduler.idle else LIVE_WAIT_MS
        self._poller.poll(longest_ms if max_wait_ms is None else max_wait_ms)

    def _publish(self, now_s: float) -> None:
        self._next_publish_s = now_s + PUBLISH_PERIOD_S
        self._heartbeat.publish(self._status())

    def _status(self) -> Status:
        scheduler, pool, model = self.scheduler, self.scheduler.pool, self._model
        load = {
            **pool.counts(),
            "queued": len(scheduler.queued) + len(scheduler.arriving),
            "running": len(scheduler.running),
            "max_context": min(model.max_position_embeddings, pool.total_pages * scheduler.limits.page_tokens),
            "vocab_size": model.vocab_size,
            "eos_token_id": model.eos_token_id,
            "bos_token_id": model.bos_token_id,
            "max_batch": scheduler.limits.max_batch,
            "tokens_per_s": self._tokens_per_s,
        }
        for name in (*pool.counts(), "queued", "running"):
            self.metrics.set(name, load[name])
        self.metrics.total("bad_frames", self.inbox.bad_frames + self._transport.bad_frames)
        self.metrics.total("dropped_messages", self._outbox.dropped)
        return Status("decode", self.name, "serving", self.inbox.address, self._identity, load, self.metrics.snapshot())


def serve(config: DecodeConfig) -> int:
    """Loads the model and runs the worker (wire/worker.py)."""
    torch.set_num_threads(config.threads)

    def build(context: zmq.Context[Any]) -> Worker:
        sizes = {"num_pages": config.num_pages, "num_slots": config.num_slots}
        return Worker(config, Runner(config.model, config.device, config.kv_dtype, config.page_tokens, **sizes), context)

    return wire.worker.serve("decode", config, build)
