"""A pair whose link is slower than --kv-floor, as an operator sees it: it is not ready; /health, the log and /metrics say why;
with a lower floor it serves."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from scripts.launch_local import LocalConfig, System
from tests.ports import own_port
from tests.system import DEVICE, PATIENCE_S, TINY, Server, wait_for


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_a_pair_below_the_floor_is_not_ready_and_says_why_and_with_a_lower_floor_it_is(path: str) -> None:
    flags, port = f"--num-pages 1024 --transport {path}", own_port()
    config = LocalConfig(TINY, port=port, device=DEVICE, prefill_args=f"{flags} --kv-floor 1e6", decode_args=flags)  # GB/s
    system = System(replace(config, router_args=f"--dead-after-s {PATIENCE_S}"))
    server = Server(f"http://127.0.0.1:{port}", system)
    with ThreadPoolExecutor(1) as beside:
        try:
            ready = beside.submit(system.start)
            wait_for(lambda: system.children and system.children[0].line("inbox "), "the router")
            wait_for(lambda: "the floor is" in health(server)[1], "the reason")
            status, reason = health(server)
            assert status == 503 and re.search(rf"tcp://\S+ takes \S+ GB/s over {path}, the floor is 1e\+06 GB/s", reason)
            reply = server.complete(prompt=[5, 6, 7], max_tokens=2)
            assert reply.status >= 500 and "KV transfer failed" in reply.body["error"]["message"]
            wait_for(lambda: server.total("kv_links_unusable") == 1, "the gauge")
            measured_gb_per_s = server.total("kv_slowest_link_gb_per_s")
            assert 0 < measured_gb_per_s < 1e6
            slow = system.children.pop(1)
            said = r"ERROR no KV goes to decode-\S+ at tcp://\S+: tcp://\S+ takes .* the floor is"
            assert re.search(said, slow.log.read_text())
            assert not ready.done(), "the launcher says that it is ready"

            slow.process.terminate()
            assert slow.process.wait(PATIENCE_S) == 0
            to = ["--model", TINY, "--router", system.children[0].line("inbox "), "--device", DEVICE]
            lower = system._spawn("lower", "prefill", [*to, *flags.split(), "--kv-floor", str(measured_gb_per_s / 1000)])
            assert ready.result() == server.url
            assert health(server) == (200, "")
            assert server.complete(prompt=[5, 6, 7], max_tokens=2).status == 200
            wait_for(lambda: server.total(f"kv_links_{path}") == 1, "the gauge")
            assert server.total("kv_links_unusable") == 0
            assert re.search(rf"INFO KV to decode-\S+ at tcp://\S+ goes over {path}, ", lower.log.read_text())
        finally:
            system.stop()


def health(server: Server) -> tuple[int, str]:
    """Its status, and why it is red."""
    status, body = server.get("/health")
    return status, json.loads(body)["reason"] or ""
