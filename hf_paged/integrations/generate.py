"""`model.generate(..., cache_implementation="paged")`: five wrapped methods, and the way back.

generate                         finds out whether "paged" is meant, opens a scope, calls the original
  stock prepares everything      inputs, masks, processors, criteria: its semantics stay its own
  _prepare_cache_for_generation  other loops of stock get a PagedKVCache
  _sample                        greedy and sampling run on the engine instead of stock's loop
  _assisted_decoding             so do prompt lookup and assistant models
  _beam_search                   beams run on the engine, inside stock's loop
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache
from transformers.generation.utils import GenerationMixin

from hf_paged.compat import CACHE_KEYWORD
from hf_paged.config import PagedConfig

logger = logging.getLogger("hf_paged")

# Model inputs that a packed row carries in its own way, or that don't change what it computes.
_KNOWN_INPUTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", "tokenizer"})

_METHODS = ("generate", "_prepare_cache_for_generation", "_sample", "_assisted_decoding", "_beam_search")
_originals: dict[str, Callable[..., Any]] = {}
_wrappers: dict[str, Callable[..., Any]] = {}
_said: set[str] = set()


@dataclass
class _PagedCall:
    """One paged `generate` call of one model, in one thread."""

    model: Any
    config: PagedConfig | None
    has_own_positions: bool
    has_own_loop: bool = False


class _Local(threading.local):
    call: _PagedCall | None = None


_local = _Local()


@contextmanager
def _scope(call: _PagedCall | None) -> Iterator[None]:
    # nested calls, of an assistant model for one, are not paged unless they say so
    previous, _local.call = _local.call, call
    try:
        yield
    finally:
        _local.call = previous


def _current(model: Any) -> _PagedCall | None:
    call = _local.call
    return call if call is not None and call.model is model else None


# -- the wrapped methods ---------------------------------------------------------------------------------------------


def _generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs, call = _take_request(model, args, kwargs)
    if isinstance(kwargs.get("custom_generate"), str) and (call or _current(model)):
        # its code gets the arguments before stock has prepared anything; stock itself names it for old modes
        _fall_back(model, "the code that custom_generate names runs as it is, without a paged cache")
    with _scope(call):
        return original(model, *args, **kwargs)


def _take_request(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], _PagedCall | None]:
    """Finds "paged" in the keywords, the given or the model's generation config, and takes it out of the first two."""
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    if _setting("cache_implementation", model, given, kwargs) != "paged":
        return args, kwargs, None
    value = _setting("cache_config", model, given, kwargs)
    config = None if value is None else PagedConfig.from_any(value)
    if isinstance(kwargs.get("streamer"), list | tuple):
        from hf_paged.integrations.row_streamers import RowStreamers

        kwargs["streamer"] = RowStreamers(kwargs["streamer"], kwargs.get("attention_mask"))
    kwargs = {name: item for name, item in kwargs.items() if name not in ("cache_implementation", "cache_config")}
    if given is not None and (given.cache_implementation is not None or given.cache_config is not None):
        given = copy.copy(given)
        given.cache_implementation = given.cache_config = None
        if len(args) > 1:
            args = (args[0], given, *args[2:])
        else:
            kwargs["generation_config"] = given
    has_own_loop = callable(kwargs.get("custom_generate"))
    return args, kwargs, _PagedCall(model, config, kwargs.get("position_ids") is not None, has_own_loop)


