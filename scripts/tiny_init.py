"""Fresh parameters. They are not plain noise: attention starts as something that copies, so that recall needs to be refined
rather than found, which from plain noise takes far longer than the ten minutes there are.

* PLAIN directions of the residual streams carry content: the words of recall lists start inside them, all other tokens
  outside. A word starts with one vector, with a space before it or without, and the head starts as the embedding.
* What an attention layer reads from a row (its plain channels) and what it writes are these directions: it copies.
* The first layer's heads look back by a fixed number of tokens. A CSA layer's queries and compressed keys compare content,
  and so do the indexer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rope import plain_frequencies
from scripts.tiny_model import (
    BLOCKS,
    CHOSEN,
    CONFIG,
    EXPERTS,
    GROUPS,
    HASH_LAYERS,
    HEAD,
    INDEX_DIM,
    INDEX_HEADS,
    INNER,
    RATIOS,
    ROPE,
    STREAMS,
    D,
    H,
    Parameters,
)

PLAIN = HEAD - ROPE
LOOK_BACK = (1, 2, 3, 5)  # tokens, per head of the first layer
LOOK_BACK_PAIRS = 4  # the fastest rotary channels tell neighbours apart
COMMON = 0.3  # share of every embedding that is one constant vector: what a look-back head's rotary channels read
COPY, COPY_LITTLE = 0.7, 0.05


class Init:
    """Draws from one generator; a method per kind of part."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        directions = self.orthonormal(PLAIN + 1, D)
        self.common, self.content = directions[:1], directions[1:]

    def normal(self, *shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * std

    def orthonormal(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] with orthonormal rows."""
        columnwise: Tensor = torch.linalg.qr(self.normal(columns, rows, std=1.0)).Q
        return columnwise.T.contiguous()

    def embedding(self, same_word: list[tuple[int, int]], content_words: list[int]) -> Tensor:
        """[V, D], every row about 0.5 * sqrt(D) long."""
        embed = self.normal(CONFIG["vocab_size"], D, std=0.5)
        embed -= embed @ self.content.T @ self.content
        embed[content_words] = self.normal(len(content_words), PLAIN, std=0.5 * (D / PLAIN) ** 0.5) @ self.content
        for one, other in same_word:
            embed[other] = embed[one]
        shared: Tensor = COMMON * 0.5 * D**0.5 * self.common
        return embed + shared

    def experts(self, number: int) -> Parameters:
        fan = D**-0.5
        p = {
            "ffn_norm.weight": torch.ones(D),
            "ffn.gate.weight": self.normal(EXPERTS, D, std=fan),
            "ffn.experts.w1": self.normal(EXPERTS, INNER, D, std=fan),
            "ffn.experts.w3": self.normal(EXPERTS, INNER, D, std=fan),
            "ffn.experts.w2": self.normal(EXPERTS, D, INNER, std=0.1 * INNER**-0.5),
            "ffn.shared_experts.w1.weight": self.normal(INNER, D, std=fan),
            "ffn.shared_experts.w3.weight": self.normal(INNER, D, std=fan),
            "ffn.shared_experts.w2.weight": self.normal(D, INNER, std=0.1 * INNER**-0.5),
        }
        return p if number < HASH_LAYERS else p | {"ffn.gate.bias": torch.zeros(EXPERTS)}

    def hyper(self, which: str, favourite: int) -> Parameters:
        """Reads mostly one stream, writes to all a little differently, and keeps streams nearly apart."""
        pre = torch.full((STREAMS,), -2.0)
        pre[favourite] = 0.5
        base = torch.cat((pre, self.normal(STREAMS, std=0.5), 4.0 * torch.eye(STREAMS).flatten()))
        fn = self.normal((2 + STREAMS) * STREAMS, STREAMS * D, std=0.02)
        return {f"hc_{which}_fn": fn, f"hc_{which}_base": base, f"hc_{which}_scale": torch.full((3,), 0.1)}

    def head(self, module: str) -> Parameters:
        return {
            f"{module}norm.weight": torch.ones(D),
            f"{module}hc_head_fn": self.normal(STREAMS, STREAMS * D, std=0.02),
            f"{module}hc_head_base": torch.full((STREAMS,), -1.0986),  # its sigmoid is 1/4
            f"{module}hc_head_scale": torch.full((1,), 0.1),
        }

    def attention(self, ratio: int, looks_back: bool) -> Parameters:
        lora, low = CONFIG["q_lora_rank"], CONFIG["o_lora_rank"]
        turned, content = self.orthonormal(lora, D), self.content
        queries = self.normal(H, HEAD, lora, std=lora**-0.5)
        rows = torch.cat((content, self.normal(ROPE, D, std=0.3 * D**-0.5)))
        norm = torch.ones(HEAD)
        if looks_back:
            queries, rows, norm = self._look_back(turned)
        elif ratio == 4:
            queries = torch.cat((content @ turned.T, self.normal(ROPE, lora, std=0.3 * lora**-0.5))).expand(H, -1, -1).clone()
            queries += self.normal(H, HEAD, lora, std=0.2 * lora**-0.5)
            rows = self.normal(HEAD, D, std=D**-0.5)  # a query must not find itself in its window
        write = self.normal(GROUPS, low, H // GROUPS, HEAD, std=0.02)
        for head in range(H // GROUPS):
            write[:, head * PLAIN : (head + 1) * PLAIN, head, :PLAIN] += torch.eye(PLAIN)
        p = {
            "attn_norm.weight": torch.ones(D),
            "attn.q_norm.weight": torch.ones(lora),
            "attn.kv_norm.weight": norm,
            "attn.attn_sink": torch.zeros(H),
            "attn.wq_a.weight": turned,
            "attn.wq_b.weight": queries.flatten(0, 1),
            "attn.wkv.weight": rows,
            "attn.wo_a.weight": write.flatten(2).flatten(0, 1),
            "attn.wo_b.weight": (COPY if looks_back else COPY_LITTLE) * content.T.repeat(1, H),
        }
        if ratio:
            p |= self._compressor("attn.compressor", ratio, HEAD)
        return p | self._indexer(turned) if ratio == 4 else p

    def _look_back(self, turned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, rows and row norm of heads whose logit is largest a fixed number of tokens back."""
        speeds = plain_frequencies(ROPE, CONFIG["rope_theta"])[:LOOK_BACK_PAIRS]
        used = slice(PLAIN, PLAIN + 2 * LOOK_BACK_PAIRS)
        queries = self.normal(H, HEAD, D, std=0.1 * D**-0.5)
        for head, back in enumerate(LOOK_BACK):
            angle = -speeds * back
            queries[head, used] += 2.0 * torch.stack((angle.cos(), angle.sin()), -1).flatten()[:, None] * self.common
        rows = torch.cat((0.3 * self.content, torch.zeros(ROPE, D)))  # a word must not outweigh the place it stands at
        rows[used] = torch.tensor([0.7, 0.0]).repeat(LOOK_BACK_PAIRS)[:, None] * self.common
        norm = torch.full((HEAD,), 2.5)
        norm[used] = 2.0
        return queries @ turned.T, rows, norm

    def _compressor(self, prefix: str, ratio: int, width: int) -> Parameters:
        halves = 2 if ratio == 4 else 1
        rows = torch.cat((self.content, self.normal(width - PLAIN, D, std=0.3 * D**-0.5)))
        return {
            f"{prefix}.wkv.weight": rows.repeat(halves, 1) + self.normal(halves * width, D, std=0.1 * D**-0.5),
            f"{prefix}.wgate.weight": self.normal(halves * width, D, std=0.5 * D**-0.5),
            f"{prefix}.ape": self.normal(ratio, halves * width, std=0.2),
            f"{prefix}.norm.weight": torch.full((width,), 1.5),
        }

    def _indexer(self, turned: Tensor) -> Parameters:
        lora = len(turned)
        queries = torch.cat((self.content @ turned.T, self.normal(ROPE, lora, std=0.3 * lora**-0.5))).repeat(INDEX_HEADS, 1)
        return {
            "attn.indexer.wq_b.weight": queries + self.normal(INDEX_HEADS * INDEX_DIM, lora, std=0.3 * lora**-0.5),
            "attn.indexer.weights_proj.weight": self.normal(INDEX_HEADS, D, std=0.3 * D**-0.5) + 0.3 * self.common,
        } | self._compressor("attn.indexer.compressor", 4, INDEX_DIM)


def new_parameters(
    seed: int, same_word: list[tuple[int, int]], content_words: list[int], device: torch.device
) -> tuple[Parameters, dict[str, Tensor]]:
    """Float32 parameters under the released names (the experts of a layer stacked, without `.weight`), and the hash layers'
    tables by block. same_word: pairs of token ids that are one word; content_words: ids of words to recall."""
    init = Init(seed)
    embed = init.embedding(same_word, content_words)
    p: Parameters = {"embed.weight": embed, "head.weight": 0.05 * embed}
    for number, (name, ratio) in enumerate(zip(BLOCKS, RATIOS, strict=True)):
        parts = init.attention(ratio, looks_back=number == 0) | init.experts(number)
        parts |= init.hyper("attn", 2 * number % STREAMS) | init.hyper("ffn", (2 * number + 1) % STREAMS)
        p |= {name + key: value for key, value in parts.items()}
    for module in ("", "mtp.0."):
        p |= init.head(module)
    p["mtp.0.e_proj.weight"], p["mtp.0.h_proj.weight"] = (
        0.7 * torch.eye(D) + init.normal(D, D, std=0.3 * D**-0.5) for _ in range(2)
    )
    p["mtp.0.enorm.weight"], p["mtp.0.hnorm.weight"] = torch.ones(D), torch.ones(D)
    order = init.normal(HASH_LAYERS, CONFIG["vocab_size"], EXPERTS, std=1.0).argsort(-1)
    tid2eid = {BLOCKS[number]: order[number, :, :CHOSEN].contiguous().to(device) for number in range(HASH_LAYERS)}
    return {name: value.to(device).contiguous() for name, value in p.items()}, tid2eid
