"""From the keywords of a request to how its tokens are chosen and when it stops.

Stock's own helpers make the generation config, the processors and the criteria, so that every field means what it
means in `generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping

from hf_paged.engine.draft_source import DraftSource, draft_source
from hf_paged.engine.grammar import GRAMMAR_KEYWORDS, Grammar
from hf_paged.engine.guidance import GuidanceProcessor
from hf_paged.engine.logit_bias import LogitBiasProcessor
from hf_paged.engine.penalties import OutputPenaltyProcessor
from hf_paged.errors import RequestError, nearest

# What a request takes besides the fields of GenerationConfig.
REQUEST_KEYWORDS = frozenset(
    {
        "seed",
        "bad_words",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "cache_salt",
        "adapter",
        "priority",
        "request_id",
        "assistant_model",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "negative_prompt_ids",
        "stopping_criteria",
        "generation_config",
        *GRAMMAR_KEYWORDS,
    }
)

# Fields whose value is a list by nature; for the others a list is one value a prompt.
LIST_FIELDS = frozenset(
    {
        "bad_words",
        "bad_words_ids",
        "begin_suppress_tokens",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "forced_eos_token_id",
        "logits_processor",
        "negative_prompt_ids",
        "sequence_bias",
        "stop_strings",
        "stopping_criteria",
        "suppress_tokens",
    }
)

# Fields that ask for another way of decoding, which a packed request doesn't do.
_OTHER_MODES: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "assistant_early_exit": None,
    "use_mtp": False,
    "speculation_type": None,
    "token_healing": False,
    "output_attentions": False,
    "output_hidden_states": False,
}

_INTEGER_FIELDS = (
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "min_length",
    "num_return_sequences",
    "top_k",
    "no_repeat_ngram_size",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "num_assistant_tokens",
)

# Processors that look at nothing but a row of scores: rows with equal settings go through one call together.
ROW_PROCESSORS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.TopHLogitsWarper,
)
_ROW_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "suppress_tokens",
    "remove_invalid_values",
    "renormalize_logits",
)


@dataclass(eq=False)
class SamplingParams:
    """How the tokens of one request are chosen, and what ends it besides its length.

    `history_start` tokens stand before the prompt in what processors and criteria see (left padding).
    `shared_key` is equal for requests whose rows may go through `processors` together, None if they may not.
    """

    processors: LogitsProcessorList
    criteria: tuple[tuple[str, int | str | None, Any], ...]  # finish reason, stop reason, criterion
    eos_token_ids: frozenset[int]
    do_sample: bool
    shared_key: Hashable | None
    seed: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    history_start: tuple[int, ...] = ()
    is_external: bool = False  # someone outside the engine takes the logits and appends the tokens
    grammar: Grammar | None = None
    draft_source: DraftSource | None = None  # who guesses tokens that are checked together
    generators: dict[int, torch.Generator] = field(default_factory=dict)

    def generator(self, index: int, device: torch.device) -> torch.Generator | None:
        """The random generator of one of the request's sequences; None draws from torch's own."""
        if self.seed is None:
            return None
        if index not in self.generators:
            self.generators[index] = torch.Generator(device).manual_seed(_sequence_seed(self.seed, index))
        return self.generators[index]


def _sequence_seed(seed: int, index: int) -> int:
    # sequence 0 draws like stock after torch.manual_seed(seed); its siblings get seeds far from any neighbour's
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True)
class ResolvedRequest:
    """A request's keywords, resolved: what the scheduler needs, and the sampling."""

    max_new_tokens: int
    num_sequences: int
    sampling: SamplingParams
    priority: int
    cache_salt: str | None


