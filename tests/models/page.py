"""`docs/models.md` and its twin of the oldest version, from the data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.models.entries import CAUSAL, ENCODER_DECODER, VISION_LANGUAGE
from tests.models.families import FAMILIES, OTHERS, family_of
from tests.models.judging import CASES
from tests.models.outcomes import MODES, ON_THE_ENGINE, Outcome, is_identical, versions, wrong_cases

DOCS = Path(__file__).parents[2] / "docs"

_MEANINGS = {
    "direct": "on the engine; each layer's keys and values lie in the paged pool, and our kernels read them there",
    "gather": "on the engine; the pool holds what the model caches, and each layer gets its context gathered from it",
    "by row": "on the engine; states that belong to a sequence are kept by row, the rest is paged",
    "stock": "stock's own loop, chosen automatically and said once, with the reason",
    "refused": "raises where stock doesn't, with the reason",
    "failed": "the run crashed or hung",
    "not built": "a tiny random model can't be made, so nothing is known",
    "fails in stock": "stock raises on the tiny model, so there is nothing to compare with",
}

_TITLES = {
    CAUSAL: "Causal language models",
    ENCODER_DECODER: "Encoder-decoder models, and those that Transformers files with them",
    VISION_LANGUAGE: "Vision-language models, asked with text alone",
}


def page_of(version: str) -> Path:
    """The page of a version: the newest has the plain name."""
    if version == versions()[-1]:
        return DOCS / "models.md"
    return DOCS / f"models-{'.'.join(version.split('.')[:2])}.md"


def render(version: str, outcomes: dict[str, Outcome]) -> str:
    """The page of a version, as Markdown."""
    by_kind: dict[str, dict[str, Outcome]] = {kind: {} for kind in _TITLES}
    for key, outcome in sorted(outcomes.items()):
        kind, _, model_type = key.partition("/")
        by_kind[kind][model_type] = outcome
    others = [f"[{page_of(other).name}]({page_of(other).name})" for other in versions() if other != version]
    parts = [
        f'# Every model of Transformers {version} under `cache_implementation="paged"`',
        "Made by `python -m tests.models.table`: a tiny random model of every class, in float32 on a CPU, run through "
        "stock `generate` and through ours, tokens compared. The cases: "
        + "; ".join(f"**{name}**: {meaning}" for name, meaning in CASES.items())
        + f". On another version: {', '.join(others)}." * bool(others),
        *(f"**{_summary(kind, entries)}**" for kind, entries in by_kind.items() if entries),
        "\n".join(f"- *{mode}*: {_MEANINGS[mode]}" for mode in MODES if _count(outcomes, mode)),
        "## Families",
        _families(by_kind[CAUSAL]),
    ]
    for kind, entries in by_kind.items():
        if entries:
            parts += [f"## {_TITLES[kind]}", _table(entries)]
    return "\n\n".join(parts) + "\n"


def _count(outcomes: dict[str, Outcome], *modes: str) -> int:
    return sum(outcome["mode"] in modes for outcome in outcomes.values())


def _summary(kind: str, outcomes: dict[str, Outcome]) -> str:
    identical = {key: outcome for key, outcome in outcomes.items() if is_identical(outcome)}
    classes = {outcome["class"] for outcome in identical.values() if outcome["mode"] in ON_THE_ENGINE}
    modes = ", ".join(f"{mode} {count}" for mode in MODES if (count := _count(identical, mode)))
    rest = ", ".join(f"{count} {mode}" for mode in MODES if (count := _count(outcomes, mode) - _count(identical, mode)))
    return (
        f"{_TITLES[kind]}: {len(identical)} of {len(outcomes)} are token-identical to stock ({modes}); on the engine: "
        f"{len(classes)} classes. The others: {rest or 'none'}."
    )


def _families(outcomes: dict[str, Outcome]) -> str:
    lines = ["| family | token-identical | how | model types |", "|---|---|---|---|"]
    for family in (*FAMILIES, OTHERS):
        members = {key: outcome for key, outcome in outcomes.items() if family_of(key) == family}
        if not members:
            continue
        identical = sum(map(is_identical, members.values()))
        counts = Counter(outcome["mode"] for outcome in members.values())
        how = ", ".join(f"{mode} {counts[mode]}" for mode in MODES if counts[mode])
        names = ", ".join(f"`{key}`" for key in members) if family != OTHERS else "see below"
        lines.append(f"| {family} | {identical} of {len(members)} | {how} | {names} |")
    return "\n".join(lines)


def _table(outcomes: dict[str, Outcome]) -> str:
    lines = ["| model type | class | how | cases equal | tokens | why, and what else |", "|---|---|---|---|---|---|"]
    order = {family: index for index, family in enumerate((*FAMILIES, OTHERS))}
    for model_type in sorted(outcomes, key=lambda name: (order[family_of(name)], name)):
        outcome = outcomes[model_type]
        cases, wrong = outcome.get("cases", {}), wrong_cases(outcome)
        other = {name: said for name, said in cases.items() if said != "equal" and name not in wrong}
        remarks = [outcome.get("why", ""), *(f"**{name} {said}**" for name, said in wrong.items())]
        remarks += [f"{name}: {said}" for name, said in other.items()] + list(outcome.get("notes", ()))
        equal = f"{sum(said.startswith('equal') for said in cases.values())} of {len(cases)}" if cases else ""
        remark = "; ".join(text.rstrip(".") for text in remarks if text).replace("|", "\\|")
        lines.append(
            f"| `{model_type}` | {outcome['class']} | {outcome['mode']} | {equal} | {outcome.get('tokens', '')} "
            f"| {remark} |"
        )
    return "\n".join(lines)
