"""The work's goals beside what was measured: each is judged by the worst of the rows that it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.ceilings import COPY
from benchmarks.gpu.decode import SDPA
from benchmarks.gpu.end_to_end import ENGINE, STOCK_BATCH

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Mark:
    """What was asked for, and what came out: the worst of the rows that it is about."""

    name: str
    wanted: float
    worst: float | None  # None: not measured
    worst_row: str
    num_met: int
    num_rows: int

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.worst is None:
            return "not measured"
        return "met" if self.worst >= self.wanted else "missed"


def marks(rows: Mapping[str, Rows]) -> list[Mark]:
    """The work's goals beside what was measured."""
    decodes = [(row, share_of_copy(row, rows)) for row in good(rows, "decode") if row["kind"] != SDPA]
    found = []
    for kind in ("bf16", "fp8"):
        large = [pair for pair in decodes if pair[0]["batch"] >= 64 and pair[0]["context"] >= 4096]
        found.append(
            _mark(
                f"decode, {kind}: share of the copy ceiling, batch 64 x 4k and larger",
                0.85,
                [pair for pair in large if pair[0]["kind"] == kind],
            )
        )
    for kind in ("bf16", "fp8"):
        small = [
            pair
            for pair in decodes
            if (pair[0]["batch"], pair[0]["context"], pair[0]["block_size"], pair[0]["kind"]) == (8, 4096, 16, kind)
        ]
        found.append(_mark(f"decode, {kind}: share of the copy ceiling, block size 16, batch 8 x 4k", 0.70, small))
    prefills = [(row, times_sdpa(row, rows, "tflop_per_s")) for row in good(rows, "prefill") if row["kind"] == "bf16"]
    found.append(_mark("prefill, bf16: TFLOP/s as a share of SDPA's", 0.80, prefills))
    peers = {row["peer"]: row for row in good(rows, "end_to_end")}
    ratio = None
    if ENGINE in peers and STOCK_BATCH in peers and peers[STOCK_BATCH]["tokens_per_second"]:
        ratio = peers[ENGINE]["tokens_per_second"] / peers[STOCK_BATCH]["tokens_per_second"]
    found.append(_mark("end to end: tokens/s, times generate_batch's", 5.0, [(peers[ENGINE], ratio)] if ratio else []))
    return found


def _mark(name: str, wanted: float, pairs: Iterable[tuple[Mapping[str, Any], float | None]]) -> Mark:
    known = [(value, str(row["key"])) for row, value in pairs if value is not None]
    if not known:
        return Mark(name, wanted, None, "", 0, 0)
    worst, key = min(known)
    return Mark(name, wanted, worst, key, sum(value >= wanted for value, _ in known), len(known))


def good(rows: Mapping[str, Rows], part: str) -> Rows:
    """The rows of a part that went well."""
    return [row for row in rows.get(part, ()) if row["status"] == "ok"]


def share_of_copy(row: Mapping[str, Any], rows: Mapping[str, Rows]) -> float | None:
    """A row's bytes a second as a share of the copy ceiling, None where that wasn't measured."""
    ceiling = next((found["gb_per_s"] for found in good(rows, "ceilings") if found["key"] == COPY), None)
    return row["gb_per_s"] / ceiling if ceiling else None


def times_sdpa(row: Mapping[str, Any], rows: Mapping[str, Rows], field: str) -> float | None:
    """A field of a row over that of SDPA's row of the same shape, None where there is none."""
    part, names = ("decode", ("model", "batch", "context"))
    if "num_queries" in row:
        part, names = ("prefill", ("model", "num_queries", "num_cached"))
    for other in good(rows, part):
        if other["kind"] == SDPA and all(other[name] == row[name] for name in names):
            return float(row[field] / other[field])
    return None
