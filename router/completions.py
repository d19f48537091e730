"""/v1/completions answers, whole and streamed.

A streamed event is a fixed head and tail, made once per choice, around the JSON string of the new text: nothing else is
serialised per token.
"""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring_ascii as quote

from router.answer import Answer, Choice, Events, Piece, Prompt, last_events
from router.errors import internal
from router.openai import CompletionRequest
from router.scores import ScoreLists, legacy_logprobs, prompt_scores, score_lists
from router.text import TextStream, Tokenizer
from wire.messages import PromptLogprobs

_LOG = logging.getLogger("pdserve.router")
INLINE_SCORES = 20_000  # of a prompt; more of them are written in a thread: 20,000 take some 20 ms


class Completion(Answer):
    object_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self, wanted: CompletionRequest, prompts: list[Prompt], tokenizer: Tokenizer | None, model: str, threads: Executor
    ) -> None:
        """With echo, the prompts' texts have to be there."""
        self.echo = wanted.echo
        self.silent = wanted.options.max_tokens == 0  # then the one token that workers make is not for the client
        self._threads = threads
        super().__init__(wanted.options, prompts, tokenizer, model)

    def offset(self, prompt: Prompt) -> int:
        return len(prompt.text) if self.echo else 0

    def take(self, choice: Choice, piece: Piece) -> None:
        if self.silent:
            choice.silence()
        else:
            choice.pieces.append(piece)

    def take_scores(self, prompt: Prompt, message: PromptLogprobs) -> None:
        if len(prompt.ids) * (message.top_k + 1) <= INLINE_SCORES:
            prompt.scores = self._score(prompt, message)
            self.scored(prompt)
        else:
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._score, prompt, message)
            work.add_done_callback(partial(self._take_written, prompt, message.rid))

    def _take_written(self, prompt: Prompt, rid: int, work: asyncio.Future[ScoreLists]) -> None:
        if self.done.done() or work.cancelled():
            return
        error = work.exception()
        if error is not None:
            _LOG.error("request %d: its prompt's scores", rid, exc_info=error)
            self.fail(internal(rid))
            return
        prompt.scores = work.result()
        self.scored(prompt)

    def _score(self, prompt: Prompt, message: PromptLogprobs) -> ScoreLists:
        return score_lists(prompt_scores(prompt.ids, message), self._prompt_offsets(prompt), self.token_text)

    def written(self, choice: Choice) -> str:
        text = "".join([piece.text for piece in choice.pieces])
        if self.echo:
            text = choice.prompt.text + text
        ids = ""
        if self.with_ids:
            made = [token_id for piece in choice.pieces for token_id in piece.ids]
            ids = f', "prompt_token_ids": {choice.prompt.json()}, "token_ids": {made}'
        logprobs = self.logprobs(choice.pieces, choice.prompt if self.echo else None)
        return (
            f'{{"index": {choice.index}, "text": {quote(text)}, "logprobs": {logprobs}, '
            f'"finish_reason": "{choice.finish_reason}"{ids}}}'
        )

    def logprobs(self, pieces: list[Piece], prompt: Prompt | None) -> str:
        """The legacy logprobs object of generated tokens, after those of the echoed prompt if one is given, as JSON."""
        if self.options.logprobs < 0:
            return "null"
        scores = [score for piece in pieces for score in piece.scores]
        offsets = [offset for piece in pieces for offset in piece.offsets]
        parts = [score_lists(scores, offsets, self.token_text)]
        if prompt is not None and prompt.scores is not None:
            parts.insert(0, prompt.scores)
        return legacy_logprobs(parts, with_tops=self.options.logprobs > 0)

    def _prompt_offsets(self, prompt: Prompt) -> list[int]:
        if self.tokenizer is None:
            return [0] * len(prompt.ids)
        stream = TextStream(self.tokenizer.skipped if self.options.skip_special else self.tokenizer.shown)
        offsets, at = [], 0
        for token_id in prompt.ids:
            offsets.append(at)
            at += len(stream.feed(token_id))
        return offsets


@dataclass(slots=True)
class Frame:
    """The fixed parts of a choice's events."""

    head: str  # up to the JSON string of the text
    tail: str  # after it, for an event that is not the last and has nothing but text
    opened: bool = False
    held: list[Piece] = field(default_factory=list)


class CompletionStream(Completion):
    def __init__(
        self,
        events: Events,
        wanted: CompletionRequest,
        prompts: list[Prompt],
        tokenizer: Tokenizer | None,
        model: str,
        threads: Executor,
    ) -> None:
        super().__init__(wanted, prompts, tokenizer, model, threads)
        options = wanted.options
        self.events = events
        self._usage = ',"usage":null' if options.include_usage else ""
        self._plain = not self.with_ids and options.logprobs < 0
        start = json.dumps(self.head(), separators=(",", ":"))[:-1]
        self._frames = [
            Frame(
                f'data: {start},"choices":[{{"index":{choice.index},"text":',
                f',"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n',
                opened=not self.echo and not self.with_ids,
            )
            for choice in self.choices
        ]

    def take(self, choice: Choice, piece: Piece) -> None:
        frame = self._frames[choice.index]
        if frame.opened and self._plain and not choice.finish_reason and not self.silent:
            if piece.text:
                self.events.send(frame.head + quote(piece.text) + frame.tail)
            return
        if self.silent:
            choice.silence()
            piece = Piece("", [], [], [])
        frame.held.append(piece)
        if not (self.echo and self._unscored and choice.prompt.scores is None):
            self._release(choice)

    def scored(self, prompt: Prompt) -> None:
        for choice in self.choices:
            if choice.prompt is prompt and self._frames[choice.index].held:
                self._release(choice)
        super().scored(prompt)

    def complete(self) -> None:
        self.events.send(*last_events(self))
        self.events.end()

    def _release(self, choice: Choice) -> None:
        """Sends what is held of a choice as one event."""
        frame = self._frames[choice.index]
        pieces, frame.held = frame.held, []
        first, frame.opened = not frame.opened, True
        text = "".join([piece.text for piece in pieces])
        if first and self.echo:
            text = choice.prompt.text + text
        logprobs = self.logprobs(pieces, choice.prompt if first and self.echo else None)
        reason = f'"{choice.finish_reason}"' if choice.finish_reason else "null"
        ids = ""
        if self.with_ids:
            made = [token_id for piece in pieces for token_id in piece.ids]
            ids = (f',"prompt_token_ids":{choice.prompt.json()}' if first else "") + f',"token_ids":{made}'
        rest = f'"logprobs":{logprobs},"finish_reason":{reason}{ids}}}'
        self.events.send(f"{frame.head}{quote(text)},{rest}]{self._usage}}}\n\n")
