"""A step waits for the device once, when the sampled tokens are read. Nothing else in it reads a value on the host."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.engine.model_runner import ModelRunner
from tests import zoo
from tests.oracle import ragged_prompts

PACKAGE = Path(hf_paged.__file__).parent
# Interpreted kernels take milliseconds a program: one model with windows and sinks
STEPS = [("torch", "llama"), ("torch", "gemma2"), ("torch", "gpt_oss")]
if importlib.util.find_spec("triton") is not None:
    STEPS.append(("triton", "gpt_oss"))


class _NoReads(TorchDispatchMode):
    """Refuses `.item()`, `bool(tensor)` and whatever else copies a value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), (
            "a value is read"
        )
        return func(*args, **(kwargs or {}))


def test_the_mode_sees_a_read() -> None:
    with pytest.raises(AssertionError, match="a value is read"), _NoReads():
        torch.ones(1).item()
    with pytest.raises(AssertionError, match="a value is read"), _NoReads():
        bool(torch.ones(1) > 0)


@pytest.mark.parametrize(("backend", "name"), STEPS)
def test_no_value_is_read_in_a_step(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prefill, decode, a prefix hit and a copy on write, greedy and sampled: the whole of each step."""
    config = PagedConfig(block_size=8, num_blocks=64, max_batch_tokens=14, attention_backend=backend)
    with PagedEngine(zoo.fresh(name, num_hidden_layers=2), config) as engine:
        prompt = ragged_prompts(1, seed=3, shortest=20, longest=20)[0]
        engine.add_request(prompt, max_new_tokens=2)
        engine.add_request([*prompt[:17], 7], max_new_tokens=2, do_sample=True, top_k=20, top_p=0.9, seed=1)
        engine.add_request(
            prompt[:11], max_new_tokens=2, num_return_sequences=2, do_sample=True, temperature=0.7, seed=2
        )
        engine.add_request([*prompt[:6], *prompt[:6]], max_new_tokens=6, prompt_lookup_num_tokens=3)
        forwards = []
        run = ModelRunner.run

        def counted(self: ModelRunner, *args: Any) -> Any:
            forwards.append(1)
            return run(self, *args)

        monkeypatch.setattr(ModelRunner, "run", counted)
        while engine.stats()["num_finished"] < 4:
            with _NoReads():
                engine.step()
        assert len(forwards) > 3


# Where a read of a tensor would make every step wait.
_STEP_FILES = ("kernels", "cache/step_cache.py", "cache/storage.py", "cache/layout.py", "engine/batch.py",
               "engine/model_runner.py", "engine/sampler.py", "engine/penalties.py", "engine/history.py",
               "engine/logit_bias.py", "engine/core.py", "engine/speculative.py", "engine/assistant.py")  # fmt: skip
_READS = {"item", "tolist", "cpu", "numpy", "nonzero"}
_EXCUSES = ("# host:", "# wait:")  # a numpy array's, or a read that has to be; a reason follows


def _reads(source: str) -> Iterator[str]:
    """Lines that read a value on the host, and don't say why."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READS:
            line = lines[node.func.end_lineno - 1] if node.func.end_lineno else ""
            if not any(excuse in line for excuse in _EXCUSES):
                yield line.strip()


def test_the_rule_sees_a_read_and_takes_a_reason() -> None:
    assert list(_reads("x = y.tolist()\nz = a.b.item()")) == ["x = y.tolist()", "z = a.b.item()"]
    assert list(_reads("x = y.tolist()  # host: a numpy array")) == []


def test_code_of_a_step_reads_nothing_on_the_host_without_a_reason() -> None:
    files = [
        path
        for name in _STEP_FILES
        for path in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"))
    ]
    assert len(files) > 20
    found = {str(path.relative_to(PACKAGE)): reads for path in files if (reads := list(_reads(path.read_text())))}
    assert found == {}
