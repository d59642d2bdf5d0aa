"""Products with a model's weights by rows: torch, oneDNN's packed copies, and the native product, alone and joined.

    python -m benchmarks.linears [--dtype float32] [--threads 2] [--rows 1 8 32] [--layers 30]

The shapes are SmolLM2-135M's. Each trial goes through the weights of `--layers` layers once, so that they come from
memory as in a model; the variants take turns, and the least of `--repeats` times counts. With one thread the time is
the thread's own, which a busy machine disturbs less. Milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_paged.linears.native import NativeProduct

HIDDEN, KV, INNER, VOCABULARY = 576, 192, 1536, 49152
# layers that take the same tensor stand together
GROUPS: dict[str, tuple[tuple[int, ...], int]] = {
    "q, k, v": ((HIDDEN, KV, KV), HIDDEN),
    "o": ((HIDDEN,), HIDDEN),
    "gate, up": ((INNER, INNER), HIDDEN),
    "down": ((HIDDEN,), INNER),
}
HEAD = {"vocabulary": ((VOCABULARY,), HIDDEN)}

Weights = list[list[torch.Tensor]]  # layers, and in each the weights of a group


def packed(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def variants(weights: Weights, x: torch.Tensor, num_threads: int) -> dict[str, Callable[[], object]]:
    """What can be timed for a group: a name -> one pass over its layers."""
    product = NativeProduct()
    joins = len(weights[0]) > 1
    found: dict[str, Callable[[], object]] = {
        "torch": lambda: [[F.linear(x, weight) for weight in layer] for layer in weights],
        "native": lambda: [[product(x, [(weight, None)], num_threads) for weight in layer] for layer in weights],
    }
    if joins:
        cat = [torch.cat(layer) for layer in weights]
        found["torch joined"] = lambda: [F.linear(x, weight) for weight in cat]
        found["native joined"] = lambda: [
            product(x, [(weight, None) for weight in layer], num_threads) for layer in weights
        ]
    if x.dtype is torch.float32:  # bfloat16 needs AVX-512
        copies = [[packed(weight) for weight in layer] for layer in weights]
        found["packed"] = lambda: [[packed_product(x, weight) for weight in layer] for layer in copies]
        if joins:
            joined = [packed(weight) for weight in cat]
            found["packed joined"] = lambda: [packed_product(x, weight) for weight in joined]
    return found


def fastest(found: dict[str, Callable[[], object]], clock: Callable[[], float], repeats: int) -> dict[str, float]:
    """Least seconds of each, taking turns."""
    best = dict.fromkeys(found, float("inf"))
    for _ in range(repeats):
        for name, work in found.items():
            start = clock()
            work()
            best[name] = min(best[name], clock() - start)
    return best


COLUMNS = ("torch", "torch joined", "packed", "packed joined", "native", "native joined")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    dtype = getattr(torch, options.dtype)
    print(f"{options.dtype}, {options.threads} threads, {options.layers} layers, torch {torch.__version__}; ms\n")
    print("| rows | weights | " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---|" * len(COLUMNS))
    with torch.no_grad():
        for rows in options.rows:
            total = dict.fromkeys(COLUMNS, 0.0)
            for name, (sizes, k) in (GROUPS | HEAD).items():
                num_layers = options.layers if name in GROUPS else 1
                weights = [[(torch.randn(n, k) / k**0.5).to(dtype) for n in sizes] for _ in range(num_layers)]
                x = torch.randn(rows, k).to(dtype)
                times = fastest(variants(weights, x, options.threads), clock, options.repeats)
                for column in COLUMNS:
                    alone = column.removesuffix(" joined")
                    total[column] += times.get(column, times.get(alone, float("nan")))
                cells = [f"{times[column] * 1e3:.2f}" if column in times else "" for column in COLUMNS]
                print(f"| {rows} | {name} | " + " | ".join(cells) + " |", flush=True)
            print(f"| {rows} | **all** | " + " | ".join(f"**{total[column] * 1e3:.1f}**" for column in COLUMNS) + " |")


if __name__ == "__main__":
    main()
