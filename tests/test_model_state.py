"""What a sequence leaves in the arena is all that its future needs: any cut, any company, a hand-off, a rollback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.batch import Batch, Row
from model.cache import ROLLBACK_TOKENS
from model.runner import Runner
from tests import golden

POISON = 0xFF  # 0xFFFF.. is NaN in float32, bfloat16 and e4m3


def assert_same(name: str, got: Tensor, wanted: Tensor) -> None:
    """Equal bits when activations are bf16: a float64 sum in another order never crosses a bf16 rounding boundary here.

    In float32 it may, about once in 10^8 values; then a row differs in its last bits. Kernels add up in float32,
    and theirs are apart as the golden set says that the reference's are from its own: by up to 0.42 where a row of the
    quantised model is alone, for which `last_rms` is a little less."""
    got, wanted = got.cpu(), wanted.cpu()
    if not golden.EXACT:
        limits = golden.case(name).js["tolerance"][golden.case(name).js["default_profile"]]
        assert (got - wanted).square().mean().sqrt() <= 1.5 * limits["last_rms"]
    elif name == "tiny-fp8fp4":
        assert torch.equal(got, wanted)
    else:
        assert (got == wanted).all(1).double().mean() > 0.97
        assert (got - wanted).abs().max() < 1e-5


def whole(name: str, which: str) -> tuple[Runner, list[int], Tensor]:
    """The prompt and its greedy continuation, and the logits of all of it in one step."""
    model, (ids, tokens) = golden.runner(name), golden.prompt(name, which)
    ids = ids + tokens[:8]
    return model, ids, golden.logits_in_chunks(model, ids, [len(ids)], slot=2)


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize(
    ("which", "cuts"),
    [
        ("len131", [1]),
        ("len257", [7]),
        ("len300", [64]),
        ("len515", [256]),
        ("len300b", [129, 1, 3, 4, 127, 1]),
        ("len131", [5, 1, 1, 1, 1, 124, 1]),
    ],
)
def test_chunks_give_the_logits_of_the_whole(name: str, which: str, cuts: list[int]) -> None:
    model, ids, expected = whole(name, which)
    assert_same(name, golden.logits_in_chunks(model, ids, cuts), expected)


@pytest.mark.parametrize("name", golden.CASES)
def test_company_changes_nothing(name: str) -> None:
    """Eight sequences of other lengths in one step: prompts, a chunk of a prompt and single tokens mixed."""
    names = ["len1", "len5", "len127", "len128", "len131", "len255", "len257", "len300b"]
    model = golden.runner(name)
    sequences = [ids + tokens for ids, tokens in (golden.prompt(name, which) for which in names)]
    alone = [golden.logits_in_chunks(model, ids, [len(ids)]) for ids in sequences]
    ends = [0] * len(names)
    for sizes in ([1, 2, 127, 100, 0, 3, 257, 64], [1, 1, 1, 28, 131, 252, 1, 1], [1] * 8, [1] * 8, [0, 1, 0, 1, 0, 1, 0, 1]):
        rows = [
            (slot, ids[end : end + size], end)
            for slot, (ids, end, size) in enumerate(zip(sequences, ends, sizes, strict=True), 1)
            if size
        ]
        streams, batch = golden.run(model, rows)
        for (slot, tokens, start), got in zip(rows, streams.tensor_split(batch.cu_tokens[1:-1].tolist()), strict=True):
            assert_same(name, model.logits(got), alone[slot - 1][start : start + len(tokens)])
            ends[slot - 1] = start + len(tokens)


@pytest.mark.parametrize("name", golden.CASES)
def test_padding_rows_change_nothing(name: str) -> None:
    """A captured step's padding is rows of token 0 at position 0 in slot 0 and page 0, all the same ones."""
    model, ids, expected = whole(name, "len131")
    poison(model)
    golden.run(model, [(1, ids[:130], 0)])
    rows = [Row([0], 0, 0, [0]), Row(ids[130:131], 130, 1, golden.pages_of(1)), Row([0], 0, 0, [0])]
    streams = model.forward(Batch.build(rows, golden.PAGE_TOKENS, golden.DEVICE))
    assert_same(name, model.logits(streams[1:2]), expected[130:131])
    assert model.logits(streams).isfinite().all()


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 127, 128, 129, 131, 255, 256, 257])
def test_only_live_bytes_are_read(name: str, length: int) -> None:
    """The hand-off set: everything but the live slot rows and the closed entries is NaN, and the text goes on unchanged."""
    model, ids, expected = whole(name, "len257")
    poison(model)
    if length:
        golden.run(model, [(1, ids[:length], 0)])
    keep_live(model, slot=1, length=length)
    got = golden.logits_in_chunks(model, ids[length : length + 6], [1, 4, 1], start=length)
    assert_same(name, got, expected[length : length + 6])


def poison(model: Runner) -> None:
    model.arena.pages.fill_(POISON)
    model.arena.slots.fill_(POISON)


