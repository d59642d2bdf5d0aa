"""`hf-paged bench`: tables, advice, exit codes, and errors of one sentence."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import PagedConfig
from hf_paged.cli import main
from hf_paged.commands import bench as bench_command
from hf_paged.commands.bench_report import advice
from hf_paged.commands.bench_runs import Workload
from hf_paged.commands.bench_tuning import BLOCK_SIZES, BUDGETS, Tuning, tune
from hf_paged.commands.demo_prompts import DEMO_PROMPTS
from hf_paged.commands.demo_runs import Run
from hf_paged.commands.prompt_file import Prompt
from tests.tiny_tokenizer import tiny_tokenizer
from tests.zoo import VOCAB_SIZE, fresh


class Result(NamedTuple):
    """What a command left; white space in stdout and stderr is one blank."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["hf-paged", "bench", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return Result(int(left.value.code or 0), re.sub(r"\s+", " ", out), re.sub(r"\s+", " ", err))

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Paris beta " * (1 + index % 3), "max_new_tokens": 3 + index % 4} for index in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


# -- the command -----------------------------------------------------------------------------------------------------


def test_tables_and_advice_are_printed(run: Callable[..., Result], model_folder: Path, prompts: Path) -> None:
    result = run("--model", model_folder, "--prompts", prompts, "--threads", 1, "--seconds", 30)
    assert result.code == 0, result.err
    assert "6 prompts, " in result.out
    assert "1 CPU threads" in result.out
    assert "Answers equal to stock's: 6 of 6." in result.out
    assert "Tries" in result.out
    assert re.search(r"Advice: (keep the defaults|PagedConfig\()", result.out)


def test_json_holds_both_runs_the_tries_and_the_advice(
    run: Callable[..., Result], model_folder: Path, prompts: Path
) -> None:
    result = run("--model", model_folder, "--prompts", prompts, "--json", "--seconds", 30)
    found = json.loads(result.out)
    assert (result.code, found["num_prompts"], found["num_equal_rows"]) == (0, 6, 6)
    assert found["stock"]["output_tokens"] == found["hf_paged"]["output_tokens"] <= 6 * 6
    assert found["hf_paged"]["setup_seconds"] > 0
    tried = {(trial["block_size"], trial["max_batch_tokens"]) for trial in found["tries"]}
    assert {(16, 512), *((16, budget) for budget in BUDGETS)} <= tried
    assert len(tried) == 1 + len(BUDGETS) + len(BLOCK_SIZES)
    assert (found["advice"]["block_size"], found["advice"]["max_batch_tokens"]) in tried
    assert found["tries_are_complete"]


def test_without_time_nothing_is_tried_and_the_advice_says_so(
    run: Callable[..., Result], model_folder: Path, prompts: Path
) -> None:
    result = run("--model", model_folder, "--prompts", prompts, "--seconds", 0)
    assert result.code == 0
    assert "Tries" not in result.out
    assert "nothing but the defaults (block_size=16, max_batch_tokens=512) was tried" in result.out


def test_without_a_file_the_demos_prompts_are_used(
    run: Callable[..., Result], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_command, "DEMO_PROMPTS", [item for item in DEMO_PROMPTS if len(item.text) < 60][:5])
    result = run("--model", model_folder, "--seconds", 0, "--json")
    assert result.code == 1 or json.loads(result.out)["num_prompts"] == 5
    assert result.err.count("error:") == (result.code == 1)


