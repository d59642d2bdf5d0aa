"""How the latent kernel is launched, by architecture: data, as in launch_table.py.

A program sums latents of up to 512 numbers for each of its rows, which fills the registers. So rows and tiles are
small, and smaller still where what is read is converted on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hf_paged.kernels.triton.launch_table import listed_arch

MAX_RANK = 512  # numbers of a latent


@dataclass(frozen=True)
class LatentLaunch:
    """`rows` of (token, head) pairs a program, which meet `tile` keys at a time, `split` of them at most in decode."""

    rows: int
    tile: int
    split: int
    num_warps: int
    num_stages: int


# architecture -> (element size of a query, whether latents are quantised) -> launch
_LATENT: dict[str, dict[tuple[int, bool], LatentLaunch]] = {
    "sm_80": {
        (2, False): LatentLaunch(64, 16, 512, 8, 2),
        (2, True): LatentLaunch(32, 16, 512, 8, 2),
        (4, False): LatentLaunch(16, 16, 512, 4, 2),
        (4, True): LatentLaunch(16, 16, 512, 4, 2),
    },
    "sm_90": {
        (2, False): LatentLaunch(32, 32, 512, 8, 2),
        (2, True): LatentLaunch(32, 16, 512, 8, 2),
        (4, False): LatentLaunch(16, 16, 512, 4, 2),
        (4, True): LatentLaunch(16, 16, 512, 4, 2),
    },
    "sm_100": {
        (2, False): LatentLaunch(64, 16, 512, 8, 2),
        (2, True): LatentLaunch(32, 16, 512, 8, 2),
        (4, False): LatentLaunch(16, 16, 512, 4, 2),
        (4, True): LatentLaunch(16, 16, 512, 4, 2),
    },
    "gfx942": {
        (2, False): LatentLaunch(32, 16, 512, 4, 1),
        (2, True): LatentLaunch(32, 16, 512, 4, 1),
        (4, False): LatentLaunch(16, 16, 512, 4, 1),
        (4, True): LatentLaunch(16, 16, 512, 4, 1),
    },
    # Small, so that short test sequences meet several tiles and splits.
    "interpreter": {
        (itemsize, is_quantised): LatentLaunch(32, 32, 128, 1, 1)
        for itemsize in (2, 4)
        for is_quantised in (False, True)
    },
}


@cache
def latent_launch(arch: str, itemsize: int, is_quantised: bool) -> LatentLaunch:
    """The launch for queries of `itemsize` bytes, and latents or rotary keys that are quantised or not."""
    return _LATENT[listed_arch(arch, tuple(_LATENT))][itemsize, is_quantised]
