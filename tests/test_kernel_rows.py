"""Packing kernels: KV rows, index queries and the window ring, byte for byte against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels.kvrows import index_queries, index_queries_reference, kv_rows, kv_rows_reference
from kernels.quant import fp8_values
from kernels.ragged import Ragged, store_ring, store_ring_reference
from kernels.rope import plain_frequencies, rotation
from kernels.rows import IndexRow, KVRow

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures(triton_backend.__name__)
EPS = 1e-6


def step(*rows: tuple[int, int, int]) -> Ragged:
    """(slot, start, tokens) rows without pages; 0 tokens are allowed."""
    lengths = [length for _, _, length in rows]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=DEVICE)

    return Ragged(
        positions=tensor([position for _, start, length in rows for position in range(start, start + length)]),
        sequence_ids=tensor([sequence for sequence, length in enumerate(lengths) for _ in range(length)]),
        starts=tensor([start for _, start, _ in rows]),
        cu_tokens=tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)]),
        slots=tensor([slot for slot, _, _ in rows]),
        page_table=tensor([0] * len(rows))[:, None],
        longest=max(lengths),
    )


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poisoned_ring(slots: int, rows: int, row_bytes: int) -> Tensor:
    return torch.full((slots, 2 * rows, row_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)[:, :rows]  # slots lie apart


KINDS = [
    ("fp8", torch.bfloat16, True),
    ("bf16", torch.bfloat16, True),
    ("bf16", torch.bfloat16, False),
    ("fp32", torch.float32, False),
    ("fp32", torch.float32, True),
]


@pytest.mark.parametrize(("kind", "dtype", "rounded"), KINDS)
@pytest.mark.parametrize(("channels", "rope_dim"), [(512, 64), (192, 64), (128, 64), (64, 16)])
def test_kv_rows(kind: str, dtype: torch.dtype, rounded: bool, channels: int, rope_dim: int) -> None:
    row, batch = KVRow(kind, channels, rope_dim, rounded), step((3, 0, 1), (1, 130, 3))
    kv = random(4, 2 * channels, dtype=dtype)[:, channels:] * torch.tensor([[1.0], [1e-5], [9], [1]], device=DEVICE).to(dtype)
    kv[0, :64] = 0.0
    weight = random(channels, seed=1)
    turn = rotation(batch.positions, plain_frequencies(rope_dim, 1e4).to(DEVICE))
    ring, expected_ring = poisoned_ring(5, 9, row.ring_bytes), poisoned_ring(5, 9, row.ring_bytes)
    packed = kv_rows(kv, weight, EPS, turn, row, batch, ring)
    expected = kv_rows_reference(kv, weight, EPS, turn, row, batch, None)
    assert packed.shape == expected.shape
    error = (row.unpack(packed) - row.unpack(expected)).abs() / row.unpack(expected).abs().clamp(min=1e-2)
    assert error.max() <= (2.0**-3 if rounded else 2.0**-7 if kind == "bf16" else 1e-5)
    assert (error > 1e-5).double().mean() <= 2e-3
    assert torch.equal(packed[:, row.value_bytes :], expected[:, row.value_bytes :])
    store_ring_reference(batch, expected_ring, packed)
    assert torch.equal(ring, expected_ring)
    assert torch.equal(kv_rows(kv, weight, EPS, turn, row, batch, None), packed)
    alone = step((1, 130, 3))
    assert torch.equal(kv_rows(kv[1:], weight, EPS, turn[1:].contiguous(), row, alone, None), packed[1:])


@pytest.mark.parametrize(("kind", "dtype", "rounded"), [*KINDS, ("mxfp4", torch.bfloat16, True)])
@pytest.mark.parametrize(("heads", "dim", "rope_dim"), [(64, 128, 64), (32, 64, 16), (3, 32, 4)])
def test_index_queries(kind: str, dtype: torch.dtype, rounded: bool, heads: int, dim: int, rope_dim: int) -> None:
    row = IndexRow(kind, dim, rounded)
    q = random(3, heads, dim, dtype=dtype) * torch.tensor([1.0, 1e-5, 100.0], device=DEVICE).to(dtype)[:, None, None]
    q[0, 0] = 0.0
    turn = rotation(torch.tensor([0, 7, 100_000], device=DEVICE), plain_frequencies(rope_dim, 1e4).to(DEVICE))
    got, scales = index_queries(q, turn, row)
    expected, expected_scales = index_queries_reference(q, turn, row)
    assert got.dtype == expected.dtype and (scales is None) == (expected_scales is None)
    values, wanted = got.double(), expected.double()
    if scales is not None and expected_scales is not None:
        assert torch.equal(scales, expected_scales)
        values = fp8_values(got.view(torch.uint8)) * scales[..., None]
        wanted = fp8_values(expected.view(torch.uint8)) * expected_scales[..., None]
    near = torch.isclose(values, wanted, rtol=1e-5, atol=0)
    assert (~near).double().mean() <= 5e-3  # a value at a rounding border goes to its neighbour
    assert ((values - wanted).abs() <= 0.51 * wanted.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(index_queries(q[1:2], turn[1:2], row)[0][0].double(), got[1].double())


@pytest.mark.parametrize("width", [592, 16])
def test_store_ring(width: int) -> None:
    """Chunks shorter than the ring, as long, longer; and none at all of a sequence."""
    for rows in ([(2, 5, 1), (4, 0, 3)], [(1, 0, 9), (2, 131, 10), (3, 4, 30)], [(1, 7, 0), (2, 3, 2)]):
        batch = step(*rows)
        new = torch.randint(0, 255, (len(batch.positions), width), dtype=torch.uint8).to(DEVICE)
        ring, expected = poisoned_ring(6, 10, width), poisoned_ring(6, 10, width)
        store_ring(batch, ring, new)
        store_ring_reference(batch, expected, new)
        assert torch.equal(ring, expected)
    state = random(3, 8)
    ring, expected = random(6, 4, 8, seed=1), random(6, 4, 8, seed=1)
    store_ring(step((2, 5, 1), (4, 0, 2)), ring, state)
    store_ring_reference(step((2, 5, 1), (4, 0, 2)), expected, state)
    assert torch.equal(ring, expected)


def test_slots_past_4_gib() -> None:
    memory = torch.empty((4 << 30) + (1 << 20), dtype=torch.uint8, device=DEVICE)
    ring = memory.as_strided((5, 10, 592), (1 << 30, 592, 1))
    new = torch.randint(0, 255, (12, 592), dtype=torch.uint8).to(DEVICE)
    store_ring(step((4, 100, 12)), ring, new)
    assert torch.equal(ring[4], new[torch.tensor([10, 11, 2, 3, 4, 5, 6, 7, 8, 9])])  # positions 102..111, row = position % 10
    row, batch = KVRow("fp8", 512, 64, True), step((4, 7, 1))
    turn = rotation(batch.positions, plain_frequencies(64, 1e4).to(DEVICE))
    packed = kv_rows(random(1, 512, dtype=torch.bfloat16), random(512, seed=1), EPS, turn, row, batch, ring)
    assert torch.equal(ring[4, 7], packed[0])
