"""What it would cost that a sequence's result is the same, bit for bit, alone and in any batch.

Of a decode step's operations those that cut their sums by the number of rows are, by `one_form`, cut as for one number of
rows whatever there are: decode attention (splits), the router's scores, and the mixing of the streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import attention, hyper, route
from kernels.attention import Tiling
from kernels.rows import KVRow


@contextmanager
def one_form(rows: int) -> Iterator[None]:
    """Kernels started or captured inside are cut as for a step of `rows` tokens."""
    tiling, route_tiles, tiles = attention.tiling, route._route_tiles, hyper._tiles

    def tiling_for(q: Tensor, row: KVRow, most_rows: int | None) -> Tiling:
        return tiling(torch.empty((rows, *q.shape[1:]), dtype=q.dtype, device="meta"), row, most_rows)

    with ExitStack() as patches:
        patches.enter_context(patch.object(attention, "tiling", tiling_for))
        patches.enter_context(patch.object(route, "_route_tiles", lambda count, width: route_tiles(rows, width)))
        patches.enter_context(patch.object(hyper, "_tiles", lambda tokens: tiles(rows)))
        yield


def equal_rows(alone: Tensor, together: Tensor) -> dict[str, float]:
    """alone [b, V] and the first b rows of together [B, V], logits of the same sequences: which part of them has the same
    bits, which part the same likeliest token, and how far apart logits are, as a part of their size (rms)."""
    both = together[: len(alone)]
    apart = (alone.double() - both.double()).square().mean() / both.double().square().mean()
    return {
        "same_bits": float((alone == both).all(1).double().mean()),
        "same_token": float((alone.argmax(1) == both.argmax(1)).double().mean()),
        "apart": float(apart.sqrt()),
    }
