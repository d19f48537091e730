"""The DeepSeek-V4 conversation format, both ways: messages to a prompt, generated text to reasoning, content, tool calls.

The fixed texts are part of the checkpoint's interface: the model was trained on exactly these characters. Messages
arrive validated (`router.openai`): every content is a string or None, tool calls have names and string arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
TOOL_CALLS_START = f"\n\n<{DSML}tool_calls"

MAXIMUM_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501 the model's own text
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

Message = Mapping[str, Any]


def encode_chat(messages: Sequence[Message], thinking: bool, effort: str | None = None) -> str:
    """The prompt text of a conversation, up to where the model goes on (spec A.3).

    thinking: generate a reasoning part first. effort: "max" puts the paragraph about effort in front; nothing else does.
    A message may have ``tools`` and ``response_format`` (system, developer), ``task`` (user), ``prefix`` (the last
    assistant message is to be continued).
    """
    turns = _order_results(_fuse(messages))
    keep_reasoning = any(turn.get("tools") for turn in turns)
    last_user = _last_user(turns)
    if thinking and not keep_reasoning:
        turns = [turn for i, turn in enumerate(turns) if i >= last_user or turn["role"] != "developer"]
        last_user = _last_user(turns)
    parts = [BOS, MAXIMUM_EFFORT if thinking and effort == "max" else ""]
    for i, turn in enumerate(turns):
        thinks_here = thinking and (keep_reasoning or i >= last_user)
        after_task = i > 0 and turns[i - 1].get("task") is not None
        parts.append(_render(turn, with_reasoning=thinks_here and not after_task))
        if i + 1 == len(turns) or turns[i + 1]["role"] in ("assistant", "latest_reminder"):
            parts.append(_transition(turn, thinking, thinks_here))
    return "".join(parts)


def _fuse(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Tool results and user texts that follow each other become the blocks of one user turn."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role not in ("tool", "user"):
            turns.append(dict(message))
            continue
        content = message.get("content") or ""
        block = (message.get("tool_call_id") or "", content) if role == "tool" else (None, content)
        last = turns[-1] if turns and turns[-1]["role"] == "user" else None
        if last is not None and (role == "tool" or last.get("task") is None):
            last["blocks"].append(block)
        else:
            turns.append({"role": "user", "blocks": [block], "task": message.get("task") if role == "user" else None})
    return turns


def _order_results(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results of a user turn, in the order in which the assistant made the calls."""
    order: dict[str, int] = {}
    for turn in turns:
        if turn["role"] == "assistant" and turn.get("tool_calls"):
            order = {call.get("id") or "": i for i, call in enumerate(turn["tool_calls"])}
        elif turn["role"] == "user":
            results = iter(sorted((b for b in turn["blocks"] if b[0] is not None), key=lambda b: order.get(b[0], 0)))
            turn["blocks"] = [block if block[0] is None else next(results) for block in turn["blocks"]]
    return turns


def _last_user(turns: Sequence[Message]) -> int:
    return max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)


def _render(turn: Message, with_reasoning: bool) -> str:
    role, content = turn["role"], turn.get("content") or ""
    if role == "user":
        blocks = [text if call is None else f"<tool_result>{text}</tool_result>" for call, text in turn["blocks"]]
        return USER + "\n\n".join(blocks)
    if role == "latest_reminder":
        return f"{REMINDER}{content}"
    if role == "assistant":
        reasoning = (turn.get("reasoning_content") or "") + END_THINK if with_reasoning else ""
        return reasoning + content + _render_calls(turn.get("tool_calls") or ()) + ("" if turn.get("prefix") else EOS)
    text: str = (USER if role == "developer" else "") + content
    if turn.get("tools"):
        text += "\n\n" + TOOLS % "\n".join(_json(tool["function"]) for tool in turn["tools"])
    if turn.get("response_format"):
        text += "\n\n" + RESPONSE_FORMAT + _json(turn["response_format"])
    return text


def _render_calls(calls: Sequence[Message]) -> str:
    if not calls:
        return ""
    invokes = []
    for call in calls:
        function = call["function"]
        lines = "\n".join(_parameter(name, value) for name, value in _arguments(function["arguments"]).items())
        invokes.append(f'<{DSML}invoke name="{function["name"]}">\n{lines}\n</{DSML}invoke>')
    return f"{TOOL_CALLS_START}>\n" + "\n".join(invokes) + f"\n</{DSML}tool_calls>"


