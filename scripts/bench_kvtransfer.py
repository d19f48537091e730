"""What a link can do for KV transfer, as ratios to the same bytes through plain TCP and memcpy in the same run.

    python -m scripts.bench_kvtransfer                                  two processes of this host
    python -m scripts.bench_kvtransfer --serve HOST:7000 --cluster-key FILE                the decode side of two hosts, and
    python -m scripts.bench_kvtransfer --connect HOST:7000 --host ME --cluster-key FILE    the prefill side

Real pages and slots of DeepSeek-V4-Flash. Times run from the first byte's push until the receiver has checked the last.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
import zmq

from kernels import backend
from kvtransfer.arena import Arena
from kvtransfer.layout import KVLayout
from kvtransfer.places import handoff_places
from kvtransfer.sender import Sender, SendLost, Sent
from kvtransfer.spans import Spans, with_sources
from kvtransfer.transports import BulkOptions, Key, Transport, open_transport
from kvtransfer.transports.bulk import congestion_control
from kvtransfer.transports.faults import Faults, FaultyTransport
from scripts.children import die_with_parent
from scripts.kv_ends import (
    NUM_SLOTS,
    busy_python,
    cpu_seconds,
    flash_layout,
    host_pages,
    is_device,
    is_here,
    no_interrupts,
    prove,
    serve,
)
from scripts.kv_floors import copy_rate, kernel_rates, memcpy_seconds, send
from scripts.kv_peers import LIBRARIES, Peer, require
from scripts.kv_undigested import UndigestedTransport
from wire.curve import ClusterKey, is_loopback, password_of, require_key
from wire.messages import Abort, Failed, Grant, Offer, SamplingParams, Tokens, unpack_ids
from wire.options import option, parse, require_least, require_place, require_whole_numbers
from wire.sockets import Inbox, Outbox, open_context
from wire.worker import SWITCH_INTERVAL_S

MOST_TRIES = 20  # of a hand-off: when so many of them break, by injected faults, the next ones will too
SAY_S = 10.0  # what takes so long is said, and again each so many seconds
KEPT_S = 0.5  # for so long the rounds of --busy are counted, with nothing moving and with hand-offs
PATHS = ("zeromq", "shm", "cuda_ipc", "auto")
INTERRUPTED = 130  # the exit code that shells give Ctrl-C
SILENCE_S = 30  # so long, with no fault injected, ends the benchmark


class BrokenHandOff(RuntimeError):
    """A hand-off did not arrive though no fault was injected."""


@dataclass(frozen=True)
class BenchConfig:
    """KV transfer between two processes or hosts, beside its floors. In the table "-" is what was not measured: the copies
    when arenas are of the CPU, the kernel of cuda_ipc on other paths, control round trips with --repeats 1, and python kept
    without --busy: its threads' rounds a second, prefill's and decode's, while hand-offs follow one another, as shares of those
    right before, with nothing moving."""

    serve: str = option("", help="HOST:PORT: be the decode side, of one prefill side after the other")
    connect: str = option("", help="HOST:PORT of a decode side; empty: start one on this host")
    host: str = option("127.0.0.1", help="address to listen on, at the prefill side")
    advertise: str = option("", help="host name the other side reaches this one by; empty: the address listened on")
    contexts: str = option("1024,8192,32768,131072", help="tokens of KV a request")
    requests: str = option("1,8,64", help="requests at once")
    lanes: str = option("1,2", help="connections")
    paths: str = option("zeromq,shm", help=", ".join(PATHS))
    arena: str = option("cpu,cpu", help="where the two arenas are, prefill's and decode's: cpu, cuda, cuda:0, ...")
    digest_cost: bool = option(
        False, help="instead of the table: what is reached with and without a digest, in turns; CPU or GPUs"
    )
    most_gb: float = option(4.0, help="larger cases are left out")
    sealed: bool = option(False, help="seal bulk with AES-GCM")
    busy: int = option(0, help="threads of CPU-heavy Python in the processes of both engines' owners; see python kept")
    inject: str = option(
        "",
        help="faults at the prefill side with their probabilities, drop, delay, corrupt, stall and cut, and how long a delay or"
        ' a stall takes: "drop=0.01,delay=0.1,seconds=0.2"',
    )
    cluster_key: str = option("", help="file of the cluster's key (scripts/make_keys.py), at both sides; bulk is sealed then")
    insecure: bool = option(False, help="listen beyond this host without a key: whoever can connect is served")
    peers: str = option(
        "", help=f"also the same hand-offs through these libraries' TCP, where they are installed: {','.join(LIBRARIES)}"
    )
    repeats: int = option(5, help="measurements of a case; the median counts; with 1, control round trips are not measured")
    json: str = option("", help="also write the numbers to this file")

    def __post_init__(self) -> None:
        if self.serve and self.connect:
            raise ValueError("--serve is the decode side and --connect the prefill side: give one of them")
        name, host = ("--serve", self.serve.rpartition(":")[0]) if self.serve else ("--host", self.host)
        if self.serve and not (host and _is_port(self.serve.rpartition(":")[2])):
            raise ValueError(f"--serve is {self.serve!r}; it must be HOST:PORT")
        if host in ("0.0.0.0", "::", "*") and not self.advertise:
            raise ValueError(f"{name} {host} also needs --advertise: the name the other side reaches this one by")
        require_key(name, host, self.cluster_key, self.insecure)
        if len(self.devices) != 2:
            raise ValueError(f"--arena is {self.arena!r}; it must name two devices")
        if unknown := [device for device in self.devices if not is_device(device)]:
            raise ValueError(f"--arena {unknown[0]}: the devices are cpu, cuda, cuda:0, ...")
        if self.connect and not _is_port(self.connect.rpartition(":")[2]):
            raise ValueError(f"--connect is {self.connect!r}; it must be HOST:PORT")
        if self.connect and not is_loopback(self.connect.rpartition(":")[0]) and is_loopback(self.advertise or self.host):
            raise ValueError(
                f"--connect {self.connect} is on another host, which cannot reach {self.advertise or self.host}: "
                "--host must be an address of this host that it reaches"
            )
        if unknown := sorted(set(self.paths.split(",")) - set(PATHS)):
            raise ValueError(f"--paths {unknown[0]}: the paths are {', '.join(PATHS)}")
        if "cuda_ipc" in self.paths.split(",") and not all(device.startswith("cuda") for device in self.devices):
            raise ValueError(f"--paths cuda_ipc goes between GPUs; --arena is {self.arena}: give --arena cuda:0,cuda:1")
        for option_name in ("contexts", "requests", "lanes"):
            require_whole_numbers(f"--{option_name}", getattr(self, option_name))
        require_least("--repeats", self.repeats, 1)
        require_least("--busy", self.busy, 0)
        require_place("--json", self.json)
        try:
            Faults.parse(self.inject)
        except ValueError as error:
            raise ValueError(f"--inject {self.inject}: {error}") from None
        self._check_digest_cost()
        here = self.devices[:1] if self.connect else self.devices
        if missing := [device for device in here if not is_here(device)]:
            raise ValueError(f"--arena is {self.arena}: torch finds no {missing[0]} here")
        self._check_peers(host)
        if self.cluster_key:
            ClusterKey.read(self.cluster_key)  # raises for what is none

    def _check_digest_cost(self) -> None:
        if not self.digest_cost:
            return
        if self.sealed or self.cluster_key or self.connect:
            raise ValueError("--digest-cost is of two processes of this host, and bulk that is not sealed")
        if self.busy:
            raise ValueError("--busy adds to the table, and --digest-cost prints another: give one of them")
        if len({device.partition(":")[0] for device in self.devices}) > 1:
            raise ValueError(
                f"--digest-cost is of two arenas of the CPU, or two of GPUs; with one of each, as --arena {self.arena}, a "
                "kernel makes the digest of one end and a core that of the other"
            )

    def _check_peers(self, host: str) -> None:
        if self.peers and self.serve:
            raise ValueError("--peers is not for --serve: give it at the side with --connect, which prints the table")
        if self.peers and self.digest_cost:
            raise ValueError("--peers adds columns to the table, and --digest-cost prints another: give one of them")
        if self.peers and self.arena != "cpu,cpu":
            raise ValueError(f"--peers is for arenas in the memory of the CPU only; --arena is {self.arena}")
        if self.peers and not (is_loopback(host) or self.insecure):
            raise ValueError(f"--peers {self.peers} takes bytes from whoever can connect: it needs --insecure at both sides")
        for name in self.peer_names:
            try:
                require(name)
            except ValueError as error:
                raise ValueError(f"--peers {name}: {error}") from error

    @property
    def devices(self) -> list[str]:
        return self.arena.split(",")

    @property
    def peer_names(self) -> list[str]:
        return self.peers.split(",") if self.peers else []


def _is_port(text: str) -> bool:
    return text.isdigit() and int(text) < 1 << 16


@dataclass
class PeerRow:
    """The same case through another library; `to_it` is our rate to its rate in the same repeat, the median."""

    gb_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_gb: float
    to_it: float


@dataclass
class Row:
    """One case. Ratios are to what was reached a moment before with as many streams, medians: the machine may change."""

    path: str
    lanes: int
    context: int
    requests: int
    gb_per_s: float
    p50_ms: float
    p99_ms: float
    mbytes_a_request: float
    messages_a_request: float
    cpu_s_per_gb: float
    control_p99_ms: float | None  # None: not measured, with one repeat
    to_tcp: float
    to_packed: float
    to_memcpy: float
    tcp_gb_per_s: float
    tcp_cpu_s_per_gb: float
    to_copy: float | None  # of GPU arenas: to a peer copy (cuda_ipc), or to the slower of the copies to and from pinned memory
    kernel_gb_per_s: float | None  # of cuda_ipc: a hand-off's spans moved by its kernel and nothing else
    kernel_to_copy: float | None  # that to a copy of as many bytes in one piece
    peers: dict[str, PeerRow]
    python_kept_prefill: float | None = None  # with --busy: rounds a second of its Python while KV moves, to those before
    python_kept_decode: float | None = None


@dataclass
class DigestRow:
    """One case with and without a digest: medians of the rates, means of the CPU time."""

    path: str
    lanes: int
    context: int
    requests: int
    gb_per_s: float
    bare_gb_per_s: float
    cpu_s_per_gb: float
    bare_cpu_s_per_gb: float


class Source:
    """The prefill side, connected to a target. `close` when done."""

    def __init__(
        self, config: BenchConfig, path: str, lanes: int, num_pages: int, target: tuple[str, int], digest: bool = True
    ) -> None:
        self.layout, self.num_pages, self._target, self._config = flash_layout(), num_pages, target, config
        sealed = config.sealed or bool(config.cluster_key)
        self.arena = _filled(self.layout, num_pages, config.devices[0])
        self.host_pages = host_pages(self.arena)
        options = BulkOptions(path, lanes)
        try:
            self._control = socket.create_connection(target)
        except OSError as error:
            raise SystemExit(f"no decode side answers at {target[0]}:{target[1]}: {error.strerror}") from error
        self._lines = self._control.makefile("r")
        self._control.sendall(prove(config.cluster_key, self._lines.readline().strip()).encode())
        order = {"pages": num_pages, "options": astuple(options), "sealed": sealed, "busy": config.busy}
        order |= {"timeout_s": 1.0 if config.inject else 30.0, "device": config.devices[1], "digest": digest}
        there = self._ask(order)
        open_it = open_transport if digest else UndigestedTransport
        try:
            with no_interrupts():
                real = open_it(self.arena, config.host, config.advertise, options, password_of(config.cluster_key))
        except RuntimeError as error:
            raise SystemExit(f"bench_kvtransfer: {error}") from error
        self.transport: Transport = FaultyTransport(real, Faults.parse(config.inject)) if config.inject else real
        self._context = open_context(config.cluster_key)
        self._inbox, self._outbox = self._new_inbox(), Outbox(self._context)
        self._sender, self._there = Sender(self.arena, self.transport, sealed), there["inbox"]
        self._rid, self.broken, self._injecting = 0, 0, bool(config.inject)
        self.peers: dict[str, Peer] = {}
        self._pushed: dict[Key, tuple[list[int], int]] = {}  # pages and slot of those that wait for a grant
        self._granted: tuple[list[int], int, Grant] | None = None  # the same of the last that has it
        self._tries: dict[Key, int] = {}  # that broke, of the hand-off that each key makes once more
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self.transport.fileno(), zmq.POLLIN)

    def hand_off(self, length: int, requests: int) -> tuple[float, list[float], int]:
        """(seconds for all, seconds of each, bytes of one) of `requests` hand-offs that start at once."""
        begin_s, latencies, num_bytes = time.perf_counter(), [], 0
        wait_ms = 10 if self._injecting else SILENCE_S * 1000  # what a fault holds back leaves when it is polled
        say_s = begin_s + SAY_S
        keys = {self._open(length) for _ in range(requests)}
        while keys:
            ready = self._poller.poll(wait_ms)
            if not ready and not self._injecting:
                raise BrokenHandOff(
                    f"nothing has happened for {SILENCE_S} s: can the decode side reach {self._inbox.address}, and this"
                    f" side the one it listens at, {self._there}? Links: {self.transport.links()}"
                )
            if time.perf_counter() >= say_s:
                missing = f"{len(keys)} of {requests} hand-offs of {length} tokens are not there"
                print(f"after {say_s - begin_s:.0f} s {missing}; broken so far: {self.broken}", file=sys.stderr, flush=True)
                say_s += SAY_S
            for message in self._inbox.drain():
                match message:
                    case Grant():
                        self._sender.granted(message)
                        self._granted = *self._pushed.pop((message.rid, message.attempt)), message
                    case Tokens():
                        latencies.append(time.perf_counter() - begin_s)
                        keys -= {(rid, attempt) for rid, attempt in message.rows}
                    case Failed():
                        keys = self._try_again(keys, (message.rid, message.attempt), message.reason, length)
            for end in self._sender.poll():
                if isinstance(end, SendLost) and not end.closed:  # of that the other side says so itself
                    self._outbox.send(self._there, Abort(*end.key))
                    keys = self._try_again(keys, end.key, end.reason, length)
                if isinstance(end, Sent):
                    num_bytes = end.ready.num_bytes
                    self._outbox.send(self._there, end.ready)
        return time.perf_counter() - begin_s, latencies, num_bytes

    def _try_again(self, keys: set[Key], key: Key, reason: str, length: int) -> set[Key]:
        """A hand-off is broken: without injected faults that ends the benchmark, with them it is made once more."""
        if not self._injecting:
            raise BrokenHandOff(reason)
        self.broken += 1
        tries = self._tries.pop(key, 0) + 1
        if tries >= MOST_TRIES:
            with_so_many = f"with --inject {self._config.inject} nothing can be measured; inject less"
            raise SystemExit(f"a hand-off of {length} tokens broke {tries} times, the last time since {reason}: {with_so_many}")
        again = self._open(length)
        self._tries[again] = tries
        return (keys - {key}) | {again}

    def _open(self, length: int) -> Key:
        self._rid += 1
        key, count = (self._rid, 0), self.layout.pages_for(length)
        pages = random.sample(range(1, self.num_pages + 1), count)
        slot = 1 + self._rid % (NUM_SLOTS - 1)
        self._pushed[key] = pages, slot
        self._sender.open(key)
        self._sender.push(key, pages, slot, length, final=True)
        self._outbox.send(self._there, offer(key, length, self._inbox.address))
        return key

    def floor(self, pages: int, streams: int, packed: bool) -> tuple[float, float]:
        """GB/s and CPU seconds per GB of so many pages through plain TCP."""
        order = random.sample(range(1, self.num_pages + 1), pages)
        cpu_s = self.cpu_seconds()
        there = self._ask({"do": "floor", "order": random.sample(order, pages), "streams": streams, "packed": packed})
        try:
            seconds = send((self._target[0], there["port"]), self.host_pages, order, streams, packed)
        except OSError as error:
            raise SystemExit(f"the decode side has hung up in the middle of a floor: {error}") from error
        gb = pages * self.layout.page_bytes / 1e9
        return gb / seconds, (self.cpu_seconds() - cpu_s) / gb

    def copy_floor(self, path: str) -> float | None:
        """GB/s of what a path between GPUs cannot be faster than; None for arenas of the CPU."""
        if not self.arena.pages.is_cuda:
            return None
        pages = self.arena.pages[: 1 + (256 << 20) // self.layout.page_bytes]
        if path == "cuda_ipc":
            return copy_rate(torch.empty_like(pages, device=self._config.devices[1]), pages)
        pinned = torch.empty(pages.shape, dtype=torch.uint8, pin_memory=True)
        return min(copy_rate(pinned, pages), copy_rate(torch.empty_like(pages), pinned))

    def kernel_floor(self, path: str, length: int) -> tuple[float, float] | None:
        """GB/s of the kernel of cuda_ipc alone, with the spans of the last hand-off, of `length` tokens, and that rate's ratio
        to a copy of as many bytes in one piece; None for other paths."""
        if path != "cuda_ipc":
            return None
        kernel, copy = kernel_rates(self.arena, self._config.devices[1], self.last_spans(length))
        return kernel, kernel / copy

    def last_spans(self, length: int) -> Spans:
        """Of the hand-off that was granted last, of `length` tokens."""
        assert self._granted is not None, "nothing was handed off"
        pages, slot, grant = self._granted
        places = handoff_places(self.layout, unpack_ids(grant.pages), grant.slot, length)
        return with_sources(places, pages + [slot] * (len(places) - len(pages)))

    def open_peer(self, name: str) -> None:
        """A library's ends at both sides, which stand still until their turn."""
        there = self._ask({"do": "peer", "name": name})
        if "error" in there:
            print(f"bench_kvtransfer: the decode side says: {there['error']}", file=sys.stderr)
            raise SystemExit(2)
        self.peers[name] = Peer(name, self.arena, self._config.host, self._config.advertise, (self._target[0], there["port"]))
        self._turn(name, False)

    def peer_hand_off(self, name: str, length: int, requests: int, compare: bool) -> tuple[float, list[float], int, float]:
        """As `hand_off`, through another library, and the CPU seconds of both ends; what it warms up with is compared."""
        self._turn(name, True)
        self.peers[name].hand_off(length if compare else 256, 1, compare)
        cpu_s = self.cpu_seconds()
        done = self.peers[name].hand_off(length, requests, False)
        cpu_s = self.cpu_seconds() - cpu_s
        self._turn(name, False)
        return *done, cpu_s

    def cpu_seconds(self) -> float:
        """Of both ends, engines included."""
        spent: float = self._ask({"do": "cpu"})["cpu_s"] + cpu_seconds()
        return spent

    def python_kept(self, rounds: Callable[[], int], length: int, requests: int) -> tuple[float, float]:
        """The shares of its rounds a second, at prefill and at decode, that the Python of --busy keeps while such hand-offs
        follow one another. `rounds`: of prefill's so far."""
        before = self._rounds(rounds)
        time.sleep(KEPT_S)
        between = self._rounds(rounds)
        end_s = time.perf_counter() + KEPT_S
        while time.perf_counter() < end_s:
            self.hand_off(length, requests)
        still, moving = _round_rates(before, between), _round_rates(between, self._rounds(rounds))
        return moving[0] / still[0], moving[1] / still[1]

    def _rounds(self, rounds: Callable[[], int]) -> list[tuple[int, float]]:
        """At prefill and at decode: so many so far, and when that was, in seconds on a clock of its own."""
        there = self._ask({"do": "rounds"})
        return [(rounds(), time.perf_counter()), (there["rounds"], there["at_s"])]

    def round_trips(self, stop: threading.Event) -> list[float]:
        """Seconds of control round trips, Offer to Grant, a hundred a second until `stop`, but one at least."""
        inbox, outbox, trips = self._new_inbox(), Outbox(self._context), []
        for rid in itertools.count(1 << 40):
            begin_s = time.perf_counter()
            outbox.send(self._there, offer((rid, 0), -1, inbox.address))
            if inbox.wait(5.0):
                list(inbox.drain())
                trips.append(time.perf_counter() - begin_s)
            if stop.wait(0.01):
                break
        inbox.close()
        outbox.close()
        return trips

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.transport.close()
        self._lines.close()  # the other side hears of it when both are
        self._control.close()
        self._inbox.close()
        self._outbox.close()
        self._context.destroy(linger=0)

    def _turn(self, name: str, begins: bool) -> None:
        self._ask({"do": "turn", "name": name, "begins": begins})
        self.peers[name].turn(begins)

    def _new_inbox(self) -> Inbox:
        """Where the other side, on whichever host, reaches us."""
        return Inbox(self._context, self._config.host, 0, self._config.advertise)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        line = ""
        with contextlib.suppress(ConnectionError):
            self._control.sendall(json.dumps(order).encode() + b"\n")
            line = self._lines.readline()
        if not line:
            raise SystemExit("the decode side has hung up: it has another --cluster-key, or has ended; see what it prints")
        reply: dict[str, Any] = json.loads(line)
        return reply


