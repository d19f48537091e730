"""Two hosts: two network namespaces with a link between them, each with its own processes. The KV throughput test between
them, and a system whose link loses everything for a while.

Needs iproute2, and a kernel that lets a user make namespaces; skipped with the reason where that is not so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.places import slot_places
from kvtransfer.spans import num_bytes
from scripts.kv_ends import flash_layout

HOSTS = ["unshare", "--user", "--map-root-user", "--net", "--mount-proc", "--pid", "--fork", "--kill-child", "bash", "-ec"]
LINK = """
mount -t tmpfs tmpfs /run
ip netns add decode
ip link add link0 type veth peer name link0 netns decode
ip address add 10.9.0.2/24 dev link0
ip -n decode address add 10.9.0.1/24 dev link0
ip link set link0 up
ip link set lo up
ip -n decode link set link0 up
own() { unshare --pid --fork --kill-child --mount-proc "$@"; }
own true
"""
BENCH = """
exec 3< <(ip netns exec decode bash -c "$(declare -f own)"'; own "$@"' - "$1" -m scripts.bench_kvtransfer \
    --serve 10.9.0.1:7000 --insecure)
read -u 3 listening
own "$1" -m scripts.bench_kvtransfer --connect 10.9.0.1:7000 --host 10.9.0.2 --insecure --paths auto,shm \
    --contexts 8192 --requests 2 --lanes 1 --repeats 1 --json "$2/rows"
ip -json -statistics link show link0 > "$2/link"
"""
SYSTEM = """
own "$@"
"""
HEALED_S = 10.0


@pytest.fixture
def hosts() -> list[str]:
    try:
        made = subprocess.run([*HOSTS, LINK], capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        pytest.skip(f"no two hosts here: {error}")
    if made.returncode:
        pytest.skip(f"no two hosts here: {made.stderr.strip()}")
    return HOSTS


def test_two_hosts(hosts: list[str], tmp_path: Path) -> None:
    command = [*hosts, LINK + BENCH, "-", sys.executable, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows").read_text())
    assert row["path"] == "zeromq", "the two have no memory in common"
    assert "--paths shm: shared memory is asked for and cannot be had" in done.stderr.splitlines()[-1]
    (link,) = json.loads((tmp_path / "link").read_text())
    layout = flash_layout()
    floors = 2 * 64 * layout.page_bytes  # scatter and packed, of 64 pages at least
    handed_off = 2 * (32 * layout.page_bytes + num_bytes(slot_places(layout, 1, 8192)))
    assert link["stats64"]["tx"]["bytes"] > floors + handed_off, "the floors went another way"


def test_a_link_between_hosts_that_lost_everything_serves_again_within_ten_seconds(hosts: list[str], tmp_path: Path) -> None:
    """After a minute TCP itself would wait for most of another one before it tries again."""
    command = [*hosts, LINK + SYSTEM, "-", sys.executable, "-m", "tests.two_hosts", str(tmp_path), "2", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    short, long = map(json.loads, done.stdout.splitlines())
    assert (short["gone"], short["status"]) == (False, 200), "a request outlives two seconds"
    assert long["gone"] and long["status"] == 503
    for seen in (short, long):
        assert seen["served_s"] < HEALED_S and seen["same_text"] and seen["same_workers"], seen
