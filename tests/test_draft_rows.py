"""The draft layer's rows that prefill leaves for decode: those of a full pass, of any chunks, and they cross."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kvtransfer.layout import Field
from kvtransfer.receiver import Arrived, Receiver
from kvtransfer.sender import Sender, Sent
from model.cache import kv_row
from model.runner import Runner
from tests import golden
from tests.transfer_rig import thread_transport, wait

POISON = 0xFF


def ring_field(model: Runner) -> Field:
    return model.layout.find(model.config.num_layers - 1, "window")


def ring(model: Runner) -> Tensor:
    """uint8 [slots, rows, bytes]"""
    return model.arena.slot_field(ring_field(model))


def live(model: Runner, slot: int, length: int) -> Tensor:
    """The rows that decode may read of a prompt of `length` positions, oldest first."""
    positions = torch.arange(length - ring_field(model).live_rows(length), length)
    return ring(model)[slot, positions % ring_field(model).rows]


def assert_same_rows(name: str, got: Tensor, wanted: Tensor) -> None:
    """On the references equal bytes in the quantised model; in float32 a sum in another order moves last bits. On kernels it
    moves roundings too."""
    if not golden.EXACT:
        assert golden.rows_alike(golden.runner(name), "window", got, wanted)
    elif name == "tiny-fp8fp4":
        assert torch.equal(got, wanted)
    else:
        torch.testing.assert_close(got.view(torch.float32), wanted.view(torch.float32), rtol=0, atol=1e-5)


def whole(name: str, which: str, slot: int) -> tuple[Runner, list[int], Tensor]:
    """A prompt and the live rows that a full pass over it leaves at once."""
    model, (ids, _) = golden.runner(name), golden.prompt(name, which)
    poison(model)
    if len(ids) > 1:
        streams, batch = golden.run(model, [(slot, ids[:-1], 0)])
        model.draft_streams(streams, torch.tensor(ids[1:], device=golden.DEVICE), batch)
    return model, ids, live(model, slot, len(ids) - 1).clone()


def poison(model: Runner) -> None:
    model.arena.pages.fill_(POISON)
    model.arena.slots.fill_(POISON)


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize(
    "rows",
    [
        [(2, 1, 40)],
        [(1, 2, 131), (3, 2, 0), (2, 2, 131)],
        [(1, 5, 254)],
        [(1, 6, 0), (2, 3, 200)],
        [(3, 131, 20), (1, 1, 5)],
        [(2, 300, 0)],
    ],
)
def test_storing_leaves_what_a_full_pass_leaves(name: str, rows: Sequence[tuple[int, int, int]]) -> None:
    """(slot, tokens, start): decode steps and chunks, shorter and longer than the ring. Every byte of every slot."""
    model, ids = golden.runner(name), golden.prompt(name, "len515")[0]
    streams, batch = golden.run(model, [(slot, ids[start : start + count], start) for slot, count, start in rows])
    following = torch.cat([torch.tensor(ids[start + 1 : start + count + 1]) for _, count, start in rows]).to(golden.DEVICE)
    model.arena.slots.fill_(POISON)
    model.draft_streams(streams, following, batch)
    wanted = model.arena.slots.clone()
    assert not (wanted == POISON).all()
    model.arena.slots.fill_(POISON)
    model.store_draft_rows(streams, following, batch)
    assert torch.equal(model.arena.slots, wanted)


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize(
    ("which", "chunk"),
    [
        ("len5", 1),
        ("len131", 1),
        ("len131", 7),
        ("len257", 7),
        ("len300", 64),
        ("len515", 256),
        ("len515", 1024),
        ("len127", 64),
    ],
)
def test_rows_of_a_prompt_in_chunks(name: str, which: str, chunk: int) -> None:
    """Those of the whole at once, and no others: what does not cross is not computed."""
    model, ids, expected = whole(name, which, slot=2)
    poison(model)
    golden.prefill(model, [(1, ids)], chunk)
    length, rows = len(ids) - 1, ring_field(model).rows
    assert_same_rows(name, live(model, 1, length), expected)
    others = sorted(set(range(rows)) - {position % rows for position in range(max(0, length - 127), length)})
    assert (ring(model)[1, others] == POISON).all()
    assert (ring(model)[2:] == POISON).all() and len(expected) == min(length, 127)


@pytest.mark.parametrize("name", golden.CASES)
def test_prompts_in_one_step(name: str) -> None:
    """Some end in it, some are near their end, one is far from it and one has nothing to compute."""
    names = ["len1", "len5", "len515", "len128", "len300"]
    expected = [whole(name, which, slot)[2] for slot, which in enumerate(names, 1)]
    model = golden.runner(name)
    poison(model)
    prompts = [(slot, golden.prompt(name, which)[0]) for slot, which in enumerate(names, 1)]
    golden.prefill(model, prompts, 100)
    for (slot, ids), wanted in zip(prompts, expected, strict=True):
        assert_same_rows(name, live(model, slot, len(ids) - 1), wanted)


@pytest.mark.parametrize("name", golden.CASES)
def test_a_row_that_is_wrong_is_told_from_a_rounding(name: str) -> None:
    """The comparison for kernels, where no GPU is: it passes over values that are rounded otherwise, and sees one row that is
    missing, its neighbour's, or another prompt's; and all of them a little too large."""
    model, _, wanted = whole(name, "len515", slot=2)
    stale = whole(name, "len300", slot=2)[2]
    row = kv_row(model.config, model.kv_dtype)
    values = row.unpack(wanted.cpu())
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rounding = 2**-5 if model.config.quantised else 1e-6  # relative: half of e4m3's last place; float32 sums of the model

    def alike(changed: Tensor) -> bool:
        return golden.rows_alike(model, "window", changed.to(wanted.device), wanted)

    assert alike(wanted)
    assert alike(row.pack((values * (1 + rounding * noise)).to(model.transformer.dtype)))
    for place in range(1, len(wanted)):
        for wrong in (wanted[place - 1], stale[place], torch.full_like(wanted[place], POISON)):
            changed = wanted.clone()
            changed[place] = wrong
            assert not alike(changed), place
    assert not alike(torch.cat((wanted[1:], wanted[:1]))) and not alike(wanted.roll(1, 0))
    assert not alike(row.pack((values * 1.1).to(model.transformer.dtype)))


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("which", ["len1", "len5", "len131", "len300"])
def test_rows_cross_with_the_rest(name: str, which: str) -> None:
    """Between two arenas, into other pages and another slot: decode's ring is prefill's, and so are its first drafts."""
    here, (ids, tokens) = golden.runner(name), golden.prompt(name, which)
    there = Runner(golden.model_dir(name), golden.DEVICE, num_pages=64, num_slots=20)
    poison(here)
    poison(there)
    golden.prefill(here, [(1, ids)], 64)
    hand_over(here, 1, there, 4, len(ids) - 1)
    assert torch.equal(live(there, 4, len(ids) - 1), live(here, 1, len(ids) - 1))
    for step in range(4):
        known = len(ids) - 1 + step
        logits = [drafted(model, slot, [*ids, *tokens], known) for model, slot in ((here, 1), (there, 4))]
        assert torch.equal(*logits) and logits[0].isfinite().all()


def drafted(model: Runner, slot: int, ids: list[int], known: int) -> Tensor:
    """The draft's logits behind a step that feeds the token at position `known`."""
    streams, batch = golden.run(model, [(slot, ids[known : known + 1], known)])
    return model.draft_logits(
        model.draft_streams(streams, torch.tensor(ids[known + 1 : known + 2], device=golden.DEVICE), batch)
    )


def hand_over(here: Runner, slot: int, there: Runner, their_slot: int, length: int) -> None:
    key, out, into = (1, 0), thread_transport(here.arena), thread_transport(there.arena)
    sender, receiver = Sender(here.arena, out), Receiver(there.arena, into, 5.0)
    try:
        sender.open(key)
        sender.granted(receiver.open(key, their_slot, golden.pages_of(their_slot)))
        sender.push(key, golden.pages_of(slot), slot, length, final=True)
        sent = first(sender.poll)
        assert isinstance(sent, Sent)
        receiver.ready(sent.ready)
        assert first(lambda: receiver.poll(0.0)) == Arrived(key, length)
    finally:
        out.close()
        into.close()


def first(poll: Callable[[], Sequence[object]]) -> object:
    """What is reported next."""
    events: list[object] = []

    def look() -> bool:
        events.extend(poll())
        return bool(events)

    assert wait(look)
    return events[0]
