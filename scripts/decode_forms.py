"""Whether a sequence's result is the same, bit for bit, alone and in any batch, and with several tokens in a step."""

from __future__ import annotations

from torch import Tensor


def equal_rows(alone: Tensor, together: Tensor) -> dict[str, float]:
    """Logits [R, V] of the same tokens in two steps: which part of the rows has the same bits, which part the same likeliest
    token, and how far apart they are, as a part of their size (rms)."""
    apart = (alone.double() - together.double()).square().mean() / together.double().square().mean()
    return {
        "same_bits": float((alone == together).all(1).double().mean()),
        "same_token": float((alone.argmax(1) == together.argmax(1)).double().mean()),
        "apart": float(apart.sqrt()),
    }
