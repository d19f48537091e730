"""What speculation is worth: tokens a step and time a token, on a model whose drafts are real and at the released widths.

``python -m scripts.bench_speculate`` continues held-out text with the bundled model, with 0 to 3 drafts a step in turn and
with as many as a worker chooses by itself, once with drafts that are never right; and it compares two ways to accept a draft
of a drawn text: when it is the token that is drawn, and rejection sampling. With
``--device cuda`` it also makes a model of DeepSeek-V4-Flash's widths and few layers in memory, whose drafts are random, and
times its steps of one to four tokens a sequence: what a draft costs there, and the speed that follows for an acceptance.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, pairwise, product, repeat
from pathlib import Path

import torch
from tokenizers import Tokenizer

from decode.engine import Engine
from decode.graphs import CudaRecorder, Graphs
from decode.sequence import Sequence
from decode.speculation import Speculation
from decode.step import PLAIN, STORING, Shape
from kernels import backend
from kernels.sequences import MOST_DRAFTS, SequenceTable
from kernels.workspace import Workspace
from kvtransfer.pages import SeqKV
from model.batch import TABLE_STEP, Batch, Row
from model.config import ModelConfig
from model.runner import Runner
from prefill.engine import Engine as PrefillEngine
from prefill.prompt import Chunk, Prompt
from scripts.bench_decode import WORKSPACE_BYTES, Figures, table
from scripts.decode_floor import step_bytes
from scripts.decode_steps import MOST_STEPS, Steps, fill_memory, last_positions
from scripts.launch_local import BUNDLED_MODEL
from scripts.random_checkpoint import RandomCheckpoint
from scripts.released_config import RELEASED, with_layers
from scripts.tiny_data import HELD_OUT_SEED, World
from scripts.tiny_measure import held_out
from wire.messages import Prefill, SamplingParams, pack_ids
from wire.options import option, parse, require_least, require_place, require_whole_numbers

PAGE_TOKENS = 256
TEMPERATURES = (0.3, 0.7, 1.0)
ACCEPTED_PROMPTS, ACCEPTED_TOKENS = 16, 240  # of held-out text
CHOSEN, CHOSEN_WRONG = "chosen", "chosen, none right"
FIRST_TOKENS = 256  # in which a worker finds out what pays
MOST_WORKERS = MOST_DRAFTS + 3  # that take turns: as many as there are numbers of drafts, and two of one token
ACCEPTANCES = (0.8, 0.6, 0.4)  # of the draft at each position, when those before it are


@dataclass(frozen=True)
class BenchConfig:
    """Speculation on the bundled model and at the released widths."""

    batches: str = option("1,8,32,64", help="sequences of a step")
    drafts: str = option("0,1,2,3", help="drafts of a step; 0 is what the others are compared with")
    prompt_tokens: int = option(96, help="held-out text before what is generated")
    tokens: int = option(64, help="tokens that every sequence gets in a round")
    rounds: int = option(3, help="how often the numbers of drafts take turns")
    chosen_rounds: int = option(32, help="rounds of a worker that chooses by itself, beside one without speculation; 0: none")
    temperature: float = option(0.0, help="of the sampled text; 0: greedy")
    layers: int = option(8, help="layers of the model of the released widths; 0: without it")
    widths: str = option("v4-flash", help="tiny: those of bundled/tiny, also on a CPU", choices=("v4-flash", "tiny"))
    context: int = option(8192, help="tokens of its sequences")
    replays: int = option(40, help="steps of one timing there")
    device: str = option("cpu", help="where to compute", choices=("cpu", "cuda"))
    threads: int = option(1, help="CPU threads of the model")
    json: str = option("", help="also write the figures to this file")

    def __post_init__(self) -> None:
        require_whole_numbers("--batches", self.batches)
        require_whole_numbers("--drafts", self.drafts, least=0)
        for name, least in (
            ("prompt_tokens", 2), ("tokens", 2), ("rounds", 1), ("chosen_rounds", 0), ("temperature", 0), ("layers", 0),
            ("context", 1), ("threads", 1),
        ):  # fmt: skip
            require_least(f"--{name.replace('_', '-')}", getattr(self, name), least)
        if self.prompt_tokens + self.tokens + MOST_DRAFTS > PAGE_TOKENS:
            raise ValueError(f"--prompt-tokens and --tokens: together at most {PAGE_TOKENS - MOST_DRAFTS}, a page")
        if not 0 < self.replays <= MOST_STEPS // (MOST_DRAFTS + 1):
            raise ValueError(f"--replays is {self.replays}: from 1 to {MOST_STEPS // (MOST_DRAFTS + 1)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no GPU here")
        if self.numbers("drafts")[0] or max(self.numbers("drafts")) > MOST_DRAFTS:
            raise ValueError(f"--drafts {self.drafts}: 0 comes first, and {MOST_DRAFTS} is the most")
        require_place("--json", self.json)

    def numbers(self, name: str) -> list[int]:
        return [int(each) for each in getattr(self, name).split(",")]


Landed = Callable[[int, Shape, float, list[tuple[int, int]]], None]


@dataclass
class Taken:
    """Of steps: seconds, the tokens that each brought each sequence, and which have no drafts yet as texts begin with them."""

    seconds: list[float] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)

    def add(self, seconds: float, counts: list[int], begins: bool) -> None:
        self.seconds.append(seconds)
        self.counts.append(counts)
        self.begins.append(begins)

    @property
    def step_s(self) -> float:
        """The median of those behind a first one."""
        return statistics.median(seconds for seconds, begins in zip(self.seconds, self.begins, strict=True) if not begins)

    @property
    def later_counts(self) -> list[int]:
        return [count for each, begins in zip(self.counts, self.begins, strict=True) if not begins for count in each]

    @property
    def tokens(self) -> float:
        """That a sequence got."""
        return sum(statistics.fmean(each) for each in self.counts)

    def round_token_s(self) -> list[float]:
        """Seconds of a token, by rounds."""
        firsts = [step for step, begins in enumerate(self.begins) if begins]
        rounds = [slice(first, end) for first, end in pairwise([*firsts, len(self.begins)])]
        return [sum(self.seconds[each]) / sum(map(statistics.fmean, self.counts[each])) for each in rounds]

    def token_s(self, first: float, end: float = math.inf) -> float:
        """Seconds of a token, of those from the first one on up to the end."""
        seconds, tokens, before = 0.0, 0.0, 0.0
        for step_s, counts in zip(self.seconds, self.counts, strict=True):
            if first <= before < end:
                seconds += step_s
                tokens += statistics.fmean(counts)
            before += statistics.fmean(counts)
        return seconds / tokens


@cache
def held_out_world() -> World:
    return held_out(Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")))


@dataclass
class Worker:
    """One of those that take turns. drafts: the most of its engine; shape: of its next step; what `landed` is called with:
    decode.speculation; sight: whether drafts may be right."""

    name: str
    drafts: int
    shape: Callable[[], Shape]
    landed: Landed = lambda *args: None
    sight: bool = True
    taken: Taken = field(default_factory=lambda: Taken())


class Bundled:
    """Held-out text, prefilled and continued by decode engines: each sequence in a slot and a page of its own."""

    def __init__(self, config: BenchConfig, batch: int) -> None:
        self.config, self.batch = config, batch
        self._slots = MOST_WORKERS * batch + 1
        self._runners = {sight: self._runner(sight) for sight in (True, False)}
        world, rng = held_out_world(), random.Random(HELD_OUT_SEED)
        self._prompts = [
            [world.story_sequence(rng, config.prompt_tokens).ids.tolist() for _ in range(batch)] for _ in range(config.rounds)
        ]
        self._engines: dict[tuple[int, bool], Engine] = {}
        self._admitted = 0

    def take_turns(self, workers: list[Worker], rounds: int) -> None:
        """Each worker continues the prompts of so many rounds. On a CPU the one that has the fewest tokens takes the next step,
        so whatever else the machine does falls on all alike; on a GPU, where steps are in flight, they take turns by rounds."""
        gc.collect()
        gc.disable()  # collections come with what is kept here of the steps of all: the same one would have them in every round
        try:
            self._take_turns(workers, rounds)
        finally:
            gc.enable()

    def _take_turns(self, workers: list[Worker], rounds: int) -> None:
        if self.config.device == "cuda":
            for number, (place, worker) in product(range(rounds), enumerate(workers)):
                deque(self._round(number, worker, place), maxlen=0)
            return
        running = {place: chain(*(self._round(number, worker, place) for number in range(rounds)))
                   for place, worker in enumerate(workers)}  # fmt: skip
        while running:
            place = min(running, key=lambda place: workers[place].taken.tokens)
            if next(running[place], None) is None:
                del running[place]

    def _runner(self, sight: bool) -> Runner:
        """Without sight the MTP layer gets zeros: what it drafts costs what it costs and is the same token whatever comes."""
        runner = Runner(str(BUNDLED_MODEL), self.config.device, num_pages=self._slots, num_slots=self._slots)
        runner.make_invariant(self.batch)  # as a worker
        assert runner.mtp is not None
        if not sight:
            runner.mtp.token_norm.zero_()
            runner.mtp.stream_norm.zero_()
        return runner

    def _engine(self, drafts: int, sight: bool) -> Engine:
        """As a worker's that is started with --speculate `drafts`."""
        if (drafts, sight) not in self._engines:
            runner, cuda = self._runners[sight], self.config.device == "cuda"
            table = SequenceTable.make(self.batch, self._slots, TABLE_STEP, runner.config.vocab_size, runner.device)
            recorder = CudaRecorder(runner.device) if cuda else None
            graphs = Graphs(runner, table, self.batch, range(1, drafts + 2), recorder, [self.batch])
            self._engines[drafts, sight] = Engine(table, graphs, spare_pages=1, depth=int(cuda))
        return self._engines[drafts, sight]

    def _round(self, number: int, worker: Worker, place: int) -> Iterator[Shape]:
        """Continues the prompts of a round, step by step, until a sequence is complete. On a CPU seconds are those of this
        process."""
        cuda = self.config.device == "cuda"
        clock = time.perf_counter if cuda else time.process_time
        prompts, first = self._prompts[number % len(self._prompts)], 1 + place * self.batch
        self._prefill(self._runners[worker.sight], prompts, first)
        engine, sequences = self._engine(worker.drafts, worker.sight), self._sequences(prompts, first)
        begins, last_s = True, clock()
        while all(sequence.generated < self.config.tokens for sequence in sequences):
            engine.launch(sequences, worker.shape())
            if engine.in_flight > engine.depth:
                landing = engine.next_shape
                found, choices = engine.collect()
                now_s = clock()
                for sequence, choice in zip(found, choices, strict=True):
                    sequence.extend(choice.tokens)
                counts = [len(choice.tokens) for choice in choices]
                outcomes = [(choice.drafts, count - 1) for choice, count in zip(choices, counts, strict=True)]
                worker.landed(self.batch, landing, now_s - last_s, outcomes)
                worker.taken.add(now_s - last_s, counts, begins)
                yield landing
                begins, last_s = False, now_s if cuda else clock()
        while engine.in_flight:
            engine.collect()

    def _prefill(self, runner: Runner, prompts: list[list[int]], first: int) -> None:
        """Into the slots from that one on."""
        engine = PrefillEngine(runner)
        for slot, ids in enumerate(prompts, first):
            message = Prefill(slot, 0, pack_ids(ids), len(ids), (0,), SamplingParams(max_tokens=1, seed=0), "", "", 60.0)
            prompt = Prompt((slot, 0), message, ids, [0], 0.0, 60.0, None, SeqKV(slot, [slot]))
            engine.compute([Chunk(prompt, prompt.remaining)])
        if self.config.device == "cuda":
            torch.cuda.synchronize()  # what is left of it would count as the first step's time

    def _sequences(self, prompts: list[list[int]], first: int) -> list[Sequence]:
        self._admitted += 1
        sampling = SamplingParams(
            max_tokens=PAGE_TOKENS - self.config.prompt_tokens, seed=0, temperature=self.config.temperature, ignore_eos=True
        )
        return [
            Sequence(
                key=(slot, self._admitted),
                sample=0,
                serial=(self._admitted, slot),
                tokens=list(ids),
                prompt_tokens=len(ids),
                sampling=replace(sampling, seed=1 + slot - first),
                eos_token_id=self._runners[True].config.eos_token_id,
                kv=SeqKV(slot, [slot]),
                router_inbox="",
                deadline_s=math.inf,
                arrived_s=0.0,
            )
            for slot, ids in enumerate(prompts, first)
        ]


