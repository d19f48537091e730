"""A decode step reads nothing on the host and allocates nothing, whatever the lengths are: shown without a GPU.

The model is built on torch's meta device, where tensors have shapes and no data: `.item()`, `.tolist()`, `.cpu()`, `nonzero`
or a shape that depends on data raises, with the line in the traceback. Kernels are not started.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, native_specialize_impl

from decode.step import Asks, Step
from kernels import backend
from kernels.cases import attention as attention_cases
from kernels.cases import indexer as indexer_cases
from kernels.cases.case import V4_FLASH
from kernels.launch import launches_go_to
from kernels.sequences import MOST_DRAFTS, SequenceTable, begin_draft, keep_draft, row_parameters, write_words
from kernels.streams import take_rows
from kernels.workspace import Workspace
from kvtransfer.arena import Arena
from kvtransfer.layout import KVLayout
from model.batch import Batch
from model.cache import LayerCache, kv_layout
from model.config import ModelConfig
from model.mtp import MTP
from model.runner import Runner, chunk_lengths, doubling
from model.transformer import Transformer
from model.weights import Checkpoint
from prefill.room import warm_steps
from tests import golden

META = torch.device("meta")
CREATES_NOTHING = (
    "view",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "permute",
    "transpose",
    "split",
    "alias",
    "t.",
    "detach",
    "unbind",
    "copy_",
)


class NothingNew(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every torch operation but views and copies in place: results come from the workspace, through kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not any(part in name for part in CREATES_NOTHING):
            raise AssertionError(f"{func} makes a tensor of its own in a decode step")
        return func(*args, **(kwargs or {}))


@cache
def shapes_of(name: str, kernels: backend.Backend, index_keys: str = "auto") -> tuple[Transformer, MTP, list[LayerCache]]:
    """Main model, MTP and caches without data, made for the active backend `kernels`."""
    config = ModelConfig.load(golden.model_dir(name))
    checkpoint = Checkpoint.open(golden.model_dir(name), config, META)
    kv_dtype = "fp8" if config.quantised else "fp32"
    main = Transformer(checkpoint, kv_dtype, index_keys)
    mtp = MTP(checkpoint, main, kv_dtype)
    arena = Arena(kv_layout(config, kv_dtype, index_keys=index_keys), 8, 4, META)
    return main, mtp, [LayerCache.of(arena, config, layer) for layer in range(config.num_layers)]


def step_of(sequences: int, tokens: int, pages: int) -> Batch:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int64, device=META)

    count = sequences * tokens
    return Batch(
        positions=tensor(count),
        sequence_ids=tensor(count),
        starts=tensor(sequences),
        cu_tokens=tensor(sequences + 1),
        slots=tensor(sequences),
        page_table=tensor(sequences, pages),
        longest=tokens,
        tokens=tensor(count),
    )


@pytest.mark.parametrize(("name", "index_keys"), [*((name, "auto") for name in golden.CASES), ("tiny-fp8fp4", "mxfp4")])
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (8, 1), (64, 1), (2, 4), (64, 2)])
def test_a_decode_step_can_be_captured(
    name: str, index_keys: str, sequences: int, tokens: int, target: backend.Backend
) -> None:
    main, _, caches = shapes_of(name, target, index_keys)
    batch, started = step_of(sequences, tokens, pages=16), []
    workspace = Workspace(256 << 20, META)
    with launches_go_to(lambda kernel, grid, *args, **options: started.append((kernel, grid))):
        main.forward(batch, caches[: len(main.layers)])  # constants (signs, counters) are made once, before a capture
        started.clear()
        with workspace.active(), NothingNew():  # type: ignore[no-untyped-call]
            logits = main.logits(main.forward(batch, caches[: len(main.layers)]))
    assert logits.shape == (sequences * tokens, main.config.vocab_size)
    assert len(started) > 10 * len(main.layers)


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (8, 1), (64, 1), (1, 5), (2, 4), (64, 2)])
def test_drafts_can_be_captured(name: str, sequences: int, tokens: int, target: backend.Backend) -> None:
    """A draft over all tokens of a step; from one row of each sequence its logits, and a draft behind it; and a step that only
    leaves its rows. Each in a workspace of its own: what goes from one to the next is copied in between."""
    _, mtp, caches = shapes_of(name, target)
    step, one, started = step_of(sequences, tokens, pages=16), step_of(sequences, 1, pages=16), []
    streams = torch.empty(sequences * tokens, mtp.config.hc_mult, mtp.config.hidden_size, dtype=mtp.main.dtype, device=META)
    chosen, kept = torch.empty(sequences, dtype=torch.int64, device=META), streams[:sequences]

    def first() -> torch.Tensor:
        rows = take_rows(mtp.forward(streams, step.tokens, step, caches[-1]), chosen)
        assert rows.shape == kept.shape and rows.dtype == kept.dtype
        return mtp.logits(rows)

    def behind() -> torch.Tensor:
        return mtp.logits(mtp.forward(kept, one.tokens, one, caches[-1]))

    def rows_alone() -> None:
        mtp.store(streams, step.tokens, step, caches[-1])

    workspace = Workspace(256 << 20, META)
    with launches_go_to(lambda kernel, grid, *args, **options: started.append(kernel.fn.__name__)):
        for run in (first, behind, rows_alone):
            run()  # constants are made once, before a capture
            started.clear()
            with workspace.active(), NothingNew():  # type: ignore[no-untyped-call]
                result = run()
            assert result is None or result.shape == (sequences, mtp.config.vocab_size)
            assert "_join_streams" in started and "_kv_rows" in started
            assert (result is None) == ("swiglu_kernel" not in started), "a stored row needs no experts"


@pytest.mark.parametrize("name", golden.CASES)
def test_the_size_of_a_step_does_not_follow_the_longest_context(name: str, target: backend.Backend) -> None:
    """Grids are the same for a graph captured for 16 pages and for 4096: only lengths in device memory decide on work."""
    main, _, caches = shapes_of(name, target)
    grids = []
    for pages in (16, 4096):
        started: list[Any] = []
        with launches_go_to(lambda kernel, grid, *args, **options: started.append((kernel.fn.__name__, grid))):  # noqa: B023
            main.forward(step_of(8, 1, pages), caches[: len(main.layers)])
        grids.append(started)
    assert grids[0] == grids[1]


@pytest.mark.parametrize("name", golden.CASES)
def test_a_chunk_of_a_prompt_reads_nothing_on_the_host(name: str, target: backend.Backend) -> None:
    """So the host can start the next chunk while this one is computed. Two prompts, in steps that are no decode steps."""
    main, _, caches = shapes_of(name, target)
    started: list[str] = []
    with launches_go_to(lambda kernel, grid, *args, **options: started.append(kernel.fn.__name__)):
        logits = main.logits(main.forward(step_of(2, 300, pages=16), caches[: len(main.layers)]))
    assert logits.shape == (600, main.config.vocab_size)
    assert len(started) > 10 * len(main.layers)


class ShapesRunner:
    """What a decode step calls of a Runner, without data."""

    def __init__(self, main: Transformer, mtp: MTP, caches: list[LayerCache], layout: KVLayout) -> None:
        self._main, self._mtp, self._caches, self.layout = main, mtp, caches, layout

    def forward(self, batch: Batch) -> torch.Tensor:
        return self._main.forward(batch, self._caches[: len(self._main.layers)])

    def logits(self, streams: torch.Tensor) -> torch.Tensor:
        return self._main.logits(streams)

    def make_streams(self, rows: int) -> torch.Tensor:
        config = self._main.config
        return torch.zeros(rows, config.hc_mult, config.hidden_size, dtype=self._main.dtype, device=META)

    def draft_streams(self, streams: torch.Tensor, next_tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._mtp.forward(streams, next_tokens, batch, self._caches[-1])

    def draft_logits(self, streams: torch.Tensor) -> torch.Tensor:
        return self._mtp.logits(streams)

    def store_draft_rows(self, streams: torch.Tensor, next_tokens: torch.Tensor, batch: Batch) -> None:
        self._mtp.store(streams, next_tokens, batch, self._caches[-1])


class Flipping(Workspace):
    """Counts the parts of a step that begin to flip: what one of them starts from must not lie in a half that is emptied."""

    parts = 0

    def flip(self) -> None:
        self.parts += self._other_half is None
        super().flip()


ASKS = [Asks(draws, edits, tops) for draws, edits, tops in product((False, True), (False, True), (-1, 0, 1, 20))]


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("sequences", [1, 8, 64])
@pytest.mark.parametrize("stores", [False, True])
def test_a_whole_decode_step_can_be_captured(name: str, sequences: int, stores: bool, target: backend.Backend) -> None:
    """From the table to the report and the drafts behind it, whatever the rows want and however many drafts are verified."""
    main, mtp, caches = shapes_of(name, target)
    layout = kv_layout(main.config, "fp8" if main.config.quantised else "fp32")
    runner = cast(Runner, ShapesRunner(main, mtp, caches, layout))
    table = SequenceTable.make(sequences, sequences + 1, 64, main.config.vocab_size, META)
    forward_space, finish_space = Workspace(512 << 20, META), Flipping(512 << 20, META)
    for tokens in range(1, MOST_DRAFTS + 2):
        started: list[str] = []
        step = Step(runner, table, sequences, tokens)
        with launches_go_to(lambda kernel, grid, *args, **options: started.append(kernel.fn.__name__)):  # noqa: B023
            step.forward()  # constants are made once, before a capture
            started.clear()
            with forward_space.active(), NothingNew():  # type: ignore[no-untyped-call]
                step.forward()
            assert started[0] == "_begin_step" and len(started) > 10 * len(main.layers)
            for asks in ASKS:
                started.clear()
                finish_space.parts = 0
                with finish_space.active(), NothingNew():  # type: ignore[no-untyped-call]
                    step.finish(replace(asks, stores=stores))
                assert finish_space.parts == (tokens - 1 if stores else 0)
                draw = ["_row_parameters", "_scan_kernel", *["_mass_kernel"] * asks.draws, "_draw_kernel"]
                own = [*draw, "_finish_step"]
                assert started[: len(own)] == own
                check_drafts(started[len(own) :], tokens, stores, [*draw, "_keep_draft"])
                assert step.report.shape == (sequences, 2 + 2 * tokens)
                assert [tops.shape for tops in step.tops] == [(sequences * tokens, max(asks.tops, 0))] * 2


def check_drafts(started: list[str], tokens: int, stores: bool, kept: list[str]) -> None:
    """The kernels behind a step's own: a pass of the MTP layer and what keeps its draft, for each draft; or only rows."""
    if not stores:
        assert not started
        return
    passes = max(tokens - 1, 1)
    assert started.count("_join_streams") == started.count("_kv_rows") == passes
    ends = [at for at, kernel in enumerate(started) if kernel == "_keep_draft"]
    assert len(ends) == tokens - 1 and started.count("_begin_draft") == max(tokens - 2, 0)
    assert ("swiglu_kernel" in started) == (tokens > 1), "a stored row needs no experts"
    for end in ends:
        assert started[end + 1 - len(kept) : end + 1] == kept


