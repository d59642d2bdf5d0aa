"""The output of `hf-paged generate`: a JSON object a line, written as requests finish, in whatever order they do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hf_paged.commands.prompt_file import Prompt
from hf_paged.errors import ConfigError


class ResultFile:
    """Rows appended to a file that may hold rows of an earlier, interrupted run; to stdout without a file.

    A torn last line and rows of requests that failed are dropped, so their prompts run again.

    Args:
        path: the JSONL file, or None for stdout.
        prompts: what is to be answered; rows of other prompts in the file are refused.

    Raises:
        ConfigError: the file holds something else than results of these prompts, or can't be written.
    """

    def __init__(self, path: Path | None, prompts: Sequence[Prompt]) -> None:
        self._path = path
        self._finished: set[int] = set()
        self._file: TextIO = sys.stdout
        if path is not None:
            try:
                self._finished = self._take_over(path, prompts)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--output {path} can't be written ({error.strerror}); name another file.") from error

    @property
    def finished(self) -> frozenset[int]:
        """Indices of prompts that were answered before this run."""
        return frozenset(self._finished)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. It is in the file when this returns, whatever happens to the process."""
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._path is not None:
            self._file.close()

    @staticmethod
    def _take_over(path: Path, prompts: Sequence[Prompt]) -> set[int]:
        if not path.exists():
            return set()
        raw = path.read_bytes()
        lines = raw.split(b"\n")
        kept: list[bytes] = []
        finished: set[int] = set()
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                index, content, reason = row["index"], row["prompt"], row["finish_reason"]
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):  # no newline behind it: its writer was stopped
                    continue
                raise ConfigError(f"--output {path}, line {number} is no result; name another file.") from error
            if not isinstance(index, int) or not 0 <= index < len(prompts) or prompts[index].content != content:
                raise ConfigError(f"--output {path}, line {number} answers another prompts file; name another file.")
            if reason != "error" and index not in finished:
                finished.add(index)
                kept.append(line)
        clean = b"".join(line + b"\n" for line in kept)
        if clean != raw:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_bytes(clean)
            temporary.replace(path)
        return finished
