"""The launch scripts as an operator uses them: ready line, stopping, failures in one line, junk, unequal pools."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq

from scripts import launch_local
from scripts.launch_local import Child, LaunchError, LocalConfig, System
from tests.system import PATIENCE_S, ROOT, TINY, Server, running, wait_for
from wire.messages import Abort, Failed, Grant, PromptLogprobs, Ready, Tokens, pack_ids
from wire.sockets import Outbox


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as each:
        yield each


def launch(*flags: str, cwd: str | Path = "/", **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PDSERVE_PYTHON": sys.executable, **environment}
    command = [str(ROOT / "scripts/launch_local.sh"), "--port", "0", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, or going this very moment
        return False


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_ready_line_then_a_signal_stops_every_child(stop: signal.Signals, tmp_path: Path) -> None:
    process = launch(TMPDIR=str(tmp_path))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(r"ready http://127\.0\.0\.1:\d+\n", line), line
    children = children_of(process.pid)
    assert len(children) == 3
    process.send_signal(stop)
    assert process.wait(PATIENCE_S) == 0
    assert process.stdout.read() == ""
    assert not [pid for pid in children if alive(pid)]
    assert len(list(tmp_path.glob("pdserve-*/*.log"))) == 3, "a client may have been told to look there"


def test_a_system_that_ends_without_a_failure_leaves_no_logs_unless_a_folder_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with System(LocalConfig()) as system:
        assert system.log_dir.is_dir()
    assert not system.log_dir.exists() and capsys.readouterr().err == ""
    with System(LocalConfig(log_dir=str(tmp_path / "named"))) as system:
        pass
    assert system.log_dir.is_dir()
    with System(LocalConfig()) as system:
        system.keep_logs()
    assert system.log_dir.is_dir() and capsys.readouterr().err == f"logs are in {system.log_dir}\n"
    with pytest.raises(LaunchError, match="broken"), System(LocalConfig()) as system:
        raise LaunchError("broken")
    assert system.log_dir.is_dir() and capsys.readouterr().err == f"logs are in {system.log_dir}\n"


def test_a_second_signal_does_not_interrupt_what_the_first_one_stops() -> None:
    kept = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        signal.signal(signal.SIGTERM, launch_local._stop_requested)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        for again in kept:
            try:
                signal.raise_signal(again)
            except KeyboardInterrupt:  # which would end pytest
                pytest.fail(f"{again!r} interrupts")
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


def test_children_end_when_the_launcher_is_killed() -> None:
    process = launch()
    assert process.stdout is not None and process.stdout.readline().startswith("ready")
    children = children_of(process.pid)
    process.kill()
    wait_for(lambda: not any(alive(pid) for pid in children), "the end of its children")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--model", "/nowhere"], "config.json"),
        (["--decode-args=--num-pages nonsense"], "num-pages"),
        (["--prefill", "0"], "at least 1"),
        (["--router-args=--tokenizer /nowhere"], "/nowhere"),
    ],
)
def test_a_failure_is_one_line_and_a_non_zero_exit(flags: list[str], word: str) -> None:
    process = launch(*flags)
    out, err = process.communicate(timeout=3 * PATIENCE_S)
    assert process.returncode != 0
    assert out == ""
    assert word in err.strip().splitlines()[-1], err


@pytest.mark.parametrize("log_dir", ["taken", "taken/logs", "/proc/logs", "full"])
def test_logs_that_cannot_be_written_are_one_line(log_dir: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "full/router.log").mkdir(parents=True)
    system = None
    with pytest.raises(LaunchError, match=f"^--log-dir .*{log_dir}: "):
        system = System(LocalConfig(log_dir=str(tmp_path / log_dir)))
        system.start()
    assert (system is None) == (log_dir != "full") and (system is None or not system.children)


def test_what_cannot_start_leaves_no_folder_and_what_starts_says_where_its_logs_are(tmp_path: Path) -> None:
    for flags, folders in ((["--model", "/nowhere"], 0), (["--router-args=--nonsense"], 1)):
        process = launch(*flags, TMPDIR=str(tmp_path))
        _, err = process.communicate(timeout=3 * PATIENCE_S)
        made = list(tmp_path.glob("pdserve-*"))
        assert process.returncode == 1 and len(made) == folders
        assert all(f"logs are in {folder}\n" in err and (folder / "router.log").read_text() for folder in made)


def test_a_broken_checkpoint_names_the_tensor(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    data = (tmp_path / "model/model.safetensors").read_bytes()
    (tmp_path / "model/model.safetensors").write_bytes(data.replace(b'"layers.3.attn.attn_sink"', b'"layers.3.attn.attn_sank"'))
    process = launch("--model", str(tmp_path / "model"))
    _, err = process.communicate(timeout=3 * PATIENCE_S)
    assert process.returncode == 1
    _, why = err.strip().splitlines()
    assert "layers.3.attn.attn_s" in why


def test_relative_paths_are_the_callers(tmp_path: Path) -> None:
    """Also from a folder whose names would shadow our packages."""
    (tmp_path / "served").symlink_to(TINY)
    (tmp_path / "model.py").write_text("raise ImportError('the wrong model')")
    process = launch("--model", "served", "--log-dir", "logs", cwd=tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline().startswith("ready")
        assert "KV memory: 1024 pages, 261888 tokens" in (tmp_path / "logs/decode-0.log").read_text()
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert (tmp_path / "logs/decode-0.log").exists()


def test_a_child_that_dies_later_stops_the_rest(tmp_path: Path) -> None:
    process = launch(TMPDIR=str(tmp_path))
    assert process.stdout is not None and process.stdout.readline().startswith("ready")
    children = children_of(process.pid)
    os.kill(children[1], signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    (folder,) = tmp_path.glob("pdserve-*")
    assert process.returncode == 1 and f"prefill-0 was killed by signal 9 (SIGKILL) (log: {folder}/" in err, err
    assert not [pid for pid in children if alive(pid)]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("exit 5", "ended with exit code 5: a last word"),
        ("exit 0", "ended with exit code 0"),
        ("kill -TERM $$", r"was killed by signal 15 \(SIGTERM\)"),
        ("kill -40 $$", "was killed by signal 40"),
    ],
)
def test_the_last_word_of_a_child_is_the_reason_only_of_its_own_failure(end: str, said: str, tmp_path: Path) -> None:
    child = Child("decode-0", ["bash", "-c", f"echo a last word >&2; {end}"], tmp_path, {**os.environ})
    child.process.wait(PATIENCE_S)
    with pytest.raises(LaunchError, match=rf"^decode-0 {said} \(log: .*decode-0\.log\)$"):
        child.check()


def test_two_clusters_on_one_host_do_not_collide(server: Server) -> None:
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    with running() as other:
        assert server.url != other.url
        assert server.complete(**body).ids() == other.complete(**body).ids()


def listening_ports(pid: int) -> list[int]:
    """Every TCP port a process listens on, from /proc."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(found[1])
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def throw_bytes(port: int) -> None:
    """That are no ZeroMQ."""
    for junk in (b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 64 + b"\x03\x00NULL"):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(junk)


