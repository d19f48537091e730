"""Spans of words: the kernels and the references against Python's numbers."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.kernel_backend import DEVICE, triton_backend  # before any kernel

# isort: split
from kernels import backend
from kernels.cases.spans import make, moved, moved_in_torch
from kernels.spans import SPAN_WORDS, move_spans, sum_spans
from kvtransfer.transports.cuda import CudaMemory, SideStream
from tests.transfer_rig import PATIENCE_S, HostStream, place_table, sums_by_hand

torch.set_num_threads(1)


@pytest.fixture(autouse=True, params=["triton", "references"])
def chosen_backend(request: pytest.FixtureRequest) -> None:
    if request.param == "triton":
        request.getfixturevalue(triton_backend.__name__)
    else:
        backend.use(backend.REFERENCE)


@pytest.mark.parametrize("spans", [1, 6])
def test_every_word_lands_and_counts(spans: int) -> None:
    inputs = make(spans, DEVICE, 3)
    expected = moved_in_torch(inputs)
    assert all(map(torch.equal, moved(inputs), expected))


def test_nothing_beside_a_span_is_touched_or_summed() -> None:
    """Spans of one word, of a block and one more, a full one, one of whole 16 bytes; words around them are poisoned."""
    counts = [1, 2049, SPAN_WORDS, 148, 2056]
    begins, ends_up = [5, 100, 3000, 40_000, 44_000], [30_000, 7, 10_001, 5_001, 32_000]
    source = torch.arange(-20_000, 30_000, dtype=torch.int32, device=DEVICE)
    target = torch.full((50_000,), -7, dtype=torch.int32, device=DEVICE)
    expected = target.clone()
    for begin, to, count in zip(begins, ends_up, counts, strict=True):
        expected[to : to + count] = source[begin : begin + count]
    table = [torch.tensor(numbers, device=DEVICE) for numbers in (begins, ends_up, counts)]
    move_spans(source, target, *table)
    assert torch.equal(target, expected)
    weights = torch.arange(SPAN_WORDS, device=DEVICE) * (1 << 50) + 1
    sums = torch.full((7,), -7, device=DEVICE)
    sum_spans(target, table[1], table[2], weights, sums[1:6])
    assert sums[0] == sums[6] == -7
    for total, begin, count in zip(sums[1:6].tolist(), begins, counts, strict=True):
        words = source[begin : begin + count].tolist()
        assert total % (1 << 64) == sum(word * (i * (1 << 50) + 1) for i, word in enumerate(words)) % (1 << 64)


def random_bytes(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def test_an_arena_is_packed_and_unpacked_by_them() -> None:
    """Places of both kinds, in turn, of less than a span and of more; around them, nothing changes."""
    shapes = {"page": (5, 200_064), "slot": (3, 4_096)}
    source, target = ({kind: random_bytes(shape) for kind, shape in shapes.items()} for _ in range(2))
    streams = [SideStream(source["page"].device) if DEVICE.type == "cuda" else HostStream() for _ in range(2)]
    out, into = CudaMemory(source, streams[0], None), CudaMemory(target, streams[1], None)
    for memory in (out, into):
        memory.enter()
    expected = {kind: rows.clone() for kind, rows in target.items()}
    places = [("slot", 1, 8, 1_000), ("page", 4, 0, 200_064), ("slot", 2, 4_092, 4), ("page", 1, 70_000, 65_540)]
    for kind, number, offset, nbytes in places:
        expected[kind][number, offset : offset + nbytes] = source[kind][number, offset : offset + nbytes]
    packed = out.buffer(sum(place[3] for place in places))
    sums = out.gather(place_table(places), packed, out.mark()).result()
    assert into.scatter(packed, place_table(places), into.mark()).result() == sums
    parts = [bytes(source[kind][number, at : at + size].tolist()) for kind, number, at, size in places]
    assert packed.tobytes() == b"".join(parts)
    assert sums == b"".join(sums_by_hand(parts[i]) for i in (1, 3, 0, 2)), "pages first"
    assert all(torch.equal(target[kind], expected[kind]) for kind in shapes)


def device_memory(rows: dict[str, torch.Tensor]) -> CudaMemory:
    memory = CudaMemory(rows, SideStream(rows["page"].device) if DEVICE.type == "cuda" else HostStream(), None)
    memory.enter()
    return memory


def test_what_came_is_packed_by_a_copying_thread() -> None:
    """It held up the engine, and so all other chunks, for as long as the copy took."""
    rows = {"page": random_bytes((3, 4_096)), "slot": random_bytes((2, 4_096))}
    memory, begun_by, come = device_memory(rows), list[int](), threading.Event()
    begins = threading.Event()
    packed, fresh = memory.buffer(4_096), random_bytes((1, 4_096))[0].cpu().numpy()

    def fill() -> None:
        begun_by.append(threading.get_ident())
        begins.set()
        assert come.wait(PATIENCE_S)
        packed[:] = fresh

    begun = memory.scatter(packed, place_table([("page", 2, 0, 4_096)]), memory.mark(), fill)
    other = memory.scatter(memory.buffer(4_096), place_table([("slot", 1, 0, 4_096)]), memory.mark())
    other.result()
    assert begins.wait(PATIENCE_S) and not begun.over(), "what is not there yet cannot be in place"
    come.set()
    assert begun.result() == sums_by_hand(fresh.tobytes()) and begun.over()
    assert rows["page"][2].cpu().numpy().tobytes() == fresh.tobytes()
    assert begun_by != [threading.get_ident()]


def test_what_cannot_be_packed_is_said_by_the_copy() -> None:
    memory = device_memory({"page": random_bytes((3, 4_096)), "slot": random_bytes((2, 4_096))})

    def fill() -> None:
        raise MemoryError("no room")

    begun = memory.scatter(memory.buffer(4_096), place_table([("page", 2, 0, 4_096)]), memory.mark(), fill)
    with pytest.raises(MemoryError, match="no room"):
        begun.result()
    assert begun.over()
