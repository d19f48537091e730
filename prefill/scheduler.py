"""Which prompts are computed next, who holds which page, and how each of them ends.

A prompt is in one of three stages: `waiting` for pages and a slot, `computing` chunk by chunk, or `sending` the rest of
its KV. All three keep the order of arrival. Whatever ends a prompt goes through `_release`.

A message may be lost with its connection. So the Offer is repeated until there is a Grant, and decode repeats its Grant
until there is a Ready: one for a prompt that is over here asks for our last word on it again, Ready or Abort.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtransfer.pages import PagePool, SeqKV
from kvtransfer.sender import Sender, SendLost, Sent
from kvtransfer.tombstones import LIMIT, Tombstones
from kvtransfer.transports import Freed, Key
from prefill.prompt import Chunk, Prompt, Scores
from prefill.shares import share_out
from wire.messages import ALL_SAMPLES, Abort, Failed, Grant, Offer, Prefill, Ready, unpack_ids
from wire.metrics import Metrics
from wire.timeline import Timeline

OFFER_PERIOD_S = 2.0  # without a Grant for so long the Offer is repeated: it, or the connection, may have been lost
LAST_WORDS = 16_384  # 5 MB; at a thousand requests a second 16 s, of which decode's repeated Grant needs two or three
DEADLINE_PERIOD_S = 0.1
_timeline = Timeline("prefill")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the command line allow."""

    vocab_size: int
    max_position: int
    page_tokens: int
    step_tokens: int
    chunk_tokens: int


