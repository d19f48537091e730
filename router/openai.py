"""What clients send: JSON bodies checked field by field into plain dataclasses. Unknown fields are ignored.

Everything wrong is an `ApiError` that names the field. Token ids are checked against the vocabulary later, in
`check_ids`, because the vocabulary is known only while a worker is there.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from router.chat import TASKS
from router.errors import ApiError, invalid
from wire.messages import SamplingParams
from wire.sockets import MAX_MESSAGE_BYTES

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_IDS = 4096
MAX_BIASES = 1 << 18  # more than any vocabulary; with it a Prefill stays below the size of a message
MAX_SCORES = MAX_MESSAGE_BYTES // 16  # of a prompt; each takes 8 bytes in PromptLogprobs, and seconds in JSON if it were more
MAX_ID = (1 << 32) - 1
MAX_TOP_K = 1 << 31  # as decode has it, and so is the next one
MIN_REPETITION = 1e-6
MAX_ARRAYS = 1 << 18  # far more than any request has; 5,000,000 empty ones would hold the interpreter for two seconds
SLICE_IDS = 1 << 16  # looked at without a break
INT64 = 1 << 63
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
Reader = Callable[[Any, str], Any]
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


@dataclass(slots=True)
class Options:
    """What both endpoints share."""

    model: str | None
    n: int
    max_tokens: int | None  # None: not given
    max_tokens_field: str  # the name the client used
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    return_token_ids: bool | None  # None: the default
    skip_special: bool
    logprobs: int  # -1: none
    sampling: dict[str, Any]  # the fields of SamplingParams that do not depend on the prompt
    seed: int | None

    def params(self, max_tokens: int, prompt_logprobs: int = -1) -> SamplingParams:
        seed = random.getrandbits(63) if self.seed is None else self.seed % INT64
        return SamplingParams(
            max_tokens=max_tokens, seed=seed, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs, **self.sampling
        )


@dataclass(slots=True)
class CompletionRequest:
    options: Options
    prompts: list[str] | list[list[int]]
    echo: bool


@dataclass(slots=True)
class ChatRequest:
    options: Options
    messages: list[dict[str, Any]]
    thinking: bool
    effort: str | None
    tools: bool  # look for tool calls in the output


def parse_json(body: bytes, patient: bool = False) -> dict[str, Any]:
    """The JSON object in a body. Raises ApiError 400; NaN and Infinity are not JSON. `patient`: for use in a thread."""
    if body.count(b"[") > MAX_ARRAYS:
        raise ApiError(400, f"the body has more than {MAX_ARRAYS} arrays or opening brackets", code="invalid_json")
    try:
        value = (_PATIENT_DECODER if patient else _DECODER).decode(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def parse_completion(body: dict[str, Any], max_logprobs: int = MAX_LOGPROBS) -> CompletionRequest:
    fields = Fields(body)
    echo = fields.boolean("echo", False)
    logprobs = fields.integer("logprobs", -1, 0, max_logprobs)
    options = _options(fields, logprobs, least_tokens=0 if echo else 1)
    if body.get("suffix"):
        raise invalid("suffix", "not supported; leave it out", "unsupported")
    if fields.integer("best_of", options.n, 1, MAX_CHOICES) != options.n:
        raise invalid("best_of", f"only best_of equal to n ({options.n}) is supported", "unsupported")
    return CompletionRequest(options, _prompts(body.get("prompt")), echo)


def parse_chat(body: dict[str, Any], max_logprobs: int = MAX_LOGPROBS) -> ChatRequest:
    fields = Fields(body)
    wants_logprobs = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, 0, max_logprobs)
    if top and not wants_logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    options = _options(fields, top if wants_logprobs else -1, least_tokens=1)
    messages = _messages(body.get("messages"))
    tools = _tools(body.get("tools"), "tools")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise invalid("tool_choice", 'only "auto" and "none" are supported: the output is not constrained', "unsupported")
    if choice == "none":
        tools = []
    _into_system(messages, tools, _response_format(body.get("response_format"), "response_format"))
    thinking, effort = _thinking(fields)
    uses_tools = any(message.get("tools") for message in messages)
    return ChatRequest(options, messages, thinking, effort, uses_tools)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 when an id is not in the vocabulary."""
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise invalid(param, f"token id {worst} is outside the vocabulary (0 to {vocab_size - 1})")


