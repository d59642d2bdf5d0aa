"""Launches that are recorded for a GPU that isn't there, and what compiling them says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hf_paged.errors import ConfigError
from hf_paged.kernels.triton.architectures import architecture
from hf_paged.kernels.triton.capture import captured_launches


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.capture_cases"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def test_interpreted_kernels_cannot_be_captured() -> None:
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set"), captured_launches(architecture("sm_90")):
        pass


def test_a_launch_is_recorded_with_its_types_constants_and_options(cases: dict[str, Any]) -> None:
    found = cases["sm_90"]
    assert found["kernel"] == "product_kernel"
    assert found["signature"] == {
        "a": "*bf16",
        "b": "*bf16",
        "out": "*fp32",
        "scale": "fp32",
        "stride": "i32",
        "count": "i32",
        "bias": "constexpr",
        "size": "constexpr",
        "depth": "constexpr",
    }
    assert found["constants"] == {"bias": None, "size": 64, "depth": 64}
    assert (found["num_warps"], found["num_stages"]) == (4, 2)


def test_alignment_is_known_of_pointers_and_of_multiples_of_16(cases: dict[str, Any]) -> None:
    known = cases["sm_90"]["known"]
    assert {name for name, facts in known.items() if "tt.divisibility" in facts} == {"a", "b", "out", "stride"}


def test_a_one_is_compiled_in_and_a_large_number_takes_64_bits(cases: dict[str, Any]) -> None:
    found = cases["stride of 1"]
    assert found["constants"]["stride"] == 1
    assert found["signature"]["stride"] == "constexpr"
    assert found["signature"]["count"] == "i64"


def test_rocm_is_told_which_tensors_lie_within_2_gib(cases: dict[str, Any]) -> None:
    known = cases["gfx942"]["known"]
    assert "tt.pointer_range" in known["out"]
    assert "tt.pointer_range" not in known["a"]


def test_decisions_are_the_targets_own_until_the_body_ends_even_by_an_error(cases: dict[str, Any]) -> None:
    assert cases["error"] == {"arch_inside": "gfx942", "arch_outside": "interpreter", "is_restored": True}


def test_launches_that_compile_to_the_same_are_one_task(cases: dict[str, Any]) -> None:
    assert cases["tasks"] == ["first", "other code"]


def compiled(cases: dict[str, Any], launch: str) -> tuple[dict[str, Any], dict[str, Any]]:
    nvidia, amd = (row for row in cases["compiled"] if row["configuration"] == launch)
    assert (nvidia["target"], amd["target"]) == ("sm_90", "gfx942")
    return nvidia, amd


def test_a_good_kernel_has_numbers_and_no_problems(cases: dict[str, Any]) -> None:
    nvidia, amd = compiled(cases, "launch_product")
    assert nvidia["problems"] == amd["problems"] == []
    assert list(nvidia["resources"]["matrix"]) == ["wgmma"]
    assert list(amd["resources"]["matrix"]) == ["mfma"]
    for row in (nvidia, amd):
        assert 16 <= row["resources"]["registers"] <= 512
        assert row["shared_bytes"] > 0
        assert row["occupancy"]["warps"] == 4 * row["occupancy"]["blocks"] > 0


def test_a_kernel_that_spills_says_so(cases: dict[str, Any]) -> None:
    for row in compiled(cases, "launch_spilling"):
        assert row["resources"]["spilled"] > 0
        assert row["problems"] == [f"spills {row['resources']['spilled']} registers"]


def test_a_kernel_without_its_matrix_instruction_says_so(cases: dict[str, Any]) -> None:
    nvidia, amd = compiled(cases, "launch_sum")
    assert nvidia["problems"] == ["has no mma or wgmma"]
    assert amd["problems"] == ["has no mfma"]