def keep_live(model: Runner, slot: int, length: int) -> None:
    """Copies the bytes of the hand-off of `slot` aside, poisons the whole arena, and puts them back."""
    arena, layout = model.arena, model.layout
    pages, slots = arena.pages.clone(), arena.slots.clone()
    poison(model)
    for offset, nbytes in layout.live_slot_spans(length):
        arena.slots[slot, offset : offset + nbytes] = slots[slot, offset : offset + nbytes]
    for field in layout.page:
        for page_number, page in enumerate(golden.pages_of(slot)):
            rows = min(max(length // field.stride - page_number * field.rows, 0), field.rows)
            row = golden.row_of(model, field.kind)
            scales_at = field.offset + field.rows * row.value_bytes  # a page keeps values and scales apart
            for offset, nbytes in ((field.offset, row.value_bytes), (scales_at, row.scale_bytes)):
                span = slice(offset, offset + rows * nbytes)
                arena.pages[page, span] = pages[page, span]


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("length", [1, 3, 4, 126, 127, 128, 254, 256])
def test_lowering_a_length_is_a_rollback(name: str, length: int) -> None:
    """1..4 other tokens are written and taken back again and again, in one step or one by one."""
    model, ids, expected = whole(name, "len257")
    poison(model)
    golden.run(model, [(1, ids[:length], 0)])
    for step, position in enumerate(range(length, length + 6)):
        rejected = [(token * 7 + step) % 318 + 2 for token in ids[position : position + 1 + step % ROLLBACK_TOKENS]]
        golden.logits_in_chunks(model, rejected, [1 if step % 2 else len(rejected)], start=position)
        got = golden.logits_in_chunks(model, ids[position : position + 1], [1], start=position)
        assert_same(name, got, expected[position : position + 1])


def test_more_than_a_ring_can_take_back_is_too_much() -> None:
    """The test above would notice. A step of K+1 tokens can be taken back whole; one more overwrites a row still needed."""
    model, ids, expected = whole("tiny-bf16", "len257")
    length, rejected = 200, [5, 6, 7, 8, 9, 10]
    golden.run(model, [(1, ids[:length], 0)])
    golden.logits_in_chunks(model, rejected, [1], start=length)
    got = golden.logits_in_chunks(model, ids[length : length + 1], [1], start=length)
    assert len(rejected) == ROLLBACK_TOKENS + 2
    assert (got - expected[length]).abs().max() > 1e-3


@pytest.mark.parametrize("name", golden.CASES)
def test_drafts_after_a_rollback_and_in_company(name: str) -> None:
    """The MTP layer's ring follows the same rules."""
    model, ids, _ = whole(name, "len131")
    following = torch.tensor([*ids[1:], 5], device=golden.DEVICE)
    streams, batch = golden.run(model, [(2, ids, 0)])
    expected = model.draft_logits(model.draft_streams(streams, following, batch))
    poison(model)
    cut = 100
    got = []
    for start, end in ((0, cut), (cut, cut + 3), (cut, cut + 1), (cut + 1, len(ids))):
        streams, batch = golden.run(model, [(1, ids[start:end], start), (3, ids[: end - start], 0)])
        both = torch.cat((following[start:end], following[: end - start]))
        got.append(model.draft_logits(model.draft_streams(streams, both, batch)[: end - start]))
    assert_same(name, torch.cat((got[0], got[2], got[3])), expected)


@pytest.mark.parametrize("length", [3, 4, 131, 256])
def test_only_live_bytes_of_mxfp4_keys_are_read(length: int) -> None:
    _, ids, expected = whole("tiny-fp8fp4", "len257")
    model = golden.runner("tiny-fp8fp4", index_keys="mxfp4")
    poison(model)
    golden.run(model, [(1, ids[:length], 0)])
    keep_live(model, slot=1, length=length)
    got = golden.logits_in_chunks(model, ids[length : length + 6], [1, 4, 1], start=length)
    assert_same("tiny-fp8fp4", got, expected[length : length + 6])


@pytest.mark.parametrize(("kv_dtype", "index_keys"), [("bf16", "auto"), ("fp32", "auto"), ("auto", "mxfp4"), ("bf16", "mxfp4")])
def test_the_quantised_model_has_one_kv_value_in_every_format(kv_dtype: str, index_keys: str) -> None:
    """Its rows are rounded to FP8 before they are stored, index keys to FP4, so a wider row changes no bit; but the kernel that
    reads it may."""
    ids = golden.prompt("tiny-fp8fp4", "len257")[0]
    expected = golden.logits_in_chunks(golden.runner("tiny-fp8fp4"), ids, [100])
    assert_same(
        "tiny-fp8fp4",
        golden.logits_in_chunks(golden.runner("tiny-fp8fp4", kv_dtype, index_keys=index_keys), ids, [100]),
        expected,
    )


@pytest.mark.parametrize(("kv_dtype", "limit"), [("bf16", 0.1), ("fp8", 0.6)])
def test_narrower_kv_than_the_checkpoint_asks_for(kv_dtype: str, limit: float) -> None:
    """Unquantised weights with a narrower cache: near the fp32 logits (standard deviation 2.9), and not equal."""
    ids = golden.prompt("tiny-bf16", "len257")[0]
    expected = golden.logits_in_chunks(golden.runner("tiny-bf16"), ids, [100])
    error = (golden.logits_in_chunks(golden.runner("tiny-bf16", kv_dtype), ids, [100]) - expected).square().mean().sqrt()
    assert 1e-4 < error < limit


def test_rows_of_a_batch_are_checked() -> None:
    for row, message in (
        (Row([], 0, 1, [1]), "one token at least"),
        (Row([5], -1, 1, [1]), "start of 0 or more"),
        (Row([5], 256, 1, [1]), "2 pages are needed"),
    ):
        with pytest.raises(ValueError, match=message):
            Batch.build([row], golden.PAGE_TOKENS)
    with pytest.raises(ValueError, match="one row at least"):
        Batch.build([], golden.PAGE_TOKENS)
