"""What a speculating sequence leaves in its KV is what a plain one leaves, wherever drafts are rejected: byte for byte on the
references; but for roundings on kernels, where a step of other rows and tokens adds up in another order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from decode.sequence import Sequence
from kernels.sequences import MOST_DRAFTS
from model.runner import Runner
from tests import golden
from tests.speculating import Said, live_rows, make_engine, sequence_of
from wire.messages import SamplingParams

POISON = 0xFF
GREEDY = SamplingParams(max_tokens=400, seed=0, temperature=0.0, ignore_eos=True)
WRONG = 7  # added to a token to make a draft that is rejected
PLAIN = 1  # the slot of the plain sequence
AROUND = 6  # plain steps before a border that are compared, and behind it


@dataclass
class Plain:
    """A greedy sequence decoded token by token: its tokens, and of each length its KV, with what lay around it."""

    tokens: list[int]
    slots: dict[int, Tensor]
    pages: dict[int, Tensor]
    rows: dict[int, dict[tuple[int, str], Tensor]]


def plain_run(model: Runner, ids: list[int], steps: int) -> Plain:
    model.arena.slots.fill_(POISON)
    model.arena.pages.fill_(POISON)
    golden.prefill(model, [(PLAIN, ids)], 64)
    sequence = sequence_of(PLAIN, ids, GREEDY)
    said, engine = Said([sequence]), make_engine(model, 1)
    plain = Plain(sequence.tokens, {}, {}, {})
    for _ in range(steps + 1):
        length = len(sequence.tokens) - 1
        plain.slots[length] = model.arena.slots[PLAIN].clone()
        plain.pages[length] = model.arena.pages[golden.pages_of(PLAIN)].clone()
        plain.rows[length] = live_rows(model, PLAIN, length)
        said.advance(engine, 1)
    return plain


class Rejecting:
    """Sequences that start where the plain one was, of which number n has the first `right` drafts right and the next wrong."""

    def __init__(self, model: Runner, plain: Plain, length: int, count: int) -> None:
        self.model, self.plain = model, plain
        self.sequences = [sequence_of(2 + n, plain.tokens[: length + 1], GREEDY) for n in range(count)]
        for sequence in self.sequences:
            model.arena.slots[sequence.kv.slot] = plain.slots[length]
            model.arena.pages[sequence.kv.pages] = plain.pages[length]
        self.said, self.engine = Said(self.sequences), make_engine(model, count)
        self.engine._words.write(self.sequences, count)

    def step(self, tokens: int, right: list[int]) -> None:
        """One step of all; every sequence's KV is the plain one's of its length afterwards."""
        for sequence, accepted in zip(self.sequences, right, strict=True):
            known = len(sequence.tokens)
            guesses = self.plain.tokens[known : known + MOST_DRAFTS]
            assert len(guesses) == MOST_DRAFTS, "the plain run is too short"
            for place in range(accepted, MOST_DRAFTS):
                guesses[place] = (guesses[place] + WRONG) % self.model.config.vocab_size
            self.engine.table.drafts[sequence.kv.slot] = torch.tensor(guesses)
        self.said.advance(self.engine, tokens)
        for sequence, accepted, counts in zip(self.sequences, right, self.said.counts, strict=True):
            assert counts[-1] == accepted + 1
            assert sequence.tokens == self.plain.tokens[: len(sequence.tokens)]
            self.compare(sequence)

    def compare(self, sequence: Sequence) -> None:
        length = len(sequence.tokens) - 1
        found, wanted = live_rows(self.model, sequence.kv.slot, length), self.plain.rows[length]
        assert found.keys() == wanted.keys()
        for field, rows in wanted.items():
            if golden.EXACT:
                assert torch.equal(found[field], rows), (field, length)
            else:
                assert golden.rows_alike(self.model, field[1], found[field], rows), (field, length)


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("border", [8, 128, 256])
def test_rejected_drafts_leave_nothing(name: str, border: int) -> None:
    """From every length just before a border (of a window of 4, of one of 128, of a page) with every number of accepted
    drafts, one sequence of the batch each; then a step with other numbers, which writes those positions again; and a plain
    one."""
    model = golden.runner(name)
    first = max(border - AROUND, 1)
    plain = plain_run(model, golden.prompt(name, "len515")[0][: first + 1], 2 * AROUND + 3 * MOST_DRAFTS)
    for drafts in range(1, MOST_DRAFTS + 1):
        for length in range(border - drafts - 1, border + 1):
            rejecting = Rejecting(model, plain, length, drafts + 1)
            rejecting.step(drafts + 1, list(range(drafts + 1)))
            rejecting.step(drafts + 1, [drafts - n for n in range(drafts + 1)])
            rejecting.step(1, [0] * (drafts + 1))
