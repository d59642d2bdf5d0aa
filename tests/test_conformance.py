"""The judge itself: what its verdicts are made of, and that the committed table has no unexplained failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.__main__ import MASK, main
from tests.conformance.chapters import Chapter, chapters
from tests.conformance.children import forget, read, run_chapter
from tests.conformance.report import PAGE, file_result, groups, load_results, merge, render, unused_rules
from tests.conformance.verdicts import Rule, judge, load_rules

OWN_LOOP = "stock's loop: the model, or the test, has a loop of its own"
RULE = Rule("shapes", "paged", "test_shape", "!= torch.Size", "the shape is another one")
SKIP = Rule("slow", "skipped", "", "is slow", "is slow")


def _outcome(kind: str, error: str = "", name: str = "a.py::test_shape") -> dict[str, Any]:
    return {"id": name, "outcome": kind, "error": error}


@pytest.mark.parametrize(
    ("paged", "stock", "kind", "rule"),
    [
        (_outcome("passed"), None, "passed", ""),
        (_outcome("failed", "AssertionError: 1"), None, "failed", ""),  # never without the comparison
        (_outcome("failed", "AssertionError: 1"), _outcome("passed"), "failed", ""),
        (_outcome("failed", "OSError: hub"), _outcome("failed", "OSError: hub"), "not applicable", ""),
        (_outcome("failed", "AssertionError: 1"), _outcome("failed", "OSError: hub"), "failed", ""),
        (_outcome("skipped", "test is slow"), _outcome("skipped", "test is slow"), "not applicable", "slow"),
        (_outcome("skipped", "no reason of stock's"), _outcome("passed"), "failed", ""),
        (_outcome("failed", "3 != torch.Size"), _outcome("passed"), "not applicable", "shapes"),
        (_outcome("failed", "something else"), _outcome("passed"), "failed", ""),
        (_outcome("failed", "3 != torch.Size", "a.py::test_other"), _outcome("passed"), "failed", ""),
    ],
)
def test_verdicts(paged: dict[str, Any], stock: dict[str, Any] | None, kind: str, rule: str) -> None:
    verdict = judge(paged, stock, [RULE, SKIP])
    assert (verdict.kind, verdict.rule) == (kind, rule)
    assert bool(verdict.reason) == (kind != "passed")


def test_a_file_that_can_not_be_imported_says_what_it_lacks_and_not_where_it_lies() -> None:
    text = "ImportError while importing test module '/there/a.py'.\nTraceback:\nE   ModuleNotFoundError: No module 'b'"
    verdict = judge(_outcome("failed", text), _outcome("failed", text), [])
    assert verdict.reason == "fails without hf_paged, too: ModuleNotFoundError: No module 'b'"


def test_a_rule_that_explains_nothing_is_named() -> None:
    verdict = judge(_outcome("skipped", "test is slow"), _outcome("skipped", "test is slow"), [RULE, SKIP])
    results = [{"files": [file_result("a.py", [verdict], {})]}]
    assert unused_rules(results, [RULE, SKIP]) == ["shapes"]


def test_a_rule_that_would_hide_everything_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([{"name": "all", "when": "paged", "tests": "", "error": "", "reason": "any"}]))
    with pytest.raises(ValueError, match="must name the tests and the error"):
        load_rules(path)


CHECKOUT_TEST = """
import os
import unittest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
import torch

def model():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=None, pad_token_id=0)).eval()

class SomeTest(unittest.TestCase):
    def test_plain(self):
        self.assertEqual(model().generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2).shape, (1, 5))

    def test_beams(self):
        model().generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, num_beams=2)

    def test_assisted(self):
        model().generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, assistant_model=model())

    def test_hidden_states(self):
        model().generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, output_hidden_states=True)

    def test_loop_of_its_own(self):
        class Own(LlamaForCausalLM):
            def _beam_search(self, input_ids, **kwargs):
                return input_ids
            def _prepare_cache_for_generation(self, *args):
                pass
        Own(model().config).eval().generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, num_beams=2)

    def test_hides_the_end(self):
        ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
        out = model().generate(ids, max_new_tokens=2, attention_mask=torch.ones_like(ids).tril(-1).flip(0))
        self.assertEqual(out.shape, (2, 5))

    def test_own_cache(self):
        model().generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, cache_implementation="dynamic")

    def test_asserts_the_class_of_the_cache(self):
        out = model().generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, return_dict_in_generate=True)
        self.assertIs(type(out.past_key_values), DynamicCache)

    def test_fails_anyway(self):
        self.fail("always")

    def test_skips(self):
        self.skipTest("test is slow")

    def test_takes_the_process_down(self):
        os._exit(7)

    def test_draws(self):
        print("drawn", torch.rand(1).item())
