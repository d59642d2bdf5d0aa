"""Tiny models whose attention matters: a broken window, softcap, sink or block order changes their tokens.

A default random initialisation is so small that the residual stream drowns attention, and greedy tokens stay the same
whatever attention does. So the weights are drawn wide: embeddings from N(0, 1), linears and expert weights from
N(0, 1.5 / sqrt(fan_in)), sinks from N(0, 1), biases from N(0, 0.1), and the output head is its own matrix.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.pytorch_utils import Conv1D

VOCAB_SIZE = 128
PAD_TOKEN_ID = 0
WINDOW = 16

ARCHITECTURES = ("llama", "mistral", "gemma2", "gpt_oss", "qwen3", "gpt2", "mixtral", "phi3")
WINDOWED = ("mistral", "gemma2", "gpt_oss")
# Latent attention: what is cached of a token is expanded to K and V by each head.
LATENT = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu", "longcat_flash", "axk1")
# What stock's sdpa refuses (softcap) or doesn't know (sinks).
NEEDS_EAGER = ("gemma2", "gpt_oss")

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_LATENT_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def config_of(name: str, **changes: Any) -> PretrainedConfig:
    """The config of one architecture, with some of its fields changed."""
    headed = {key: value for key, value in SHARED.items() if key != "head_dim"}
    if name == "llama":
        return LlamaConfig(**{**SHARED, "num_hidden_layers": 3, **changes})
    if name == "mistral":
        return MistralConfig(**{**SHARED, "num_hidden_layers": 2, "sliding_window": WINDOW, **changes})
    if name == "gemma2":
        own = {"num_hidden_layers": 4, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}
        return Gemma2Config(**{**SHARED, **own, "query_pre_attn_scalar": 16, **changes})
    if name == "gpt_oss":
        own = {"num_hidden_layers": 4, "sliding_window": WINDOW, **_EXPERTS}
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return GptOssConfig(**{**SHARED, **own, "rope_parameters": rope, **changes})
    if name == "qwen3":
        return Qwen3Config(**{**SHARED, "num_hidden_layers": 2, **changes})
    if name == "mixtral":
        return MixtralConfig(**{**SHARED, "num_hidden_layers": 2, **_EXPERTS, **changes})
    if name == "phi3":
        return Phi3Config(**{**headed, "num_hidden_layers": 2, **changes})
    if name == "gpt2":
        own = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_inner": 96, "n_positions": 512}
        common = {"vocab_size", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"}
        return GPT2Config(**{key: SHARED[key] for key in common}, **{**own, **changes})
    if name in LATENT:
        own = {**_LATENT, **({} if name in ("minicpm3", "youtu") else _LATENT_EXPERTS)}
        if name == "longcat_flash":  # counts two attention layers in each of its own
            del own["num_hidden_layers"]
            own |= {"num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2}
            own |= {"moe_topk": 2, "head_dim": 8}
        return AutoConfig.for_model(name, **{**headed, **own, **changes})
    raise ValueError(f"the zoo has no {name!r}; known: {', '.join((*ARCHITECTURES, *LATENT))}")


@torch.no_grad()
def draw_weights(model: nn.Module, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: torch.Tensor, std: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    def draw_linear(weight: torch.Tensor, fan_in: int) -> None:
        draw(weight, 1.5 / math.sqrt(fan_in))

    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            std = 0.15 if name == "gemma2" else 0.3 if path.endswith("wpe") else 1.0
            draw(module.weight, std)
        elif isinstance(module, Conv1D):  # [in, out]
            draw_linear(module.weight, module.weight.shape[0])
        elif isinstance(module, nn.Linear):
            draw_linear(module.weight, module.weight.shape[1])
    for path, parameter in model.named_parameters():
        if path.endswith("sinks"):
            draw(parameter, 1.0)
        elif path.endswith("bias"):
            draw(parameter, 0.1)
        elif path.endswith(("router.weight", "mlp.gate.weight")):
            draw_linear(parameter, parameter.shape[1])
        elif parameter.ndim == 3:  # experts: gpt_oss keeps [experts, in, out], mixtral [experts, out, in]
            draw_linear(parameter, parameter.shape[1] if name == "gpt_oss" else parameter.shape[2])


def fresh(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of its own, for a test that changes it or counts what its engine did. float32, eval."""
    config = config_of(name, **changes)
    kwargs: dict[str, Any] = {"attn_implementation": "eager"} if name in NEEDS_EAGER else {}
    state = torch.get_rng_state()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **kwargs)
    torch.set_rng_state(state)  # a test's own seeded draws don't depend on which models were built before
    draw_weights(model, name, seed)
    return model.eval()


@functools.cache
def build(name: str, seed: int = 0) -> PreTrainedModel:
    """The model of that name, built once a session and shared by the tests."""
    return fresh(name, seed)
