"""A system over the two hosts of test_kv_hosts.py, router and prefill on one and decode on the other, whose link loses all that
is sent for a while. Prints a JSON object for each of those times.

``python -m tests.two_hosts FOLDER SECONDS...``, in the namespaces that it needs; the processes' logs are left in the folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.launch_local import Child, LocalConfig, System
from tests.system import PATIENCE_S, TINY, Server

ON_DECODE = ["ip", "netns", "exec", "decode"]
NOBODY = "02:00:00:00:00:01"  # no interface of the link: what is sent there is lost, and no sender is told
ENDS = ((["ip"], "10.9.0.1"), (["ip", "-n", "decode"], "10.9.0.2"))  # where we are, and who is at the other end
ASK: dict[str, Any] = {"prompt": list(range(5, 40)), "max_tokens": 4, "temperature": 0}


class TwoHosts(System):
    def _spawn(self, name: str, module: str, flags: list[str], gpu: str | None = None) -> Child:
        command = [sys.executable, "-m", module, *flags]
        self.children.append(
            Child(name, [*ON_DECODE, *command] if module == "decode" else command, self.log_dir, dict(os.environ))
        )
        return self.children[-1]


def set_link(whole: bool) -> None:
    for ip, peer in ENDS:
        change = ["del", peer] if whole else ["replace", peer, "lladdr", NOBODY, "nud", "permanent"]
        subprocess.run([*ip, "neigh", *change, "dev", "link0"], check=True)


def workers(server: Server) -> list[str]:
    return sorted(each["name"] for each in json.loads(server.get("/health")[1])["workers"])


def stall(server: Server, stalled_s: float) -> dict[str, Any]:
    """What becomes of a request that is sent into a link that stands still, and after how long one behind it is answered."""
    with ThreadPoolExecutor(1) as beside:
        set_link(whole=False)
        waiting = beside.submit(server.complete, **ASK)
        time.sleep(stalled_s)
        gone = waiting.done()
        set_link(whole=True)
        healed_s = time.monotonic()
        while (reply := server.complete(**ASK)).status != 200:
            assert time.monotonic() - healed_s < PATIENCE_S, reply.body
            time.sleep(0.1)
        served_s = time.monotonic() - healed_s
        status = waiting.result().status
    return {"stalled_s": stalled_s, "gone": gone, "status": status, "served_s": served_s, "ids": reply.ids()}


def main(folder: str, *stalls_s: str) -> None:
    common = "--insecure --transport zeromq"
    system = TwoHosts(
        LocalConfig(
            TINY,
            port=0,
            router_args="--inbox-host 10.9.0.2 --insecure",
            prefill_args=f"{common} --host 10.9.0.2",
            decode_args=f"{common} --host 10.9.0.1",
            log_dir=folder,
        )
    )
    try:
        server = Server(system.start(), system)
        names, ids = workers(server), server.complete(**ASK).ids()
        for stalled_s in stalls_s:
            seen = stall(server, float(stalled_s))
            for child in system.children:
                child.check()
            seen |= {"same_text": seen.pop("ids") == ids, "same_workers": workers(server) == names}
            print(json.dumps(seen), flush=True)
    finally:
        system.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
