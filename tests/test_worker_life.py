"""What both kinds of worker share: their options, the measured rate, and the Status that the loop keeps publishing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import pytest
import zmq

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from wire.codec import schema_digest
from wire.messages import Status, unpack_keys
from wire.sockets import Inbox, Outbox
from wire.worker import Presence, Rate, WorkerConfig

OPTIONS: dict[str, Any] = {"model": "m", "router": "tcp://127.0.0.1:1"}


@pytest.mark.parametrize("cls", [PrefillConfig, DecodeConfig])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_an_address_that_nobody_can_reach_is_refused(cls: type[WorkerConfig], host: str) -> None:
    with pytest.raises(ValueError, match="needs --advertise"):
        cls(**OPTIONS, host=host)
    assert cls(**OPTIONS, host=host, advertise="10.0.0.2", insecure=True).advertise == "10.0.0.2"


def test_rate_is_what_the_batches_see_not_what_probes_do() -> None:
    rate = Rate()
    now_s = 0.0
    for _ in range(20):  # 256 tokens in 0.1 s
        now_s += 0.1
        rate.add(256, 0.1, now_s)
    assert rate.per_s(now_s) == pytest.approx(2560)
    for _ in range(10):  # then half a minute of probes: 2 tokens in 20 ms, 100 tokens a second
        now_s += 3.0
        rate.add(2, 0.02, now_s)
    assert rate.per_s(now_s) == pytest.approx(2560, rel=0.02)


def test_rate_is_nothing_while_too_little_was_measured() -> None:
    rate = Rate()
    assert rate.per_s(0.0) == 0
    for n in range(100):
        rate.add(2, 0.02, 3.0 * n)
        assert rate.per_s(3.0 * n) == 0, "probes alone are no measure"
    rate.add(4000, 1.0, 300.0)
    assert rate.per_s(300.0) == pytest.approx(4000, rel=0.01)
    assert rate.per_s(500.0) == 0, "nor is what was long ago"


def test_rate_follows_the_worker() -> None:
    rate = Rate()
    for n in range(300):
        rate.add(100, 0.1, 0.1 * n)
    assert rate.per_s(30.0) == pytest.approx(1000)
    for n in range(900):
        rate.add(100, 0.2, 30.0 + 0.2 * n)
    assert rate.per_s(210.0) == pytest.approx(500, rel=0.02)


@dataclass(frozen=True)
class Model:
    vocab_size: int = 100
    max_position_embeddings: int = 1000
    eos_token_id: int = 1
    bos_token_id: int = 0


class Bulk:
    def counters(self) -> dict[str, int]:
        return {"bad_frames": 2, "late_frames": 5}

    def gauges(self) -> dict[str, float]:
        return {"kv_links_shm": 1.0}

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def address(self) -> str:
        return "tcp://kv:1"


def test_presence_publishes_from_both_sides_of_the_loop_and_wakes_without_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    router = Inbox(context)
    config = WorkerConfig(model="m", router=router.address, page_tokens=8)
    presence = Presence("prefill", config, context)
    counts = {"total_pages": 10, "queued": 0, "running": 3}
    live = [(1, 0)]
    with caplog.at_level("INFO", "wire"):
        presence.join({"page_tokens": 8}, Model(), 7, lambda: dict(counts), lambda: live, Bulk())
    assert f"{presence.name}: messages to {presence.inbox.address}, KV to tcp://kv:1" in caplog.messages
    counts["queued"] = 1
    now_s = time.monotonic()
    presence.stepped(500, now_s - 0.25, now_s)
    stepped = published(router, queued=1)
    assert stepped.load["tokens_per_s"] == pytest.approx(2000, rel=0.1)
    assert (unpack_keys(stepped.live), stepped.turn) == ([(1, 0)], 2)
    counts["queued"] = 2
    live.append((2**62, 3))
    start_s = time.monotonic()
    presence.wait(idle=True)
    assert 0.5 < time.monotonic() - start_s < 10, "an idle loop looks up once a second"
    status = published(router, queued=2)
    assert (status.role, status.name, status.state, status.inbox) == (
        "prefill", presence.name, "serving", presence.inbox.address
    )  # fmt: skip
    facts = {"max_context": 80, "vocab_size": 100, "eos_token_id": 1, "bos_token_id": 0, "max_batch": 7}
    assert status.identity == {"page_tokens": 8, "messages": schema_digest()}
    assert status.load.items() >= {**facts, **counts}.items()
    assert (unpack_keys(status.live), status.turn) == ([(1, 0), (2**62, 3)], 3)
    counters, gauges, _ = status.metrics
    assert counters["transfers_broken"] == 0
    assert (counters["bad_frames"], counters["late_frames"], counters["steps"], gauges["queued"]) == (2, 5, 1, 2)
    outbox = Outbox(context)
    monkeypatch.setattr("wire.worker.IDLE_WAIT_MS", 120_000)
    start_s = time.monotonic()
    outbox.send(presence.inbox.address, status)
    presence.wait(idle=True)
    assert time.monotonic() - start_s < 60, "a message wakes it"
    with caplog.at_level("INFO", "wire"):
        presence.leave()
    assert f"{presence.name} leaves: 3 running and 2 queued sequences go to other workers" in caplog.messages
    outbox.close()
    router.close()
    context.destroy(linger=0)


def published(router: Inbox, queued: int) -> Status:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        router.wait(0.1)
        for status in router.drain():
            if status.load["queued"] == queued:
                assert isinstance(status, Status)
                return status
    raise AssertionError(f"no Status with queued {queued}")
