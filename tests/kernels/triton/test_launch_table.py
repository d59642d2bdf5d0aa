"""Launch decisions: by architecture, for every head dim, and never by what else is in a batch."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.triton.launch_table import (
    converts_e4m3,
    current_arch,
    decode_launch,
    prefill_launch,
    target_override,
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_every_architecture_and_head_dim_has_a_launch(
    arch: str, itemsize: int, head_dim: int, is_quantised: bool
) -> None:
    decode = decode_launch(arch, itemsize, head_dim, is_quantised)
    prefill = prefill_launch(arch, itemsize, head_dim, is_quantised)
    assert decode.split % decode.tile == 0
    for number in (decode.tile, prefill.tile, prefill.rows):
        assert number & (number - 1) == 0


def test_an_unlisted_architecture_takes_the_newest_listed_before_it() -> None:
    assert decode_launch("sm_100", 2, 128) == decode_launch("sm_90", 2, 128)
    assert decode_launch("sm_75", 2, 128) == decode_launch("sm_80", 2, 128)
    assert decode_launch("gfx950", 2, 128) == decode_launch("gfx942", 2, 128)


def test_float8_is_converted_by_hardware_where_there_is_some() -> None:
    having = {arch for arch in ("sm_80", "sm_89", "sm_90", "gfx942", "gfx950", "interpreter") if converts_e4m3(arch)}
    assert having == {"sm_89", "sm_90", "gfx950"}


def test_an_override_ends_with_its_block() -> None:
    cpu = torch.device("cpu")
    with target_override("sm_90"):
        inside = current_arch(cpu)
    assert inside == "sm_90"
    with pytest.raises(KeyError), target_override("sm_90"):
        raise KeyError
    assert current_arch(cpu) == "interpreter"
