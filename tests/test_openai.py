"""Requests checked field by field, and the shapes of the answers."""

import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from router.__main__ import SWITCH_INTERVAL_S
from router.answer import Answer
from router.errors import ApiError
from router.openai import MAX_SCORES, check_scores, output_tokens, parse_chat, parse_completion, parse_json
from router.scores import score_lists
from router.text import Tokenizer
from tests.scripted import Script
from tests.scripted_cluster import ScriptedCluster, scripted_cluster, until
from tests.test_text import TOKENIZER
from wire.sockets import MAX_MESSAGE_BYTES

MESSAGES = [{"role": "user", "content": "x"}]


def refused(parse: Callable[[dict[str, Any]], Any], **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400
    return caught.value


def test_a_bound_that_nobody_reaches_is_not_named() -> None:
    assert refused(parse_completion, prompt="x", max_tokens=0).message == "max_tokens: must be at least 1"
    assert refused(parse_completion, prompt="x", logprobs=50).message == "logprobs: must be between 0 and 20"


def test_defaults() -> None:
    request = parse_completion({"prompt": "x", "anything_else": [1], "user": None, "store": True})
    options = request.options
    assert (options.n, options.max_tokens, options.stream, options.stop, options.logprobs) == (1, None, False, (), -1)
    params = options.params(5)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (1.0, 1.0, 0, 0.0, 5)
    assert options.params(5).seed != params.seed  # drawn anew


def test_every_sampling_field_arrives() -> None:
    given_: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
    }
    given_ |= {"repetition_penalty": 1.2, "logit_bias": {"5": -100, "7": 2.5}, "min_tokens": 2, "ignore_eos": True}
    params = parse_completion({"prompt": "x", "seed": -3, "stop_token_ids": [4, 5.0], "logprobs": 3, **given_}).options.params(
        9
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.2)
    assert params.logit_bias == ((5, -100.0), (7, 2.5)) and params.stop_token_ids == (4, 5)
    assert (params.min_tokens, params.ignore_eos, params.logprobs, params.seed) == (2, True, 3, 2**63 - 3)


@pytest.mark.parametrize(
    "prompt", [None, 3, True, {}, [], [[]], ["a", 1], [1, "a"], [[1], "a"], [True], [-1], [1.5], [2**32], [None]]
)
def test_bad_prompts_are_named(prompt: Any) -> None:
    assert refused(parse_completion, prompt=prompt).param == "prompt"


