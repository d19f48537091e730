"""The short form of scripts/bench_handoff.py: real processes on a CPU, and what the figures are computed from. No speeds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_handoff
from scripts.bench_handoff import BenchConfig, checkpoint, main
from scripts.handoff_timeline import Way, way_of
from scripts.launch_local import BUNDLED_MODEL, LaunchError, System
from wire.options import parse
from wire.timeline import Moment

CHAIN = [
    *(("client", "sent"), ("router", "sent"), ("prefill", "queued"), ("prefill", "begun"), ("prefill", "computing")),
    *(("prefill", "computed"), ("decode", "ready"), ("decode", "arrived"), ("decode", "first_step"), ("decode", "first_token")),
    *(("router", "answered"), ("client", "first_token")),
]  # each is there because the one before was


def moments(*more: Moment) -> list[Moment]:
    """Of request 5: 200 tokens in two chunks of 2 and 3 s, decode's first step 0.25 s behind them; beside it a probe."""
    prefill = [("queued", 101.0), ("begun", 101.5), ("computing", 102.0), ("computed", 104.0), ("computing", 104.0)]
    said = [Moment("prefill", event, at_s, {"tokens": 100}, 5) for event, at_s in prefill]
    said += [Moment("router", "sent", 100.5, {"tokens": 200}, 5), Moment("router", "answered", 107.5, {}, 5)]
    said += [Moment("prefill", "computed", 107.0, {"tokens": 99}, 5), Moment("kvtransfer", "in_place", 107.125, {}, 5)]
    decode = [("offered", 101.5), ("ready", 107.125), ("arrived", 107.1875), ("first_step", 107.25), ("first_token", 107.5)]
    said += [Moment("decode", event, at_s, {}, 5) for event, at_s in decode]
    probe = [Moment("router", "sent", 100.25, {"tokens": 2}, 4), Moment("decode", "finished", 108.0, {}, 4)]
    return sorted([*said, *probe, *more], key=lambda moment: moment.at_s)


FINISHED = Moment("decode", "finished", 109.0, {"tokens": 3}, 5)
TOKENS = [107.75, 108.0, 109.0]


def way(said: list[Moment]) -> Way | None:
    return way_of(said, 200, 100.0, TOKENS)


def test_figures_are_those_of_the_requests_own_moments() -> None:
    found = way(moments(FINISHED))
    assert found is not None and {moment.rid for moment in found.moments if moment.where != "client"} == {5}
    assert found.figures() == {
        "before_prefill_ms": 2000.0,
        "prefill_ms": 5000.0,
        "prefill_tokens_per_s": 199 / 5,
        "in_place_ms": 125.0,
        "ready_ms": 125.0,
        "arrived_ms": 187.5,
        "first_step_ms": 250.0,
        "first_token_ms": 500.0,
        "ttft_ms": 7750.0,
        "decode_step_ms": 625.0,
        "ratio": 0.05,
    }
    assert found.lines()[2:4] == ["| 0.00 | client | sent (200 tokens) |", "| 500.00 | router | sent (200 tokens) |"]
    assert "| 7250.00 | decode | first step |" in found.lines()


def test_a_way_is_complete_or_none() -> None:
    complete = moments(FINISHED)
    assert way(moments()) is None and way([]) is None
    assert way([moment for moment in complete if moment.at_s != 107.0]) is None, "the last chunk's end is not there yet"
    assert way([replace(moment, at_s=moment.at_s - 50) for moment in complete]) is None, "an earlier request of that length"
    without_step = way([moment for moment in complete if moment.event != "first_step"])
    assert without_step is not None
    with pytest.raises(ValueError, match="first_step"):
        without_step.figures()


def test_a_second_attempt_is_no_handoff_to_measure() -> None:
    with pytest.raises(ValueError, match="more than one attempt"):
        way(moments(FINISHED, Moment("router", "sent", 103.0, {"tokens": 201}, 5, 1)))


