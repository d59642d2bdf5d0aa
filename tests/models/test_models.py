"""Every class of the installed Transformers gives stock's tokens under "paged", or says why it isn't known.

The ordinary run takes a fixed sample. `-m models` runs all entries, `--models-shard 2/4` a part of them; each must come
to what the data say. After a change that moves an entry, run `python -m tests.models.table`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.models.entries import Entry, entries, shard
from tests.models.families import OTHERS, family_of
from tests.models.isolation import judge_isolated
from tests.models.judging import CASES
from tests.models.outcomes import INSTALLED, MODES, ON_THE_ENGINE, is_identical, load, versions, wrong_cases
from tests.models.page import page_of, render
from tests.oracle import TALLY

SAMPLE = ("causal/llama", "causal/gpt2", "causal/bloom", "encoder-decoder/t5", "vision-language/qwen2_5_vl")
ENTRIES = {entry.key: entry for entry in entries()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_entry" in metafunc.fixturenames:
        chosen = shard(entries(), metafunc.config.getoption("--models-shard"))
        metafunc.parametrize("any_entry", chosen, ids=[entry.key for entry in chosen])


def _judge(entry: Entry) -> dict[str, Any]:
    ((_, outcome),) = judge_isolated([entry])
    return outcome


def _assert_as_known(entry: Entry) -> None:
    outcome = _judge(entry)
    TALLY.add(outcome.get("tokens", 0), 0)
    assert not wrong_cases(outcome), f"{outcome['mode']}: {wrong_cases(outcome)}"
    assert outcome["mode"] not in ("failed", "refused"), outcome["why"]
    known = load(INSTALLED).get(entry.key)
    if known is not None:  # a version between those that the pages show has no data
        assert outcome["mode"] == known["mode"], f"{outcome.get('why')}; python -m tests.models.table --only ..."
        assert outcome.get("cases") == known.get("cases")


@pytest.mark.parametrize("key", SAMPLE)
def test_the_sample_gives_stocks_tokens(key: str) -> None:
    _assert_as_known(ENTRIES[key])


@pytest.mark.models
def test_an_entry_gives_stocks_tokens(any_entry: Entry) -> None:
    _assert_as_known(any_entry)


# -- the data and the pages --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions())
def test_no_model_is_silently_different(version: str) -> None:
    wrong = {key: wrong_cases(outcome) for key, outcome in load(version).items() if wrong_cases(outcome)}
    assert not wrong
    modes = {key: outcome["mode"] for key, outcome in load(version).items()}
    assert set(modes.values()) <= set(MODES) - {"failed", "refused"}
    assert all(outcome.get("why") for outcome in load(version).values() if outcome["mode"] not in ON_THE_ENGINE)
    assert all(set(outcome["cases"]) == set(CASES) for outcome in load(version).values() if is_identical(outcome))


@pytest.mark.parametrize("version", versions())
def test_the_page_is_made_from_the_data(version: str) -> None:
    assert page_of(version).read_text() == render(version, load(version)), "python -m tests.models.table --pages"


@pytest.mark.skipif(INSTALLED not in versions(), reason="the pages show the newest and the oldest version only")
def test_every_entry_of_the_installed_version_is_in_the_data() -> None:
    kinds = {key.partition("/")[0] for key in load(INSTALLED)}
    assert set(load(INSTALLED)) == {key for key in ENTRIES if key.partition("/")[0] in kinds}


def test_at_least_125_classes_run_on_the_engine() -> None:
    outcomes = load(versions()[-1])
    classes = {
        outcome["class"]
        for key, outcome in outcomes.items()
        if key.startswith("causal/") and outcome["mode"] in ON_THE_ENGINE and is_identical(outcome)
    }
    assert len(classes) >= 125


def test_families_have_the_names_that_people_use() -> None:
    assert family_of("qwen3_moe") == "Qwen"
    assert family_of("mixtral") == "Mistral and Mixtral"
    assert family_of("smollm3") == "SmolLM"
    assert family_of("t5gemma") == "Gemma"
    assert family_of("rwkv") == OTHERS


# -- the judge can say no --------------------------------------------------------------------------------


def _with_positions_off_by_one(entry: Entry) -> dict[str, Any]:
    from hf_paged.engine import batch, model_runner
    from tests.models.judging import judge

    packed = batch.pack

    def shifted(*args: Any) -> Any:
        made = packed(*args)
        if made.input_ids.shape[1] > 8:  # longer than the self-check's steps
            made.position_ids.add_(1)
        return made

    model_runner.pack = shifted  # the process ends with this entry
    return judge(entry)


def test_positions_off_by_one_are_found() -> None:
    ((_, outcome),) = judge_isolated([ENTRIES["causal/gpt2"]], judge=_with_positions_off_by_one)
    assert outcome["mode"] == "direct"
    assert "differs" in outcome["cases"]["greedy"]
    assert not is_identical(outcome)


def _crash_or_hang(entry: Entry) -> dict[str, Any]:
    if entry.model_type == "gpt2":
        os.abort()
    if entry.model_type == "bloom":
        time.sleep(1000)
    if entry.model_type == "opt":
        raise LookupError("out of the judge itself")
    return {"mode": "direct"}


def test_a_crash_or_a_hang_loses_no_other_entry() -> None:
    chosen = [ENTRIES[f"causal/{name}"] for name in ("gpt2", "bloom", "opt", "llama")]
    outcomes = {
        entry.model_type: outcome
        for entry, outcome in judge_isolated(chosen, num_processes=2, time_limit_s=5.0, judge=_crash_or_hang)
    }
    assert outcomes["llama"]["mode"] == "direct"
    assert outcomes["gpt2"] == {"class": "GPT2LMHeadModel", "mode": "failed", "why": "its process ended with code -6"}
    assert outcomes["bloom"]["why"] == "it took more than 5 seconds"
    assert outcomes["opt"]["why"] == "LookupError: out of the judge itself"


def test_shards_are_the_whole() -> None:
    parts = [shard(entries(), f"{index}/3") for index in (1, 2, 3)]
    assert sorted(entry.key for part in parts for entry in part) == sorted(ENTRIES)
    with pytest.raises(ValueError, match="1/4"):
        shard(entries(), "4/3")
