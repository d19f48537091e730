"""The live workers of both roles: who may join, how loaded each is, which one serves next."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from wire.messages import Status
from wire.metrics import valid_snapshot
from wire.sockets import MAX_MESSAGE_BYTES

ROLES = ("prefill", "decode")
MAX_WORKERS = 1024
MAX_CONTEXT = MAX_MESSAGE_BYTES // 8  # a Prefill takes 4 bytes a token
WORKING_S = 2.5  # a worker whose last step is not longer ago is at work: less than a probe's timeout, more than a long step
BURST_S = 0.25  # reports are twice as far apart unless something held them up

Key = TypeVar("Key", bound=Hashable)


class Ledger(Generic[Key]):
    """Amounts by key and their sum. The sum is only changed with an entry, so it cannot drift or go negative."""

    __slots__ = ("_amounts", "total")

    def __init__(self) -> None:
        self._amounts: dict[Key, int] = {}
        self.total = 0

    def put(self, key: Key, amount: int) -> None:
        self.total += amount - self._amounts.get(key, 0)
        self._amounts[key] = amount

    def drop(self, key: Key) -> None:
        self.total -= self._amounts.pop(key, 0)


class Worker:
    """One worker process as the router knows it: its last Status, and what this router has given it to do."""

    def __init__(self, status: Status, now_s: float) -> None:
        self.role = status.role
        self.name = status.name
        self.inbox = status.inbox
        self.identity = status.identity
        self.prompt_tokens: Ledger[tuple[int, int]] = Ledger()  # prefill: handed over, first token not yet back
        self.sequences: Ledger[tuple[int, int]] = Ledger()  # decode
        self.cache_tokens: Ledger[tuple[int, int]] = Ledger()  # decode: worst case of those sequences
        self.proven_s = -math.inf  # last time a hand-off through it worked
        self.checked_s = -math.inf  # last time that was tried, by traffic or by a probe
        self.failures = 0  # since it worked
        self.picked = 0
        self.stepped_s = -math.inf  # last time its report showed that its loop had computed something
        self._steps: float | None = None  # None: it has not reported any
        self._turn = status.turn
        self._turn_s = now_s
        self.update(status, now_s)

    def update(self, status: Status, now_s: float) -> None:
        self.seen_s = now_s
        self.load = {name: value for name, value in status.load.items() if _is_number(value)}
        self.metrics = status.metrics if valid_snapshot(status.metrics) else [{}, {}, {}]
        steps = self.metrics[0].get("steps") or None
        if steps and steps != self._steps:
            self.stepped_s = now_s
        self._steps = steps

    def is_news(self, turn: int, now_s: float) -> bool:
        """Whether a report shows another turn of its loop than the last one that was news; those of one burst count once."""
        if turn == self._turn or now_s - self._turn_s < BURST_S:
            return False
        self._turn, self._turn_s = turn, now_s
        return True

    def number(self, name: str, default: float) -> float:
        return float(self.load.get(name, default))

    def fits(self, tokens: int) -> bool:
        return tokens <= self.number("max_context", math.inf)

    def wait_s(self, tokens: int, fastest: float) -> float:
        """Prefill: how long until a prompt of that many tokens would be done, by the measured rate. One that is not measured
        yet counts as fast as the fastest: it has to get work to be measured."""
        rate = self.number("tokens_per_s", 0.0)
        return (self.prompt_tokens.total + tokens) / max(rate if rate > 0 else fastest, 1.0)

    def is_avoided(self, avoid: Mapping[Worker, float]) -> bool:
        """Whether it has failed the request with that list and has not been proven since."""
        since = avoid.get(self)
        return since is not None and since >= self.proven_s

    def fullness(self, samples: int, tokens: int) -> float:
        """Decode: the fuller of batch and cache if this request came in too; above 1 it would have to wait."""
        batch = (self.sequences.total + samples) / max(self.number("max_batch", 64), 1)
        used = 1 - self.number("free_pages", 1) / max(self.number("total_pages", 1), 1)
        room = max(self.number("total_pages", 0) * self.identity_tokens(), 1)
        return max(batch, used, (self.cache_tokens.total + tokens) / room)

    def identity_tokens(self) -> int:
        tokens = self.identity.get("page_tokens")
        return tokens if isinstance(tokens, int) and tokens > 0 else 256

    @property
    def has_no_slot(self) -> bool:
        return self.number("running", 0) >= self.number("max_batch", math.inf) or self.number("free_slots", 1) <= 0

    @property
    def is_full(self) -> bool:
        """Whether a new sequence has to wait here; unknown numbers mean no."""
        return self.has_no_slot or self.number("queued", 0) > 0

    def is_saturated(self, now_s: float) -> bool:
        """Whether it is full and gets on with its work, so that it may well leave a small request waiting for seconds.

        What a decode worker has queued says nothing: that may be hand-offs that never arrive.
        """
        if self.role == "decode":
            return self.has_no_slot
        return self.is_full and (self._steps is None or now_s - self.stepped_s <= WORKING_S)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker that may not join, while it still asks."""

    reason: str
    inbox: str
    seen_s: float


