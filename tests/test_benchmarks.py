"""The benchmarks' workloads, their runner on a tiny model, and the table that is made of their results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import import_time, summary, table, workloads
from benchmarks import mixed as mixed_benchmark
from benchmarks.peers import OURS, PEERS, Settings

SMALL = Settings(batch_size=2, kv_tokens=1024, max_batch_tokens=64)


def test_mixed_has_the_token_counts_that_are_quoted() -> None:
    counts = {n: workloads.mixed(n) for n in (32, 128)}
    assert (counts[32].num_prompt_tokens, counts[32].num_output_tokens) == (3_163, 1_261)
    assert (counts[128].num_prompt_tokens, counts[128].num_output_tokens) == (12_400, 6_539)


def test_a_longer_mixed_begins_with_the_shorter_one() -> None:
    assert workloads.mixed(8).requests == workloads.mixed(32).requests[:8]


def test_mixed_keeps_within_its_limits() -> None:
    for request in workloads.mixed(128).requests:
        assert 8 <= len(request.prompt_ids) <= 512
        assert 4 <= request.num_output_tokens <= 192
        assert all(10 <= token < 49_000 for token in request.prompt_ids)


def test_chat_shares_one_system_prompt_of_256_tokens() -> None:
    requests = workloads.chat(16).requests
    assert len({request.prompt_ids[:256] for request in requests}) == 1
    assert len({request.prompt_ids[256:] for request in requests}) == 16


def test_parallel_sampling_wants_eight_answers_a_prompt() -> None:
    workload = workloads.parallel_sampling(3)
    assert workload.num_output_tokens == 8 * sum(request.num_output_tokens for request in workload.requests)


# -- the runner ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def result(tiny_folder: Path) -> dict[str, object]:
    return mixed_benchmark.run(
        workloads.mixed(3, first_id=3, last_id=128),
        model_folder=tiny_folder,
        names=list(PEERS),
        num_rounds=1,
        threads=1,
        settings=SMALL,
        command="python -m benchmarks.mixed --requests 3 --rounds 1",
    )


@pytest.mark.slow
def test_every_engine_returns_the_same_tokens(result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [row["peer"] for row in rows] == list(PEERS)
    assert [row["equality"]["num_equal"] for row in rows] == [3] * len(PEERS)


@pytest.mark.slow
def test_no_row_of_ours_fell_back_to_stock(result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, list)
    assert {row["peer"]: row["num_fallbacks"] for row in rows} == {
        "stock generate": None,
        "stock generate_batch": None,
        "hf_paged engine": 0,
        "hf_paged hook": 0,
    }


@pytest.mark.slow
def test_the_pools_hold_as_many_tokens_as_they_were_given(result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, list)
    kv_bytes = {row["peer"]: row["kv_bytes"] for row in rows}
    bytes_per_token = 2 * 2 * 2 * 8 * 4  # K and V, layers, kv heads, head dim, float32
    assert kv_bytes["hf_paged engine"] == kv_bytes["stock generate_batch"] == SMALL.kv_tokens * bytes_per_token
    assert all(0 < row["token_occupancy"] <= 1 for row in rows if row["token_occupancy"] is not None)


@pytest.mark.slow
def test_a_result_file_makes_the_table_of_a_readme(result: dict[str, object], tmp_path: Path) -> None:
    path = mixed_benchmark.write(result, tmp_path)
    assert table.newest("mixed", tmp_path) == path
    made = summary.markdown(json.loads(path.read_text(encoding="utf-8")))
    assert [line.split(" | ")[0] for line in made.splitlines()[2:6]] == [f"| {name}" for name in PEERS]
    assert "3 of 3" in made
    assert "python -m benchmarks.mixed --requests 3 --rounds 1" in made
    assert str(tmp_path.parent.parent) not in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_failing_engine_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="hf_paged engine ended with 1"):
        mixed_benchmark.run(
            workloads.mixed(1),
            model_folder=tmp_path / "nothing",
            names=[OURS],
            num_rounds=1,
            threads=1,
            settings=SMALL,
            command="",
        )


# -- rows and tables -------------------------------------------------------------------------------------------------


def _round(seconds: float, tokens: list[list[int]]) -> summary.Round:
    return {
        "startup_seconds": 1.0,
        "seconds": seconds,
        "peak_bytes_above_weights": 2**20,
        "tokens": tokens,
        "kv_bytes": 2**20,
        "token_occupancy": None,
        "done_seconds": [seconds] * len(tokens),
        "first_token_seconds": [seconds / 2] * len(tokens),
        "num_steps": 4,
        "num_preemptions": 0,
        "num_fallbacks": 0,
    }


def test_a_row_is_the_median_of_its_rounds_and_says_how_far_they_spread() -> None:
    rounds = {OURS: [_round(seconds, [[1, 2]]) for seconds in (4.0, 1.0, 2.0)], "peer": [_round(8.0, [[1, 2]])]}
    ours, peer = summary.make_rows(rounds, num_output_tokens=2)
    assert (ours["seconds"], ours["output_tokens_per_second"], ours["time_to_ours"]) == (2.0, 1.0, 1.0)
    assert peer["time_to_ours"] == 4.0
    assert summary.cells(ours)[2] == "2.0 s (1.0 to 4.0)"
    assert ours["seconds_per_output_token"]["p50"] == 1.0


def test_the_first_difference_of_each_request_is_found_in_the_worst_round() -> None:
    rounds = {
        OURS: [_round(1.0, [[1, 2, 3], [4, 5, 6]])],
        "peer": [_round(1.0, [[1, 2, 3], [4, 5, 6]]), _round(1.0, [[1, 2, 9], [4, 5, 6]])],
    }
    _, peer = summary.make_rows(rounds, num_output_tokens=6)
    assert peer["equality"]["num_equal"] == 1
    assert peer["equality"]["first_differences"] == [{"request": 0, "position": 2}]


def test_the_table_replaces_what_stands_between_its_markers_and_nothing_else() -> None:
    text = "before <!-- bench:mixed -->old\n<!-- /bench:mixed --> after"
    after = table.put(text, "mixed", r"| new \1 |")
    assert after == "before <!-- bench:mixed -->\n| new \\1 |\n<!-- /bench:mixed --> after"
    assert table.put(after, "mixed", r"| new \1 |") == after


@pytest.mark.parametrize("text", ["nothing", "<!-- /bench:mixed --><!-- bench:mixed -->", "<!-- bench:mixed -->"])
def test_a_file_without_a_pair_of_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the file needs <!-- bench:mixed -->"):
        table.put(text, "mixed", "")


def test_the_newest_result_is_the_one_with_the_latest_date(tmp_path: Path) -> None:
    for name, date in (("mixed-a.json", "2026-02-01"), ("mixed-b.json", "2026-01-01"), ("other-c.json", "2026-03-01")):
        (tmp_path / name).write_text(json.dumps({"date": date}), encoding="utf-8")
    assert table.newest("mixed", tmp_path).name == "mixed-a.json"
    with pytest.raises(ValueError, match="run make bench"):
        table.newest("mixed", tmp_path / "results")


def test_an_import_is_timed_in_a_process_of_its_own() -> None:
    seconds = import_time.import_seconds("import sys; assert 'hf_paged' not in sys.modules; time.sleep(0.05)")
    assert seconds >= 0.05
