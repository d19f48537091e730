"""How a prefill worker is started; the command line is made from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from wire.options import option
from wire.worker import WorkerConfig


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: computes the KV of prompts and hands it to decode workers."""

    step_tokens: int = option(512, help="tokens computed in one step, all prompts together")
    chunk_tokens: int = option(256, help="tokens of one prompt computed in one step")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(chunk_tokens=1, step_tokens=2)
        if self.step_tokens < self.chunk_tokens:
            raise ValueError(f"--step-tokens is {self.step_tokens}; it must be at least --chunk-tokens, {self.chunk_tokens}")