class Pool:
    """Workers by name, in the order they joined."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, Worker]] = {role: {} for role in ROLES}
        self.refused: dict[str, Refusal] = {}  # by name
        self._clock = 0
        self.context_tokens = 0  # the longest prompt + output that some pair can hold
        self.vocab_size = 0
        self.bos_token_id = 0
        self._fastest = 0.0  # tokens/s of a prefill worker

    def workers(self, role: str = "") -> list[Worker]:
        if not role:
            return [*self._workers["prefill"].values(), *self._workers["decode"].values()]
        return list(self._workers[role].values())

    def find(self, role: str, name: str) -> Worker | None:
        return self._workers[role].get(name)

    def has_pair(self) -> bool:
        return bool(self._workers["prefill"] and self._workers["decode"])

    def missing(self) -> str:
        """Which pools are empty, as a sentence; "" when a pair exists."""
        empty = [role for role in ROLES if not self._workers[role]]
        return f"no live {' and no live '.join(empty)} worker" if empty else ""

    def add(self, worker: Worker) -> None:
        self._workers[worker.role][worker.name] = worker
        self.refused.pop(worker.name, None)
        self.changed()

    def remove(self, worker: Worker) -> None:
        self._workers[worker.role].pop(worker.name, None)
        self.changed()

    def objection(self, status: Status) -> str:
        """Why this worker may not join: the first field in which it differs from the first live one; "" when it may."""
        if len(self.workers()) >= MAX_WORKERS:
            return f"the cluster already has {MAX_WORKERS} workers"
        others = (w for w in self.workers() if (w.role, w.name) != (status.role, status.name))
        first = next(others, None)
        if first is None:
            return ""
        return difference(first.name, first.identity, status.name, status.identity)

    def changed(self) -> None:
        """Members or their reports have changed: what all requests ask for is worked out once."""
        longest = [max((w.number("max_context", math.inf) for w in self.workers(role)), default=0.0) for role in ROLES]
        self.context_tokens = int(min(*longest, float(MAX_CONTEXT)))
        self.vocab_size = self._reported("vocab_size", 1 << 32)
        self.bos_token_id = self._reported("bos_token_id", 0)
        self._fastest = max((w.number("tokens_per_s", 0.0) for w in self.workers("prefill")), default=0.0)

    def _reported(self, name: str, default: int) -> int:
        """A number that all workers agree on."""
        return next((int(worker.load[name]) for worker in self.workers() if name in worker.load), default)

    def choose_prefill(self, tokens: int, avoid: Mapping[Worker, float]) -> Worker | None:
        return self._choose("prefill", tokens, avoid, lambda worker: worker.wait_s(tokens, self._fastest))

    def choose_decode(self, samples: int, prompt: int, output: int, avoid: Mapping[Worker, float]) -> Worker | None:
        worst = samples * (prompt + output)
        return self._choose("decode", prompt + output, avoid, lambda worker: worker.fullness(samples, worst))

    def _choose(self, role: str, tokens: int, avoid: Mapping[Worker, float], cost: Callable[[Worker], float]) -> Worker | None:
        """The cheapest worker; one that just failed or is too small only when there is no other; ties go round."""
        workers = list(self._workers[role].values())
        if len(workers) < 2:
            return workers[0] if workers else None
        best = min(workers, key=lambda w: (not w.fits(tokens), w.is_avoided(avoid), w.failures > 0, cost(w), w.picked))
        self._clock += 1
        best.picked = self._clock
        return best


def difference(ours: str, identity: dict[str, Any], theirs: str, other: dict[str, Any]) -> str:
    """The first field in which two workers differ, with both values; "" when they can work together."""
    for field in (*identity, *(key for key in other if key not in identity)):
        mine, your = identity.get(field, "missing"), other.get(field, "missing")
        if mine != your or type(mine) is not type(your):
            return f"{field} differs: {_short(mine)} on {ours}, {_short(your)} on {theirs}"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1 << 53
