"""The whole model on the Triton kernels, one short prompt: interpreted where there is no GPU, compiled where there is one.

tests/test_golden.py runs every prompt on the kernels of a GPU; this shows on any machine that weights, rows and steps fit.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernel_backend import DEVICE, WORKSPACE_BYTES, Poisoned, triton_backend  # before any kernel

# isort: split
from decode.graphs import GREEDY
from decode.step import Step
from kernels import backend
from kernels.launch import launches_go_to
from kernels.sequences import SequenceTable
from model.batch import Batch, Row
from model.hyper import HyperConnection
from model.runner import Runner, chunk_lengths, doubling
from tests import golden

torch.set_num_threads(1)


@pytest.mark.usefixtures(triton_backend.__name__)
@pytest.mark.parametrize("name", golden.CASES)
def test_one_prompt_on_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "choose", lambda device: backend.active())
    case = golden.case(name)
    model = Runner(golden.model_dir(name), str(DEVICE), page_tokens=golden.PAGE_TOKENS, num_pages=8, num_slots=3)
    assert backend.active().triton
    ids, tokens = golden.prompt(name, "len1")
    logits = golden.logits_in_chunks(model, ids, [1])
    stored = torch.from_numpy(case.t["len1.last_logits"].copy())
    limits = case.js["tolerance"][case.js["default_profile"]]
    assert (logits[0] - stored).square().mean().sqrt() <= limits["last_rms"]
    assert int(logits[0].argmax()) == tokens[0]


@pytest.mark.usefixtures(triton_backend.__name__)
def test_the_last_token_of_a_prompt_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind 126 tokens of the references: the indexer chooses 8 of 31 entries, whose keys are MXFP4."""
    kernels, name = backend.active(), "tiny-fp8fp4"
    case, (ids, tokens) = golden.case(name), golden.prompt(name, "len127")
    sizes: dict[str, Any] = {"page_tokens": golden.PAGE_TOKENS, "num_pages": 8, "num_slots": 3, "index_keys": "mxfp4"}
    reference = Runner(golden.model_dir(name), "cpu", **sizes)
    backend.use(kernels)
    monkeypatch.setattr(backend, "choose", lambda device: backend.active())
    model = Runner(golden.model_dir(name), str(DEVICE), **sizes)
    backend.use(backend.REFERENCE)
    reference.forward(Batch.build([Row(ids[:-1], 0, 1, [1])], golden.PAGE_TOKENS))
    backend.use(kernels)
    model.arena.pages.copy_(reference.arena.pages)
    model.arena.slots.copy_(reference.arena.slots)
    with Poisoned(WORKSPACE_BYTES, DEVICE).active():
        streams = model.forward(Batch.build([Row(ids[-1:], 126, 1, [1])], golden.PAGE_TOKENS, DEVICE))
        logits = model.logits(streams)[0].cpu()
    stored = torch.from_numpy(case.t["len127.last_logits"].copy())
    limits = case.js["tolerance"][case.js["default_profile"]]
    assert (logits - stored).square().mean().sqrt() <= limits["last_rms"]
    assert int(logits.argmax()) == tokens[0]


