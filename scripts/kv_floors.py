"""The floors that KV transfer is measured against: the same pages through plain TCP and through memcpy, in the same run.

`receive` runs at the target, `send` at the source, a thread per stream each; pages go from random places to random
places. "scatter" hands page views to the kernel, "packed" gathers 4 MiB first and scatters it at the other end.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.spans import move_spans
from kvtransfer.arena import Arena
from kvtransfer.spans import Spans, num_bytes, places_of, sources_of
from kvtransfer.transports.connection import hurry_within_a_host
from kvtransfer.transports.cuda import Ground, rows_at, span_table
from kvtransfer.transports.memory import Bytes

PACK_BYTES = 4 << 20
VECTOR = 64  # page views handed to the kernel at once
AHEAD = 4  # times that what a GPU is timed at is begun before: it is at work then, and does not wait to be told the next
TURNS = 9

Share = Callable[[Sequence[int], socket.socket], None]  # moves these pages over a connection


def receive(listener: socket.socket, pages: Bytes, order: Sequence[int], streams: int, packed: bool) -> None:
    """Takes `order`'s pages over `streams` connections, each its share; says so with one byte on each."""

    def take(share: Sequence[int], connection: socket.socket) -> None:
        with connection:
            if packed:
                _receive_packed(connection, pages, share)
            else:
                for start in range(0, len(share), VECTOR):
                    _receive_into(connection, [memoryview(pages[page]) for page in share[start : start + VECTOR]])
            connection.sendall(b"!")

    _in_threads([(take, order[i::streams], listener.accept()[0]) for i in range(streams)])


def send(address: tuple[str, int], pages: Bytes, order: Sequence[int], streams: int, packed: bool) -> float:
    """Seconds from the first byte until every page is in its place at the target."""

    def give(share: Sequence[int], connection: socket.socket) -> None:
        with connection:
            if packed:
                _send_packed(connection, pages, share)
            else:
                for start in range(0, len(share), VECTOR):
                    _send_all(connection, [memoryview(pages[page]) for page in share[start : start + VECTOR]])
            connection.recv(1)

    connections = [socket.create_connection(address) for _ in range(streams)]
    for connection in connections:  # as ours are
        hurry_within_a_host(connection, address[0])
    begin_s = time.perf_counter()
    _in_threads([(give, order[i::streams], connection) for i, connection in enumerate(connections)])
    return time.perf_counter() - begin_s


def memcpy_seconds(source: Bytes, target: Bytes, order: Sequence[int], places: Sequence[int]) -> float:
    """One thread, page by page, scattered."""
    begin_s = time.perf_counter()
    for src, dst in zip(order, places, strict=True):
        target[dst] = source[src]
    return time.perf_counter() - begin_s


def copy_rate(target: Tensor, source: Tensor) -> float:
    """GB/s of a copy from or to a GPU (the other side pinned memory, or a GPU too), the median of five."""
    seconds = []
    for _ in range(6):
        begin_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        for device in {side.device for side in (target, source) if side.is_cuda}:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin_s)
    return source.numel() / 1e9 / statistics.median(seconds[1:])


def kernel_rates(source: Arena, device: str, spans: Spans) -> tuple[float, float]:
    """GB/s of `spans` from an arena to one as large on the GPU `device`, moved by the kernel of cuda_ipc alone, on that GPU and
    out of the other's memory; and GB/s of a copy in one piece of as many bytes. By the GPUs' clocks, medians of turns."""
    rows = {"page": source.pages, "slot": source.slots}
    target = {kind: torch.empty_like(each, device=device) for kind, each in rows.items()}
    here, there = source.pages.device, target["page"].device
    for kind, each in rows.items():  # there and back: each of two GPUs may read the other's memory then
        each.copy_(target[kind].copy_(each))
    as_seen = {kind: rows_at(each.data_ptr(), there, *each.shape) for kind, each in rows.items()}
    move = mover(Ground.of(as_seen), Ground.of(target), spans)
    nbytes = num_bytes(spans)
    whole, room = (torch.zeros(nbytes, dtype=torch.uint8, device=each) for each in (here, there))
    torch.cuda.synchronize(there)
    seen = rows_at(room.data_ptr(), here, 1, nbytes)[0]  # else torch has streams of both GPUs wait for each other
    seconds = [(_gpu_seconds(there, move), _gpu_seconds(here, lambda: seen.copy_(whole))) for _ in range(1 + TURNS)]
    kernel_s, copy_s = map(statistics.median, zip(*seconds[1:], strict=True))
    return nbytes / 1e9 / kernel_s, nbytes / 1e9 / copy_s


def mover(source: Ground, target: Ground, spans: Spans) -> Callable[[], None]:
    """What starts to move `spans` between two arenas, as one device sees them."""
    places = places_of(spans)
    table = torch.from_numpy(span_table(source.at(sources_of(spans)), target.at(places), places)).to(target.words.device)
    return lambda: move_spans(source.words, target.words, *table)


def _gpu_seconds(device: torch.device, begin: Callable[[], object]) -> float:
    """Of what `begin` starts on the current stream of `device`."""
    with torch.cuda.device(device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(AHEAD):
            begin()
        before.record()
        begin()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def _in_threads(calls: list[tuple[Share, Sequence[int], socket.socket]]) -> None:
    """Raises OSError when one of them does."""
    errors: list[OSError] = []

    def call(function: Share, share: Sequence[int], connection: socket.socket) -> None:
        try:
            function(share, connection)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=each, daemon=True) for each in calls]  # Ctrl-C does not wait for them
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _send_all(connection: socket.socket, views: list[memoryview]) -> None:
    while views:
        sent = connection.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def _receive_into(connection: socket.socket, views: list[memoryview]) -> None:
    while views:
        got = connection.recvmsg_into(views)[0]
        if not got:
            raise ConnectionError("the source has closed the connection")
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if got:
            views[0] = views[0][got:]


def _send_packed(connection: socket.socket, pages: Bytes, share: Sequence[int]) -> None:
    per = max(1, PACK_BYTES // pages.shape[1])
    staging = np.empty((per, pages.shape[1]), dtype=np.uint8)
    for start in range(0, len(share), per):
        part = share[start : start + per]
        np.take(pages, part, axis=0, out=staging[: len(part)], mode="clip")
        connection.sendall(staging[: len(part)].reshape(-1).data)


def _receive_packed(connection: socket.socket, pages: Bytes, share: Sequence[int]) -> None:
    per = max(1, PACK_BYTES // pages.shape[1])
    staging = np.empty((per, pages.shape[1]), dtype=np.uint8)
    for start in range(0, len(share), per):
        part = share[start : start + per]
        _receive_into(connection, [staging[: len(part)].reshape(-1).data])
        pages[list(part)] = staging[: len(part)]
