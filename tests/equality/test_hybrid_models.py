"""Models with recurrent states run in the engine, one row a sequence, and give stock's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from hf_paged import PagedConfig, PagedEngine
from hf_paged.cache.row_cache import RowCache
from hf_paged.compat import CACHE_KEYWORD, cache_keyword
from hf_paged.errors import PackedStepError, UnsupportedModelError
from hf_paged.integrations.engines import get_engine, num_fallbacks
from tests import families, zoo
from tests.equality.drive import check_seeded_company, pool_of_2048, run_requests, run_to_end, tokens_of
from tests.oracle import assert_equal_tokens, assert_rows_equal_solo, left_pad, ragged_prompts, random_prompt, solo

NEW = 7
PROMPTS = ragged_prompts(6, seed=3, longest=26)


@pytest.mark.parametrize("name", families.RECURRENT)
def test_ragged_requests_in_chunks_on_few_rows(name: str) -> None:
    """Prompts of several chunks, more requests than rows, single tokens and decodes: all in the same steps."""
    model = families.build(name)
    settings = pool_of_2048(8, max_batch_tokens=12, max_requests_per_batch=4)
    with PagedEngine(model, settings) as engine:
        assert engine.mode == "by row"
        assert engine.core.runner.prefills_whole is (name in families.WITHOUT_CHUNKS)
        outputs = run_requests(engine, PROMPTS, max_new_tokens=NEW)
        assert engine.core.allocator.pools[-1].num_blocks == 4
        assert engine.core.allocator.pools[-1].num_referenced == 0
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), name, max_new_tokens=NEW)


@pytest.mark.parametrize("name", families.RECURRENT)
def test_generate_gives_stocks_tokens_from_the_engine(name: str) -> None:
    """With fewer rows of states than prompts: rows that wait give theirs away and compute them again."""
    model = families.build(name)
    before = num_fallbacks(model)
    ids, mask = left_pad(PROMPTS)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "paged"}
    out = model.generate(ids, attention_mask=mask, cache_config={"max_requests_per_batch": 5}, **options)
    rows = [row[ids.shape[1] :].tolist() for row in out]
    assert_rows_equal_solo(model, PROMPTS, rows, name, max_new_tokens=NEW)
    assert num_fallbacks(model) == before
    engine = get_engine(model)
    assert engine is not None
    assert engine.mode == "by row"
    assert engine.stats()["num_packed_tokens"] >= sum(map(len, PROMPTS))
    engine.check()


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "mamba2"])
def test_the_cache_that_generate_returns_has_the_states(name: str) -> None:
    model = families.build(name)
    ids = torch.tensor([random_prompt(7, 1), random_prompt(7, 2)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
        cache_implementation="paged",
    )
    with torch.no_grad():
        expected = model(out.sequences).logits[:, -1]
        continued = model(out.sequences[:, -1:], **{cache_keyword(model): getattr(out, CACHE_KEYWORD)}).logits[:, -1]
    torch.testing.assert_close(continued, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", families.RECURRENT)
def test_preempted_sequences_compute_their_states_again(name: str) -> None:
    model, prompts = families.build(name), [random_prompt(length, 8) for length in (14, 15, 6, 16)]
    settings = PagedConfig(block_size=8, num_blocks=5, max_batch_tokens=24)
    with PagedEngine(model, settings) as engine:
        if not engine.core.runner.layout.layers:  # without K and V nothing runs out: take one away by hand
            ids = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
            for _ in range(4):
                engine.step()
            engine.core.scheduler.preempt(engine.core.scheduler.running[-1])
            final = run_to_end(engine, ids)
            outputs = [final[request_id] for request_id in ids]
        else:
            outputs = run_requests(engine, prompts, max_new_tokens=NEW)
        assert engine.stats()["num_preemptions"] > 0
    assert_rows_equal_solo(model, prompts, tokens_of(outputs), name, max_new_tokens=NEW)


@pytest.mark.parametrize("name", families.RECURRENT)
def test_seeded_sampling_does_not_depend_on_the_company(name: str) -> None:
    check_seeded_company(families.build(name), PROMPTS[:4], name, max_new_tokens=4)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "jamba", "mamba2"])
def test_siblings_get_a_copy_of_their_states(name: str) -> None:
    """Siblings are born from one computed prompt; each goes on from its own copy of the prompt's states."""
    model, prompt = families.build(name), PROMPTS[0]
    with PagedEngine(model, pool_of_2048(8)) as engine:
        (greedy,) = run_requests(engine, [prompt], max_new_tokens=NEW)
        sampled = {"do_sample": True, "temperature": 1.5, "seed": 3, "num_return_sequences": 4}
        (family,) = run_requests(engine, [prompt], [sampled], max_new_tokens=NEW)
        for sequence in family.outputs:  # what follows a sibling's first tokens is what follows them anywhere
            (again,) = run_requests(engine, [[*prompt, *sequence.token_ids]], max_new_tokens=2)
            assert_equal_tokens(
                again.token_ids, solo(model, [*prompt, *sequence.token_ids], max_new_tokens=2), "sibling"
            )
        engine.check()
    assert len({sequence.token_ids for sequence in family.outputs}) == 4
    assert_equal_tokens(greedy.token_ids, solo(model, prompt, max_new_tokens=NEW), name)


