"""How each kernel is launched, by architecture: data, not autotuning, so that no first call is slow and none differs.

A row holds for head dims up to its own. An architecture that isn't listed takes the newest listed one before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

MAX_DECODE_QUERIES = 8  # sequences with more new tokens than this go to the prefill kernel
MAX_SPLITS = 64  # beyond it a sequence's splits grow instead: bounds the partial results


@dataclass(frozen=True)
class DecodeLaunch:
    """`split` keys a program, `tile` of them at a time. The split is fixed, so a result doesn't depend on the batch."""

    tile: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillLaunch:
    """`rows` of (token, head) pairs a program, which meet `tile` keys at a time."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


# architecture -> (bytes of a query's element, whether K or V is quantised) -> head dim up to which it holds -> launch
_DECODE: dict[str, dict[tuple[int, bool], dict[int, DecodeLaunch]]] = {
    "sm_80": {
        (2, False): {
            128: DecodeLaunch(64, 512, 4, 3),
            256: DecodeLaunch(32, 512, 4, 3),
            512: DecodeLaunch(16, 512, 4, 2),
        },
        (2, True): {128: DecodeLaunch(32, 512, 4, 3), 512: DecodeLaunch(16, 512, 4, 2)},
        (4, False): {
            128: DecodeLaunch(32, 512, 4, 2),
            256: DecodeLaunch(16, 512, 4, 2),
            512: DecodeLaunch(16, 512, 8, 1),
        },
    },
    "sm_90": {
        (2, False): {
            128: DecodeLaunch(64, 512, 4, 3),
            256: DecodeLaunch(64, 512, 4, 2),
            512: DecodeLaunch(32, 512, 8, 2),
        },
        (2, True): {128: DecodeLaunch(32, 512, 4, 3), 512: DecodeLaunch(16, 512, 4, 2)},
        (4, False): {
            128: DecodeLaunch(32, 512, 4, 3),
            256: DecodeLaunch(16, 512, 4, 3),
            512: DecodeLaunch(16, 512, 8, 2),
        },
    },
    "gfx942": {
        (2, False): {
            128: DecodeLaunch(64, 512, 4, 2),
            256: DecodeLaunch(32, 512, 4, 2),
            512: DecodeLaunch(16, 512, 4, 1),
        },
        (2, True): {128: DecodeLaunch(32, 512, 4, 2), 512: DecodeLaunch(16, 512, 4, 1)},
        (4, False): {
            128: DecodeLaunch(32, 512, 4, 2),
            256: DecodeLaunch(16, 512, 4, 2),
            512: DecodeLaunch(16, 512, 8, 1),
        },
    },
    # Small, so that short test sequences meet several tiles and splits.
    "interpreter": {
        (2, False): {512: DecodeLaunch(32, 128, 1, 1)},
        (4, False): {512: DecodeLaunch(32, 128, 1, 1)},
    },
}

_PREFILL: dict[str, dict[tuple[int, bool], dict[int, PrefillLaunch]]] = {
    "sm_80": {
        (2, False): {
            64: PrefillLaunch(128, 64, 8, 3),
            128: PrefillLaunch(128, 64, 8, 2),
            512: PrefillLaunch(64, 32, 8, 2),
        },
        (2, True): {128: PrefillLaunch(64, 32, 4, 2), 512: PrefillLaunch(32, 16, 4, 2)},
        (4, False): {
            64: PrefillLaunch(64, 32, 4, 2),
            128: PrefillLaunch(32, 32, 4, 2),
            512: PrefillLaunch(16, 16, 4, 2),
        },
    },
    "sm_90": {
        (2, False): {
            64: PrefillLaunch(128, 128, 8, 3),
            128: PrefillLaunch(128, 64, 8, 3),
            512: PrefillLaunch(64, 64, 8, 2),
        },
        (2, True): {128: PrefillLaunch(128, 32, 8, 3), 512: PrefillLaunch(64, 32, 8, 2)},
        (4, False): {
            64: PrefillLaunch(64, 32, 4, 2),
            128: PrefillLaunch(32, 32, 4, 2),
            512: PrefillLaunch(16, 16, 4, 2),
        },
    },
    "gfx942": {
        (2, False): {
            64: PrefillLaunch(128, 64, 4, 1),
            128: PrefillLaunch(128, 32, 4, 1),
            512: PrefillLaunch(64, 16, 4, 1),
        },
        (4, False): {
            64: PrefillLaunch(64, 32, 4, 1),
            128: PrefillLaunch(32, 32, 4, 1),
            512: PrefillLaunch(16, 16, 4, 1),
        },
    },
    "interpreter": {
        (2, False): {512: PrefillLaunch(32, 32, 1, 1)},
        (4, False): {512: PrefillLaunch(32, 32, 1, 1)},
    },
}

_Launch = TypeVar("_Launch")


class _Target:
    override: str | None = None


_target = _Target()


@contextmanager
def target_override(arch: str) -> Iterator[None]:
    """Launches inside are decided as on another architecture: for compiling without a device."""
    previous, _target.override = _target.override, arch
    try:
        yield
    finally:
        _target.override = previous


def current_arch(device: torch.device) -> str:
    """The architecture of a device, such as "sm_90" or "gfx942"; "interpreter" for a CPU."""
    if _target.override is not None:
        return _target.override
    return "interpreter" if device.type == "cpu" else _device_arch(device)


@cache
def _device_arch(device: torch.device) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def decode_launch(arch: str, itemsize: int, head_dim: int, is_quantised: bool = False) -> DecodeLaunch:
    """The decode kernel's launch for queries of `itemsize` bytes and the larger head dim of K and V."""
    return _row(_DECODE[listed_arch(arch, tuple(_DECODE))], itemsize, head_dim, is_quantised)


@cache
def prefill_launch(arch: str, itemsize: int, head_dim: int, is_quantised: bool = False) -> PrefillLaunch:
    """The prefill kernel's launch for queries of `itemsize` bytes and the larger head dim of K and V."""
    return _row(_PREFILL[listed_arch(arch, tuple(_PREFILL))], itemsize, head_dim, is_quantised)


@cache
def converts_e4m3(arch: str) -> bool:
    """Whether the hardware converts float8_e4m3fn itself; elsewhere the kernels do it with integers."""
    vendor, number = _parts(arch)
    return (vendor == "sm" and number >= 89) or (vendor == "gfx" and number >= 0x950)


def _row(rows: dict[tuple[int, bool], dict[int, _Launch]], itemsize: int, head_dim: int, is_quantised: bool) -> _Launch:
    by_head_dim = rows.get((itemsize, is_quantised)) or rows[itemsize, False]
    return by_head_dim[min(dim for dim in by_head_dim if dim >= head_dim)]


def listed_arch(arch: str, listed: tuple[str, ...]) -> str:
    """Of the architectures that a table lists, the one whose rows hold for `arch`."""
    if arch in listed:
        return arch
    vendor, number = _parts(arch)
    before = [name for name in listed if _parts(name)[0] == vendor and _parts(name)[1] <= number]
    same_vendor = [name for name in listed if _parts(name)[0] == vendor]
    return max(before, key=_parts) if before else min(same_vendor, key=_parts)


def _parts(arch: str) -> tuple[str, int]:
    # gfx942 and gfx90a count in hexadecimal
    match = re.fullmatch(r"(sm|gfx)_?([0-9a-f]+)", arch)
    if match is None:
        return arch, 0
    return match[1], int(match[2], 16) if match[1] == "gfx" else int(match[2])
