"""From sequences and their logits to their next tokens: the only sampler of the system.

What a client asked for becomes tensors once per batch composition (`_Plan`); per step only counts and positions move.
The token is a function of the logits and of (seed, sample, position) alone, so it is the same in any batch and on any
worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.sequence import Sequence
from kernels.sample import Counts, Draw, bias, draw, forbid, greedy, noise_stream, penalize, top_logprobs, uniform, weights
from wire.messages import SamplingParams

EXCLUDED = "no token is left to choose: logit_bias and the stop tokens exclude all of them"


@dataclass(slots=True)
class Choice:
    """What a row of logits came to. Log probabilities are those of the model's own logits, before any of the client's
    changes (penalties, bias, temperature), as OpenAI and vLLM give them."""

    token: int
    error: str = ""  # not empty: the row has no token, and this is why
    logprob: float | None = None
    tops: list[list[float]] | None = None  # [id, logprob], most likely first, lowest id first on ties


@dataclass(slots=True)
class _Plan:
    """What does not change while the batch holds the same sequences."""

    sequences: list[Sequence]
    penalized: list[int]  # row numbers
    waiting: list[int]  # rows that may not stop yet
    bias: tuple[Tensor, Tensor, Tensor] | None
    drawn: list[int]
    rows: Tensor  # int64 [len(drawn)], as is the next one
    streams: Tensor  # their noise
    draw: Draw
    scored: list[int]  # rows that want log probabilities
    top_k: int


class Sampler:
    """Chooses the next token of every sequence of a step."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._plan = self._make_plan([])

    def sample(self, sequences: list[Sequence], logits: Tensor) -> list[Choice]:
        """One Choice per sequence. logits: float32 [len(sequences), vocab]; changed in place."""
        if self._plan.sequences != sequences:
            self._plan = self._make_plan(list(sequences))
        plan = self._plan
        peaks, ids = greedy(logits)
        errors = [_unusable(peak) for peak in peaks.tolist()]
        original = logits[plan.scored] if plan.scored else None
        if self._change(plan, logits):
            peaks, ids = greedy(logits)
            errors = [error or _excluded(peak) for error, peak in zip(errors, peaks.tolist(), strict=True)]
        if plan.drawn:
            drawn = self._draw(plan, logits)
            ids = drawn if len(drawn) == len(ids) else ids.index_copy(0, plan.rows, drawn)
        choices = [Choice(token, error) for token, error in zip(ids.tolist(), errors, strict=True)]
        if original is not None:
            _score(plan, original, ids, choices)
        return choices

    def _change(self, plan: _Plan, logits: Tensor) -> bool:
        """Masks, then bias, then penalties; False when nobody asked for any."""
        waiting = [row for row in plan.waiting if not _may_stop(plan.sequences[row])]
        places = [(row, token) for row in waiting for token in plan.sequences[row].stopping_ids()]
        if places:
            rows, ids = torch.tensor(places, device=self._device).T
            forbid(logits, rows, ids)
        if plan.bias is not None:
            bias(logits, *plan.bias)
        if plan.penalized:
            penalize(logits, self._counts(plan))
        return bool(plan.penalized or plan.bias is not None or places)

    def _counts(self, plan: _Plan) -> Counts:
        histories = [history for row in plan.penalized if (history := plan.sequences[row].history) is not None]
        params = [plan.sequences[row].sampling for row in plan.penalized]
        sizes = torch.tensor([len(history.ids) for history in histories])
        per_row = torch.tensor([[p.presence_penalty, p.frequency_penalty, p.repetition_penalty] for p in params])
        presence, frequency, repetition = per_row.repeat_interleave(sizes, dim=0).to(self._device).T
        return Counts(
            torch.tensor(plan.penalized).repeat_interleave(sizes).to(self._device),
            torch.cat([history.ids for history in histories]).to(self._device),
            torch.cat([history.counts for history in histories]).to(self._device),
            presence,
            frequency,
            repetition,
        )

    def _draw(self, plan: _Plan, logits: Tensor) -> Tensor:
        positions = torch.tensor([len(plan.sequences[row].tokens) for row in plan.drawn], device=self._device)
        noise = uniform(plan.streams, positions)
        picked = logits if len(plan.drawn) == len(plan.sequences) else logits[plan.rows]
        return draw(weights(picked, plan.draw), noise)

    def _make_plan(self, sequences: list[Sequence]) -> _Plan:
        params = [sequence.sampling for sequence in sequences]
        drawn = [row for row, p in enumerate(params) if p.temperature > 0]
        chosen = [params[row] for row in drawn]
        scored = [row for row, p in enumerate(params) if p.logprobs >= 0]
        return _Plan(
            sequences=sequences,
            penalized=[row for row, sequence in enumerate(sequences) if sequence.history is not None],
            waiting=[row for row, sequence in enumerate(sequences) if not _may_stop(sequence)],
            bias=self._bias(params),
            drawn=drawn,
            rows=self._tensor(drawn),
            streams=noise_stream(
                self._tensor([_int64(p.seed) for p in chosen]), self._tensor([sequences[row].sample for row in drawn])
            ),
            draw=Draw.build(
                [p.temperature for p in chosen],
                [p.top_k for p in chosen],
                [p.top_p for p in chosen],
                [p.min_p for p in chosen],
                self._device,
            ),
            scored=scored,
            top_k=max((params[row].logprobs for row in scored), default=0),
        )

    def _bias(self, params: list[SamplingParams]) -> tuple[Tensor, Tensor, Tensor] | None:
        entries = [(row, token, value) for row, p in enumerate(params) for token, value in p.logit_bias]
        if not entries:
            return None
        rows, ids, values = zip(*entries, strict=True)
        return self._tensor(rows), self._tensor(ids), torch.tensor(values, dtype=torch.float32, device=self._device)

    def _tensor(self, values: list[int] | tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _may_stop(sequence: Sequence) -> bool:
    return sequence.generated >= sequence.sampling.min_tokens


def _int64(seed: int) -> int:
    """Any integer as the int64 of the same low 64 bits."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


def _unusable(peak: float) -> str:
    return "" if math.isfinite(peak) else f"the model's logits are not usable: the largest of them is {peak}"


def _excluded(peak: float) -> str:
    return "" if math.isfinite(peak) else EXCLUDED


def _score(plan: _Plan, logits: Tensor, ids: Tensor, choices: list[Choice]) -> None:
    """Fills in the log probabilities of the rows that asked. logits: [len(plan.scored), vocab], unchanged ones."""
    chosen, top_ids, top_values = top_logprobs(logits, ids[plan.scored], plan.top_k)
    found = zip(plan.scored, chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    for row, logprob, row_ids, row_values in found:
        wanted = plan.sequences[row].sampling.logprobs
        tops = [[token, value] for token, value in zip(row_ids, row_values, strict=True)]
        tops.sort(key=lambda top: (-top[1], top[0]))
        choices[row].logprob, choices[row].tops = logprob, tops[:wanted]


def complaint(params: SamplingParams, vocab_size: int) -> str:
    """What is wrong with a client's parameters and what to change; empty when they can be sampled with."""
    ranges = (
        ("max_tokens", params.max_tokens, 0, math.inf),
        ("min_tokens", params.min_tokens, 0, math.inf),
        ("temperature", params.temperature, 0, 1e6),
        ("top_p", params.top_p, 0, 1),
        ("top_k", params.top_k, 0, 2**31),
        ("min_p", params.min_p, 0, 1),
        ("presence_penalty", params.presence_penalty, -1e6, 1e6),
        ("frequency_penalty", params.frequency_penalty, -1e6, 1e6),
        ("repetition_penalty", params.repetition_penalty, 1e-6, 1e6),
        ("logprobs", params.logprobs, -1, vocab_size),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # NaN is in no range
            return f"{name} is {value}; it must be between {low:g} and {high:g}"
    for token, value in params.logit_bias:
        if not 0 <= token < vocab_size or math.isnan(value) or value == math.inf:
            return f"logit_bias of token {token} is {value}; ids run from 0 to {vocab_size - 1}, and values are numbers"
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            return f"stop_token_ids has {token}; ids run from 0 to {vocab_size - 1}"
    return ""
