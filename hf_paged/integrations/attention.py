"""Registers attn_implementation="hf_paged" with Transformers."""

from __future__ import annotations

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.kernels.interface import paged_attention_forward, paged_mask
from hf_paged.kernels.swapped import ATTENTION_NAME


def register_attention() -> None:
    """Makes the name known, with its mask function: without that one, forwards outside a packed step had no mask."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_mask)
