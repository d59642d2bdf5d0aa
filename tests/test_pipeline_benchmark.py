"""The benchmark of pipelines: the same answers from all of them, and a page that holds its table."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from benchmarks import pipeline as benchmark
from benchmarks import pipeline_worker as worker
from benchmarks import table
from benchmarks.job import Job
from benchmarks.pipeline_names import ALONE, NAMES, OURS
from benchmarks.rounds import Setting
from benchmarks.workloads import WorkloadRequest
from tests.tiny_tokenizer import tiny_tokenizer
from tests.zoo import PAD_TOKEN_ID, fresh

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)
ENDS = [*range(50, 60), 101]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can chat, and whose answers end at different lengths."""
    place = tmp_path_factory.mktemp("model")
    model = fresh("llama", max_position_embeddings=2048)
    model.generation_config = GenerationConfig(pad_token_id=PAD_TOKEN_ID, eos_token_id=ENDS)
    model.save_pretrained(place)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(name: str, requests: Sequence[WorkloadRequest], setting: Setting) -> dict[str, Any]:
        file = tmp_path / "round.json"
        worker.run(Job(name, str(folder_of(setting)), 1, setting.settings, tuple(requests), str(file), time.time()))
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def folder_of(setting: Setting) -> Path:
        return setting.model_folder

    monkeypatch.setattr(benchmark, "work", work)


@pytest.mark.usefixtures("_in_this_process")
def test_all_pipelines_give_the_same_answers_and_the_page_gets_the_table(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "pipeline.md"
    page.write_text("# Title\n<!-- bench:pipeline -->\nold\n<!-- /bench:pipeline -->\nend\n", encoding="utf-8")
    names = [ALONE, NAMES[1], OURS]
    benchmark.main(6, 12, 2, names, 1, folder, tmp_path, page, True)
    kept = json.loads((tmp_path / "pipeline.json").read_text(encoding="utf-8"))
    assert [row["peer"] for row in kept["rows"]] == names
    assert [row["num_equal"] for row in kept["rows"]] == [6, 6, 6]
    assert len(set(kept["rows"][0]["answer_lengths"])) > 1
    assert {len(row["seconds_of_rounds"]) for row in kept["rows"]} == {2}
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Title\n<!-- bench:pipeline -->\n| pipeline | seconds |")
    assert text.endswith("<!-- /bench:pipeline -->\nend\n")
    assert "| 6 of 6 |" in text
    assert "Median of 2 interleaved rounds" in text
    page.write_text(text.replace("6 of 6", "5 of 6"), encoding="utf-8")
    benchmark.main(6, 12, 2, None, 1, folder, tmp_path, page, False)
    assert page.read_text(encoding="utf-8") == text
    assert table.newest("pipeline", tmp_path) == tmp_path / "pipeline.json"
    assert table.TABLES["pipeline"](kept) in text


def test_a_rows_own_tokens_are_found_between_the_padding_of_its_batch() -> None:
    assert worker.new_tokens([0, 0, 5, 6, 7, 8, 2, 2, 2], [5, 6], 0, {2}) == [7, 8, 2]
    assert worker.new_tokens([5, 6, 7, 8], [5, 6], 0, {2}) == [7, 8]
    assert worker.new_tokens([0, 0, 0, 5, 0], [0, 5], 0, {9}) == [0]  # a prompt that begins with the padding token
    with pytest.raises(ValueError, match="doesn't hold its prompt"):
        worker.new_tokens([0, 4, 5, 6], [5, 6], 0, {2})


def test_the_pages_own_markers_are_there() -> None:
    assert benchmark.PAGE.read_text(encoding="utf-8").count("<!-- bench:pipeline -->") == 1
