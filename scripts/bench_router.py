"""What the router costs, with scripted workers and no model, as ratios to peers measured in the same run.

    python -m scripts.bench_router [--json FILE] [--seconds 4]

Router and workers are separate processes; the load generator is this process (uvloop protocols). CPU is read from
/proc, so it hardly moves with what else the machine does; latencies do. Peers: a bare uvloop Protocol server with a
fixed answer, and nginx `return 200` when it is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop
import zmq

from tests.scripted import Script, ScriptedDecode, ScriptedPrefill
from wire.messages import Prefill, SamplingParams, Tokens, pack_ids
from wire.options import option, parse, require_least, require_place
from wire.sockets import Inbox, Outbox

STREAMS, TICK_S, CONNECTIONS = 256, 0.02, 64
ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "tests" / "data" / "tokenizer"
ANSWER = json.dumps({"id": "cmpl-0", "choices": [{"index": 0, "text": "x" * 60}], "usage": {"prompt_tokens": 8}})


@dataclass(frozen=True)
class BenchConfig:
    """Router benchmark with scripted workers."""

    json: str = option("", help="also write the numbers to this file")
    seconds: float = option(4.0, help="length of each load, 1 at least: CPU time comes in steps of 10 ms")

    def __post_init__(self) -> None:
        require_least("--seconds", self.seconds, 1)
        require_place("--json", self.json)


@dataclass
class Row:
    """One line of the table. `limit` 0: a peer, for comparison only."""

    name: str
    value: float
    unit: str
    limit: float = 0.0
    least: bool = False  # the limit is a minimum
    ratio: float = 0.0  # to the peer
    peer: str = ""

    @property
    def verdict(self) -> str:
        if not self.limit:
            return ""
        return "ok" if (self.value >= self.limit if self.least else self.value <= self.limit) else "MISSED"


# ---- processes ----


def cpu_s(pid: int) -> float:
    """User + system CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Child:
    """A process of ours, and the lines it prints."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, *arguments: str) -> Child:
        process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        return cls(process)

    async def line(self, pattern: str) -> str:
        """The first group of the next printed line that matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(20):
            while data := await self.process.stdout.readline():
                if match := re.search(pattern, data.decode()):
                    return match.group(1)
        raise RuntimeError(f"{self.pid} ended without printing {pattern}")

    async def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
            await self.process.wait()


@dataclass
class Cluster:
    router: Child
    inbox: str
    port: int

    async def workers(self, tick_s: float, name: str = "w", role: str = "both") -> Child:
        child = await Child.start(
            sys.executable, "-m", "tests.scripted", "--router", self.inbox, "--tick-s", str(tick_s), "--name", name,
            "--role", role,
        )  # fmt: skip
        await child.line("serving (.*)")
        return child


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    router = await Child.start(
        sys.executable, "-m", "router", "--port", "0", "--tokenizer", str(TOKENIZER), "--model-name", "m", "--max-requests",
        "100000", "--recovery-wait-s", "0.3",
    )  # fmt: skip
    inbox = await router.line(r"inbox (\S+)")
    first = await Child.start(sys.executable, "-m", "tests.scripted", "--router", inbox, "--name", "first")
    port = int(await router.line(r"ready http://\S+:(\d+)"))
    await first.stop()
    try:
        yield Cluster(router, inbox, port)
    finally:
        await router.stop()


# ---- load ----


def http_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Closed(asyncio.Protocol):
    """One keep-alive connection that sends the next request as soon as an answer is complete."""

    def __init__(self, request: bytes, finished: Callable[[float], bool]) -> None:
        self._request = request
        self._finished = finished  # takes the latency, says whether to go on
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not instances of it
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(self._data.decode())
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length is None or len(body) < int(length.group(1)):
            return
        self._data = b""
        if self._finished(time.perf_counter() - self._sent):
            self._send()
        else:
            self._transport.close()


async def closed_load(port: int, request: bytes, connections: int, seconds: float) -> tuple[int, list[float]]:
    """(answers, latencies) of `connections` clients that never pause."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds
    open_count, over = connections, asyncio.get_running_loop().create_future()

    def finished(latency: float) -> bool:
        nonlocal open_count
        latencies.append(latency)
        if time.perf_counter() < until:
            return True
        open_count -= 1
        if not open_count:
            over.set_result(None)
        return False

    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Closed(request, finished), "127.0.0.1", port)
    await over
    return len(latencies), latencies


class Reader(asyncio.Protocol):
    """One stream; counts events and keeps the time of the first and the last byte."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.events = 0
        self.tail = b""
        self.first_s = 0.0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.sent_s = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.first_s:
            self.first_s = time.perf_counter()
        self.events += data.count(b"data: ")
        self.tail = (self.tail + data)[-400:]
        if data.endswith(b"0\r\n\r\n") and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def open_stream(port: int, max_tokens: int) -> Reader:
    request = http_request(
        {"model": "m", "prompt": "The story of", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    )
    _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(request), "127.0.0.1", port)
    return reader


