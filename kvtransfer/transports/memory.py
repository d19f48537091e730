"""An arena as a transport sees it: packing spans into a host buffer and unpacking them, for CPU and CUDA memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.transports import Place

if TYPE_CHECKING:
    from kvtransfer.arena import Arena

Bytes = NDArray[np.uint8]


class Memory(Protocol):
    """Used by one thread, except `mark`, which belongs to the thread that computes."""

    def mark(self) -> Any:
        """A point in the computing thread's work; what was issued before it is done before a copy given it starts."""
        ...

    def buffer(self, nbytes: int) -> Bytes:
        """A fresh uint8 host buffer that `gather` writes to fast; it may be handed to a socket without a copy."""
        ...

    def gather(self, places: Sequence[Place], out: Bytes, mark: Any) -> None:
        """Packs the bytes of `places`, one after the other, into `out`; done when it returns."""
        ...

    def scatter(self, places: Sequence[Place], data: Bytes, mark: Any) -> list[Bytes]:
        """Unpacks `data` to `places`; done when it returns. Gives per place the bytes that a digest is to be made of.

        In CPU memory these are the arena's own bytes, so that the digest covers what really landed. From a device they
        would have to come back over PCIe: there they are the received bytes, and the copy is trusted.
        """
        ...


class CpuMemory:
    """Numpy views over the arena's tensors: one copy a span, without torch's cost per slice."""

    def __init__(self, arena: Arena) -> None:
        self._rows: dict[str, Bytes] = {"page": arena.pages.numpy(), "slot": arena.slots.numpy()}

    def mark(self) -> None:
        return None

    def buffer(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, dtype=np.uint8)

    def gather(self, places: Sequence[Place], out: Bytes, mark: None) -> None:
        at = 0
        for kind, number, offset, nbytes in places:
            out[at : at + nbytes] = self._rows[kind][number, offset : offset + nbytes]
            at += nbytes

    def scatter(self, places: Sequence[Place], data: Bytes, mark: None) -> list[Bytes]:
        landed, at = [], 0
        for kind, number, offset, nbytes in places:
            target = self._rows[kind][number, offset : offset + nbytes]
            target[:] = data[at : at + nbytes]
            landed.append(target)
            at += nbytes
        return landed


class CudaMemory:
    """Packs on the device, crosses PCIe once a message through pinned memory, on a stream of its own."""

    def __init__(self, arena: Arena) -> None:
        self._rows = {"page": arena.pages, "slot": arena.slots}
        self._device = arena.pages.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._staging = torch.empty(0, dtype=torch.uint8)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def buffer(self, nbytes: int) -> Bytes:
        pinned: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned

    def gather(self, places: Sequence[Place], out: Bytes, mark: torch.cuda.Event) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            packed = torch.cat(self._views(places))
            torch.from_numpy(out).copy_(packed, non_blocking=True)
            self._stream.synchronize()

    def scatter(self, places: Sequence[Place], data: Bytes, mark: torch.cuda.Event) -> list[Bytes]:
        if self._staging.numel() < data.nbytes:
            self._staging = torch.empty(data.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned: Bytes = self._staging[: data.nbytes].numpy()
        pinned[:] = data
        sizes = [place[3] for place in places]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            packed = self._staging[: data.nbytes].to(self._device, non_blocking=True)
            for target, source in zip(self._views(places), torch.split(packed, sizes), strict=True):
                target.copy_(source)
            self._stream.synchronize()
        return np.split(pinned, np.cumsum(sizes[:-1]))

    def _views(self, places: Sequence[Place]) -> list[torch.Tensor]:
        return [self._rows[kind][number, offset : offset + nbytes] for kind, number, offset, nbytes in places]


def memory_of(arena: Arena) -> Memory:
    """The way into `arena`'s memory, by its device."""
    return CudaMemory(arena) if arena.pages.is_cuda else CpuMemory(arena)
