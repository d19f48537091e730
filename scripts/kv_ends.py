"""The two ends of the KV transfer benchmark: real arenas, transports, senders and receivers, and no model.

The target serves one source at a time. What it is to do comes as JSON lines over a TCP connection; hand-offs themselves
are Offer, Grant and Ready over the inboxes that workers use, and arrival is told with a Tokens row.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import re
import resource
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import zmq

from kernels import backend
from kvtransfer.arena import Arena
from kvtransfer.layout import KVLayout
from kvtransfer.pages import PagePool, SeqKV
from kvtransfer.receiver import Arrived, Broken, Receiver
from kvtransfer.transports import BulkOptions, Freed, Key, Transport, open_transport
from kvtransfer.transports.frame import PATHS
from kvtransfer.transports.memory import Bytes
from kvtransfer.transports.seal import new_secret
from model.cache import kv_layout
from model.config import ModelConfig
from scripts.kv_floors import receive
from scripts.kv_peers import Peer, require
from scripts.kv_undigested import UndigestedTransport
from scripts.released_config import RELEASED
from wire.curve import ClusterKey, is_loopback, password_of
from wire.messages import Abort, Failed, Grant, Offer, Ready, Tokens
from wire.sockets import Inbox, Outbox, open_context

NUM_SLOTS = 10
ADMIT_S = 10.0  # for a source to say who it is
MAX_ORDER_BYTES = 1 << 20
MOST_THREADS = 256  # of --busy, and streams of a floor


class BadOrder(ValueError):
    """What a source asks for is no order, or cannot be done here."""


def flash_layout() -> KVLayout:
    return kv_layout(ModelConfig.from_json(RELEASED))


def cpu_seconds() -> float:
    """User and system time of this process and its children so far."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    total = spent.ru_utime + spent.ru_stime
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


@contextlib.contextmanager
def busy_python(threads: int) -> Iterator[Callable[[], int]]:
    """CPU-heavy Python in this process, as an engine's scheduler may be. Gives what says how often it went round so far, in
    thousands."""
    stop, thousands = threading.Event(), [0] * threads

    def spin(which: int) -> None:
        number = 0
        while not stop.is_set():
            for _ in range(1000):
                number = (number * 1_103_515_245 + 12_345) % 2**31
            thousands[which] += 1

    spinners = [threading.Thread(target=spin, args=[which], daemon=True) for which in range(threads)]
    for spinner in spinners:
        spinner.start()
    try:
        yield lambda: sum(thousands)
    finally:
        stop.set()
        for spinner in spinners:
            spinner.join()


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """For starting processes: a terminal's Ctrl-C goes to all of them, and they inherit that it waits. We say when they end."""
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))  # other threads do not block it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if came and callable(handler):  # else it was ignored before
        raise KeyboardInterrupt


def host_pages(arena: Arena) -> Bytes:
    """The pages, uint8 [pages, page_bytes], or as many bytes of the host's memory when they are on a device."""
    pages: Bytes = arena.pages.numpy() if arena.shared is not None else torch.ones(arena.pages.shape, dtype=torch.uint8).numpy()
    return pages


def is_device(text: str) -> bool:
    """Whether an arena can be there, on a host that has it."""
    return re.fullmatch(r"cpu|cuda(:\d{1,3})?", text) is not None


