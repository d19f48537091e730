"""The messages on a bulk connection, byte for byte. To ZeroMQ a sender's lane is a DEALER, a receiver's port a ROUTER.

    HELLO    sender -> receiver   who I am, and where my memory is if you can map it
    WELCOME  receiver -> sender   which path it is to be, and why
    OTHER    receiver -> sender   instead of it: I speak another version, this one
    CHUNK    sender -> receiver   a header, then the bytes in frames of their own (path "zeromq"), or the header alone:
                                  then the receiver fetches the bytes from the sender's memory (paths "shm", "cuda_ipc")
    ACK      receiver -> sender   that chunk's bytes are in place, or why not

Whatever changes here changes VERSION, with which a HELLO begins; OTHER, and the first four bytes of a HELLO, are the same for
ever. Little-endian throughout. A chunk's spans fill its payload frames in order, and none lies across two.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvtransfer.sharing import NAME_BYTES
from kvtransfer.spans import KIND, KINDS, NBYTES, SPAN_BYTES, SRC, Spans, from_bytes, to_bytes
from kvtransfer.transports import Key

MAX_SPANS = 4096
MAX_FRAMES = 64  # of payload in one chunk
CHUNK_BYTES = 8 << 20  # of payload in one chunk at most, unless one span is larger
STRAIGHT_BYTES = 16 << 20  # the same where it is read to its places and needs no buffer: each chunk costs Python a little
PATHS = ("zeromq", "shm", "cuda_ipc")
SPOKEN = {"zeromq": "ZeroMQ", "shm": "shared memory", "cuda_ipc": "CUDA IPC"}
MAX_HANDLES_BYTES = 1024  # what leads to a device's memory
LANDED, LATE, REFUSED, CORRUPT = range(4)  # what an ACK says
VERSION = b"pdH4"
OTHER = b"pdV1"
_HELLO = struct.Struct(f"<4sBxxxIIQ{NAME_BYTES}sIIII")
_WELCOME = struct.Struct("<4sB")
_OTHER = struct.Struct("<4s4s")
_CHUNK = struct.Struct(f"<4sBxxxIQQ{NAME_BYTES}sI")
_ACK = struct.Struct("<4sBxxxQ")
_DEVICE = 128  # in a WELCOME, beside the path
_MAX_REASON_BYTES = 500
MAX_REPLY_BYTES = _WELCOME.size + _MAX_REASON_BYTES  # the longest that a receiver says
MAX_HEADER_BYTES = _CHUNK.size + MAX_SPANS * SPAN_BYTES


class BadFrame(ValueError):
    """Bytes that are not a bulk message, or one that nobody here has asked for."""


@dataclass(frozen=True, slots=True)
class Hello:
    """`pid` and `fd` lead to the sender's memory on this host (fd 0: it has none to share); `rows` are its sizes.

    `path` is what that memory is good for. "shm": it is the arena itself. "cuda_ipc": it holds the handles of an arena on a
    GPU, so that who can read them is known to be on the same host.
    """

    pid: int
    fd: int
    memory_bytes: int
    memory_name: bytes
    rows: dict[str, tuple[int, int]]  # kind -> (rows, bytes of one)
    path: str = "shm"


@dataclass(frozen=True, slots=True)
class Welcome:
    """`device`: the receiver's memory is one's, so that it makes the digests of sums (sums.py)."""

    path: str
    reason: str
    device: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """`probe`: the bytes are for nobody, only their speed counts. `memory_name`: whose memory to fetch from, b"" when the
    bytes come along. `number` is unique in the sender's process. `sums`: the digest is of sums, since one of the two memories
    is a device's."""

    key: Key
    number: int
    spans: Spans
    memory_name: bytes = b""
    probe: bool = False
    sums: bool = False


@dataclass(frozen=True, slots=True)
class Ack:
    number: int
    status: int


def version_of(frame: bytes | memoryview) -> bytes:
    """Of a HELLO of any version; b"" for what is none, or so short that an answer would be longer."""
    version = bytes(frame[:4])
    return version if len(frame) >= _OTHER.size and version.startswith(VERSION[:3]) and version[3:].isalnum() else b""


def pack_hello(hello: Hello) -> bytes:
    pages, slots = hello.rows["page"], hello.rows["slot"]
    where = (hello.pid, hello.fd, hello.memory_bytes, hello.memory_name)
    return _HELLO.pack(VERSION, PATHS.index(hello.path), *where, *pages, *slots)


