"""DeepSeek-V4 for training: dense, differentiable, rounded where serving rounds (FP8 and FP4 with straight-through gradients).

Tensors are [B, T, ...] or, where only tokens matter, [N, ...] with N = B * T. Parameters carry the released names, so saving
them is rounding and writing. Section numbers are those of the model's specification, as in kernels/ and model/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quant import KV_BLOCK, hadamard_matrix
from kernels.rope import plain_frequencies, yarn_frequencies
from scripts.tiny_rounding import fp4, fp8, fp8_weight

Parameters = dict[str, Tensor]
GRADIENT_SWEEPS = 3  # of the 20 Sinkhorn iterations, how many the gradient goes through: they converge much faster

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": 32,
    "initializer_range": 0.02,
    "max_position_embeddings": 16384,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 1024,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 1824,
}
D, H, HEAD, ROPE = 256, 4, 128, 64
STREAMS, EPS = 4, 1e-6
EXPERTS, CHOSEN, INNER = 8, 2, 128
INDEX_HEADS, INDEX_DIM = 8, 128
WINDOW, TOPK, GROUPS = 128, 32, 2
RATIOS: list[int] = CONFIG["compress_ratios"]
HASH_LAYERS: int = CONFIG["num_hash_layers"]
ROUTE_FACTOR: float = CONFIG["routed_scaling_factor"]
EACH_TOKEN = ("attn_norm.", "ffn_norm.", "hc_attn_", "hc_ffn_", "attn.w", "attn.q_norm.", "attn.kv_norm.", "ffn.")
BLOCKS = [f"layers.{i}." for i in range(len(RATIOS) - 1)] + ["mtp.0."]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """An FP8 linear layer: activation and weight rounded, bf16 out."""
    return functional.linear(fp8(x), fp8_weight(weight))


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (normed if weight is None else normed * weight).bfloat16()


# ---- rotary embedding (B.4)


def rotary_tables(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(plain, compressed) float32 [length, ROPE/2, 2]: cosine and sine of every position."""
    scaling = CONFIG["rope_scaling"]
    plain = plain_frequencies(ROPE, CONFIG["rope_theta"])
    stretched = yarn_frequencies(
        ROPE,
        CONFIG["compress_rope_theta"],
        scaling["factor"],
        scaling["original_max_position_embeddings"],
        scaling["beta_fast"],
        scaling["beta_slow"],
    )
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    tables = [torch.stack(((positions * f).cos(), (positions * f).sin()), -1).to(device) for f in (plain, stretched)]
    return tables[0], tables[1]


def rotate(x: Tensor, turn: Tensor, back: bool = False) -> Tensor:
    """The last ROPE channels of x [..., C] turned by `turn` [..., ROPE/2, 2] (broadcast), bf16."""
    even, odd = torch.unflatten(x[..., -ROPE:].float(), -1, (-1, 2)).unbind(-1)
    cos, sin = turn.unbind(-1)
    sin = -sin if back else sin
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-ROPE], turned.bfloat16()), -1)


def round_row(kv: Tensor) -> Tensor:
    """A KV row as the cache keeps it: FP8 in blocks of 64 but for the rotary channels."""
    return torch.cat((fp8(kv[..., :-ROPE], KV_BLOCK), kv[..., -ROPE:]), -1)


def index_row(x: Tensor, hadamard: Tensor) -> Tensor:
    """Indexer queries and keys [..., INDEX_DIM]: Hadamard, then FP4 (B.7)."""
    return fp4(x @ hadamard)


# ---- hyper-connections (B.2)