# ---- what is measured ----


async def streaming(bench: Cluster, seconds: float) -> list[Row]:
    workers = await bench.workers(TICK_S)
    await asyncio.sleep(0.3)
    readers = await asyncio.gather(*(open_stream(bench.port, 4000) for _ in range(STREAMS)))
    await asyncio.sleep(1.0)
    events, cpu, start = sum(r.events for r in readers), cpu_s(bench.router.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    events, cpu = sum(r.events for r in readers) - events, cpu_s(bench.router.pid) - cpu
    rate = events / (time.perf_counter() - start)
    for reader in readers:
        reader.transport.close()
    await workers.stop()
    floor = await streaming_floor(seconds)
    cost = cpu / events * 1e6
    return [
        Row("event CPU, 256 streams x 20 ms", cost, "us", 20, ratio=cost / floor, peer="uvloop Protocol"),
        Row("  events a second", rate, "/s"),
        Row("  bare uvloop Protocol, same events", floor, "us"),
    ]


async def throughput(bench: Cluster, seconds: float) -> list[Row]:
    workers = await bench.workers(0.0)
    await asyncio.sleep(0.3)
    request = http_request({"model": "m", "prompt": "The story of", "max_tokens": 1, "temperature": 0})
    await closed_load(bench.port, request, CONNECTIONS, 0.5)
    cpu = cpu_s(bench.router.pid)
    count, latencies = await closed_load(bench.port, request, CONNECTIONS, seconds)
    cost = (cpu_s(bench.router.pid) - cpu) / count * 1e6
    rows = [
        Row("request CPU, 64 connections", cost, "us", 130),
        Row("requests a second, 64 connections", count / seconds, "/s", 5000, least=True),
        Row("  p50 latency", statistics.median(latencies) * 1e3, "ms"),
        Row("  p99 latency", sorted(latencies)[int(len(latencies) * 0.99)] * 1e3, "ms"),
    ]
    cpu = cpu_s(bench.router.pid)
    front_count, _ = await closed_load(bench.port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", CONNECTIONS, seconds / 2)
    front = (cpu_s(bench.router.pid) - cpu) / front_count * 1e6
    rows.append(Row("  its HTTP front alone (GET /v1/models)", front, "us", ratio=cost / front, peer="router / it"))
    await workers.stop()
    for name, peer in (("uvloop Protocol", fixed_server), ("nginx return 200", nginx)):
        async with peer() as found:
            if found is None:
                continue
            pid, port = found
            cpu = cpu_s(pid)
            peer_count, _ = await closed_load(port, request, CONNECTIONS, seconds / 2)
            peer_cost = (cpu_s(pid) - cpu) / peer_count * 1e6
            rows.append(Row(f"  {name}: CPU a request", peer_cost, "us", ratio=cost / max(peer_cost, 0.1), peer="router / it"))
            rows.append(Row(f"  {name}: requests a second", peer_count / seconds * 2, "/s"))
    return rows


class Serial(asyncio.Protocol):
    """One keep-alive connection with one stream after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    async def first_event_s(self, request: bytes) -> float:
        """Seconds until the first event of a stream, which is read to its end."""
        self._first_s = 0.0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self.transport.write(request)
        await self._over
        return self._first_s - start

    def data_received(self, data: bytes) -> None:
        if not self._first_s and b"data: " in data:
            self._first_s = time.perf_counter()
        if data.endswith(b"0\r\n\r\n"):
            self._over.set_result(None)


async def first_token(bench: Cluster, count: int = 300) -> list[Row]:
    """Added time to first token at concurrency 1: through the router, less the same workers asked directly."""
    workers = await bench.workers(0.0)
    await asyncio.sleep(0.3)
    request = http_request({"model": "m", "prompt": "The story of", "max_tokens": 1, "stream": True})
    _, client = await asyncio.get_running_loop().create_connection(Serial, "127.0.0.1", bench.port)
    times = [await client.first_event_s(request) for _ in range(count)]
    client.transport.close()
    await workers.stop()
    direct = await direct_token(count)
    added = (statistics.median(times) - direct) * 1e3
    slow = sum(1 for each in times if each > 0.035) / count * 100
    return [
        Row("added TTFT, concurrency 1, p50", added, "ms", 0.5),
        Row("  p99 through the router", sorted(times)[int(count * 0.99)] * 1e3, "ms"),
        Row("  the same workers asked directly, p50", direct * 1e3, "ms"),
        Row("  share of 40 ms steps", slow, "%"),
    ]


async def direct_token(count: int) -> float:
    """Median seconds from a Prefill to its Tokens, with no router between."""
    context: zmq.Context[Any] = zmq.Context()
    inbox, outbox = Inbox(context), Outbox(context)
    child = await Child.start(sys.executable, "-m", "tests.scripted", "--router", inbox.address, "--name", "direct")
    prefill, decode = [(await child.line("serving (.*)")).split()[1] for _ in range(2)]
    got = asyncio.Event()
    inbox.attach(asyncio.get_running_loop(), lambda message: got.set() if isinstance(message, Tokens) else None)
    times = []
    for rid in range(count):
        got.clear()
        start = time.perf_counter()
        sampling = SamplingParams(max_tokens=1, seed=0)
        outbox.send(prefill, Prefill(rid, 0, pack_ids([2, 3]), 2, (0,), sampling, decode, inbox.address, 10.0))
        await got.wait()
        times.append(time.perf_counter() - start)
    await child.stop()
    inbox.close()
    outbox.close()
    context.destroy(linger=0)
    return statistics.median(times)


async def failures(bench: Cluster) -> list[Row]:
    rows = [*await disconnects(bench), await all_down(bench), await recovery(bench)]
    return [*rows, *await worker_lost(bench)]


async def disconnects(bench: Cluster, count: int = 10) -> list[Row]:
    """Client gone -> Abort at both workers. The workers live here, so both clocks are one."""
    prefill = ScriptedPrefill(bench.inbox, "here-p")
    decode = ScriptedDecode(bench.inbox, "here-d", Script(tick_s=TICK_S))
    prefill.start()
    decode.start()
    await asyncio.sleep(0.3)
    times = []
    for _ in range(count):
        reader = await open_stream(bench.port, 4000)
        while not reader.events:
            await asyncio.sleep(0.005)
        prefill.aborted.clear()
        decode.aborted.clear()
        gone = time.monotonic()
        reader.transport.abort()
        while not (prefill.aborted and decode.aborted):
            await asyncio.sleep(0.001)
        times.append(max(prefill.aborted[0][1], decode.aborted[0][1]) - gone)
    await prefill.stop()
    await decode.stop()
    return [Row("disconnect -> Abort on both, worst of 10", max(times) * 1e3, "ms", 50)]


async def all_down(bench: Cluster) -> Row:
    await asyncio.sleep(0.2)
    times = []
    for _ in range(10):
        status, seconds, head = await one_request(bench.port)
        if status != 503 or b"Retry-After" not in head:
            raise RuntimeError(f"no workers: {status} {head!r}")
        times.append(seconds)
    return Row("no workers: 503 with Retry-After, worst of 10", max(times) * 1e3, "ms", 10)


async def recovery(bench: Cluster) -> Row:
    """From the first heartbeat of workers that came back to an answer with 200."""
    prefill, decode = ScriptedPrefill(bench.inbox, "back-p"), ScriptedDecode(bench.inbox, "back-d")
    start = time.perf_counter()
    prefill.start()
    decode.start()
    while (await one_request(bench.port))[0] != 200:
        await asyncio.sleep(0.005)
    seconds = time.perf_counter() - start
    await prefill.stop()
    await decode.stop()
    return Row("serving again after workers return", seconds * 1e3, "ms", 1000)


async def worker_lost(bench: Cluster) -> list[Row]:
    """SIGKILL in mid-stream: with a second worker the stream goes on, without one it ends with an error event."""
    rest = await bench.workers(TICK_S, "stays")
    lost = await bench.workers(TICK_S, "lost", "decode")
    await asyncio.sleep(0.3)
    readers = [await open_stream(bench.port, 400) for _ in range(4)]
    await asyncio.sleep(0.5)
    await lost.stop(signal.SIGKILL)
    await asyncio.gather(*(reader.over for reader in readers))
    whole = sum(1 for reader in readers if b"[DONE]" in reader.tail and reader.events == 401)
    reader = await open_stream(bench.port, 4000)
    await asyncio.sleep(0.3)
    start = time.perf_counter()
    await rest.stop(signal.SIGKILL)
    await reader.over
    clean = b'"error"' in reader.tail and reader.tail.endswith(b"0\r\n\r\n") and b"[DONE]" not in reader.tail
    return [
        Row("worker killed, another there: streams complete of 4", whole, "", 4, least=True),
        Row("last worker killed: error event and clean end", float(clean), "", 1, least=True),
        Row("  after (dead-after 3 s + recovery wait 0.3 s)", time.perf_counter() - start, "s"),
    ]


async def one_request(port: int) -> tuple[int, float, bytes]:
    """(status, seconds, head)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = time.perf_counter()
    writer.write(http_request({"model": "m", "prompt": "x", "max_tokens": 1}))
    head = await reader.readuntil(b"\r\n\r\n")
    seconds = time.perf_counter() - start
    writer.close()
    return int(head.split()[1]), seconds, head


# ---- peers ----

FIXED_SERVER = """
import asyncio, sys, uvloop
body = sys.argv[1].encode(); tick = float(sys.argv[2])
answer = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n%s" % (len(body), body)
event = b'%x\\r\\n%s\\r\\n' % (len(body), body)
streams = set()
class Server(asyncio.Protocol):
    def connection_made(self, transport): self.transport = transport
    def connection_lost(self, error): streams.discard(self)
    def data_received(self, data):
        if tick: self.transport.write(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"); streams.add(self)
        else: self.transport.write(answer)
async def main():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=4096)
    print("port", server.sockets[0].getsockname()[1], flush=True)
    while True:
        await asyncio.sleep(tick or 3600)
        for stream in list(streams): stream.transport.write(event)
uvloop.run(main())
"""


@asynccontextmanager
async def fixed_server(body: str = ANSWER, tick_s: float = 0.0) -> AsyncIterator[tuple[int, int] | None]:
    child = await Child.start(sys.executable, "-c", FIXED_SERVER, body, str(tick_s))
    try:
        yield child.pid, int(await child.line(r"port (\d+)"))
    finally:
        await child.stop(signal.SIGKILL)


async def streaming_floor(seconds: float) -> float:
    """CPU us per event of a bare Protocol server that writes a fixed event of the same size to as many streams."""
    event = (
        "data: " + json.dumps({"id": "cmpl-" + "0" * 24, "choices": [{"index": 0, "text": "the"}], "pad": "x" * 90}) + "\n\n"
    )
    async with fixed_server(event, TICK_S) as found:
        assert found is not None
        pid, port = found
        readers = await asyncio.gather(*(open_stream(port, 1) for _ in range(STREAMS)))
        await asyncio.sleep(0.5)
        events, cpu = sum(r.events for r in readers), cpu_s(pid)
        await asyncio.sleep(seconds)
        cost = (cpu_s(pid) - cpu) / (sum(r.events for r in readers) - events) * 1e6
        for reader in readers:
            reader.transport.close()
    return cost


@asynccontextmanager
async def nginx() -> AsyncIterator[tuple[int, int] | None]:
    """One nginx worker process that returns a fixed body; None when nginx is not installed."""
    program = shutil.which("nginx")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        Path(folder, "nginx.conf").write_text(
            f"pid {folder}/pid; error_log {folder}/error; master_process off; daemon off; worker_processes 1;"
            f"events {{ worker_connections 1024; }} http {{ access_log off; keepalive_requests 100000000; {paths}"
            f"server {{ listen 127.0.0.1:{port}; location / {{ default_type application/json; return 200 '{ANSWER}'; }} }} }}"
        )
        process = subprocess.Popen([program, "-p", folder, "-c", f"{folder}/nginx.conf"], stderr=subprocess.DEVNULL)
        try:
            await listening(port)
            yield process.pid, port
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def listening(port: int) -> None:
    for _ in range(200):
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise RuntimeError(f"nothing listens on {port}")


# ---- report ----


async def run(seconds: float) -> list[Row]:
    rows: list[Row] = []
    async with cluster() as bench:
        rows += await streaming(bench, seconds)
        rows += await throughput(bench, seconds)
        rows += await first_token(bench)
        rows += await failures(bench)
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'what':<52} {'value':>10} {'':<3} {'limit':>8}  {'':<6} ratio"]
    for row in rows:
        limit = f"{'>=' if row.least else '<='} {row.limit:g}" if row.limit else ""
        ratio = f"{row.ratio:.1f} x {row.peer}" if row.peer else ""
        lines.append(f"{row.name:<52} {row.value:>10,.2f} {row.unit:<3} {limit:>8}  {row.verdict:<6} {ratio}".rstrip())
    return "\n".join(lines)


def main() -> None:
    config = parse(BenchConfig, "python -m scripts.bench_router")
    rows = uvloop.run(run(config.seconds))
    print(table(rows))
    if config.json:
        Path(config.json).write_text(json.dumps([vars(row) | {"verdict": row.verdict} for row in rows], indent=1) + "\n")
    sys.exit(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
