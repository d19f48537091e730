"""From logits to token ids, for many rows at once, each row with its own parameters.

The order is that of vLLM V1: masks and bias change the logits, then penalties; temperature scales them; min-p, top-k and
top-p drop tokens in this order, each from what the one before has left; one uniform number picks from the rest. Every
row is computed from its own data alone, so a row's token does not depend on which other rows share the step.

`sample`, at the end of the file, is what decode calls: a row's parameters in tensors of fixed shapes, as a captured step wants
them. The functions before it are its reference and a CPU's sampler; penalties and masks are sparse there (lists of places).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import backend
from kernels.sample_triton import sample_rows

_NO_TOKEN = float("-inf")


def noise_stream(seed: Tensor, sample: Tensor) -> Tensor:
    """The noise stream of each row's sequence: int64 [R] from int64 [R] each. It does not change while that runs."""
    return _mix(_mix(seed) ^ sample)


def uniform(stream: Tensor, position: Tensor) -> Tensor:
    """One number in [0, 1) per row: float64 [R] from `noise_stream` and the position of the new token, int64 [R].

    A counter-based generator, so a pure function of (seed, sample, position): the splitmix64 finaliser (Vigna 2015,
    constants of Stafford's mix 13) chained over the three; the upper 52 bits are the fraction. Not 53: the product of
    a float64 and 1 - 2^-52 always rounds to less than that float64, which `draw` counts on.
    """
    return _shift(_mix(stream ^ position), 12).double() * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    """One splitmix64 step, a bijection of 64 bits; int64 arithmetic wraps around as uint64 does."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


@dataclass(frozen=True, slots=True)
class Counts:
    """What penalties look at, as distinct places (row, id) of the logits: all tensors are [K], one entry a place."""

    rows: Tensor  # int64
    ids: Tensor  # int64
    generated: Tensor  # float32: how often the row has generated the id; 0 for an id of the prompt alone
    presence: Tensor  # float32, the row's parameter, as are the next two
    frequency: Tensor
    repetition: Tensor


def penalize(logits: Tensor, counts: Counts) -> None:
    """Applies repetition, then frequency and presence penalties in place. logits: float32 [R, V].

    Repetition (CTRL, Keskar et al. 2019) divides positive logits and multiplies negative ones; OpenAI's two subtract
    ``frequency * count + presence * (count > 0)``.
    """
    values = logits[counts.rows, counts.ids]
    values = torch.where(values > 0, values / counts.repetition, values * counts.repetition)
    values -= counts.frequency * counts.generated + counts.presence * (counts.generated > 0)
    logits[counts.rows, counts.ids] = values


def bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Adds float32 `values` [K] at the places (rows, ids), in place; a place named twice gets both."""
    logits.index_put_((rows, ids), values, accumulate=True)


