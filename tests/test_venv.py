"""The folder that the scripts install into: whose it may be, and that scripts which start together do not install twice."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAKE_PYTHON = """#!/usr/bin/env bash
echo "begins $*" >> "$LOG"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; else sleep 0.3; fi
echo ends >> "$LOG"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a Python that installs nothing and writes down what it is asked for."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    ours = {"PDSERVE_VENV": str(tmp_path / "venv"), "PDSERVE_BASE_PYTHON": str(python), "LOG": str(tmp_path / "log")}
    return kept | ours


def source(environment: dict[str, str]) -> subprocess.Popen[str]:
    command = ["bash", "-c", 'source scripts/venv.sh && echo "$PYTHON"']
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_scripts_that_start_together_install_once(tmp_path: Path, environment: dict[str, str]) -> None:
    started = [source(environment) for _ in range(3)]
    for script in started:
        out, err = script.communicate(timeout=60)
        assert (script.returncode, out) == (0, f"{tmp_path}/venv/bin/python\n"), err
    asked = [line.split()[2] for line in (tmp_path / "log").read_text().splitlines() if line != "ends"]
    assert asked == ["venv", "pip"], "one after the other, and nobody again"


@pytest.mark.parametrize("unfinished", [False, True], ids=["other requirements", "interrupted"])
def test_what_is_ours_is_brought_up_to_date_in_place(tmp_path: Path, environment: dict[str, str], unfinished: bool) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / ".installed").write_text("unfinished" if unfinished else "the stamp of other requirements")
    (folder / "in_use.so").touch()
    script = source(environment)
    _, err = script.communicate(timeout=60)
    assert script.returncode == 0, err
    assert (folder / "in_use.so").exists(), "a worker may be running out of it"


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    script = source(environment)
    _, err = script.communicate(timeout=60)
    assert script.returncode == 1 and "give PDSERVE_VENV an empty or a new folder" in err
    assert (folder / "thesis.txt").read_text() == "years of work" and not (tmp_path / "log").exists()
