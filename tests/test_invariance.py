"""A token's logits are the same bits whatever else is in a decode step, and however many tokens of its sequence.

On a GPU (PDSERVE_TEST_DEVICE=cuda) of the kernels, elsewhere of the references, which round once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import room
from decode.config import DecodeConfig
from kernels import attention, backend, gemm_portable, hyper, route
from kernels.cases.sample import neutral
from kernels.experts import ExpertWeights, experts
from kernels.launch import launches_go_to
from kernels.rows import KVRow
from kernels.sample import sample
from model.batch import Batch, Row
from tests import golden

PROMPTS = ("len5", "len127", "len131", "len257", "len300")
WIDTHS = ((64, 512), (4, 192))  # heads and their dim: the released ones, and small ones
WGMMA_ROWS = 64  # of a product from which the compiler takes Hopper's other matrix instruction


@pytest.fixture(params=sorted(backend.TARGETS))
def invariant(request: pytest.FixtureRequest) -> Iterator[None]:
    before = backend.active()
    backend.use(backend.TARGETS[request.param])
    backend.make_invariant()
    yield
    backend.use(before)


def cuts(tokens: int, heads: int, dim: int) -> tuple[Any, ...]:
    """What says how the sums of a step are cut."""
    q = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device="meta")
    row = KVRow("fp8", dim, 64, rounded=True)
    splits = [attention.tiling(q, row, most_rows).splits for most_rows in (None, 128, 640)]
    return (*splits, route._route_tiles(tokens, 4096)[1:], hyper._tiles(tokens).span)


@pytest.mark.parametrize(("heads", "dim"), WIDTHS)
@pytest.mark.usefixtures("invariant")
def test_no_sum_is_cut_by_the_number_of_tokens(heads: int, dim: int) -> None:
    most = backend.INVARIANT_ROWS
    assert len({cuts(tokens, heads, dim) for tokens in range(1, most + 1)}) == 1
    assert cuts(most + 1, heads, dim) != cuts(most, heads, dim), "a large step is cut as is best for it"
    assert most == gemm_portable.SOME_TOKENS, "with more tokens the dense layers are cut otherwise"


def launched(run: Callable[[], object]) -> dict[str, dict[str, Any]]:
    """The options of the kernels that `run` starts, by their names."""
    found = {}

    def starter(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        found[kernel.fn.__name__] = options

    with launches_go_to(starter):
        run()
    return found


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.usefixtures("invariant")
def test_experts_of_any_format_are_multiplied_by_the_same_units(kind: str) -> None:
    """Few experts, so that many rows ask the same one; FP4 of widths that only the portable kernel takes."""
    weights = ExpertWeights.allocate(kind, 4, 96, 128, "meta")
    rows = set()
    for tokens in (1, 40, backend.INVARIANT_ROWS):
        x = torch.empty(tokens, 96, dtype=torch.bfloat16, device="meta")
        ids = torch.empty(tokens, 3, dtype=torch.int32, device="meta")
        plan = launched(lambda: experts(x, weights, ids, ids.float(), 2.0, None))  # noqa: B023
        rows.add(plan["grouped_kernel"]["ROWS"] < WGMMA_ROWS)
    assert rows == {True}


@pytest.mark.usefixtures("invariant")
def test_log_probabilities_are_summed_alike_whatever_the_neighbours_ask_for() -> None:
    logits = torch.empty(3, 129_280, device="meta")
    parameters = neutral(3, 129_280, 4, "meta")
    warps = {
        launched(lambda: sample(logits, parameters, draws, edits, 0))["_draw_kernel"]["num_warps"]  # noqa: B023
        for draws in (False, True)
        for edits in (False, True)
    }
    assert len(warps) == 1


@pytest.mark.parametrize("target", sorted(backend.TARGETS))
def test_otherwise_steps_are_cut_as_is_fastest(target: str) -> None:
    backend.use(backend.TARGETS[target])
    assert len({cuts(tokens, *WIDTHS[0]) for tokens in (1, 32, 128)}) == 3


@pytest.mark.parametrize("name", golden.CASES)
def test_the_same_bits_alone_in_a_batch_and_with_several_tokens(name: str) -> None:
    model = golden.runner(name)
    backend.make_invariant()
    starts = [len(golden.prompt(name, case)[0]) for case in PROMPTS]
    for slot, case in enumerate(PROMPTS, 1):
        prompt = golden.prompt(name, case)[0]
        model.forward(Batch.build([Row(prompt, 0, slot, golden.pages_of(slot))], golden.PAGE_TOKENS, golden.DEVICE))
    texts = [golden.prompt(name, case)[1][:4] for case in PROMPTS]

    def logits(rows: list[int], tokens: int, behind: int = 0) -> Tensor:
        """[rows, tokens, vocab]"""
        given = [
            Row(texts[row][behind : behind + tokens], starts[row] + behind, row + 1, golden.pages_of(row + 1)) for row in rows
        ]
        streams = model.forward(Batch.build(given, golden.PAGE_TOKENS, golden.DEVICE))
        return model.logits(streams).view(len(rows), tokens, -1)

    everybody = list(range(len(PROMPTS)))
    one_by_one = torch.cat([logits(everybody, 1, behind) for behind in range(4)], 1)
    assert torch.equal(logits(everybody, 4), one_by_one)
    assert torch.equal(logits(everybody[1:3], 2), one_by_one[1:3, :2])
    for row in everybody:
        assert torch.equal(logits([row], 1), one_by_one[row : row + 1, :1])
    assert not torch.equal(one_by_one[0], one_by_one[1])


@pytest.mark.parametrize(
    ("flags", "rows"), [({}, [64]), ({"batch_invariant": "off"}, []), ({"max_batch": 128, "speculate": 3}, [512])]
)
def test_a_worker_is_invariant_unless_it_is_told_not_to_be(
    flags: dict[str, Any], rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    for name in ("make_table", "make_graphs", "Engine"):
        monkeypatch.setattr(room, name, lambda *arguments: None)
    runner = SimpleNamespace(
        config=SimpleNamespace(num_nextn_predict_layers=1),
        layout=SimpleNamespace(pages_for=lambda tokens: 1),
        make_invariant=told.append,
    )
    room.make_engine(DecodeConfig(model="m", router="tcp://127.0.0.1:1", **flags), runner, 1)  # type: ignore[arg-type]
    assert told == rows


def test_too_large_a_step_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = golden.runner("tiny-bf16")
    backend.use(backend.TARGETS["sm_90"])
    for rows, warned in ((256, False), (257, True)):
        model.make_invariant(rows)
        assert backend.active().invariant and ("more than 256 rows" in caplog.text) == warned
