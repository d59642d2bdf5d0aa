"""Threads on a CPU: as many as torch was told, from torch's own pool, and none that spin once the work is done."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hf_paged.kernels.cpu.build import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"not buildable here: {unavailable_reason()}")

# In a process of its own: OpenMP's pool only ever grows.
SCRIPT = """
import json, os, sys, time
import torch
torch.set_num_threads(int(sys.argv[1]))
from transformers import LlamaConfig, LlamaForCausalLM
from hf_paged import PagedConfig, PagedEngine

def threads():
    return len(os.listdir("/proc/self/task"))

config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
left, right = torch.randn(600, 600), torch.randn(600, 600)
left @ right                                     # torch's own pool is there
before = threads()
config = PagedConfig(num_blocks=64, attention_backend="native", linear_backend="native")
with PagedEngine(model, config) as engine:
    engine.generate([list(range(1, 200)), list(range(1, 50))], max_new_tokens=8, do_sample=False)
    assert engine.core.runner.backend.num_calls and engine.core.runner.linears.num_products
    after = threads()
    time.sleep(0.3)                              # OpenMP's threads look for more work for a moment
    begin = time.process_time()
    time.sleep(1.0)
    idle = time.process_time() - begin
print(json.dumps({"before": before, "after": after, "idle": idle}))
"""


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_as_many_threads_as_torch_and_idle_ones_rest(num_threads: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(num_threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["after"] == found["before"], "the kernels brought threads of their own"
    assert found["idle"] < 0.1, "seconds of CPU in a second without work"
