"""The transport as its owner sees it: checks what it is asked for, passes it on to its engine, reads what comes back."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kvtransfer.sharing import SharedMemory
from kvtransfer.spans import KIND, KINDS, NBYTES, Spans, sources_of, spoken, strays, to_bytes
from kvtransfer.transports import MAX_WRITE_SPANS, BulkOptions, Event, Key, Link
from kvtransfer.transports.channel import ChannelClosed, channel_pair, unpack_event
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.frame import PATHS
from kvtransfer.transports.memory import CpuMemory, DeviceMemory, Memory, Rows
from kvtransfer.transports.seal import check_secret
from wire.sockets import MAX_PEERS

if TYPE_CHECKING:
    from kvtransfer.arena import Arena

END_S = 5.0  # for an engine to end by itself
START_S = 120.0  # memory is touched for the first time: a second for ten gigabytes
_GIB = 1 << 30
# A sealed chunk needs buffers; giving their pages back to the kernel each time costs 10,000 faults for 64 MiB
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(_GIB), "MALLOC_MMAP_THRESHOLD_": str(_GIB), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_SWITCH_S = 0.00002  # who computes in Python gives way to the engine's thread after so long; of Python's own 5 ms many add up
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_MAX_NAME = 100  # characters
_FAST_XXHASH = (4, 1)  # finds out at run time which vector instructions there are
_DEFAULTS = BulkOptions()
_log = logging.getLogger("kvtransfer")


class BulkTransport:
    """See `Transport`. The engine is a process over an arena in shared memory, a thread over one on a device."""

    engine = "kvtransfer.transports.engine"  # the process's module

    def __init__(
        self,
        arena: Arena,
        host: str = "127.0.0.1",
        advertise: str = "",
        options: BulkOptions = _DEFAULTS,
        password: bytes = b"",
    ) -> None:
        self._password = password
        self._arena = arena  # its descriptor stays open for as long as we do
        self._rows: Rows = {kind: (len(t), t.shape[1]) for kind, t in (("page", arena.pages), ("slot", arena.slots))}
        self._counters = Counters()
        self._links: dict[str, Link] = {}
        self._names: dict[str, str] = {}  # of peers, the one that was met last behind the others
        self._closed = False
        self._channel, theirs = channel_pair()
        self._process: subprocess.Popen[bytes] | None = None
        self._memory: Memory | None = None
        if self._own_process(arena):
            self._process = self._start_process(arena, host, options, theirs)
        else:
            self._memory = self._start_thread(arena, host, options, theirs)
        self._address = f"tcp://{advertise or host}:{self._await_port()}"
        _warn_of_pacing()
        _warn_of_slow_digests()

    def address(self) -> str:
        return self._address

    def expect(self, key: Key, slot: int, pages: Sequence[int], seal: bytes = b"") -> None:
        for kind, numbers in (("page", pages), ("slot", [slot])):
            if not all(0 < number < self._rows[kind][0] for number in numbers):
                raise ValueError(f"{kind}s {numbers} cannot be granted: ours are 1..{self._rows[kind][0] - 1}")
        check_secret(seal)
        self._channel.send("expect", *key, slot, list(pages), self._mark(), seal)

    def revoke(self, key: Key) -> None:
        self._channel.send("revoke", *key)

    def meet(self, peer: str, name: str) -> None:
        self._names.pop(peer, None)
        self._names[peer] = name if name.isprintable() and len(name) <= _MAX_NAME else ""  # whoever grants may say anything
        if len(self._names) > MAX_PEERS:
            del self._names[next(iter(self._names))]

    def write(self, peer: str, key: Key, spans: Spans, seal: bytes = b"") -> None:
        if not (0 <= key[0] < 1 << 64 and 0 <= key[1] < 1 << 32):
            raise ValueError(f"{key}: a rid has 64 bits, an attempt 32")
        if not 0 < len(spans) <= MAX_WRITE_SPANS:
            raise ValueError(f"a write takes 1 to {MAX_WRITE_SPANS} spans, not {len(spans)}")
        self._check(spans)
        check_secret(seal)
        self._channel.send("write", *key, peer, to_bytes(spans), self._mark(), seal)

    def cancel(self, key: Key) -> None:
        self._channel.send("cancel", *key)

    def poll(self) -> list[Event]:
        self._channel.flush()
        events: list[Event] = []
        try:
            for message in self._channel.receive():
                if message[0] == "link":
                    self._linked(message[1], message[2])
                else:
                    events += map(unpack_event, message[1])
        except ChannelClosed:
            if not self._closed:
                raise RuntimeError("the engine that moves KV bytes has died: this worker cannot go on") from None
        return events

    def fileno(self) -> int:
        return self._channel.fileno()

    def counters(self) -> Mapping[str, int]:
        return self._counters.read()

    def links(self) -> Mapping[str, Link]:
        return self._links

    def gauges(self) -> Mapping[str, float]:
        usable = [link for link in self._links.values() if link.usable]
        return {
            **{f"kv_links_{path}": sum(link.path == path for link in usable) for path in PATHS},
            "kv_links_unusable": len(self._links) - len(usable),
            "kv_slowest_link_gb_per_s": min((link.gb_per_s for link in self._links.values()), default=0.0),
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        if self._process is not None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:  # stuck, or stopped: this worker has to end all the same
                self._process.kill()
                self._process.wait()
        else:
            self._thread.join()

    def _own_process(self, arena: Arena) -> bool:
        return arena.shared is not None

    def _start_process(self, arena: Arena, host: str, options: BulkOptions, theirs: socket.socket) -> subprocess.Popen[bytes]:
        assert arena.shared is not None
        descriptors = (theirs.fileno(), arena.shared.fd, self._counters.fd)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", self.engine, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=descriptors, env={**os.environ, **_MALLOC, "PYTHONPATH": path})
        theirs.close()
        pages, slots = self._rows["page"], self._rows["slot"]
        memory = (arena.shared.fd, arena.shared.size_bytes, pages, slots)
        self._channel.send("start", *memory, self._counters.fd, host, astuple(options), self._password)
        return process

    def _start_thread(self, arena: Arena, host: str, options: BulkOptions, theirs: socket.socket) -> Memory:
        from kvtransfer.transports.channel import Channel
        from kvtransfer.transports.engine import Engine, Site

        if not _keep_freed_memory():
            _log.info("this C library does not keep freed memory: each large frame costs page faults")
        memory, shared, path = self._device_memory(arena), arena.shared, "shm"
        if isinstance(memory, DeviceMemory):
            shared, path = self._share_handles(memory.handles()), "cuda_ipc"
        site = Site(memory, self._rows, shared, path, host, options, self._counters, self._password)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._engine = Engine(Channel(theirs), site)
        self._thread = threading.Thread(target=self._engine.run, name="kvtransfer", daemon=True)
        self._thread.start()
        return memory

    def _device_memory(self, arena: Arena) -> Memory:
        if arena.pages.is_cuda:
            from kvtransfer.transports.cuda import CudaMemory, SideStream
            from kvtransfer.transports.cuda_ipc import CudaIpc

            device = arena.pages.device
            return CudaMemory({"page": arena.pages, "slot": arena.slots}, SideStream(device), CudaIpc(device))
        return CpuMemory({"page": arena.pages.numpy(), "slot": arena.slots.numpy()})

    def _share_handles(self, handles: bytes) -> SharedMemory | None:
        """Where peers of this host, and only they, find them."""
        if not handles:
            return None
        shared = SharedMemory.create(len(handles))
        shared.map[: len(handles)] = handles
        weakref.finalize(self, os.close, shared.fd)
        return shared

    def _await_port(self) -> int:
        """Blocks, once, until the engine listens. Raises RuntimeError when it does not."""
        try:
            message = self._channel.first(START_S) or ["failed", f"their engine did not start within {START_S:g} s"]
        except ChannelClosed:
            message = ["failed", "their engine died at its start"]
        if message[0] != "bound":
            self.close()
            raise RuntimeError(f"KV bytes cannot be moved: {message[1]}")
        port: int = message[1]
        return port

    def _mark(self) -> int:
        return self._memory.mark() if self._memory is not None else 0

    def _linked(self, peer: str, values: list[Any] | None) -> None:
        if values is None:
            self._links.pop(peer, None)
            return
        link = self._links[peer] = Link(*values)
        name = self._names.get(peer)
        who = f"{name} at {peer}" if name else peer
        if not link.usable:
            _log.error("no KV goes to %s: %s", who, link.reason)
            return
        because = f" ({link.reason})" if link.reason else ""
        lanes = f", {link.lanes} connections" if link.lanes > 1 else ""
        _log.info("KV to %s goes over %s%s, %.2f GB/s in its test%s", who, link.path, lanes, link.gb_per_s, because)

    def _check(self, spans: Spans) -> None:
        if spans[:, KIND].max() >= len(KINDS):
            raise ValueError(f"a span of kind {spans[:, KIND].max()}")
        sources = sources_of(spans)
        wrong = strays(sources, self._rows) | (sources[:, NBYTES] == 0)
        if wrong.any():
            raise ValueError(f"{spoken(sources[wrong][0])} is not inside our arena: {self._rows}")


def _keep_freed_memory() -> bool:
    """For an engine in this process what _MALLOC is for one of its own, as far as it can still be said; an older glibc
    takes pieces of up to 32 MiB only. Whether this C library has such a thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not any(mallopt(_MMAP_THRESHOLD, size_bytes) for size_bytes in (_GIB, 32 << 20)):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _GIB))


def congestion_control() -> str:
    """The kernel's algorithm for new TCP connections, "" where it does not say."""
    return _CONGESTION.read_text().strip() if _CONGESTION.exists() else ""


def _warn_of_pacing() -> None:
    if congestion_control() == "bbr":
        _log.warning(
            "TCP connections here use BBR, which paces them: KV within this host goes by reno where it may be chosen, KV to "
            "other hosts by BBR, in a fast network at about half of what reno or cubic reach"
        )


def _warn_of_slow_digests() -> None:
    if tuple(map(int, xxhash.VERSION.split(".")[:2])) < _FAST_XXHASH:
        _log.warning(
            "xxhash %s makes digests of KV at a half to a third of the speed of 4.1: python3 -m pip install 'xxhash>=4.1'",
            xxhash.VERSION,
        )
