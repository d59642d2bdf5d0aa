"""Text-generation pipelines that run all their prompts together on the paged engine.

Stock's own methods preprocess, prepare `generate` and postprocess; only the order of the work is ours.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset
from transformers import Pipeline, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from hf_paged.config import PagedConfig
from hf_paged.errors import ConfigError, PagedError
from hf_paged.integrations import generate as hook
from hf_paged.integrations.pipeline_iterator import PagedPipelineIterator, say_once, seeded

TASK = "text-generation"


# What stock tells apart by itself, or refuses with a reason.
_AS_STOCK = (str, bytes, list, tuple, Mapping, Dataset, types.GeneratorType)


class _Column(Dataset[Any]):
    """A sequence as a dataset."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class PagedPipelineMixin:
    """What makes a text-generation pipeline paged. It stands before the pipeline's class in the order of bases."""

    def __init__(self, *args: Any, task: str = "", **kwargs: Any) -> None:
        _require_task(task)
        super().__init__(*args, task=task, **kwargs)  # type: ignore[call-arg]  # the pipeline's, which comes next

    def _sanitize_parameters(
        self, progress: bool | None = None, seed: int | None = None, **parameters: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**parameters)  # type: ignore[misc]
        if progress is not None:
            forward["progress"] = progress
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
                raise ConfigError(f"seed must be an integer from 0 to 2**63 - 1, not {seed!r}.")
            forward["seed"] = seed
        return preprocess, forward, postprocess

    def __call__(self, text_inputs: Any, **keywords: Any) -> Any:
        """Completes one prompt or chat, or many of them.

        Args:
            text_inputs: text or a chat; a list of them; or a dataset, a generator or another iterator of them.
            **keywords: what stock's pipeline takes, and

                - progress: whether a bar is shown on a terminal; it counts the prompts that are done.
                - seed: prompt i is sampled as by stock's pipeline after `torch.manual_seed(seed + i)`, alone. Without
                  it the seed is drawn from torch's generator.

                batch_size is accepted and not needed.

        Returns:
            As stock's: a list of dicts for one prompt, a list of those for a list, an iterator of those for a dataset
            or an iterator.
        """
        if isinstance(text_inputs, list) and not text_inputs:
            return []
        if not isinstance(text_inputs, _AS_STOCK):
            # iterators, and the columns of other libraries' data sets: stock would take them for one prompt
            if isinstance(text_inputs, Sequence):
                text_inputs = _Column(text_inputs)
            elif isinstance(text_inputs, Iterable):
                text_inputs = (item for item in text_inputs)
        return super().__call__(text_inputs, **keywords)  # type: ignore[misc]

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> PagedPipelineIterator:
        """What runs many inputs; called by stock's `__call__`."""
        if batch_size not in (None, 1):
            say_once("A paged pipeline runs as many prompts together as fit; it needs no batch_size.")
        forward_params, progress, seed = self._paged(forward_params)
        why_at_once = None
        if forward_params.get("stopping_criteria"):
            why_at_once = "stopping_criteria of one's own"
        elif not _runs_stock_forward(type(self)):
            why_at_once = f"the _forward or forward of {type(self).__name__}"
        return PagedPipelineIterator(
            self,
            inputs,
            (preprocess_params, forward_params, postprocess_params),
            num_workers=num_workers or 0,
            seed=seed,
            has_progress=progress,
            is_eager=isinstance(inputs, list),
            why_at_once=why_at_once,
        )

    def run_single(
        self,
        inputs: Any,
        preprocess_params: dict[str, Any],
        forward_params: dict[str, Any],
        postprocess_params: dict[str, Any],
    ) -> Any:
        """What runs one input; called by stock's `__call__`."""
        forward_params, _, seed = self._paged(forward_params)
        run = functools.partial(super().run_single, inputs)  # type: ignore[misc]
        if seed is None:
            return run(preprocess_params, forward_params, postprocess_params)
        with seeded(seed, self.device):  # type: ignore[attr-defined]
            return run(preprocess_params, forward_params, postprocess_params)

    @staticmethod
    def _paged(forward_params: dict[str, Any]) -> tuple[dict[str, Any], bool, int | None]:
        # the keywords of generate, and ours
        if not hook._wrappers:
            raise PagedError("A paged pipeline needs hf_paged's generate: call hf_paged.install() first.")
        params = {"cache_implementation": "paged", **forward_params}
        return params, bool(params.pop("progress", False)), params.pop("seed", None)


class PagedTextGenerationPipeline(PagedPipelineMixin, TextGenerationPipeline):
    """Stock's TextGenerationPipeline, with continuous batching for whatever has many prompts.

    ```
    pipeline("text-generation", model, pipeline_class=hf_paged.PagedTextGenerationPipeline)
    ```
    """


def paged_pipeline(pipe: Pipeline, config: PagedConfig | None = None, *, progress: bool = False) -> Pipeline:
    """A pipeline like `pipe`, with its model, tokenizer and settings, that runs its prompts on the paged engine.

    Args:
        pipe: a text-generation pipeline, or one of a class derived from it. It stays as it is.
        config: the engine's settings; None keeps those of the model's engine, or takes the defaults.
        progress: whether calls of many prompts show a bar.

    Raises:
        TypeError: it is another kind of pipeline.
    """
    if not isinstance(pipe, TextGenerationPipeline):
        raise TypeError(f"paged_pipeline takes a text-generation pipeline, not {type(pipe).__name__}. {_INSTEAD}")
    cls: Any = type(pipe)
    if not issubclass(cls, PagedPipelineMixin):
        cls = _paged_class(cls)
    # a shallow copy: what was resolved when the pipeline was made holds, whatever its arguments were
    paged: Any = cls.__new__(cls)
    paged.__dict__.update(vars(pipe))
    settings: dict[str, Any] = {"progress": True} if progress else {}
    if config is not None:
        settings["cache_config"] = PagedConfig.from_any(config)
    paged._forward_params = {**pipe._forward_params, **settings}
    return paged


_INSTEAD = (
    "For other tasks give the pipeline generate_kwargs={'cache_implementation': 'paged'}, where it takes them, or call "
    "model.generate(..., cache_implementation='paged')."
)


def _require_task(task: str) -> None:
    if task in ("", TASK):
        return
    known = PIPELINE_REGISTRY.supported_tasks.get(task)
    # where a pipeline's libraries are missing, a stand-in without bases is registered
    if known is not None and TextGenerationPipeline not in getattr(known["impl"], "__mro__", ()):
        raise ConfigError(f"PagedTextGenerationPipeline runs the task {TASK!r}, not {task!r}. {_INSTEAD}")


@functools.cache
def _paged_class(base: Any) -> Any:
    if base is TextGenerationPipeline:
        return PagedTextGenerationPipeline
    bases: tuple[type, ...] = (PagedPipelineMixin, base)
    return type(f"Paged{base.__name__}", bases, {"__module__": __name__, "__doc__": base.__doc__})


def _runs_stock_forward(cls: type) -> bool:
    # a _forward of one's own may look at the tokens, which aren't there yet when it returns
    return cls._forward is TextGenerationPipeline._forward and cls.forward is Pipeline.forward  # type: ignore[attr-defined]
