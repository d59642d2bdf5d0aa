"""How the host's work grows: the cases run, exponents are found, and a table says so."""

from __future__ import annotations

import itertools
import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import growth
from benchmarks.growth import best_seconds, exponent, measure, profile
from benchmarks.growth_cases import CASES, MAX_REPEATS, Case
from benchmarks.growth_table import duration, markdown


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_has_room_for_all_its_runs(case: Case) -> None:
    operation = case.prepare(case.sizes[0])
    for _ in range(MAX_REPEATS):
        operation()


def test_an_exponent_is_that_of_the_last_two_sizes() -> None:
    assert exponent((1, 10, 100), (5.0, 5.0, 5.0)) == 0
    assert exponent((1, 10, 100), (5.0, 1.0, 10.0)) == pytest.approx(1)
    assert exponent((4, 8), (1.0, 4.0)) == pytest.approx(2)


def test_a_run_has_at_least_three_and_at_most_so_many_repeats() -> None:
    counts = [itertools.count(), itertools.count()]
    best_seconds(lambda: next(counts[0]), seconds=0.0)
    best_seconds(lambda: next(counts[1]), seconds=60.0)
    assert [next(count) for count in counts] == [3, MAX_REPEATS]


def test_a_case_that_grows_faster_than_it_should_is_marked_and_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {10: 1e-4, 100: 1e-2}
    case = Case("squares, by numbers", (10, 100), 1, lambda size: lambda: size)
    monkeypatch.setattr(growth, "best_seconds", lambda operation, seconds: times[operation()])
    row = measure(case)
    assert row["exponent"] == pytest.approx(2)
    assert row["is_steep"]
    cpu = {"cpu": {"model": "some"}}
    result = {"rows": [row], "machine": cpu, "date": "2026-01-01", "commit": None, "command": "python"}
    assert "| squares, by numbers | 10: 100 us; 100: 10 ms | 2.00 **steep** | 1 |" in markdown(
        json.loads(json.dumps(result))
    )
    assert "function calls" in profile(case)


def test_a_word_that_no_case_has_is_one_sentence() -> None:
    app = typer.Typer()
    app.command()(growth.main)
    result = CliRunner().invoke(app, ["--case", "nothing of that kind"])
    assert result.exit_code == 2
    assert "is in no case's name" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("seconds", "text"), [(2.5e-6, "2.5 us"), (0.0123, "12.3 ms"), (1.5, "1.5 s")])
def test_a_duration_has_a_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text
