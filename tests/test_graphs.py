"""Graphs without a GPU: a recorder that replays by calling again, kernels that are not started, and failures put in the way."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from decode.graphs import EVERYTHING, GREEDY, SAMPLED, WAYS, CaptureFailed, CudaRecorder, Graphs, Results, batch_sizes, way_for
from decode.stages import check
from decode.step import Asks, Step
from kernels import backend, workspace
from kernels.launch import launch, launches_go_to, stage
from kernels.sample_triton import _scan_kernel
from kernels.sequences import SequenceTable
from kernels.trail import Trail
from kernels.workspace import Ruler, Workspace
from model.runner import Runner
from tests import golden
from tests.fake_runner import VOCAB, FakeDrafter, FakeRunner, expected_text

torch.set_num_threads(1)
PROMPTS = [[5, 6, 7], [100, 3, 9, 9, 2, 8], [44] * 9]


class Again:
    """What FakeRecorder has recorded."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class FakeRecorder:
    """Captures by running, and replays by running again. `capturing` while it does the first."""

    def __init__(self) -> None:
        self.capturing = False
        self.collects = False
        self.recorded = self.replayed = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def record(self, run: Callable[[], Results]) -> tuple[Again, Results]:
        with self.recording():
            results = run()

        def again() -> None:
            self.replayed += 1
            for place, new in zip(results, run(), strict=True):
                place.copy_(new)

        return Again(again), results

    @contextmanager
    def recording(self) -> Iterator[Again]:
        self.capturing, self.recorded = True, self.recorded + 1
        self.collects = self.collects or gc.isenabled()
        try:
            yield Again(lambda: None)
        finally:
            self.capturing = False