"""


@pytest.mark.slow
def test_a_checkout_is_run_with_and_without(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "test_some.py").write_text(CHECKOUT_TEST)
    chapter = Chapter("some", ("tests/test_some.py", "tests/test_not_there.py"), "not nothing")
    paged = run_chapter(tmp_path, chapter, tmp_path / "paged.jsonl", is_paged=True, timeout=60)
    names = {name.rsplit("::", 1)[1]: name for name in paged}
    again = [names["test_asserts_the_class_of_the_cache"], names["test_fails_anyway"], names["test_skips"]]
    stock = run_chapter(tmp_path, chapter, tmp_path / "stock.jsonl", is_paged=False, only=again, timeout=60)

    assert {name: paged[test]["outcome"] for name, test in names.items()} == {
        "test_plain": "passed",
        "test_beams": "passed",
        "test_assisted": "passed",
        "test_hidden_states": "passed",
        "test_hides_the_end": "passed",
        "test_loop_of_its_own": "passed",
        "test_own_cache": "passed",
        "test_asserts_the_class_of_the_cache": "failed",
        "test_fails_anyway": "failed",
        "test_skips": "skipped",
        "test_takes_the_process_down": "failed",
        "test_draws": "passed",
    }
    assert paged[names["test_plain"]]["calls"] == {"engine": 1}
    assert paged[names["test_beams"]]["calls"] == {"engine": 1}
    assert paged[names["test_assisted"]]["calls"] == {"engine": 1}  # the assistant's own calls are no calls of the test
    assert paged[names["test_hidden_states"]]["calls"] == {
        "stock's loop: attentions and hidden states come from stock's loop": 1
    }
    assert [MASK in way for way in paged[names["test_hides_the_end"]]["calls"]] == [True]
    filled = tmp_path / "filled.jsonl"
    only = [names["test_hides_the_end"]]
    filled = run_chapter(tmp_path, chapter, filled, is_paged=True, has_full_masks=True, only=only, timeout=60)
    assert {test: outcome["calls"] for test, outcome in filled.items()} == {only[0]: {"engine": 1}}
    assert paged[names["test_loop_of_its_own"]]["calls"] == {OWN_LOOP: 1}
    assert paged[names["test_own_cache"]]["calls"] == {"names its own cache": 1}
    assert "ended with 7" in paged[names["test_takes_the_process_down"]]["error"]
    assert "always" in paged[names["test_fails_anyway"]]["error"]
    assert set(stock) == set(again)
    assert stock[names["test_asserts_the_class_of_the_cache"]]["outcome"] == "passed"

    rules = [Rule("class", "paged", "class_of_the_cache", "PagedKVCache", "asserts the class of the cache")]
    judged = [judge(outcome, stock.get(name), rules) for name, outcome in paged.items()]
    result = file_result("tests/test_some.py", judged, paged)
    assert (result["passed"], result["failed"], result["not applicable"]) == (8, 1, 3)  # the crash has no comparison
    assert result["reasons"]["asserts the class of the cache"]["tests"] == [
        "SomeTest::test_asserts_the_class_of_the_cache"
    ]
    # a finished log is not run again
    before = (tmp_path / "paged.jsonl").read_text()
    assert run_chapter(tmp_path, chapter, tmp_path / "paged.jsonl", is_paged=True, timeout=60) == paged
    assert (tmp_path / "paged.jsonl").read_text() == before
    assert len(read(tmp_path / "paged.jsonl")[1]) == 12


@pytest.mark.slow
def test_a_run_in_shards_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file's results are there as soon as it has run; a shard adds its own; what is done isn't run again."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("test_modeling_common.py", "__init__.py"):
        (folder / name).touch()
    names = ("test_a", "test_b")
    for name in names:
        marks = f"tests/{name}.ran"
        (folder / f"{name}.py").write_text(f"def test_some():\n    open({marks!r}, 'a').write('x')\n    assert True\n")
    listed = [Chapter(name, (f"tests/{name}.py",), "") for name in (*names, "test_not_there")]
    monkeypatch.setattr("tests.conformance.__main__.chapters", lambda with_long: listed)
    monkeypatch.setattr("tests.conformance.report.chapters", lambda with_long: listed)
    out = tmp_path / "results.json"
    run = [str(tmp_path), "--work", str(tmp_path / "work"), "--out", str(out)]

    def files() -> list[tuple[str, int]]:
        return [(entry["file"], entry["passed"]) for entry in json.loads(out.read_text())["files"]]

    assert main([*run, "--shard", "2/2"]) == 0
    assert files() == [("tests/test_b.py", 1)]
    assert main([*run, "--only", "test_not_there"]) == 0
    assert main([*run, "--shard", "1/2"]) == 0
    assert files() == [("tests/test_a.py", 1), ("tests/test_b.py", 1)]
    assert main(run) == 0
    assert [(folder / f"{name}.ran").read_text() for name in names] == ["x", "x"]
    assert main([*run, "--fresh", "--only", "test_b"]) == 0
    assert [(folder / f"{name}.ran").read_text() for name in names] == ["x", "xx"]

    (folder / "test_b.py").write_text(
        "def test_some():\n    import hf_paged.compat as c\n    assert 'hook' in vars(c)\n"
    )
    (folder / "conftest.py").write_text(
        "def pytest_configure(config):\n"
        "    import hf_paged.compat\n"
        "    hf_paged.compat.hook = 1\n"
        "    if config.getoption('--paged-default'):\n"
        "        del hf_paged.compat.hook\n"
    )
    assert main([*run, "--fresh", "--only", "test_b"]) == 1  # only with "paged": failed, and said so
    assert json.loads(out.read_text())["files"][1]["failed"] == 1
    (folder / "conftest.py").unlink()
    (folder / "test_b.py").write_text("def test_some():\n    assert True\n")
    assert main([*run, "--only", "test_b"]) == 1  # known already
    assert main([*run, "--again", "--only", "test_b"]) == 0
    assert files() == [("tests/test_a.py", 1), ("tests/test_b.py", 1)]


def test_results_of_another_checkout_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first, second = chapters(with_long=False)[0].files[0], chapters(with_long=False)[1].files[0]
    merge(path, {"checkout": "one"}, file_result(second, [], {}))
    merge(path, {"checkout": "one"}, file_result(first, [], {}))
    assert [entry["file"] for entry in json.loads(path.read_text())["files"]] == [first, second]
    merge(path, {"checkout": "two"}, file_result(second, [], {}))
    assert [entry["file"] for entry in json.loads(path.read_text())["files"]] == [second]


def test_what_is_forgotten_runs_again(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"collected": ["a", "b"]}, _outcome("failed", name="a"), _outcome("passed", name="b")]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    forget(log, ["a"])
    assert list(read(log)[0]) == ["b"]


def test_the_committed_table() -> None:
    """Not one unexplained failure, no stale rule, and a page that is what the data say."""
    results, rules = load_results(), load_rules()
    assert results
    unexplained = [
        f"{result['transformers']}: {group['why']}: {group['tests']}"
        for result in results
        for group in groups(result)
        if group["kind"] == "failed"
    ]
    assert unexplained == []
    assert unused_rules(results, rules) == []
    assert PAGE.read_text(encoding="utf-8") == render(results, rules)


def test_every_file_is_in_one_chapter() -> None:
    files = [file for chapter in chapters(with_long=True) for file in chapter.files]
    assert len(files) == len(set(files))
    names = [chapter.name for chapter in chapters(with_long=True)]  # of their logs
    assert len(names) == len(set(names))
