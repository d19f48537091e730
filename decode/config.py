"""How a decode worker is started; the command line is made from these fields."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.sequences import MOST_DRAFTS
from wire.options import option
from wire.worker import WorkerConfig


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    """A decode worker: takes KV over from prefill workers and generates the tokens."""

    max_batch: int = option(64, help="sequences in one step; with more running they take turns")
    capture: str = option(
        "on",
        choices=("on", "off", "check"),
        help="CUDA graphs of the steps; check: tests every stage of them, prints a table and ends. A CPU has none",
    )

    batch_invariant: str = option(
        "on",
        choices=("on", "off"),
        help="on a GPU a text is the same whatever it is batched with, and with guesses as without, in steps of up to 256 rows;"
        " off: faster in small batches, and where two tokens are nearly as likely texts may part",
    )
    speculate: int = option(
        0, help="most tokens that the checkpoint's MTP layer guesses ahead in a step; texts stay the same. 0: none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(max_batch=1, speculate=0)
        if self.speculate > MOST_DRAFTS:
            raise ValueError(f"--speculate is {self.speculate}; at most {MOST_DRAFTS} tokens can be guessed ahead")
        if self.capture == "check" and self.device != "cuda":
            raise ValueError("--capture check captures the steps of a GPU; it needs --device cuda")
