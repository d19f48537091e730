"""GPU memory that other processes of the same host may read, by way of the CUDA driver.

A handle is 64 bytes that only this host's driver understands. torch has a way of its own to share tensors, but it counts on
each handle being received once and trusts the numbers that come with it; here one handle serves any number of peers, and
what a peer says is held against what the driver has opened.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from torch import Tensor

HANDLE_BYTES = 64
ALIGNMENT = 64  # of rows in an allocation, so that they can be read as wider words
_KINDS = ("page", "slot")
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


@dataclass(frozen=True, slots=True)
class Extent:
    """Where rows begin: `offset` bytes into the allocation that `handle` opens."""

    handle: bytes
    offset: int


def pack_extents(extents: Mapping[str, Extent]) -> bytes:
    packed: bytes = msgpack.packb([[extents[kind].handle, extents[kind].offset] for kind in _KINDS])
    return packed


def unpack_extents(data: bytes) -> dict[str, Extent]:
    """Raises ValueError for anything but what `pack_extents` makes."""
    try:
        rows = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"{len(data)} bytes are no handles") from error
    match rows:
        case [[bytes() as pages, int() as page_offset], [bytes() as slots, int() as slot_offset]]:
            extents = {"page": Extent(pages, page_offset), "slot": Extent(slots, slot_offset)}
        case _:
            raise ValueError("these are no handles of pages and slots")
    for extent in extents.values():
        if len(extent.handle) != HANDLE_BYTES or not 0 <= extent.offset < 1 << 48 or extent.offset % ALIGNMENT:
            raise ValueError(f"a handle of {len(extent.handle)} bytes, at {extent.offset}")
    return extents


@dataclass(frozen=True, slots=True)
class Opened:
    """Memory of another process: `base` is what is to be closed, `address` where its rows begin."""

    base: int
    address: int


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaIpc:
    """The driver's calls, for the memory of one device. Raises OSError with the driver's word for what went wrong."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        address, size = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
        self._driver.cuMemGetAddressRange_v2.argtypes = [address, size, ctypes.c_uint64]
        self._driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [address, _Handle, ctypes.c_uint]
        self._driver.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
        self._driver.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def export(self, rows: Tensor) -> Extent:
        handle = _Handle()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # whichever thread this is: the driver wants its context to be current
            base, _ = self._range(rows.data_ptr())
            self._check("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return Extent(bytes(handle.reserved), rows.data_ptr() - base)

    def open(self, extent: Extent, nbytes: int) -> Opened:
        """`nbytes` bytes that our device can read, on whichever device they are. Raises ValueError when there are fewer."""
        base = ctypes.c_uint64()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._check("cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(extent.handle), _LAZY_PEER_ACCESS)
            try:
                begin, size = self._range(base.value)
                if base.value + extent.offset + nbytes > begin + size:
                    raise ValueError(f"{nbytes} bytes from {extent.offset} on are more than the {size} that were opened")
            except BaseException:
                self._check("cuIpcCloseMemHandle", base.value)
                raise
        return Opened(base.value, base.value + extent.offset)

    def close(self, opened: Opened) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._check("cuIpcCloseMemHandle", opened.base)

    def _range(self, address: int) -> tuple[int, int]:
        """(first address, bytes) of the allocation that `address` lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._check("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def _check(self, function: str, *arguments: Any) -> None:
        result: int = getattr(self._driver, function)(*arguments)
        if result:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(result, ctypes.byref(name))
            raise OSError(f"{function}: {(name.value or b'error %d' % result).decode()}")