def offer(key: Key, length: int, inbox: str) -> Offer:
    return Offer(*key, b"", length, (0,), SamplingParams(1, 0), inbox, "", "", 60.0)


def _filled(layout: KVLayout, num_pages: int, device: str) -> Arena:
    arena = Arena(layout, num_pages + 1, NUM_SLOTS, device)
    backend.choose(arena.pages.device)
    arena.pages.random_(0, 256)
    arena.slots.random_(0, 256)
    return arena


def measure(source: Source, path: str, lanes: int, context: int, requests: int, repeats: int) -> Row:
    """One case, its floors measured right before and after."""
    pages = min(source.num_pages, max(64, source.layout.pages_for(context) * requests))
    tcp, packed, memcpy, rates, p50, p99 = [], [], [], [], [], []
    peers: dict[str, list[PeerRow]] = {name: [] for name in source.peers}
    places = random.sample(range(1, source.num_pages + 1), source.num_pages)
    half = source.num_pages // 2
    view = source.host_pages
    stop, trips = threading.Event(), []
    source.hand_off(256, 1)  # greets the peer and tests the link
    cpu_s = gb = 0.0
    messages = source.transport.counters()["chunks_sent"]
    for number in range(repeats):
        tcp.append(source.floor(pages, lanes, packed=False))
        packed.append(source.floor(pages, lanes, packed=True)[0])
        memcpy.append(
            half * source.layout.page_bytes / 1e9 / memcpy_seconds(view, view, places[:half], places[half : 2 * half])
        )
        stop.clear()
        pinger = threading.Thread(target=lambda: trips.extend(source.round_trips(stop)))
        before_s = source.cpu_seconds()
        if number % 2:  # control messages beside the bulk; in the other repeats nothing but bulk costs CPU
            pinger.start()
        try:
            seconds, latencies, num_bytes = source.hand_off(context, requests)
        finally:
            stop.set()
            if number % 2:
                pinger.join()
        if not number % 2:
            cpu_s += source.cpu_seconds() - before_s
            gb += requests * num_bytes / 1e9
        rates.append(requests * num_bytes / 1e9 / seconds)
        p50.append(statistics.median(latencies) * 1e3)
        p99.append(_p99(latencies) * 1e3)
        for name, rows in peers.items():
            rows.append(_peer_row(source, name, context, requests, rates[-1], compare=not number))
    rate = statistics.median(rates)
    to_tcp, to_packed, to_memcpy = (_ratio(rates, floors) for floors in ([rate for rate, _ in tcp], packed, memcpy))
    (link,) = source.transport.links().values()
    copy = source.copy_floor(link.path)
    kernel, kernel_to_copy = source.kernel_floor(link.path, context) or (None, None)
    return Row(
        link.path, lanes, context, requests, rate,
        statistics.median(p50), statistics.median(p99), num_bytes / 1e6,
        (source.transport.counters()["chunks_sent"] - messages) / repeats / requests, cpu_s / gb,
        _p99(trips) * 1e3 if trips else None,
        to_tcp, to_packed, to_memcpy,
        statistics.median(rate for rate, _ in tcp), statistics.median(cpu for _, cpu in tcp), rate / copy if copy else None,
        kernel, kernel_to_copy,
        {name: _median_row(rows) for name, rows in peers.items()},
    )  # fmt: skip