def bundled(config: BenchConfig) -> list[Figures]:
    """A row for each batch and number of drafts; of the steps of one token that a worker with the most drafts runs, in a pause
    and behind one; and of what it chooses by itself."""
    rows = []
    for batch in config.numbers("batches"):
        side = Bundled(config, batch)
        found = fixed(side) + (chosen(side) if config.chosen_rounds else [])
        for row in found:
            print(row, file=sys.stderr, flush=True)
        rows += found
    return rows


def fixed(side: Bundled) -> list[Figures]:
    drafts = side.config.numbers("drafts")
    shapes = {str(count): Shape(count + 1, stores=count > 0) for count in drafts} | {"paused": PLAIN, "stores": STORING}
    workers = [Worker(name, int(name) if name.isdigit() else max(drafts), partial(repeat(shape).__next__))
               for name, shape in shapes.items()]  # fmt: skip
    side.take_turns(workers, side.config.rounds)
    plain_s, rows = workers[0].taken.step_s, []
    for worker in workers:
        step_s, counts = worker.taken.step_s, worker.taken.later_counts
        length = statistics.fmean(counts)
        row: Figures = {"batch": side.batch, "drafts": worker.name, "tokens_a_step": length, "step_ms": 1000 * step_s}
        row |= {"step_ratio": step_s / plain_s, "tokens_per_s": side.batch * length / step_s}
        rows.append(row | {"speed_up": length * plain_s / step_s} | by_position(counts, shapes[worker.name].tokens - 1))
    return rows


