"""ZMTP 3.0, which ZeroMQ speaks over TCP (rfc.zeromq.org/spec/23, PLAIN: spec/24), as far as a bulk connection needs it: bytes
and commands, no socket.

Bulk speaks it itself because libzmq reads into memory of its own: a copy of every byte, and page faults, more. What comes in
here is read where it belongs. Whatever speaks ZeroMQ can be the other end: a DEALER connects, a ROUTER listens.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator

GREETING_BYTES = 64
MAX_COMMAND_BYTES = 1024  # of a handshake; libzmq's own are a tenth of it
MORE, _LONG, COMMAND = 1, 2, 4  # a frame's flags
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_GREETING = struct.Struct("<10sBB20sB31x")
_LONG_HEAD, _SHORT_HEAD = struct.Struct(">BQ"), struct.Struct(">BB")
_VALUE = struct.Struct(">I")
_USER = b"member"
_ERROR_OF_LIBZMQ = b"\x5eRROR"  # what "\x05ERROR" is to C
_PING_BYTES = 7  # its name, and for how long it is good
_CONTEXT_BYTES = 16  # of it, at most


class BadPeer(ValueError):
    """The other end does not speak this."""


class TurnedAway(BadPeer):
    """One of the two shows a password that the other does not take, or does not ask for."""


def frame_head(nbytes: int, flags: int = 0) -> bytes:
    """What goes in front of a frame."""
    return _SHORT_HEAD.pack(flags, nbytes) if nbytes < 256 else _LONG_HEAD.pack(flags | _LONG, nbytes)


def read_head(data: memoryview) -> tuple[int, int, int] | None:
    """(flags, bytes of the frame, bytes of this head) of what begins with one; None when more of it is needed.

    Raises BadPeer.
    """
    if not data:
        return None
    flags = data[0]
    if flags > 7 or (flags & COMMAND and flags & MORE):
        raise BadPeer(f"{flags} are no flags of a frame")
    head = _LONG_HEAD if flags & _LONG else _SHORT_HEAD
    if len(data) < head.size:
        return None
    return flags & ~_LONG, head.unpack_from(data)[1], head.size


class Handshake:
    """Of one connection. Each method gives what is to be sent next, and raises BadPeer."""

    def __init__(self, listens: bool, password: bytes) -> None:
        self._listens, self._password = listens, password
        self._heard: set[bytes] = set()
        self.over = False

    def greeting(self) -> bytes:
        return _GREETING.pack(_SIGNATURE, 3, 0, self._mechanism, self._listens and bool(self._password))

    def greeted(self, greeting: bytes) -> bytes:
        """They have sent their greeting."""
        signature, major, _, mechanism, _ = _GREETING.unpack(greeting)
        if signature[0] != 0xFF or signature[-1] != 0x7F or major < 3:
            raise BadPeer("no greeting of ZMTP 3")
        if mechanism.rstrip(b"\0") != self._mechanism:
            raise TurnedAway("one of us shows a password, the other does not")
        if not self._password:
            return _command(b"READY", self._properties())
        return b"" if self._listens else _command(b"HELLO", _short(_USER) + _short(self._password))

    def hear(self, command: bytes) -> bytes:
        name, body = command[1 : 1 + command[0]] if command else b"", command[1 + command[0] :] if command else b""
        if name == b"ERROR" or command.startswith(_ERROR_OF_LIBZMQ):
            raise TurnedAway("the other end turns us away")
        if name in self._heard or name not in self._expected():
            raise BadPeer(f"{name[:20]!r} is not what comes next")
        self._heard.add(name)
        match name:
            case b"READY":
                self._check_type(body)
                self.over = True
            case b"HELLO":
                if not hmac.compare_digest(body, _short(_USER) + _short(self._password)):
                    raise TurnedAway("not a member of this cluster")
                return _command(b"WELCOME")
            case b"WELCOME":
                return _command(b"INITIATE", self._properties())
            case b"INITIATE":
                self._check_type(body)
                self.over = True
                return _command(b"READY", self._properties())
        return b""

    @property
    def _mechanism(self) -> bytes:
        return b"PLAIN" if self._password else b"NULL"

    def _expected(self) -> tuple[bytes, ...]:
        if not self._password:
            return (b"READY",)
        if self._listens:
            return (b"INITIATE",) if b"HELLO" in self._heard else (b"HELLO",)
        return (b"READY",) if b"WELCOME" in self._heard else (b"WELCOME",)

    def _properties(self) -> bytes:
        kind = b"ROUTER" if self._listens else b"DEALER"
        return _property(b"Socket-Type", kind) + _property(b"Identity", b"")

    def _check_type(self, properties: bytes) -> None:
        kind = dict(_read_properties(properties)).get(b"socket-type")
        if kind not in ((b"DEALER", b"ROUTER") if not self._listens else (b"DEALER",)):
            raise BadPeer(f"a socket of type {kind!r} does not fit")


def refusal() -> bytes:
    """What is sent to who is turned away."""
    return _command(b"ERROR", _short(b"400"))


def pong(command: bytes) -> bytes:
    """The answer to a PING of ZMTP 3.1 (spec/37), which libzmq sends to any version: its context. b"" to another command."""
    return _command(b"PONG", command[_PING_BYTES:][:_CONTEXT_BYTES]) if command.startswith(b"\4PING") else b""


def _command(name: bytes, body: bytes = b"") -> bytes:
    data = _short(name) + body
    return frame_head(len(data), COMMAND) + data


def _short(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def _property(name: bytes, value: bytes) -> bytes:
    return _short(name) + _VALUE.pack(len(value)) + value


def _read_properties(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names in small letters. Raises BadPeer."""
    at = 0
    while at < len(data):
        value_at = at + 1 + data[at] + _VALUE.size
        if value_at > len(data):
            raise BadPeer("properties that are cut short")
        (nbytes,) = _VALUE.unpack_from(data, value_at - _VALUE.size)
        if value_at + nbytes > len(data):
            raise BadPeer("properties that are cut short")
        yield data[at + 1 : value_at - _VALUE.size].lower(), data[value_at : value_at + nbytes]
        at = value_at + nbytes
