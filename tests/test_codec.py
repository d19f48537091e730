"""The wire encoding: everything comes back as it was, and no bytes whatever raise anything but BadMessage."""

from __future__ import annotations

import pickle
from dataclasses import fields, make_dataclass, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.codec import BadMessage, decode, encode, schema_digest
from wire.messages import (
    ALL_SAMPLES,
    MESSAGES,
    Abort,
    Failed,
    Grant,
    Offer,
    Prefill,
    PromptLogprobs,
    Ready,
    Refused,
    SamplingParams,
    Status,
    Tokens,
    pack_ids,
    pack_keys,
    unpack_ids,
    unpack_keys,
)

SAMPLING = SamplingParams(16, 7, temperature=0.5, logit_bias=((3, -1.5), (9, 2.0)), stop_token_ids=(1, 2), ignore_eos=True)
EXAMPLES: list[Any] = [
    Status(
        "decode",
        "d0",
        "serving",
        "tcp://127.0.0.1:1",
        {"page_tokens": 256},
        {"free_pages": 3},
        [{"steps": 4}, {}, {}],
        pack_keys([(7, 1)]),
        9,
    ),
    Refused("page_bytes: 1 and 2"),
    Prefill(1, 0, pack_ids([5, 6]), 2, (0, 1), SAMPLING, "tcp://a:1", "tcp://b:2", 30.0),
    Offer(2**63, 3, b"", 0, (), SAMPLING, "tcp://a:1", "tcp://b:2", "abcd", 0.5),
    Grant(1, 2, 3, pack_ids([9, 8]), "tcp://c:3", b"secret", "decode-1"),
    Ready(1, 2, 300, 4, 10**9, 2**64 - 1),
    PromptLogprobs(1, 2, 1, b"1234", b"5678", b"9012"),
    Tokens("decode-1", [[1, 0, 0, 0, [17], "", None, None], [2, 0, 1, 9, [4, 5], "stop", [-0.5, -1.0], [[[4, -0.5]], []]]]),
    Abort(1, 2),
    Failed(1, 2, ALL_SAMPLES, "transfer", "digest", True, "decode"),
]


def test_examples_cover_every_message() -> None:
    assert {type(example) for example in EXAMPLES} == set(MESSAGES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_comes_back_equal(message: Any) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_first_element_is_the_name_and_fields_follow_in_order(message: Any) -> None:
    raw = msgpack.unpackb(encode(message), strict_map_key=False)
    assert raw[0] == type(message).__name__
    assert len(raw) == 1 + len(fields(message))


def _raw(message: Any) -> list[Any]:
    row = msgpack.unpackb(encode(message), strict_map_key=False)
    assert isinstance(row, list)
    return row


@pytest.mark.parametrize(
    ("position", "value", "field"),
    [
        (1, "1", "rid"),
        (1, True, "rid"),
        (1, 1.0, "rid"),
        (1, None, "rid"),
        (3, "pages", "tokens"),
        (5, [0, "1"], "samples"),
        (5, 0, "samples"),
        (6, [], "sampling"),
        (7, b"tcp://a:1", "decode_inbox"),
        (9, "soon", "timeout_s"),
    ],
)
def test_wrong_type_is_refused_by_field(position: int, value: Any, field: str) -> None:
    row = _raw(EXAMPLES[2])
    row[position] = value
    with pytest.raises(BadMessage, match=f"Prefill.{field}"):
        decode(msgpack.packb(row))


def test_nested_and_tuple_fields_are_checked_to_the_bottom() -> None:
    for bias in ([[1]], [[1, 2.0, 3]], [["1", 2.0]], [1], {"1": 2}):
        row = _raw(EXAMPLES[2])
        row[6][10] = bias
        with pytest.raises(BadMessage, match="logit_bias"):
            decode(msgpack.packb(row))
    row = _raw(EXAMPLES[2])
    row[6][0] = "Abort"
    with pytest.raises(BadMessage, match="SamplingParams"):
        decode(msgpack.packb(row))


def test_an_int_may_stand_for_a_float_and_becomes_one() -> None:
    message = decode(encode(replace(EXAMPLES[2], timeout_s=30)))
    assert message.timeout_s == 30.0
    assert isinstance(message.timeout_s, float)


@pytest.mark.parametrize("change", [lambda row: row[:-1], lambda row: [*row, 0]], ids=["short", "long"])
def test_wrong_number_of_fields_is_refused(change: Any) -> None:
    for message in EXAMPLES:
        with pytest.raises(BadMessage, match=type(message).__name__):
            decode(msgpack.packb(change(_raw(message))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps(["Abort", 1, 2, -1]),
        msgpack.packb(["Nobody", 1]),
        msgpack.packb(["SamplingParams", *[0] * 15]),
        msgpack.packb({"Abort": 1}),
        msgpack.packb([["Abort"], 1]),
        msgpack.packb("Abort"),
        msgpack.packb(None),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xa5\xff\xff\xff\xff\xff",
        msgpack.packb({(1, 2): 3}),
        encode(EXAMPLES[0]) + b"\x00",
        encode(EXAMPLES[0])[:-1],
    ],
    ids=repr,
)
def test_junk_is_a_bad_message(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data)


@given(st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_any_bytes_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data)


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(LEAVES, inner, max_size=3), max_leaves=12
)


