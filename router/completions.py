"""/v1/completions answers, whole and streamed.

A streamed event is a fixed head and tail, made once per choice, around the JSON string of the new text: nothing else is
serialised per token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from router.answer import Answer, Choice, Events, Piece, Prompt, Scored, last_events
from router.openai import Options
from router.text import TextStream, Tokenizer


class Completion(Answer):
    object_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self, options: Options, prompts: list[Prompt], tokenizer: Tokenizer | None, model: str, echo: bool, silent: bool
    ) -> None:
        """silent: max_tokens was 0, so the one token that workers make is not for the client."""
        self.echo = echo
        self.silent = silent
        super().__init__(options, prompts, tokenizer, model)

    def offset(self, prompt: Prompt) -> int:
        return len(self.echo_text(prompt)) if self.echo else 0

    def echo_text(self, prompt: Prompt) -> str:
        if prompt.text is None:
            skip = self.options.skip_special
            prompt.text = self.tokenizer.decode(prompt.ids, skip) if self.tokenizer is not None else ""
        return prompt.text

    def take(self, choice: Choice, piece: Piece) -> None:
        if self.silent:
            choice.silence()
        else:
            choice.pieces.append(piece)

    def body(self) -> str:
        choices = ",".join([self._choice(choice) for choice in self.choices])
        usage = self.usage()
        counts = ", ".join([f'"{name}": {count}' for name, count in usage.items()])
        return (
            f'{{"id": "{self.id}", "object": "{self.object_name}", "created": {self.created}, "model": {quote(self.model)}, '
            f'"choices": [{choices}], "usage": {{{counts}}}}}'
        )

    def _choice(self, choice: Choice) -> str:
        text = "".join([piece.text for piece in choice.pieces])
        if self.echo:
            text = self.echo_text(choice.prompt) + text
        logprobs = self.logprobs(choice.pieces, choice.prompt if self.echo else None)
        ids = ""
        if self.with_ids:
            made = [token_id for piece in choice.pieces for token_id in piece.ids]
            ids = f', "prompt_token_ids": {choice.prompt.ids}, "token_ids": {made}'
        scores = json.dumps(logprobs) if logprobs is not None else "null"
        return (
            f'{{"index": {choice.index}, "text": {quote(text)}, "logprobs": {scores}, '
            f'"finish_reason": "{choice.finish_reason}"{ids}}}'
        )

    def logprobs(self, pieces: list[Piece], prompt: Prompt | None) -> dict[str, Any] | None:
        """The legacy logprobs object of generated tokens, after those of the echoed prompt if one is given."""
        if self.options.logprobs < 0:
            return None
        scores = [score for piece in pieces for score in piece.scores]
        offsets = [offset for piece in pieces for offset in piece.offsets]
        if prompt is not None:
            scores = [*(prompt.scores or ()), *scores]
            offsets = [*self._prompt_offsets(prompt), *offsets]
        return {
            "tokens": [self.token_text(token_id) for token_id, _, _ in scores],
            "token_logprobs": [logprob for _, logprob, _ in scores],
            "top_logprobs": [self._top(score) for score in scores] if self.options.logprobs else None,
            "text_offset": offsets,
        }

    def _top(self, score: Scored) -> dict[str, float] | None:
        token_id, logprob, top = score
        if logprob is None or top is None:
            return None
        return {self.token_text(other): value for other, value in [*top, (token_id, logprob)]}

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
        options: Options,
        prompts: list[Prompt],
        tokenizer: Tokenizer | None,
        model: str,
        echo: bool,
        silent: bool,
    ) -> None:
        super().__init__(options, prompts, tokenizer, model, echo, silent)
        self.events = events
        self._usage = ',"usage":null' if options.include_usage else ""
        self._plain = not self.with_ids and options.logprobs < 0
        start = json.dumps(self.head(), separators=(",", ":"))[:-1]
        self._frames = [
            Frame(
                f'data: {start},"choices":[{{"index":{choice.index},"text":',
                f',"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n',
                opened=not echo and not self.with_ids,
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
            text = self.echo_text(choice.prompt) + text
        logprobs = self.logprobs(pieces, choice.prompt if first and self.echo else None)
        extra: dict[str, Any] = {"logprobs": logprobs, "finish_reason": choice.finish_reason or None}
        if self.with_ids:
            extra |= {"prompt_token_ids": choice.prompt.ids} if first else {}
            extra["token_ids"] = [token_id for piece in pieces for token_id in piece.ids]
        rest = json.dumps(extra, separators=(",", ":"))[1:]
        self.events.send(f"{frame.head}{quote(text)},{rest}]{self._usage}}}\n\n")
