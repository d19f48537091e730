"""How much KV fits on a device: what is free once the weights are there, less what a step needs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtransfer.layout import KVLayout

CPU_PAGES = 1024  # where nobody says how many: 1 GB for V4-Flash
TRIAL = {"num_pages": 2, "num_slots": 2}  # the smallest arena: page 0 and slot 0 are all that a step needs to be measured


def first_arena(num_pages: int, num_slots: int, device: str) -> dict[str, int]:
    """The arena that a Runner is loaded with. num_pages 0: as many as there is room for, which a GPU does not know yet."""
    if not num_pages and device == "cuda":
        return TRIAL
    return {"num_pages": num_pages or CPU_PAGES, "num_slots": num_slots}


class Gauge(Protocol):
    """What is read of a device's memory, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """Free now, of how much in all; what torch only keeps for later is free."""

    def peak(self, run: Callable[[], None]) -> int:
        """How much more was taken while `run` ran."""


class CudaGauge:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        self._settle()
        return torch.cuda.mem_get_info(self._device)

    def peak(self, run: Callable[[], None]) -> int:
        self._settle()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before

    def _settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Pages and slots that fit, and what was left to others. `str` is the line for the log."""

    layout: KVLayout
    num_pages: int
    num_slots: int
    step_bytes: int
    spare_bytes: int

    @property
    def tokens(self) -> int:
        """Page 0 belongs to nobody."""
        return (self.num_pages - 1) * self.layout.page_tokens

    def __str__(self) -> str:
        layout = self.layout
        pages_gb, slots_gb = self.num_pages * layout.page_bytes / 1e9, self.num_slots * layout.slot_bytes / 1e9
        return (
            f"KV memory: {self.num_pages} pages, {self.tokens} tokens in {pages_gb:.2f} GB"
            f" ({layout.page_bytes / layout.page_tokens:.0f} B a token); {self.num_slots} slots in {slots_gb:.2f} GB"
            f"{self._aside()}"
        )

    def _aside(self) -> str:
        if not self.step_bytes and not self.spare_bytes:  # of a size that was given
            return ""
        return f"; set aside: {self.step_bytes / 1e9:.2f} GB for steps, {self.spare_bytes / 1e9:.2f} GB by --memory-fraction"


def tokens_in(nbytes: int, layout: KVLayout, num_slots: int = 0) -> int:
    """How many tokens of KV `nbytes` hold beside the slots."""
    return max(0, nbytes - num_slots * layout.slot_bytes) // layout.page_bytes * layout.page_tokens


def given_room(layout: KVLayout, sizes: Mapping[str, int]) -> KVRoom:
    """That of an arena whose size was given, and not measured."""
    return KVRoom(layout, sizes["num_pages"], sizes["num_slots"], 0, 0)


def kv_room(
    layout: KVLayout, free_bytes: int, total_bytes: int, fraction: float, step_bytes: int, num_slots: int, longest_tokens: int
) -> KVRoom:
    """Everything of `fraction` of the device that is neither taken nor for steps. Raises ValueError when not even one
    sequence of `longest_tokens` fits."""
    spare_bytes = total_bytes - int(total_bytes * fraction)
    budget = free_bytes - spare_bytes - step_bytes
    num_pages = tokens_in(budget, layout, num_slots) // layout.page_tokens
    room = KVRoom(layout, num_pages, num_slots, step_bytes, spare_bytes)
    if room.tokens < longest_tokens:
        slots_gb = num_slots * layout.slot_bytes / 1e9
        raise ValueError(
            f"the GPU has no room for the KV of one sequence of {longest_tokens} tokens, but for {max(0, room.tokens)}:"
            f" {free_bytes / 1e9:.2f} GB are free beside the weights, of which {step_bytes / 1e9:.2f} GB are for steps,"
            f" {slots_gb:.2f} GB for {num_slots} slots, and {spare_bytes / 1e9:.2f} GB stay by --memory-fraction {fraction:g};"
            " raise that, or lower --max-context, --num-slots, --max-batch or --step-tokens"
        )
    return room
