"""Loading: a checkpoint that is cut off, corrupt, incomplete or another model is refused by name; equal ones are equal."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import quant
from kvtransfer.layout import difference
from model.config import ModelConfig
from model.runner import Runner
from model.weights import INDEX_FILE, SAMPLE_BYTES, SINGLE_FILE, Checkpoint
from tests import golden

Header = dict[str, dict[str, Any]]


def read(path: Path) -> tuple[Header, bytes]:
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write(path: Path, header: Header, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def copy(name: str, tmp_path: Path, folder: str = "model") -> Path:
    return Path(shutil.copytree(golden.model_dir(name, folder), tmp_path / "model"))


def load(directory: Path) -> Runner:
    return Runner(str(directory), num_pages=2, num_slots=2)


def drop(header: Header, name: str, body: bytes) -> bytes:
    """Takes a tensor out, bytes and all."""
    first, last = header.pop(name)["data_offsets"]
    for item in header.values():
        if "data_offsets" in item and item["data_offsets"][0] >= last:
            item["data_offsets"] = [offset - (last - first) for offset in item["data_offsets"]]
    return body[:first] + body[last:]


def add(header: Header, name: str, body: bytes) -> bytes:
    header[name] = {"dtype": "BF16", "shape": [2], "data_offsets": [len(body), len(body) + 4]}
    return body + bytes(4)


def renamed(header: Header, old: str, new: str) -> Header:
    return {new if name == old else name: item for name, item in header.items()}


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("tiny-bf16", lambda h, b: (h, drop(h, "layers.3.attn.kv_norm.weight", b)), "layers.3.attn.kv_norm.weight is missing"),
        ("tiny-bf16", lambda h, b: (h, drop(h, "mtp.0.enorm.weight", b)), "mtp.0.enorm.weight is missing"),
        ("tiny-fp8fp4", lambda h, b: (h, drop(h, "layers.0.attn.wkv.scale", b)), "layers.0.attn.wkv.scale is missing"),
        ("tiny-fp8fp4", lambda h, b: (h, drop(h, "layers.6.ffn.experts.5.w2.scale", b)), "experts.5.w2.scale is missing"),
        ("tiny-bf16", lambda h, b: (h, add(h, "layers.7.attn_norm.weight", b)), "layers.7.attn_norm.weight is not part"),
        ("tiny-bf16", lambda h, b: (h, add(h, "layers.0.attn.wkv.scale", b)), "layers.0.attn.wkv.scale is not part"),
        ("tiny-bf16", lambda h, b: (h, add(h, "model.norm.weight", b)), "norm.weight is in the checkpoint twice"),
        ("tiny-bf16", lambda h, b: (h, add(h, "mtp.0.main_proj.weight", b)), "mtp.0.main_proj.weight belongs to a DSpark"),
        (
            "tiny-bf16",
            lambda h, b: (h, add(h, "mtp.2.markov_head.markov_w1.weight", b)),
            "markov_w1.weight belongs to a DSpark",
        ),
        ("tiny-bf16", lambda h, b: (renamed(h, "embed.weight", "embedding.weight"), b), "embed.weight is missing"),
    ],
)
def test_a_tensor_too_few_or_too_many(
    name: str, edit: Callable[[Header, bytes], tuple[Header, bytes]], message: str, tmp_path: Path
) -> None:
    directory = copy(name, tmp_path)
    write(directory / SINGLE_FILE, *edit(*read(directory / SINGLE_FILE)))
    with pytest.raises(ValueError, match=message):
        load(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [1, 16]}, r"q_norm.weight has 96 bytes for BF16 \[1, 16\]"),
        ({"shape": [6, 8]}, r"q_norm.weight in model.safetensors is BF16 \[6, 8\]: config.json asks for BF16 \[48\]"),
        ({"dtype": "F16"}, r"q_norm.weight in model.safetensors is F16"),
        ({"dtype": "F12"}, "unknown dtype 'F12'"),
    ],
)
def test_a_tensor_of_another_kind(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path)
    header, body = read(directory / SINGLE_FILE)
    header["layers.0.attn.q_norm.weight"] |= change
    write(directory / SINGLE_FILE, header, body)
    with pytest.raises(ValueError, match=message):
        load(directory)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw[:-1], "cut off"),
        (lambda raw: raw[: len(raw) // 2], "cut off"),
        (lambda raw: raw + b"x", "corrupt"),
        (lambda raw: raw[:100], "cut off"),
        (lambda raw: raw[:5], "cut off"),
        (lambda raw: b"\xff" * 8 + raw[8:], "names a header of"),
        (lambda raw: raw[:8] + b"\xff" * 20 + raw[28:], "header cannot be read"),
        (lambda raw: raw.replace(b"data_offsets", b"data_offzets", 1), "header cannot be read"),
    ],
)
def test_a_cut_off_or_corrupt_file(edit: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path)
    path = directory / SINGLE_FILE
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_overlapping_tensors(tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path)
    header, body = read(directory / SINGLE_FILE)
    header["mtp.0.enorm.weight"]["data_offsets"] = header["mtp.0.hnorm.weight"]["data_offsets"]
    write(directory / SINGLE_FILE, header, body)
    with pytest.raises(ValueError, match="begins at byte"):
        load(directory)


def test_bad_shards(tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path, "model-sharded")
    index = json.loads((directory / INDEX_FILE).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    name = next(key for key, shard in index["weight_map"].items() if shard == first)

    def refused(weight_map: Any, message: str) -> None:
        (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            load(directory)

    refused(index["weight_map"] | {name: second}, f"{name} is not in {second}")
    refused({key: shard for key, shard in index["weight_map"].items() if key != name}, f"{name} is in {first}, where")
    refused(index["weight_map"] | {name: "../model.safetensors"}, "is missing in")
    refused([1, 2], "no weight_map")
    (directory / second).unlink()
    refused(index["weight_map"], f"shard {second} is missing")
    (directory / INDEX_FILE).unlink()
    with pytest.raises(ValueError, match="holds neither"):
        load(directory)


def test_names_may_have_a_prefix(tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path)
    header, body = read(directory / SINGLE_FILE)
    write(directory / SINGLE_FILE, {k if k == "__metadata__" else f"model.{k}": v for k, v in header.items()}, body)
    assert load(directory).identity()["model.checkpoint"] == golden.runner("tiny-bf16").identity()["model.checkpoint"]


def test_an_expert_outside_the_table(tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path)
    header, body = read(directory / SINGLE_FILE)
    first = header["layers.1.ffn.gate.tid2eid"]["data_offsets"][0]
    write(directory / SINGLE_FILE, header, body[:first] + struct.pack("<q", 16) + body[first + 8 :])
    with pytest.raises(ValueError, match=r"layers.1.ffn.gate.tid2eid names an expert outside 0\.\.15"):
        load(directory)


def test_fp8_experts_give_the_same_model(tmp_path: Path) -> None:
    """The FP4 experts of the tiny checkpoint repacked as FP8, losslessly (spec D), as the base checkpoint has them."""
    directory = copy("tiny-fp8fp4", tmp_path)
    config = ModelConfig.load(directory)
    header, body = read(directory / SINGLE_FILE)
    parts: list[bytes] = []
    fresh: Header = {}
    at = 0
    for name, item in header.items():
        if name == "__metadata__":
            continue
        first, last = item["data_offsets"]
        data, dtype, shape = body[first:last], item["dtype"], item["shape"]
        if ".experts." in name and name.endswith(".weight"):
            start, end = header[name.replace(".weight", ".scale")]["data_offsets"]
            codes = torch.frombuffer(bytearray(data), dtype=torch.int8).view(shape)
            scale = torch.frombuffer(bytearray(body[start:end]), dtype=torch.uint8).view(shape[0], shape[1] // 16)
            value = quant.dequantise_fp4(codes, scale)
            top = int(scale.max()) - 6
            data = (value / 2.0 ** (top - 127)).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
            dtype, shape, tops = "F8_E4M3", [shape[0], shape[1] * 2], bytes([top])
            fresh[name.replace(".weight", ".scale")] = {"dtype": "F8_E8M0", "shape": [1, 1], "data_offsets": [at, at + 1]}
            parts.append(tops)
            at += 1
        elif ".experts." in name:
            continue
        fresh[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    write(directory / SINGLE_FILE, fresh, b"".join(parts))
    text = json.loads((directory / "config.json").read_text()) | {"expert_dtype": "fp8"}
    (directory / "config.json").write_text(json.dumps(text))
    assert config.expert_dtype == "fp4" and ModelConfig.load(directory).expert_dtype == "fp8"

    model = Runner(str(directory), num_pages=4, num_slots=2)
    ids = golden.prompt("tiny-fp8fp4", "len131")[0]
    fp4 = Runner(golden.model_dir("tiny-fp8fp4"), num_pages=4, num_slots=2)
    expected = golden.logits_in_chunks(fp4, ids, [200])
    assert torch.equal(golden.logits_in_chunks(model, ids, [200]), expected)


def test_a_model_without_mtp(tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path)
    text = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (directory / "config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=r"tensor mtp\.0\..* is not part of the model"):
        load(directory)
    header, body = read(directory / SINGLE_FILE)
    for name in [key for key in header if key.startswith("mtp.")]:
        body = drop(header, name, body)
    write(directory / SINGLE_FILE, header, body)
    model = Runner(str(directory), num_pages=4, num_slots=2)
    streams, batch = golden.run(model, [(1, [5, 6], 0)])
    with pytest.raises(ValueError, match="no MTP layer"):
        model.draft_streams(streams, torch.tensor([6, 7]), batch)


def test_identity_tells_checkpoints_apart(tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path)
    ours = golden.runner("tiny-bf16").identity()
    header, body = read(directory / SINGLE_FILE)
    first = header["layers.4.attn.wq_a.weight"]["data_offsets"][0]
    write(directory / SINGLE_FILE, header, body[:first] + bytes([body[first] ^ 1]) + body[first + 1 :])
    theirs = load(directory).identity()
    assert {name for name in ours if ours[name] != theirs[name]} == {"model.checkpoint"}
    narrow = Runner(str(directory), kv_dtype="bf16", num_pages=2, num_slots=2).identity()
    assert narrow["kv_dtype"] == "bf16" and narrow["layout"] != theirs["layout"]
    packed = golden.runner("tiny-fp8fp4", index_keys="mxfp4").identity()
    assert difference(golden.runner("tiny-fp8fp4").identity(), packed) == "index_keys: 'fp8' and 'mxfp4'"
    assert set(ours) >= {"model.hidden_size", "model.checkpoint", "dtype", "kv_dtype", "page_bytes", "layout"}


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_the_digest_looks_at_the_start_middle_and_end_of_every_tensor(where: float, tmp_path: Path) -> None:
    directory = copy("tiny-bf16", tmp_path)
    header, body = read(directory / SINGLE_FILE)
    first, last = max(
        (item["data_offsets"] for name, item in header.items() if name != "__metadata__"), key=lambda ends: ends[1] - ends[0]
    )
    assert last - first > 4 * SAMPLE_BYTES, "the tensor is hashed whole: the test shows nothing"
    at = first + int(where * (last - first - 1))
    before = Checkpoint.open(directory, golden.runner("tiny-bf16").config).digest()
    write(directory / SINGLE_FILE, header, body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
    assert Checkpoint.open(directory, golden.runner("tiny-bf16").config).digest() != before


def test_reading_leaves_the_file_alone(tmp_path: Path) -> None:
    """The mapping is private: nothing the model does can reach the checkpoint."""
    directory = copy("tiny-bf16", tmp_path)
    before = (directory / SINGLE_FILE).read_bytes()
    checkpoint = Checkpoint.open(directory, ModelConfig.load(directory))
    checkpoint.take("head.weight", (320, 64), "BF16").zero_()
    assert (directory / SINGLE_FILE).read_bytes() == before
