"""The bytes that a decode step cannot avoid reading, and how fast this device reads: together its floor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.measure import measure_limits
from model.cache import index_row, kv_row
from model.config import CSA, HCA, ModelConfig
from scripts.random_checkpoint import entries_of

READ_BYTES = 64 << 20  # where there is no GPU
READ_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class StepBytes:
    """weights: of all layers but the experts'; experts: those that are asked, once each; rows: KV rows and indexer keys;
    head: the vocabulary matrix. Not in it: the MTP layer and, because small, activations, embeddings, compressor states and
    page tables."""

    weights: int
    experts: int
    rows: int
    head: int

    @property
    def forward(self) -> int:
        """Without the vocabulary, as other engines' graphs are."""
        return self.weights + self.experts + self.rows

    @property
    def step(self) -> int:
        return self.forward + self.head


def step_bytes(
    config: ModelConfig, contexts: Sequence[int], experts_asked: Sequence[int], index_keys: str = "auto"
) -> StepBytes:
    """For sequences of so many tokens, the new one included, and so many different experts in each layer."""
    sizes = {name: entry.last for name, entry in entries_of(config).items()}
    layers = {name: size for name, size in sizes.items() if name.startswith("layers.") and "tid2eid" not in name}
    one_expert = sum(size for name, size in layers.items() if name.startswith("layers.0.ffn.experts.0."))
    rows = sum(
        _row_bytes(config, config.ratio(layer), tokens, index_keys)
        for layer in range(config.num_hidden_layers)
        for tokens in contexts
    )
    return StepBytes(
        weights=sum(size for name, size in layers.items() if ".experts." not in name),
        experts=one_expert * sum(experts_asked),
        rows=rows,
        head=sizes["head.weight"],
    )


def _row_bytes(config: ModelConfig, ratio: int, tokens: int, index_keys: str) -> int:
    """What one layer reads of one sequence: the window, and the chosen or all compressed rows. Keys are scored where there are
    more than may be chosen."""
    row, key = kv_row(config, "auto").row_bytes, index_row(config, "auto", index_keys).row_bytes
    window = min(tokens, config.sliding_window) * row
    match ratio:
        case 4:
            entries = tokens // CSA
            scored = entries if entries > config.index_topk else 0
            return window + min(entries, config.index_topk) * row + scored * key
        case 128:
            return window + tokens // HCA * row
    return window


def read_gb_per_s(device: torch.device) -> float:
    """On a GPU as scripts/bench_kernels.py measures it."""
    if device.type == "cuda":
        rate = measure_limits().read_gb_per_s
        torch.cuda.empty_cache()
        return rate
    block = torch.ones(READ_BYTES // 4)
    best_s = min(_seconds(block) for _ in range(READ_ROUNDS))
    return block.nbytes / best_s / 1e9


def _seconds(block: torch.Tensor) -> float:
    begin_s = time.perf_counter()
    block.sum()
    return time.perf_counter() - begin_s
