"""How a decode worker is started; the command line is made from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from wire.options import option


@dataclass(frozen=True)
class DecodeConfig:
    """A decode worker: takes KV over from prefill workers and generates the tokens."""

    model: str = option(help="checkpoint folder")
    router: str = option(help="the router's inbox, tcp://HOST:PORT")
    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(0, help="port of the inbox; 0: any free one")
    advertise: str = option("", help="host name that peers reach this worker by; empty: --host")
    device: str = option("cpu", choices=("cpu", "cuda"), help="where the model runs")
    kv_dtype: str = option(
        "auto", choices=("auto", "fp8", "bf16", "fp32"), help="how KV rows are stored; auto: as the checkpoint"
    )
    page_tokens: int = option(256, help="tokens in a KV page")
    num_pages: int = option(1024, help="KV pages; one is reserved")
    num_slots: int = option(129, help="sequence slots; one is reserved")
    transport: str = option("zeromq", choices=("zeromq",), help="how KV travels")
    threads: int = option(1, help="CPU threads of the model")
    max_batch: int = option(64, help="sequences in one step; with more running they take turns")

    def __post_init__(self) -> None:
        if not self.router.startswith("tcp://"):
            raise ValueError(f"--router is {self.router!r}; it must be the router's inbox, tcp://HOST:PORT")
        for name, least in (("num_pages", 2), ("num_slots", 2), ("page_tokens", 1), ("threads", 1), ("max_batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least {least}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port is {self.port}; ports are 0 to 65535")
