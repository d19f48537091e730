"""How fast a hand-off is, beside the same bytes through a plain TCP connection in the same run.

Prints both (run pytest with -s); asserts that every byte arrived, and no speed: that belongs to a quiet machine.
"""

from __future__ import annotations

import select
import socket
import statistics
import threading
import time
from pathlib import Path

import pytest
import torch
import zmq

from kvtransfer.arena import Arena
from kvtransfer.layout import Field, KVLayout
from kvtransfer.receiver import Arrived, Receiver
from kvtransfer.sender import Sender, Sent
from kvtransfer.transports.zeromq import ZeroMQTransport

torch.set_num_threads(1)

NUM_PAGES = 48
REPEATS = 5
# DeepSeek-V4-Flash's page of 256 tokens, and a slot whose live bytes are in hundreds of pieces
PAGE_BYTES = 986_624
LAYOUT = KVLayout.pack(
    256, [Field(0, "page", 0, 1, PAGE_BYTES, 256)], [Field(layer, "window", 0, 132, 584, keep=128) for layer in range(44)]
)


def tcp_rate(source: Arena, target: Arena, length: int) -> float:
    """GB/s of the pages over one plain connection, straight out of and into the arenas, until the last byte is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        into, _ = server.accept()

    def send() -> None:
        for page in range(1, NUM_PAGES + 1):
            out.sendall(source.pages[page].numpy().data)

    with out, into:
        thread = threading.Thread(target=send)
        begin_s = time.perf_counter()
        thread.start()
        for page in range(1, NUM_PAGES + 1):
            view = target.pages[NUM_PAGES + 1 - page].numpy().data
            while view:
                view = view[into.recv_into(view) :]
        seconds = time.perf_counter() - begin_s
        thread.join()
    return length // 256 * PAGE_BYTES / seconds / 1e9


def handoff_rate(
    sender: Sender, receiver: Receiver, out: ZeroMQTransport, into: ZeroMQTransport, attempt: int, length: int
) -> float:
    """GB/s of one hand-off, from the push until everything is checked on the other side."""
    key = (1, attempt)
    sender.open(key)
    sender.granted(receiver.open(key, 1, list(range(NUM_PAGES, 0, -1))))
    ended: list[object] = []

    def done() -> bool:
        for sent in sender.poll():
            assert isinstance(sent, Sent), sent
            num_bytes.append(sent.ready.num_bytes)
            receiver.ready(sent.ready)
        ended.extend(receiver.poll(time.monotonic()))
        return bool(ended)

    num_bytes: list[int] = []
    begin_s = time.perf_counter()
    sender.push(key, list(range(1, NUM_PAGES + 1)), 1, length, final=True)
    while not done():
        ready, _, _ = select.select([out.fileno(), into.fileno()], [], [], 10)
        assert ready, "nothing happens"
    seconds = time.perf_counter() - begin_s
    assert ended == [Arrived(key, length)]
    return num_bytes[0] / seconds / 1e9


def test_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source, target = Arena(LAYOUT, NUM_PAGES + 1, 2), Arena(LAYOUT, NUM_PAGES + 1, 2)
    source.pages.random_(0, 256)
    source.slots.random_(0, 256)
    out, into = ZeroMQTransport(context, source), ZeroMQTransport(context, target)
    sender, receiver = Sender(source, out), Receiver(target, into, 10.0)
    length = NUM_PAGES * 256
    tcp, ours = [], []
    for attempt in range(REPEATS):
        target.pages.zero_()
        target.slots.zero_()
        ours.append(handoff_rate(sender, receiver, out, into, attempt, length))
        for page in range(1, NUM_PAGES + 1):
            assert torch.equal(target.pages[NUM_PAGES + 1 - page], source.pages[page])
        for offset, nbytes in LAYOUT.live_slot_spans(length):
            assert torch.equal(target.slots[1, offset : offset + nbytes], source.slots[1, offset : offset + nbytes])
        target.pages.zero_()
        tcp.append(tcp_rate(source, target, length))
        assert torch.equal(target.pages[1], source.pages[NUM_PAGES])
    out.close()
    into.close()
    context.destroy(linger=0)
    algorithm = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    control = algorithm.read_text().strip() if algorithm.exists() else "unknown"
    with capsys.disabled():
        print(
            f"\nhand-off {statistics.median(ours):.2f} GB/s with digest, plain TCP {statistics.median(tcp):.2f} GB/s, "
            f"ratio {statistics.median(ours) / statistics.median(tcp):.2f} (one process, congestion control {control})"
        )