@given(st.sampled_from([cls.__name__ for cls in MESSAGES]), st.lists(TREES, max_size=16))
@settings(max_examples=400, deadline=None)
def test_any_structure_is_a_message_or_bad(name: str, values: list[Any]) -> None:
    try:
        message = decode(msgpack.packb([name, *values]))
    except BadMessage:
        return
    assert type(message).__name__ == name
    assert repr(decode(encode(message))) == repr(message)  # repr: NaN is not equal to itself


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=400, deadline=None)
def test_one_changed_byte_is_a_message_or_bad(message: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert type(decode(bytes(raw))) in MESSAGES
    except BadMessage:
        return


def test_what_is_no_message_cannot_be_encoded() -> None:
    with pytest.raises(KeyError):
        encode(SAMPLING)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_come_back(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert unpack_ids(packed) == ids


def test_ids_are_little_endian_uint32() -> None:
    assert pack_ids([1, 256]) == bytes([1, 0, 0, 0, 0, 1, 0, 0])
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_ids([bad])
    with pytest.raises(ValueError, match="whole number"):
        unpack_ids(b"12345")


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))))
def test_keys_come_back(keys: list[tuple[int, int]]) -> None:
    packed = pack_keys(keys)
    assert len(packed) == 12 * len(keys)
    assert unpack_keys(packed) == keys


def test_keys_are_little_endian_and_never_fail_a_worker() -> None:
    assert pack_keys([(1, 256)]) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
    assert unpack_keys(pack_keys([(-1, 2**32 + 5)])) == [(2**64 - 1, 5)]
    with pytest.raises(ValueError, match="whole number"):
        unpack_keys(b"x" * 13)


def test_whoever_has_other_messages_is_known_by_their_digest() -> None:
    """A field more, another type, another order, and so in what a message has inside; but not the order of the messages."""

    def of(*names: tuple[str, str], inside: tuple[str, str] = ("seed", "int")) -> str:
        params = make_dataclass("Params", [inside])
        types = {"int": int, "str": str, "Params": params}
        offer = make_dataclass("Offer", [(name, types[kind]) for name, kind in (*names, ("sampling", "Params"))])
        return schema_digest([offer, Abort])

    ours = of(("rid", "int"), ("text", "str"))
    others = [of(("rid", "int")), of(("rid", "str"), ("text", "str")), of(("text", "str"), ("rid", "int"))]
    others.append(of(("rid", "int"), ("text", "str"), inside=("seed", "str")))
    assert ours == of(("rid", "int"), ("text", "str")) and len({ours, *others}) == 5
    assert schema_digest() == schema_digest(list(reversed(MESSAGES))) != schema_digest(MESSAGES[1:])