def _peer_row(source: Source, name: str, context: int, requests: int, our_rate: float, compare: bool) -> PeerRow:
    seconds, latencies, num_bytes, cpu_s = source.peer_hand_off(name, context, requests, compare)
    gb = requests * num_bytes / 1e9
    return PeerRow(gb / seconds, statistics.median(latencies) * 1e3, _p99(latencies) * 1e3, cpu_s / gb, our_rate * seconds / gb)


def _median_row(rows: Sequence[PeerRow]) -> PeerRow:
    return PeerRow(*map(statistics.median, zip(*map(astuple, rows), strict=True)))


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


def _round_rates(begin: Sequence[tuple[int, float]], end: Sequence[tuple[int, float]]) -> list[float]:
    return [(last - first) / (last_s - first_s) for (first, first_s), (last, last_s) in zip(begin, end, strict=True)]


def _ratio(rates: Sequence[float], floors: Sequence[float]) -> float:
    return statistics.median(rate / floor for rate, floor in zip(rates, floors, strict=True))


def run(config: BenchConfig, show: bool = True) -> list[Row]:
    """Every case of `config`, less those of paths on which hand-offs break, as shared memory of two hosts: they are said."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    with _target(config) as address:
        first, *more = [int(lanes) for lanes in config.lanes.split(",")]
        for path in config.paths.split(","):
            for lanes in [first, *more] if path == "zeromq" else [first]:  # the others have one connection
                try:
                    rows += _run_path(config, path, lanes, address, show)
                except BrokenHandOff as error:
                    print(f"bench_kvtransfer: --paths {path}: {error}", file=sys.stderr)
    if not rows:
        raise SystemExit(1)
    return rows


@contextlib.contextmanager
def _target(config: BenchConfig) -> Iterator[tuple[str, int]]:
    """The decode side's address; without --connect it is a process of our own."""
    if config.connect:
        host, port = config.connect.rsplit(":", 1)
        yield host, int(port)
        return
    key = ["--cluster-key", config.cluster_key] if config.cluster_key else []
    command = [sys.executable, "-m", "scripts.bench_kvtransfer", "--serve", "127.0.0.1:0", *key]
    with contextlib.ExitStack() as stack:
        with no_interrupts():
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
            stack.enter_context(child)
            stack.callback(child.terminate)
        assert child.stdout is not None
        host, port = child.stdout.readline().split()[1].rsplit(":", 1)
        yield host, int(port)


