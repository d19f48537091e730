"""The attention of a layer, whichever of the three kinds it is: window only, CSA, HCA (spec B.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.gemm import grouped_linear, linear
from kernels.indexer import every_entry
from kernels.norm import query_norm, rms_norm
from kernels.ragged import Ragged, store_ring
from kernels.rope import rope
from model.cache import LayerCache, index_row, kv_row
from model.compressor import Compressor
from model.config import CSA, WINDOW_ONLY
from model.indexer import Indexer
from model.weights import Checkpoint


class Attention:
    """Queries of all heads, one KV row a token, and the grouped output projection."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, ratio: int, kv_dtype: str, frequencies: Tensor) -> None:
        config = checkpoint.config
        self.config, self.ratio = config, ratio
        self.row = kv_row(config, kv_dtype)
        hidden, heads, dim, rank = config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank
        wq_a = checkpoint.take_linear(f"{prefix}.wq_a", rank, hidden)
        self.wq_a_kv = torch.cat((wq_a, checkpoint.take_linear(f"{prefix}.wkv", dim, hidden)))
        self.wq_b = checkpoint.take_linear(f"{prefix}.wq_b", heads * dim, rank)
        self.q_norm = checkpoint.take_plain(f"{prefix}.q_norm.weight", rank)
        self.kv_norm = checkpoint.take_plain(f"{prefix}.kv_norm.weight", dim)
        self.sinks = checkpoint.take_float(f"{prefix}.attn_sink", heads)
        self.wo_a = self._take_wo_a(checkpoint, f"{prefix}.wo_a")
        self.wo_b = checkpoint.take_linear(f"{prefix}.wo_b", hidden, config.o_groups * config.o_lora_rank)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if ratio != WINDOW_ONLY:
            self.compressor = Compressor(checkpoint, f"{prefix}.compressor", ratio, dim, self.row, frequencies)
        if ratio == CSA:
            self.indexer = Indexer(checkpoint, f"{prefix}.indexer", index_row(config, kv_dtype), frequencies)

    def forward(self, x: Tensor, batch: Ragged, turn: Tensor, cache: LayerCache) -> Tensor:
        """x [T, hidden] (normed) -> [T, hidden]. The chunk's rows join the window ring last, when history has been read."""
        c, quantised, eps = self.config, self.config.quantised, self.config.rms_norm_eps
        latent, kv = torch.split(linear(x, self.wq_a_kv, quantised), [c.q_lora_rank, c.head_dim], -1)
        latent = rms_norm(latent, self.q_norm, eps)
        q = torch.unflatten(linear(latent, self.wq_b, quantised), 1, (c.num_attention_heads, c.head_dim))
        q = rope(query_norm(q, eps), turn)
        new_rows = self.row.pack(rope(rms_norm(kv, self.kv_norm, eps), turn))

        entries = self._compressed_entries(x, latent, batch, turn, cache)
        out = sparse_attention(
            q, new_rows, batch, cache.window, self.row, c.sliding_window, self.sinks, turn, cache.entries, entries
        )
        store_ring(batch, cache.window, new_rows)
        grouped = grouped_linear(torch.unflatten(out, 1, (c.o_groups, -1)).flatten(2), self.wo_a)
        return linear(grouped.flatten(1), self.wo_b, quantised)

    def _compressed_entries(self, x: Tensor, latent: Tensor, batch: Ragged, turn: Tensor, cache: LayerCache) -> Tensor | None:
        """Compresses what this step closes, and says which compressed rows each token attends to."""
        if self.compressor is None:
            return None
        assert cache.state is not None and cache.entries is not None
        self.compressor.forward(x, batch, cache.state, cache.entries)
        if self.indexer is None:
            return every_entry(batch, self.ratio)
        return self.indexer.forward(x, latent, batch, turn, cache)

    def _take_wo_a(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """[groups, group's heads * dim, o_lora] float64. The released kernels hold it in bf16 and do not round its input."""
        c = self.config
        wo_a = checkpoint.take_linear(name, c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups)
        if c.quantised:
            wo_a = wo_a.bfloat16().double()
        return torch.unflatten(wo_a, 0, (c.o_groups, c.o_lora_rank)).transpose(1, 2).contiguous()
