"""The whole system as real processes on loopback, through HTTP: golden values, mixed load, retraction, lost workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from decode.sampling import MOST_TOPS
from tests import golden
from tests.system import ROOT, TINY, Reply, Server, complete, running, wait_for

CHUNKS = (1, 7, 64, 256)
VOCAB = 320
TOPS = VOCAB if golden.DEVICE == "cpu" else MOST_TOPS  # log probabilities that a decode worker gives at most


def greedy(case: str, name: str, most: int = 32) -> dict[str, Any]:
    """most: of the stored tokens, which are 32 at most."""
    return {"prompt": golden.prompt(case, name)[0], "max_tokens": most, "temperature": 0, "logprobs": TOPS}


def check_golden(case: str, name: str, reply: Reply, most: int = 32) -> None:
    """Greedy tokens are the stored ones; the first step's distribution within the tolerance of the golden README."""
    assert reply.status == 200, reply.body
    expected = golden.case(case).prompts[name]
    assert golden.goes_on_like(case, name, reply.ids(), most), f"{case} {name}: {reply.ids()}"
    tolerance = golden.case(case).js["tolerance"][golden.case(case).js["default_profile"]]
    got = np.full(VOCAB, np.nan)
    for key, value in reply.choice()["logprobs"]["top_logprobs"][0].items():
        got[int(key.removeprefix("token_id:"))] = value
    difference = got - golden.case(case).t[f"{name}.last_logits"]  # and a constant: log probabilities are normalised
    assert np.isfinite(difference).sum() >= TOPS
    error = (np.nanmax(difference) - np.nanmin(difference)) / 2
    limit = max(tolerance["last_max"], tolerance["last_factor"] * max(expected["noise"]["noise_last"].values()))
    assert error <= limit, f"{case} {name}: logits differ by {error}"


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    normalised: np.ndarray[Any, Any] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return normalised


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("case", golden.CASES)
def test_golden_prompts_together_at_every_chunk_size(case: str, chunk: int) -> None:
    cut, wide = f"--chunk-tokens {chunk}", f"--max-logprobs {TOPS}"
    with running(golden.model_dir(case), prefill_args=cut, router_args=wide) as server:
        names = [name for name, each in golden.case(case).prompts.items() if chunk > 1 or len(each["ids"]) <= 300]
        for name, reply in zip(names, server.complete_all([greedy(case, name) for name in names]), strict=True):
            check_golden(case, name, reply)
        server.wait_idle()


@pytest.mark.parametrize("case", golden.CASES)
def test_echo_gives_the_golden_logprobs_of_the_prompt(case: str) -> None:
    stored = golden.case(case)
    with running(golden.model_dir(case), prefill_args="--chunk-tokens 50") as server:
        for name in stored.js["full_logits"]:
            ids = stored.prompts[name]["ids"]
            reply = server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=1)
            assert reply.status == 200, reply.body
            got = reply.choice()["logprobs"]["token_logprobs"]
            want = log_softmax(stored.t[f"{name}.logits"].astype(np.float64))[np.arange(len(ids) - 1), ids[1:]]
            assert got[0] is None and len(got) == len(ids)
            error = np.abs(np.array(got[1:]) - want)
            tolerance = stored.js["tolerance"][stored.js["default_profile"]]
            assert np.sqrt((error**2).mean()) <= 2 * tolerance["full_rms"], (case, name, error.max())


@pytest.mark.parametrize("case", golden.CASES)
def test_golden_prompts_alone_and_in_their_batches(case: str) -> None:
    """Sixteen tokens of each; the test above decodes them to their ends."""
    with running(golden.model_dir(case), router_args=f"--max-logprobs {TOPS}") as server:
        for name in golden.case(case).prompts:
            check_golden(case, name, server.complete(**greedy(case, name, 16)), 16)
        for batch in golden.case(case).js["batches"]:
            replies = server.complete_all([greedy(case, name, 16) for name in batch["prompts"]])
            for name, reply in zip(batch["prompts"], replies, strict=True):
                assert golden.goes_on_like(case, name, reply.ids(), 16), f"{name} differs when decoded with {batch['prompts']}"