class RequestResolver:
    """Turns keywords into ResolvedRequests for one model.

    Args:
        model: its generation config holds the defaults.
        tokenizer: needed for stop_strings only.
        vocab_size: token ids are below it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._fields = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))
        self._device = model.device if model.device.type != "meta" else torch.device("cpu")

    def resolve(
        self, model: PreTrainedModel, num_prompt_tokens: int, keywords: Mapping[str, Any], num_embedded: int = 0
    ) -> ResolvedRequest:
        """The request that these keywords ask for.

        Args:
            model: the one that runs it.
            num_prompt_tokens: tokens that processors and criteria see before the generated ones.
            keywords: the caller's.
            num_embedded: length of a prompt that is embeddings, and has no tokens.

        Raises:
            RequestError: an unknown keyword, a contradiction, or a mode that packed requests don't have.
        """
        self.check_names(keywords)
        _check_types(keywords)
        generation = {name: value for name, value in keywords.items() if name not in REQUEST_KEYWORDS}
        generation_config = keywords.get("generation_config")
        if keywords.get("bad_words"):
            known = generation.get("bad_words_ids") or getattr(generation_config, "bad_words_ids", None) or []
            generation["bad_words_ids"] = [*known, *self._bad_words_ids(keywords["bad_words"])]
        _settle_temperature(model, generation_config, generation)
        config = self._generation_config(model, generation_config, generation, num_prompt_tokens, num_embedded)
        for name, neutral in _OTHER_MODES.items():
            if getattr(config, name, None) not in (None, neutral):
                raise RequestError(
                    f"A request can't have {name}={getattr(config, name)!r}; call model.generate for it."
                )
        max_new_tokens = config.max_length - num_prompt_tokens
        asks_prompt = config.guidance_scale not in (None, 1) or keywords.get("prompt_logprobs") is not None
        if num_embedded and asks_prompt:
            raise RequestError("guidance_scale and prompt_logprobs need a prompt of tokens, not of embeddings.")
        if max_new_tokens < 1:
            raise RequestError(
                f"max_length={config.max_length} leaves nothing to generate after a prompt of {num_prompt_tokens} "
                "tokens; raise it, or set max_new_tokens."
            )
        return ResolvedRequest(
            max_new_tokens=max_new_tokens,
            num_sequences=config.num_return_sequences or 1,
            sampling=self._sampling(model, config, num_prompt_tokens, keywords),
            priority=keywords.get("priority") or 0,
            cache_salt=keywords.get("cache_salt"),
        )

    def check_names(self, names: Mapping[str, Any]) -> None:
        """Raises RequestError for a keyword that is neither GenerationConfig's nor ours."""
        for name in names:
            if name not in self._fields and name not in REQUEST_KEYWORDS:
                hint = nearest(name, self._fields | REQUEST_KEYWORDS)
                raise RequestError(f"A request has no keyword {name!r}: {hint}")

    def _bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        # a word is another token behind a space, and special tokens are no part of it
        if self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer: PagedEngine(model, config, tokenizer=tokenizer).")
        forms = [form for word in words for form in (word, f" {word}")]
        ids = [self._tokenizer(form, add_special_tokens=False)["input_ids"] for form in forms]
        return [list(form) for form in dict.fromkeys(map(tuple, ids)) if form]

    def _generation_config(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None,
        generation: dict[str, Any],
        num_prompt_tokens: int,
        num_embedded: int,
    ) -> GenerationConfig:
        def unset(name: str) -> bool:
            return (
                generation.get(name) is None
                and (generation_config is None or getattr(generation_config, name) is None)
                and getattr(model.generation_config, name) is None
            )

        try:
            default_max, default_min = unset("max_length"), unset("min_length")
            config, _ = model._prepare_generation_config(generation_config, **generation)
            ids = torch.zeros(1, num_embedded or num_prompt_tokens, dtype=torch.int64)
            model._prepare_special_tokens(config, True, device=self._device, batch_size=1)
            return model._prepare_generated_length(
                generation_config=config,
                has_default_max_length=default_max,
                has_default_min_length=default_min,
                model_input_name="inputs_embeds" if num_embedded else "input_ids",
                inputs_tensor=ids,
                input_ids_length=num_prompt_tokens,
            )
        except (ValueError, TypeError) as error:
            raise RequestError(str(error)) from error

    def _sampling(
        self, model: PreTrainedModel, config: GenerationConfig, num_prompt_tokens: int, keywords: Mapping[str, Any]
    ) -> SamplingParams:
        extra = LogitsProcessorList(keywords.get("logits_processor") or [])
        if keywords.get("logit_bias"):
            extra.append(LogitBiasProcessor(keywords["logit_bias"], self._vocab_size))
        presence, frequency = _penalty(keywords, "presence_penalty"), _penalty(keywords, "frequency_penalty")
        if presence or frequency:
            extra.append(OutputPenaltyProcessor(presence, frequency, num_prompt_tokens))
        scale, config.guidance_scale = config.guidance_scale, None  # stock's processor is for a batch
        try:
            processors = model._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=num_prompt_tokens,
                prefix_allowed_tokens_fn=keywords.get("prefix_allowed_tokens_fn"),
                logits_processor=extra,
                device=self._device,
                model_kwargs={},
            )
            criteria = self._criteria(model, config, keywords.get("stopping_criteria"))
        except (ValueError, TypeError) as error:
            raise RequestError(str(error)) from error
        negative = self._negative_ids(keywords.get("negative_prompt_ids"), scale)
        if scale is not None and scale != 1:
            if keywords.get("adapter") is not None:
                raise RequestError(
                    "guidance_scale uses the model's active adapters, so a request can't name an adapter beside it."
                )
            rows = config.num_return_sequences or 1
            processors.insert(0, GuidanceProcessor(scale, model, num_prompt_tokens, negative, rows))
        grammar, ends = None, eos_ids(config)
        rules = {name: keywords[name] for name in GRAMMAR_KEYWORDS if keywords.get(name) is not None}
        if rules:
            grammar = Grammar(self._tokenizer, stop_token_ids=sorted(ends), **rules)
            ends |= set(grammar.stop_token_ids)  # a text that is complete ends, whatever the model's config says
        seed = keywords.get("seed")
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 2**64):
            raise RequestError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}.")
        return SamplingParams(
            processors=processors,
            criteria=criteria,
            eos_token_ids=ends,
            do_sample=bool(config.do_sample),
            # processors that the caller brings are that request's alone, whatever their class
            shared_key=None if extra else shared_key(config, processors),
            seed=seed,
            num_logprobs=_count(keywords, "logprobs", self._vocab_size),
            num_prompt_logprobs=_count(keywords, "prompt_logprobs", self._vocab_size),
            grammar=grammar,
            draft_source=draft_source(
                model, config, keywords.get("assistant_model"), keywords.get("num_assistant_tokens")
            ),
        )

    def _negative_ids(self, value: Any, scale: float | None) -> list[int] | None:
        if value is None:
            return None
        try:
            ids: list[int] = torch.as_tensor(value).flatten().tolist()
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"negative_prompt_ids are token ids, not {value!r:.80}.") from error
        if not ids or any(not isinstance(token, int) or not 0 <= token < self._vocab_size for token in ids):
            raise RequestError(f"negative_prompt_ids are one or more token ids from 0 to {self._vocab_size - 1}.")
        if scale is None or scale == 1:
            raise RequestError("negative_prompt_ids need a guidance_scale other than 1 beside them.")
        return ids

    def _criteria(
        self, model: PreTrainedModel, config: GenerationConfig, own: StoppingCriteriaList | None
    ) -> tuple[tuple[str, int | str | None, Any], ...]:
        strings = config.stop_strings
        config = copy.copy(config)
        config.stop_strings = None
        found: list[tuple[str, int | str | None, Any]] = []
        for criterion in model._get_stopping_criteria(config, StoppingCriteriaList(own or []), self._tokenizer):
            if isinstance(criterion, stopping.MaxLengthCriteria | stopping.EosTokenCriteria):
                continue  # the engine looks at lengths and ids itself
            found.append(("length" if isinstance(criterion, stopping.MaxTimeCriteria) else "stop", None, criterion))
        for string in [strings] if isinstance(strings, str) else strings or ():
            if self._tokenizer is None:
                raise RequestError("stop_strings need a tokenizer: PagedEngine(model, config, tokenizer=tokenizer).")
            found.append(("stop", string, stopping.StopStringCriteria(self._tokenizer, [string])))
        return tuple(found)


