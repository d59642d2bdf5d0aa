"""An adapter a request: several LoRA adapters of one model in one batch, each request as it is alone."""

from __future__ import annotations

import copy
import logging
from typing import Any

import peft
import pytest
import torch

from hf_paged import PagedConfig, PagedEngine, get_engine, num_fallbacks
from hf_paged.errors import RequestError, UnsupportedModelError
from tests import families
from tests.oracle import assert_equal_batches, assert_equal_tokens, left_pad, ragged_prompts
from tests.zoo import PAD_TOKEN_ID, fresh

NEW = 8
BASE = "__base__"
PROMPTS = ragged_prompts(6, seed=91, shortest=2, longest=24)
IDS, MASK = left_pad(PROMPTS)
NAMES = ["one", BASE, "two", "one", "wide", "two"]
TARGETS = {
    "llama": ["q_proj", "v_proj", "up_proj", "lm_head", "embed_tokens"],
    "gpt2": ["c_attn", "c_proj"],
    "mistral": ["k_proj", "o_proj", "down_proj"],
}
OPTIONS: dict[str, Any] = {
    "attention_mask": MASK,
    "max_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": PAD_TOKEN_ID,
}


def _lora(name: str, rank: int = 4, **changes: Any) -> peft.LoraConfig:
    options = {"target_modules": TARGETS[name], "init_lora_weights": False, "lora_alpha": 24, **changes}
    return peft.LoraConfig(r=rank, fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM", **options)


def _draw(model: Any, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if f".{name}." in path or path.endswith(f".{name}"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def _adapted(name: str = "llama") -> Any:
    model = peft.get_peft_model(fresh(name), _lora(name), adapter_name="one")
    model.add_adapter("two", _lora(name))
    model.add_adapter("wide", _lora(name, rank=7, use_rslora=True))
    for seed, adapter in enumerate(("one", "two", "wide")):
        _draw(model, adapter, seed)
    return model.eval()


def _alone(model: Any, prompt: list[int], adapter: str) -> list[int]:
    """Stock, that prompt alone, with that adapter and no other."""
    ids = torch.tensor([prompt])
    options = {**OPTIONS, "attention_mask": torch.ones_like(ids)}
    if adapter == BASE:
        with model.disable_adapter():
            out = model.generate(input_ids=ids, **options)
    else:
        before = model.active_adapter
        model.set_adapter(adapter)
        out = model.generate(input_ids=ids, **options)
        model.set_adapter(before)
    return out[0, len(prompt) :].tolist()


def _engine(model: Any, **settings: Any) -> PagedEngine:
    return PagedEngine(model, PagedConfig(**{"block_size": 8, "num_blocks": 96, **settings}))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", {"max_batch_tokens": 7}),
        ("llama", {"num_blocks": 8, "max_batch_tokens": 12}),
        ("gpt2", {}),
        ("mistral", {"max_batch_tokens": 16}),
    ],
)
def test_requests_of_several_adapters_run_in_one_batch(name: str, settings: dict[str, Any]) -> None:
    model = _adapted(name)
    engine = _engine(model, **settings)
    assert len({tuple(_alone(model, PROMPTS[0], adapter)) for adapter in set(NAMES)}) == 4
    for _ in range(2):  # the second time from cached prefixes
        outputs = engine.generate(PROMPTS, max_new_tokens=NEW, adapter=NAMES)
        for prompt, adapter, output in zip(PROMPTS, NAMES, outputs, strict=True):
            assert_equal_tokens(output.token_ids, _alone(model, prompt, adapter), adapter)
        engine.check()
    if "num_blocks" in settings:
        assert engine.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_models_that_run_a_row_a_sequence_take_adapters_too(name: str) -> None:
    lora = _lora("llama", target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])
    model = peft.get_peft_model(copy.deepcopy(families.build(name)), lora, adapter_name="one")
    model.add_adapter("two", lora)
    for seed, adapter in enumerate(("one", "two")):
        _draw(model, adapter, seed)
    names = ["one", BASE, "two", "one", "two", "two"]
    engine = _engine(model.eval(), max_batch_tokens=12)
    assert engine.mode == "by row"
    for prompt, adapter, output in zip(
        PROMPTS, names, engine.generate(PROMPTS, max_new_tokens=NEW, adapter=names), strict=True
    ):
        assert_equal_tokens(output.token_ids, _alone(model, prompt, adapter), adapter)


def test_equal_prompts_of_different_adapters_share_no_prefix() -> None:
    model, prompt = _adapted(), PROMPTS[1] * 3
    engine = _engine(model)
    cached = []
    for adapter in ("one", "two", "one", BASE, "two", None):
        output = engine.generate([prompt], max_new_tokens=NEW, adapter=adapter)[0]
        cached.append(output.num_cached_tokens > 0)
        assert_equal_tokens(output.token_ids, _alone(model, prompt, adapter or "one"))
    assert cached == [False, False, True, False, True, False]


