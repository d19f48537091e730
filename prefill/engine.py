"""Chunks of prompts through the model: KV goes into the arena, log probabilities into the prompts that ask for them.

No token is chosen here; decode is the only sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtransfer.layout import Field
from model.batch import Batch, Row
from model.runner import Runner, device_failure
from prefill.prompt import Chunk, Prompt, Scores

SCORED_ROWS = 64  # rows of logits held at a time: 33 MB with the released vocabulary


class Engine:
    """Runs one step. Whatever it raises concerns the chunks of that step only, unless the device is `lost`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._layout = runner.layout
        config = runner.config
        self._draft_ring = self._layout.find(config.num_layers - 1, "window") if config.num_nextn_predict_layers else None

    @torch.inference_mode()
    def compute(self, chunks: list[Chunk]) -> None:
        """Writes the KV of all chunks and, where wanted, their rows' log probabilities."""
        streams = self._runner.forward(self._batch([self._row(c.prompt, c.prompt.computed, c.end) for c in chunks]))
        if self._draft_ring is not None:
            self._store_draft_rows(chunks, streams, self._draft_ring)
        first = 0
        for chunk in chunks:
            if chunk.prompt.scores is not None:
                self._score(chunk.prompt, chunk.prompt.scores, streams[first : first + chunk.count])
            first += chunk.count

    def lost(self) -> str:
        """Why this process can not use its device any more; empty while it can."""
        return device_failure(self._runner.arena.pages.device)

    def _batch(self, rows: list[Row]) -> Batch:
        return Batch.build(rows, self._layout.page_tokens, self._runner.arena.pages.device)

    def _row(self, prompt: Prompt, start: int, end: int, ahead: int = 0) -> Row:
        """Positions start to end - 1, each with the token that comes `ahead` of it."""
        assert prompt.kv is not None
        pages = prompt.kv.pages[: self._layout.pages_for(end)]
        return Row(prompt.tokens[start + ahead : end + ahead], start, prompt.kv.slot, pages)

    def _store_draft_rows(self, chunks: list[Chunk], streams: Tensor, ring: Field) -> None:
        """The draft layer's rows, as far as decode gets them: those of a prompt's last positions. The token that follows the
        last of them is known too; it is decode's first.

        streams: [T, hc_mult, hidden], of all chunks.
        """
        rows, parts, end_row = [], [], 0
        for chunk in chunks:
            prompt = chunk.prompt
            end_row += chunk.count
            start = max(prompt.computed, prompt.length - ring.live_rows(prompt.length))
            if start < chunk.end:
                rows.append(self._row(prompt, start, chunk.end, ahead=1))
                parts.append(streams[end_row - (chunk.end - start) : end_row])
        if rows:
            batch = self._batch(rows)
            self._runner.store_draft_rows(torch.cat(parts), batch.tokens, batch)

    def _score(self, prompt: Prompt, scores: Scores, streams: Tensor) -> None:
        """Of each position the log probability of the token after it, as far as that is the client's.

        streams: [chunk, hc_mult, hidden], the first row at position `prompt.computed`.
        """
        first = prompt.computed + 1  # position of the first row's next token
        targets = prompt.tokens[first : min(first + len(streams), prompt.message.prompt_tokens)]
        for at in range(0, len(targets), SCORED_ROWS):
            wanted = targets[at : at + SCORED_ROWS]
            logprobs = torch.log_softmax(self._runner.logits(streams[at : at + len(wanted)]).float(), dim=-1)
            chosen = logprobs.gather(1, torch.tensor(wanted, device=logprobs.device)[:, None])[:, 0]
            if bool(chosen.isnan().any()):
                scores.error = f"the model's logits for prompt positions {first + at - 1} and up are not numbers"
                return
            values, ids = logprobs.topk(scores.top_k, dim=-1)
            scores.logprobs.append(chosen)
            scores.top_ids.append(ids)
            scores.top_logprobs.append(values)
