"""The short form of scripts/bench_speculate.py: every section on a CPU, tiny widths for the released ones. No speeds."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from scripts import bench_speculate
from scripts.bench_speculate import BenchConfig, Bundled, Taken, Worker, by_position, error, expected, main
from wire.options import parse

SHORT = [
    *("--batches", "2", "--drafts", "0,2", "--rounds", "1", "--chosen-rounds", "4", "--tokens", "8", "--prompt-tokens", "40"),
    *("--widths", "tiny", "--layers", "4", "--context", "300", "--replays", "1"),
]


def test_every_section_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["bench_speculate", *SHORT, "--json", str(path)])
    with patch.object(bench_speculate, "ACCEPTED_PROMPTS", 2), patch.object(bench_speculate, "ACCEPTED_TOKENS", 60):
        assert main() == 0
    figures = json.loads(path.read_text())
    plain, drafted, paused, stores, chosen, wrong = figures["bundled"]
    assert [row["drafts"] for row in (paused, stores, chosen)] == ["paused", "stores", "chosen"]
    assert min(row["step_ratio"] for row in figures["bundled"]) > 0 and paused["tokens_a_step"] == stores["tokens_a_step"] == 1
    assert chosen["speed_up_error"] > 0 and wrong["speed_up_error"] > 0 and "speed_up_error" not in drafted
    assert 1 < chosen["tokens_a_step"] <= 3 and wrong["tokens_a_step"] < 1.1, "no draft is right"
    assert plain["tokens_a_step"] == 1 == plain["speed_up"] and 1 < drafted["tokens_a_step"] <= 3
    for row in figures["acceptance"][1:]:
        assert 0.5 < row["same_noise"] <= row["rejection"] + 1e-9 <= 1 + 1e-6
    alone, verified, storing = figures["released"]
    assert (alone["stores"], verified["stores"], storing["stores"]) == ("false", "true", "true") and storing["tokens"] == 1
    assert verified["experts_asked"] >= alone["experts_asked"] and 0 < verified["experts_of_verified_bytes"] < 1
    assert verified["speed_up_0.8"] == pytest.approx(2.44 / verified["step_ratio"])
    assert "| batch | drafts |" in capsys.readouterr().out


def test_figures_of_counts() -> None:
    assert by_position([1, 3, 2, 3], 2) == {"accepted_1": 0.75, "accepted_2": pytest.approx(2 / 3)}
    assert expected(0.5, 2) == 1.75


def test_what_a_speed_may_be_off_by() -> None:
    """By rounds: the first of two steps and three tokens a sequence, the second of one step."""
    taken = Taken()
    taken.add(2.0, [1, 1], True)
    taken.add(4.0, [1, 3], False)
    taken.add(3.0, [2, 2], True)
    assert taken.round_token_s() == [2.0, 1.5]
    assert error([2.0, 1.5], [2.0, 1.5]) == 0 and error([2.0, 1.2], [1.0, 1.0]) == pytest.approx(0.4)


def test_no_collection_falls_on_one_of_those_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []

    def take_turns(side: Bundled, workers: list[Worker], rounds: int) -> None:
        collects.append(gc.isenabled())
        raise RuntimeError("a step failed")

    monkeypatch.setattr(Bundled, "_take_turns", take_turns)
    with pytest.raises(RuntimeError, match="a step failed"):
        object.__new__(Bundled).take_turns([], 1)
    assert collects == [False] and gc.isenabled()


def test_a_gpu_that_is_not_there_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_speculate", *SHORT, "--device", "cuda"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "torch finds no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--drafts", "1,2"], ["--drafts", "0,5"], ["--tokens", "200"], ["--replays", "0"]])
def test_what_cannot_be_measured_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(BenchConfig, "bench_speculate", wrong)
