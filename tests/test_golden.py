"""The model against DeepSeek's own code: every stored prompt of both tiny checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.batch import Batch, Row
from model.runner import Runner
from model.transformer import Transformer
from tests import golden

KERNEL_ROOM = {"tiny-bf16": 1e-4, "tiny-fp8fp4": 0.1}


def judge(name: str, results: dict[str, Any], arrays: dict[str, Any]) -> None:
    assert golden.verify().check(golden.case(name), results, arrays), "see the report above"


@pytest.mark.parametrize(("name", "index_keys"), [*((name, "auto") for name in golden.CASES), ("tiny-fp8fp4", "mxfp4")])
def test_every_prompt_alone(name: str, index_keys: str) -> None:
    """Prefill in one piece, 31 one-token steps, full logits and MTP logits where they are stored."""
    case, model = golden.case(name), golden.runner(name, index_keys=index_keys)
    results: dict[str, Any] = {"prompts": {}}
    arrays: dict[str, Any] = {}
    last_drafts: dict[str, torch.Tensor] = {}
    for which, stored in case.prompts.items():
        ids = list(stored["ids"])
        streams, batch = golden.run(model, [(1, ids, 0)])
        logits = model.logits(streams).cpu()
        first = int(logits[-1].argmax())
        following = torch.tensor([*ids[1:], first], device=golden.DEVICE)
        drafted = model.draft_logits(model.draft_streams(streams, following, batch)).cpu()
        arrays |= {f"{which}.logits": logits.numpy(), f"{which}.last_logits": logits[-1].numpy()}
        arrays[f"{which}.mtp_logits"] = drafted.numpy()
        last_drafts[which] = drafted[-1]
        results["prompts"][which] = {"tokens": golden.greedy(model, [first], [len(ids)], [1], case.n - 1)[0]}
    judge(name, results, arrays)
    judge_last_drafts(name, last_drafts)


def judge_last_drafts(name: str, drafts: dict[str, torch.Tensor]) -> None:
    """The limits are for a whole prompt's rows, of which 2% move far when a rounding flips an expert: so the 15 rows are
    judged together, and one by one with the room that a row of main logits gets."""
    case = golden.case(name)
    limits = case.js["tolerance"][case.js["default_profile"]]
    stored = {which: torch.from_numpy(case.t[f"{which}.mtp_last_logits"].copy()) for which in drafts}
    errors = {which: (draft - stored[which]).square().mean().sqrt() for which, draft in drafts.items()}
    assert torch.stack([*errors.values()]).square().mean().sqrt() <= limits["mtp_rms"], errors
    assert max(errors.values()) <= max(limits["last_rms"], limits["mtp_rms"]), errors


@pytest.mark.parametrize("name", golden.CASES)
def test_drafts_after_a_prefill_in_chunks(name: str) -> None:
    """The draft behind every prompt's first token, where the prompt's own rows of the draft layer are those that prefill
    leaves for decode: the stored MTP logits."""
    case, model = golden.case(name), golden.runner(name)
    model.arena.slots.fill_(0xFF)  # NaN: a row that is missing shows
    drafts: dict[str, torch.Tensor] = {}
    for number, which in enumerate(case.prompts):
        ids, tokens = golden.prompt(name, which)
        golden.prefill(model, [(1, ids)], (64, 256, 7)[number % 3])
        streams, batch = golden.run(model, [(1, ids[-1:], len(ids) - 1)])
        following = torch.tensor(tokens[:1], device=golden.DEVICE)
        drafts[which] = model.draft_logits(model.draft_streams(streams, following, batch))[0].cpu()
    judge_last_drafts(name, drafts)


@pytest.mark.parametrize("name", golden.CASES)
def test_the_stored_batches_decoded_together(name: str) -> None:
    """Prompts of a batch prefilled in one ragged step and decoded together give their solo tokens."""
    case, model = golden.case(name), golden.runner(name)
    batches = []
    for stored in case.js["batches"]:
        prompts = [golden.prompt(name, which)[0] for which in stored["prompts"]]
        slots = list(range(1, len(prompts) + 1))
        streams, batch = golden.run(model, [(slot, ids, 0) for slot, ids in zip(slots, prompts, strict=True)])
        first = model.logits(streams[batch.cu_tokens[1:] - 1]).argmax(-1).tolist()
        tokens = golden.greedy(model, first, [len(ids) for ids in prompts], slots, case.n - 1)
        batches.append({"prompts": stored["prompts"], "tokens": tokens})
    judge(name, {"batches": batches}, {})


@pytest.mark.parametrize("chunk", [7, 64, 1024])
@pytest.mark.parametrize(("which", "k"), [("len5", 1), ("len5", 2), ("len131", 1), ("len131", 2), ("len257", 2)])
def test_draft_rounds(which: str, k: int, chunk: int) -> None:
    """Speculation by hand behind a prefill in chunks: drafts, verification of k+1 tokens in one step, rollback by taking the
    old length again."""
    name = "tiny-bf16"
    model = golden.runner(name)
    model.arena.slots.fill_(0xFF)
    ids, expected = golden.prompt(name, which)
    golden.prefill(model, [(1, ids)], chunk)
    rounds, emitted = speculate(model, ids, k, golden.case(name).n)
    assert emitted[: len(expected)] == expected
    judge(name, {"prompts": {which: {"mtp_rounds": {str(k): rounds}}}}, {})


def speculate(model: Runner, ids: list[int], k: int, count: int) -> tuple[list[int], list[int]]:
    """(accepted drafts of each round, all tokens) behind a prompt of which all but the last token is in slot 1."""
    known = len(ids) - 1
    streams, batch = golden.run(model, [(1, ids[known:], known)])
    emitted = [int(model.logits(streams).argmax())]
    hidden = model.draft_streams(streams, torch.tensor(emitted, device=golden.DEVICE), batch)
    rounds, known = [], len(ids)
    while len(emitted) < count:
        drafts = [int(model.draft_logits(hidden[-1:]).argmax())]
        if k == 2:
            row = Batch.build([Row([emitted[-1]], known, 1, golden.pages_of(1))], golden.PAGE_TOKENS, golden.DEVICE)
            behind = model.draft_streams(hidden[-1:], torch.tensor(drafts, device=golden.DEVICE), row)
            drafts.append(int(model.draft_logits(behind).argmax()))
        streams, batch = golden.run(model, [(1, [emitted[-1], *drafts], known)])
        best = model.logits(streams).argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != best[i]), k)
        rounds.append(accepted)
        emitted += best[: accepted + 1]
        row = Batch.build([Row(best[: accepted + 1], known, 1, golden.pages_of(1))], golden.PAGE_TOKENS, golden.DEVICE)
        hidden = model.draft_streams(streams[: accepted + 1], torch.tensor(best[: accepted + 1], device=golden.DEVICE), row)
        known += accepted + 1
    return rounds, emitted


@pytest.mark.parametrize(
    ("name", "limits"),
    [("tiny-bf16", [1e-5] * 7), ("tiny-fp8fp4", [1e-4] * 5)],
)
def test_streams_of_each_layer(name: str, limits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative rms of the streams of a prompt short enough for one softmax block. Quantised, five layers of all three
    kinds are equal but for a bit here and there (a flip in any of them would give 0.006 and more in the next layer): every
    rounding is where the reference has it, which no tolerance on logits can show.

    The stored values come from torch on a CPU, whose bf16 rsqrt of a few numbers rounds twice; so the query norm is that
    for this one comparison."""
    monkeypatch.setattr("kernels.norm.query_norm_reference", torch_query_norm)
    model, stored = golden.runner(name), golden.layer_outputs(name)
    ids = golden.prompt(name, "len5")[0]
    batch = Batch.build([Row(ids, 0, 1, golden.pages_of(1))], golden.PAGE_TOKENS, golden.DEVICE)
    for layer, limit in enumerate(limits):
        part = object.__new__(Transformer)
        part.__dict__ |= model.transformer.__dict__ | {"layers": model.transformer.layers[: layer + 1]}
        with torch.inference_mode():
            streams = part.forward(batch, model.main_caches[: layer + 1]).double().cpu()
        expected = stored[f"len5.layer{layer}.streams"].double()
        error = ((streams.view_as(expected) - expected).square().mean() / expected.square().mean()).sqrt()
        room = KERNEL_ROOM[name] if golden.DEVICE == "cuda" else limit  # float32 sums flip a rounding here and there
        assert error <= room, f"layer {layer}: {error:.3g}"


def test_a_sharded_checkpoint_is_the_same_model() -> None:
    whole, sharded = golden.runner("tiny-bf16"), golden.runner("tiny-bf16", folder="model-sharded")
    assert whole.identity() == sharded.identity()
    ids = golden.prompt("tiny-bf16", "len131")[0]
    assert torch.equal(golden.logits_in_chunks(whole, ids, [256]), golden.logits_in_chunks(sharded, ids, [256]))


def torch_query_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
