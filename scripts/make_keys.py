"""Makes the key of a cluster: ``python -m scripts.make_keys FILE``. Every router and worker gets a copy of FILE."""

from __future__ import annotations

import argparse
import sys

from wire.curve import ClusterKey


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m scripts.make_keys", description="Makes the key of a cluster.")
    parser.add_argument("file", metavar="FILE", help="where to write it; a file that is there is never replaced")
    path: str = parser.parse_args(arguments).file
    try:
        ClusterKey.generate().write(path)
    except FileExistsError:
        print(f"{path} is there, and a key is never replaced: give another name, or remove it first", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{path} cannot be made: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{path}: copy it to every host over a safe way, readable by the service's user alone, and start")
    print("router, prefill and decode workers with --cluster-key")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
