"""Which hand-offs are over: a key is single-use, and a late message of a closed one must not be taken for a new one."""

from __future__ import annotations

from collections import OrderedDict

from kvtransfer.transports import Key

LIMIT = 65_536  # about 10 MB; at a thousand requests a second a minute's worth


class Tombstones:
    """The last `limit` keys that were closed."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        # In the order of closing. A plain dict would do but for its age: its first key is found by walking over deleted ones.
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)
