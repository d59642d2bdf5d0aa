"""PagedConfig: every value checked, every wrong name answered."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from hf_paged import PagedConfig
from hf_paged.config import FOREIGN_NAMES, KV_DTYPES
from hf_paged.errors import ConfigError, PagedError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("block_size", [8, 16, 32, 64, 128, 256]),
        ("num_blocks", [None, 1, 10**9]),
        ("memory_fraction", [1e-9, 0.5, 1, 1.0]),
        ("max_batch_tokens", [1, 10**6]),
        ("max_requests_per_batch", [1, 10**6]),
        ("max_queue_size", [None, 1, 10**6]),
        ("enable_prefix_caching", [True, False]),
        ("prefix_cache_fraction", [0, 0.0, 0.5, 0.999]),
        ("attention_backend", ["auto", "torch", "reference"]),
        ("k_dtype", ["auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8"]),
        ("v_dtype", ["auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8"]),
    ],
)
def test_values_in_range_are_taken_as_they_are(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(PagedConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("block_size", [0, -16, 1, 4, 12, 17, 512, None, "16", True, 16.5], "one of 8, 16, 32, 64, 128, 256"),
        ("num_blocks", [0, -1, 1.5, 2.0, True, "10", NAN], "a positive integer"),
        ("memory_fraction", [0, -0.1, 1.0001, 90, NAN, INF], "above 0 and at most 1"),
        ("max_batch_tokens", [0, -1, 1.5, None, True, "512"], "a positive integer"),
        ("max_requests_per_batch", [0, -1, 1.5, None, True, "8"], "a positive integer"),
        ("max_queue_size", [0, -1, 1.5, True, "8"], "a positive integer or None"),
        ("enable_prefix_caching", [None, 0, 1, "yes"], "True or False"),
        ("prefix_cache_fraction", [-0.1, 1, 1.0, 2, NAN], "at least 0 and below 1"),
        ("attention_backend", [None, 3], "the name of a backend"),
        ("k_dtype", [None, "uint8", "fp16", "float64", "fp8_e5m2", 16], f"one of {', '.join(KV_DTYPES)}"),
        ("v_dtype", [None, "uint8", "fp16", "float64", "fp8_e5m2", 16], f"one of {', '.join(KV_DTYPES)}"),
    ],
)
def test_values_out_of_range_name_the_field_and_what_it_takes(name: str, values: list[Any], expected: str) -> None:
    for value in values:
        with pytest.raises(ConfigError) as raised:
            PagedConfig(**{name: value})
        assert f"PagedConfig.{name} must be {expected}" in str(raised.value)


def test_a_torch_dtype_is_welcome() -> None:
    config = PagedConfig(k_dtype=torch.bfloat16, v_dtype=torch.float16)  # type: ignore[arg-type]
    assert (config.k_dtype, config.v_dtype) == ("bfloat16", "float16")
    config = PagedConfig(k_dtype=torch.float8_e4m3fn, v_dtype=torch.int8)  # type: ignore[arg-type]
    assert (config.k_dtype, config.v_dtype) == ("float8_e4m3fn", "int8")
    with pytest.raises(ConfigError, match="k_dtype"):
        PagedConfig(k_dtype=torch.float8_e5m2)  # type: ignore[arg-type]


def test_fp8_is_another_spelling_of_one_type() -> None:
    config = PagedConfig(k_dtype="fp8", v_dtype="fp8")
    assert config == PagedConfig(k_dtype="float8_e4m3fn", v_dtype="float8_e4m3fn")
    assert config.with_options(v_dtype="auto").k_dtype == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("blocksize", "block_size"),
        ("num_block", "num_blocks"),
        ("max_batch_token", "max_batch_tokens"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("attention_backed", "attention_backend"),
        ("kdtype", "k_dtype"),
    ],
)
def test_a_typo_gets_the_name_that_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"no {wrong!r}: did you mean .*{meant!r}"):
        PagedConfig(**{wrong: 1})


def test_a_name_like_no_other_gets_the_whole_list() -> None:
    with pytest.raises(ConfigError) as raised:
        PagedConfig(zzz=1)  # type: ignore[call-arg]
    for field in dataclasses.fields(PagedConfig):
        assert field.name in str(raised.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("gpu_memory_utilization", "memory_fraction"),  # vLLM
        ("max_num_batched_tokens", "max_batch_tokens"),
        ("max_num_seqs", "max_requests_per_batch"),
        ("num_gpu_blocks_override", "num_blocks"),
        ("max_memory_percent", "memory_fraction"),  # ContinuousBatchingConfig
        ("allow_block_sharing", "enable_prefix_caching"),
        ("page_size", "block_size"),
        ("max_batch_prefill_tokens", "max_batch_tokens"),  # text-generation-inference
        ("max_batch_total_tokens", "num_blocks"),
        ("max_concurrent_requests", "max_queue_size"),
        ("cuda_memory_fraction", "memory_fraction"),
    ],
)
def test_other_systems_names_are_translated(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as raised:
        PagedConfig(**{theirs: 1})
    assert str(raised.value) == f"PagedConfig has no {theirs!r}: here it is {ours!r}."


def test_one_name_of_theirs_may_be_two_of_ours() -> None:
    with pytest.raises(ConfigError) as raised:
        PagedConfig(kv_cache_dtype="auto")  # type: ignore[call-arg]
    assert str(raised.value) == "PagedConfig has no 'kv_cache_dtype': here it is 'k_dtype' and 'v_dtype'."


def test_what_has_no_counterpart_says_so() -> None:
    with pytest.raises(ConfigError, match="'use_cuda_graph': it has no counterpart here; leave it out"):
        PagedConfig(use_cuda_graph=True)  # type: ignore[call-arg]


def test_translations_lead_to_names_that_exist() -> None:
    known = {field.name for field in dataclasses.fields(PagedConfig)}
    for theirs, ours in FOREIGN_NAMES.items():
        assert theirs not in known
        assert ours is None or set(ours.split("' and '")) <= known


def test_config_errors_are_value_errors_and_the_packages_own() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, PagedError)


def test_a_config_is_a_value() -> None:
    config = PagedConfig(block_size=32)
    assert config == PagedConfig(block_size=32) != PagedConfig()
    assert hash(config) == hash(PagedConfig(block_size=32))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8  # type: ignore[misc]


CHANGED = PagedConfig(block_size=64, num_blocks=3, prefix_cache_fraction=0.5, k_dtype="float16", max_queue_size=9)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_config(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(CHANGED, protocol)) == CHANGED


def test_copies_are_equal_and_the_dict_of_fields_makes_the_config_again() -> None:
    assert copy.copy(CHANGED) == copy.deepcopy(CHANGED) == CHANGED
    assert PagedConfig(**dataclasses.asdict(CHANGED)) == CHANGED


def test_replace_and_with_options_change_one_field_and_check_it() -> None:
    for changed in (dataclasses.replace(CHANGED, block_size=8), CHANGED.with_options(block_size=8)):
        assert changed.block_size == 8
        assert changed.num_blocks == CHANGED.num_blocks
    for change in (lambda **o: dataclasses.replace(CHANGED, **o), CHANGED.with_options):
        with pytest.raises(ConfigError, match="block_size must be"):
            change(block_size=7)
        with pytest.raises(ConfigError, match="did you mean 'block_size'"):
            change(block_sise=8)


def test_from_any_takes_a_config_a_mapping_or_nothing() -> None:
    assert PagedConfig.from_any(None) == PagedConfig()
    assert PagedConfig.from_any(CHANGED) is CHANGED
    assert PagedConfig.from_any({"block_size": 8}) == PagedConfig(block_size=8)
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        PagedConfig.from_any({"block_sise": 8})
    with pytest.raises(ConfigError, match="a PagedConfig or a dict of its fields, not int"):
        PagedConfig.from_any(3)  # type: ignore[arg-type]
