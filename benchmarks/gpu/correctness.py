"""Every kernel on the card against float64, on odd shapes, with NaN in every slot that must not be read.

Attention is compared with the reference backend, which reads the same stored K and V; writes with float64 arithmetic of
their own; copies bit for bit. Memory that outputs are likely to be put into is filled with NaN before each call.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.comparing import dtype_name, errors
from benchmarks.gpu.part import Row, Setting
from benchmarks.gpu.storing import FLOAT_DTYPES, FP8, INT8, copy_rows, write_rows
from hf_paged.kernels.kv_blocks import KVBlocks
from hf_paged.kernels.reference import ReferenceBackend
from tests.kernels.packed import Packed, decodes, pack

# (queries, keys) of each sequence
STEPS: dict[str, list[tuple[int, int]]] = {
    "decode": decodes([1, 15, 16, 17, 255, 4097]),
    "prefill": [(40, 40), (129, 129), (17, 4097), (300, 700)],
    "mixed": [(1, 300), (37, 37), (20, 530), (1, 1), (4, 90), (1, 1100), (130, 700), (1, 31)],
}
SMOKE_STEPS: dict[str, list[tuple[int, int]]] = {"decode": decodes([1, 17]), "mixed": [(1, 20), (11, 17)]}
FEATURES: list[dict[str, Any]] = [
    {"window": 20},
    {"window": 700},
    {"chunk": 64},
    {"softcap": 2.0},
    {"with_sinks": True},
    {"window": 100, "softcap": 2.0, "with_sinks": True},
]
FAR = 2**31  # elements; blocks beyond it need 64-bit offsets
LONG = 131072  # tokens; low-precision sums lose such contexts first


def rows(setting: Setting) -> list[Row]:
    """Plain calls of every kernel and dtype first, then features, heads, block sizes, and blocks that lie far."""
    if setting.smoke:
        return _smoke_rows(setting)
    llama = {"num_kv_heads": 8, "group_size": 4, "head_dim": 128}
    quantised = [
        {"key_dtype": FP8, "value_dtype": FP8},
        {"key_dtype": INT8, "value_dtype": INT8},
        {"key_dtype": FP8, "value_dtype": torch.bfloat16},
    ]
    cases: list[tuple[str, dict[str, Any]]] = []
    cases += [(step, {**llama, "dtype": dtype}) for step in STEPS for dtype in FLOAT_DTYPES]
    cases += [(step, {**llama, "dtype": torch.bfloat16, **storage}) for step in STEPS for storage in quantised]
    listed = [*_attention_rows(setting, cases), *write_rows(setting), *copy_rows(setting), *_latent_rows(setting)]

    cases = []
    for size, step, storage in itertools.product((16, 64, 256), ("decode", "prefill"), ({}, quantised[0])):
        for group_size in (4, 2):  # what the timed parts run, so that they find it compiled
            shape = {"num_kv_heads": 8, "group_size": group_size, "head_dim": 128, "block_size": size}
            cases.append((step, {**shape, "dtype": torch.bfloat16, **storage}))
    cases += [
        (step, {**llama, "dtype": torch.bfloat16, **feature}) for feature in FEATURES for step in ("decode", "prefill")
    ]
    cases += [
        ("mixed", {"head_dim": dim, "value_dim": value_dim, "dtype": dtype, "group_size": 4})
        for dim, value_dim in ((64, 64), (80, 80), (96, 96), (192, 192), (256, 256), (192, 128), (72, 40))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    cases += [
        ("mixed", {"head_dim": 128, "group_size": group_size, "dtype": dtype})
        for group_size in (1, 3, 5, 8, 16)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    cases += [("mixed", {**llama, "block_size": size, "dtype": torch.float16}) for size in (8, 32, 128)]
    cases += [
        ("mixed", {**llama, "dtype": torch.float16, **quantised[1], "window": 100, "with_sinks": True}),
        ("mixed", {**llama, "dtype": torch.float32, **quantised[0], "chunk": 64}),
    ]
    listed += _attention_rows(setting, cases)
    for storage in ({}, *quantised[:2]):
        options = {**llama, "dtype": torch.bfloat16, **storage}
        listed.append(Row(_name("decode", options) + ", long context", functools.partial(_long, setting, options)))
    for step in ("decode", "prefill"):
        options = {**llama, "dtype": torch.bfloat16}
        run = functools.partial(_attention, setting, STEPS[step], options, far=True)
        listed.append(Row(_name(step, options) + ", far blocks", run))
    unique = {row.key: row for row in reversed(listed)}
    return [row for row in listed if unique.pop(row.key, None)]


def _smoke_rows(setting: Setting) -> list[Row]:
    small = {"head_dim": 16, "dtype": torch.float32}
    listed = []
    for step, lengths in SMOKE_STEPS.items():
        for options in (small, {**small, "dtype": torch.bfloat16, "key_dtype": FP8, "value_dtype": FP8}):
            listed.append(Row(_name(step, options), functools.partial(_attention, setting, lengths, options)))
    return [*listed, *write_rows(setting), *copy_rows(setting), *_latent_rows(setting)]


def _attention_rows(setting: Setting, cases: list[tuple[str, dict[str, Any]]]) -> list[Row]:
    return [
        Row(_name(step, options), functools.partial(_attention, setting, STEPS[step], options))
        for step, options in cases
    ]


# -- attention -------------------------------------------------------------------------------------------------------


def _attention(
    setting: Setting, lengths: list[tuple[int, int]], options: dict[str, Any], far: bool = False
) -> dict[str, Any]:
    packed = on_device(pack(lengths, **options), setting.device)
    if far:
        packed = _moved_far(packed)
    kinds = {"decode" if queries == 1 else "prefill" for queries, _ in lengths}
    kernel = kinds.pop() if len(kinds) == 1 else "mixed"
    return {"kernel": kernel, "dtype": dtype_name(packed.query.dtype, packed.blocks), **_compared(setting, packed)}


def _compared(setting: Setting, packed: Packed) -> dict[str, Any]:
    exact = replace(packed, query=packed.query.double()).attend(ReferenceBackend())
    backend = setting.backend()
    _poison(exact.numel(), setting)
    return errors(packed.attend(backend), exact)


def _long(setting: Setting, options: dict[str, Any]) -> dict[str, Any]:
    return _attention(setting, decodes([LONG, 33]), {**options, "num_kv_heads": 2})


def on_device(packed: Packed, device: torch.device) -> Packed:
    """The same step with its tensors on a device, its query as a model lays it out."""

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    blocks = packed.blocks
    query = packed.query.transpose(0, 1).to(device).transpose(0, 1)
    return replace(
        packed,
        query=query,
        blocks=KVBlocks(
            blocks.keys.to(device), blocks.values.to(device), moved(blocks.key_scales), moved(blocks.value_scales)
        ),
        metadata=packed.metadata.to(device),
        params=replace(packed.params, sinks=moved(packed.params.sinks)),
    )


def _moved_far(packed: Packed) -> Packed:
    """The same blocks at the end of tensors so large that their offsets need 64 bits."""
    keys, values = packed.blocks.keys, packed.blocks.values
    offset = FAR // keys[0].numel() + 1

    def at_the_end(tensor: torch.Tensor) -> torch.Tensor:
        large = tensor.new_empty((offset + tensor.shape[0], *tensor.shape[1:]))
        large[:offset].fill_(float("nan"))
        large[offset:].copy_(tensor)
        return large

    table = packed.metadata.block_table
    metadata = replace(packed.metadata, block_table=torch.where(table > 0, table + offset, table), plans={})
    return replace(packed, blocks=KVBlocks(at_the_end(keys), at_the_end(values)), metadata=metadata)


def _poison(num_elements: int, setting: Setting) -> None:
    """Fills what the allocator will hand out next with NaN: what a kernel doesn't write shows."""
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (1, 2, 64):
            if not setting.smoke or factor == 1:
                torch.full((factor * num_elements,), float("nan"), dtype=dtype, device=setting.device)