def unpack_hello(frame: bytes | memoryview) -> Hello:
    """Raises BadFrame, and only that, whatever the bytes are; so do the other four."""
    if len(frame) != _HELLO.size:
        raise BadFrame(f"{len(frame)} bytes are no hello")
    magic, path, pid, fd, memory_bytes, name, *rows = _HELLO.unpack(frame)
    if magic != VERSION or not 0 < path < len(PATHS):
        raise BadFrame("not a hello of this protocol")
    if fd and PATHS[path] == "shm" and rows[0] * rows[1] + rows[2] * rows[3] != memory_bytes:
        raise BadFrame("rows and memory differ in size")
    if fd and PATHS[path] == "cuda_ipc" and memory_bytes > MAX_HANDLES_BYTES:
        raise BadFrame(f"{memory_bytes} bytes of handles")
    return Hello(pid, fd, memory_bytes, name, {"page": (rows[0], rows[1]), "slot": (rows[2], rows[3])}, PATHS[path])


def pack_welcome(welcome: Welcome) -> bytes:
    reason = welcome.reason.encode()[:_MAX_REASON_BYTES]
    return _WELCOME.pack(b"pdW2", PATHS.index(welcome.path) | (_DEVICE if welcome.device else 0)) + reason


def unpack_welcome(frame: bytes | memoryview) -> Welcome:
    if not _WELCOME.size <= len(frame) <= MAX_REPLY_BYTES:
        raise BadFrame(f"{len(frame)} bytes are no welcome")
    magic, path = _WELCOME.unpack_from(frame)
    if magic != b"pdW2" or path & ~_DEVICE >= len(PATHS):
        raise BadFrame("not a welcome of this protocol")
    return Welcome(PATHS[path & ~_DEVICE], bytes(frame[_WELCOME.size :]).decode(errors="replace"), bool(path & _DEVICE))


def pack_other() -> bytes:
    return _OTHER.pack(OTHER, VERSION)


def unpack_other(frame: bytes | memoryview) -> bytes:
    """The version that a receiver speaks; not ours."""
    if len(frame) != _OTHER.size:
        raise BadFrame(f"{len(frame)} bytes name no version")
    magic, version = _OTHER.unpack(frame)
    if magic != OTHER or version == VERSION or not version.isalnum():
        raise BadFrame("not another version of this protocol")
    return bytes(version)


def versions(theirs: bytes) -> str:
    return f"another version ({theirs.decode()}, we speak {VERSION.decode()}): upgrade so that both are the same"


def pack_chunk(chunk: Chunk) -> bytes:
    """Raises struct.error for a key or number that does not fit its field."""
    rid, attempt = chunk.key
    flags = (1 if chunk.memory_name else 0) | (2 if chunk.probe else 0) | (4 if chunk.sums else 0)
    name = chunk.memory_name or bytes(NAME_BYTES)
    return _CHUNK.pack(b"pdK2", flags, attempt, rid, chunk.number, name, len(chunk.spans)) + to_bytes(chunk.spans)


def unpack_chunk(frame: bytes | memoryview) -> Chunk:
    if not _CHUNK.size < len(frame) <= MAX_HEADER_BYTES:
        raise BadFrame(f"{len(frame)} bytes are no header")
    magic, flags, attempt, rid, number, name, count = _CHUNK.unpack_from(frame)
    if magic != b"pdK2" or flags > 7 or len(frame) != _CHUNK.size + count * SPAN_BYTES:
        raise BadFrame("not a chunk of this protocol")
    spans = from_bytes(frame[_CHUNK.size :], SRC + 1)
    if spans[:, KIND].max() >= len(KINDS) or not spans[:, NBYTES].all():
        raise BadFrame("a span of no known kind, or of no bytes")
    return Chunk((rid, attempt), number, spans, name if flags & 1 else b"", bool(flags & 2), bool(flags & 4))


def pack_ack(ack: Ack) -> bytes:
    return _ACK.pack(b"pdA2", ack.status, ack.number)


def unpack_ack(frame: bytes | memoryview) -> Ack:
    if len(frame) != _ACK.size:
        raise BadFrame(f"{len(frame)} bytes are no ack")
    magic, status, number = _ACK.unpack(frame)
    if magic != b"pdA2" or status not in (LANDED, LATE, REFUSED, CORRUPT):
        raise BadFrame("not an ack of this protocol")
    return Ack(number, status)
