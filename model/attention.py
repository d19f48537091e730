"""The attention of a layer, whichever of the three kinds it is: window only, CSA, HCA (spec B.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.gemm import grouped_linear, grouped_linear_quantised, linear
from kernels.indexer import Entries
from kernels.kvrows import kv_rows
from kernels.norm import query_norm_rope, rms_norm, rms_norm_quantise
from kernels.quant import Quantised
from kernels.ragged import Ragged, store_ring
from model.cache import LayerCache, index_row, kv_row
from model.compressor import Compressor
from model.config import CSA, HCA, WINDOW_ONLY
from model.indexer import Indexer
from model.weights import Checkpoint


class Attention:
    """Queries of all heads, one KV row a token, and the grouped output projection."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, ratio: int, kv_dtype: str, index_keys: str, frequencies: Tensor
    ) -> None:
        config = checkpoint.config
        self.config, self.ratio = config, ratio
        self.row = kv_row(config, kv_dtype)
        hidden, heads, dim, rank = config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank
        self.wq_a_kv = checkpoint.take_linear([f"{prefix}.wq_a", f"{prefix}.wkv"], [rank, dim], hidden)
        self.wq_b = checkpoint.take_linear([f"{prefix}.wq_b"], [heads * dim], rank)
        self.q_norm = checkpoint.take_plain(f"{prefix}.q_norm.weight", rank)
        self.kv_norm = checkpoint.take_plain(f"{prefix}.kv_norm.weight", dim)
        self.sinks = checkpoint.take_float(f"{prefix}.attn_sink", heads)
        self.wo_a = checkpoint.take_grouped(
            f"{prefix}.wo_a", config.o_groups, config.o_lora_rank, heads * dim // config.o_groups
        )
        self.wo_b = checkpoint.take_linear([f"{prefix}.wo_b"], [hidden], config.o_groups * config.o_lora_rank)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if ratio != WINDOW_ONLY:
            self.compressor = Compressor(checkpoint, f"{prefix}.compressor", ratio, dim, self.row, frequencies)
        if ratio == CSA:
            self.indexer = Indexer(checkpoint, f"{prefix}.indexer", index_row(config, kv_dtype, index_keys), frequencies)

    def forward(self, x: Tensor, rounded: Tensor | Quantised, batch: Ragged, turn: Tensor, cache: LayerCache) -> Tensor:
        """x [T, hidden] (normed), and the same as quantised weights see it -> [T, hidden].

        A decode step's rows join the window ring before the ring is read, a chunk's when its history has been read.
        """
        c = self.config
        projected, kv = self._projected(rounded)
        latent = self._latent(projected)
        q = torch.unflatten(linear(latent, self.wq_b), 1, (c.num_attention_heads, c.head_dim))
        q = query_norm_rope(q, turn, c.rms_norm_eps)
        new_rows = self._new_rows(kv, batch, turn, cache)

        entries = self._compressed_entries(x, latent, batch, turn, cache)
        out = sparse_attention(
            q, new_rows, batch, cache.window, self.row, c.sliding_window, self.sinks, turn, cache.entries, entries
        )
        if not batch.is_decode:
            store_ring(batch, cache.window, new_rows)
        by_group = out.view(len(out), c.o_groups, -1)
        if c.quantised:
            return linear(grouped_linear_quantised(by_group, self.wo_a), self.wo_b)
        return linear(grouped_linear(by_group, self.wo_a).flatten(1), self.wo_b)

    def store(self, rounded: Tensor | Quantised, batch: Ragged, turn: Tensor, cache: LayerCache) -> None:
        """Only the window rows that `forward` stores."""
        _, kv = self._projected(rounded)
        new_rows = self._new_rows(kv, batch, turn, cache)
        if not batch.is_decode:
            store_ring(batch, cache.window, new_rows)

    def _projected(self, rounded: Tensor | Quantised) -> tuple[Tensor, Tensor]:
        """The queries' latent before its norm [T, q_lora_rank], and the KV before its own [T, head_dim]."""
        projected, kv = torch.split(linear(rounded, self.wq_a_kv), [self.config.q_lora_rank, self.config.head_dim], -1)
        return projected, kv

    def _new_rows(self, kv: Tensor, batch: Ragged, turn: Tensor, cache: LayerCache) -> Tensor:
        """The batch's packed rows, uint8 [T, row]; those of a decode step are in the ring too."""
        ring = cache.window if batch.is_decode else None
        return kv_rows(kv, self.kv_norm, self.config.rms_norm_eps, turn, self.row, batch, ring)

    def _latent(self, projected: Tensor) -> Tensor | Quantised:
        if self.config.quantised:
            return rms_norm_quantise(projected, self.q_norm, self.config.rms_norm_eps)
        return rms_norm(projected, self.q_norm, self.config.rms_norm_eps)

    def _compressed_entries(
        self, x: Tensor, latent: Tensor | Quantised, batch: Ragged, turn: Tensor, cache: LayerCache
    ) -> Entries | int | None:
        """Compresses what this step closes, and says which compressed rows each token attends to."""
        if self.compressor is None:
            return None
        assert cache.state is not None and cache.entries is not None
        self.compressor.forward(x, batch, cache.state, cache.entries)
        if self.indexer is None:
            return HCA
        return self.indexer.forward(x, latent, batch, turn, cache)