def prepared(runner: FakeRunner, rows: int) -> SequenceTable:
    """A table with PROMPTS in slots 1 to 3, all tokens but the last in the arena."""
    table = SequenceTable.make(rows, len(runner.arena.slots), 16, VOCAB, "cpu")
    for number, prompt in enumerate(PROMPTS):
        slot, pages = number + 1, torch.arange(1 + 16 * number, 17 + 16 * number)
        table.pages[slot] = pages
        table.lengths[slot], table.tokens[slot] = len(prompt) - 1, prompt[-1]
        for position, token in enumerate(prompt[:-1]):
            runner._tokens[int(pages[position // 4]), position % 4] = token
            runner._ring[slot, position % 8] = token
    return table


def texts(graphs: Graphs, table: SequenceTable, asks: Asks, steps: int) -> list[list[int]]:
    """`steps` tokens of each prompt. As the host does it: the rows that run, and zeros behind them."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(steps):
        table.rows.zero_()
        table.rows[: len(PROMPTS)] = torch.arange(1, len(PROMPTS) + 1)
        step = graphs.run(len(PROMPTS), 1, asks)
        for text, row in zip(found, step.report[: len(PROMPTS)].tolist(), strict=True):
            assert row[:2] == [1, 0]
            text.append(row[2])
    return found


@pytest.mark.parametrize("asks", WAYS)
@pytest.mark.parametrize("captured", [False, True])
def test_the_text_of_replayed_steps(captured: bool, asks: Asks) -> None:
    """Three sequences; with graphs in a step of four rows, of which one fills up."""
    runner = FakeRunner()
    table = prepared(runner, 6)
    recorder = FakeRecorder() if captured else None
    graphs = Graphs(runner, table, 6, [1], recorder)  # type: ignore[arg-type]
    runner.steps.clear()
    assert texts(graphs, table, asks, 5) == [expected_text(prompt, 5) for prompt in PROMPTS]
    assert {len(step) for step in runner.steps} == {4 if captured else 3}
    assert graphs.step(3, 1).rows == (4 if captured else 3)
    assert not table.lengths[0] and not table.counts[0].any(), "slot 0 belongs to nobody"
    assert graphs.run(3, 1, asks).tops[0].shape[1] == max(0, asks.tops)


def test_every_graph_is_replayed_once_before_anybody_waits_for_it() -> None:
    """The first replay of each took milliseconds, in the middle of a text."""
    runner, recorder = FakeRunner(), FakeRecorder()
    table = prepared(runner, 2)
    before = table.words.clone()
    Graphs(runner, table, 2, [1], recorder)  # type: ignore[arg-type]
    assert recorder.replayed == recorder.recorded == 2 * (1 + len(WAYS))
    assert torch.equal(table.words, before), "the sequences that are there already are left alone"


def test_a_replay_that_fails_at_start_is_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(captured: Any) -> None:
        raise RuntimeError("an illegal address")

    monkeypatch.setattr("decode.graphs._Captured.replay_all", fail)
    runner = FakeRunner()
    with pytest.raises(CaptureFailed, match=r"batch 2, 1 token .*an illegal address"):
        Graphs(runner, prepared(runner, 2), 2, [1], FakeRecorder())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", golden.CASES)
def test_the_tiny_models_through_graphs(name: str) -> None:
    """Three prompts of different lengths, in a step with a row of nobody, captured before there was anything in the arena;
    CUDA graphs where the golden tests run on a GPU. The texts are those of eager steps, one sequence alone."""
    model, steps = golden.runner(name), 12
    device = torch.device(golden.DEVICE)
    table = SequenceTable.make(4, 20, 16, model.config.vocab_size, device)
    recorder = CudaRecorder(device) if device.type == "cuda" else FakeRecorder()
    graphs = Graphs(model, table, 4, [1], recorder)
    expected, texts = [], []
    for slot, which in enumerate(("len1", "len129", "len300"), 1):
        ids, _ = golden.prompt(name, which)
        streams, _ = golden.run(model, [(slot, ids, 0)])
        expected.append([first := int(model.logits(streams[-1:]).argmax())])
        expected[-1] = golden.greedy(model, [first], [len(ids)], [slot], steps - 1)[0]
        golden.run(model, [(slot, ids, 0)])  # once more: the rings are those of the prompt's end again
        table.rows[slot - 1] = slot
        table.pages[slot, :3] = torch.tensor(golden.pages_of(slot))
        table.lengths[slot], table.tokens[slot] = len(ids), first
        texts.append([first])
    for _ in range(steps - 1):
        report = graphs.run(3, 1, GREEDY).report[:3].tolist()
        for text, (count, status, token, *_) in zip(texts, report, strict=True):
            assert (count, status) == (1, 0)
            text.append(token)
    assert texts == expected


def test_what_a_replay_reports_is_of_the_way_it_finished() -> None:
    runner = FakeRunner()
    table = prepared(runner, 3)
    graphs = Graphs(runner, table, 3, [1], FakeRecorder())  # type: ignore[arg-type]
    wide = graphs.run(3, 1, Asks(draws=True, edits=False, tops=2)).tops[0]
    assert wide.shape[1] == EVERYTHING.tops, "wider than asked for"
    greedy = graphs.run(3, 1, GREEDY)
    report = greedy.report
    assert greedy.tops[0].shape[1] == 0
    assert graphs.run(3, 1, EVERYTHING).report is not report
    assert graphs.run(3, 1, GREEDY).report is report, "a replay writes where the capture wrote"


def test_a_step_finishes_in_the_least_way_that_has_all_it_asks_for() -> None:
    def way(draws: bool, edits: bool, tops: int) -> Asks:
        return way_for(Asks(draws, edits, tops))

    assert way(False, False, -1) == GREEDY
    assert way(True, False, -1) == way(False, True, -1) == way(True, True, -1) == SAMPLED
    assert way(False, False, 0) == way(True, False, 3) == way(True, True, 20) == EVERYTHING


def test_every_step_is_started_before_the_first_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    runner, recorder = FakeDrafter(), FakeRecorder()
    order: list[tuple[bool, int]] = []
    forward = runner.forward
    runner.forward = lambda batch: order.append((recorder.capturing, len(batch.slots))) or forward(batch)  # type: ignore
    table = SequenceTable.make(4, 16, 16, VOCAB, "cpu")
    with caplog.at_level("INFO"):
        Graphs(runner, table, 4, [1, 2], recorder)  # type: ignore[arg-type]
    rows = [4, 4, 2, 2, 1, 1]
    eager = replayed = [(False, each) for each in rows]
    assert order == eager + [(True, each) for each in rows] + replayed, "all eagerly; then the largest first"
    assert recorder.recorded == 3 * (4 + 7), "with one token a step has twice as many ways to finish: it stores or not"
    assert not recorder.collects and gc.isenabled(), "no garbage is collected during a capture, only then"
    assert "capturing 1 of 6: batch 4, 2 tokens" in caplog.text and "capturing 6 of 6: batch 1, 1 token\n" in caplog.text
    assert "33 graphs captured in" in caplog.text


def test_a_plain_step_of_a_worker_that_speculates_is_that_of_one_that_does_not() -> None:
    """Replayed, between steps that store: the same kernels over the same rows, and no MTP row. Texts are the same."""
    found = []
    for tokens in ([1], [1, 2]):
        runner = FakeDrafter()
        table, ring = prepared(runner, 4), runner._drafted.clone()
        graphs = Graphs(runner, table, 4, tokens, FakeRecorder())  # type: ignore[arg-type]
        runner._drafted.copy_(ring)
        found.append(texts(graphs, table, GREEDY, 5))
        assert torch.equal(runner._drafted, ring)
        if len(tokens) > 1:
            stored = texts(graphs, table, replace(GREEDY, stores=True), 1)
            assert (runner._drafted != ring)[1:].sum(1).tolist()[:4] == [1, 1, 1, 0], "a row of each sequence"
            for text, prompt, more in zip(found[0], PROMPTS, stored, strict=True):
                assert text + more == expected_text(prompt, 6)
    assert found[0] == found[1] == [expected_text(prompt, 5) for prompt in PROMPTS]


def test_batch_sizes_end_with_the_largest_and_waste_little() -> None:
    assert batch_sizes(1) == [1] and batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    for most in (5, 100, 256, 1000):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for rows in range(1, most + 1):
            waste = next(size for size in sizes if size >= rows) - rows
            assert waste < max(8, rows / 8)


# --- where memory comes from


def test_a_workspace_as_large_as_the_ruler_says_is_enough_and_a_smaller_one_is_not() -> None:
    def step() -> None:
        workspace.empty((1000,), torch.float32, "cpu")
        workspace.flip()
        for size in (10, 5000, 300, 7000, 1):
            with workspace.frame():
                workspace.empty((size, 3), torch.bfloat16, "cpu")
            workspace.empty((size,), torch.float32, "cpu")
            workspace.flip()
        workspace.empty((77,), torch.int64, "cpu")

    ruler = Ruler("cpu")
    for _ in range(2):
        with ruler.active():
            step()
    with Workspace(ruler.needed_bytes, "cpu").active():
        step()
    with Workspace(ruler.needed_bytes - 4 * workspace.ALIGNMENT, "cpu").active(), pytest.raises(MemoryError, match="too small"):
        step()


def test_a_ruler_measures_a_step_without_halves_exactly() -> None:
    ruler = Ruler("cpu")
    with ruler.active():
        assert workspace.empty((2, 3), torch.float32, "cpu").shape == (2, 3)
        workspace.empty((1000,), torch.uint8, "cpu")
    assert 1256 <= ruler.needed_bytes <= 1256 + 4 * workspace.ALIGNMENT


# --- when a capture fails


class Broken:
    """Takes every launch and starts nothing, but raises `error` for the n-th one of `kernel`, if `when` agrees."""

    def __init__(self, kernel: str, error: Exception, nth: int = 0, when: Callable[[], bool] = lambda: True) -> None:
        self.kernel, self.error, self.when, self._left = kernel, error, when, nth

    def __call__(self, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        if kernel.fn.__name__ == self.kernel and self.when():
            self._left -= 1
            if self._left < 0:
                raise self.error


@cache
def loaded() -> Runner:
    """The tiny model as it is loaded for the backend that is active."""
    return Runner(golden.model_dir("tiny-fp8fp4"), page_tokens=golden.PAGE_TOKENS, num_pages=4, num_slots=3)


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Runner, SequenceTable]]:
    """A model and a table as on a card that is not there. Kernels must not be started."""
    before = backend.active()
    backend.use(backend.TARGETS["sm_120"])
    monkeypatch.setattr(backend, "choose", lambda device: backend.active())
    try:
        yield loaded(), SequenceTable.make(2, 3, 16, loaded().config.vocab_size, "cpu")
    finally:
        backend.use(before)


def message_of(runner: Runner, table: SequenceTable, recorder: FakeRecorder, broken: Broken) -> str:
    with launches_go_to(broken), pytest.raises(CaptureFailed) as failed:
        Graphs(runner, table, 2, [1], recorder)
    assert failed.value.__cause__ is broken.error
    return str(failed.value)


TOO_MUCH = OutOfResources(147_456, 101_376, "shared memory")


@pytest.mark.parametrize(
    ("kernel", "nth", "where"),
    [
        ("_embed_kernel", 0, "embed, kernel embed_kernel"),
        ("_decode", 0, "layers.0.attn, kernel decode"),
        ("_combine", 3, "layers.3.attn, kernel combine"),
        ("sum_kernel", 2, "layers.2.ffn, kernel sum_kernel"),
        ("_compress", 0, "layers.2.attn, kernel compress"),
        ("_scan_kernel", 0, "sample, kernel scan_kernel"),
    ],
)
def test_a_kernel_that_cannot_be_captured_is_named_with_its_place(
    unstarted: tuple[Runner, SequenceTable], kernel: str, nth: int, where: str
) -> None:
    recorder = FakeRecorder()
    said = message_of(*unstarted, recorder, Broken(kernel, TOO_MUCH, nth, lambda: recorder.capturing))
    assert "the step of batch 2, 1 token cannot be captured: " in said
    assert f"{where}, triton for sm_120: it needs 147456 of shared memory, the card has 101376" in said
    assert "ran eagerly just before" in said and "--capture off serves without graphs" in said
    assert "--capture check" in said


def test_a_kernel_that_does_not_start_at_all(unstarted: tuple[Runner, SequenceTable]) -> None:
    said = message_of(*unstarted, FakeRecorder(), Broken("_decode", RuntimeError("Triton Error [CUDA]: no kernel image"), 1))
    assert "batch 2, 1 token cannot be started, even without a graph: layers.1.attn, kernel decode" in said
    assert "RuntimeError: Triton Error [CUDA]: no kernel image" in said
    assert "--capture off would not help" in said and "python -m kernels.check" in said


def test_warming_up_for_prefill_says_where_it_fails(unstarted: tuple[Runner, SequenceTable]) -> None:
    runner, _ = unstarted
    with (
        launches_go_to(Broken("_decode", TOO_MUCH, 1)),
        pytest.raises(
            RuntimeError, match=r"a step of 2 x 1 tokens fails: layers\.1\.attn, kernel decode, .*needs 147456 of shared"
        ),
    ):
        runner.warm_up([[300], [1, 1]])


def test_without_graphs_every_size_is_started_once(unstarted: tuple[Runner, SequenceTable]) -> None:
    graphs, started = Graphs(*unstarted, 2, [1, 2]), []
    with launches_go_to(lambda kernel, grid, *args, **options: started.append(kernel.fn.__name__)):
        graphs.warm_up([1, 2])
    assert started.count("_scan_kernel") == 24, "two sizes, three ways to finish two tokens and a draft, six to finish one"
    assert started.count("_join_streams") == 12, "half of the steps of one token store"
    with (
        launches_go_to(Broken("_scan_kernel", TOO_MUCH)),
        pytest.raises(CaptureFailed, match="batch 1, 1 token cannot be started"),
    ):
        graphs.warm_up([1])


def test_without_graphs_one_step_alone_holds_its_logits(unstarted: tuple[Runner, SequenceTable]) -> None:
    graphs = Graphs(*unstarted, 2, [1, 2])
    with launches_go_to(lambda kernel, grid, *args, **options: None):
        ran = [weakref.ref(graphs.run(rows, tokens, GREEDY)) for rows, tokens in ((1, 1), (2, 1), (2, 2), (2, 2))]
    gc.collect()
    first, second, third, again = (ref() for ref in ran)
    assert first is None and second is None and third is again is not None


def test_memory_that_runs_out_is_no_riddle() -> None:
    runner = FakeRunner()
    runner.forward = lambda batch: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))  # type: ignore
    with pytest.raises(CaptureFailed, match=r"OutOfMemoryError: CUDA out of memory.*a smaller --max-batch"):
        Graphs(runner, SequenceTable.make(4, 16, 16, VOCAB, "cpu"), 4, [1], FakeRecorder())  # type: ignore[arg-type]


def test_an_operation_that_reads_the_device_is_named_by_its_stage() -> None:
    """No kernel is at fault there, a line of ours is. Of what torch says the first line counts."""
    recorder = FakeRecorder()
    runner = FakeRunner()
    logits = runner.logits

    def reads(streams: Tensor) -> Tensor:
        with stage("head"):
            if recorder.capturing:
                raise RuntimeError("CUDA error: operation not permitted\nCompile with more to see more.")
            return logits(streams)

    runner.logits = reads  # type: ignore[method-assign]
    said = r"captured: head, tests/test_graphs\.py:\d+, .*: RuntimeError: CUDA error: operation not permitted\. The same step"
    with pytest.raises(CaptureFailed, match=said):
        Graphs(runner, SequenceTable.make(4, 16, 16, VOCAB, "cpu"), 4, [1], recorder)  # type: ignore[arg-type]


def test_an_unwatched_stage_is_nothing_and_a_trail_forgets_what_went_well() -> None:
    trail = Trail()
    with stage("a"):
        pass
    with trail.followed():
        with stage("b"):
            assert trail.stage == "b"
        assert trail.place(ValueError()).startswith("between its stages, outside any kernel")
        with launches_go_to(lambda *args: None), trail.followed():
            launch(_scan_kernel, (1,))
        assert trail.kernels == 1 and trail.launch is None, "it was started and is not at fault"
    assert stage("a") is stage("c"), "nothing is made for nobody"


PROBE = """
import json, torch
from triton.runtime.errors import OutOfResources
from kernels import backend
from kernels.compiled import compiling
from kernels.launch import launch, launches_go_to
from kernels.trail import Trail
from tests.compile_probe import _wide_product

backend.use(backend.TARGETS["sm_120"])
trail, matrix = Trail(), torch.empty(128, 512, dtype=torch.bfloat16)
error = OutOfResources(131072, 101376, "shared memory")
def refuse(kernel, grid, *args, **options):
    raise error
with compiling(120), launches_go_to(refuse):
    try:
        with trail.followed():
            launch(_wide_product, (1,), matrix, matrix, torch.empty(128, 128), SIZE=128, DEPTH=256, num_warps=8)
    except OutOfResources:
        print(json.dumps([trail.place(error), trail.reason(error)]))
"""


def test_what_a_kernel_takes_is_read_off_its_machine_code() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, check=True)
    place, reason = json.loads(run.stdout.splitlines()[-1])
    assert "kernel wide_product, triton for sm_120" in place
    assert reason.startswith("it needs 131072 of shared memory, the card has 101376; it takes 131072 B of shared memory")
    assert "(a block has 101376)" in reason and "registers in 256 threads (a block has 65536)" in reason


def test_steps_that_ran_once_keep_nothing_beside_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of every size, one beside the other, would be gigabytes."""
    runner = FakeRunner()
    held: list[int] = []

    def emptied() -> None:
        mine = [each for each in gc.get_objects() if type(each) is Step and id(each._runner) == id(runner)]
        held.append(sum(hasattr(step, "_logits") for step in mine))

    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    Graphs(runner, SequenceTable.make(4, 16, 16, VOCAB, "cpu"), 4, [1], FakeRecorder())  # type: ignore[arg-type]
    assert held == [0]


def test_sizes_that_are_captured_later_are_compiled_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of them is measured or kept."""
    started: list[int] = []
    step = Graphs._step

    def noted(graphs: Graphs, rows: int, tokens: int) -> Step:
        started.append(rows)
        return step(graphs, rows, tokens)

    def first_start(run: Callable[[], None], later: Callable[[], None]) -> None:
        for each in (run, later, run):
            started.clear()
            each()
            seen.append(list(started))

    table = SequenceTable.make(4, 16, 16, VOCAB, "cpu")
    alone = Graphs(FakeRunner(), table, 4, [1], FakeRecorder(), [2])  # type: ignore[arg-type]
    seen: list[list[int]] = []
    monkeypatch.setattr("decode.graphs.run_compiled", first_start)
    monkeypatch.setattr(Graphs, "_step", noted)
    graphs = Graphs(FakeRunner(), table, 4, [1], FakeRecorder(), [2], later=[1, 2, 4])  # type: ignore[arg-type]
    assert seen == [[2], [4, 2, 1], [2]]
    assert graphs._captured.keys() == {(2, 1)} and graphs.workspace_bytes == alone.workspace_bytes


def test_what_graphs_write_to_lives_as_long_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of what the steps hold: one that is run eagerly later lets go of it, and the graphs do not know."""
    made: list[weakref.ref[Workspace]] = []

    class Forgetful(FakeRecorder):
        """As CUDA's, which remembers addresses and no tensors."""

        def record(self, run: Callable[[], Results]) -> tuple[Again, Results]:
            with self.recording():
                results = run()
            return Again(lambda: None), results

    def watched(nbytes: int, device: torch.device) -> Workspace:
        space = Workspace(nbytes, device)
        made.append(weakref.ref(space))
        return space

    monkeypatch.setattr("decode.graphs.Workspace", watched)
    graphs = Graphs(FakeRunner(), SequenceTable.make(4, 16, 16, VOCAB, "cpu"), 4, [1], Forgetful())  # type: ignore[arg-type]
    assert len(made) == 2 and all(space() is not None for space in made)
    del graphs
    gc.collect()
    assert all(space() is None for space in made)


def test_a_graph_begins_outside_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of torch make the tensors that all graphs share with the first one, and write them with every next: made in
    inference mode they could not be written outside (pytorch issue 166792)."""
    modes: list[tuple[str, bool]] = []

    class CUDAGraph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            modes.append(("begin", torch.is_inference_mode_enabled()))

        def capture_end(self) -> None:
            modes.append(("end", torch.is_inference_mode_enabled()))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    with torch.inference_mode(), CudaRecorder(torch.device("cuda")).recording():
        modes.append(("inside", torch.is_inference_mode_enabled()))
    assert modes == [("begin", False), ("inside", True), ("end", True)]


# --- --capture check


def table_of(runner: Runner, table: SequenceTable, recorder: FakeRecorder, starter: Any) -> tuple[int, list[str]]:
    lines: list[str] = []
    with launches_go_to(starter):
        return check(runner, table, [1, 2], [1], lambda: recorder, lines.append), lines


def test_check_finds_nothing_where_nothing_is(unstarted: tuple[Runner, SequenceTable]) -> None:
    gaps, lines = table_of(*unstarted, FakeRecorder(), lambda *args, **options: None)
    assert gaps == 0 and lines[-1] == "every stage can be captured"
    stages = [line.split()[0] for line in lines]
    layers = unstarted[0].config.num_hidden_layers
    assert [f"layers.{layer}.attn" in stages for layer in range(layers)] == [True] * layers
    assert {"begin", "embed", "head", "sample", "finish"} <= set(stages)
    assert "batch 1, 1 token:" in lines[-2], "of a smaller step without gaps one line says enough"


def test_check_tries_the_step_that_only_stores(unstarted: tuple[Runner, SequenceTable]) -> None:
    """The kernel that joins streams breaks: with one token it is in the ways to finish that store, and in no other."""
    runner, table = unstarted
    broken: list[list[str]] = []
    for tokens in ([1], [1, 2]):
        lines: list[str] = []
        with launches_go_to(Broken("_join_streams", TOO_MUCH)):
            gaps = check(runner, table, [2], tokens, FakeRecorder, lines.append)
        assert bool(gaps) == (len(tokens) > 1)
        broken.append([line for line in lines if "GAP kernel join_streams" in line])
    assert [len(each) for each in broken] == [0, 2] and all("mtp.0: " in line for line in broken[1])


def test_check_goes_on_behind_a_stage_that_cannot_be_captured(unstarted: tuple[Runner, SequenceTable]) -> None:
    recorder = FakeRecorder()

    def breaks(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        if recorder.capturing and kernel.fn.__name__ in ("_embed_kernel", "sum_kernel"):
            raise TOO_MUCH

    gaps, lines = table_of(*unstarted, recorder, breaks)
    layers = unstarted[0].config.num_hidden_layers
    assert gaps == 2 * (1 + layers), "embed and the experts of each layer, at two batch sizes"
    row = next(line for line in lines if line.split()[0] == "layers.1.ffn")
    assert "ok" in row and "GAP kernel sum_kernel: it needs 147456 of shared memory" in row
    assert next(line for line in lines if line.split()[0] == "head").split()[2:] == ["ok", "ok"]


def test_check_says_how_far_a_step_gets_that_fails_eagerly(unstarted: tuple[Runner, SequenceTable]) -> None:
    gaps, lines = table_of(*unstarted, FakeRecorder(), Broken("sum_kernel", RuntimeError("a kernel broke"), 1))
    assert gaps and "cannot be served" in lines[-1]
    row = next(line for line in lines if line.split()[0] == "layers.1.ffn")
    assert "GAP kernel sum_kernel: RuntimeError: a kernel broke" in row and row.endswith("not reached")
