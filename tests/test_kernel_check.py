"""kernels.check: what cannot run on a card is named before any server starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cases import attention, attention_prefill
from kernels.cases.case import GOLDEN, TINY, Case
from kernels.measure import relative_rms, tensors_in
from kernels.workspace import Workspace, empty, flip, frame

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def probed() -> dict[tuple[str, int], dict[str, Any]]:
    done = run("-m", "tests.compile_probe")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len({(each["kernel"], each["arch"]) for each in found}), "a kernel is listed once per machine code"
    return {(each["kernel"], each["arch"]): each for each in found}


def test_kernels_compile_without_a_gpu(probed: dict[tuple[str, int], dict[str, Any]]) -> None:
    for arch in (90, 120):
        copy = probed["copy", arch]
        assert copy["reason"] == "" and copy["registers"] > 0 and copy["spilled_bytes"] == 0, copy


def test_shared_memory_is_held_against_the_card(probed: dict[tuple[str, int], dict[str, Any]]) -> None:
    assert probed["wide_product", 90]["reason"] == ""
    assert probed["wide_product", 90]["shared_bytes"] > 101_376
    reason = probed["wide_product", 120]["reason"]
    assert "shared memory" in reason and "101376" in reason


def test_the_compilers_words_are_the_reason(probed: dict[tuple[str, int], dict[str, Any]]) -> None:
    for arch in (90, 120):
        assert "Error" in probed["broken", arch]["reason"]


def test_it_refuses_to_run_where_it_could_say_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("-m", "kernels.check")
    assert done.returncode == 2 and "--arch" in done.stderr
    done = run("-m", "kernels.check", "--arch", "sm_90", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "TRITON_INTERPRET" in done.stderr


def test_a_name_that_no_case_file_has_is_refused() -> None:
    """It compiled nothing, printed nothing, and exited with 0: that every kernel runs."""
    done = run("-m", "kernels.check", "--arch", "sm_90", "--only", "nothingsuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nothingsuch" in done.stderr and "attention, " in done.stderr


def test_a_workspace_gives_the_same_addresses_again_and_says_when_it_is_full() -> None:
    workspace = Workspace(4096, "cpu")
    addresses = []
    for _ in range(2):
        with workspace.active():
            first = empty((3, 5), torch.float32, "cpu")
            with frame():
                inner = empty((100,), torch.int64, "cpu")
            after = empty((100,), torch.int64, "cpu")
            assert after.data_ptr() == inner.data_ptr(), "a frame gives back what was taken in it"
            addresses.append((first.data_ptr(), inner.data_ptr()))
            with pytest.raises(MemoryError, match="too small"):
                empty((4096,), torch.uint8, "cpu")
    assert addresses[0] == addresses[1]
    assert empty((2,), torch.float32, "cpu").untyped_storage().nbytes() == 8, "outside it torch allocates"


def test_a_flip_keeps_the_last_results_and_no_older_ones() -> None:
    workspace = Workspace(4096, "cpu")
    with workspace.active():
        below = empty((100,), torch.uint8, "cpu").fill_(7)
        places = []
        for turn in range(5):
            flip()
            places.append(empty((1100,), torch.uint8, "cpu").fill_(turn))
            if turn:
                assert {*places[-2].tolist()} == {turn - 1}, "the last turn's result is still there"
            with pytest.raises(MemoryError):
                empty((1100,), torch.uint8, "cpu")
        assert [place.data_ptr() for place in places[:2] * 2] == [place.data_ptr() for place in places[:4]]
        assert {*below.tolist()} == {7}
    with workspace.active():
        empty((4000,), torch.uint8, "cpu")


def test_errors_that_hide_nothing() -> None:
    right = torch.tensor([1.0, 2.0])
    assert relative_rms(right, right) == 0.0
    assert relative_rms(torch.tensor([1.0, float("nan")]), right) == float("inf")
    assert relative_rms(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    assert relative_rms((right, None), (right * 2,)) == pytest.approx(0.5)


def test_every_tensor_of_the_inputs_is_found() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    case = Case("x", lambda d, s: None, lambda i: None, lambda i: None, 0.0)
    assert [t.numel() for t in tensors_in({"one": [a, (b,)], "two": case, "three": c, "four": 5})] == [1, 2, 3]


def test_prefill_cases_are_chunks_and_decode_cases_are_steps() -> None:
    """A chunk of one token was held against the reference of a decode step, whose row is in the ring already; no prefill
    ever runs it."""
    cpu = torch.device("cpu")
    for widths in (TINY, GOLDEN):
        for case in attention_prefill.cases(widths):
            assert not case.make(cpu, -1).batch.is_decode, case.name
        for case in attention.cases(widths):
            assert case.make(cpu, -1).batch.is_decode, case.name
