"""Host memory that other processes of the same host can map: one sealed memfd, with its name in its last page.

Sealed against shrinking, so that who maps it can never be killed by a read behind a cut. A foreign one is mapped for
reading only: a peer may fetch bytes from it, and never change any.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

NAME_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """`size_bytes` bytes from the start of `map` are for use; behind them is `name`, 16 random bytes."""

    fd: int
    size_bytes: int
    name: bytes
    map: mmap.mmap

    @classmethod
    def create(cls, size_bytes: int) -> SharedMemory:
        """Fresh memory, zero-filled. Its descriptor belongs to the map: both go when nothing refers to them any more."""
        name = os.urandom(NAME_BYTES)
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _mapped_bytes(size_bytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls._map(fd, size_bytes, name, mmap.ACCESS_WRITE)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def inherit(cls, fd: int, size_bytes: int) -> SharedMemory:
        """Memory of the parent process, whose descriptor was passed on. Raises ValueError when it is not that large."""
        if os.fstat(fd).st_size != _mapped_bytes(size_bytes):
            raise ValueError(f"descriptor {fd} is not {size_bytes} bytes of shared memory")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a fault for each page's first write halves the speed of that write
        mapped = mmap.mmap(fd, _mapped_bytes(size_bytes), flags=flags)
        return cls(fd, size_bytes, bytes(mapped[size_bytes : size_bytes + NAME_BYTES]), mapped)

    @classmethod
    def open_foreign(cls, pid: int, fd: int, size_bytes: int, name: bytes) -> SharedMemory:
        """Memory of another process of this host and user, to read from.

        Raises OSError when it cannot be opened, ValueError when it is not what it was said to be.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # what is opened may be a pipe or a terminal instead
        own = os.open(f"/proc/{pid}/fd/{fd}", flags)
        try:
            if fcntl.fcntl(own, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("the peer's memory is not sealed: it could be cut while it is read")
            if os.fstat(own).st_size != _mapped_bytes(size_bytes):
                raise ValueError("the peer's memory has another size than it says")
            opened = cls._map(own, size_bytes, name, mmap.ACCESS_READ)
            if opened.name != name:
                raise ValueError("the peer's memory has another name than it says")
            return opened
        except BaseException:
            os.close(own)
            raise

    @classmethod
    def _map(cls, fd: int, size_bytes: int, name: bytes, access: int) -> SharedMemory:
        mapped = mmap.mmap(fd, _mapped_bytes(size_bytes), access=access)
        if access == mmap.ACCESS_WRITE:
            with suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)  # where the kernel's shmem_enabled is "advise"
            mapped[size_bytes : size_bytes + NAME_BYTES] = name
        return cls(fd, size_bytes, bytes(mapped[size_bytes : size_bytes + NAME_BYTES]), mapped)

    def close_descriptor(self) -> None:
        """The map stays; nobody can open it by this descriptor any more."""
        os.close(self.fd)


def _mapped_bytes(size_bytes: int) -> int:
    return -(-(size_bytes + NAME_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
