"""A decode step reads nothing on the host and allocates nothing, whatever the lengths are: shown without a GPU.

The model is built on torch's meta device, where tensors have shapes and no data: `.item()`, `.tolist()`, `.cpu()`, `nonzero`
or a shape that depends on data raises, with the line in the traceback. Kernels are not started.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import backend
from kernels.launch import launches_go_to
from kernels.workspace import Workspace
from kvtransfer.arena import Arena
from model.batch import Batch
from model.cache import LayerCache, kv_layout
from model.config import ModelConfig
from model.mtp import MTP
from model.transformer import Transformer
from model.weights import Checkpoint
from tests import golden

META = torch.device("meta")
CREATES_NOTHING = (
    "view",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "permute",
    "transpose",
    "split",
    "alias",
    "t.",
    "detach",
    "unbind",
)


class NothingNew(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every torch operation but views: results come from the workspace, through kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not any(part in name for part in CREATES_NOTHING):
            raise AssertionError(f"{func} makes a tensor of its own in a decode step")
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=sorted(backend.TARGETS))
def target(request: pytest.FixtureRequest) -> Iterator[backend.Backend]:
    before = backend.active()
    backend.use(backend.TARGETS[request.param])
    yield backend.active()
    backend.use(before)


@cache
def shapes_of(name: str, kernels: backend.Backend) -> tuple[Transformer, MTP, list[LayerCache]]:
    """Main model, MTP and caches without data, made for the active backend `kernels`."""
    config = ModelConfig.load(golden.model_dir(name))
    checkpoint = Checkpoint.open(golden.model_dir(name), config, META)
    kv_dtype = "fp8" if config.quantised else "fp32"
    main = Transformer(checkpoint, kv_dtype)
    mtp = MTP(checkpoint, main, kv_dtype)
    arena = Arena(kv_layout(config, kv_dtype), 8, 4, META)
    return main, mtp, [LayerCache.of(arena, config, layer) for layer in range(config.num_layers)]


def step_of(sequences: int, tokens: int, pages: int) -> Batch:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int64, device=META)

    count = sequences * tokens
    return Batch(
        positions=tensor(count),
        sequence_ids=tensor(count),
        starts=tensor(sequences),
        cu_tokens=tensor(sequences + 1),
        slots=tensor(sequences),
        page_table=tensor(sequences, pages),
        longest=tokens,
        tokens=tensor(count),
    )


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (8, 1), (64, 1), (2, 4), (64, 2)])
def test_a_decode_step_can_be_captured(name: str, sequences: int, tokens: int, target: backend.Backend) -> None:
    main, _, caches = shapes_of(name, target)
    batch, started = step_of(sequences, tokens, pages=16), []
    workspace = Workspace(256 << 20, META)
    with launches_go_to(lambda kernel, grid, *args, **options: started.append((kernel, grid))):
        main.forward(batch, caches[: len(main.layers)])  # constants (signs, counters) are made once, before a capture
        started.clear()
        with workspace.active(), NothingNew():  # type: ignore[no-untyped-call]
            logits = main.logits(main.forward(batch, caches[: len(main.layers)]))
    assert logits.shape == (sequences * tokens, main.config.vocab_size)
    assert len(started) > 10 * len(main.layers)


@pytest.mark.parametrize("name", golden.CASES)
def test_the_size_of_a_step_does_not_follow_the_longest_context(name: str, target: backend.Backend) -> None:
    """Grids are the same for a graph captured for 16 pages and for 4096: only lengths in device memory decide on work."""
    main, _, caches = shapes_of(name, target)
    grids = []
    for pages in (16, 4096):
        started: list[Any] = []
        with launches_go_to(lambda kernel, grid, *args, **options: started.append((kernel.fn.__name__, grid))):  # noqa: B023
            main.forward(step_of(8, 1, pages), caches[: len(main.layers)])
        grids.append(started)
    assert grids[0] == grids[1]


@pytest.mark.parametrize("name", golden.CASES)
def test_a_chunk_of_a_prompt_reads_nothing_on_the_host(name: str, target: backend.Backend) -> None:
    """So the host can start the next chunk while this one is computed. Two prompts, in steps that are no decode steps."""
    main, _, caches = shapes_of(name, target)
    started: list[str] = []
    with launches_go_to(lambda kernel, grid, *args, **options: started.append(kernel.fn.__name__)):
        logits = main.logits(main.forward(step_of(2, 300, pages=16), caches[: len(main.layers)]))
    assert logits.shape == (600, main.config.vocab_size)
    assert len(started) > 10 * len(main.layers)


def test_the_watchman_sees_a_host_read_and_an_allocation() -> None:
    shape = torch.empty(4, device=META)
    for reads in (lambda: shape.sum().item(), lambda: shape.tolist(), lambda: shape.nonzero(), lambda: bool((shape > 0).any())):
        with pytest.raises((RuntimeError, NotImplementedError)):
            reads()
    with NothingNew(), pytest.raises(AssertionError, match="makes a tensor"):  # type: ignore[no-untyped-call]
        shape + 1
