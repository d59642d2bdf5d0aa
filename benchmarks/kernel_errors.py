"""How far the Triton kernels are from float64, as data and as the table of docs/kernels.md.

    python -m benchmarks.kernel_errors            under Triton's interpreter where there is no GPU; a minute or two

Keys, values and queries are drawn from N(0, 1). Quantised K and V are compared with the reference on the same stored
numbers, so that a row is the kernel's own error; what quantising itself costs is the last column.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import typer

from benchmarks.markers import put
from hf_paged.kernels.reference import ReferenceBackend
from hf_paged.kernels.triton.backend import TritonBackend
from tests.kernels.latent_packed import pack_latent
from tests.kernels.packed import decodes, pack

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "kernel-errors.json"
PAGE = ROOT / "docs" / "kernels.md"
SHAPES: dict[str, list[tuple[int, int]]] = {
    "decode": [*decodes([1, 15, 16, 17, 255, 1500]), (4, 90)],
    "prefill": [(37, 37), (20, 330), (9, 60)],
    "latent": [*decodes([1, 17, 255, 700]), (20, 60)],
}
FEATURES: list[dict[str, Any]] = [{}, {"window": 40, "with_sinks": True}, {"softcap": 2.0}]
STORED: list[torch.dtype | None] = [None, torch.float8_e4m3fn, torch.int8]


def main() -> None:
    """Measure, keep the result, and bring the page's table up to date."""
    torch.set_num_threads(1)
    rows = [
        _row(kernel, dtype, stored)
        for kernel in SHAPES
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for stored in STORED
    ]
    machine = {"machine": platform.machine(), "torch": version("torch"), "triton": version("triton")}
    how = "interpreter" if os.environ["TRITON_INTERPRET"] == "1" else torch.cuda.get_device_name()
    RESULT.write_text(
        json.dumps({"command": "python -m benchmarks.kernel_errors", "ran_on": how, **machine, "rows": rows})
    )
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), "errors", _markdown(rows, how)), encoding="utf-8")
    typer.echo(_markdown(rows, how))


def _row(kernel: str, dtype: torch.dtype, stored: torch.dtype | None) -> dict[str, Any]:
    kernel_error, stored_error = 0.0, 0.0
    for seed, features in enumerate(FEATURES):
        options = {"dtype": dtype, "seed": seed, **features}
        if kernel == "latent":
            make: Any = pack_latent
        else:
            make, options = pack, {**options, "group_size": 3, "head_dim": 64, "num_kv_heads": 1}
        batch = make(SHAPES[kernel], **options, key_dtype=stored, value_dtype=stored)
        expected = batch.attend(ReferenceBackend()).double()
        actual = batch.attend(TritonBackend()).double()
        if not actual.isfinite().all():  # a maximum would pass NaN by
            raise SystemExit(f"error: {kernel} on {dtype} with {stored or dtype} stored gave NaN or inf")
        kernel_error = max(kernel_error, (actual - expected).abs().max().item())
        if stored is not None:
            exact = make(SHAPES[kernel], **options).attend(ReferenceBackend()).double()
            stored_error = max(stored_error, (expected - exact).abs().max().item())
    name = str(stored or dtype).removeprefix("torch.")
    return {
        "kernel": kernel,
        "query": str(dtype).removeprefix("torch."),
        "stored": name,
        "kernel_error": kernel_error,
        "storage_error": None if stored is None else stored_error,
    }


def _markdown(rows: list[dict[str, Any]], how: str) -> str:
    lines = [
        f"On: {how}. `python -m benchmarks.kernel_errors`",
        "",
        "| kernel | queries | K and V stored as | kernel against float64 | cost of the storage |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cost = "" if row["storage_error"] is None else f"{row['storage_error']:.1e}"
        lines.append(f"| {row['kernel']} | {row['query']} | {row['stored']} | {row['kernel_error']:.1e} | {cost} |")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
