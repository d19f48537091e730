"""How long a kernel takes inside a CUDA graph, on inputs that are not in the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

ROUNDS = 9


def capture(work: Callable[[], Any], warm: int = 2) -> torch.cuda.CUDAGraph:
    """`work` as a graph. It runs `warm` times before, which compiles what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def graph_us(launches: Sequence[Callable[[], Any]], rounds: int = ROUNDS, at_least_us: float = 3000.0) -> float:
    """Microseconds a launch, median over `rounds`. `launches` do the same on different inputs, so that rotating through
    them finds every input cold: give as many as exceed the L2 cache together."""
    graph = capture(lambda: [launch() for launch in launches])
    once = repeated_us(graph.replay, 1)
    times = max(1, int(at_least_us / max(once, 1.0)))
    return statistics.median(repeated_us(graph.replay, times) for _ in range(rounds)) / len(launches)


def repeated_us(launch: Callable[[], Any], times: int) -> float:
    """Microseconds on the device of one of `times` launches, back to back."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000.0 / times


def copies_for(input_bytes: float, l2_bytes: float = 60e6, most: int = 24) -> int:
    """How many sets of inputs of that size make rotation find them cold."""
    return max(1, min(most, int(2 * l2_bytes // max(input_bytes, 1.0)) + 1))
