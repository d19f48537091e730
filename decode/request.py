"""One offered hand-off until its sequences run, and the rules by which an Offer is refused at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from decode.sampling import complaint
from kvtransfer.pages import SeqKV
from kvtransfer.transports import Key
from wire.messages import Grant, Offer, unpack_ids


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model, the pool and the command line allow."""

    vocab_size: int
    max_position: int
    eos_token_id: int
    page_tokens: int
    total_pages: int
    total_slots: int
    max_batch: int
    most_logprobs: int

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


@dataclass(slots=True, eq=False)
class Request:
    """An accepted Offer. It waits for room, then (`kvs` is set) for its KV to arrive.

    `kvs` has one entry a sample. The first is where the KV lands; of the others only the slot and, when the last page
    is a partial one, a page to copy it to are taken, and the fork shares the rest.
    """

    key: Key
    offer: Offer
    tokens: list[int]
    samples: list[int]
    queued_s: float
    deadline_s: float
    serial: int = 0  # order of admission
    granted_s: float = 0.0
    kvs: list[SeqKV] = field(default_factory=list)
    grant: Grant | None = None
    grant_again_s: float = math.inf  # when the Grant is repeated; never once Ready is here
    num_bytes: int = 0  # of KV, as prefill says it sent them

    @property
    def length(self) -> int:
        """Tokens of KV that arrive; the last token is fed by decode."""
        return len(self.tokens) - 1


def pages_at_grant(length: int, num_samples: int, limits: Limits) -> int:
    """Pages that `num_samples` forks of a hand-off of `length` tokens hold before their first step."""
    copies = num_samples - 1 if length % limits.page_tokens else 0
    return limits.pages_for(length) + copies


def refusal(offer: Offer, fingerprint: str, limits: Limits) -> str:
    """Why this Offer can never be served here, and what to change; empty when it can."""
    if offer.fingerprint != fingerprint:
        return (
            f"fingerprint {offer.fingerprint} of prefill is not decode's {fingerprint}: start both with the same model and KV"
        )
    if not offer.tokens or len(offer.tokens) % 4:
        return "the prompt is empty: send one token at least"
    if offer.timeout_s != offer.timeout_s:
        return "timeout_s is not a number"
    samples = offer.samples
    if not samples or len(set(samples)) < len(samples) or min(samples) < 0 or max(samples) >= 2**31:
        return f"samples {samples} must be different numbers, at least one"
    tokens = unpack_ids(offer.tokens)
    if not 1 <= offer.prompt_tokens <= len(tokens):
        return f"prompt_tokens is {offer.prompt_tokens} of {len(tokens)} tokens: it must be between 1 and that"
    if max(tokens) >= limits.vocab_size:
        return f"token id {max(tokens)} is not in the vocabulary: ids run from 0 to {limits.vocab_size - 1}"
    return complaint(offer.sampling, limits.vocab_size, limits.most_logprobs) or _too_large(offer, len(tokens), limits)


def _too_large(offer: Offer, num_tokens: int, limits: Limits) -> str:
    """A sequence that is alone must always be able to finish; that is what keeps retraction from going on for ever."""
    most = max(num_tokens, offer.prompt_tokens + offer.sampling.max_tokens)
    asked = f"a prompt of {offer.prompt_tokens} tokens and max_tokens {offer.sampling.max_tokens}"
    if most > limits.max_position:
        return f"{asked} are more than the model's {limits.max_position} positions: shorten the prompt or lower max_tokens"
    if limits.pages_for(most - 1) > limits.total_pages:  # the last token's KV is never needed
        fits = limits.total_pages * limits.page_tokens + 1
        return f"{asked} are more than the {fits} tokens this decode worker has memory for: shorten or lower them"
    count = len(offer.samples)
    if count > limits.total_slots:
        return f"{count} samples are more than the {limits.total_slots} sequences this decode worker can hold: lower n"
    if pages_at_grant(num_tokens - 1, count, limits) > limits.total_pages:
        return f"{count} samples of a prompt of {num_tokens} tokens do not fit into this decode worker's memory: lower n"
    return ""
