"""The V4 conversation format: prompts exact to the character, output told apart wherever tokens cut it."""

import json
from typing import Any

import pytest

from router.chat import DSML, MAXIMUM_EFFORT, TOOL_CALLS_START, ReplySplitter, ToolCall, encode_chat, parse_tool_calls

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, BOT = "<｜User｜>", "<｜Assistant｜>"


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def bot(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: str, call_id: str = "") -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [SYSTEM, user("a"), bot("b", reasoning_content="r"), user("c")]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "description": "é"}}


def test_chat_and_thinking_prompts() -> None:
    assert encode_chat([user("hi")], thinking=False) == f"{BOS}{USER}hi{BOT}</think>"
    assert encode_chat([user("hi")], thinking=True) == f"{BOS}{USER}hi{BOT}<think>"
    assert encode_chat([SYSTEM, user("hi")], thinking=False) == f"{BOS}Be brief.{USER}hi{BOT}</think>"


def test_effort_goes_in_front_of_the_system_text_only_when_it_is_max_and_thinking() -> None:
    assert encode_chat([SYSTEM, user("x")], True, "max") == f"{BOS}{MAXIMUM_EFFORT}Be brief.{USER}x{BOT}<think>"
    assert MAXIMUM_EFFORT.startswith("Reasoning Effort: Absolute maximum") and MAXIMUM_EFFORT.endswith("\n\n")
    assert encode_chat([user("x")], True, "high") == encode_chat([user("x")], True)
    assert encode_chat([user("x")], False, "max") == encode_chat([user("x")], False)


def test_earlier_reasoning_is_dropped_while_thinking() -> None:
    assert encode_chat(TALK, True) == f"{BOS}Be brief.{USER}a{BOT}</think>b{EOS}{USER}c{BOT}<think>"
    assert encode_chat(TALK, False) == f"{BOS}Be brief.{USER}a{BOT}</think>b{EOS}{USER}c{BOT}</think>"


def test_tools_keep_earlier_reasoning() -> None:
    talk = [{**SYSTEM, "tools": [TOOL]}, *TALK[1:]]
    text = encode_chat(talk, True)
    assert text.endswith(f"{USER}a{BOT}<think>r</think>b{EOS}{USER}c{BOT}<think>")
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\n\nYou have access to a set of tools")
    schema = json.dumps(TOOL["function"], ensure_ascii=False)
    assert f"### Available Tool Schemas\n\n{schema}\n\nYou MUST strictly follow" in text


def test_a_response_format_is_shown_after_the_system_text() -> None:
    text = encode_chat([{**SYSTEM, "response_format": {"type": "object"}}, user("x")], False)
    head = 'Be brief.\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "object"}'
    assert text == f"{BOS}{head}{USER}x{BOT}</think>"


def test_tool_calls_and_results() -> None:
    calls = [call("look", '{"where": "up", "far": 3, "deep": {"a": [1]}}', "1"), call("wait", "{}", "2")]
    talk = [user("q"), bot("ok", tool_calls=calls)]
    talk += [{"role": "tool", "tool_call_id": "2", "content": "two"}, {"role": "tool", "tool_call_id": "1", "content": "one"}]
    text = encode_chat([*talk, user("and?")], False)
    made = (
        f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="look">\n'
        f'<{DSML}parameter name="where" string="true">up</{DSML}parameter>\n'
        f'<{DSML}parameter name="far" string="false">3</{DSML}parameter>\n'
        f'<{DSML}parameter name="deep" string="false">{{"a": [1]}}</{DSML}parameter>\n'
        f'</{DSML}invoke>\n<{DSML}invoke name="wait">\n\n</{DSML}invoke>\n</{DSML}tool_calls>'
    )
    results = "<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\nand?"
    assert text == f"{BOS}{USER}q{BOT}</think>ok{made}{EOS}{USER}{results}{BOT}</think>"


