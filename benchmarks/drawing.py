"""Pictures, where there is matplotlib: a measurement doesn't fail for want of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.rounds import err


@contextmanager
def picture(hint: str = "") -> Iterator[None]:
    """Around importing and calling what draws; without matplotlib, a line says how to get the picture."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        err.print(f"No picture: it needs matplotlib (pip install matplotlib{hint})")