@pytest.mark.parametrize("drafted", range(MOST_DRAFTS))
def test_a_draft_can_be_captured(drafted: int, target: backend.Backend) -> None:
    """What goes round between two passes of the MTP layer, and the words of the host."""
    table, batch = SequenceTable.make(8, 9, 16, 100, META), step_of(8, 1, 16)
    sampled = torch.empty(8, dtype=torch.int64, device=META)
    pairs = torch.empty(300, 2, dtype=torch.int32, device=META)
    started: list[str] = []
    with (
        launches_go_to(lambda kernel, grid, *args, **options: started.append(kernel.fn.__name__)),
        Workspace(1 << 20, META).active(),
        NothingNew(),  # type: ignore[no-untyped-call]
    ):
        write_words(table, pairs, 17)
        row_parameters(table, batch.slots, 1, drafted)
        keep_draft(table, batch.slots, sampled, drafted)
        begin_draft(table, batch, batch.tokens, drafted + 1)
    assert started == ["_write_words", "_row_parameters", "_keep_draft", "_begin_draft"]


Code = tuple[tuple[Any, ...], tuple[Any, ...]]  # constants, and what triton looks at of each argument
Codes = dict[str, set[Code]]  # by kernel


@cache
def as_compiled(kernel: Any) -> Any:
    """The kernel where it is interpreted, as it would be on a GPU."""
    return kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)


