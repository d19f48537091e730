"""The main model: embedding, layers, vocabulary (spec B.1, B.3, B.10)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.embed import embed
from kernels.gemm import LinearWeight, linear
from kernels.launch import stage
from kernels.ragged import Ragged
from kernels.rope import plain_frequencies, rotation, yarn_frequencies
from model.attention import Attention
from model.batch import Batch
from model.cache import LayerCache
from model.config import WINDOW_ONLY, ModelConfig
from model.hyper import HyperConnection, HyperHead, Run, through
from model.moe import MoE
from model.weights import Checkpoint


def layer_frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """The rotary table of everything in a layer: plain in window-only layers, YaRN on the other theta elsewhere (B.4)."""
    if ratio == WINDOW_ONLY:
        return plain_frequencies(config.qk_rope_head_dim, config.rope_theta)
    yarn = config.rope_scaling
    return yarn_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        yarn.factor,
        yarn.original_max_position_embeddings,
        yarn.beta_fast,
        yarn.beta_slow,
    )


class Block:
    """One decoder layer: attention, then experts, each between hyper-connections."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, ratio: int, hashed: bool, kv_dtype: str, index_keys: str = "auto"
    ) -> None:
        frequencies = layer_frequencies(checkpoint.config, ratio).to(checkpoint.device)
        self.ratio = ratio
        self.attention_streams = HyperConnection(checkpoint, prefix, "attn")
        self.attention = Attention(checkpoint, f"{prefix}.attn", ratio, kv_dtype, index_keys, frequencies)
        self.moe_streams = HyperConnection(checkpoint, prefix, "ffn")
        self.moe = MoE(checkpoint, f"{prefix}.ffn", hashed)

    def sublayers(self, tokens: Tensor, batch: Ragged, turn: Tensor, cache: LayerCache) -> list[tuple[HyperConnection, Run]]:
        """Attention, then experts, for a batch and the token ids of its rows."""
        return [
            (self.attention_streams, lambda x, rounded: self.attention.forward(x, rounded, batch, turn, cache)),
            (self.moe_streams, lambda x, rounded: self.moe.forward(x, rounded, tokens)),
        ]

    def store(self, streams: Tensor, batch: Ragged, turn: Tensor, cache: LayerCache) -> None:
        """Only the window rows of a batch: no attention, no experts."""
        mixed = self.attention_streams.first(streams)
        self.attention.store(mixed.x if mixed.quantised is None else mixed.quantised, batch, turn, cache)


class Transformer:
    def __init__(self, checkpoint: Checkpoint, kv_dtype: str, index_keys: str = "auto") -> None:
        config = checkpoint.config
        self.config = config
        self.dtype = torch.bfloat16 if config.quantised else torch.float32
        self.embed = checkpoint.take_plain("embed.weight", config.vocab_size, config.hidden_size).to(self.dtype)
        self.layers = [
            Block(checkpoint, f"layers.{layer}", config.ratio(layer), layer < config.num_hash_layers, kv_dtype, index_keys)
            for layer in range(config.num_hidden_layers)
        ]
        self.hyper_head = HyperHead(checkpoint, "")
        self.head = LinearWeight.plain(checkpoint.take_plain("head.weight", config.vocab_size, config.hidden_size))
        self.frequencies = {
            ratio != WINDOW_ONLY: layer_frequencies(config, ratio).to(checkpoint.device) for ratio in {*config.compress_ratios}
        }

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """The streams after the last layer, [T, n, hidden]; every layer's KV of the batch is in `caches` afterwards."""
        with stage("embed"):
            streams = embed(batch.tokens, self.embed, self.config.hc_mult)
            turns = {long: rotation(batch.positions, frequencies) for long, frequencies in self.frequencies.items()}
        sublayers: list[tuple[HyperConnection, Run]] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            sublayers += layer.sublayers(batch.tokens, batch, turns[layer.ratio != WINDOW_ONLY], cache)
        return through(streams, sublayers)

    def logits(self, streams: Tensor) -> Tensor:
        """streams [R, n, hidden] -> float32 [R, vocab]."""
        with stage("head"):
            return self.vocabulary(self.hyper_head.forward(streams))

    def vocabulary(self, x: Tensor) -> Tensor:
        """x [R, hidden] (normed) -> float32 [R, vocab]; MTP shares it."""
        return linear(x, self.head, out_dtype=torch.float32)
