"""The search for the crossover, with given times, and that a shape is measured once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_paged.linears import crossover
from hf_paged.linears.crossover import STEPS, SURE_ROWS, UNLIMITED, find_limit, measured_limit


@pytest.mark.parametrize("limit", [SURE_ROWS, *STEPS[:-1]])
def test_the_last_step_at_which_the_native_product_wins(limit: int) -> None:
    asked = []

    def native_wins(rows: int) -> bool:
        asked.append(rows)
        return rows <= limit

    assert find_limit(native_wins) == limit
    assert len(asked) <= 4, "a search by halves"


def test_no_limit_where_it_wins_to_the_last() -> None:
    assert find_limit(lambda rows: True) == UNLIMITED


def test_a_shape_is_measured_once_for_each_type_and_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "_limits", {})
    measured = []

    def native_wins(next_weight: Callable[[], torch.Tensor], product: object, rows: int, num_threads: int) -> bool:
        measured.append((tuple(next_weight().shape), num_threads))
        return rows <= 48 * num_threads

    monkeypatch.setattr(crossover, "_native_wins", native_wins)
    for _ in range(2):
        assert measured_limit([torch.empty(6, 5)], None, 1) == 48  # type: ignore[arg-type]
        assert measured_limit([torch.empty(6, 5)], None, 2) == 96  # type: ignore[arg-type]
        assert measured_limit([torch.empty(6, 5).bfloat16()], None, 1) == 48  # type: ignore[arg-type]
    assert measured_limit([torch.empty(5, 6)], None, 1) == 48  # type: ignore[arg-type]
    assert 4 < len(measured) <= 16


def test_each_trial_takes_the_next_layer_so_that_its_weights_come_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "_limits", {})
    layers = [torch.full((6, 5), float(index)) for index in range(100)]
    taken = []

    def product(x: torch.Tensor, weights: list[tuple[torch.Tensor, None]], num_threads: int) -> list[torch.Tensor]:
        taken.append(int(weights[0][0][0, 0]))
        return [x @ weights[0][0].T]

    measured_limit(layers, product, 1)  # type: ignore[arg-type]
    assert len(set(taken)) == len(taken)
