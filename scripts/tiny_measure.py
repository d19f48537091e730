"""What the bundled model can do, measured on text and prompts it never saw: loss, recall, acceptance of drafts, samples."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from scripts.tiny_data import BOS_ID, EOS_ID, HELD_OUT_SEED, TOPIC, VALUES, RecallPrompt, World
from scripts.tiny_model import WINDOW, Model
from scripts.tiny_stories import PEOPLE

STORIES = 3000
LOSS_SEQUENCES, LOSS_LENGTH = 64, 1024
RECALL_PROMPTS, RECALL_LENGTHS, RECALL_PAIRS = 200, (4200, 6000), (8, 64)
RECALL_BATCH = 8
DRAFT_PROMPTS, DRAFT_TOKENS, DRAFT_PROMPT_TOKENS = 128, 64, 40


def held_out(tokenizer: Tokenizer) -> World:
    return World(tokenizer, HELD_OUT_SEED, STORIES)


def recall_prompts(world: World, count: int, lengths: tuple[int, int], seed: int) -> list[RecallPrompt]:
    """Chat prompts of all lengths in between, each with one asked pair among RECALL_PAIRS."""
    rng = random.Random(seed)
    return [world.recall_prompt(rng, rng.randint(*lengths), rng.randint(*RECALL_PAIRS)) for _ in range(count)]


@torch.no_grad()
def measure(model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """All figures of the card. model: with the parameters as the file keeps them."""
    world = held_out(tokenizer)
    loss = story_loss(model, world)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "parameters": sum(value.numel() for value in model.parameters.values()) / 1e6,
        **recall(model, world),
        **acceptance(model, world),
        "samples": samples(model, world),
    }


def story_loss(model: Model, world: World) -> float:
    """Nats a token on held-out stories and chats about them."""
    rng = random.Random(HELD_OUT_SEED)
    rows = [world.story_sequence(rng, LOSS_LENGTH).ids for _ in range(LOSS_SEQUENCES)]
    ids = torch.stack([torch.from_numpy(row) for row in rows]).to(model.device)
    logits = logits_of(model, ids)
    return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def recall(model: Model, world: World) -> dict[str, float]:
    """Share of long prompts answered with the right value and then the end, and what the prompts were like."""
    prompts = sorted(recall_prompts(world, RECALL_PROMPTS, RECALL_LENGTHS, HELD_OUT_SEED), key=lambda p: len(p.ids))
    right = 0
    for first in range(0, len(prompts), RECALL_BATCH):
        some = prompts[first : first + RECALL_BATCH]
        logits = logits_of(model, padded([p.ids + p.answer for p in some], model.device))
        for row, prompt in zip(logits, some, strict=True):
            end = len(prompt.ids)
            right += row[end - 1 : end + 1].argmax(-1).tolist() == prompt.answer
    fewest, most = RECALL_PAIRS
    return {
        "recall": right / len(prompts),
        "recall_prompts": len(prompts),
        "shortest": len(prompts[0].ids),
        "longest": len(prompts[-1].ids),
        "fewest": fewest,
        "most": most,
        "values": len(VALUES),
    }


def acceptance(model: Model, world: World) -> dict[str, float]:
    """Share of the model's own greedy tokens that a first draft names, and of those also the next one by a second draft.

    A draft is made at every token, from true state, as a server makes it right after that token.
    """
    rng = random.Random(HELD_OUT_SEED + 1)
    prompts = [world.story_sequence(rng, DRAFT_PROMPT_TOKENS).ids.tolist() for _ in range(DRAFT_PROMPTS)]
    ids = generate(model, prompts, DRAFT_TOKENS)
    streams = model.forward(ids, sparse=True).streams
    following = torch.cat((ids[:, 1:], ids[:, :1]), 1)
    first_streams, rows, _ = model.draft(streams, following, None)
    second_streams, _, _ = model.draft(torch.cat((first_streams[:, :1], first_streams[:, :-1]), 1), following, rows)
    first, second = (model.logits(s.flatten(0, 1), "mtp.0.").argmax(-1).view_as(ids) for s in (first_streams, second_streams))
    places = torch.arange(DRAFT_PROMPT_TOKENS - 1, DRAFT_PROMPT_TOKENS + DRAFT_TOKENS - 3, device=ids.device)
    once = first[:, places] == ids[:, places + 2]
    twice = once & (second[:, places + 1] == ids[:, places + 3])
    return {"first_draft": float(once.float().mean()), "second_draft": float(twice.float().mean())}


def samples(model: Model, world: World) -> list[tuple[str, str]]:
    """Greedy answers: (what was asked, what came)."""
    rng = random.Random(HELD_OUT_SEED + 2)
    asked = [TOPIC.format(name=name) for name in list(PEOPLE)[::4]]
    prompts = [[BOS_ID, world.user, *world.encode(text), world.assistant, world.no_think] for text in asked]
    for _ in range(2):
        text = world.decode(world.story_sequence(rng, 30).ids.tolist()[1:])
        asked.append(text)
        prompts.append([BOS_ID, *world.encode(text)])
    told = generate(model, prompts, 160)
    answers = []
    for row, prompt in zip(told.tolist(), prompts, strict=True):
        new = row[len(prompt) : len(prompt) + 160]
        answers.append(world.decode(new[: new.index(EOS_ID)] if EOS_ID in new else new).strip())
    return list(zip(asked, answers, strict=True))


def generate(model: Model, prompts: list[list[int]], count: int) -> Tensor:
    """Greedy: int64 [B, T] with `count` tokens after each prompt, then zeros."""
    lengths = torch.tensor([len(p) for p in prompts], device=model.device)
    ids = padded([p + [0] * count for p in prompts], model.device)
    rows = torch.arange(len(prompts), device=model.device)
    for step in range(count):
        at = lengths + step
        streams = model.forward(ids, sparse=True).streams[rows, at - 1]
        ids[rows, at] = model.logits(streams).argmax(-1)
    return ids


def logits_of(model: Model, ids: Tensor) -> Tensor:
    """[B, T] -> float32 [B, T, V], as served: the indexer chooses."""
    return model.logits(model.forward(ids, sparse=True).streams.flatten(0, 1)).view(*ids.shape, -1)


def padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """[B, T], zeros at the end, T a multiple of the window."""
    length = -(-max(map(len, rows)) // WINDOW) * WINDOW
    return torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
