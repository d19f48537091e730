"""Router, prefill pool and decode pool on one host, as child processes that live and die together."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from scripts.children import die_with_parent
from wire.options import option, parse, require_port

ROOT = Path(__file__).resolve().parent.parent
BUNDLED_MODEL = ROOT / "bundled/tiny"
GPU_FRACTION = 0.9  # of a GPU's memory, for all workers on it


@dataclass(frozen=True)
class LocalConfig:
    """Serve a DeepSeek-V4 checkpoint on this host: one router, some prefill workers, some decode workers."""

    model: str = option("", help="checkpoint folder; empty: the small model that ships with the project")
    host: str = option("127.0.0.1", help="address the HTTP server binds")
    port: int = option(8000, help="HTTP port; 0: any free one")
    prefill: int = option(1, help="prefill workers")
    decode: int = option(1, help="decode workers")
    device: str = option("cpu", help="where the workers compute", choices=("cpu", "cuda"))
    router_args: str = option("", help="further flags for the router, in one string, with =: --router-args='--timeline'")
    prefill_args: str = option("", help="further flags for every prefill worker, in one string, with =")
    decode_args: str = option("", help="further flags for every decode worker, in one string, with =")
    log_dir: str = option("", help="folder for the processes' logs; empty: a new temporary one")
    timeout_s: float = option(900.0, help="give up when nothing was served after this long; a GPU compiles its kernels first")

    def __post_init__(self) -> None:
        require_port("--port", self.port)
        if self.prefill < 1 or self.decode < 1:
            raise ValueError("--prefill and --decode must be at least 1: a request needs one of each")
        for name in ("router_args", "prefill_args", "decode_args"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')} cannot be split into flags: {error}") from None


class LaunchError(Exception):
    """Why the system is not running, in one line."""


class Child:
    """One process of the system: its name, its log, and the lines it prints."""

    def __init__(self, name: str, command: list[str], log_dir: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = log_dir / f"{name}.log"
        self._lines: list[tuple[float, str]] = []  # when it came, what
        self._spawned_s = time.monotonic()
        with _open_log(self.log) as stderr:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=ROOT,
                preexec_fn=die_with_parent,
                text=True,
            )
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def line(self, prefix: str) -> str:
        """The rest of the first printed line that starts with `prefix`, or "" while there is none."""
        return next((line[len(prefix) :].strip() for _, line in list(self._lines) if line.startswith(prefix)), "")

    def seconds_until(self, prefix: str) -> float:
        """From the start of the process to that line; infinite while there is none."""
        return next((at_s for at_s, line in list(self._lines) if line.startswith(prefix)), math.inf) - self._spawned_s

    def check(self) -> None:
        """Raises LaunchError when it has ended. Its last word is the reason only if it ended itself, with a failure."""
        code = self.process.poll()
        if code is None:
            return
        end = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        if code > 0:
            words = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            end += f": {words[-1] if words else 'it said nothing'}"
        raise LaunchError(f"{self.name} {end} (log: {self.log})")

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.append((time.monotonic(), line))


class System:
    """All children. Started in order, watched, and stopped together, at the latest when a ``with`` of it ends. That removes
    logs for which no folder was named, unless it ends with an exception, or `keep_logs` was called."""

    def __init__(self, config: LocalConfig) -> None:
        """Makes the folder of the logs, last: what cannot start leaves none. Raises LaunchError."""
        self.config = config
        self._model = str(Path(config.model).resolve() if config.model else BUNDLED_MODEL)
        if not Path(self._model, "config.json").is_file():
            raise LaunchError(f"--model {config.model}: no config.json there; give a checkpoint folder in the released format")
        self._gpus = visible_gpus() if config.device == "cuda" else []
        self.log_dir, self._keeps_logs = _make_log_dir(config.log_dir), bool(config.log_dir)
        self.children: list[Child] = []
        self.deadline_s = time.monotonic() + config.timeout_s

    def __enter__(self) -> System:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is not None:
            self.keep_logs()
        if not self._keeps_logs:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def start(self) -> str:
        """Starts everything; returns the URL once a probe has been served. Raises LaunchError."""
        config, gpus = self.config, self._gpus
        router = self._spawn("router", "router", self._router_flags())
        inbox = self._wait_line(router, "inbox ")
        workers = [("prefill", index, config.prefill_args) for index in range(config.prefill)]
        workers += [("decode", index, config.decode_args) for index in range(config.decode)]
        for number, (role, index, extra) in enumerate(workers):
            if gpus and number >= len(gpus):  # it measures what the one before on its GPU has left
                self._wait_line(self.children[1 + number - len(gpus)], "serving ")
            flags = ["--model", self._model, "--router", inbox, "--device", config.device]
            flags += [*memory_flags(number, len(workers), len(gpus)), *shlex.split(extra)]
            self._spawn(f"{role}-{index}", role, flags, gpus[number % len(gpus)] if gpus else None)
        return self._wait_line(router, "ready ")

    def watch(self) -> None:
        """Returns never: raises LaunchError as soon as a child has ended."""
        while True:
            for child in self.children:
                child.check()
            time.sleep(0.2)

    def stop(self) -> None:
        """SIGTERM to every child, SIGKILL to those that are still there after five seconds."""
        for child in self.children:
            child.process.terminate()
        deadline_s = time.monotonic() + 5
        for child in self.children:
            try:
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def keep_logs(self) -> None:
        """They may tell what went wrong; says where they are."""
        self._keeps_logs = True
        print(f"logs are in {self.log_dir}", file=sys.stderr, flush=True)

    def _router_flags(self) -> list[str]:
        flags = ["--model", self._model, "--host", self.config.host, "--port", str(self.config.port)]
        return [*flags, *shlex.split(self.config.router_args)]

    def _spawn(self, name: str, module: str, flags: list[str], gpu: str | None = None) -> Child:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        child = Child(name, [sys.executable, "-m", module, *flags], self.log_dir, environment)
        self.children.append(child)
        return child

    def _wait_line(self, child: Child, prefix: str) -> str:
        while not child.line(prefix):
            for each in self.children:
                each.check()
            if time.monotonic() > self.deadline_s:
                raise LaunchError(f"nothing was served within {self.config.timeout_s:g} s; logs are in {self.log_dir}")
            time.sleep(0.02)
        return child.line(prefix)


def signal_name(number: int) -> str:
    """Also of a real-time signal, which has no name."""
    return f"signal {number} ({signal.Signals(number).name})" if number in list(signal.Signals) else f"signal {number}"


def memory_flags(number: int, workers: int, gpus: int) -> list[str]:
    """Equal parts for workers that share a GPU. A worker takes what is free up to its fraction of the whole GPU, so the
    fractions rise from one to the next."""
    sharing = len(range(number % gpus, workers, gpus)) if gpus else 1
    if sharing == 1:
        return []
    return ["--memory-fraction", f"{GPU_FRACTION * (number // gpus + 1) / sharing:.3f}"]


def visible_gpus() -> list[str]:
    """The GPUs workers are spread over, as CUDA_VISIBLE_DEVICES names them. Raises LaunchError when there is none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"--device cuda: nvidia-smi finds no GPU ({error})") from error
    count = sum(line.startswith("GPU ") for line in listing.splitlines())
    if not count:
        raise LaunchError("--device cuda: nvidia-smi lists no GPU")
    return [str(index) for index in range(count)]


