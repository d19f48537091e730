"""What the bytes of a page and of a slot mean: the layout of a model's KV, and one layer's views of the arena."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rows import IndexRow, KVRow
from kvtransfer.arena import Arena
from kvtransfer.layout import Field, KVLayout
from model.config import CSA, HCA, ModelConfig

KV_DTYPES = ("auto", "fp8", "bf16", "fp32")
INDEX_KEYS = ("auto", "mxfp4")
ROLLBACK_TOKENS = 4


def resolve_kv_dtype(config: ModelConfig, kv_dtype: str) -> str:
    """ "auto": fp8, which is lossless, for a quantised checkpoint, and fp32 for one that is not."""
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv dtype {kv_dtype!r} is unknown: use one of {', '.join(KV_DTYPES)}")
    if kv_dtype == "auto":
        return "fp8" if config.quantised else "fp32"
    return kv_dtype


def resolve_index_keys(config: ModelConfig, kv_dtype: str, index_keys: str) -> str:
    """The kind of the index rows. "auto": as the KV rows; mxfp4 is lossless for a quantised checkpoint, and only there."""
    if index_keys not in INDEX_KEYS:
        raise ValueError(f"index keys {index_keys!r} are unknown: use one of {', '.join(INDEX_KEYS)}")
    if index_keys == "auto":
        return resolve_kv_dtype(config, kv_dtype)
    if not config.quantised:
        raise ValueError("index keys 'mxfp4': this checkpoint is not quantised, so its indexer would choose other entries")
    if config.index_head_dim % 64:
        raise ValueError(f"index keys 'mxfp4': index_head_dim is {config.index_head_dim}; it must be a multiple of 64")
    return index_keys


def kv_row(config: ModelConfig, kv_dtype: str) -> KVRow:
    return KVRow(resolve_kv_dtype(config, kv_dtype), config.head_dim, config.qk_rope_head_dim, rounded=config.quantised)


def index_row(config: ModelConfig, kv_dtype: str, index_keys: str) -> IndexRow:
    return IndexRow(resolve_index_keys(config, kv_dtype, index_keys), config.index_head_dim, rounded=config.quantised)


def kv_layout(
    config: ModelConfig,
    kv_dtype: str = "auto",
    page_tokens: int = 256,
    rollback_tokens: int = ROLLBACK_TOKENS,
    index_keys: str = "auto",
) -> KVLayout:
    """The field tables. Every ring has `rollback_tokens` rows more than the mathematics need (spec C.2), so that many
    tokens can be taken back by lowering a length. Raises ValueError when a page would end inside a compression window, or
    hold nothing."""
    longest = max((HCA, *config.compress_ratios))
    if page_tokens < 1 or page_tokens % longest:
        raise ValueError(f"page_tokens is {page_tokens}: it must be a multiple of {longest}, the longest compression window")
    if rollback_tokens < 0:
        raise ValueError(f"rollback_tokens is {rollback_tokens}: it cannot be negative")
    entry, index_bytes = kv_row(config, kv_dtype), index_row(config, kv_dtype, index_keys).row_bytes
    entry_bytes, ring_bytes = entry.row_bytes, entry.ring_bytes
    window = config.sliding_window
    page: list[Field] = []
    slot: list[Field] = []
    for layer in range(config.num_layers):
        slot.append(Field(layer, "window", 0, window + rollback_tokens, ring_bytes, keep=window - 1))
        match config.ratio(layer):
            case 4:
                page.append(Field(layer, "csa", 0, page_tokens // CSA, entry_bytes, stride=CSA))
                page.append(Field(layer, "csa_index", 0, page_tokens // CSA, index_bytes, stride=CSA))
                rows = 2 * CSA + rollback_tokens
                slot.append(_state(layer, "csa_state", rows, 4 * config.head_dim, keep=CSA, modulo=CSA))
                slot.append(_state(layer, "csa_index_state", rows, 4 * config.index_head_dim, keep=CSA, modulo=CSA))
            case 128:
                page.append(Field(layer, "hca", 0, page_tokens // HCA, entry_bytes, stride=HCA))
                slot.append(_state(layer, "hca_state", HCA + rollback_tokens, 2 * config.head_dim, keep=0, modulo=HCA))
    if not page:
        raise ValueError("compress_ratios is 0 for every main layer: pages would hold nothing; at least one must be 4 or 128")
    return KVLayout.pack(page_tokens, page, slot)


def _state(layer: int, kind: str, rows: int, width: int, keep: int, modulo: int) -> Field:
    """A ring of float32 compressor rows: values, then scores."""
    return Field(layer, kind, 0, rows, width * torch.float32.itemsize, keep=keep, modulo=modulo)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's views of the arena. Rings: [slots, rows, row]; pages: [pages, rows, row]; None where there is none.

    window, entries, index_entries uint8; state, index_state float32.
    """

    window: Tensor
    entries: Tensor | None = None
    index_entries: Tensor | None = None
    state: Tensor | None = None
    index_state: Tensor | None = None

    @classmethod
    def of(cls, arena: Arena, config: ModelConfig, layer: int) -> LayerCache:
        layout = arena.layout
        window = arena.slot_field(layout.find(layer, "window"))
        match config.ratio(layer):
            case 4:
                return cls(
                    window,
                    arena.page_field(layout.find(layer, "csa")),
                    arena.page_field(layout.find(layer, "csa_index")),
                    arena.slot_field(layout.find(layer, "csa_state")).view(torch.float32),
                    arena.slot_field(layout.find(layer, "csa_index_state")).view(torch.float32),
                )
            case 128:
                return cls(
                    window,
                    arena.page_field(layout.find(layer, "hca")),
                    state=arena.slot_field(layout.find(layer, "hca_state")).view(torch.float32),
                )
        return cls(window)
