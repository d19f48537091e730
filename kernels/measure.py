"""Runs cases on the GPU: right or not, captured and replayed with other lengths, how fast, and against which floor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.cases.case import Case, Widths
from kernels.quant import Quantised
from kernels.timing import capture, copies_for, graph_us
from kernels.workspace import Workspace

WORKSPACE_BYTES = 6 << 30
L2_BYTES = 60e6


@dataclass(frozen=True, slots=True)
class Limits:
    """What this card does at best, measured in the same run: GB/s read, TFLOP/s by matrix format."""

    read_gb_per_s: float
    tflops: dict[str, float]

    def floor_us(self, case: Case) -> float:
        """The longer of moving the bytes and doing the arithmetic."""
        return max(case.moved_bytes / self.read_gb_per_s / 1e3, case.flops / self.tflops[case.matrix] / 1e6)


@dataclass(frozen=True, slots=True)
class Measured:
    """error: relative rms against the reference, eager and after a replay with other lengths. us: in a graph, cold."""

    group: str
    case: str
    widths: str
    error: float
    replay_error: float
    us: float
    floor_us: float
    gb_per_s: float
    tflops: float
    must_us: float | None
    aim_us: float | None
    bench: bool
    reason: str  # why it failed; empty when it did not

    @property
    def fraction(self) -> float:
        return self.floor_us / self.us if self.us else 0.0


def measure_limits() -> Limits:
    """Reading 4 GiB once (a sum), and three large matrix products, sustained."""
    device = torch.device("cuda")
    block = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    read = graph_us([lambda: torch.sum(block)], rounds=5)
    tflops = {"fp32": 60.0}
    size = 8192
    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    tflops["bf16"] = 2 * size**3 / graph_us([lambda: left @ right], rounds=5, at_least_us=100_000) / 1e6
    codes = [each.to(torch.float8_e4m3fn) for each in (left, right)]
    one = torch.ones((), device=device)
    product = lambda: torch._scaled_mm(codes[0], codes[1].T, one, one, out_dtype=torch.bfloat16)  # noqa: E731
    tflops["fp8"] = 2 * size**3 / graph_us([product], rounds=5, at_least_us=100_000) / 1e6
    return Limits(block.nbytes / read / 1e3, tflops)


def measure_everything(groups: Sequence[str], all_widths: Sequence[Widths], bench_only: bool = False) -> list[Measured]:
    """All cases of the groups, one after another. Chooses the backend of the GPU."""
    from kernels.check import cases_of  # check.py is also a program: imported late, as a module

    backend.choose(torch.device("cuda"))
    limits = measure_limits()
    rates = ", ".join(f"{matrix} {rate:.0f} TFLOP/s" for matrix, rate in limits.tflops.items())
    print(f"limits: read {limits.read_gb_per_s:.0f} GB/s, {rates}", file=sys.stderr)
    workspace = Workspace(WORKSPACE_BYTES, "cuda")
    found = []
    for group in groups:
        for widths in all_widths:
            for case in cases_of(group, widths):
                if case.bench or not bench_only:
                    found.append(measure(group, widths, case, limits, workspace))
                    print(line(found[-1]), file=sys.stderr, flush=True)
    return found


def measure(group: str, widths: Widths, case: Case, limits: Limits, workspace: Workspace) -> Measured:
    """A case that raises is a failed case: the others still run."""
    error = replay_error = us = 0.0
    reason = ""
    try:
        error, replay_error = _errors(case, workspace)
        worst = max(error, replay_error)
        if not worst <= case.tolerance:
            reason = f"relative error {worst:.2e}, allowed {case.tolerance:.0e}"
        us = _time(case, workspace)
    except Exception as failure:  # the table names every kernel that cannot run
        reason = f"{type(failure).__name__}: {str(failure).strip().splitlines()[-1][:200] if str(failure).strip() else ''}"
    gb = case.moved_bytes / us / 1e3 if us else 0.0
    tflops = case.flops / us / 1e6 if us else 0.0
    floor = limits.floor_us(case)
    must_us = floor / case.must_fraction if case.must_fraction else case.must_us
    aim_us = floor / case.aim_fraction if case.aim_fraction else case.aim_us
    return Measured(
        group, case.name, widths.name, error, replay_error, us, floor, gb, tflops, must_us, aim_us, case.bench, reason
    )


def _errors(case: Case, workspace: Workspace) -> tuple[float, float]:
    """Eagerly, then replayed from a graph after the lengths have changed; the capture must not allocate."""
    inputs = case.make(torch.device("cuda"), 1)
    with workspace.active(), torch.inference_mode():
        case.run(inputs)  # compiles
        inputs = case.make(torch.device("cuda"), 1)  # an operation may write into what it was given
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        result = case.run(inputs)
        if torch.cuda.memory_stats()["allocation.all.allocated"] != before:
            raise RuntimeError("the operation allocates device memory: its results and scratch must come from the workspace")
        error = relative_rms(result, case.expected(case.make(torch.device("cuda"), 1)))
    graph_inputs = case.make(torch.device("cuda"), 2)
    results: list[Any] = []

    def step() -> None:
        with workspace.active(), torch.inference_mode():
            results.append(case.run(graph_inputs))

    graph = capture(step)
    fresh = case.make(torch.device("cuda"), 2)
    if case.change is not None:
        case.change(fresh)
    for ours, new in zip(tensors_in(graph_inputs), tensors_in(fresh), strict=True):
        ours.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    return error, relative_rms(results[-1], case.expected(fresh))


def tensors_in(inputs: Any) -> Iterator[Tensor]:
    """Every tensor of nested tuples, lists, dicts and objects with fields, in order."""
    for each in _leaves(inputs):
        yield from (each.codes, each.scales) if isinstance(each, Quantised) else (each,)


def _leaves(nested: Any) -> Iterator[Tensor | Quantised]:
    if isinstance(nested, (Tensor, Quantised)):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for each in nested:
            yield from _leaves(each)
    elif isinstance(nested, dict):
        yield from _leaves(list(nested.values()))
    elif is_dataclass(nested):
        yield from _leaves([getattr(nested, field.name) for field in fields(nested)])
    elif hasattr(nested, "__dict__"):
        yield from _leaves(vars(nested))


def _time(case: Case, workspace: Workspace) -> float:
    device = torch.device("cuda")
    copies = copies_for(case.moved_bytes, L2_BYTES)
    sets = [case.make(device, 10 + number) for number in range(copies)]

    def launcher(inputs: Any) -> Callable[[], None]:
        def start() -> None:
            with workspace.active(), torch.inference_mode():
                case.run(inputs)

        return start

    return graph_us([launcher(inputs) for inputs in sets])


def relative_rms(got: Any, expected: Any) -> float:
    """The largest over all results; infinite for NaN and for integers that differ."""
    pairs = zip(results_in(got), results_in(expected), strict=True)
    return max((_relative_rms(ours, theirs) for ours, theirs in pairs), default=0.0)


def results_in(made: Any) -> list[Tensor]:
    """The tensors to compare, in order. FP8 activations as values: where one rounding decides it, the scale of a block may
    differ and the values nearly agree."""
    return [each.values() if isinstance(each, Quantised) else each for each in _leaves(made)]


def _relative_rms(got: Tensor, expected: Tensor) -> float:
    if not got.is_floating_point():
        return 0.0 if torch.equal(got.to(expected.dtype).to(expected.device), expected) else float("inf")
    wide, right = got.double(), expected.to(got.device).double()
    error = float(((wide - right).square().mean() / right.square().mean().clamp(min=1e-60)).sqrt())
    return error if error == error else float("inf")


def line(each: Measured) -> str:
    if each.us == 0.0:
        return f"{each.group:18} {each.widths:12} {each.case:44} FAILED {each.reason}"
    speed = (
        f"{each.us:9.2f} us {each.gb_per_s:6.0f} GB/s {each.tflops:6.1f} TFLOP/s {each.fraction:5.2f} of {each.floor_us:8.2f}"
    )
    wanted = f" must {each.must_us:.1f} aim {each.aim_us:.1f}" if each.must_us and each.aim_us else ""
    name = f"{each.group:18} {each.widths:12} {each.case:44}"
    return f"{name} {max(each.error, each.replay_error):8.1e} {speed}{wanted} {each.reason}"


def print_measured(measured: Sequence[Measured]) -> int:
    """A summary; how many cases failed. The lines were printed as they came."""
    failed = [each for each in measured if each.reason]
    for each in failed:
        print(f"FAILED {each.group} {each.widths} {each.case}: {each.reason}")
    print(f"{len(measured)} cases ran, {len(failed)} failed")
    return len(failed)
