"""Drafts right behind a hand-off are as good as those of one process that has seen the whole prompt, and behind a pause as if
there had been none: the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from decode.speculation import WARM_STEPS
from model.runner import Runner
from scripts.tiny_data import HELD_OUT_SEED, World
from tests import golden
from tests.speculating import Said, make_engine, say, sequence_of
from tests.system import ROOT
from tests.test_draft_rows import hand_over, ring
from wire.messages import SamplingParams

BUNDLED = ROOT / "bundled/tiny"
TOLD = 32  # tokens behind the hand-off that are looked at
PAUSE, LOOK = 16, 16  # steps
DRAFTS = 2
PROMPTS = 6
GREEDY = SamplingParams(max_tokens=TOLD, seed=0, temperature=0.0, ignore_eos=True)


@dataclass
class Both:
    """The two sides of a hand-off, and held-out prompts."""

    prefill: Runner
    decode: Runner
    prompts: list[list[int]]

    def accepted(self, there: Runner) -> float:
        """The share of drafts that are accepted in the first tokens, of sequences whose prompts are in slots 1, 2, ..."""
        said = say(there, [sequence_of(slot, ids, GREEDY) for slot, ids in enumerate(self.prompts, 1)], lambda step: DRAFTS + 1)
        counts = [count for each in said.counts for count in each[1:]]
        return (sum(counts) - len(counts)) / (DRAFTS * len(counts))

    def accepted_behind(self, pause: bool, warm: int) -> float:
        """The same of LOOK steps behind others of one token, the last `warm` of which store; those before do so without a
        pause alone."""
        self.through_the_wire()
        endless = replace(GREEDY, max_tokens=400)
        said = Said([sequence_of(slot, ids, endless) for slot, ids in enumerate(self.prompts, 1)])
        engine = make_engine(self.decode, len(self.prompts))
        for stores in [not pause] * (PAUSE + WARM_STEPS - warm) + [True] * warm:
            said.advance(engine, 1, stores)
        for _ in range(LOOK):
            said.advance(engine, DRAFTS + 1)
        counts = [count for each in said.counts for count in each[1 - LOOK :]]
        return (sum(counts) - len(counts)) / (DRAFTS * len(counts))

    def through_the_wire(self) -> None:
        golden.prefill(self.prefill, list(enumerate(self.prompts, 1)), 100)
        self.decode.arena.slots.zero_()
        for slot, ids in enumerate(self.prompts, 1):
            hand_over(self.prefill, slot, self.decode, slot, len(ids) - 1)


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    world, rng = World(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), HELD_OUT_SEED, 600), Random(7)
    prompts = [world.story_sequence(rng, 150 + 20 * n).ids.tolist() for n in range(PROMPTS)]
    prefill, decode = (Runner(str(BUNDLED), num_pages=3 * PROMPTS + 1, num_slots=PROMPTS + 1) for _ in range(2))
    yield Both(prefill, decode, prompts)


def test_acceptance_behind_a_hand_off_is_that_of_one_process(both: Both) -> None:
    """Within 5 %; and without the rows that prefill leaves of the last positions it is far below."""
    for slot, ids in enumerate(both.prompts, 1):
        streams, batch = golden.run(both.prefill, [(slot, ids[:-1], 0)])
        both.prefill.draft_streams(streams, torch.tensor(ids[1:]), batch)
    alone = both.accepted(both.prefill)
    both.through_the_wire()
    handed_over = both.accepted(both.decode)
    both.through_the_wire()
    ring(both.decode).zero_()
    without = both.accepted(both.decode)

    assert alone > 0.5 and abs(handed_over / alone - 1) <= 0.05
    assert without < 0.9 * alone


def test_acceptance_behind_a_pause_is_that_without_one(both: Both) -> None:
    """Of the same texts at the same places: within 3 % where as many steps have stored as in a worker, and far below where
    none has."""
    without = both.accepted_behind(pause=False, warm=WARM_STEPS)
    warm, cold = (both.accepted_behind(pause=True, warm=steps) for steps in (WARM_STEPS, 0))
    assert without > 0.9 and abs(warm / without - 1) <= 0.03
    assert cold < 0.9 * without
