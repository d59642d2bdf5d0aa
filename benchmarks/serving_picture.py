"""The picture of a serving benchmark: how latency grows with the load, and how it is spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.serving_table import MEASURES

SHARES = {"p50": ("#1b6ca8", "P50"), "p95": ("#e08e0b", "P95"), "p99": ("#c0392b", "P99")}
SHOWN = ("ttft", "tpot", "itl", "e2e")


def draw_serving(result: Mapping[str, Any], path: Path) -> None:
    """A panel a measure, by load; a line each for P50, P95 and P99, and the goal. The last panel is goodput."""
    loads = result["loads"]
    places = list(range(len(loads)))
    labels = [load["name"] for load in loads]
    figure, grid = plt.subplots(2, 3, figsize=(13, 7))
    panels = list(grid.flat)
    for panel, name in zip(panels, SHOWN, strict=False):
        _draw_measure(panel, places, [load["summary"][f"{name}_seconds"] for load in loads])
        goal = result["goals"].get(name)
        if goal is not None:
            panel.axhline(goal, color="#888", linewidth=1, linestyle="--")
            panel.text(0, goal, "goal", size=7, color="#666", va="bottom", clip_on=True)
        panel.set_title(f"{MEASURES[name]}, seconds", loc="left", size=10)
    _draw_goodput(panels[4], places, loads)
    _draw_spread(panels[5], loads)
    for panel in panels[:5]:
        panel.set_xticks(places, labels, size=7, rotation=20, ha="right")
    for panel in panels:
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{result['workload']['name']} to {result['target']}", x=0.01, ha="left", weight="bold")
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def _draw_measure(panel: Any, places: Sequence[int], values: Sequence[Mapping[str, float] | None]) -> None:
    for share, (colour, label) in SHARES.items():
        known = [(place, value[share]) for place, value in zip(places, values, strict=True) if value is not None]
        panel.plot(*zip(*known, strict=True), marker="o", markersize=4, color=colour, label=label) if known else None
    panel.set_ylim(bottom=0)


def _draw_goodput(panel: Any, places: Sequence[int], loads: Sequence[Mapping[str, Any]]) -> None:
    panel.bar(places, [load["summary"]["requests_per_second"] for load in loads], color="#d5d9de", label="all")
    goodput = [load["summary"]["goodput_requests_per_second"] for load in loads]
    panel.bar(places, goodput, color="#1b6ca8", width=0.5, label="within goals")
    panel.set_title("requests a second", loc="left", size=10)
    panel.legend(frameon=False, fontsize=8)


def _draw_spread(panel: Any, loads: Sequence[Mapping[str, Any]]) -> None:
    for load in loads:
        values = sorted(load["ttft_seconds"])
        shares = [(index + 1) / len(values) for index in range(len(values))]
        panel.step(values, shares, where="post", linewidth=1.2, label=load["name"])
    panel.set_title("share of requests whose first token came by then", loc="left", size=10)
    panel.set_xlim(left=0)
    panel.set_ylim(0, 1.02)
    panel.legend(frameon=False, fontsize=7)
