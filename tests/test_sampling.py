"""The sampler: every filter against a plain numpy version, the draw's distribution, and independence of the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from decode.config import DecodeConfig
from decode.engine import Engine
from decode.room import make_engine
from decode.sampling import Choice, complaint
from decode.sequence import Sequence
from kernels.sample import Draw, draw, noise_stream, uniform, weights
from kvtransfer.layout import Field, KVLayout
from kvtransfer.pages import SeqKV
from model.batch import Batch
from wire.messages import SamplingParams

EOS = 1
GREEDY = SamplingParams(max_tokens=100, seed=0, temperature=0.0)
DRAWN = SamplingParams(max_tokens=100, seed=0)
Floats = NDArray[np.float64]


def sequence(
    params: SamplingParams, prompt: list[int] | None = None, generated: list[int] | None = None, sample: int = 0
) -> Sequence:
    prompt = [5, 6, 7] if prompt is None else prompt
    return Sequence(
        key=(1, 0),
        sample=sample,
        serial=(1, sample),
        tokens=prompt + (generated or []),
        prompt_tokens=len(prompt),
        sampling=params,
        eos_token_id=EOS,
        kv=SeqKV(1),
        router_inbox="",
        deadline_s=math.inf,
        arrived_s=0.0,
    )


class GivenLogits:
    """Stands in for model.runner.Runner: row r of every step has the logits `rows`[r]. It has no KV."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.config = SimpleNamespace(vocab_size=rows.shape[1], max_position_embeddings=4096)
        self.layout = KVLayout.pack(256, [Field(0, "token", 0, 256, 1, stride=1)], [Field(0, "tail", 0, 1, 1, keep=1)])
        self.arena = SimpleNamespace(pages=torch.zeros(2, 1), slots=torch.zeros(len(rows) + 1, 1))

    def make_invariant(self, most_rows: int) -> None: ...

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.slots

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        return self.rows[: len(streams)]


def engine_of(sequences: list[Sequence], logits: torch.Tensor) -> Engine:
    """An engine that gives sequence n `logits`[n] in every step."""
    for number, each in enumerate(sequences, 1):
        each.kv = SeqKV(number, [1])
    runner: Any = GivenLogits(logits)
    count = len(sequences)
    config = DecodeConfig(model="", router="tcp://127.0.0.1:1", num_pages=2, num_slots=count + 1, max_batch=count)
    return make_engine(config, runner, depth=0)


def step(engine: Engine, sequences: list[Sequence]) -> list[Choice]:
    engine.launch(sequences)
    found, choices = engine.collect()
    assert found == sequences
    return choices


def choose(sequences: list[Sequence], logits: torch.Tensor) -> list[Choice]:
    """One step of a table that knew nothing of the sequences."""
    before = logits.clone()
    choices = step(engine_of(sequences, logits), sequences)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return choices


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# --- the noise


def splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_splitmix64_has_its_published_first_outputs() -> None:
    """The generator seeded with 1234567 (reference output of the public-domain implementation)."""
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state += 0x9E3779B97F4A7C15
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
@settings(max_examples=200, deadline=None)
def test_uniform_is_the_documented_hash(seed: int, sample: int, position: int) -> None:
    mask = (1 << 64) - 1
    bits = splitmix64(splitmix64(splitmix64(seed & mask) ^ sample) ^ position)
    found = uniform(noise_stream(torch.tensor([seed]), torch.tensor([sample])), torch.tensor([position]))
    assert found.item() == (bits >> 12) * 2.0**-52
    assert 0 <= found.item() < 1


def test_uniform_is_uniform_over_positions_samples_and_seeds() -> None:
    numbers = torch.arange(100_000)
    zeros = torch.zeros_like(numbers)
    for seed, sample, position in ((numbers, zeros, zeros), (zeros, numbers, zeros), (zeros, zeros, numbers)):
        noise = uniform(noise_stream(seed, sample), position)
        counts = torch.histc(noise, bins=100, min=0, max=1)
        chi_square = float(((counts - 1000) ** 2 / 1000).sum())
        assert chi_square < 160, chi_square  # 99 degrees of freedom: 1 in 10,000 is above 158
        neighbours = torch.corrcoef(torch.stack((noise[:-1], noise[1:])))[0, 1]
        assert abs(float(neighbours)) < 0.015


# --- filters, against numpy


