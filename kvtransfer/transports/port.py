"""Where a bulk engine listens: who comes in, who is turned away, and who never says what he wants."""

from __future__ import annotations

import fcntl
import logging
import selectors
import socket
import struct
import time

from kvtransfer.transports.connection import READ, Connection, Side
from kvtransfer.transports.counters import Counters
from wire.curve import MOST_HOSTS, WARN_EVERY_S, Refusals

HANDSHAKE_S = 30.0  # to say who one is
_BACKLOG = 128
_ACCEPTS = 16  # in one go
_FULL_S = 0.1  # to look again whether a connection more can be had
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10))  # a host that is gone without a word is noticed
_SIOCGIFADDR, _IFREQ = 0x8915, struct.Struct("16s4x4s16x")  # netdevice(7)
_log = logging.getLogger("kvtransfer")


class Port:
    """Belongs to the engine's thread."""

    def __init__(self, side: Side, selector: selectors.BaseSelector, counters: Counters) -> None:
        self._side, self._selector, self._counters = side, selector, counters
        self._listener: socket.socket | None = None
        self._strangers: dict[Connection, float] = {}  # whose handshake is not over, and until when it may last
        self._members: dict[Connection, None] = {}  # in the order in which they are resumed
        self._full_until_s = 0.0  # no connection more could be had
        self._warn_at_s = 0.0  # of that again
        self._refusals: Refusals | None = None
        self._hosts: set[str] = set()  # that were turned away

    def listen(self, host: str) -> int:
        """On any free port, which is returned. Raises OSError."""
        self._listener = socket.create_server((_address(host), 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        if self._side.password:
            self._refusals = Refusals(f"tcp://{host}:{port}")
        self._selector.register(self._listener, READ, self._accept)
        return port

    def wait_ms(self) -> int:
        if self._full_until_s or (self._refusals is not None and self._refusals.unsaid):
            return int(_FULL_S * 1000)
        return 1000 if self._strangers else 10_000

    def tend(self, now_s: float) -> None:
        for connection, until_s in list(self._strangers.items()):
            if connection.up:
                del self._strangers[connection]
                self._members[connection] = None
            elif connection.broken or now_s > until_s:
                del self._strangers[connection]
                self._dismiss(connection)
        for connection in [each for each in self._members if each.broken]:
            del self._members[connection]
        for connection in [each for each in self._members if each.paused]:
            if connection.resume():  # there may be room for one chunk only: the next one is another's
                del self._members[connection]
                self._members[connection] = None
        if self._refusals is not None:
            self._refusals.tell(self._hosts)
        if self._full_until_s and now_s > self._full_until_s:
            self._full_until_s = 0.0
            assert self._listener is not None
            self._selector.register(self._listener, READ, self._accept)

    def close(self) -> None:
        for connection in (*self._strangers, *self._members):
            connection.close()
        if self._listener is not None:
            self._listener.close()

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS):
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:  # no descriptor, no memory: who is here already is served all the same
                now_s = time.monotonic()
                if now_s >= self._warn_at_s:
                    self._warn_at_s = now_s + WARN_EVERY_S
                    _log.warning("no connection can be taken: %s", error)
                self._full_until_s = now_s + _FULL_S
                self._selector.unregister(self._listener)
                return
            self._adopt(end)

    def _adopt(self, end: socket.socket) -> None:
        connection = Connection(self._side, self._selector)
        try:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                end.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.adopt(end)
        except OSError as error:
            connection.close(str(error))
        self._strangers[connection] = time.monotonic() + HANDSHAKE_S

    def _dismiss(self, connection: Connection) -> None:
        """One that did not get as far as to be a peer."""
        connection.close("it does not say who it is")
        if self._refusals is not None:
            self._counters.add("refused_peers")
            self._refusals.add()
            if connection.turned_away and len(self._hosts) < MOST_HOSTS:
                self._hosts.add(connection.host)


def _address(host: str) -> str:
    """What libzmq, which a worker's other port listens with, takes for a host: an interface's name too. Raises OSError."""
    if host not in [name for _, name in socket.if_nameindex()]:
        return "" if host == "*" else host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        asked = fcntl.ioctl(end, _SIOCGIFADDR, _IFREQ.pack(host.encode(), b""))
    return socket.inet_ntoa(_IFREQ.unpack(asked)[1])