def chosen(side: Bundled) -> list[Figures]:
    """A worker's own choice, by all the seconds of its steps from the first one on and of those of a worker without
    speculation; and with drafts that are not right. Of the first tokens, in which it finds out, and of all behind them too.
    Where there are rounds enough, also what the speed may be off by as they differ: a standard error."""
    most = max(side.config.numbers("drafts"))
    off, workers = Worker("0", 0, lambda: PLAIN), []
    for name in (CHOSEN, CHOSEN_WRONG):
        speculation = Speculation(most, [side.batch])
        shape = partial(speculation.shape, side.batch)
        workers.append(Worker(name, most, shape, speculation.landed, sight=name == CHOSEN))
    side.take_turns([off, *workers], side.config.chosen_rounds)
    rows: list[Figures] = []
    for worker in workers:
        taken, token_s = worker.taken, worker.taken.token_s(0)
        row: Figures = {"batch": side.batch, "drafts": worker.name, "tokens_a_step": taken.tokens / len(taken.seconds)}
        step_s = statistics.fmean(taken.seconds)
        row |= {"step_ms": 1000 * step_s, "step_ratio": step_s / off.taken.token_s(0), "tokens_per_s": side.batch / token_s}
        row |= {"speed_up": off.taken.token_s(0) / token_s}
        if side.config.chosen_rounds > 1:
            row |= {"speed_up_error": error(off.taken.round_token_s(), taken.round_token_s())}
        row |= {"speed_up_first": off.taken.token_s(0, FIRST_TOKENS) / taken.token_s(0, FIRST_TOKENS)}
        if taken.tokens > 2 * FIRST_TOKENS:
            row |= {"speed_up_later": off.taken.token_s(FIRST_TOKENS) / taken.token_s(FIRST_TOKENS)}
        rows.append(row)
    return rows


