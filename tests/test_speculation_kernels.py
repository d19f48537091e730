"""What the steps of the bundled model ask of the compiler is in the table of kernels.check: plain steps, chunks of prompts, and
what speculation adds: steps that verify 1 to 4 drafts, the passes of the draft layer behind them, and steps that only leave
its rows. Shown without a GPU, by what steps and cases launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import pytest
import torch

from decode.graphs import batch_sizes, ways_of
from decode.step import Step
from kernels import backend
from kernels.cases.case import TINY
from kernels.check import UNTOUCHED, cases_of, groups
from kernels.sequences import MOST_DRAFTS, SequenceTable
from kvtransfer.arena import Arena
from model.cache import LayerCache, kv_layout
from model.config import ModelConfig
from model.mtp import MTP
from model.runner import Runner
from model.transformer import Transformer
from model.weights import Checkpoint
from tests.system import ROOT
from tests.test_capture_safety import META, ShapesRunner, codes_of, prompts_of

BUNDLED = str(ROOT / "bundled/tiny")  # whose widths are TINY
BATCHES = (1, 8, 64)
PER_SEQUENCE = "GROUPS_PADDED"  # grows with the sequences and not with their tokens: the table has one or two of each
PER_TOKEN = ("kernels.attention._combine", "SPLITS")  # another for nearly each number of tokens, of which a loop is no longer
CHUNKS = ((1,), (2,), (5,), (7,), (16,), (64,), (100,), (256,), (512,), (3, 3), (40, 60))  # tokens of each prompt
Variants = dict[str, set[tuple[Any, ...]]]  # by kernel: constants, and the dtypes of the others


def variants_of(run: Callable[[], Any]) -> Variants:
    def variant(kernel: str, constants: tuple[Any, ...], looked_at: tuple[Any, ...]) -> tuple[Any, ...]:
        held = [each for each in constants if each[0] != PER_SEQUENCE and (kernel, each[0]) != PER_TOKEN]
        return tuple(held), tuple(each[0] for each in looked_at)

    return {kernel: {variant(kernel, *code) for code in codes} for kernel, codes in codes_of(run).items()}


def together(parts: list[Variants]) -> Variants:
    found: Variants = defaultdict(set)
    for part in parts:
        for kernel, variants in part.items():
            found[kernel] |= variants
    return found


class Bundled:
    """The bundled model without data."""

    def __init__(self) -> None:
        config = ModelConfig.load(BUNDLED)
        checkpoint, layout = Checkpoint.open(BUNDLED, config, META), kv_layout(config, "fp8")
        self._main = Transformer(checkpoint, "fp8")
        self._mtp, arena = MTP(checkpoint, self._main, "fp8"), Arena(layout, 8, 4, META)
        self._caches = [LayerCache.of(arena, config, layer) for layer in range(config.num_layers)]
        self._runner, self._vocab = cast(Runner, ShapesRunner(self._main, self._mtp, self._caches, layout)), config.vocab_size

    def step(self, rows: int, tokens: int, speculates: bool) -> None:
        step = Step(self._runner, SequenceTable.make(rows, rows + 1, 64, self._vocab, META), rows, tokens)
        step.forward()
        for asks in ways_of(tokens, speculates):
            step.finish(asks)

    def prefill(self, lengths: Sequence[int]) -> None:
        """A chunk of each of so many prompts, as a prefill worker computes it."""
        batch = prompts_of(lengths, pages=16)
        streams = self._main.forward(batch, self._caches[: len(self._main.layers)])
        self._main.logits(streams[: len(lengths)])
        self._mtp.store(streams, batch.tokens, batch, self._caches[-1])


@cache
def checked(kernels: backend.Backend) -> Variants:
    """What the cases of kernels.check launch at these widths, by the active backend `kernels`."""

    def cases() -> None:
        for group in groups():
            for case in cases_of(group, TINY):
                case.run(case.make(torch.device("cpu"), UNTOUCHED))

    return variants_of(cases)


def missing(asked: Variants) -> Variants:
    there = checked(backend.active())
    found = {kernel: variants - there.get(kernel, set()) for kernel, variants in asked.items()}
    return {kernel: variants for kernel, variants in found.items() if variants}


@pytest.mark.parametrize("alike", [True, False], ids=["batch-invariant", "fastest"])
def test_the_table_has_what_plain_steps_launch(alike: bool, target: backend.Backend) -> None:
    """Of all sizes that a decode worker captures."""
    model = Bundled()
    with backend.cutting(alike=alike):
        asked = together([variants_of(partial(model.step, rows, 1, False)) for rows in batch_sizes(BATCHES[-1])])
    assert sum(map(len, asked.values())) > 50 and missing(asked) == {}


def test_the_table_has_what_chunks_of_prompts_launch(target: backend.Backend) -> None:
    """Less the indexer's code for prompts of 2 to 4 tokens beside shorter ones."""
    model = Bundled()
    asked = together([variants_of(partial(model.prefill, lengths)) for lengths in CHUNKS])
    assert sum(map(len, asked.values())) > 50 and missing(asked) == {}


def test_the_table_has_what_speculation_adds(target: backend.Backend) -> None:
    """All that a worker with --speculate 4 launches and one without does not, in steps of as many tokens and fewer."""
    step = Bundled().step
    shapes = [(rows, tokens) for rows in BATCHES for tokens in range(1, MOST_DRAFTS + 2)]
    plain = together([variants_of(partial(step, rows * tokens, 1, False)) for rows, tokens in shapes])
    added = together([variants_of(partial(step, rows, tokens, True)) for rows, tokens in shapes])
    added = {kernel: variants - plain.get(kernel, set()) for kernel, variants in added.items()}
    for kernel in ("_begin_step", "_finish_step", "_row_parameters", "_begin_draft", "_keep_draft"):
        assert added[f"kernels.sequences.{kernel}"], "nothing was asked: the test shows nothing"
    assert added["kernels.streams._join_streams"] and added["kernels.indexer._score_kernel"]
    assert missing(added) == {}
