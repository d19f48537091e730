"""/v1/chat/completions answers, whole and streamed: reasoning, content and tool calls told apart."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from router.answer import Answer, Choice, Events, Piece, Prompt, last_events
from router.chat import ReplySplitter, ToolCall
from router.openai import Options
from router.scores import chat_logprobs
from router.text import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What a chat request wants of the output's structure."""

    thinking: bool  # the prompt ends inside a reasoning part
    tools: bool


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": "call_" + secrets.token_hex(12), "type": "function", "function": function}


class Chat(Answer):
    object_name = "chat.completion"
    id_prefix = "chatcmpl-"

    def __init__(
        self, options: Options, prompts: list[Prompt], tokenizer: Tokenizer | None, model: str, shape: ChatShape
    ) -> None:
        super().__init__(options, prompts, tokenizer, model)
        self.shape = shape

    def take(self, choice: Choice, piece: Piece) -> None:
        choice.pieces.append(piece)

    def ending(self) -> str:
        return f', "prompt_token_ids": {self.prompts[0].json()}' if self.with_ids else ""

    def logprobs(self, pieces: list[Piece]) -> str:
        if self.options.logprobs < 0:
            return "null"
        return chat_logprobs((score for piece in pieces for score in piece.scores), self.token_text, self._token_bytes)

    def _token_bytes(self, token_id: int) -> bytes:
        tokenizer = self.tokenizer
        return tokenizer.shown.pieces[token_id] if tokenizer is not None and token_id < tokenizer.size else b""

    def written(self, choice: Choice) -> str:
        splitter = ReplySplitter(self.shape.thinking, self.shape.tools)
        parts = splitter.feed("".join([piece.text for piece in choice.pieces]))
        rest, calls = splitter.finish()
        parts += rest
        content = "".join(text for kind, text in parts if kind == "content")
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if self.shape.thinking:
            message["reasoning_content"] = "".join(text for kind, text in parts if kind == "reasoning")
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        reason = "tool_calls" if calls else choice.finish_reason
        ids = ""
        if self.with_ids:
            ids = f', "token_ids": {[token_id for piece in choice.pieces for token_id in piece.ids]}'
        return (
            f'{{"index": {choice.index}, "message": {json.dumps(message)}, "logprobs": {self.logprobs(choice.pieces)}, '
            f'"finish_reason": "{reason}"{ids}}}'
        )


class ChatStream(Chat):
    object_name = "chat.completion.chunk"

    def __init__(
        self,
        events: Events,
        options: Options,
        prompts: list[Prompt],
        tokenizer: Tokenizer | None,
        model: str,
        shape: ChatShape,
    ) -> None:
        super().__init__(options, prompts, tokenizer, model, shape)
        self.events = events
        self._usage = ',"usage":null' if options.include_usage else ""
        self._start = "data: " + json.dumps(self.head(), separators=(",", ":"))[:-1]
        self._plain = not self.with_ids and options.logprobs < 0
        self._tail = f'}},"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n'
        self._opened = [False] * len(self.choices)
        self._splitters: list[ReplySplitter | None] = [
            ReplySplitter(shape.thinking, shape.tools) if shape.thinking or shape.tools else None for _ in self.choices
        ]
        self._heads = [f'{self._start},"choices":[{{"index":{choice.index},"delta":{{' for choice in self.choices]

    def take(self, choice: Choice, piece: Piece) -> None:
        i = choice.index
        if not self._opened[i]:
            self._opened[i] = True
            self.events.send(self._opening(choice))
        splitter = self._splitters[i]
        if splitter is None and self._plain and not choice.finish_reason:
            if piece.text:
                self.events.send(f'{self._heads[i]}"content":{quote(piece.text)}{self._tail}')
            return
        parts = splitter.feed(piece.text) if splitter is not None else [("content", piece.text)] if piece.text else []
        calls: list[ToolCall] = []
        if choice.finish_reason and splitter is not None:
            rest, calls = splitter.finish()
            parts += rest
        self._send(choice, piece, parts, calls)

    def complete(self) -> None:
        self.events.send(*last_events(self))
        self.events.end()

    def _opening(self, choice: Choice) -> str:
        ids = f',"prompt_token_ids":{self.prompts[0].json()}' if self.with_ids else ""
        delta = '"role":"assistant","content":""'
        return f'{self._heads[choice.index]}{delta}}},"logprobs":null,"finish_reason":null}}]{ids}{self._usage}}}\n\n'

    def _send(self, choice: Choice, piece: Piece, parts: list[tuple[str, str]], calls: list[ToolCall]) -> None:
        """One event for each part; logprobs and ids go with the first, the finish reason with the last."""
        deltas: list[dict[str, Any]] = [{"content" if kind == "content" else "reasoning_content": text} for kind, text in parts]
        if calls:
            deltas.append({"tool_calls": [{"index": i, **_call(call)} for i, call in enumerate(calls)]})
        if not deltas and (not self._plain or choice.finish_reason):
            deltas.append({})
        out = []
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            reason = ("tool_calls" if calls else choice.finish_reason) if is_last and choice.finish_reason else None
            body: dict[str, Any] = {"index": choice.index, "delta": delta, "finish_reason": reason}
            if number == 0 and self.with_ids:
                body["token_ids"] = piece.ids
            logprobs = self.logprobs([piece]) if number == 0 and piece.ids else "null"
            text = json.dumps(body, separators=(",", ":"))[:-1]
            out.append(f'{self._start},"choices":[{text},"logprobs":{logprobs}}}]{self._usage}}}\n\n')
        if out:
            self.events.send(*out)
