"""The mixture-of-experts sublayer: routed experts, chosen by score or by token id, and the shared one (spec B.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.experts import experts, route, swiglu
from kernels.gemm import linear
from model.weights import Checkpoint


class MoE:
    def __init__(self, checkpoint: Checkpoint, prefix: str, hashed: bool) -> None:
        config = checkpoint.config
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.config = config
        self.gate = checkpoint.take_plain(f"{prefix}.gate.weight", count, hidden)
        self.bias: Tensor | None = None
        self.experts_of_token: Tensor | None = None
        if hashed:
            table = checkpoint.take(f"{prefix}.gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), "I64").clone()
            if not bool(((table >= 0) & (table < count)).all()):
                raise ValueError(f"tensor {prefix}.gate.tid2eid names an expert outside 0..{count - 1}")
            self.experts_of_token = table
        else:
            self.bias = checkpoint.take_float(f"{prefix}.gate.bias", count)
        self.shared_w13 = self._gate_up(checkpoint, f"{prefix}.shared_experts", routed=False)
        self.shared_w2 = checkpoint.take_linear(f"{prefix}.shared_experts.w2", hidden, inner)
        names = [f"{prefix}.experts.{number}" for number in range(count)]
        self.w13 = torch.stack([self._gate_up(checkpoint, name, routed=True).T for name in names])
        self.w2 = torch.stack([checkpoint.take_expert(f"{name}.w2", hidden, inner).T for name in names])

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [T, hidden], the ids of the same rows [T] -> [T, hidden]."""
        c = self.config
        fixed = None if self.experts_of_token is None else self.experts_of_token[tokens]
        ids, weights = route(x, self.gate, self.bias, fixed, c.num_experts_per_tok, c.routed_scaling_factor)
        routed = experts(x, self.w13, self.w2, ids, weights, c.swiglu_limit, c.quantised)
        hidden = swiglu(linear(x, self.shared_w13, c.quantised), c.swiglu_limit)
        return (routed + linear(hidden, self.shared_w2, c.quantised)).to(x.dtype)

    def _gate_up(self, checkpoint: Checkpoint, name: str, routed: bool) -> Tensor:
        """w1 (gate) over w3 (up): float64 [2 * inner, hidden]."""
        c, take = self.config, checkpoint.take_expert if routed else checkpoint.take_linear
        inner, hidden = c.moe_intermediate_size, c.hidden_size
        return torch.cat((take(f"{name}.w1", inner, hidden), take(f"{name}.w3", inner, hidden)))