def _make_log_dir(log_dir: str) -> Path:
    try:
        if not log_dir:
            return Path(tempfile.mkdtemp(prefix="pdserve-"))
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log-dir {log_dir}: no folder can be made there: {error.strerror}") from error
    return Path(log_dir)


def _open_log(path: Path) -> IO[bytes]:
    try:
        return path.open("wb")
    except OSError as error:
        raise LaunchError(f"--log-dir {path.parent}: {path.name} can not be written: {error.strerror}") from error


def _stop_requested(signum: int, frame: FrameType | None) -> None:
    _ignore_signals()  # a second one must not interrupt what the first one stops
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)


def main() -> int:
    config = parse(LocalConfig, "launch_local.sh")
    for each in (signal.SIGTERM, signal.SIGINT):  # a shell starts what is in the background with SIGINT ignored
        signal.signal(each, _stop_requested)
    system: System | None = None
    failed = False
    try:
        system = System(config)
        print(f"launch_local: logs are in {system.log_dir}", file=sys.stderr, flush=True)
        print(f"ready {system.start()}", flush=True)
        system.watch()
    except LaunchError as error:
        print(f"launch_local: {error}", file=sys.stderr)
        failed = True
    except KeyboardInterrupt:
        pass
    finally:
        _ignore_signals()
        if system is not None:
            system.stop()
    return int(failed)  # the logs stay: a request may have failed whose client was told to look there


if __name__ == "__main__":
    sys.exit(main())
