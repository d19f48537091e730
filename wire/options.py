"""A command line from a frozen dataclass: names, types, defaults and help are written once, in its fields."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

Config = TypeVar("Config")


def option(default: Any = MISSING, *, help: str, choices: Sequence[str] = ()) -> Any:
    """A dataclass field with a help text; without a default the option is required."""
    metadata = {"help": help, "choices": tuple(choices)}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def require_port(flag: str, port: int) -> None:
    """Raises ValueError for what is no TCP port; 0 asks for any free one."""
    if not 0 <= port < 65536:
        raise ValueError(f"{flag} is {port}; ports are 0 to 65535")


def require_least(flag: str, number: float, least: float) -> None:
    """Raises ValueError for a number below `least`, and for nan."""
    if not number >= least:
        raise ValueError(f"{flag} is {number}; it must be at least {least}")


def require_whole_numbers(flag: str, text: str, least: int = 1) -> None:
    """Raises ValueError for what is not whole numbers from `least` on with commas between them."""
    if not all(each.isdecimal() and int(each) >= least for each in text.split(",")):
        numbers = "positive whole numbers" if least == 1 else f"whole numbers, {least} at least,"
        raise ValueError(f"{flag} is {text!r}; it must be {numbers} with commas between them")


def require_place(flag: str, path: str) -> None:
    """Raises ValueError for a file that cannot be written, before there is anything to write; "" asks for none."""
    if not path:
        return
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{flag} {path} is a folder; it must be a file")
    if not file.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written")


def parse(cls: type[Config], program: str, argv: Sequence[str] | None = None) -> Config:
    """`cls` filled from the command line. A ValueError of its ``__post_init__`` becomes a usage error (exit 2)."""
    parser = argparse.ArgumentParser(program, description=cls.__doc__)
    hints = get_type_hints(cls)
    for each in fields(cls):  # type: ignore[arg-type]
        _add(parser, each, hints[each.name])
    arguments = vars(parser.parse_args(argv))
    try:
        return cls(**arguments)
    except ValueError as error:
        parser.error(str(error))


def _add(parser: argparse.ArgumentParser, each: Field[Any], hint: type) -> None:
    flag = "--" + each.name.replace("_", "-")
    text = each.metadata.get("help", "").replace("%", "%%")  # argparse formats help texts
    kwargs: dict[str, Any] = {"type": hint, "choices": each.metadata.get("choices") or None}
    if hint is bool:
        kwargs = {"action": argparse.BooleanOptionalAction}
    if each.default is MISSING:
        parser.add_argument(flag, required=True, help=text, **kwargs)
    else:
        shown = repr(each.default).replace("%", "%%")
        parser.add_argument(flag, default=each.default, help=f"{text} (default: {shown})", **kwargs)
