"""lm-eval, unchanged, on stock `generate` and on the paged one: the same answers and score, and the time of each.

    pip install lm-eval
    python -m benchmarks.harness

The task is made here: short questions behind worked examples of mixed length, answered freely until a new line. The
harness brings stopping criteria of its own, which keep a flag a row. "paged" is switched on where a user would who
can not reach the call of the harness: in `model.generation_config`.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import hf_paged
from hf_paged.embedded import embedded_model_folder

TASK = """\
task: mixed_sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 48
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    regexes_to_ignore: ["\\\\.$", "^ +"]
metadata:
  version: 1
"""


def make_documents(count: int) -> list[dict[str, str]]:
    """Sums behind 1 to 24 worked examples, so that contexts go from some 20 to some 400 tokens."""
    rng = random.Random(1)
    documents = []
    for _ in range(count):
        pairs = [(rng.randrange(1, 10), rng.randrange(1, 10)) for _ in range(rng.randrange(2, 26))]
        lines = [f"Q: What is {a} plus {b}?\\nA: {a + b}".replace("\\n", "\n") for a, b in pairs]
        a, b = pairs[-1]
        lines[-1] = f"Q: What is {a} plus {b}?\nA:"
        documents.append({"question": "\n".join(lines), "answer": str(a + b)})
    return documents


def main(
    documents: Annotated[int, typer.Option(min=1, help="Questions in the task.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch of both, as given to the harness.")] = 16,
    paged_batch_size: Annotated[int, typer.Option(min=1, help="A larger batch for a second paged run.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, interleaved; medians are shown.")] = 3,
    output: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
) -> None:
    """Run the task on both and compare."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    runs = {
        f"stock, batches of {batch_size}": (None, batch_size),
        f"paged, batches of {batch_size}": ("paged", batch_size),
        f"paged, batches of {paged_batch_size}": ("paged", paged_batch_size),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results: dict[str, tuple[float, list[str]]] = {}
    with tempfile.TemporaryDirectory() as place:
        data = Path(place, "documents.jsonl")
        data.write_text("".join(json.dumps(document) + "\n" for document in make_documents(documents)))
        Path(place, "mixed_sums.yaml").write_text(TASK.format(path=data))
        manager = TaskManager(include_path=place, include_defaults=False)
        for _ in range(rounds):
            for name, (implementation, size) in runs.items():
                model.generation_config.cache_implementation = implementation
                start = time.perf_counter()
                found = lm_eval.simple_evaluate(
                    model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size),
                    tasks=["mixed_sums"],
                    task_manager=manager,
                    bootstrap_iters=0,
                )
                seconds[name].append(time.perf_counter() - start)
                samples = sorted(found["samples"]["mixed_sums"], key=lambda sample: sample["doc_id"])
                answers = [sample["resps"][0][0] for sample in samples]
                results[name] = (found["results"]["mixed_sums"]["exact_match,none"], answers)
                hf_paged.release(model)  # every run starts without the prefixes of the last
    report = _report(seconds, results)
    report["versions"] = {"lm_eval": lm_eval.__version__, "torch": torch.__version__, "hf_paged": hf_paged.__version__}
    Console().print_json(data=report)
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    if not all(row["answers_equal_to_stock"] == documents for row in report["runs"]):
        raise typer.Exit(1)


def _report(seconds: dict[str, list[float]], results: dict[str, tuple[float, list[str]]]) -> dict[str, Any]:
    stock = next(iter(results))
    base = statistics.median(seconds[stock])
    rows = []
    for name, (score, answers) in results.items():
        median = statistics.median(seconds[name])
        rows.append(
            {
                "run": name,
                "exact_match": score,
                "answers_equal_to_stock": sum(a == b for a, b in zip(answers, results[stock][1], strict=True)),
                "seconds": [round(value, 2) for value in seconds[name]],
                "median_seconds": round(median, 2),
                "times_faster_than_stock": round(base / median, 2),
            }
        )
    return {"task": "mixed_sums", "documents": len(results[stock][1]), "threads": torch.get_num_threads(), "runs": rows}


if __name__ == "__main__":
    typer.run(main)