# -- latent ----------------------------------------------------------------------------------------------------------


def _latent_rows(setting: Setting) -> list[Row]:
    listed = []
    cases: list[tuple[torch.dtype, torch.dtype | None, dict[str, Any]]] = [
        *((dtype, None, {}) for dtype in FLOAT_DTYPES),
        (torch.bfloat16, FP8, {}),
        (torch.bfloat16, INT8, {}),
        (torch.bfloat16, None, {"window": 20}),
        (torch.bfloat16, None, {"block_size": 64}),
    ]
    for dtype, storage, options in cases[2:4] if setting.smoke else cases:
        named = {"dtype": dtype, "key_dtype": storage, "value_dtype": storage, **options}
        listed.append(Row(_name("latent", named), functools.partial(_latent, setting, named)))
    return listed


def _latent(setting: Setting, options: dict[str, Any]) -> dict[str, Any]:
    num_heads, rank, rope = (4, 32, 16) if setting.smoke else (16, 512, 64)
    lengths = [(1, 17), (3, 9)] if setting.smoke else [*decodes([1, 16, 17, 255, 1500]), (40, 40), (3, 130), (20, 300)]
    cached = on_device(
        pack(lengths, num_kv_heads=1, group_size=num_heads, head_dim=rank, value_dim=rope, **options), setting.device
    )
    query_rope = torch.randn(num_heads, cached.query.shape[0], rope, device=setting.device)
    query_rope = query_rope.to(cached.query.dtype).transpose(0, 1)
    step = (cached.blocks, cached.metadata, replace(cached.params, scale=(rank + rope) ** -0.5))
    exact = ReferenceBackend().attend_latent(cached.query.double(), query_rope.double(), *step)
    cached.metadata.plans.clear()
    backend = setting.backend()
    _poison(exact.numel(), setting)
    actual = backend.attend_latent(cached.query, query_rope, *step)
    dtype = dtype_name(cached.query.dtype, cached.blocks)
    return {"kernel": "latent", "dtype": dtype, **errors(actual, exact)}


def _name(kernel: str, options: dict[str, Any]) -> str:
    parts = [f"{name}={str(value).removeprefix('torch.')}" for name, value in options.items() if value is not None]
    return f"{kernel} {', '.join(parts)}"
