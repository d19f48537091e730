"""The device's own state of running sequences: laid out, read and moved as the references do it, and as a list of tokens."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels import sequences
from kernels.ragged import Ragged
from kernels.sample import Draw, Parameters, Sampled, draw, noise_stream, sample, uniform, weights
from kernels.sequences import (
    BIASES,
    EXCLUDED,
    FORBIDDEN,
    MOST_DRAFTS,
    UNUSABLE,
    SequenceTable,
    begin_draft,
    begin_draft_reference,
    begin_step,
    begin_step_reference,
    finish_step,
    finish_step_reference,
    keep_draft,
    keep_draft_reference,
    row_parameters,
    row_parameters_reference,
    write_words,
)

torch.set_num_threads(1)
on_triton = pytest.mark.usefixtures(triton_backend.__name__)
every_length = pytest.mark.parametrize("longest", range(1, MOST_DRAFTS + 2))
VOCAB, SLOTS, PAGES, PAGE_TOKENS = 23, 13, 11, 8
LISTS = {"forbidden": "forbidden_counts", "bias_ids": "bias_counts", "bias_values": "bias_counts"}


@pytest.fixture(params=["references", "triton"])
def either_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "triton":
        request.getfixturevalue(triton_backend.__name__)
    yield


def table_of(rows: Sequence[int], seed: int = 0) -> SequenceTable:
    """Something in every field of every slot but 0; `rows` are the slots of a step."""
    table = SequenceTable.make(len(rows), SLOTS, PAGES, VOCAB, DEVICE)
    generator = torch.Generator().manual_seed(seed)

    def fill(name: str, low: int, high: int, scale: float = 1.0) -> None:
        view: Tensor = getattr(table, name)
        view[1:] = (torch.randint(low, high, view[1:].shape, generator=generator) * scale).to(view.dtype)

    table.rows.copy_(torch.tensor(rows))
    fill("lengths", 0, PAGES * PAGE_TOKENS - MOST_DRAFTS)
    fill("tokens", 0, VOCAB)
    fill("drafts", -1, VOCAB)
    fill("pages", 1, 1000)
    fill("stream", -(2**62), 2**62)
    fill("may_stop_from", 0, PAGES * PAGE_TOKENS)
    fill("top_k", 0, VOCAB)
    fill("forbidden", 0, VOCAB)
    fill("forbidden_counts", 0, FORBIDDEN + 1)
    fill("bias_ids", 0, VOCAB)
    fill("bias_counts", 0, BIASES + 1)
    fill("counts", 0, 5)
    for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition", "bias_values"):
        fill(name, 0, 1000, 0.001)
    return table


def copy_of(table: SequenceTable) -> SequenceTable:
    made = SequenceTable.make(len(table.rows), len(table.lengths), table.pages.shape[1], table.counts.shape[1], DEVICE)
    made.words.copy_(table.words)
    return made


def batch_of(rows: int, longest: int, width: int = PAGES, stale: int = 777) -> Ragged:
    """A step's static tensors, full of what an earlier step left."""

    def left(*shape: int) -> Tensor:
        return torch.full(shape, stale, dtype=torch.int64, device=DEVICE)

    return Ragged(
        positions=left(rows * longest),
        sequence_ids=torch.arange(rows, device=DEVICE).repeat_interleave(longest),
        starts=left(rows),
        cu_tokens=torch.arange(rows + 1, device=DEVICE) * longest,
        slots=left(rows),
        page_table=left(rows, width),
        longest=longest,
    )


