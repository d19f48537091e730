"""Where the time of decode steps goes: GPU time by kind of kernel, and how long the GPU has nothing to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

OTHER, COPIES = "other", "copies"
GROUPS = {
    "routed experts": ("block_kernel", "stream_kernel", "grouped_kernel", "swiglu_kernel"),
    "routing, sorting and adding up": (
        *("_logits_kernel", "_route_kernel", "segments_kernel", "order_kernel", "tiles_kernel", "arrange_kernel", "sum_kernel"),
    ),
    "linear layers and vocabulary": ("_linear_kernel", "_multiply_few", "_multiply_many"),
    "attention": ("_decode", "_decode_hopper", "_combine", "_attend", "_attend_hopper", "_unpack_rows"),
    "mHC": ("_mix_kernel", "mix_fragments_kernel", "_finish_kernel", "_post_kernel"),
    "norm, rope, FP8, KV rows": (
        *("_rms_norm", "_query_norm_rope", "_rotation", "_quantise_kernel", "_kv_rows", "_store_ring", "_embed_kernel"),
    ),
    "indexer": ("_score_kernel", "_choose_kernel", "_every_kernel", "_index_queries"),
    "compressor": ("_compress", "_store_state"),
    "table of sequences": ("_write_words", "_begin_step", "_row_parameters", "_finish_step", "_begin_draft", "_keep_draft"),
    "sampler": ("_scan_kernel", "_mass_kernel", "_draw_kernel"),
}
GROUP_OF = {kernel: group for group, kernels in GROUPS.items() for kernel in kernels}


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel or copy as it ran; microseconds of one clock."""

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some steps in a row. kernels: a step, copies included; busy_us and step_us: a step; idle: what part of a step the
    device has nothing to do, between steps and within them; shares: what part of the busy time each group takes."""

    kernels: float
    step_us: float
    busy_us: float
    idle_between: float
    idle_within: float
    shares: dict[str, float]


def group_of(name: str) -> str:
    """Of a kernel or a copy, by the name that the profiler gives it."""
    return COPIES if name.startswith(("Memcpy", "Memset")) else GROUP_OF.get(name, OTHER)


def recorded(work: Callable[[], object], device: torch.device) -> list[Work]:
    """What the device does during `work`, in order. On a CPU: the torch operations that were called directly."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        work()
        if cuda:
            torch.cuda.synchronize(device)
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    found = [each for each in profiler.events() or [] if each.device_type == wanted and (cuda or each.cpu_parent is None)]
    works = [Work(each.name, each.time_range.start, each.time_range.end) for each in found]
    return sorted(works, key=lambda each: each.begin_us)


def summary(works: Sequence[Work], steps: int) -> Summary:
    """Raises ValueError when the works cannot be those of `steps` equal steps: the gaps between them are not known then."""
    if not works or len(works) % steps:
        raise ValueError(f"{len(works)} kernels and copies were recorded: not those of {steps} equal steps")
    each = len(works) // steps
    parts = [works[first : first + each] for first in range(0, len(works), each)]
    begins, ends = [part[0].begin_us for part in parts], [max(work.end_us for work in part) for part in parts]
    span = max(ends) - begins[0]
    gaps = sum(max(0.0, begin - end) for begin, end in zip(begins[1:], ends[:-1], strict=True))
    times = exclusive_times(works)
    busy = sum(times.values())
    by_group: defaultdict[str, float] = defaultdict(float)
    for name, time_us in times.items():
        by_group[group_of(name)] += time_us
    shares = {group: by_group[group] / busy for group in sorted(by_group, key=lambda group: -by_group[group])}
    return Summary(each, span / steps, busy / steps, gaps / span, max(0.0, span - busy - gaps) / span, shares)


def exclusive_times(works: Sequence[Work]) -> dict[str, float]:
    """Microseconds by name; an instant in which several run is shared out among them, so the sum is the time that any runs.
    works: sorted by their beginning."""
    times: defaultdict[str, float] = defaultdict(float)
    running: list[Work] = []
    edges = sorted({edge for work in works for edge in (work.begin_us, work.end_us)})
    at = 0
    for begin_us, end_us in pairwise(edges):
        while at < len(works) and works[at].begin_us <= begin_us:
            running.append(works[at])
            at += 1
        running = [work for work in running if work.end_us > begin_us]
        for work in running:
            times[work.name] += (end_us - begin_us) / len(running)
    return dict(times)