def _parameter(name: str, value: Any) -> str:
    text, kind = (value, "true") if isinstance(value, str) else (_json(value), "false")
    return f'<{DSML}parameter name="{name}" string="{kind}">{text}</{DSML}parameter>'


def _arguments(raw: str) -> dict[str, Any]:
    """A call's arguments by name; what is not a JSON object becomes one argument called "arguments"."""
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        return {"arguments": raw}
    return parsed if isinstance(parsed, dict) else {"arguments": raw}


def _transition(turn: Message, thinking: bool, thinks_here: bool) -> str:
    """What follows a turn after which the model speaks."""
    task = turn.get("task")
    if task == "action":
        return ASSISTANT + (THINK if thinking else END_THINK) + "<｜action｜>"
    if task is not None:
        return f"<｜{task}｜>"
    if turn["role"] in ("user", "developer"):
        return ASSISTANT + (THINK if thinks_here else END_THINK)
    return ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object, as text


_CALLS = re.compile(rf"\s*<{DSML}tool_calls>\n(.*)</{DSML}tool_calls>\s*", re.DOTALL)
_INVOKE = re.compile(rf'<{DSML}invoke name="([^"\n]*)">\n(.*?)</{DSML}invoke>\n', re.DOTALL)
_PARAMETER = re.compile(rf'<{DSML}parameter name="([^"\n]*)" string="(true|false)">(.*?)</{DSML}parameter>\n', re.DOTALL)


def parse_tool_calls(text: str) -> list[ToolCall] | None:
    """The calls of a complete tool_calls block; None when it is not exactly in the format (nothing is repaired)."""
    block = _CALLS.fullmatch(text)
    invokes = _split(_INVOKE, block.group(1)) if block else None
    if not invokes:
        return None
    calls = []
    for name, body in invokes:
        arguments = _read_arguments(body)
        if arguments is None:
            return None
        calls.append(ToolCall(name, arguments))
    return calls


def _split(pattern: re.Pattern[str], text: str) -> list[tuple[str, ...]] | None:
    """The groups of matches that cover `text` without a gap, else None."""
    found, at = [], 0
    for match in pattern.finditer(text):
        if match.start() != at:
            return None
        at = match.end()
        found.append(match.groups())
    return found if at == len(text) else None


def _read_arguments(body: str) -> str | None:
    parameters = _split(_PARAMETER, "" if body == "\n" else body)  # the encoder leaves an empty line for no arguments
    if parameters is None or len({name for name, _, _ in parameters}) != len(parameters):
        return None
    arguments: dict[str, Any] = {}
    for name, is_string, value in parameters:
        try:
            arguments[name] = value if is_string == "true" else json.loads(value)
        except (ValueError, RecursionError):
            return None
    return _json(arguments)


class ReplySplitter:
    """Generated text, arriving in pieces, as ("reasoning" | "content", text) pieces and at the end the tool calls.

    A marker may be cut anywhere by token borders, so the longest suffix that could begin one is held back. With tools,
    everything from the tool_calls marker on is kept until the end: it is either calls, or content after all.
    """

    def __init__(self, thinking: bool, tools: bool) -> None:
        self._kind = "reasoning" if thinking else "content"
        self._tools = tools
        self._held = ""
        self._block: list[str] | None = None

    def feed(self, text: str) -> list[tuple[str, str]]:
        if self._block is not None:
            self._block.append(text)
            return []
        text = self._held + text
        out: list[tuple[str, str]] = []
        if self._kind == "reasoning":
            before, marker, after = text.partition(END_THINK)
            if not marker:
                return self._show(out, text, END_THINK)
            out += [("reasoning", before)] if before else []
            self._kind, text = "content", after
        if not self._tools:
            return self._show(out, text, "")
        before, marker, after = text.partition(TOOL_CALLS_START)
        if not marker:
            return self._show(out, text, TOOL_CALLS_START)
        self._held, self._block = "", [marker + after]
        return [*out, ("content", before)] if before else out

    def finish(self) -> tuple[list[tuple[str, str]], list[ToolCall]]:
        """(what was held back, the tool calls)."""
        if self._block is None:
            held, self._held = self._held, ""
            return ([(self._kind, held)] if held else []), []
        block = "".join(self._block)
        calls = parse_tool_calls(block)
        return ([("content", block)], []) if calls is None else ([], calls)

    def _show(self, out: list[tuple[str, str]], text: str, marker: str) -> list[tuple[str, str]]:
        keep = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
        self._held = text[len(text) - keep :]
        shown = text[: len(text) - keep]
        return [*out, (self._kind, shown)] if shown else out