def kept_by_numpy(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> Floats:
    """The same distribution by sorting and looping, one row."""
    weight = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    likely = [i for i in order if weight[i] >= min_p]
    keep = likely[:top_k] if top_k else likely
    total, reached = sum(weight[i] for i in keep), 0.0
    nucleus: list[int] = []
    for i in keep:
        if nucleus and top_p < 1 and reached >= top_p * total:
            break
        nucleus.append(i)
        reached += weight[i]
    out: Floats = np.zeros_like(weight)
    for i in nucleus:
        out[i] = weight[i]
    return out


@given(
    st.integers(0, 10_000),
    st.integers(1, 60),
    st.floats(0.05, 5),
    st.integers(0, 70),
    st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.9, 0.99]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_filters_agree_with_numpy(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    logits = random_logits(3, vocab, seed)
    if ties:
        logits = logits.round()
    parameters = Draw.build([1.0, temperature, 2.0], [0, top_k, 3], [1.0, top_p, 0.7], [0.0, min_p, 0.0])
    found = weights(logits, parameters)[1].numpy()
    expected = kept_by_numpy(logits[1].double().numpy(), temperature, top_k, top_p, min_p)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-300)


def test_filters_of_one_row_leave_the_others_alone() -> None:
    logits = random_logits(2, 50)
    plain = weights(logits, Draw.build([1.0, 1.0], [0, 0], [1.0, 1.0], [0.0, 0.0]))
    mixed = weights(logits, Draw.build([1.0, 1.0], [0, 2], [1.0, 0.5], [0.0, 0.1]))
    assert torch.equal(plain[0], mixed[0])
    assert int((mixed[1] > 0).sum()) <= 2


def test_top_k_keeps_exactly_k_on_ties_and_the_lowest_ids() -> None:
    weight = weights(torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 2.0]]), Draw.build([1.0], [3], [1.0], [0.0]))
    assert weight[0].nonzero().flatten().tolist() == [1, 2, 3]


# --- the draw


def test_draw_is_the_inverse_cdf_in_id_order() -> None:
    weight = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]]).double().expand(7, -1)
    noise = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.999, 1 - 2.0**-52], dtype=torch.float64)
    assert draw(weight.contiguous(), noise).tolist() == [1, 1, 3, 3, 4, 4, 4]


def test_draw_never_gives_a_dropped_token_even_at_the_edges() -> None:
    for peak in (1.0, 1 + 2.0**-52, 1.5, 2 - 2.0**-52):
        weight = torch.tensor([[0.0, 1e-300, 0.0, peak, 0.0]], dtype=torch.float64)
        assert int(draw(weight, torch.zeros(1, dtype=torch.float64))) == 1
        assert int(draw(weight, torch.tensor([1 - 2.0**-52], dtype=torch.float64))) == 3


@pytest.mark.parametrize("params", [DRAWN, replace(DRAWN, temperature=0.7, top_p=0.8), replace(DRAWN, top_k=4, min_p=0.05)])
def test_drawn_tokens_have_the_distribution_that_was_asked_for(params: SamplingParams) -> None:
    logits = random_logits(1, 12, seed=3)
    draws = 20_000
    sequences = [sequence(replace(params, seed=seed)) for seed in range(draws)]
    tokens = [choice.tokens[0] for choice in choose(sequences, logits.expand(draws, -1))]
    weight = kept_by_numpy(logits[0].double().numpy(), params.temperature, params.top_k, params.top_p, params.min_p)
    expected = weight / weight.sum() * draws
    counts = np.bincount(tokens, minlength=12)
    assert not counts[expected == 0].any()
    chi_square = float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())
    assert chi_square < 40, (chi_square, counts, expected)  # 11 degrees of freedom: 1 in 10,000 is above 37


def test_token_depends_on_seed_sample_and_position_alone() -> None:
    params = replace(DRAWN, seed=9, temperature=1.5)
    logits = random_logits(40, 30, seed=5)
    rows = [sequence(replace(params, seed=n % 3), generated=[4] * (n % 5), sample=n % 4) for n in range(40)]
    together = [choice.tokens for choice in choose(rows, logits)]
    alone = [choose([row], logits[n : n + 1])[0].tokens for n, row in enumerate(rows)]
    turned = [choice.tokens for choice in choose(rows[::-1], logits.flip(0))][::-1]
    assert together == alone == turned
    same = logits[:1].expand(60, -1)
    assert len({c.tokens[0] for c in choose([sequence(params, sample=n) for n in range(60)], same)}) > 5
    assert len({c.tokens[0] for c in choose([sequence(params, generated=[2] * n) for n in range(60)], same)}) > 5


def test_any_integer_is_a_seed() -> None:
    logits = random_logits(4, 30)
    seeds = (-1, 2**64 - 1, 2**63, -(2**70))
    tokens = [
        choice.tokens for choice in choose([sequence(replace(DRAWN, seed=seed)) for seed in seeds], logits[:1].expand(4, -1))
    ]
    assert tokens[0] == tokens[1]  # the same low 64 bits


