"""Drives a server through langchain-openai; run by tests/test_clients.py under the clients' python."""

import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found,unused-ignore]


def main() -> None:
    url = sys.argv[1] + "/v1"
    chat: Any = ChatOpenAI(model="pdserve", base_url=url, api_key="unused", max_tokens=6, temperature=0)
    answer = chat.invoke("Hello")
    assert answer.usage_metadata["output_tokens"] <= 6, answer
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == answer.content
    assert [each.content for each in chat.batch(["Hello", "Hello"])] == [answer.content] * 2
    bound = chat.bind_tools(
        [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    )
    assert bound.invoke("call f").response_metadata["finish_reason"] in ("length", "stop", "tool_calls")
    text: Any = OpenAI(model="pdserve", base_url=url, api_key="unused", max_tokens=6, temperature=0)
    assert isinstance(text.invoke("Hello"), str)
    print("langchain ok")


if __name__ == "__main__":
    main()
