"""The GPU check on the CPU at tiny sizes: what it writes, what it resumes, and that a wrong kernel fails it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu.budgets import BUDGETS, deadlines
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.marks import marks
from benchmarks.gpu.supervisor import Supervisor
from hf_paged.kernels import registry
from hf_paged.kernels.torch_backend import TorchBackend

ROOT = Path(gpu_check.__file__).parent.parent


def check(folder: Path, parts: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and result file of a smoke run."""
    status = gpu_check.main(["--smoke", "--output", str(folder), "--parts", parts, *options])
    return status, json.loads((folder / "results.json").read_text())


def statuses(result: dict[str, Any]) -> dict[str, list[str]]:
    return {part: [row["status"] for row in rows] for part, rows in result["rows"].items()}


PARTS = "correctness,ceilings,decode,prefill,tune"
# What a machine with torch, Triton, Transformers and numpy alone doesn't have; nor has it TRITON_INTERPRET set.
RUN_WITHOUT_EXTRAS = """
import importlib.machinery, os, sys
os.environ.pop("TRITON_INTERPRET", None)
find = importlib.machinery.PathFinder.find_spec
absent = {"psutil", "rich", "pytest", "hypothesis", "accelerate", "peft", "torchao", "gguf", "bitsandbytes"}
importlib.machinery.PathFinder.find_spec = lambda name, *rest: (
    None if name.partition(".")[0] in absent else find(name, *rest)
)
from benchmarks import gpu_check
sys.exit(gpu_check.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("smoke")
    command = [sys.executable, "-c", RUN_WITHOUT_EXTRAS, "--smoke", "--output", str(folder), "--parts", PARTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "results.json").exists(), done.stderr
    return done.returncode, json.loads((folder / "results.json").read_text()), folder


def test_smoke_needs_only_torch_triton_transformers_and_numpy_and_passes(
    smoke: tuple[int, dict[str, Any], Path],
) -> None:
    status, result, _ = smoke
    assert status == 0, result["rows"]
    assert result["backend"] == "triton"
    assert list(result["rows"]) == ["correctness", "ceilings", "decode", "prefill", "tune_compile", "tune"]
    assert {status for part in statuses(result).values() for status in part} == {"ok"}
    assert result["left_out"] == {}
    assert {row["kernel"] for row in result["rows"]["correctness"]} == {"decode", "mixed", "write", "copy", "latent"}
    for row in result["rows"]["decode"]:
        assert 0 < row["us_p20"] <= row["us_p50"] <= row["us_p80"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us_p50"] / 1e3)


def test_markdown_has_a_row_for_each_measurement(smoke: tuple[int, dict[str, Any], Path]) -> None:
    _, result, folder = smoke
    text = (folder / "results.md").read_text()
    for title in ("Ceilings", "Correctness", "Decode", "Prefill", "Launches"):
        assert f"## {title}\n" in text
    section = text.split("## Decode\n")[1].split("\n## ")[0]
    assert section.count("\n| small |") == len(result["rows"]["decode"])
    assert "## Marks" not in text  # tiny sizes on a CPU say nothing about them
    assert "## Rows that failed" not in text


def test_resume_runs_only_what_is_missing(smoke: tuple[int, dict[str, Any], Path], tmp_path: Path) -> None:
    _, result, folder = smoke
    lines = (folder / "rows.jsonl").read_text().splitlines()
    missing = result["rows"]["decode"][1]["key"]
    kept = [line for line in lines if not (json.loads(line)["event"] == "finished" and missing in line)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*kept, '{"event": "finished", "par']) + "\n")  # cut short

    status, resumed = check(tmp_path, PARTS, "--resume")
    events = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[len(kept) + 1 :]]
    assert [event["key"] for event in events if event["event"] == "started"] == [missing]
    assert status == 0
    assert statuses(resumed) == statuses(result)


def test_results_are_not_overwritten_without_being_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(SystemExit, match="has results already"):
        check(tmp_path, "ceilings")


def test_end_to_end_compares_tokens_and_measures_all_engines(tmp_path: Path) -> None:
    status, result = check(tmp_path, "end_to_end", "--backend", "torch")
    rows = {row["peer"]: row for row in result["rows"]["end_to_end"]}
    assert status == 0, rows
    tokens = rows.pop("tokens in float32")
    assert tokens["num_equal"] == tokens["num_requests"] == 2
    assert set(rows) == {"hf_paged engine", "hf_paged hook", "stock generate", "stock generate_batch, sdpa"}
    assert all(row["complete"] and row["tokens_per_second"] > 0 for row in rows.values())
    assert "| hf_paged engine |" in (tmp_path / "results.md").read_text()


class Wrong(TorchBackend):
    """Forgets a little, everywhere."""

    def attend(self, *arguments: Any) -> torch.Tensor:
        return super().attend(*arguments) * 0.9


class Leaky(TorchBackend):
    """Reads a slot that no query sees."""

    def attend(self, *arguments: Any) -> torch.Tensor:
        return super().attend(*arguments) + arguments[1].values[0, 0, 0, 0].float()


class Broken(TorchBackend):
    def attend(self, *_: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")


class Forgetful(TorchBackend):
    """Writes to a slot beside the last one."""

    def write(self, blocks: Any, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        super().write(blocks, key, value, slot_mapping)
        blocks.keys.view(torch.uint8).flatten()[:] ^= 1


@pytest.mark.parametrize(
    ("backend", "kernel", "status"),
    [(Wrong, "decode", "wrong"), (Leaky, "decode", "wrong"), (Forgetful, "write", "wrong"), (Broken, "", "error")],
)
def test_a_wrong_kernel_fails_the_check_and_the_other_rows_go_on(
    backend: type[TorchBackend], kernel: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._backends, "spoilt", backend)
    exit_status, result = check(tmp_path, "correctness", "--backend", "spoilt")
    rows = result["rows"]["correctness"]
    assert exit_status == 1
    assert {row["status"] for row in rows if row.get("kernel", "") == kernel} == {status}
    assert any(row["status"] == "ok" for row in rows)
    assert result["left_out"] == {}
    assert "## Rows that failed" in (tmp_path / "results.md").read_text()


def test_rows_that_time_does_not_allow_are_listed_as_left_out(tmp_path: Path) -> None:
    status, result = check(tmp_path, "ceilings,decode", "--backend", "torch", "--seconds", "0")
    assert status == 0
    assert result["rows"] == {}
    assert len(result["left_out"]["ceilings"]) == 2
    assert "- ceilings: copy" in (tmp_path / "results.md").read_text()


def test_without_a_gpu_it_says_what_can_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--parts", "ceilings"]) == 2
    assert "--smoke" in capsys.readouterr().err


def test_an_unknown_part_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--parts", "decode,prefil"])
    assert (
        "'prefil' is none of correctness, ceilings, decode, prefill, end_to_end, tune_compile, tune"
        in capsys.readouterr().err
    )


def test_shards_share_the_rows_of_a_part(tmp_path: Path) -> None:
    until = str(time.time() + 60)
    keys = []
    for shard in ("0", "1"):
        options = ["--parts", "ceilings", "--backend", "torch", "--worker", shard, "2", "0", until]
        assert gpu_check.main(["--smoke", "--output", str(tmp_path), *options]) == 0
        keys.append([key for _, key in Journal(tmp_path / "rows.jsonl").finished()])
    assert keys == [["copy"], ["copy", "bf16 matrix product"]]


# -- time and marks --------------------------------------------------------------------------------------------------


def test_parts_leave_the_later_ones_what_is_kept_for_them() -> None:
    limits = deadlines(list(BUDGETS), 1000.0, gpu_check.SECONDS)
    assert limits["end_to_end"] == 1000 + gpu_check.SECONDS
    assert limits["prefill"] == limits["end_to_end"] - BUDGETS["end_to_end"]
    assert list(limits.values()) == sorted(limits.values())
    assert deadlines(["decode"], 1000.0, 450.0) == {"decode": 1450.0}
    assert deadlines(["decode", "prefill"], 0.0, 16.5) == {"decode": pytest.approx(11.0), "prefill": 16.5}


def test_all_parts_fit_below_eight_minutes() -> None:
    assert sum(BUDGETS.values()) <= gpu_check.SECONDS <= 460


def decode_row(batch: int, context: int, block_size: int | None, kind: str, rate: float) -> dict[str, Any]:
    return {
        "key": f"{batch} x {context} {kind}",
        "status": "ok",
        "model": "a model",
        "batch": batch,
        "context": context,
        "block_size": block_size,
        "kind": kind,
        "gb_per_s": rate,
        "us_p50": 1.0,
    }


def test_marks_are_judged_by_the_worst_row() -> None:
    prefill = {"status": "ok", "model": "a model", "num_queries": 8192, "num_cached": 0}
    peer = {"key": "", "status": "ok"}
    rows: dict[str, Any] = {
        "ceilings": [{"key": "copy", "status": "ok", "gb_per_s": 1000.0}],
        "decode": [
            decode_row(64, 4096, 16, "bf16", 900.0),
            decode_row(256, 32768, 64, "bf16", 840.0),
            decode_row(64, 512, 16, "bf16", 100.0),  # no mark is about it
            decode_row(64, 4096, None, "sdpa", 10.0),
            decode_row(8, 4096, 16, "bf16", 700.0),
            decode_row(8, 4096, 64, "bf16", 10.0),
        ],
        "prefill": [
            {**prefill, "key": "ours", "kind": "bf16", "tflop_per_s": 90.0},
            {**prefill, "key": "sdpa", "kind": "sdpa", "tflop_per_s": 100.0},
        ],
        "end_to_end": [
            {**peer, "peer": "hf_paged engine", "tokens_per_second": 490.0},
            {**peer, "peer": "stock generate_batch, sdpa", "tokens_per_second": 100.0},
        ],
    }
    found = {mark.name: mark for mark in marks(rows)}
    large = found["decode, bf16: share of the copy ceiling, batch 64 x 4k and larger"]
    assert (large.verdict, large.worst, large.num_met, large.num_rows) == ("missed", 0.84, 1, 2)
    small = found["decode, bf16: share of the copy ceiling, block size 16, batch 8 x 4k"]
    assert (small.verdict, small.num_rows) == ("met", 1)
    assert found["decode, fp8: share of the copy ceiling, batch 64 x 4k and larger"].verdict == "not measured"
    assert found["prefill, bf16: TFLOP/s as a share of SDPA's"].worst == pytest.approx(0.9)
    assert found["end to end: tokens/s, times generate_batch's"].verdict == "missed"


# -- processes -------------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, time
from pathlib import Path
from benchmarks.gpu.journal import Journal
journal, since = Journal(Path({path!r})), {since!r}
journal.append("planned", "decode", keys=["first", "bad", "last"])
for key in ("first", "bad", "last"):
    if ("decode", key) in journal.to_skip(since):
        continue
    journal.append("started", "decode", key=key)
    if key == "bad":
        {deed}
    journal.append("finished", "decode", key=key, status="ok")
"""


