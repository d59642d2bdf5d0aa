"""The names of peers that other files speak of, apart from what it takes to run them."""

from __future__ import annotations

OURS = "hf_paged engine"  # what the others are compared with
WITHOUT_PREFIXES = "hf_paged engine, no prefixes"
VLLM, OPENVINO = "vllm", "openvino-genai"
USUAL = ("stock generate", "stock generate_batch", OURS, "hf_paged hook")  # those of `benchmarks.mixed`
