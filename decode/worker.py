"""The decode worker: one loop that receives, schedules, steps and replies.

While there is something to run it never waits; otherwise it sleeps on its inbox and its transport.
"""

from __future__ import annotations

import gc
import logging
import secrets
import signal
import sys
import time
from typing import Any

import torch
import zmq

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

REFUSED_EXIT = 3
ARRIVAL_TIMEOUT_S = 10.0  # from Ready to the last byte
PUBLISH_PERIOD_S = 0.25
LIVE_WAIT_MS = 100  # with requests in hand deadlines are looked at ten times a second
LAST_WORDS_MS = 500
SWITCH_INTERVAL_S = 0.0005  # the transport's thread gets the interpreter within half a millisecond
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
                    print(f"refused: {message.reason}", file=sys.stderr, flush=True)
                    raise SystemExit(REFUSED_EXIT)
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
            "free_pages": pool.free_pages,
            "total_pages": pool.total_pages,
            "free_slots": pool.free_slots,
            "total_slots": pool.total_slots,
            "queued": len(scheduler.queued) + len(scheduler.arriving),
            "running": len(scheduler.running),
            "max_context": min(model.max_position_embeddings, pool.total_pages * scheduler.limits.page_tokens),
            "vocab_size": model.vocab_size,
            "eos_token_id": model.eos_token_id,
            "bos_token_id": model.bos_token_id,
            "max_batch": scheduler.limits.max_batch,
            "tokens_per_s": self._tokens_per_s,
        }
        for name in ("free_pages", "total_pages", "free_slots", "total_slots", "queued", "running"):
            self.metrics.set(name, load[name])
        bad_frames = self.inbox.bad_frames + self._transport.bad_frames
        self.metrics.add("bad_frames", bad_frames - self.metrics.count("bad_frames"))
        self.metrics.add("dropped_messages", self._outbox.dropped - self.metrics.count("dropped_messages"))
        return Status("decode", self.name, "serving", self.inbox.address, self._identity, load, self.metrics.snapshot())


def serve(config: DecodeConfig) -> int:
    """Loads the model and runs the worker; gives the exit code of a start that failed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    torch.set_num_threads(config.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    context: zmq.Context[Any] = zmq.Context.instance()
    try:
        worker = Worker(config, _load(config), context)
    except (OSError, ValueError, RuntimeError, KeyError, zmq.ZMQError) as error:
        print(f"decode cannot start with --model {config.model}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    gc.collect()
    gc.freeze()  # the model's objects are never garbage: no pause looks at them again
    try:
        print(f"serving {worker.name} {worker.inbox.address}", flush=True)
        worker.run()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        worker.close()
        context.destroy(linger=LAST_WORDS_MS)  # waits that long for what is still queued, "gone" among it
    return 0


def _load(config: DecodeConfig) -> Runner:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; use --device cpu")
    sizes = {"num_pages": config.num_pages, "num_slots": config.num_slots}
    return Runner(config.model, config.device, config.kv_dtype, config.page_tokens, **sizes)


def _leave(signal_number: int, frame: object) -> None:
    raise SystemExit(0)
