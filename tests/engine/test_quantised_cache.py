"""Engines whose pool is quantised: the bytes, the accuracy, and that everything else is as with other types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine, get_engine
from hf_paged.errors import UnsupportedModelError
from hf_paged.kernels.kv_blocks import QUANTISED_DTYPES
from hf_paged.kernels.torch_backend import TorchBackend
from tests.oracle import Ids, assert_equal_tokens, left_pad, ragged_prompts, random_prompt
from tests.zoo import PAD_TOKEN_ID, build

NEW = 12
PROMPTS = ragged_prompts(6, seed=81, shortest=3, longest=40)
LAYERS, HEADS, HEAD_DIM = 3, 2, 16  # of the tiny llama
# What one head of a token takes, and the half step of each type: of the value itself for fp8, of the largest for int8
HEAD_BYTES = {"float32": 4 * HEAD_DIM, "bfloat16": 2 * HEAD_DIM, "fp8": HEAD_DIM + 4, "int8": HEAD_DIM + 4}
HALF_STEP = {"float32": 0.0, "bfloat16": 2**-8, "fp8": 2**-4, "int8": 1 / 254}
TYPES = [("fp8", "bfloat16"), ("fp8", "fp8"), ("int8", "int8"), ("float32", "int8")]

every_type = pytest.mark.parametrize("types", TYPES, ids="-".join)


def engine_with(types: Sequence[str], name: str = "llama", **options: Any) -> PagedEngine:
    settings = {"block_size": 8, "num_blocks": 64, "k_dtype": types[0], "v_dtype": types[1], **options}
    return PagedEngine(build(name), PagedConfig(**settings))


def tokens(engine: PagedEngine, prompts: list[Ids], **keywords: Any) -> list[Ids]:
    """New tokens of every sequence of every prompt, in order."""
    outputs = engine.generate(prompts, **{"max_new_tokens": NEW, **keywords})
    engine.check()
    assert engine.stats()["num_failed"] == 0
    return [list(sequence.token_ids) for output in outputs for sequence in output.outputs]


def assert_same(actual: list[Ids], expected: list[Ids]) -> None:
    for row, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_equal_tokens(a, b, f"row {row}")


def alone(types: Sequence[str], prompts: list[Ids], name: str = "llama") -> list[Ids]:
    """The tokens of each prompt by itself, in a pool with room for everything and no prefixes."""
    engine = engine_with(types, name, enable_prefix_caching=False)
    return [tokens(engine, [prompt])[0] for prompt in prompts]


@every_type
def test_the_pool_takes_the_bytes_that_were_promised(types: tuple[str, str]) -> None:
    engine, plain = engine_with(types), engine_with(("float32", "float32"))
    per_head = sum(HEAD_BYTES[name] for name in types)
    num_tokens = plain.stats()["pool_bytes"] // (LAYERS * HEADS * 2 * HEAD_BYTES["float32"])
    assert num_tokens >= 64 * 8
    assert engine.stats()["pool_bytes"] == num_tokens * LAYERS * HEADS * per_head
    assert engine.core.runner.pool_bytes(engine.core.allocator, 64) == engine.stats()["pool_bytes"]


@every_type
def test_tokens_do_not_depend_on_the_batch_or_the_chunks(types: tuple[str, str]) -> None:
    expected = alone(types, PROMPTS)
    assert_same(tokens(engine_with(types), PROMPTS), expected)
    assert_same(tokens(engine_with(types, max_batch_tokens=7, block_size=16), PROMPTS), expected)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gemma2"])
def test_windows_sinks_and_softcap_read_a_quantised_pool(name: str) -> None:
    types = ("int8", "fp8")
    assert_same(tokens(engine_with(types, name), PROMPTS), alone(types, PROMPTS, name))


@every_type
def test_a_shared_prefix_gives_the_tokens_that_computing_it_gives(types: tuple[str, str]) -> None:
    base = random_prompt(32, seed=82)
    prompts = [base + random_prompt(3, seed=83), base + random_prompt(5, seed=84)]
    engine = engine_with(types)
    actual = [tokens(engine, [prompt])[0] for prompt in prompts]
    assert engine.stats()["prefix_hit_tokens"] == len(base)
    assert_same(actual, alone(types, prompts))


@every_type
def test_preempted_requests_resume_with_the_same_tokens(types: tuple[str, str]) -> None:
    prompts = [random_prompt(length, 7) for length in (4, 3, 5, 15, 9, 30)]
    engine = engine_with(types, num_blocks=7)
    actual = tokens(engine, prompts)
    assert engine.stats()["num_preemptions"] > 0
    assert_same(actual, alone(types, prompts))


@every_type
def test_forks_copy_scales_with_their_blocks(types: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    real = TorchBackend.copy_blocks

    def counted(self: TorchBackend, *arguments: Any) -> None:
        copies.append(arguments)
        real(self, *arguments)

    monkeypatch.setattr(TorchBackend, "copy_blocks", counted)
    prompt = random_prompt(16, seed=85)
    sampled = {"do_sample": True, "seed": 5, "num_return_sequences": 3}
    on_a_border = tokens(engine_with(types, block_size=16, attention_backend="torch"), [prompt], **sampled)
    assert not copies
    within_a_block = tokens(engine_with(types, block_size=64, attention_backend="torch"), [prompt], **sampled)
    assert copies
    assert_same(within_a_block, on_a_border)
    assert len({tuple(row) for row in on_a_border}) > 1


@every_type
def test_logits_stay_near_those_of_the_model(types: tuple[str, str]) -> None:
    ids = torch.tensor([random_prompt(48, seed=86)])
    options: dict[str, Any] = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    model = build("llama")
    [expected] = model.generate(ids, **options).logits
    config = PagedConfig(k_dtype=types[0], v_dtype=types[1])
    [actual] = model.generate(ids, **options, cache_implementation="paged", cache_config=config).logits
    error = float((actual - expected).norm() / expected.norm())
    # Each layer moves its result by at most half a step of K and one of V, relative to its size; layers add up.
    assert 0 < error < LAYERS * sum(HALF_STEP[name] for name in types)


@every_type
def test_generate_takes_quantised_types(types: tuple[str, str]) -> None:
    model = build("llama")
    ids, mask = left_pad(PROMPTS)
    config = {"k_dtype": types[0], "v_dtype": types[1], "block_size": 8}
    paged = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=PAD_TOKEN_ID,
        cache_implementation="paged",
        cache_config=config,
    )
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_fallbacks"] == 0
    cache = engine.core.runner.cache
    assert cache is not None
    assert any(tensor.dtype in QUANTISED_DTYPES for tensor in cache.storages[0].blocks.tensors)
    assert_same(paged[:, ids.shape[1] :].tolist(), alone(types, PROMPTS))


@every_type
def test_a_returned_cache_is_dequantised(types: tuple[str, str]) -> None:
    model = build("llama")
    ids = torch.tensor([random_prompt(20, seed=87)])
    options: dict[str, Any] = {"max_new_tokens": 4, "return_dict_in_generate": True, "cache_implementation": "paged"}
    expected = model.generate(ids, **options, cache_config=PagedConfig()).past_key_values
    config = {"k_dtype": types[0], "v_dtype": types[1]}
    actual = model.generate(ids, **options, cache_config=config).past_key_values
    for name, plain, stored in zip(
        types,
        (expected.layers[0].keys, expected.layers[0].values),
        (actual.layers[0].keys, actual.layers[0].values),
        strict=True,
    ):
        prompt, kept = plain[..., :20, :], stored[..., :20, :]  # the first layer's K and V come from the ids alone
        assert kept.dtype == torch.float32
        largest = prompt.abs().amax(dim=-1, keepdim=True)
        bound = HALF_STEP[name] * (prompt.abs() if name == "fp8" else largest) + 1e-5 * largest
        if name == "fp8":
            bound += 2**-10 / 448 * largest
        assert ((kept - prompt).abs() <= bound).all()


def test_a_nan_ends_its_own_request_alone() -> None:
    types = ("fp8", "int8")
    engine = engine_with(types)
    prompts = PROMPTS[:3]
    request_ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
    final: dict[str, Any] = {}
    spoilt = False
    while engine.has_unfinished_requests:
        running = {sequence.request.request_id: sequence for sequence in engine.core.scheduler.running}
        sequence = running.get(request_ids[1])
        if sequence is not None and sequence.num_computed_tokens and not spoilt:
            assert engine.core.runner.cache is not None
            blocks = engine.core.runner.cache.storages[1].blocks
            assert blocks.key_scales is not None
            blocks.key_scales[sequence.block_tables[0].blocks[0], 0] = float("nan")
            spoilt = True
        final.update({output.request_id: output for output in engine.step() if output.finished})
    reasons = [final[request_id].finish_reason for request_id in request_ids]
    assert reasons == ["length", "error", "length"]
    expected = alone(types, prompts)
    for row in (0, 2):
        assert_equal_tokens(final[request_ids[row]].token_ids, expected[row])


def test_the_proof_of_packing_is_as_strict_with_a_quantised_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TorchBackend.attend

    def slightly_wrong(self: TorchBackend, *arguments: Any) -> torch.Tensor:
        return real(self, *arguments) * 1.02  # less than what quantising costs

    monkeypatch.setattr(TorchBackend, "attend", slightly_wrong)
    with pytest.raises(UnsupportedModelError, match="can't run packed"):
        engine_with(("fp8", "fp8"), attention_backend="torch")
