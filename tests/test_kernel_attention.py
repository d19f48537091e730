"""Attention, indexer and compressor references against per-token loops, over rings and pages full of NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.compress import CompressorWeights, compress
from kernels.indexer import every_entry, select_entries
from kernels.norm import query_norm, rms_norm
from kernels.ragged import Ragged, equal_length_groups, store_ring
from kernels.rope import plain_frequencies, rope, rotation, yarn_frequencies
from kernels.rows import IndexRow, KVRow
from model.batch import Batch, Row

torch.set_num_threads(1)
HEADS, DIM, ROPE, WINDOW, RING, PAGE_TOKENS = 3, 16, 4, 8, 10, 16


def step(*rows: tuple[int, int, int]) -> Batch:
    """(slot, start, tokens) rows; slot s owns pages 4s..4s+3."""
    return Batch.build([Row([0] * n, start, slot, [4 * slot + i for i in range(4)]) for slot, start, n in rows], PAGE_TOKENS)


def nan_ring(slots: int, rows: int, width: int) -> Tensor:
    return torch.full((slots, rows, width), torch.nan)


@pytest.mark.parametrize("entries", [False, True])
def test_sparse_attention_against_a_loop(entries: bool) -> None:
    """Three sequences in steps of several sizes, one longer than the ring; rows are the values themselves (fp32)."""
    torch.manual_seed(1)
    row, sinks = KVRow("fp32", DIM, ROPE, rounded=False), torch.randn(HEADS)
    history = {slot: torch.randn(60, DIM) for slot in (1, 2, 3)}
    pages = torch.full((20, 4, row.row_bytes), 0xFF, dtype=torch.uint8)
    for slot in history:
        for entry in range(9):
            pages[4 * slot + entry // 4, entry % 4] = row.pack(history[slot][40 + entry])
    ring = nan_ring(5, RING, DIM).view(torch.uint8)
    frequencies = plain_frequencies(ROPE, 100.0)
    for rows in ([(1, 0, 1), (2, 0, 25), (3, 0, 3)], [(1, 1, 12), (2, 25, 1)], [(1, 13, 1), (2, 26, 1), (3, 3, 1)]):
        batch = step(*rows)
        new = torch.cat([history[slot][start : start + n] for slot, start, n in rows])
        q = torch.randn(DIM, HEADS, len(new)).permute(2, 1, 0)  # strided
        chosen = torch.tensor([[p % 9, -1, 3] for p in batch.positions.tolist()]) if entries else None
        turn = rotation(batch.positions, frequencies)
        got = sparse_attention(q, row.pack(new), batch, ring, row, WINDOW, sinks, turn, pages if entries else None, chosen)
        store_ring(batch, ring, row.pack(new))
        owners = [slot for slot, _, n in rows for _ in range(n)]
        for token, (slot, position) in enumerate(zip(owners, batch.positions.tolist(), strict=True)):
            keys = history[slot][max(0, position - WINDOW + 1) : position + 1]
            if entries:
                keys = torch.cat((keys, history[slot][[40 + position % 9, 43]]))
            logits = torch.cat((q[token] @ keys.T * DIM**-0.5, sinks[:, None]), 1)
            expected = torch.softmax(logits, 1)[:, :-1] @ keys
            expected = rope(expected[None], turn[token : token + 1], inverse=True)[0]
            torch.testing.assert_close(got[token], expected, rtol=1e-4, atol=1e-5)


def test_the_best_entries_are_chosen_the_lower_one_first() -> None:
    """Ties (relu gives many zeros) go to the lower entry; what is not visible never comes, whatever NaN lies there."""
    row = IndexRow("fp32", 4, rounded=False)
    pages = torch.full((12, 4, row.row_bytes), 0xFF, dtype=torch.uint8)
    keys = torch.tensor([[1.0], [0], [3], [0], [0], [5], [0], [2]]) * torch.ones(1, 4)
    for entry, key in enumerate(keys):
        pages[4 + entry // 4, entry % 4] = row.pack(key)
        pages[8 + entry // 4, entry % 4] = row.pack(keys[7 - entry])
    batch = step((1, 30, 2), (2, 31, 1), (1, 3, 1))  # 7, 8 | 8 | 1 entries visible
    queries, weights = torch.ones(4, 2, 4), torch.tensor([[1.0, 0.5]]).repeat(4, 1)
    assert select_entries(queries, weights, batch, pages, row, 4, 3).tolist() == [[0, 2, 5], [2, 5, 7], [0, 2, 5], [0, -1, -1]]
    # negative scores: the zeros win, the lowest of them
    assert select_entries(queries, -weights, batch, pages, row, 4, 3).tolist() == [[1, 3, 4], [1, 3, 4], [1, 3, 4], [0, -1, -1]]
    everything = select_entries(queries, weights, batch, pages, row, 4, 8)
    assert torch.equal(everything, every_entry(batch, 4))
    assert everything.tolist()[0] == [0, 1, 2, 3, 4, 5, 6, -1]
    assert every_entry(step((1, 0, 2)), 4).shape == (2, 0)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (8, False)])
@pytest.mark.parametrize("cuts", [[40], [1] * 40, [3, 20, 1, 1, 15]])
def test_compress_against_a_loop(ratio: int, overlap: bool, cuts: list[int]) -> None:
    torch.manual_seed(2)
    width, total = 8, 40
    channels = 2 * width if overlap else width
    weights = CompressorWeights(
        ratio, overlap, torch.randn(ratio, channels), torch.rand(width) + 0.5, 1e-6, plain_frequencies(4, 50.0)
    )
    row = KVRow("fp32", width, 4, rounded=False)
    projected = torch.randn(total, 2 * channels)
    ring = nan_ring(3, (2 if overlap else 1) * ratio + 2, 2 * channels)
    pages = torch.full((12, PAGE_TOKENS // ratio, row.row_bytes), 0xFF, dtype=torch.uint8)
    start = 0
    for size in cuts:
        batch = step((2, 0, 1), (1, start, size))  # in company
        compress(
            torch.cat((torch.ones(1, 2 * channels), projected[start : start + size])),
            weights,
            batch,
            ring,
            pages,
            row,
            torch.float32,
        )
        start += size
    values, scores = torch.split(projected, channels, 1)
    scores = scores + weights.ape.repeat(total // ratio, 1)
    for window in range(total // ratio):
        own, before = slice(window * ratio, (window + 1) * ratio), slice((window - 1) * ratio, window * ratio)
        v, s = values[own, -width:], scores[own, -width:]
        if overlap and window:
            v, s = torch.cat((values[before, :width], v)), torch.cat((scores[before, :width], s))
        entry = rms_norm((torch.softmax(s, 0) * v).sum(0)[None], weights.norm.double(), 1e-6)
        entry = rope(entry, rotation(torch.tensor([window * ratio]), weights.frequencies))[0]
        place = pages[4 + window // pages.shape[1], window % pages.shape[1]]
        torch.testing.assert_close(row.unpack(place).float(), entry, rtol=1e-4, atol=1e-5)


def test_a_ring_keeps_the_last_rows_and_groups_are_by_length() -> None:
    ring = nan_ring(3, 4, 1)
    batch = step((1, 3, 9), (2, 0, 2))
    store_ring(batch, ring, torch.arange(11.0)[:, None])
    assert ring[1, :, 0].tolist() == [5.0, 6.0, 7.0, 8.0]  # positions 8, 9, 10, 11
    assert ring[2, :2, 0].tolist() == [9.0, 10.0] and ring[2, 2:].isnan().all() and ring[0].isnan().all()
    groups = equal_length_groups(step((1, 0, 2), (2, 5, 1), (1, 9, 2)))
    assert [(sequences.tolist(), length) for sequences, length in groups] == [([0, 2], 2), ([1], 1)]
    assert isinstance(batch, Ragged)


def test_yarn_of_the_released_model() -> None:
    """Channels below 15 as they are, above 25 sixteen times slower, a ramp between (spec B.4)."""
    plain, yarn = plain_frequencies(64, 160000.0), yarn_frequencies(64, 160000.0, 16, 65536, 32, 1)
    assert torch.equal(yarn[:16], plain[:16])
    assert torch.equal(yarn[25:], plain[25:] / 16)
    torch.testing.assert_close(yarn[20], plain[20] * (0.5 + 0.5 / 16))


def test_rope_turns_adjacent_pairs_and_back() -> None:
    x = torch.randn(20, 5, 2).permute(2, 1, 0)  # [2, 5, 20], strided
    frequencies = plain_frequencies(8, 100.0)
    turn = rotation(torch.tensor([0, 7]), frequencies)
    turned = rope(x, turn)
    assert torch.equal(turned[0], x[0]) and torch.equal(turned[..., :12], x[..., :12])
    angle = 7 * frequencies[1]
    expected = x[1, 2, 14] * angle.cos() - x[1, 2, 15] * angle.sin()
    torch.testing.assert_close(turned[1, 2, 14], expected)
    torch.testing.assert_close(rope(turned, turn, inverse=True), x)


def test_norms() -> None:
    x = torch.randn(32, 9).bfloat16().T
    weight = torch.rand(32, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x.float(), (32,), weight.float(), 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).float(), expected, rtol=2**-8, atol=1e-3)
    big = (torch.randn(4000, 192) * 3).bfloat16()
    theirs = big * torch.rsqrt(big.square().mean(-1, keepdim=True) + 1e-6)  # rounded after every operation
    assert (query_norm(big, 1e-6) == theirs).double().mean() > 0.999
    assert torch.equal(query_norm(big.T.contiguous().T, 1e-6), query_norm(big, 1e-6))
