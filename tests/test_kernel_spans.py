"""Spans of words: the kernels and the references against Python's numbers."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels import backend
from kernels.cases.spans import make, moved, moved_in_torch
from kernels.spans import SPAN_WORDS, move_spans, sum_spans

torch.set_num_threads(1)


@pytest.fixture(autouse=True, params=["triton", "references"])
def chosen_backend(request: pytest.FixtureRequest) -> None:
    if request.param == "triton":
        request.getfixturevalue(triton_backend.__name__)
    else:
        backend.use(backend.REFERENCE)


@pytest.mark.parametrize("spans", [1, 6])
def test_every_word_lands_and_counts(spans: int) -> None:
    inputs = make(spans, DEVICE, 3)
    expected = moved_in_torch(inputs)
    assert all(map(torch.equal, moved(inputs), expected))


def test_nothing_beside_a_span_is_touched_or_summed() -> None:
    """Spans of one word, of a block and one more, a full one; words around them are poisoned."""
    counts = [1, 2049, SPAN_WORDS, 148]
    begins, ends_up = [5, 100, 3000, 40_000], [30_000, 7, 10_001, 5_001]
    source = torch.arange(-20_000, 30_000, dtype=torch.int32, device=DEVICE)
    target = torch.full((50_000,), -7, dtype=torch.int32, device=DEVICE)
    expected = target.clone()
    for begin, to, count in zip(begins, ends_up, counts, strict=True):
        expected[to : to + count] = source[begin : begin + count]
    table = [torch.tensor(numbers, device=DEVICE) for numbers in (begins, ends_up, counts)]
    move_spans(source, target, *table)
    assert torch.equal(target, expected)
    weights = torch.arange(SPAN_WORDS, device=DEVICE) * (1 << 50) + 1
    sums = torch.full((6,), -7, device=DEVICE)
    sum_spans(target, table[1], table[2], weights, sums[1:5])
    assert sums[0] == sums[5] == -7
    for total, begin, count in zip(sums[1:5].tolist(), begins, counts, strict=True):
        words = source[begin : begin + count].tolist()
        assert total % (1 << 64) == sum(word * (i * (1 << 50) + 1) for i, word in enumerate(words)) % (1 << 64)
