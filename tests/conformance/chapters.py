"""What is run of a checkout's tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

GENERATES = "(generate or beam or sample or assisted or cache)"
# Minutes each: torch.compile and exports, asked for with a static cache, which isn't ours; statistics of watermarks,
# which call no generate.
LONG = "(compile or compilation or no_recompile or synthidtext)"

GENERAL = (
    "tests/generation/test_stopping_criteria.py",
    "tests/generation/test_streamers.py",
    "tests/generation/test_logits_process.py",
    "tests/generation/test_configuration_utils.py",
    "tests/generation/test_candidate_generator.py",
    "tests/generation/test_utils.py",
    "tests/utils/test_cache_utils.py",
    "tests/generation/test_paged_attention.py",
    "tests/generation/test_flash_attention_parity.py",
    "tests/generation/test_continuous_batching.py",
    "tests/pipelines/test_pipelines_text_generation.py",
)

# Families that stand for the rest, in the order in which they are run: full, sliding, softcap, sinks, MoE, latent,
# learned positions, alibi, recurrent and hybrid, encoder-decoder, speech, and images.
FAMILIES = (
    *(
        "llama",
        "gemma2",
        "gpt_oss",
        "t5",
        "bamba",
        "qwen2",
        "mistral",
        "gpt2",
        "mixtral",
        "deepseek_v3",
        "mamba",
        "bart",
    ),
    *("phi3", "qwen3", "bloom", "gemma3", "qwen3_moe", "olmo2", "cohere2", "opt", "gpt_neox"),
    *("whisper", "qwen2_vl", "llava"),
)


@dataclass(frozen=True)
class Chapter:
    """Files that run in one process.

    Attributes:
        name: what logs are called after.
        files: relative to the checkout.
        select: pytest's -k.
    """

    name: str
    files: tuple[str, ...]
    select: str


def chapters(*, with_long: bool) -> list[Chapter]:
    """All of them, a file each, so that a run can be stopped after any.

    Args:
        with_long: also the tests that take minutes each.
    """
    skip = "" if with_long else f"not {LONG}"
    models = f"{GENERATES} and {skip}" if skip else GENERATES
    listed = [(file, skip) for file in GENERAL]
    listed += [(f"tests/models/{name}/test_modeling_{name}.py", models) for name in FAMILIES]
    return [Chapter(PurePosixPath(file).stem, (file,), select) for file, select in listed]
