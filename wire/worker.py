"""The life of a worker process as the router sees it: what it is started with, how it starts, is refused, and leaves.

Both pools share this. What they do with a request is in prefill/ and decode/.
"""

from __future__ import annotations

import gc
import logging
import math
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import zmq

from wire.codec import schema_digest
from wire.counters import COUNTERS
from wire.curve import require_key
from wire.heartbeat import Heartbeat
from wire.messages import Refused, Status, pack_keys
from wire.metrics import Metrics
from wire.options import option, require_port
from wire.sockets import Inbox, Outbox, open_context
from wire.timeline import show_timelines

_log = logging.getLogger("wire")
REFUSED_EXIT = 3
LOST_EXIT = 4
LAST_WORDS_MS = 500  # what is still queued when the process ends, "gone" among it, may take that long to leave
SWITCH_INTERVAL_S = 0.00002  # who comes back from the kernel, several times a message, waits so long for one that computes
PUBLISH_PERIOD_S = 0.25
LIVE_WAIT_MS = 100  # with requests in hand deadlines are looked at ten times a second
IDLE_WAIT_MS = 1000  # without: a loop that never wakes could not be told from one that is stuck (wire/heartbeat.py)
RATE_MEMORY_S = 30.0
RATE_LEAST_TOKENS = 100  # more than the probes of an idle worker come to in that time


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker of either pool is started with; each pool adds its own."""

    model: str = option(help="checkpoint folder")
    router: str = option(help="the router's inbox, tcp://HOST:PORT")
    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(0, help="port of the inbox; 0: any free one")
    advertise: str = option("", help="host name that peers reach this worker by; empty: --host")
    device: str = option("cpu", choices=("cpu", "cuda"), help="where the model runs")
    kv_dtype: str = option(
        "auto", choices=("auto", "fp8", "bf16", "fp32"), help="how KV rows are stored; auto: as the checkpoint"
    )
    index_keys: str = option(
        "auto",
        choices=("auto", "mxfp4"),
        help="how the indexer's keys are stored; auto: as KV rows; mxfp4: half as large, as exact, for quantised checkpoints",
    )
    page_tokens: int = option(256, help="tokens in a KV page")
    num_pages: int = option(0, help="KV pages, one is reserved; 0: what a GPU's memory holds, 1024 on a CPU")
    num_slots: int = option(129, help="sequence slots; one is reserved")
    memory_fraction: float = option(0.9, help="how much of a GPU's memory may be taken, weights and all")
    max_context: int = option(0, help="tokens of the longest sequence; 0: as many as the model takes, which is the most")
    transport: str = option(
        "auto",
        choices=("auto", "zeromq", "shm", "cuda_ipc"),
        help="how KV travels; auto: on one host shared memory, or from GPU to GPU (cuda_ipc), if the peer's can be opened",
    )
    threads: int = option(1, help="CPU threads of the model")
    timeline: bool = option(False, help="log when each request passes each stage, on a clock that all of a host share")
    cluster_key: str = option(
        "", help="file of the cluster's key (python -m scripts.make_keys): only members are talked to, encrypted"
    )
    insecure: bool = option(False, help="listen beyond this host without a key: whoever can connect is served")

    def __post_init__(self) -> None:
        if not self.router.startswith("tcp://"):
            raise ValueError(f"--router is {self.router!r}; it must be the router's inbox, tcp://HOST:PORT")
        if self.host in ("0.0.0.0", "::", "*") and not self.advertise:
            raise ValueError(f"--host {self.host} also needs --advertise: the name the router and other workers reach it by")
        require_key("--host", self.host, self.cluster_key, self.insecure)
        self.require(num_pages=2 if self.num_pages else 0, num_slots=2, page_tokens=1, threads=1)
        self.require(max_context=2 if self.max_context else 0)
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"--memory-fraction is {self.memory_fraction}; it must be more than 0 and at most 1")
        if self.transport == "cuda_ipc" and self.device != "cuda":
            raise ValueError("--transport cuda_ipc goes from GPU to GPU; it needs --device cuda")
        require_port("--port", self.port)

    def longest(self, most: int) -> int:
        """Tokens of the longest sequence, of a model that takes `most`; it refuses a --max-context beyond that itself."""
        return self.max_context or most

    def require(self, **least: int) -> None:
        """Raises ValueError for the first of these options that is less than it may be."""
        for name, minimum in least.items():
            if not getattr(self, name) >= minimum:  # NaN is not
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least {minimum}")


class Rate:
    """Tokens a second while a worker computes, as the average token of the recent past saw it.

    Each step counts with its number of tokens, so a probe's two say little beside a batch's thousands. Everything is
    forgotten with a time constant of `RATE_MEMORY_S`; what is left of less than `RATE_LEAST_TOKENS` tokens is no measure.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._squares = 0.0  # tokens x tokens
        self._seconds = 0.0  # tokens x seconds
        self._at_s = -math.inf

    def add(self, tokens: int, seconds: float, now_s: float) -> None:
        """A step of `tokens` has taken `seconds`."""
        fade = self._fade(now_s)
        self._tokens = self._tokens * fade + tokens
        self._squares = self._squares * fade + tokens * tokens
        self._seconds = self._seconds * fade + tokens * seconds
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 when there is nothing to go by."""
        enough = self._tokens * self._fade(now_s) >= RATE_LEAST_TOKENS and self._seconds > 0
        return self._squares / self._seconds if enough else 0.0

    def _fade(self, now_s: float) -> float:
        return math.exp((self._at_s - now_s) / RATE_MEMORY_S)


class Model(Protocol):
    """What a worker says of its model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_id(self) -> int: ...
    @property
    def bos_token_id(self) -> int: ...


