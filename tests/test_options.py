"""A command line from a frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from router.config import RouterConfig
from scripts.launch_local import LocalConfig
from wire.options import option, parse
from wire.worker import WorkerConfig


@dataclass(frozen=True)
class Config:
    """What the tests start."""

    model: str = option(help="a checkpoint directory")
    port: int = option(0, help="0: any free port")
    ratio: float = option(0.9, help="how full, 100% is everything")
    device: str = option("cpu", help="where", choices=("cpu", "cuda"))
    advertise: str = option("", help="50% of all users need this")
    trace: bool = option(False, help="write a trace")

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ValueError("--port must not be negative")


@dataclass(frozen=True)
class Strict:
    trace: bool = option(help="must be said")


def test_defaults_and_required() -> None:
    assert parse(Config, "worker", ["--model", "m"]) == Config("m", 0, 0.9, "cpu", "", False)


def test_every_type() -> None:
    argv = ["--model=m", "--port", "81", "--ratio", "0.5", "--device", "cuda", "--advertise", "host", "--trace"]
    assert parse(Config, "worker", argv) == Config("m", 81, 0.5, "cuda", "host", True)
    assert parse(Config, "worker", ["--model=m", "--trace", "--no-trace"]).trace is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model"),
        (["--model=m", "--port=x"], "--port"),
        (["--model=m", "--port=1.5"], "--port"),
        (["--model=m", "--device=tpu"], "cuda"),
        (["--model=m", "--nonsense"], "--nonsense"),
        (["--model=m", "--port=-1"], "--port must not be negative"),
    ],
)
def test_a_wrong_line_says_what_is_wrong_and_exits_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Config, "worker", argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        (RouterConfig, ["--port"]),
        (RouterConfig, ["--inbox-port"]),
        (LocalConfig, ["--port"]),
        (WorkerConfig, ["--model=m", "--router=tcp://h:1", "--port"]),
    ],
)
def test_a_port_that_is_none_is_refused_with_the_range(
    program: type, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for port in ("-1", "65536"):
        with pytest.raises(SystemExit) as stop:
            parse(program, "any", [*flags, port])
        assert stop.value.code == 2
        assert f"{flags[-1]} is {port}; ports are 0 to 65535" in capsys.readouterr().err
    parse(program, "any", [*flags, "65535"])


@pytest.mark.parametrize("flag", ["--router-args", "--prefill-args", "--decode-args"])
def test_flags_for_a_process_that_cannot_be_split_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(LocalConfig, "launch_local", [f"{flag}=--log 'a b"])
    assert stop.value.code == 2
    assert f"{flag} cannot be split into flags: No closing quotation" in capsys.readouterr().err


def test_a_bool_without_default_is_required() -> None:
    with pytest.raises(SystemExit):
        parse(Strict, "worker", [])
    assert parse(Strict, "worker", ["--no-trace"]) == Strict(False)


def test_help_shows_texts_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(Config, "worker", ["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "What the tests start.",
        "how full, 100% is everything (default: 0.9)",
        "{cpu,cuda}",
        "50% of all",
        "--no-trace",
    ):
        assert part in text


@pytest.mark.parametrize(("role", "lanes", "said"), [
    (PrefillConfig, "-1", "--lanes is -1; it must be at least 0"),
    (PrefillConfig, "9", "--lanes is 9; more than 8 connections to a peer only cost"),
    (DecodeConfig, "2", "unrecognized arguments: --lanes=2"),
])  # fmt: skip
def test_connections_are_chosen_by_who_sends(
    role: type[WorkerConfig], lanes: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ["--model=m", "--router=tcp://h:1"]
    assert parse(PrefillConfig, "prefill", [*to, "--lanes=8"]).lanes == 8
    with pytest.raises(SystemExit):
        parse(role, "worker", [*to, f"--lanes={lanes}"])
    assert said in capsys.readouterr().err


def test_the_floor_of_a_link_is_set_where_it_is_tested(capsys: pytest.CaptureFixture[str]) -> None:
    to = ["--model=m", "--router=tcp://h:1"]
    assert parse(PrefillConfig, "prefill", [*to, "--kv-floor=2.5"]).kv_floor == 2.5
    for cls, floor, said in (
        (PrefillConfig, "nan", "--kv-floor is nan; it must be at least 0"),
        (DecodeConfig, "2.5", "unrecognized arguments: --kv-floor=2.5"),
    ):
        with pytest.raises(SystemExit):
            parse(cls, "worker", [*to, f"--kv-floor={floor}"])
        assert said in capsys.readouterr().err
