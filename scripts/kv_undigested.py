"""The bulk engine without its digests: what they cost is the difference (--digest-cost of scripts/bench_kvtransfer.py).

As a module of its own that nothing else starts, so that there is no such switch in what is served.
"""

from __future__ import annotations

import sys
from typing import Any

from kvtransfer.digest import SpanDigests
from kvtransfer.transports import engine
from kvtransfer.transports.bulk import BulkTransport


class UndigestedTransport(BulkTransport):
    engine = "scripts.kv_undigested"


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
