"""Indexer scores with wgmma: FP8 keys arrive page by page through the copy engine, and while one product runs the one before
is reduced. The portable kernel of indexer.py computes the same."""

# Tuples grow in unrolled loops here, which types do not see, and the compiler of kernels knows no unpacking.
# ruff: noqa: RUF005
# mypy: disable-error-code="unreachable, var-annotated"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.early import early
from kernels.jit import gluon_jit
from kernels.launch import launch

PAGE_ROWS = 64
HEADS = 64
DIM = 128
STAGES = 2  # pages that a program has in flight; more cost more instructions than they hide time
SHORT = 8192  # entries; where there is no room for more, starting a product early pays


@dataclass(frozen=True, slots=True)
class Tiling:
    """programs: a multiprocessor. registers: at most, a thread. keep_weights: the heads' weights stay in registers. ahead: a
    product of one token starts before the one before it is reduced; otherwise one product takes all tokens, and its page is
    asked for again as soon as it is done."""

    programs: int
    registers: int
    keep_weights: bool
    ahead: bool


def tiling(members: int, capacity: int) -> Tiling:
    """For so many tokens that share the keys, and rows with so much room; found on an H200."""
    if members == 1:
        return Tiling(4, 128, True, True) if capacity <= SHORT else Tiling(5, 96, True, False)
    return Tiling(4, 128, False, False) if members == 2 else Tiling(2, 255, True, True)


def fits(kind: str, page_rows: int, heads: int, dim: int) -> bool:
    return kind == "fp8" and (page_rows, heads, dim) == (PAGE_ROWS, HEADS, DIM)


def start(chosen: Tiling, programs: int, arguments: tuple[Any, ...], shared: dict[str, Any]) -> None:
    """arguments and constexprs as indexer.score_entries has them ready."""
    launch(
        _score_kernel,
        (programs,),
        *arguments,
        MEMBERS_PADDED=next_power_of_2(shared["MEMBERS"]),
        STAGES=STAGES,
        KEEP_WEIGHTS=chosen.keep_weights,
        AHEAD=chosen.ahead,
        num_warps=4,
        maxnreg=chosen.registers,
        **shared,
        **early(),
    )


def descriptor(keys: Tensor) -> Any:
    """What the copy engine needs to know of keys e4m3 [pages, 64, 128]; one page at a time."""
    by_rows = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)
    return TensorDescriptor.from_tensor(keys, [1, PAGE_ROWS, DIM], by_rows)


@gluon_jit
def _add(left, right):
    return left + right


@gluon_jit
def _divide_up(value, by):
    return (value + (by - 1)) // by


@gluon_jit
def _last_positions(positions, first, count, MEMBERS, MEMBERS_PADDED, GROUPS_PADDED, LAYOUT):
    """The largest position in each group of tokens, int32 [GROUPS_PADDED]; -1 beyond the last."""
    group = gl.arange(0, GROUPS_PADDED, gl.SliceLayout(1, LAYOUT))
    member = gl.arange(0, MEMBERS_PADDED, gl.SliceLayout(0, LAYOUT))
    token = group[:, None] * MEMBERS + member[None, :]
    real = (member[None, :] < MEMBERS) & (token < count)
    position = gl.load(positions + first + token, mask=real, other=-1)
    return gl.max(position.to(gl.int32), 1)