@pytest.mark.parametrize("name", ["qwen3_5_text", "zamba2", "mamba2"])
def test_siblings_in_generate_equal_stocks_greedy_rows(name: str) -> None:
    """Lockstep with num_return_sequences: forks go on through stock's own seeded draws."""
    model = families.build(name)
    ids = torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(5)
    stock = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    torch.manual_seed(5)
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), cache_implementation="paged", **options)
    for row, (a, b) in enumerate(zip(ours.tolist(), stock.tolist(), strict=True)):
        assert_equal_tokens(a, b, f"{name} row {row}")


@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
def test_prompt_logprobs_in_chunks(name: str) -> None:
    model, prompt = families.build(name), random_prompt(21, 4)
    with PagedEngine(model, pool_of_2048(8, max_batch_tokens=8)) as engine:
        (output,) = run_requests(engine, [prompt], [{"prompt_logprobs": 0}], max_new_tokens=2)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, found in enumerate(output.prompt_logprobs[1:], start=1):
        assert found is not None
        assert found.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=2e-4)


def test_prefixes_are_not_cached() -> None:
    """A prefix's K and V without its states would be of no use."""
    model = families.build("qwen3_5_text")
    with PagedEngine(model, pool_of_2048(8, enable_prefix_caching=True)) as engine:
        for _ in range(2):
            outputs = run_requests(engine, PROMPTS, max_new_tokens=3)
            assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), "again", max_new_tokens=3)
        assert engine.stats()["prefix_query_tokens"] == 0


def test_states_are_counted_as_memory() -> None:
    model = families.build("mamba2")
    with PagedEngine(model, PagedConfig(num_blocks=64, max_requests_per_batch=5)) as engine:
        config = model.config
        channels = config.expand * config.hidden_size + 2 * config.n_groups * config.state_size
        state = config.num_heads * config.head_dim * config.state_size
        a_layer = (channels * config.conv_kernel + state) * 4
        assert engine.stats()["pool_bytes"] == 5 * config.num_hidden_layers * a_layer


def test_behind_generate_states_follow_the_workload() -> None:
    model = families.fresh("lfm2")
    ids = torch.tensor([random_prompt(40, seed) for seed in range(3)])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, cache_implementation="paged")
    engine = get_engine(model)
    assert engine is not None
    cache = engine.core.runner.cache
    assert isinstance(cache, RowCache)
    assert cache.num_rows == 3 < engine.core.allocator.pools[-1].num_blocks


@pytest.mark.parametrize("failing_call", [3, 4, 6])
def test_a_forward_that_raises_leaves_all_states_as_they_were(
    failing_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of several forwards is run again sequence by sequence, also when it was the last of them that raised."""
    model = families.build("qwen3_5_text")
    expected = [solo(model, prompt, max_new_tokens=NEW) for prompt in PROMPTS[:3]]
    forward, calls = model.lm_head.forward, []

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[:2])
        if len(calls) == failing_call:
            raise RuntimeError("once")
        return forward(hidden)  # type: ignore[no-any-return]

    with PagedEngine(model, pool_of_2048(8)) as engine:
        requests = [engine.add_request(PROMPTS[0], max_new_tokens=NEW)]
        engine.step()
        calls.clear()
        monkeypatch.setattr(model.lm_head, "forward", failing)
        requests += [engine.add_request(prompt, max_new_tokens=NEW) for prompt in PROMPTS[1:3]]
        final = run_to_end(engine, requests)  # its first step is a decode and two prompts: three forwards
        assert engine.stats()["num_failed"] == 0
    for request_id, tokens in zip(requests, expected, strict=True):
        assert_equal_tokens(final[request_id].token_ids, tokens, "after an error")


def test_a_state_that_changes_its_shape_is_refused() -> None:
    model = families.build("lfm2")
    with PagedEngine(model, pool_of_2048(8)) as engine:
        cache = engine.core.runner.cache
        assert isinstance(cache, RowCache)
        with (
            pytest.raises(PackedStepError, match="other recurrent states"),
            cache.open_rows(torch.tensor([0]), is_first=True),
        ):
            cache.update_conv_state(torch.zeros(1, 64, 9), 0)


def test_a_recurrent_model_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: a model that forgets its state between steps, so that only the check can tell."""
    model = families.fresh("mamba2")
    original = RowCache.open_rows

    def forgetful(self: Any, rows: torch.Tensor, *, is_first: bool) -> Any:
        return original(self, rows, is_first=True)

    monkeypatch.setattr(RowCache, "open_rows", forgetful)
    with pytest.raises(UnsupportedModelError, match="differ from those of the prompt"):
        PagedEngine(model, pool_of_2048(8))


def test_layers_of_different_heads_and_head_dims() -> None:
    """D11: a pool has each layer's own shape."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this version of Transformers has no gemma4")
    config = AutoConfig.for_model(
        "gemma4_text",
        vocab_size=zoo.VOCAB_SIZE,
        vocab_size_per_layer_input=zoo.VOCAB_SIZE,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        attention_k_eq_v=True,
        num_kv_shared_layers=0,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    zoo.draw_weights(model, "gemma4_text", 0)
    model.eval()
    with PagedEngine(model, pool_of_2048(8, max_batch_tokens=12)) as engine:
        specs = [layer.spec for layer in engine.core.runner.layout.layers.values()]
        assert {(spec.num_key_heads, spec.key_head_dim) for spec in specs} == {(2, 16), (1, 32)}
        outputs = run_requests(engine, PROMPTS, max_new_tokens=NEW)
    assert_rows_equal_solo(model, PROMPTS, tokens_of(outputs), "gemma4", max_new_tokens=NEW)
