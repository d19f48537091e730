"""Prefill attention against a loop in float64 that starts from the packed rows; every row nobody may read is NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels import backend
from kernels.attention_prefill import _runs_on_hopper, prefill_attention
from kernels.backend import Backend
from kernels.indexer import Entries
from kernels.rope import rope_reference
from kernels.rows import KVRow, write_rows
from kernels.workspace import Workspace
from model.batch import Batch, Row
from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

__all__ = ["triton_backend"]  # a fixture, used by name
torch.set_num_threads(1)
BF16_ERROR = 8e-3  # two roundings to 8 bits (weights and result) and one before the rotation
FP32_ERROR = 1e-6
SLOT_PAGES = 6


@dataclass(frozen=True)
class Sizes:
    """rows: (slot, start, new tokens) of every sequence. ratio: tokens a compressed row stands for."""

    rows: tuple[tuple[int, int, int], ...]
    kind: str = "fp8"
    heads: int = 3
    dim: int = 128
    rope_dim: int = 64
    window: int = 8
    ratio: int = 4
    page_tokens: int = 64
    topk: int = 24
    page_gap_bytes: int = 64  # between the fields of neighbouring pages


class Chunk:
    """One step's inputs with sequences of their own rows, and the answer for one token."""

    def __init__(self, sizes: Sizes, form: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes, self.form = sizes, form
        self.row = row = KVRow(sizes.kind, sizes.dim, sizes.rope_dim, rounded=False)
        self.dtype = torch.float32 if sizes.kind == "fp32" else torch.bfloat16
        self.batch = batch_of(sizes, range(len(sizes.rows)))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        self.history = [row.pack(normal(start + new, sizes.dim)) for _, start, new in sizes.rows]
        self.compressed = [row.pack(normal((start + new) // sizes.ratio, sizes.dim)) for _, start, new in sizes.rows]
        slots = 1 + max(slot for slot, _, _ in sizes.rows)
        self.ring = torch.full((slots, sizes.window + 4, row.ring_bytes), 0xFF, dtype=torch.uint8)
        page_rows = sizes.page_tokens // sizes.ratio
        field_bytes = page_rows * row.row_bytes
        arena = torch.empty(slots * SLOT_PAGES + 1, field_bytes + sizes.page_gap_bytes, dtype=torch.uint8)
        self.pages = torch.unflatten(arena[:, :field_bytes], 1, (page_rows, row.row_bytes))
        self.pages.fill_(0xFF)
        for number, (slot, start, _) in enumerate(sizes.rows):
            for position in range(max(0, start - sizes.window + 1), start):
                self.ring[slot, position % self.ring.shape[1]] = self.history[number][position]
            entry = torch.arange(len(self.compressed[number]))
            page = self.batch.page_table[number][entry // page_rows]
            write_rows(self.pages, row, page, entry % page_rows, self.compressed[number])
        self.queries = [normal(new, sizes.heads, sizes.dim).to(self.dtype) for _, _, new in sizes.rows]
        angles = [normal(new, sizes.rope_dim // 2).double() for _, _, new in sizes.rows]
        self.turns = [torch.stack((angle.cos(), angle.sin()), -1) for angle in angles]
        self.sinks = normal(sizes.heads)
        self.chosen = [
            [torch.randperm(visible, generator=generator)[: sizes.topk].sort().values for visible in self._visible(number)]
            for number in range(len(sizes.rows))
        ]

    def _visible(self, number: int) -> list[int]:
        _, start, new = self.sizes.rows[number]
        return [(position + 1) // self.sizes.ratio for position in range(start, start + new)]

    def run(self, order: Sequence[int]) -> list[Tensor]:
        """The kernel's result for every sequence, when they stand in the batch in this order."""
        batch = batch_of(self.sizes, order)
        new_rows = torch.cat([self.history[n][self.sizes.rows[n][1] :] for n in order])
        q, turn = torch.cat([self.queries[n] for n in order]), torch.cat([self.turns[n] for n in order])
        entries: Entries | int | None = self.sizes.ratio if self.form == "all" else None
        if self.form == "selected":
            entries = self._entries(batch, order)
        for name in ("positions", "sequence_ids", "starts", "cu_tokens", "slots", "page_table"):
            setattr(batch, name, on(getattr(batch, name)))
        workspace = Workspace(64 << 20, DEVICE)
        workspace._block.fill_(0xFF)  # what nobody wrote is NaN
        with workspace.active():
            out = prefill_attention(
                on(q),
                on(new_rows),
                batch,
                on(self.ring),
                self.row,
                self.sizes.window,
                on(self.sinks),
                on(turn.float()),
                None if self.form == "window" else on(self.pages),
                entries,
            )
        parts = torch.split(out.cpu(), [self.sizes.rows[n][2] for n in order])
        return [part for _, part in sorted(zip(order, parts, strict=True))]

    def _entries(self, batch: Batch, order: Sequence[int]) -> Entries:
        lists = [(place, chosen) for place, n in enumerate(order) for chosen in self.chosen[n]]
        rows = torch.full((len(lists), self.sizes.topk), -1, dtype=torch.int32)
        page_rows = self.pages.shape[1]
        for token, (place, chosen) in enumerate(lists):
            physical = batch.page_table[place][chosen // page_rows] * page_rows + chosen % page_rows
            rows[token, : len(chosen)] = physical.int()
        counts = torch.tensor([len(chosen) for _, chosen in lists], dtype=torch.int32)
        return Entries(rows.to(DEVICE), counts.to(DEVICE))

    def expected(self, number: int) -> Tensor:
        """float64 [new tokens, H, d] of one sequence."""
        _, start, new = self.sizes.rows[number]
        results = []
        for token in range(new):
            position = start + token
            packed = [self.history[number][max(0, position - self.sizes.window + 1) : position + 1]]
            if self.form == "all":
                packed.append(self.compressed[number][: (position + 1) // self.sizes.ratio])
            elif self.form == "selected":
                packed.append(self.compressed[number][self.chosen[number][token]])
            rows = self.row.unpack(torch.cat(packed))
            logits = self.queries[number][token].double() @ rows.T * self.sizes.dim**-0.5
            share = torch.softmax(torch.cat((logits, self.sinks[:, None].double()), 1), 1)[:, :-1]
            results.append(share @ rows)
        return rope_reference(torch.stack(results), self.turns[number], inverse=True)

    def check(self) -> None:
        """Every sequence is right, and bit-equal with the batch the other way round."""
        count = len(self.sizes.rows)
        forward, backward = self.run(range(count)), self.run(range(count)[::-1])
        for number in range(count):
            expected = self.expected(number)
            error = (forward[number].double() - expected).norm() / expected.norm()
            assert error < (FP32_ERROR if self.dtype is torch.float32 else BF16_ERROR)
            assert torch.equal(forward[number], backward[number])


def on(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


def batch_of(sizes: Sizes, order: Sequence[int]) -> Batch:
    """Slot s owns pages SLOT_PAGES * s + 1 and on, in falling order."""
    rows = []
    for slot, start, new in (sizes.rows[number] for number in order):
        pages = [SLOT_PAGES * slot + SLOT_PAGES - page for page in range(-(-(start + new) // sizes.page_tokens))]
        rows.append(Row([0] * new, start, slot, pages))
    return Batch.build(rows, sizes.page_tokens)


THREE = ((1, 70, 6), (3, 0, 9), (2, 133, 3))


@pytest.mark.parametrize("form", ["window", "selected", "all"])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
@pytest.mark.usefixtures("triton_backend")
def test_three_sequences(form: str, kind: str) -> None:
    Chunk(Sizes(THREE, kind), form).check()


@pytest.mark.parametrize(
    "change",
    [
        lambda sizes: replace(sizes, dim=192, heads=5),
        lambda sizes: replace(sizes, topk=3),  # the selected rows are fewer than all: unpacked one by one
        lambda sizes: replace(sizes, topk=3, kind="fp32", dim=16, rope_dim=4),
        lambda sizes: replace(sizes, rows=((1, 2, 1),)),  # nothing compressed yet
        lambda sizes: replace(sizes, rows=((1, 3, 1), (2, 0, 7))),
        lambda sizes: replace(sizes, rows=((1, 5, 30),)),  # longer than the ring
    ],
)
@pytest.mark.usefixtures("triton_backend")
def test_odd_sizes(change: Callable[[Sizes], Sizes]) -> None:
    Chunk(change(Sizes(THREE)), "selected").check()


@pytest.mark.usefixtures("triton_backend")
def test_page_0_is_read_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's first steps select rows of it; an address that nobody wrote stopped a GPU."""

    def on_page_0(sizes: Sizes, order: Sequence[int]) -> Batch:
        rows = (sizes.rows[number] for number in order)
        return Batch.build([Row([0] * new, start, slot, [0] * 16) for slot, start, new in rows], sizes.page_tokens)

    monkeypatch.setattr("tests.test_kernel_attention_prefill.batch_of", on_page_0)
    Chunk(Sizes(((0, 3, 30),)), "selected").check()


@pytest.mark.parametrize("start", [0, 1, 120, 127, 128, 250])
@pytest.mark.usefixtures("triton_backend")
def test_around_the_window_and_the_first_compressed_rows(start: int) -> None:
    Chunk(Sizes(((1, start, 7),), window=128, ratio=128, page_tokens=256, heads=2), "all").check()


@pytest.mark.parametrize("form", ["selected", "all"])
def test_the_widths_of_v4_flash(form: str, triton_backend: Backend) -> None:
    """The tuned kernel of a Hopper GPU when there is one."""
    sizes = Sizes(
        ((1, 300, 2), (2, 126, 1)), heads=64, dim=512, window=128, topk=70, ratio=2, page_tokens=128, page_gap_bytes=4096
    )
    Chunk(sizes, form).check()


@pytest.mark.usefixtures("triton_backend")
def test_pages_further_apart_than_32_bits() -> None:
    """The last page begins 4.9 GiB after the first; only the pages in use are touched."""
    sizes = Sizes(((1, 60, 3),), page_gap_bytes=420 << 20, heads=1)
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    chunk = Chunk(replace(sizes, page_gap_bytes=64), "selected")
    pages, far = chunk.pages, 420 << 20
    block = torch.empty((len(pages) - 1) * far + pages[0].numel(), dtype=torch.uint8, device=DEVICE)
    apart = block.as_strided(pages.shape, (far, pages.stride(1), 1))
    for page in chunk.batch.page_table.flatten().tolist():
        apart[page] = pages[page].to(DEVICE)
    chunk.pages = apart
    chunk.check()


def test_the_fast_form_takes_the_widths_it_was_written_for() -> None:
    """Everything else goes to the portable kernel, rotary channels of another number among it."""
    q, turn = torch.empty(4, 64, 512, dtype=torch.bfloat16), torch.empty(4, 32, 2)
    before = backend.active()
    try:
        backend.use(backend.TARGETS["sm_90"])
        assert _runs_on_hopper(q, 128, turn)
        for other in ((q[:, :48], 128, turn), (q[..., :384], 128, turn), (q, 100, turn), (q, 128, torch.empty(4, 64, 2))):
            assert not _runs_on_hopper(*other)
        assert not _runs_on_hopper(q.float(), 128, turn)
        backend.use(backend.TARGETS["sm_120"])
        assert not _runs_on_hopper(q, 128, turn)
    finally:
        backend.use(before)
