"""What a client is told is the same whatever is guessed ahead, wherever in a run of right drafts a text ends: through HTTP, the
real router, and decode workers whose every step has as many drafts as it may."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq

from decode.config import DecodeConfig
from decode.speculation import Speculation
from decode.worker import Worker
from kernels.sequences import MOST_DRAFTS
from prefill.config import PrefillConfig
from prefill.worker import Worker as PrefillWorker
from router.config import RouterConfig
from router.server import Router
from router.text import Tokenizer
from tests.fake_runner import FakeDrafter, expected_text
from tests.scripted_cluster import TOKENIZER, events
from tests.test_workers import Running, prompt, sizes

LONGEST = 12
BROKEN = "\ufffd"  # of bytes that are no letter
PROMPTS = [prompt(length) for length in (5, 6, 12)]
Answer = tuple[Any, list[float]]  # everything but scores, and those


def answers(speculate: int, bodies: list[dict[str, Any]]) -> tuple[list[Answer], float]:
    """And how many drafts at the second position were accepted."""
    return asyncio.run(_answers(speculate, bodies))


async def _answers(speculate: int, bodies: list[dict[str, Any]]) -> tuple[list[Answer], float]:
    router = Router(RouterConfig(port=0, tokenizer=TOKENIZER, model_name="m"))
    await router.start()
    context: zmq.Context[Any] = zmq.Context()
    runners: Any = FakeDrafter(), FakeDrafter()
    options = {"model": "fake", "router": router.inbox.address, **sizes(runners[0])}
    decode = Worker(DecodeConfig(speculate=speculate, **options), runners[1], context, depth=speculate % 2)
    workers = [Running(PrefillWorker(PrefillConfig(**options), runners[0], context)), Running(decode)]
    try:
        await asyncio.wait_for(router.health.ready.wait(), 30)
        async with aiohttp.ClientSession(router.url, timeout=aiohttp.ClientTimeout(60)) as http:
            found = await asyncio.gather(*[_answer(http, body) for body in bodies])
        return list(found), decode.metrics.count("draft_2_accepted")
    finally:
        for worker in workers:
            await asyncio.to_thread(worker.stop)
        context.destroy(linger=0)
        await router.stop()


async def _answer(http: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
    async with http.post("/v1/completions", json={"return_token_ids": True, **body}) as response:
        assert response.status == 200, await response.text()
        whole = joined(events(await response.text())[:-1]) if body.get("stream") else await response.json()
    numbers: list[float] = []
    return without_floats([whole["choices"], whole["usage"]], numbers), numbers


def joined(parts: list[Any]) -> dict[str, Any]:
    """The whole answer that a stream's events say, with the usage of the last one."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (part["choices"][0] for part in parts if part["choices"]):
        whole = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "scores": []})
        whole["text"] += choice["text"]
        whole["token_ids"] += choice["token_ids"]
        whole["scores"] += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        whole["finish_reason"] = choice["finish_reason"]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": parts[-1]["usage"]}


def without_floats(value: Any, numbers: list[float]) -> Any:
    """JSON whose floats are in `numbers`, in order, instead."""
    if isinstance(value, float):
        numbers.append(value)
        return None
    if isinstance(value, dict):
        return {key: without_floats(each, numbers) for key, each in value.items()}
    return [without_floats(each, numbers) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Texts that end at every place, by their length, a stop token or a stop string; and what changes a text on its way."""
    tokenizer, made = Tokenizer(Path(TOKENIZER)), list[dict[str, Any]]()
    for ids in PROMPTS:
        text = expected_text(ids, LONGEST, stop=())
        greedy = {"prompt": ids, "temperature": 0, "ignore_eos": True, "logprobs": 2, "max_tokens": LONGEST}
        for place in range(LONGEST):
            made.append({**greedy, "max_tokens": place + 1, "stream": place % 2 == 1})
            made.append({**greedy, "stop_token_ids": [text[place]], "stream": place % 2 == 0})
        letters = [letter for letter in tokenizer.decode(text) if letter.isprintable() and letter != BROKEN]
        made += [{**greedy, "stop": letter, "stream": n % 2 == 1} for n, letter in enumerate(letters)]
        made.append({**greedy, "stop": ["".join(tokenizer.decode(text)[3:6]), "nowhere"]})
        waiting = {**greedy, "stop_token_ids": [*text[:4], text[9]], "min_tokens": 7}
        drawn = {**greedy, "temperature": 0.9, "n": 3, "seed": 5, "logprobs": 0}
        made += [
            waiting,
            {**waiting, "logit_bias": {str(text[2]): 30.0}},
            drawn,
            {**drawn, "seed": -6, "top_p": 0.9, "stream": True},
            {**drawn, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4, "n": 2},
            {**drawn, "logit_bias": {str(text[0]): -100.0, "7": 3.0}, "stop_token_ids": [7], "min_tokens": 3},
        ]
    for body in made:
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
    return made


@pytest.fixture(scope="module")
def wanted(bodies: list[dict[str, Any]]) -> list[Answer]:
    found, guessed = answers(0, bodies)
    reasons = [choice["finish_reason"] for (choices, _), _ in found for choice in choices]
    lengths = {usage["completion_tokens"] for (_, usage), _ in found}
    assert not guessed and reasons.count("stop") > 30 < reasons.count("length") and lengths >= set(range(1, LONGEST + 1))
    return found


@pytest.mark.parametrize("speculate", range(1, MOST_DRAFTS + 1))
def test_an_answer_is_the_answer_without_drafts(
    speculate: int, bodies: list[dict[str, Any]], wanted: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculation, "shape", lambda self, rows: self._all[-1])
    found, guessed = answers(speculate, bodies)
    for body, (ours, scores), (theirs, expected) in zip(bodies, found, wanted, strict=True):
        assert ours == theirs, body
        assert scores == pytest.approx(expected, abs=1e-5), body
    assert guessed > 50 or speculate == 1