def rows_of(count: int, seed: int) -> list[int]:
    """Slots in any order, none but 0 twice."""
    order: list[int] = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[row // 2] + 1 if row % 2 == 0 and row // 2 < len(order) else 0 for row in range(count)]


def nobodys(table: SequenceTable) -> dict[str, list[float]]:
    """What slot 0 has in every field."""
    return {
        each.name: getattr(table, each.name)[0].tolist() for each in fields(SequenceTable) if each.name not in ("words", "rows")
    }


@on_triton
def test_words_are_those_of_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "BLOCK", 4)
    table = table_of([5, 6, 7])
    before = copy_of(table)
    wanted: dict[tuple[str, int], tuple[str, Sequence[float]]] = {
        ("temperature", 3): ("<d", [0.7]),
        ("stream", SLOTS - 1): ("<q", [-(2**61) - 5]),
        ("drafts", 1): ("<4q", [3, -1, -1, -1]),
        ("top_k", 4): ("<i", [17]),
        ("pages", 2): (f"<{PAGES}i", [*range(PAGES)]),
        ("rows", 1): ("<q", [12]),
        ("repetition", 5): ("<f", [1.5]),
    }
    pairs = []
    for (name, slot), (layout, values) in wanted.items():
        packed = struct.pack(layout, *values)
        first, each = table.place(name)
        assert each * 4 == len(packed)
        pairs += [[first + slot * each + at, *struct.unpack_from("<i", packed, 4 * at)] for at in range(each)]
    first, _ = table.place("lengths")
    uploaded = torch.tensor([*pairs, [first + 2, -1], [0, -1]], dtype=torch.int32, device=DEVICE)
    write_words(table, uploaded, len(pairs))
    for (name, slot), (_, values) in wanted.items():
        assert getattr(table, name)[slot].flatten().tolist() == values
        place = getattr(before, name)[slot]
        place.copy_(torch.tensor(values, dtype=place.dtype).view(place.shape))
    assert torch.equal(table.words, before.words), "and no other word"


