"""Prefill and decode workers without a model: they speak the wire protocol and generate by a script.

In a test: ``ScriptedPrefill`` and ``ScriptedDecode`` live in the test's event loop, over real sockets. As processes:
``python -m tests.scripted --router tcp://127.0.0.1:PORT [--role both] [--tick-s 0.02]`` prints ``serving NAME INBOX``.

The scripted prefill forwards each Prefill as an Offer; the scripted decode takes an Offer as prefilled and generates,
for sample s, ``script[(s + number of tokens so far) % len(script)]``: a retry goes on where the last try stopped.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop
import zmq

from wire.messages import (
    ALL_SAMPLES,
    Abort,
    Failed,
    Offer,
    Prefill,
    PromptLogprobs,
    Refused,
    Status,
    Tokens,
    pack_ids,
    pack_keys,
    unpack_ids,
)
from wire.metrics import Metrics
from wire.options import option, parse
from wire.sockets import Inbox, Outbox

Key = tuple[int, int]
VOCAB_SIZE = 320
IDENTITY = {"model": "scripted", "page_tokens": 256, "page_bytes": 4096}


class ScriptedWorker:
    """Inbox, outbox, heartbeat. `silent` stops the heartbeat and all answers, as a killed process would."""

    role = ""

    def __init__(self, router: str, name: str = "", identity: dict[str, Any] | None = None, **load: Any) -> None:
        self.name = name or f"{self.role}-{secrets.token_hex(3)}"
        self.identity = dict(IDENTITY if identity is None else identity)
        self.load = {"max_context": 4096, "vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "max_batch": 256}
        self.load |= {
            "free_pages": 1000,
            "total_pages": 1000,
            "free_slots": 256,
            "total_slots": 256,
            "tokens_per_s": 1e6,
        } | load
        self.silent = False
        self.deaf = 0  # how many of the next requests are lost on their way
        self.refused = ""
        self.turn = 0
        self.aborted: list[tuple[Abort, float]] = []
        self.metrics = Metrics()
        self.router = router
        self._context: zmq.Context[Any] = zmq.Context()
        self.inbox = Inbox(self._context)
        self._outbox = Outbox(self._context)
        self._beat: asyncio.Task[None] | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.inbox.attach(loop, self.handle)
        self._beat = loop.create_task(self._heartbeat())

    async def stop(self, say_gone: bool = True) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if say_gone and not self.silent:
            self.send(self.router, self.status("gone"))
        self.inbox.close()
        self._outbox.close()
        self._context.destroy(linger=200)

    def status(self, state: str = "serving") -> Status:
        self.turn += 1
        return Status(
            self.role, self.name, state, self.inbox.address, self.identity, self.load, self.metrics.snapshot(),
            pack_keys(self.live()), self.turn,
        )  # fmt: skip

    def live(self) -> set[Key]:
        """The attempts in hand."""
        return set()

    def send(self, address: str, message: Any) -> None:
        if not self.silent:
            self._outbox.send(address, message)

    def announce(self) -> None:
        self.send(self.router, self.status())

    def handle(self, message: Any) -> None:
        if self.silent:
            return
        if isinstance(message, Refused):
            self.refused = message.reason
        elif isinstance(message, Abort):
            self.aborted.append((message, time.monotonic()))
            self.abort(message)
        elif self.deaf:
            self.deaf -= 1
        else:
            self.work(message)

    def work(self, message: Any) -> None:
        raise NotImplementedError

    def abort(self, message: Abort) -> None:
        return None

    async def _heartbeat(self) -> None:
        while True:
            self.announce()
            await asyncio.sleep(0.5)


class ScriptedPrefill(ScriptedWorker):
    role = "prefill"

    def __init__(self, router: str, name: str = "", **kwargs: Any) -> None:
        super().__init__(router, name, **kwargs)
        self.seen: list[Prefill] = []
        self.fail: list[tuple[str, bool]] = []  # (cause, retryable) for the next prompts
        self.blocked = False  # the data port: nothing gets across
        self.stuck: set[Key] = set()  # what came while it was

    def work(self, message: Any) -> None:
        assert isinstance(message, Prefill), message
        self.seen.append(message)
        del self.seen[:-10_000]
        key = message.rid, message.attempt
        if self.fail:
            cause, retryable = self.fail.pop(0)
            self.send(message.router_inbox, Failed(*key, ALL_SAMPLES, cause, f"scripted {cause}", retryable, "prefill"))
            return
        if message.sampling.prompt_logprobs >= 0:
            self.send(message.router_inbox, prompt_logprobs(message))
        if self.blocked:
            self.stuck.add(key)
        else:
            self.send(
                message.decode_inbox,
                Offer(*key, message.tokens, message.prompt_tokens, message.samples, message.sampling, self.inbox.address,
                      message.router_inbox, "", message.timeout_s),
            )  # fmt: skip

    def abort(self, message: Abort) -> None:
        self.stuck.discard((message.rid, message.attempt))

    def live(self) -> set[Key]:
        return self.stuck


def prompt_logprobs(message: Prefill) -> PromptLogprobs:
    """Token i scores -i/8; the most likely alternatives are ids 5, 6, … at -0.125."""
    k, count = message.sampling.prompt_logprobs, len(message.tokens) // 4 - 1
    logprobs = struct.pack(f"<{count}f", *(-(i + 1) / 8 for i in range(count)))
    top = pack_ids(list(range(5, 5 + k)) * count)
    return PromptLogprobs(
        message.rid, message.attempt, k, logprobs, top, struct.pack(f"<{count * k}f", *[-0.125] * (count * k))
    )


@dataclass
class Sequence_:
    """One sample that is being generated."""

    offer: Offer
    sample: int
    generated: int


@dataclass
class Script:
    """What decode generates. `eos_after` ends every sample with EOS; `burst` tokens come in each row."""

    ids: Sequence[int] = field(default_factory=lambda: list(range(60, 90)))
    tick_s: float = 0.0  # 0: everything at once
    burst: int = 1
    eos_after: int = -1


class ScriptedDecode(ScriptedWorker):
    role = "decode"

    def __init__(self, router: str, name: str = "", script: Script | None = None, **kwargs: Any) -> None:
        super().__init__(router, name, **kwargs)
        self.script = script or Script()
        self.running: dict[tuple[int, int, int], Sequence_] = {}
        self.retract_at = -1  # the next sample with that many tokens is retracted
        self.hold = False  # take requests, generate nothing
        self.lost_ends = 0  # how many of the next last rows are lost on their way
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        super().start()
        if self.script.tick_s:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def stop(self, say_gone: bool = True) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await super().stop(say_gone)

    def work(self, message: Any) -> None:
        assert isinstance(message, Offer), message
        done = len(message.tokens) // 4 - message.prompt_tokens
        for sample in message.samples:
            self.running[message.rid, message.attempt, sample] = Sequence_(message, sample, done)
        if not self.script.tick_s:
            while self.running and not self.hold:
                self.step()

    def abort(self, message: Abort) -> None:
        for key in list(self.running):
            if key[:2] == (message.rid, message.attempt) and message.sample in (ALL_SAMPLES, key[2]):
                del self.running[key]

    def live(self) -> set[Key]:
        return {key[:2] for key in self.running}

    def step(self) -> None:
        """One token row for everything that runs, as one message for each router inbox."""
        rows: dict[str, list[Any]] = {}
        for key, sequence in list(self.running.items()):
            if sequence.generated == self.retract_at:
                self.retract_at = -1
                del self.running[key]
                self.send(sequence.offer.router_inbox, Failed(*key[:2], key[2], "retracted", "no pages", True, "decode"))
                continue
            row = self._row(key, sequence)
            if row[5]:
                del self.running[key]
            if row[5] and self.lost_ends:
                self.lost_ends -= 1
            else:
                rows.setdefault(sequence.offer.router_inbox, []).append(row)
        for inbox, batch in rows.items():
            self.send(inbox, Tokens(self.name, batch))

    def _row(self, key: tuple[int, int, int], sequence: Sequence_) -> list[Any]:
        sampling, first, ids, finish = sequence.offer.sampling, sequence.generated, [], ""
        for _ in range(self.script.burst):
            if sequence.generated == self.script.eos_after and not sampling.ignore_eos:
                ids.append(1)
                finish = "stop"
            else:
                ids.append(self.script.ids[(sequence.sample + sequence.generated) % len(self.script.ids)])
                sequence.generated += 1
                finish = "length" if sequence.generated >= sampling.max_tokens else ""
            if finish:
                break
        if sampling.logprobs < 0:
            return [*key, first, ids, finish, None, None]
        tops = [[[token_id + i, -0.5 - i] for i in range(sampling.logprobs)] for token_id in ids]
        return [*key, first, ids, finish, [-0.5] * len(ids), tops]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.script.tick_s)
            if self.running and not self.silent and not self.hold:
                self.step()


@dataclass(frozen=True)
class ScriptedConfig:
    """Scripted workers in a process of their own."""

    router: str = option(help="the router's inbox")
    role: str = option("both", help="which worker", choices=("prefill", "decode", "both"))
    name: str = option("", help="worker name; with both, a suffix is added")
    tick_s: float = option(0.0, help="seconds between two tokens; 0: no pause")
    ids: str = option("", help="the ids to generate, with commas")


async def serve(config: ScriptedConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    script = Script(tick_s=config.tick_s)
    if config.ids:
        script.ids = [int(word) for word in config.ids.split(",")]
    workers: list[ScriptedWorker] = []
    if config.role != "decode":
        workers.append(ScriptedPrefill(config.router, f"{config.name}-p" if config.name else ""))
    if config.role != "prefill":
        workers.append(ScriptedDecode(config.router, f"{config.name}-d" if config.name else "", script))
    for worker in workers:
        worker.start()
        print(f"serving {worker.name} {worker.inbox.address}", flush=True)
    await stop.wait()
    for worker in workers:
        await worker.stop()


def prompt_of(message: Prefill) -> list[int]:
    """The client's part of a Prefill's tokens."""
    return unpack_ids(message.tokens)[: message.prompt_tokens]


if __name__ == "__main__":
    uvloop.run(serve(parse(ScriptedConfig, "python -m tests.scripted")))
