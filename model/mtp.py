"""The multi-token-prediction layer: from the main model's streams at p and token p+1 it predicts token p+2 (spec B.11)."""

from __future__ import annotations

from torch import Tensor

from kernels.embed import embed
from kernels.gemm import LinearWeight, linear
from kernels.launch import stage
from kernels.norm import rms_norm, rms_norm_quantise
from kernels.ragged import Ragged
from kernels.rope import rotation
from kernels.streams import join_streams
from model.cache import LayerCache
from model.config import WINDOW_ONLY
from model.hyper import HyperHead, through
from model.transformer import Block, Transformer, layer_frequencies
from model.weights import Checkpoint

PREFIX = "mtp.0"


class MTP:
    """A window-only block with its own ring, behind a projection of token and streams. Embedding and vocabulary are the
    main model's."""

    def __init__(self, checkpoint: Checkpoint, main: Transformer, kv_dtype: str) -> None:
        config = checkpoint.config
        hidden = config.hidden_size
        self.config, self.main = config, main
        self.token_norm = checkpoint.take_plain(f"{PREFIX}.enorm.weight", hidden)
        self.token_projection = checkpoint.take_linear([f"{PREFIX}.e_proj"], [hidden], hidden)
        self.stream_norm = checkpoint.take_plain(f"{PREFIX}.hnorm.weight", hidden)
        self.stream_projection = checkpoint.take_linear([f"{PREFIX}.h_proj"], [hidden], hidden)
        self.block = Block(checkpoint, PREFIX, WINDOW_ONLY, hashed=False, kv_dtype=kv_dtype)
        self.hyper_head = HyperHead(checkpoint, f"{PREFIX}.")
        self.frequencies = layer_frequencies(config, WINDOW_ONLY).to(checkpoint.device)

    def forward(self, streams: Tensor, next_tokens: Tensor, batch: Ragged, cache: LayerCache) -> Tensor:
        """streams [T, n, hidden] of the batch's positions and the id that follows each [T] -> MTP streams [T, n, hidden].
        Row p is stored at position p. A second draft takes the MTP streams and the first draft at position p+1."""
        with stage(f"{PREFIX}: token and streams"):
            turn = rotation(batch.positions, self.frequencies)
            joined = self._joined(streams, next_tokens)
        return through(joined, self.block.sublayers(next_tokens, batch, turn, cache))

    def logits(self, streams: Tensor) -> Tensor:
        """MTP streams [R, n, hidden] -> float32 [R, vocab]."""
        return self.main.vocabulary(self.hyper_head.forward(streams))

    def store(self, streams: Tensor, next_tokens: Tensor, batch: Ragged, cache: LayerCache) -> None:
        """Stores the rows that `forward` stores and does nothing else: a row depends on nothing but its own position's
        streams and next token. Enough where later drafts will look back and none is made now."""
        with stage(f"{PREFIX}: rows alone"):
            turn = rotation(batch.positions, self.frequencies)
            self.block.store(self._joined(streams, next_tokens), batch, turn, cache)

    def _joined(self, streams: Tensor, next_tokens: Tensor) -> Tensor:
        """What the block starts from, [T, n, hidden]."""
        embedded = embed(next_tokens, self.main.embed, 1).flatten(0, 1)
        token = self._projected(embedded, self.token_norm, self.token_projection)
        stream = self._projected(streams.flatten(0, 1), self.stream_norm, self.stream_projection)
        return join_streams(token, stream.view(streams.shape))

    def _projected(self, x: Tensor, norm: Tensor, projection: LinearWeight) -> Tensor:
        """x [R, hidden] -> [R, hidden]."""
        normed = (rms_norm_quantise if self.config.quantised else rms_norm)(x, norm, self.config.rms_norm_eps)
        return linear(normed, projection)
