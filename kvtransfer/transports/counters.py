"""Counts that the bulk engine keeps and its owner reads, in memory that both have mapped: no message, no lock."""

from __future__ import annotations

import mmap
import os
import weakref

_NAMES = ("bad_frames", "late_frames", "repeated_frames", "chunks_sent", "chunks_resent", "bulk_bytes_sent", "refused_peers")


class Counters:
    """Written by one thread, read by any: an aligned 8-byte number is never seen half written."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("pdserve-counters", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, mmap.PAGESIZE)
        weakref.finalize(self, os.close, self.fd)
        self._values = memoryview(mmap.mmap(self.fd, mmap.PAGESIZE)).cast("Q")[: len(_NAMES)]

    def add(self, name: str, amount: int = 1) -> None:
        """Raises ValueError for a name that is not in the list."""
        self._values[_NAMES.index(name)] += amount

    def read(self) -> dict[str, int]:
        return dict(zip(_NAMES, self._values, strict=True))
