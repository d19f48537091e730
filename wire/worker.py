"""The life of a worker process as the router sees it: what it is started with, how it starts, is refused, and leaves."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import zmq

from wire.messages import Refused
from wire.options import option
from wire.sockets import Inbox

REFUSED_EXIT = 3
LAST_WORDS_MS = 500  # what is still queued when the process ends, "gone" among it, may take that long to leave
SWITCH_INTERVAL_S = 0.0005  # the transport's thread gets the interpreter within half a millisecond


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
    page_tokens: int = option(256, help="tokens in a KV page")
    num_pages: int = option(1024, help="KV pages; one is reserved")
    num_slots: int = option(129, help="sequence slots; one is reserved")
    transport: str = option("zeromq", choices=("zeromq",), help="how KV travels")
    threads: int = option(1, help="CPU threads of the model")

    def __post_init__(self) -> None:
        if not self.router.startswith("tcp://"):
            raise ValueError(f"--router is {self.router!r}; it must be the router's inbox, tcp://HOST:PORT")
        self.require(num_pages=2, num_slots=2, page_tokens=1, threads=1)
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port is {self.port}; ports are 0 to 65535")

    def require(self, **least: int) -> None:
        """Raises ValueError for the first of these options that is less than it may be."""
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least {minimum}")


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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    context: zmq.Context[Any] = zmq.Context.instance()
    try:
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


def _leave(signal_number: int, frame: object) -> None:
    raise SystemExit(0)
