"""The model that ships with the project: the figures of its card, checked on its files and through the served system."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from model.batch import Batch, Row
from model.runner import Runner
from router.chat import encode_chat
from scripts.tiny_data import HELD_OUT_SEED, TOPIC, World
from scripts.tiny_measure import recall_prompts
from scripts.tiny_model import CONFIG
from tests.system import ROOT, running

BUNDLED = ROOT / "bundled/tiny"
MAX_BYTES = 12_000_000
PAGE_TOKENS = 256
SERVED_PROMPTS, SERVED_RIGHT = 20, 19  # 95 %
GREEDY_ASKED = TOPIC.format(name="Rosa")
GREEDY_TOLD = (
    "Rosa was walking along the village on a sunny afternoon. Suddenly she heard a strange sound behind a willow. "
    "It was a small dog with a brown ribbon. Rosa gave the dog some water and a piece of bread."
)


@pytest.fixture(scope="module")
def world() -> World:
    return World(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), HELD_OUT_SEED, 600)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Runner(str(BUNDLED), num_pages=34, num_slots=9)
    torch.set_num_threads(threads)


class Greedy:
    """Several sequences continued together, each in a slot and pages of its own; keeps the streams of every position."""

    def __init__(self, runner: Runner, prompts: list[list[int]], count: int) -> None:
        self.runner = runner
        self.pages = -(-(max(map(len, prompts)) + count) // PAGE_TOKENS)
        self.tokens = [list(prompt) for prompt in prompts]
        streams = runner.forward(self.batch([(0, tokens) for tokens in self.tokens]))
        self.streams = list(torch.split(streams, [len(tokens) for tokens in self.tokens]))
        for _ in range(count):
            logits = runner.logits(torch.stack([streams[-1] for streams in self.streams]))
            starts = [len(tokens) for tokens in self.tokens]
            for tokens, best in zip(self.tokens, logits.argmax(-1).tolist(), strict=True):
                tokens.append(best)
            new = runner.forward(
                self.batch([(start, tokens[start:]) for start, tokens in zip(starts, self.tokens, strict=True)])
            )
            self.streams = [torch.cat((old, row[None])) for old, row in zip(self.streams, new, strict=True)]

    def batch(self, rows: list[tuple[int, list[int]]]) -> Batch:
        """(first position, tokens) of every sequence."""
        made = [
            Row(tokens=tokens, start=start, slot=i + 1, pages=range(1 + i * self.pages, 1 + (i + 1) * self.pages))
            for i, (start, tokens) in enumerate(rows)
        ]
        return Batch.build(made, PAGE_TOKENS, self.runner.device)


def test_fits_in_a_repository() -> None:
    assert {path.name for path in BUNDLED.iterdir()} == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= MAX_BYTES


def test_every_part_of_the_architecture_is_there(runner: Runner) -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    assert config == CONFIG  # what the training script would write
    assert set(config["compress_ratios"]) == {0, 4, 128}
    assert 0 < config["num_hash_layers"] < config["num_hidden_layers"]
    assert config["expert_dtype"] == "fp4" and config["quantization_config"]["scale_fmt"] == "ue8m0"
    assert runner.mtp is not None and runner.config.quantised


def test_tokenizer_has_the_released_names(world: World) -> None:
    names = [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
    ]
    ids = [world.tokenizer.token_to_id(name) for name in names]
    assert ids[:2] == [CONFIG["bos_token_id"], CONFIG["eos_token_id"]]
    assert None not in ids and world.tokenizer.get_vocab_size() <= CONFIG["vocab_size"]
    for text in ("ein Käse für 3 €", "日本語", "\x00\n\t "):
        assert world.decode(world.encode(text)) == text


def test_prompts_are_what_the_router_would_encode(world: World) -> None:
    prompt = recall_prompts(world, 1, (500, 600), seed=3)[0]
    content = world.decode(prompt.ids[2:-2])
    assert world.encode(encode_chat([{"role": "user", "content": content}], thinking=False)) == prompt.ids


def test_greedy_sample(runner: Runner, world: World) -> None:
    prompt = world.encode(encode_chat([{"role": "user", "content": GREEDY_ASKED}], thinking=False))
    told = world.encode(GREEDY_TOLD)
    assert Greedy(runner, [prompt], len(told)).tokens[0][len(prompt) :] == told


def test_drafts_are_accepted(runner: Runner, world: World) -> None:
    """Greedy text, a draft of two tokens after each: the first agrees in 70 % and both do in 50 % at least."""
    rng, count = Random(HELD_OUT_SEED), 40
    said = Greedy(runner, [world.story_sequence(rng, 40).ids.tolist() for _ in range(8)], count)
    first, both = [], []
    for at in range(39 + count - 3):
        after = torch.tensor([tokens[at + 1] for tokens in said.tokens])
        streams = torch.stack([streams[at] for streams in said.streams])
        batch = said.batch([(at, tokens[at : at + 1]) for tokens in said.tokens])
        if at < 39:  # the prompt: only its rows are wanted
            runner.store_draft_rows(streams, after, batch)
            continue
        streams = runner.draft_streams(streams, after, batch)
        draft = runner.draft_logits(streams).argmax(-1)
        batch = said.batch([(at + 1, tokens[at + 1 : at + 2]) for tokens in said.tokens])
        second = runner.draft_logits(runner.draft_streams(streams, draft, batch)).argmax(-1)
        drafts = zip(draft.tolist(), second.tolist(), said.tokens, strict=True)
        for one, two, tokens in drafts:
            first.append(one == tokens[at + 2])
            both.append(first[-1] and two == tokens[at + 3])
    assert sum(first) / len(first) >= 0.7 and sum(both) / len(both) >= 0.5


def test_a_lost_page_is_a_wrong_answer(runner: Runner, world: World) -> None:
    """So a hand-off that loses or mixes pages cannot pass for a good one."""
    prompts = [p for p in recall_prompts(world, 12, (640, 760), seed=6) if p.pair_at < PAGE_TOKENS - 8][:4]
    last = [len(prompt.ids) - 1 for prompt in prompts]
    said = Greedy(runner, [prompt.ids[:-1] for prompt in prompts], 0)

    def answers() -> list[int]:
        rows = [(at, prompt.ids[at:]) for at, prompt in zip(last, prompts, strict=True)]
        tokens: list[int] = runner.logits(runner.forward(said.batch(rows))).argmax(-1).tolist()
        return tokens

    values = [prompt.answer[0] for prompt in prompts]
    assert answers() == values
    for i in range(len(prompts)):
        runner.arena.pages[1 + i * said.pages] = 0  # of each prompt the page that holds the pair
    assert sum(answer == value for answer, value in zip(answers(), values, strict=True)) <= 1


def test_recall_through_prefill_and_decode(world: World) -> None:
    """Chat over HTTP, in two processes; most prompts are a few pages long, the last one over 4,000 tokens."""
    prompts = recall_prompts(world, SERVED_PROMPTS - 1, (640, 1000), seed=4)
    prompts += recall_prompts(world, 1, (4200, 4400), seed=5)
    reach = CONFIG["index_topk"] * 4 + CONFIG["sliding_window"]
    assert min(len(prompt.ids) for prompt in prompts) > 2 * reach
    bodies = [
        {"messages": [{"role": "user", "content": world.decode(prompt.ids[2:-2])}], "temperature": 0, "max_tokens": 8}
        for prompt in prompts
    ]
    with running(str(BUNDLED)) as server:
        replies = server.complete_all([{"path": "/v1/chat/completions", **body} for body in bodies])
        server.wait_idle()
    told = [(r.choice(0)["message"]["content"], r.choice(0)["finish_reason"]) for r in replies]
    right = sum(answer == (prompt.value, "stop") for answer, prompt in zip(told, prompts, strict=True))
    assert right >= SERVED_RIGHT, [
        (a, p.key, p.value, p.pair_at) for a, p in zip(told, prompts, strict=True) if a[0] != p.value
    ]


def test_lists_and_stories_of_the_scripts_join_where_the_tokenizer_would_cut(world: World) -> None:
    """Sequences are made token by token; the text they stand for must encode to the same tokens."""
    rng = Random(0)
    for sequence in (world.recall_sequence(rng, 1024, 32, 24), world.story_sequence(rng, 1024)):
        ids = sequence.ids.tolist()
        assert world.encode(world.decode(ids)) == ids
        for at, source in enumerate(sequence.source.tolist()):
            assert source < 0 or world.decode([ids[at]]).strip() == world.decode([ids[source]]).strip()


def test_held_out_stories_are_new(world: World) -> None:
    trained = World(world.tokenizer, 1, 2000)
    seen = {tuple(trained.pool[a:b].tolist()) for a, b in pairwise(trained.starts.tolist())}
    fresh = [tuple(world.pool[a:b].tolist()) for a, b in pairwise(world.starts.tolist())]
    assert sum(story in seen for story in fresh) <= 0.01 * len(fresh)


def test_card_names_its_figures() -> None:
    text = Path(BUNDLED / "README.md").read_text()
    assert "CC0 1.0" in text and "held-out loss" in text and "% right" in text and "first draft accepted" in text