def test_an_adapter_that_is_loaded_again_under_its_name_starts_anew() -> None:
    model, prompt = _adapted(), PROMPTS[1] * 3
    engine = _engine(model)
    before = engine.generate([prompt], max_new_tokens=NEW, adapter="two")[0].token_ids
    model.delete_adapter("two")
    model.add_adapter("two", _lora("llama"))
    _draw(model, "two", 77)
    expected = _alone(model, prompt, "two")
    assert list(before) != expected
    for cached in (False, True):
        output = engine.generate([prompt], max_new_tokens=NEW, adapter="two")[0]
        assert_equal_tokens(output.token_ids, expected)
        assert (output.num_cached_tokens > 0) == cached


def test_the_models_active_adapter_is_every_other_requests() -> None:
    model = _adapted()
    model.set_adapter("two")
    engine = _engine(model)
    names = [None, "one", None, BASE, "wide", None]
    outputs = engine.generate(PROMPTS, max_new_tokens=NEW, adapter=names)
    for prompt, adapter, output in zip(PROMPTS, names, outputs, strict=True):
        assert_equal_tokens(output.token_ids, _alone(model, prompt, adapter or "two"))


def test_sequences_and_logprobs_of_a_request_are_its_adapters() -> None:
    model = _adapted()
    engine = _engine(model)
    options = {"max_new_tokens": NEW, "num_return_sequences": 3, "do_sample": True, "seed": 5, "prompt_logprobs": 0}
    found = engine.generate(PROMPTS[:3], adapter=["one", "two", "wide"], **options)
    for prompt, adapter, output in zip(PROMPTS, ("one", "two", "wide"), found, strict=False):
        model.set_adapter(adapter)
        alone = _engine(model).generate([prompt], **options)[0]
        for sequence, expected in zip(output.outputs, alone.outputs, strict=True):
            assert_equal_tokens(sequence.token_ids, expected.token_ids)
        assert [entry and entry.logprob for entry in output.prompt_logprobs] == pytest.approx(
            [entry and entry.logprob for entry in alone.prompt_logprobs], abs=1e-4
        )


def test_a_prompt_of_embeddings_stands_beside_other_adapters_tokens() -> None:
    model = _adapted()
    embeds = torch.randn(5, 64, generator=torch.Generator().manual_seed(6))
    found = _engine(model).generate(
        [PROMPTS[0], embeds, PROMPTS[1]], max_new_tokens=NEW, adapter=["two", "one", "wide"]
    )
    assert_equal_tokens(found[0].token_ids, _alone(model, PROMPTS[0], "two"))
    assert_equal_tokens(found[2].token_ids, _alone(model, PROMPTS[1], "wide"))
    model.set_adapter("one")
    expected = model.generate(inputs_embeds=embeds[None], **{**OPTIONS, "attention_mask": torch.ones(1, 5)})
    assert_equal_tokens(found[1].token_ids, expected[0].tolist())


