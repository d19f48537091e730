"""The bulk engine without its digests: what they cost is the difference (--digest-cost of scripts/bench_kvtransfer.py).

As a module of its own that nothing else starts, so that there is no such switch in what is served. Over the CPU's memory no
byte is shown to a hash; a device starts no sums, and what is left of its digest, the same at both ends, is of whose a chunk is
and where it goes: a microsecond.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvtransfer.digest import SpanDigests
from kvtransfer.transports import engine
from kvtransfer.transports.bulk import BulkTransport
from kvtransfer.transports.memory import Memory

if TYPE_CHECKING:
    from torch import Tensor

    from kvtransfer.arena import Arena


class UndigestedTransport(BulkTransport):
    """Of an engine in a process, over the CPU's memory, this module is that process; over a device's memory, which a thread
    moves in a process where others have digests, only that memory makes none."""

    engine = "scripts.kv_undigested"

    def _device_memory(self, arena: Arena) -> Memory:
        memory = super()._device_memory(arena)
        device: Any = memory
        device._sums = no_sums
        device.sums = lambda places, mark: device._stream.begin(mark, no_sums)  # a sender also waits by it for the mark
        return memory


def no_sums(*spans: Tensor) -> Tensor:
    import torch  # not above: the CPU's engine does without it

    return torch.empty(0, dtype=torch.int64)


def no_digest(*place_and_data: Any) -> int:
    return 0


def begin_none(digests: SpanDigests, *place: Any) -> Any:
    return no_digest


if __name__ == "__main__":
    if not (len(sys.argv) == 2 and sys.argv[1].isdecimal()):
        owner = "scripts.bench_kvtransfer --digest-cost"
        print(f"scripts.kv_undigested is a process of {owner}, and is started by that only", file=sys.stderr)
        sys.exit(2)
    setattr(SpanDigests, "begin", begin_none)  # noqa: B010  mypy: it is a name of another module
    engine.main(int(sys.argv[1]))
