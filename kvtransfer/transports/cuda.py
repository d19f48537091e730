"""CUDA memory as a transport sees it: packed on the device, over PCIe once a chunk through pinned memory.

The transport works in a thread of the owner's process here. Peer copies between GPUs of one host (CUDA IPC) would be a
third path beside "zeromq" and "shm": HELLO carries the handle, and the receiver fetches, as it does from shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtransfer.transports import Place
from kvtransfer.transports.memory import Bytes

if TYPE_CHECKING:
    from kvtransfer.arena import Arena

_MARKS = 65_536  # kept; a hand-off that waits for more others than that starts behind the last of them


class CudaMemory:
    """See `Memory`. Copies run on a stream of their own."""

    def __init__(self, arena: Arena) -> None:
        self._rows = {"page": arena.pages, "slot": arena.slots}
        self._device = arena.pages.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._numbers = count(1)
        self._newest = 0
        self._events: dict[int, torch.cuda.Event] = {}

    def mark(self) -> int:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        number = next(self._numbers)
        self._events[number] = event
        self._newest = number  # in this order: the other thread finds what it names
        self._events.pop(number - _MARKS, None)
        return number

    def direct(self, place: Place, mark: int) -> None:
        return None

    def buffer(self, nbytes: int) -> Bytes:
        pinned: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned

    def gather(self, places: Sequence[Place], out: Bytes, mark: int) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event(mark))
            packed = torch.cat(self._views(places))
            torch.from_numpy(out).copy_(packed, non_blocking=True)
            self._stream.synchronize()

    def scatter(self, places: Sequence[Place], parts: Sequence[Bytes], mark: int) -> Iterator[Bytes]:
        sizes = [place[3] for place in places]
        total = sum(sizes)
        if self._staging.numel() < total:
            self._staging = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        pinned: Bytes = self._staging[:total].numpy()
        np.concatenate(parts, out=pinned)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._event(mark))
            packed = self._staging[:total].to(self._device, non_blocking=True)
            for target, source in zip(self._views(places), torch.split(packed, sizes), strict=True):
                target.copy_(source)
            self._stream.synchronize()
        yield from np.split(pinned, np.cumsum(sizes[:-1]))

    def _event(self, mark: int) -> torch.cuda.Event:
        """What a copy waits for. A mark that is forgotten is covered by any later one: one thread makes them, in order."""
        return self._events.get(mark) or self._events[self._newest]

    def _views(self, places: Sequence[Place]) -> list[torch.Tensor]:
        return [self._rows[kind][number, offset : offset + nbytes] for kind, number, offset, nbytes in places]
