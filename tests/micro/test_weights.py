"""What it costs to look whether a model's weights changed: once a call of generate, on a model of 272 parameters."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from hf_paged.engine.weights import weights_fingerprint
from tests.zoo import fresh


def test_a_look_at_the_weights_of_thirty_layers(benchmark: BenchmarkFixture) -> None:
    model = fresh("llama", num_hidden_layers=30)
    assert len(list(model.parameters())) > 270
    fingerprint = benchmark(weights_fingerprint, model)
    assert fingerprint == weights_fingerprint(model)
