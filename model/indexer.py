"""The lightning indexer of a CSA layer: weights (spec B.7)."""

from __future__ import annotations

from torch import Tensor

from kernels.gemm import LinearWeight, linear
from kernels.indexer import Entries, select_entries
from kernels.kvrows import index_queries
from kernels.quant import Quantised
from kernels.ragged import Ragged
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
        self.row = row
        self.wq = checkpoint.take_linear([f"{prefix}.wq_b"], [self.heads * self.dim], config.q_lora_rank)
        self.head_weights = LinearWeight.plain(
            checkpoint.take_plain(f"{prefix}.weights_proj.weight", self.heads, config.hidden_size)
        )
        self.compressor = Compressor(checkpoint, f"{prefix}.compressor", CSA, self.dim, row, frequencies)

    def forward(self, x: Tensor, latent: Tensor | Quantised, batch: Ragged, turn: Tensor, cache: LayerCache) -> Entries:
        """x [T, hidden], the query latent [T, q_lora] -> the entries of each token. Stores its keys first: an entry that
        this step closes can be chosen in this step."""
        assert cache.index_state is not None and cache.index_entries is not None
        self.compressor.forward(x, batch, cache.index_state, cache.index_entries)
        queries = linear(latent, self.wq).view(-1, self.heads, self.dim)
        queries, scales = index_queries(queries, turn, self.row)
        weights = linear(x, self.head_weights)
        factor = self.dim**-0.5 * self.heads**-0.5
        return select_entries(queries, scales, weights, batch, cache.index_entries, self.row, CSA, self.topk, factor)
