"""The mixture-of-experts sublayer: routed experts, chosen by score or by token id, and the shared one (spec B.8)."""

from __future__ import annotations

from torch import Tensor

from kernels.experts import experts, route, swiglu
from kernels.gemm import linear
from kernels.quant import Quantised
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
            shape = (config.vocab_size, config.num_experts_per_tok)
            self.experts_of_token = checkpoint.take_ids(f"{prefix}.gate.tid2eid", shape, count)
        else:
            self.bias = checkpoint.take_float(f"{prefix}.gate.bias", count)
        shared = f"{prefix}.shared_experts"
        self.shared_w13 = checkpoint.take_linear([f"{shared}.w1", f"{shared}.w3"], [inner, inner], hidden)  # gate over up
        self.shared_w2 = checkpoint.take_linear([f"{shared}.w2"], [hidden], inner)
        self.experts = checkpoint.take_experts(f"{prefix}.experts", count, inner, hidden)

    def forward(self, x: Tensor, rounded: Tensor | Quantised, tokens: Tensor) -> Tensor:
        """x [T, hidden], the same as quantised weights see it, the ids of the same rows [T] -> [T, hidden]."""
        c = self.config
        ids, weights = route(
            x, self.gate, self.bias, self.experts_of_token, tokens, c.num_experts_per_tok, c.routed_scaling_factor
        )
        hidden = swiglu(linear(rounded, self.shared_w13), c.swiglu_limit, c.quantised)
        return experts(rounded, self.experts, ids, weights, c.swiglu_limit, linear(hidden, self.shared_w2))