def throw_junk(port: int, kind: int = zmq.PUSH) -> None:
    """Bytes that are no ZeroMQ, and ZeroMQ frames that are no message of ours."""
    throw_bytes(port)
    context = zmq.Context()
    push = context.socket(kind)
    push.connect(f"tcp://127.0.0.1:{port}")
    truncated = b"\x95\xa5Ready\x01"
    for frame in (b"", b"\x00", os.urandom(300), pickle.dumps({"a": 1}), truncated, b"\x91\xa6Status", b"x" * (20 << 20)):
        push.send(frame)
    for _ in range(20):
        push.send_multipart([os.urandom(20), b"", os.urandom(200)])
    push.close(linger=30_000)
    context.term()


def test_junk_on_every_socket_is_counted_and_service_goes_on(server: Server) -> None:
    body: dict[str, Any] = {"prompt": list(range(5, 300)), "max_tokens": 8, "temperature": 0}
    before = server.complete(**body).ids()
    for child in server.system.children:
        ports = listening_ports(child.process.pid)
        assert ports, child.name
        for port in ports:
            if f":{port}" not in server.url:
                throw_junk(port)
    assert server.complete(**body).ids() == before
    wait_for(lambda: all(count_bad(server, child.name) for child in server.system.children), "the counters")
    wait_for(lambda: server.get("/health")[0] == 200, "health")


NOBODYS: list[Callable[[int], Any]] = [  # well-formed, and about no request that there is
    lambda rid: Abort(rid, 0),
    lambda rid: Grant(rid, 0, 1, pack_ids([1]), "tcp://127.0.0.1:1"),
    lambda rid: Ready(rid, 0, 5, 1, 100, rid),
    lambda rid: Tokens("nobody", [[rid, 0, 0, 0, [5], "", None, None], "junk"]),
    lambda rid: Failed(rid, 0, 0, "transfer", "made up", True, "decode"),
    lambda rid: PromptLogprobs(rid, 0, 1, bytes(4), bytes(4), bytes(4)),
]


def throw_messages(port: int) -> None:
    """Those, of a thousand requests."""
    context: zmq.Context[Any] = zmq.Context()
    outbox = Outbox(context, linger_ms=30_000)
    for rid in random.sample(range(1 << 40), 1000):
        for make in NOBODYS:
            outbox.send(f"tcp://127.0.0.1:{port}", make(rid))
    outbox.close()
    context.term()


