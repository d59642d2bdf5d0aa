"""`generate(..., streamer=[...])`: a streamer a row. Stock takes one, and its text streamers take one row.

round        1      2      3      4
row 0        put    put    put, end
row 1        put    put    put    put, end       a row ends when it is finished, not when the batch is
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList

from hf_paged.errors import RequestError


class RowStreamers:
    """Streamers of the rows of one call, as the one streamer that stock's code knows.

    Each gets its prompt `[1, tokens]` first, without padding, then its tokens `[1]` one by one.

    Args:
        streamers: one a row, counting each prompt as often as `num_return_sequences`; None for a row that nobody reads.
        attention_mask: of the call, `[B, L]`; None if no row is padded.
    """

    def __init__(self, streamers: Sequence[Any], attention_mask: torch.Tensor | None) -> None:
        self._streamers = list(streamers)
        self._mask = attention_mask
        self._num_given: int | None = None  # tokens that rows got after their prompts
        self._length = [-1] * len(self._streamers)  # tokens of rows that are finished
        self._is_open = [streamer is not None for streamer in self._streamers]

    def watched(self, criteria: StoppingCriteriaList, num_prompt_tokens: int) -> StoppingCriteriaList:
        """The same criteria, but the streamers of rows that they end are told."""
        return _WatchedCriteria(criteria, self, num_prompt_tokens)

    def note_ends(self, done: torch.Tensor, num_generated: int) -> None:
        """Rows where `done` `[B]` is set end with that many tokens, if they haven't ended before."""
        for row, is_done in enumerate(done.tolist()):
            if is_done and self._length[row] < 0:
                self._length[row] = num_generated

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompts `[B, L]` the first time, and a token of each row `[B]`, or several, after that.

        Raises:
            RequestError: there is not a streamer for each row.
        """
        if len(value) != len(self._streamers):
            raise RequestError(
                f"streamer has {len(self._streamers)} streamers for {len(value)} rows; give one a row, or None for a "
                "row that nobody reads."
            )
        if self._num_given is None:
            self._num_given = 0
            self._put_prompts(value)
            return
        new = value.view(len(value), -1)
        self._num_given += new.shape[1]
        for row, streamer in enumerate(self._streamers):
            if not self._is_open[row]:
                continue
            length = self._length[row]
            if length < 0 or self._num_given <= length:
                streamer.put(new[row])
            if 0 <= length <= self._num_given:
                self._end(row)

    def _put_prompts(self, prompts: torch.Tensor) -> None:
        mask = None if self._mask is None else self._mask.bool().cpu()
        for row, streamer in enumerate(self._streamers):
            if streamer is not None:
                prompt = prompts[row]
                if mask is not None and mask.shape[1] == prompts.shape[1]:  # embeddings have no tokens
                    prompt = prompt[mask[row * len(mask) // len(prompts)]]
                streamer.put(prompt[None])

    def _end(self, row: int) -> None:
        self._is_open[row] = False
        self._streamers[row].end()

    def end(self) -> None:
        """All rows have ended."""
        for row, is_open in enumerate(self._is_open):
            if is_open:
                self._end(row)


class _WatchedCriteria(StoppingCriteriaList):
    def __init__(self, criteria: StoppingCriteriaList, streamers: RowStreamers, num_prompt_tokens: int) -> None:
        super().__init__(criteria)
        self._streamers = streamers
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self._streamers.note_ends(done, input_ids.shape[1] - self._num_prompt_tokens)
        return done
