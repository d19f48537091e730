"""Drives a server with OpenAI's own client; run by tests/test_clients.py under the clients' python."""

import sys
from typing import Any

from openai import OpenAI  # type: ignore[import-not-found,unused-ignore]


def main() -> None:
    client: Any = OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused")
    model = client.models.list().data[0].id

    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=6, temperature=0, seed=1
    )
    assert chat.usage.completion_tokens <= 6 and chat.choices[0].finish_reason in ("length", "stop"), chat

    pieces, usage = [], None
    for event in client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in event.choices]
        usage = event.usage or usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage

    plain = client.completions.create(model=model, prompt="Hello", max_tokens=8, temperature=0)
    streamed = client.completions.create(model=model, prompt="Hello", max_tokens=8, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in streamed if event.choices) == plain.choices[0].text

    scored = client.completions.create(model=model, prompt=[5, 6, 7, 8], max_tokens=1, echo=True, logprobs=2)
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    assert len(scored.choices[0].logprobs.token_logprobs) == 5, scored
    assert all(len(top) >= 2 for top in scored.choices[0].logprobs.top_logprobs[1:]), scored

    several = client.completions.create(model=model, prompt=["a", "b"], n=2, max_tokens=3, seed=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    with_tools = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "call f"}], tools=tools, max_tokens=4
    )
    assert with_tools.choices[0].message.role == "assistant"

    try:
        client.completions.create(model=model, prompt="x", max_tokens=-1)
    except Exception as error:
        assert error.__class__.__name__ == "BadRequestError" and "max_tokens" in str(error), error
    else:
        raise AssertionError("max_tokens=-1 was accepted")
    print("openai ok")


if __name__ == "__main__":
    main()
