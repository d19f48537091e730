"""Random checkpoints: what the released format has and nothing else, weights that keep activations near 1, on both backends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernel_backend import DEVICE, Poisoned, triton_backend  # before any kernel

# isort: split
from kernels import backend
from kernels.experts_weights import dequantised
from model.batch import Batch, Row
from model.config import ModelConfig
from model.runner import Runner
from model.weights import SINGLE_FILE, Checkpoint, read_safetensors
from scripts.launch_local import ROOT
from scripts.random_checkpoint import RandomCheckpoint, entries_of, write_checkpoint
from scripts.released_config import RELEASED, with_layers
from tests import golden

FOLDERS = (*(golden.model_dir(name) for name in golden.CASES), str(ROOT / "bundled" / "tiny"))


def tiny() -> ModelConfig:
    """The widths of a golden checkpoint: FP8, FP4, layers of all three kinds, hashed and scored ones."""
    config = ModelConfig.load(golden.model_dir("tiny-fp8fp4"))
    kinds = {"num_hidden_layers": 3, "compress_ratios": (0, 4, 128), "num_hash_layers": 2, "num_nextn_predict_layers": 0}
    return replace(config, **kinds, hc_sinkhorn_iters=2)  # type: ignore[arg-type]


@pytest.fixture(params=["references", "kernels"])
def either_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device to compute on, with that backend chosen."""
    if request.param == "references":
        yield torch.device("cpu")
        return
    request.getfixturevalue(triton_backend.__name__)
    monkeypatch.setattr(backend, "choose", lambda device: backend.active())
    yield DEVICE


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_has_every_tensor_of_a_checkpoint_and_no_other(folder: str) -> None:
    stored = {
        name.removeprefix("model."): (entry.dtype, entry.shape, entry.last - entry.first)
        for name, entry in read_safetensors(ROOT / folder / SINGLE_FILE).items()
    }
    made = entries_of(ModelConfig.load(folder))
    assert {name: (entry.dtype, entry.shape, entry.last) for name, entry in made.items()} == stored


def test_a_chunk_and_a_step_of_it(either_backend: torch.device) -> None:
    """Finite logits that tell tokens apart, from streams that are no larger than eight sublayers of unit size make them."""
    checkpoint = RandomCheckpoint(tiny(), either_backend)
    runner = Runner(checkpoint, str(either_backend), num_pages=3, num_slots=2)
    checkpoint.finish()  # nothing is left that the model did not take
    memory, made = Poisoned(256 << 20, either_backend), []
    for row in (Row([5, 6, 7], 0, 1, [1]), Row([8], 3, 1, [1])):
        batch = Batch.build([row], 256, either_backend)
        with memory.active():
            made.append(runner.forward(batch).float().clone())
        with memory.active():
            logits = runner.logits(made[-1].to(runner.transformer.dtype)[:1])
            assert bool(logits.isfinite().all()) and 0.3 < float(logits.std()) < 4.0
    for streams in made:
        assert bool(streams.isfinite().all()) and 0.3 < float(streams.square().mean().sqrt()) < 6.0
    assert float((made[0][0] - made[0][1]).abs().max()) > 0.1


def test_equal_seeds_are_equal_models() -> None:
    first, again, other = (Runner(RandomCheckpoint(tiny(), "cpu", seed), num_pages=2, num_slots=2) for seed in (1, 1, 2))
    batch = Batch.build([Row([3, 4], 0, 1, [1])], 256)
    assert torch.equal(first.forward(batch), again.forward(batch)) and not torch.equal(
        again.forward(batch), other.forward(batch)
    )
    assert first.identity() == again.identity() != other.identity()


def test_what_a_checkpoint_refuses() -> None:
    checkpoint = RandomCheckpoint(tiny(), "cpu")
    with pytest.raises(ValueError, match=r"q_norm.weight in memory is BF16 \[128\]: config.json asks for BF16 \[64\]"):
        checkpoint.take_plain("layers.0.attn.q_norm.weight", 64)
    with pytest.raises(ValueError, match=r"layers.3.attn.q_norm.weight is missing"):
        checkpoint.take_plain("layers.3.attn.q_norm.weight", 128)
    with pytest.raises(ValueError, match=r"tensor embed\.weight is not part of the model"):
        checkpoint.finish()


