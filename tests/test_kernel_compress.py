"""The compressor kernel against its reference: chunks and steps of every size, over rings and pages full of NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels.compress import CompressorWeights, compress, compress_reference
from kernels.rope import plain_frequencies
from kernels.rows import IndexRow, KVRow, read_rows
from model.batch import Batch, Row

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures(triton_backend.__name__)
PAGES, SLOTS = 4, 6
PAGE_ROWS = {4: 4, 128: 2}


def step(ratio: int, *rows: tuple[int, int, int]) -> Batch:
    """(slot, start, tokens) rows; slot s owns pages s, s + 6, s + 12, ..."""
    pages = [[slot + SLOTS * number for number in range(PAGES)] for slot, _, _ in rows]
    made = [Row([0] * length, start, slot, own) for (slot, start, length), own in zip(rows, pages, strict=True)]
    return Batch.build(made, PAGE_ROWS[ratio] * ratio, DEVICE)


class Compressor:
    """Both implementations over the same tokens; each has rings and pages of its own, NaN where nothing was written."""

    def __init__(self, row: KVRow | IndexRow, ratio: int, width: int, rope_dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        overlap = ratio == 4
        self.columns = (4 if overlap else 2) * width
        ape = torch.randn(ratio, self.columns // 2, generator=generator)
        norm = torch.rand(width, generator=generator) + 0.5
        frequencies = plain_frequencies(rope_dim, 1e4).to(DEVICE)
        self.weights = CompressorWeights(ratio, overlap, ape.to(DEVICE), norm.to(DEVICE), 1e-6, frequencies)
        self.tokens = torch.randn(SLOTS, PAGES * PAGE_ROWS[ratio] * ratio, self.columns, generator=generator).to(DEVICE)
        self.row, self.dtype = row, dtype
        ring_rows = self.weights.length + 4
        self.rings = [torch.full((SLOTS, ring_rows, self.columns), torch.nan, device=DEVICE) for _ in range(2)]
        shape = (SLOTS * PAGES, PAGE_ROWS[ratio], row.row_bytes)
        page = torch.full((shape[0], 2 * shape[1], shape[2]), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.pages = [page.clone()[:, : shape[1]], page[:, : shape[1]]]

    def run(self, *rows: tuple[int, int, int]) -> Tensor:
        """One step of both; gives the pages that the kernel wrote. The entries are packed from equal state, so that a
        rounding that falls otherwise does not show up again in later steps."""
        batch = step(self.weights.ratio, *rows)
        projected = torch.cat([self.tokens[slot, start : start + length] for slot, start, length in rows])
        for ring, pages, run in zip(self.rings, self.pages, (compress, compress_reference), strict=True):
            run(projected, self.weights, batch, ring, pages, self.row, self.dtype)
        assert torch.equal(self.rings[0].isnan(), self.rings[1].isnan())
        assert torch.equal(self.rings[0].nan_to_num(), self.rings[1].nan_to_num())
        return self.pages[0]

    def assert_entries_equal(self, slot: int, tokens: int, misrounded: float) -> None:
        entries = torch.arange(tokens // self.weights.ratio, device=DEVICE)
        rows = PAGE_ROWS[self.weights.ratio]
        stored = [read_rows(pages, self.row, slot + SLOTS * (entries // rows), entries % rows) for pages in self.pages]
        got, expected = (self.row.unpack(each) for each in stored)
        if not len(entries):
            return
        if self.row.kind == "mxfp4":  # of which another scale could make the same values
            assert (stored[0] != stored[1]).double().mean() <= misrounded
        assert not got.isnan().any()
        error = (got - expected).abs() / expected.abs().amax(-1, keepdim=True)
        assert error.max() <= 0.51 and (error > 1e-5).double().mean() <= misrounded

    def assert_nothing_else_written(self, *written: tuple[int, int]) -> None:
        """`written`: (slot, tokens). All other entries are still as they were."""
        rows = PAGE_ROWS[self.weights.ratio]
        for slot in range(SLOTS):
            count = dict(written).get(slot, 0) // self.weights.ratio
            entries = torch.arange(count, rows * PAGES, device=DEVICE)
            left = read_rows(self.pages[0], self.row, slot + SLOTS * (entries // rows), entries % rows)
            assert (left == 0xFF).all()


KV = [
    (KVRow("fp8", 512, 64, True), torch.bfloat16),
    (KVRow("fp8", 192, 64, True), torch.bfloat16),
    (KVRow("bf16", 128, 64, True), torch.bfloat16),
    (KVRow("fp32", 64, 16, False), torch.float32),
]
INDEX = [
    (IndexRow("fp8", 128, True), torch.bfloat16),
    (IndexRow("fp8", 64, True), torch.bfloat16),
    (IndexRow("mxfp4", 128, True), torch.bfloat16),
    (IndexRow("mxfp4", 64, True), torch.bfloat16),
    (IndexRow("bf16", 128, True), torch.bfloat16),
    (IndexRow("fp32", 64, False), torch.float32),
]
CASES = [(4, *each) for each in KV + INDEX] + [(128, *each) for each in KV[::3]]


def made(ratio: int, row: KVRow | IndexRow, dtype: torch.dtype) -> Compressor:
    if isinstance(row, KVRow):
        return Compressor(row, ratio, row.head_dim, row.rope_dim, dtype)
    return Compressor(row, ratio, row.dim, row.dim // 2, dtype)


@pytest.mark.parametrize(("ratio", "row", "dtype"), CASES)
def test_chunks_then_steps(ratio: int, row: KVRow | IndexRow, dtype: torch.dtype) -> None:
    """Sequences of many lengths, in chunks that end anywhere, then in steps of one to five tokens; one sequence is new, one
    rests, one crosses into its next page."""
    both, long = made(ratio, row, dtype), 128 if ratio == 128 else 16
    both.run((1, 0, long - 2), (2, 0, 3), (3, 0, 2 * long + 1))
    both.run((3, 2 * long + 1, 6), (2, 3, long + 2))
    both.run((1, long - 2, 1), (2, long + 5, 1), (3, 2 * long + 7, 1))
    both.run((1, long - 1, 5), (4, 0, 3), (3, 2 * long + 8, 1))
    both.run((1, long + 4, 4), (4, 3, 5), (3, 2 * long + 9, 2))
    misrounded = 1e-2 if row.rounded else 2e-3
    lengths = ((1, long + 8), (2, long + 6), (3, 2 * long + 11), (4, 8))
    for slot, tokens in lengths:
        both.assert_entries_equal(slot, tokens, misrounded)
    both.assert_nothing_else_written(*lengths)


@pytest.mark.parametrize("ratio", [4, 128])
def test_an_entry_does_not_depend_on_the_company_or_the_cut(ratio: int) -> None:
    row, dtype = KV[0]
    whole, alone = made(ratio, row, dtype), made(ratio, row, dtype)
    long = 128 if ratio == 128 else 16
    whole.run((5, 0, long + 2), (1, 0, long))
    alone.run((1, 0, long - 5))
    alone.run((1, long - 5, 2))
    alone.run((1, long - 3, 3))
    entries = torch.arange(long // ratio, device=DEVICE)
    pages = [read_rows(each.pages[0], row, torch.ones_like(entries), entries) for each in (whole, alone)]
    assert torch.equal(*pages)


def test_rejected_tokens_leave_no_trace() -> None:
    """Five tokens, of which four are taken back, again and again: the ring still has what the next entry needs."""
    row, dtype = KV[1]
    both, once = made(4, row, dtype), made(4, row, dtype)
    for start in range(16):
        both.tokens[1, start + 1 : start + 5] += 1.0  # drafts that will be other tokens
        both.run((1, start, 5))
        both.tokens[1, start + 1 : start + 5] -= 1.0
    both.tokens.copy_(once.tokens)
    for start in range(16):
        once.run((1, start, 1))
    entries = torch.arange(4, device=DEVICE)
    kept, expected = (row.unpack(read_rows(each.pages[0], row, torch.ones_like(entries), entries)) for each in (both, once))
    torch.testing.assert_close(kept, expected, rtol=0.13, atol=1e-2)


def test_pages_and_slots_past_4_gib() -> None:
    """Addresses are 64 bits wide: the last page and the last slot begin 4 GiB into memory that is hardly touched."""
    row, dtype = KV[1]
    both = made(4, row, dtype)
    memory = torch.empty((4 << 30) + (1 << 20), dtype=torch.uint8, device=DEVICE)
    both.pages[0] = memory.as_strided((5, 4, row.row_bytes), (1 << 30, row.row_bytes, 1))
    rows, columns = both.rings[0].shape[1:]
    both.rings[0] = memory[1 << 19 :].view(torch.float32).as_strided((5, rows, columns), (1 << 28, columns, 1))
    both.rings[0][4], both.rings[1][4] = 0.0, 0.0
    for ring, pages, run in zip(both.rings, both.pages, (compress, compress_reference), strict=True):
        run(both.tokens[4, :4], both.weights, step(4, (4, 0, 4)), ring, pages, row, dtype)
    assert torch.equal(both.rings[0][4], both.rings[1][4])
    both.assert_entries_equal(4, 4, 1e-2)
