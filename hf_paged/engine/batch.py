"""Packs the sequences of one step into a single row of tokens.

scheduled          a: 3 tokens from 4 on        b: 1 token, its 12th
input_ids        [[ a4  a5  a6  b11 ]]
position_ids     [[  4   5   6   11 ]]
logits wanted             ▲   ▲          the last token of every sequence that catches up, and the drafts behind it
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hf_paged.engine.adapter_rows import AdapterRows
from hf_paged.engine.prompt_embeds import EmbeddedRows, embedded_rows
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.request import Sequence
from hf_paged.scheduler.output import ScheduledSequence, SchedulerOutput


@dataclass(frozen=True)
class LogitsRows:
    """Rows `start` to `stop` of a step's logits are those of a sequence's tokens from position `first_position` on."""

    sequence: Sequence
    start: int
    stop: int
    first_position: int
    is_last_chunk: bool
    num_draft_tokens: int = 0  # the last rows are those of drafts


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One step, ready for the model. T tokens, R rows of logits."""

    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64
    metadata: tuple[AttentionMetadata, ...]  # one a layer group
    logits_to_keep: torch.Tensor  # [R] int64
    rows: tuple[LogitsRows, ...]
    adapters: AdapterRows | None = None
    embeds: EmbeddedRows = ()
    long_tokens: torch.Tensor | None = None  # [T] bool, see `rotary_regimes.py`


def pack(output: SchedulerOutput, block_size: int, num_groups: int, device: torch.device) -> PackedBatch:
    """The packed batch of a step, on `device`. All the arithmetic is done on the host in numpy."""
    scheduled = output.scheduled
    lens = np.array([item.num_new_tokens for item in scheduled], dtype=np.int64)
    starts = np.array([item.sequence.num_computed_tokens for item in scheduled], dtype=np.int64)
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(lens, out=query_start[1:])
    ids: list[int] = []
    for item in scheduled:
        start = item.sequence.num_computed_tokens
        ids += item.sequence.token_ids[start : start + item.num_new_tokens - item.num_draft_tokens]
        ids += item.sequence.draft_token_ids[: item.num_draft_tokens]
    owner = np.repeat(np.arange(len(scheduled)), lens)
    positions = np.arange(len(ids)) - (query_start[:-1] - starts)[owner]
    seq_lens = starts + lens
    query_start_loc = torch.from_numpy(query_start.astype(np.int32)).to(device, non_blocking=True)
    seq_lens_device = torch.from_numpy(seq_lens.astype(np.int32)).to(device, non_blocking=True)
    metadata = []
    for group in range(num_groups):
        table = _block_table(scheduled, group)
        slots = table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
        metadata.append(
            AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens_device,
                block_table=torch.from_numpy(table).to(device, non_blocking=True),
                slot_mapping=torch.from_numpy(slots).to(device, non_blocking=True),
                block_size=block_size,
                query_lens=tuple(lens.tolist()),  # host: a numpy array
                kv_lens=tuple(seq_lens.tolist()),  # host: a numpy array
            )
        )
    keep, rows = _logits_rows(scheduled, query_start)
    return PackedBatch(
        input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
        position_ids=torch.from_numpy(positions[None]).to(device, non_blocking=True),
        metadata=tuple(metadata),
        logits_to_keep=torch.from_numpy(keep).to(device, non_blocking=True),
        rows=rows,
        adapters=AdapterRows.of(scheduled, rows, len(keep), device),
        embeds=embedded_rows(scheduled),
    )


def _block_table(scheduled: SequenceOf[ScheduledSequence], group: int) -> npt.NDArray[np.int32]:
    tables = [item.sequence.block_tables[group].blocks for item in scheduled]
    matrix = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(matrix, tables, strict=True):
        row[: len(table)] = np.frombuffer(table, dtype=np.int32)
    # blocks given back behind a window are never read, but an index must be one
    return np.maximum(matrix, 0, out=matrix)


def _logits_rows(
    scheduled: SequenceOf[ScheduledSequence], query_start: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], tuple[LogitsRows, ...]]:
    keep: list[int] = []
    rows: list[LogitsRows] = []
    bounds = query_start.tolist()  # host: a numpy array
    for item, start, stop in zip(scheduled, bounds, bounds[1:], strict=False):
        sequence = item.sequence
        request = sequence.request
        in_prompt = request.wants_prompt_logprobs and sequence.num_computed_tokens < request.num_prompt_tokens
        if not in_prompt and not item.is_last_chunk:
            continue
        first = start if in_prompt else stop - 1 - item.num_draft_tokens
        total = len(keep)
        keep.extend(range(first, stop))
        first_position = sequence.num_computed_tokens + first - start
        rows.append(LogitsRows(sequence, total, len(keep), first_position, item.is_last_chunk, item.num_draft_tokens))
    if not keep:  # a step of middle chunks only: one row all the same, since not every model takes none
        keep.append(bounds[-1] - 1)
    return np.array(keep, dtype=np.int64), tuple(rows)
