"""The one exception a client gets to see, and its OpenAI-shaped JSON."""

from __future__ import annotations

import json

_TYPES = {400: "invalid_request_error", 404: "not_found_error", 405: "invalid_request_error", 413: "invalid_request_error"}
_TYPES |= {415: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
_DETAILS = "The server's log has the details under that number"
_SEND_AGAIN = "Send it again; the server's log has the details under that number"


class ApiError(Exception):
    """An answer other than 200: HTTP status, a sentence that says what to change, the offending field, a short code."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow  # 405: the methods that are

    def body(self) -> str:
        """``{"error": {"message", "type", "param", "code"}}``, ASCII only, so any echo of the client's text is safe."""
        kind = _TYPES.get(self.status, "server_error")
        return json.dumps({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about one field; the message starts with its name."""
    return ApiError(400, f"{param}: {message}", param, code)


def unavailable(message: str) -> ApiError:
    """A 503 worth another try in a second."""
    return ApiError(503, message, code="no_workers", retry_after_s=1)


def no_worker_came(rid: int, missing: str) -> ApiError:
    """`unavailable`, of a request that was accepted: the log has more under its number."""
    return unavailable(f"request {rid} ended: {missing}. {_SEND_AGAIN}")


def gave_up(rid: int, failure: str, tries: int, code: str) -> ApiError:
    """A 500 after the last try. It names no worker: the log does, under the same number."""
    ended = f"request {rid} ended after {tries} attempt{'s' if tries > 1 else ''}: {failure}"
    return ApiError(500, f"{ended}. {_SEND_AGAIN}", code=code)


def timed_out(rid: int, failure: str) -> ApiError:
    """A 504. `failure`: what had gone wrong before, in brackets, or nothing."""
    return ApiError(504, f"request {rid} ended: not finished in time{failure}. {_DETAILS}", code="timeout")


def hopeless(rid: int, failure: str) -> ApiError:
    """A 500 that is not tried again: it would fail everywhere."""
    return ApiError(500, f"request {rid} ended: {failure}. {_DETAILS}", code="worker_failed")


def internal(rid: int | None = None) -> ApiError:
    """A 500 for a bug of ours, which the log describes: under the request's number, once it has one."""
    if rid is None:
        return ApiError(500, "internal error; the server's log has the details", code="internal")
    return ApiError(500, f"request {rid} ended: internal error. {_DETAILS}", code="internal")