@pytest.mark.parametrize("arguments", ["not json", "[1]", "3", "[" * 100_000])
def test_arguments_that_are_no_json_object_go_into_one_parameter(arguments: str) -> None:
    text = encode_chat([user("q"), bot(None, tool_calls=[call("f", arguments)]), user("x")], False)
    assert f'<{DSML}parameter name="arguments" string="true">{arguments}</{DSML}parameter>' in text


def test_developer_messages_before_the_last_user_are_dropped_while_thinking() -> None:
    talk = [{"role": "developer", "content": "d"}, user("a")]
    assert encode_chat(talk, False) == f"{BOS}{USER}d{USER}a{BOT}</think>"
    assert encode_chat(talk, True) == f"{BOS}{USER}a{BOT}<think>"
    assert encode_chat([user("a"), talk[0]], True) == f"{BOS}{USER}a{USER}d{BOT}<think>"


def test_tasks_reminders_and_a_prefix() -> None:
    assert encode_chat([user("x", task="action")], False) == f"{BOS}{USER}x{BOT}</think><｜action｜>"
    assert encode_chat([user("x", task="domain")], True) == f"{BOS}{USER}x<｜domain｜>"
    reminder = {"role": "latest_reminder", "content": "now"}
    assert encode_chat([user("x"), reminder], False) == f"{BOS}{USER}x{BOT}</think><｜latest_reminder｜>now"
    assert encode_chat([user("x"), bot("so", prefix=True)], False) == f"{BOS}{USER}x{BOT}</think>so"


def block(body: str) -> str:
    return f"{TOOL_CALLS_START}>\n{body}\n</{DSML}tool_calls>"


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    lines = "\n".join(f'<{DSML}parameter name="{n}" string="{s}">{v}</{DSML}parameter>' for n, s, v in parameters)
    return f'<{DSML}invoke name="{name}">\n{lines}\n</{DSML}invoke>'


def test_tool_calls_are_parsed_back() -> None:
    text = block(invoke("f", ("a", "true", 'x "y"\n<b>'), ("n", "false", "[1, 2.5]")) + "\n" + invoke("g"))
    assert parse_tool_calls(text) == [ToolCall("f", '{"a": "x \\"y\\"\\n<b>", "n": [1, 2.5]}'), ToolCall("g", "{}")]


GOOD = block(invoke("f", ("a", "true", "x")))


@pytest.mark.parametrize(
    "text",
    [
        GOOD[:-5],
        GOOD + "more",
        block(""),
        block("noise\n" + invoke("f")),
        block(invoke("f", ("a", "true", "1"), ("a", "true", "2"))),
        block(invoke("f", ("a", "false", "{not json"))),
        block(invoke("f", ("a", "maybe", "1"))),
        GOOD.replace(">\n<", "><"),
    ],
)
def test_malformed_tool_calls_stay_content(text: str) -> None:
    assert parse_tool_calls(text) is None
    splitter = ReplySplitter(thinking=False, tools=True)
    parts = splitter.feed("say" + text)
    rest, calls = splitter.finish()
    assert "".join(part for kind, part in parts + rest if kind == "content") == "say" + text and not calls


def split(text: str, size: int, thinking: bool, tools: bool) -> tuple[str, str, list[ToolCall]]:
    splitter = ReplySplitter(thinking, tools)
    parts = [part for i in range(0, len(text), size) for part in splitter.feed(text[i : i + size])]
    rest, calls = splitter.finish()
    joined = {kind: "".join(t for k, t in parts + rest if k == kind) for kind in ("reasoning", "content")}
    return joined["reasoning"], joined["content"], calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_output_is_told_apart_wherever_it_is_cut(size: int) -> None:
    text = "let me </thin k</think>The <｜DS answer\n\n" + GOOD[2:]
    assert split(text, size, True, True) == ("let me </thin k", "The <｜DS answer", [ToolCall("f", '{"a": "x"}')])
    assert split(text, size, True, False) == ("let me </thin k", "The <｜DS answer\n\n" + GOOD[2:], [])
    assert split("a</think>b", size, False, False) == ("", "a</think>b", [])
    assert split("never ends </thi", size, True, True) == ("never ends </thi", "", [])