def error(off: list[float], own: list[float]) -> float:
    """Standard error of how much faster than `off` it is, by as many rounds of both."""
    speeds = [one / other for one, other in zip(off, own, strict=True)]
    return statistics.stdev(speeds) / math.sqrt(len(speeds))


def by_position(counts: list[int], drafts: int) -> dict[str, float]:
    """How often the draft at each position is accepted when all before it are."""
    found = {}
    for place in range(1, drafts + 1):
        reached = sum(count >= place for count in counts)
        found[f"accepted_{place}"] = sum(count > place for count in counts) / max(reached, 1)
    return found


@torch.inference_mode()
def acceptance(config: BenchConfig) -> list[Figures]:
    """How often the first draft behind each token of held-out text is accepted, by what the two models' probabilities say:
    argmax for argmax; drawn with the noise of the token that it stands for; and by rejection sampling."""
    runner = Runner(str(BUNDLED_MODEL), config.device, num_pages=ACCEPTED_PROMPTS + 1, num_slots=ACCEPTED_PROMPTS + 1)
    world, rng = held_out_world(), random.Random(HELD_OUT_SEED)
    texts = [world.story_sequence(rng, ACCEPTED_TOKENS).ids.tolist() for _ in range(ACCEPTED_PROMPTS)]
    rows = [Row(ids[:-1], 0, slot, [slot]) for slot, ids in enumerate(texts, 1)]
    batch = Batch.build(rows, PAGE_TOKENS, runner.device)
    streams = runner.forward(batch)
    following = torch.tensor([token for ids in texts for token in ids[1:]], device=runner.device)
    drafted = runner.draft_logits(runner.draft_streams(streams, following, batch))
    apart = (ACCEPTED_PROMPTS, ACCEPTED_TOKENS - 1, -1)
    drawn = runner.logits(streams).view(apart)[:, 1:].flatten(0, 1).double()  # behind the token that its draft was given
    drafted = drafted.view(apart)[:, :-1].flatten(0, 1).double()
    found = [{"temperature": 0.0, "same_noise": (drawn.argmax(-1) == drafted.argmax(-1)).double().mean().item()}]
    for temperature in TEMPERATURES:
        p, q = (torch.softmax(logits / temperature, -1) for logits in (drawn, drafted))
        last_p, last_q = p.cumsum(-1), q.cumsum(-1)
        same = (torch.minimum(last_p, last_q) - torch.maximum(last_p - p, last_q - q)).clamp(min=0).sum(-1)
        rejection = torch.minimum(p, q).sum(-1)
        found.append({"temperature": temperature, "same_noise": same.mean().item(), "rejection": rejection.mean().item()})
    return found


