"""What clients get, whatever the endpoint: choices that grow token by token until all are finished."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Protocol

from router.errors import ApiError
from router.openai import Options
from router.scores import Scored, ScoreLists
from router.text import StopStrings, TextStream, Tokenizer
from wire.messages import PromptLogprobs

_PROCESS, _COUNT = secrets.token_hex(8), itertools.count()  # ids of answers: unique without asking the system each time


class Events(Protocol):
    """Where server-sent events go: `router.stream.EventStream`."""

    def send(self, *events: str) -> None: ...

    def end(self) -> None: ...

    @property
    def started(self) -> bool: ...


@dataclass(slots=True)
class Prompt:
    """One prompt of a request: its ids, its text if it is known, its scores once they are."""

    ids: list[int]
    text: str = ""
    scores: ScoreLists | None = None
    _written: str = ""

    def json(self) -> str:
        """The ids, written once for all choices."""
        if not self._written:
            self._written = f"[{','.join(map(str, self.ids))}]"
        return self._written


@dataclass(slots=True)
class Piece:
    """What one message from decode adds to a choice."""

    text: str
    ids: list[int]
    scores: list[Scored]
    offsets: list[int]


class Choice:
    """One sample of one prompt: detokenises, looks for stop strings, counts."""

    __slots__ = ("_min_tokens", "_offset", "_stop", "_stream", "finish_reason", "index", "pieces", "prompt", "tokens")

    def __init__(self, index: int, prompt: Prompt, options: Options, tokenizer: Tokenizer | None, offset: int = 0) -> None:
        self.index = index
        self.prompt = prompt
        self.tokens = 0
        self.finish_reason = ""
        self.pieces: list[Piece] = []
        self._offset = offset
        self._stop = StopStrings(options.stop) if options.stop and tokenizer is not None else None
        self._min_tokens = options.sampling.get("min_tokens", 0)
        self._stream: TextStream | None = None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer.skipped if options.skip_special else tokenizer.shown)

    def take(self, ids: list[int], finish: str, logprobs: Any, tops: Any) -> Piece:
        """New tokens. The text of a token that ends the generation (EOS, stop id) is not shown.

        Sets `finish_reason` at the end, or when a stop string is complete: then what comes after it is cut off.
        """
        if self._stream is not None and self._stop is None and not finish and logprobs is None and len(ids) == 1:
            self.tokens += 1
            return Piece(self._stream.feed(ids[0]), ids, [], [])
        texts, offsets, hit = [], [], False
        last_shown = len(ids) - (finish == "stop")
        for i, token_id in enumerate(ids):
            self.tokens += 1
            offsets.append(self._offset)
            text = self._stream.feed(token_id) if self._stream is not None and i < last_shown else ""
            self._offset += len(text)
            if self._stop is not None and self.tokens > self._min_tokens:
                text, hit = self._stop.feed(text)
            texts.append(text)
            if hit:
                finish, ids = "stop", ids[: i + 1]
                break
        if finish:
            texts.append("" if hit else self._rest())
            self.finish_reason = finish
        return Piece("".join(texts), ids, _scores(ids, logprobs, tops), offsets)

    def silence(self) -> None:
        """The client asked for no tokens: the one that came does not count."""
        self.tokens = 0
        self.finish_reason = "length"

    def _rest(self) -> str:
        rest = self._stream.finish() if self._stream is not None else ""
        if self._stop is None:
            return rest
        shown, hit = self._stop.feed(rest)
        return shown if hit else shown + self._stop.flush()


def _scores(ids: list[int], logprobs: Any, tops: Any) -> list[Scored]:
    if logprobs is None:
        return []
    return [
        (token_id, float(logprobs[i]), () if tops is None else [(top[0], float(top[1])) for top in tops[i]])
        for i, token_id in enumerate(ids)
    ]


class Answer:
    """The choices of one HTTP request. `done` is set when all are finished, or holds the ApiError that ended them."""

    object_name = ""
    id_prefix = ""

    def __init__(self, options: Options, prompts: list[Prompt], tokenizer: Tokenizer | None, model: str) -> None:
        self.options = options
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.model = model
        self.id = f"{self.id_prefix}{_PROCESS}{next(_COUNT):08x}"
        self.created = int(time.time())
        self.with_ids = tokenizer is None if options.return_token_ids is None else options.return_token_ids
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.choices = [
            Choice(number * options.n + sample, prompt, options, tokenizer, self.offset(prompt))
            for number, prompt in enumerate(prompts)
            for sample in range(options.n)
        ]
        self._open = len(self.choices)
        self._unscored = 0

    def offset(self, prompt: Prompt) -> int:
        """Where the first generated character is in the choice's text."""
        return 0

    def expect_scores(self) -> None:
        """The answer is not complete before every prompt's logprobs are there."""
        self._unscored = len(self.prompts)

    def listener(self, number: int) -> PromptListener:
        """Hears of prompt `number`; what the dispatcher calls."""
        first = number * self.options.n
        return PromptListener(self, self.prompts[number], self.choices[first : first + self.options.n])

    def take(self, choice: Choice, piece: Piece) -> None:
        raise NotImplementedError

    def take_scores(self, prompt: Prompt, message: PromptLogprobs) -> None:
        """The log probabilities of a prompt; `scored` when they are ready to be sent."""
        raise NotImplementedError

    def scored(self, prompt: Prompt) -> None:
        self._unscored -= 1
        self._finish_if_complete()

    def ended(self) -> None:
        self._open -= 1
        self._finish_if_complete()

    def complete(self) -> None:
        """Everything is there."""

    def fail(self, error: ApiError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def weight(self) -> int:
        """About how many numbers `body` has to write."""
        each = (self.options.logprobs + 2 if self.options.logprobs >= 0 else 0) + self.with_ids
        if not each:
            return 0
        prompts = sum([len(prompt.ids) for prompt in self.prompts]) if self.with_ids else 0
        return prompts + each * sum([choice.tokens for choice in self.choices])

    def body(self) -> str:
        """The whole answer as JSON. Any thread, once it is complete."""
        prompt, output = self.prompt_tokens, self.output_tokens
        usage = f'"prompt_tokens": {prompt}, "completion_tokens": {output}, "total_tokens": {prompt + output}'
        return (
            f'{{"id": "{self.id}", "object": "{self.object_name}", "created": {self.created}, "model": {quote(self.model)}, '
            f'"choices": [{",".join(map(self.written, self.choices))}], "usage": {{{usage}}}{self.ending()}}}'
        )

    def written(self, choice: Choice) -> str:
        """A choice as JSON."""
        raise NotImplementedError

    def ending(self) -> str:
        """What else the whole answer has, with a comma in front."""
        return ""

    @property
    def prompt_tokens(self) -> int:
        return sum([len(prompt.ids) for prompt in self.prompts])

    @property
    def output_tokens(self) -> int:
        return sum([choice.tokens for choice in self.choices])

    def usage(self) -> dict[str, int]:
        prompt, output = self.prompt_tokens, self.output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object_name, "created": self.created, "model": self.model}

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id) if self.tokenizer is not None else f"token_id:{token_id}"

    def _finish_if_complete(self) -> None:
        if not self._open and not self._unscored and not self.done.done():
            self.complete()
            self.done.set_result(None)


@dataclass(slots=True)
class PromptListener:
    """The `router.dispatch.Listener` of one prompt."""

    answer: Answer
    prompt: Prompt
    choices: list[Choice]

    def tokens(self, sample: int, ids: list[int], finish: str, logprobs: Any, tops: Any) -> bool:
        choice = self.choices[sample]
        piece = choice.take(ids, finish, logprobs, tops)
        self.answer.take(choice, piece)
        if choice.finish_reason:
            self.answer.ended()
            return not finish
        return False

    def prompt_logprobs(self, message: PromptLogprobs) -> None:
        self.answer.take_scores(self.prompt, message)

    def failed(self, error: ApiError) -> None:
        self.answer.fail(error)


def last_events(answer: Answer) -> list[str]:
    events = []
    if answer.options.include_usage:
        events.append(f"data: {json.dumps({**answer.head(), 'choices': [], 'usage': answer.usage()})}\n\n")
    return [*events, "data: [DONE]\n\n"]
