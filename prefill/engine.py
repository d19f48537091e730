"""Chunks of prompts through the model: KV goes into the arena, log probabilities into the prompts that ask for them.

No token is chosen here; decode is the only sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.batch import Batch, Row
from model.runner import Runner
from prefill.prompt import Chunk, Prompt, Scores

SCORED_ROWS = 64  # rows of logits held at a time: 33 MB with the released vocabulary


class Engine:
    """Runs one step. Whatever it raises concerns the chunks of that step only."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._layout = runner.layout

    @torch.inference_mode()
    def compute(self, chunks: list[Chunk]) -> None:
        """Writes the KV of all chunks and, where wanted, their rows' log probabilities."""
        batch = Batch.build([self._row(chunk) for chunk in chunks], self._layout.page_tokens, self._runner.arena.pages.device)
        streams = self._runner.forward(batch)
        first = 0
        for chunk in chunks:
            if chunk.prompt.scores is not None:
                self._score(chunk.prompt, chunk.prompt.scores, streams[first : first + chunk.count])
            first += chunk.count

    def _row(self, chunk: Chunk) -> Row:
        prompt = chunk.prompt
        assert prompt.kv is not None
        end = prompt.computed + chunk.count
        pages = prompt.kv.pages[: self._layout.pages_for(end)]
        return Row(prompt.tokens[prompt.computed : end], prompt.computed, prompt.kv.slot, pages)

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