class Scheduler:
    """First come first served, by pages and by tokens, as far as nobody starves: `_crowds_out` and prefill/shares.py."""

    def __init__(
        self,
        pool: PagePool,
        sender: Sender,
        limits: Limits,
        fingerprint: str,
        inbox: str,
        send: Callable[[str, Any], bool],
        metrics: Metrics,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: OrderedDict[Key, Prompt] = OrderedDict()
        self.computing: dict[Key, Prompt] = {}
        self.sending: dict[Key, Prompt] = {}
        self.draining: dict[Key, SeqKV] = {}  # over, but its memory may still be read: ours again when it is Freed
        self._sender = sender
        self._fingerprint = fingerprint
        self._inbox = inbox
        self._send = send
        self._metrics = metrics
        self._closed = Tombstones(4 * LIMIT)  # more than the sender's: keys that never reached it are in here too
        self._last_words: OrderedDict[Key, tuple[str, Ready | Abort]] = OrderedDict()  # to whom, what
        self._next_expiry_s = 0.0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.computing or self.sending)

    def live(self) -> list[Key]:
        """The prompts in hand."""
        return [*self.waiting, *self.computing, *self.sending]

    # --- messages

    def submit(self, message: Prefill, now_s: float) -> None:
        """Queues a prompt, or answers Failed("refused") at once when it could never be computed here."""
        key = (message.rid, message.attempt)
        if key in self._closed or self._find(key) is not None:
            self._metrics.add("duplicates")
            return
        self._metrics.add("prompts")
        reason = self._refusal(message)
        if reason:
            self._metrics.add("refused")
            self._send(message.router_inbox, Failed(*key, ALL_SAMPLES, "refused", reason, False, "prefill"))
            return
        top_k = min(message.sampling.prompt_logprobs, self.limits.vocab_size)
        scores = Scores(top_k) if top_k >= 0 else None
        deadline_s = now_s + message.timeout_s
        tokens, samples = unpack_ids(message.tokens), list(message.samples)
        self.waiting[key] = Prompt(key, message, tokens, samples, now_s, deadline_s, scores)
        _timeline.note(key, "queued", now_s, tokens=len(tokens))

    def grant(self, message: Grant) -> None:
        """Lets a hand-off go. Decode repeats its Grant while it has no Ready; see above."""
        key = (message.rid, message.attempt)
        prompt = self._find(key)
        if prompt is not None:
            if self._sender.granted(message):
                prompt.granted = True
                _timeline.note(key, "granted")
        elif key in self._last_words:
            self._send(*self._last_words[key])
        else:
            self._metrics.add("stale_grants")

    def abort(self, message: Abort) -> None:
        """Forgets a prompt, or one sample of it; its pages are free when nobody reads them any more."""
        key = (message.rid, message.attempt)
        prompt = self._find(key)
        if prompt is None:
            if message.sample == ALL_SAMPLES:
                self._closed.add(key)
            return
        prompt.samples = [s for s in prompt.samples if message.sample not in (s, ALL_SAMPLES)]
        # The router tells decode too, but its word may get there before our Offer, and be about nothing then.
        if prompt.samples and prompt.kv is not None:
            self._send(prompt.message.decode_inbox, message)
        if not prompt.samples:
            self._drop(prompt)

    # --- one turn of the loop

    def settle(self, events: list[Sent | SendLost | Freed], now_s: float) -> None:
        """Ends the prompts whose last byte is in place, and those whose decode worker can not be reached."""
        for event in events:
            if event.key in self.draining:
                self.pool.drop(self.draining.pop(event.key))
            prompt = self._find(event.key)
            if prompt is None or isinstance(event, Freed):
                continue
            if isinstance(event, SendLost) and event.closed:  # its word is on its way to us; lost, two reports show that
                self._drop(prompt)
                continue
            if isinstance(event, SendLost):
                self._metrics.add("transfers_broken")
                cause = "corrupt" if event.corrupt else "transfer"
                decode = prompt.message.decode_inbox
                self._fail(prompt, cause, f"the KV could not be sent to the decode worker at {decode}: {event.reason}", True)
                continue
            if not self._say_last(prompt, event.ready):
                self._fail(prompt, "transfer", f"nothing can be sent to {prompt.message.decode_inbox!r}", retryable=True)
                continue
            _timeline.note(event.key, "ready", bytes=event.ready.num_bytes)
            self._metrics.add("transfers_ok")
            self._metrics.add("kv_sent_bytes", event.ready.num_bytes)
            self._metrics.add("kv_sent_pages", self._pages(prompt.length))
            self._metrics.observe("kv_seconds", now_s - prompt.end_s)
            self._release(prompt)

    def expire(self, now_s: float) -> None:
        """Fails what is past its deadline and repeats Offers that may be lost; looks ten times a second, however often it
        is called."""
        if now_s < self._next_expiry_s:
            return
        self._next_expiry_s = now_s + DEADLINE_PERIOD_S
        for stage in (self.waiting, self.computing, self.sending):
            for prompt in [p for p in stage.values() if p.deadline_s <= now_s]:
                self._metrics.add("timeouts")
                reason = f"not handed to decode within {prompt.message.timeout_s:g} s"
                self._fail(prompt, "timeout", reason, retryable=False)
        for prompt in self._ungranted():
            if prompt.offer_again_s <= now_s:
                self._metrics.add("offers_repeated")
                self._offer(prompt, now_s)

    def admit(self, now_s: float) -> None:
        """Gives pages and a slot in the order of arrival. The head waits for them, and nobody overtakes it; only a prompt
        whose decode worker is behind with its grants is passed over until that has caught up."""
        behind: set[str] = set()
        for prompt in list(self.waiting.values()):
            decode = prompt.message.decode_inbox
            if decode in behind:
                continue
            if self._crowds_out(prompt):
                behind.add(decode)
                continue
            kv = self.pool.take(self._pages(prompt.length))
            if kv is None:
                return
            prompt.kv = kv
            self._begin(prompt, now_s)

    def next_chunks(self) -> list[Chunk]:
        """The next step (prefill/shares.py)."""
        return share_out(list(self.computing.values()), self.limits.step_tokens, self.limits.chunk_tokens)

    def computed(self, chunks: list[Chunk], now_s: float) -> None:
        """Sends on what a step has made, or will have on its device, for which the transport waits: full pages at once, and the
        rest behind a prompt's last chunk."""
        for chunk in chunks:
            prompt = chunk.prompt
            prompt.computed += chunk.count
            self._metrics.add("prefill_tokens", chunk.count)
            if prompt.scores is not None and prompt.scores.error:
                self._fail(prompt, "internal", prompt.scores.error, retryable=False)
            elif prompt.remaining:
                self._push(prompt, final=False)
            else:
                self._hand_over(prompt, now_s)

    def ended(self, chunks: list[Chunk], begin_s: float, end_s: float) -> None:
        """A step is over on its device, where it took that time."""
        for chunk in chunks:
            prompt = chunk.prompt
            prompt.done += chunk.count
            _timeline.note(prompt.key, "computing", begin_s, tokens=chunk.count)
            _timeline.note(prompt.key, "computed", end_s, tokens=chunk.count)
            if prompt.done == prompt.length:
                prompt.end_s = end_s
                self._metrics.observe("prefill_seconds", end_s - prompt.begin_s)

    def fail_step(self, chunks: list[Chunk], reason: str) -> None:
        """A step has raised: its prompts end, and nothing else."""
        self._metrics.add("step_failures")
        for chunk in chunks:
            self._fail(chunk.prompt, "internal", reason, retryable=True)

    # --- how prompts move and end

    def _begin(self, prompt: Prompt, now_s: float) -> None:
        """Starts to compute, and tells decode what is coming."""
        prompt.begin_s = now_s
        _timeline.note(prompt.key, "begun", now_s)
        self._metrics.observe("queue_seconds", now_s - prompt.queued_s)
        self.computing[prompt.key] = self.waiting.pop(prompt.key)
        self._sender.open(prompt.key)
        if not self._offer(prompt, now_s):
            reason = f"nothing can be sent to the decode worker at {prompt.message.decode_inbox!r}"
            self._fail(prompt, "transfer", reason, retryable=True)
        elif not prompt.length:
            self._hand_over(prompt, now_s)

    def _hand_over(self, prompt: Prompt, now_s: float) -> None:
        prompt.end_s = now_s
        if not prompt.length:
            self._metrics.observe("prefill_seconds", now_s - prompt.begin_s)
        if prompt.scores is not None:  # before the hand-off is complete, so that they precede the first token
            self._send(prompt.message.router_inbox, prompt.scores.message(prompt.key))
        self.sending[prompt.key] = self.computing.pop(prompt.key)
        self._push(prompt, final=True)

    def _push(self, prompt: Prompt, final: bool) -> None:
        assert prompt.kv is not None
        self._sender.push(prompt.key, prompt.kv.pages, prompt.kv.slot, prompt.computed, final)

    def _drop(self, prompt: Prompt) -> None:
        """Ends a prompt that somebody else gave up, who says so to the router."""
        self._say_last(prompt, Abort(*prompt.key))
        self._metrics.add("aborts")
        self._release(prompt)

    def _fail(self, prompt: Prompt, cause: str, reason: str, retryable: bool) -> None:
        """Ends a prompt with a message to the router, and to decode if that has been told of it."""
        self._say_last(prompt, Abort(*prompt.key))
        self._release(prompt)
        self._send(prompt.message.router_inbox, Failed(*prompt.key, ALL_SAMPLES, cause, reason, retryable, "prefill"))

    def _offer(self, prompt: Prompt, now_s: float) -> bool:
        message, left_s = prompt.message, prompt.deadline_s - now_s
        prompt.offer_again_s = now_s + OFFER_PERIOD_S
        offer = Offer(
            *prompt.key,
            message.tokens,
            message.prompt_tokens,
            tuple(prompt.samples),
            message.sampling,
            self._inbox,
            message.router_inbox,
            self._fingerprint,
            left_s,
        )
        return self._send(message.decode_inbox, offer)

    def _say_last(self, prompt: Prompt, word: Ready | Abort) -> bool:
        """Tells decode how a prompt ended, if it has been offered, and keeps that for the case that it asks again."""
        if prompt.kv is None:
            return True
        decode = prompt.message.decode_inbox
        self._last_words[prompt.key] = (decode, word)
        if len(self._last_words) > LAST_WORDS:
            self._last_words.popitem(last=False)
        return self._send(decode, word)

    def _release(self, prompt: Prompt) -> None:
        for stage in (self.waiting, self.computing, self.sending):
            stage.pop(prompt.key, None)
        self._closed.add(prompt.key)
        if prompt.kv is not None:
            if self._sender.close(prompt.key):
                self.pool.drop(prompt.kv)
            else:
                self.draining[prompt.key] = prompt.kv
            prompt.kv = None

    # --- questions

    def _refusal(self, message: Prefill) -> str:
        if not message.tokens or len(message.tokens) % 4:
            return "the prompt is empty: send one token at least"
        if not message.samples:
            return "no sample is asked for: n must be at least 1"
        if message.timeout_s != message.timeout_s:
            return "timeout_s is not a number"
        tokens = unpack_ids(message.tokens)
        if not 1 <= message.prompt_tokens <= len(tokens):
            return f"prompt_tokens is {message.prompt_tokens} of {len(tokens)} tokens: it must be between 1 and that"
        if max(tokens) >= self.limits.vocab_size:
            return f"token id {max(tokens)} is not in the vocabulary: ids run from 0 to {self.limits.vocab_size - 1}"
        if len(tokens) > self.limits.max_position:
            return f"the prompt has {len(tokens)} tokens, the model takes {self.limits.max_position}: shorten it"
        pages, total = self._pages(len(tokens) - 1), self.pool.total_pages
        if pages > total:
            fits = total * self.limits.page_tokens + 1
            return f"the prompt has {len(tokens)} tokens, this prefill worker has memory for {fits}: shorten it"
        return ""

    def _ungranted(self) -> list[Prompt]:
        """What holds pages and has no Grant."""
        return [prompt for stage in (self.sending, self.computing) for prompt in stage.values() if not prompt.granted]

    def _crowds_out(self, prompt: Prompt) -> bool:
        """Whether what waits for grants of one decode worker would hold more than a half of the pages or slots.

        KV that a worker has no room for must not keep others idle. One prompt may always wait, whatever its size.
        """
        mine = [each for each in self._ungranted() if each.message.decode_inbox == prompt.message.decode_inbox]
        pages = sum(self._pages(each.length) for each in [*mine, prompt])
        return bool(mine) and (2 * pages > self.pool.total_pages or 2 * (len(mine) + 1) > self.pool.total_slots)

    def _find(self, key: Key) -> Prompt | None:
        return self.computing.get(key) or self.sending.get(key) or self.waiting.get(key)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_tokens)
