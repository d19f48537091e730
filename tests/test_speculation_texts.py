"""Texts, log probabilities and ends are the same whatever is guessed ahead: golden checkpoints and the bundled model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from decode.sequence import Sequence
from kernels.sequences import MOST_DRAFTS
from model.runner import Runner
from tests import golden
from tests.speculating import Said, make_engine, say, sequence_of
from tests.test_golden import judge
from wire.messages import SamplingParams

GREEDY = SamplingParams(max_tokens=24, seed=3, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8)
DRAFTS = range(1, MOST_DRAFTS + 1)
ASKED = {
    "greedy": ("len127", GREEDY),
    "greedy with scores": ("len5", replace(GREEDY, logprobs=3)),
    "drawn": ("len131", DRAWN),
    "drawn with scores": ("len255", replace(DRAWN, logprobs=0, seed=9)),
    "filtered": ("len3", replace(DRAWN, top_p=0.9, top_k=20, min_p=0.01, seed=-5)),
    "penalised": ("len129", replace(GREEDY, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.4)),
    "penalised and drawn": ("len4", replace(DRAWN, frequency_penalty=1.0, repetition_penalty=1.2, logprobs=2)),
    "biased": ("len257", replace(DRAWN, logit_bias=((5, 4.0), (6, -100.0), (5, 1.0)))),
    "short": ("len1", replace(GREEDY, max_tokens=2)),
}


def asked(name: str) -> list[Sequence]:
    """Of every kind one sequence, prefilled; two that stop, as soon as they may and at a token of the greedy text; and three
    samples of one request."""
    text = golden.prompt(name, "len300")[1]
    early = replace(GREEDY, stop_token_ids=(9, 42), min_tokens=9, logit_bias=((42, 60.0),))
    kinds = [
        *ASKED.values(),
        ("len300", early),
        ("len300", replace(GREEDY, stop_token_ids=(text[7],))),
        *[("len131", replace(DRAWN, seed=77))] * 3,
    ]
    made = [
        sequence_of(slot, golden.prompt(name, which)[0], params, max(0, slot - 12))
        for slot, (which, params) in enumerate(kinds, 1)
    ]
    golden.prefill(golden.runner(name), [(each.kv.slot, each.tokens) for each in made], 64)
    return made


@cache
def plain(name: str) -> Said:
    """Without speculation: steps that know nothing of the MTP layer."""
    sequences, model = asked(name), golden.runner(name)
    said = say(model, sequences, lambda step: 1, make_engine(model, len(sequences), [1]))
    assert said.ends == ["length"] * 9 + ["stop", "stop"] + ["length"] * 3
    assert said.texts[11] != said.texts[12] != said.texts[13]
    return said


def assert_same(said: Said, wanted: Said) -> None:
    """Token for token; log probabilities but for the last bits, which move with what else is in a step without drafts too."""
    for row, (ours, theirs) in enumerate(zip(said.texts, wanted.texts, strict=True)):
        assert ours == theirs, row
    assert said.ends == wanted.ends
    assert flat(said.logprobs) == pytest.approx(flat(wanted.logprobs), abs=1e-5, rel=0)
    assert flat(said.tops) == pytest.approx(flat(wanted.tops), abs=1e-5, rel=0)


def flat(nested: Any) -> list[float]:
    return [number for each in nested for number in flat(each)] if isinstance(nested, list) else [nested]


@pytest.mark.parametrize(("name", "drafts"), [*[("tiny-bf16", drafts) for drafts in DRAFTS], ("tiny-fp8fp4", 2)])
def test_a_text_is_the_text_without_drafts(name: str, drafts: int) -> None:
    wanted = plain(name)
    said = say(golden.runner(name), asked(name), lambda step: drafts + 1)
    assert_same(said, wanted)
    steps, plainly = max(map(len, said.counts)), max(map(len, wanted.counts))
    assert steps < plainly - 2, "no draft was accepted: the test shows nothing"


@pytest.mark.parametrize("name", golden.CASES)
def test_a_text_does_not_depend_on_how_the_number_of_drafts_changes(name: str) -> None:
    wanted, rng = plain(name), Random(1)
    said = say(golden.runner(name), asked(name), lambda step: rng.choice([1, 1, 2, 3, 4, 5]))
    assert_same(said, wanted)
    assert max(map(len, said.counts)) < max(map(len, wanted.counts))


def test_a_retry_goes_on_with_the_same_text() -> None:
    """What comes back after a retraction: prompt and tokens so far through prefill, under another serial, in another slot."""
    name = "tiny-bf16"
    wanted, again = plain(name), []
    for row, cut in ((2, 7), (5, 11), (6, 18)):
        whole = wanted.sequences[row]
        slot = 1 + (row + 3) % 14
        sequence = sequence_of(slot, whole.tokens[: whole.prompt_tokens + cut], whole.sampling, whole.sample)
        sequence.prompt_tokens = whole.prompt_tokens
        again.append((row, sequence))
    model = golden.runner(name)
    golden.prefill(model, [(sequence.kv.slot, sequence.tokens) for _, sequence in again], 64)
    said = say(model, [sequence for _, sequence in again], lambda step: 4)
    for (row, _), text in zip(again, said.texts, strict=True):
        assert text == wanted.texts[row]


@pytest.mark.parametrize("drafts", [1, 2])
def test_accepted_drafts_are_the_stored_ones(drafts: int) -> None:
    """Every prompt of the golden set, round by round."""
    name = "tiny-bf16"
    model, case = golden.runner(name), golden.case(name)
    names = list(case.prompts)
    sequences = [sequence_of(slot, golden.prompt(name, which)[0], GREEDY) for slot, which in enumerate(names, 1)]
    for sequence in sequences:
        sequence.sampling = replace(GREEDY, max_tokens=case.n)
    golden.prefill(model, [(each.kv.slot, each.tokens) for each in sequences], 100)
    said = say(model, sequences, lambda step: drafts + 1)
    results = {}
    for which, text, counts in zip(names, said.texts, said.counts, strict=True):
        assert counts[0] == 1, "there was no draft yet"
        results[which] = {"tokens": text, "mtp_rounds": {str(drafts): [count - 1 for count in counts[1:]]}}
    judge(name, {"prompts": results}, {})


def test_drawn_tokens_have_the_models_own_distribution() -> None:
    """Chi-square over the tokens at the second and third place of a text of 800 seeds, which are drawn behind drafts,
    against the model's probabilities: each given the tokens before it, which bias makes few."""
    model = golden.runner("tiny-bf16")
    ids, few = golden.prompt("tiny-bf16", "len5")[0], (5, 40, 90, 200, 300)
    sampling = replace(DRAWN, temperature=1.5, max_tokens=3, logit_bias=tuple((token, 60.0) for token in few))
    texts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    engine = make_engine(model, 16)
    golden.prefill(model, [(slot, ids) for slot in range(1, 17)], 64)
    for first in range(0, 800, 16):
        sequences = []
        for slot in range(1, 17):
            sequence = sequence_of(slot, ids, replace(sampling, seed=1000 + first + slot))
            sequence.serial = (first + slot, 0)  # the engine has not seen it
            sequences.append(sequence)
        said = say(model, sequences, lambda step: 3, engine)
        texts.update(tuple(text) for text in said.texts)
        accepted += sum(sum(counts[1:]) - len(counts[1:]) for counts in said.counts)
    assert accepted > 200, "too few tokens came from drafts"
    total, degrees = 0.0, 0
    for length in (1, 2, 3):
        for before in {text[: length - 1] for text in texts}:
            seen = Counter[int]()
            for text, count in texts.items():
                if text[: length - 1] == before:
                    seen[text[length - 1]] += count
            expected = {token: share * sum(seen.values()) for token, share in shares(model, [*ids, *before], sampling).items()}
            counted = [token for token in few if expected[token] >= 5]
            if len(counted) > 1:
                total += sum((seen[token] - expected[token]) ** 2 / expected[token] for token in counted)
                degrees += len(counted) - (len(counted) == len(few))
    assert degrees > 20
    assert total < degrees + 4 * (2 * degrees) ** 0.5, (total, degrees)


def shares(model: Runner, ids: list[int], sampling: SamplingParams) -> dict[int, float]:
    """The probability of each of the biased tokens, from the model's logits of a whole text."""
    streams, _ = golden.run(model, [(18, ids, 0)])
    logits = model.logits(streams[-1:])[0].double()
    for token, value in sampling.logit_bias:
        logits[token] += value
    share = torch.softmax(logits / sampling.temperature, 0)
    return {token: float(share[token]) for token, _ in sampling.logit_bias}
