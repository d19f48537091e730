"""The router over real sockets with scripted workers: health, losses, disconnects, slow readers, junk, bad HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
import uvloop
import zmq
from aiohttp import HttpVersion11

from router.stream import EventStream, Reply
from tests.scripted import Script
from tests.scripted_cluster import TOKENIZER, ScriptedCluster, events, scripted_cluster, until
from wire.timeline import read_moment

ROOT = Path(__file__).resolve().parent.parent
LETTERS = list(range(66, 92))
SLOW = Script(ids=LETTERS, tick_s=0.01)
BODY = {"prompt": "x", "max_tokens": 5}


def check(test: Callable[[ScriptedCluster], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with scripted_cluster(**options) as cluster:
            await test(cluster)

    uvloop.run(run())


def letters(count: int) -> str:
    return "".join(chr(97 + i % 26) for i in range(count))


def is_idle(cluster: ScriptedCluster) -> bool:
    """Nothing is in flight and nothing is accounted to a worker, of a probe neither."""
    dispatcher = cluster.router.dispatcher
    loads = [(w.cache_tokens.total, w.prompt_tokens.total, w.sequences.total) for w in dispatcher.pool.workers()]
    return dispatcher.in_flight == 0 and all(load == (0, 0, 0) for load in loads)


async def health(cluster: ScriptedCluster) -> tuple[int, dict[str, Any]]:
    async with cluster.http.get("/health") as response:
        return response.status, await response.json()


def text_of(parsed: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in parsed if "choices" in event)


# ---- health ----


def test_health_is_red_until_a_real_pair_has_served_a_probe() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        status, report = await health(cluster)
        assert status == 503 and report["reason"] == "no live prefill and no live decode worker"
        cluster.add_decode().hold = True
        await until(lambda: cluster.router.dispatcher.pool.workers())
        assert "no live prefill worker" in (await health(cluster))[1]["reason"]
        prefill = cluster.add_prefill()
        await until(lambda: prefill.seen)
        status, report = await health(cluster)
        assert status == 503 and "no request has been served yet" in report["reason"]
        probe = prefill.seen[0]
        assert len(probe.tokens) // 4 >= 3 and probe.sampling.max_tokens == 1
        cluster.decodes[0].hold = False
        cluster.decodes[0].step()
        await until(lambda: cluster.router.health.ready.is_set())
        status, report = await health(cluster)
        assert status == 200 and report["reason"] is None and len(report["workers"]) == 2

    check(test, prefills=0, decodes=0)


def test_probes_go_round_over_all_workers() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        workers = cluster.router.dispatcher.pool.workers()
        await until(lambda: all(worker.proven_s > 0 for worker in workers))
        seen = [len(prefill.seen) for prefill in cluster.prefills]
        await until(lambda: all(len(p.seen) > before for p, before in zip(cluster.prefills, seen, strict=True)))

    check(test, prefills=2, decodes=3, probe_every_s=0.2)


def test_a_blocked_data_port_turns_health_red_and_back() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        cluster.prefills[0].blocked = True
        await until(lambda: cluster.router.health.reason())
        status, report = await health(cluster)
        assert status == 503 and "no hand-off" in report["reason"]
        cluster.prefills[0].fail = [("transfer", True)]
        cluster.prefills[0].blocked = False
        await until(lambda: not cluster.router.health.reason())

    check(test, probe_every_s=0.2, health_window_s=0.5)


def test_a_full_pool_that_makes_tokens_is_healthy() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        decode = cluster.decodes[0]
        stream = asyncio.create_task(cluster.stream("completions", {"prompt": "x", "max_tokens": 500}))
        await until(lambda: decode.running)
        cluster.prefills[0].blocked = True  # nothing new gets in: probes wait
        decode.load |= {"running": 1, "max_batch": 1}
        decode.announce()
        await until(lambda: cluster.router.dispatcher.pool.workers("decode")[0].has_no_slot)
        dispatcher = cluster.router.dispatcher
        await until(lambda: time.monotonic() - dispatcher.served_s > 1.2)
        while (await health(cluster))[0] != 200:  # nor does a machine make tokens that stands still for a second
            assert not stream.done()
        assert text_of((await stream)[:-1]) == letters(500)

    check(test, script=Script(ids=LETTERS, tick_s=0.01), probe_every_s=0.2, health_window_s=1.0)


def test_a_refused_worker_is_told_and_shown() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        worker = cluster.add_decode(identity={"model": "scripted", "page_tokens": 128})
        await until(lambda: worker.refused)
        assert "page_tokens differs: 256 on" in worker.refused and "128 on" in worker.refused
        status, report = await health(cluster)
        assert status == 200 and report["refused"] == [{"name": worker.name, "reason": worker.refused}]
        await worker.stop(say_gone=False)
        cluster.decodes.remove(worker)
        await until(lambda: not cluster.router.dispatcher.pool.refused)

    check(test, dead_after_s=1.5)


# ---- losses ----


def test_a_prompt_and_an_end_that_are_lost_on_the_way_cost_seconds() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        cluster.prefills[0].deaf = 1
        start_s = time.monotonic()
        unheard = asyncio.create_task(cluster.complete(prompt="x", max_tokens=30))
        await until(lambda: not cluster.prefills[0].deaf)
        cluster.decodes[0].lost_ends = 1
        endless = asyncio.create_task(cluster.complete(prompt="x", max_tokens=20))
        for answer, length in ((await endless, 20), (await unheard, 30)):
            assert answer["choices"][0]["text"] == letters(length)
        assert 1.5 < time.monotonic() - start_s < 20
        assert cluster.count("tries_lost") == 2
        await until(lambda: is_idle(cluster))
        await cluster.complete(prompt="x", max_tokens=200)  # and nobody else is disturbed
        assert cluster.count("tries_lost") == 2 and cluster.count("retries") == 2

    check(test, script=Script(ids=LETTERS, tick_s=0.01), probe_every_s=60)


def test_a_decode_worker_lost_in_mid_stream_is_not_noticed_by_the_client() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        streams = [asyncio.create_task(cluster.stream("completions", {"prompt": "x", "max_tokens": 200})) for _ in range(6)]
        await until(lambda: all(decode.running for decode in cluster.decodes))
        await asyncio.sleep(0.2)
        cluster.decodes[0].silent = True
        for parsed in await asyncio.gather(*streams):
            assert parsed[-1] == "[DONE]" and text_of(parsed[:-1]) == letters(200)
        assert cluster.count("workers_lost") == 1 and cluster.count("retries") == 3
        await until(lambda: is_idle(cluster))

    check(test, decodes=2, script=SLOW, dead_after_s=3.0)


def test_a_leaving_worker_is_replaced_at_once() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        stream = asyncio.create_task(cluster.stream("completions", {"prompt": "x", "max_tokens": 60}))
        await until(lambda: cluster.decodes[0].running)
        await asyncio.sleep(0.1)
        await cluster.decodes.pop(0).stop()
        cluster.add_decode(SLOW)
        parsed = await stream
        assert text_of(parsed[:-1]) == letters(60)

    check(test, script=SLOW, recovery_wait_s=20.0)


def test_retraction_does_not_change_the_text() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        cluster.decodes[0].retract_at = 7
        answer = await cluster.complete(prompt="x", max_tokens=20, n=2, logprobs=0)
        assert [choice["text"] for choice in answer["choices"]] == [letters(20), letters(21)[1:]]
        assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [20, 20]
        assert answer["usage"]["completion_tokens"] == 40 and cluster.count("failures_retracted") == 1

    check(test, script=Script(ids=LETTERS))


def test_no_worker_left_in_mid_stream_is_an_error_event_and_a_clean_end() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        async with cluster.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 500, "stream": True}) as response:
            await response.content.readany()
            cluster.decodes[0].silent = True
            parsed = events("data:" + (await response.text()).split("data:", 1)[1])  # reads to the last chunk or raises
        assert "[DONE]" not in parsed and parsed[-1]["error"]["code"] == "no_workers"
        said = r"request \d+ ended: no live decode worker \(last failure: a decode worker was lost\)\. Send it again; "
        assert re.match(said, parsed[-1]["error"]["message"])
        await until(lambda: is_idle(cluster))

    check(test, script=SLOW, recovery_wait_s=0.3, dead_after_s=1.5)


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_byte_an_error_is_a_status(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.health.RETRY_S", 1000.0)  # a probe would take a failure that is meant for a request

    async def test(cluster: ScriptedCluster) -> None:
        for cause, retryable, expected in (("internal", False, 500), ("refused", False, 400)):
            cluster.prefills[0].fail = [(cause, retryable)]
            status, answer = await cluster.post("completions", BODY | {"stream": stream})
            assert status == expected and f"scripted {cause}" in answer["error"]["message"]
        cluster.prefills[0].fail = [("transfer", True)] * 2
        async with cluster.http.post("/v1/completions", json=BODY | {"stream": stream}) as response:
            assert response.status == 200  # the third try
        cluster.prefills[0].fail = [("transfer", True)] * 3
        status, answer = await cluster.post("completions", BODY | {"stream": stream})
        assert status == 500 and "ended after 3 attempts: KV transfer failed. Send" in answer["error"]["message"]
        await until(lambda: is_idle(cluster))

    check(test, probe_every_s=1000.0)


def test_without_workers_503_comes_at_once_and_service_returns_with_them() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        await cluster.decodes.pop().stop()
        await until(lambda: not cluster.router.dispatcher.pool.has_pair())
        start = time.perf_counter()
        async with cluster.http.post("/v1/completions", json=BODY) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert "no live decode worker" in (await response.json())["error"]["message"]
        assert time.perf_counter() - start < 10  # the benchmark holds it to 10 ms; tests share their machine
        assert (await health(cluster))[0] == 503
        start = time.perf_counter()
        cluster.add_decode()
        await until(lambda: cluster.router.dispatcher.pool.has_pair())
        assert (await cluster.complete(**BODY))["usage"]["completion_tokens"] == 5
        assert time.perf_counter() - start < 10

    check(test, recovery_wait_s=30.0)


# ---- clients that go, wait or do not read ----


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": False}, {"stream": True, "n": 3, "prompt": ["x", "y"]}])
def test_a_client_that_goes_frees_both_workers(body: dict[str, Any]) -> None:
    async def test(cluster: ScriptedCluster) -> None:
        decode, prefill = cluster.decodes[0], cluster.prefills[0]
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(cluster))
        writer.write(raw_post(BODY | {"max_tokens": 4000} | body))
        samples = body.get("n", 1) * (2 if body.get("n") else 1)
        await until(lambda: len(decode.running) >= samples)
        prefill.aborted.clear()
        start = time.monotonic()
        writer.transport.abort()
        await until(lambda: not decode.running and prefill.aborted)
        assert max(at for _, at in decode.aborted + prefill.aborted) - start < 10  # of 40 s that it would take
        await until(lambda: is_idle(cluster))
        await until(lambda: cluster.count("requests_dropped") == (2 if body.get("n") else 1))

    check(test, script=SLOW, probe_every_s=60.0)


def test_a_client_that_does_not_read_loses_its_stream_and_nobody_elses() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        slow = socket.create_connection(("127.0.0.1", port_of(cluster)))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        wide = BODY | {"max_tokens": 4000, "stream": True, "n": 60, "return_token_ids": True}
        await asyncio.get_running_loop().sock_sendall(slow, raw_post(wide))
        reader = asyncio.create_task(cluster.stream("completions", {"prompt": "x", "max_tokens": 300}))
        await until(lambda: cluster.count("streams_overflowed") == 1)
        assert text_of((await reader)[:-1]) == letters(300)
        await until(lambda: is_idle(cluster) and not cluster.decodes[0].running)
        slow.close()

    check(test, script=Script(ids=LETTERS, tick_s=0.004), stream_buffer_bytes=100_000, probe_every_s=60.0)


@pytest.mark.parametrize("gone", [False, True])
def test_events_for_a_client_that_has_gone_go_nowhere(gone: bool) -> None:
    """Its connection is closed some turns of the loop before its handler hears of that; writing to it would raise."""

    class Transport:
        written = b""

        def is_closing(self) -> bool:
            return gone

        def get_write_buffer_size(self) -> int:
            return 0

        def write(self, data: bytes) -> None:
            if gone:
                raise RuntimeError("the handler is closed")
            self.written += data

    http = SimpleNamespace(transport=Transport(), version=HttpVersion11, keep_alive=True)
    stream = EventStream(cast(Any, http), 1000)
    stream.send("data: x\n\n")
    stream.end()
    assert http.transport.written.endswith(b"" if gone else b"9\r\ndata: x\n\n\r\n0\r\n\r\n")
    assert bool(http.transport.written) != gone


def test_too_many_requests_are_turned_away() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        cluster.decodes[0].hold = True
        first = asyncio.create_task(cluster.complete(prompt="x", max_tokens=50, n=4))
        await until(lambda: cluster.router.dispatcher.in_flight == 4)
        async with cluster.http.post("/v1/completions", json=BODY) as response:
            assert response.status == 429 and response.headers["Retry-After"]
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        cluster.decodes[0].hold = False
        await first
        assert (await cluster.complete(**BODY))["usage"]["completion_tokens"] == 5

    check(test, script=SLOW, max_requests=4, probe_every_s=60.0)


def test_a_request_that_takes_too_long_is_ended() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        stream = asyncio.create_task(cluster.stream("completions", {"prompt": "x", "max_tokens": 4000}))
        requests = cluster.router.dispatcher._requests
        await until(lambda: any(len(request.samples[0].ids) > 5 for request in requests.values()))
        (request,) = requests.values()
        assert request.deadline_s == request.submitted_s + 500.0
        request.deadline_s = time.monotonic()  # as if they were over: until here a busy machine may take its time
        parsed = await stream
        assert parsed[-1]["error"]["code"] == "timeout" and len(parsed) > 5
        await until(lambda: is_idle(cluster) and not cluster.decodes[0].running)

    check(test, script=SLOW, request_timeout_s=500.0, probe_every_s=60.0)


def test_a_timeline_is_found_by_the_answers_id_and_by_an_errors_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "timeline")

    async def test(cluster: ScriptedCluster) -> None:
        answer = await cluster.complete(prompt=["x", "y"], max_tokens=2)
        chat = (await cluster.stream("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}))[0]
        cluster.decodes[0].hold = True
        asked = asyncio.create_task(cluster.post("completions", BODY))
        requests = cluster.router.dispatcher._requests
        await until(lambda: requests)
        (late,) = requests.values()
        late.deadline_s = time.monotonic()
        status, body = await asked
        named = [line.split(" is ") for line in caplog.messages if " is " in line]
        assert [api_id for _, api_id in named[:3]] == [answer["id"]] * 2 + [chat["id"]]
        (told,) = re.findall(r"^request (\d+) ended: ", body["error"]["message"])
        assert status == 504 and told == named[3][0] and named[3][1].startswith("cmpl-")
        lines = [f"{record.name} {record.levelname} {record.getMessage()}" for record in caplog.records]
        sent = [moment.rid for moment in map(read_moment, lines) if moment is not None and moment.event == "sent"]
        assert [int(rid) for rid, _ in named] == sent[-4:]  # before them, a probe

    check(test, script=SLOW, probe_every_s=60.0, request_timeout_s=500.0)


def test_mixed_load_with_drops_leaves_nothing_behind() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        rng = random.Random(1)

        async def one(number: int) -> None:
            n, count = rng.randint(1, 3), rng.randint(1, 40)
            body = {"prompt": [5] * rng.randint(1, 700), "max_tokens": count, "n": n, "return_token_ids": True}
            if number % 5 == 0:
                task = asyncio.create_task(cluster.post("completions", body | {"max_tokens": 3000}))
                await asyncio.sleep(rng.random() * 0.3)
                task.cancel()
            elif number % 2:
                answer = await cluster.complete(**body)
                assert [c["text"] for c in answer["choices"]] == [letters(count + s)[s:] for s in range(n)]
            else:
                parsed = await cluster.stream("completions", body)
                for sample in range(n):
                    mine = [event for event in parsed[:-1] if event["choices"][0]["index"] == sample]
                    assert text_of(mine) == letters(count + sample)[sample:]

        await asyncio.gather(*(one(number) for number in range(200)))
        await until(lambda: is_idle(cluster) and not any(decode.running for decode in cluster.decodes))

    check(test, prefills=2, decodes=2, script=Script(ids=LETTERS, tick_s=0.005))


# ---- what the wire and the network bring ----


def test_junk_on_the_inbox_is_counted_and_service_goes_on() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        context: zmq.Context[Any] = zmq.Context()
        junk = context.socket(zmq.PUSH)
        junk.connect(cluster.router.inbox.address)
        rng = random.Random(0)
        for size in (0, 1, 10, 1000):
            junk.send(rng.randbytes(size))
        junk.send_multipart([b"a", b"b"])
        junk.send(b"\x92\xa6Tokens\xc0")
        junk.send(b"\xdf\xff\xff\xff\xff")
        await until(lambda: cluster.router.inbox.bad_frames == 7)
        port = int(cluster.router.inbox.address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(rng.randbytes(5000))
        assert (await cluster.complete(**BODY))["usage"]["completion_tokens"] == 5
        junk.close(linger=0)
        context.term()

    check(test)


def port_of(cluster: ScriptedCluster) -> int:
    return int(cluster.router.url.rsplit(":", 1)[1])


def raw_post(body: dict[str, Any], headers: str = "", version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return f"{head}{headers}\r\n".encode() + data


async def raw(cluster: ScriptedCluster, data: bytes) -> bytes:
    """What the server sends until it closes; the request should ask for that."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(cluster))
    writer.write(data)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


