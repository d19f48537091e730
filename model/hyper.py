"""The residual streams around a sublayer, and their end (spec B.2, B.10): weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.hyper import hyper_head, hyper_post, hyper_pre
from kernels.norm import rms_norm
from model.weights import Checkpoint


class HyperConnection:
    """Mixes the streams into a sublayer's input, norms it, and mixes the sublayer's output back."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, kind: str) -> None:
        config = checkpoint.config
        n, width = config.hc_mult, config.hc_mult * config.hidden_size
        self.config = config
        self.fn = checkpoint.take_float(f"{prefix}.hc_{kind}_fn", 2 * n + n * n, width).double()
        self.base = checkpoint.take_float(f"{prefix}.hc_{kind}_base", 2 * n + n * n)
        scale = checkpoint.take_float(f"{prefix}.hc_{kind}_scale", 3)  # for pre, post and comb
        self.scale = torch.cat((scale[0].expand(n), scale[1].expand(n), scale[2].expand(n * n)))
        self.norm = checkpoint.take_plain(f"{prefix}.{kind}_norm.weight", config.hidden_size)

    def around(self, sublayer: Callable[[Tensor], Tensor], streams: Tensor) -> Tensor:
        """streams [T, n, hidden] -> the streams after `sublayer`."""
        c = self.config
        x, post, comb = hyper_pre(streams, self.fn, self.scale, self.base, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)
        return hyper_post(sublayer(rms_norm(x, self.norm, c.rms_norm_eps)), streams, post, comb)


class HyperHead:
    """The streams as one normed vector, ready for the vocabulary. `prefix` is "" for the main model, "mtp.0." for MTP."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        config = checkpoint.config
        n = config.hc_mult
        self.config = config
        self.fn = checkpoint.take_float(f"{prefix}hc_head_fn", n, n * config.hidden_size).double()
        self.base = checkpoint.take_float(f"{prefix}hc_head_base", n)
        self.scale = checkpoint.take_float(f"{prefix}hc_head_scale", 1)
        self.norm = checkpoint.take_plain(f"{prefix}norm.weight", config.hidden_size)

    def forward(self, streams: Tensor) -> Tensor:
        """streams [R, n, hidden] -> [R, hidden]."""
        c = self.config
        return rms_norm(
            hyper_head(streams, self.fn, self.scale, self.base, c.hc_eps, c.rms_norm_eps), self.norm, c.rms_norm_eps
        )
