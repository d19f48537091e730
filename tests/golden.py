"""The golden data for tests: two tiny checkpoints, their prompts, and what DeepSeek's own code answers (README beside it)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.rows import IndexRow, KVRow
from kvtransfer.pages import SeqKV
from model.batch import Batch, Row
from model.cache import index_row, kv_row
from model.runner import Runner
from prefill.engine import Engine
from prefill.prompt import Chunk, Prompt
from wire.messages import Prefill, SamplingParams, pack_ids

FOLDER = Path(__file__).parent / "data" / "golden"
CASES = ("tiny-bf16", "tiny-fp8fp4")
PAGE_TOKENS = 256
DEVICE = os.environ.get("PDSERVE_TEST_DEVICE", "cpu")  # "cuda": the Triton kernels on a GPU
EXACT = DEVICE == "cpu"  # the references: what is computed in steps of other shapes is the same to the bit, or nearly
# How far apart a row of KV may be, as rms relative to the row, that kernels made in steps of different shapes: they add up
# float32 in another order, and the FP8 units of Hopper keep 14 bits of a sum. Unquantised those are last bits: sums 1e-6 apart
# give 5e-6. Quantised, a rounding that flips flips others behind it, and a row is soon as if it had been rounded to e4m3 once
# more, however small the first difference was: sums from 1e-7 to 1e-3 apart give 0.036 over all rows, and 0.18 in the worst,
# where an expert or a value of an FP4 index key has flipped. A row of another position or prompt is 0.28 away at least, as the
# prompts repeat tokens, and mostly 1.1.
ROW_ROOM = {"unquantised": 1e-4, "quantised": 0.25}
ROWS_ROOM = {"unquantised": 2e-5, "quantised": 0.06}  # all together, where there are MANY_ROWS
MANY_ROWS = 100

torch.set_num_threads(1)


@cache
def verify() -> ModuleType:
    """The comparison that came with the data: tolerances, near-ties and all."""
    spec = importlib.util.spec_from_file_location("golden_verify", FOLDER / "verify.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def case(name: str) -> Any:
    """verify.Case: `.prompts[p]["ids" | "tokens" | ...]`, `.t["p.logits"]`, `.js["batches"]`, `.n` new tokens."""
    return verify().Case(str(FOLDER / name))


def goes_on_like(name: str, which: str, tokens: Sequence[int], most: int = 32) -> bool:
    """Whether greedy `tokens`, `most` at most, are the stored ones behind a prompt: on kernels up to where the stored logits
    nearly tie, as roundings may decide there, and everything behind."""
    stored, limits = case(name).prompts[which], case(name).js["tolerance"][case(name).js["default_profile"]]
    places = zip(tokens, stored["tokens"], stored["gaps"], strict=False)  # a text may end early behind a tie
    gap = next((gap for ours, theirs, gap in places if ours != theirs), None)
    return len(tokens) == min(most, len(stored["tokens"])) if gap is None else not EXACT and gap <= limits["tie_gap"]


def model_dir(name: str, folder: str = "model") -> str:
    return str(FOLDER / name / folder)


def prompt(name: str, which: str) -> tuple[list[int], list[int]]:
    """(ids, the greedy tokens that follow)."""
    stored = case(name).prompts[which]
    return list(stored["ids"]), list(stored["tokens"])


@cache
def units() -> dict[str, Tensor]:
    """Inputs and outputs of the quantisers."""
    stored = verify().read_safetensors(str(FOLDER / "tiny-fp8fp4" / "expected" / "units.safetensors"))
    return {name: torch.from_numpy(value.copy()) for name, value in stored.items()}


@cache
def layer_outputs(name: str) -> dict[str, Tensor]:
    stored = verify().read_safetensors(str(FOLDER / name / "expected" / "layers.safetensors"))
    return {key: torch.from_numpy(value.copy()) for key, value in stored.items()}


def runner(name: str, kv_dtype: str = "auto", folder: str = "model", index_keys: str = "auto") -> Runner:
    """One loaded model per test process; 64 pages and 20 slots. Its backend is active afterwards, as behind a loading."""
    backend.choose(torch.device(DEVICE))
    return loaded(name, kv_dtype, folder, index_keys)


@cache
def loaded(name: str, kv_dtype: str = "auto", folder: str = "model", index_keys: str = "auto") -> Runner:
    return Runner(model_dir(name, folder), DEVICE, kv_dtype, PAGE_TOKENS, index_keys=index_keys, num_pages=64, num_slots=20)


def pages_of(slot: int) -> list[int]:
    """Three pages (768 tokens) that belong to `slot` in these tests."""
    return [3 * slot - 2, 3 * slot - 1, 3 * slot]


def run(model: Runner, rows: Sequence[tuple[int, Sequence[int], int]]) -> tuple[Tensor, Batch]:
    """One step of (slot, tokens, start) rows: the streams of every token, and the batch."""
    batch = Batch.build([Row(tokens, start, slot, pages_of(slot)) for slot, tokens, start in rows], PAGE_TOKENS, model.device)
    return model.forward(batch), batch


def rows_alike(model: Runner, kind: str, got: Tensor, wanted: Tensor) -> bool:
    """Whether rows of a field of that kind (model/cache.py), uint8 [N, bytes], are the same but for roundings (ROW_ROOM)."""
    values, expected = row_values(model, kind, got), row_values(model, kind, wanted)
    errors, sizes = (each.square().sum(-1) for each in (values - expected, expected))
    case = "quantised" if model.config.quantised else "unquantised"
    together = len(sizes) < MANY_ROWS or errors.sum() <= ROWS_ROOM[case] ** 2 * sizes.sum()
    return bool(together) and bool((errors <= ROW_ROOM[case] ** 2 * sizes).all())  # not where there is a NaN


def row_values(model: Runner, kind: str, rows: Tensor) -> Tensor:
    """float64 [N, channels]."""
    if kind.endswith("state"):
        return rows.view(torch.float32).double()
    return row_of(model, kind).unpack(rows)


def row_of(model: Runner, kind: str) -> KVRow | IndexRow:
    """What a row of a field of that kind (model/cache.py) is."""
    if kind == "csa_index":
        return index_row(model.config, model.kv_dtype, model.index_keys)
    return kv_row(model.config, model.kv_dtype)


def prefill(model: Runner, prompts: Sequence[tuple[int, Sequence[int]]], chunk: int) -> None:
    """Prefill's own engine over (slot, ids) prompts together, `chunk` tokens of each a step: all that decode gets of them
    before it feeds each one's last token."""
    engine, waiting = Engine(model), [_prompt(slot, list(ids)) for slot, ids in prompts]
    while chunks := [Chunk(prompt, min(chunk, prompt.remaining)) for prompt in waiting if prompt.remaining]:
        engine.compute(chunks)
        for each in chunks:
            each.prompt.computed += each.count


