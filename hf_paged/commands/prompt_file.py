"""The input of `hf-paged generate`: a prompt a line, text or JSONL. Read and checked whole, before anything runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_paged.errors import RequestError, nearest

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
FIELDS = ("prompt", "messages", "max_new_tokens", "id")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file.

    `index` counts prompts from 0 and `line` lines from 1 (blank lines hold no prompt). `content` is the text, or a
    chat's messages. `max_new_tokens` and `id` are None where the line has none.
    """

    index: int
    line: int
    content: str | list[dict[str, Any]]
    max_new_tokens: int | None = None
    id: str | int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file.

    Args:
        path: JSONL by its suffix (.jsonl, .ndjson, .json): `{"prompt": "..."}` or `{"messages": [...]}`, and optional
            "max_new_tokens" and "id"; any other file is text, a prompt a line.

    Raises:
        RequestError: the file can't be read or holds no prompt, or a line is malformed (named by its number).
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} can't be read ({error.strerror}); name a file of prompts.") from error
    parse = _parse_json if path.suffix.lower() in JSONL_SUFFIXES else _parse_text
    prompts: list[Prompt] = []
    lines_of_ids: dict[str | int, int] = {}
    for number, raw_line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw_line.decode("utf-8").strip()
            if not line:
                continue
            prompt = parse(line, len(prompts), number)
            if prompt.id is not None and lines_of_ids.setdefault(prompt.id, number) != number:
                raise ValueError(f"the id {prompt.id!r} is line {lines_of_ids[prompt.id]}'s already")
        except UnicodeDecodeError as error:
            raise RequestError(f"{path}, line {number}: the text must be UTF-8.") from error
        except ValueError as error:
            dot = "" if str(error).endswith("?") else "."
            raise RequestError(f"{path}, line {number}: {error}{dot}") from error
        prompts.append(prompt)
    if not prompts:
        raise RequestError(f"{path} holds no prompt; write one a line.")
    return prompts


def _parse_text(line: str, index: int, number: int) -> Prompt:
    return Prompt(index, number, line)


def _parse_json(line: str, index: int, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError('must be an object such as {"prompt": "..."}')
    for name in row:
        if name not in FIELDS:
            raise ValueError(f"unknown field {name!r}, {nearest(name, FIELDS)}")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError("must have either 'prompt' or 'messages'")
    limit = row.get("max_new_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"'max_new_tokens' must be a positive integer, not {limit!r}")
    identifier = row.get("id")
    if identifier is not None and (not isinstance(identifier, str | int) or isinstance(identifier, bool)):
        raise ValueError(f"'id' must be a string or an integer, not {identifier!r}")
    content = _messages(row["messages"]) if "messages" in row else _text(row["prompt"])
    return Prompt(index, number, content, limit, identifier)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("'prompt' must be a string with text in it")
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("'messages' must be a list with at least one message")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError("every message must be an object with the strings 'role' and 'content'")
    return value
