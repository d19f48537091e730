"""A runner without weights: its KV are the token ids themselves, and its logits depend on every one of them.

Pages hold the token of each position, the slot a ring of the last ones. A step reads the whole history back out of the
arena, so a page that is lost, shared wrongly or overwritten changes the text; `expected_text` says what it should be.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtransfer.arena import Arena
from kvtransfer.layout import Field, KVLayout
from model.batch import Batch
from model.config import ModelConfig, YarnScaling

VOCAB = 211
EOS = 1
RING = 8
TAIL = 3  # positions of the ring that a step reads
PRIME = 1_000_003
ID_BYTES = 8

CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=1,
    num_hidden_layers=1,
    num_nextn_predict_layers=0,
    num_attention_heads=1,
    head_dim=4,
    qk_rope_head_dim=2,
    q_lora_rank=1,
    o_lora_rank=1,
    o_groups=1,
    sliding_window=RING,
    compress_ratios=(0,),
    rope_theta=10.0,
    compress_rope_theta=10.0,
    rope_scaling=YarnScaling(1.0, 16, 32.0, 1.0),
    index_n_heads=1,
    index_head_dim=2,
    index_topk=1,
    n_routed_experts=1,
    num_experts_per_tok=1,
    moe_intermediate_size=1,
    num_hash_layers=0,
    routed_scaling_factor=1.0,
    swiglu_limit=1.0,
    hc_mult=1,
    hc_sinkhorn_iters=1,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=EOS,
    quantised=False,
    expert_dtype="",
)


class FakeRunner:
    """Stands in for model.runner.Runner. `fail` makes the next steps raise, `nan_slots` poisons rows of these slots."""

    def __init__(
        self,
        page_tokens: int = 4,
        num_pages: int = 400,
        num_slots: int = 16,
        name: str = "fake",
        config: ModelConfig = CONFIG,
        more_rings: Sequence[Field] = (),
    ) -> None:
        self.config = config
        pages = [Field(0, "token", 0, page_tokens, ID_BYTES, stride=1)]
        slots = [Field(0, "tail", 0, RING, ID_BYTES, keep=TAIL), *more_rings]
        self.layout = KVLayout.pack(page_tokens, pages, slots)
        self.arena = Arena(self.layout, num_pages, num_slots)
        self.arena.pages.fill_(0x77)
        self.arena.slots.fill_(0x77)
        self.fail = 0
        self.fail_launches = 0  # of an engine that runs later what it launches (tests/late_engine.py)
        self.nan_slots: set[int] = set()
        self.steps: list[list[int]] = []  # tokens per row of each step
        self.writes: list[list[tuple[int, int]]] = []  # (slot, page) of every token that each step wrote
        self._name = name
        self._tokens = self.arena.page_field(self.layout.page[0]).view(torch.int64)[:, :, 0]
        self._ring = self.arena.slot_field(self.layout.slot[0]).view(torch.int64)[:, :, 0]

    def make_invariant(self, most_rows: int) -> None: ...

    def identity(self) -> dict[str, object]:
        return {"config": self._name, **self.layout.identity()}

    def forward(self, batch: Batch) -> Tensor:
        """The checksum of each position's history, int64 [T, 1, 1]."""
        bounds = batch.cu_tokens.tolist()
        self.steps.append([end - start for start, end in itertools.pairwise(bounds)])
        self.writes.append([])
        if self.fail:
            self.fail -= 1
            raise RuntimeError("the fake runner was told to fail")
        sums = [self._row(batch, row, bounds[row], bounds[row + 1]) for row in range(len(bounds) - 1)]
        return torch.tensor([s for row in sums for s in row])[:, None, None]

    def _row(self, batch: Batch, row: int, first: int, end: int) -> list[int]:
        start, slot = int(batch.starts[row]), int(batch.slots[row])
        pages = batch.page_table[row]
        for position, token in zip(range(start, start + end - first), batch.tokens[first:end].tolist(), strict=True):
            page, place = divmod(position, self.layout.page_tokens)
            self._tokens[int(pages[page]), place] = token
            self._ring[slot, position % RING] = token
            self.writes[-1].append((slot, int(pages[page])))
        length = start + end - first
        history = self._tokens[pages].flatten()[:length].tolist()
        tail = [int(self._ring[slot, p % RING]) for p in range(max(0, length - TAIL), length)]
        if tail != history[max(0, length - TAIL) :]:
            history[-1] += 17  # the slot is not this sequence's: the text must show it
        bad = -1 if slot in self.nan_slots else 0
        return [bad or checksum(history[: position + 1]) for position in range(start, length)]

    def logits(self, streams: Tensor) -> Tensor:
        return fake_logits(streams[:, 0, 0])

    def make_streams(self, rows: int) -> Tensor:
        return torch.zeros(rows, 1, 1, dtype=torch.int64)


class FakeDrafter(FakeRunner):
    """With an MTP layer, whose KV is the checksum of each position's history and the token behind it, in a ring of the slot.
    Two of three drafts are right; where the row before is missing or another's, hardly any."""

    def __init__(self, page_tokens: int = 4, num_pages: int = 400, num_slots: int = 16, name: str = "drafter") -> None:
        ring = Field(1, "window", 0, RING, ID_BYTES, keep=1)
        config = replace(CONFIG, num_nextn_predict_layers=1, compress_ratios=(0, 0))
        super().__init__(page_tokens, num_pages, num_slots, name, config, [ring])
        self._drafted = self.arena.slot_field(self.layout.slot[1]).view(torch.int64)[:, :, 0]

    def store_draft_rows(self, streams: Tensor, next_tokens: Tensor, batch: Batch) -> None:
        self.draft_streams(streams, next_tokens, batch)

    def draft_streams(self, streams: Tensor, next_tokens: Tensor, batch: Batch) -> Tensor:
        sums = (streams[:, 0, 0] * 31 + next_tokens + 1) % PRIME
        found = sums.clone()
        for row in range(len(batch.starts)):
            slot, start = int(batch.slots[row]), int(batch.starts[row])
            for place in range(int(batch.cu_tokens[row]), int(batch.cu_tokens[row + 1])):
                position = start + place - int(batch.cu_tokens[row])
                self._drafted[slot, position % RING] = sums[place]
                if position and self._drafted[slot, (position - 1) % RING] != streams[place, 0, 0]:
                    found[place] += 17
        return found[:, None, None]

    def draft_logits(self, streams: Tensor) -> Tensor:
        sums = streams[:, 0, 0]
        return fake_logits(torch.where(sums % 3 == 0, sums + 1, sums))


def checksum(tokens: list[int]) -> int:
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % PRIME
    return value


def fake_logits(sums: Tensor) -> Tensor:
    """float32 [R, VOCAB] in 0..10 from int64 [R]; NaN for a negative sum."""
    ids = torch.arange(VOCAB)
    logits = ((sums[:, None] * 7919 + ids * 104_729 + sums[:, None] * ids) % 10_007).float() / 1000
    return torch.where(sums[:, None] < 0, float("nan"), logits)


def expected_text(prompt: list[int], count: int, stop: tuple[int, ...] = (EOS,)) -> list[int]:
    """Greedy tokens after `prompt`, computed without pages."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        token = int(fake_logits(torch.tensor([checksum(tokens)])).argmax())
        tokens.append(token)
        if token in stop:
            break
    return tokens[len(prompt) :]
