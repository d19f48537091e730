"""What a benchmark cannot do is one line and exit code 2, before it measures; and what is started by others says so."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import (
    bench_decode,
    bench_handoff,
    bench_kvtransfer,
    bench_router,
    bench_serving,
    bench_speculate,
    kv_peers,
    tiny_tokenizer,
)
from tests import machine
from tests.ports import closed_port
from wire.options import parse

BENCHMARKS: dict[str, tuple[Any, list[str]]] = {
    "decode": (bench_decode, ["--device=cpu"]),
    "handoff": (bench_handoff, []),
    "kvtransfer": (bench_kvtransfer, []),
    "router": (bench_router, []),
    "serving": (bench_serving, []),
    "speculate": (bench_speculate, []),
}


def refusal(name: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a usage error."""
    benchmark, needed = BENCHMARKS[name]
    with pytest.raises(SystemExit) as stop:
        parse(benchmark.BenchConfig, name, [*needed, *flags])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_file_that_cannot_be_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert refusal(name, [f"--json={missing}/x.json"], capsys).endswith(f"/x.json: there is no folder {missing}")
    assert refusal(name, [f"--json={tmp_path}"], capsys).endswith(f"{tmp_path} is a folder; it must be a file")
    benchmark, needed = BENCHMARKS[name]
    parse(benchmark.BenchConfig, name, [*needed, f"--json={tmp_path}/x.json"])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "flag", "said"),
    [
        ("speculate", "--rounds=0", "--rounds is 0; it must be at least 1"),
        ("speculate", "--batches=abc", "--batches is 'abc'; it must be positive whole numbers with commas between them"),
        ("speculate", "--batches=0", "--batches is '0'; it must be positive whole"),
        ("speculate", "--drafts=0,-1", "--drafts is '0,-1'; it must be whole numbers, 0 at least, with commas"),
        ("speculate", "--tokens=1", "--tokens is 1; it must be at least 2"),
        ("serving", "--batches=x", "--batches is 'x'; it must be positive whole"),
        ("serving", "--rates=1,0", "--rates is '1,0'; it must be positive numbers"),
        ("serving", "--rates=1,often", "--rates is '1,often'; it must be positive numbers"),
        ("serving", "--load-s=nan", "--load-s is nan; it must be at least 0"),
        ("serving", "--url=host:8000", "--url is 'host:8000'; it must begin with http://"),
        ("router", "--seconds=0", "--seconds is 0.0; it must be at least 1"),
        ("decode", "--batches=0", "--batches is '0'; it must be positive whole"),
        ("decode", "--chunk=0", "--chunk is 0; it must be at least 1"),
        ("handoff", "--prompts=8,1", "--prompts is '8,1'; it must be whole numbers, 2 at least, with commas"),
        ("handoff", "--layers=2", "--layers 2: the first two layers have no pages to hand off; give 3 at least"),
        ("kvtransfer", "--contexts=0", "--contexts is '0'; it must be positive whole numbers with commas between them"),
        ("kvtransfer", "--requests=-1", "--requests is '-1'; it must be positive whole"),
    ],
)
def test_numbers_that_cannot_be_meant(name: str, flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(name, [flag], capsys)


def test_a_server_or_a_model_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with closed_port() as port:
        for flag, what in (("--url", f"http://127.0.0.1:{port}"), ("--model", str(tmp_path / "missing"))):
            monkeypatch.setattr(sys, "argv", ["bench_serving", flag, what])
            assert bench_serving.main() == 2
            (said,) = capsys.readouterr().err.splitlines()
            assert said.startswith("bench_serving: ") and what.removeprefix("http://") in said


@pytest.mark.parametrize(("gpu", "transports"), [(False, "tcp"), (True, "tcp,cuda_copy")])
def test_nixl_is_given_what_it_asks_for_where_there_is_a_gpu(
    gpu: bool, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert kv_peers.settings()["UCX_TLS"] == transports


@pytest.mark.parametrize(
    ("module", "owner"),
    [
        ("scripts.kv_peers", "scripts.bench_kvtransfer --peers"),
        ("scripts.kv_undigested", "scripts.bench_kvtransfer --digest-cost"),
        ("kvtransfer.transports.engine", "a worker's KV transport"),
        ("kernels.ahead", "a worker that compiles its kernels"),
    ],
)
@pytest.mark.parametrize("given", [["--help"], []])
def test_what_others_start_says_so(
    module: str, owner: str, given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, *given])
    monkeypatch.delitem(sys.modules, module, raising=False)  # or runpy warns
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(module, run_name="__main__")
    said = f"{module} is a process of {owner}, and is started by that only\n"
    assert (stop.value.code, *capsys.readouterr()) == (2, "", said)


def test_help_of_the_made_up_machines_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["machine", "--help"])
    with pytest.raises(SystemExit) as stop:
        machine.main()
    assert stop.value.code == 0 and "steps" in capsys.readouterr().out


def test_help_of_the_tokenizer_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tiny_tokenizer", "--help"])
    with pytest.raises(SystemExit) as stop:
        tiny_tokenizer.main()
    assert stop.value.code == 0 and "folder" in capsys.readouterr().out and not [*tmp_path.iterdir()]
    monkeypatch.setattr(sys, "argv", ["tiny_tokenizer", "made/here"])
    tiny_tokenizer.main()
    assert [*tmp_path.rglob("*.json")] == [tmp_path / "made/here/tokenizer.json"]
