"""Checkpoint: a model directory's safetensors, read in place and handed out once each, by name.

Whoever builds a layer takes its tensors; what is missing, left over, of another shape or dtype is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.experts import ExpertWeights
from kernels.gemm import GroupedWeight, LinearWeight
from kernels.quant import FP4_BLOCK, WEIGHT_BLOCK
from model.config import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
SAMPLE_BYTES = 4096  # at each of three places of a tensor, for the checkpoint's digest
_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # handed out as exponent bytes
}
ITEM_BYTES = {"F64": 8, "F16": 2, "I32": 4, "I16": 2, "U8": 1, "BOOL": 1, "F8_E5M2": 1} | {
    name: dtype.itemsize for name, dtype in _DTYPES.items()
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: bytes first..last of `memory`, the mapped file `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int
    path: Path
    memory: mmap.mmap


class Checkpoint:
    """`Checkpoint.open(model_dir, config)`; then `take*` every tensor, then `finish()`.

    Names are without the `model.` prefix, which a file may or may not have.
    """

    def __init__(self, entries: dict[str, Entry], config: ModelConfig, device: str | torch.device) -> None:
        self.config = config
        self.device = device
        self._entries = entries
        self._taken: set[str] = set()

    @classmethod
    def open(cls, model_dir: str | Path, config: ModelConfig, device: str | torch.device = "cpu") -> Checkpoint:
        """Maps the files and reads their headers. Raises ValueError for a missing, cut off or corrupt file."""
        directory = Path(model_dir)
        if (directory / INDEX_FILE).exists():
            entries = _read_shards(directory)
        elif (directory / SINGLE_FILE).exists():
            entries = read_safetensors(directory / SINGLE_FILE)
        else:
            raise ValueError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        named: dict[str, Entry] = {}
        for name, entry in entries.items():
            plain = name.removeprefix("model.")
            if plain in named:
                raise ValueError(f"tensor {plain} is in the checkpoint twice, with and without 'model.'")
            named[plain] = entry
        _refuse_dspark(named)
        return cls(named, config, device)

    def take(self, name: str, shape: tuple[int, ...], dtype: str, device: str | torch.device | None = None) -> Tensor:
        """The tensor as stored, on `device` (the checkpoint's if None). On the CPU it is the mapping itself: convert or copy
        it. `dtype` is the file format's word for it."""
        return self._read(self._expected(name, shape, dtype)).to(self.device if device is None else device)

    def _expected(self, name: str, shape: tuple[int, ...], dtype: str) -> Entry:
        """The entry of that name, which counts as taken. Raises ValueError when there is none or it is another tensor."""
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"tensor {name} is missing in the checkpoint")
        if entry.dtype != dtype or entry.shape != shape:
            raise ValueError(
                f"tensor {name} in {entry.path.name} is {entry.dtype} {list(entry.shape)}:"
                f" config.json asks for {dtype} {list(shape)}"
            )
        self._taken.add(name)
        return entry

    def _read(self, entry: Entry) -> Tensor:
        stored = torch.frombuffer(entry.memory, dtype=_DTYPES[entry.dtype], count=math.prod(entry.shape), offset=entry.first)
        return stored.view(entry.shape)

    def take_plain(self, name: str, *shape: int) -> Tensor:
        """A BF16 tensor that is never quantised, copied."""
        return self.take(name, shape, "BF16").clone()

    def take_ids(self, name: str, shape: tuple[int, ...], count: int) -> Tensor:
        """An I64 tensor of numbers in 0..count-1, copied. Raises ValueError when one is not."""
        ids = self.take(name, shape, "I64", "cpu").clone()
        if not bool(((ids >= 0) & (ids < count)).all()):
            raise ValueError(f"tensor {name} names an expert outside 0..{count - 1}")
        return ids.to(self.device)

    def take_float(self, name: str, *shape: int) -> Tensor:
        """A F32 tensor, copied."""
        return self.take(name, shape, "F32").clone()

    def take_linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int) -> LinearWeight:
        """The matrices `names` [out, in] on top of each other, as `kernels.gemm` keeps them: FP8 with scales in a quantised
        checkpoint, BF16 in one that is not. Raises ValueError when scale blocks of the joined matrices would not line up."""
        parts = [self._take_matrix(name, out, in_features) for name, out in zip(names, out_features, strict=True)]
        weight, scales = torch.cat([values for values, _ in parts]), [scale for _, scale in parts if scale is not None]
        if not scales:
            return LinearWeight.plain(weight)
        for name, out in list(zip(names, out_features, strict=True))[:-1]:
            if out % WEIGHT_BLOCK:
                raise ValueError(f"tensor {name}.weight has {out} rows: only multiples of {WEIGHT_BLOCK} are supported there")
        return LinearWeight.fp8(weight, torch.cat(scales))

    def take_grouped(self, name: str, groups: int, out_features: int, in_features: int) -> GroupedWeight:
        """NAME as `groups` matrices [out, in] over each other. The released kernels hold it in BF16 and do not round its
        input."""
        weight, scale = self._take_matrix(name, groups * out_features, in_features)
        if scale is None:
            return GroupedWeight.plain(weight.view(groups, out_features, in_features))
        return GroupedWeight.fp8(weight, scale, groups)

    def take_experts(self, prefix: str, count: int, inner: int, hidden: int) -> ExpertWeights:
        """w1 (gate), w3 (up) and w2 of every expert, FP4 where the config says so."""
        made = ExpertWeights.allocate(self._expert_kind(), count, hidden, inner, self.device)
        shapes = (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner))
        for number in range(count):
            w1, w3, w2 = (self._take_expert(f"{prefix}.{number}.{name}", out, width) for name, out, width in shapes)
            made.fill(number, w1, w3, w2)
        return made

    def _expert_kind(self) -> str:
        return (self.config.expert_dtype or "fp8") if self.config.quantised else "plain"

    def _take_matrix(self, name: str, out_features: int, in_features: int) -> tuple[Tensor, Tensor | None]:
        """(e4m3 [out, in], ue8m0 bytes of 128 x 128 blocks), or (bf16, None)."""
        if not self.config.quantised:
            return self.take_plain(f"{name}.weight", out_features, in_features), None
        weight = self.take(f"{name}.weight", (out_features, in_features), "F8_E4M3")
        blocks = (-(-out_features // WEIGHT_BLOCK), -(-in_features // WEIGHT_BLOCK))
        return weight, self.take(f"{name}.scale", blocks, "F8_E8M0")

    def _take_expert(self, name: str, out_features: int, in_features: int) -> tuple[Tensor, Tensor | None]:
        """Like `_take_matrix`, but two e2m1 a byte (int8) with ue8m0 bytes per 32 where experts are FP4."""
        if self._expert_kind() != "fp4":
            return self._take_matrix(name, out_features, in_features)
        weight = self.take(f"{name}.weight", (out_features, in_features // 2), "I8")
        return weight, self.take(f"{name}.scale", (out_features, in_features // FP4_BLOCK), "F8_E8M0")

    def finish(self) -> None:
        """Raises ValueError when the checkpoint has tensors that nobody took: it is another model than config.json says."""
        if left := sorted(self._entries.keys() - self._taken):
            raise ValueError(f"tensor {left[0]} is not part of the model that config.json describes ({len(left)} such tensors)")

    def digest(self) -> str:
        """Of names, dtypes, shapes and each tensor's first, middle and last bytes (all of a small one's): equal however the
        tensors are spread over files. Tells checkpoints apart; no proof that a file is undamaged."""
        digest = hashlib.sha256()
        for name, entry in sorted(self._entries.items()):
            digest.update(f"{name} {entry.dtype} {entry.shape} ".encode())
            latest = max(entry.first, entry.last - SAMPLE_BYTES)
            for start in (entry.first, (entry.first + latest) // 2, latest):
                digest.update(entry.memory[start : min(entry.last, start + SAMPLE_BYTES)])
        return digest.hexdigest()[:16]


def read_safetensors(path: Path) -> dict[str, Entry]:
    """The entries of one file, mapped. Raises ValueError when its header or its size is wrong."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 8:
            raise ValueError(f"{path} is cut off: {size} bytes are no safetensors file")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private pages: torch wants a writable buffer
    (header_bytes,) = struct.unpack_from("<Q", memory)
    if header_bytes > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"{path} is cut off or corrupt: it names a header of {header_bytes} bytes in a file of {size}")
    try:
        header: dict[str, Any] = json.loads(memory[8 : 8 + header_bytes])
        header.pop("__metadata__", None)
        entries = {name: _entry(name, item, 8 + header_bytes, path, memory) for name, item in header.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is corrupt: its header cannot be read ({error})") from None
    _check_extents(path, sorted(entries.values(), key=lambda entry: (entry.first, entry.last)), 8 + header_bytes, size)
    return entries


def _entry(name: str, item: dict[str, Any], body: int, path: Path, memory: mmap.mmap) -> Entry:
    first, last = item["data_offsets"]
    entry = Entry(name, item["dtype"], tuple(item["shape"]), body + first, body + last, path, memory)
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if item_bytes is None:
        raise ValueError(f"{path} is corrupt: tensor {name} has the unknown dtype {entry.dtype!r}")
    if min((0, *entry.shape)) < 0 or last - first != math.prod(entry.shape) * item_bytes:
        raise ValueError(f"{path} is corrupt: tensor {name} has {last - first} bytes for {entry.dtype} {list(entry.shape)}")
    return entry


def _check_extents(path: Path, entries: list[Entry], body: int, size: int) -> None:
    """Tensors must fill the file exactly, without a hole or an overlap."""
    at = body
    for entry in entries:
        if entry.first != at:
            raise ValueError(f"{path} is corrupt: tensor {entry.name} begins at byte {entry.first}, not at {at}")
        at = entry.last
    if at != size:
        raise ValueError(f"{path} is cut off or corrupt: its tensors end at byte {at} and the file has {size}")


def _read_shards(directory: Path) -> dict[str, Entry]:
    index = directory / INDEX_FILE
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        shard_names = sorted(set(places.values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is corrupt: no weight_map of tensor to file can be read ({error})") from None
    shards: dict[str, dict[str, Entry]] = {}
    for shard in shard_names:
        if Path(shard).name != shard or not (directory / shard).exists():
            raise ValueError(f"shard {shard} is missing in {directory}: {INDEX_FILE} names it")
        shards[shard] = read_safetensors(directory / shard)
    for name, shard in places.items():
        if name not in shards[shard]:
            raise ValueError(f"tensor {name} is not in {shard}, where {INDEX_FILE} places it")
    for shard, entries in shards.items():
        if stray := sorted(name for name in entries if places.get(name) != shard):
            raise ValueError(f"tensor {stray[0]} is in {shard}, where {INDEX_FILE} does not place it")
    return {name: shards[shard][name] for name, shard in places.items()}


def _refuse_dspark(entries: dict[str, Entry]) -> None:
    signs = ("mtp.0.main_proj", "mtp.1.", "mtp.2.", "markov_head", "confidence_head")
    for name in sorted(entries):
        if any(sign in name for sign in signs) and name.startswith("mtp."):
            raise ValueError(
                f"tensor {name} belongs to a DSpark drafter, which is not supported: its mtp.* tensors are another network"
                " than the MTP layer of DeepSeek-V4; use the checkpoint without DSpark"
            )
