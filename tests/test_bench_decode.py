"""The short form of scripts/bench_decode.py: every section on a CPU with tiny widths, and the parts that its figures rest on.

Asserts no speed: on a CPU there is none to speak of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import kernels
from decode.sampling import Choice
from kernels import backend
from kernels.cases.sample import neutral
from kernels.indexer import select_entries
from kernels.launch import launches_go_to
from kernels.rows import planes
from kernels.sample import noise_stream, sample
from kernels.workspace import Workspace
from model import indexer
from model.batch import Batch, Row
from model.cache import index_row, kv_row
from model.config import ModelConfig
from model.runner import Runner
from scripts import decode_steps
from scripts.bench_decode import SECTIONS, BenchConfig, capacity, run, table
from scripts.decode_floor import step_bytes
from scripts.decode_forms import equal_rows
from scripts.decode_profile import GROUP_OF, Work, exclusive_times, summary
from scripts.decode_steps import (
    Steps,
    fill_memory,
    indexer_of_the_maximum,
    last_positions,
    page_tables,
    routes_recorded,
    sharing,
)
from scripts.random_checkpoint import RandomCheckpoint
from scripts.released_config import RELEASED, with_layers
from wire.options import parse

torch.set_num_threads(1)

SHORT = [
    *("--device", "cpu", "--widths", "tiny", "--layers", "3", "--batches", "2", "--contexts", "300", "--profiled", "1"),
    *("--limit", "1024", "--short-limit", "512", "--limit-context", "300", "--prompts", "300", "--chunk", "256"),
    *("--replays", "1", "--steps", "1", "--profiled-steps", "1"),
]


def tiny_runner(device: str = "cpu") -> Runner:
    """Layers of every kind, filled memory."""
    config = ModelConfig.from_json(with_layers(parse(BenchConfig, "", SHORT).released(), 4))
    runner = Runner(RandomCheckpoint(config, device), device, num_pages=12, num_slots=7)
    fill_memory(runner)
    return runner


@pytest.fixture(scope="module")
def runner() -> Runner:
    return tiny_runner()


def test_the_short_form() -> None:
    with patch.object(decode_steps, "select_among_everything", wraps=decode_steps.select_among_everything) as ablation:
        figures = run(parse(BenchConfig, "bench_decode", SHORT))
    assert ablation.called
    assert json.loads(json.dumps(figures)) == figures and not figures["skipped"]
    for section in set(SECTIONS) - {"bits"}:  # which needs two batches
        assert figures[section] and table(figures[section]).count("\n") == 1 + len(figures[section])
    (decode,) = figures["decode"]
    assert min(decode[name] for name in ("forward_ms", "step_ms", "wall_ms", "tokens_per_s", "floor_ms")) > 0
    assert (decode["batch"], decode["context"], decode["pages_shared_by"]) == (2, 300, 1.0)
    assert 2 <= decode["experts_asked"] <= 4  # two of eight for each of two tokens
    assert decode["floor_of_forward"] == pytest.approx(decode["floor_ms"] / decode["forward_ms"])
    assert [(row["limit"], row["indexer"]) for row in figures["limit"]] == [(512, ""), (1024, ""), (1024, "ablation")]
    (prefill,) = figures["prefill"]
    assert prefill["tokens_per_s"] > 0 and prefill["queued_tokens_per_s"] > 0
    (profile,) = figures["profile"]
    assert profile["kernels"] > 100 and sum(each for name, each in profile.items() if name.startswith("share")) > 0.999
    assert profile["idle_between"] == 0 and 0 <= profile["idle_within"] < 1


def test_bits_alone_and_in_a_batch() -> None:
    """The references do not look at the number of rows."""
    figures = run(parse(BenchConfig, "bench_decode", [*SHORT, "--batches", "3,1", "--only", "bits"]))
    forms = [(row["form"], row["batch"]) for row in figures["bits"]]
    assert forms == [("by rows", 1), ("by rows", 3), ("invariant", 1), ("invariant", 3)]
    for row in figures["bits"]:
        beside = ["beside 3: "] if row["batch"] == 1 else []
        for name in (*beside, "4 tokens: "):
            assert [row[name + what] for what in ("same_bits", "same_token", "apart")] == [1.0, 1.0, 0.0]
        assert row["step_ratio"] > 0 and len(row) == 9 + 3 * len(beside)


def test_bits_that_differ_are_counted() -> None:
    alone, together = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    found = equal_rows(alone, together)
    assert (found["same_bits"], found["same_token"]) == (0.5, 0.5)
    assert found["apart"] == pytest.approx((9 / 15) ** 0.5)


def test_logits_of_four_tokens_at_once_are_those_of_one_after_another() -> None:
    """The same tokens at the same places, and no others'. They leave their rows, so the memory is this test's own."""
    steps = Steps(tiny_runner(), None, 1024, [2])
    steps.prepare(2, 300)
    together, singles = steps.logits(2, 4).view(2, 4, -1), [steps.logits(2, behind=behind) for behind in range(4)]
    assert all(torch.equal(together[:, behind], single) for behind, single in enumerate(singles))
    assert not torch.equal(singles[0], singles[1]) and not torch.equal(singles[0][0], singles[0][1])


def test_what_there_is_no_time_for_is_named() -> None:
    figures = run(parse(BenchConfig, "bench_decode", [*SHORT, "--layers", "2,3", "--only", "decode", "--budget-s", "1e-9"]))
    assert figures["skipped"] == ["2 layers: no time left", "3 layers: no time left"] and "decode" not in figures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--only", "decode,speed"], "--only speed: the sections are decode, limit"),
        (["--device", "cpu", "--layers", "8,x"], "--layers is '8,x'; it must be positive whole numbers"),
        (["--device", "cpu", "--steps", "300"], "--steps 300: from 1 to 252"),
    ],
)
def test_options_that_cannot_be_meant(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(BenchConfig, "bench_decode", arguments)
    assert message in capsys.readouterr().err


def test_filled_memory_is_finite_and_varied(runner: Runner) -> None:
    row, key = kv_row(runner.config, runner.kv_dtype), index_row(runner.config, runner.kv_dtype, runner.index_keys)
    for cache in runner.main_caches:
        parts = [row.unpack(cache.window)]
        parts += [state for state in (cache.state, cache.index_state) if state is not None]
        parts += [row.unpack(torch.cat(planes(cache.entries, row), -1))] if cache.entries is not None else []
        parts += [key.unpack(torch.cat(planes(cache.index_entries, key), -1))] if cache.index_entries is not None else []
        for values in parts:
            assert bool(values.isfinite().all()) and float(values.abs().max()) < 2
            assert float(values[0].std()) > 0.01 and not torch.equal(values[1], values[2])


def test_page_tables_share_no_page_that_is_written() -> None:
    plenty = page_tables(3, 5, 1, 16)
    assert sorted(plenty.flatten().tolist()) == list(range(1, 16)) and sharing(plenty) == 1.0
    scarce = page_tables(3, 6, 2, 11)  # 4 pages for 12 places
    assert sorted(scarce[:, -2:].flatten().tolist()) == [1, 2, 3, 4, 5, 6] and sharing(scarce) == 3.0
    assert scarce[:, :-2].flatten().bincount(minlength=11).tolist() == [0] * 7 + [3, 3, 3, 3][:4]
    assert page_tables(3, 1, 4, 4).tolist() == [[1], [2], [3]]
    for pages_each, num_pages in ((2, 4), (1, 3)):
        with pytest.raises(ValueError, match="too few for 3 sequences"):
            page_tables(3, pages_each, 1, num_pages)


def test_rows_close_windows_as_often_as_in_real_batches() -> None:
    ends = last_positions(128, 8192) + 1
    assert int((ends % 128 == 0).sum()) == 1 and int((ends % 4 == 0).sum()) == 32
    assert int(ends[0]) % 4 == 0 and int(ends[0]) % 128  # a batch of one closes the smaller one
    assert 8192 - int(ends.min()) < 128 and int(last_positions(128, 3).min()) == 0


def test_steps_are_the_models_and_the_samplers(runner: Runner) -> None:
    """Steps of the engine for two sequences, across the end of a page, token by token against batches that are built from rows;
    and again, as a measurement does, from the beginning."""
    steps = Steps(runner, None, 1024, [2])
    steps.prepare(2, 512)
    tables, positions = page_tables(2, 3, 2, 12).tolist(), last_positions(2, 512)
    fed = [sequence.tokens[-1] for sequence in steps._sequences]
    fill_memory(runner)
    steps.run(6)
    drawn = [sequence.tokens[int(position) + 1 :] for sequence, position in zip(steps._sequences, positions, strict=True)]
    assert steps._table.lengths[1:3].tolist() == (positions + 6).tolist()
    fill_memory(runner)
    parameters = neutral(2, runner.config.vocab_size, 3, "cpu")
    parameters.temperature.fill_(1.0)
    parameters.stream.copy_(noise_stream(torch.arange(2), torch.zeros(2, dtype=torch.int64)))
    passes = []
    for step in range(6):
        rows = [Row([token], int(positions[at]) + step, at + 1, tables[at]) for at, token in enumerate(fed)]
        parameters.position.copy_(positions + step + 1)
        streams = runner.forward(Batch.build(rows, 256))
        passes.append(streams)
        fed = sample(runner.logits(streams), parameters, edits=False).ids.tolist()
        assert fed == [each[step] for each in drawn]
    fill_memory(runner)
    assert torch.equal(steps._forward(), passes[0]), "the pass that is timed alone starts at the same place"
    steps.step_ms(2)
    steps.rewind()
    fill_memory(runner)
    steps.run(6)
    assert [sequence.tokens[-6:] for sequence in steps._sequences] == drawn
    assert [len(sequence.tokens) for sequence in steps._sequences] == (positions + 7).tolist()


def test_steps_refuse_what_does_not_fit(runner: Runner) -> None:
    steps = Steps(runner, None, 1024, [1, 6])
    with pytest.raises(ValueError, match="more than these steps are configured for"):
        steps.prepare(1, 16 * 256)
    with pytest.raises(ValueError, match="12 pages are too few"):
        steps.prepare(6, 300)


def test_the_ablation_scores_everything_and_chooses_the_same(runner: Runner) -> None:
    scored: list[int] = []

    def watching(*arguments: Any) -> Any:
        scored.append(int(arguments[3].positions.max()))
        return select_entries(*arguments)

    steps = Steps(runner, None, 4096, [2])
    steps.prepare(2, 700)
    with torch.inference_mode():
        plain = steps._forward().clone()
        with patch.object(decode_steps, "select_entries", watching), indexer_of_the_maximum():
            assert torch.equal(steps._forward(), plain)
    assert scored == [4095, 695], "all 16 pages of the limit, then what is there"
    assert vars(indexer)["select_entries"] is select_entries


def test_the_experts_that_a_step_asks(runner: Runner) -> None:
    steps = Steps(runner, None, 1024, [3])
    steps.prepare(3, 300)
    with routes_recorded() as asked:
        steps._forward()
    assert [tuple(ids.shape) for ids in asked] == [(3, 2)] * 4
    assert steps.experts_asked() == [len(set(ids.flatten().tolist())) for ids in asked]
    with routes_recorded() as nothing:
        pass
    assert nothing == []


@pytest.mark.parametrize(
    ("batch", "distinct", "context", "floor_ms"),
    [(1, 6, 8192, 0.40), (8, 44, 8192, 1.28), (32, 136, 8192, 3.40), (64, 200, 1024, 4.86), (64, 200, 65_536, 4.97)],
)
def test_bytes_of_a_step_at_the_released_widths(batch: int, distinct: int, context: int, floor_ms: float) -> None:
    """Against floors that were computed by hand for 8 layers, from the same counts, at 4.66 TB/s."""
    config = ModelConfig.from_json(with_layers(RELEASED, 8))
    found = step_bytes(config, [context] * batch, [distinct] * 8)
    assert found.forward / 4.66e9 == pytest.approx(floor_ms, rel=0.02)
    assert found.step - found.forward == 2 * 129_280 * 4096


def test_bytes_of_rows() -> None:
    """Keys are read where there are more entries than may be chosen; the window is never longer than the context."""
    config = ModelConfig.from_json(with_layers(RELEASED, 4))
    assert step_bytes(config, [100], [0] * 4).rows == 584 * (4 * 100 + 25)
    assert step_bytes(config, [2048], [0] * 4).rows == 584 * (4 * 128 + 512 + 16)
    assert step_bytes(config, [2052], [0] * 4).rows == 584 * (4 * 128 + 512 + 16) + 513 * 132
    assert step_bytes(config, [100, 2052], [0] * 4).rows == 584 * (8 * 128 - 112 + 25 + 512 + 16) + 513 * 132


def test_capacity_beside_vllm() -> None:
    """3,854 bytes a token in pages, and a slot of 17 MB a sequence: 12.3 million tokens in 64 sequences."""
    rows = capacity(parse(BenchConfig, "", ["--device", "cpu"]))
    assert rows[0]["sequences"] == 64 and 12.2e6 < rows[0]["tokens"] < 12.4e6
    assert rows[0]["page_bytes_per_token"] == 986_624 / 256 and rows[0]["vllm_tokens_limit_73728"] == 554_000
    for row in rows:
        needed = row["tokens"] // 256 * 986_624 + row["sequences"] * row["slot_bytes"]
        assert 48.5e9 - 986_624 < needed <= 48.5e9


def test_a_summary_of_two_steps() -> None:
    """Two kernels and a copy each; the second kernel begins while the first one runs, the copy after a pause."""
    step = [Work("_decode", 0, 4), Work("_linear_kernel", 3, 7), Work("Memcpy DtoH (Device -> Pinned)", 8, 9)]
    works = step + [Work(each.name, each.begin_us + 10, each.end_us + 10) for each in step]
    times = exclusive_times(works)
    assert times == {"_decode": 7.0, "_linear_kernel": 7.0, "Memcpy DtoH (Device -> Pinned)": 2.0}
    found = summary(works, 2)
    assert (found.kernels, found.step_us, found.busy_us) == (3, 9.5, 8.0)
    assert found.idle_between == pytest.approx(1 / 19) and found.idle_within == pytest.approx(2 / 19)
    assert found.shares == {"attention": 7 / 16, "linear layers and vocabulary": 7 / 16, "copies": 1 / 8}
    for count, steps in ((5, 2), (0, 1)):
        with pytest.raises(ValueError, match=f"{count} kernels and copies were recorded"):
            summary(works[:count], steps)


@pytest.fixture(params=sorted(backend.TARGETS))
def runner_for_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """For a card that is not there."""
    before = backend.active()
    monkeypatch.setattr(backend, "choose", lambda device: backend.use(backend.TARGETS[request.param]))
    yield tiny_runner()
    backend.use(before)


def test_every_kernel_of_a_step_has_a_group(runner_for_kernels: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step on kernels finds its memory; the kernels themselves are not started."""
    started: set[str] = set()
    monkeypatch.setattr("decode.engine.read_choices", lambda sequences, *_: [Choice([0]) for _ in sequences])
    with launches_go_to(lambda kernel, grid, *args, **options: started.add(kernel.fn.__name__)):
        steps = Steps(runner_for_kernels, Workspace(64 << 20, "cpu"), 4096, [1, 3])
        for batch, context in ((1, 700), (3, 300)):
            steps.prepare(batch, context)
            steps.step_ms(1)
            steps.step_ms(1, greedy=True)
        runner_for_kernels.forward(Batch.build([Row([1] * 300, 0, 1, [1, 2])], 256))
    assert started - GROUP_OF.keys() == set() and len(started) > 20
    sources = "".join(path.read_text() for path in Path(str(kernels.__file__)).parent.glob("*.py"))
    assert [name for name in GROUP_OF if f"def {name}(" not in sources] == []