def code_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Code:
    """Two launches with the same answer run the same machine code."""
    parameters = as_compiled(kernel).params
    named = dict(zip([each.name for each in parameters], args, strict=False)) | options
    looked_at = []
    for each in parameters:
        if not each.is_constexpr and named[each.name] is not None:
            specialise, align = not each.do_not_specialize, not each.do_not_specialize_on_alignment
            looked_at.append(native_specialize_impl(BaseBackend, named.pop(each.name), each.is_const, specialise, align))
    return tuple(sorted((name, str(value)) for name, value in named.items())), tuple(looked_at)


def codes_of(run: Callable[[], Any]) -> Codes:
    found: Codes = defaultdict(set)

    def note(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        found[f"{kernel.fn.__module__}.{kernel.fn.__name__}"].add(code_of(kernel, args, options))

    with launches_go_to(note):
        run()
    return found


def specialised(steps: Iterable[Codes]) -> set[str]:
    """Kernels whose machine code follows a number that is no constant: with equal constants, other code in another step."""
    first: dict[Any, set[Any]] = {}
    found = set()
    for codes in steps:
        arguments = defaultdict(set)
        for kernel, (constants, looked_at) in ((kernel, code) for kernel, those in codes.items() for code in those):
            arguments[kernel, constants].add(looked_at)
        found |= {key[0] for key, those in arguments.items() if first.setdefault(key, those) != those}
    return found


def new_codes(steps: Iterable[Codes], warm: Iterable[Codes]) -> dict[str, int]:
    """Kernels of `steps` with code that no step of `warm` has: how many."""
    found: Codes = defaultdict(set)
    for sign, codes in [*((1, codes) for codes in steps), *((-1, codes) for codes in warm)]:
        for kernel, those in codes.items():
            found[kernel] = found[kernel] | those if sign > 0 else found[kernel] - those
    return {kernel: len(left) for kernel, left in found.items() if left}


# How many codes of a kernel may be missing. Splits are a constant, since that saves registers (128 in place of 168 or more):
# a server meets the sizes of steps that it has captured. With few experts tiles grow as fast as what is sorted at once, and
# one pair of the two is not met; with 256 experts all are.
MISSING = {"kernels.attention._combine": 6, "kernels.experts_portable.segments_kernel": 1}
MOST = 40


def not_allowed(missing: dict[str, int]) -> dict[str, int]:
    return {kernel: count for kernel, count in missing.items() if count > MISSING.get(kernel, 0)}


@pytest.mark.parametrize("name", golden.CASES)
def test_no_length_asks_for_machine_code_that_warming_up_did_not_make(name: str, target: backend.Backend) -> None:
    """Chunks of 1 to 40 tokens, steps of as many sequences, and page tables of any width."""
    main, _, caches = shapes_of(name, target)

    def run(sequences: int, tokens: int, pages: int) -> None:
        main.logits(main.forward(step_of(sequences, tokens, pages), caches[: len(main.layers)])[:sequences])

    def codes(shapes: Iterable[tuple[int, int]], pages: int = 16) -> list[Codes]:
        return [codes_of(partial(run, *shape, pages)) for shape in shapes]

    chunks, steps = ([(1, n) for n in range(1, MOST + 1)], [(n, 1) for n in range(1, MOST + 1)])
    warm = codes([*((1, n) for n in chunk_lengths(MOST)), *((n, 1) for n in doubling(MOST))])
    some = [*chunks[:3], *chunks[-2:], *steps[1:3], steps[-1]]
    found = codes([*chunks, *steps]) + codes(some, 33) + codes(some, 82)
    assert not specialised(found)
    assert not_allowed(new_codes(found, warm)) == {}


def test_prompts_of_any_lengths_run_the_code_that_warming_up_made(target: backend.Backend) -> None:
    """Up to 64 prompts in a step, most of them short. One step in a thousand may still meet the compiler (`_combine`)."""
    main, mtp, caches = shapes_of("tiny-fp8fp4", target)
    draw, most = random.Random(5), 512

    def run(lengths: Sequence[int], pages: int) -> None:
        batch = prompts_of(lengths, pages)
        streams = main.forward(batch, caches[: len(main.layers)])
        main.logits(streams[: len(lengths)])
        mtp.store(streams, batch.tokens, batch, caches[-1])

    def prompts() -> list[int]:
        count, together = draw.choice((1, 2, 3, 5, 9, 17, 40)), draw.choice((64, most))
        return [draw.randint(1, together // count) for _ in range(count)]

    warm = [codes_of(partial(run, lengths, 16)) for lengths in warm_steps(most, most)]
    found = [codes_of(partial(run, prompts(), draw.choice((16, 48, 80)))) for _ in range(150)]
    assert not specialised(found)
    assert not_allowed(new_codes(found, warm)) == {}


@pytest.mark.parametrize(("name", "kv_dtype"), [("tiny-bf16", "bf16"), ("tiny-fp8fp4", "fp32"), ("tiny-bf16", "fp32")])
def test_keys_that_are_not_of_the_queries_dtype_are_widened(name: str, kv_dtype: str, target: backend.Backend) -> None:
    """A compiler multiplies no two dtypes; an interpreter does."""
    config = ModelConfig.load(golden.model_dir(name))
    main = Transformer(Checkpoint.open(golden.model_dir(name), config, META), kv_dtype)
    arena = Arena(kv_layout(config, kv_dtype), 8, 4, META)
    caches = [LayerCache.of(arena, config, layer) for layer in range(len(main.layers))]
    scored = []

    def note(kernel: Any, grid: Any, queries: Any = None, *rest: Any, **options: Any) -> None:
        if kernel.fn.__name__ == "_score_kernel":
            scored.append((queries.dtype, rest[2].dtype, options["WIDEN"]))

    with launches_go_to(note):
        main.forward(step_of(2, 1, 16), caches)
    assert scored and scored[0][1] == {"bf16": torch.bfloat16, "fp32": torch.float32}[kv_dtype]
    assert all(asked == kept or widened for asked, kept, widened in scored)


def prompts_of(lengths: Sequence[int], pages: int) -> Batch:
    """A chunk of each of some prompts."""
    batch = step_of(1, sum(lengths), pages)
    batch.longest, count = max(lengths), len(lengths)
    batch.starts, batch.slots = (torch.empty(count, dtype=torch.int64, device=META) for _ in range(2))
    batch.cu_tokens = torch.empty(count + 1, dtype=torch.int64, device=META)
    batch.page_table = torch.empty(count, pages, dtype=torch.int64, device=META)
    return batch


def test_no_length_asks_for_new_code_of_the_kernels_that_only_the_large_model_runs() -> None:
    before = backend.active()
    backend.use(backend.TARGETS["sm_90"])
    try:
        for tokens in (1, 2, 4):
            found, warm = (
                [
                    codes_of(partial(case.run, case.make(META, -1)))
                    for sequences in sizes
                    for case in (
                        indexer_cases.select_case(V4_FLASH, "", indexer_cases.Shape(sequences, tokens, 2048, keys)),
                        indexer_cases.select_case(V4_FLASH, "", indexer_cases.Shape(sequences, tokens, few)),  # all of them
                        indexer_cases.select_case(V4_FLASH, "", indexer_cases.Shape(sequences, tokens, 2048, keys, "mxfp4")),
                        attention_cases.case(V4_FLASH, "", attention_cases.Shape(sequences, tokens, 512, True)),
                        attention_cases.case(V4_FLASH, "", attention_cases.Shape(sequences, tokens, rows)),
                    )
                ]
                for sizes, keys, few, rows in ((range(1, MOST + 1), 3008, 64, 40), (doubling(MOST), 4096, 448, 32))
            )
            assert not specialised(found + warm) and not_allowed(new_codes(found, warm)) == {}
            kernels = {kernel for codes in found for kernel in codes}
            assert {"kernels.indexer_hopper._score_kernel", "kernels.indexer._score_kernel"} <= kernels
            assert "kernels.attention_hopper._decode_hopper" in kernels
    finally:
        backend.use(before)


def test_the_watchman_sees_a_host_read_and_an_allocation() -> None:
    shape = torch.empty(4, device=META)
    for reads in (lambda: shape.sum().item(), lambda: shape.tolist(), lambda: shape.nonzero(), lambda: bool((shape > 0).any())):
        with pytest.raises((RuntimeError, NotImplementedError)):
            reads()
    with NothingNew(), pytest.raises(AssertionError, match="makes a tensor"):  # type: ignore[no-untyped-call]
        shape + 1