@pytest.mark.parametrize(
    ("start", "handoff", "code"),
    [
        ({}, {}, 0),
        ({"decode_s": 61.0}, {}, 1),
        ({"decode_s": 61.0, "limit_s": None}, {}, 0),
        ({}, {"ratio": 0.11}, 1),
        ({}, {"ratio": 0.11, "limit": None}, 0),
        ({}, {"same_text": False}, 1),
    ],
)
def test_a_missed_limit_or_another_text_is_a_failure(
    start: dict[str, Any],
    handoff: dict[str, Any],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    starts = [{"prefill_s": 59.0, "decode_s": 58.0, "limit_s": 60.0} | start]
    handoffs = [{"ratio": 0.09, "limit": 0.10, "same_text": True} | handoff]
    figures = {"machine": "none", "starts": starts, "timelines": [], "handoffs": handoffs}
    monkeypatch.setattr(bench_handoff, "run", lambda config: figures)
    monkeypatch.setattr(sys, "argv", ["bench_handoff"])
    assert main() == code
    assert f"| {handoffs[0]['ratio']} |" in capsys.readouterr().out


def test_between_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    seen: list[Way] = []
    figures_of = Way.figures

    def figures_seen(way: Way) -> dict[str, float]:
        seen.append(way)
        return figures_of(way)

    monkeypatch.setattr(Way, "figures", figures_seen)
    short = ["--prompts", "300", "--repeats", "2", "--output-tokens", "4", "--chunk-tokens", "128"]
    short += ["--router-args", "--dead-after-s 60"]  # a retry has no timeline, and other tests may keep the workers waiting
    monkeypatch.setattr(sys, "argv", ["bench_handoff", *short, "--transport", "shm,zeromq", "--json", str(path)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main() == 0
    assert not list(tmp_path.glob("pdserve-*")), "logs of what went well"
    figures = json.loads(path.read_text())
    assert [row["transport"] for row in figures["starts"]] == ["shm", "zeromq"]
    for row in figures["starts"]:
        assert 0 < row["router_s"] < row["ready_s"] and 0 < max(row["prefill_s"], row["decode_s"]) < row["ready_s"]
    for row in figures["handoffs"]:
        assert row["same_text"] and row["limit"] is None and 0 < row["ratio"] <= row["worst_ratio"]
        assert 0 < row["ready_ms"] < row["arrived_ms"] < row["first_step_ms"] < row["first_token_ms"]
        assert row["before_prefill_ms"] + row["prefill_ms"] + row["first_token_ms"] <= row["ttft_ms"] + 1e-6
    assert len(seen) == 4
    for each in seen:
        times = [each.at(*link) for link in CHAIN]
        assert all(before <= after for before, after in pairwise(times)), list(zip(CHAIN, times, strict=True))
        assert each.at("decode", "first_token") < each.at("decode", "finished")
        chunks = [moment.counts["tokens"] for moment in each.moments if moment.event == "computed"]
        assert chunks == [128, 128, 43]
        assert each.at("kvtransfer", "in_place") < each.at("decode", "arrived")
        last_s = max(moment.at_s for moment in each.moments if moment.event == "computed")
        assert last_s < each.at("decode", "ready")
        assert each.ratio == pytest.approx(
            (each.at("decode", "first_step") - last_s) / (last_s - each.at("prefill", "computing"))
        )
    out, err = capsys.readouterr()
    assert out.count("| decode | first step |") == 2 and "| transport | prompt |" in out
    assert "goes over shm" in err and "goes over zeromq" in err and "(as asked for)" in err


def test_a_checkpoint_is_made_once_or_for_a_while(tmp_path: Path) -> None:
    tiny = ["--widths", "tiny", "--layers", "3"]
    with checkpoint(parse(BenchConfig, "", [*tiny, "--model", str(tmp_path)])) as folder:
        assert folder == tmp_path and json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
        made_ns = (folder / "model.safetensors").stat().st_mtime_ns
    with checkpoint(parse(BenchConfig, "", [*tiny, "--model", str(tmp_path)])):
        assert (tmp_path / "model.safetensors").stat().st_mtime_ns == made_ns
    with checkpoint(parse(BenchConfig, "", tiny)) as folder:
        assert (folder / "model.safetensors").exists()
    assert not folder.exists()
    with checkpoint(parse(BenchConfig, "", [])) as folder:
        assert folder == BUNDLED_MODEL


def test_prompts_that_the_model_does_not_take_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def start(system: Any) -> str:
        started.append(system)
        raise LaunchError("started")

    monkeypatch.setattr(System, "start", start)
    refusal = "--prompts 16384 with --output-tokens 2: the model takes 16384"
    for prompt, said in ((16384, refusal), (16382, "started")):
        monkeypatch.setattr(sys, "argv", ["bench_handoff", "--prompts", f"8,{prompt}", "--output-tokens", "2"])
        assert main() == 2
        assert said in capsys.readouterr().err
    assert len(started) == 1


@pytest.mark.parametrize("wrong", [["--prompts", "1"], ["--prompts", "300,x"], ["--output-tokens", "1"], ["--repeats", "0"]])
def test_what_cannot_be_measured_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(BenchConfig, "bench_handoff", wrong)
