"""From logits to tokens on the device, in two or three kernels that read no host value (`kernels.sample.sample`).

1. `_scan_kernel`, a chunk of a row each: the largest logit of every group of 64 ids, the chunk's part of the softmax's
   sum, and, for rows whose logits the client changes, a changed copy with the same of its own.
2. `_mass_kernel` (only when rows draw), a chunk each: the sum of its weights.
3. `_draw_kernel`, a row each: greedy or drawn token, log probabilities.

A row's k largest logits lie in the k groups with the largest maxima, so top-k, top-p and the likeliest tokens look at a few
thousand ids only; a row for which that does not hold (top-p of a flat distribution) searches the whole row instead.
Thresholds are found bit by bit on integers that order as the floats do. A weight is exp((logit - peak) / temperature) as a
44-bit fixed-point number, so sums are exact and do not depend on their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import workspace
from kernels.jit import jit
from kernels.launch import launch

if TYPE_CHECKING:
    from kernels.sample import Parameters

GROUP = 64  # ids whose largest logit is kept
CHUNK_GROUPS = 64  # groups of a program
TOP_P_GROUPS = 128  # how many groups top-p looks at first
MOST_GROUPS = 1024  # and then, before it takes the whole row; the largest top-k that is found among groups
CANDIDATES = 2048  # ids kept of the groups looked at
ROW_TILE = 4096  # ids of a step over a whole row

_LOWEST = tl.constexpr(-(1 << 31))  # below the key of every float
_NAN_KEY = tl.constexpr(0x7FC00000)
_ONE = tl.constexpr(2.0**44)  # the weight of the likeliest token
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)


def sample_rows(logits: Tensor, parameters: Parameters, draws: bool, edits: bool, tops: int) -> tuple[Tensor, ...]:
    """The fields of `kernels.sample.Sampled` in their order. tops: -1 for no log probabilities."""
    rows, vocab = logits.shape
    device = logits.device
    groups = triton.cdiv(vocab, GROUP)
    chunk_groups = min(CHUNK_GROUPS, triton.next_power_of_2(groups))
    chunks = triton.cdiv(groups, chunk_groups)
    shape = {"vocab": vocab, "groups": groups, "CHUNK_GROUPS": chunk_groups, "GROUP": GROUP}

    def made(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return workspace.empty(size, dtype, device)

    keys, sums = made(rows, groups), made(rows, chunks, dtype=torch.float32)
    changed = made(rows, vocab, dtype=torch.float32) if edits else logits
    changed_keys = made(rows, groups) if edits else keys
    p = parameters
    launch(
        _scan_kernel,
        (rows, chunks),
        logits,
        changed,
        keys,
        changed_keys,
        sums,
        p.presence,
        p.frequency,
        p.repetition,
        p.slots,
        p.counts,
        p.drafts,
        p.forbidden,
        p.forbidden_counts,
        p.bias_ids,
        p.bias_values,
        p.bias_counts,
        DRAFTS=p.drafts.shape[1],
        FORBIDDEN=p.forbidden.shape[1],
        BIASES=p.bias_ids.shape[1],
        EDITS=edits,
        **shape,
        num_warps=4,
    )
    edited_by = (p.presence, p.frequency, p.repetition, p.forbidden_counts, p.bias_counts)
    masses = made(rows, chunks, dtype=torch.int64)
    if draws:
        launch(
            _mass_kernel,
            (rows, chunks),
            logits,
            changed,
            keys,
            changed_keys,
            masses,
            *edited_by,
            p.temperature,
            p.min_p,
            GROUPS_PADDED=triton.next_power_of_2(groups),
            EDITS=edits,
            **shape,
            num_warps=4,
        )
    ids, peak = made(rows, dtype=torch.int64), made(rows, dtype=torch.float32)
    model_peak, logprob = made(rows, dtype=torch.float32), made(rows, dtype=torch.float32)
    found = max(tops, 0)
    top_ids, top_logprobs = made(rows, found, dtype=torch.int64), made(rows, found, dtype=torch.float32)
    selected = made(rows, MOST_GROUPS)
    candidates, candidate_ids = made(rows, CANDIDATES, dtype=torch.float32), made(rows, CANDIDATES)
    launch(
        _draw_kernel,
        (rows,),
        logits,
        changed,
        keys,
        changed_keys,
        sums,
        masses,
        *edited_by,
        p.temperature,
        p.top_k,
        p.top_p,
        p.min_p,
        p.stream,
        p.position,
        ids,
        peak,
        model_peak,
        logprob,
        top_ids,
        top_logprobs,
        selected,
        candidates,
        candidate_ids,
        chunks=chunks,
        CHUNKS_PADDED=triton.next_power_of_2(chunks),
        GROUPS_PADDED=triton.next_power_of_2(groups),
        TOPS=tops,
        TOPS_PADDED=triton.next_power_of_2(max(found, 1)),
        TOP_P_GROUPS=TOP_P_GROUPS,
        MOST_GROUPS=MOST_GROUPS,
        CANDIDATES=CANDIDATES,
        ROW_TILE=ROW_TILE,
        DRAWS=draws,
        EDITS=edits,
        **shape,
        num_warps=16 if draws or tops >= 0 else 8,  # one number where a sum, that of the log probabilities, follows from it
    )
    return ids, model_peak, peak, logprob, top_ids, top_logprobs


# Floats as integers


@jit
def _key(x):
    """float32 -> int32 in the same order; NaN above everything, both zeros equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def _value(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _weight(x, peak, slope, least):
    """exp((x - peak) / temperature) in units of 2^-44, int64; 0 below `least` (min-p). slope: log2(e) / temperature."""
    weight = tl.exp2((x - peak) * slope)
    return (tl.where(weight >= least, weight, 0.0) * _ONE).to(tl.int64)


@jit
def _slope(heat):
    """log2(e) / temperature, finite for a temperature near 0 too."""
    return tl.minimum(1.4426950408889634 / heat, 1e30).to(tl.float32)


@jit
def _mix(x):
    """One splitmix64 step of uint64 (see kernels.sample)."""
    x += _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_A
    x = (x ^ (x >> 27)) * _MIX_B
    return x ^ (x >> 31)


@jit
def _edited(row, presence, frequency, repetition, forbidden_counts, bias_counts):
    """Whether a row has penalties; whether it has a list."""
    penalties = (tl.load(presence + row) != 0.0) | (tl.load(frequency + row) != 0.0) | (tl.load(repetition + row) != 1.0)
    return penalties, (tl.load(forbidden_counts + row) > 0) | (tl.load(bias_counts + row) > 0)


# 1. Groups


@jit
def _scan_kernel(
    logits,
    changed,
    keys,
    changed_keys,
    sums,
    presence,
    frequency,
    repetition,
    slots,
    counts,
    drafts,
    forbidden,
    forbidden_counts,
    bias_ids,
    bias_values,
    bias_counts,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    DRAFTS: tl.constexpr,
    FORBIDDEN: tl.constexpr,
    BIASES: tl.constexpr,
    EDITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    numbers = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
    ids = numbers[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = ids < vocab
    x = tl.load(logits + row * vocab + ids, mask=inside, other=float("-inf"))
    largest = tl.max(x, 1)  # passes over NaN, but the sum does not
    peak = tl.max(largest, 0)
    total = tl.sum(tl.sum(tl.where(x == peak, 1.0, tl.exp(x - peak)), 1), 0)
    tl.store(sums + row * tl.num_programs(1) + chunk, total)
    largest = tl.where(total != total, _NAN_KEY, _key(largest))
    tl.store(keys + row * groups + numbers, largest, mask=numbers < groups)
    if EDITS:
        penalties, lists = _edited(row, presence, frequency, repetition, forbidden_counts, bias_counts)
        if penalties | lists:
            mine = changed + row * vocab
            if lists:
                tl.store(mine + ids, x, mask=inside)
                first = chunk * (CHUNK_GROUPS * GROUP)
                last = first + CHUNK_GROUPS * GROUP
                places = tl.arange(0, FORBIDDEN)
                there = places < tl.load(forbidden_counts + row)
                token = tl.load(forbidden + row * FORBIDDEN + places, mask=there, other=-1)
                tl.debug_barrier()
                tl.store(mine + token, float("-inf"), mask=(token >= first) & (token < last) & (token < vocab))
                places = tl.arange(0, BIASES)
                there = places < tl.load(bias_counts + row)
                token = tl.load(bias_ids + row * BIASES + places, mask=there, other=-1)
                there = (token >= first) & (token < last) & (token < vocab)
                added = tl.load(bias_values + row * BIASES + places, mask=there, other=0.0)
                tl.debug_barrier()
                added += tl.load(mine + token, mask=there, other=0.0)
                tl.debug_barrier()  # one place may be held by several threads
                tl.store(mine + token, added, mask=there)
                tl.debug_barrier()
                x = tl.load(mine + ids, mask=inside, other=float("-inf"))
            if penalties:
                seen = tl.load(counts + tl.load(slots + row) * vocab + ids, mask=inside, other=0)
                for place in tl.static_range(DRAFTS):
                    seen += tl.where(ids == tl.load(drafts + row * DRAFTS + place).to(tl.int32), 2, 0)
                factor = tl.load(repetition + row)
                repeated = tl.where(x > 0, x / factor, x * factor)
                generated = seen >> 1
                lower = tl.load(frequency + row) * generated.to(tl.float32)
                lower += tl.where(generated > 0, tl.load(presence + row), 0.0)
                x = tl.where(seen != 0, repeated - lower, x)
            tl.store(mine + ids, x, mask=inside)
            tl.store(changed_keys + row * groups + numbers, tl.max(_key(x), 1), mask=numbers < groups)


# 2. Weights


@jit
def _mass_kernel(
    logits,
    changed,
    keys,
    changed_keys,
    masses,
    presence,
    frequency,
    repetition,
    forbidden_counts,
    bias_counts,
    temperature,
    min_p,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    EDITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0:
        source, largest = logits + row * vocab, keys + row * groups
        if EDITS:
            penalties, lists = _edited(row, presence, frequency, repetition, forbidden_counts, bias_counts)
            if penalties | lists:
                source, largest = changed + row * vocab, changed_keys + row * groups
        ids = chunk * (CHUNK_GROUPS * GROUP) + tl.arange(0, CHUNK_GROUPS * GROUP)
        x = tl.load(source + ids, mask=ids < vocab, other=float("-inf"))
        numbers = tl.arange(0, GROUPS_PADDED)
        peak = _value(tl.max(tl.load(largest + numbers, mask=numbers < groups, other=_LOWEST), 0))
        slope = _slope(heat)
        least = tl.load(min_p + row).to(tl.float32)
        tl.store(masses + row * tl.num_programs(1) + chunk, tl.sum(_weight(x, peak, slope, least), 0))


# 3. Tokens


@jit
def _draw_kernel(
    logits,
    changed,
    keys,
    changed_keys,
    sums,
    masses,
    presence,
    frequency,
    repetition,
    forbidden_counts,
    bias_counts,
    temperature,
    top_k,
    top_p,
    min_p,
    stream,
    position,
    ids,
    peaks,
    model_peaks,
    logprobs,
    top_ids,
    top_logprobs,
    selected,
    candidates,
    candidate_ids,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    chunks: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOPS: tl.constexpr,
    TOPS_PADDED: tl.constexpr,
    TOP_P_GROUPS: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DRAWS: tl.constexpr,
    EDITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, GROUPS_PADDED)
    known = tl.load(keys + row * groups + numbers, mask=numbers < groups, other=_LOWEST)
    largest = known
    source = logits + row * vocab
    if EDITS:
        penalties, lists = _edited(row, presence, frequency, repetition, forbidden_counts, bias_counts)
        if penalties | lists:
            source = changed + row * vocab
            largest = tl.load(changed_keys + row * groups + numbers, mask=numbers < groups, other=_LOWEST)
    peak_key = tl.max(largest, 0)
    peak = _value(peak_key)
    group = tl.min(tl.where(largest == peak_key, numbers, GROUPS_PADDED), 0)
    members = group * GROUP + tl.arange(0, GROUP)
    equal = _key(tl.load(source + members, mask=members < vocab, other=float("-inf"))) == peak_key
    token = tl.min(tl.where(equal & (members < vocab), members, vocab - 1), 0)
    picked = selected + row * MOST_GROUPS
    if DRAWS:
        heat = tl.load(temperature + row)
        if (heat > 0) & (tl.abs(peak) < float("inf")):  # false for NaN too
            slope = _slope(heat)
            least = tl.load(min_p + row).to(tl.float32)
            k = tl.load(top_k + row)
            k = tl.where(k < vocab, k, 0)
            p = tl.load(top_p + row)
            bits = _mix((tl.load(stream + row) ^ tl.load(position + row)).to(tl.uint64)) >> 12
            noise = bits.to(tl.int64).to(tl.float64) * 2.220446049250313e-16
            part = tl.arange(0, CHUNKS_PADDED)
            mass = tl.load(masses + row * chunks + part, mask=part < chunks, other=0)
            total = tl.sum(mass, 0)
            if (k == 0) & (p >= 1.0):
                target = _target(noise, total)
                chunk = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
                target -= tl.sum(tl.where(part < chunk, mass, 0), 0)
                start = chunk * (CHUNK_GROUPS * GROUP)
                length = tl.minimum(CHUNK_GROUPS * GROUP, vocab - start)
                token = start + _pick(source + start, length, _LOWEST, vocab, target, peak, slope, least, CHUNK_GROUPS * GROUP)
            else:
                mine, mine_ids = candidates + row * CANDIDATES, candidate_ids + row * CANDIDATES
                count = tl.full([], 0, tl.int32)
                wanted = tl.where(k > 0, k, TOP_P_GROUPS)
                while wanted > 0:
                    count, floor = _gather(
                        source, largest, numbers, wanted, picked, mine, mine_ids, vocab, groups, GROUP, MOST_GROUPS, CANDIDATES
                    )
                    more = tl.where(wanted < MOST_GROUPS, MOST_GROUPS, 0)
                    if (count > 0) & (k == 0):  # groups hold top-p's tokens only if what is above their floor suffices
                        _, above = _tally(mine, count, floor + 1, peak, slope, least, CANDIDATES)
                        enough = above >= _share(p, total)
                        count = tl.where(enough, count, 0)
                        more = tl.where(enough, 0, more)
                    wanted = tl.where(k > 0, 0, more)
                if count > 0:
                    place = _filtered(mine, count, k, p, total, noise, peak, slope, least, CANDIDATES)
                    token = tl.load(mine_ids + place)
                else:
                    token = _filtered(source, vocab, k, p, total, noise, peak, slope, least, ROW_TILE)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(peaks + row, peak)
    model_key = tl.max(known, 0)
    model_peak = _value(model_key)
    tl.store(model_peaks + row, model_peak)
    if TOPS >= 0:
        part = tl.arange(0, CHUNKS_PADDED)
        chunk_keys = tl.max(tl.reshape(known, [GROUPS_PADDED // CHUNK_GROUPS, CHUNK_GROUPS]), 1)
        sum_of = tl.load(sums + row * chunks + part, mask=part < chunks, other=0.0)
        parts = tl.where(sum_of == 0.0, 0.0, sum_of * tl.exp(_value(chunk_keys) - model_peak))
        norm = tl.log(tl.sum(parts, 0))
        tl.store(logprobs + row, tl.load(logits + row * vocab + token) - model_peak - norm)
        if TOPS > 0:
            _tops(
                logits + row * vocab,
                known,
                numbers,
                picked,
                top_ids + row * TOPS,
                top_logprobs + row * TOPS,
                model_peak,
                norm,
                vocab,
                groups,
                GROUP,
                TOPS,
                TOPS_PADDED,
                MOST_GROUPS,
            )


@jit
def _target(noise, total):
    """floor(noise * total), below total."""
    return tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)


@jit
def _share(p, total):
    """The least mass that reaches share p of total: ceil, at least 1."""
    share = p * total.to(tl.float64)
    whole = share.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < share).to(tl.int64), 1)


@jit
def _pick(values, length, floor, ties, target, peak, slope, least, TILE: tl.constexpr):
    """The first place whose cumulative weight is above target. What is below the key `floor` weighs nothing, and so do all
    that equal it but the first `ties`."""
    found = tl.full([], -1, tl.int32) + length
    missing = tl.full([], 1, tl.int1)
    done = tl.full([], 0, tl.int64)
    met = tl.full([], 0, tl.int32)
    for start in range(0, length, TILE):
        places = start + tl.arange(0, TILE)
        x = tl.load(values + places, mask=places < length, other=float("-inf"))
        key = _key(x)
        equal = (key == floor).to(tl.int32)
        keep = (key > floor) | ((equal > 0) & (met + tl.cumsum(equal, 0) <= ties))
        weight = tl.where(keep, _weight(x, peak, slope, least), 0)
        hit = done + tl.cumsum(weight, 0) > target
        first = tl.min(tl.where(hit & (places < length), places, length), 0)
        found = tl.where(missing & (first < length), first, found)
        missing = missing & (first >= length)
        done += tl.sum(weight, 0)
        met += tl.sum(equal, 0)
    return found


@jit
def _tally(values, length, floor, peak, slope, least, TILE: tl.constexpr):
    """How many keys are `floor` or more, and what they weigh together."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    for start in tl.range(0, length, TILE, num_stages=3 if TILE > 2048 else 1):
        places = start + tl.arange(0, TILE)
        x = tl.load(values + places, mask=places < length, other=float("-inf"))
        above = (_key(x) >= floor) & (places < length)
        count += above.to(tl.int32)
        mass += tl.where(above, _weight(x, peak, slope, least), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@jit
def _filtered(values, length, k, p, total, noise, peak, slope, least, TILE: tl.constexpr):
    """A draw from what top-k, then top-p leave of `values`: its place. total: what the row weighs without them."""
    floor = tl.full([], _LOWEST, tl.int32)
    ties = tl.full([], 0x7FFFFFFF, tl.int32)
    if k > 0:
        floor = _nth(values, length, k, TILE)
        above, total = _tally(values, length, floor + 1, peak, slope, least, TILE)
        ties = k - above
        total += ties * _weight(_value(floor), peak, slope, least)
    if p < 1.0:
        share = _share(p, total)
        border = _reach(values, length, floor, total, share, peak, slope, least, TILE)
        _, above = _tally(values, length, border + 1, peak, slope, least, TILE)
        each = tl.maximum(_weight(_value(border), peak, slope, least), 1)
        wanted = tl.maximum((share - above + each - 1) // each, 0)
        ties = tl.minimum(wanted, tl.where(border == floor, ties, 0x7FFFFFFF).to(tl.int64)).to(tl.int32)
        floor = border
        total = above + ties * _weight(_value(border), peak, slope, least)
    return _pick(values, length, floor, ties, _target(noise, total), peak, slope, least, TILE)


@jit
def _nth(values, length, n, TILE: tl.constexpr):
    """A key that n of the values or more reach, and fewer than n exceed."""
    found = tl.full([], _LOWEST, tl.int64)
    bit = tl.full([], 31, tl.int64)
    while bit >= 0:
        tried = found + (tl.full([], 1, tl.int64) << bit)
        counts = tl.zeros([TILE], tl.int32)
        for start in tl.range(0, length, TILE, num_stages=3 if TILE > 2048 else 1):
            places = start + tl.arange(0, TILE)
            x = tl.load(values + places, mask=places < length, other=float("-inf"))
            counts += ((_key(x) >= tried.to(tl.int32)) & (places < length)).to(tl.int32)
        count = tl.sum(counts, 0)
        found = tl.where(count >= n, tried, found)
        bit = tl.where(count == n, -1, bit - 1)
    return found.to(tl.int32)


@jit
def _reach(values, length, floor, total, share, peak, slope, least, TILE: tl.constexpr):
    """A key whose reachers weigh `share` or more while those above it weigh less. total: what is at `floor` or more weighs.

    Regula falsi (Illinois) on the logit, and every fourth time the middle of the keys, which ends it for any shape.
    """
    low = tl.maximum(_key(peak - 46.0 / slope), floor).to(tl.int64)  # what is below 2^-46 of the peak weighs nothing
    high = _key(peak).to(tl.int64) + 1
    too_much, too_little = (total - share).to(tl.float32), -share.to(tl.float32)
    reached = tl.full([], 1 << 30, tl.int32)  # how many values are at `low` or more
    beyond = tl.full([], 0, tl.int32)  # and at `high` or more
    turn = tl.full([], 0, tl.int32)
    raised = tl.full([], 0, tl.int32)  # which end moved last
    while (high - low > 1) & (reached - beyond > 1):
        left, right = _value(low.to(tl.int32)), _value((high - 1).to(tl.int32))
        guess = _key(left + (right - left) * (too_much / (too_much - too_little))).to(tl.int64)
        tried = tl.where(turn % 4 == 3, low + (high - low) // 2, guess)
        tried = tl.minimum(tl.maximum(tried, low + 1), high - 1)
        count, mass = _tally(values, length, tried.to(tl.int32), peak, slope, least, TILE)
        off = (mass - share).to(tl.float32)
        if mass >= share:
            low = tried
            reached = count
            too_much = off
            too_little = tl.where(raised == 1, too_little * 0.5, too_little)
            raised = tl.full([], 1, tl.int32)
        else:
            high = tried
            beyond = count
            too_little = off
            too_much = tl.where(raised == -1, too_much * 0.5, too_much)
            raised = tl.full([], -1, tl.int32)
        turn += 1
    return low.to(tl.int32)


@jit
def _nth_of(keys, n):
    """`_nth` of keys in registers."""
    found = tl.full([], _LOWEST, tl.int64)
    bit = tl.full([], 31, tl.int64)
    while bit >= 0:
        tried = found + (tl.full([], 1, tl.int64) << bit)
        count = tl.sum((keys >= tried.to(tl.int32)).to(tl.int32), 0)
        found = tl.where(count >= n, tried, found)
        bit = tl.where(count == n, -1, bit - 1)
    return found.to(tl.int32)


@jit
def _select(largest, numbers, n, picked):
    """Writes the numbers of the n groups with the largest maxima, lower numbers first on ties, ascending; gives the border."""
    border = _nth_of(largest, n)
    equal = (largest == border).to(tl.int32)
    room = n - tl.sum((largest > border).to(tl.int32), 0)
    taken = (largest > border) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
    tl.debug_barrier()
    tl.store(picked + tl.cumsum(taken.to(tl.int32), 0) - 1, numbers, mask=taken)
    tl.debug_barrier()
    return border


@jit
def _gather(
    source,
    largest,
    numbers,
    wanted,
    picked,
    values,
    value_ids,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Writes what reaches the border of the best groups, in the order of the ids. Gives how many, 0 if that is not possible,
    and the border."""
    TILE: tl.constexpr = 4 * CANDIDATES
    wanted = tl.minimum(wanted, groups)
    count = tl.full([], 0, tl.int32)
    border = tl.full([], _LOWEST, tl.int32)
    if wanted <= MOST_GROUPS:
        border = _select(largest, numbers, wanted, picked)
        border = tl.where(wanted == groups, _LOWEST, border)  # fewer groups than k: all of them, as far as they go
        for start in range(0, wanted, TILE // GROUP):
            lines = start + tl.arange(0, TILE) // GROUP
            group = tl.load(picked + lines, mask=lines < wanted, other=groups)
            token = group * GROUP + tl.arange(0, TILE) % GROUP
            x = tl.load(source + token, mask=token < vocab, other=float("-inf"))
            kept = (_key(x) >= border) & (token < vocab)
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            fits = kept & (place < CANDIDATES)
            tl.store(values + place, x, mask=fits)
            tl.store(value_ids + place, token, mask=fits)
            count += tl.sum(kept.to(tl.int32), 0)
        tl.debug_barrier()
    return tl.where(count <= CANDIDATES, count, 0), border


@jit
def _tops(
    logits,
    largest,
    numbers,
    picked,
    top_ids,
    top_logprobs,
    peak,
    norm,
    vocab: tl.constexpr,
    groups: tl.constexpr,
    GROUP: tl.constexpr,
    TOPS: tl.constexpr,
    TOPS_PADDED: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
):
    """The TOPS likeliest tokens, lower ids first on ties: they are in the TOPS best groups."""
    wanted: tl.constexpr = min(TOPS, groups)
    _select(largest, numbers, wanted, picked)
    lines = tl.arange(0, TOPS_PADDED * GROUP) // GROUP
    group = tl.load(picked + lines, mask=lines < wanted, other=groups)
    token = group * GROUP + tl.arange(0, TOPS_PADDED * GROUP) % GROUP
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    order = (_key(x).to(tl.int64) << 32) + (0x7FFFFFFF - token)
    order = tl.where(token < vocab, order, -0x7FFFFFFFFFFFFFFF)
    for rank in range(TOPS):
        best = tl.max(order, 0)
        tl.store(top_ids + rank, 0x7FFFFFFF - (best & 0xFFFFFFFF))
        tl.store(top_logprobs + rank, _value((best >> 32).to(tl.int32)) - peak - norm)
        order = tl.where(order == best, -0x7FFFFFFFFFFFFFFF, order)
