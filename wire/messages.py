"""The messages that pools and router exchange, as frozen dataclasses.

Every message is one-way: nobody waits on a reply. ``(rid, attempt)`` names one try at a request and is single-use;
a request that is retried comes back under a higher attempt, so a late message of the old try matches nothing.
Token ids travel as ``bytes`` (little-endian uint32, `pack_ids`): a 128k-token prompt costs 0.1 ms that way and 6.5 ms
as a list.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ALL_SAMPLES = -1
_KEY = struct.Struct("<QI")
_UINT64, _UINT32 = 2**64 - 1, 2**32 - 1


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token or page ids as little-endian uint32 bytes. Raises OverflowError for an id outside 0..2^32-1."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`. Raises ValueError when the length is not a multiple of four."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are not a whole number of uint32 ids")
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def pack_keys(keys: Iterable[tuple[int, int]]) -> bytes:
    """(rid, attempt) pairs, 12 bytes each: little-endian uint64 and uint32.

    Numbers that are larger or negative, which no router gives out, wrap: a worker must not fail on what it was sent.
    """
    numbers = [number for rid, attempt in keys for number in (rid & _UINT64, attempt & _UINT32)]
    return struct.pack("<" + "QI" * (len(numbers) // 2), *numbers)


def unpack_keys(data: bytes) -> list[tuple[int, int]]:
    """The inverse of `pack_keys`. Raises ValueError when the length is not a multiple of twelve."""
    if len(data) % _KEY.size:
        raise ValueError(f"{len(data)} bytes are not a whole number of keys")
    return list(_KEY.iter_unpack(data))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How decode turns logits into tokens. Counts are in tokens and start at the end of the client's prompt."""

    max_tokens: int
    seed: int  # always set (the router draws one when the client gave none): a retry must draw the same numbers
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1  # -1: none; k >= 0: the chosen token's and the k most likely ones'
    prompt_logprobs: int = -1  # the same for the prompt's tokens; computed by prefill
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """A worker's registration, heartbeat and report, twice a second; silence means dead."""

    role: str  # "prefill" or "decode"
    name: str  # unique per worker process
    state: str  # "serving", or "gone" as the last word of a worker that leaves
    inbox: str
    identity: dict[str, Any]  # what both sides must agree on: KVLayout.identity() and the model's; compared field by field
    load: dict[str, Any]  # free_pages, total_pages, free_slots, total_slots, queued, running, max_context, ...
    metrics: list[Any]  # Metrics.snapshot()
    live: bytes  # pack_keys of every attempt it holds, whatever its stage: what is not in here it will say no more about
    turn: int  # how many snapshots it has made: the heartbeat repeats one until there is a new one


@dataclass(frozen=True, slots=True)
class Refused:
    """Router to worker: you cannot join, and why. The worker says so and exits."""

    reason: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Router to prefill: compute the KV of ``tokens[:-1]`` and hand it to ``decode_inbox``."""

    rid: int
    attempt: int
    tokens: bytes  # the client's prompt, then what was generated before a retraction or retry
    prompt_tokens: int  # how many of `tokens` are the client's
    samples: tuple[int, ...]  # which of the request's n samples continue from here
    sampling: SamplingParams
    decode_inbox: str
    router_inbox: str
    timeout_s: float  # give up (Failed) after this long


@dataclass(frozen=True, slots=True)
class Offer:
    """Prefill to decode, when the prompt starts: this KV is being made, where shall it go?"""

    rid: int
    attempt: int
    tokens: bytes
    prompt_tokens: int
    samples: tuple[int, ...]
    sampling: SamplingParams
    prefill_inbox: str
    router_inbox: str
    fingerprint: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Decode to prefill: room is reserved. ``pages`` (pack_ids) and ``slot`` are decode's own numbers."""

    rid: int
    attempt: int
    slot: int
    pages: bytes
    address: str  # where decode's transport listens
    secret: bytes = b""  # what the bulk of this hand-off is sealed with; "" without a cluster key
    worker: str = ""  # decode's Status.name: who that address is, in prefill's log


@dataclass(frozen=True, slots=True)
class Ready:
    """Prefill to decode, after the last byte has left: what must have arrived."""

    rid: int
    attempt: int
    length: int  # tokens of KV
    num_spans: int
    num_bytes: int
    digest: int  # sum over spans, mod 2^64; kvtransfer/digest.py


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Prefill to router: log probabilities of prompt tokens 1..N-1 (token 0 has none)."""

    rid: int
    attempt: int
    top_k: int
    logprobs: bytes  # float32 [N-1]
    top_ids: bytes  # uint32 [N-1, top_k]
    top_logprobs: bytes  # float32 [N-1, top_k]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Decode to router, one a step.

    A row is ``[rid, attempt, sample, first, ids, finish_reason, logprobs, tops]``: ``first`` how many tokens the sample
    had before ``ids``, counted from the end of the client's prompt, those of earlier attempts included, so that a gap
    shows a message that was lost; ``ids`` a list; ``finish_reason`` "" while running, else "stop" or "length";
    ``logprobs`` None or one float per id; ``tops`` None or per id a list of ``[id, logprob]``, most likely first. A stop
    or EOS token is the last of ``ids`` of its row.
    """

    worker: str  # the sender's Status.name: whom to tell when nobody wants a row's attempt any more
    rows: list[Any]


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget this: router to either worker, prefill to decode, decode to prefill. Repeating it changes nothing.

    ``sample`` ALL_SAMPLES ends the whole attempt. Decode also answers an Offer of an attempt that is over there with it.
    """

    rid: int
    attempt: int
    sample: int = ALL_SAMPLES


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker to router: this attempt (or one sample of it) ends without a result here.

    ``cause`` is one word for metrics and policy: "retracted" (out of pages; resubmit, not counted as a failure),
    "transfer" (hand-off broken), "corrupt" (the same, by bytes that are not what was sent: retried once), "timeout",
    "refused" (can never work: a 400), "internal". The reason goes to the client when it is not retryable, so it names no worker
    then; otherwise to the router's log.
    """

    rid: int
    attempt: int
    sample: int
    cause: str
    reason: str
    retryable: bool
    role: str  # of the worker that says so: "prefill" or "decode"


MESSAGES: Sequence[type] = (Status, Refused, Prefill, Offer, Grant, Ready, PromptLogprobs, Tokens, Abort, Failed)
