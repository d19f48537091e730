"""What the host writes into the table of sequences, and when."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode.config import DecodeConfig
from decode.room import make_engine
from decode.sequence import Sequence
from decode.step import Asks, Step
from decode.words import Uploads
from kernels.sample import noise_stream
from kernels.sequences import SequenceTable, write_words
from kvtransfer.pages import SeqKV
from tests.fake_runner import EOS, FakeRunner, expected_text
from wire.messages import SamplingParams

GREEDY = SamplingParams(max_tokens=60, seed=3, temperature=0.0, ignore_eos=True)
PROMPT = [9, 8, 7, 7, 6, 5]


class Host:
    """An engine over a fake runner, and the pairs of every upload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_batch: int = 8) -> None:
        self.runner = FakeRunner(num_pages=60, num_slots=9)
        runner: Any = self.runner
        options: dict[str, Any] = {"num_pages": 60, "num_slots": 9, "page_tokens": runner.layout.page_tokens}
        config = DecodeConfig(model="", router="tcp://127.0.0.1:1", max_batch=max_batch, **options)
        self.engine = make_engine(config, runner, depth=0)
        self.uploads: list[dict[int, int]] = []

        def noted(table: Any, pairs: torch.Tensor, count: int) -> None:
            words = dict(pairs[:count].tolist())
            assert len(words) == count == len(pairs), "a word is written twice"
            self.uploads.append(words)
            write_words(table, pairs, count)

        monkeypatch.setattr("decode.words.write_words", noted)

    def sequence(
        self, slot: int, pages: list[int], params: SamplingParams = GREEDY, generated: tuple[int, ...] = ()
    ) -> Sequence:
        """One whose KV is in the arena, but for the last token's."""
        tokens = [*PROMPT, *generated]
        made = Sequence(
            key=(slot, 0),
            sample=4,
            serial=(len(self.uploads), slot),
            tokens=tokens,
            prompt_tokens=len(PROMPT),
            sampling=params,
            eos_token_id=EOS,
            kv=SeqKV(slot, pages),
            router_inbox="",
            deadline_s=math.inf,
            arrived_s=0.0,
        )
        for position, token in enumerate(tokens[:-1]):
            self.runner._tokens[pages[position // 4], position % 4] = token
            self.runner._ring[slot, position % 8] = token
        return made

    def step(self, *sequences: Sequence) -> None:
        self.engine.launch(list(sequences))
        for sequence, choice in zip(*self.engine.collect(), strict=True):
            sequence.extend(choice.tokens)

    def fields(self) -> list[str]:
        """Which fields the newest upload wrote to, in the order of the table."""
        table, words = self.engine.table, self.uploads[-1]
        names = [name for name in type(table).__dataclass_fields__ if name != "words"]
        spans = {name: (table.place(name)[0], getattr(table, name).nbytes // 4) for name in names}
        return [name for name, (first, size) in spans.items() if any(first <= word < first + size for word in words)]


def test_a_batch_that_stays_the_same_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    pair = host.sequence(1, [1, 2, 3]), host.sequence(2, [4, 5, 6])
    for _ in range(6):
        host.step(*pair)
    assert len(host.uploads) == 1
    assert [each.tokens[6:] for each in pair] == [expected_text(PROMPT, 6, stop=())] * 2


def test_a_new_page_is_one_entry_and_zeros_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    one = host.sequence(1, [1, 2])
    host.step(one)
    one.kv.pages += [7]
    host.step(one)
    assert host.fields() == ["pages"]
    first, width = host.engine.table.place("pages")
    written = host.uploads[-1]
    assert written == {first + width + 2 + n: 7 if n == 0 else 0 for n in range(len(written))} and len(written) > 1
    assert host.engine.table.pages[1, :4].tolist() == [1, 2, 7, 0]


def test_only_rows_that_change_hands_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    three = [host.sequence(n, [3 * n, 3 * n + 1, 3 * n + 2]) for n in (1, 2, 3)]
    host.step(*three)
    host.step(three[0], three[2], three[1])
    assert host.fields() == ["rows"] and len(host.uploads[-1]) == 2
    host.step(*three[:1])
    assert len(host.uploads) == 2, "row 0 is still its"
    host.step(three[0], three[2], three[1])
    assert len(host.uploads) == 2, "and the others have theirs where they were"
    assert len({tuple(each.tokens[:8]) for each in three}) == 1


def test_the_next_owner_of_a_slot_finds_nothing_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    everything = replace(
        GREEDY, temperature=2.0, top_k=5, top_p=0.5, min_p=0.1, presence_penalty=1.0, frequency_penalty=1.0,
        repetition_penalty=2.0, min_tokens=50, stop_token_ids=(3, 4), logit_bias=((9, 5.0), (10, 2.0)),
    )  # fmt: skip
    long = host.sequence(1, [1, 2, 3, 4, 5, 6, 7], everything)
    host.step(long)
    host.engine.table.drafts[1] = 5
    table, fresh = host.engine.table, host.sequence(1, [8, 9, 10])
    host.step(fresh)
    assert fresh.tokens[6:] == expected_text(PROMPT, 1, stop=())
    reach = 3 + host.engine._words._spare_pages
    assert table.pages[1, :reach].tolist() == [8, 9, 10] + [0] * (reach - 3)
    off = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "presence": 0, "frequency": 0, "repetition": 1}
    off |= {"forbidden_counts": 0, "bias_counts": 0}
    assert {name: getattr(table, name)[1].item() for name in off} == off
    assert table.drafts[1].tolist() == [-1] * 4


def test_a_sequence_that_comes_back_has_everything_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    params = SamplingParams(
        max_tokens=60, seed=2**64 - 2, temperature=0.1, top_p=0.7, top_k=2**31, min_p=0.2, presence_penalty=0.25,
        frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias=((20, 1.5), (30, -math.inf), (20, 2.0)), min_tokens=9,
        stop_token_ids=(11, 12, 11),
    )  # fmt: skip
    back = host.sequence(3, [5, 6, 7], params, generated=(7, 50, 7))
    table = host.engine.table
    table.counts[3] = 9
    monkeypatch.setattr(host.engine._graphs, "run", lambda rows, tokens, asks: pytest.fail("") if rows != 1 else Nothing())
    host.engine.launch([back])
    found = {name: getattr(table, name)[3].tolist() for name in ("lengths", "tokens", "drafts", "may_stop_from", "top_k")}
    assert found == {"lengths": 8, "tokens": 7, "drafts": [-1] * 4, "may_stop_from": 15, "top_k": 211}
    assert [getattr(table, name)[3].item() for name in ("temperature", "top_p", "min_p")] == [0.1, 0.7, 0.2]  # float64
    assert [getattr(table, name)[3].item() for name in ("presence", "frequency", "repetition")] == [0.25, -0.5, 1.5]
    assert table.stream[3] == noise_stream(torch.tensor(-2), torch.tensor(4))
    assert table.forbidden[3, : int(table.forbidden_counts[3])].tolist() == [11, 12, EOS]
    assert table.bias_ids[3, : int(table.bias_counts[3])].tolist() == [20, 30]
    assert table.bias_values[3, :2].tolist() == [3.5, -math.inf]
    counts = {token: int(table.counts[3, token]) for token in torch.nonzero(table.counts[3]).flatten().tolist()}
    assert counts == {9: 1, 8: 1, 7: 5, 6: 1, 5: 1, 50: 2}
    assert table.rows[:2].tolist() == [3, 0] and table.pages[3, :4].tolist() == [5, 6, 7, 0]


class Nothing:
    """A step that did not run."""

    report = torch.zeros(2, 4, dtype=torch.int32)
    tops = (torch.zeros(2, 0), torch.zeros(2, 0))


def test_the_sampler_is_asked_for_no_more_than_the_batch_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    asked: list[tuple[bool, bool, int]] = []
    finish = Step.finish

    def noted(step: Step, asks: Asks) -> None:
        asked.append((asks.draws, asks.edits, asks.tops))
        finish(step, asks)

    monkeypatch.setattr(Step, "finish", noted)
    plain = host.sequence(1, [1, 2, 3])
    drawn = host.sequence(2, [4, 5, 6], replace(GREEDY, temperature=1.0, logprobs=2))
    waiting = host.sequence(3, [7, 8, 9], replace(GREEDY, min_tokens=2, stop_token_ids=(4,)))
    host.step(plain)
    host.step(plain, drawn)
    for _ in range(3):
        host.step(plain, waiting)
    assert asked == [
        (False, False, -1),
        (True, False, 2),
        (False, True, -1),
        (False, True, -1),
        (False, False, -1),
    ]


class Copied:
    """Stands in for torch.cuda.Event: what a pinned buffer held when its copy was enqueued must be there until it is over."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("wait")

    def record(self) -> None:
        self.calls.append("record")


def test_more_pairs_than_a_buffer_holds_go_in_rounds_that_wait_for_their_own_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.words.PAIRS", 3)
    table = SequenceTable.make(2, 3, 4, 5, "cpu")
    uploads, copied = Uploads(table), [Copied(), Copied()]
    uploads._landing = torch.zeros(3, 2, dtype=torch.int32)
    rounds: Any = deque((torch.zeros(3, 2, dtype=torch.int32), event) for event in copied)
    uploads._rounds = rounds
    first, width = table.place("counts")
    pairs = np.array([[first + n, 100 + n] for n in range(width + 3)], np.int32)  # 8: three rounds of two buffers
    uploads.send(pairs)
    assert (
        table.counts.flatten()[: len(pairs)].tolist() == pairs[:, 1].tolist() and not table.counts.flatten()[len(pairs) :].any()
    )
    assert [event.calls for event in copied] == [["wait", "record"] * 2, ["wait", "record"]]
