"""The picture of a comparison, from its result file.

python -m benchmarks.picture                  of the newest one
python -m benchmarks.picture FILE.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.summary import Row

OURS_COLOUR, OTHERS_COLOUR, LIMIT_COLOUR = "#1b6ca8", "#b8bec6", "#c0392b"
NUM_COLUMNS = 2
FAR = 3  # a limit so many times the best is only named: its line would squeeze the bars


def draw_comparison(result: Mapping[str, Any], path: Path) -> None:
    """A panel a workload: a bar an engine, its output tokens a second, and the range of its rounds."""
    parts = result["workloads"]
    num_columns = min(NUM_COLUMNS, len(parts))
    num_rows = -(-len(parts) // num_columns)
    bars = max(len(part["rows"]) for part in parts)
    figure, grid = plt.subplots(
        num_rows, num_columns, figsize=(6.4 * num_columns, num_rows * (0.9 + 0.3 * bars)), squeeze=False
    )
    panels = list(grid.flat)
    for panel, part in zip(panels, parts, strict=False):
        _draw_panel(panel, part)
    for panel in panels[len(parts) :]:
        panel.set_axis_off()
    cpu = result["machine"]["cpu"]["model"]
    rounds = result["num_rounds"]
    spread = "" if rounds == 1 else f"; lines: slowest to fastest of {rounds} rounds"
    figure.suptitle(f"Output tokens a second, {result['model']}, {result['dtype']}", x=0.01, ha="left", weight="bold")
    figure.text(0.01, 0.005, f"{cpu}, {result['threads']} threads, {result['date'][:10]}{spread}", size=8, color="#555")
    figure.tight_layout(rect=(0, 0.02, 1, 0.99))
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def _draw_panel(panel: Any, part: Mapping[str, Any]) -> None:
    rows: Sequence[Row] = sorted(part["rows"], key=lambda row: row["output_tokens_per_second"])
    num_tokens = part["workload"]["num_output_tokens"]
    places = range(len(rows))
    speeds = [row["output_tokens_per_second"] for row in rows]
    slowest = [num_tokens / max(row["seconds_of_rounds"]) for row in rows]
    fastest = [num_tokens / min(row["seconds_of_rounds"]) for row in rows]
    colours = [OURS_COLOUR if row["peer"].startswith("hf_paged") else OTHERS_COLOUR for row in rows]
    panel.barh(places, speeds, color=colours, height=0.7)
    for place, low, high in zip(places, slowest, fastest, strict=True):
        panel.plot([low, high], [place, place], color="#333", linewidth=1)
    limit = num_tokens / part["limit_seconds"]
    is_near = limit <= FAR * max(fastest)
    widest = max(*fastest, limit) if is_near else max(fastest)
    for place, speed, high in zip(places, speeds, fastest, strict=True):
        panel.text(high + widest * 0.012, place, f"{speed:.1f}", va="center", size=8)
    if is_near:
        panel.axvline(limit, color=LIMIT_COLOUR, linewidth=1, linestyle="--")
    note = "limit of the products" if is_near else f"limit of the products: {limit:,.0f}"
    place = limit if is_near else widest * 1.1
    panel.text(place, len(rows) - 0.42, note, color=LIMIT_COLOUR, size=7, ha="right", va="bottom")
    panel.set_yticks(list(places), [row["peer"] for row in rows], size=8)
    panel.set_xlim(0, widest * 1.1)
    panel.tick_params(axis="x", labelsize=8)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    workload = part["workload"]
    title = f"{workload['name']}: {workload['num_requests']} requests, {workload['num_prompt_tokens']:,} tokens in, "
    panel.set_title(f"{title}{num_tokens:,} out", loc="left", size=9, pad=14)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw one result file's picture beside it."""
    from benchmarks.rounds import RESULTS
    from benchmarks.table import newest

    given = list(sys.argv[1:] if arguments is None else arguments)
    path = Path(given[0]) if given else newest("compare", RESULTS)
    draw_comparison(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png"))
    print(f"Written to {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
