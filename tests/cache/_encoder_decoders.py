"""Tiny T5 and BART models whose decoder's attention matters, drawn as wide as the models of the zoo."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel, T5Config, T5ForConditionalGeneration

VOCAB_SIZE = 128
PAD_TOKEN_ID = 0


@functools.cache
def build(name: str) -> PreTrainedModel:
    """The model "t5" or "bart", float32, eval, without an end token."""
    generator = torch.Generator().manual_seed(0)
    shared = {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "pad_token_id": PAD_TOKEN_ID,
        "bos_token_id": None,
        "eos_token_id": None,
        "decoder_start_token_id": 1,
        "tie_word_embeddings": False,
    }
    model: PreTrainedModel
    if name == "t5":
        model = T5ForConditionalGeneration(T5Config(**shared, d_ff=96, d_kv=16, num_heads=4, num_layers=2))
    else:
        layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        sizes = {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 256}
        model = BartForConditionalGeneration(BartConfig(**shared, **layers, **sizes, forced_eos_token_id=None))
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.Linear)):
                std = 1.5 / math.sqrt(module.weight.shape[1]) if isinstance(module, nn.Linear) else 1.0
                std = 0.3 if "embed_positions" in path else std
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * std)
    return model.eval()
