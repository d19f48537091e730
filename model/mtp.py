"""The multi-token-prediction layer: from the main model's streams at p and token p+1 it predicts token p+2 (spec B.11)."""

from __future__ import annotations

from torch import Tensor

from kernels.embed import embed
from kernels.gemm import linear
from kernels.norm import rms_norm
from kernels.ragged import Ragged
from kernels.rope import rotation
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

    def forward(self, streams: Tensor, next_tokens: Tensor, batch: Ragged, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """streams [T, n, hidden] of the batch's positions and the id that follows each [T] -> (MTP streams [T, n, hidden],
        logits float32 [T, vocab]). Row p is stored at position p. A second draft takes the MTP streams and the first
        draft at position p+1."""
        eps = self.config.rms_norm_eps
        token = linear(rms_norm(embed(next_tokens, self.main.embed, 1)[:, 0], self.token_norm, eps), self.token_projection)
        stream = linear(rms_norm(streams, self.stream_norm, eps).flatten(0, 1), self.stream_projection)
        turn = rotation(batch.positions, self.frequencies)
        streams = through(token[:, None] + stream.view_as(streams), self.block.sublayers(next_tokens, batch, turn, cache))
        return streams, self.main.vocabulary(self.hyper_head.forward(streams))
