"""`--capture check`: every stage of every step run eagerly, then captured alone, and a table of what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from decode.graphs import Recorder, Replayed, run_within, shape_name, ways_of
from decode.step import Asks, Step
from kernels.launch import stages_go_to
from kernels.sequences import SequenceTable
from kernels.trail import Trail
from kernels.workspace import Ruler, Workspace
from model.runner import Runner

NOT_REACHED, OK = "not reached", "ok"


@dataclass(slots=True)
class Outcome:
    """One stage. eager, captured: OK, NOT_REACHED or what went wrong."""

    stage: str
    kernels: int = 0
    eager: str = NOT_REACHED
    captured: str = NOT_REACHED

    @property
    def gap(self) -> bool:
        return self.eager != OK or self.captured != OK


@torch.inference_mode()
def check(
    runner: Runner,
    table: SequenceTable,
    sizes: Sequence[int],
    tokens: Sequence[int],
    recorder: Callable[[], Recorder],
    show: Callable[[str], None] = print,
) -> int:
    """Shows the table: all stages of the largest step and of each with a gap. How many gaps there are. recorder: makes one;
    graphs that are thrown away take their pool with them, so each pass has its own."""
    gaps = 0
    for rows in sorted(sizes, reverse=True):
        for count in sorted(tokens, reverse=True):
            outcomes = check_step(Step(runner, table, rows, count), ways_of(count, speculates=max(tokens) > 1), recorder)
            wrong = sum(outcome.gap for outcome in outcomes)
            show(f"{shape_name(rows, count)}: {len(outcomes)} stages, {wrong} with a gap")
            if wrong or (rows, count) == (max(sizes), max(tokens)):
                show(f"  {'stage':34} {'kernels':>7}  {'eager':12} captured alone")
                for each in outcomes:
                    show(f"  {each.stage:34} {each.kernels:7}  {each.eager:12} {each.captured}")
            gaps += wrong
    show(f"{gaps} stages cannot be served with graphs" if gaps else "every stage can be captured")
    return gaps


def check_step(step: Step, ways: Sequence[Asks], recorder: Callable[[], Recorder]) -> list[Outcome]:
    """All stages in order, as far as the step gets. ways: to finish it."""
    rulers = Ruler(step.device), Ruler(step.device)
    outcomes = _run_eagerly(lambda: run_within(step, ways, *rulers), recorder())
    if outcomes and outcomes[-1].eager == OK:
        spaces = [Workspace(ruler.needed_bytes, step.device) for ruler in rulers]
        _capture_each(lambda: run_within(step, ways, *spaces), recorder, outcomes)
    return outcomes


def _run_eagerly(run: Callable[[], None], recorder: Recorder) -> list[Outcome]:
    """Waits for the device behind each stage: a kernel that fails while it runs shows where it was started."""
    outcomes: list[Outcome] = []
    trail = Trail()

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        outcomes.append(Outcome(name))
        before = trail.kernels
        with trail.within(name), recorder.running():
            yield
        outcomes[-1].kernels, outcomes[-1].eager = trail.kernels - before, OK

    try:
        with trail.followed(), stages_go_to(watch):
            run()
    except Exception as error:  # the table is there to show it
        if not outcomes or outcomes[-1].eager == OK:
            outcomes.append(Outcome("between stages"))
        outcomes[-1].eager = _shown(trail, error)
    return outcomes


def _capture_each(run: Callable[[], None], recorder: Callable[[], Recorder], outcomes: list[Outcome]) -> None:
    """A stage that cannot be captured runs eagerly in the next pass, so that those behind it are tested too."""
    broken: set[int] = set()
    while (failed := _capture_pass(run, recorder(), outcomes, broken)) is not None and failed not in broken:
        broken.add(failed)


def _capture_pass(run: Callable[[], None], recorder: Recorder, outcomes: list[Outcome], broken: set[int]) -> int | None:
    """Captures and replays all stages but the `broken` ones; the number of the one that raised. One that is broken already
    ran eagerly before: then the device has failed."""
    trail, at = Trail(), -1
    graphs: list[Replayed] = []  # what a stage computed lives as long as its graph

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        nonlocal at
        at += 1
        with trail.within(name), recorder.running():
            if at in broken:
                yield
                return
            with recorder.recording() as graph:
                yield
            graph.replay()
        graphs.append(graph)
        outcomes[at].captured = OK

    try:
        with trail.followed(), stages_go_to(watch):
            run()
    except Exception as error:  # the table is there to show it
        if at not in broken:
            outcomes[at].captured = _shown(trail, error)
        return at
    return None


def _shown(trail: Trail, error: Exception) -> str:
    kernel = f"kernel {trail.launch.name}: " if trail.launch is not None else ""
    return f"GAP {kernel}{trail.reason(error)}"
