"""The table, the KV memory and the graphs of a decode worker, made in the order in which they know of each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from decode.config import DecodeConfig
from decode.engine import Engine
from decode.graphs import CudaRecorder, Graphs, Recorder, batch_sizes
from decode.stages import check
from kernels.sequences import MOST_DRAFTS, SequenceTable
from model.batch import TABLE_STEP
from model.memory import TRIAL, CudaGauge, Gauge, kv_room
from model.runner import Runner, doubling

_log = logging.getLogger("decode")


def make_engine(config: DecodeConfig, runner: Runner, depth: int) -> Engine:
    """Gives `runner` its KV memory where --num-pages leaves that open, and captures. depth: steps in flight while the
    next one is launched. Raises CaptureFailed, or ValueError when the memory is too small or there is no MTP layer."""
    if config.speculate and not runner.config.num_nextn_predict_layers:
        raise ValueError(
            f"--speculate {config.speculate} needs a checkpoint with an MTP layer, and this one's num_nextn_predict_layers is 0"
        )
    tokens = range(1, config.speculate + 2)  # of each row of a step: its next one, and guesses behind it
    if config.batch_invariant == "on":
        runner.make_invariant(config.max_batch * max(tokens))
    spare_pages = runner.layout.pages_for((depth + 2) * (MOST_DRAFTS + 1))  # steps in flight, this one, guesses behind it
    table = make_table(config, runner, spare_pages)
    return Engine(table, make_graphs(config, runner, table, tokens), spare_pages, depth)


def make_table(config: DecodeConfig, runner: Runner, spare_pages: int) -> SequenceTable:
    """Wide enough for the longest sequence, and no wider than there are pages."""
    pages = runner.layout.pages_for(config.longest(runner.config.max_position_embeddings))
    if config.num_pages:
        pages = min(pages, config.num_pages - 1)
    wide = -(-(pages + spare_pages) // TABLE_STEP) * TABLE_STEP
    return SequenceTable.make(config.max_batch, config.num_slots, wide, runner.config.vocab_size, runner.arena.pages.device)


def make_graphs(config: DecodeConfig, runner: Runner, table: SequenceTable, tokens: Sequence[int]) -> Graphs:
    """Allots the KV memory, then captures. tokens: the new tokens a row of the steps."""
    if table.words.device.type != "cuda":
        return Graphs(runner, table, config.max_batch, tokens)

    def recorder() -> Recorder:
        return CudaRecorder(runner.device)

    if config.capture == "check":
        raise SystemExit(1 if check(runner, table, batch_sizes(config.max_batch), tokens, recorder) else 0)
    captures = config.capture == "on"
    if not config.num_pages:
        allot(config, runner, table, tokens, recorder() if captures else None, CudaGauge(runner.device))
    graphs = Graphs(runner, table, config.max_batch, tokens, recorder() if captures else None)
    if not captures:
        graphs.warm_up(doubling(config.max_batch))
    return graphs


def allot(
    config: DecodeConfig,
    runner: Runner,
    table: SequenceTable,
    tokens: Sequence[int],
    recorder: Recorder | None,
    gauge: Gauge,
) -> None:
    """Measures the largest steps over an arena of two pages, and makes the real one of what is left."""
    runner.make_arena(**TRIAL)
    free_bytes, total_bytes = gauge.free_and_total()
    step_bytes = _steps_bytes(config, runner, table, tokens, recorder, gauge)
    longest = config.longest(runner.config.max_position_embeddings)
    fraction, num_slots = config.memory_fraction, config.num_slots
    room = kv_room(runner.layout, free_bytes, total_bytes, fraction, step_bytes, num_slots, longest)
    runner.make_arena(room.num_pages, room.num_slots)
    _log.info("%s", room)


def _steps_bytes(
    config: DecodeConfig,
    runner: Runner,
    table: SequenceTable,
    tokens: Sequence[int],
    recorder: Recorder | None,
    gauge: Gauge,
) -> int:
    """What all steps will take. With graphs the largest size is captured twice for it: the first time shows what it takes with
    workspaces and machine code, the second what each further size does, which shares those."""
    if recorder is None:
        largest = Graphs(runner, table, config.max_batch, [max(tokens)])
        return gauge.peak(lambda: largest.warm_up([config.max_batch]))
    sizes = batch_sizes(config.max_batch)
    before, _ = gauge.free_and_total()
    kept = [Graphs(runner, table, config.max_batch, tokens, recorder, sizes[-1:], later=sizes)]
    one, _ = gauge.free_and_total()
    kept.append(Graphs(runner, table, config.max_batch, tokens, recorder, sizes[-1:]))
    two, _ = gauge.free_and_total()
    return (before - one) + max(0, one - two - kept[1].workspace_bytes) * (len(sizes) - 1)
