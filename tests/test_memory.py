"""How much KV a device gets: arithmetic over readings that are made up here, and the arena that is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decode.config import DecodeConfig
from decode.room import allot, make_graphs, make_table
from kernels import workspace
from kvtransfer.layout import KVLayout
from model.batch import Batch
from model.memory import CPU_PAGES, TRIAL, first_arena, given_room, kv_room, tokens_in
from prefill.config import PrefillConfig
from prefill.room import allot as allot_prefill
from scripts.kv_ends import flash_layout
from tests import golden
from tests.fake_runner import FakeDrafter
from tests.test_graphs import FakeRecorder

torch.set_num_threads(1)
OPTIONS: dict[str, Any] = {"model": "m", "router": "tcp://127.0.0.1:1", "page_tokens": 4}


class Gauge:
    """Gives `free` readings in turn, the last one for good; a peak is what it was told. total 1,000,000."""

    def __init__(self, *free: int, peak: int = 0) -> None:
        self._free, self._peak = list(free), peak

    def free_and_total(self) -> tuple[int, int]:
        return (self._free.pop(0) if len(self._free) > 1 else self._free[0]), 1_000_000

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return self._peak


class Unsized(FakeDrafter):
    """A runner whose arena comes later. `made`: the arenas it had."""

    def __init__(self) -> None:
        super().__init__(num_pages=2, num_slots=2)
        self.device = torch.device("cpu")
        self.made: list[tuple[int, int]] = []
        self.measured: list[list[int]] = []

    def make_arena(self, num_pages: int, num_slots: int) -> None:
        self.measured = self.steps
        FakeDrafter.__init__(self, num_pages=num_pages, num_slots=num_slots)
        self.made.append((num_pages, num_slots))

    def forward(self, batch: Batch) -> torch.Tensor:
        workspace.empty((2500,), torch.float32, "cpu")
        return super().forward(batch)

    def run_once(self, lengths: list[int], start: int) -> None:
        self.ran = (lengths, start)


def test_what_48_gb_hold_of_the_released_model() -> None:
    """One contiguous page per 256 tokens: some 12 million, where pages of one size for every kind of state hold half a one."""
    layout = flash_layout()
    tokens = tokens_in(48_500_000_000, layout, num_slots=129)
    assert tokens == (48_500_000_000 - 129 * layout.slot_bytes) // 986_624 * 256
    assert 11_500_000 < tokens < 12_600_000
    assert tokens_in(986_623, layout) == 0 and tokens_in(986_624, layout) == 256 and tokens_in(-5, layout) == 0
    assert tokens_in(layout.slot_bytes + 986_624, layout, num_slots=1) == 256


def test_room_is_what_is_free_less_what_is_set_aside() -> None:
    layout = flash_layout()
    free, total, steps = 120_000_000_000, 150_000_000_000, 2_000_000_000
    room = kv_room(layout, free, total, 0.9, steps, 129, 1_048_576)
    left = free - 15_000_000_000 - steps - 129 * layout.slot_bytes
    assert left - layout.page_bytes < room.num_pages * layout.page_bytes <= left
    assert room.tokens == 256 * (room.num_pages - 1), "page 0 is nobody's"
    line = str(room)
    for part in (f"{room.num_pages} pages", f"{room.tokens} tokens", "(3854 B a token)", "129 slots in", "2.00 GB for steps"):
        assert part in line, line
    assert "15.00 GB by --memory-fraction" in line
    given = given_room(layout, first_arena(7, 3, "cpu"))
    assert str(given).startswith("KV memory: 7 pages, 1536 tokens in 0.01 GB (3854 B a token); 3 slots in ")
    assert "set aside" not in str(given), "nothing was measured"


def test_too_little_for_one_sequence_is_refused_with_its_reasons() -> None:
    layout = flash_layout()
    with pytest.raises(ValueError, match=r"no room for the KV of one sequence of 1048576 tokens, but for \d+: 20\.00 GB are"):
        kv_room(layout, 20_000_000_000, 150_000_000_000, 0.9, 1_000_000_000, 129, 1_048_576)
    with pytest.raises(ValueError, match=r"raise that, or lower --max-context, --num-slots, --max-batch"):
        kv_room(layout, 1_000_000_000, 150_000_000_000, 0.9, 1_000_000_000, 129, 4096)
    small = kv_room(layout, 20_000_000_000, 150_000_000_000, 0.9, 1_000_000_000, 129, 65_536)
    assert small.tokens >= 65_536


def test_the_first_arena() -> None:
    assert first_arena(0, 129, "cpu") == {"num_pages": CPU_PAGES, "num_slots": 129}
    assert first_arena(7, 129, "cuda") == {"num_pages": 7, "num_slots": 129}
    assert first_arena(0, 129, "cuda") == TRIAL


def expected_pages(layout: KVLayout, free: int, steps: int, slots: int, fraction: float) -> int:
    return (free - (1_000_000 - int(1_000_000 * fraction)) - steps - slots * layout.slot_bytes) // layout.page_bytes


def test_a_decode_worker_with_graphs_sets_aside_what_they_took() -> None:
    """The largest step takes 100,000 with everything, each further one 10,000 beside its workspace."""
    config = DecodeConfig(**OPTIONS, num_slots=5, max_batch=4, max_context=64)
    runner = Unsized()
    table = make_table(config, runner, 1)  # type: ignore[arg-type]
    workspace_bytes = 10_240 + 2 * workspace.ALIGNMENT
    gauge = Gauge(800_000, 800_000, 700_000, 690_000 - workspace_bytes)
    allot(config, runner, table, [1], FakeRecorder(), gauge)  # type: ignore[arg-type]
    steps = 100_000 + 2 * 10_000  # batch 4, and 1 and 2
    assert runner.made == [(2, 2), (expected_pages(runner.layout, 800_000, steps, 5, 0.9), 5)]


def test_a_decode_worker_without_graphs_sets_aside_the_peak() -> None:
    config = DecodeConfig(**OPTIONS, num_slots=5, max_batch=4, max_context=64, memory_fraction=0.5)
    runner = Unsized()
    allot(config, runner, make_table(config, runner, 1), [1, 3], None, Gauge(800_000, peak=50_000))  # type: ignore[arg-type]
    assert runner.measured == [[3] * 4], "the largest step was the one measured"
    assert runner.made[-1] == (expected_pages(runner.layout, 800_000, 50_000, 5, 0.5), 5)


def test_a_prefill_worker_sets_aside_its_largest_step_at_the_longest_context() -> None:
    config = PrefillConfig(**OPTIONS, num_slots=5, step_tokens=100, chunk_tokens=50, max_context=1000)
    runner = Unsized()
    allot_prefill(config, runner, Gauge(800_000, peak=300_000))  # type: ignore[arg-type]
    assert runner.ran == ([50, 50], 950)
    assert runner.made == [(expected_pages(runner.layout, 800_000, 300_000, 5, 0.9), 5)]


def test_a_table_reaches_as_far_as_drafts_may() -> None:
    config = DecodeConfig(**OPTIONS, num_slots=5, max_batch=4, max_context=64)
    table = make_table(config, Unsized(), 3)  # type: ignore[arg-type]
    assert table.pages.shape == (5, 32), "64 tokens in 16 pages, and 3 to spare; widths are multiples of 16"
    assert len(table.rows) == 4


def test_on_a_cpu_there_is_nothing_to_measure_or_capture() -> None:
    config = DecodeConfig(**OPTIONS, num_slots=5, max_batch=4, max_context=64)
    runner = Unsized()
    graphs = make_graphs(config, runner, make_table(config, runner, 1), [1])  # type: ignore[arg-type]
    assert not runner.made and not runner.steps and graphs.step(3, 1).rows == 3


def test_a_new_arena_is_the_one_that_the_model_writes() -> None:
    runner = golden.loaded.__wrapped__("tiny-bf16")
    old = runner.arena
    runner.make_arena(6, 5)
    assert (len(runner.arena.pages), len(runner.arena.slots)) == (6, 5)
    runner.run_once([200])
    assert runner.arena.pages.any() and runner.arena.slots[0].any()
    assert not old.pages.any() and not old.slots.any()


# --- options


def test_memory_options() -> None:
    config = DecodeConfig(**OPTIONS)
    assert (config.num_pages, config.memory_fraction, config.longest(4096)) == (0, 0.9, 4096)
    assert DecodeConfig(**OPTIONS, max_context=100).longest(4096) == 100
    for wrong, words in (
        ({"num_pages": 1}, "--num-pages is 1"),
        ({"num_pages": -1}, "--num-pages is -1"),
        ({"max_context": 1}, "--max-context is 1"),
        ({"memory_fraction": 0.0}, "--memory-fraction is 0.0"),
        ({"memory_fraction": 1.5}, "--memory-fraction is 1.5"),
        ({"capture": "check"}, "--capture check captures the steps of a GPU; it needs --device cuda"),
        ({"transport": "cuda_ipc"}, "--transport cuda_ipc goes from GPU to GPU; it needs --device cuda"),
    ):
        with pytest.raises(ValueError, match=words):
            DecodeConfig(**OPTIONS, **wrong)
    assert DecodeConfig(**OPTIONS, capture="check", device="cuda").capture == "check"


@pytest.mark.parametrize(
    ("given", "step_and_chunk"),
    [
        ({}, (512, 256)),
        ({"device": "cuda"}, (8192, 8192)),
        ({"device": "cuda", "step_tokens": 2048}, (2048, 2048)),
        ({"device": "cuda", "chunk_tokens": 16_384}, (16_384, 16_384)),
        ({"chunk_tokens": 100}, (512, 100)),
        ({"step_tokens": 64, "chunk_tokens": 64}, (64, 64)),
    ],
)
def test_steps_of_prefill_are_as_large_as_the_device_likes(given: dict[str, Any], step_and_chunk: tuple[int, int]) -> None:
    config = PrefillConfig(**OPTIONS, **given)
    assert (config.step_tokens, config.chunk_tokens) == step_and_chunk