def kept(pid: int) -> dict[str, int]:
    """What a process has open, and the memory it has."""
    process = Path(f"/proc/{pid}")
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "bytes": int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def known(server: Server) -> tuple[set[str], Any, Any]:
    """The rows of /metrics, and the workers."""
    rows = {line.rsplit(" ", 1)[0] for line in server.get("/metrics")[1].splitlines()}
    health = json.loads(server.get("/health")[1])
    return rows, sorted(worker["name"] for worker in health["workers"]), health["refused"]


ROUNDS = 5
MORE = {"descriptors": 0, "threads": 0, "bytes": 20 << 20}  # a fifth of what each socket is sent


def test_junk_on_every_socket_makes_nothing_grow() -> None:
    """Of router, workers and their engines: connections and what else has a descriptor, threads, memory; and of what they know:
    workers, rows of /metrics, pages and slots."""
    with running() as server:
        children = [child.process.pid for child in server.system.children]
        processes = children + [engine for child in children for engine in children_of(child)]
        ports = [(pid, port) for pid in processes for port in listening_ports(pid)]
        assert (len(processes), len(ports)) == (5, 6), "HTTP, three inboxes, two for KV"

        def throw() -> None:
            for pid, port in ports:
                if server.url.endswith(f":{port}"):
                    throw_bytes(port)
                    continue
                throw_junk(port, zmq.PUSH if pid in children else zmq.DEALER)
                if pid in children:
                    throw_messages(port)
            assert server.complete(prompt=[5, 6, 7], max_tokens=2).status == 200
            server.wait_idle()

        for _ in range(2):  # what is made once is there by then
            throw()
        before, knew = {pid: kept(pid) for pid in processes}, known(server)
        for _ in range(ROUNDS):
            throw()

        def grown() -> list[str]:
            now = {pid: kept(pid) for pid in processes}
            return [
                f"{name} of {pid}: {before[pid][name]} -> {now[pid][name]}"
                for name, more in MORE.items()
                for pid in processes
                if now[pid][name] > before[pid][name] + more
            ]

        with contextlib.suppress(AssertionError):
            wait_for(lambda: not grown(), "what there was before")  # connections are closed in libzmq's own time
        assert not grown()
        assert known(server) == knew


def count_bad(server: Server, child: str) -> bool:
    """Whether a process of that role has counted bad frames."""
    role = child.split("-")[0]
    text = server.get("/metrics")[1]
    rows = [line for line in text.splitlines() if line.startswith("pdserve_bad_frames_total") and (f'role="{role}"' in line)]
    return any(float(row.split()[-1]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("model", "flags", "field"),
    [
        (TINY, ["--page-tokens", "128"], "page_tokens"),
        (TINY, ["--kv-dtype", "bf16"], "kv_dtype"),
        (str(ROOT / "tests/data/golden/tiny-fp8fp4/model"), [], "model."),
    ],
)
def test_an_unequal_worker_is_refused_with_the_field(server: Server, model: str, flags: list[str], field: str) -> None:
    inbox = server.system.children[0].line("inbox ")
    command = [sys.executable, "-m", "decode", "--model", model, "--router", inbox, *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3 * PATIENCE_S)
    assert done.returncode == 3, done.stderr
    assert "refused" in done.stderr and field in done.stderr, done.stderr
    assert server.complete(prompt=[5, 6, 7], max_tokens=2).status == 200


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("0", [("prefill-0", "0", "0.300"), ("decode-0", "0", "0.600"), ("decode-1", "0", "0.900")]),
        ("2,5", [("prefill-0", "2", "0.450"), ("decode-0", "5", ""), ("decode-1", "2", "0.900")]),
        ("1,2,3", [("prefill-0", "1", ""), ("decode-0", "2", ""), ("decode-1", "3", "")]),
    ],
)
def test_workers_that_share_a_gpu_start_one_after_another_with_a_part_of_it_each(
    gpus: str, expected: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker takes what is free up to its fraction: two at once would each count on all of it."""
    serving: list[str] = []
    started: list[tuple[str, str, str]] = []

    class Child:
        def __init__(self, name: str, command: list[str], log_dir: Path, environment: dict[str, str]) -> None:
            self.name = name
            if name == "router":
                return
            gpu = environment["CUDA_VISIBLE_DEVICES"]
            before = [other for other, its, _ in started if its == gpu]
            assert serving[-1:] == before[-1:] or not before, "the one before on this GPU is not serving yet"
            given = dict(pairwise(command))
            started.append((name, gpu, given.get("--memory-fraction", "")))

        def line(self, prefix: str) -> str:
            if prefix == "serving ":
                serving.append(self.name)
            return "x"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(launch_local, "Child", Child)
    System(LocalConfig(decode=2, device="cuda", log_dir=str(tmp_path))).start()
    assert started == expected