def test_prompt_shapes() -> None:
    shapes: list[tuple[Any, Any]] = [
        ("a", ["a"]), (["a", ""], ["a", ""]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([1.0], [[1]]),
    ]  # fmt: skip
    for raw, prompts in shapes:
        assert parse_completion({"prompt": raw}).prompts == prompts


BAD_FIELDS: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1, 1.5, "5", True, 2**70, math.inf, [1]]),
    ("max_completion_tokens", [0, "5"]),
    ("n", [0, 129, True, "1", 1e30]),
    ("temperature", [-0.1, 2.1, "1", True, math.nan, math.inf, 10**400]),
    ("top_p", [0, 1.1, "1"]),
    ("top_k", [-2, 0.5, "1", True, 2**31 + 1, 2**32 - 1]),
    ("min_p", [-0.1, 1.1]),
    ("presence_penalty", [-2.1, 2.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("repetition_penalty", [0, -1, 11, 1e-9]),
    ("seed", ["1", 1.5, 2**63, True]),
    ("stop", [1, [1], [""], "", ["a"] * 17, ["a", None], "x" * 1001, {}]),
    ("stream", ["true", 1]),
    ("stream_options", [[], "x", 1]),
    ("stop_token_ids", [1, ["a"], [-1], [True], [5] * 5000]),
    ("logit_bias", [[1], {"a": 1}, {"5": 101}, {"5": "x"}, {"-1": 1}, {"²": 1}]),
    ("min_tokens", [-1, "1", True]),
    ("ignore_eos", [1, "x"]),
    ("return_token_ids", [1, "x"]),
    ("model", [1, ["m"]]),
]


@pytest.mark.parametrize(("field", "values"), BAD_FIELDS)
def test_bad_values_are_named_on_both_endpoints(field: str, values: list[Any]) -> None:
    for value in values:
        assert refused(parse_completion, prompt="x", **{field: value}).param == field, value
        assert refused(parse_chat, messages=MESSAGES, **{field: value}).param == field, value


def test_fields_of_completions_only() -> None:
    assert refused(parse_completion, prompt="x", suffix="y").param == "suffix"
    assert refused(parse_completion, prompt="x", best_of=2).param == "best_of"
    assert parse_completion({"prompt": "x", "best_of": 2, "n": 2, "suffix": None}).options.n == 2
    for logprobs in (True, 21, -1, "1"):
        assert refused(parse_completion, prompt="x", logprobs=logprobs).param == "logprobs"
    assert parse_completion({"prompt": "x", "echo": True, "max_tokens": 0}).options.max_tokens == 0
    assert refused(parse_completion, prompt="x", min_tokens=5, max_tokens=4).param == "min_tokens"


BAD_MESSAGES: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages[0]", ["hi"]),
    ("messages[0].role", [{"content": "x"}]),
    ("messages[0].role", [{"role": "robot", "content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content[0]", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages[1].tool_calls[0]", [*MESSAGES, {"role": "assistant", "tool_calls": [{}]}]),
    ("messages[1].tool_calls", [*MESSAGES, {"role": "assistant", "tool_calls": "x"}]),
    ("messages[0].tool_call_id", [{"role": "tool", "content": "x", "tool_call_id": 5}]),
    ("messages[0].task", [{"role": "user", "content": "x", "task": "dance"}]),
    ("messages[0].reasoning_content", [{"role": "assistant", "content": "x", "reasoning_content": 1}]),
    ("messages", [{"role": "assistant", "content": "x", "prefix": True}, *MESSAGES]),
]


@pytest.mark.parametrize(("param", "messages"), BAD_MESSAGES)
def test_bad_messages_are_named(param: str, messages: Any) -> None:
    assert refused(parse_chat, messages=messages).param == param


BAD_CHAT: list[tuple[str, dict[str, Any]]] = [
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("logprobs", {"logprobs": 1}),
    ("tools", {"tools": {}}),
    ("tools[0]", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": 'a"b'}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": "json"}),
    ("reasoning_effort", {"reasoning_effort": "huge"}),
    ("thinking", {"thinking": True}),
    ("thinking.type", {"thinking": {"type": "maybe"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": 1}),
]


@pytest.mark.parametrize(("param", "body"), BAD_CHAT)
def test_bad_chat_fields_are_named(param: str, body: dict[str, Any]) -> None:
    assert refused(parse_chat, messages=MESSAGES, **body).param == param


@pytest.mark.parametrize(
    ("body", "thinking", "effort"),
    [
        ({}, False, None),
        ({"chat_template_kwargs": {"thinking": True}}, True, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, None),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"reasoning_effort": "high"}, True, None),
        ({"reasoning_effort": "max"}, True, "max"),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "max", "thinking": {"type": "disabled"}}, False, "max"),
    ],
)
def test_how_thinking_is_asked_for(body: dict[str, Any], thinking: bool, effort: str | None) -> None:
    request = parse_chat({"messages": MESSAGES, **body})
    assert (request.thinking, request.effort) == (thinking, effort)


def test_tools_and_response_format_move_into_the_system_message() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    request = parse_chat({"messages": MESSAGES, "tools": [tool], "response_format": {"type": "json_object"}})
    assert request.messages[0] == {"role": "system", "content": "", "tools": [tool], "response_format": {"type": "object"}}
    assert request.tools
    request = parse_chat({"messages": MESSAGES, "tools": [tool], "tool_choice": "none"})
    assert [message["role"] for message in request.messages] == ["user"] and not request.tools


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"[" * 200_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"nul",
    ],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.status == 400 and json.loads(caught.value.body())["error"]["code"] == "invalid_json"


def test_max_tokens_against_the_context() -> None:
    given_ = parse_completion({"prompt": "x", "max_tokens": 10}).options
    assert output_tokens(given_, 90, 100, 16, "prompt") == 10
    with pytest.raises(ApiError, match="context of 100 tokens") as caught:
        output_tokens(given_, 91, 100, 16, "prompt")
    assert caught.value.param == "max_tokens"
    absent = parse_completion({"prompt": "x"}).options
    assert [output_tokens(absent, n, 100, 16, "prompt") for n in (10, 90, 99)] == [16, 10, 1]
    assert output_tokens(absent, 10, 100, 0, "messages") == 90  # chat: what fits
    with pytest.raises(ApiError) as caught:
        output_tokens(absent, 100, 100, 16, "prompt")
    assert caught.value.param == "prompt"
    with pytest.raises(ApiError) as caught:
        output_tokens(parse_chat({"messages": MESSAGES, "max_completion_tokens": 95}).options, 10, 100, 0, "messages")
    assert caught.value.param == "max_completion_tokens"


# ---- through HTTP, against scripted workers ----


def check(test: Callable[[ScriptedCluster], Awaitable[None]], script: Script | None = None, **config: Any) -> None:
    async def run() -> None:
        async with scripted_cluster(script=script, **config) as cluster:
            await test(cluster)

    asyncio.run(run())


def test_a_completion_and_its_usage() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        answer = await cluster.complete(model="m", prompt="hello", max_tokens=5)
        text = cluster.router.tokenizer.decode(range(60, 65))  # type: ignore[union-attr]
        assert answer["object"] == "text_completion" and answer["model"] == "m"
        assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        assert (await cluster.complete(prompt="hello"))["usage"]["completion_tokens"] == 16
        chat = await cluster.chat(max_tokens=5)
        assert chat["choices"][0]["message"] == {"role": "assistant", "content": text} and chat["object"] == "chat.completion"
        # The prompt of a chat is BOS, <User>, "h", "i", <Assistant>, </think>; without max_tokens, what fits is allowed.
        assert chat["usage"]["prompt_tokens"] == 6
        assert (await cluster.chat())["usage"]["completion_tokens"] == 4096 - 6

    check(test)


def test_batches_and_samples_come_back_in_order_with_their_ids() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        answer = await cluster.complete(prompt=[[3, 4], [5]], n=3, max_tokens=2, return_token_ids=True)
        got = [(c["index"], c["prompt_token_ids"], c["token_ids"]) for c in answer["choices"]]
        assert got == [(i, [[3, 4], [5]][i // 3], [60 + i % 3, 61 + i % 3]) for i in range(6)]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
        events = await cluster.stream(
            "completions", {"prompt": [[3, 4], [5]], "n": 3, "max_tokens": 2, "return_token_ids": True}
        )
        assert events[-1] == "[DONE]"
        streamed: dict[int, list[int]] = {}
        for event in events[:-1]:
            choice = event["choices"][0]
            if choice["index"] not in streamed:
                assert choice["prompt_token_ids"] == [[3, 4], [5]][choice["index"] // 3]
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert streamed == {i: [60 + i % 3, 61 + i % 3] for i in range(6)}

    check(test)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_says_what_the_whole_answer_says(path: str) -> None:
    async def test(cluster: ScriptedCluster) -> None:
        body: dict[str, Any] = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
        body |= {"n": 2, "max_tokens": 14}
        status, whole = await cluster.post(path, body)
        assert status == 200
        events = await cluster.stream(path, body | {"stream_options": {"include_usage": True}})
        assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
        texts, reasons = ["", ""], ["", ""]
        for event in events[:-2]:
            assert event["usage"] is None
            choice = event["choices"][0]
            delta = choice["text"] if path == "completions" else choice["delta"].get("content", "")
            texts[choice["index"]] += delta
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
        expected = [c["text"] if path == "completions" else c["message"]["content"] for c in whole["choices"]]
        assert texts == expected and "\ufffd" not in texts[0]
        assert reasons == ["length", "length"]

    emoji = [222, 305, 224, 164, 247, 100, 40]  # a space, a smiley in two tokens, a kanji in three, a letter
    check(test, Script(ids=emoji))


def test_unfinished_characters_only_at_the_very_end() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        assert (await cluster.complete(prompt="x", max_tokens=2))["choices"][0]["text"] == " \ufffd"
        events = await cluster.stream("completions", {"prompt": "x", "max_tokens": 2})
        assert [event["choices"][0]["text"] for event in events[:-1]] == [" ", "\ufffd"]

    check(test, Script(ids=[222, 305]))


def test_stop_strings_across_tokens_end_the_sample_on_decode_too() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        decode = cluster.decodes[0]
        for body in ({"stop": "cde"}, {"stop": ["zz", "cde"]}):
            answer = await cluster.complete(prompt="x", max_tokens=20, **body)
            assert answer["choices"][0] | {"logprobs": 0} == {"index": 0, "text": "ab", "logprobs": 0, "finish_reason": "stop"}
            assert answer["usage"]["completion_tokens"] == 5  # up to and with the token that completed it
        await until(lambda: not decode.running and sum(abort.sample == 0 for abort, _ in decode.aborted) == 2)
        events = await cluster.stream("completions", {"prompt": "x", "max_tokens": 20, "stop": "cde", "return_token_ids": True})
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "ab"
        assert [i for event in events[:-1] for i in event["choices"][0]["token_ids"]] == LETTERS[:5]
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        # Not found: what was held back comes after all.
        answer = await cluster.complete(prompt="x", max_tokens=4, stop="cdz")
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abcd", "length")

    check(test, Script(ids=LETTERS, tick_s=0.005))


LETTERS = list(range(66, 92))  # a to z


def test_a_stop_string_inside_a_burst_of_tokens_cuts_the_rest() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        answer = await cluster.complete(prompt="x", max_tokens=20, stop="c", return_token_ids=True, logprobs=0)
        choice = answer["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("ab", LETTERS[:3], "stop")
        assert len(choice["logprobs"]["tokens"]) == 3 == answer["usage"]["completion_tokens"]

    check(test, Script(ids=LETTERS, burst=8))


def test_how_many_tokens_come_in_a_row_changes_nothing() -> None:
    """Whole and streamed: texts, ids, scores, usage and reasons, with ends inside a row and characters across rows."""
    emoji = [222, 305, 224, 164, 247, 100, 40]
    bodies: list[dict[str, Any]] = [
        {"max_tokens": 9, "logprobs": 2, "n": 2},
        {"max_tokens": 20, "stop": ["de", "zz"], "logprobs": 0},
        {"max_tokens": 20, "stop": "cdeg", "min_tokens": 4},
        {"max_tokens": 7, "stop": "c", "min_tokens": 3},
    ]

    async def test(cluster: ScriptedCluster) -> None:
        for body in bodies:
            body |= {"prompt": "x", "return_token_ids": True}
            answer = await cluster.complete(**body)
            found.append((answer["choices"], answer["usage"]))
            texts: dict[int, list[Any]] = {}
            for event in (await cluster.stream("completions", body))[:-1]:
                choice = event["choices"][0]
                whole = texts.setdefault(choice["index"], ["", [], [], ""])
                whole[0] += choice["text"]
                whole[1] += choice["token_ids"]
                whole[2] += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                whole[3] = choice["finish_reason"] or whole[3]
            for choice in answer["choices"]:
                text, ids, scores, reason = texts[choice["index"]]
                assert (text, ids, reason) == (choice["text"], choice["token_ids"], choice["finish_reason"])
                assert not choice["logprobs"] or scores == choice["logprobs"]["token_logprobs"]

    for ids, eos_after in ((LETTERS, 8), (emoji, 6)):
        answers = []
        for burst in (1, 2, 3, 5):
            found: list[Any] = []
            check(test, Script(ids=ids, burst=burst, eos_after=eos_after))
            answers.append(found)
        assert answers[1:] == answers[:1] * 3 and len(answers[0]) == len(bodies)


def test_the_eos_token_counts_but_has_no_text() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        answer = await cluster.complete(prompt="x", max_tokens=20, return_token_ids=True)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("abc", "stop", [*LETTERS[:3], 1])
        assert answer["usage"]["completion_tokens"] == 4

    check(test, Script(ids=LETTERS, eos_after=3))


def test_echo_with_logprobs_scores_the_prompt() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        body: dict[str, Any] = {"prompt": [[66, 67, 68], [69, 70]], "echo": True, "logprobs": 1}
        whole = await cluster.complete(**body, max_tokens=1)
        first = whole["choices"][0]
        assert first["text"] == "abca"
        assert first["logprobs"]["tokens"] == ["a", "b", "c", "a"] and first["logprobs"]["text_offset"] == [0, 1, 2, 3]
        assert first["logprobs"]["token_logprobs"] == [None, -0.125, -0.25, -0.5]
        assert first["logprobs"]["top_logprobs"][0] is None and first["logprobs"]["top_logprobs"][1] == {
            "$": -0.125,
            "b": -0.125,
        }
        only = await cluster.complete(**body, max_tokens=0)
        assert [choice["text"] for choice in only["choices"]] == ["abc", "de"]
        assert only["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.125, -0.25]
        assert only["choices"][0]["finish_reason"] == "length" and only["usage"]["completion_tokens"] == 0
        events = await cluster.stream("completions", body | {"max_tokens": 1})
        for choice in whole["choices"]:
            parts = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [t for part in parts for t in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        assert (await cluster.complete(prompt="hé", echo=True, max_tokens=1))["choices"][0]["text"] == "héa"

    check(test, Script(ids=LETTERS))


def test_chat_logprobs_name_the_bytes() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        body: dict[str, Any] = {"max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        answer = await cluster.chat(**body)
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["a", "b"] and content[0]["bytes"] == [97]
        assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
        events = await cluster.stream("chat/completions", {"messages": MESSAGES, **body})
        streamed = [e["choices"][0]["logprobs"]["content"][0] for e in events[:-1] if e["choices"][0]["logprobs"]]
        assert streamed == content

    check(test, Script(ids=LETTERS))


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def test_reasoning_and_tool_calls_in_chat() -> None:
    dsml = "｜DSML｜"
    output = (
        f'think</think>Sure.\n\n<{dsml}tool_calls>\n<{dsml}invoke name="f">\n<{dsml}parameter name="a" string="false">1'
        f"</{dsml}parameter>\n</{dsml}invoke>\n</{dsml}tool_calls>"
    )
    ids = encoded(output)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"messages": MESSAGES, "tools": [tool], "thinking": {"type": "enabled"}, "max_tokens": 2000}

    async def test(cluster: ScriptedCluster) -> None:
        status, answer = await cluster.post("chat/completions", body)
        choice = answer["choices"][0]
        assert status == 200 and choice["finish_reason"] == "tool_calls"
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Sure.", "think")
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        events = await cluster.stream("chat/completions", body)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "think"
        assert "".join(delta.get("content", "") for delta in deltas) == "Sure."
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "f")]
        assert [event["choices"][0]["finish_reason"] for event in events[-3:-1]] == [None, "tool_calls"]
        # The same output cut short is content, with its own finish reason.
        status, answer = await cluster.post("chat/completions", body | {"max_tokens": len(ids) - 3})
        message = answer["choices"][0]["message"]
        assert message["content"].startswith("Sure.\n\n<｜DSML｜tool_calls>") and "tool_calls" not in message
        assert answer["choices"][0]["finish_reason"] == "length"

    check(test, Script(ids=ids, eos_after=len(ids)))


def test_without_a_tokenizer_only_ids_are_served() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        answer = await cluster.complete(prompt=[3, 4], max_tokens=2, logprobs=1)
        choice = answer["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [60, 61], [3, 4])
        assert choice["logprobs"]["tokens"] == ["token_id:60", "token_id:61"]
        assert (await cluster.refusal("completions", {"prompt": "x"}))["param"] == "prompt"
        assert (await cluster.refusal("completions", {"prompt": [3], "stop": "x"}))["param"] == "stop"
        events = await cluster.stream("completions", {"prompt": [3, 4], "max_tokens": 2})
        assert [event["choices"][0]["token_ids"] for event in events[:-1]] == [[60], [61]]
        error = await cluster.refusal("chat/completions", {"messages": MESSAGES})
        assert error["param"] == "messages" and "tokenizer.json" in error["message"]

    check(test, tokenizer="")


def test_refusals_through_http() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("completions", {"prompt": [320]}, "prompt"),
            ("completions", {"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids"),
            ("completions", {"prompt": "x", "logit_bias": {"320": 1}}, "logit_bias"),
            ("completions", {"prompt": "x", "max_tokens": 4096}, "max_tokens"),
            ("completions", {"prompt": "\ud800", "max_tokens": 1}, "prompt"),
            ("chat/completions", {"messages": [{"role": "user", "content": "\udfff"}]}, "messages"),
            ("completions", {"prompt": [[5]] * 2000, "n": 100}, "n"),
        ]
        for path, body, param in cases:
            assert (await cluster.refusal(path, body))["param"] == param
        for depth in range(50, 1000, 25):  # whatever JSON can be read at all is served or refused
            deep = '{"a":' * depth + "1" + "}" * depth
            text = f'{{"messages":{json.dumps(MESSAGES)},"tools":[{{"type":"function","function":{{"name":"f","x":{deep}}}}}]}}'
            async with cluster.http.post(
                "/v1/chat/completions", data=text.encode(), headers={"Content-Type": "application/json"}
            ) as response:
                assert response.status in (200, 400), await response.text()
        status, answer = await cluster.post("completions", {"prompt": "x", "model": "other"})
        assert status == 404 and answer["error"]["code"] == "model_not_found" and answer["error"]["param"] == "model"
        assert not cluster.router.dispatcher.in_flight

    check(test)


def test_the_most_logprobs_are_an_option() -> None:
    assert parse_completion({"prompt": "x", "logprobs": 320}, 320).options.logprobs == 320
    assert parse_chat({"messages": MESSAGES, "logprobs": True, "top_logprobs": 25}, 30).options.logprobs == 25
    with pytest.raises(ApiError, match="between 0 and 5"):
        parse_completion({"prompt": "x", "logprobs": 6}, 5)
    with pytest.raises(ApiError, match="between 0 and 5"):
        parse_chat({"messages": MESSAGES, "logprobs": True, "top_logprobs": 6}, 5)

    async def test(cluster: ScriptedCluster) -> None:
        answer = await cluster.complete(prompt=[66, 67], max_tokens=1, logprobs=40)
        assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 40
        assert (await cluster.refusal("completions", {"prompt": "x", "logprobs": 41}))["param"] == "logprobs"

    check(test, max_logprobs=40, script=Script(ids=LETTERS))


def test_prompt_scores_that_could_not_come_back_are_refused() -> None:
    check_scores(50_000, 19)
    check_scores(1_000_000, 0)
    with pytest.raises(ApiError, match="lower logprobs or shorten") as caught:
        check_scores(60_000, 19)
    assert (caught.value.status, caught.value.param) == (400, "logprobs")
    for k in (0, 1, 20, 320):  # whatever is let through fits a message, with room for its head
        tokens = MAX_SCORES // (k + 1)
        assert tokens * (4 + 8 * k) + 1000 <= MAX_MESSAGE_BYTES

    async def test(cluster: ScriptedCluster) -> None:
        body = {"prompt": [[5] * 30_000] * 2, "echo": True, "logprobs": 20, "max_tokens": 0}
        assert (await cluster.refusal("completions", body))["param"] == "logprobs"
        assert not cluster.router.dispatcher.in_flight

    check_wide(test)


def check_wide(test: Callable[[ScriptedCluster], Awaitable[None]], **config: Any) -> None:
    """With workers that hold a long context."""

    async def run() -> None:
        async with scripted_cluster(prefills=0, decodes=0, **config) as cluster:
            cluster.add_prefill(max_context=200_000)
            cluster.add_decode(Script(ids=LETTERS), max_context=200_000)
            await until(lambda: cluster.router.health.ready.is_set())
            await test(cluster)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_are_written_beside_the_event_loop(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[str]] = {"scores": set(), "body": set(), "text": set()}

    def spy(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*arguments: Any) -> Any:
            threads[what].add(threading.current_thread().name.split("_")[0])
            return function(*arguments)

        return seen

    monkeypatch.setattr("router.completions.score_lists", spy("scores", score_lists))
    monkeypatch.setattr(Answer, "body", spy("body", Answer.body))
    monkeypatch.setattr(Tokenizer, "decode", spy("text", Tokenizer.decode))

    async def test(cluster: ScriptedCluster) -> None:
        ids = [66 + i % 26 for i in range(21_000)]
        body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 2}
        if stream:
            parsed = [event["choices"][0] for event in (await cluster.stream("completions", body))[:-1]]
        else:
            parsed = (await cluster.complete(**body))["choices"]
        logprobs = [part["logprobs"] for part in parsed]
        assert "".join(part["text"] for part in parsed) == "".join(map(chr, (31 + i for i in ids))) + "ab"
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum(len(part[name]) for part in logprobs) == 21_002
        assert logprobs[0]["token_logprobs"][:3] == [None, -0.125, -0.25] and logprobs[0]["text_offset"][20_999] == 20_999
        assert "long" in threads["scores"] and threads["text"] == {"long"}
        if not stream:
            wide = await cluster.complete(prompt=[5], max_tokens=1000, logprobs=20)
            assert len(wide["choices"][0]["logprobs"]["tokens"]) == 1000 and threads["body"] == {"MainThread", "long"}

    check_wide(test)


def test_a_bug_in_writing_scores_is_told_and_logged_under_the_requests_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.completions.score_lists", lambda *arguments: 1 // 0)

    async def test(cluster: ScriptedCluster) -> None:
        body = {"prompt": [5] * 30_000, "echo": True, "logprobs": 0, "max_tokens": 1}
        async with cluster.http.post("/v1/completions", json=body) as response:
            error = (await response.json())["error"]
        number = next(prompt.rid for prompt in cluster.prefills[0].seen if len(prompt.tokens) == 120_000)
        assert (response.status, error["code"]) == (500, "internal")
        assert error["message"].startswith(f"request {number} ended: internal error. ")
        assert f"request {number}: its prompt's scores" in caplog.messages

    check_wide(test)


def test_a_client_that_goes_while_its_scores_are_written_harms_nobody() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        body = {"prompt": [5] * 50_000, "echo": True, "logprobs": 10, "max_tokens": 1}
        task = asyncio.create_task(cluster.stream("completions", body))
        await until(lambda: any(len(prompt.tokens) == 200_000 for prompt in cluster.prefills[0].seen))
        await asyncio.sleep(0.05)
        task.cancel()
        assert (await cluster.complete(prompt=[5] * 30_000, echo=True, logprobs=1, max_tokens=1))["usage"][
            "total_tokens"
        ] == 30_001
        await until(lambda: not cluster.router.dispatcher.in_flight)

    check_wide(test)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = int(TOKENIZER.longest_bytes)
    assert longest == max(map(len, TOKENIZER.shown.pieces))

    async def test(cluster: ScriptedCluster) -> None:
        fits = {"prompt": "x" * 5000, "max_tokens": 1}
        assert (await cluster.refusal("completions", fits))["code"] == "context_length_exceeded"
        monkeypatch.setattr(Tokenizer, "encode", None)
        error = await cluster.refusal("completions", {"prompt": "x" * (4096 * longest + 1), "max_tokens": 1})
        assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        text = "é" * (4096 * longest // 2 + 1)  # bytes count, not characters
        error = await cluster.refusal("chat/completions", {"messages": [{"role": "user", "content": text}]})
        assert error["code"] == "context_length_exceeded" and error["param"] == "messages"

    check(test)


def test_a_huge_text_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    huge, release, encode = "y" * 300_000, threading.Event(), Tokenizer.encode

    def slow(self: Tokenizer, text: str) -> list[int]:
        if len(text) == len(huge):
            release.wait(60)
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def test(cluster: ScriptedCluster) -> None:
        tasks = [asyncio.create_task(cluster.post("completions", {"prompt": huge, "max_tokens": 1})) for _ in range(3)]
        await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(30):
                assert (await cluster.complete(prompt="z" * 3000, max_tokens=1))["usage"]["completion_tokens"] == 1
            assert not any(task.done() for task in tasks)
        finally:
            release.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [400] * 3  # too long after all

    check_wide(test)


def test_room_is_looked_at_again_when_the_prompt_is_tokenised() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        body = {"prompt": "z" * 3000, "max_tokens": 1000}
        cluster.decodes[0].hold = True
        tasks = [asyncio.create_task(cluster.post("completions", body)) for _ in range(6)]
        await until(lambda: sum(task.done() for task in tasks) == 4)
        cluster.decodes[0].hold = False
        answers = await asyncio.gather(*tasks)
        assert sorted(status for status, _ in answers) == [200, 200, *[429] * 4]
        assert not cluster.router.dispatcher.in_flight
        error = await cluster.refusal("completions", {"prompt": [[5] * 4000] * 2, "max_tokens": 1})
        assert error["param"] == "prompt" and "limit of 7000" in error["message"]  # would never be served: not a 429

    check(test, script=Script(ids=LETTERS, tick_s=0.001), max_requests=2, max_prompt_tokens=7000, probe_every_s=60.0)


def test_other_prompts_of_a_request_that_fails_are_not_dropped_by_a_client() -> None:
    async def test(cluster: ScriptedCluster) -> None:
        cluster.prefills[0].fail = [("internal", False)]
        status, _ = await cluster.post("completions", {"prompt": ["x", "y"], "max_tokens": 100})
        await until(lambda: not cluster.decodes[0].running and not cluster.router.dispatcher.in_flight)
        assert status == 500 and cluster.count("requests_dropped") == 0 and cluster.count("requests_failed") == 1

    check(test, script=Script(ids=LETTERS, tick_s=0.01), probe_every_s=60.0)


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_fills_the_context_is_named_itself(max_tokens: int | None) -> None:
    async def test(cluster: ScriptedCluster) -> None:
        for prompt in ([5] * 4096, [[5], [5] * 4096], "x " * 5000):
            error = await cluster.refusal("completions", {"prompt": prompt, "max_tokens": max_tokens})
            assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        body = {"messages": [{"role": "user", "content": "x " * 5000}], "max_tokens": max_tokens}
        error = await cluster.refusal("chat/completions", body)
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        error = await cluster.refusal("completions", {"prompt": [5] * 4090, "max_tokens": 9})
        assert error["param"] == "max_tokens"

    check(test)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """As in the router's process."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(before)


LARGE: dict[str, tuple[str, bytes]] = {
    "ids": ("completions", b'{"prompt":[' + b"1," * 5_000_000 + b'1],"max_tokens":1}'),
    "floats": ("completions", b'{"prompt":[5],"max_tokens":1,"user":[' + b"1.5," * 2_500_000 + b"1]}"),
    "messages": ("chat/completions", json.dumps({"messages": [{"role": "user", "content": "x"}] * 250_000}).encode()),
}


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("what", LARGE)
def test_a_large_body_does_not_hold_up_the_others(what: str) -> None:
    path, body = LARGE[what]

    async def test(cluster: ScriptedCluster) -> None:
        async def longest_pause_s() -> float:
            worst, last = 0.0, time.process_time()  # of this process alone: others may have the processor meanwhile
            while not answer.done():
                await asyncio.sleep(0.001)
                worst, last = max(worst, time.process_time() - last), time.process_time()
            return worst

        async def post() -> int:
            async with cluster.http.post(f"/v1/{path}", data=body, headers={"Content-Type": "application/json"}) as response:
                return response.status

        answer = asyncio.create_task(post())
        assert await longest_pause_s() < 0.2  # some 0.02; 0.3 and more if the parser of the standard library is not slowed
        assert await answer == (200 if what == "floats" else 400)

    check(test)


def test_a_body_of_a_million_arrays_is_refused_at_once() -> None:
    with pytest.raises(ApiError, match="arrays"):
        parse_json(b'{"prompt":[' + b"[]," * 300_000 + b"[]]}")


@pytest.mark.parametrize("patient", [False, True])
def test_both_ways_to_read_json_are_the_same(patient: bool) -> None:
    body: dict[str, Any] = {"a": [1, -2, 1.5, 1e300, True, None, "x", {"b": {}}, []], "c": {"d": 10**50}}
    parsed = parse_json(json.dumps(body).encode(), patient)
    assert parsed == body and [type(item) for item in parsed["a"]] == [type(item) for item in body["a"]]
    for bad in (b"[1]", b'{"a":NaN}', b"{", b"\xff", b'{"a":' + b"9" * 5000 + b"}", b'{"a":' + b"[" * 100_000):
        with pytest.raises(ApiError) as caught:
            parse_json(bad, patient)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_many_short_texts_are_tokenised_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", noted)

    async def test(cluster: ScriptedCluster) -> None:
        answer = await cluster.complete(prompt=["z" * 300] * 20 + [""], max_tokens=1)
        assert len(answer["choices"]) == 21 and threads == [False] * 21
        threads.clear()
        await cluster.complete(prompt=["z" * 30] * 20, max_tokens=1)
        assert threads == [True] * 20

    check_wide(test)
