"""What clients ask of the sampler, said for a whole step, and what comes back from it.

The sampler itself is `kernels/sample.py`; it reads each sequence's parameters from the table that `decode/words.py` fills.
The token is a function of the logits and of (seed, sample, position) alone, so it is the same in any batch and on any
worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.sequence import Sequence
from decode.step import Asks
from kernels.sequences import BIASES, FORBIDDEN, UNUSABLE
from kernels.sequences import EXCLUDED as EXCLUDED_STATUS
from wire.messages import SamplingParams

MOST_TOPS = 20  # log probabilities beside the chosen token's that the sampling kernel finds; its reference finds any number
EXCLUDED = "no token is left to choose: logit_bias and the stop tokens exclude all of them"
_ERRORS = {0: "", EXCLUDED_STATUS: EXCLUDED, UNUSABLE: "the model's logits are not usable: the largest of them is not finite"}


@dataclass(slots=True)
class Choice:
    """What a step came to for one sequence: its next tokens, one or more. Log probabilities are those of the model's own
    logits, before any of the client's changes (penalties, bias, temperature), as OpenAI and vLLM give them."""

    tokens: list[int]
    error: str = ""  # not empty: there is no token behind `tokens`, and this is why
    logprobs: list[float] | None = None  # one a token, as the next one
    tops: list[list[list[float]]] | None = None  # [id, logprob] each, most likely first, lowest id first on ties
    drafts: int = 0  # guesses that were compared with the tokens, whose last one is no guess


class Wishes:
    """What the sequences of a batch want of the sampler together; looked through once for as long as it stays the same."""

    def __init__(self, sequences: list[Sequence]) -> None:
        params = [sequence.sampling for sequence in sequences]
        self.sequences = sequences
        self._draws = any(p.temperature > 0 for p in params)
        self._edits = any(is_penalised(p) or p.logit_bias for p in params)
        self._tops = max((p.logprobs for p in params), default=-1)
        self._waiting = [sequence for sequence in sequences if not sequence.may_stop]

    def asks(self) -> Asks:
        edits = self._edits or any(not sequence.may_stop for sequence in self._waiting)
        return Asks(self._draws, edits, self._tops)


def is_penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def read_choices(sequences: list[Sequence], report: Tensor, tops: tuple[Tensor, Tensor]) -> list[Choice]:
    """One Choice a sequence, from what `decode.step.Step` reports of its first rows: report int32 [B, 2 + 2 T], tops [B T, K]
    each, both on the host."""
    report, longest = report[: len(sequences)], report.shape[1] // 2 - 1
    rows = report[:, : 2 + longest].tolist()
    choices = [Choice(ids[:count], _ERRORS[status]) for count, status, *ids in rows]
    if any(sequence.sampling.logprobs >= 0 for sequence in sequences):
        _score(sequences, choices, report[:, 2 + longest :].contiguous().view(torch.float32), tops)
    return choices


def _score(sequences: list[Sequence], choices: list[Choice], logprobs: Tensor, tops: tuple[Tensor, Tensor]) -> None:
    """Fills in the log probabilities of the sequences that asked. logprobs: [B, T]."""
    longest = logprobs.shape[1]
    ids, values = tops[0].tolist(), tops[1].tolist()
    for row, (sequence, choice, found) in enumerate(zip(sequences, choices, logprobs.tolist(), strict=True)):
        wanted = sequence.sampling.logprobs
        if wanted >= 0:
            rows = range(row * longest, row * longest + len(choice.tokens))
            choice.logprobs = found[: len(choice.tokens)]
            choice.tops = [list(map(list, zip(ids[r][:wanted], values[r][:wanted], strict=True))) for r in rows]


def complaint(params: SamplingParams, vocab_size: int, most_logprobs: int) -> str:
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
        ("logprobs", params.logprobs, -1, most_logprobs),
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
    return _too_many(params)


def _too_many(params: SamplingParams) -> str:
    """What does not fit into a sequence's part of the table."""
    biased, stops = len({token for token, _ in params.logit_bias}), len(set(params.stop_token_ids))
    if biased > BIASES:
        return f"logit_bias names {biased} tokens; at most {BIASES} can be changed"
    if params.min_tokens and stops > FORBIDDEN - 1:  # EOS is the last
        return (
            f"stop_token_ids has {stops} ids; with min_tokens at most {FORBIDDEN - 1} can be held back: send fewer, "
            f"or no min_tokens"
        )
    return ""
