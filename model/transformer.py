"""The main model: embedding, layers, vocabulary (spec B.1, B.3, B.10)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gemm import linear
from kernels.ragged import Ragged
from kernels.rope import plain_frequencies, rotation, yarn_frequencies
from model.attention import Attention
from model.batch import Batch
from model.cache import LayerCache
from model.config import WINDOW_ONLY, ModelConfig
from model.hyper import HyperConnection, HyperHead
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

    def __init__(self, checkpoint: Checkpoint, prefix: str, ratio: int, hashed: bool, kv_dtype: str) -> None:
        frequencies = layer_frequencies(checkpoint.config, ratio).to(checkpoint.device)
        self.ratio = ratio
        self.attention_streams = HyperConnection(checkpoint, prefix, "attn")
        self.attention = Attention(checkpoint, f"{prefix}.attn", ratio, kv_dtype, frequencies)
        self.moe_streams = HyperConnection(checkpoint, prefix, "ffn")
        self.moe = MoE(checkpoint, f"{prefix}.ffn", hashed)

    def forward(self, streams: Tensor, tokens: Tensor, batch: Ragged, turn: Tensor, cache: LayerCache) -> Tensor:
        """streams [T, n, hidden] and the token ids of the same rows -> the streams after the layer."""
        streams = self.attention_streams.around(lambda x: self.attention.forward(x, batch, turn, cache), streams)
        return self.moe_streams.around(lambda x: self.moe.forward(x, tokens), streams)


class Transformer:
    def __init__(self, checkpoint: Checkpoint, kv_dtype: str) -> None:
        config = checkpoint.config
        self.config = config
        self.dtype = torch.bfloat16 if config.quantised else torch.float32
        self.embed = checkpoint.take_plain("embed.weight", config.vocab_size, config.hidden_size).to(self.dtype)
        self.layers = [
            Block(checkpoint, f"layers.{layer}", config.ratio(layer), layer < config.num_hash_layers, kv_dtype)
            for layer in range(config.num_hidden_layers)
        ]
        self.hyper_head = HyperHead(checkpoint, "")
        self.head = checkpoint.take_plain("head.weight", config.vocab_size, config.hidden_size)
        self.frequencies = {
            ratio: layer_frequencies(config, ratio).to(checkpoint.device) for ratio in {*config.compress_ratios}
        }

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """The streams after the last layer, [T, n, hidden]; every layer's KV of the batch is in `caches` afterwards."""
        streams = self.embed[batch.tokens][:, None].repeat(1, self.config.hc_mult, 1)
        turns = {ratio: rotation(batch.positions, frequencies) for ratio, frequencies in self.frequencies.items()}
        for layer, cache in zip(self.layers, caches, strict=True):
            streams = layer.forward(streams, batch.tokens, batch, turns[layer.ratio], cache)
        return streams

    def logits(self, streams: Tensor) -> Tensor:
        """streams [R, n, hidden] -> float32 [R, vocab]."""
        return self.vocabulary(self.hyper_head.forward(streams))

    def vocabulary(self, x: Tensor) -> Tensor:
        """x [R, hidden] (normed) -> float32 [R, vocab]; MTP shares it."""
        return linear(x, self.head, fp8_activation=False, out_dtype=torch.float32)
