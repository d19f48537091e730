"""Other libraries that move KV over TCP, given the hand-offs that ours are measured with: the same places to the same places.

Each side runs a library in a process of its own over its arena, as our bulk engine is one, and lets it run in its turn
only: some have threads that never sleep. What a library needs of the other side, and that bytes are in place, goes over
a connection between the two processes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.arena import Arena
from kvtransfer.pages import PagePool, SeqKV
from kvtransfer.places import handoff_places
from kvtransfer.sharing import SharedMemory
from kvtransfer.spans import KIND, NBYTES, NUMBER, OFFSET
from model.cache import kv_layout
from model.config import ModelConfig
from scripts.children import die_with_parent
from scripts.released_config import RELEASED

Offsets = NDArray[np.int64]
Pieces = tuple[Offsets, Offsets, Offsets]  # [n] each: offsets in our memory, in the other side's, which is as large, and bytes
LAYOUT = kv_layout(ModelConfig.from_json(RELEASED))
END_S = 5.0  # for a process that has hung up to say why
_POLL_S = 1e-4


def settings() -> dict[str, str]:
    """Of the libraries, unless the environment has others. Where there is a GPU, NIXL refuses UCX without cuda_copy."""
    transports = "tcp,cuda_copy" if torch.cuda.is_available() else "tcp"
    return {"UCX_TLS": transports, "MC_LOG_LEVEL": "WARNING", "NIXL_LOG_LEVEL": "WARN"}


class Library(Protocol):
    """One end over `num_bytes` of memory at `base`, installed by pip as `package`."""

    module: str
    package: str
    about: dict[str, Any]  # what the other end is to be told

    def __init__(self, base: int, num_bytes: int, host: str) -> None: ...

    def meet(self, there: dict[str, Any]) -> None:
        """`there` is `about` of the other end."""

    def begin(self, sources: Offsets, targets: Offsets, sizes: Offsets) -> Any:
        """Starts to write pieces of our memory to the other end's."""

    def finish(self, transfer: Any) -> None:
        """Waits until all of it is in place. Raises RuntimeError when it failed."""


class Mooncake:
    """The transfer engine of Mooncake, protocol tcp; its ends find each other without a metadata server."""

    module, package = "mooncake.engine", "mooncake-transfer-engine-non-cuda"

    def __init__(self, base: int, num_bytes: int, host: str) -> None:
        engine = importlib.import_module(self.module).TransferEngine()
        if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(base, num_bytes):
            raise RuntimeError(f"mooncake does not start at {host}")
        self._engine, self._base = engine, base
        self.about = {"base": base, "name": f"{host}:{engine.get_rpc_port()}"}

    def meet(self, there: dict[str, Any]) -> None:
        self._there = there

    def begin(self, sources: Offsets, targets: Offsets, sizes: Offsets) -> Any:
        here, there = (sources + self._base).tolist(), (targets + self._there["base"]).tolist()
        batch = self._engine.batch_transfer_async_write(self._there["name"], here, there, sizes.tolist())
        if not batch:
            raise RuntimeError(f"mooncake refused {len(here)} pieces")
        return batch

    def finish(self, transfer: Any) -> None:
        if self._engine.get_batch_transfer_status([transfer]):
            raise RuntimeError("mooncake failed")


