"""How the experts' kernels are started: who works on which rows, with which tiles."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels import backend, workspace
from kernels.early import early
from kernels.experts_block import block_kernel
from kernels.experts_fp4 import BLOCK_ROWS, SCALES, STEP, TOKENS, WORDS
from kernels.experts_portable import (
    arrange_kernel,
    grouped_kernel,
    most_tiles,
    order_kernel,
    segments_kernel,
    sum_kernel,
    swiglu_kernel,
    tiles_kernel,
)
from kernels.experts_stream import STREAM_ROWS, stream_kernel
from kernels.experts_weights import ExpertWeights, Matrices
from kernels.launch import launch
from kernels.quant import ACTIVATION_BLOCK, Quantised

DIRECT_PAIRS = 16  # so few pairs seldom share an expert: each is a tile of its own, and nothing is sorted
ALIKE_ROWS = 32  # of a tile of `grouped_kernel`: from 64 on Hopper multiplies with wgmma, whose sums may have other bits
MANY_PAIRS = 2048  # from here on two kernels sort faster than one
STREAM_STAGES = 8


class Plan:
    """One step's rows of every expert, found on the device; both products of the step run over the same tiles.

    direct: pairs are taken as they come, and the kernels from the first product on overlap: each begins while the one before
    it still runs and waits for it where it needs its results (programmatic dependent launch).
    order, tiles, tile_count: see `experts_portable.segments_kernel`; order is None, and the others are missing, if direct.
    """

    def __init__(self, ids: Tensor, weights: ExpertWeights) -> None:
        """ids [T, k]."""
        self._ids, self._choices, self._pairs = ids, ids.shape[1], ids.numel()
        experts = len(weights.w13.values)
        fragments = weights.w13.kind == weights.w2.kind == "fragments"
        self.direct = self._pairs <= DIRECT_PAIRS and fragments
        self.order: Tensor | None = None
        if self.direct:
            return
        self._tile = tile_rows(self._pairs, experts)
        if not fragments and backend.active().cuts_alike(len(ids)):
            self._tile = min(self._tile, ALIKE_ROWS)
        self._most = most_tiles(self._pairs, experts, self._tile)
        self.order = self._integers(self._pairs)
        self.tiles, self.tile_count = self._integers(self._most, 4), self._integers(1)
        self._sort(experts)

    def _integers(self, *shape: int) -> Tensor:
        return workspace.empty(shape, torch.int32, self._ids.device)

    def _sort(self, experts: int) -> None:
        pairs, padded = self._pairs, triton.next_power_of_2(experts)
        tiles: dict[str, Any] = {"TILE": self._tile, "PADDED": padded}
        if pairs > MANY_PAIRS:
            segments = self._integers(experts, 2)
            launch(order_kernel, (experts,), self._ids, self.order, segments, pairs, CHUNK=2048, num_warps=8)
            launch(tiles_kernel, (experts,), segments, self.tiles, self.tile_count, EXPERTS=experts, num_warps=1, **tiles)
        else:
            chunk = max(32, triton.next_power_of_2(min(pairs, 1024)))
            results = (self.order, self.tiles, self.tile_count)
            launch(segments_kernel, (experts,), self._ids, *results, pairs, CHUNK=chunk, num_warps=4, **tiles)

    def product(self, x: Tensor | Quantised, matrices: Matrices, gather: bool) -> Tensor:
        """[P, N]: rows of x times their expert's matrix.

        gather: x has a row a token, the result is in the order of experts; otherwise x is in that order and the result has
        row t * k + j for choice j of token t."""
        values, scales = (x.codes, x.scales) if isinstance(x, Quantised) else (x, None)
        dtype = torch.bfloat16 if isinstance(x, Quantised) else x.dtype
        out = workspace.empty((self._pairs, matrices.n), dtype, values.device)
        if matrices.kind == "fragments" and not self.direct and streams(self._tile, matrices):
            self._start_stream(values, scales, matrices, gather, out)
        elif matrices.kind == "fragments":
            self._start_block(values, scales, matrices, gather, out)
        else:
            self._start_portable(values, scales, matrices, gather, out)
        return out

    def _start_block(self, values: Tensor, scales: Tensor | None, matrices: Matrices, gather: bool, out: Tensor) -> None:
        assert matrices.scales is not None
        tile = 8 if self.direct else self._tile
        rows, factors = (values, scales) if self.direct else self._arranged(values, scales, matrices.k, gather)
        work = (self._ids, None, None) if self.direct else (self.order, self.tiles, self.tile_count)
        launch(
            block_kernel,
            (matrices.n // BLOCK_ROWS, self._pairs if self.direct else self._most),
            *self._descriptors(rows, matrices, tile),
            *(factors, matrices.row_scales, *work, out),
            **self._shape(matrices, gather),
            TILE=tile,
            STAGES=block_stages(tile, matrices.k),
            DIRECT=self.direct,
            WGMMA=backend.active().hopper,
            num_warps=4,
            launch_pdl=self.direct and not gather,
        )

    def _descriptors(self, rows: Tensor, matrices: Matrices, tile: int) -> tuple[TensorDescriptor, ...]:
        assert matrices.scales is not None
        return (
            TensorDescriptor.from_tensor(rows, [tile, STEP], TOKENS),
            TensorDescriptor.from_tensor(matrices.values.view(-1, 32), [32, 32], WORDS),
            TensorDescriptor.from_tensor(matrices.scales.view(-1, 8), [8, 8], SCALES),
        )

    def _start_stream(self, values: Tensor, scales: Tensor | None, matrices: Matrices, gather: bool, out: Tensor) -> None:
        rows, factors = self._arranged(values, scales, matrices.k, gather)
        launch(
            stream_kernel,
            (backend.active().multiprocessors,),
            *self._descriptors(rows, matrices, self._tile),
            *(factors, matrices.row_scales, self.order, self.tiles, self.tile_count, out),
            N=matrices.n,
            K=matrices.k,
            GATHER=gather,
            TILE=self._tile,
            STAGES=STREAM_STAGES,
            num_warps=4,
        )

    def _arranged(self, values: Tensor, scales: Tensor | None, k: int, gather: bool) -> tuple[Tensor, Tensor]:
        """The rows of the tiles one after another, so that a tile is one block of memory, and their scales."""
        factors = workspace.empty((self._most, k // STEP, self._tile), torch.float32, values.device)
        arranged = workspace.empty((self._pairs, k), values.dtype, values.device) if gather else None
        block = min(triton.next_power_of_2(k), 512)
        launch(
            arrange_kernel,
            (self._most, triton.cdiv(k, block) if gather else 1),
            *(values, scales, self.order, self.tiles, self.tile_count, arranged, factors),
            K=k,
            TOPK=self._choices,
            TILE=self._tile,
            BLOCK=block,
            num_warps=8 if self._tile >= 64 else 4,
        )
        return values if arranged is None else arranged, factors

    def _start_portable(self, values: Tensor, scales: Tensor | None, matrices: Matrices, gather: bool, out: Tensor) -> None:
        plain = matrices.kind == "plain"
        block_n = 32 if plain else 64
        launch(
            grouped_kernel,
            (triton.cdiv(matrices.n, block_n), self._most),
            *(values, scales, matrices.values, matrices.scales),
            *(self.order, self.tiles, self.tile_count, out),
            **self._shape(matrices, gather),
            KIND=matrices.kind,
            TILE=self._tile,
            ROWS=max(16, self._tile),
            BLOCK_N=block_n,
            BLOCK_K=min(64 if plain else 128, max(16, triton.next_power_of_2(matrices.k))),
            num_warps=8 if self._tile > 64 else 4,
            num_stages=3,
        )

    def _shape(self, matrices: Matrices, gather: bool) -> dict[str, Any]:
        return {"N": matrices.n, "K": matrices.k, "TOPK": self._choices, "GATHER": gather}

    def swiglu(self, gate_up: Tensor, limit: float, weights: Tensor, quantised: bool) -> Tensor | Quantised:
        """gate_up [P, 2F] in the order of experts, weights [T, k]."""
        return swiglu(gate_up, limit, self.order, weights, quantised, self.direct)

    def add_up(self, answers: Tensor, shared: Tensor | None) -> Tensor:
        """answers [T * k, D], shared [T, D] -> [T, D]."""
        tokens, width = self._ids.shape[0], answers.shape[1]
        out = workspace.empty((tokens, width), answers.dtype, answers.device)
        block = min(1024, triton.next_power_of_2(width))
        launch(
            sum_kernel,
            (tokens, triton.cdiv(width, block)),
            *(answers, shared, out, 0 if shared is None else shared.stride(0)),
            WIDTH=width,
            TOPK=self._choices,
            BLOCK=block,
            num_warps=4 if block >= 512 else 1,
            **early(self.direct),
        )
        return out


def swiglu(
    gate_up: Tensor,
    limit: float,
    order: Tensor | None,
    weights: Tensor | None,
    quantised: bool,
    programmatic: bool = False,
) -> Tensor | Quantised:
    """Row i has weights.flatten()[order[i]], or weights.flatten()[i] when order is None."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    blocks = triton.cdiv(inner, ACTIVATION_BLOCK)
    out = workspace.empty((rows, inner), torch.float8_e4m3fn if quantised else gate_up.dtype, gate_up.device)
    scales = workspace.empty((rows, blocks), torch.uint8, gate_up.device) if quantised else None
    taken = 32 if rows * blocks >= 32_768 else 4
    launch(
        swiglu_kernel,
        (triton.cdiv(rows * blocks, taken),),
        *(gate_up, order, weights, out, scales, rows, limit, gate_up.stride(0)),
        INNER=inner,
        BLOCKS=blocks,
        ROWS=taken,
        num_warps=4,
        **early(programmatic),
    )
    return out if scales is None else Quantised(out, scales)


# Below: the fastest of what was tried on an H200 at the widths of V4-Flash


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: enough for most experts when tokens spread evenly, from shapes alone."""
    average = pairs / experts
    return 8 if average <= 4 else 16 if average <= 12 else 32 if average <= 26 else 64 if average <= 48 else 128


def streams(tile: int, matrices: Matrices) -> bool:
    """Whether `stream_kernel` runs. With fewer rows short blocks are as fast, for more it has too few registers."""
    return backend.active().hopper and tile == 32 and matrices.n % STREAM_ROWS == 0


def block_stages(tile: int, k: int) -> int:
    """Steps that a block of `block_kernel` has under way, so many that at least two share a multiprocessor."""
    fit = (backend.active().shared_bytes // 2 - 1024) // (tile * STEP + 4352)
    return max(1, min(4 if tile <= 64 else 3, fit, k // STEP))
