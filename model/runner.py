"""Runner: one rank's model and KV memory. Builds, loads, makes the arena, runs batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.ahead import run_compiled
from kernels.trail import Trail
from kvtransfer.arena import Arena
from model.batch import Batch, Row
from model.cache import LayerCache, kv_layout, resolve_index_keys, resolve_kv_dtype
from model.config import ModelConfig
from model.mtp import MTP
from model.transformer import Transformer
from model.weights import Checkpoint

WARM_PAGES = 16  # so wide that entries must be chosen, as in a long text: more than index_topk of them
_log = logging.getLogger("model")


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`: the sizes to warm up for. Kernels are chosen for sizes between powers of two."""
    return sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})


def chunk_lengths(most: int) -> list[int]:
    """The lengths of chunks to warm up for: `doubling`, and one more than each, since the indexer has other machine code for
    tokens that do not fill their groups (kernels/indexer.py)."""
    return sorted({min(tokens + more, most) for tokens in doubling(most) for more in (0, 1)})


def device_failure(device: torch.device) -> str:
    """Why this process can not use `device` any more; empty while it can. What was started on it is over afterwards."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


class Runner:
    """Loads a checkpoint folder, or a checkpoint that is open already, onto `device`. Raises ValueError that says what is wrong
    with the config, the checkpoint or an option."""

    def __init__(
        self,
        model: str | Checkpoint,
        device: str = "cpu",
        kv_dtype: str = "auto",
        page_tokens: int = 256,
        *,
        index_keys: str = "auto",
        num_pages: int,
        num_slots: int,
        max_context: int = 0,
    ) -> None:
        """max_context: tokens of the longest sequence that will be asked for; 0: as many as the model takes."""
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device {device}: torch finds no GPU here; use --device cpu")
        backend.choose(self.device)
        self.config = model.config if isinstance(model, Checkpoint) else ModelConfig.load(model)
        most = self.config.max_position_embeddings
        if max_context > most:
            raise ValueError(
                f"--max-context {max_context} is more than the {most} tokens that this model takes (max_position_embeddings in"
                f" its config.json): give {most} or less, or leave it out"
            )
        self.kv_dtype = resolve_kv_dtype(self.config, kv_dtype)
        self.index_keys = index_keys
        self.layout = kv_layout(self.config, self.kv_dtype, page_tokens, index_keys=index_keys)
        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model, self.config, self.device)
        self.transformer = Transformer(checkpoint, self.kv_dtype, index_keys)
        self.mtp = MTP(checkpoint, self.transformer, self.kv_dtype) if self.config.num_nextn_predict_layers else None
        checkpoint.finish()
        self.checkpoint_digest = checkpoint.digest()
        self.make_arena(num_pages, num_slots)

    def make_arena(self, num_pages: int, num_slots: int) -> None:
        """KV memory, all zero. A worker calls it again when it has measured what a step needs."""
        self.arena = Arena(self.layout, num_pages, num_slots, self.device)
        caches = [LayerCache.of(self.arena, self.config, layer) for layer in range(self.config.num_layers)]
        self.main_caches, self.mtp_caches = caches[: self.config.num_hidden_layers], caches[self.config.num_hidden_layers :]

    def identity(self) -> dict[str, Any]:
        """What two workers must agree on before KV may pass between them, in the words of an operator."""
        return {
            **{f"model.{name}": value for name, value in self.config.named_values().items()},
            "model.checkpoint": self.checkpoint_digest,
            "dtype": str(self.transformer.dtype).removeprefix("torch."),
            "kv_dtype": self.kv_dtype,
            "index_keys": resolve_index_keys(self.config, self.kv_dtype, self.index_keys),
            **self.layout.identity(),
        }

    def make_invariant(self, most_rows: int) -> None:
        """From here on a token's result has the same bits whatever else is in its step. most_rows: of the largest step; where
        that is too large for it to hold, a warning says so."""
        backend.make_invariant()
        if backend.active().triton and most_rows > backend.INVARIANT_ROWS:
            most = backend.INVARIANT_ROWS
            _log.warning("steps of more than %d rows are not batch-invariant; the largest here has %d", most, most_rows)

    @torch.inference_mode()
    def warm_up(self, steps: Iterable[Sequence[int]]) -> None:
        """Compiles the kernels of steps, each given by how many tokens each of its sequences has, on page 0 and slot 0, which
        belong to nobody. Does nothing without kernels. A loop whose first request waits for the compiler would be taken for
        dead.
        Raises RuntimeError that says where a step fails.
        """
        if not backend.active().triton:
            return
        begin_s, kept = time.monotonic(), list(steps)
        run_compiled(lambda: self._run_each(kept))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        _log.info("kernels compiled in %.1f s", time.monotonic() - begin_s)

    def _run_each(self, steps: Iterable[Sequence[int]]) -> None:
        for lengths in steps:
            trail = Trail()
            try:
                with trail.followed():
                    self.run_once(lengths)
            except Exception as error:  # whatever a compiler, a driver or an operation says is part of the message
                raise RuntimeError(
                    f"a step of {len(lengths)} x {max(lengths)} tokens fails: {trail.place(error)}: {trail.reason(error)}."
                    " python -m kernels.check tests every kernel on this card."
                ) from error

    @torch.inference_mode()
    def run_once(self, lengths: Sequence[int], start: int = 0) -> None:
        """A step of so many tokens of each sequence from position `start` on, on page 0 and slot 0, which belong to nobody: for
        what it compiles and takes."""
        pages = [0] * max(WARM_PAGES, self.layout.pages_for(start + max(lengths)))
        batch = Batch.build([Row([0] * tokens, start, 0, pages) for tokens in lengths], self.layout.page_tokens, self.device)
        streams = self.forward(batch)
        self.logits(streams[: len(lengths)])
        if self.mtp is not None:
            self.store_draft_rows(streams, batch.tokens, batch)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Writes the batch's KV into the arena; the streams after the last main layer, [T, hc_mult, hidden]."""
        return self.transformer.forward(batch, self.main_caches)

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """streams [R, hc_mult, hidden] -> float32 [R, vocab]."""
        return self.transformer.logits(streams)

    def make_streams(self, rows: int) -> Tensor:
        """Room for the streams of `rows` tokens: zeros [rows, hc_mult, hidden]."""
        shape = rows, self.config.hc_mult, self.config.hidden_size
        return torch.zeros(shape, dtype=self.transformer.dtype, device=self.device)

    @torch.inference_mode()
    def draft_streams(self, streams: Tensor, next_tokens: Tensor, batch: Batch) -> Tensor:
        """One MTP pass over the batch's positions (model/mtp.py): the MTP streams, [T, hc_mult, hidden]. `batch.tokens` is not
        looked at."""
        return self._mtp().forward(streams, next_tokens, batch, self.mtp_caches[0])

    @torch.inference_mode()
    def draft_logits(self, streams: Tensor) -> Tensor:
        """MTP streams [R, hc_mult, hidden] -> float32 [R, vocab]: of the rows behind which a draft is wanted."""
        return self._mtp().logits(streams)

    @torch.inference_mode()
    def store_draft_rows(self, streams: Tensor, next_tokens: Tensor, batch: Batch) -> None:
        """What `draft_streams` leaves in the arena, without a draft: for positions that later drafts look back on."""
        self._mtp().store(streams, next_tokens, batch, self.mtp_caches[0])

    def _mtp(self) -> MTP:
        if self.mtp is None:
            raise ValueError("this checkpoint has no MTP layer (num_nextn_predict_layers is 0)")
        return self.mtp