def is_here(device: str) -> bool:
    """Whether torch finds it on this host."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return device == "cpu" or int(device.partition(":")[2] or 0) < count


class Target:
    """The decode side. `serve` runs until the source hangs up, or asks for what makes no sense: BadOrder."""

    def __init__(self, layout: KVLayout, host: str, advertise: str, cluster_key: str, insecure: bool) -> None:
        self._layout, self._host, self._advertise, self._sealed = layout, host, advertise, bool(cluster_key)
        self._password = password_of(cluster_key)
        self._peers_allowed, self._peers = insecure or is_loopback(host), dict[str, Peer]()
        self._context = open_context(cluster_key)
        self._inbox = Inbox(self._context, host, 0, advertise)
        self._outbox = Outbox(self._context)
        self._waiting: deque[Offer] = deque()
        self._held: dict[Key, tuple[SeqKV, str]] = {}

    def serve(self, connection: socket.socket) -> None:
        lines = connection.makefile("r", encoding="utf-8")
        with connection, contextlib.ExitStack() as opened, contextlib.suppress(ConnectionError):  # of a source that was stopped
            opened.callback(self._close)
            order = _read(lines)
            if order is None:
                return
            transport = opened.enter_context(contextlib.closing(self._open(order)))
            self._rounds = opened.enter_context(busy_python(_field(order, "busy", int, 0, MOST_THREADS)))
            reply = {"inbox": self._inbox.address, "bulk": transport.address()}
            connection.sendall(json.dumps(reply).encode() + b"\n")
            poller = zmq.Poller()
            for source in (self._inbox.socket, connection.fileno(), transport.fileno()):
                poller.register(source, zmq.POLLIN)
            while True:
                ready = dict(poller.poll(50))
                if connection.fileno() in ready:
                    order = _read(lines)
                    if order is None:
                        return
                    self._obey(order, connection)
                self._hand_off()

    def _open(self, order: dict[str, Any]) -> Transport:
        """Makes the arena that a source asks for. Raises BadOrder."""
        pages, device = _field(order, "pages", int, 1), _field(order, "device", str)
        if not (is_device(device) and is_here(device)):
            raise BadOrder(f"torch finds no {device!r} here")
        if pages * self._layout.page_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise BadOrder(f"{pages} pages are more than this host's memory")
        options = _options(_field(order, "options", list))
        open_it = open_transport if _field(order, "digest", bool) else UndigestedTransport
        timeout_s, sealed = _field(order, "timeout_s", float, 0), _field(order, "sealed", bool)
        try:
            arena = self._arena = Arena(self._layout, pages + 1, NUM_SLOTS, device)
            backend.choose(arena.pages.device)
            arena.pages.zero_()
            with no_interrupts():
                transport = open_it(arena, self._host, self._advertise, options, self._password)
        except (OSError, RuntimeError) as error:
            raise BadOrder(f"{pages} pages on {device}: {error}") from error
        self._host_pages = host_pages(arena)
        self._pool = PagePool(pages + 1, NUM_SLOTS)
        self._receiver = Receiver(arena, transport, timeout_s, new_secret if sealed or self._sealed else bytes)
        return transport

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._inbox.close()
        self._outbox.close()
        self._context.destroy(linger=0)

    def _obey(self, order: dict[str, Any], connection: socket.socket) -> None:
        """Raises BadOrder."""
        match _field(order, "do", str):
            case "cpu":
                reply: dict[str, Any] = {"cpu_s": cpu_seconds()}
            case "rounds":
                reply = {"rounds": self._rounds(), "at_s": time.perf_counter()}
            case "peer":
                reply = self._open_peer(_field(order, "name", str))
            case "turn":
                peer = self._peers.get(_field(order, "name", str))
                if peer is None:
                    raise BadOrder(f"{order['name']!r} is no peer that was opened")
                peer.turn(_field(order, "begins", bool))
                reply = {}
            case "floor":
                self._receive_floor(order, connection)
                return
            case what:
                raise BadOrder(f"{what!r} is nothing that can be done")
        connection.sendall(json.dumps(reply).encode() + b"\n")

    def _receive_floor(self, order: dict[str, Any], connection: socket.socket) -> None:
        pages, num_pages = _field(order, "order", list), len(self._host_pages)
        if not all(type(page) is int and 0 <= page < num_pages for page in pages):
            raise BadOrder(f"order has what is no page of {num_pages}")
        streams, packed = _field(order, "streams", int, 1, MOST_THREADS), _field(order, "packed", bool)
        with socket.create_server((self._host, 0), backlog=64) as listener:
            connection.sendall(json.dumps({"port": listener.getsockname()[1]}).encode() + b"\n")
            receive(listener, self._host_pages, pages, streams, packed)

    def _open_peer(self, name: str) -> dict[str, Any]:
        try:
            require(name)
        except ValueError as error:
            return {"error": f"--peers {name}: {error}"}
        if not self._peers_allowed:
            return {"error": f"{name} takes bytes from whoever can connect: --serve needs --insecure for --peers"}
        self._peers[name] = Peer(name, self._arena, self._host, self._advertise)
        return {"port": self._peers[name].port}

    def _hand_off(self) -> None:
        for message in self._inbox.drain():
            if isinstance(message, Offer) and message.prompt_tokens < 0:  # a round trip and nothing else
                self._outbox.send(message.prefill_inbox, Grant(message.rid, message.attempt, 0, b"", ""))
            elif isinstance(message, Offer):
                self._waiting.append(message)
            elif isinstance(message, Ready):
                self._receiver.ready(message)
            elif isinstance(message, Abort):
                self._receiver.close((message.rid, message.attempt))
        for end in self._receiver.poll(time.monotonic()):
            kv, home = self._held.pop(end.key)
            self._pool.drop(kv)
            match end:
                case Arrived():
                    self._outbox.send(home, Tokens("target", [[*end.key]]))
                case Broken():
                    self._outbox.send(home, Failed(*end.key, 0, "transfer", end.reason, True, "decode"))
                case Freed():
                    pass
        while self._waiting:
            offer = self._waiting[0]
            room = self._pool.take(self._layout.pages_for(offer.prompt_tokens))
            if room is None:
                return
            self._waiting.popleft()
            key = (offer.rid, offer.attempt)
            self._held[key] = room, offer.prefill_inbox
            self._outbox.send(offer.prefill_inbox, self._receiver.open(key, room.slot, room.pages))


def _read(lines: TextIO) -> dict[str, Any] | None:
    """The next order; None when the source has hung up. Raises BadOrder."""
    try:
        line = lines.readline(MAX_ORDER_BYTES)
        order = json.loads(line) if line else None
    except (ValueError, RecursionError) as error:
        raise BadOrder(f"that is no line of JSON: {error}") from error
    if line and not isinstance(order, dict):
        raise BadOrder(f"{_short(order)} is no order")
    return order


def _field(order: dict[str, Any], name: str, kind: type, least: float = -math.inf, most: float = math.inf) -> Any:
    """Raises BadOrder for one that is not there, of another kind, or, of numbers, out of bounds."""
    value = order.get(name)
    right = type(value) is kind or (kind is float and type(value) is int)
    if not right or (kind in (int, float) and not least <= value <= most):  # type: ignore[operator]
        raise BadOrder(f"{name} is {_short(value)}")
    return value


def _options(values: list[Any]) -> BulkOptions:
    """Raises BadOrder."""
    try:
        options = BulkOptions(*values)
    except TypeError as error:
        raise BadOrder(f"options are {_short(values)}") from error
    given = asdict(options)
    if _field(given, "path", str) not in ("auto", *PATHS):
        raise BadOrder(f"{_short(options.path)} is no path")
    _field(given, "lanes", int, 1, MOST_THREADS)
    _field(given, "floor_gb_per_s", float, 0)
    _field(given, "stall_s", float, 0)
    return options


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def prove(cluster_key: str, challenge: str) -> str:
    """What shows that one has the cluster's key, without telling it; of a challenge that is used once."""
    secret = ClusterKey.read(cluster_key).secret if cluster_key else b""
    return hmac.new(secret, b"kv benchmark " + challenge.encode(), "sha256").hexdigest()


