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

from kvtransfer.transports.memory import Bytes

PACK_BYTES = 4 << 20
VECTOR = 64  # page views handed to the kernel at once

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
