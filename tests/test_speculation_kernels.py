"""What speculation alone asks of the compiler is in the table of kernels.check: steps that verify 1 to 4 drafts, the passes of
the draft layer behind them, and steps that only leave its rows. Shown without a GPU, by what steps and cases launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from decode.graphs import ways_of
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
from tests.test_capture_safety import META, ShapesRunner, codes_of

BUNDLED = str(ROOT / "bundled/tiny")  # whose widths are TINY
BATCHES = (1, 8, 64)
PER_SEQUENCE = "GROUPS_PADDED"  # grows with the sequences and not with their tokens: the table has one or two of each
Variants = dict[str, set[tuple[Any, ...]]]  # by kernel: constants, and the dtypes of the others


def variants_of(run: Callable[[], Any]) -> Variants:
    def variant(constants: tuple[Any, ...], looked_at: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each for each in constants if each[0] != PER_SEQUENCE), tuple(each[0] for each in looked_at)

    return {kernel: {variant(*code) for code in codes} for kernel, codes in codes_of(run).items()}


def together(parts: list[Variants]) -> Variants:
    found: Variants = defaultdict(set)
    for part in parts:
        for kernel, variants in part.items():
            found[kernel] |= variants
    return found


def bundled() -> tuple[Runner, int]:
    """The bundled model without data, and the ids of its vocabulary."""
    config = ModelConfig.load(BUNDLED)
    checkpoint, layout = Checkpoint.open(BUNDLED, config, META), kv_layout(config, "fp8")
    main = Transformer(checkpoint, "fp8")
    mtp, arena = MTP(checkpoint, main, "fp8"), Arena(layout, 8, 4, META)
    caches = [LayerCache.of(arena, config, layer) for layer in range(config.num_layers)]
    return cast(Runner, ShapesRunner(main, mtp, caches, layout)), config.vocab_size


def test_the_table_has_what_speculation_adds(target: backend.Backend) -> None:
    """All that a worker with --speculate 4 launches and one without does not, in steps of as many tokens and fewer."""
    runner, vocab = bundled()

    def step(rows: int, tokens: int, speculates: bool) -> None:
        step = Step(runner, SequenceTable.make(rows, rows + 1, 64, vocab, META), rows, tokens)
        step.forward()
        for asks in ways_of(tokens, speculates):
            step.finish(asks)

    def cases() -> None:
        for group in groups():
            for case in cases_of(group, TINY):
                case.run(case.make(torch.device("cpu"), UNTOUCHED))

    shapes = [(rows, tokens) for rows in BATCHES for tokens in range(1, MOST_DRAFTS + 2)]
    plain = together([variants_of(partial(step, rows * tokens, 1, False)) for rows, tokens in shapes])
    added = together([variants_of(partial(step, rows, tokens, True)) for rows, tokens in shapes])
    added = {kernel: variants - plain.get(kernel, set()) for kernel, variants in added.items()}
    checked = variants_of(cases)
    for kernel in ("_begin_step", "_finish_step", "_row_parameters", "_begin_draft", "_keep_draft"):
        assert added[f"kernels.sequences.{kernel}"], "nothing was asked: the test shows nothing"
    assert added["kernels.streams._join_streams"] and added["kernels.indexer._score_kernel"]
    missing = {kernel: variants - checked.get(kernel, set()) for kernel, variants in added.items()}
    assert {kernel: variants for kernel, variants in missing.items() if variants} == {}