def test_bad_http() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        http = cluster.http
        cases: list[tuple[str, str, dict[str, Any], int]] = [
            ("GET", "/nothing", {}, 404),
            ("GET", "/v1/completions", {}, 405),
            ("DELETE", "/health", {}, 405),
            ("POST", "/v1/completions", {"data": b"{", "headers": {"Content-Type": "application/json"}}, 400),
            ("POST", "/v1/completions", {"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 400),
            ("POST", "/v1/completions", {"data": b"", "headers": {"Content-Type": "application/json"}}, 400),
            ("POST", "/v1/completions", {"json": {"prompt": "x" * 3000}}, 413),
            ("GET", "/v1/models/other", {}, 404),
        ]
        for method, path, arguments, expected in cases:
            async with http.request(method, path, **arguments) as response:
                assert response.status == expected, (method, path)
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
                if expected == 405:
                    assert response.headers["Allow"]

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b" " * 500

        async with http.post("/v1/completions", data=chunks(), headers={"Content-Type": "application/json"}) as response:
            assert response.status == 413
        assert (await cluster.complete(**BODY))["usage"]["completion_tokens"] == 5

    check(test, max_body_bytes=2000)


def test_old_and_unusual_http_clients() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        answer = await raw(cluster, raw_post(BODY | {"stream": True}, version="1.0"))
        head, body = answer.split(b"\r\n\r\n", 1)
        assert b"chunked" not in head and b"Connection: close" in head and events(body.decode())[-1] == "[DONE]"
        answer = await raw(cluster, raw_post(BODY, "Connection: close\r\nExpect: 100-continue\r\n"))
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        answer = await raw(cluster, b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"\r\n\r\n")
        # Two requests in one packet, the second after a stream on the same connection.
        answer = await raw(cluster, raw_post(BODY | {"stream": True}) + raw_post(BODY, "Connection: close\r\n"))
        assert answer.count(b"HTTP/1.1 200 OK") == 2 and b"[DONE]\n\n\r\n0\r\n\r\nHTTP/1.1" in answer

    check(test)


ASK = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


async def pipeline(cluster: ScriptedCluster, requests: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client with a small window that sends all its requests and has read nothing yet."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port_of(cluster)))
    reader, writer = await asyncio.open_connection(sock=client, limit=1000)
    writer.write(ASK * requests)
    return reader, writer


def watch_replies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What every reply left unread."""
    unread, prepare = [0], Reply.prepare

    async def noted(self: Reply, request: Any) -> None:
        transport = request.transport
        unread.append(transport.get_write_buffer_size())
        await prepare(self, request)

    monkeypatch.setattr(Reply, "prepare", noted)
    return unread


def test_requests_of_a_client_that_does_not_read_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = watch_replies(monkeypatch)

    async def test(cluster: ScriptedCluster) -> None:
        reader, writer = await pipeline(cluster, 2000)
        stuck = 0
        async with asyncio.timeout(60):
            while len(unread) > stuck or stuck < 2:
                stuck = len(unread)
                await asyncio.sleep(0.5)
        assert stuck < 1000 and max(unread) <= 1 << 20
        answers = 0
        async with asyncio.timeout(60):
            while answers < 2000:  # then it reads, and nothing is lost
                await reader.readuntil(b"HTTP/1.1 200 OK\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))  # type: ignore[index]
                answers += 1
        writer.close()
        assert max(unread) <= 1 << 20

    check(test)


def test_a_client_that_never_reads_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.stream.UNREAD_S", 0.3)

    async def test(cluster: ScriptedCluster) -> None:
        _, writer = await pipeline(cluster, 2000)
        assert cluster.router._runner is not None and cluster.router._runner.server is not None
        server = cluster.router._runner.server
        await until(lambda: server.connections)
        await until(lambda: not server.connections)  # with what it left unread: closing alone would wait for ever
        writer.close()
        assert (await cluster.complete(**BODY))["usage"]["completion_tokens"] == 5

    check(test)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "identity, gzip", "x"])
def test_compressed_bodies_are_refused(coding: str) -> None:
    async def test(cluster: ScriptedCluster) -> None:
        answer = await raw(cluster, raw_post(BODY, f"Content-Encoding: {coding}\r\nConnection: close\r\n"))
        assert answer.startswith(b"HTTP/1.1 415 ")
        error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
        assert error["param"] == "Content-Encoding" and error["type"] == "invalid_request_error"
        answer = await raw(cluster, raw_post(BODY, "Content-Encoding: Identity\r\nConnection: close\r\n"))
        assert answer.startswith(b"HTTP/1.1 200 ") and cluster.count("http_500") == 0

    check(test)


@pytest.mark.parametrize("before", [b"", ASK, raw_post(BODY | {"max_tokens": 20})])
def test_a_chunked_body_that_turns_bad_is_answered_and_closed(before: bytes) -> None:
    async def test(cluster: ScriptedCluster) -> None:
        start = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n'
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(cluster))
        writer.write(before + start)
        for _ in range(2):  # in between the loop has read what came
            await asyncio.sleep(0.03)
        writer.write(b"zz\r\n")
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
        assert answer.count(b"HTTP/1.1 400 Bad Request\r\n") == 1 and answer.count(b"HTTP/1.1 200 OK") == bool(before)
        assert json.loads(answer.rsplit(b"\r\n\r\n", 1)[1])["error"]["code"] == "broken_body"
        answer = await raw(cluster, start + b"zz\r\n")  # in one packet, which aiohttp answers by itself
        assert answer.startswith(b"HTTP/1.0 400 Bad Request\r\n") and cluster.count("http_500") == 0

    check(test, script=Script(ids=LETTERS, tick_s=0.01))


def test_the_head_and_the_first_event_come_together_and_each_token_at_once() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        decode = cluster.decodes[0]
        decode.hold = True  # the next token is made when the one before has been read
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(cluster))
        writer.write(raw_post(BODY | {"stream": True, "max_tokens": 3}))
        await until(lambda: decode.running)
        decode.step()
        first = await reader.read(65536)
        assert first.startswith(b"HTTP/1.1 200") and first.count(b"data: ") == 1
        decode.step()
        assert (await reader.read(65536)).count(b"data: ") == 1
        writer.close()

    check(test, script=Script(ids=LETTERS), probe_every_s=60.0)


def test_models_metrics_and_the_api_description() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        await cluster.complete(**BODY)
        cluster.decodes[0].metrics.add("tokens", 7)
        cluster.decodes[0].announce()
        async with cluster.http.get("/v1/models") as response:
            [card] = (await response.json())["data"]
        assert card["id"] == "m" and card["max_model_len"] == 4096
        async with cluster.http.get("/v1/models/m") as response:
            assert await response.json() == card
        async with cluster.http.get("/openapi.json") as response:
            description = await response.json()
        assert description["openapi"].startswith("3.1") and set(cluster.router.app.paths) <= set(description["paths"])
        await until(lambda: cluster.router.dispatcher.pool.workers("decode")[0].metrics[0].get("tokens") == 7)
        async with cluster.http.get("/metrics") as response:
            page = await response.text()
            assert response.headers["Content-Type"].startswith("text/plain")
        name = cluster.decodes[0].name
        assert f'pdserve_tokens_total{{role="decode",worker="{name}"}} 7' in page
        assert 'pdserve_requests_total{role="router",worker="router"} 1' in page
        assert 'pdserve_healthy{role="router",worker="router"} 1' in page
        assert 'pdserve_retries_total{role="router",worker="router"} 0' in page
        assert re.search(r"^pdserve_ttft_seconds_count\{.*\} [1-9]", page, re.M)

    check(test)


# ---- the process ----


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def line(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    return (await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip()


def test_the_process_announces_itself_serves_and_ends_streams_on_sigterm() -> None:
    async def run() -> None:
        options = ("--port", "0", "--model-name", "m", "--tokenizer", TOKENIZER)
        async with process("router", *options) as router:
            inbox = (await line(router)).removeprefix("inbox ")
            async with process("tests.scripted", "--router", inbox, "--tick-s", "0.02") as workers:
                assert (await line(workers)).startswith("serving ")
                url = (await line(router)).removeprefix("ready ")
                async with aiohttp.ClientSession(url) as http:
                    body = {"prompt": "x", "max_tokens": 4000, "stream": True}
                    async with http.post("/v1/completions", json=body) as response:
                        await response.content.readany()
                        router.send_signal(signal.SIGTERM)
                        rest = await response.text()
                assert "shutting down" in rest and "[DONE]" not in rest
                assert events("data:" + rest.split("data:", 1)[1])[-1]["error"]["code"] == "shutting_down"
                assert await asyncio.wait_for(router.wait(), 60) == 0
                assert router.stdout is not None and await router.stdout.read() == b""

    asyncio.run(run())


USAGE_ERRORS = ("advertise", "--model /nowhere")


@pytest.mark.parametrize("what", ["--port", "--inbox-port", "tokenizer", "advertise", "--model /nowhere"])
def test_a_start_that_cannot_work_is_one_line_and_exit_1(what: str, tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "tokenizer.json").write_text("{}")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            options = {
                "--port": ("--port", port),
                "--inbox-port": ("--port", "0", "--inbox-port", port),
                "tokenizer": ("--port", "0", "--tokenizer", str(tmp_path)),
                "--model /nowhere": ("--port", "0", "--model", "/nowhere"),
                "advertise": ("--port", "0", "--inbox-host", "0.0.0.0"),
            }[what]
            async with process("router", *options) as router:
                _, errors = await asyncio.wait_for(router.communicate(), 60)
        last = errors.decode().strip().splitlines()
        assert router.returncode == (2 if what in USAGE_ERRORS else 1)
        assert "Traceback" not in errors.decode() and what in last[-1]
        assert not what.endswith("port") or f"{what} {port}: Address already in use" in last[-1]
        assert len(last) == 1 or what in USAGE_ERRORS

    asyncio.run(run())
