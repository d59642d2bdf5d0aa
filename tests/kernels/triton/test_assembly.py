"""Numbers read from compilers' texts, and the occupancy they allow."""

from __future__ import annotations

import pytest

from hf_paged.errors import ConfigError
from hf_paged.kernels.triton.architectures import Occupancy, architecture, occupancy
from hf_paged.kernels.triton.assembly import Resources, read_amd, read_nvidia
from hf_paged.kernels.triton.compile_report import find_problems
from hf_paged.kernels.triton.main_configurations import Matrix

PTXAS_LOG = """
ptxas-blackwell info    : Function properties for a_kernel
    640 bytes stack frame, 648 bytes spill stores, 888 bytes spill loads
ptxas-blackwell info    : Used 255 registers, used 1 barriers, 640 bytes cumulative stack size
"""
PTX = """
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, p, 1, 1;
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, p, 1, 1;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1};
    tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r3, %p1;
"""
AMDGCN = """
    v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
    .sgpr_spill_count: 27
    .vgpr_count:     296
    .vgpr_spill_count: 3
"""


def test_ptxas_spills_are_bytes_that_are_counted_as_registers() -> None:
    found = read_nvidia(PTXAS_LOG, "")
    assert (found.registers, found.spilled) == (255, 888 // 4)


def test_each_matrix_instruction_is_told_from_the_others() -> None:
    assert read_nvidia(PTXAS_LOG, PTX).matrix == {
        "mma": ("m16n8k16",),
        "wgmma": ("m64n64k16", "m64n128k16"),
        "tcgen05": ("f16",),
    }
    assert read_nvidia(PTXAS_LOG, "fma.rn.f32 %f1, %f2, %f3, %f4;").matrix == {}


def test_a_serialised_wgmma_is_noticed() -> None:
    warning = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    assert read_nvidia(PTXAS_LOG + warning, PTX).is_serialised
    assert not read_nvidia(PTXAS_LOG, PTX).is_serialised


def test_amd_counts_come_from_the_metadata() -> None:
    assert read_amd(AMDGCN) == Resources(296, 3, 27, {"mfma": ("16x16x16",)})


def test_a_text_without_numbers_is_no_zero() -> None:
    with pytest.raises(ValueError, match="did not say"):
        read_nvidia("ptxas info    : 0 bytes gmem", PTX)
    with pytest.raises(ValueError, match="vgpr_spill_count"):
        read_amd(".vgpr_count: 8")


@pytest.mark.parametrize(
    ("target", "num_warps", "registers", "shared", "expected"),
    [
        ("sm_90", 4, 105, 39168, Occupancy(4, 16, "registers")),
        ("sm_90", 4, 32, 0, Occupancy(16, 64, "warps")),
        ("sm_90", 1, 32, 0, Occupancy(32, 32, "blocks")),
        ("sm_80", 4, 128, 42112, Occupancy(3, 12, "shared memory")),
        ("sm_80", 8, 255, 0, Occupancy(1, 8, "registers")),
        # As LLVM's own comment has it: 8, 2 and 1 waves on each of the four parts.
        ("gfx942", 4, 53, 2048, Occupancy(8, 32, "warps")),
        ("gfx942", 4, 213, 16384, Occupancy(2, 8, "registers")),
        ("gfx942", 4, 296, 16384, Occupancy(1, 4, "registers")),
        ("gfx942", 8, 64, 65536, Occupancy(1, 8, "shared memory")),
    ],
)
def test_occupancy_is_bound_by_what_runs_out_first(
    target: str, num_warps: int, registers: int, shared: int, expected: Occupancy
) -> None:
    assert occupancy(architecture(target), num_warps, registers, shared) == expected


def test_tensor_memory_bounds_too() -> None:
    assert occupancy(architecture("sm_100"), 4, 64, 0, 256) == Occupancy(2, 8, "tensor memory")


def test_an_unknown_architecture_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gfx942'"):
        architecture("gfx943")


def problems(target: str, matrix: Matrix, resources: Resources, shared_bytes: int = 0) -> list[str]:
    found = architecture(target)
    return list(find_problems(found, matrix, resources, shared_bytes, occupancy(found, 4, 64, shared_bytes)))


def test_a_kernel_bound_by_matrix_products_needs_the_widest_instruction_there_is() -> None:
    narrow = Resources(64, 0, 0, {"mma": ("m16n8k16",)})
    assert problems("sm_90", Matrix.WIDEST, narrow) == ["has no wgmma, only mma"]
    assert problems("sm_100", Matrix.WIDEST, narrow) == ["has no tcgen05, only mma"]
    assert problems("sm_80", Matrix.WIDEST, narrow) == problems("sm_90", Matrix.ANY, narrow) == []


def test_no_matrix_instruction_is_asked_of_a_kernel_that_multiplies_none() -> None:
    assert problems("sm_90", Matrix.NONE, Resources(64, 0, 0, {})) == []
    assert problems("sm_90", Matrix.ANY, Resources(64, 0, 0, {})) == ["has no mma or wgmma"]


def test_scalar_registers_kept_in_vector_registers_are_no_spill() -> None:
    assert problems("gfx942", Matrix.NONE, Resources(64, 0, 27, {})) == []
    assert problems("gfx942", Matrix.NONE, Resources(64, 1, 0, {})) == ["spills 1 registers"]


def test_a_block_that_does_not_fit_is_a_problem() -> None:
    too_much = architecture("sm_90").max_shared_bytes + 1
    assert problems("sm_90", Matrix.NONE, Resources(64, 0, 0, {}), too_much) == [
        f"needs {too_much} bytes of shared memory, a block may have {too_much - 1}"
    ]


def test_a_serialised_wgmma_is_a_problem() -> None:
    serialised = Resources(64, 0, 0, {"wgmma": ("m64n64k16",)}, is_serialised=True)
    assert problems("sm_90", Matrix.WIDEST, serialised) == ["waits for each wgmma before the next"]