class Nixl:
    """An agent of NIXL with the UCX backend, which UCX_TLS keeps from memory that the two ends may share."""

    module = package = "nixl"

    def __init__(self, base: int, num_bytes: int, host: str) -> None:
        nixl = importlib.import_module(self.module)
        name = f"{host} {os.getpid()}"
        self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(base, num_bytes, 0, "")], "DRAM")
        self._base = base
        self.about = {"base": base, "metadata": self._agent.get_agent_metadata().hex()}

    def meet(self, there: dict[str, Any]) -> None:
        self._there_base, self._there = there["base"], self._agent.add_remote_agent(bytes.fromhex(there["metadata"]))

    def begin(self, sources: Offsets, targets: Offsets, sizes: Offsets) -> Any:
        here, there = self._pieces(self._base + sources, sizes), self._pieces(self._there_base + targets, sizes)
        transfer = self._agent.initialize_xfer("WRITE", here, there, self._there)
        self._check(self._agent.transfer(transfer))
        return transfer

    def finish(self, transfer: Any) -> None:
        while self._check(self._agent.check_xfer_state(transfer)) != "DONE":
            time.sleep(_POLL_S)
        self._agent.release_xfer_handle(transfer)

    def _pieces(self, addresses: Offsets, sizes: Offsets) -> Any:
        pieces = np.stack((addresses, sizes, np.zeros_like(sizes)), 1).astype(np.uint64)
        return self._agent.get_xfer_descs(pieces, "DRAM")

    def _check(self, state: str) -> str:
        if state == "ERR":
            raise RuntimeError("nixl failed")
        return state


LIBRARIES: dict[str, type[Library]] = {"mooncake": Mooncake, "nixl": Nixl}


def require(name: str) -> None:
    """Raises ValueError with what to install for a library that cannot be used here."""
    if name not in LIBRARIES:
        raise ValueError(f"the peers are {', '.join(LIBRARIES)}")
    try:
        importlib.import_module(LIBRARIES[name].module)
    except ImportError as error:
        raise ValueError(f"it cannot be imported ({error}): pip install {LIBRARIES[name].package}") from error


