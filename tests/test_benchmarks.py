"""The benchmarks' workloads, their runner on a tiny model, and the table that is made of their results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks import compare as compare_benchmark
from benchmarks import comparison, import_time, limit, rounds, step_profile, summary, table, worker, workloads
from benchmarks import mixed as mixed_benchmark
from benchmarks.job import Job, run_turns
from benchmarks.names import OURS, USUAL, WITHOUT_PREFIXES
from benchmarks.peer import Report, Settings, Tokens
from benchmarks.peers import PEERS
from benchmarks.percentiles import percentiles
from benchmarks.rounds import Foreign, Setting, run_rounds, work
from benchmarks.workloads import WORKLOADS, Workload, WorkloadRequest

ROOT = Path(__file__).resolve().parent.parent
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
    assert workload.is_sampled


def test_every_turn_of_a_conversation_follows_the_one_before() -> None:
    requests = workloads.multi_turn(8).requests
    assert [request.follows for request in requests] == [None, None, 0, 1, 2, 3, 4, 5]
    lengths = [len(request.prompt_ids) for request in requests]
    outputs = [request.num_output_tokens for request in requests]
    third = lengths[4] + outputs[2] + lengths[2] + outputs[0] + lengths[0]
    assert Workload("part", requests[:5]).num_prompt_tokens == sum(lengths[:2]) + third + sum(
        lengths[index] + lengths[index - 2] + outputs[index - 2] for index in (2, 3)
    )


def test_a_turn_is_known_once_the_one_before_is_answered() -> None:
    requests = workloads.multi_turn(4).requests
    answers = [[[7] * request.num_output_tokens] for request in requests]
    known = workloads.complete(requests, [answers[0], None, None, None])
    assert [item is None for item in known] == [False, False, True, True]
    whole = workloads.complete(requests, answers)
    assert whole[1] is not None
    first = requests[0]
    assert whole[1].prompt_ids == (*first.prompt_ids, *answers[0][0], *requests[1].prompt_ids)


def test_one_prompt_in_eight_is_long_among_short_ones() -> None:
    lengths = [len(request.prompt_ids) for request in workloads.long_among_short(16).requests]
    assert [index for index, length in enumerate(lengths) if length == 2048] == [3, 11]
    assert max(length for length in lengths if length != 2048) <= 96


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workloads_of_the_same_arguments_are_the_same(name: str) -> None:
    make = WORKLOADS[name].make
    workload = make(8, last_id=99)
    assert workload == make(8, last_id=99)
    assert all(10 <= token < 99 for request in workload.requests for token in request.prompt_ids)


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
def setting(tiny_folder: Path) -> Setting:
    return Setting(tiny_folder, 1, SMALL)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], AbstractContextManager[None]]:
    """Lets jobs run in this process: one test of a process is enough."""
    place = tmp_path_factory.mktemp("jobs") / "result.json"

    def work_here(name: str, requests: Sequence[WorkloadRequest], setting: Setting) -> summary.Round:
        folder, started = str(setting.model_folder), time.time()
        worker.run(Job(name, folder, 1, setting.settings, tuple(requests), str(place), started))
        result: summary.Round = json.loads(place.read_text(encoding="utf-8"))
        return result

    @contextmanager
    def patched() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds, "work", work_here)
            patch.setattr(compare_benchmark, "work", work_here)
            patch.setattr(worker, "gemm_flops_per_second", lambda: limit.gemm_flops_per_second(seconds=0.01))
            yield

    return patched


@pytest.fixture(scope="module")
def result(setting: Setting, here: Callable[[], AbstractContextManager[None]]) -> dict[str, Any]:
    with here():
        return mixed_benchmark.run(
            workloads.mixed(3, last_id=128),
            names=list(USUAL),
            num_rounds=1,
            setting=setting,
            command="python -m benchmarks.mixed --requests 3 --rounds 1",
        )


@pytest.mark.slow
def test_a_peer_runs_in_a_process_of_its_own(setting: Setting) -> None:
    result = work(OURS, workloads.mixed(2, last_id=128).requests, setting)
    assert [len(tokens) for tokens in result["tokens"]] == [
        request.num_output_tokens for request in workloads.mixed(2, last_id=128).requests
    ]
    assert result["num_fallbacks"] == 0
    assert 0 < result["cold_seconds"] < result["startup_seconds"]


def test_a_failing_engine_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    foreign = {"broken": Foreign(Path(sys.executable), "nothing_of_that_name", tmp_path)}
    with pytest.raises(RuntimeError, match=r"broken ended with 1:\n.*No module named nothing_of_that_name"):
        work("broken", workloads.mixed(1).requests, Setting(tmp_path, 1, SMALL, foreign))


def test_every_engine_returns_the_same_tokens(result: dict[str, Any]) -> None:
    rows = result["rows"]
    assert [row["peer"] for row in rows] == list(USUAL)
    assert [row["equality"]["num_equal"] for row in rows] == [3] * len(USUAL)


def test_no_row_of_ours_fell_back_to_stock(result: dict[str, Any]) -> None:
    assert {row["peer"]: row["num_fallbacks"] for row in result["rows"]} == {
        "stock generate": None,
        "stock generate_batch": None,
        "hf_paged engine": 0,
        "hf_paged hook": 0,
    }


def test_the_pools_hold_as_many_tokens_as_they_were_given(result: dict[str, Any]) -> None:
    rows = result["rows"]
    kv_bytes = {row["peer"]: row["kv_bytes"] for row in rows}
    bytes_per_token = 2 * 2 * 2 * 8 * 4  # K and V, layers, kv heads, head dim, float32
    assert kv_bytes["hf_paged engine"] == kv_bytes["stock generate_batch"] == SMALL.kv_tokens * bytes_per_token
    assert all(0 < row["token_occupancy"] <= 1 for row in rows if row["token_occupancy"] is not None)


def test_a_result_file_makes_the_table_of_a_readme(result: dict[str, Any], tmp_path: Path) -> None:
    path = mixed_benchmark.write(result, tmp_path)
    assert table.newest("mixed", tmp_path) == path
    made = summary.markdown(json.loads(path.read_text(encoding="utf-8")))
    assert [line.split(" | ")[0] for line in made.splitlines()[2:6]] == [f"| {name}" for name in USUAL]
    assert "3 of 3" in made
    assert "python -m benchmarks.mixed --requests 3 --rounds 1" in made
    assert str(tmp_path.parent.parent) not in path.read_text(encoding="utf-8")


# -- peers, in this process ------------------------------------------------------------------------------------------


def _run(name: str, model: LlamaForCausalLM, workload: Workload) -> tuple[Tokens, Report]:
    peer = PEERS[name](model, workload.requests, SMALL)
    try:
        return run_turns(peer, workload.requests)
    finally:
        peer.close()


@pytest.fixture
def model(tiny_folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(tiny_folder, attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model


@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_holds_the_same_conversations(name: str, model: LlamaForCausalLM) -> None:
    requests = [
        WorkloadRequest((5, 6, 7), 4),
        WorkloadRequest((9,) * 17, 3),
        WorkloadRequest((11, 12), 5, follows=0),
        WorkloadRequest((13,), 2, follows=1),
    ]
    workload = Workload("two turns", tuple(requests))
    tokens, report = _run(name, model, workload)
    whole = workloads.complete(requests, workloads.answers_of(requests, tokens))
    for request, answer in zip(whole, tokens, strict=True):
        assert request is not None
        ids = torch.tensor([request.prompt_ids])
        expected = model.generate(ids, max_new_tokens=request.num_output_tokens, do_sample=False)
        assert answer == expected[0, ids.shape[1] :].tolist()
    assert len(report.done_seconds) == 4


@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_draws_several_answers_to_a_prompt(name: str, model: LlamaForCausalLM) -> None:
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)
    requests = tuple(WorkloadRequest((5 + index, 6), 4 + index, num_sequences=3) for index in range(2))
    tokens, report = _run(name, model, Workload("samples", requests))
    assert [len(answer) for answer in tokens] == [4, 4, 4, 5, 5, 5]
    assert len({tuple(answer) for answer in tokens}) > 2
    assert len(report.done_seconds) == 2


def test_sorted_batches_hold_more_tokens_a_slot_and_give_the_same_answers(model: LlamaForCausalLM) -> None:
    lengths = (3, 40, 4, 41)
    requests = tuple(WorkloadRequest(tuple(range(10, 10 + length)), 4) for length in lengths)
    arrival = _run("stock generate", model, Workload("lengths", requests))
    by_length = _run("stock generate, by length", model, Workload("lengths", requests))
    assert by_length[0] == arrival[0]
    assert arrival[1].token_occupancy is not None
    assert by_length[1].token_occupancy is not None
    assert by_length[1].token_occupancy > 0.9 > arrival[1].token_occupancy


def test_only_the_engine_with_prefix_caching_takes_prompt_tokens_from_prefixes(model: LlamaForCausalLM) -> None:
    workload = workloads.chat(3, last_id=128)
    short = Workload("chat", tuple(WorkloadRequest(item.prompt_ids, 2) for item in workload.requests))
    hits = {}
    for name in (OURS, WITHOUT_PREFIXES):
        peer = PEERS[name](model, short.requests, Settings(kv_tokens=2048, max_batch_tokens=256))
        _, report = peer.run(short.requests)
        peer.close()
        hits[name] = report.prefix_hit_rate
    assert hits[OURS] is not None
    assert hits[OURS] > 0.5
    assert hits[WITHOUT_PREFIXES] is None


# -- jobs, other environments, memory --------------------------------------------------------------------------------

ECHO = """
import sys
from benchmarks.job import Job, measure
from benchmarks.peer import Report
from benchmarks import memory

