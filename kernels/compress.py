"""The CSA and HCA compressors: a window of tokens becomes one row (spec B.6, C.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.norm import rms_norm_reference
from kernels.ragged import Ragged, gather_history, store_ring
from kernels.rope import rope_reference, rotation
from kernels.rows import IndexRow, KVRow


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """ape float32 [ratio, f*c]; norm float32 [c]; frequencies of the layer's rotary table. f = 2 when windows overlap."""

    ratio: int
    overlap: bool
    ape: Tensor
    norm: Tensor
    norm_eps: float
    frequencies: Tensor


def compress(
    projected: Tensor,
    weights: CompressorWeights,
    batch: Ragged,
    ring: Tensor,
    pages: Tensor,
    row: KVRow | IndexRow,
    dtype: torch.dtype,
) -> None:
    """Writes the entries that this step's tokens close into `pages`, and the tokens' state rows into `ring`.

    projected float32 [T, 2*f*c]: values, then scores without ape. ring float32 [slots, R, 2*f*c], row = position % R,
    scores with ape; R >= f*ratio, plus what may be rolled back. pages uint8 [pages, rows, row_bytes]: entry w of a
    sequence is row w % rows of its page w // rows. An entry is rounded to `dtype` where the activations are.
    """
    compress_reference(projected, weights, batch, ring, pages, row, dtype)


def compress_reference(
    projected: Tensor,
    weights: CompressorWeights,
    batch: Ragged,
    ring: Tensor,
    pages: Tensor,
    row: KVRow | IndexRow,
    dtype: torch.dtype,
) -> None:
    ratio = weights.ratio
    state = projected.clone()
    state[:, projected.shape[1] // 2 :] += weights.ape[batch.positions % ratio]
    closing = ((batch.positions + 1) % ratio == 0).nonzero().squeeze(1)
    if len(closing):
        entries = _pool(state, weights, batch, ring, closing)
        windows = batch.positions[closing] // ratio
        normed = rms_norm_reference(entries.to(dtype), weights.norm, weights.norm_eps)
        turned = rope_reference(normed, rotation(windows * ratio, weights.frequencies), inverse=False)
        page = batch.page_table[batch.sequence_ids[closing], windows // pages.shape[1]]
        pages[page, windows % pages.shape[1]] = row.pack(turned)
    store_ring(batch, ring, state)


def _pool(state: Tensor, weights: CompressorWeights, batch: Ragged, ring: Tensor, closing: Tensor) -> Tensor:
    """One softmax over tokens per channel, of the window that each `closing` token ends: float64 [M, c].

    With overlap the window before takes part with its tokens' first halves, this one with the second halves.
    """
    ratio = weights.ratio
    length = 2 * ratio if weights.overlap else ratio
    wanted = batch.positions[closing][:, None] + torch.arange(1 - length, 1, device=closing.device)
    values, scores = gather_history(batch, ring, state, closing, wanted).double().chunk(2, -1)
    if weights.overlap:
        values, scores = _halves(values, ratio), _halves(scores, ratio)
    absent = (wanted < 0)[..., None]
    share = torch.softmax(scores.masked_fill(absent, -torch.inf), 1)
    return (share * values.masked_fill(absent, 0.0)).sum(1)


def _halves(x: Tensor, ratio: int) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((x[:, :ratio, :half], x[:, ratio:, half:]), 1)
