"""Receivers that welcome, answer and break off at random, against senders of all kinds: every hand-off ends once, nothing is
held when all have, and no nonce seals two things."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvtransfer.transports import BulkOptions, Drained, Key, Lost, Wrote
from kvtransfer.transports.frame import PATHS, VERSION, Ack, Welcome, pack_ack, pack_welcome, unpack_chunk
from kvtransfer.transports.outbound import CREDIT
from kvtransfer.transports.seal import SECRET_BYTES
from tests.test_gpu_link import large_arena, memory_of, page_span
from tests.transfer_rig import DeviceTransport, Proxy, ThreadTransport, table, wait

NUM_HANDOFFS, AT_ONCE = 150, 16
SIZES = (4096, 200_000, 1 << 20)


class Hostile:
    """Knows the protocol and mostly keeps to it. `astray`: how often it welcomes to any path; `sealed`: what came under
    each nonce."""

    def __init__(self, seed: int, astray: float, sealed: dict[tuple[Any, ...], tuple[bytes, bytes]]) -> None:
        self._random, self._astray, self._sealed = random.Random(seed), astray, sealed
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.proxy = Proxy(f"tcp://127.0.0.1:{self._port}")
        self.again = 0
        self.twice: list[tuple[Any, ...]] = []  # nonces
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.proxy.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(5):
                identity, *frames = self._socket.recv_multipart()
                for reply in self._hello() if frames[0][:4] == VERSION else self._chunk(*frames):
                    self._socket.send_multipart([identity, reply])

    def _hello(self) -> Iterator[bytes]:
        if self._hit(0.1):
            yield os.urandom(self._random.randrange(40))
        path = self._random.choice(PATHS) if self._hit(self._astray) else "zeromq"
        yield pack_welcome(Welcome(path, "?" * self._random.randrange(20), device=self._hit(0.5)))

    def _chunk(self, header: bytes, *frames: bytes) -> Iterator[bytes]:
        chunk = unpack_chunk(header)
        for index, frame in enumerate(frames if chunk.key[1] else ()):
            nonce = (chunk.key, chunk.number, -1 if chunk.memory_name else index)
            self.again += nonce in self._sealed
            if self._sealed.setdefault(nonce, (header, frame)) != (header, frame):
                self.twice.append(nonce)
        if self._hit(0.1):
            self.proxy.cut()
        if self._hit(0.03):
            return
        if self._hit(0.1):  # a guess, which may be of a chunk that has not left yet
            yield pack_ack(Ack(chunk.number + self._random.randrange(4), self._random.randrange(4)))
        yield pack_ack(Ack(chunk.number, 0 if chunk.probe or self._hit(0.9) else self._random.randrange(4)))

    def _hit(self, probability: float) -> bool:
        return self._random.random() < probability


@pytest.mark.parametrize(("kind", "path"), [("c", "zeromq"), ("c", "auto"), ("d", "zeromq"), ("d", "auto")])
def test_whatever_a_receiver_does_every_hand_off_ends_once_and_nothing_is_held(kind: str, path: str) -> None:
    chance = random.Random(f"{kind}{path}")
    sealed: dict[tuple[Any, ...], tuple[bytes, bytes]] = {}
    peers = [Hostile(chance.randrange(1 << 30), 0.01 if path == "zeromq" else 0.7, sealed) for _ in range(3)]
    kind_of = DeviceTransport if kind == "d" else ThreadTransport
    sender = kind_of(large_arena(20, seed=1), options=BulkOptions(path, lanes=2, stall_s=1.0))
    writes: dict[Key, int] = {}  # of those that are open
    cancels: dict[Key, float] = {}  # when those are cancelled that are
    cancelled: set[Key] = set()
    started, end_s = 0, time.monotonic() + 300.0  # it takes a few seconds
    while started < NUM_HANDOFFS or writes:
        assert time.monotonic() < end_s, f"{writes} hang, of which {cancelled & writes.keys()} were cancelled"
        while started < NUM_HANDOFFS and len(writes) < AT_ONCE:
            started += 1
            key = (started, chance.randrange(2))  # attempts of 1 are sealed
            writes[key] = chance.randrange(1, 4)
            for _ in range(writes[key]):
                pages = chance.sample(range(1, 20), chance.randrange(1, 12))
                spans = table(page_span(page, page, chance.choice(SIZES)) for page in pages)
                sender.write(chance.choice(peers).proxy.address, key, spans, b"k" * SECRET_BYTES if key[1] else b"")
            if chance.random() < 0.3:
                cancels[key] = time.monotonic() + chance.random()
        for key in [key for key, at_s in cancels.items() if at_s < time.monotonic()]:
            del cancels[key]
            if key in writes:
                cancelled.add(key)
                sender.cancel(key)
        for event in sender.poll():
            assert event.key in writes, f"{event} after its end"
            match event:
                case Wrote():
                    writes[event.key] -= 1
                case Drained():
                    assert event.key in cancelled
            ends = event.key not in cancelled and (isinstance(event, Lost) or not writes[event.key])
            if ends or isinstance(event, Drained):
                del writes[event.key]
        time.sleep(0.002)
    outbound = sender.inner._outbound
    jobs = outbound._jobs
    assert not (jobs._held or jobs._closing or jobs._ending or outbound._parcels or jobs.peers())
    lanes = [lane for peer in list(outbound._peers.values()) for lane in list(peer.lanes)]  # peers may break off even now
    assert not any(lane.parcels for lane in lanes)
    assert sum(peer.again for peer in peers) and not any(peer.twice for peer in peers)
    if kind == "d":
        assert wait(lambda: len(memory_of(sender)._ring._free) >= 2 * CREDIT), "all buffers come back"
    sender.close()
    for each in peers:
        each.close()
