"""What `.ci/run` does with a part in which tests have failed: few of them run once more, alone, and have to pass then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import ROOT

FAILING = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    with open("ran", "a") as ran:
        ran.write(f"{number} ")
    assert number >= int(Path("failing").read_text())
"""
# The function as it stands there, called as it is there.
ONCE_MORE = """
set -euo pipefail
eval "$(sed -n '/^once_more() {$/,/^}$/p; /^most_once_more=/p' "$CI_RUN")"
logs=$PWD
once_more models || exit 1
"""


def bash(folder: Path, script: str) -> int:
    environment = {**os.environ, "CI_RUN": str(ROOT / ".ci/run"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, timeout=60).returncode


def first_run(folder: Path, failing: int) -> int:
    """Of six tests, of which the first so many fail; with its last words, as a part leaves them."""
    (folder / "scripts").mkdir()
    (folder / "scripts/test.sh").write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -m pytest "$@"\n')
    (folder / "scripts/test.sh").chmod(0o755)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_some.py").write_text(FAILING)
    (folder / "failing").write_text(str(failing))
    code = bash(folder, "scripts/test.sh -q -o cache_dir=models-cache")
    (folder / "outcomes").write_text(f"models: exit code {code} after 5 s\n")
    (folder / "ran").unlink()
    return code


def ran(folder: Path) -> list[str]:
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


@pytest.mark.parametrize(("failing", "again"), [(3, 0), (1, 1)])
def test_a_few_run_once_more_and_what_fails_again_is_wrong(failing: int, again: int, tmp_path: Path) -> None:
    assert first_run(tmp_path, failing) == 1
    (tmp_path / "failing").write_text(str(again))
    assert bash(tmp_path, ONCE_MORE) == (1 if again else 0)
    assert ran(tmp_path) == [str(number) for number in range(failing)]
    outcomes = (tmp_path / "outcomes").read_text().splitlines()
    assert outcomes[1] == f"models: {failing} failed beside the other parts; once more, alone:"
    assert f"{1 if again else failing} {'failed' if again else 'passed'}" in outcomes[-1]


def test_many_are_no_accident(tmp_path: Path) -> None:
    assert first_run(tmp_path, 4) == 1
    (tmp_path / "failing").write_text("0")
    assert bash(tmp_path, ONCE_MORE) == 1 and not ran(tmp_path)


@pytest.mark.parametrize("broken", ["interrupted", "no pytest"])
def test_nor_is_another_end_than_that_of_failed_tests(broken: str, tmp_path: Path) -> None:
    """With another exit code some tests were perhaps not run; a linter's failure leaves none that could run again."""
    assert first_run(tmp_path, 1) == 1
    (tmp_path / "failing").write_text("0")
    if broken == "interrupted":
        (tmp_path / "outcomes").write_text("kernels: exit code 1 after 5 s\nmodels: exit code 2 after 5 s\n")
    else:
        (tmp_path / "models-cache/v/cache/lastfailed").unlink()
    assert bash(tmp_path, ONCE_MORE) == 1 and not ran(tmp_path)
