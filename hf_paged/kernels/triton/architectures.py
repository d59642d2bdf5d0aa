"""What a compute unit of each GPU holds: the numbers that bound how many blocks of a kernel run on it at once.

Both vendors cut a compute unit (SM or CU) into four parts, each with 512 registers a lane and its own warps, and hand
out registers in steps of 8 a lane.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.errors import ConfigError, nearest

NUM_PARTS = 4
REGISTERS_A_LANE = 512
REGISTER_STEP = 8
TENSOR_MEMORY_COLUMNS = 512

DEFAULT_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Architecture:
    """Limits of one compute unit."""

    name: str
    backend: str  # Triton's word: "cuda" or "hip"
    warp_size: int
    max_warps: int
    max_blocks: int
    shared_bytes: int  # shared memory, LDS
    max_shared_bytes: int  # what one block may have of it
    matrix: tuple[str, ...]  # its matrix instructions, the widest last
    reserved_shared_bytes: int = 0  # taken from every block by the system

    @property
    def number(self) -> int | str:
        """What Triton calls it: 90, or "gfx942"."""
        return int(self.name.removeprefix("sm_")) if self.backend == "cuda" else self.name


@dataclass(frozen=True)
class Occupancy:
    """How much of a kernel runs on one compute unit at once, at most."""

    blocks: int
    warps: int
    bound: str  # what keeps it from being more: "registers", "shared memory", "tensor memory", "blocks", "warps"


def _nvidia(name: str, max_warps: int, max_blocks: int, shared_kib: int, *matrix: str) -> Architecture:
    shared, most = shared_kib * 1024, (shared_kib - 1) * 1024
    return Architecture(name, "cuda", 32, max_warps, max_blocks, shared, most, matrix, reserved_shared_bytes=1024)


def _amd(name: str, shared_kib: int) -> Architecture:
    return Architecture(name, "hip", 64, 32, 16, shared_kib * 1024, shared_kib * 1024, ("mfma",))


# NVIDIA: CUDA Programming Guide, "Compute Capabilities", technical specifications per compute capability.
# AMD: "AMDGPU" in LLVM's user guide (waves, vector registers), the CDNA instruction set guides (LDS).
ARCHITECTURES = {
    item.name: item
    for item in (
        _nvidia("sm_80", 64, 32, 164, "mma"),
        _nvidia("sm_86", 48, 16, 100, "mma"),
        _nvidia("sm_89", 48, 24, 100, "mma"),
        _nvidia("sm_90", 64, 32, 228, "mma", "wgmma"),
        _nvidia("sm_100", 64, 32, 228, "mma", "tcgen05"),
        _nvidia("sm_120", 48, 24, 100, "mma"),
        _amd("gfx90a", 64),
        _amd("gfx942", 64),
        _amd("gfx950", 160),
    )
}


def architecture(name: str) -> Architecture:
    """An architecture by its name.

    Raises:
        ConfigError: its limits are not known here.
    """
    if name not in ARCHITECTURES:
        raise ConfigError(f"There is no target {name!r}: {nearest(name, ARCHITECTURES)}")
    return ARCHITECTURES[name]


def occupancy(
    target: Architecture, num_warps: int, registers: int, shared_bytes: int, tensor_memory_columns: int = 0
) -> Occupancy:
    """The occupancy of a kernel, from above: scalar registers and steps of shared memory are left out.

    Args:
        target: where it runs.
        num_warps: warps of a block.
        registers: vector registers of a lane.
        shared_bytes: shared memory of a block.
        tensor_memory_columns: columns of tensor memory of a block.
    """
    steps = max(1, -(-registers // REGISTER_STEP))
    warps_by_registers = NUM_PARTS * (REGISTERS_A_LANE // (steps * REGISTER_STEP))
    limits = {
        "registers": warps_by_registers // num_warps,
        "warps": target.max_warps // num_warps,
        "blocks": target.max_blocks if num_warps > 1 or target.backend == "cuda" else target.max_warps,
    }
    if shared_bytes:
        limits["shared memory"] = target.shared_bytes // (shared_bytes + target.reserved_shared_bytes)
    if tensor_memory_columns:
        limits["tensor memory"] = TENSOR_MEMORY_COLUMNS // tensor_memory_columns
    blocks = min(limits.values())
    # Where several bind, the plainest one: all warps in use is nothing to mend.
    bound = next(
        name
        for name in ("warps", "blocks", "registers", "shared memory", "tensor memory")
        if limits.get(name) == blocks
    )
    return Occupancy(blocks, blocks * num_warps, bound)