def forbid(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Makes the places (rows, ids) impossible to draw, in place."""
    logits[rows, ids] = _NO_TOKEN


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its id, the lowest id on ties: float32 [R], int64 [R]. NaN wins if there is one."""
    values, ids = logits.max(dim=-1)
    return values, ids


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter that only some rows ask for: int64 row numbers [K] and each one's parameter [K]."""

    rows: Tensor
    values: Tensor
    largest: float

    @classmethod
    def build(cls, values: Sequence[float], off: float, dtype: torch.dtype, device: torch.device | str) -> Filter | None:
        """From one parameter a row; None when all of them are `off`."""
        rows = [row for row, value in enumerate(values) if value != off]
        if not rows:
            return None
        picked = [values[row] for row in rows]
        return cls(torch.tensor(rows, device=device), torch.tensor(picked, dtype=dtype, device=device), max(picked))


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters of the rows that draw."""

    temperature: Tensor  # float64 [R], above 0
    top_k: Filter | None  # int64 values
    top_p: Filter | None  # float64
    min_p: Filter | None  # float64

    @classmethod
    def build(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> Draw:
        """From one value a row; top_k 0, top_p 1 and min_p 0 are off."""
        return cls(
            torch.tensor(temperature, dtype=torch.float64, device=device),
            Filter.build(top_k, 0, torch.int64, device),
            Filter.build(top_p, 1.0, torch.float64, device),
            Filter.build(min_p, 0.0, torch.float64, device),
        )


def weights(logits: Tensor, parameters: Draw) -> Tensor:
    """Unnormalised probabilities after temperature and filters: float64 [R, V], 0 for a token that is dropped.

    logits: float32 [R, V]; the likeliest token of a row weighs exactly 1. At least one token of a row is kept.
    """
    peak = logits.max(dim=-1, keepdim=True).values.double()
    weight = ((logits.double() - peak) / parameters.temperature[:, None]).exp_()
    if parameters.min_p is not None:  # p / p_max is the weight itself
        rows, least = parameters.min_p.rows, parameters.min_p.values
        picked = weight[rows]
        weight[rows] = torch.where(picked >= least[:, None], picked, 0.0)
    if parameters.top_k is not None:
        _keep_top_k(weight, logits, parameters.top_k)
    if parameters.top_p is not None:
        _keep_top_p(weight, parameters.top_p)
    return weight


def draw(weight: Tensor, noise: Tensor) -> Tensor:
    """Inverse CDF in the order of the ids: int64 [R] from `weight` float64 [R, V] and `noise` [R] of `uniform`."""
    cumulative = weight.cumsum(dim=-1)
    ids = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return ids.clamp_(max=weight.shape[1] - 1)  # a row of NaN is reported by the caller; its id must still be one


def _keep_top_k(weight: Tensor, logits: Tensor, top_k: Filter) -> None:
    """Zeroes all but the k largest; of equal ones at the border the lowest ids stay."""
    limit = min(int(top_k.largest), logits.shape[1])
    picked = logits[top_k.rows]
    kth = top_k.values.clamp(max=limit)[:, None]
    border = picked.topk(limit, dim=-1).values.gather(1, kth - 1)
    above, equal = picked > border, picked == border
    room = kth - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=-1) <= room))
    weight[top_k.rows] = torch.where(keep, weight[top_k.rows], 0.0)


def _keep_top_p(weight: Tensor, top_p: Filter) -> None:
    """Zeroes all but the smallest set of the likeliest tokens whose share reaches p; lower ids first on ties."""
    ordered, order = weight[top_p.rows].sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    keep = torch.ones_like(ordered, dtype=torch.bool)  # the first one always stays
    keep[:, 1:] = cumulative[:, :-1] < top_p.values[:, None] * cumulative[:, -1:]
    kept = torch.where(keep, ordered, 0.0)
    weight[top_p.rows] = torch.zeros_like(kept).scatter_(1, order, kept)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What `sample` reads of each row, on the device and of fixed shapes: a captured step finds new values in place.

    counts is indexed by slot, not by row, so that it stays where it is when rows move: 2 * (how often the id was generated)
    + (1 if the prompt has it). The lists hold distinct ids; the first `..._counts` of a row count.
    """

    temperature: Tensor  # float64 [R]; 0: greedy
    top_k: Tensor  # int32 [R]; 0: off
    top_p: Tensor  # float64 [R]; 1: off
    min_p: Tensor  # float64 [R]; 0: off
    presence: Tensor  # float32 [R]; 0: off
    frequency: Tensor  # float32 [R]; 0: off
    repetition: Tensor  # float32 [R]; 1: off
    slots: Tensor  # int64 [R], rows of counts
    counts: Tensor  # int32 [slots, V]
    drafts: Tensor  # int64 [R, D], tokens generated since that are not in counts yet; -1: none
    forbidden: Tensor  # int32 [R, F]
    forbidden_counts: Tensor  # int32 [R]
    bias_ids: Tensor  # int32 [R, B]
    bias_values: Tensor  # float32 [R, B]
    bias_counts: Tensor  # int32 [R]
    stream: Tensor  # int64 [R], from `noise_stream`
    position: Tensor  # int64 [R], of the new token


@dataclass(frozen=True, slots=True)
class Sampled:
    """ids int64 [R]. The peaks, float32 [R], are the largest logit of the row as the model gave it and after the client's
    changes: a row whose peak is not finite has no token (its id is still one of the vocabulary). Log probabilities are of
    the model's own logits, of the chosen token float32 [R] and of the likeliest int64 and float32 [R, tops], lowest id first
    on ties; where none were asked for, logprob means nothing (zeros from the reference, anything from the kernels)."""

    ids: Tensor
    model_peak: Tensor
    peak: Tensor
    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def sample(logits: Tensor, parameters: Parameters, draws: bool = True, edits: bool = True, tops: int = -1) -> Sampled:
    """One token a row of float32 logits [R, V], which are left as they are. Captured in a graph it reads only tensors.

    draws, edits: whether any row may have a temperature, or penalties, bias or forbidden ids: without them there is less to
    start. tops: how many log probabilities beside the chosen token's, at most 20; -1 for none at all.

    Greedy tokens are the reference's. A drawn token differs from the reference's only where rounding moves a border past
    the noise: a weight is off by at most 1e-5 of itself (its exponent is a float32) plus 2^-44 of the likeliest token's.
    """
    if not backend.active().triton:
        return sample_reference(logits, parameters, draws, edits, tops)
    return Sampled(*sample_rows(logits, parameters, draws, edits, tops))


def sample_reference(logits: Tensor, parameters: Parameters, draws: bool, edits: bool, tops: int) -> Sampled:
    """`sample` from the functions above."""
    p, changed = parameters, logits
    model_peak, ids = greedy(logits)
    peak = model_peak
    if edits:
        changed = logits.clone()
        _edit(changed, p)
        peak, ids = greedy(changed)
    rows = torch.nonzero(p.temperature > 0).flatten() if draws else ids[:0]
    if len(rows):
        temperature, top_k, top_p, min_p = (x[rows].tolist() for x in (p.temperature, p.top_k, p.top_p, p.min_p))
        filters = Draw.build(temperature, top_k, top_p, min_p, logits.device)
        drawn = draw(weights(changed[rows], filters), uniform(p.stream[rows], p.position[rows]))
        ids = ids.index_copy(0, rows, torch.where(peak[rows].isfinite(), drawn, ids[rows]))
    if tops < 0:
        return Sampled(ids, model_peak, peak, torch.zeros_like(peak), ids.new_empty(len(ids), 0), peak.new_empty(len(ids), 0))
    return Sampled(ids, model_peak, peak, *top_logprobs(logits, ids, tops))


def top_logprobs(logits: Tensor, chosen: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of `logits` float32 [R, V] as the model gave them: of `chosen` int64 [R], and of the likeliest.

    Gives float32 [R], int64 [R, top_k], float32 [R, top_k], most likely first and lowest ids first on ties. top_k may be 0.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if top_k:
        ids = logprobs.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    else:
        ids = chosen.new_empty(len(chosen), 0)
    return logprobs.gather(1, chosen[:, None])[:, 0], ids, logprobs.gather(1, ids)


def _edit(logits: Tensor, p: Parameters) -> None:
    """Masks, then bias, then penalties, in place."""
    forbid(logits, *_listed(p.forbidden, p.forbidden_counts))
    rows, ids = _listed(p.bias_ids, p.bias_counts)
    bias(logits, rows, ids, _entries(p.bias_values, p.bias_counts))
    penalised = ((p.presence != 0) | (p.frequency != 0) | (p.repetition != 1)).nonzero()[:, 0]
    if not len(penalised):
        return
    seen = p.counts[p.slots[penalised]]
    for drafts in p.drafts[penalised].unbind(1):
        there = (drafts >= 0).nonzero()[:, 0]
        seen[there, drafts[there]] += 2
    places, ids = torch.nonzero(seen, as_tuple=True)
    generated, rows = (seen[places, ids] >> 1).float(), penalised[places]
    penalize(logits, Counts(rows, ids, generated, p.presence[rows], p.frequency[rows], p.repetition[rows]))


def _listed(ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The places (rows, ids) of lists [R, N] of which the first counts [R] entries are in use."""
    rows = torch.arange(len(ids), device=ids.device).repeat_interleave(counts)
    return rows, _entries(ids, counts).long()


def _entries(values: Tensor, counts: Tensor) -> Tensor:
    return values[torch.arange(values.shape[1], device=values.device) < counts[:, None]]