def _check_types(keywords: Mapping[str, Any]) -> None:
    allowed = keywords.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise RequestError(f"prefix_allowed_tokens_fn must be a function of a row and its tokens, not {allowed!r:.80}.")
    salt = keywords.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, not {salt!r}.")
    for name in ("priority", *_INTEGER_FIELDS):
        value = keywords.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise RequestError(f"{name} must be an integer, not {value!r}.")


def _settle_temperature(
    model: PreTrainedModel, generation_config: GenerationConfig | None, generation: dict[str, Any]
) -> None:
    temperature = generation.get("temperature")
    if temperature is None:
        return
    if temperature == 0:  # the convention of HTTP clients
        generation["temperature"] = None
        generation["do_sample"] = False
        return
    do_sample = generation.get("do_sample")
    if do_sample is None:
        do_sample = generation_config.do_sample if generation_config is not None else None
    if do_sample is None:
        do_sample = model.generation_config.do_sample
    if not do_sample:
        raise RequestError(f"temperature={temperature} needs do_sample=True beside it; add that, or leave both out.")


def _penalty(keywords: Mapping[str, Any], name: str) -> float:
    value = keywords.get(name) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not -2 <= value <= 2:
        raise RequestError(f"{name} must be a number from -2 to 2, not {value!r}.")
    return float(value)


def _count(keywords: Mapping[str, Any], name: str, most: int) -> int | None:
    value = keywords.get(name)
    if value is None or value is False:
        return None
    if not isinstance(value, int) or not 0 <= value <= most:
        raise RequestError(f"{name} must be how many alternatives to return, 0 to {most}, not {value!r}.")
    return int(value) if value is not True else 0


def eos_ids(config: GenerationConfig) -> frozenset[int]:
    """The ids that end a sequence."""
    tokens = config._eos_token_tensor
    return frozenset() if tokens is None else frozenset(tokens.flatten().tolist())


def shared_key(config: GenerationConfig, processors: Sequence[Any]) -> Hashable | None:
    """Equal for configs whose processors treat a row of scores alike, whatever the row's history; else None."""
    if not all(type(processor) in ROW_PROCESSORS for processor in processors):
        return None
    values = (getattr(config, name, None) for name in _ROW_FIELDS) if processors else ()
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def spread(keywords: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The keywords of each of `count` prompts: a list gives one value a prompt, except for fields that are lists."""
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in keywords.items():
        is_list = isinstance(value, list | tuple) and name not in LIST_FIELDS
        if is_list and len(value) != count:
            raise RequestError(f"{name} has {len(value)} values for {count} prompts; give one value, or one a prompt.")
        for index, options in enumerate(each):
            options[name] = value[index] if is_list else value
    allowed = keywords.get("prefix_allowed_tokens_fn")
    if callable(allowed):  # it is called with the prompt's index, as in a batch
        for index, options in enumerate(each):
            options["prefix_allowed_tokens_fn"] = _of_row(allowed, index)
    return each


def _of_row(allowed: Callable[[int, torch.Tensor], list[int]], row: int) -> Callable[[int, torch.Tensor], list[int]]:
    return lambda _, tokens: allowed(row, tokens)
