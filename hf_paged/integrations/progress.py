"""How far a call of many prompts is, on a terminal."""

from __future__ import annotations

import sys

from tqdm.auto import tqdm  # type: ignore[import-untyped]


class Progress:
    """A bar that counts the prompts that are done, with the tokens that were generated for them, a second.

    It counts prompts as they end, not as they are read. Nothing is drawn where standard error is no terminal.

    Args:
        total: how many prompts there are; None where nobody knows.
    """

    def __init__(self, total: int | None) -> None:
        self._bar = tqdm(total=total, unit=" prompts", disable=not sys.stderr.isatty(), dynamic_ncols=True)
        self._num_tokens = 0

    def count(self, num_prompts: int, num_tokens: int, num_running: int) -> None:
        """Notes prompts that ended, their new tokens, and how many run on."""
        self._num_tokens += num_tokens
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-6)
            rate = f"{self._num_tokens:,} tokens, {self._num_tokens / seconds:,.0f} a second, {num_running} running"
            self._bar.set_postfix_str(rate, refresh=False)
            self._bar.update(num_prompts)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()
