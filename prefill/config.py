"""How a prefill worker is started; the command line is made from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from wire.options import option
from wire.worker import WorkerConfig

USUAL_TOKENS = {"cpu": (512, 256), "cuda": (8192, 8192)}  # of a step, of a prompt in it


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: computes the KV of prompts and hands it to decode workers."""

    step_tokens: int = option(0, help="tokens computed in one step, all prompts together; 0: 8192 on a GPU, 512 on a CPU")
    chunk_tokens: int = option(0, help="tokens of one prompt computed in one step; 0: 8192 on a GPU, 256 on a CPU")
    lanes: int = option(
        0, help="connections to a decode worker over ZeroMQ, 8 at most; 0: up to four, one for every four cores"
    )
    kv_floor: float = option(0.0, help="GB/s that a decode worker must take in its test to be used; 0: any speed will do")

    def __post_init__(self) -> None:
        super().__post_init__()
        step_tokens, chunk_tokens = USUAL_TOKENS[self.device]
        chunk_tokens = self.chunk_tokens or min(chunk_tokens, self.step_tokens or chunk_tokens)
        object.__setattr__(self, "step_tokens", self.step_tokens or max(step_tokens, chunk_tokens))
        object.__setattr__(self, "chunk_tokens", chunk_tokens)
        self.require(chunk_tokens=1, step_tokens=2, lanes=0, kv_floor=0)
        if self.lanes > 8:
            raise ValueError(f"--lanes is {self.lanes}; more than 8 connections to a peer only cost")
        if self.step_tokens < self.chunk_tokens:
            raise ValueError(f"--step-tokens is {self.step_tokens}; it must be at least --chunk-tokens, {self.chunk_tokens}")
