"""Dataclass <-> msgpack ``[name, field, field, ...]``, strict: what does not match the declared types is a BadMessage.

No pickle, no evaluation, nothing constructed but the classes in `wire.messages`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from wire.messages import MESSAGES

Check = Callable[[Any], Any]


class BadMessage(ValueError):
    """Bytes that are not a message of ours; the text says what is wrong with them."""


def encode(message: Any) -> bytes:
    """One message as bytes. Raises KeyError for an object that is not a message."""
    return msgpack.packb(_PLANS[type(message)].rows(message))  # type: ignore[no-any-return]


def decode(data: bytes | memoryview) -> Any:
    """The message in `data`. Raises BadMessage, and only that, whatever the bytes are."""
    try:
        raw = msgpack.unpackb(data, use_list=True, strict_map_key=False)
        if not isinstance(raw, list) or not raw or not isinstance(raw[0], str) or raw[0] not in _BY_NAME:
            raise BadMessage("not a message of this protocol")
        return _BY_NAME[raw[0]].build(raw)
    except BadMessage:
        raise
    except Exception as error:  # msgpack raises a dozen types on junk, recursion and bad UTF-8 among them
        raise BadMessage(f"undecodable: {type(error).__name__}: {error}") from error


def schema_digest(messages: Sequence[type] = MESSAGES) -> str:
    """Of these messages and their fields: who has another cannot read ours."""
    hints = [hint for cls in messages for hint in get_type_hints(cls).values()]
    classes = {*messages, *(hint for hint in hints if isinstance(hint, type) and is_dataclass(hint))}
    schemas = [(cls.__name__, [(field.name, field.type) for field in fields(cls)]) for cls in classes]
    return hashlib.sha256(repr(sorted(schemas)).encode()).hexdigest()[:16]


class _Plan:
    """How one dataclass is taken apart and put together; made once per class from its annotations."""

    def __init__(self, cls: type) -> None:
        hints = get_type_hints(cls)
        self.cls = cls
        self.names = [field.name for field in fields(cls)]
        self.checks = [_check(hints[name]) for name in self.names]
        self.nested = [i for i, name in enumerate(self.names, 1) if is_dataclass(hints[name])]
        self.values = attrgetter("__class__.__name__", *self.names)  # one call for all of them: this is every message's path

    def rows(self, message: Any) -> list[Any]:
        row = list(self.values(message))
        for i in self.nested:
            row[i] = _plan(type(row[i])).rows(row[i])
        return row

    def build(self, row: Any) -> Any:
        if not isinstance(row, list) or len(row) != len(self.names) + 1 or row[0] != self.cls.__name__:
            raise BadMessage(f"{self.cls.__name__} takes {len(self.names)} fields")
        values = []
        for name, check, value in zip(self.names, self.checks, row[1:], strict=True):
            try:
                values.append(check(value))
            except (TypeError, ValueError) as error:
                raise BadMessage(f"{self.cls.__name__}.{name}: {error}") from error
        return self.cls(*values)


def _check(hint: Any) -> Check:
    if hint is Any:
        return lambda value: value
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: _plan(hint).build(value)
    origin = get_origin(hint)
    if origin is tuple:
        return _tuple_check(get_args(hint))
    if origin in (list, dict):
        return _exact(origin)
    if origin is Union:
        raise TypeError(f"{hint}: messages have no optional fields")
    return _float if hint is float else _exact(hint)


def _exact(cls: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not cls:
            raise TypeError(f"expected {cls.__name__}, got {type(value).__name__}")
        return value

    return check


def _float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"expected float, got {type(value).__name__}")
    return float(value)


def _tuple_check(args: tuple[Any, ...]) -> Check:
    if len(args) == 2 and args[1] is Ellipsis:
        item = _check(args[0])
        return lambda value: tuple(item(v) for v in _exact(list)(value))
    items = [_check(arg) for arg in args]

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(items):
            raise TypeError(f"expected a list of {len(items)}")
        return tuple(item(v) for item, v in zip(items, value, strict=True))

    return check


_PLAN_CACHE: dict[type, _Plan] = {}


def _plan(cls: type) -> _Plan:
    if cls not in _PLAN_CACHE:
        _PLAN_CACHE[cls] = _Plan(cls)
    return _PLAN_CACHE[cls]


_PLANS = {cls: _plan(cls) for cls in MESSAGES}
_BY_NAME = {cls.__name__: plan for cls, plan in _PLANS.items()}
