"""A first start compiles on all cores what it would have compiled one after another, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from kernels.ahead import _Compilers

ROOT = Path(__file__).resolve().parent.parent
COMPILES_C = shutil.which("gcc") is not None and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


def probe(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)} | environment
    return subprocess.run(
        [sys.executable, "-m", "tests.ahead_probe", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_processes_are_given_what_a_start_compiles(target: str, tmp_path: Path) -> None:
    """By triton's own hashes of source, constants, alignments, options and environment, and by the C that starts a kernel: of
    all kernels of prefill and decode steps with drafts, each once."""
    done = probe("found", target, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["given"] == found["started"]
    assert found["jobs"] == len(found["started"]) > 100


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = tmp_path_factory.mktemp("cache")
    (cache / "libcuda.c").touch()
    library = ["gcc", "-shared", "-o", str(cache / "libcuda.so.1"), str(cache / "libcuda.c")]
    linked = COMPILES_C and subprocess.run(library, check=False).returncode == 0
    done = probe("first_start", cache=cache, TRITON_LIBCUDA_PATH=str(cache))
    assert done.returncode == 0, done.stderr
    launchers = len(list((cache / "a").rglob("__triton_launcher*"))) if linked else -1
    return {"log": done.stderr, "launchers": launchers, **json.loads(done.stdout)}


def test_with_an_empty_cache_all_but_the_first_kernel_are_compiled_by_processes(starts: dict[str, Any]) -> None:
    assert starts["empty"] == {"runs": 2, "later": 1, "here": 1, "processes": [0, 0]}
    assert "5 kernels compiled by 2 processes in" in starts["log"]


def test_the_c_that_starts_a_kernel_is_compiled_by_them_too(starts: dict[str, Any]) -> None:
    if starts["launchers"] < 0:
        pytest.skip("no C compiler, or no headers of Python")
    assert starts["launchers"] == 2, "one for _copy and one for _wide_product"


def test_with_a_full_cache_there_is_one_run_and_no_process(starts: dict[str, Any]) -> None:
    assert starts["full"] == {"runs": 1, "later": 0, "here": 0, "processes": []}


def test_a_kernel_that_cannot_be_compiled_raises_where_it_is_started(starts: dict[str, Any]) -> None:
    """With everything else there, and in a first start, where processes have tried it before."""
    wrong = {"error": "CompilationError"}
    assert starts["broken"] == {"runs": 1, "later": 0, "here": 0, "processes": [], **wrong}
    assert starts["empty and broken"] == {"runs": 2, "later": 1, "here": 1, "processes": [0, 0], **wrong}
    assert "Error" not in starts["log"]


def test_one_core_compiles_as_it_goes(starts: dict[str, Any]) -> None:
    assert starts["one core"] == {"runs": 1, "later": 0, "here": 5, "processes": []}


def test_processes_do_not_outlive_who_started_them(tmp_path: Path) -> None:
    done = probe("killed", cache=tmp_path)
    left = set(json.loads(done.stdout))
    assert done.returncode < 0 and len(left) == 2
    end_s = time.monotonic() + 60.0
    while left and time.monotonic() < end_s:
        left = {pid for pid in left if "kernels.ahead" in command_of(pid)}
        time.sleep(0.05)
    assert not left


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_who_leaves_early_ends_them() -> None:
    compilers = _Compilers(2)
    with pytest.raises(KeyboardInterrupt), compilers.ended():
        compilers.give("tests.compile_probe", "_copy", "{}")
        raise KeyboardInterrupt
    assert [process.returncode for process in compilers.processes] == [-9, -9]


def test_processes_that_die_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many jobs there are. What they leave is compiled where it is started."""
    monkeypatch.setattr(sys, "executable", "false")
    compilers = _Compilers(2)
    with compilers.ended():
        for number in range(1000):
            compilers.give("tests.compile_probe", "_copy", f"{number:04096}")
    assert [process.returncode for process in compilers.processes] == [1, 1]