class Echo:
    def run(self, requests):
        answers = [[request.prompt_ids[0]] * request.num_output_tokens for request in requests]
        times = (0.0,) * len(requests)
        return answers, Report(0, None, times, times)
    def close(self):
        pass

job = Job.from_json(sys.stdin.read())
job.write(measure(job, Echo, memory.reset_peak()))
assert not {"torch", "transformers", "numpy", "psutil", "hf_paged"} & set(sys.modules)
"""


def test_a_peer_of_another_environment_needs_only_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_peer.py").write_text(ECHO, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    foreign = {"echo": Foreign(Path(sys.executable), "echo_peer", tmp_path)}
    workload = workloads.multi_turn(4, last_id=128)
    (row,) = run_rounds(workload, ["echo"], 1, Setting(tmp_path, 1, SMALL, foreign))
    assert row["peer"] == "echo"
    assert row["output_tokens_per_second"] > 0
    assert row["equality"] is None  # ours didn't run


def test_the_runners_of_other_engines_import_without_them() -> None:
    names = "benchmarks.runners.vllm, benchmarks.runners.openvino"
    code = f"import sys, {names}; assert not {{'torch', 'vllm', 'openvino', 'hf_paged'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_job_survives_its_way_through_json() -> None:
    job = Job("peer", "folder", 2, SMALL, workloads.multi_turn(4).requests, "file", 1.5)
    assert Job.from_json(job.to_json()) == job


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts a peak that can start anew")
def test_the_peak_starts_anew_and_counts_children() -> None:
    # In a process of its own: children of other tests may just be ending in this one.
    code = """