@pytest.mark.parametrize("target", sorted(backend.TARGETS))
def test_experts_for_kernels_are_as_a_checkpoints(target: str) -> None:
    """In the kernels' order: the same dtypes, shapes and range of scales as when every expert went through `fill`; no two
    experts share codes; a wrong width is refused."""
    before = backend.active()
    backend.use(backend.TARGETS[target])
    try:
        made = RandomCheckpoint(tiny(), "cpu").take_experts("layers.2.ffn.experts", 6, 128, 128)
        checkpoint = RandomCheckpoint(tiny(), "cpu")
        filled = super(RandomCheckpoint, checkpoint).take_experts("layers.2.ffn.experts", 6, 128, 128)
        with pytest.raises(ValueError, match=r"experts.0.w1.weight in memory is I8 \[128, 64\]"):
            checkpoint.take_experts("layers.2.ffn.experts", 6, 128, 256)
    finally:
        backend.use(before)
    for one, other in ((made.w13, filled.w13), (made.w2, filled.w2)):
        for ours, theirs in ((one.values, other.values), (one.scales, other.scales), (one.row_scales, other.row_scales)):
            assert ours is not None and theirs is not None
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert len({codes.numpy().tobytes() for codes in one.values}) == 6
        assert one.scales is not None and other.scales is not None and one.row_scales is not None
        assert bytes_in(one.scales) == bytes_in(other.scales) and bool((one.row_scales > 0).all())


def bytes_in(scales: Tensor) -> set[int]:
    return set(scales.view(torch.uint8).flatten().tolist())


def test_rows_of_matrices_are_about_as_long_as_their_inputs() -> None:
    checkpoint = RandomCheckpoint(tiny(), "cpu")
    for name, shape, dtype, blocks in (
        ("layers.0.attn.wq_b", (768, 128), "F8_E4M3", (6, 1)),
        ("layers.2.ffn.experts.2.w2", (128, 64), "I8", (128, 4)),
    ):
        values = checkpoint.take(f"{name}.weight", shape, dtype)
        length = dequantised(values, checkpoint.take(f"{name}.scale", blocks, "F8_E8M0")).norm(dim=1).mean()
        assert 0.6 < float(length) < 1.5, name


def test_the_released_widths_with_few_layers() -> None:
    config = ModelConfig.from_json(with_layers(RELEASED, 8))
    assert config.compress_ratios == (0, 0, 4, 128, 4, 128, 4, 128) and config.num_hash_layers == 3
    stored = entries_of(config)
    experts = sum(entry.last for name, entry in stored.items() if ".experts." in name)
    assert experts == 8 * 256 * 13_369_344  # e2m1 and a scale byte for every 32 of three matrices of 4096 x 2048
    assert ModelConfig.from_json(with_layers(RELEASED, 1)).compress_ratios == (0,)


def test_a_written_checkpoint_is_one_that_workers_read(tmp_path: Path) -> None:
    """Its experts repeat after eight; nothing else does."""
    described = with_layers(json.loads((ROOT / "bundled/tiny/config.json").read_text()), 4) | {"n_routed_experts": 10}
    write_checkpoint(described, tmp_path, "cpu")
    runner = Runner(str(tmp_path), "cpu", num_pages=3, num_slots=2)
    streams = runner.forward(Batch.build([Row(list(range(2, 9)), 0, 1, [1])], runner.layout.page_tokens, runner.device))
    logits = runner.logits(streams)
    assert bool(logits.isfinite().all()) and len({tuple(row) for row in logits.tolist()}) == 7
    stored = Checkpoint.open(tmp_path, ModelConfig.load(tmp_path))
    name = "layers.{}.ffn.experts.{}.w1.weight"
    codes = {at: stored._read(stored._entries[name.format(*at)]) for at in ((3, 0), (3, 1), (3, 8), (2, 0))}
    assert torch.equal(codes[3, 8], codes[3, 0])
    assert not torch.equal(codes[3, 1], codes[3, 0]) and not torch.equal(codes[2, 0], codes[3, 0])
