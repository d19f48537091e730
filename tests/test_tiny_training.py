"""The training script's model is the served model, and a step of it learns."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from kernels.quant import dequantise_fp4, dequantise_fp8_weight, simulate_fp4, simulate_fp8
from model.batch import Batch, Row
from model.runner import Runner
from scripts.tiny_data import World, train_tokenizer
from scripts.tiny_export import released_tensors, rounded_parameters, save_safetensors
from scripts.tiny_model import CONFIG, Model, Parameters
from scripts.tiny_rounding import fp4, fp8, fp8_weight
from scripts.train_tiny import Trainer, new_model

LENGTH = 640
NOISE = 0.06  # relative error of logits that rounding explains; a wrong mask, scale or rotation is several times that


@pytest.fixture(scope="module")
def world() -> World:
    torch.set_num_threads(1)
    return World(train_tokenizer(1), 1, 500)


def shaken(parameters: Parameters, seed: int) -> Parameters:
    """Without zeros and ones that would hide a mistake: sinks, biases, norms."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, value in parameters.items():
        noise = torch.randn(value.shape, generator=generator)
        out[name] = value.detach() + 0.2 * noise if name.endswith(("sink", "gate.bias", "norm.weight")) else value.detach()
    return out


def relative(ours: Tensor, served: Tensor) -> float:
    return float((ours.float() - served.float()).norm() / served.float().norm())


def test_forward_is_the_served_forward(world: World, tmp_path: Path) -> None:
    fresh = new_model(world, 1, torch.device("cpu"))
    parameters = shaken(fresh.parameters, 2)
    save_safetensors(tmp_path / "model.safetensors", released_tensors(parameters, fresh.tid2eid))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = Model(rounded_parameters(parameters, fresh.tid2eid), fresh.tid2eid)
    ids = torch.from_numpy(world.recall_sequence(Random(0), LENGTH, 16, 16).ids)[None]
    after = torch.cat((ids[:, 1:], ids[:, :1]), 1)

    runner = Runner(str(tmp_path), num_pages=4, num_slots=2)
    batch = Batch.build([Row(tokens=ids[0].tolist(), start=0, slot=1, pages=[1, 2, 3])], 256, runner.device)
    streams = runner.forward(batch)
    drafts = runner.draft_logits(runner.draft_streams(streams, after[0], batch))
    with torch.no_grad():
        ours = model.forward(ids, sparse=True).streams
        our_drafts = model.logits(model.draft(ours, after, None)[0].flatten(0, 1), "mtp.0.")
    errors = relative(ours[0], streams), relative(model.logits(ours[0]), runner.logits(streams)), relative(our_drafts, drafts)
    assert max(errors) < NOISE, errors


def test_rounding_is_that_of_the_kernels() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 256, generator=generator) * torch.exp(3 * torch.randn(64, 1, generator=generator))).bfloat16()
    assert torch.equal(fp8(x).double(), simulate_fp8(x, 128))
    assert torch.equal(fp4(x).double(), simulate_fp4(x))


def test_what_is_written_is_what_was_trained_with(world: World) -> None:
    model = new_model(world, 1, torch.device("cpu"))
    tensors = released_tensors(model.parameters, model.tid2eid)
    name = "layers.2.attn.wq_b"
    stored = dequantise_fp8_weight(tensors[f"{name}.weight"], tensors[f"{name}.scale"].view(torch.uint8))
    assert torch.equal(fp8_weight(model.parameters[f"{name}.weight"].detach()).double(), stored)
    name = "layers.4.ffn.experts.5.w1"
    stored = dequantise_fp4(tensors[f"{name}.weight"], tensors[f"{name}.scale"].view(torch.uint8))
    assert torch.equal(fp4(model.parameters["layers.4.ffn.experts.w1"].detach()[5]).double(), stored)


def test_a_step_learns_every_part(world: World) -> None:
    model = new_model(world, 1, torch.device("cpu"))
    before = {name: value.detach().clone() for name, value in model.parameters.items()}
    sequence = world.recall_sequence(Random(0), 256, 6, 6)
    ids, learn, source = (torch.from_numpy(part)[None] for part in (sequence.ids, sequence.learn, sequence.source))
    trainer = Trainer(model)
    losses = []
    for _ in range(4):
        trainer.optimiser.set_rate(0.3)
        losses.append({name: float(value) for name, value in trainer.step((ids, learn, source), sparse=False).items()})
    for name in ("text", "draft1", "draft2", "index"):
        assert losses[-1][name] < losses[0][name], (name, losses)
    still = [name for name, value in model.parameters.items() if torch.equal(value.detach(), before[name])]
    assert not still