class Peer:
    """One side's process of a library: listens at `host` for the other side's, or connects to that one at `target`."""

    def __init__(self, name: str, arena: Arena, host: str, advertise: str, target: tuple[str, int] | None = None) -> None:
        assert arena.shared is not None, "libraries are given arenas of the CPU"
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), arena.shared.fd)
        numbers = (*fds, len(arena.pages), len(arena.slots))
        command = [sys.executable, "-m", "scripts.kv_peers", name, *map(str, numbers), host, advertise or host]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        with theirs:
            self._process = subprocess.Popen(
                [*command, *map(str, target or ())],
                env=settings() | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=fds,
            )
        self._name, self._control, self._lines = name, ours, ours.makefile("r")
        self.port: int = self._reply()["port"]  # where it listens

    def turn(self, begins: bool) -> None:
        """Outside of its turns it stands still."""
        self._process.send_signal(signal.SIGCONT if begins else signal.SIGSTOP)

    def hand_off(self, length: int, requests: int, compare: bool) -> tuple[float, list[float], int]:
        """(seconds for all, seconds of each, bytes of one) of `requests` hand-offs that start at once; with `compare` what
        has landed is read too, and RuntimeError raised when it is not what was sent."""
        _say(self._control, {"length": length, "requests": requests, "compare": compare})
        reply = self._reply()
        return reply["seconds"], reply["latencies"], reply["num_bytes"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()
        self._log.close()

    def _reply(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._log.seek(0)
            raise RuntimeError(f"the process of {self._name} has ended:\n{self._log.read().decode(errors='replace')}")
        reply: dict[str, Any] = json.loads(line)
        return reply


class _End:
    """What the process of a `Peer` does: the hand-offs that the control connection asks for, or their receiver."""

    def __init__(
        self, name: str, control: socket.socket, memory: SharedMemory, num_pages: int, num_slots: int, host: str
    ) -> None:
        self._control, self._num_pages, self._num_slots = control, num_pages, num_slots
        self._bytes = np.frombuffer(memory.map, dtype=np.uint8, count=memory.size_bytes)
        self._library = LIBRARIES[name](self._bytes.ctypes.data, len(self._bytes), host)

    def receive(self, listener: socket.socket) -> None:
        """Answers that it has heard, with the checksums of the pieces that it is to read."""
        _say(self._control, {"port": listener.getsockname()[1]})
        self._connection, _ = listener.accept()
        self._lines = self._connection.makefile("r")
        self._meet()
        for line in self._lines:
            _say(self._connection, [self._sum(offset, num_bytes) for offset, num_bytes in json.loads(line)])

    def send(self, target: tuple[str, int]) -> None:
        self._connection = socket.create_connection(target)
        self._lines = self._connection.makefile("r")
        self._meet()
        _say(self._control, {"port": 0})
        for line in self._control.makefile("r"):
            _say(self._control, self._hand_off(**json.loads(line)))

    def _meet(self) -> None:
        _say(self._connection, self._library.about)
        self._library.meet(json.loads(self._lines.readline()))

    def _hand_off(self, length: int, requests: int, compare: bool) -> dict[str, Any]:
        """Hand-offs wait for pages and a slot as ours do; those under way are waited for in the order in which they began."""
        begin_s, latencies, num_bytes = time.perf_counter(), [], 0
        pool, under_way = PagePool(self._num_pages, self._num_slots), deque[tuple[SeqKV, Pieces, Any]]()
        while requests or under_way:
            while requests and (room := pool.take(LAYOUT.pages_for(length))) is not None:
                pieces = self._pieces(room, length)
                under_way.append((room, pieces, self._library.begin(*pieces)))
                requests -= 1
            room, pieces, transfer = under_way.popleft()
            self._library.finish(transfer)
            self._ask([])
            latencies.append(time.perf_counter() - begin_s)
            num_bytes = int(pieces[2].sum())
            if compare:
                self._compare(*pieces)
            pool.drop(room)
        return {"seconds": time.perf_counter() - begin_s, "latencies": latencies, "num_bytes": num_bytes}

    def _pieces(self, room: SeqKV, length: int) -> Pieces:
        """A hand-off from random pages and a random slot to `room`."""
        places = handoff_places(LAYOUT, room.pages, room.slot, length)
        numbers = np.full(len(places), random.randrange(1, self._num_slots))
        numbers[: len(room.pages)] = random.sample(range(1, self._num_pages), len(room.pages))
        kinds, starts = places[:, KIND], np.array([0, self._num_pages * LAYOUT.page_bytes])
        row_bytes = np.array([LAYOUT.page_bytes, LAYOUT.slot_bytes])[kinds]
        inside = starts[kinds] + places[:, OFFSET]
        return numbers * row_bytes + inside, places[:, NUMBER] * row_bytes + inside, places[:, NBYTES].astype(np.int64)

    def _compare(self, sources: Offsets, targets: Offsets, sizes: Offsets) -> None:
        sent = [self._sum(offset, num_bytes) for offset, num_bytes in zip(sources.tolist(), sizes.tolist(), strict=True)]
        if self._ask(np.stack((targets, sizes), 1).tolist()) != sent:
            raise RuntimeError("what has landed is not what was sent")

    def _ask(self, pieces: list[list[int]]) -> list[int]:
        """Tells the receiver that all is in place, and waits until it has heard: the checksums of `pieces` there."""
        _say(self._connection, pieces)
        sums: list[int] = json.loads(self._lines.readline())
        return sums

    def _sum(self, offset: int, num_bytes: int) -> int:
        return zlib.crc32(self._bytes[offset : offset + num_bytes].data)


def _say(connection: socket.socket, what: Any) -> None:
    connection.sendall(json.dumps(what).encode() + b"\n")


def main() -> None:
    if len(sys.argv) not in (8, 10):  # see Peer
        print("scripts.kv_peers is a process of scripts.bench_kvtransfer --peers, and is started by that only", file=sys.stderr)
        sys.exit(2)
    die_with_parent(signal.SIGKILL)  # also when it stands still
    name, *numbers, host, advertise = sys.argv[1:8]
    target = sys.argv[8:]
    control_fd, memory_fd, num_pages, num_slots = map(int, numbers)
    memory = SharedMemory.inherit(memory_fd, num_pages * LAYOUT.page_bytes + num_slots * LAYOUT.slot_bytes)
    with socket.socket(fileno=control_fd) as control:
        end = _End(name, control, memory, num_pages, num_slots, advertise)
        if target:
            end.send((target[0], int(target[1])))
        else:
            with socket.create_server((host, 0)) as listener:
                end.receive(listener)


if __name__ == "__main__":
    main()