import subprocess, sys
from benchmarks import memory
resting = memory.reset_peak()
held = bytearray(b"x") * (64 * 2**20)
del held
print(memory.peak_bytes() - resting)
before = memory.reset_peak()
child_code = "import sys; held = bytearray(b'x') * (64 * 2**20); print(1, flush=True); sys.stdin.read()"
with subprocess.Popen([sys.executable, "-c", child_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(memory.peak_bytes() - before)
    child.communicate(b"")
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    alone, with_child = map(int, printed.split())
    assert alone > 48 * 2**20
    assert with_child > 48 * 2**20


# -- the limit -------------------------------------------------------------------------------------------------------


def test_the_products_of_a_model_are_counted_from_its_linear_layers(tiny_folder: Path) -> None:
    flops = limit.model_flops(str(tiny_folder))
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64  # q and o, k and v, the MLP's three
    assert flops == {"per_token": 2 * 2 * layer, "per_output": 2 * 32 * 128}
    assert limit.limit_seconds(10, 4, flops, rate=1e6) == pytest.approx((14 * 4 * layer + 4 * 8192) / 1e6)


def test_the_rate_of_products_is_measured() -> None:
    assert 1e8 < limit.gemm_flops_per_second(seconds=0.01) < 1e15


# -- the comparison --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(setting: Setting, here: Callable[[], AbstractContextManager[None]]) -> dict[str, Any]:
    small = [
        Workload(name, tuple(WorkloadRequest(item.prompt_ids[:20], 3) for item in make(2, last_id=128).requests))
        for name, make in (("mixed", workloads.mixed), ("chat", workloads.chat))
    ]
    with here():
        return compare_benchmark.run(
            small,
            names=[OURS, WITHOUT_PREFIXES],
            num_rounds=1,
            setting=setting,
            command="python -m benchmarks.compare",
        )


def test_a_comparison_has_a_table_a_workload_and_one_of_ratios(compared: dict[str, Any]) -> None:
    assert [[row["peer"] for row in part["rows"]] for part in compared["workloads"]] == [
        [OURS],
        [OURS, WITHOUT_PREFIXES],  # only where prompts begin alike
    ]
    assert all(row["time_to_limit"] > 0 for part in compared["workloads"] for row in part["rows"])
    text = comparison.markdown(json.loads(json.dumps(compared)))
    lines = text.splitlines()
    assert lines[0] == "| time, ours = 1 | mixed (2) | chat (2) |"
    assert lines[2] == f"| {OURS} | 1.00 | 1.00 |"
    assert lines[3].startswith(f"| {WITHOUT_PREFIXES} | - | ")
    assert "### Mixed (2)" in lines
    assert "GFLOP/s before" in text


def test_a_comparison_makes_a_picture(compared: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which no command needs")
    from benchmarks.picture import draw_comparison

    draw_comparison(compared, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_writes_a_result_file_and_its_tables(
    tiny_folder: Path, tmp_path: Path, here: Callable[[], AbstractContextManager[None]]
) -> None:
    options = ["--model", tiny_folder, "--workload", "alone", "--peer", OURS, "--rounds", 1, "--threads", 1]
    with here():
        result = CliRunner().invoke(compare_app, [*map(str, options), "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("compare-*-1.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["export_seconds"] is None
    assert path.with_suffix(".md").read_text(encoding="utf-8") == comparison.markdown(data) + "\n"


def test_an_unknown_workload_or_peer_is_named_before_anything_runs() -> None:
    for arguments in (["--workload", "mixt"], ["--peer", "vllm"]):
        result = CliRunner().invoke(compare_app, arguments)
        assert result.exit_code == 2
        assert f"'{arguments[1]}' is none of" in " ".join(result.output.replace("│", " ").split())


compare_app = typer.Typer()
compare_app.command()(compare_benchmark.main)


# -- rows and tables -------------------------------------------------------------------------------------------------


def _round(seconds: float, tokens: list[list[int]]) -> summary.Round:
    return {
        "cold_seconds": 0.5,
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
        "prefix_hit_rate": None,
    }


def _wanting(*lengths: int, follows: int | None = None) -> Workload:
    """Requests that want so many tokens; the last may follow another."""
    requests = [WorkloadRequest((5,), length) for length in lengths]
    requests[-1] = WorkloadRequest((5,), lengths[-1], follows=follows)
    return Workload("some", tuple(requests))


def test_a_row_is_the_median_of_its_rounds_and_says_how_far_they_spread() -> None:
    rounds = {OURS: [_round(seconds, [[1, 2]]) for seconds in (4.0, 1.0, 2.0)], "peer": [_round(8.0, [[1, 2]])]}
    ours, peer = summary.make_rows(rounds, _wanting(2))
    assert (ours["seconds"], ours["output_tokens_per_second"], ours["time_to_ours"]) == (2.0, 1.0, 1.0)
    assert peer["time_to_ours"] == 4.0
    assert summary.cells(ours, ["workload"])[0] == "2.0 s (1.0 to 4.0)"
    assert ours["seconds_per_output_token"]["p50"] == 1.0


def test_the_first_difference_of_each_request_is_found_in_the_worst_round() -> None:
    rounds = {
        OURS: [_round(1.0, [[1, 2, 3], [4, 5, 6]])],
        "peer": [_round(1.0, [[1, 2, 3], [4, 5, 6]]), _round(1.0, [[1, 2, 9], [4, 5, 6]])],
    }
    _, peer = summary.make_rows(rounds, _wanting(3, 3))
    assert peer["equality"]["num_equal"] == 1
    assert peer["equality"]["first_differences"] == [{"request": 0, "position": 2}]


def test_a_turn_behind_a_difference_is_no_first_difference_and_not_equal() -> None:
    rounds = {OURS: [_round(1.0, [[1], [2], [3]])], "peer": [_round(1.0, [[9], [2], [8]])]}
    _, peer = summary.make_rows(rounds, _wanting(1, 1, 1, follows=0))
    assert peer["equality"] == {
        "num_equal": 1,
        "num_requests": 3,
        "first_differences": [{"request": 0, "position": 0}],
    }


def test_a_column_of_which_nothing_is_known_is_left_out() -> None:
    rows = summary.make_rows({OURS: [_round(1.0, [[1, 2]])]}, _wanting(2))
    titles = summary.columns(rows)
    assert "time, ours = 1" in titles
    assert not {"token occupancy", "time, limit = 1", "prompt tokens from prefixes"} & set(titles)


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles(list(range(1, 101))) == {"p50": 50, "p95": 95, "p99": 99}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}


def test_the_table_replaces_what_stands_between_its_markers_and_nothing_else() -> None:
    text = "before <!-- bench:mixed -->old\n<!-- /bench:mixed --> after"
    after = table.put(text, "mixed", r"| new \1 |")
    assert after == "before <!-- bench:mixed -->\n| new \\1 |\n<!-- /bench:mixed --> after"
    assert table.put(after, "mixed", r"| new \1 |") == after


def test_every_table_that_a_readme_has_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], compared: dict[str, Any]
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    mixed_benchmark.write(result, tmp_path / "results")
    rounds.write_result(compared, tmp_path / "results", 2)
    readme = tmp_path / "README.md"
    names = ("mixed", "compare")
    readme.write_text("".join(f"<!-- bench:{name} --><!-- /bench:{name} -->\n" for name in names), encoding="utf-8")
    table.main(readme, None, False)
    text = readme.read_text(encoding="utf-8")
    assert summary.markdown(result) in text
    assert comparison.headline(compared) in text
    table.main(readme, None, True)
    readme.write_text(text.replace("3 of 3", "2 of 3"), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"README.md has other tables than mixed-.*, compare-"):
        table.main(readme, None, True)


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


def test_a_step_profile_accounts_for_every_step(tiny_folder: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(step_profile.main)
    options = ["--model", tiny_folder, "--requests", 6, "--max-batch-tokens", 64, "--threads", 1, "--output", tmp_path]
    done = CliRunner().invoke(app, [str(option) for option in options])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("step-profile-*.json")
    result = json.loads(path.read_text())
    vocab_size = json.loads((tiny_folder / "config.json").read_text())["vocab_size"]
    workload = workloads.mixed(6, last_id=vocab_size)
    fed = workload.num_prompt_tokens + workload.num_output_tokens - 6  # the last token of an answer is not
    assert sum(row["num_steps"] * row["mean"]["tokens"] for row in result["rows"]) == pytest.approx(fed)
    for row in result["rows"]:
        mean = row["mean"]
        parts = [value for name, value in mean.items() if name not in ("tokens", "step")]
        assert sum(parts) == pytest.approx(mean["step"])
        assert min(parts) >= 0
        assert min(mean["attention"], mean["products"]) > 0
        assert 0 < row["host_share"] < 1
    assert path.with_suffix(".md").read_text().count("\n|") == len(result["rows"]) + 1
