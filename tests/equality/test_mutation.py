"""The suites notice broken attention: each thing is broken on purpose, one at a time, and rows differ from stock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine
from hf_paged.errors import UnsupportedModelError
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.metadata import AttentionMetadata, AttentionParams
from hf_paged.kernels.torch_backend import TorchBackend
from tests import zoo
from tests.equality.drive import run_to_end
from tests.oracle import differing_tokens, ragged_prompts, solo

NEW = 12
PROMPTS = ragged_prompts(6, seed=71, shortest=20)
ALL = zoo.ARCHITECTURES

Call = tuple[AttentionMetadata, AttentionParams]
Mutation = Callable[[AttentionMetadata, AttentionParams], Call]


def _changed(metadata: AttentionMetadata, **fields: object) -> AttentionMetadata:
    return dataclasses.replace(metadata, plans={}, **fields)  # a plan made before the change must not hide it


def _nothing(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    return _changed(metadata), dataclasses.replace(params)


def _no_window(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    return metadata, dataclasses.replace(params, window=None)


def _narrow_window(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    return metadata, dataclasses.replace(params, window=None if params.window is None else params.window - 1)


def _wide_window(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    return metadata, dataclasses.replace(params, window=None if params.window is None else params.window + 1)


def _no_softcap(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    return metadata, dataclasses.replace(params, softcap=None)


def _no_sinks(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    return metadata, dataclasses.replace(params, sinks=None)


def _wrong_scale(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    return metadata, dataclasses.replace(params, scale=params.scale * 1.5)


def _reversed_blocks(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    """Each sequence's blocks, from its window's first to its last, in reversed order."""
    table = metadata.block_table.clone()
    for row, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        first_key = 0 if params.window is None else max(0, kv_len - query_len - params.window + 1)
        begin, end = first_key // metadata.block_size, math.ceil(kv_len / metadata.block_size)
        table[row, begin:end] = table[row, begin:end].flip(0)
    return _changed(metadata, block_table=table), params


def _neighbours_blocks(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    return _changed(metadata, block_table=metadata.block_table.roll(1, 0)), params


def _no_first_key(metadata: AttentionMetadata, params: AttentionParams) -> Call:
    """The last query of the only sequence doesn't see the key at position 0; everything else is right."""
    (kv_len,) = metadata.kv_lens
    if params.window is not None or kv_len == 1:
        return metadata, params
    return metadata, dataclasses.replace(params, window=kv_len - 1)


def _rows_that_differ(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    mutation: Mutation,
    prompts: list[list[int]],
    write: Callable[..., None] | None = None,
    **config: int,
) -> int:
    model = zoo.build(name)
    expected = [solo(model, ids, max_new_tokens=NEW) for ids in prompts]
    attend = TorchBackend.attend
    calls = []

    def broken(
        self: TorchBackend,
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        calls.append(1)
        return attend(self, query, blocks, *mutation(metadata, params))

    settings = PagedConfig(
        block_size=8, num_blocks=128, attention_backend="torch", enable_prefix_caching=False, **config
    )
    with PagedEngine(model, settings) as engine, monkeypatch.context() as patch:
        # Only now: the engine tries a packed step of its own when it is made, and would refuse.
        patch.setattr(TorchBackend, "attend", broken)
        if write is not None:
            patch.setattr(TorchBackend, "write", write)
        ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
        final = run_to_end(engine, ids)
    assert calls
    # a broken table may point at slots that nobody wrote, whose NaN ends the request: noticed too, and fewer tokens
    return sum(differing_tokens(final[i].token_ids, tokens) > 0 for i, tokens in zip(ids, expected, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_nothing_broken_nothing_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _rows_that_differ(name, monkeypatch, _nothing, PROMPTS, max_batch_tokens=64) == 0


BROKEN: list[tuple[Mutation, tuple[str, ...]]] = [
    (_no_window, zoo.WINDOWED),
    (_narrow_window, zoo.WINDOWED),
    (_wide_window, zoo.WINDOWED),
    (_no_softcap, ("gemma2",)),
    (_no_sinks, ("gpt_oss",)),
    (_wrong_scale, ALL),
    (_reversed_blocks, ALL),
    (_neighbours_blocks, ALL),
]


@pytest.mark.parametrize(("mutation", "name"), [(mutation, name) for mutation, names in BROKEN for name in names])
def test_broken_attention_is_noticed(mutation: Mutation, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    differing = _rows_that_differ(name, monkeypatch, mutation, PROMPTS, max_batch_tokens=64)
    assert differing > len(PROMPTS) / 2


@pytest.mark.parametrize("name", [name for name in ALL if name != "mistral"])  # all of mistral's layers have a window
def test_a_lost_first_key_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # One at a time, and prompts that the first key still weighs in.
    prompts = ragged_prompts(6, seed=72, shortest=2, longest=14)
    differing = _rows_that_differ(name, monkeypatch, _no_first_key, prompts, max_requests_per_batch=1)
    assert differing > len(prompts) / 2


@pytest.mark.parametrize("name", ALL)
def test_tokens_written_to_the_wrong_slot_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = TorchBackend.write

    def shifted(
        self: TorchBackend, blocks: KVBlocks, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        write(self, blocks, key, value.roll(1, 0) if len(value) > 1 else value, slot_mapping)

    differing = _rows_that_differ(name, monkeypatch, _nothing, PROMPTS, shifted, max_batch_tokens=64)
    assert differing > len(PROMPTS) / 2


@pytest.mark.parametrize(
    ("mutation", "name"), [(_no_softcap, "gemma2"), (_no_sinks, "gpt_oss"), (_wrong_scale, "llama")]
)
def test_an_engine_refuses_a_model_that_it_would_get_wrong(
    mutation: Mutation, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine tries a packed step when it is made, and compares it with the model's own attention."""
    attend = TorchBackend.attend

    def broken(
        self: TorchBackend,
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        return attend(self, query, blocks, *mutation(metadata, params))

    monkeypatch.setattr(TorchBackend, "attend", broken)
    with pytest.raises(UnsupportedModelError, match="packed"):
        PagedEngine(zoo.build(name), PagedConfig(num_blocks=16, attention_backend="torch"))
