"""Makes the key of a cluster: ``python -m scripts.make_keys FILE``. Every router and worker gets a copy of FILE."""

from __future__ import annotations

import sys

from wire.curve import ClusterKey


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m scripts.make_keys FILE", file=sys.stderr)
        return 2
    try:
        ClusterKey.generate().write(arguments[0])
    except OSError as error:
        print(f"{arguments[0]} cannot be made: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{arguments[0]}: copy it to every host over a safe way, readable by the service's user alone, and start")
    print("router, prefill and decode workers with --cluster-key")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