# --- greedy, penalties, bias, masks


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.tensor([[0.0, 2.0, 5.0, 5.0], [7.0, 7.0, 7.0, 7.0]])
    assert [c.tokens for c in choose([sequence(GREEDY), sequence(GREEDY)], logits)] == [[2], [0]]


def penalized_by_numpy(logits: Floats, params: SamplingParams, prompt: list[int], generated: list[int]) -> Floats:
    out = logits.copy()
    if len(generated) < params.min_tokens:
        out[[*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]] = -np.inf
    for token, value in params.logit_bias:
        out[token] += value
    for token in {*prompt, *generated}:
        out[token] = out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
    for token in set(generated):
        out[token] -= params.presence_penalty + params.frequency_penalty * generated.count(token)
    return out


@given(
    st.integers(0, 10_000),
    st.lists(st.integers(0, 19), min_size=1, max_size=8),
    st.lists(st.integers(0, 19), max_size=12),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from([0.0, 0.25, -0.3]),
    st.sampled_from([1.0, 1.3, 0.8]),
    st.sampled_from([(), ((3, 4.0), (7, -100.0))]),
    st.integers(0, 6),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_greedy_with_penalties_agrees_with_numpy(
    seed: int,
    prompt: list[int],
    generated: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: tuple[tuple[int, float], ...],
    min_tokens: int,
    ignore_eos: bool,
) -> None:
    params = replace(
        GREEDY,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=(4, 9),
    )
    grown = sequence(params, prompt)
    for token in generated:  # the history of a sequence that generates equals that of one that was retried
        grown.append(token)
    retried = sequence(params, prompt, generated)
    logits = random_logits(3, 20, seed)
    found = choose([grown, sequence(GREEDY), retried], torch.stack((logits[0], logits[1], logits[0])))
    changed = penalized_by_numpy(logits[0].numpy().astype(np.float64), params, prompt, generated)
    best = np.flatnonzero(changed >= changed.max() - 1e-5)
    assert found[0].tokens[0] in best
    assert found[2].tokens == found[0].tokens
    assert found[1].tokens == [int(logits[1].argmax())]


def test_bias_comes_before_penalties() -> None:
    """As in vLLM V1: a bias that makes a logit positive is then divided by the repetition penalty."""
    params = replace(GREEDY, repetition_penalty=2.0, logit_bias=((2, 10.0),))
    logits = torch.tensor([[0.0, 0.0, -1.0, 5.0]])  # token 2: (-1 + 10) / 2 = 4.5; penalised first it would be -2 + 10 = 8
    assert choose([sequence(params, [2])], logits)[0].tokens == [3]


def test_min_p_comes_before_top_p() -> None:
    """As in vLLM V1: top-p is a share of what min-p has left. 0.5, 0.3 and 0.2: of 0.8, the first is 0.625."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = weights(logits, Draw.build([1.0], [0], [0.6], [0.5]))
    assert (kept[0] > 0).tolist() == [True, False, False]


def test_the_table_counts_as_the_sequence_grows() -> None:
    """A sequence that has generated here and one that comes back with its text penalise the same tokens."""
    params = replace(
        DRAWN, max_tokens=1000, temperature=2.0, frequency_penalty=0.2, presence_penalty=0.3, repetition_penalty=1.2
    )
    logits = random_logits(2, 30)
    grown = sequence(params, [3, 3, 4])
    engine, texts = engine_of([grown], logits[:1]), []
    for _ in range(120):
        [choice] = step(engine, [grown])
        texts.append(choice.tokens)
        if len(texts) % 20 == 1:
            assert choose([sequence(params, [3, 3, 4], grown.tokens[3:])], logits[:1])[0].tokens == choice.tokens
        grown.extend(choice.tokens)
    assert len({text[0] for text in texts}) > 20
    counts = np.bincount(grown.tokens[3:], minlength=30) * 2
    counts[[3, 4]] += 1
    assert engine.table.counts[1].tolist() == counts.tolist()


def test_min_tokens_forbids_stopping_until_it_is_reached() -> None:
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(3,))
    logits = torch.tensor([[0.0, 9.0, 1.0, 8.0]])
    row, tokens, reasons = sequence(params), [], []
    engine = engine_of([row], logits)
    for _ in range(3):
        [token] = step(engine, [row])[0].tokens
        tokens.append(token)
        reasons.append(row.append(token))
    assert (tokens, reasons) == ([2, 2, 1], ["", "", "stop"])


def test_finish_reasons() -> None:
    assert sequence(GREEDY).append(EOS) == "stop"
    assert sequence(replace(GREEDY, ignore_eos=True)).append(EOS) == ""
    assert sequence(replace(GREEDY, ignore_eos=True, stop_token_ids=(EOS,))).append(EOS) == "stop"
    assert sequence(replace(GREEDY, stop_token_ids=(8,))).append(8) == "stop"
    assert sequence(replace(GREEDY, max_tokens=1)).append(8) == "length"
    assert sequence(replace(GREEDY, max_tokens=1)).append(EOS) == "stop"
    assert sequence(replace(GREEDY, max_tokens=4), generated=[2, 2]).append(8) == ""
    assert sequence(replace(GREEDY, max_tokens=4), generated=[2, 2, 2]).append(8) == "length"


# --- log probabilities


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    params = replace(DRAWN, logprobs=3, temperature=0.3, logit_bias=((2, 50.0),), presence_penalty=1.0)
    logits = random_logits(3, 25, seed=8)
    choices = choose([sequence(GREEDY), sequence(params, generated=[2, 2]), sequence(replace(GREEDY, logprobs=0))], logits)
    reference = torch.log_softmax(logits.double(), dim=-1)
    assert choices[0].logprobs is None and choices[0].tops is None
    assert choices[1].tokens == [2] and choices[1].logprobs == pytest.approx([float(reference[1, 2])], abs=1e-5)
    values, ids = reference[1].topk(3)
    assert choices[1].tops is not None and [top[0] for top in choices[1].tops[0]] == ids.tolist()
    assert [top[1] for top in choices[1].tops[0]] == pytest.approx(values.tolist(), abs=1e-5)
    assert choices[2].tops == [[]] and choices[2].logprobs == pytest.approx([float(reference[2].max())], abs=1e-5)


def test_top_logprobs_order_ties_by_id() -> None:
    choice = choose([sequence(replace(GREEDY, logprobs=3))], torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]))[0]
    assert choice.tops is not None and [top[0] for top in choice.tops[0]] == [1, 2, 3]


# --- bad rows


@pytest.mark.parametrize("params", [GREEDY, DRAWN, replace(DRAWN, top_p=0.9, top_k=3, logprobs=2)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_a_number_fails_alone(params: SamplingParams, poison: float) -> None:
    logits = random_logits(3, 10)
    healthy = choose([sequence(params) for _ in range(3)], logits)
    logits[1, 4] = poison
    choices = choose([sequence(params) for _ in range(3)], logits)
    assert "logits are not usable" in choices[1].error and choices[1].tokens == []
    assert [(c.tokens, c.error) for c in (choices[0], choices[2])] == [(healthy[0].tokens, ""), (healthy[2].tokens, "")]
    assert len(healthy[0].tokens) == len(healthy[2].tokens) == 1


def test_a_row_with_nothing_left_says_so() -> None:
    everything = replace(DRAWN, min_tokens=3, stop_token_ids=tuple(range(6)))
    choices = choose([sequence(everything), sequence(GREEDY)], random_logits(2, 6))
    assert "exclude all" in choices[0].error and not choices[1].error


def test_complaints_name_the_field() -> None:
    bad = {
        "temperature": math.nan,
        "top_p": 1.5,
        "top_k": -1,
        "min_p": 2.0,
        "repetition_penalty": 0.0,
        "presence_penalty": math.inf,
        "logprobs": 1000,
        "max_tokens": -1,
        "min_tokens": -1,
        "logit_bias": ((100, 1.0),),
        "stop_token_ids": (100,),
    }
    for name, value in bad.items():
        assert name in complaint(replace(DRAWN, **{name: value}), 100, 100)  # type: ignore[arg-type]
    assert complaint(replace(DRAWN, logit_bias=((99, -100.0),), stop_token_ids=(0,), logprobs=20), 100, 20) == ""
    assert "logprobs" in complaint(replace(DRAWN, logprobs=21), 100, 20)


def test_what_does_not_fit_into_the_table_is_refused() -> None:
    stops = replace(DRAWN, stop_token_ids=tuple(range(16)))
    assert complaint(stops, 1000, 20) == "", "without min_tokens any number will do"
    assert "15 can be held back" in complaint(replace(stops, min_tokens=1), 1000, 20)
    assert complaint(replace(stops, min_tokens=1, stop_token_ids=tuple(range(15)) * 2), 1000, 20) == ""
    assert complaint(replace(DRAWN, logit_bias=tuple((n, 1.0) for n in range(512)) * 2), 1000, 20) == ""
    assert "512" in complaint(replace(DRAWN, logit_bias=tuple((n, 1.0) for n in range(513))), 1000, 20)