def admit(connection: socket.socket, cluster_key: str) -> bool:
    """Whether who has connected has the cluster's key (or there is none): orders come in the clear, but not from anyone."""
    challenge = os.urandom(32).hex()
    connection.settimeout(ADMIT_S)
    try:
        connection.sendall(challenge.encode() + b"\n")
        proof = connection.recv(64, socket.MSG_WAITALL)
        connection.settimeout(None)
    except OSError:
        return False
    return hmac.compare_digest(proof, prove(cluster_key, challenge).encode())


def serve(layout: KVLayout, host: str, port: int, advertise: str, cluster_key: str = "", insecure: bool = False) -> None:
    """Serves sources one after the other; prints ``listening HOST:PORT`` when it does."""
    torch.set_num_threads(1)
    no_source = "that is no prefill side of this benchmark, or has a --cluster-key, which this side does not have"
    refusal = "that does not have the cluster's key" if cluster_key else no_source
    with socket.create_server((host, port)) as listener:
        print(f"listening {advertise or host}:{listener.getsockname()[1]}", flush=True)
        while True:
            connection, _ = listener.accept()
            if admit(connection, cluster_key):
                try:
                    Target(layout, host, advertise, cluster_key, insecure).serve(connection)
                except BadOrder as error:
                    print(f"dropped a source: {error}", flush=True)
            else:
                print(f"refused a source {refusal}", flush=True)
                connection.close()