def test_a_sharded_checkpoint_is_served() -> None:
    with running(golden.model_dir("tiny-bf16", "model-sharded"), router_args=f"--max-logprobs {TOPS}") as server:
        for name in ("len5", "len300"):
            check_golden("tiny-bf16", name, server.complete(**greedy("tiny-bf16", name)))


def test_transformers_agrees_on_fresh_prompts(tmp_path: Path) -> None:
    """An implementation that is not ours, in a process of its own, on prompts that nobody stored."""
    python = os.environ.get("PDSERVE_CLIENTS_PYTHON")
    assert python, "set PDSERVE_CLIENTS_PYTHON to a python with tests/clients-requirements.txt; scripts/test.sh does"
    generator = random.Random(7)
    prompts = [[generator.randrange(2, VOCAB) for _ in range(length)] for length in (2, 9, 130, 261, 390)]
    oracle = subprocess.run(
        [python, str(ROOT / "tests/oracle_transformers.py"), TINY],
        input=json.dumps({"prompts": prompts, "new_tokens": 6}),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    expected = json.loads(oracle.stdout)["tokens"]
    with running() as server:
        replies = server.complete_all([{"prompt": p, "max_tokens": 6, "temperature": 0, "ignore_eos": True} for p in prompts])
    assert [reply.ids() for reply in replies] == expected


def request_specs(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Requests of every sort: lengths 1-700, n 1-3, greedy and sampled, penalties, streamed and not."""
    generator = random.Random(seed)
    for index in range(count):
        length = generator.choice(
            [1, 2, 3, 5, 17, 127, 128, 129, 255, 256, 257, 300, 511, 513, 700, generator.randrange(1, 700)]
        )
        spec: dict[str, Any] = {
            "prompt": [generator.randrange(2, VOCAB) for _ in range(length)],
            "max_tokens": generator.randrange(1, 24),
            "n": 1 + index % 3,
            "seed": generator.randrange(1 << 30),
            "temperature": generator.choice([0, 0.7, 1.2]),
            "top_p": generator.choice([1.0, 0.9]),
            "ignore_eos": True,
            "stream": generator.random() < 0.5,
        }
        if generator.random() < 0.3:
            spec |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        yield spec


def texts(reply: Reply, spec: dict[str, Any]) -> list[list[int]]:
    assert reply.status == 200, reply.body
    return [reply.ids(choice) for choice in range(spec["n"])]


async def drop(session: aiohttp.ClientSession, spec: dict[str, Any], after_s: float) -> None:
    """A client that goes away in the middle of its request (or has its whole answer by then)."""
    with contextlib.suppress(TimeoutError):
        assert (await asyncio.wait_for(complete(session, **spec), after_s)).status == 200


def mixed_load(server: Server, specs: list[dict[str, Any]], repeats: int, dropped: float) -> list[tuple[int, Reply]]:
    """Every spec `repeats` times, all at once in random order; a share `dropped` of them loses its client."""
    generator = random.Random(3)

    async def work(session: aiohttp.ClientSession) -> list[tuple[int, Reply]]:
        order = [index for index in range(len(specs)) for _ in range(repeats)]
        generator.shuffle(order)
        tasks, leaving = [], []
        for index in order:
            if generator.random() < dropped:
                leaving.append(asyncio.create_task(drop(session, specs[index], generator.uniform(0.05, 5))))
            else:
                tasks.append((index, asyncio.create_task(complete(session, **specs[index]))))
        await asyncio.gather(*leaving)
        return [(index, await task) for index, task in tasks]

    return server.run(work)


def test_two_hundred_mixed_requests_equal_their_solo_output() -> None:
    specs = list(request_specs(50, seed=11))
    with running(prefill=2, decode=2) as server:
        solo = [texts(server.complete(**spec), spec) for spec in specs]
        survivors = mixed_load(server, specs, repeats=4, dropped=0.2)
        server.wait_idle()
        assert len(survivors) > 120
        assert server.total("requests_dropped_total") > 15, "too few clients left before their answer was whole"
        for index, reply in survivors:
            assert texts(reply, specs[index]) == solo[index], specs[index]
        assert server.total("transfers_broken_total") == 0


def test_a_decode_pool_that_is_too_small_gives_the_same_texts() -> None:
    generator = random.Random(5)
    specs: list[dict[str, Any]] = [
        {
            "prompt": [generator.randrange(2, VOCAB) for _ in range(generator.randrange(60, 250))],
            "max_tokens": 200,
            "n": 1 + index % 2,
            "seed": index,
            "temperature": 0.8,
            "frequency_penalty": 0.2,
            "ignore_eos": True,
        }
        for index in range(6)
    ]
    with running(prefill_args="--page-tokens 128", decode_args="--page-tokens 128 --num-pages 400") as server:
        wide = [texts(reply, spec) for reply, spec in zip(server.complete_all(specs), specs, strict=True)]
        assert server.total("retractions_total") == 0
    with running(prefill_args="--page-tokens 128", decode_args="--page-tokens 128 --num-pages 14") as server:
        narrow = [texts(reply, spec) for reply, spec in zip(server.complete_all(specs), specs, strict=True)]
        wait_for(lambda: server.total("retractions_total") > 0, "a retraction")
        server.wait_idle()
    assert narrow == wide


@pytest.mark.parametrize(("victim", "stops_after_s"), [("prefill", 0.0), ("decode", 0.3)])
def test_a_worker_killed_under_load_loses_nothing(victim: str, stops_after_s: float) -> None:
    """It stands still before it is killed: what it has been given by then is in flight, however fast the machine is."""
    specs = list(request_specs(12, seed=21))
    for spec in specs:
        spec["max_tokens"] += 30
    with running(prefill=2, decode=2, router_args="--dead-after-s 3") as server:
        solo = [texts(server.complete(**spec), spec) for spec in specs]

        async def work(session: aiohttp.ClientSession) -> list[Reply]:
            child = next(c for c in server.system.children if c.name.startswith(victim))
            if not stops_after_s:
                os.kill(child.process.pid, signal.SIGSTOP)
            tasks = [asyncio.create_task(complete(session, **spec)) for spec in specs]
            await asyncio.sleep(stops_after_s)
            os.kill(child.process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.7)
            os.kill(child.process.pid, signal.SIGKILL)
            return list(await asyncio.gather(*tasks))

        replies = server.run(work)
        for reply, spec, expected in zip(replies, specs, solo, strict=True):
            assert texts(reply, spec) == expected
        assert server.total("workers_lost_total") >= 1, "a healthy one that a busy machine starves is counted too"
        assert server.total("retries_total") > 0, "nothing was in flight on the worker that died"
        server.wait_idle()
        wait_for(lambda: server.get("/health")[0] == 200, "health")


def test_a_bf16_cache_serves_the_golden_tokens() -> None:
    with running(prefill_args="--kv-dtype bf16", decode_args="--kv-dtype bf16") as server:
        for name in ("len5", "len131", "len300"):
            ids, tokens = golden.prompt("tiny-bf16", name)
            assert server.complete(prompt=ids, max_tokens=len(tokens), temperature=0).ids() == tokens


def test_mxfp4_index_keys_serve_the_golden_tokens_beside_no_pool_with_others() -> None:
    model, flags = golden.model_dir("tiny-fp8fp4"), "--index-keys mxfp4"
    with running(model, prefill_args=flags, decode_args=flags) as server:
        for name in ("len5", "len131", "len300"):
            got = server.complete(**greedy("tiny-fp8fp4", name) | {"logprobs": None}).ids()
            assert golden.goes_on_like("tiny-fp8fp4", name, got)
        inbox = server.system.children[0].line("inbox ")
        command = [sys.executable, "-m", "decode", "--model", model, "--router", inbox]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 3 and "index_keys differs: 'mxfp4'" in done.stderr, done.stderr
