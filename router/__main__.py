"""``python -m router``: one line and exit code 1 when it cannot start."""

from __future__ import annotations

import gc
import logging
import sys

import uvloop
import zmq

from router.config import RouterConfig
from router.server import Router
from router.text import TokenizerError
from wire.curve import ClusterKeyError
from wire.options import parse
from wire.timeline import show_timelines

SWITCH_INTERVAL_S = 0.001  # how long a thread that writes a large answer may keep the event loop waiting


async def _serve(config: RouterConfig) -> None:
    router = Router(config)
    gc.freeze()  # the vocabulary's tables are here to stay: full collections need not walk them
    await router.run()


def main() -> None:
    config = parse(RouterConfig, "python -m router")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if config.timeline:
        show_timelines()
    try:
        uvloop.run(_serve(config))
    except (TokenizerError, ClusterKeyError) as error:
        sys.exit(f"router: {error}")
    except zmq.ZMQError as error:
        sys.exit(
            f"router: cannot listen on --inbox-host {config.inbox_host} --inbox-port {config.inbox_port}: {error.strerror}"
        )
    except OSError as error:
        sys.exit(f"router: cannot listen on --host {config.host} --port {config.port}: {error.strerror}")


if __name__ == "__main__":
    main()