def check_vocabulary(options: Options, vocab_size: int) -> None:
    check_ids(options.sampling.get("stop_token_ids", ()), vocab_size, "stop_token_ids")
    check_ids([token_id for token_id, _ in options.sampling.get("logit_bias", ())], vocab_size, "logit_bias")


def check_fits(prompt_tokens: int, context_tokens: int, param: str) -> None:
    """Raises ApiError 400 when a prompt alone, which came in the field `param`, leaves no room for a token."""
    if prompt_tokens >= context_tokens:
        message = f"{prompt_tokens} tokens, but the context is {context_tokens} and output needs at least one"
        raise invalid(param, message, "context_length_exceeded")


def output_tokens(options: Options, prompt_tokens: int, context_tokens: int, default: int, param: str) -> int:
    """How many tokens may be generated. Raises ApiError 400 when prompt + what was asked for does not fit."""
    check_fits(prompt_tokens, context_tokens, param)
    room = context_tokens - prompt_tokens
    wanted = options.max_tokens
    if wanted is None:
        return max(min(default or room, room), 1)
    if wanted > room:
        field = options.max_tokens_field
        message = f"{field}: {prompt_tokens} prompt tokens + {field} {wanted} exceed the context of {context_tokens} tokens"
        raise ApiError(400, message, field, "context_length_exceeded")
    return wanted


def check_scores(prompt_tokens: int, logprobs: int) -> None:
    """Raises ApiError 400 when the log probabilities of a prompt would be too many to come back, or to be written."""
    if prompt_tokens * (logprobs + 1) > MAX_SCORES:
        most = MAX_SCORES // (logprobs + 1)
        message = f"echo with logprobs {logprobs} is served for prompts of up to {most} tokens, this one has {prompt_tokens}"
        raise invalid("logprobs", f"{message}: lower logprobs or shorten the prompt", "too_many_logprobs")


class Fields:
    """Typed reads from a JSON object; null counts as not given."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body

    def boolean(self, name: str, default: bool) -> bool:
        value = self.body.get(name)
        return default if value is None else _as_boolean(value, name)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.body.get(name)
        return default if value is None else as_integer(value, name, low, high)

    def string(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, str):
            raise invalid(name, "must be a string", "invalid_type")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise invalid(name, "must be an object", "invalid_type")
        return value


def as_integer(value: Any, name: str, low: int, high: int) -> int:
    """An integer (16.0 is one, true is not) within low..high."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise invalid(name, "must be an integer", "invalid_type")
    if value < low and high == INT64:  # which is no bound to speak of
        raise invalid(name, f"must be at least {low}")
    if not low <= value <= high:
        raise invalid(name, f"must be between {low} and {high}")
    return value


def _as_number(value: Any, name: str, low: float, high: float, above_low: bool = False) -> float:
    if type(value) not in (int, float):
        raise invalid(name, "must be a number", "invalid_type")
    if not low <= value <= high or (above_low and value == low):  # NaN and infinities fail the comparison
        raise invalid(name, f"must be {'above' if above_low else 'at least'} {low:g} and at most {high:g}")
    return float(value)


def _as_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(name, "must be an array", "invalid_type")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _same(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _integer(digits: str) -> int:
    return int(digits)


def _number_of(digits: str) -> float:
    return float(digits)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
# The scanner in C never lets go of the interpreter: in a thread it stops the event loop as if it ran there. A call of a
# Python function is a place to switch threads at, so this one has some. It takes twice as long.
_PATIENT_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_int=_integer, parse_float=_number_of, object_hook=_same
)


def _options(fields: Fields, logprobs: int, least_tokens: int) -> Options:
    name = "max_tokens" if fields.body.get("max_completion_tokens") is None else "max_completion_tokens"
    max_tokens = fields.integer(name, -1, least_tokens, INT64)
    stream = fields.boolean("stream", False)
    min_tokens = fields.integer("min_tokens", 0, 0, INT64)
    if 0 <= max_tokens < min_tokens:
        raise invalid("min_tokens", f"must not be above {name} ({max_tokens})")
    seed = fields.integer("seed", INT64, -INT64, INT64 - 1)
    with_ids = fields.body.get("return_token_ids")
    return Options(
        model=fields.string("model"),
        n=fields.integer("n", 1, 1, MAX_CHOICES),
        max_tokens=None if max_tokens < 0 else max_tokens,
        max_tokens_field=name,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        stop=_stop(fields.body.get("stop")),
        return_token_ids=None if with_ids is None else _as_boolean(with_ids, "return_token_ids"),
        skip_special=fields.boolean("skip_special_tokens", True),
        logprobs=logprobs,
        sampling=_sampling(fields.body, min_tokens),
        seed=None if seed == INT64 else seed,
    )


