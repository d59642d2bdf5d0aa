"""A tokenizer for the tiny models: ASCII, one character a token from id 32 on, a few longer tokens below, no hub."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.zoo import VOCAB_SIZE

_MERGES = [("P", "a"), ("r", "i"), ("Pa", "ri"), ("Pari", "s"), ("b", "e"), ("t", "a"), ("be", "ta")]
_SPECIAL = ["<pad>", "<bos>", "<eos>"]


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Ids: 0 padding, 1 bos, 2 eos, 3 to 9 "Pa", "ri", "Pari", "Paris", "be", "ta", "beta", and printable ASCII."""
    tokens = [*_SPECIAL, *(a + b for a, b in _MERGES)]
    tokens += [f"<unused{index}>" for index in range(len(tokens), 32)]
    tokens += ["Ġ", *map(chr, range(33, VOCAB_SIZE - 1)), "<unused127>"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, _MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
