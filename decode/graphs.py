"""All steps of fixed shapes: on a GPU as CUDA graphs, captured at start and replayed for good; on a CPU simply run.

A step has a graph for forward, and one for each way to finish. All of them share one memory pool and two workspaces, one for
forward, whose streams and logits stay until finish has read them, and one for finish. So replays of different steps must
follow each other on one stream, and what a step reports is to be copied before the next one is replayed.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from decode.sampling import MOST_TOPS
from decode.step import Asks, Step
from kernels.ahead import run_compiled
from kernels.sequences import SequenceTable
from kernels.trail import Trail
from kernels.workspace import Ruler, Workspace
from model.runner import Runner

GREEDY = Asks(draws=False, edits=False, tops=-1)
SAMPLED = Asks(draws=True, edits=True, tops=-1)
EVERYTHING = Asks(draws=True, edits=True, tops=MOST_TOPS)
WAYS = (GREEDY, SAMPLED, EVERYTHING)  # to finish; a step takes the first that has all that its rows ask for
STORING_WAYS = tuple(replace(way, stores=True) for way in WAYS)
Results = tuple[Tensor, ...]
_log = logging.getLogger("decode")


class CaptureFailed(RuntimeError):
    """A step cannot be started or captured; says where, why, and what to do."""


class Replayed(Protocol):
    """What was recorded."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Where steps are warmed up and captured."""

    def running(self) -> AbstractContextManager[None]:
        """Inside, work runs where it will be captured; it is done at the end."""

    def record(self, run: Callable[[], Results]) -> tuple[Replayed, Results]:
        """A replay writes what `run` gave into the same tensors."""

    def recording(self) -> AbstractContextManager[Replayed]:
        """Records what is done inside, which must be within `running`."""


class CudaRecorder:
    """A stream of its own, and a memory pool that all graphs share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def record(self, run: Callable[[], Results]) -> tuple[Replayed, Results]:
        with self.running(), self.recording() as graph:
            results = run()
        return graph, results

    @contextmanager
    def recording(self) -> Iterator[Replayed]:
        """thread_local: what other threads do on the device meanwhile does not break the capture."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False):  # torch makes what all graphs of a process share, and writes it when one begins
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to read
                graph.capture_end()
            raise
        graph.capture_end()


def batch_sizes(most: int) -> list[int]:
    """The numbers of rows that have graphs, up to `most`: a step is filled up by less than an eighth of it from 64 rows on,
    and by seven rows at most below; a row that only fills up costs little beside the weights that are read anyway."""
    sizes, size = [1, 2, 4], 8
    while size < most:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 4))
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True, slots=True)
class _Finish:
    """A captured way to finish, and where it leaves what it says."""

    graph: Replayed
    report: Tensor
    tops: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Captured:
    forward: Replayed
    finish: dict[Asks, _Finish]

    def replay_all(self) -> None:
        """Over the rows that are nobody's, while no others are in the step."""
        self.forward.replay()
        for finish in self.finish.values():
            finish.graph.replay()


