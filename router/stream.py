"""Bytes straight to a client's transport: whole JSON replies, and server-sent events without a task per event.

aiohttp parses requests and keeps connections; writing is ours, because one `transport.write` for a head and its body
is a third of the cost of a prepared response, and an event must not wake a task. The responses below are handed to
aiohttp only so that it sees a finished one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, web

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
UNREAD_S = 30.0  # a client that takes nothing of its answer for this long loses its connection


class Reply(web.StreamResponse):
    """A complete response in one write.

    It is done when the transport has taken nearly all of it (64 KiB may be left), and only then is the next request of
    the connection looked at: a client that asks and asks and never reads must not grow memory.
    """

    def __init__(
        self, body: str, status: int = 200, content_type: str = "application/json", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status=status)
        self._text = body
        self._type = content_type
        self._extra = headers or {}
        self._alive = True

    @property
    def keep_alive(self) -> bool | None:
        return self._alive

    def close_after(self) -> Reply:
        """The connection is not used again: the request was not read to its end."""
        self._alive = False
        return self

    async def prepare(self, request: web.BaseRequest) -> Any:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._alive = self._alive and request.keep_alive
        body = self._text.encode()
        head = _OK_HEAD % len(body) if self._is_plain(request) else self._head(request, len(body))
        transport.write(head if request.method == "HEAD" else head + body)
        if transport.get_write_buffer_size():
            await _drained(request, transport)

    def _is_plain(self, request: web.BaseRequest) -> bool:
        """Nearly every reply: its head is always the same, but for the length."""
        usual = self.status == 200 and self._type == "application/json" and not self._extra
        return usual and self._alive and request.version >= HttpVersion11

    def _head(self, request: web.BaseRequest, length: int) -> bytes:
        lines = [_status_line(self.status), f"Content-Type: {self._type}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in self._extra.items()]
        if not self._alive or request.version < HttpVersion11:
            lines.append(f"Connection: {'keep-alive' if self._alive else 'close'}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def write_eof(self, data: bytes = b"") -> None:
        return None


async def _drained(request: web.BaseRequest, transport: asyncio.WriteTransport) -> None:
    """Waits while more than the transport's high-water mark is unread. Raises ConnectionResetError when nobody reads."""
    while True:
        unread_bytes = transport.get_write_buffer_size()
        try:
            async with asyncio.timeout(UNREAD_S):
                return await request.writer.drain()
        except TimeoutError:
            if transport.get_write_buffer_size() >= unread_bytes:  # slow is fine, as long as it goes on
                transport.abort()
                raise ConnectionResetError("the client does not read") from None


class EventStream:
    """One client's event stream. The head leaves with the first events, in one write (a second would meet delayed ACK).

    A client that leaves more than `limit_bytes` unread loses its connection: `send` must not grow memory.
    """

    def __init__(self, request: web.BaseRequest, limit_bytes: int) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        self._transport: asyncio.WriteTransport = transport
        self._limit_bytes = limit_bytes
        self._chunked = request.version >= HttpVersion11
        self.keep_alive = self._chunked and request.keep_alive
        self.started = False
        self.overflowed = False

    def send(self, *events: str) -> None:
        if self._transport.is_closing():  # the client has gone, and its handler is about to be told
            return
        if self._transport.get_write_buffer_size() > self._limit_bytes:  # before this event: one may be larger by itself
            self.overflowed = True
            self._transport.abort()  # aiohttp then cancels the handler, which drops the request
            return
        text = "".join(events)
        data = f"{len(text):x}\r\n{text}\r\n".encode("ascii") if self._chunked else text.encode("ascii")
        if not self.started:
            self.started = True
            data = self._head() + data
        self._transport.write(data)

    def end(self) -> None:
        if self._chunked and not self._transport.is_closing():
            self._transport.write(_LAST_CHUNK)

    def _head(self) -> bytes:
        lines = [_status_line(200), "Content-Type: text/event-stream; charset=utf-8", "Cache-Control: no-cache"]
        lines.append("Transfer-Encoding: chunked" if self._chunked else "X-Accel-Buffering: no")
        if not self.keep_alive:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


class Written(web.StreamResponse):
    """Tells aiohttp that an `EventStream` is complete."""

    def __init__(self, events: EventStream) -> None:
        super().__init__()
        self._alive = events.keep_alive

    @property
    def keep_alive(self) -> bool | None:
        return self._alive

    async def prepare(self, request: web.BaseRequest) -> Any:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {_REASONS.get(status, '')}"
