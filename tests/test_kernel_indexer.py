"""The indexer's kernels against the reference: scores, and the exact choice, over pages whose unread rows are NaN."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # isort: skip

from kernels import backend, indexer
from kernels.indexer import Entries, best_reference, physical_rows, score_entries, select_entries, select_entries_reference
from kernels.quant import FP4_VALUES
from kernels.ragged import Ragged
from kernels.rows import PLAIN_DTYPES, IndexRow, write_rows
from kernels.topk import GROUP, choose_rows
from kernels.workspace import Workspace

__all__ = ["triton_backend"]
torch.set_num_threads(1)
RATIO = 4
POISON = 0xFF  # NaN as e4m3, bf16 and float32


class Step:
    """Sequences with `visible` entries each after `new` tokens each. whole: small whole numbers (mxfp4: of a scale for each
    block), whose scores are exact in any order of summation and often equal."""

    def __init__(
        self,
        visible: list[int],
        new: list[int],
        kind: str = "fp8",
        heads: int = 8,
        dim: int = 128,
        page_rows: int = 16,
        whole: bool = True,
        page_stride: int | None = None,
        spare_columns: int = 1,
    ) -> None:
        self.row = IndexRow(kind, dim, rounded=False)
        ends = [max(RATIO * each + RATIO - 1, count) for each, count in zip(visible, new, strict=True)]
        starts = [end - count for end, count in zip(ends, new, strict=True)]
        needed = [-(-each // page_rows) for each in visible]
        total = sum(needed) + 1
        numbers = iter((torch.randperm(total - 1) + 1).tolist())
        table = torch.zeros(len(visible), max(needed) + spare_columns, dtype=torch.int64)
        for sequence, count in enumerate(needed):
            table[sequence, :count] = torch.tensor([next(numbers) for _ in range(count)])
        block = -(-page_rows * self.row.row_bytes // 64) * 64
        arena = torch.empty(total * (page_stride or block), dtype=torch.uint8)
        self.pages = arena.as_strided((total, page_rows, self.row.row_bytes), (page_stride or block, self.row.row_bytes, 1))
        self.pages.fill_(POISON)
        for sequence, count in enumerate(visible):
            if not count:
                continue
            entry = torch.arange(count)
            keys = torch.randint(-2, 3, (count, dim)).float() if whole else torch.randn(count, dim)
            if kind == "mxfp4":
                keys *= torch.exp2(torch.randint(-2, 2, (count, dim // 32)).float()).repeat_interleave(32, 1)
            write_rows(self.pages, self.row, table[sequence, entry // page_rows], entry % page_rows, self._pack(keys, whole))
        positions = [position for start, end in zip(starts, ends, strict=True) for position in range(start, end)]
        cu_tokens = [sum(new[:sequence]) for sequence in range(len(new) + 1)]
        self.batch = Ragged(
            torch.tensor(positions),
            torch.arange(len(new)).repeat_interleave(torch.tensor(new)),
            torch.tensor(starts),
            torch.tensor(cu_tokens),
            torch.zeros(len(new), dtype=torch.int64),
            table,
            max(new),
        )
        self.queries, self.scales = self._queries(len(positions), heads, dim, whole)
        self.head_weights = (
            torch.randint(-3, 4, (len(positions), heads)).float() / 4 if whole else torch.randn(len(positions), heads)
        )
        self._move()

    def _pack(self, keys: Tensor, whole: bool) -> Tensor:
        if self.row.kind != "fp8" or not whole:
            return self.row.pack(keys)
        scale = torch.full((len(keys), 1), 0.5)
        return torch.cat((keys.to(torch.float8_e4m3fn).view(torch.uint8), scale.view(torch.uint8)), -1)

    def _queries(self, tokens: int, heads: int, dim: int, whole: bool) -> tuple[Tensor, Tensor | None]:
        values = torch.randint(-2, 3, (tokens, heads, dim)).float() if whole else torch.randn(tokens, heads, dim)
        if self.row.kind in PLAIN_DTYPES:
            return values.to(PLAIN_DTYPES[self.row.kind]), None
        return values.to(torch.float8_e4m3fn), 2.0 ** torch.randint(-2, 3, (tokens, heads))

    def _move(self) -> None:
        names = ("positions", "sequence_ids", "starts", "cu_tokens", "slots", "page_table")
        self.batch = replace(self.batch, **{name: getattr(self.batch, name).to(DEVICE) for name in names})
        self.queries, self.head_weights, self.pages = (
            each.to(DEVICE) for each in (self.queries, self.head_weights, _to_device(self.pages))
        )
        self.scales = None if self.scales is None else self.scales.to(DEVICE)

    def select(self, topk: int) -> Entries:
        return select_entries(self.queries, self.scales, self.head_weights, self.batch, self.pages, self.row, RATIO, topk)

    def reference(self, topk: int) -> Entries:
        return select_entries_reference(
            self.queries, self.scales, self.head_weights, self.batch, self.pages, self.row, RATIO, topk
        )


def _to_device(pages: Tensor) -> Tensor:
    if DEVICE.type == "cpu":
        return pages
    count, rows, row_bytes = pages.shape
    stride = pages.stride(0)
    arena = torch.empty(count * stride, dtype=torch.uint8, device=DEVICE)
    moved = arena.as_strided((count, rows, row_bytes), (stride, row_bytes, 1))
    moved.copy_(pages)
    return moved


def same(got: Entries, wanted: Entries) -> None:
    assert torch.equal(got.counts, wanted.counts)
    assert torch.equal(got.rows, wanted.rows)


@pytest.mark.parametrize(
    ("visible", "new", "topk", "options"),
    [
        ([40, 3, 0, 130], [1, 1, 1, 1], 8, {"kind": "fp32", "dim": 64, "page_rows": 4}),
        ([40, 70], [2, 2], 32, {"kind": "bf16", "page_rows": 4}),
        ([600, 5, 64], [1, 1, 1], 32, {"heads": 32}),
        ([127, 128, 129, 1, 0], [1] * 5, 32, {"heads": 64, "page_rows": 64}),
        ([90, 200], [4, 4], 8, {}),
        ([90, 40, 33], [3, 3, 3], 8, {}),
        ([40, 70, 5, 200], [5, 1, 9, 2], 8, {}),  # groups of tokens that hold two sequences
        ([90, 40], [5, 2], 8, {"heads": 64, "page_rows": 64}),
        ([150], [30], 32, {"page_rows": 64}),
        ([600, 5, 64], [1, 1, 1], 32, {"kind": "mxfp4", "heads": 32}),
        ([127, 128, 129, 1, 0], [1] * 5, 32, {"kind": "mxfp4", "heads": 64, "page_rows": 64}),
        ([90, 200], [4, 4], 8, {"kind": "mxfp4"}),
        ([40, 70, 5, 200], [5, 1, 9, 2], 8, {"kind": "mxfp4", "dim": 64, "page_rows": 4}),
        ([150], [30], 32, {"kind": "mxfp4", "page_rows": 64}),
    ],
)
def test_the_chosen_rows_are_the_references(
    triton_backend: backend.Backend, visible: list[int], new: list[int], topk: int, options: dict[str, object]
) -> None:
    torch.manual_seed(3)
    step = Step(visible, new, **options)  # type: ignore[arg-type]
    same(step.select(topk), step.reference(topk))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@pytest.mark.parametrize("visible", [[511, 512, 513], [2051, 0, 1]])
def test_widths_of_the_released_model(triton_backend: backend.Backend, visible: list[int], kind: str) -> None:
    torch.manual_seed(4)
    step = Step(visible, [1] * len(visible), kind, heads=64, page_rows=64)
    same(step.select(512), step.reference(512))


@pytest.mark.parametrize(("kind", "tolerance"), [("fp8", 1e-3), ("mxfp4", 1e-3), ("bf16", 2e-6), ("fp32", 2e-6)])
@pytest.mark.parametrize("new", [1, 2, 4])
def test_scores_of_random_values(triton_backend: backend.Backend, kind: str, tolerance: float, new: int) -> None:
    """In float32; the tensor cores of a Hopper GPU keep 14 bits of an FP8 product's sum."""
    torch.manual_seed(5)
    step = Step([200, 66], [new, new], kind, heads=64, page_rows=64, whole=False)
    batch = step.batch
    scores = score_entries(
        step.queries, step.scales, step.head_weights, batch, step.pages, step.row, RATIO, 8, 0, len(step.queries)
    )
    for token in range(len(step.queries)):
        sequence, count = int(batch.sequence_ids[token]), int(batch.positions[token] + 1) // RATIO
        keys = indexer._keys(batch, step.pages, step.row, batch.sequence_ids[token : token + 1], count)[0]
        query = step.queries[token].double()
        if step.scales is not None:
            query *= step.scales[token, :, None]
        expected = ((query @ keys).relu() * step.head_weights[token, :, None].double()).sum(0)
        got = scores.values[token, :count].double()
        assert float((got - expected).norm() / expected.norm()) < tolerance, sequence
        groups = torch.nn.functional.pad(scores.values[token, :count], (0, -count % GROUP), value=-torch.inf)
        assert torch.equal(scores.maxima[token, : -(-count // GROUP)], groups.view(-1, GROUP).amax(1))


@pytest.mark.parametrize(("kind", "heads"), [("fp8", 64), ("fp8", 32), ("mxfp4", 64), ("bf16", 16)])
@pytest.mark.parametrize("new", [1, 5])
def test_the_order_of_a_scores_sum_is_not_the_compilers(
    triton_backend: backend.Backend, kind: str, heads: int, new: int
) -> None:
    """Which threads hold a token's heads depends on how many tokens share the keys, and a sum over them in the order of the
    threads would too. Dots that are whole times weights of 8 bits are exact, so only the additions round."""
    torch.manual_seed(14)
    step = Step([60], [new], kind, heads=heads)
    step.head_weights = torch.randn(new, heads) * torch.exp2(torch.randint(-8, 9, (new, heads)).float())
    step.head_weights = step.head_weights.bfloat16().float().to(DEVICE)
    scores = score_entries(step.queries, step.scales, step.head_weights, step.batch, step.pages, step.row, RATIO, 8, 0, new)
    keys = indexer._keys(step.batch, step.pages, step.row, step.batch.sequence_ids[:1], 60)[0]
    for token in range(new):
        count = int(step.batch.positions[token] + 1) // RATIO
        scale = 1.0 if step.scales is None else step.scales[token, :, None].double()
        dots = ((step.queries[token].double() @ keys[:, :count]) * scale).relu_()
        x = (dots * step.head_weights[token, :, None].double()).float().view(-1, 2, 2, 2, 2, count)
        assert torch.equal(x.double().flatten(0, 4), dots * step.head_weights[token, :, None].double())
        x = x[..., 0, :] + x[..., 1, :]
        while len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        x = x[0, ..., 0, :] + x[0, ..., 1, :]
        x = x[:, 0] + x[:, 1]
        assert torch.equal(scores.values[token, :count], x[0] + x[1])


@pytest.mark.parametrize("spread", [0, 26, 27, 100])
def test_blocks_of_an_mxfp4_key_may_be_far_apart(triton_backend: backend.Backend, spread: int) -> None:
    """Up to 2^26 exactly; smaller ones count as if they were so large, which is less than float32 resolves of the largest.
    Every token asks for one channel of entry 0, which holds all codes, and zeros whose scale is the least there is. The tensor
    cores of a Hopper GPU keep 14 bits of a sum."""
    step = Step([40], [128], "mxfp4", heads=1)
    codes = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    key = codes.repeat(8) * torch.exp2(-spread * (torch.arange(128) // 32 % 2).float())
    key[96:] = 0.0
    first, row = step.batch.page_table[0, :1], torch.zeros(1, dtype=torch.int64, device=DEVICE)
    write_rows(step.pages, step.row, first, row, step.row.pack(key[None]).to(DEVICE))
    step.queries = torch.diag(torch.where(key < 0, -1.0, 1.0))[:, None].to(DEVICE, torch.float8_e4m3fn)
    step.scales, step.head_weights = torch.ones(2, 128, 1, device=DEVICE)
    got = score_entries(step.queries, step.scales, step.head_weights, step.batch, step.pages, step.row, RATIO, 0, 0, 128)
    error = (got.values[:, 0].cpu() - key.abs()).abs()
    room = 0.0 if spread <= 26 else 6 * 2.0**-26
    assert error.max() <= (room if DEVICE.type == "cpu" else 6 * 2.0**-13)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_a_row_does_not_depend_on_its_company(triton_backend: backend.Backend, kind: str) -> None:
    torch.manual_seed(6)
    step = Step([300, 40, 129, 0, 222], [1] * 5, kind, whole=False)
    alone = step.select(32)
    order = torch.tensor([3, 1, 4, 0, 2], device=DEVICE)
    for name in ("positions", "starts", "page_table"):
        setattr(step.batch, name, getattr(step.batch, name)[order].contiguous())
    step.queries, step.head_weights = step.queries[order].contiguous(), step.head_weights[order]
    assert step.scales is not None
    step.scales = step.scales[order]
    permuted = step.select(32)
    assert torch.equal(permuted.rows, alone.rows[order]) and torch.equal(permuted.counts, alone.counts[order])


def test_room_for_longer_rows_changes_nothing(triton_backend: backend.Backend) -> None:
    torch.manual_seed(7)
    step = Step([200, 90], [1, 1], whole=False)
    tight = step.select(32)
    step.batch.page_table = torch.nn.functional.pad(step.batch.page_table, (0, 200))
    assert torch.equal(step.select(32).rows, tight.rows)


def test_a_long_chunk_is_scored_in_blocks(triton_backend: backend.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "SCRATCH_BYTES", 1000)
    torch.manual_seed(8)
    step = Step([60, 40], [70, 3], dim=64, kind="fp32")
    same(step.select(8), step.reference(8))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_pages_beyond_four_gibibytes(triton_backend: backend.Backend, kind: str) -> None:
    torch.manual_seed(9)
    step = Step([300], [1], kind, page_stride=1 << 28)  # 19 pages
    same(step.select(32), step.reference(32))


def test_everything_comes_from_the_workspace(triton_backend: backend.Backend) -> None:
    torch.manual_seed(10)
    step = Step([200, 90], [1, 1])
    workspace = Workspace(1 << 20, DEVICE)
    with workspace.active():
        entries = step.select(32)
    begin = workspace._block.data_ptr()
    assert all(begin <= each.data_ptr() < begin + (1 << 20) for each in (entries.rows, entries.counts))
    same(entries, step.reference(32))


def choose(scores: Tensor, visible: Tensor, topk: int, page_rows: int) -> tuple[Entries, Entries]:
    """Chosen by the kernel and by sorting, from scores [T, capacity] that are NaN beyond `visible` [T]."""
    tokens, capacity = scores.shape
    hidden = torch.arange(capacity) >= visible[:, None]
    maxima = scores.masked_fill(hidden, -torch.inf).view(tokens, -1, GROUP).amax(2)
    maxima = maxima.masked_fill(maxima == -torch.inf, torch.nan)
    table = torch.randint(1, 1 << 20, (tokens, capacity // page_rows))
    numbers = torch.arange(tokens)
    batch = Ragged(RATIO * visible + 1, numbers, numbers, numbers, numbers, table, 1)
    wanted = best_reference(scores.double(), visible, topk)
    counts = visible.clamp(max=topk)
    expected = Entries(physical_rows(wanted, counts, batch, page_rows), counts.int())
    for name in ("positions", "sequence_ids", "page_table"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    got = Entries(
        torch.full((tokens, topk), -7, dtype=torch.int32, device=DEVICE),
        torch.full((tokens,), -7, dtype=torch.int32, device=DEVICE),
    )
    choose_rows(
        got.rows, got.counts, scores.masked_fill(hidden, torch.nan).to(DEVICE), maxima.to(DEVICE), batch, page_rows, RATIO
    )
    return Entries(got.rows.cpu(), got.counts.cpu()), expected


@pytest.mark.parametrize("values", ["normal", "few", "equal", "negative zeros", "steep"])
@pytest.mark.parametrize(
    ("visible", "topk"),
    [
        ([0, 1, 7, 8, 9, 31, 32, 33, 40, 256, 257, 300, 2048], 8),
        ([511, 512, 513, 4095, 4096, 4097, 16384, 16385], 512),
        ([65_600], 512),
    ],
)
def test_the_choice_is_exact(triton_backend: backend.Backend, values: str, visible: list[int], topk: int) -> None:
    torch.manual_seed(11)
    random.seed(11)
    shape = (len(visible), -(-max(visible) // 64) * 64)
    scores = torch.randn(shape)
    if values == "few":
        scores = (scores * 2).round()
    elif values == "equal":
        scores = torch.full(shape, -0.25)
    elif values == "negative zeros":
        scores = torch.where(torch.rand(shape) < 0.5, torch.tensor(-0.0), torch.tensor(0.0)) - (scores > 1).float()
    elif values == "steep":
        scores = scores.sign() * torch.exp2(scores * 20)
    same(*choose(scores, torch.tensor(visible), topk, 64))


def test_the_longest_rows(triton_backend: backend.Backend) -> None:
    """262,144 entries are what a million tokens leave; a longer row only needs more levels."""
    torch.manual_seed(12)
    visible = torch.tensor([262_144, 270_000, 8192 * GROUP + 1])
    same(*choose(torch.randn(3, 270_016), visible, 512, 64))
    same(*choose((torch.randn(3, 270_016) * 3).round(), visible, 512, 64))


def test_a_table_without_room_for_more_than_topk(triton_backend: backend.Backend) -> None:
    torch.manual_seed(13)
    step = Step([30, 0, 7], [1, 1, 1], page_rows=4)
    same(step.select(64), step.reference(64))