def supervisor_of(path: Path, deed: str, **options: Any) -> tuple[Supervisor, Journal, dict[str, float]]:
    """Of a worker whose second row does a deed; the deadline is far away."""
    journal, since = Journal(path), time.time()
    code = WORKER.format(path=str(path), since=since, deed=deed)
    limits = {"decode": since + 200}
    return Supervisor(lambda *_: [sys.executable, "-c", code], journal, limits, **options), journal, limits


def statuses_of(journal: Journal) -> dict[str, str]:
    return {key: row["status"] for (_, key), row in journal.finished().items()}


def test_a_row_that_kills_its_process_costs_only_itself(tmp_path: Path) -> None:
    supervisor, journal, _ = supervisor_of(tmp_path / "rows.jsonl", "os._exit(7)")
    supervisor.run(["decode"])
    assert statuses_of(journal) == {"first": "ok", "bad": "error", "last": "ok"}
    assert "status 7" in journal.finished()["decode", "bad"]["error"]


def test_a_row_that_hangs_is_ended_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.supervisor.GRACE", 0.1)

    def pass_time() -> None:  # the deadline comes while the bad row runs, however slow the machine
        last = journal.entries()[-1:]
        is_hanging = bool(last) and last[0].get("key") == "bad" and last[0]["event"] == "started"
        limits["decode"] = time.time() + (-1 if is_hanging else 200)

    supervisor, journal, limits = supervisor_of(tmp_path / "rows.jsonl", "time.sleep(150)", changed=pass_time)
    supervisor.run(["decode"])
    assert statuses_of(journal) == {"first": "ok", "bad": "error", "last": "ok"}
    assert "deadline" in journal.finished()["decode", "bad"]["error"]