def _setting(name: str, model: Any, given: Any, kwargs: dict[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    if given is not None and getattr(given, name) is not None:
        return getattr(given, name)
    return getattr(getattr(model, "generation_config", None), name, None)


def _prepare_cache(
    original: Callable[..., Any],
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = _current(model)
    if call is None:
        return original(model, generation_config, model_kwargs, generation_mode, *args, **kwargs)
    # the model's own generation config may be where "paged" came from; this is a copy of it
    generation_config.cache_implementation = generation_config.cache_config = None
    if call.has_own_loop:
        _fall_back(model, "the function given as custom_generate runs its own loop on a PagedKVCache")
        return _give_paged_cache(original, model, generation_config, model_kwargs, generation_mode, *args, **kwargs)
    if generation_mode in ("sample", "greedy_search") and type(model)._sample is GenerationMixin._sample:
        return None  # _sample decides, and makes a cache if it is stock's loop that runs
    assisted = GenerationMixin._assisted_decoding
    if generation_mode == "assisted_generation" and type(model)._assisted_decoding is assisted:
        return None
    if generation_mode in ("beam_search", "beam_sample") and type(model)._beam_search is GenerationMixin._beam_search:
        return None
    _fall_back(model, f"{getattr(generation_mode, 'value', generation_mode)} runs stock's loop on a PagedKVCache")
    return _give_paged_cache(original, model, generation_config, model_kwargs, generation_mode, *args, **kwargs)


def _give_paged_cache(
    original: Callable[..., Any],
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Lets stock prepare its cache, then puts a PagedKVCache in the place of the DynamicCache that it made."""
    from hf_paged.cache.paged_cache import PagedKVCache

    is_own = model_kwargs.get(CACHE_KEYWORD) is not None
    result = original(model, generation_config, model_kwargs, *args, **kwargs)
    made = model_kwargs.get(CACHE_KEYWORD)
    if is_own or made is None:
        return result
    inner = made.self_attention_cache if isinstance(made, EncoderDecoderCache) else made
    plain = (DynamicLayer, DynamicSlidingWindowLayer)  # recurrent states and indexers stay with stock's cache
    if type(inner) is not DynamicCache or any(type(layer) not in plain for layer in inner.layers):
        return result
    paged = PagedKVCache(model.config)
    if generation_config.is_assistant:
        paged.activate_past_recording()
    if inner is made:
        model_kwargs[CACHE_KEYWORD] = paged
    else:
        model_kwargs[CACHE_KEYWORD] = EncoderDecoderCache(paged, made.cross_attention_cache)
    return result


def _sample(
    original: Callable[..., Any],
    model: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    if _current(model) is not None:
        stopping_criteria = _watched(streamer, stopping_criteria, input_ids)
        engine = _engine(model, input_ids, stopping_criteria, generation_config, synced_gpus, model_kwargs)
        if engine is not None:
            from hf_paged.integrations.decoding import batch_of
            from hf_paged.integrations.deferral import run_or_defer

            asked = (input_ids, logits_processor, stopping_criteria, generation_config)
            return run_or_defer(engine, batch_of(model, *asked, model_kwargs, streamer))
    return original(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        **model_kwargs,
    )


def _assisted_decoding(
    original: Callable[..., Any],
    model: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    assistant_model: Any = None,
    **kwargs: Any,
) -> Any:
    if _current(model) is not None:
        from hf_paged.integrations import assisted
        from hf_paged.integrations.decoding import batch_of
        from hf_paged.integrations.deferral import was_deferred

        stopping_criteria = _watched(streamer, stopping_criteria, input_ids)
        asked = (input_ids, logits_processor, stopping_criteria, generation_config)
        batch = batch_of(model, *asked, kwargs, streamer)
        model_kwargs = {name: value for name, value in kwargs.items() if name not in assisted.KEYWORDS}
        engine = _engine(
            model,
            input_ids,
            stopping_criteria,
            generation_config,
            synced_gpus,
            model_kwargs,
            reason=assisted.why_stock(model, batch, assistant_model, kwargs),
        )
        if engine is not None:
            drafts, reason = assisted.draft_source(engine, batch, assistant_model)
            if reason is not None:
                _say(model, reason)
            if was_deferred(engine, batch, drafts):
                return batch.input_ids
            return assisted.decode(engine, batch, drafts)
        kwargs = {**kwargs, **model_kwargs}  # with the cache that was prepared
    return original(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        assistant_model=assistant_model,
        **kwargs,
    )


def _beam_search(
    original: Callable[..., Any],
    model: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    if _current(model) is not None:
        engine = _engine(model, input_ids, stopping_criteria, generation_config, synced_gpus, model_kwargs)
        if engine is not None:
            from hf_paged.integrations import beams
            from hf_paged.integrations.decoding import batch_of
            from hf_paged.integrations.deferral import were_deferred

            batch = batch_of(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
            if were_deferred(original, model, engine, batch):
                return input_ids[: generation_config.num_return_sequences]
            return beams.search(original, model, engine, batch)
    return original(
        model,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        **model_kwargs,
    )


def _watched(streamer: Any, stopping_criteria: Any, input_ids: Any) -> Any:
    # streamers of single rows hear from the criteria when theirs ends
    if streamer is None:
        return stopping_criteria
    from hf_paged.integrations.row_streamers import RowStreamers

    if isinstance(streamer, RowStreamers):
        return streamer.watched(stopping_criteria, input_ids.shape[1])
    return stopping_criteria


def _engine(
    model: Any,
    input_ids: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
    reason: str | None = None,
) -> Any:
    """The engine that runs this call; None, with stock's cache prepared and the reason said, if stock's loop must."""
    call = _current(model)
    assert call is not None
    reason = reason or _why_stock(
        model, call, input_ids, stopping_criteria, generation_config, synced_gpus, model_kwargs
    )
    prepare_cache = functools.partial(_give_paged_cache, _originals["_prepare_cache_for_generation"])
    if reason is None:
        from hf_paged.errors import UnsupportedModelError
        from hf_paged.integrations.engines import engine_for

        try:
            engine = engine_for(model, call.config)
        except UnsupportedModelError as error:
            reason = str(error)
            prepare_cache = functools.partial(_originals["_prepare_cache_for_generation"])  # stock, as it is
        else:
            from hf_paged.integrations import frequencies

            reason = frequencies.why_stock(engine, input_ids, stopping_criteria, generation_config, model_kwargs)
            if reason is None:
                return engine
    _fall_back(model, reason)
    mode, length = generation_config.get_generation_mode(), int(stopping_criteria.max_length or 0)
    prepare_cache(model, generation_config, model_kwargs, mode, input_ids.shape[0], length)
    return None


def _why_stock(
    model: Any,
    call: _PagedCall,
    input_ids: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why the engine can't run this call, or None if it can."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models run stock's loop"
    if synced_gpus or _is_sharded(model):
        return "synced_gpus, FSDP and ZeRO-3 need stock's loop, whose ranks step together"
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return "attentions and hidden states come from stock's loop"
    if generation_config.num_beams > 1 and hasattr(model, "_reorder_cache"):
        return "beams of a model that reorders its cache itself run stock's loop"
    if generation_config.use_cache is False:
        return "use_cache=False needs stock's loop"
    if generation_config.is_assistant:
        return "an assistant model drafts with stock's loop"
    if stopping_criteria.max_length is None:
        return "a call without any max_length or max_new_tokens runs stock's loop"
    if call.has_own_positions:
        return "position_ids of one's own need stock's loop"
    if _prepares_its_own_way(model):
        return "inputs that are prepared in another way, as PEFT's learned prompts are, need stock's loop"
    shape = input_ids.shape
    known = _KNOWN_INPUTS
    if model_kwargs.get("inputs_embeds") is not None:
        from hf_paged.integrations import embeds

        reason = embeds.why_stock(model, call.config, input_ids, stopping_criteria, generation_config, model_kwargs)
        if reason is not None:
            return reason
        shape, known = model_kwargs["inputs_embeds"].shape[:2], known | {"inputs_embeds"}
    if model_kwargs.get(CACHE_KEYWORD) is not None:
        from hf_paged.integrations import continuing

        reason = continuing.why_stock(model, call.config, input_ids, generation_config, model_kwargs)
        if reason is not None:
            return reason
        known = known | {CACHE_KEYWORD}
    # a dict of what encoders made of images is empty where there are none
    given = {name for name, value in model_kwargs.items() if value is not None and not _is_empty(value)}
    extra = sorted(given - known)
    if extra:
        return f"{', '.join(extra)} {'needs' if len(extra) == 1 else 'need'} stock's loop"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape != shape:
        return "an attention_mask of another shape than input_ids needs stock's loop"
    if mask is not None and mask.numel():
        shown = mask.ne(0).long()  # bool masks have no differences below zero
        if bool((shown.diff(dim=-1) < 0).any()):
            return "a mask that hides tokens inside or behind the prompt needs stock's loop"
        if not bool(shown[:, -1].all()):
            return "a mask that hides the whole of a row needs stock's loop"
    if getattr(model, "peft_config", None) is not None:
        from hf_paged.integrations.peft import why_stock

        return why_stock(model, call.config, input_ids.shape[0], generation_config.get_generation_mode())
    return None


def _prepares_its_own_way(model: Any) -> bool:
    # on the instance; what PEFT puts back there after a call is the class's own
    own = vars(model).get("prepare_inputs_for_generation")
    return own is not None and getattr(own, "__func__", None) is not type(model).prepare_inputs_for_generation


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def _is_sharded(model: Any) -> bool:
    # parameters that exist in whole only while all ranks run the same forward
    wrapped = any(type(module).__name__.startswith(("FSDP", "FullyShardedDataParallel")) for module in model.modules())
    return wrapped or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _fall_back(model: Any, reason: str) -> None:
    from hf_paged.integrations.engines import count_fallback

    count_fallback(model)
    _say(model, reason)


def _say(model: Any, reason: str) -> None:
    message = f"cache_implementation='paged' on {type(model).__name__}: {reason.rstrip('.')}."
    if message not in _said:
        _said.add(message)
        logger.warning(message)


# -- install and uninstall -------------------------------------------------------------------------------------------


def install() -> None:
    """Wraps the five methods. Done by `import hf_paged`; a second time changes nothing."""
    implementations: dict[str, Callable[..., Any]] = {
        "generate": _generate,
        "_prepare_cache_for_generation": _prepare_cache,
        "_sample": _sample,
        "_assisted_decoding": _assisted_decoding,
        "_beam_search": _beam_search,
    }
    if _wrappers:
        return
    for name in _METHODS:
        original = getattr(GenerationMixin, name)
        _originals[name] = original
        wrapper = _wrap(original, implementations[name])
        _wrappers[name] = wrapper
        setattr(GenerationMixin, name, wrapper)


def _wrap(original: Callable[..., Any], implementation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(model: Any, *args: Any, **kwargs: Any) -> Any:
        if wrapper not in _wrappers.values():  # uninstalled, but someone's later patch still calls us
            return original(model, *args, **kwargs)
        return implementation(original, model, *args, **kwargs)

    return wrapper


def uninstall() -> None:
    """Puts the five methods back. A patch that someone laid over ours stays, and reaches the original through it."""
    for name, wrapper in _wrappers.items():
        if getattr(GenerationMixin, name) is wrapper:
            setattr(GenerationMixin, name, _originals[name])
    _wrappers.clear()
