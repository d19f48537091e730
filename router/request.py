"""One prompt on its way through the pools: its samples, its tries, and who hears of its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.errors import ApiError
from router.pool import Worker
from wire.messages import PromptLogprobs, SamplingParams

Key = tuple[int, int]


class Listener(Protocol):
    """Who wants a request's result. Called from the event loop; must not block."""

    def tokens(self, sample: int, ids: list[int], finish: str, logprobs: Any, tops: Any) -> bool:
        """New tokens of a sample; True ends it now (a stop string was found)."""

    def prompt_logprobs(self, message: PromptLogprobs) -> None: ...

    def failed(self, error: ApiError) -> None: ...


@dataclass(slots=True, eq=False)
class Sample:
    index: int
    ids: list[int] = field(default_factory=list)  # generated so far
    failures: int = 0  # tries that count against max_attempts
    corrupt: int = 0  # of them: their KV arrived as other bytes than were sent
    done: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its samples. Only probes are `pinned`: to the pair (prefill, decode) that they are to prove."""

    prompt: list[int]
    sampling: SamplingParams
    listener: Listener
    samples: list[Sample]
    pinned: tuple[Worker, Worker] | None = None
    on_trial: tuple[Worker, ...] = ()  # which of the pinned a broken hand-off is held against
    rid: int = 0
    attempts: int = 0  # attempt numbers given out
    submitted_s: float = 0.0
    deadline_s: float = 0.0
    answered: bool = False  # its first token is back
    closed: bool = False
    tries: list[Try] = field(default_factory=list)
    avoid: dict[Worker, float] = field(default_factory=dict)  # since when; until it is proven after that
    failure: str = ""  # the last one, in words for the client, which name no worker
    reason: str = ""  # of it, for the log: with names and addresses

    @classmethod
    def new(cls, prompt: list[int], n: int, sampling: SamplingParams, listener: Listener) -> Request:
        return cls(prompt, sampling, listener, [Sample(i) for i in range(n)])

    @property
    def wants_scores(self) -> bool:
        """The prompt's log probabilities were asked for and are not here yet."""
        return self.sampling.prompt_logprobs >= 0

    @property
    def is_generated(self) -> bool:
        return all(sample.done for sample in self.samples)


@dataclass(slots=True, eq=False)
class Try:
    """One (rid, attempt). Without samples it is there only for the prompt's log probabilities."""

    key: Key
    request: Request
    samples: dict[int, Sample]  # those still open here
    prefill: Worker
    decode: Worker
    sent_s: float
    started: bool = False  # a token came back
    heard_s: float = -math.inf  # last sign of life: a row, or a worker that says it holds it
    misses: int = 0  # reports since then that do not know it, see router/losses.py


@dataclass(slots=True, eq=False)
class Parked:
    """Samples that wait for a worker to come back."""

    request: Request
    samples: list[Sample]
    until_s: float