class Bulk(Protocol):
    """What a worker watches and reports of its KV transport."""

    def counters(self) -> Mapping[str, int]: ...
    def gauges(self) -> Mapping[str, float]: ...
    def fileno(self) -> int: ...
    def address(self) -> str: ...


class Presence:
    """A worker as others know it: its name, inbox and outbox, and the Status it keeps publishing.

    `join` makes it known. From then on the loop calls `stepped` after a step and `wait` when there is none to do; both
    publish when it is time, and `wait` returns in a second at most; `nap` while a device is still busy.
    """

    def __init__(self, role: str, config: WorkerConfig, context: zmq.Context[Any]) -> None:
        self.name = f"{role}-{secrets.token_hex(4)}"
        self.metrics = Metrics(COUNTERS[role])
        try:
            self.inbox = Inbox(context, config.host, config.port, config.advertise)
        except zmq.ZMQError as error:
            raise OSError(f"cannot listen on --host {config.host} --port {config.port}: {error.strerror}") from error
        self.outbox = Outbox(context)
        self._role, self._config, self._context = role, config, context
        self._rate = Rate()
        self._poller = zmq.Poller()
        self._next_publish_s = 0.0
        self._turn = 0

    def join(
        self,
        identity: dict[str, Any],
        model: Model,
        max_batch: int,
        counts: Callable[[], dict[str, int]],
        live: Callable[[], Iterable[tuple[int, int]]],
        bulk: Bulk,
    ) -> None:
        """Starts the heartbeat. `counts` gives what changes: the pool's pages and slots, queued, running; `live` the keys
        of all that is in hand."""
        self._identity = {**identity, "messages": schema_digest()}  # of another version of us the router says so, at once
        self._counts, self._live, self._bulk = counts, live, bulk
        self._facts = {
            "max_context": min(
                self._config.longest(model.max_position_embeddings), counts()["total_pages"] * self._config.page_tokens
            ),
            "vocab_size": model.vocab_size,
            "eos_token_id": model.eos_token_id,
            "bos_token_id": model.bos_token_id,
            "max_batch": max_batch,
        }
        _log.info("%s: messages to %s, KV to %s", self.name, self.inbox.address, bulk.address())
        self._poller.register(self.inbox.socket, zmq.POLLIN)
        self._poller.register(bulk.fileno(), zmq.POLLIN)
        self._heartbeat = Heartbeat(self._context, self._config.router, self._status(time.monotonic()))

    def stepped(self, tokens: int, start_s: float, now_s: float) -> None:
        """A step that began at `start_s` has computed `tokens`."""
        self.metrics.add("steps")
        self.metrics.observe("step_seconds", now_s - start_s)
        self._rate.add(tokens, now_s - start_s, now_s)
        if now_s >= self._next_publish_s:
            self._publish(now_s)

    def wait(self, idle: bool, max_wait_ms: int | None = None) -> None:
        """Sleeps until a message or KV is here. idle: no request is in hand."""
        self._publish(time.monotonic())
        longest_ms = IDLE_WAIT_MS if idle else LIVE_WAIT_MS
        self._poller.poll(longest_ms if max_wait_ms is None else max_wait_ms)

    def nap(self, longest_ms: int) -> None:
        """As `wait`, for a loop whose device is busy and which comes again at once: publishes only when it is time."""
        now_s = time.monotonic()
        if now_s >= self._next_publish_s:
            self._publish(now_s)
        self._poller.poll(longest_ms)

    def leave(self) -> None:
        """Says "gone" and closes the sockets."""
        counts = self._counts()
        running, queued = counts["running"], counts["queued"]
        _log.info("%s leaves: %d running and %d queued sequences go to other workers", self.name, running, queued)
        self._heartbeat.close()
        self.outbox.close()
        self.inbox.close()

    def _publish(self, now_s: float) -> None:
        self._next_publish_s = now_s + PUBLISH_PERIOD_S
        self._heartbeat.publish(self._status(now_s))

    def _status(self, now_s: float) -> Status:
        counts = self._counts()
        for name, value in counts.items():
            self.metrics.set(name, value)
        bulk = dict(self._bulk.counters())
        self.metrics.total("bad_frames", self.inbox.bad_frames + bulk.pop("bad_frames", 0))
        self.metrics.total("refused_peers", self.inbox.refused_peers + bulk.pop("refused_peers", 0))
        for name, amount in bulk.items():
            self.metrics.total(name, amount)
        for name, gauge in self._bulk.gauges().items():
            self.metrics.set(name, gauge)
        self.metrics.total("dropped_messages", self.outbox.dropped)
        load = {**self._facts, **counts, "tokens_per_s": self._rate.per_s(now_s)}
        self._turn += 1
        return Status(
            self._role, self.name, "serving", self.inbox.address, self._identity, load, self.metrics.snapshot(),
            pack_keys(self._live()), self._turn,
        )  # fmt: skip


