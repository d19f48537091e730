"""RandomCheckpoint: a checkpoint that no file holds. Its tensors are made on the device when they are taken, or written to a
folder for processes that read one.

It has what the released format has for a config: every name, dtype and shape (spec D). The values keep activations near 1:
matrices have rows of about unit length, norms and scales are close to 1, a token asks any expert as likely as any other.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.experts import ExpertWeights
from kernels.quant import FP4_BLOCK, FP4_VALUES, WEIGHT_BLOCK
from model.config import CSA, WINDOW_ONLY, ModelConfig
from model.weights import ITEM_BYTES, SINGLE_FILE, Checkpoint, Entry

FP8_RMS = 32.0  # of the codes: far from e4m3's largest, 448, and from its subnormals
FP4_RMS = math.sqrt(sum(value * value for value in FP4_VALUES) / len(FP4_VALUES))  # of random codes
SCALES_RMS = math.sqrt((0.25 + 1.0 + 4.0) / 3)  # of a scale, relative to the middle one of the three there are
ZERO_EXPONENT = 127  # the ue8m0 byte of 1
WRITTEN_EXPERTS = 8  # of a layer in a file; the others repeat them: making bytes takes longer than writing them

Named = tuple[str, str, tuple[int, ...]]  # name, dtype in the file format's word, shape


class RandomCheckpoint(Checkpoint):
    """For `Runner` in place of a folder. Equal seeds give equal weights on the same device and backend."""

    def __init__(self, config: ModelConfig, device: str | torch.device, seed: int = 1) -> None:
        super().__init__(entries_of(config), config, device)
        self._seed = seed
        self._generator = torch.Generator(device).manual_seed(seed)

    def _read(self, entry: Entry) -> Tensor:
        match entry.dtype:
            case "F8_E4M3":
                return (self._normal(entry.shape) * FP8_RMS).to(torch.float8_e4m3fn)
            case "I8":
                return self._integers(-128, 128, entry.shape, torch.int8)
            case "F8_E8M0":
                return self._integers(-1, 2, entry.shape, torch.int8).add_(self._exponent(entry)).to(torch.uint8)
            case "I64":  # the experts of each token id, none of them twice
                scores = torch.rand(entry.shape[0], self.config.n_routed_experts, device=self.device, generator=self._generator)
                return scores.topk(entry.shape[1]).indices
        return self._plain(entry).to(torch.float32 if entry.dtype == "F32" else torch.bfloat16)

    def _plain(self, entry: Entry) -> Tensor:
        values = self._normal(entry.shape)
        if entry.name.endswith(("norm.weight", "_scale")):
            return values * 0.1 + 1.0
        if entry.name == "embed.weight":
            return values
        return values * (entry.shape[1] ** -0.5 if len(entry.shape) == 2 else 0.01)

    def _exponent(self, entry: Entry) -> int:
        """The middle one of a matrix' scale bytes: with it the rows are about as long as 1."""
        four_bits = ".experts." in entry.name and self._expert_kind() == "fp4"
        width = entry.shape[1] * (FP4_BLOCK if four_bits else WEIGHT_BLOCK)
        return ZERO_EXPONENT - round(math.log2((FP4_RMS if four_bits else FP8_RMS) * SCALES_RMS * width**0.5))

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=self._generator)

    def _integers(self, low: int, end: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randint(low, end, shape, dtype=dtype, device=self.device, generator=self._generator)

    def take_experts(self, prefix: str, count: int, inner: int, hidden: int) -> ExpertWeights:
        """FP4 experts for kernels: the first as from a file, the others with its scales and codes of their own. Any code is a
        value, so they are made in the kernels' order, and nothing wider than them is."""
        if self._expert_kind() != "fp4" or not backend.active().triton:
            return super().take_experts(prefix, count, inner, hidden)
        shapes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
        for number in range(count):
            for name, (out, width) in shapes.items():
                self._expected(f"{prefix}.{number}.{name}.weight", (out, width // 2), "I8")
                self._expected(f"{prefix}.{number}.{name}.scale", (out, width // FP4_BLOCK), "F8_E8M0")
        made = ExpertWeights.allocate("fp4", count, hidden, inner, self.device)
        w1, w3, w2 = (self._take_expert(f"{prefix}.0.{name}", *shape) for name, shape in shapes.items())
        made.fill(0, w1, w3, w2)
        for matrices in (made.w13, made.w2):
            for codes in matrices.values:
                codes.view(torch.uint8).random_(0, 256, generator=self._generator)
            for scales in (matrices.scales, matrices.row_scales):
                if scales is not None:
                    scales[1:] = scales[0]
        return made

    def file_bytes(self, entries: Iterable[Entry]) -> Iterator[memoryview]:
        """Of each entry what a file holds."""
        made: dict[str, memoryview] = {}  # of experts
        for entry in entries:
            prefix, is_expert, rest = entry.name.partition(".experts.")
            if is_expert:
                number, _, what = rest.partition(".")
                name = f"{prefix}.{int(number) % WRITTEN_EXPERTS}.{what}"
                if name not in made:
                    made[name] = self._file_bytes(entry)
                yield made[name]
            else:
                yield self._file_bytes(entry)

    def _file_bytes(self, entry: Entry) -> memoryview:
        return self._read(entry).flatten().view(torch.uint8).cpu().numpy().data

    def digest(self) -> str:
        """Of names, dtypes, shapes and the seed."""
        named = [(entry.name, entry.dtype, entry.shape) for _, entry in sorted(self._entries.items())]
        return hashlib.sha256(f"{self._seed} {named}".encode()).hexdigest()[:16]


def write_checkpoint(config_json: dict[str, Any], folder: Path, device: str | torch.device) -> None:
    """A folder that a worker takes for --model: config.json and one safetensors file, without a tokenizer."""
    checkpoint = RandomCheckpoint(ModelConfig.from_json(config_json), device)
    # wide types first, as the format asks for alignment
    entries = sorted(entries_of(checkpoint.config).values(), key=lambda entry: -ITEM_BYTES[entry.dtype])
    header, at = {}, 0
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, at + entry.last]}
        at += entry.last
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in checkpoint.file_bytes(entries):
            file.write(data)
    (folder / "config.json").write_text(json.dumps(config_json, indent=1))  # last: with it the folder is complete


def entries_of(config: ModelConfig) -> dict[str, Entry]:
    """The entries of a checkpoint of that config. They lie nowhere: `last` is a tensor's bytes, the memory is not its own."""
    nowhere, path = mmap.mmap(-1, 1), Path("memory")
    return {
        name: Entry(name, dtype, shape, 0, math.prod(shape) * ITEM_BYTES[dtype], path, nowhere)
        for name, dtype, shape in _tensors(config)
    }


def _tensors(c: ModelConfig) -> Iterator[Named]:
    yield "embed.weight", "BF16", (c.vocab_size, c.hidden_size)
    yield "head.weight", "BF16", (c.vocab_size, c.hidden_size)
    yield from _head(c, "")
    for layer in range(c.num_hidden_layers):
        yield from _block(c, f"layers.{layer}", c.ratio(layer), layer < c.num_hash_layers)
    if c.num_nextn_predict_layers:
        yield from _block(c, "mtp.0", WINDOW_ONLY, hashed=False)
        yield from _head(c, "mtp.0.")
        for side in "eh":
            yield from _norm(f"mtp.0.{side}norm", c.hidden_size)
            yield from _matrix(c, f"mtp.0.{side}_proj", c.hidden_size, c.hidden_size)


def _block(c: ModelConfig, prefix: str, ratio: int, hashed: bool) -> Iterator[Named]:
    n, width = c.hc_mult, c.hc_mult * c.hidden_size
    for kind in ("attn", "ffn"):
        yield f"{prefix}.hc_{kind}_fn", "F32", (2 * n + n * n, width)
        yield f"{prefix}.hc_{kind}_base", "F32", (2 * n + n * n,)
        yield f"{prefix}.hc_{kind}_scale", "F32", (3,)
        yield from _norm(f"{prefix}.{kind}_norm", c.hidden_size)
    yield from _attention(c, f"{prefix}.attn", ratio)
    yield from _experts(c, f"{prefix}.ffn", hashed)


def _attention(c: ModelConfig, prefix: str, ratio: int) -> Iterator[Named]:
    heads, groups = c.num_attention_heads, c.o_groups
    yield from _matrix(c, f"{prefix}.wq_a", c.q_lora_rank, c.hidden_size)
    yield from _matrix(c, f"{prefix}.wq_b", heads * c.head_dim, c.q_lora_rank)
    yield from _matrix(c, f"{prefix}.wkv", c.head_dim, c.hidden_size)
    yield from _matrix(c, f"{prefix}.wo_a", groups * c.o_lora_rank, heads * c.head_dim // groups)
    yield from _matrix(c, f"{prefix}.wo_b", c.hidden_size, groups * c.o_lora_rank)
    yield from _norm(f"{prefix}.q_norm", c.q_lora_rank)
    yield from _norm(f"{prefix}.kv_norm", c.head_dim)
    yield f"{prefix}.attn_sink", "F32", (heads,)
    if ratio != WINDOW_ONLY:
        yield from _compressor(c, f"{prefix}.compressor", ratio, c.head_dim)
    if ratio == CSA:
        yield from _compressor(c, f"{prefix}.indexer.compressor", CSA, c.index_head_dim)
        yield from _matrix(c, f"{prefix}.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield f"{prefix}.indexer.weights_proj.weight", "BF16", (c.index_n_heads, c.hidden_size)


def _compressor(c: ModelConfig, prefix: str, ratio: int, width: int) -> Iterator[Named]:
    channels = 2 * width if ratio == CSA else width
    yield f"{prefix}.wkv.weight", "BF16", (channels, c.hidden_size)
    yield f"{prefix}.wgate.weight", "BF16", (channels, c.hidden_size)
    yield f"{prefix}.ape", "F32", (ratio, channels)
    yield from _norm(f"{prefix}.norm", width)


def _experts(c: ModelConfig, prefix: str, hashed: bool) -> Iterator[Named]:
    hidden, inner, four_bits = c.hidden_size, c.moe_intermediate_size, c.quantised and c.expert_dtype == "fp4"
    yield f"{prefix}.gate.weight", "BF16", (c.n_routed_experts, hidden)
    if hashed:
        yield f"{prefix}.gate.tid2eid", "I64", (c.vocab_size, c.num_experts_per_tok)
    else:
        yield f"{prefix}.gate.bias", "F32", (c.n_routed_experts,)
    for name, out, width in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
        yield from _matrix(c, f"{prefix}.shared_experts.{name}", out, width)
        for number in range(c.n_routed_experts):
            expert = f"{prefix}.experts.{number}.{name}"
            if four_bits:
                yield f"{expert}.weight", "I8", (out, width // 2)
                yield f"{expert}.scale", "F8_E8M0", (out, width // FP4_BLOCK)
            else:
                yield from _matrix(c, expert, out, width)


def _head(c: ModelConfig, prefix: str) -> Iterator[Named]:
    yield f"{prefix}hc_head_fn", "F32", (c.hc_mult, c.hc_mult * c.hidden_size)
    yield f"{prefix}hc_head_base", "F32", (c.hc_mult,)
    yield f"{prefix}hc_head_scale", "F32", (1,)
    yield from _norm(f"{prefix}norm", c.hidden_size)


def _norm(name: str, width: int) -> Iterator[Named]:
    yield f"{name}.weight", "BF16", (width,)


def _matrix(c: ModelConfig, name: str, out: int, width: int) -> Iterator[Named]:
    """[out, width], with a scale for each 128 x 128 where the checkpoint is quantised."""
    yield f"{name}.weight", "F8_E4M3" if c.quantised else "BF16", (out, width)
    if c.quantised:
        yield f"{name}.scale", "F8_E8M0", (-(-out // WEIGHT_BLOCK), -(-width // WEIGHT_BLOCK))