def _prompt(slot: int, ids: list[int]) -> Prompt:
    message = Prefill(slot, 0, pack_ids(ids), len(ids), (0,), SamplingParams(max_tokens=1, seed=0), "", "", 60.0)
    return Prompt((slot, 0), message, ids, [0], 0.0, 60.0, None, SeqKV(slot, pages_of(slot)))


def logits_in_chunks(model: Runner, ids: Sequence[int], cuts: Sequence[int], slot: int = 1, start: int = 0) -> Tensor:
    """Logits of every token of `ids` (at position `start` on), fed as chunks of `cuts` tokens, the last size repeated."""
    out, at, sizes = [], 0, list(cuts)
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out.append(model.logits(run(model, [(slot, ids[at : at + size], start + at)])[0]).cpu())
        at += size
    return torch.cat(out)


def greedy(model: Runner, first: Sequence[int], lengths: Sequence[int], slots: Sequence[int], steps: int) -> list[list[int]]:
    """`steps` more tokens of each sequence, decoded together, whose `first` token comes at position lengths[i]."""
    answers = [[token] for token in first]
    for step in range(steps):
        rows = [(slot, answer[-1:], length + step) for slot, answer, length in zip(slots, answers, lengths, strict=True)]
        best = model.logits(run(model, rows)[0]).argmax(-1).tolist()
        for answer, token in zip(answers, best, strict=True):
            answer.append(token)
    return answers
