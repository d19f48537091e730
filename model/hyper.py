"""The residual streams through the sublayers, and their end (spec B.2, B.10): weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import backend
from kernels.hyper import STREAMS, HyperWeights, Mixed, hyper_head, hyper_post, hyper_post_pre, hyper_pre
from kernels.launch import stage
from kernels.quant import Quantised
from kernels.workspace import flip
from model.weights import Checkpoint

Run = Callable[[Tensor, Tensor | Quantised], Tensor]  # (the normed input, the same as quantised weights see it) -> output


class HyperConnection:
    """How the streams become a sublayer's normed input, and take up its output."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, kind: str) -> None:
        config = checkpoint.config
        n, width = config.hc_mult, config.hc_mult * config.hidden_size
        if backend.active().triton and n != STREAMS:
            raise ValueError(
                f"config field hc_mult is {n}: the GPU kernels are written for {STREAMS} streams; use --device cpu"
            )
        self.name = f"{prefix}.{kind}"
        self.quantised, self.norm_eps = config.quantised, config.rms_norm_eps
        fn = checkpoint.take_float(f"{prefix}.hc_{kind}_fn", 2 * n + n * n, width)
        base = checkpoint.take_float(f"{prefix}.hc_{kind}_base", 2 * n + n * n)
        scale = checkpoint.take_float(f"{prefix}.hc_{kind}_scale", 3)  # for pre, post and comb
        scale = torch.cat((scale[0].expand(n), scale[1].expand(n), scale[2].expand(n * n)))
        self.weights = HyperWeights(_as_kept(fn), scale, base, n, config.hc_sinkhorn_iters, config.hc_eps)
        self.norm = checkpoint.take_plain(f"{prefix}.{kind}_norm.weight", config.hidden_size)

    def first(self, streams: Tensor) -> Mixed:
        return hyper_pre(streams, self.weights, self.norm, self.norm_eps, self.quantised)

    def after(self, out: Tensor, streams: Tensor, mixed: Mixed) -> tuple[Tensor, Mixed]:
        """Another sublayer's output and what it started from -> the streams with it, and the input of this one."""
        return hyper_post_pre(out, streams, mixed.post, mixed.comb, self.weights, self.norm, self.norm_eps, self.quantised)


def through(streams: Tensor, sublayers: Sequence[tuple[HyperConnection, Run]]) -> Tensor:
    """streams [T, n, hidden] -> the streams after the sublayers. On a GPU they are changed in place."""
    connections = [connection for connection, _ in sublayers]
    flip()
    with stage(f"{connections[0].name}: streams in"):
        mixed = connections[0].first(streams)
    for number, (connection, run) in enumerate(sublayers):
        with stage(connection.name):
            out = run(mixed.x, mixed.x if mixed.quantised is None else mixed.quantised)
        flip()
        if number + 1 < len(sublayers):
            following = connections[number + 1]
            with stage(f"{following.name}: streams in"):
                streams, mixed = following.after(out, streams, mixed)
    with stage(f"{connections[-1].name}: streams out"):
        return hyper_post(out, streams, mixed.post, mixed.comb)


class HyperHead:
    """The streams as one normed vector, ready for the vocabulary. `prefix` is "" for the main model, "mtp.0." for MTP."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        config = checkpoint.config
        n = config.hc_mult
        self.norm_eps = config.rms_norm_eps
        fn = checkpoint.take_float(f"{prefix}hc_head_fn", n, n * config.hidden_size)
        base = checkpoint.take_float(f"{prefix}hc_head_base", n)
        scale = checkpoint.take_float(f"{prefix}hc_head_scale", 1).expand(n).contiguous()
        self.weights = HyperWeights(_as_kept(fn), scale, base, n, 0, config.hc_eps)
        self.norm = checkpoint.take_plain(f"{prefix}norm.weight", config.hidden_size)

    def forward(self, streams: Tensor) -> Tensor:
        """streams [R, n, hidden] -> [R, hidden]."""
        return hyper_head(streams, self.weights, self.norm, self.norm_eps)


def _as_kept(fn: Tensor) -> Tensor:
    return fn if backend.active().triton else fn.double()