def hyper_pre(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """streams [N, 4, D] -> sublayer input [N, D], post [N, 4], comb [N, 4, 4]."""
    flat = streams.float().flatten(1)
    mixes = functional.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(mixes[:, :STREAMS] * scale[0] + base[:STREAMS]) + EPS
    post = 2 * torch.sigmoid(mixes[:, STREAMS : 2 * STREAMS] * scale[1] + base[STREAMS : 2 * STREAMS])
    comb = torch.unflatten(mixes[:, 2 * STREAMS :] * scale[2] + base[2 * STREAMS :], -1, (STREAMS, STREAMS))
    return mix(streams, pre), post, doubly_stochastic(torch.softmax(comb, -1) + EPS)


def doubly_stochastic(first: Tensor) -> Tensor:
    """Sinkhorn of [N, 4, 4]: columns, then rows and columns in turn, 20 times. Gradient of the last sweeps only."""
    iterations = CONFIG["hc_sinkhorn_iters"] - 1 - GRADIENT_SWEEPS
    with torch.no_grad():
        near = first / (first.sum(-2, keepdim=True) + EPS)
        near = sweeps(near, iterations) / first
    return sweeps(first * near, GRADIENT_SWEEPS)


def sweeps(comb: Tensor, count: int) -> Tensor:
    for _ in range(count):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return comb


def mix(streams: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of streams [N, 4, D] by [N, 4], bf16."""
    total = streams[:, 0].float() * weights[:, 0, None]
    for j in range(1, STREAMS):
        total = total + streams[:, j].float() * weights[:, j, None]
    return total.bfloat16()


def hyper_post(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """S'_k = post_k * out + sum_j comb[j, k] * S_j, bf16 [N, 4, D]."""
    total = out.float()[:, None] * post[..., None]
    for j in range(STREAMS):
        total = total + streams[:, j, None].float() * comb[:, j, :, None]
    return total.bfloat16()


def hyper_head(streams: Tensor, p: Parameters) -> Tensor:
    """[N, 4, D] -> [N, D] before the last norm (B.10)."""
    flat = streams.float().flatten(1)
    mixes = functional.linear(flat, p["hc_head_fn"]) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    return mix(streams, torch.sigmoid(mixes * p["hc_head_scale"] + p["hc_head_base"]) + EPS)


# ---- what a block does to tokens one by one; compiled on a GPU, one shape for all sequence lengths


def attention_input(mixed: Tensor, p: Parameters, turn: Tensor) -> tuple[Tensor, ...]:
    """mixed [N, D], turn [N, ROPE/2, 2] -> x [N, D], qr [N, lora], q [N, H, HEAD], kv [N, HEAD] (B.5)."""
    x = rms(mixed, p["attn_norm.weight"])
    qr = rms(linear(x, p["attn.wq_a.weight"]), p["attn.q_norm.weight"])
    q = rotate(rms(torch.unflatten(linear(qr, p["attn.wq_b.weight"]), -1, (H, HEAD))), turn[:, None])
    kv = rotate(rms(linear(x, p["attn.wkv.weight"]), p["attn.kv_norm.weight"]), turn)
    return x, qr, q, round_row(kv)


def attention_output(out: Tensor, p: Parameters, turn: Tensor) -> Tensor:
    """out [N, H, HEAD] of the attention -> [N, D]."""
    grouped = torch.unflatten(rotate(out, turn[:, None], back=True), 1, (GROUPS, -1)).flatten(2)
    wo_a = torch.unflatten(fp8_weight(p["attn.wo_a.weight"]), 0, (GROUPS, -1))
    low = torch.cat([functional.linear(grouped[:, g], wo_a[g]) for g in range(GROUPS)], -1)
    return linear(low, p["attn.wo_b.weight"])


def route(x: Tensor, gate: Tensor, bias: Tensor | None, fixed: Tensor | None) -> Tensor:
    """x [N, D] -> weight of every expert [N, E], 0 for those not chosen (B.8)."""
    scores = functional.softplus(functional.linear(x.float(), gate.bfloat16().float())).sqrt()
    chosen = (scores.detach() + bias).topk(CHOSEN).indices if bias is not None else fixed
    if chosen is None:
        raise ValueError("a router needs a bias or a table")
    picked = scores.gather(1, chosen)
    return torch.zeros_like(scores).scatter(1, chosen, picked * (ROUTE_FACTOR / picked.sum(-1, keepdim=True)))


def mixture(x: Tensor, weights: Tensor, p: Parameters) -> Tensor:
    """All experts on all tokens: those not chosen have weight 0, the shared expert is one more with weight 1 (B.8)."""
    weights = torch.cat((weights, torch.ones_like(weights[:, :1])), 1)
    w1, w3, w2 = (expert_weights(p, name) for name in ("w1", "w3", "w2"))
    xq = fp8(x)
    gate = torch.unflatten(functional.linear(xq, w1.flatten(0, 1)), -1, (-1, INNER)).float()
    up = torch.unflatten(functional.linear(xq, w3.flatten(0, 1)), -1, (-1, INNER)).float()
    limit = CONFIG["swiglu_limit"]
    hidden = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weights[..., None]
    return functional.linear(fp8(hidden).flatten(1), w2.transpose(0, 1).flatten(1))


def expert_weights(p: Parameters, name: str) -> Tensor:
    """[E + 1, O, K] bf16: routed experts in FP4, then the shared one in FP8."""
    return torch.cat((fp4(p[f"ffn.experts.{name}"]), fp8_weight(p[f"ffn.shared_experts.{name}.weight"])[None]))


def vocabulary(streams: Tensor, p: Parameters, head: Tensor) -> Tensor:
    """streams [N, 4, D] -> logits float32 [N, V] (B.10)."""
    return functional.linear(rms(hyper_head(streams, p), p["norm.weight"]), head.bfloat16()).float()


def index_queries(x: Tensor, qr: Tensor, p: Parameters, turn: Tensor, hadamard: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [N, heads, dim] and head weights [N, heads] of the indexer (B.7). Learns from its own loss only."""
    q = torch.unflatten(linear(qr.detach(), p["attn.indexer.wq_b.weight"]), -1, (INDEX_HEADS, INDEX_DIM))
    weights = functional.linear(x.detach(), p["attn.indexer.weights_proj.weight"].bfloat16())
    return index_row(rotate(q, turn[:, None]), hadamard), weights * (INDEX_DIM * INDEX_HEADS) ** -0.5


# ---- across tokens


def compress(x: Tensor, p: Parameters, prefix: str, ratio: int, turn: Tensor) -> Tensor:
    """x [B, T, D] -> the T // ratio closed entries, normed and turned, bf16 [B, W, c] (B.6)."""
    wide = x.float()
    values = torch.unflatten(functional.linear(wide, p[f"{prefix}.wkv.weight"].bfloat16().float()), 1, (-1, ratio))
    scores = torch.unflatten(functional.linear(wide, p[f"{prefix}.wgate.weight"].bfloat16().float()), 1, (-1, ratio))
    scores = scores + p[f"{prefix}.ape"]
    if ratio == 4:
        values, scores = overlap(values, 0.0), overlap(scores, -torch.inf)
    entries = (torch.softmax(scores, 2) * values).sum(2)
    return rotate(rms(entries.bfloat16(), p[f"{prefix}.norm.weight"]), turn[::ratio][: entries.shape[1]])


def overlap(x: Tensor, before: float) -> Tensor:
    """[B, W, 4, 2c] -> [B, W, 8, c]: the window before's first halves, then this window's second halves."""
    first, second = x.chunk(2, -1)
    return torch.cat((functional.pad(first[:, :-1], (0, 0, 0, 0, 1, 0), value=before), second), 2)


def attend(
    q: Tensor, kv: Tensor, sink: Tensor, entries: Tensor | None = None, seen: Tensor | None = None, own: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """q [B, T, H, HEAD] over the window of kv [B, T, HEAD] and `entries` [B, E, HEAD] where seen [B or 1, T, E] (B.5).

    own [B, T, HEAD] takes the place of a token's own row. Returns [B, T, H, HEAD] and the entries' share of the attention
    [B, T / 128, H, 128, E].
    """
    b, t = q.shape[:2]
    n = t // WINDOW
    q = q.view(b, n, WINDOW, H, HEAD).transpose(2, 3).reshape(b, n, H * WINDOW, HEAD) * HEAD**-0.5
    padded = functional.pad(kv, (0, 0, WINDOW, 0)).view(b, n + 1, WINDOW, HEAD)
    rows = torch.cat((padded[:, :-1], padded[:, 1:]), 2)
    age = torch.arange(WINDOW, device=q.device)[:, None] + WINDOW - torch.arange(2 * WINDOW, device=q.device)
    hidden = ((age < 0) | (age >= WINDOW)).expand(n, 1, WINDOW, -1).clone()
    hidden[0, :, :, :WINDOW] = True
    logits = torch.unflatten(q @ rows.transpose(2, 3), 2, (H, WINDOW)).masked_fill(hidden, -torch.inf)
    if own is not None:
        own = own.view(b, n, 1, WINDOW, HEAD)
        logits = torch.where(age == 0, (torch.unflatten(q, 2, (H, WINDOW)) * own).sum(-1, keepdim=True), logits)
    parts = [logits]
    if entries is not None and seen is not None:
        more = torch.unflatten(q.flatten(1, 2) @ entries.transpose(1, 2), 1, (n, H, WINDOW))
        parts.append(more.masked_fill(~torch.unflatten(seen, 1, (n, 1, WINDOW)), -torch.inf))
    parts.append(sink.bfloat16().view(H, 1, 1).expand(b, n, H, WINDOW, 1))
    share = torch.softmax(torch.cat(parts, -1), -1)
    near = share[..., : 2 * WINDOW]
    out = near.flatten(2, 3) @ rows
    if own is not None:
        mine = near.masked_fill(age != 0, 0.0).sum(-1, keepdim=True)
        out = out + (mine * (own - padded[:, 1:, None])).flatten(2, 3)
    far = None
    if entries is not None:
        far = share[..., 2 * WINDOW : -1]
        out = out + (far.flatten(1, 3) @ entries).view_as(out)
    return torch.unflatten(out, 2, (H, WINDOW)).transpose(2, 3).reshape(b, t, H, HEAD), far


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [B, T, heads, dim], weights [B, T, heads], keys [B, E, dim] -> [B, T, E]."""
    dots = torch.unflatten(torch.relu(q.flatten(1, 2) @ keys.transpose(1, 2)), 1, q.shape[1:3])
    return torch.squeeze(weights[:, :, None] @ dots, 2)


def index_loss(scores: Tensor, seen: Tensor, mass: Tensor, answers: Tensor) -> Tensor:
    """Cross entropy of the attention's distribution over entries, mass [B, T, E], and that of the scores: over all tokens by
    the attention that leaves their window, and once more over answers [B, T]."""
    total = mass.sum(-1, keepdim=True)
    log_share = functional.log_softmax(scores.float().masked_fill(~seen, -1e4), -1)
    each = -(mass * log_share).sum(-1) / (total.squeeze(-1) + 1e-9)
    weight = total.squeeze(-1) + 0.02 * seen.any(-1)
    return (each * weight).sum() / (weight.sum() + 1e-9) + (each * answers).sum() / answers.sum().clamp(min=1)


def guide_loss(far: Tensor, source: Tensor) -> Tensor:
    """How far the attention far [B, n, H, 128, E] of tokens with a source [B, T] (a position, or -1) is from the CSA entry
    that the source closes into: minus the log of its share, averaged over heads first."""
    mass = far.mean(2, dtype=torch.float32).flatten(1, 2)
    share = mass.gather(-1, (source.clamp(min=0) // 4)[..., None]).squeeze(-1)
    asked = source >= 0
    return -((share + 1e-6).log() * asked).sum() / asked.sum().clamp(min=1)


@dataclass
class Output:
    """Of one forward pass: streams [B, T, 4, D], expert loads by block name, and the CSA layers' losses."""

    streams: Tensor
    loads: dict[str, Tensor] = field(default_factory=dict)
    index_losses: list[Tensor] = field(default_factory=list)
    guide_losses: list[Tensor] = field(default_factory=list)


class Model:
    """Parameters and the forward passes over them. compiled: what sees tokens one by one goes through torch.compile, which
    pays for many steps of one size."""

    def __init__(self, parameters: Parameters, tid2eid: dict[str, Tensor], compiled: bool = False) -> None:
        self.parameters, self.compiled = parameters, compiled
        self.tid2eid = tid2eid
        self.scoped = {
            name: {k.removeprefix(name): v for k, v in parameters.items() if k.startswith(name)} for name in ("", *BLOCKS)
        }
        self.each_token = {
            name: {k: v for k, v in p.items() if k.startswith(EACH_TOKEN)} for name, p in self.scoped.items() if name
        }
        self.hadamard = hadamard_matrix(INDEX_DIM, self.device).bfloat16()
        self._tables = rotary_tables(CONFIG["max_position_embeddings"], self.device)
        functions = hyper_pre, attention_input, attention_output, route, mixture, hyper_post, index_queries, vocabulary
        wrapped: list[Callable[..., Any]] = [torch.compile(f, dynamic=False) if compiled else f for f in functions]
        self.hyper_pre, self.attention_input, self.attention_output, self.route, *wrapped = wrapped
        self.mixture, self.hyper_post, self.index_queries, self.vocabulary = wrapped

    @property
    def device(self) -> torch.device:
        return self.parameters["embed.weight"].device

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.parameters["embed.weight"]).bfloat16()

    def forward(self, ids: Tensor, sparse: bool, source: Tensor | None = None) -> Output:
        """ids [B, T], T a multiple of 128. sparse: CSA layers see the indexer's choice only, as in serving. source [B, T]:
        where the next token stands, if it is a recalled one; with it the CSA layers' losses are computed."""
        streams = self.embed(ids)[:, :, None].repeat(1, 1, STREAMS, 1)
        output = Output(streams)
        for name, ratio in zip(BLOCKS[:-1], RATIOS, strict=False):
            attention = partial(self._attention, name, ratio, output, sparse, source)
            output.streams = self._block(name, ratio, output, ids, attention)
        return output

    def draft(self, streams: Tensor, next_ids: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The MTP module on streams [B, T, 4, D] and the tokens after them (B.11).

        rows: the KV rows [B, T, HEAD] of a first draft; then this is the second one, which sees them but for its own row.
        Returns its streams, its own KV rows, its expert loads.
        """
        p = self.scoped["mtp.0."]
        flat = streams.flatten(0, 1)
        embedded = linear(rms(self.embed(next_ids).flatten(0, 1), p["enorm.weight"]), p["e_proj.weight"])
        before = linear(rms(flat, p["hnorm.weight"]), p["h_proj.weight"])
        output = Output((embedded[:, None] + before).view_as(streams))
        kept: list[Tensor] = []

        def attention(x: Tensor, qr: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            kept.append(kv)
            return attend(q, kv if rows is None else rows, p["attn.attn_sink"], own=None if rows is None else kv)[0]

        return self._block("mtp.0.", 0, output, next_ids, attention), kept[0], output.loads

    def logits(self, streams: Tensor, module: str = "") -> Tensor:
        """[N, 4, D] -> float32 [N, V]; module "mtp.0." for a draft's streams."""
        p = self.scoped[module]
        names = ("hc_head_fn", "hc_head_scale", "hc_head_base", "norm.weight")
        logits: Tensor = self.vocabulary(streams, {name: p[name] for name in names}, self.parameters["head.weight"])
        return logits

    def _block(self, name: str, ratio: int, output: Output, ids: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """One decoder layer on output.streams; `attention` makes [B, T, H, HEAD] of x, qr, q and kv."""
        (b, t), p = ids.shape, self.each_token[name]
        turns = self._turn(t, ratio > 0).expand(b, -1, -1, -1).flatten(0, 1)
        streams = output.streams.flatten(0, 1)
        mixed, post, comb = self._mixed(streams, p, "attn")
        tokens = [torch.unflatten(x, 0, (b, t)) for x in self.attention_input(mixed, p, turns)]
        out = self.attention_output(attention(*tokens).flatten(0, 1), p, turns)
        streams = self.hyper_post(out, streams, post, comb)
        mixed, post, comb = self._mixed(streams, p, "ffn")
        x = rms(mixed, p["ffn_norm.weight"])
        fixed = self.tid2eid[name][ids.flatten()] if name in self.tid2eid else None
        weights = self.route(x, p["ffn.gate.weight"], p.get("ffn.gate.bias"), fixed)
        if fixed is None:
            output.loads[name] = (weights.detach() > 0).float().sum(0)
        after: Tensor = self.hyper_post(self.mixture(x, weights, p), streams, post, comb)
        return after.view(b, t, STREAMS, D)

    def _mixed(self, streams: Tensor, p: Parameters, which: str) -> tuple[Tensor, Tensor, Tensor]:
        mixed, post, comb = self.hyper_pre(streams, p[f"hc_{which}_fn"], p[f"hc_{which}_scale"], p[f"hc_{which}_base"])
        return mixed, post, comb

    def _attention(
        self,
        name: str,
        ratio: int,
        output: Output,
        sparse: bool,
        source: Tensor | None,
        x: Tensor,
        qr: Tensor,
        q: Tensor,
        kv: Tensor,
    ) -> Tensor:
        """Of one main layer, on x [B, T, D], qr [B, T, lora], q [B, T, H, HEAD], kv [B, T, HEAD]."""
        p, sink = self.scoped[name], self.scoped[name]["attn.attn_sink"]
        if not ratio:
            return attend(q, kv, sink)[0]
        t = x.shape[1]
        turn = self._turn(t, True)
        entries = round_row(compress(x, p, "attn.compressor", ratio, turn))
        closed = (torch.arange(t, device=x.device)[:, None] + 1) // ratio
        seen = (torch.arange(entries.shape[1], device=x.device) < closed)[None]
        if ratio != 4:
            return attend(q, kv, sink, entries, seen)[0]
        scores = self._index_scores(p, x, qr, turn)
        if sparse:
            seen = chosen_entries(scores.detach(), seen)
        out, far = attend(q, kv, sink, entries, seen)
        if source is not None and far is not None:
            mass = far.detach().sum(2, dtype=torch.float32).flatten(1, 2)
            output.index_losses.append(index_loss(scores, seen, mass, source >= 0))
            output.guide_losses.append(guide_loss(far, source))
        return out

    def _index_scores(self, p: Parameters, x: Tensor, qr: Tensor, turn: Tensor) -> Tensor:
        b, t = x.shape[:2]
        turns = turn.expand(b, -1, -1, -1).flatten(0, 1)
        queries, weights = self.index_queries(x.flatten(0, 1), qr.flatten(0, 1), p, turns, self.hadamard)
        keys = index_row(compress(x.detach(), p, "attn.indexer.compressor", 4, turn), self.hadamard)
        return index_scores(torch.unflatten(queries, 0, (b, t)), torch.unflatten(weights, 0, (b, t)), keys)

    def _turn(self, length: int, compressed: bool) -> Tensor:
        return (self._tables[1] if compressed else self._tables[0])[:length]


def chosen_entries(scores: Tensor, seen: Tensor) -> Tensor:
    """Where the TOPK best seen scores [B, T, E] of a token are: bool [B, T, E]."""
    if scores.shape[-1] <= TOPK:
        return seen
    best = scores.masked_fill(~seen, -torch.inf).topk(TOPK, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen
