"""One prompt on its way through prefill, and the log probabilities that are collected of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtransfer.pages import SeqKV
from kvtransfer.transports import Key
from wire.messages import Prefill, PromptLogprobs


@dataclass(slots=True)
class Scores:
    """Log probabilities of the client's prompt tokens 1..N-1, chunk by chunk. error: why they can not be given."""

    top_k: int
    logprobs: list[Tensor] = field(default_factory=list)  # float32 [n], as are the parts of the next two [n, top_k]
    top_ids: list[Tensor] = field(default_factory=list)  # int64
    top_logprobs: list[Tensor] = field(default_factory=list)
    error: str = ""

    def message(self, key: Key) -> PromptLogprobs:
        logprobs, ids, tops = (_bytes(parts) for parts in (self.logprobs, self.top_ids, self.top_logprobs))
        return PromptLogprobs(*key, self.top_k, logprobs, ids, tops)


def _bytes(parts: list[Tensor]) -> bytes:
    """Little-endian float32, or uint32 for ids."""
    if not parts:
        return b""
    whole = torch.cat(parts)
    return whole.cpu().numpy().astype("<f4" if whole.is_floating_point() else "<u4").tobytes()


@dataclass(slots=True, eq=False)
class Prompt:
    """`tokens` are the client's prompt and what was generated before a retry; KV is made of all but the last."""

    key: Key
    message: Prefill
    tokens: list[int]
    samples: list[int]
    queued_s: float
    deadline_s: float
    scores: Scores | None
    kv: SeqKV | None = None  # from admission on
    computed: int = 0  # tokens whose KV is in `kv`
    done: int = 0  # of them those whose step is over on the device
    passed_over: int = 0  # steps since it was last in one
    granted: bool = False
    offer_again_s: float = 0.0  # when the Offer is repeated, if there is no Grant by then
    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of KV to hand over; the last token is decode's first."""
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        return self.length - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a prompt, computed in one step."""

    prompt: Prompt
    count: int

    @property
    def end(self) -> int:
        """The position after its last, until the prompt moves on."""
        return self.prompt.computed + self.count
