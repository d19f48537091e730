"""One running sequence: its tokens, its KV, the steps that hold it, and the rules by which it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.pages import SeqKV
from kvtransfer.transports import Key
from wire.messages import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. `tokens` are the client's prompt and everything generated since, retries included.

    `in_flight` has one entry for every step that was begun with it and whose tokens are not here yet, oldest first: the most
    tokens that it may bring. The least is one.
    """

    key: Key
    sample: int
    serial: tuple[int, int]  # order of admission, then sample: the highest is the newest, and no two are the same
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    eos_token_id: int
    kv: SeqKV
    router_inbox: str
    deadline_s: float
    arrived_s: float
    first_token_s: float = 0.0
    in_flight: list[int] = field(default_factory=list)
    drafts: int = 0  # guesses behind its next token that the last step with it leaves
    over: bool = False  # nobody wants its tokens any more

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be one of `stopping_ids`."""
        return self.generated >= self.sampling.min_tokens

    @property
    def surely_complete(self) -> bool:
        """Whether the steps in flight bring the last token, however few tokens they bring."""
        return self.generated + len(self.in_flight) >= self.sampling.max_tokens

    def stopping_ids(self) -> list[int]:
        """The tokens that end this sequence: its own stop ids, and EOS unless that is ignored."""
        eos = [] if self.sampling.ignore_eos else [self.eos_token_id]
        return [*self.sampling.stop_token_ids, *eos]

    def kv_tokens(self, tokens: int) -> int:
        """Tokens whose KV must have a page in a step that feeds `tokens` more behind those in flight. The last token's KV is
        never needed, nor is that of guesses behind it."""
        fed = len(self.tokens) - 1 + sum(self.in_flight) + tokens
        return min(fed, self.prompt_tokens + self.sampling.max_tokens - 1)

    def append(self, token: int) -> str:
        """Takes the next token; its KV is written when it is fed. Gives the finish reason, "" while running."""
        may_stop = self.may_stop
        self.tokens.append(token)
        if may_stop and token in self.sampling.stop_token_ids:
            return "stop"
        if may_stop and token == self.eos_token_id and not self.sampling.ignore_eos:
            return "stop"
        return "length" if self.generated >= self.sampling.max_tokens else ""

    def extend(self, tokens: list[int]) -> tuple[int, str]:
        """Takes tokens up to the one that ends the sequence: how many, and the finish reason or ""."""
        for count, token in enumerate(tokens, 1):
            reason = self.append(token)
            if reason:
                return count, reason
        return len(tokens), ""
