"""config.json of DeepSeek-V4-Flash: its sizes make the layout of real pages and slots, and models of its widths."""

from __future__ import annotations

from typing import Any

RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp4",
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}


def with_layers(released: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config of a model of the same widths with so many layers and no MTP: two window-only ones, then CSA and HCA in
    turn, as at the released model's beginning."""
    return released | {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "num_hash_layers": min(released["num_hash_layers"], layers),
        "compress_ratios": [0, 0, *[4, 128] * layers][:layers],
    }
