"""ModelConfig names the field it cannot accept; the layout of the released model has the published sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.places import slot_places
from model.cache import index_row, kv_layout, kv_row
from model.config import ModelConfig
from scripts.released_config import RELEASED
from tests import golden


def test_the_released_layout() -> None:
    """986,624 bytes a page of 256 tokens in 62 fields; rows of 584 and 132 bytes; 44 windows, 21 CSA, 20 HCA layers."""
    config = ModelConfig.from_json(RELEASED)
    layout = kv_layout(config)
    assert (kv_row(config, "auto").row_bytes, index_row(config, "auto", "auto").row_bytes) == (584, 132)
    assert (layout.page_bytes, len(layout.page)) == (986_624, 62)
    kinds = [field.kind for field in layout.page]
    assert (kinds.count("csa"), kinds.count("csa_index"), kinds.count("hca")) == (21, 21, 20)
    assert {(f.kind, f.rows, f.row_bytes) for f in layout.page} == {("csa", 64, 584), ("csa_index", 64, 132), ("hca", 2, 584)}
    assert {(f.kind, f.rows, f.row_bytes, f.keep, f.modulo) for f in layout.slot} == {
        ("window", 132, 592, 127, 1),  # a ring pads its rows to 16 bytes
        ("csa_state", 12, 8192, 4, 4),
        ("csa_index_state", 12, 2048, 4, 4),
        ("hca_state", 132, 4096, 0, 128),
    }
    assert [f.layer for f in layout.slot if f.kind == "window"] == list(range(44))
    live = sum(nbytes for _, nbytes in layout.live_slot_spans(100_003))
    csa = (4 + 3) * (8192 + 2048) * 21
    assert live == 44 * 127 * 592 + csa + 20 * (100_003 % 128) * 4096
    packed = kv_layout(config, index_keys="mxfp4")
    assert packed.find(2, "csa_index").row_bytes == 68 and packed.find(2, "csa").row_bytes == 584
    assert layout.page_bytes - packed.page_bytes == 21 * 64 * 64 and packed.slot == layout.slot
    assert kv_layout(config, "bf16", index_keys="mxfp4").find(2, "csa_index").row_bytes == 68
    assert (len(layout.live_slot_spans(32_768)), len(slot_places(layout, 1, 32_768))) == (128, 84)  # windows travel whole
    assert kv_layout(config, "bf16").find(2, "csa").row_bytes == 1024
    assert kv_layout(config, "bf16").find(2, "csa_index").row_bytes == 256
    assert kv_layout(config, "fp32").find(43, "window").row_bytes == 2048


@pytest.mark.parametrize("page_tokens", [0, 64, 100, 200])
def test_a_page_ends_with_a_compression_window(page_tokens: int) -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        kv_layout(ModelConfig.from_json(RELEASED), page_tokens=page_tokens)


def test_other_bad_layout_options() -> None:
    config = ModelConfig.from_json(RELEASED)
    with pytest.raises(ValueError, match="kv dtype 'int8' is unknown"):
        kv_layout(config, "int8")
    with pytest.raises(ValueError, match="index keys 'fp4' are unknown: use one of auto, mxfp4"):
        kv_layout(config, index_keys="fp4")
    with pytest.raises(ValueError, match="index_head_dim is 96; it must be a multiple of 64"):
        kv_layout(replace(config, index_head_dim=96), index_keys="mxfp4")
    with pytest.raises(ValueError, match="rollback_tokens"):
        kv_layout(config, rollback_tokens=-1)
    with pytest.raises(ValueError, match="pages would hold nothing"):
        kv_layout(replace(config, compress_ratios=(0,) * len(config.compress_ratios)))
    assert kv_layout(config, rollback_tokens=0).find(0, "window").rows == 128


def test_mxfp4_index_keys_are_for_checkpoints_that_round_them_so() -> None:
    config = ModelConfig.load(golden.model_dir("tiny-bf16"))
    with pytest.raises(ValueError, match="index keys 'mxfp4': this checkpoint is not quantised"):
        kv_layout(config, "fp8", index_keys="mxfp4")


def test_auto_kv_dtype_follows_the_checkpoint() -> None:
    assert golden.runner("tiny-bf16").kv_dtype == "fp32"
    assert golden.runner("tiny-fp8fp4").kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096': it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": 0}, "vocab_size is 0: it must be 1 or more"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"hc_eps": float("nan")}, "hc_eps"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8: only 1"),
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"model_type": "", "architectures": None}, "model_type"),
        ({"model_type": "deepseek_v41"}, "deepseek_v41 is not supported: .*CSA2"),
        ({"architectures": ["DeepseekV41ForConditionalGeneration"]}, "deepseek_v41 is not supported"),
        ({"dspark_block_size": 5}, "dspark_block_size is not supported: .*DSpark drafter"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"compress_ratios": [0, 4]}, "compress_ratios must be a list of 43"),
        ({"compress_ratios": [*[16] * 43, 0]}, "compress_ratios holds 16"),
        ({"compress_ratios": [*[4] * 43, 4]}, "MTP layer 4"),
        ({"rope_scaling": None}, "rope_scaling is None"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "rope_scaling.original_max_position_embeddings is missing"),
        ({"expert_dtype": "fp6"}, "expert_dtype is 'fp6'"),
        ({"quantization_config": None}, "expert_dtype is 'fp4' but quantization_config is missing"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method is 'awq'"),
        ({"qk_rope_head_dim": 512}, "qk_rope_head_dim"),
        ({"index_head_dim": 96}, "index_head_dim is 96: it must be a power of two"),
        ({"o_groups": 7}, "o_groups is 7"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"num_hash_layers": 44}, "num_hash_layers"),
        ({"eos_token_id": 129280}, "eos_token_id"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_the_error_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(RELEASED | change)


def test_fp8_experts_and_no_mtp() -> None:
    base = {key: value for key, value in RELEASED.items() if key != "expert_dtype"}
    assert ModelConfig.from_json(base).expert_dtype == "fp8"
    config = ModelConfig.from_json(base | {"num_nextn_predict_layers": 0, "compress_ratios": RELEASED["compress_ratios"][:43]})
    assert config.num_layers == 43
    with pytest.raises(KeyError):
        kv_layout(config).find(43, "window")


def test_a_bad_config_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        ModelConfig.load(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "must hold a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert ModelConfig.load(tmp_path) == ModelConfig.from_json(RELEASED)


def test_named_values_are_plain_and_tell_two_models_apart() -> None:
    ours = ModelConfig.from_json(RELEASED)
    theirs = ModelConfig.from_json({**RELEASED, "sliding_window": 64})
    assert all(isinstance(value, (int, float, str)) for value in ours.named_values().values())
    assert "rope_scaling.factor" in ours.named_values()
    different = {name for name, value in ours.named_values().items() if theirs.named_values()[name] != value}
    assert different == {"sliding_window"}