class Graphs:
    """The steps of up to `max_batch` rows with `tokens` new tokens a row; more than one is speculation. Then those of one token
    may store or not, and without are the very ones that there are without speculation.

    With a recorder the steps of `sizes` (as `batch_sizes`) are captured here and now, which raises CaptureFailed, and nothing
    is allocated afterwards. later: the sizes that other graphs will have; where kernels must be compiled, theirs are too.
    Without a recorder a step runs when it is asked for, with exactly its rows.
    """

    def __init__(
        self,
        runner: Runner,
        table: SequenceTable,
        max_batch: int,
        tokens: Sequence[int],
        recorder: Recorder | None = None,
        sizes: Sequence[int] = (),
        later: Sequence[int] = (),
    ) -> None:
        self._runner, self._table, self._recorder = runner, table, recorder
        self._tokens = sorted(tokens)
        self._sizes, self._later = sorted(sizes) or batch_sizes(max_batch), later
        self._steps: dict[tuple[int, int], Step] = {}
        self._captured: dict[tuple[int, int], _Captured] = {}
        if recorder is not None:
            self._capture(recorder)

    def step(self, rows: int, tokens: int) -> Step:
        """The step that runs `rows` sequences with `tokens` tokens each; it may have more rows."""
        if self._recorder is not None:
            return self._steps[next(size for size in self._sizes if size >= rows), tokens]
        if (rows, tokens) not in self._steps:
            self._steps = {(rows, tokens): self._step(rows, tokens)}  # the last one alone: each holds its logits
        return self._steps[rows, tokens]

    def _step(self, rows: int, tokens: int) -> Step:
        return Step(self._runner, self._table, rows, tokens)

    def _ways(self, step: Step) -> Sequence[Asks]:
        return ways_of(step.tokens, speculates=self._tokens[-1] > 1)

    @torch.inference_mode()
    def run(self, rows: int, tokens: int, asks: Asks) -> Step:
        """Runs that step over the first rows of the table; of those beyond `rows` the slot must be 0. What it reports is of
        this run until the next. `tops` may be wider than asked for, never narrower."""
        step = self.step(rows, tokens)
        captured = self._captured.get((step.rows, tokens))
        if captured is None:
            step.forward()
            step.finish(asks)
            return step
        finish = captured.finish[way_for(asks)]
        captured.forward.replay()
        finish.graph.replay()
        step.report, step.tops = finish.report, finish.tops
        return step

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int]) -> None:
        """Where nothing is captured: runs a step of each size on the page and the slot that are nobody's, which compiles its
        kernels. Raises CaptureFailed."""

        def start() -> None:
            for rows in sizes:
                for tokens in self._tokens:
                    step = self.step(rows, tokens)
                    with _explained(step, captured=False):
                        step.forward()
                        for asks in self._ways(step):
                            step.finish(asks)

        begin_s = time.monotonic()
        run_compiled(start)
        _log.info("kernels compiled in %.1f s", time.monotonic() - begin_s)

    @torch.inference_mode()
    def _capture(self, recorder: Recorder) -> None:
        """Starts every step once, which compiles its kernels, makes their constants and measures; then captures them, the
        largest first, as the others fit into the pool then."""
        begin_s = time.monotonic()
        shapes, later = self._shapes(self._sizes), self._shapes(self._later)
        rulers = self._rulers()
        run_compiled(lambda: self._start(recorder, shapes, *rulers), lambda: self._start(recorder, later, *self._rulers()))
        torch.cuda.empty_cache()  # what the rulers took
        self._steps = {shape: self._step(*shape) for shape in shapes}
        warm_s = time.monotonic()
        self.workspace_bytes = sum(ruler.needed_bytes for ruler in rulers)
        _log.info("%d steps started once, kernels compiled, in %.1f s", len(shapes), warm_s - begin_s)
        self._spaces = [Workspace(ruler.needed_bytes, self._table.words.device) for ruler in rulers]  # as long as the graphs
        with _no_collection():
            for number, (shape, step) in enumerate(self._steps.items(), 1):
                _log.info("capturing %d of %d: %s", number, len(shapes), shape_name(*shape))
                with _explained(step, captured=True):
                    self._captured[shape] = _record(step, self._ways(step), recorder, *self._spaces)
        with recorder.running():  # a graph's first replay takes milliseconds more: not in the middle of a text
            for shape, captured in self._captured.items():
                with _explained(self._steps[shape], captured=True):
                    captured.replay_all()
        seconds, megabytes = time.monotonic() - warm_s, self.workspace_bytes / 1e6
        graphs = sum(1 + len(captured.finish) for captured in self._captured.values())
        _log.info("%d graphs captured in %.1f s; workspace %.0f MB", graphs, seconds, megabytes)

    def _shapes(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        return [(rows, tokens) for rows in reversed(sizes) for tokens in reversed(self._tokens)]

    def _rulers(self) -> tuple[Ruler, Ruler]:
        return Ruler(self._table.words.device), Ruler(self._table.words.device)

    def _start(
        self, recorder: Recorder, shapes: Sequence[tuple[int, int]], forward_space: Workspace, finish_space: Workspace
    ) -> None:
        for shape in shapes:
            step = self._step(*shape)  # a step holds its logits: what is kept of all of them is a gigabyte
            with _explained(step, captured=False), recorder.running():
                run_within(step, self._ways(step), forward_space, finish_space)


def shape_name(rows: int, tokens: int) -> str:
    return f"batch {rows}, {tokens} token{'s' if tokens > 1 else ''}"


def ways_of(tokens: int, speculates: bool) -> Sequence[Asks]:
    """To finish a step of so many tokens."""
    if tokens > 1:
        return STORING_WAYS
    return (*WAYS, *STORING_WAYS) if speculates else WAYS


def way_for(asks: Asks) -> Asks:
    ways = STORING_WAYS if asks.stores else WAYS
    return next(way for way in ways if way.draws >= asks.draws and way.edits >= asks.edits and way.tops >= asks.tops)


def run_within(step: Step, ways: Sequence[Asks], forward_space: Workspace, finish_space: Workspace) -> None:
    """A step, and all its ways to finish, one after another."""
    with forward_space.active():
        step.forward()
    for asks in ways:
        with finish_space.active():
            step.finish(asks)


def _record(
    step: Step, ways: Sequence[Asks], recorder: Recorder, forward_space: Workspace, finish_space: Workspace
) -> _Captured:
    def forward() -> Results:
        with forward_space.active():
            step.forward()
        return ()

    def finish(asks: Asks) -> _Finish:
        def run() -> Results:
            with finish_space.active():
                step.finish(asks)
            return step.report, *step.tops

        graph, (report, ids, logprobs) = recorder.record(run)
        return _Finish(graph, report, (ids, logprobs))

    return _Captured(recorder.record(forward)[0], {asks: finish(asks) for asks in ways})


@contextmanager
def _no_collection() -> Iterator[None]:
    """Objects that Python frees during a capture may ask the device for what it forbids then."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _explained(step: Step, captured: bool) -> Iterator[None]:
    """Turns whatever is raised inside into CaptureFailed. captured: the step is being captured, and ran eagerly before."""
    trail = Trail()
    try:
        with trail.followed():
            yield
    except Exception as error:  # whatever a compiler, a driver or an operation says is part of the message
        raise CaptureFailed(_message(step, trail, error, captured)) from error


def _message(step: Step, trail: Trail, error: Exception, captured: bool) -> str:
    what = "cannot be captured" if captured else "cannot be started, even without a graph"
    if captured:
        eager = "The same step ran eagerly just before"
        advice = "--capture off serves without graphs, slower; --capture check tests each stage alone"
    else:
        eager = "It fails when it is run eagerly, so --capture off would not help"
        advice = "python -m kernels.check tests every kernel on this card; --capture check tests each stage alone"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        advice += "; a smaller --max-batch or --num-pages leaves more memory"
    where, why = trail.place(error), trail.reason(error)
    return f"the step of {shape_name(step.rows, step.tokens)} {what}: {where}: {why}. {eager}. {advice}."
