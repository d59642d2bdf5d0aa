"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_paged.errors import ConfigError
from hf_paged.kernels import registry
from hf_paged.kernels.cpu.backend import NativeBackend
from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.kernels.registry import available_backends, register_backend, resolve_backend
from hf_paged.kernels.torch_backend import TorchBackend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored_registry() -> Iterator[None]:
    before = dict(registry._backends)
    said = set(registry._said)
    registry._said.clear()
    yield
    registry._said.clear()
    registry._said.update(said)
    registry._backends.clear()
    registry._backends.update(before)


def test_auto_is_the_native_backend_on_a_cpu_where_it_can_be_built() -> None:
    reason = available_backends(CPU)["native"]
    assert type(resolve_backend("auto", CPU)) is (NativeBackend if reason is None else TorchBackend)


def test_names_resolve_to_new_instances() -> None:
    assert type(resolve_backend("reference", "cpu")) is ReferenceBackend
    assert resolve_backend("torch", CPU) is not resolve_backend("torch", CPU)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"no attention backend 'tortch'.*did you mean 'torch'"):
        resolve_backend("tortch", CPU)


def test_a_name_that_is_taken_is_refused() -> None:
    class Other(ReferenceBackend):
        name = "torch"

    with pytest.raises(ConfigError, match="'torch' is registered already"):
        register_backend(Other)
    assert type(resolve_backend("torch", CPU)) is TorchBackend


def test_registering_the_same_class_twice_is_harmless() -> None:
    assert register_backend(TorchBackend) is TorchBackend


@pytest.mark.parametrize("taken", ["auto", ""])
def test_reserved_names_are_refused(taken: str) -> None:
    class Reserved(ReferenceBackend):
        name = taken

    with pytest.raises(ConfigError, match="must be a string other than"):
        register_backend(Reserved)


def test_auto_takes_the_highest_priority_that_can_run() -> None:
    @register_backend
    class Fast(TorchBackend):
        name = "fast"
        auto_priority = 15

    @register_backend
    class Faster(TorchBackend):
        name = "faster"
        auto_priority = 20

        @classmethod
        def unavailable_reason(cls, device: torch.device) -> str | None:
            return "it needs a card that nobody has"

    assert type(resolve_backend("auto", CPU)) is Fast
    with pytest.raises(ConfigError, match="'faster' can't run on cpu: it needs a card that nobody has"):
        resolve_backend("faster", CPU)
    reasons = available_backends(CPU)
    assert reasons.pop("triton", None) in (None, "triton is not installed")
    del reasons["native"]  # as the machine is
    assert reasons == {
        "torch": None,
        "reference": None,
        "fast": None,
        "faster": "it needs a card that nobody has",
    }


def test_a_backend_that_fails_when_it_is_made_is_passed_by_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    @register_backend
    class Fragile(TorchBackend):
        name = "fragile"
        auto_priority = 99
        auto_device_types = ("cpu",)

        def __init__(self) -> None:
            raise ConfigError("it broke while it was made")

    with caplog.at_level("WARNING", logger="hf_paged"):
        chosen = [resolve_backend("auto", CPU) for _ in range(2)]
    assert {type(backend).name for backend in chosen} <= {"native", "torch"}
    (message,) = [record.getMessage() for record in caplog.records if "fragile" in record.getMessage()]
    assert message == (
        f"Attention on cpu takes the {chosen[0].name} backend: "
        "the fragile one can't run, since it broke while it was made."
    )
    with pytest.raises(ConfigError, match="'fragile' can't run on cpu: it broke while it was made; choose another one"):
        resolve_backend("fragile", CPU)


def test_reasons_are_those_of_the_device() -> None:
    assert available_backends("meta")["torch"] is not None
    assert available_backends("cpu")["torch"] is None
    assert "float64" in (available_backends("mps")["reference"] or "")


def test_nothing_that_can_run_is_an_error_that_names_the_device() -> None:
    with pytest.raises(ConfigError, match="No attention backend can run on meta"):
        resolve_backend("auto", torch.device("meta"))
