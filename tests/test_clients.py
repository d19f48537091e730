"""Clients that are not ours, from PyPI, drive a real system: openai, langchain-openai, lm-eval, schemathesis."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests import golden
from tests.system import ROOT, TINY, TOKENIZER, Server, running, wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(TINY, router_args=f"--tokenizer {TOKENIZER} --model-name pdserve", decode_args="--num-pages 24") as each:
        yield each


def client(command: list[str], cwd: Path, timeout_s: float = 900) -> str:
    """Runs a program of the clients' venv in `cwd` (not here: transformers would import our `kernels`)."""
    python = os.environ.get("PDSERVE_CLIENTS_PYTHON")
    assert python, "set PDSERVE_CLIENTS_PYTHON to a python with tests/clients-requirements.txt; scripts/test.sh does"
    program = [python, *command] if command[0].endswith(".py") else [str(Path(python).parent / command[0]), *command[1:]]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cwd / "hf")}
    done = subprocess.run(program, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def score(context: str, continuation: str) -> float:
    """log p(continuation | context) of the tiny model, computed in this process."""
    tokenizer = Tokenizer.from_file(str(Path(TOKENIZER, "tokenizer.json")))
    prefix = tokenizer.encode(context, add_special_tokens=False).ids
    ids = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    logprobs = golden.logits_in_chunks(golden.runner("tiny-bf16"), ids, [len(ids)]).log_softmax(-1)
    return sum(float(logprobs[at - 1, ids[at]]) for at in range(len(prefix), len(ids)))


def test_openai(server: Server, tmp_path: Path) -> None:
    assert "openai ok" in client([str(ROOT / "tests/client_openai.py"), server.url], tmp_path)
    server.wait_idle()


def test_langchain(server: Server, tmp_path: Path) -> None:
    assert "langchain ok" in client([str(ROOT / "tests/client_langchain.py"), server.url], tmp_path)
    server.wait_idle()


def test_lm_eval(server: Server, tmp_path: Path) -> None:
    """Multiple choice (echo, logprobs, batches of id lists) and generation, over a task of our own."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(Path(TOKENIZER, "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<｜end▁of▁sentence｜>", "model_max_length": 4096}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    documents = [{"question": f"{a} and {b}", "choices": ["red", "blue"], "answer": a % 2} for a in range(3) for b in range(2)]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    source = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: documents.jsonl\ntest_split: test\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: tiny_choice\n{source}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}} is'\n"
        "doc_to_choice: choices\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    (tmp_path / "generate.yaml").write_text(
        f"task: tiny_generate\n{source}output_type: generate_until\ndoc_to_text: '{{{{question}}}} is'\n"
        "doc_to_target: ' red'\ngeneration_kwargs:\n  until: ['\\n']\n  max_gen_toks: 4\n  do_sample: false\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    arguments = (
        f"model=pdserve,base_url={server.url}/v1/completions,tokenizer={tokenizer},tokenizer_backend=huggingface,"
        "num_concurrent=2,max_retries=1,tokenized_requests=True"
    )
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--include_path", "."]
    command += ["--tasks", "tiny_choice,tiny_generate", "--batch_size", "2", "--output_path", "out", "--log_samples"]
    client(command, tmp_path)
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]
    assert "exact_match,none" in results["tiny_generate"]
    samples = next((tmp_path / "out").rglob("samples_tiny_choice_*.jsonl")).read_text().splitlines()
    assert len(samples) == len(documents)
    for line in samples:
        sample = json.loads(line)
        scores = [float(response[0][0]) for response in sample["resps"]]
        context = f"{sample['doc']['question']} is"
        assert scores == pytest.approx([score(context, f" {choice}") for choice in sample["doc"]["choices"]], abs=1e-3)
    server.wait_idle()


def test_schemathesis_finds_no_server_error(tmp_path: Path) -> None:
    """Over a pool of one page and short texts, so that a valid request cannot ask for minutes of tokens."""
    with running(TINY, router_args=f"--tokenizer {TOKENIZER}", decode_args="--num-pages 2 --max-context 64") as server:
        command = ["st", "run", f"{server.url}/openapi.json", "--phases", "examples,coverage,fuzzing", "--max-examples", "10"]
        command += ["--workers", "1", "--seed", "1", "--request-timeout", "60"]
        command += ["--checks", "not_a_server_error,response_schema_conformance,content_type_conformance"]
        client(command, tmp_path)
        server.wait_idle()
        wait_for(lambda: server.get("/health")[0] == 200, "health")
