"""Who may talk to whom: one key pair for a whole cluster, and CURVE on every socket that it is given to.

Whoever holds the pair is a member: it proves so as a client and as a server, and everything on the wire is encrypted. Where
that costs too much, for KV, members show a password that is made of the key (`ClusterKey.password`).
Without a key nothing is checked, which is why nothing may then listen beyond this host (`require_key`).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import zmq
from zmq.utils import z85

ZAP_ADDRESS = "inproc://zeromq.zap.01"
WARN_AFTER_S = 1.0
WARN_EVERY_S = 60.0  # who is turned away goes on trying
MOST_HOSTS = 8  # named in a warning
_turned_away: WeakKeyDictionary[zmq.Context[Any], set[str]] = WeakKeyDictionary()  # hosts that are still to be named
_log = logging.getLogger("wire")


class ClusterKeyError(ValueError):
    """A file that is no usable key; the text says what to do."""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A CURVE key pair in Z85, 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def password(self) -> bytes:
        """What members show where nothing is encrypted, 64 characters. It says nothing of the key."""
        return hmac.new(self.secret, b"bulk port", "sha256").hexdigest().encode()

    @classmethod
    def generate(cls) -> ClusterKey:
        return cls(*zmq.curve_keypair())

    @classmethod
    def read(cls, path: str) -> ClusterKey:
        """Raises ClusterKeyError for a file that is no key or that others may read."""
        try:
            mode, lines = os.stat(path).st_mode, Path(path).read_bytes().split()
        except OSError as error:
            raise ClusterKeyError(f"--cluster-key {path} cannot be read: {error.strerror}") from error
        if mode & 0o077:
            raise ClusterKeyError(
                f"--cluster-key {path} can be read by others: chmod 600 it, and make new keys if they may have"
            )
        try:
            public, secret = lines
            matches = zmq.curve_public(secret) == public
        except (ValueError, zmq.ZMQError):
            matches = False
        if not matches:
            raise ClusterKeyError(f"--cluster-key {path} is no cluster key: make one with python -m scripts.make_keys")
        return cls(public, secret)

    def write(self, path: str) -> None:
        """Creates the file, for its owner alone. Raises FileExistsError rather than replace one."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(self.public + b"\n" + self.secret + b"\n")


def require_key(option: str, host: str, cluster_key: str, insecure: bool) -> None:
    """Raises ValueError when `host` can be reached from elsewhere, there is no key, and nobody said that this is meant."""
    if cluster_key or is_loopback(host):
        return
    if not insecure:
        raise ValueError(
            f"{option} {host} can be reached from other hosts: give every process --cluster-key FILE "
            "(python -m scripts.make_keys makes one), or --insecure to serve whoever can connect"
        )
    _log.warning("INSECURE: %s %s without --cluster-key: whoever can connect can read and forge everything", option, host)


def secure(context: zmq.Context[Any], key: ClusterKey) -> None:
    """From now on every socket of `context` is a member's: it encrypts, and connects and listens to members only.

    A socket that binds has to say so (`be_server`); libzmq takes it for a client otherwise.
    """
    context.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    context.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
    context.setsockopt(zmq.CURVE_SERVERKEY, key.public)
    # Of a shadow, so that destroying `context` does not close it under its thread: it is told that the context ends.
    gate: zmq.Socket[bytes] = zmq.Context.shadow(context).socket(zmq.REP)
    gate.setsockopt(zmq.LINGER, 0)
    gate.bind(ZAP_ADDRESS)
    hosts = _turned_away[context] = set()
    threading.Thread(target=_keep_gate, args=(gate, z85.decode(key.public), hosts), name="gate", daemon=True).start()


def password_of(cluster_key: str) -> bytes:
    """Of the key in that file; b"" without a file. Raises ClusterKeyError."""
    return ClusterKey.read(cluster_key).password if cluster_key else b""


def be_server(socket: zmq.Socket[bytes]) -> bool:
    """Makes a socket of a secured context the listening side. Whether it is one: False without a key."""
    secured = socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    if secured:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    return secured


class Refusals:
    """Connections to a listening socket that were turned away: says so, in a line at most each `WARN_EVERY_S`. The first waits
    a little, since who is turned away tries again at once."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._unsaid, self._warn_at_s = 0, 0.0

    @property
    def unsaid(self) -> bool:
        """Whether a warning is due soon, so that `tell` has to be called though nothing else happens."""
        return self._unsaid > 0

    def add(self, more: int = 1) -> None:
        if not self._unsaid:
            self._warn_at_s = max(self._warn_at_s, time.monotonic() + WARN_AFTER_S)
        self._unsaid += more

    def tell(self, hosts: set[str]) -> None:
        """hosts: of some that are still to be named; emptied with the line."""
        now_s = time.monotonic()
        if not self._unsaid or now_s < self._warn_at_s:
            return
        named = sorted(hosts.copy())
        _log.warning(
            "connections turned away at %s: %d%s. They do not show this cluster's key: "
            "do all processes have the same --cluster-key?",
            self._address,
            self._unsaid,
            f", some from {', '.join(named)}" if named else "",
        )
        hosts.clear()
        self._unsaid, self._warn_at_s = 0, now_s + WARN_EVERY_S


class RefusedPeers:
    """Counts the connections to a listening ZeroMQ socket that were turned away at their greeting, and warns of them.

    The warning names the hosts of those that got as far as a wrong key; of others libzmq tells nobody where they are.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[bytes]) -> None:
        address = f"inproc://refused-{id(socket):x}"
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        socket.monitor(address, failed)
        self._socket, self._count = socket, 0
        self._hosts = _turned_away[context]
        self._refusals: Refusals | None = None
        self.events: zmq.Socket[bytes] = context.socket(zmq.PAIR)  # readable when there is something to count
        self.events.setsockopt(zmq.LINGER, 0)
        self.events.setsockopt(zmq.RCVHWM, 0)  # without a limit: a full pipe would hold up libzmq's own thread
        self.events.connect(address)

    def count(self) -> int:
        before = self._count
        with suppress(zmq.Again):
            while True:
                self.events.recv_multipart(zmq.NOBLOCK)
                self._count += 1
        if self._refusals is None and self._count:
            self._refusals = Refusals(bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
        if self._refusals is not None:
            if self._count > before:
                self._refusals.add(self._count - before)
            self._refusals.tell(self._hosts)
        return self._count

    def close(self) -> None:
        self._socket.disable_monitor()
        self.events.close()


def _keep_gate(gate: zmq.Socket[bytes], member: bytes, hosts: set[str]) -> None:
    """Answers libzmq's question about each peer (ZAP, rfc.zeromq.org/spec/27) until the context ends. hosts: of those who are
    turned away."""
    try:
        while True:
            version, sequence, _, host, _, mechanism, *credentials = gate.recv_multipart()
            known = mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], member)
            answer = [b"200", b"OK", b"member", b""] if known else [b"400", b"not a member of this cluster", b"", b""]
            if not known and len(hosts) < MOST_HOSTS:
                hosts.add(host.decode())
            gate.send_multipart([version, sequence, *answer])
    except zmq.ZMQError:  # the context is ending
        gate.close()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
