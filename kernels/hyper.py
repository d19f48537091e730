"""Manifold-constrained hyper-connections: n residual streams mixed before and after each sublayer (spec B.2, B.10).

A boundary between two sublayers (`hyper_post_pre`) is two kernels: the first mixes the sublayer's output into the
streams and multiplies what it just wrote by the next projection, split over the streams' width; the second sums the
splits, runs Sinkhorn, mixes the streams into the next sublayer's input, norms it and quantises it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels import backend, workspace
from kernels.early import await_inputs, early
from kernels.hyper_mma import mix_fragments_kernel
from kernels.jit import jit
from kernels.launch import launch
from kernels.norm import rms_norm_reference
from kernels.quant import ACTIVATION_BLOCK, Quantised, inverse_power_of_two, quantise_fp8, scale_to_byte, ue8m0_for_fp8
from kernels.rounding import INTERPRETED, rounded, rounded_through

STREAMS = 4  # what the Triton kernels are written for: Sinkhorn keeps a 4 x 4 matrix in registers
MIX_CHANNELS, MIX_VECTOR = 32, 4
PARTIAL_COLUMNS = 32  # a line of partial sums: the mixes, then the sum of squares, then padding, which is never written
PORTABLE_TOKENS = 32
PORTABLE_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """One hyper-connection. fn [2n + n*n, n*D] (the head's: [n, n*D]), float64 on the reference and float32 on Triton;
    scale and base float32 [2n + n*n], already one value per output; n streams, Sinkhorn iterations and its eps.

    parts, made from a float32 fn: the same as a sum of two bf16 numbers, [2, 2n + n*n, n*D], right to 2^-17 of each value.
    bf16 streams times these are exact products.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    n: int
    iterations: int
    eps: float
    parts: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.fn.dtype == torch.float32:
            high = self.fn.bfloat16()
            object.__setattr__(self, "parts", torch.stack((high, (self.fn - high.float()).bfloat16())))


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a sublayer starts from: its normed input x [T, D] in the streams' dtype, the same in FP8 where asked for, and
    post [T, n] and comb [T, n, n] for `hyper_post`: float64 on the reference, float32 on Triton."""

    x: Tensor
    quantised: Quantised | None
    post: Tensor
    comb: Tensor


def hyper_pre(streams: Tensor, weights: HyperWeights, norm_weight: Tensor, norm_eps: float, quantise: bool) -> Mixed:
    """streams [T, n, D] -> a sublayer's input. norm_weight [D]: of the RMSNorm before the sublayer."""
    if not backend.active().triton:
        return mixed_reference(streams, weights, norm_weight, norm_eps, quantise)
    return _finish(streams, _mix(streams, weights, None), weights, norm_weight, norm_eps, quantise)


def hyper_post(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor, into: Tensor | None = None) -> Tensor:
    """S'_k = post_k * out + sum_j comb[j, k] * S_j: the sum is over comb's FIRST index. [T, n, D] in streams' dtype.

    out [T, D]. On Triton the result is written to `into`, by default over the streams; the reference makes a new tensor.
    """
    if not backend.active().triton:
        return hyper_post_reference(out, streams, post, comb)
    into = streams if into is None else into
    tokens, n, width = streams.shape
    _require_four(n)
    block = min(1024, triton.next_power_of_2(width))
    grid = (tokens, triton.cdiv(width, block))
    launch(_post_kernel, grid, out, streams, post, comb, into, width, n, block, num_warps=max(1, min(4, block // 256)))
    return into


def hyper_post_pre(
    out: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    weights: HyperWeights,
    norm_weight: Tensor,
    norm_eps: float,
    quantise: bool,
    into: Tensor | None = None,
) -> tuple[Tensor, Mixed]:
    """`hyper_post` of one sublayer and `hyper_pre` of the next, which reads the streams once less: (streams, Mixed)."""
    if not backend.active().triton:
        streams = hyper_post_reference(out, streams, post, comb)
        return streams, hyper_pre(streams, weights, norm_weight, norm_eps, quantise)
    into = streams if into is None else into
    partial = _mix(streams, weights, (out, post, comb, into))
    return into, _finish(into, partial, weights, norm_weight, norm_eps, quantise)


def hyper_head(streams: Tensor, weights: HyperWeights, norm_weight: Tensor, norm_eps: float) -> Tensor:
    """The streams as one normed vector, ready for the vocabulary: [T, n, D] -> [T, D] in their dtype. weights.fn [n, n*D]."""
    if not backend.active().triton:
        x = hyper_head_reference(streams, weights.fn, weights.scale, weights.base, weights.eps, norm_eps)
        return rms_norm_reference(x, norm_weight, norm_eps)
    return _finish(streams, _mix(streams, weights, None), weights, norm_weight, norm_eps, False).x


# References


def hyper_weights(
    mixes: Tensor, scale: Tensor, base: Tensor, n: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mixes, normalised projections [T, 2n + n*n], scale and base [2n + n*n] -> pre [T, n], post [T, n],
    comb [T, n, n], float64.

    comb is made doubly stochastic by Sinkhorn: softmax of the rows, then columns, then (rows, columns) again.
    """
    pre, post, comb = torch.split(mixes.double() * scale + base, [n, n, n * n], -1)
    comb = torch.softmax(torch.unflatten(comb, -1, (n, n)), -1).add_(eps)
    ones = comb.new_ones(1, 1, n).expand(len(comb), 1, n)  # sums as products: the loop is 39 launches of almost nothing
    comb.div_(torch.bmm(ones, comb).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(torch.bmm(comb, ones.mT).add_(eps))
        comb.div_(torch.bmm(ones, comb).add_(eps))
    return torch.sigmoid(pre).add_(eps), torch.sigmoid(post).mul_(2.0), comb


def hyper_pre_reference(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, n, D] -> the mixed streams [T, D] in their dtype, not yet normed, and post, comb float64.
    fn float64 [2n + n*n, n*D], scale and base float32 [2n + n*n]."""
    wide = streams.double()
    pre, post, comb = hyper_weights(_mixes(wide, fn, norm_eps), scale, base, streams.shape[1], iterations, hc_eps)
    return torch.bmm(pre[:, None], wide).squeeze(1).to(streams.dtype), post, comb


def hyper_post_reference(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.bmm(comb.double().transpose(1, 2), streams.double())
    return mixed.addcmul_(post.double()[..., None], out.double()[:, None]).to(streams.dtype)


def hyper_head_reference(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    """The streams as one vector before the last norm: [T, n, D] -> [T, D] in their dtype. fn float64 [n, n*D]."""
    wide = streams.double()
    pre = torch.sigmoid(_mixes(wide, fn, norm_eps) * scale + base).add_(hc_eps)
    return torch.bmm(pre[:, None], wide).squeeze(1).to(streams.dtype)


def _mixes(wide: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """fn times the streams end to end, divided by one RMS over all of them."""
    flat = wide.flatten(1)
    return functional.linear(flat, fn) * flat.square().mean(-1, keepdim=True).add_(norm_eps).rsqrt_()


def mixed_reference(streams: Tensor, weights: HyperWeights, norm_weight: Tensor, norm_eps: float, quantise: bool) -> Mixed:
    """`hyper_pre_reference`, the RMSNorm and FP8 as three roundings. weights.fn and norm_weight float64."""
    x, post, comb = hyper_pre_reference(
        streams, weights.fn, weights.scale, weights.base, weights.iterations, weights.eps, norm_eps
    )
    x = rms_norm_reference(x, norm_weight, norm_eps)
    quantised = None
    if quantise:
        codes, scale = quantise_fp8(x, ACTIVATION_BLOCK)
        quantised = Quantised(codes[:, : x.shape[1]], scale_to_byte(scale))
    return Mixed(x, quantised, post, comb)


# Triton


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How `mix_fragments_kernel` cuts its work: blocks of tokens, 16 or more a warp, by a span of channels, walked in steps of
    MIX_CHANNELS, of which a thread loads MIX_VECTOR at once."""

    tokens: int
    warps: int
    span: int


def _tiles(tokens: int) -> _Tiles:
    """Chosen from shapes alone, so a row's sums do not depend on what else is in the batch."""
    if tokens <= 16:
        return _Tiles(16, 1, 32)
    if tokens <= 128 or backend.active().cuts_alike(tokens):
        return _Tiles(32, 2, 32)  # sums of the same spans as above: the same bits
    if tokens <= 1024:
        return _Tiles(64, 4, 128)
    return _Tiles(64, 4, 256)


def _finish_shape(tokens: int) -> tuple[int, int]:
    """Tokens of a program that runs Sinkhorn, and warps."""
    return 1 if tokens <= 1024 else 16, 4


def _require_four(n: int) -> None:
    if n != STREAMS:
        raise ValueError(f"hc_mult is {n}; the Triton kernels are written for {STREAMS} streams")


def _mix(streams: Tensor, weights: HyperWeights, before: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> Tensor:
    """Partial sums float32 [splits, T, PARTIAL_COLUMNS] of fn times the streams, and of their squares. before: the
    (out, post, comb, into) of a `hyper_post` that comes first."""
    tokens, n, width = streams.shape
    _require_four(n)
    tiles = _tiles(tokens)
    span = min(tiles.span, width)
    if streams.dtype != torch.bfloat16 or width % span or span % MIX_CHANNELS or not backend.active().arch:
        return _mix_portable(streams, weights, before)
    partial = workspace.empty((width // span, tokens, PARTIAL_COLUMNS), torch.float32, streams.device)
    out, post, comb, into = before or (streams, streams, streams, streams)
    launch(
        mix_fragments_kernel,
        (width // span, triton.cdiv(tokens, tiles.tokens)),
        streams,
        out,
        post,
        comb,
        into,
        weights.parts,
        partial,
        tokens,
        WIDTH=width,
        SPAN=span,
        OUTPUTS=len(weights.fn),
        COLUMNS=PARTIAL_COLUMNS,
        TOKENS=tiles.tokens,
        CHANNELS=MIX_CHANNELS,
        VECTOR=MIX_VECTOR,
        POST=before is not None,
        num_warps=tiles.warps,
        **early(),
    )
    return partial


def _mix_portable(streams: Tensor, weights: HyperWeights, before: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> Tensor:
    """`_mix` for any dtype and width, and for the interpreter."""
    tokens, n, width = streams.shape
    splits = min(64, triton.cdiv(width, PORTABLE_CHANNELS))
    span = triton.cdiv(triton.cdiv(width, splits), PORTABLE_CHANNELS) * PORTABLE_CHANNELS
    partial = workspace.empty((splits, tokens, PARTIAL_COLUMNS), torch.float32, streams.device)
    out, post, comb, into = before or (streams, streams, streams, streams)
    launch(
        _mix_kernel,
        (triton.cdiv(tokens, PORTABLE_TOKENS), splits),
        streams,
        out,
        post,
        comb,
        into,
        weights.fn,
        partial,
        tokens,
        width,
        SPAN=span,
        N=n,
        OUTPUTS=len(weights.fn),
        COLUMNS=PARTIAL_COLUMNS,
        TOKENS=PORTABLE_TOKENS,
        CHANNELS=PORTABLE_CHANNELS,
        POST=before is not None,
        PARTS=0 if streams.dtype == torch.float32 else 2,
        num_warps=4,
        num_stages=2,
        **early(),
    )
    return partial


def _finish(
    streams: Tensor, partial: Tensor, weights: HyperWeights, norm_weight: Tensor, norm_eps: float, quantise: bool
) -> Mixed:
    """Everything after the partial sums. Without post and comb when fn is the head's."""
    tokens, n, width = streams.shape
    device, outputs = streams.device, len(weights.fn)
    head = outputs == n
    x = workspace.empty((tokens, width), streams.dtype, device)
    post = workspace.empty((0 if head else tokens, n), torch.float32, device)
    comb = workspace.empty((0 if head else tokens, n, n), torch.float32, device)
    codes, scales = x, x
    if quantise:
        codes = workspace.empty((tokens, width), torch.float8_e4m3fn, device)
        scales = workspace.empty((tokens, triton.cdiv(width, ACTIVATION_BLOCK)), torch.uint8, device)
    sinkhorn_tokens, warps = _finish_shape(tokens)
    doubly_stochastic = 0 if head else triton.cdiv(tokens, sinkhorn_tokens)  # programs
    launch(
        _finish_kernel,
        (tokens + doubly_stochastic,),
        streams,
        partial,
        weights.scale,
        weights.base,
        norm_weight,
        x,
        codes,
        scales,
        post,
        comb,
        tokens,
        width,
        norm_eps,
        weights.eps,
        N=n,
        OUTPUTS=outputs,
        COLUMNS=PARTIAL_COLUMNS,
        SPLITS=partial.shape[0],
        SPLITS_PADDED=triton.next_power_of_2(partial.shape[0]),
        WIDTH_PADDED=max(ACTIVATION_BLOCK, triton.next_power_of_2(width)),
        BLOCK=ACTIVATION_BLOCK,
        SINKHORN_TOKENS=sinkhorn_tokens,
        ITERATIONS=weights.iterations,
        QUANTISE=quantise,
        num_warps=warps,
        **early(),
    )
    return Mixed(x, Quantised(codes, scales) if quantise else None, post, comb)


@jit
def _post_kernel(out, streams, post, comb, into, width: tl.constexpr, N: tl.constexpr, CHANNELS: tl.constexpr):
    """One token and a range of its channels."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < width
    base = token * N * width
    value = tl.load(out + token * width + channels, mask=inside, other=0.0).to(tl.float32)
    old = _load_four(streams + base + channels, width, inside)
    for k in tl.static_range(N):
        new = tl.load(post + token * N + k) * value
        for j in tl.static_range(N):
            new += tl.load(comb + token * N * N + j * N + k) * old[j].to(tl.float32)
        tl.store(into + base + k * width + channels, rounded(new, into.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["tokens"])
def _mix_kernel(
    streams,
    out,
    post,
    comb,
    into,
    fn,
    partial,
    tokens,
    width: tl.constexpr,
    SPAN: tl.constexpr,
    N: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POST: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A block of tokens times a span of channels of all streams; the streams after `hyper_post` if POST."""
    await_inputs(EARLY)
    split = tl.program_id(1)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = rows < tokens
    wide_rows = rows.to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    if POST:
        added = _load_four((post + wide_rows * N)[:, None], 1, live[:, None])
        kept = (
            _load_four((comb + wide_rows * (N * N))[:, None], 1, live[:, None]),
            _load_four((comb + wide_rows * (N * N) + N)[:, None], 1, live[:, None]),
            _load_four((comb + wide_rows * (N * N) + 2 * N)[:, None], 1, live[:, None]),
            _load_four((comb + wide_rows * (N * N) + 3 * N)[:, None], 1, live[:, None]),
        )
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    squares = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for step in range(0, SPAN, CHANNELS):
        channels = split * SPAN + step + tl.arange(0, CHANNELS)
        inside = live[:, None] & (channels < width)[None, :]
        places = wide_rows[:, None] * (N * width) + channels[None, :]
        wanted = (columns < OUTPUTS)[None, :] & (channels < width)[:, None]
        old = _load_four(streams + places, width, inside)
        if POST:
            value = tl.load(out + wide_rows[:, None] * width + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(N):
            if POST:
                mixed = added[k] * value
                for j in tl.static_range(N):
                    mixed += kept[j][k] * old[j].to(tl.float32)
                stream = rounded(mixed, into.dtype.element_ty)
                tl.store(into + places + k * width, stream, mask=inside)
            else:
                stream = old[k]
            projection = tl.load(fn + columns[None, :] * (N * width) + k * width + channels[:, None], mask=wanted, other=0.0)
            total = _dot(stream, projection, total, PARTS)
            squares += stream.to(tl.float32) * stream.to(tl.float32)
    total = tl.where(columns[None, :] == OUTPUTS, tl.sum(squares, 1)[:, None], total)
    wanted = live[:, None] & (columns <= OUTPUTS)[None, :]
    tl.store(partial + (split * tokens + rows[:, None]) * COLUMNS + columns[None, :], total, mask=wanted)


@jit
def _dot(x, weight, total, PARTS: tl.constexpr):
    """total + x times a float32 weight. x is bf16, so with the weight as a sum of PARTS bf16 numbers (2^-9 of the last one
    each) every product is exact and bf16 matrix units do it; PARTS 0: x is float32."""
    if PARTS == 0:
        total = tl.dot(x, weight, total, input_precision="ieee")
    else:
        for _ in tl.static_range(PARTS):
            part = rounded(weight, tl.bfloat16)
            if INTERPRETED:
                total = tl.dot(x.to(tl.float32), part.to(tl.float32), total)
            else:
                total = tl.dot(x, part, total)
            weight -= part.to(tl.float32)
    return total


@jit(do_not_specialize=["tokens"])
def _finish_kernel(
    streams,
    partial,
    scale,
    base,
    norm_weight,
    x,
    codes,
    scales,
    post,
    comb,
    tokens,
    width: tl.constexpr,
    norm_eps,
    eps,
    N: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SINKHORN_TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    QUANTISE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first programs make post and comb of SINKHORN_TOKENS tokens each, the others a token's input each."""
    first = 0 if OUTPUTS == N else tl.cdiv(tokens, SINKHORN_TOKENS)
    token = tokens - 1 - (tl.program_id(0) - first)  # backwards: the last ones written are still in the cache
    if token < tokens:
        _input(
            streams,
            partial,
            scale,
            base,
            norm_weight,
            x,
            codes,
            scales,
            token.to(tl.int64),
            tokens,
            width,
            norm_eps,
            eps,
            N,
            OUTPUTS,
            COLUMNS,
            SPLITS,
            SPLITS_PADDED,
            WIDTH_PADDED,
            BLOCK,
            QUANTISE,
            EARLY,
        )
    else:
        rows = tl.program_id(0) * SINKHORN_TOKENS + tl.arange(0, SINKHORN_TOKENS)
        _outer_weights(
            partial,
            scale,
            base,
            post,
            comb,
            rows,
            tokens,
            width,
            norm_eps,
            eps,
            N,
            OUTPUTS,
            COLUMNS,
            SPLITS,
            SPLITS_PADDED,
            ITERATIONS,
            EARLY,
        )


@jit
def _input(
    streams,
    partial,
    scale,
    base,
    norm_weight,
    x,
    codes,
    scales,
    token,
    tokens,
    width: tl.constexpr,
    norm_eps,
    eps,
    N: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTISE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum of pre_j * S_j, rounded, normed, rounded, quantised."""
    channels = tl.arange(0, WIDTH_PADDED)
    inside = channels < width
    columns, splits = tl.arange(0, COLUMNS), tl.arange(0, SPLITS_PADDED)
    # Weights do not depend on the kernel before.
    weight = tl.load(norm_weight + channels, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(scale + columns, mask=columns < OUTPUTS, other=0.0)
    shift = tl.load(base + columns, mask=columns < OUTPUTS, other=0.0)
    await_inputs(EARLY)
    places = partial + (splits * tokens + token)[:, None] * COLUMNS + columns[None, :]
    parts = tl.load(places, mask=(splits < SPLITS)[:, None], other=0.0)
    values = _load_four(streams + token * N * width + channels, width, inside)
    sums = tl.sum(parts, 0)
    inverse = tl.rsqrt(tl.sum(tl.where(columns == OUTPUTS, sums, 0.0), 0) / (N * width) + norm_eps)
    pre = tl.sigmoid(sums * inverse * slope + shift) + eps
    mixed = tl.zeros([WIDTH_PADDED], tl.float32)
    for j in tl.static_range(N):
        mixed += tl.sum(tl.where(columns == j, pre, 0.0), 0) * values[j].to(tl.float32)
    mixed = rounded_through(mixed, x.dtype.element_ty)
    normed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / width + norm_eps) * weight
    done = rounded(normed, x.dtype.element_ty)
    tl.store(x + token * width + channels, done, mask=inside)
    if QUANTISE:
        blocks = tl.reshape(done.to(tl.float32), [WIDTH_PADDED // BLOCK, BLOCK])
        byte = ue8m0_for_fp8(tl.max(tl.abs(blocks), 1))
        code = rounded(tl.reshape(blocks * inverse_power_of_two(byte)[:, None], [WIDTH_PADDED]), tl.float8e4nv)
        tl.store(codes + token * width + channels, code, mask=inside)
        numbers = tl.arange(0, WIDTH_PADDED // BLOCK)
        count = tl.cdiv(width, BLOCK)
        tl.store(scales + token * count + numbers, byte.to(tl.uint8), mask=numbers < count)


@jit
def _outer_weights(
    partial,
    scale,
    base,
    post,
    comb,
    rows,
    tokens,
    width: tl.constexpr,
    norm_eps,
    eps,
    N: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """post and comb of the tokens `rows`."""
    columns, splits = tl.arange(0, COLUMNS), tl.arange(0, SPLITS_PADDED)
    slope = tl.load(scale + columns, mask=columns < OUTPUTS, other=0.0)[None, :]
    shift = tl.load(base + columns, mask=columns < OUTPUTS, other=0.0)[None, :]
    live = rows < tokens
    await_inputs(EARLY)
    places = partial + (splits[:, None] * tokens + rows[None, :])[:, :, None] * COLUMNS + columns[None, None, :]
    sums = tl.sum(tl.load(places, mask=(splits < SPLITS)[:, None, None] & live[None, :, None], other=0.0), 0)
    squares = tl.sum(tl.where((columns == OUTPUTS)[None, :], sums, 0.0), 1)
    mixes = sums * tl.rsqrt(squares / (N * width) + norm_eps)[:, None] * slope + shift
    is_post = (columns >= N) & (columns < 2 * N)
    place = rows[:, None] * N + columns[None, :] - N
    tl.store(post + place, 2.0 * tl.sigmoid(mixes), mask=is_post[None, :] & live[:, None])
    cells = _sinkhorn(_softmax(_cells(mixes), eps), tl.full([rows.shape[0]], 1.0, tl.float32), eps, ITERATIONS)
    for index in tl.static_range(N * N):
        tl.store(comb + rows * (N * N) + index, cells[index], mask=live)


@jit
def _cells(mixes):
    """[R, 32], of which 8 .. 23 are a matrix -> its 16 vectors [R], so that one thread holds all of a token's matrix and its
    sums need no other thread."""
    bits = tl.reshape(mixes, [mixes.shape[0], 2, 2, 2, 2, 2])
    low, high = tl.split(tl.permute(bits, [0, 5, 4, 3, 2, 1]))  # split takes the last dim: the highest bit goes first
    low, high = tl.split(low)[1], tl.split(high)[0]
    return _quarters(low, 0) + _quarters(low, 1) + _quarters(high, 0) + _quarters(high, 1)


@jit
def _quarters(half, WHICH: tl.constexpr):
    """[R, 2, 2, 2] -> the four vectors of one of its last dim."""
    halves = tl.split(half)
    low, high = tl.split(halves[WHICH])
    a, b = tl.split(low)
    c, d = tl.split(high)
    return a, b, c, d


@jit
def _softmax(cells, eps):
    """Of each row of the matrix, and eps added."""
    upper = _softmax_row(cells, 0, eps) + _softmax_row(cells, 4, eps)
    return upper + _softmax_row(cells, 8, eps) + _softmax_row(cells, 12, eps)


@jit
def _softmax_row(cells, FIRST: tl.constexpr, eps):
    a, b, c, d = cells[FIRST], cells[FIRST + 1], cells[FIRST + 2], cells[FIRST + 3]
    peak = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - peak), tl.exp(b - peak), tl.exp(c - peak), tl.exp(d - peak)
    inverse = _inverse((a + b) + (c + d))
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@jit
def _sinkhorn(cells, one, eps, ITERATIONS: tl.constexpr):
    """Columns, then (rows, columns) again. The matrix stays as it is; what its rows and columns were divided by is kept:
    C[j, k] = cells[j, k] / (row[j] * column[k]), so dividing C's row j by its sum + eps makes
    row[j] the sum of cells[j, k] / column[k], + eps * the row[j] of before."""
    by_row = (one, one, one, one)
    row = by_row
    by_column = _divisors(cells, by_row, row, eps, 1, 4)
    column = _inverses(by_column)
    for _ in range(ITERATIONS - 1):
        by_row = _divisors(cells, column, by_row, eps, 4, 1)
        row = _inverses(by_row)
        by_column = _divisors(cells, row, by_column, eps, 1, 4)
        column = _inverses(by_column)
    a, b, c, d = column
    upper = _times(cells, 0, row[0], a, b, c, d) + _times(cells, 4, row[1], a, b, c, d)
    return upper + _times(cells, 8, row[2], a, b, c, d) + _times(cells, 12, row[3], a, b, c, d)


@jit
def _divisors(cells, factors, before, eps, LINE: tl.constexpr, STEP: tl.constexpr):
    """For each of four lines LINE apart: the sum over its cells, STEP apart, times their factors, + eps * before."""
    return (
        _divisor(cells, factors, eps * before[0], 0, STEP),
        _divisor(cells, factors, eps * before[1], LINE, STEP),
        _divisor(cells, factors, eps * before[2], 2 * LINE, STEP),
        _divisor(cells, factors, eps * before[3], 3 * LINE, STEP),
    )


@jit
def _divisor(cells, factors, start, FIRST: tl.constexpr, STEP: tl.constexpr):
    left = cells[FIRST] * factors[0] + start
    right = cells[FIRST + STEP] * factors[1]
    return (left + cells[FIRST + 2 * STEP] * factors[2]) + (right + cells[FIRST + 3 * STEP] * factors[3])


@jit
def _inverses(x):
    """Two divisions for four: a special function takes eight cycles of a warp, and these are in a chain of 39."""
    left, right = _inverse(x[0] * x[1]), _inverse(x[2] * x[3])
    return left * x[1], left * x[0], right * x[3], right * x[2]


@jit
def _inverse(x):
    """1 / x to one unit in the last place, for x far from the ends of float32."""
    if INTERPRETED:
        return 1.0 / x
    else:  # noqa: RET505  (both branches of a constexpr)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def _times(cells, FIRST: tl.constexpr, row, a, b, c, d):
    return (
        cells[FIRST] * (row * a),
        cells[FIRST + 1] * (row * b),
        cells[FIRST + 2] * (row * c),
        cells[FIRST + 3] * (row * d),
    )


@jit
def _load_four(pointer, STEP: tl.constexpr, mask):
    return (
        tl.load(pointer, mask=mask, other=0.0),
        tl.load(pointer + STEP, mask=mask, other=0.0),
        tl.load(pointer + 2 * STEP, mask=mask, other=0.0),
        tl.load(pointer + 3 * STEP, mask=mask, other=0.0),
    )
