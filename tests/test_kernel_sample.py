"""Sampling on the device: the same tokens as the torch functions, row by row, whatever a row asks for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels import sample_triton
from kernels.cases.sample import neutral
from kernels.sample import Parameters, Sampled, noise_stream, sample, sample_reference

torch.set_num_threads(1)
on_triton = pytest.mark.usefixtures(triton_backend.__name__)
VOCAB = 1000  # sixteen groups, the last one partial


def logits_of(rows: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def parameters(rows: int, vocab: int = VOCAB, seed: int = 0, **values: list[float]) -> Parameters:
    return parameters_of(values, rows, vocab, seed)


def parameters_of(values: dict[str, list[float]], rows: int, vocab: int = VOCAB, seed: int = 0) -> Parameters:
    """Neutral ones with noise, and `values` by name, repeated over the rows."""
    made = neutral(rows, vocab, rows + 1, DEVICE, forbidden=8, biases=8)
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    made.stream.copy_(noise_stream(seeds, torch.zeros_like(seeds)))
    made.position.copy_(torch.randint(0, 1 << 20, (rows,), generator=generator))
    made.slots.copy_(torch.arange(rows).flip(0) + 1)
    for name, given in values.items():
        field = getattr(made, name)
        field.copy_(torch.tensor((given * rows)[:rows], dtype=field.dtype))
    return made


def same(got: Sampled, expected: Sampled, tops: int = -1) -> None:
    assert got.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(got.peak, expected.peak, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.model_peak, expected.model_peak, rtol=0, atol=0, equal_nan=True)
    if tops >= 0:
        assert got.top_ids.tolist() == expected.top_ids.tolist()
        torch.testing.assert_close(got.logprob, expected.logprob, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=1e-5)


def check(logits: Tensor, given: Parameters, draws: bool = True, edits: bool = False, tops: int = -1) -> Sampled:
    got = sample(logits, given, draws, edits, tops)
    same(got, sample_reference(logits, given, draws, edits, tops), tops)
    return got


@on_triton
@pytest.mark.parametrize("vocab", [5, 64, 65, 1000, 9000])
def test_greedy_takes_the_lowest_id_on_ties(vocab: int) -> None:
    logits = logits_of(4, vocab).round()
    logits[2] = -0.0
    logits[2, 3:] = 0.0
    logits[3] = -torch.inf
    logits[3, vocab - 1] = -1e30
    check(logits, parameters(4, vocab), draws=False, tops=min(20, vocab))


@on_triton
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": [0.0, 0.3, 1.0, 5.0, 1e6, 1e-30]},
        {"top_k": [1, 2, 17, 200, 999, 1000, 4000]},
        {"top_p": [0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]},
        {"min_p": [0.5, 0.1, 0.01, 1.0]},
        {"top_k": [0, 3, 50], "top_p": [0.7, 0.95], "min_p": [0.0, 0.02, 0.0, 0.2, 0.0], "temperature": [0.8, 1.5]},
    ],
)
def test_drawn_tokens_are_the_references(filters: dict[str, list[float]]) -> None:
    """Several positions, peaked and flat rows, rows of few distinct values (ties at every border)."""
    rows = 7
    for seed, scale in enumerate((3.0, 0.2)):
        logits = logits_of(rows, scale=scale, seed=seed)
        logits[::3] = (logits[::3] * 2).round() / 2
        check(logits, parameters_of({"temperature": [1.0]} | filters, rows, seed=seed))


@on_triton
def test_top_p_of_a_row_that_is_too_flat_for_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly equal logits: the tokens of top-p are not in the best groups, so the whole row is searched."""
    monkeypatch.setattr(sample_triton, "TOP_P_GROUPS", 4)
    monkeypatch.setattr(sample_triton, "ROW_TILE", 512)
    logits = logits_of(6, 3000, scale=0.01)
    check(logits, parameters(6, 3000, temperature=[1.0], top_p=[0.3, 0.9, 0.6]))


@on_triton
def test_top_k_beyond_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_triton, "MOST_GROUPS", 8)
    monkeypatch.setattr(sample_triton, "CANDIDATES", 128)
    monkeypatch.setattr(sample_triton, "ROW_TILE", 512)
    logits = logits_of(4, 1500, scale=0.5)
    logits[1] = 0.0  # everything ties
    check(logits, parameters(4, 1500, temperature=[1.0], top_k=[7, 8, 9, 600], top_p=[1.0, 0.5]))


@on_triton
def test_masks_then_bias_then_penalties() -> None:
    given = parameters(
        6,
        temperature=[0.0, 1.0],
        presence=[0.0, 0.5, -0.5],
        frequency=[0.0, 0.25],
        repetition=[1.0, 1.3, 1.0, 0.8],
        forbidden_counts=[0, 3, 1],
        bias_counts=[0, 0, 5, 8],
    )
    logits = logits_of(6)
    best = logits.argsort(-1, descending=True)[:, :16].int()
    given.forbidden.copy_(best[:, :8])
    given.bias_ids.copy_(best[:, 2:10])
    given.bias_values.copy_(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)) * 3)
    given.counts.copy_(torch.randint(-6, 6, given.counts.shape, generator=torch.Generator().manual_seed(2)).clamp(min=0))
    before = logits.clone()
    got = check(logits, given, edits=True, tops=3)
    assert torch.equal(logits, before), "log probabilities need the model's own"
    assert not torch.equal(got.peak, got.model_peak)


