"""ModelConfig: what a checkpoint's config.json says, checked once, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WINDOW_ONLY, CSA, HCA = 0, 4, 128


@dataclass(frozen=True, slots=True)
class YarnScaling:
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """DeepSeek-V4 as released (spec A.1); the field names are those of config.json.

    `compress_ratios` has one entry per main layer: 0 (window only), 4 (CSA) or 128 (HCA). `expert_dtype` is "fp4" or "fp8"
    in a quantised checkpoint and "" in one that is not.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    quantised: bool
    expert_dtype: str

    def ratio(self, layer: int) -> int:
        """The compression of a layer; the MTP layer (number num_hidden_layers) has none."""
        return self.compress_ratios[layer] if layer < self.num_hidden_layers else WINDOW_ONLY

    @property
    def num_layers(self) -> int:
        """Main layers and the MTP layer."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def named_values(self) -> dict[str, Any]:
        """Every field as a plain value, nested ones as "rope_scaling.factor"; to compare two workers' models by name."""
        flat: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                flat |= {f"{name}.{inner}": each for inner, each in value.items()}
            else:
                flat[name] = ",".join(map(str, value)) if isinstance(value, tuple) else value
        return flat

    @classmethod
    def load(cls, model_dir: str | Path) -> ModelConfig:
        """Reads MODEL_DIR/config.json. Raises ValueError that names the field that is missing, wrong or unsupported."""
        path = Path(model_dir) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"{path} is missing: the model directory must hold the checkpoint's config.json") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ValueError(f"{path} must hold a JSON object")
        return cls.from_json(raw)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelConfig:
        _refuse_other_models(raw)
        for name, supported in _FIXED.items():
            if raw.get(name, supported) != supported:
                raise ValueError(f"config field {name} is {raw[name]!r}: only {supported!r} is supported")
        quantised, expert_dtype = _quantisation(raw)
        integers = {name: _number(raw, name, int, minimum=low) for name, low in _INTEGERS.items()}
        reals = {name: _number(raw, name, float, minimum=0.0) for name in _REALS}
        config = cls(
            **integers,  # type: ignore[arg-type]
            **reals,  # type: ignore[arg-type]
            compress_ratios=_ratios(raw, integers["num_hidden_layers"], integers["num_nextn_predict_layers"]),
            rope_scaling=_yarn(raw),
            quantised=quantised,
            expert_dtype=expert_dtype,
        )
        _check(config)
        return config


_INTEGERS = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 1,
    "head_dim": 1,
    "qk_rope_head_dim": 2,
    "q_lora_rank": 1,
    "o_lora_rank": 1,
    "o_groups": 1,
    "sliding_window": 1,
    "index_n_heads": 1,
    "index_head_dim": 1,
    "index_topk": 1,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 1,
    "num_hash_layers": 0,
    "hc_mult": 1,
    "hc_sinkhorn_iters": 1,
    "max_position_embeddings": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_REALS = (
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
    "hc_eps",
    "rms_norm_eps",
)
_FIXED: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "attention_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def _refuse_other_models(raw: Mapping[str, Any]) -> None:
    names = [str(raw.get("model_type", "")), *map(str, raw.get("architectures") or [])]
    if any(name.lower().replace("_", "").startswith("deepseekv41") for name in names):
        raise ValueError(
            "model_type deepseek_v41 is not supported: DeepSeek-V4.1 shares compressors between layers (CSA2), adds Engram"
            " tables and has other cache rows; use a DeepSeek-V4 checkpoint"
        )
    if drafter := sorted(name for name in raw if name.startswith("dspark")):
        raise ValueError(
            f"config field {drafter[0]} is not supported: this checkpoint has a DSpark drafter where DeepSeek-V4 has an MTP"
            " layer, and reading it as MTP would draft nonsense; use the checkpoint without DSpark"
        )
    if not raw.get("model_type") and not raw.get("architectures"):
        raise ValueError("config field model_type is missing: only deepseek_v4 is supported")


def _number(raw: Mapping[str, Any], name: str, kind: type[int] | type[float], minimum: float) -> int | float:
    value = raw.get(name)
    if value is None:
        raise ValueError(f"config field {name} is missing")
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole or (kind is float and isinstance(value, float))):
        raise ValueError(f"config field {name} is {value!r}: it must be a {'whole ' if kind is int else ''}number")
    if not value >= minimum:
        raise ValueError(f"config field {name} is {value!r}: it must be {minimum} or more")
    return kind(value)


