"""The lightning indexer of a CSA layer: weights (spec B.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gemm import linear
from kernels.indexer import select_entries
from kernels.ragged import Ragged
from kernels.rope import rope
from kernels.rows import IndexRow
from model.cache import LayerCache
from model.compressor import Compressor
from model.config import CSA
from model.weights import Checkpoint


class Indexer:
    """Chooses the compressed rows of each token; all heads of the attention share the choice."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, row: IndexRow, frequencies: Tensor) -> None:
        config = checkpoint.config
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.row, self.quantised = row, config.quantised
        self.wq = checkpoint.take_linear(f"{prefix}.wq_b", self.heads * self.dim, config.q_lora_rank)
        self.head_weights = checkpoint.take_plain(f"{prefix}.weights_proj.weight", self.heads, config.hidden_size)
        self.compressor = Compressor(checkpoint, f"{prefix}.compressor", CSA, self.dim, row, frequencies)

    def forward(self, x: Tensor, query_latent: Tensor, batch: Ragged, turn: Tensor, cache: LayerCache) -> Tensor:
        """x [T, hidden], query_latent [T, q_lora] -> entries int64 [T, K], -1 where there is none. Stores its keys first:
        an entry that this step closes can be chosen in this step."""
        assert cache.index_state is not None and cache.index_entries is not None
        self.compressor.forward(x, batch, cache.index_state, cache.index_entries)
        queries = torch.unflatten(linear(query_latent, self.wq, self.quantised), 1, (self.heads, self.dim))
        queries = self.row.round(rope(queries, turn))
        weights = linear(x, self.head_weights, fp8_activation=False) * (self.dim**-0.5 * self.heads**-0.5)
        return select_entries(queries, weights, batch, cache.index_entries, self.row, CSA, self.topk)
