"""Bulk that nobody can read, forge or replay: AES-GCM over each frame, under a secret that one Grant agreed.

The secret serves a single hand-off and a single sender, and chunk numbers never repeat in a process, so (number, frame)
is a nonce that is used once; a chunk that is sent again is the same bytes again, and is not sent again when its path has
changed meanwhile. The chunk's header is authenticated with every frame. The tags of bytes that come along are their digest.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from kvtransfer.transports.frame import BadFrame
from kvtransfer.transports.memory import Bytes

TAG_BYTES = 16
NO_PAYLOAD = 1 << 31  # the frame's number in a chunk that has a header alone
SECRET_BYTES = 16
SECRET_SIZES = (16, 32)  # AES-128 or AES-256
_NONCE = struct.Struct("<QI")


def new_secret() -> bytes:
    return os.urandom(SECRET_BYTES)


def check_secret(secret: bytes) -> None:
    """Raises ValueError for what is no secret; none at all (b"") is for bulk that is not sealed."""
    if secret and len(secret) not in SECRET_SIZES:
        raise ValueError(f"a secret of {len(secret)} bytes; it has 16 or 32")


class BrokenSeal(BadFrame):
    """What arrived is not what was sealed."""


class Seal:
    """Of one hand-off. Raises ValueError for a secret of the wrong length."""

    def __init__(self, secret: bytes) -> None:
        from cryptography.exceptions import InvalidTag  # here: most engines never need it
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._invalid = AESGCM(secret), InvalidTag

    def close(self, number: int, index: int, data: Any, header: bytes) -> bytearray:
        """`data` encrypted, with its tag behind."""
        sealed = bytearray(len(data) + TAG_BYTES)
        self._cipher.encrypt_into(_NONCE.pack(number, index), data, header, sealed)
        return sealed

    def open_into(self, number: int, index: int, sealed: memoryview, header: bytes, out: Bytes) -> None:
        """Decrypts to `out`. Raises BrokenSeal when it was not sealed with this secret for this place; `out` is then junk."""
        if len(sealed) != len(out) + TAG_BYTES:
            raise BadFrame("payload and spans differ in length")
        try:
            self._cipher.decrypt_into(_NONCE.pack(number, index), sealed, header, out.data)
        except self._invalid as error:
            raise BrokenSeal("the seal is not ours") from error


def tag_digest(sealed: bytes | bytearray | Bytes) -> int:
    """What a sealed frame adds to a hand-off's digest; 0..2^64-1."""
    return int.from_bytes(bytes(sealed[-8:]), "little")
