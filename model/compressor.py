"""The compressor of a CSA or HCA layer, and the small one inside its indexer: weights (spec B.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.compress import CompressorWeights, compress
from kernels.gemm import LinearWeight, linear
from kernels.ragged import Ragged
from kernels.rows import IndexRow, KVRow
from model.config import CSA
from model.weights import Checkpoint


class Compressor:
    """Turns every `ratio` tokens into one row of `width` channels. Nothing in it is quantised; its state is float32."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, ratio: int, width: int, row: KVRow | IndexRow, frequencies: Tensor
    ) -> None:
        config, overlap = checkpoint.config, ratio == CSA
        channels = 2 * width if overlap else width
        values = checkpoint.take_plain(f"{prefix}.wkv.weight", channels, config.hidden_size)
        scores = checkpoint.take_plain(f"{prefix}.wgate.weight", channels, config.hidden_size)
        self.projection = LinearWeight.plain(torch.cat((values, scores)))
        self.row = row
        self.weights = CompressorWeights(
            ratio,
            overlap,
            checkpoint.take_float(f"{prefix}.ape", ratio, channels),
            checkpoint.take_plain(f"{prefix}.norm.weight", width),
            config.rms_norm_eps,
            frequencies,
        )

    def forward(self, x: Tensor, batch: Ragged, ring: Tensor, pages: Tensor) -> None:
        """x [T, hidden]: closed windows go to `pages`, the tokens' state rows to `ring` (kernels/compress.py)."""
        projected = linear(x, self.projection, out_dtype=torch.float32)
        compress(projected, self.weights, batch, ring, pages, self.row, x.dtype)