def _sampling(body: dict[str, Any], min_tokens: int) -> dict[str, Any]:
    """The fields of SamplingParams that the body gives; its defaults are the API's."""
    given = {name: read(body[name], name) for name in body if (read := _READERS.get(name)) and body[name] is not None}
    if min_tokens:
        given["min_tokens"] = min_tokens
    return given


def _number(low: float, high: float, above_low: bool = False) -> Reader:
    return lambda value, name: _as_number(value, name, low, high, above_low)


def _top_k(value: Any, name: str) -> int:
    return max(as_integer(value, name, -1, MAX_TOP_K), 0)  # -1 means off elsewhere


def _as_boolean(value: Any, name: str) -> bool:
    if value is not True and value is not False:
        raise invalid(name, "must be true or false", "invalid_type")
    return bool(value)


def _stop_token_ids(value: Any, name: str) -> tuple[int, ...]:
    if len(_as_list(value, name)) > MAX_STOP_IDS:
        raise invalid(name, f"at most {MAX_STOP_IDS} ids")
    return tuple(as_integer(item, name, 0, MAX_ID) for item in value)


def _logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise invalid(name, "must be an object", "invalid_type")
    if len(value) > MAX_BIASES:
        raise invalid(name, f"at most {MAX_BIASES} ids")
    pairs = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_ID):
            raise invalid(name, "keys must be token ids, as strings")
        pairs.append((int(key), _as_number(bias, name, -100.0, 100.0)))
    return tuple(pairs)


_READERS: dict[str, Reader] = {
    "temperature": _number(0.0, 2.0),
    "top_p": _number(0.0, 1.0, above_low=True),
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(MIN_REPETITION, 10.0),
    "logit_bias": _logit_bias,
    "ignore_eos": _as_boolean,
    "stop_token_ids": _stop_token_ids,
}


def _include_usage(fields: Fields, stream: bool) -> bool:
    if fields.body.get("stream_options") is None:
        return False
    wanted = fields.mapping("stream_options").get("include_usage")
    return wanted is not None and _as_boolean(wanted, "stream_options.include_usage") and stream


def _stop(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    stops = [raw] if isinstance(raw, str) else _as_list(raw, "stop")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str):
            raise invalid("stop", "must be a string or an array of strings", "invalid_type")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", f"each string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _prompts(raw: Any) -> list[str] | list[list[int]]:
    """A string, strings, ids, or lists of ids, as a list of prompts of one kind."""
    shape = "must be a string, an array of strings, an array of token ids or an array of those"
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list):
        raise invalid("prompt", shape, "invalid_type")
    if not raw:
        raise invalid("prompt", "must not be empty")
    if type(raw[0]) in (int, float):
        return [_prompt_ids(raw)]
    if all(isinstance(item, str) for item in raw) or all(isinstance(item, list) for item in raw):
        if len(raw) > MAX_PROMPTS:
            raise invalid("prompt", f"at most {MAX_PROMPTS} prompts in one request")
        return [item if isinstance(item, str) else _prompt_ids(item) for item in raw]  # type: ignore[return-value]
    raise invalid("prompt", shape, "invalid_type")


def _prompt_ids(raw: list[Any]) -> list[int]:
    if not raw:
        raise invalid("prompt", "an array of token ids must not be empty")
    slices = (raw[start : start + SLICE_IDS] for start in range(0, len(raw), SLICE_IDS))
    if all(set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_ID for ids in slices):
        return raw  # the long path is slow for 100,000 ids
    return [as_integer(item, "prompt", 0, MAX_ID) for item in raw]


def _messages(raw: Any) -> list[dict[str, Any]]:
    if raw is None:
        raise invalid("messages", "is required", "missing")
    if not _as_list(raw, "messages"):
        raise invalid("messages", "must not be empty")
    messages = [_message(item, f"messages[{i}]") for i, item in enumerate(raw)]
    if any(message.get("prefix") for message in messages[:-1]):
        raise invalid("messages", "prefix is only for the last message")
    return messages