@pytest.mark.parametrize(
    ("adapter", "message"), [("tow", "did you mean 'two'"), (3, "no adapter 3"), ("", "no adapter ''")]
)
def test_an_unknown_adapter_is_refused(adapter: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        _engine(_adapted()).add_request(PROMPTS[0], adapter=adapter)


def test_a_model_without_adapters_takes_none() -> None:
    engine = _engine(fresh("llama"))
    with pytest.raises(RequestError, match="no LoRA adapters"):
        engine.add_request(PROMPTS[0], adapter="one")
    plain, base = engine.generate([PROMPTS[0]] * 2, max_new_tokens=NEW, adapter=[None, BASE])
    assert_equal_tokens(base.token_ids, plain.token_ids)


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_learned_prompts_are_refused_by_the_engine_and_right_in_generate(kind: Any) -> None:
    model = peft.get_peft_model(fresh("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(UnsupportedModelError, match="learned prompt"):
        _engine(model)
    expected = model.generate(input_ids=IDS, **OPTIONS)
    assert_equal_batches(model.generate(input_ids=IDS, **OPTIONS, cache_implementation="paged"), expected)


def _with_dora(model: Any) -> None:
    model.add_adapter("dora", _lora("llama", use_dora=True, target_modules=["q_proj"]))


def _with_saved_modules(model: Any) -> None:
    model.add_adapter("saved", _lora("llama", target_modules=["q_proj"], modules_to_save=["norm"]))


def _merged(model: Any) -> None:
    model.merge_adapter(["two"])


@pytest.mark.parametrize(
    ("change", "message"),
    [(_with_dora, "DoRA"), (_with_saved_modules, "modules_to_save"), (_merged, "unmerge_adapter")],
)
def test_what_has_no_rows_of_its_own_is_refused(change: Any, message: str) -> None:
    model = _adapted()
    engine = _engine(model)
    change(model)
    with pytest.raises(RequestError, match=message):
        engine.add_request(PROMPTS[0], adapter="one")


class _Flat(torch.nn.Module):
    """Hands its layer the tokens of all rows on one axis, as mixtures of experts do."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(0, 1)).view(*x.shape[:-1], -1)


def test_layers_whose_rows_can_not_be_told_apart_are_refused() -> None:
    model = _adapted()
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.up_proj = _Flat(mlp.up_proj)
    with pytest.raises(RequestError, match="whose row"):
        _engine(model).add_request(PROMPTS[0], adapter="one")
    _engine(model).generate([PROMPTS[0]], max_new_tokens=NEW)


def test_an_adapter_deleted_under_a_request_ends_it_alone() -> None:
    model = _adapted()
    engine = _engine(model)
    lost, kept = (engine.add_request(PROMPTS[index], max_new_tokens=NEW, adapter=NAMES[index]) for index in (0, 2))
    engine.step()
    model.delete_adapter("one")
    final: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        final.update({output.request_id: output for output in engine.step()})
    assert "deleted" in str(final[lost].error)
    assert_equal_tokens(final[kept].token_ids, _alone(model, PROMPTS[2], "two"))


# -- in generate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"cache_config": {"num_blocks": 5, "block_size": 16}},
        {"repetition_penalty": 1.3},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [True, False])
def test_generate_takes_an_adapter_a_row(options: dict[str, Any], first: bool) -> None:
    model = _adapted()
    stock_options = {name: value for name, value in options.items() if name != "cache_config"}
    torch.manual_seed(3)
    stock = model.generate(input_ids=IDS, **{**OPTIONS, **stock_options}, adapter_names=NAMES)
    if not first:  # an engine that there is already, with prefixes of other adapters
        model.generate(input_ids=IDS, **OPTIONS, cache_implementation="paged")
    torch.manual_seed(3)
    paged = model.generate(input_ids=IDS, **{**OPTIONS, **options}, adapter_names=NAMES, cache_implementation="paged")
    if not isinstance(stock, torch.Tensor):
        stock, paged = stock.sequences, paged.sequences
    assert_equal_batches(paged, stock)
    assert num_fallbacks(model) == 0
    assert get_engine(model) is not None
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": list(range(3, 12))},
        {"num_beams": 2, "do_sample": True},
        {"num_beams": 2, "cache_config": {"num_blocks": 8, "block_size": 16}},
    ],
    ids=["search", "sample", "small pool"],
)
def test_beams_with_adapter_names_equal_stock(name: str, options: dict[str, Any]) -> None:
    model = _adapted(name)
    stock_options = {key: value for key, value in options.items() if key != "cache_config"}
    torch.manual_seed(3)
    stock = model.generate(input_ids=IDS, **{**OPTIONS, **stock_options}, adapter_names=NAMES)
    torch.manual_seed(3)
    paged = model.generate(input_ids=IDS, **{**OPTIONS, **options}, adapter_names=NAMES, cache_implementation="paged")
    assert_equal_batches(paged, stock)
    assert num_fallbacks(model) == 0


def test_drafts_with_adapter_names_equal_each_row_alone() -> None:
    model = _adapted()
    options = {**OPTIONS, "adapter_names": NAMES, "cache_implementation": "paged"}
    stock = model.generate(input_ids=IDS, **OPTIONS, adapter_names=NAMES)
    assert_equal_batches(model.generate(input_ids=IDS, **options, prompt_lookup_num_tokens=3), stock)
    assert_equal_batches(model.generate(input_ids=IDS, **options, assistant_model=fresh("llama")), stock)
    assert num_fallbacks(model) == 0
    engine = get_engine(model)
    assert engine is not None
    assert engine.stats()["num_accepted_tokens"] > 0


@pytest.mark.parametrize("options", [{"output_hidden_states": True, "return_dict_in_generate": True}])
def test_adapter_names_beside_modes_of_stocks_loop(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = _adapted()
    stock = model.generate(input_ids=IDS, **OPTIONS, adapter_names=NAMES, **options)
    with caplog.at_level(logging.WARNING, logger="hf_paged"):
        paged = model.generate(input_ids=IDS, **OPTIONS, adapter_names=NAMES, **options, cache_implementation="paged")
    if not isinstance(stock, torch.Tensor):
        stock, paged = stock.sequences, paged.sequences
    assert_equal_batches(paged, stock)
    assert num_fallbacks(model) == 1


def test_an_unknown_name_in_adapter_names_raises_as_in_stock() -> None:
    model = _adapted()
    for more in ({}, {"cache_implementation": "paged"}):
        with pytest.raises(ValueError, match="tow"):
            model.generate(input_ids=IDS, **OPTIONS, adapter_names=["tow"] * len(IDS), **more)
