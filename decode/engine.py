"""Running sequences through the model: the last token of each in, the next one out."""

from __future__ import annotations

import torch

from decode.sampling import Choice, Sampler
from decode.sequence import Sequence
from model.batch import Batch, Row
from model.runner import Runner


class Engine:
    """Runs one step. Whatever it raises concerns the sequences of that step only."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._device = runner.arena.pages.device
        self._page_tokens = runner.layout.page_tokens
        self._sampler = Sampler(str(self._device))

    @torch.inference_mode()
    def step(self, sequences: list[Sequence]) -> list[Choice]:
        """Feeds each sequence's last token, at its position, and chooses the token after it."""
        rows = [Row(s.tokens[-1:], len(s.tokens) - 1, s.kv.slot, s.kv.pages) for s in sequences]
        streams = self._runner.forward(Batch.build(rows, self._page_tokens, self._device))
        return self._sampler.sample(sequences, self._runner.logits(streams))