@on_triton
@every_length
@pytest.mark.parametrize(("rows", "width"), [(1, PAGES), (7, PAGES), (20, PAGES), (5, PAGES - 4), (5, PAGES + 3)])
def test_a_step_is_laid_out(longest: int, rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "BLOCK", 4)  # pages a program copies at once
    table = table_of(rows_of(rows, longest))
    batch, expected = batch_of(rows, longest, width), batch_of(rows, longest, width)
    if width >= PAGES:
        table.lengths[1:] = torch.arange(SLOTS - 1) % (2 * PAGE_TOKENS) + 5 * PAGE_TOKENS  # around the ends of pages
    before = table.words.clone()
    tokens, expected_tokens = torch.full((2, rows * longest), 777, device=DEVICE)
    begin_step(table, batch, tokens, PAGE_TOKENS)
    begin_step_reference(table, expected, expected_tokens, PAGE_TOKENS)
    assert tokens.tolist() == expected_tokens.tolist() and int(tokens.max()) < VOCAB and int(tokens.min()) >= 0
    for each in fields(Ragged):
        if each.name != "longest":
            assert getattr(batch, each.name).tolist() == getattr(expected, each.name).tolist(), each.name
    assert torch.equal(table.words, before)
    for row, slot in enumerate(table.rows.tolist()):
        last = int(table.lengths[slot]) + longest - 1
        for place in range(width):
            page = int(batch.page_table[row, place])
            assert page == (int(table.pages[slot, place]) if place <= min(last // PAGE_TOKENS, PAGES - 1) else 777)


def same_parameters(got: Parameters, expected: Parameters) -> None:
    for each in fields(Parameters):
        ours, theirs = getattr(got, each.name), getattr(expected, each.name)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, each.name
        if each.name in LISTS:
            counts = getattr(expected, LISTS[each.name]).tolist()
            ours, theirs = ([view[:count].tolist() for view, count in zip(x, counts, strict=True)] for x in (ours, theirs))
            assert ours == theirs, each.name
        else:
            assert torch.equal(ours, theirs), each.name


@on_triton
@every_length
@pytest.mark.parametrize("edits", [False, True])
def test_a_rows_parameters_are_those_of_its_sequence(longest: int, edits: bool) -> None:
    for rows in (1, 6, 17):
        table = table_of(rows_of(rows, rows), seed=rows)
        got = row_parameters(table, table.rows, longest, edits=edits)
        same_parameters(got, row_parameters_reference(table, table.rows, longest, edits=edits))
        assert len(got.temperature) == rows * longest and len(got.bias_ids) == (rows * longest if edits else 0)


@on_triton
@pytest.mark.parametrize("drafted", range(MOST_DRAFTS))
def test_a_drafts_parameters(drafted: int) -> None:
    table = table_of(rows_of(7, drafted))
    got = row_parameters(table, table.rows, 1, drafted)
    same_parameters(got, row_parameters_reference(table, table.rows, 1, drafted))
    assert got.position.tolist() == [int(table.lengths[slot]) + 1 + drafted for slot in table.rows]
    assert (got.drafts[:, drafted:] == -1).all()


def test_a_table_whose_words_no_int32_can_name_is_refused() -> None:
    assert SequenceTable.make(64, 16_000, 16, 129_280, "meta").words.numel() < 1 << 31
    with pytest.raises(ValueError, match=r"17000 slots .* lower --num-slots"):
        SequenceTable.make(64, 17_000, 16, 129_280, "meta")


@pytest.mark.usefixtures("either_backend")
def test_stop_ids_are_forbidden_up_to_the_token_from_which_it_may_stop() -> None:
    """may_stop_from is a position: the first whose token may be a stop."""
    table = table_of([4])
    table.forbidden_counts[4] = 2
    table.lengths[4], table.may_stop_from[4] = 10, 13  # the next tokens are at 11, 12, 13, ...
    assert row_parameters(table, table.rows, 5).forbidden_counts.tolist() == [2, 2, 0, 0, 0]
    for drafted in range(MOST_DRAFTS):
        counts = row_parameters(table, table.rows, 1, drafted).forbidden_counts
        assert counts.tolist() == ([2] if 11 + drafted < 13 else [0])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row of a verify step is to come to: how many drafts agree, which row has no token, and in which way."""

    agree: int
    bad: int | None
    model: bool
    peak: float

    @property
    def tokens(self) -> int:
        return self.agree + 1 if self.bad is None or self.bad > self.agree else self.bad

    @property
    def status(self) -> int:
        if self.bad is None or self.bad > self.agree:
            return 0
        return UNUSABLE if self.model else EXCLUDED


def outcomes(longest: int) -> list[Outcome]:
    kinds = [(True, float("nan")), (True, float("inf")), (False, float("-inf")), (False, float("nan"))]
    return [Outcome(agree, None, False, 0.0) for agree in range(longest)] + [
        Outcome(agree, bad, model, peak)
        for agree, bad, (model, peak) in itertools.product(range(longest), range(longest), kinds)
    ]


def sampled_as(wanted: Sequence[Outcome | None], slots: Sequence[int], table: SequenceTable, longest: int) -> Sampled:
    """Results of the sampler that come to `wanted`; sets the table's drafts for it. None: a row that fills up."""
    rows = len(wanted)
    generator = torch.Generator().manual_seed(rows + longest)
    ids = torch.randint(0, 3, (rows, longest), generator=generator)  # few, so that many come twice
    peak, model_peak = torch.ones(2, rows, longest)
    table.drafts[0] = -1
    for row, (outcome, slot) in enumerate(zip(wanted, slots, strict=True)):
        if outcome is not None:
            guesses = ids[row, :-1].clone()
            if outcome.agree < longest - 1:
                guesses[outcome.agree] = -1 if row % 2 else 3
            table.drafts[slot, : longest - 1] = guesses
            if outcome.bad is not None:
                peak[row, outcome.bad] = outcome.peak
                if outcome.model:
                    model_peak[row, outcome.bad] = outcome.peak
    logprob = -torch.rand(rows, longest, generator=generator)
    none = torch.zeros(rows * longest, 0, device=DEVICE)
    flat = [each.flatten().to(DEVICE) for each in (ids, model_peak, peak, logprob)]
    return Sampled(flat[0], flat[1], flat[2], flat[3], none.long(), none)


@pytest.mark.usefixtures("either_backend")
@every_length
def test_a_step_takes_the_tokens_up_to_the_first_that_was_not_guessed(longest: int) -> None:
    """Every place of the first mismatch with every place and kind of a row without a token, before it and behind it."""
    wanted: list[Outcome | None] = [*outcomes(longest)]
    slots = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(1)).add(1).tolist()
    for place in (0, len(wanted) // 2, len(wanted)):  # rows that fill up, in between too
        wanted.insert(place, None)
        slots.insert(place, 0)
    table = SequenceTable.make(len(slots), len(slots) + 1, 1, VOCAB, DEVICE)
    table.lengths[1:] = torch.arange(len(slots), device=DEVICE) * 7
    table.counts[1:] = torch.randint(0, 4, table.counts[1:].shape, generator=torch.Generator().manual_seed(2))
    sampled = sampled_as(wanted, slots, table, longest)
    before, other = copy_of(table), copy_of(table)
    finished = finish_step(table, torch.tensor(slots, device=DEVICE), sampled, longest)
    expected = finish_step_reference(other, torch.tensor(slots, device=DEVICE), sampled, longest)
    assert finished.report.tolist() == expected.report.tolist() and finished.chosen.tolist() == expected.chosen.tolist()
    assert torch.equal(table.words, other.words)
    assert nobodys(table) == nobodys(before)
    ids = sampled.ids.view(len(slots), longest)
    bits = sampled.logprob.view(torch.int32).view(len(slots), longest)
    for row, (outcome, slot) in enumerate(zip(wanted, slots, strict=True)):
        if outcome is None:
            continue
        taken = ids[row, : outcome.tokens].tolist()
        assert finished.report[row].tolist() == [outcome.tokens, outcome.status, *ids[row].tolist(), *bits[row].tolist()]
        assert finished.chosen[row] == row * longest + (outcome.tokens if outcome.status else outcome.tokens - 1)
        assert table.lengths[slot] == before.lengths[slot] + outcome.tokens
        if not outcome.status:
            assert table.tokens[slot] == taken[-1]
        assert table.drafts[slot].tolist() == [-1] * MOST_DRAFTS
        counted = before.counts[slot].clone()
        for token in taken:
            counted[token] += 2
        assert torch.equal(table.counts[slot], counted)


@on_triton
@pytest.mark.parametrize("rows", [1, 6, 63, 64, 65, 130])
def test_drafts_go_round(rows: int) -> None:
    for drafted in range(MOST_DRAFTS):
        table = table_of(rows_of(rows, drafted))
        other, batch, expected = copy_of(table), batch_of(rows, 1), batch_of(rows, 1)
        ids = torch.arange(rows, device=DEVICE) % VOCAB
        keep_draft(table, table.rows, ids, drafted)
        keep_draft_reference(other, other.rows, ids, drafted)
        assert torch.equal(table.words, other.words) and table.drafts[0].tolist() == [-1] * MOST_DRAFTS
        tokens, expected_tokens = torch.full((2, rows), 777, device=DEVICE)
        begin_draft(table, batch, tokens, drafted + 1)
        begin_draft_reference(other, expected, expected_tokens, drafted + 1)
        assert tokens.tolist() == expected_tokens.tolist()
        assert tokens.tolist() == [row % VOCAB if slot else 0 for row, slot in enumerate(table.rows.tolist())]
        assert batch.positions.tolist() == [int(table.lengths[slot]) + drafted for slot in table.rows]
        for name in ("positions", "starts", "slots", "page_table"):
            assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name


@dataclass(slots=True)
class Text:
    """A sequence as a list of tokens: what comes next by the rules, without speculation, tables or tensors of many rows.
    All numbers are multiples of small powers of two, so that Python's floats do what float32 does."""

    tokens: list[int]
    prompt_tokens: int
    min_tokens: int
    stops: list[int]
    bias: dict[int, float]
    presence: float
    frequency: float
    repetition: float
    temperature: float
    seed: int
    drafts: list[int] = field(default_factory=list)

    def logits(self, drafts: Sequence[int] = ()) -> list[float]:
        """The model: any function of the tokens so far."""
        generator = torch.Generator().manual_seed(hash((*self.tokens, *drafts)) % 2**31)
        return (torch.randint(-12, 13, (VOCAB,), generator=generator) / 4).tolist()

    def changed(self) -> list[float]:
        values, generated = self.logits(), self.tokens[self.prompt_tokens :]
        if len(generated) < self.min_tokens:
            values = [float("-inf") if token in self.stops else value for token, value in enumerate(values)]
        values = [value + self.bias.get(token, 0.0) for token, value in enumerate(values)]
        for token in {*self.tokens}:
            value = values[token]
            value = value / self.repetition if value > 0 else value * self.repetition
            times = generated.count(token)
            values[token] = value - self.frequency * times - (self.presence if times else 0.0)
        return values

    def next(self) -> int:
        values = self.changed()
        if not self.temperature:
            return values.index(max(values))
        stream = noise_stream(torch.tensor([self.seed]), torch.tensor([0]))
        noise = uniform(stream, torch.tensor([len(self.tokens)]))
        return int(draw(weights(torch.tensor([values]), Draw.build([self.temperature], [0], [1.0], [0.0])), noise))

    def continued(self, count: int) -> list[int]:
        ahead = Text(**{each.name: getattr(self, each.name) for each in fields(Text)} | {"tokens": [*self.tokens]})
        for _ in range(count):
            ahead.tokens.append(ahead.next())
        return ahead.tokens[len(self.tokens) :]

    def write(self, table: SequenceTable, slot: int) -> None:
        """Joins: all of its tokens but the last have their KV."""
        table.lengths[slot], table.tokens[slot] = len(self.tokens) - 1, self.tokens[-1]
        table.may_stop_from[slot] = self.prompt_tokens + self.min_tokens
        table.forbidden_counts[slot], table.bias_counts[slot] = len(self.stops), len(self.bias)
        table.forbidden[slot, : len(self.stops)] = torch.tensor(self.stops, dtype=torch.int32)
        table.bias_ids[slot, : len(self.bias)] = torch.tensor([*self.bias], dtype=torch.int32)
        table.bias_values[slot, : len(self.bias)] = torch.tensor([*self.bias.values()])
        for name in ("presence", "frequency", "repetition", "temperature"):
            getattr(table, name)[slot] = getattr(self, name)
        table.stream[slot] = int(noise_stream(torch.tensor([self.seed]), torch.tensor([0])))
        table.counts[slot] = 0
        for token in {*self.tokens[: self.prompt_tokens]}:
            table.counts[slot, token] = 1
        for token in self.tokens[self.prompt_tokens :]:
            table.counts[slot, token] += 2


SMALL = st.integers(0, VOCAB - 1)
TEXTS = st.builds(
    Text,
    tokens=st.lists(SMALL, min_size=6, max_size=9),
    prompt_tokens=st.integers(1, 6),
    min_tokens=st.integers(0, 8),
    stops=st.lists(SMALL, max_size=5, unique=True),
    bias=st.dictionaries(SMALL, st.sampled_from([-2.0, 1.5, 4.0]), max_size=6),
    presence=st.sampled_from([0.0, 0.5, -0.25]),
    frequency=st.sampled_from([0.0, 0.25, -0.5]),
    repetition=st.sampled_from([1.0, 2.0, 0.5]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(-(2**40), 2**40),
)


def run_texts(texts: list[Text], longest: int, steps: int, wrong: list[int]) -> None:
    """Every step feeds a text's next tokens with some wrong among the guesses; the texts must come out as without."""
    rows = len(texts) + 2
    slots = [3 + 2 * row for row in range(len(texts))][::-1]
    expected = [text.continued(steps * longest) for text in texts]
    table = SequenceTable.make(rows, max(slots) + 1, PAGES, VOCAB, DEVICE)
    table.rows[: len(slots)] = torch.tensor(slots)
    for text, slot in zip(texts, slots, strict=True):
        text.write(table, slot)
    batch, tokens = batch_of(rows, longest), torch.zeros(rows * longest, dtype=torch.int64, device=DEVICE)
    taken: list[list[int]] = [[] for _ in texts]
    for step in range(steps):
        for row, (slot, ahead) in enumerate(zip(slots, expected, strict=True)):
            guesses = ahead[len(taken[row]) :][: longest - 1]
            first_wrong = wrong[(step + row) % len(wrong)]
            guesses = [(guess + (place >= first_wrong)) % VOCAB for place, guess in enumerate(guesses)]
            table.drafts[slot, : len(guesses)] = torch.tensor(guesses, dtype=torch.int64)
        begin_step(table, batch, tokens, PAGE_TOKENS)
        logits = torch.zeros(rows, longest, VOCAB)
        for row, text in enumerate(texts):
            fed = tokens.view(rows, longest)[row].tolist()
            assert fed[0] == text.tokens[-1] and int(batch.starts[row]) == len(text.tokens) - 1
            for place in range(longest):
                logits[row, place] = torch.tensor(text.logits(fed[1 : 1 + place]))
        parameters = row_parameters(table, batch.slots, longest)
        sampled = sample(logits.view(rows * longest, VOCAB).to(DEVICE), parameters)
        report = finish_step(table, batch.slots, sampled, longest).report.tolist()
        for row, text in enumerate(texts):
            came, status, *ids = report[row]
            assert status == 0 and came == min(wrong[(step + row) % len(wrong)], longest - 1) + 1
            taken[row] += ids[:came]
            text.tokens += ids[:came]
            assert taken[row] == expected[row][: len(taken[row])]


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    longest=st.integers(1, MOST_DRAFTS + 1),
    wrong=st.lists(st.integers(0, MOST_DRAFTS), min_size=1, max_size=4),
)
def test_a_text_is_what_it_would_be_without_guesses(texts: list[Text], longest: int, wrong: list[int]) -> None:
    run_texts(texts, longest, 4, wrong)


@on_triton
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=2, max_size=2), longest=st.integers(1, MOST_DRAFTS + 1))
def test_a_text_is_what_it_would_be_without_guesses_on_triton(texts: list[Text], longest: int) -> None:
    run_texts(texts, longest, 3, [MOST_DRAFTS, 1, 2, 0])