def digest_cost(config: BenchConfig) -> list[DigestRow]:
    """The same hand-offs with and without a digest; prints a line a case, and as `run` on which paths hand-offs break."""
    rows: list[DigestRow] = []
    torch.set_num_threads(1)
    print("path     context  n   GB/s with, without  cost: of the rate, CPU s/GB")
    for path in config.paths.split(","):
        try:
            rows += _digest_costs(config, path)
        except BrokenHandOff as error:
            print(f"bench_kvtransfer: --paths {path}: {error}", file=sys.stderr)
    if not rows:
        raise SystemExit(1)
    return rows


def _digest_costs(config: BenchConfig, path: str) -> list[DigestRow]:
    """In turns, so that both meet the same machine."""
    rows = []
    contexts, requests = ([int(number) for number in text.split(",")] for text in (config.contexts, config.requests))
    num_pages = max(128, flash_layout().pages_for(max(contexts)))
    lanes = int(config.lanes.split(",")[0])
    with contextlib.ExitStack() as stack:
        sources = []
        for digest in (True, False):
            target = stack.enter_context(_target(config))
            source = Source(config, path, lanes, num_pages, target, digest)
            sources.append(stack.enter_context(contextlib.closing(source)))
        for context, count in itertools.product(contexts, requests):
            rates: list[list[float]] = [[], []]
            cpu_s: list[list[float]] = [[], []]
            for number in range(2 * config.repeats + 2):
                which = number % 2 ^ number // 2 % 2  # with, without, without, with
                before_s = sources[which].cpu_seconds()
                seconds, _, num_bytes = sources[which].hand_off(context, count)
                gb = count * num_bytes / 1e9
                if number > 1:  # the first of each greets and touches memory
                    rates[which].append(gb / seconds)
                    cpu_s[which].append((sources[which].cpu_seconds() - before_s) / gb)
            taken = "/".join(sorted({link.path for source in sources for link in source.transport.links().values()}))
            rows.append(DigestRow(taken, lanes, context, count, *map(statistics.median, rates), *map(statistics.mean, cpu_s)))
            print(_digest_line(rows[-1]), flush=True)
    return rows