def test_a_wrong_answer_is_an_exit_code(
    run: Callable[..., Result], model_folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench_command.run_engine

    def wrong(model: Any, workload: Workload, config: PagedConfig) -> Run:
        run = real(model, workload, config)
        run.rows[0][1] += 1
        return run

    monkeypatch.setattr(bench_command, "run_engine", wrong)
    result = run("--model", model_folder, "--prompts", prompts, "--seconds", 0)
    assert result.code == 1
    assert "Answers equal to stock's: 5 of 6. 1 differ elsewhere" in result.out


def test_an_interrupt_has_a_code_of_its_own(
    run: Callable[..., Result], model_folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_command, "run_stock", interrupt)
    result = run("--model", model_folder, "--prompts", prompts)
    assert result.code == 130
    assert "Interrupted" in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"prompt": "a"}\n{"promt": "b"}', "line 2: unknown field 'promt', did you mean 'prompt'?"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: this model has no chat template"),
        ("", "holds no prompt"),
    ],
)
def test_a_prompt_that_cannot_run_is_one_sentence_with_its_line(
    run: Callable[..., Result], model_folder: Path, tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    result = run("--model", model_folder, "--prompts", path)
    assert result.code == 1
    assert reason in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_a_prompt_that_passes_the_models_positions_is_named_by_its_line(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    folder = tmp_path / "learned positions"
    fresh("gpt2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "max_new_tokens": 100000}', encoding="utf-8")
    result = run("--model", folder, "--prompts", path)
    assert result.code == 1
    assert "prompts.jsonl, line 2: A prompt of 1 tokens and 100000 new ones pass the model's" in result.err
    assert result.out == ""


def test_a_folder_without_a_model_or_an_option_of_no_kind_is_said_at_once(
    run: Callable[..., Result], tmp_path: Path, prompts: Path
) -> None:
    missing = run("--model", tmp_path, "--prompts", prompts)
    assert (missing.code, "holds no config.json" in missing.err) == (1, True)
    assert run("--model", tmp_path, "--seconds", "-1").code == 2


# -- tuning ----------------------------------------------------------------------------------------------------------


class Machine:
    """Runs take what a table says, on a clock of its own."""

    def __init__(self, seconds: dict[tuple[int, int], float], usual: float = 10.0) -> None:
        self._seconds = seconds
        self._usual = usual
        self.now = 0.0
        self.runs: list[tuple[int, int]] = []

    def __call__(self, config: PagedConfig) -> float:
        key = (config.block_size, config.max_batch_tokens)
        self.runs.append(key)
        taken = self._seconds.get(key, self._usual)
        self.now += taken
        return taken

    def tune(self, default_seconds: float, seconds: float) -> Tuning:
        return tune(self, default_seconds, seconds, clock=lambda: self.now)


def test_budgets_are_tried_first_and_block_sizes_at_the_best_of_them() -> None:
    machine = Machine({(16, 1024): 6.0, (32, 1024): 5.0})
    tuning = machine.tune(10.0, 1000.0)
    budgets = [(16, budget) for budget in BUDGETS]
    sizes = [(size, 1024) for size in BLOCK_SIZES]
    assert machine.runs == [*budgets, *sizes, (16, 512), (32, 1024)]  # the last two for certainty
    assert (tuning.advised.block_size, tuning.advised.max_batch_tokens, tuning.advised.num_runs) == (32, 1024, 2)
    assert tuning.is_complete
    assert advice(tuning) == "PagedConfig(block_size=32, max_batch_tokens=1024), 100% faster than the defaults here."


def test_a_gain_within_the_noise_is_no_advice() -> None:
    tuning = Machine({(16, 1024): 9.7}).tune(10.0, 1000.0)
    assert tuning.keeps_defaults
    assert advice(tuning) == ("keep the defaults (block_size=16, max_batch_tokens=512); nothing else was 5% faster.")


def test_a_slow_first_run_of_the_defaults_is_run_again_before_anything_is_advised() -> None:
    machine = Machine({(16, 512): 7.0, (16, 1024): 7.0})
    tuning = machine.tune(10.0, 1000.0)
    assert machine.runs[-2:] == [(16, 512), (16, 1024)]
    assert tuning.keeps_defaults


def test_no_run_begins_that_would_pass_the_time() -> None:
    machine = Machine({})
    tuning = machine.tune(10.0, 25.0)
    assert len(machine.runs) == 2
    assert not tuning.is_complete
    assert advice(tuning).endswith("Time ran out before everything was tried; --seconds gives more.")


def test_a_pool_has_room_for_half_of_all_and_for_the_longest() -> None:
    prompt = Prompt(0, 1, "x")
    workload = Workload(Path("file"), [prompt] * 3, [[1] * 10, [1] * 20, [1] * 90], [10, 10, 10])
    assert workload.pool_tokens(256) == 100
    even = Workload(Path("file"), [prompt] * 4, [[1] * 10] * 4, [10] * 4)
    assert even.pool_tokens(256) == 40
    assert even.pool_tokens(2) == 20