class Worker(Protocol):
    name: str
    inbox: Inbox

    def run(self) -> None: ...
    def close(self) -> None: ...


def serve(role: str, config: WorkerConfig, build: Callable[[zmq.Context[Any]], Worker]) -> int:
    """Builds the worker and runs it until a signal or a Refused; gives the exit code of a start that failed.

    Prints ``serving NAME INBOX`` when it runs; one line on stderr says why it does not.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if config.timeline:
        show_timelines()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        context = open_context(config.cluster_key)
        worker = build(context)
    except (OSError, ValueError, RuntimeError, KeyError, zmq.ZMQError) as error:
        print(f"{role} cannot start with --model {config.model}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
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
        context.destroy(linger=LAST_WORDS_MS)
    return 0


def leave_refused(message: Refused) -> NoReturn:
    """Says why the router does not want this worker, and ends the process."""
    print(f"refused: {message.reason}", file=sys.stderr, flush=True)
    raise SystemExit(REFUSED_EXIT)


def leave_lost(role: str, reason: str) -> NoReturn:
    """Ends a process whose device fails everything from now on: the router sends its requests elsewhere."""
    print(
        f"{role} can not go on: the device failed and this process can not use it again: {reason}", file=sys.stderr, flush=True
    )
    raise SystemExit(LOST_EXIT)


def _leave(signal_number: int, frame: object) -> None:
    raise SystemExit(0)
