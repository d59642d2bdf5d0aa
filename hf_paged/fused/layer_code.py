"""Which decoder layers do nothing but what a layer program does, told by their code.

```
h = x + o(attention(rotary(q_norm(q(n))), rotary(k_norm(k(n))), v(n)))     n = input_layernorm(x); the two norms if any
y = h + mlp(post_attention_layernorm(h))
```

Numbers can't tell: a layer may scale its queries from some position on, and be like any other before it. So the code of
`forward`, of the layer and of its attention, has to be that of a class known to do this. Most of Transformers' own
models repeat it letter by letter.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

# The files, and the beginnings of the names of their classes.
_KNOWN = (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))

Code = tuple[Any, ...]


def is_known(layer: nn.Module, attention: nn.Module) -> bool:
    """Whether the code of a decoder layer and of its attention is known."""
    return _is_known(type(layer).forward, "DecoderLayer") and _is_known(type(attention).forward, "Attention")


@cache  # a model's layers are of one class
def _is_known(forward: Callable[..., Any], role: str) -> bool:
    code = _code_of(forward)
    return any(code == _code_of(known) for known in _known_forwards(role))


def _known_forwards(role: str) -> Iterator[Callable[..., Any]]:
    for folder, name in _KNOWN:  # one after another: most models need but one of these files
        file = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        yield getattr(file, f"{name}{role}").forward


def _code_of(function: Callable[..., Any]) -> Code:
    """What a function does, whatever file it stands in: two that are equal were written alike."""
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else _parts(code)


def _parts(code: CodeType) -> Code:
    constants = tuple(_parts(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, names, constants, code.co_argcount, code.co_kwonlyargcount, code.co_flags
