"""What a compiled kernel takes, read from what the compilers say: ptxas's log and the PTX, or the AMDGCN text."""

from __future__ import annotations

import re
from dataclasses import dataclass

# As they begin in PTX and AMDGCN, with the shape behind.
_MATRIX_INSTRUCTIONS = {
    "mma": r"\bmma\.sync\.aligned\.(m\d+n\d+k\d+)",
    "wgmma": r"\bwgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)",
    "tcgen05": r"\btcgen05\.mma\.cta_group::\d\.kind::(\w+)",
    "mfma": r"\bv_mfma_[a-z]*\d+_(\d+x\d+x\d+)",
}


@dataclass(frozen=True)
class Resources:
    """Of one thread (registers, spills) and of one block (the rest)."""

    registers: int  # vector registers
    spilled: int  # registers that are kept in memory instead, for some time
    scalar_spilled: int  # scalar registers kept in lanes of vector registers: AMD
    matrix: dict[str, tuple[str, ...]]  # instruction -> its shapes, the largest last
    is_serialised: bool = False  # ptxas had to wait for each wgmma before the next


def read_nvidia(log: str, ptx: str) -> Resources:
    """Args: what `ptxas -v` printed, and its input.

    Raises:
        ValueError: the log doesn't name registers and spills.
    """
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    stores = [int(number) for number in re.findall(r"(\d+) bytes spill stores", log)]
    loads = [int(number) for number in re.findall(r"(\d+) bytes spill loads", log)]
    if not (registers and stores and loads):
        raise ValueError(f"ptxas did not say what the kernel takes: {log.strip()!r}")
    spilled_bytes = max(sum(stores), sum(loads))
    serialised = re.search(r"wgmma.* serialized", log) is not None
    return Resources(max(registers), -(-spilled_bytes // 4), 0, _matrix(ptx), serialised)


def read_amd(amdgcn: str) -> Resources:
    """Args: the assembler text, with its metadata.

    Raises:
        ValueError: the metadata don't name registers and spills.
    """
    counts: dict[str, int] = {}
    for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count"):
        found = re.search(rf"\.{name}:\s*(\d+)", amdgcn)
        if found is None:
            raise ValueError(f"the assembler text has no .{name}")
        counts[name] = int(found[1])
    return Resources(counts["vgpr_count"], counts["vgpr_spill_count"], counts["sgpr_spill_count"], _matrix(amdgcn))


def _matrix(text: str) -> dict[str, tuple[str, ...]]:
    shapes = {name: sorted(set(re.findall(form, text)), key=_numbers) for name, form in _MATRIX_INSTRUCTIONS.items()}
    return {name: tuple(found) for name, found in shapes.items() if found}


def _numbers(shape: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", shape)]