@gluon_jit
def _share(pages, ends, numbers, programs, STAGES: gl.constexpr):
    """This program's part of the pages of all groups, laid end to end: int32 (first, behind the last).

    Long parts are equal, in whole turns of the loop: a turn that is not whole reads a page for nothing. Short ones belong to
    one group each, because to begin with another costs as much as some pages: their number is the least (nearly) for which
    there are not more parts than programs.
    """
    program, total = gl.program_id(0), gl.sum(pages, 0)
    first = (program.to(gl.int64) * total // programs).to(gl.int32)
    stop = ((program + 1).to(gl.int64) * total // programs).to(gl.int32)
    if total < 64 * programs:
        quota = gl.maximum(_divide_up(total, programs), 1)
        step = 1 + quota // 32
        longest = gl.maximum(gl.max(pages, 0), 1)
        while (gl.sum(_divide_up(pages, quota), 0) > programs) & (quota < longest):
            quota += step
        parts = _divide_up(pages, quota)
        part_ends = gl.associative_scan(parts, 0, _add)
        if gl.sum(parts, 0) <= programs:
            mine = numbers == gl.sum((part_ends <= program).to(gl.int32), 0)
            group_pages, group_parts = gl.sum(gl.where(mine, pages, 0), 0), gl.sum(gl.where(mine, parts, 0), 0)
            part = program - (gl.sum(gl.where(mine, part_ends, 0), 0) - group_parts)
            start = gl.sum(gl.where(mine, ends, 0), 0) - group_pages
            divisor = gl.maximum(group_parts, 1)  # 0 for a program without work
            first, stop = start + part * group_pages // divisor, start + (part + 1) * group_pages // divisor
    else:
        first = first // STAGES * STAGES
        stop = gl.where(program + 1 < programs, stop // STAGES * STAGES, total)
    return first, stop


@gluon_jit
def _multiply(key_buffer, query_buffer, spare):
    """Starts keys x queries, into the registers of `spare`."""
    return warpgroup_mma(key_buffer.reshape([64, 128]), query_buffer.permute([1, 0]), spare, use_acc=False, is_async=True)


@gluon_jit
def _relu(value):
    """relu(value) / 2^25, exact: below 2^25 in size, the largest sum of 128 products of e4m3. Saturation is free in a
    multiplication; a maximum runs at half its rate."""
    return gl.inline_asm_elementwise(
        "mul.rn.sat.f32 $0, $1, 0f33000000;", "=r,r", [value], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon_jit
def _sums(dots, weight, TOGETHER: gl.constexpr, MMA: gl.constexpr):
    """dots [64 keys, TOGETHER * 64 heads] of one or two tokens -> for each, the sum over the heads of weight * relu(dot)."""
    products = _relu(dots) * weight[None, :]
    if TOGETHER == 1:
        return (gl.sum(products, 1),)
    else:  # noqa: RET505  (both branches of a constexpr)
        left, right = gl.split(gl.sum(gl.reshape(products, [64, 2, 64]), 2))
        return gl.convert_layout(left, gl.SliceLayout(1, MMA)), gl.convert_layout(right, gl.SliceLayout(1, MMA))


@gluon_jit
def _store_page(score, score_page, maximum_page, left, MMA: gl.constexpr):
    """Stores scores [64 keys] of one token and the maxima of 8 neighbours: of the first `left` keys. Addresses are a number of
    the page plus a small one of the thread, which costs fewest registers."""
    row = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    seen = row < left
    gl.store(score_page + row, score, mask=seen)
    best = gl.max(gl.reshape(gl.where(seen, score, float("-inf")), [8, 8]), 1)
    group = gl.arange(0, 8, best.type.layout)
    gl.store(maximum_page + group, best, mask=group * 8 < left)


@gluon_jit(do_not_specialize=["count", "longest", "table_stride"])
def _score_kernel(
    queries,
    query_scales,
    head_weights,
    keys,
    key_scales,
    page_table,
    positions,
    sequence_ids,
    scores,
    maxima,
    first,
    count,
    programs,
    longest,
    table_stride,
    capacity,
    query_stride,
    weight_stride,
    scale_stride,
    RATIO: gl.constexpr,
    MEMBERS: gl.constexpr,
    MEMBERS_PADDED: gl.constexpr,
    UNIFORM: gl.constexpr,
    GROUPS_PADDED: gl.constexpr,
    TOPK: gl.constexpr,
    STAGES: gl.constexpr,
    KEEP_WEIGHTS: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    num_warps: gl.constexpr,
):
    """As indexer._score_kernel, a page being a tile. A turn of the loop takes STAGES pages, each with buffers and barriers of
    its own: so addresses are constants, and the compiler sees that a copy and a product do not meet."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    BY_HEAD: gl.constexpr = gl.SliceLayout(0, MMA)
    # Every warp plans for itself: no shared memory, no barrier.
    EACH: gl.constexpr = GROUPS_PADDED // 32 if GROUPS_PADDED > 32 else 1
    PLAN: gl.constexpr = gl.BlockedLayout([EACH, MEMBERS_PADDED], [32, 1], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([EACH], [32], [4], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])

    key_buffers, ready = (), ()
    for stage in gl.static_range(STAGES):
        key_buffers = key_buffers + (gl.allocate_shared_memory(keys.dtype, [1, 64, 128], keys.layout),)
        ready = ready + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(ready[stage], count=1)
    TOGETHER: gl.constexpr = 1 if AHEAD else MEMBERS  # tokens of a product
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64 * TOGETHER, 32])
    query_buffers = gl.allocate_shared_memory(
        keys.dtype,
        [MEMBERS // TOGETHER, 64 * TOGETHER, 128],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2),
    )
    weight_buffers = gl.allocate_shared_memory(
        gl.float32, [MEMBERS // TOGETHER, 64 * TOGETHER], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    fence_async_shared()
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )

    last_position = gl.convert_layout(
        _last_positions(positions, first, count, MEMBERS, MEMBERS_PADDED, GROUPS_PADDED, PLAN), FLAT
    )
    entries = (last_position + 1) // RATIO
    pages = gl.where(entries > TOPK, _divide_up(entries, 64), 0)
    ends = gl.associative_scan(pages, 0, _add)
    numbers = gl.arange(0, GROUPS_PADDED, FLAT)
    place, stop = _share(pages, ends, numbers, programs, STAGES)
    page_row = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    parity = 0
    while place < stop:
        group = gl.sum((ends <= place).to(gl.int32), 0)
        mine = numbers == group
        group_end = gl.sum(gl.where(mine, ends, 0), 0)
        group_pages = gl.sum(gl.where(mine, pages, 0), 0)
        begin = place - (group_end - group_pages)
        run_end = gl.minimum(stop, group_end) - (group_end - group_pages)
        place = gl.minimum(stop, group_end)
        position = gl.sum(gl.where(mine, last_position, 0), 0)
        if UNIFORM:
            low = (first + group * MEMBERS) // longest
            high = low
        else:
            low, high = 0x7FFFFFFF, 0
            for member in gl.static_range(MEMBERS):
                token = (first + gl.minimum(group * MEMBERS + member, count - 1)).to(gl.int64)
                sequence = gl.load(sequence_ids + token).to(gl.int32)
                low, high = gl.minimum(low, sequence), gl.maximum(high, sequence)

        for sequence in range(low, high + 1):
            score_rows, maximum_rows, visible = (), (), ()
            most = 0
            for member in gl.static_range(MEMBERS):
                local = group * MEMBERS + member
                if UNIFORM:
                    seen = (position - (MEMBERS - 1 - member) + 1) // RATIO
                else:
                    token = (first + gl.minimum(local, count - 1)).to(gl.int64)
                    same = (local < count) & (gl.load(sequence_ids + token).to(gl.int32) == sequence)
                    seen = gl.where(same, ((gl.load(positions + token) + 1) // RATIO).to(gl.int32), 0)
                most = gl.maximum(most, seen)
                visible = visible + (gl.minimum(seen, run_end * 64),)
                score_rows = score_rows + (scores + local.to(gl.int64) * capacity,)
                maximum_rows = maximum_rows + (maxima + local.to(gl.int64) * (capacity // 8),)
            end = gl.minimum(run_end, _divide_up(most, 64))
            if begin < end:
                # The last turn may reach beyond `end`: it gets the last page again, and nothing of that is stored.
                table = page_table + gl.cast(sequence, gl.int64) * table_stride
                numbers_of_pages, scales = (), ()
                for stage in gl.static_range(STAGES):
                    mbarrier.expect(ready[stage], 64 * 128)
                    numbers_of_pages = numbers_of_pages + (gl.load(table + gl.minimum(begin + stage, end - 1)),)
                gl.thread_barrier()
                for stage in gl.static_range(STAGES):
                    page = numbers_of_pages[stage]
                    tma.async_copy_global_to_shared(keys, [page.to(gl.int32), 0, 0], ready[stage], key_buffers[stage])
                    scales = scales + (gl.load(key_scales + page * scale_stride + page_row),)

                head, channel = gl.arange(0, 64, gl.SliceLayout(1, ROWS)), gl.arange(0, 128, gl.SliceLayout(0, ROWS))
                by_head = gl.arange(0, 64, BY_HEAD)
                weights = ()
                for member in gl.static_range(MEMBERS):
                    token = (first + gl.minimum(group * MEMBERS + member, count - 1)).to(gl.int64)
                    query = gl.load(queries + token * query_stride + head[:, None] * 128 + channel[None, :])
                    weight = gl.load(head_weights + token * weight_stride + by_head).to(gl.float32)
                    weight *= gl.load(query_scales + token * 64 + by_head) * 33554432.0
                    query_buffers.index(member // TOGETHER).slice(64 * (member % TOGETHER), 64).store(query)
                    if KEEP_WEIGHTS:
                        weights = weights + (weight,)
                    else:
                        weight_buffers.index(member // TOGETHER).slice(64 * (member % TOGETHER), 64).store(weight)
                fence_async_shared()
                gl.thread_barrier()

                for turn in range(begin, end, STAGES):
                    more = turn + STAGES < end
                    spare = gl.zeros([64, 64 * TOGETHER], gl.float32, WIDE)
                    if AHEAD:
                        mbarrier.wait(ready[0], parity)
                        running = _multiply(key_buffers[0], query_buffers.index(0), spare)
                    later_scales = ()
                    for stage in gl.static_range(STAGES):
                        number = turn + stage
                        page = gl.load(table + gl.minimum(number + STAGES, end - 1))
                        for product in gl.static_range(MEMBERS // TOGETHER):
                            if not AHEAD:
                                mbarrier.wait(ready[stage], parity)
                                running = _multiply(key_buffers[stage], query_buffers.index(0), spare)
                                dots = warpgroup_mma_wait(0, deps=[running])
                            elif stage + 1 == STAGES and product + 1 == MEMBERS // TOGETHER:
                                dots = warpgroup_mma_wait(0, deps=[running])
                            else:
                                if product + 1 == MEMBERS // TOGETHER:
                                    mbarrier.wait(ready[stage + 1], parity)
                                    after = _multiply(key_buffers[stage + 1], query_buffers.index(0), spare)
                                else:
                                    after = _multiply(key_buffers[stage], query_buffers.index(product + 1), spare)
                                dots = warpgroup_mma_wait(1, deps=[running])
                                running = after
                            if product + 1 == MEMBERS // TOGETHER:  # this page's last product: refill its buffer
                                mbarrier.expect(ready[stage], 64 * 128, pred=more)
                                gl.thread_barrier()  # every warp has done with it
                                tma.async_copy_global_to_shared(
                                    keys, [page.to(gl.int32), 0, 0], ready[stage], key_buffers[stage], pred=more
                                )
                                later_scales = later_scales + (gl.load(key_scales + page * scale_stride + page_row),)
                            if KEEP_WEIGHTS:
                                product_weight = weights[product]
                            else:
                                product_weight = weight_buffers.index(product).load(gl.SliceLayout(0, WIDE))
                            sums = _sums(dots, product_weight, TOGETHER, MMA)
                            for part in gl.static_range(TOGETHER):
                                _store_page(
                                    sums[part] * scales[stage],
                                    score_rows[product * TOGETHER + part] + number * 64,
                                    maximum_rows[product * TOGETHER + part] + number * 8,
                                    visible[product * TOGETHER + part] - number * 64,
                                    MMA,
                                )
                    scales = later_scales
                    parity ^= 1
                gl.thread_barrier()  # every warp has done with the queries
