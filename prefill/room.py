"""The model of a prefill worker, its kernels compiled, and its KV memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from model.memory import TRIAL, CudaGauge, Gauge, first_arena, given_room, kv_room
from model.runner import Runner, chunk_lengths, doubling
from prefill.config import PrefillConfig

WARM_PROMPTS = 64  # of one step; more are few enough to be let wait for a compiler
WARM_SHARE = 64  # tokens; a step of longer shares has the code of one prompt as long
_log = logging.getLogger("prefill")


def make_runner(config: PrefillConfig) -> Runner:
    """Loads the model. Raises ValueError when something is wrong with it or too large, RuntimeError when a step fails."""
    sizes = first_arena(config.num_pages, config.num_slots, config.device)
    runner = Runner(
        config.model, config.device, config.kv_dtype, config.page_tokens, index_keys=config.index_keys,
        max_context=config.max_context, **sizes,
    )  # fmt: skip
    runner.warm_up(warm_steps(config.step_tokens, config.chunk_tokens))
    if sizes is not TRIAL:
        _log.info("%s", given_room(runner.layout, sizes))
    else:
        allot(config, runner, CudaGauge(runner.device))
    return runner


def warm_steps(step_tokens: int, chunk_tokens: int) -> Iterator[list[int]]:
    """Tokens of each prompt of the steps to warm up for: together they run nearly all the machine code that any step asks
    for, which follows from how many tokens it has, how many prompts, the longest share, and whether all are as long."""
    lengths = chunk_lengths(chunk_tokens)
    yield from ([tokens] for tokens in lengths)
    for prompts in doubling(WARM_PROMPTS)[1:]:
        shares = [[tokens] * prompts for tokens in lengths if tokens <= WARM_SHARE]
        shares += [[1] * (prompts - 1) + [tokens] for tokens in range(2, 6)]  # as a decode step's, but not as long
        yield from (each for each in shares if sum(each) <= step_tokens and max(each) <= chunk_tokens)
    yield [chunk_tokens] * max(1, step_tokens // chunk_tokens)


def allot(config: PrefillConfig, runner: Runner, gauge: Gauge) -> None:
    """Makes the KV memory of what is left beside the largest step, at the end of the longest prompts."""
    longest, chunk = config.longest(runner.config.max_position_embeddings), config.chunk_tokens
    rows = max(1, config.step_tokens // chunk)
    free_bytes, total_bytes = gauge.free_and_total()
    step_bytes = gauge.peak(lambda: runner.run_once([chunk] * rows, max(0, longest - chunk)))
    room = kv_room(runner.layout, free_bytes, total_bytes, config.memory_fraction, step_bytes, config.num_slots, longest)
    runner.make_arena(room.num_pages, room.num_slots)
    _log.info("%s", room)
