"""The router process: binds both sides, serves until told to stop, closes every stream with a word."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from aiohttp import web

from router.app import App
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.errors import ApiError
from router.health import Health
from router.text import Tokenizer
from wire.counters import COUNTERS
from wire.metrics import Metrics
from wire.sockets import Inbox, Outbox, open_context

_HTTP_LOG = logging.getLogger("pdserve.http")
_HTTP_LOG.setLevel(logging.CRITICAL)  # aiohttp logs a traceback for every malformed request: anybody could fill the disk
BACKLOG = 4096  # 256 clients that connect at once must not meet a full accept queue
GOODBYE_S = 1.0


class Router:
    """All parts wired together, so that tests can run one in their own loop. Use `start` and `stop`."""

    def __init__(self, config: RouterConfig) -> None:
        """Binds the inbox and reads the tokenizer. Raises zmq.ZMQError, TokenizerError or ClusterKeyError."""
        path = config.tokenizer_path
        self.tokenizer = Tokenizer(path) if path is not None else None
        self.config = config
        self.metrics = Metrics(COUNTERS["router"])
        self._context = open_context(config.cluster_key)
        try:
            self.inbox = Inbox(self._context, config.inbox_host, config.inbox_port, config.advertise)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._outbox = Outbox(self._context)
        self.dispatcher = Dispatcher(config, self._outbox, self.inbox.address, self.metrics, self._defer)
        self.health = Health(config, self.dispatcher)
        self.app = App(config, self.dispatcher, self.health, self.metrics, self.inbox, self.tokenizer)
        self.url = ""
        self._runner: web.ServerRunner | None = None
        self._watch: asyncio.Task[None] | None = None

    @staticmethod
    def _defer(callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    async def start(self) -> None:
        """Listens. Raises OSError when the HTTP address is taken."""
        loop = asyncio.get_running_loop()
        listener = _listen(self.config.host, self.config.port)
        server = Server(
            self.app.handle,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            logger=_HTTP_LOG,
            auto_decompress=False,  # the app refuses what is compressed: inflating it would hold up everybody
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=GOODBYE_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=BACKLOG).start()
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.inbox.attach(loop, self.dispatcher.handle)
        self._watch = loop.create_task(self.health.run())

    async def stop(self) -> None:
        """Ends every request with a 503 or an error event, then closes."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        self.dispatcher.fail_all(ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=1))
        if self._runner is not None:
            await asyncio.sleep(0.05)  # the handlers write their last words
            await self._runner.cleanup()
        self.inbox.close()
        self._outbox.close()
        self._context.destroy(linger=200)

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT; prints the two lines that launchers wait for."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await self.start()
        print(f"inbox {self.inbox.address}", flush=True)
        announce, stopped = asyncio.create_task(self._announce()), asyncio.create_task(stop.wait())
        assert self._watch is not None
        await asyncio.wait({stopped, self._watch}, return_when=asyncio.FIRST_COMPLETED)
        announce.cancel()
        if self._watch.done():
            self._watch.result()  # only a bug ends it: better no router than one that no longer notices anything
        await self.stop()

    async def _announce(self) -> None:
        await self.health.ready.wait()
        print(f"ready {self.url}", flush=True)

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        protocol.take(payload)
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=self.config.max_body_bytes)


class Connection(web.RequestHandler):
    """aiohttp's, which puts a broken body's error behind the request that waits for the rest of that body, for ever."""

    _body: Any = None

    def take(self, body: Any) -> None:
        """This body belongs to the request that is handled from now on."""
        self._body = body
        self._check_body()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._check_body()

    def _check_body(self) -> None:
        if self._messages and self._body is not None and not self._body.is_eof():  # nothing can follow half a body
            self._body.set_exception(web.RequestPayloadError("the body's chunked encoding is broken"))


class Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
