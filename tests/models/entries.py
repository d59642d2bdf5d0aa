"""Which models there are: the entries of Transformers' own mappings, by the kind of their inputs."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.models.auto import modeling_auto

CAUSAL = "causal"
ENCODER_DECODER = "encoder-decoder"
VISION_LANGUAGE = "vision-language"

_MAPPINGS = {
    CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ENCODER_DECODER: modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    VISION_LANGUAGE: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}


@dataclass(frozen=True)
class Entry:
    """One line of a mapping: a model type and the class that generates for it."""

    kind: str
    model_type: str
    class_name: str

    @property
    def key(self) -> str:
        """What the entry is called in the data: a model type may be in more than one mapping."""
        return f"{self.kind}/{self.model_type}"


def entries(*kinds: str) -> list[Entry]:
    """All entries of these kinds, or of all kinds, sorted by kind and model type."""
    found = [
        Entry(kind, model_type, class_name)
        for kind in kinds or _MAPPINGS
        for model_type, class_name in sorted(_MAPPINGS[kind].items())
    ]
    return found


def shard(all_entries: list[Entry], text: str | None) -> list[Entry]:
    """The part `text` of the entries, written "1/4" to "4/4"; None for all.

    Raises:
        ValueError: it is not written so.
    """
    if text is None:
        return all_entries
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"a shard is written like 1/4, not {text!r}")
    return all_entries[int(index) - 1 :: int(count)]
