"""The families of transformers' causal language models that must run, at toy size."""

import inspect
from typing import Any

import tiny
from transformers import AutoConfig, PreTrainedConfig

# Families that must run, as of transformers 5.24.
NAMES = """
    afmoe apertus apertus1p5_text arcee aria_text beam bitnet cohere cohere2 cohere2_moe ctrl
    cwm ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
    iquestcoder jais2 kolibri1 laguna llama mellum minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss smollm3
    solar_open starcoder2 vaultgemma
"""
# Hybrids, and what gives each recurrent layers and attention at toy size. They end with a
# recurrent layer.
_TYPES = ["linear_attention", "full_attention", "linear_attention"]
HYBRIDS: dict[str, dict[str, Any]] = {
    "lara_mini": {"layer_types": _TYPES},
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {},
    "olmo_hybrid": {"layer_types": _TYPES, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {"layer_types": _TYPES},
    "qwen3_5_text": {"layer_types": _TYPES},
    "qwen3_next": {"layer_types": _TYPES},
}
RUN = {*NAMES.split(), *HYBRIDS}
# Each family uses some of these names.
SIZES: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 5,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("n_inner", "ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("n_head", "num_heads"), 4),
    **dict.fromkeys(("n_layer", "num_layers"), 3),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": tiny.VOCAB,
    "n_positions": 256,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    usual = AutoConfig.for_model(name)
    kind = type(usual)
    known = {*inspect.signature(kind.__init__).parameters, *kind.__annotations__}
    sizes = {size: value for size, value in SIZES.items() if size in known}
    if getattr(usual, "sliding_window", 0) is None:
        del sizes["sliding_window"]  # it has none by default
    shape = dict(tiny._SHAPE)
    if not hasattr(usual, "num_key_value_heads"):
        del shape["num_key_value_heads"]
    return kind(**{**shape, **sizes, **HYBRIDS.get(name, {}), **changes})