def _digest_line(row: DigestRow) -> str:
    rate = f"{row.gb_per_s:.2f}, {row.bare_gb_per_s:.2f}  {1 - row.gb_per_s / row.bare_gb_per_s:.1%}"
    return f"{row.path:8} {row.context:7} {row.requests:2}   {rate}, {row.cpu_s_per_gb - row.bare_cpu_s_per_gb:.3f}"


def _run_path(config: BenchConfig, path: str, lanes: int, target: tuple[str, int], show: bool) -> list[Row]:
    contexts = [int(context) for context in config.contexts.split(",")]
    layout, rows = flash_layout(), []
    num_pages = max(128, layout.pages_for(max(contexts)))
    with contextlib.closing(Source(config, path, lanes, num_pages, target)) as source, busy_python(config.busy) as rounds:
        for name in config.peer_names:
            source.open_peer(name)
        for context in contexts:
            for requests in map(int, config.requests.split(",")):
                if layout.pages_for(context) * requests * layout.page_bytes / 1e9 <= config.most_gb:
                    row = measure(source, path, lanes, context, requests, config.repeats)
                    if config.busy:
                        kept = [source.python_kept(rounds, context, requests) for _ in range(config.repeats)]
                        row.python_kept_prefill, row.python_kept_decode = map(statistics.median, zip(*kept, strict=True))
                    rows.append(row)
                    if show:
                        print(line(rows[-1]), flush=True)
        if config.inject:
            counters = source.transport.counters()
            injected = [f"{count} {name}" for name, count in counters.items() if name.startswith("injected_") and count]
            print(f"{', '.join(injected) or 'no fault'}; {source.broken} hand-offs were broken and made again", flush=True)
    return rows


