"""Tiny models of the families that don't run in one packed row of their own K and V, with weights as in the zoo.

RECURRENT ones keep states beside attention, or instead of it; GATHERED ones change K or V between cache and attention.
Each is as small as its config allows, and has at least one layer of every kind that the family has.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests import zoo

_SHARED: dict[str, Any] = {
    "vocab_size": zoo.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": zoo.PAD_TOKEN_ID,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA2: dict[str, Any] = {
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_CONV = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_PURE = {"state_size": 8, "expand": 2, "conv_kernel": 4}

_RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": _DELTA,
    "lara_mini": {**_DELTA, **_EXPERTS},
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": _CONV,
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "falcon_h1": {**_MAMBA2, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "nemotron_h": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
    },
    "jamba": {
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {**_DELTA, **_LATENT, **_EXPERTS},
    "bailing_hybrid": {**_DELTA, **_LATENT, **_EXPERTS, "n_group": 1, "topk_group": 1},
    "zamba": {"mamba_d_state": 8, "mamba_dt_rank": 8, "n_mamba_heads": 2, "use_mamba_kernels": False},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 8,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
    },
    "zaya": {**_EXPERTS, "head_dim": 16, "num_experts_per_tok": 1, "router_hidden_size": 32},
    "mamba": {**_PURE, "time_step_rank": 8},
    "falcon_mamba": {**_PURE, "time_step_rank": 8},
    "mamba2": {**_PURE, "num_heads": 8, "head_dim": 16, "n_groups": 1},
}
_GATHERED: dict[str, dict[str, Any]] = {
    "jetmoe": {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "diffllama": {"head_dim": 16},
}

RECURRENT = tuple(_RECURRENT)
GATHERED = tuple(_GATHERED)
# What has no scan that starts from a state: a later chunk of a prompt computes the earlier ones again.
WITHOUT_CHUNKS = ("jamba", "zamba", "mamba", "falcon_mamba")


def fresh(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of its own; float32, eval. Skips the test where this version of Transformers doesn't have it."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {name}")
    own = _RECURRENT.get(name) or _GATHERED[name]
    config = AutoConfig.for_model(name, **_fields(name, {**_SHARED, **own, **changes}))
    state = torch.get_rng_state()
    torch.manual_seed(seed)  # decays and time steps keep the values that the model draws
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.set_rng_state(state)
    zoo.draw_weights(model, name, seed)
    return model.eval()


def _fields(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    # purely recurrent configs refuse what they have no field for
    known = CONFIG_MAPPING[name]
    renamed = getattr(known, "attribute_map", {})
    return {key: value for key, value in wanted.items() if key not in renamed or renamed[key] not in wanted}


@functools.cache
def build(name: str) -> PreTrainedModel:
    """The model of that name, built once a session and shared by the tests."""
    return fresh(name)
