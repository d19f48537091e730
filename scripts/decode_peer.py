"""What vLLM 0.26.0 did with models of the same widths on one H200, measured in another run (2026-11-29): random weights, KV
memory filled with random rows, temperature 1. Printed beside our figures where layers, batch and context agree."""

from __future__ import annotations

K = 1024

# (layers, batch, context) -> ms of the captured forward pass, ms of wall time a step
DECODE_MS = {
    (8, 1, 1 * K): (1.639, 4.2),
    (8, 1, 8 * K): (1.651, 3.3),
    (8, 1, 64 * K): (1.673, 5.1),
    (8, 8, 1 * K): (3.163, 4.1),
    (8, 8, 8 * K): (3.188, 6.5),
    (8, 8, 64 * K): (3.234, 5.6),
    (8, 32, 1 * K): (6.841, 7.50),
    (8, 32, 8 * K): (6.885, 7.53),
    (8, 32, 64 * K): (7.066, 7.65),
    (8, 64, 1 * K): (9.433, 10.12),
    (8, 64, 8 * K): (9.537, 10.42),
    (8, 64, 64 * K): (9.775, 13.2),
    (28, 1, 1 * K): (5.183, 5.91),
    (28, 1, 8 * K): (5.231, 5.67),
    (28, 1, 64 * K): (5.303, 5.87),
    (28, 8, 8 * K): (10.614, 10.97),
    (28, 32, 8 * K): (23.758, 23.93),
    (28, 64, 1 * K): (32.26, 32.6),
    (28, 64, 8 * K): (32.85, 32.9),
}

# (layers, batch, configured limit), 4K tokens of context -> the same two
LIMIT_MS = {
    (8, 1, 8 * K): (1.659, 3.09),
    (8, 8, 8 * K): (3.237, 3.88),
    (8, 32, 8 * K): (6.867, 7.49),
    (8, 64, 8 * K): (9.536, 10.32),
    (8, 1, 1024 * K): (1.655, 3.56),
    (8, 8, 1024 * K): (3.235, 6.27),
    (8, 32, 1024 * K): (7.010, 8.52),
    (8, 64, 1024 * K): (9.628, 12.22),
}

# (layers, tokens of a prompt), chunks of 8192 -> tokens a second of one prompt alone, of prompts that queue
PREFILL_TOKENS_PER_S = {
    (8, 8 * K): (58_800, 61_800),
    (8, 32 * K): (60_800, 61_300),
    (28, 8 * K): (17_600, 17_800),
    (28, 32 * K): (17_400, 17_400),
}

KV_BYTES = 48.5e9  # of which it said how many tokens they hold, 43 layers, by the configured limit
KV_TOKENS = {73_728: 554_000, 16_384: 128_000}
