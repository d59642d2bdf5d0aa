"""Where a request's draft tokens come from, as its keywords say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_paged.errors import RequestError

# Fields of stock's assisted decoding that draft in another way, or change what is generated, and their neutral values.
_OTHER_WAYS: Mapping[str, Any] = {
    "assistant_early_exit": None,
    "assistant_ensemble_weight": None,  # accepts more than is lossless
    "use_mtp": False,
    "speculation_type": None,
}


@dataclass(frozen=True)
class PromptLookup:
    """Drafts what followed the last tokens where they stood before.

    `num_tokens` is the most that is drafted at once, `max_ngram` the most tokens that are looked for.
    """

    num_tokens: int
    max_ngram: int = 2


@dataclass(frozen=True, eq=False)
class Assistant:
    """Drafts with a smaller model of the same vocabulary.

    Args:
        model: the assistant.
        num_tokens: most tokens drafted at once, at first.
        schedule: "constant", or "heuristic" and "heuristic_transient": two more after a draft that was right to its
            end, else one fewer. "heuristic" leaves the number reached in the assistant's generation config.
        confidence_threshold: drafting ends behind a token that the assistant gave less than this.
    """

    model: PreTrainedModel
    num_tokens: int
    schedule: str = "constant"
    confidence_threshold: float = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel, num_tokens: int | None = None) -> Assistant:
        """An assistant as its own generation config describes it, which is where stock looks."""
        config = model.generation_config
        defaults: Mapping[str, Any] = getattr(config, "_get_default_generation_params", dict)()

        def setting(name: str, otherwise: Any) -> Any:
            value = getattr(config, name, None)
            return defaults.get(name, otherwise) if value is None else value

        return cls(
            model,
            int(num_tokens or setting("num_assistant_tokens", 20)),
            setting("num_assistant_tokens_schedule", "constant"),
            float(setting("assistant_confidence_threshold", 0.0) or 0.0),
        )


DraftSource = PromptLookup | Assistant


def why_not_drafted(model: PreTrainedModel, config: GenerationConfig, assistant: Any) -> str | None:
    """Why the engine can't draft as stock would for this config, or None if it can."""
    for name, neutral in _OTHER_WAYS.items():
        if getattr(config, name, None) not in (None, neutral):
            return f"{name} drafts in stock's loop"
    if config.prompt_lookup_num_tokens is not None:
        return None
    if assistant is None:
        return "assisted generation without an assistant_model drafts in stock's loop"
    if assistant.config.is_encoder_decoder:
        return "an assistant that is an encoder-decoder drafts in stock's loop"
    if _vocab_size(model) != _vocab_size(assistant):
        return "an assistant of another vocabulary drafts in stock's loop"
    return None


def draft_source(
    model: PreTrainedModel, config: GenerationConfig, assistant: Any, num_assistant_tokens: int | None = None
) -> DraftSource | None:
    """Who drafts for a config and an `assistant_model`; None if nobody is asked to.

    Raises:
        RequestError: it is asked for in a way that the engine doesn't have.
    """
    if config.prompt_lookup_num_tokens is None and assistant is None:
        return None
    reason = why_not_drafted(model, config, assistant)
    if reason is not None:
        raise RequestError(f"A request can't be assisted so: {reason}. Call model.generate for it.")
    if config.prompt_lookup_num_tokens is None:
        return Assistant.of(assistant, num_assistant_tokens)
    lookup = PromptLookup(config.prompt_lookup_num_tokens, config.max_matching_ngram_size or 2)
    if lookup.num_tokens < 1 or lookup.max_ngram < 1:
        raise RequestError("prompt_lookup_num_tokens and max_matching_ngram_size must be at least 1.")
    return lookup


def _vocab_size(model: PreTrainedModel) -> int | None:
    size: int | None = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return size