def released(config: BenchConfig) -> list[Figures]:
    """Steps with drafts at the released widths: their cost, what of it is experts, and the speed that follows."""
    rows: list[Figures] = []
    batches, drafts = config.numbers("batches"), config.numbers("drafts")
    tiny = json.loads((BUNDLED_MODEL / "config.json").read_text())
    few = with_layers(tiny if config.widths == "tiny" else RELEASED, config.layers)
    mtp = {"num_nextn_predict_layers": 1, "compress_ratios": [*few["compress_ratios"], 0]}
    model = ModelConfig.from_json(few | mtp)
    pages = 1 + max(batches) * -(-(config.context + MOST_STEPS) // PAGE_TOKENS)
    checkpoint = RandomCheckpoint(model, config.device)
    runner = Runner(checkpoint, config.device, page_tokens=PAGE_TOKENS, num_pages=pages, num_slots=max(batches) + 1)
    runner.make_invariant(max(batches))
    fill_memory(runner)
    workspace = Workspace(WORKSPACE_BYTES, config.device) if backend.active().triton else None
    steps = Steps(runner, workspace, config.context + 2 * MOST_STEPS, batches, range(1, max(drafts) + 2))
    for batch in batches:
        steps.prepare(batch, config.context)
        plain_ms = steps.step_ms(config.replays, greedy=True)
        contexts = (last_positions(batch, config.context) + 1).tolist()
        for count, stores in [(count, count > 0) for count in drafts] + [(0, True)]:
            asked = steps.experts_verified(count + 1)
            moved = step_bytes(model, contexts, asked)
            step_ms = steps.step_ms(config.replays, greedy=True, shape=Shape(count + 1, stores)) if stores else plain_ms
            row: Figures = {"layers": config.layers, "batch": batch, "context": config.context, "tokens": count + 1}
            row |= {"stores": str(stores).lower(), "step_ms": step_ms, "step_ratio": step_ms / plain_ms}
            row |= {"experts_asked": statistics.fmean(asked)}
            row |= {"experts_of_verified_bytes": moved.experts / moved.step}
            row |= {f"speed_up_{rate}": expected(rate, count) * plain_ms / step_ms for rate in ACCEPTANCES}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def expected(rate: float, drafts: int) -> float:
    """Tokens of a step whose drafts are accepted so often, each when those before it are."""
    return sum(rate**place for place in range(drafts + 1))


def main() -> int:
    config = parse(BenchConfig, "bench_speculate")
    torch.set_num_threads(config.threads)
    where = torch.cuda.get_device_name() if config.device == "cuda" else f"CPU ({platform.machine()})"
    figures: Figures = {"machine": f"{where}, Python {platform.python_version()}, torch {torch.__version__}"}
    print(figures["machine"])
    figures["bundled"] = bundled(config)
    print(f"\nbundled model, held-out text\n\n{table(figures['bundled'])}")
    figures["acceptance"] = acceptance(config)
    print(f"\nfirst drafts of a drawn text that are accepted\n\n{table(figures['acceptance'])}")
    if config.layers and (config.device == "cuda" or config.widths == "tiny"):
        figures["released"] = released(config)
        print(f"\nwidths {config.widths}, {config.layers} layers, random weights and drafts\n\n{table(figures['released'])}")
    if config.json:
        Path(config.json).write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
