"""One running sequence: its tokens, its KV, and the rules by which it ends."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtransfer.pages import SeqKV
from kvtransfer.transports import Key
from wire.messages import SamplingParams


class History:
    """The distinct tokens that penalties look at, and how often each was generated; grows with the sequence.

    The numbers live in arrays that tensors are laid over: an array element costs a step 0.1 us, a tensor element 10.
    """

    def __init__(self, prompt: list[int], generated: list[int]) -> None:
        counts = dict.fromkeys(prompt, 0)
        for token in generated:
            counts[token] = counts.get(token, 0) + 1
        self._place = {token: place for place, token in enumerate(counts)}
        self._reserve(array("q", counts), array("f", counts.values()))

    @property
    def ids(self) -> Tensor:
        """int64 [size]"""
        return self._id_tensor[: len(self._place)]

    @property
    def counts(self) -> Tensor:
        """float32 [size]; 0 for a token of the prompt alone"""
        return self._count_tensor[: len(self._place)]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._reserve(self._ids, self._counts)
        self._ids[place] = token
        self._counts[place] += 1

    def _reserve(self, ids: array[int], counts: array[float]) -> None:
        """Doubles the room. New arrays each time: one that a tensor lies over can not be resized."""
        spare = max(64, len(ids))
        self._ids = ids + array("q", bytes(8 * spare))
        self._counts = counts + array("f", bytes(4 * spare))
        self._id_tensor = torch.frombuffer(self._ids, dtype=torch.int64)
        self._count_tensor = torch.frombuffer(self._counts, dtype=torch.float32)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. `tokens` are the client's prompt and everything generated since, retries included."""

    key: Key
    sample: int
    serial: tuple[int, int]  # order of admission, then sample: the highest is the newest
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    eos_token_id: int
    kv: SeqKV
    router_inbox: str
    deadline_s: float
    arrived_s: float
    first_token_s: float = 0.0
    history: History | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        params = self.sampling
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            prompt = self.tokens[: self.prompt_tokens] if params.repetition_penalty != 1.0 else []
            self.history = History(prompt, self.tokens[self.prompt_tokens :])

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def stopping_ids(self) -> list[int]:
        """The tokens that end this sequence: its own stop ids, and EOS unless that is ignored."""
        eos = [] if self.sampling.ignore_eos else [self.eos_token_id]
        return [*self.sampling.stop_token_ids, *eos]

    def append(self, token: int) -> str:
        """Takes the next token; its KV is written when it is fed. Gives the finish reason, "" while running."""
        may_stop = self.generated >= self.sampling.min_tokens
        self.tokens.append(token)
        self.kv.length = len(self.tokens) - 1
        if self.history is not None:
            self.history.add(token)
        if may_stop and token in self.sampling.stop_token_ids:
            return "stop"
        if may_stop and token == self.eos_token_id and not self.sampling.ignore_eos:
            return "stop"
        return "length" if self.generated >= self.sampling.max_tokens else ""
