"""Sparse attention of a decode step: the reference against a loop over tokens, the kernels against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels import backend
from kernels.attention import Tiling, decode_attention, sparse_attention_reference, tiling
from kernels.cases.attention import TOLERANCE, Inputs, Shape, expected, fill, make, poison, run
from kernels.cases.case import GOLDEN, TINY, V4_FLASH, Widths
from kernels.indexer import Entries
from kernels.measure import relative_rms
from kernels.ragged import Ragged, store_ring_reference
from kernels.rope import plain_frequencies, rope_reference, rotation_reference, yarn_frequencies
from kernels.rows import KVRow, write_rows

torch.set_num_threads(1)
HEADS, DIM, ROPE, WINDOW, RING, RATIO = 3, 16, 4, 8, 12, 4
SMALL = Widths("small", 64, 8, 64, 16, 32, 32, 2, 4, 64, 24, 4, 2, 32, 100, window=24)
KINDS = [("fp8", torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.bfloat16), ("fp32", torch.float32)]


def step(*rows: tuple[int, int, int]) -> Ragged:
    """(slot, start, tokens) rows; slot s owns pages 4s..4s+3."""
    lengths = [length for _, _, length in rows]
    return Ragged(
        positions=torch.tensor([position for _, start, length in rows for position in range(start, start + length)]),
        sequence_ids=torch.tensor([sequence for sequence, length in enumerate(lengths) for _ in range(length)]),
        starts=torch.tensor([start for _, start, _ in rows]),
        cu_tokens=torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)]),
        slots=torch.tensor([slot for slot, _, _ in rows]),
        page_table=torch.tensor([[4 * slot + i for i in range(4)] for slot, _, _ in rows]),
        longest=max(lengths),
    )


@pytest.mark.parametrize("which", ["window", "selected", "all"])
def test_the_reference_against_a_loop(which: str) -> None:
    """Three sequences, chunks and decode steps in turn; unused rows are NaN, rows are the values themselves (fp32)."""
    torch.manual_seed(1)
    row, sinks = KVRow("fp32", DIM, ROPE, rounded=False), torch.randn(HEADS)
    history, more = torch.randn(4, 60, DIM), torch.randn(4, 9, DIM)
    pages = torch.full((20, 4, row.row_bytes), 0xFF, dtype=torch.uint8)
    owner, number = torch.meshgrid(torch.arange(1, 4), torch.arange(9), indexing="ij")
    page = (4 * owner + number // 4).flatten()
    write_rows(pages, row, page, (number % 4).flatten(), row.pack(more[1:].flatten(0, 1)))
    ring = torch.full((5, RING, DIM), torch.nan).view(torch.uint8)
    steps = [[(1, 0, 1), (2, 0, 25), (3, 0, 3)], [(1, 1, 12), (2, 25, 1)], [(1, 13, 1), (2, 26, 4), (3, 3, 5)], [(2, 30, 1)]]
    for rows in steps:
        batch = step(*rows)
        new = row.pack(torch.cat([history[slot, start : start + length] for slot, start, length in rows]))
        if batch.is_decode:
            store_ring_reference(batch, ring, new)
        q = torch.randn(DIM, HEADS, len(new)).permute(2, 1, 0)  # strided
        owners = [slot for slot, _, length in rows for _ in range(length)]
        entries: Entries | int | None = None
        if which == "selected":
            chosen = [
                [4 * (4 * s + p % 9 // 4) + p % 9 % 4, -1, 16 * s + 3, 16 * s + 5]
                for s, p in zip(owners, batch.positions.tolist(), strict=True)
            ]
            entries = Entries(torch.tensor(chosen, dtype=torch.int32), torch.full((len(new),), 3, dtype=torch.int32))
        elif which == "all":
            entries = RATIO
        turn = rotation_reference(batch.positions, plain_frequencies(ROPE, 100.0))
        got = sparse_attention_reference(q, new, batch, ring, row, WINDOW, sinks, turn, pages, entries)
        if not batch.is_decode:
            store_ring_reference(batch, ring, new)
        for token, (slot, position) in enumerate(zip(owners, batch.positions.tolist(), strict=True)):
            keys = history[slot, max(0, position - WINDOW + 1) : position + 1]
            if which == "selected":
                keys = torch.cat((keys, more[slot, [position % 9, 3]]))
            elif which == "all":
                keys = torch.cat((keys, more[slot, : (position + 1) // RATIO]))
            logits = torch.cat((q[token] @ keys.T * DIM**-0.5, sinks[:, None]), 1)
            right = torch.softmax(logits, 1)[:, :-1] @ keys
            right = rope_reference(right[None], turn[token : token + 1], inverse=True)[0]
            torch.testing.assert_close(got[token], right, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures(triton_backend.__name__)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize(("rows", "selected"), [(0, False), (20, True), (20, False)])
@pytest.mark.parametrize("widths", [TINY, GOLDEN, SMALL])
def test_a_step(widths: Widths, rows: int, selected: bool, kind: str, dtype: torch.dtype) -> None:
    """Two tokens for each of two sequences of random lengths, or (SMALL) full; every row that is not seen is NaN."""
    shape = Shape(2, 2, rows, selected, kind, dtype)
    inputs = make(widths, shape, DEVICE, 3)
    if widths is not SMALL:
        fill(inputs, shape, 5, full=False)
    assert relative_rms(run(inputs), expected(inputs)) < TOLERANCE[dtype]


@pytest.mark.usefixtures(triton_backend.__name__)
@pytest.mark.parametrize("start", [0, 1, 22, 23, 24, 127, 128, 512])
def test_lengths_around_the_window_and_the_entries(start: int) -> None:
    inputs = make(SMALL, Shape(1, 3, 6, poison=False), DEVICE, 1)
    inputs.batch.starts.fill_(start)
    inputs.batch.positions.copy_(start + torch.arange(3))
    poison(inputs)
    assert relative_rms(run(inputs), expected(inputs)) < TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures(triton_backend.__name__)
@pytest.mark.parametrize("splits", [1, 2, 9])
@pytest.mark.parametrize("block_rows", [16, 32])
def test_any_number_of_splits(splits: int, block_rows: int) -> None:
    """Nine splits for fewer tiles: some have nothing to do, and what they leave unwritten does not matter."""
    shape = Shape(2, 1, 40, True)
    inputs = make(SMALL, shape, DEVICE, 8)
    fill(inputs, shape, 8, full=False)
    assert relative_rms(attend(inputs, Tiling(16, block_rows, splits, 4, 1)), expected(inputs)) < TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures(triton_backend.__name__)
def test_the_hopper_kernel() -> None:
    """It is chosen on Hopper for the rows of V4 and 64 or 128 heads, and is right there for any number of splits."""
    rows = {widths: KVRow("fp8", widths.head_dim, widths.rope_dim, rounded=True) for widths in (V4_FLASH, TINY)}
    before = backend.active()
    backend.use(backend.TARGETS["sm_90"])
    try:
        for heads, widths, fits in ((64, V4_FLASH, True), (128, V4_FLASH, True), (32, V4_FLASH, False), (64, TINY, False)):
            q = torch.empty(3, heads, widths.head_dim, dtype=torch.bfloat16, device="meta")
            assert tiling(q, rows[widths], 640).hopper == fits
        assert not tiling(q.float(), rows[TINY], 640).hopper
    finally:
        backend.use(before)
    for shape in (Shape(3, 2, 512, True), Shape(2, 1, 70), Shape(2, 1)) if before.hopper else ():
        for heads, splits in ((64, 1), (64, 2), (64, 9), (128, 2)):
            inputs = make(replace(V4_FLASH, heads=heads), shape, DEVICE, 8)
            fill(inputs, shape, 9, full=False)
            assert relative_rms(attend(inputs, Tiling(64, 64, splits, 8, 1, hopper=True)), expected(inputs)) < 8e-3


def attend(inputs: Inputs, cut: Tiling) -> Tensor:
    i = inputs
    return decode_attention(i.q, i.batch, i.ring, i.row, i.window, i.sinks, i.turn, i.pages, i.entries, cut)


@pytest.mark.usefixtures(triton_backend.__name__)
@pytest.mark.parametrize("selected", [True, False])
def test_a_row_does_not_depend_on_its_company(selected: bool) -> None:
    """Bit for bit: the sequences in another order, and a strided q."""
    shape = Shape(4, 1, 20, selected)
    inputs = make(SMALL, shape, DEVICE, 2)
    fill(inputs, shape, 2, full=False)
    before, order, batch = run(inputs), torch.tensor([2, 0, 3, 1], device=DEVICE), inputs.batch
    inputs.q = torch.cat((inputs.q[order], inputs.q), 1)[:, : SMALL.heads]
    inputs.turn = inputs.turn[order]
    inputs.batch = replace(
        batch,
        positions=batch.positions[order],
        starts=batch.starts[order],
        slots=batch.slots[order],
        page_table=batch.page_table[order],
    )
    if isinstance(inputs.entries, Entries):
        inputs.entries = Entries(inputs.entries.rows[order], inputs.entries.counts[order])
    assert torch.equal(run(inputs), before[order])


@pytest.mark.usefixtures(triton_backend.__name__)
@pytest.mark.parametrize("selected", [True, False])
def test_pages_and_slots_further_apart_than_32_bits(selected: bool) -> None:
    shape = Shape(1, 1, 20, selected)
    inputs = make(SMALL, shape, DEVICE, 4)
    right = expected(inputs)
    assert inputs.pages is not None
    apart = (1 << 32) // (len(inputs.pages) - 1) // 64 * 64 + 4096
    arena = torch.empty(apart * len(inputs.pages), dtype=torch.uint8, device=DEVICE)  # mapped where it is written
    pages = arena.as_strided(inputs.pages.shape, (apart, inputs.pages.stride(1), 1))
    inputs.pages = pages.copy_(inputs.pages)
    slots = torch.empty((1 << 32) + inputs.ring[0].nbytes, dtype=torch.uint8, device=DEVICE)
    inputs.ring = slots.as_strided(inputs.ring.shape, (1 << 32, inputs.ring.stride(1), 1)).copy_(inputs.ring)
    assert relative_rms(run(inputs), right) < TOLERANCE[torch.bfloat16]


def test_yarn_of_the_released_model() -> None:
    """Channels below 15 as they are, above 25 sixteen times slower, a ramp between (spec B.4)."""
    plain, yarn = plain_frequencies(64, 160000.0), yarn_frequencies(64, 160000.0, 16, 65536, 32, 1)
    assert torch.equal(yarn[:16], plain[:16])
    assert torch.equal(yarn[25:], plain[25:] / 16)
    torch.testing.assert_close(yarn[20], plain[20] * (0.5 + 0.5 / 16))