def _message(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise invalid(where, "must be an object", "invalid_type")
    role = raw.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    calls = _calls(raw.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else []
    content = _content(raw.get("content"), f"{where}.content", optional=role == "assistant")
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        reasoning = raw.get("reasoning_content")
        if reasoning is not None and not isinstance(reasoning, str):
            raise invalid(f"{where}.reasoning_content", "must be a string", "invalid_type")
        message |= {"tool_calls": calls, "reasoning_content": reasoning, "prefix": Fields(raw).boolean("prefix", False)}
    if role == "tool":
        call_id = raw.get("tool_call_id")
        if call_id is not None and not isinstance(call_id, str):
            raise invalid(f"{where}.tool_call_id", "must be a string", "invalid_type")
        message["tool_call_id"] = call_id
    if role in ("system", "developer"):
        message["tools"] = _tools(raw.get("tools"), f"{where}.tools")
        message["response_format"] = _response_format(raw.get("response_format"), f"{where}.response_format")
    if raw.get("task") is not None:
        if raw["task"] not in TASKS:
            raise invalid(f"{where}.task", f"must be one of {', '.join(TASKS)}")
        message["task"] = raw["task"]
    return message


def _content(raw: Any, where: str, optional: bool) -> str | None:
    """Text, or text parts, which are the blocks of one message and are joined as the format joins blocks."""
    if isinstance(raw, str) or (raw is None and optional):
        return raw
    if not isinstance(raw, list):
        raise invalid(where, "must be a string or an array of text parts", "invalid_type")
    texts = []
    for i, part in enumerate(raw):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{where}[{i}]", 'must be {"type": "text", "text": "…"}: the model reads only text')
        texts.append(part["text"])
    return "\n\n".join(texts)


def _calls(raw: Any, where: str) -> list[dict[str, Any]]:
    calls = []
    for i, call in enumerate([] if raw is None else _as_list(raw, where)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            raise invalid(f"{where}[{i}]", "must have a function with name and arguments, a string of JSON", "invalid_type")
        if call.get("type", "function") != "function":
            raise invalid(f"{where}[{i}].type", 'must be "function"')
        call_id = call.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise invalid(f"{where}[{i}].id", "must be a string", "invalid_type")
        name = _function_name(function, f"{where}[{i}].function.name")
        calls.append({"id": call_id, "function": {"name": name, "arguments": function["arguments"]}})
    return calls


def _tools(raw: Any, where: str) -> list[dict[str, Any]]:
    tools = [] if raw is None else _as_list(raw, where)
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise invalid(f"{where}[{i}]", 'must be {"type": "function", "function": {…}}', "invalid_type")
        _function_name(tool["function"], f"{where}[{i}].function.name")
    return tools


def _function_name(function: dict[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(where, "must be 1 to 128 letters, digits, underscores, dots or dashes")
    return name


def _response_format(raw: Any, where: str) -> Any:
    """The JSON schema to show to the model, or None for plain text."""
    if raw is None:
        return None
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    holder = raw.get("json_schema") if kind == "json_schema" else None
    if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
        raise invalid(where, 'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": …}')
    return holder["schema"]


def _into_system(messages: list[dict[str, Any]], tools: list[dict[str, Any]], schema: Any) -> None:
    """The request's tools and response format belong to the system message; there is one from here on if need be."""
    if not tools and schema is None:
        return
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    system = messages[0]
    system["tools"] = (system.get("tools") or []) + tools
    system["response_format"] = system.get("response_format") if schema is None else schema


def _thinking(fields: Fields) -> tuple[bool, str | None]:
    """(whether to think, effort). Explicit switches win; otherwise asking for an effort asks for thinking."""
    template = Fields(fields.mapping("chat_template_kwargs"))
    effort = fields.string("reasoning_effort") or template.string("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    thinking = effort not in (None, "none", "minimal")
    for name in ("enable_thinking", "thinking"):
        thinking = template.boolean(name, thinking)
    switch = fields.mapping("thinking").get("type")
    if switch not in (None, "enabled", "disabled"):
        raise invalid("thinking.type", "must be enabled or disabled")
    thinking = thinking if switch is None else switch == "enabled"
    return thinking, "max" if effort in ("max", "xhigh") else None