def _ratios(raw: Mapping[str, Any], layers: int | float, nextn: int | float) -> tuple[int, ...]:
    ratios = raw.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) not in (layers, layers + 1):
        raise ValueError(
            f"config field compress_ratios must be a list of {layers} ratios, one per layer, and one for the MTP layer,"
            f" not {ratios!r}"
        )
    for ratio in ratios:
        if ratio not in (WINDOW_ONLY, CSA, HCA):
            raise ValueError(f"config field compress_ratios holds {ratio!r}: only 0, 4 and 128 are supported")
    main, rest = ratios[: int(layers)], ratios[int(layers) :]
    if any(rest):
        raise ValueError(f"config field compress_ratios gives the MTP layer {rest[0]}: only 0 is supported there")
    if nextn not in (0, 1):
        raise ValueError(f"config field num_nextn_predict_layers is {nextn}: only 0 and 1 are supported")
    return tuple(main)


def _yarn(raw: Mapping[str, Any]) -> YarnScaling:
    scaling = raw.get("rope_scaling")
    if not isinstance(scaling, dict):
        raise ValueError(f"config field rope_scaling is {scaling!r}: a yarn entry is needed for the compressed layers")
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        raise ValueError(f"config field rope_scaling.type is {kind!r}: only 'yarn' is supported")
    named = {f"rope_scaling.{name}": value for name, value in scaling.items()}
    return YarnScaling(
        float(_number(named, "rope_scaling.factor", float, 1.0)),
        int(_number(named, "rope_scaling.original_max_position_embeddings", int, 1)),
        float(_number(named, "rope_scaling.beta_fast", float, 0.0)),
        float(_number(named, "rope_scaling.beta_slow", float, 0.0)),
    )


def _quantisation(raw: Mapping[str, Any]) -> tuple[bool, str]:
    """(quantised, expert_dtype). Without quantization_config nothing is simulated either."""
    scheme, expert_dtype = raw.get("quantization_config"), raw.get("expert_dtype")
    if scheme is None:
        if expert_dtype not in (None, "bf16"):
            raise ValueError(f"config field expert_dtype is {expert_dtype!r} but quantization_config is missing")
        return False, ""
    if not isinstance(scheme, dict):
        raise ValueError(f"config field quantization_config is {scheme!r}: it must be an object")
    released = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    for name, supported in released.items():
        if scheme.get(name) != supported:
            raise ValueError(
                f"config field quantization_config.{name} is {scheme.get(name)!r}: only {supported!r} is supported"
            )
    if expert_dtype not in (None, "fp4", "fp8"):
        raise ValueError(f"config field expert_dtype is {expert_dtype!r}: only 'fp4' and 'fp8' are supported")
    return True, expert_dtype or "fp8"


def _check(config: ModelConfig) -> None:
    """Fields that must fit each other."""
    c = config
    for name, good, wish in (
        ("qk_rope_head_dim", c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim < c.head_dim, "even and below head_dim"),
        ("index_head_dim", c.index_head_dim >= c.qk_rope_head_dim, "qk_rope_head_dim or more"),
        ("index_head_dim", c.index_head_dim & (c.index_head_dim - 1) == 0, "a power of two: it is Hadamard-rotated"),
        ("index_head_dim", not c.quantised or c.index_head_dim % 32 == 0, "a multiple of 32: it is rounded in blocks of 32"),
        ("o_groups", c.num_attention_heads % c.o_groups == 0, "a divisor of num_attention_heads"),
        ("num_experts_per_tok", c.num_experts_per_tok <= c.n_routed_experts, "n_routed_experts or less"),
        ("num_hash_layers", c.num_hash_layers <= c.num_hidden_layers, "num_hidden_layers or less"),
        ("bos_token_id", c.bos_token_id < c.vocab_size, "below vocab_size"),
        ("eos_token_id", c.eos_token_id < c.vocab_size, "below vocab_size"),
        ("rope_theta", c.rope_theta > 1, "above 1"),
        ("compress_rope_theta", c.compress_rope_theta > 1, "above 1"),
    ):
        if not good:
            raise ValueError(f"config field {name} is {getattr(c, name)!r}: it must be {wish}")