@pytest.mark.usefixtures(triton_backend.__name__)
@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("rows", [[(1, 2, 130), (2, 1, 3)], [(2, 6, 129), (1, 1, 0)]])
def test_the_draft_layer_on_the_kernels(name: str, rows: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step and a chunk of (slot, tokens, start): storing alone leaves the bytes that a full pass leaves, and those
    are the reference's but for a rounding here and there.

    Quantised, with sums in float32 hardly a byte differs. Hopper's FP8 units keep 14 bits of a sum: 6e-5 to 2e-4 of noise on
    every sum changes up to a third of a row's bytes, in the last place of a bf16 or by one code of e4m3, 0.06 of the row's rms
    at most. Rows of other positions are 0.33 apart and more."""
    kernels = backend.active()
    reference = Runner(golden.model_dir(name), "cpu", page_tokens=golden.PAGE_TOKENS, num_pages=8, num_slots=3)
    backend.use(kernels)
    monkeypatch.setattr(backend, "choose", lambda device: backend.active())
    model = Runner(golden.model_dir(name), str(DEVICE), page_tokens=golden.PAGE_TOKENS, num_pages=8, num_slots=3)
    given = [Row([5 + slot] * count, start, slot, [1, 2]) for slot, count, start in rows]
    batch = Batch.build(given, golden.PAGE_TOKENS, DEVICE)
    shape = (len(batch.tokens), model.config.hc_mult, model.config.hidden_size)
    streams = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, model.transformer.dtype)
    model.draft_streams(streams, batch.tokens, batch)
    full = model.arena.slots.clone()
    model.arena.slots.zero_()
    model.store_draft_rows(streams, batch.tokens, batch)
    assert torch.equal(model.arena.slots, full)

    assert backend.active().triton
    backend.use(backend.REFERENCE)
    reference.store_draft_rows(streams.cpu(), batch.tokens.cpu(), Batch.build(given, golden.PAGE_TOKENS))
    values, wanted = (runner.mtp_caches[0].window[1:3].cpu() for runner in (model, reference))
    if name != "tiny-fp8fp4":
        torch.testing.assert_close(values.view(torch.float32), wanted.view(torch.float32), rtol=1e-5, atol=1e-5)
    elif DEVICE.type == "cpu":
        assert (values != wanted).double().mean() < 0.001
    else:
        kept, expected = (golden.row_values(reference, "window", each) for each in (values, wanted))
        assert ((kept - expected).norm(dim=-1) <= 0.1 * expected.norm(dim=-1)).all()


@pytest.mark.usefixtures(triton_backend.__name__)
def test_a_step_with_drafts_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts are verified, one of them right, and two are made behind it, each pass in poisoned memory of which it gives
    back what it took: the report and the drafts are those of the references."""
    kernels, name = backend.active(), "tiny-bf16"
    ids, following = golden.prompt(name, "len1")
    reference = Runner(golden.model_dir(name), "cpu", page_tokens=golden.PAGE_TOKENS, num_pages=8, num_slots=3)
    backend.use(kernels)
    monkeypatch.setattr(backend, "choose", lambda device: backend.active())
    model = Runner(golden.model_dir(name), str(DEVICE), page_tokens=golden.PAGE_TOKENS, num_pages=8, num_slots=3)
    found = []
    for runner, active in ((model, kernels), (reference, backend.REFERENCE)):
        backend.use(active)
        table = SequenceTable.make(1, 3, 16, runner.config.vocab_size, runner.device)
        table.rows[0], table.tokens[2], table.pages[2, 0] = 2, ids[0], 3
        table.drafts[2, :2] = torch.tensor([following[0], following[1] + 1])
        step = Step(runner, table, 1, 3)
        spaces = [Poisoned(WORKSPACE_BYTES, runner.device) for _ in range(2)]
        with torch.inference_mode():
            with spaces[0].active():
                step.forward()
            with spaces[1].active():
                step.finish(replace(GREEDY, stores=True))
        found.append((step.report[0, :5].tolist(), table.lengths.tolist(), table.drafts[2].tolist()))
    backend.use(kernels)
    assert found[0] == found[1]
    report, lengths, drafts = found[0]
    assert report[:4] == [2, 0, *following[:2]] and lengths == [0, 0, 2]
    assert min(drafts[:2]) >= 0 and drafts[2:] == [-1, -1]


def test_warming_up_starts_every_kernel_on_the_page_that_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a card that is not there, with kernels that are not started: which are, and that nothing else is touched."""
    before, started = backend.active(), set()
    monkeypatch.setattr(backend, "choose", lambda device: backend.use(backend.TARGETS["sm_120"]))
    try:
        runner = Runner(golden.model_dir("tiny-fp8fp4"), page_tokens=golden.PAGE_TOKENS, num_pages=4, num_slots=3)
        with launches_go_to(lambda kernel, grid, *args, **options: started.add(kernel.fn.__name__)):
            runner.warm_up([[1] * 4, [7], [300]])
    finally:
        backend.use(before)
    kernels = ("_decode", "_attend", "_score_kernel", "_compress", "_kv_rows", "swiglu_kernel", "_choose_kernel")
    for kernel in (*kernels, "_join_streams"):
        assert kernel in started, started
    assert not runner.arena.pages.any(), "kernels alone write pages"


def test_without_kernels_there_is_nothing_to_warm_up() -> None:
    runner = Runner(golden.model_dir("tiny-bf16"), page_tokens=golden.PAGE_TOKENS, num_pages=2, num_slots=2)
    runner.arena.pages[0].fill_(7)
    runner.warm_up([[200, 200]])
    assert (runner.arena.pages[0] == 7).all()


def test_the_sizes_to_warm_up_for_end_with_the_largest() -> None:
    assert [doubling(most) for most in (1, 2, 6, 64)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32, 64]]
    assert [chunk_lengths(most) for most in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 8, 9, 16]]


def test_a_model_that_the_kernels_do_not_take_is_refused_when_it_is_loaded() -> None:
    before, checkpoint = backend.active(), SimpleNamespace(config=SimpleNamespace(hc_mult=2, hidden_size=64))
    try:
        backend.use(backend.TARGETS["sm_90"])
        with pytest.raises(ValueError, match=r"hc_mult is 2.*--device cpu"):
            HyperConnection(checkpoint, "layers.0", "attn")  # type: ignore[arg-type]
    finally:
        backend.use(before)
