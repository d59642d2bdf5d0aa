"""The results of one run as data, and all results as a page."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.chapters import chapters
from tests.conformance.verdicts import Outcome, Rule, Verdict

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent.parent / "docs" / "conformance.md"
KINDS = ("passed", "failed", "not applicable")

Result = dict[str, Any]


def file_result(file: str, verdicts: Sequence[Verdict], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """One file: counts, how its `generate` calls ran, and each test that didn't pass, by reason."""
    counts = Counter(verdict.kind for verdict in verdicts)
    ways: Counter[str] = Counter()
    reasons: dict[str, dict[str, Any]] = {}
    for verdict in verdicts:
        if verdict.kind == "passed":
            ways.update(outcomes[verdict.test].get("calls", {}))
        else:
            entry = reasons.setdefault(verdict.reason, {"kind": verdict.kind, "rule": verdict.rule, "tests": []})
            entry["tests"].append(verdict.test.removeprefix(file + "::"))
    return {
        "file": file,
        **{kind: counts[kind] for kind in KINDS},
        "generate calls of passed tests": dict(sorted(ways.items())),
        "reasons": dict(sorted(reasons.items())),
    }


def load_results(folder: Path = RESULTS) -> list[Result]:
    """The committed results, the newest Transformers first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("transformers-*.json")]
    return sorted(found, key=lambda result: [int(part) for part in result["transformers"].split(".")[:3]], reverse=True)


def merge(path: Path, head: Result, entry: dict[str, Any]) -> Result:
    """Puts one file's entry into the results at a path, and writes them.

    Entries of other files stay if they are of the same run (`head`: versions, device, checkout); otherwise they go.
    Shards that run at the same time wait for each other here.

    Args:
        path: the JSON file; made where there is none.
        head: what all entries have in common.
        entry: what `file_result` gave.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (Path(tempfile.gettempdir()) / f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        is_same = {**before, "files": []} == {**head, "files": []}
        files = {old["file"]: old for old in before["files"]} if is_same else {}
        files[entry["file"]] = entry
        order = [file for chapter in chapters(with_long=True) for file in chapter.files]
        listed = sorted(files.values(), key=lambda file: order.index(file["file"]))
        result = {**head, "files": listed}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    return result


def groups(result: Result) -> list[dict[str, Any]]:
    """The tests that didn't pass, by file and reason, those with full masks among them."""
    entries = [entry for file in result["files"] for entry in (file, file.get("with full masks"))]
    return [{"why": why, **group} for entry in entries if entry for why, group in entry["reasons"].items()]


def unused_rules(results: Iterable[Result], rules: Iterable[Rule]) -> list[str]:
    """Names of the rules that explain nothing in any of the results."""
    used = {group["rule"] for result in results for group in groups(result)}
    return [rule.name for rule in rules if rule.name not in used]


def render(results: Sequence[Result], rules: Sequence[Rule]) -> str:
    """docs/conformance.md."""
    lines = [
        '# Transformers\' own tests, with `"paged"` as the default',
        "",
        "Made by `python -m tests.conformance CHECKOUT` from a checkout of Transformers' source. A plugin of pytest",
        'makes `cache_implementation="paged"` the default of every `generate` call that names no cache of its own. A',
        "test that doesn't pass runs again without hf_paged, with the same seeds. It is *not applicable* only if it",
        "skips itself or fails there, too, with the same error, or if a rule of `tests/conformance/rules.json` names",
        "the test, the error and the reason. Everything else counts as failed.",
        "",
    ]
    for result in results:
        lines += _section(result)
    lines += ['## The rules for what fails only with `"paged"` as the default', ""]
    lines += [f"- **{rule.name}**: {rule.reason}" for rule in rules if rule.when == "paged"] or ["None."]
    return "\n".join(lines) + "\n"


def _section(result: Result) -> list[str]:
    totals = {kind: sum(entry[kind] for entry in result["files"]) for kind in KINDS}
    ways: Counter[str] = Counter()
    for entry in result["files"]:
        ways.update(entry["generate calls of passed tests"])
    lines = [
        f"## Transformers {result['transformers']}",
        "",
        f"Tests: {result['checkout']}. torch {result['torch']}, {result['device']}, no hub.",
        "",
        _left_out(result),
        "",
        f"**{totals['passed']} passed, {totals['failed']} failed, {totals['not applicable']} not applicable.**",
        "",
        "| file | passed | failed | not applicable | calls on the engine | in stock's loop | own cache |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in result["files"]:
        counts = " | ".join(str(entry[kind]) for kind in KINDS)
        lines.append(f"| {entry['file'].removeprefix('tests/')} | {counts} | {_ways(entry)} |")
    lines += _with_full_masks(result)
    lines += ["", "Why calls of passed tests ran stock's loop:", "", "| calls | reason |", "|---:|---|"]
    loops = [(count, way.removeprefix("stock's loop: ")) for way, count in ways.items() if way.startswith("stock's")]
    lines += [f"| {count} | {_cell(reason)} |" for count, reason in sorted(loops, key=lambda loop: (-loop[0], loop[1]))]
    for kind, title in (("failed", "Failed"), ("not applicable", "Not applicable")):
        groups: Counter[str] = Counter()
        for entry in result["files"]:
            for reason, group in entry["reasons"].items():
                if group["kind"] == kind:
                    groups[reason] += len(group["tests"])
        if groups:
            lines += ["", f"{title}:", "", "| tests | reason |", "|---:|---|"]
            lines += [f"| {count} | {_cell(reason)} |" for reason, count in sorted(groups.items(), key=_by_count)]
    return [*lines, ""]


def _with_full_masks(result: Result) -> list[str]:
    filled = [entry["with full masks"] for entry in result["files"] if "with full masks" in entry]
    filled = [entry for entry in filled if any(entry[kind] for kind in KINDS)]
    if not filled:
        return []
    lines = [
        "",
        "The model testers' masks are triangles that hide the end of most rows, and such calls are stock's. The tests",
        "that make them ran once more with masks that hide nothing:",
        "",
        "| file | passed | failed | not applicable | calls on the engine | in stock's loop | own cache |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in filled:
        counts = " | ".join(str(entry[kind]) for kind in KINDS)
        lines.append(f"| {entry['file'].removeprefix('tests/')} | {counts} | {_ways(entry)} |")
    return lines


def _left_out(result: Result) -> str:
    run = {entry["file"] for entry in result["files"]}
    listed = [file for chapter in chapters(with_long=True) for file in chapter.files]
    missing = [file.removeprefix("tests/") for file in listed if file not in run]
    long = "" if result["long tests"] else "tests that take minutes each (torch.compile, statistics of watermarks)"
    return f"Not run: {', '.join(filter(None, [long, *missing])) or 'nothing'}."


def _ways(entry: Mapping[str, Any]) -> str:
    ways = entry["generate calls of passed tests"]
    loops = sum(count for way, count in ways.items() if way.startswith("stock's loop"))
    return f"{ways.get('engine', 0)} | {loops} | {ways.get('names its own cache', 0)}"


def _by_count(group: tuple[str, int]) -> tuple[int, str]:
    return (-group[1], group[0])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
