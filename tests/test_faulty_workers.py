"""Real workers over a KV transport that fails: nothing is answered from KV that is not what was computed."""

from __future__ import annotations

from typing import Any

import pytest

import prefill.worker
from kvtransfer.transports import open_transport
from kvtransfer.transports.faults import Faults, FaultyTransport
from tests.fake_runner import expected_text
from tests.test_workers import GREEDY, Cluster, prompt


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[FaultyTransport]:
    """The transports of prefill workers that are started from now on; without faults, so far."""
    opened: list[FaultyTransport] = []

    def wrapped(*arguments: Any) -> FaultyTransport:
        opened.append(FaultyTransport(open_transport(*arguments), Faults()))
        return opened[-1]

    monkeypatch.setattr(prefill.worker, "open_transport", wrapped)
    return opened


@pytest.mark.parametrize(
    ("fault", "role", "reason"),
    [
        ("corrupt", "decode", "digest"),
        ("cut", "prefill", "the connection was cut"),
        ("drop", "decode", "missing 10 s after Ready"),
    ],
)
@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_a_fault_fails_the_attempt_and_the_next_one_gives_the_text(
    faulty: list[FaultyTransport], fault: str, role: str, reason: str, path: str
) -> None:
    with Cluster() as cluster:
        router = cluster.router
        source, target = cluster.prefill(transport=path), cluster.decode(transport=path)
        faulty[0]._faults = Faults(**{fault: 1.0})
        rid = router.ask(source.address, target.address, prompt(30), GREEDY)
        router.until(lambda: len(router.failed) == 1, "the failure")
        failed = router.failed[0]
        cause = "corrupt" if fault == "corrupt" else "transfer"
        assert (failed.rid, failed.cause, failed.retryable, failed.role) == (rid, cause, True, role)
        assert reason in failed.reason
        broken = source if role == "prefill" else target
        router.until(lambda: router.counter(broken.address, "transfers_broken") == 1, "the count")
        assert (rid, 0, 0) not in router.ids, "something was answered"
        faulty[0]._faults = Faults()
        router.ask(source.address, target.address, prompt(30), GREEDY, rid=rid, attempt=1)
        router.until(lambda: (rid, 1, 0) in router.finished, "the text")
        assert router.ids[rid, 1, 0] == expected_text(prompt(30), 12, stop=())


def test_a_link_below_the_floor_says_so_and_serves_nobody() -> None:
    with Cluster() as cluster:
        router, source, target = cluster.router, cluster.prefill(kv_floor=1e6), cluster.decode()
        router.ask(source.address, target.address, prompt(30), GREEDY)
        router.until(lambda: len(router.failed) == 1, "the failure")
        assert "the floor is 1e+06 GB/s" in router.failed[0].reason
        router.until(lambda: gauge(cluster, source.address, "kv_links_unusable") == 1, "the gauge")


def test_the_path_and_its_speed_are_in_the_metrics() -> None:
    with Cluster() as cluster:
        router, source, target = cluster.router, cluster.prefill(), cluster.decode()
        rid = router.ask(source.address, target.address, prompt(30), GREEDY)
        router.until(lambda: (rid, 0, 0) in router.finished, "the text")
        router.until(lambda: gauge(cluster, source.address, "kv_links_shm") == 1, "the gauge")
        assert gauge(cluster, source.address, "kv_slowest_link_gb_per_s") > 0


def gauge(cluster: Cluster, inbox: str, name: str) -> float:
    status = cluster.router.status.get(inbox)
    value: float = status.metrics[1].get(name, -1) if status is not None else -1
    return value
