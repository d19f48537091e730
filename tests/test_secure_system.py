"""The whole system with a cluster key, over each path: it serves, what travels is sealed, and a stranger is turned away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import zmq

from tests.system import running, wait_for
from wire.curve import ClusterKey
from wire.messages import Abort
from wire.sockets import Outbox, open_context


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_a_cluster_with_a_key_serves_and_refuses_strangers(path: str, tmp_path: Path) -> None:
    key = str(tmp_path / "cluster.key")
    ClusterKey.generate().write(key)
    flags = f"--cluster-key {key}"
    workers = f"{flags} --transport {path}"
    with running(router_args=flags, prefill_args=workers, decode_args=workers) as server:
        reply = server.complete(prompt=list(range(3, 40)), max_tokens=4, temperature=0)
        assert reply.status == 200, reply.body
        assert server.total("transfers_broken_total") == 0
        wait_for(lambda: server.total(f"kv_links_{path}") == 1, "the link")
        context: zmq.Context[zmq.Socket[bytes]] = open_context()
        stranger = Outbox(context)
        router, *others = server.system.children
        inboxes = [router.line("inbox ")] + [worker.line("serving ").split()[-1] for worker in others]
        for inbox in inboxes:
            stranger.send(inbox, Abort(1, 1))

        def turned_away() -> dict[str, float]:
            return {worker: count for worker, count in server.metrics().get("refused_peers_total", {}).items() if count}

        wait_for(lambda: len(turned_away()) == len(inboxes), "that each has turned it away")
        stranger.close()
        (bulk_port,) = {
            found for worker in others for found in re.findall(r"KV to decode-\S+ at (\S+) goes", worker.log.read_text())
        }
        before, strangers = turned_away(), [Outbox(context) for _ in range(10)]
        for each in strangers:
            each.send(bulk_port, Abort(1, 1))
        most = 5  # of the ten; the first stranger may have tried once more at the inboxes before it was closed
        wait_for(
            lambda: any(count > before[worker] + most for worker, count in turned_away().items()), "that KV's port did too"
        )
        ports = ((router, inboxes[0]), (others[1], bulk_port))
        wait_for(
            lambda: all(f"connections turned away at {port}: " in child.log.read_text() for child, port in ports),
            "that the logs of router and decode worker say so",
        )
        for each in strangers:
            each.close()
        context.destroy(linger=0)
        assert server.complete(prompt=[5, 6, 7], max_tokens=2).status == 200
