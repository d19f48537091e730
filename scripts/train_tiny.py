"""Trains the small DeepSeek-V4 model that ships in bundled/tiny, on one GPU in less than ten minutes.

    python -m scripts.train_tiny --out bundled/tiny

Writes config.json, model.safetensors, tokenizer.json and the card README.md with the figures it measured on what it wrote.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from scripts.tiny_card import card
from scripts.tiny_data import World, train_tokenizer
from scripts.tiny_export import released_tensors, rounded_parameters, save_safetensors
from scripts.tiny_init import new_parameters
from scripts.tiny_measure import measure
from scripts.tiny_model import CONFIG, Model, Output
from scripts.tiny_optimiser import Optimiser
from wire.options import option, parse

STORIES = 60_000
TOKENS_PER_STEP = 24_576  # one number for all lengths: compiled once
RECALL_SHARE = 0.85
DRAFT_WEIGHT = 0.3
GUIDE_WEIGHT = 0.2
WARM_UP_STEPS = 100
DECAY_SHARE = 0.5  # of all steps, the last ones, over which the rates fall to zero
BALANCE_RATE = 1e-3
LOG_STEPS = 50


@dataclass(frozen=True)
class TrainConfig:
    """Train the model that ships with the project."""

    out: str = option("bundled/tiny", help="folder to write")
    seed: int = option(1, help="of data, parameters and order")
    device: str = option("cuda", help="where to train", choices=("cpu", "cuda"))


@dataclass(frozen=True)
class Phase:
    """A part of training: sequences of `length` tokens with up to `pairs` pairs of which `questions` are asked. sparse: the
    attention sees only what the indexer chose."""

    steps: int
    length: int
    pairs: int
    questions: int
    sparse: bool


PHASES = (
    Phase(500, 256, 10, 10, False),
    Phase(500, 512, 24, 24, False),
    Phase(400, 2048, 48, 32, False),
    Phase(500, 4096, 64, 32, False),
    Phase(600, 6144, 64, 32, True),
)


TokenBatch = tuple[Tensor, Tensor, Tensor]  # ids int64, learn bool, source int64, each [B, T]


class Batches(Dataset[TokenBatch]):
    """Step -> its batch. Each batch depends on the seed and its number only."""

    def __init__(self, world: World, phases: tuple[Phase, ...], seed: int) -> None:
        self.world, self.seed = world, seed
        self.phases = [phase for phase in phases for _ in range(phase.steps)]

    def __len__(self) -> int:
        return len(self.phases)

    def __getitem__(self, step: int) -> TokenBatch:
        rng, phase = random.Random(self.seed * 1_000_000_007 + step), self.phases[step]
        rows = TOKENS_PER_STEP // phase.length
        stories = round(rows * (1 - RECALL_SHARE))
        made = [self.world.story_sequence(rng, phase.length) for _ in range(stories)]
        for _ in range(rows - stories):
            made.append(self.world.recall_sequence(rng, phase.length, rng.randint(4, phase.pairs), phase.questions))
        ids, learn, source = (np.stack([getattr(s, name) for s in made]) for name in ("ids", "learn", "source"))
        return torch.from_numpy(ids), torch.from_numpy(learn), torch.from_numpy(source)


def token_losses(main: Tensor, first: Tensor, second: Tensor, following: Tensor) -> tuple[Tensor, ...]:
    """Logits [N, V] of the model and of two drafts, and the following tokens [N] -> per token the losses of the three,
    whether the model is right, and whether each draft agrees with it.

    Row r predicts token r+1, a draft's row r token r+2: it learns what the model itself says there, in row r+1.
    """
    loss = functional.cross_entropy(main, following, reduction="none")
    target = main.detach().softmax(-1).roll(-1, 0)
    said = main.argmax(-1)
    drafts = [-(target * draft.log_softmax(-1)).sum(-1) for draft in (first, second)]
    return loss, *drafts, said == following, *(draft.argmax(-1) == said.roll(-1) for draft in (first, second))


class Trainer:
    """Model, optimiser and schedule; `step` is one batch."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.optimiser = Optimiser(model.parameters)
        self.token_losses = torch.compile(token_losses, dynamic=False) if model.compiled else token_losses

    def step(self, batch: TokenBatch, sparse: bool) -> dict[str, Tensor]:
        """One update; what is worth printing, as tensors."""
        ids, learn, source = batch
        following, origin = ahead(ids, 1), ahead(source, 1, empty=-1)
        output = self.model.forward(ids, sparse, origin)
        logits = self.model.logits(output.streams.flatten(0, 1))
        first, second, loads = self._drafts(output, following)
        loss, draft1, draft2, right, agrees1, agrees2 = self.token_losses(logits, first, second, following.flatten())
        recalled = (origin >= 0).flatten()
        text, twice = ahead(learn, 1).flatten() & ~recalled, ahead(learn, 2).flatten()
        figures = {
            "text": mean(loss, text),
            "recall": mean(loss, recalled),
            "draft1": mean(draft1, twice),
            "draft2": mean(draft2, twice),
            "index": torch.stack(output.index_losses).mean(),
            "guide": torch.stack(output.guide_losses).mean(),
        }
        total = figures["text"] + figures["recall"] + figures["index"] + GUIDE_WEIGHT * figures["guide"]
        total = total + DRAFT_WEIGHT * (figures["draft1"] + figures["draft2"])
        total.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self._balance(output.loads | loads)
        told = {"right": mean(right, recalled), "agree1": mean(agrees1, twice), "agree2": mean(agrees2, twice)}
        return {name: value.detach() for name, value in (figures | told).items()}

    def _drafts(self, output: Output, following: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Logits of a first and a second draft at every position: the second starts from the first's streams one before."""
        streams, rows, loads = self.model.draft(output.streams, following, None)
        again, _, _ = self.model.draft(torch.cat((streams[:, :1], streams[:, :-1]), 1), following, rows)
        first, second = (self.model.logits(s.flatten(0, 1), "mtp.0.") for s in (streams, again))
        return first, second, loads

    @torch.no_grad()
    def _balance(self, loads: dict[str, Tensor]) -> None:
        """Lifts the bias of experts that were asked too little, as the released models were balanced: no extra loss."""
        for name, load in loads.items():
            self.model.parameters[f"{name}ffn.gate.bias"].add_(BALANCE_RATE * torch.sign(load.mean() - load))


class Recorded:
    """A trainer's step for one shape as a CUDA graph: the host needs several times longer to launch a step than the GPU to
    run it."""

    def __init__(self, trainer: Trainer, batch: TokenBatch, sparse: bool) -> None:
        self._inputs = batch
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles and makes every lazy allocation; these are updates like any other
                trainer.step(self._inputs, sparse)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._figures = trainer.step(self._inputs, sparse)

    def step(self, batch: TokenBatch) -> dict[str, Tensor]:
        for mine, new in zip(self._inputs, batch, strict=True):
            mine.copy_(new)
        self._graph.replay()
        return self._figures


def ahead(x: Tensor, by: int, empty: int = 0) -> Tensor:
    """x [B, T] of `by` tokens later, `empty` where there is none."""
    return torch.cat((x[:, by:], torch.full_like(x[:, :by], empty)), 1)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def rate(step: int, steps: int) -> float:
    """Share of the full rates: a short rise, level, then down to zero in a straight line."""
    return min((step + 1) / WARM_UP_STEPS, 1.0, (steps - step) / (steps * DECAY_SHARE))


def new_model(world: World, seed: int, device: torch.device) -> Model:
    parameters, tid2eid = new_parameters(seed, world.same_word(), world.recall_words(), device)
    for name, value in parameters.items():
        value.requires_grad_(not name.endswith("gate.bias"))
    return Model(parameters, tid2eid, compiled=device.type == "cuda")


def train(world: World, phases: tuple[Phase, ...], seed: int, device: torch.device, workers: int) -> Model:
    """A trained model; prints progress."""
    torch.backends.cuda.matmul.allow_tf32 = True
    batches = Batches(world, phases, seed)
    loader = DataLoader(batches, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None)
    model = new_model(world, seed, device)
    trainer = Trainer(model)
    recorded: dict[Phase, Recorded] = {}
    begin = time.monotonic()
    for number, host in enumerate(loader):
        phase = batches.phases[number]
        batch = host[0].to(device), host[1].to(device), host[2].to(device)
        trainer.optimiser.set_rate(rate(number, len(batches)))
        if device.type == "cuda" and phase not in recorded:
            recorded.clear()  # gives its memory back
            recorded[phase] = Recorded(trainer, batch, phase.sparse)
        figures = recorded[phase].step(batch) if recorded else trainer.step(batch, phase.sparse)
        if number % LOG_STEPS == 0 or number == len(batches) - 1:
            told = " ".join(f"{name} {float(value):.3f}" for name, value in figures.items())
            print(f"step {number} length {phase.length} {told} {time.monotonic() - begin:.0f} s", flush=True)
    return model


def save(out: Path, world: World, parameters: dict[str, Tensor], tid2eid: dict[str, Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_safetensors(out / "model.safetensors", released_tensors(parameters, tid2eid))
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    world.tokenizer.save(str(out / "tokenizer.json"))


def main() -> int:
    config = parse(TrainConfig, "train_tiny")
    begin = time.monotonic()
    device = torch.device(config.device)
    world = World(train_tokenizer(config.seed), config.seed, STORIES)
    print(f"{len(world.pool)} tokens of stories, {time.monotonic() - begin:.0f} s", flush=True)
    model = train(world, PHASES, config.seed, device, workers=10)
    save(Path(config.out), world, model.parameters, model.tid2eid)
    print(f"saved, {time.monotonic() - begin:.0f} s", flush=True)
    shipped = Model(rounded_parameters(model.parameters, model.tid2eid), model.tid2eid)
    figures = measure(shipped, world.tokenizer)
    figures["minutes"] = (time.monotonic() - begin) / 60
    Path(config.out, "README.md").write_text(card(figures, config.seed, STORIES, PHASES))
    print(json.dumps(figures, indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