HEADER = (
    "path     lanes  context  n   GB/s  xTCP  xpacked  xmemcpy  xcopy  kernel    p50 ms    p99 ms  MB/req  msg/req"
    "  CPU s/GB (TCP)  ctrl p99 ms  python kept"
)


def header(peers: Sequence[str]) -> str:
    return HEADER + "".join(f"  {'x' + name:>9} (GB/s, CPU s/GB)" for name in peers)


def line(row: Row) -> str:
    """What was not measured is a "-"."""
    peers = "".join(f"  {peer.to_it:9.2f} ({peer.gb_per_s:4.2f},     {peer.cpu_s_per_gb:4.2f})" for peer in row.peers.values())
    unsure = (row.to_copy, row.kernel_to_copy, row.control_p99_ms)
    to_copy, kernel, control = ("-" if number is None else f"{number:.2f}" for number in unsure)
    kept = "-" if row.python_kept_prefill is None else f"{row.python_kept_prefill:.2f}, {row.python_kept_decode:.2f}"
    return (
        f"{row.path:8} {row.lanes:5}  {row.context:7} {row.requests:2}  {row.gb_per_s:5.2f}  {row.to_tcp:4.2f}"
        f"  {row.to_packed:7.2f}  {row.to_memcpy:7.2f}  {to_copy:>5}  {kernel:>6}  {row.p50_ms:8.1f}  {row.p99_ms:8.1f}"
        f"  {row.mbytes_a_request:6.1f}  {row.messages_a_request:7.1f}"
        f"     {row.cpu_s_per_gb:4.2f} ({row.tcp_cpu_s_per_gb:4.2f})  {control:>11}  {kept:>11}{peers}"
    )


def main() -> None:
    config = parse(BenchConfig, "bench_kvtransfer")
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as workers have it
    log = logging.getLogger("kvtransfer")
    log.addFilter(_not_of_pacing)
    try:
        _main(config)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        log.removeFilter(_not_of_pacing)


def _not_of_pacing(record: logging.LogRecord) -> bool:
    """Every transport warns of BBR; here a line says once which congestion control there is."""
    return "BBR" not in record.getMessage()


def _main(config: BenchConfig) -> None:
    control = f"TCP congestion control here: {congestion_control()} (within a host reno, where it may be chosen)"
    if config.serve:
        host, port = config.serve.rsplit(":", 1)
        if not is_loopback(host):  # there the other side says so
            print(control, file=sys.stderr, flush=True)
        try:
            serve(flash_layout(), host, int(port), config.advertise, config.cluster_key, config.insecure)
        except OSError as error:
            sys.exit(f"bench_kvtransfer: --serve {config.serve}: {error}")
        return
    print(control, flush=True)
    rows: Sequence[Row | DigestRow]
    if config.digest_cost:
        rows = digest_cost(config)
    else:
        print(header(config.peer_names), flush=True)
        rows = run(config)
    if config.json:
        with open(config.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
