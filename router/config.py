"""The router's settings; every field is a command-line option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wire.curve import require_key
from wire.options import option, require_port


@dataclass(frozen=True)
class RouterConfig:
    """OpenAI-compatible HTTP front of the prefill and decode pools."""

    host: str = option("127.0.0.1", help="address that HTTP clients connect to")
    port: int = option(8000, help="HTTP port; 0: any free one")
    inbox_host: str = option("127.0.0.1", help="address of the inbox that workers send to")
    inbox_port: int = option(0, help="port of that inbox; 0: any free one")
    advertise: str = option("", help="host name that workers reach the inbox by, when it is not --inbox-host")
    model: str = option("", help="model folder; only its tokenizer.json is read")
    model_name: str = option("", help="the name clients ask for; the default is the folder's")
    tokenizer: str = option("", help="tokenizer.json or its folder, when it is not in --model")
    max_body_bytes: int = option(16 << 20, help="larger HTTP bodies are answered with 413")
    max_requests: int = option(4096, help="samples in flight before new requests are answered with 429")
    max_prompt_tokens: int = option(8 << 20, help="prompt tokens in flight before new requests are answered with 429")
    max_logprobs: int = option(20, help="most alternatives a request may ask for with logprobs or top_logprobs")
    request_timeout_s: float = option(600.0, help="a request that takes longer is ended with an error")
    dead_after_s: float = option(3.0, help="a worker silent for this long is dead")
    recovery_wait_s: float = option(5.0, help="how long an accepted request waits for a worker to come back")
    max_attempts: int = option(3, help="tries at a request before it is answered with an error")
    probe_every_s: float = option(3.0, help="a worker that nothing has proven for this long is probed")
    health_window_s: float = option(10.0, help="/health is red when no hand-off has worked for this long")
    cluster_key: str = option(
        "", help="file of the cluster's key (python -m scripts.make_keys): only members are talked to, encrypted"
    )
    insecure: bool = option(False, help="let the inbox listen beyond this host without a key: whoever can connect is served")
    timeline: bool = option(False, help="log when each request is sent to workers and answered; they take --timeline too")
    stream_buffer_bytes: int = option(1 << 20, help="a client that leaves more than this unread loses its stream")

    def __post_init__(self) -> None:
        require_port("--port", self.port)
        require_port("--inbox-port", self.inbox_port)
        if self.inbox_host in ("0.0.0.0", "::", "*") and not self.advertise:
            raise ValueError(f"--inbox-host {self.inbox_host} also needs --advertise: the name workers reach this host by")
        require_key("--inbox-host", self.inbox_host, self.cluster_key, self.insecure)
        if self.model and not Path(self.model).is_dir():
            raise ValueError(f"--model {self.model}: there is no such folder")
        for name in (
            "request_timeout_s",
            "dead_after_s",
            "probe_every_s",
            "health_window_s",
            "max_attempts",
            "max_requests",
            "max_prompt_tokens",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0")
        if self.max_logprobs < 0:
            raise ValueError("--max-logprobs must not be negative")

    @property
    def served_name(self) -> str:
        return self.model_name or (Path(self.model).resolve().name if self.model else "deepseek-v4-flash")

    @property
    def tokenizer_path(self) -> Path | None:
        """Where the tokenizer is; None: the model has none and is served with ids only."""
        if self.tokenizer:
            return Path(self.tokenizer)
        bundled = Path(self.model) / "tokenizer.json"
        return bundled if self.model and bundled.exists() else None