@on_triton
def test_rows_without_a_token_are_told_by_their_peaks() -> None:
    logits = logits_of(4)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 9] = torch.inf
    given = parameters(4, temperature=[1.0], top_p=[0.9], forbidden_counts=[0])
    got = sample(logits, given, True, True, 2)
    assert got.peak.isfinite().tolist() == [False, False, False, True] == got.model_peak.isfinite().tolist()
    assert bool(((got.ids >= 0) & (got.ids < VOCAB)).all())
    alone = sample_reference(
        logits[3:], Parameters(*(part_of(given, field.name) for field in fields(Parameters))), True, True, 2
    )
    assert got.ids[3:].tolist() == alone.ids.tolist()


def part_of(given: Parameters, name: str) -> Tensor:
    """The last row's share of a field."""
    field: Tensor = getattr(given, name)
    return field if name == "counts" else field[3:]


@on_triton
def test_a_row_does_not_see_the_others() -> None:
    """In any order, the same tokens and bit-equal numbers."""
    given = parameters(7, temperature=[0.0, 1.0, 2.0], top_p=[1.0, 0.8], top_k=[0, 0, 5], repetition=[1.0, 1.1])
    given.counts.copy_(torch.randint(0, 3, given.counts.shape, generator=torch.Generator().manual_seed(3)))
    logits, order = logits_of(7), torch.tensor([3, 6, 0, 5, 2, 1, 4], device=DEVICE)
    moved = Parameters(
        *(getattr(given, f.name) if f.name == "counts" else getattr(given, f.name)[order] for f in fields(Parameters))
    )
    first, second = sample(logits, given, tops=4), sample(logits[order], moved, tops=4)
    for field in fields(Sampled):
        assert torch.equal(getattr(first, field.name)[order], getattr(second, field.name)), field.name


@on_triton
def test_top_logprobs_break_ties_by_id() -> None:
    logits = logits_of(3, 300).round()
    got = check(logits, parameters(3, 300), draws=False, tops=20)
    logprobs = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(got.top_logprobs, logprobs.topk(20).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.logprob, logprobs.gather(1, got.ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)


@on_triton
def test_penalties_count_the_drafts_before_a_row() -> None:
    """As if they were in the counts, each as often as it is there."""
    given = parameters(4, 50, presence=[0.5], frequency=[0.25], repetition=[1.5, 1.0, 1.0])
    given.counts[given.slots[0], 4] = 3
    drafts = torch.tensor([[7, 9, 7, -1], [4, 4, 7, 4], [-1, -1, -1, -1], [4, -1, 0, 3]], device=DEVICE)
    logits = logits_of(4, 50)
    logits[:, [4, 7, 9, 49]] = torch.tensor([20.0, 19.75, 19.5, 19.25], device=DEVICE)  # close: a draft decides
    before = check(logits, given, draws=False, edits=True)
    given.drafts.copy_(drafts)
    got = check(logits, given, draws=False, edits=True)
    assert (got.ids != before.ids).tolist() == [True, True, False, True]
    counted = replace(given, drafts=torch.full_like(drafts, -1), counts=given.counts.clone())
    for row, tokens in enumerate(drafts.tolist()):
        for token in tokens:
            if token >= 0:
                counted.counts[given.slots[row], token] += 2
    same(got, sample_reference(logits, counted, False, True, -1))


def test_reference_does_no_more_than_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the CPU's sampler: a greedy step copies and sorts nothing."""
    for name in ("clone", "argsort", "log_softmax", "logsumexp"):
        monkeypatch.setattr(Tensor, name, lambda *_: pytest.fail("asked for nothing"))
    monkeypatch.setattr(torch, "log_softmax", lambda *_, **__: pytest.fail("asked for nothing"))
    logits = logits_of(3).cpu()
    assert sample_reference(logits, parameters(3), False, False, -1).ids.tolist() == logits.argmax(-1).tolist()


def test_reference_of_a_chosen_tokens_probability_alone() -> None:
    logits = logits_of(3).cpu()
    got = sample_reference(logits, parameters(3), False, False, 0)
    torch.testing.assert_close(got.logprob, torch.log_softmax(logits, dim=-1).amax(-1))
    assert got.top_ids.shape == got.top_logprobs.shape == (3, 0)


def test_reference_greedy_row_among_drawn_ones() -> None:
    """The reference itself: temperature 0 is argmax, also beside rows that draw."""
    logits = logits_of(3).cpu()
    given = parameters(3, temperature=[0.0, 1.0, 0.0])
    given = replace(given, **{field.name: getattr(given, field.name).cpu() for field in fields(Parameters)})
    ids = sample_reference(logits, given, True, True, -1).ids
    assert ids[0] == logits[0].argmax() and ids[2] == logits[2].argmax()
