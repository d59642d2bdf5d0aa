"""Tiny models of any class: a config from `tiny_configs.json`, and weights that make attention matter.

The weights are drawn as in tests/zoo.py: a default initialisation is so small that greedy tokens stay the same whatever
attention does.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from tests.models.entries import CAUSAL, Entry

VOCAB_SIZE = 128
PAD_TOKEN_ID = 0
MAX_PARAMETERS = 30_000_000

SETTINGS: dict[str, Any] = json.loads((Path(__file__).parent / "tiny_configs.json").read_text())

_TOWERS = ("vision", "audio", "video", "image", "perceiver", "qformer", "vq", "codec", "speech", "backbone", "encoder")
_POSITION_TABLES = ("wpe", "position")


class CannotBuildError(Exception):
    """A tiny model of that entry can't be made; the message says why."""


def config_of(entry: Entry) -> PretrainedConfig:
    """The tiny config of an entry."""
    config_class = CONFIG_MAPPING[entry.model_type]
    # a BERT is a causal model only if its config says so
    return config_class(**_fields(config_class, {"is_decoder": True} if entry.kind == CAUSAL else {}))


def _fields(config_class: type[PretrainedConfig], extra: dict[str, Any]) -> dict[str, Any]:
    known = {field.name: field.default for field in dataclasses.fields(config_class)}
    renamed = dict(config_class.attribute_map)
    own = SETTINGS["by_model_type"].get(config_class.model_type, {})
    fields: dict[str, Any] = {}
    layered = SETTINGS["with_layer_types"] if "layer_types" in {*known, *renamed} else {}
    for name, value in {**SETTINGS["common"], **layered, **extra}.items():
        target = renamed.get(name, name)
        if isinstance(known.get(target), list | tuple) and not isinstance(value, list):
            continue  # a number a layer, or a side, where others have one
        if name in known:
            fields[name] = value
        elif target in known:
            fields.setdefault(target, value)
    for name, declared in config_class.sub_configs.items():
        changes = own.get(name, {})
        if changes is None:
            continue
        sub_class = CONFIG_MAPPING[changes["model_type"]] if "model_type" in changes else declared
        if sub_class is AutoConfig:
            default = getattr(config_class(), name, None)
            if default is None:
                continue
            sub_class = type(default)
        tower = SETTINGS["vision"] if any(word in name for word in _TOWERS) else {}
        made = {**_fields(sub_class, tower), **changes}
        made.pop("model_type", None)
        fields[name] = sub_class(**made)
    fields.update({name: value for name, value in own.items() if name not in config_class.sub_configs})
    return fields


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, embedding_std: float = 1.0, gain: float = 1.5) -> None:
    """Draws all weights: embeddings from N(0, embedding_std), matrices from N(0, gain / sqrt(fan_in)), sinks wide."""
    generator = torch.Generator().manual_seed(seed)
    drawn: set[int] = set()

    def draw(weight: torch.Tensor, std: float) -> None:
        if id(weight) not in drawn:
            drawn.add(id(weight))
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            draw(module.weight, 0.3 if any(word in path for word in _POSITION_TABLES) else embedding_std)
        elif isinstance(module, Conv1D):  # [in, out]
            draw(module.weight, gain / math.sqrt(module.weight.shape[0]))
        elif isinstance(module, nn.Linear):
            draw(module.weight, gain / math.sqrt(module.weight.shape[1]))
    for path, parameter in model.named_parameters():
        if id(parameter) in drawn or not parameter.is_floating_point():
            continue
        if "sink" in path:
            draw(parameter, 1.0)
        elif path.endswith("bias") and "expert_bias" not in path and "dt_bias" not in path:
            draw(parameter, 0.1)
        elif parameter.ndim == 3 or path.endswith(("router.weight", "gate.weight")):  # experts, routers
            draw(parameter, gain / math.sqrt(parameter.shape[-1]))


def build(entry: Entry, seed: int = 0, embedding_std: float = 1.0, gain: float = 1.5) -> PreTrainedModel:
    """The tiny model of an entry: float32, eval, without an end token.

    Raises:
        CannotBuildError: saying why.
    """
    try:
        config = config_of(entry)
        model_class = getattr(transformers, entry.class_name)
        wanted, text_config = model_class.config_class, config.get_text_config(decoder=True)
        if not isinstance(config, wanted) and isinstance(text_config, wanted):
            config = text_config  # the text model of a larger one, as AutoModel makes it
        torch.manual_seed(0)
        with torch.device("meta"):
            size = _num_parameters(model_class, config)
        if size > MAX_PARAMETERS:
            raise CannotBuildError(f"a tiny one has {size / 1e6:.0f} million parameters")
        model: PreTrainedModel = _from_config(model_class, config)
    except CannotBuildError:
        raise
    except Exception as error:  # whatever a config or a constructor raises is the reason
        raise CannotBuildError(f"{type(error).__name__}: {_one_line(error)}") from error
    model = model.to(torch.float32)
    draw_weights(model, seed, embedding_std, gain)
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID, decoder_start_token_id=1)
    model.config.get_text_config(decoder=True).eos_token_id = None
    return model.eval()


def _num_parameters(model_class: type[PreTrainedModel], config: PretrainedConfig) -> int:
    try:
        model = model_class._from_config(config)
    except (NotImplementedError, RuntimeError):  # reads its weights while it is made
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def _from_config(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = model_class._from_config(config, dtype=torch.float32)
    return model


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
