"""Grammars: which tokens may come next, so that a text matches a regular expression, a JSON schema or a grammar.

xgrammar compiles them and finds the tokens. A row's place in its grammar follows from its tokens alone, so a row that
was preempted, forked, reordered or rolled back is where its tokens say it is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.errors import GrammarError, RequestError

# The keywords that say what a text must match; at most one of them.
GRAMMAR_KEYWORDS = frozenset({"regex", "json_schema", "ebnf"})

_compilers: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


class Grammar:
    """A compiled grammar, and the place in it of every row that must match it.

    Args:
        tokenizer: its vocabulary is what the grammar is compiled for.
        regex: a regular expression that the whole text matches.
        json_schema: a JSON schema, as a dict, as JSON, or as a pydantic model. The text is JSON on one line, spaced as
            `json.dumps` does it, with no properties that the schema doesn't name.
        ebnf: a grammar in xgrammar's EBNF; its first rule is called `root`.
        stop_token_ids: tokens that end a text; empty for the tokenizer's end-of-sequence token.

    Raises:
        RequestError: xgrammar isn't installed, not exactly one of the three is given, it can't be compiled, or there
            is no token that could end the text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        regex: str | None = None,
        json_schema: Any = None,
        ebnf: str | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._xgrammar = _require_xgrammar()
        if tokenizer is None:
            raise RequestError("A grammar needs a tokenizer: PagedEngine(model, config, tokenizer=tokenizer).")
        given = {"regex": regex, "json_schema": json_schema, "ebnf": ebnf}
        asked = {name: value for name, value in given.items() if value is not None}
        if len(asked) != 1:
            raise RequestError(
                f"A request takes one of regex, json_schema and ebnf, not {' and '.join(asked) or 'none'}."
            )
        ((kind, source),) = asked.items()
        compiler = _compiler(self._xgrammar, tokenizer)
        self._compiled = _compile(compiler, kind, source)
        info = self._compiled.tokenizer_info
        self._vocab_size: int = info.vocab_size
        self.stop_token_ids = tuple(token for token in stop_token_ids or info.stop_token_ids if token < info.vocab_size)
        if not self.stop_token_ids:
            raise RequestError("A text that matches a grammar needs a token to end with; give an eos_token_id.")
        self._places: dict[int, GrammarPlace] = {}

    def place(self, row: int) -> GrammarPlace:
        """Where a row is; at the start if it wasn't asked for before."""
        if row not in self._places:
            matcher = self._xgrammar.GrammarMatcher(
                self._compiled, override_stop_tokens=list(self.stop_token_ids), terminate_without_stop_token=False
            )
            self._places[row] = GrammarPlace(matcher, self.stop_token_ids, -(-self._vocab_size // 32))
        return self._places[row]

    def next_bits(self, row: int, generated: list[int]) -> torch.Tensor:
        """The bits of the tokens that may follow these, of a row that goes on.

        Raises:
            GrammarError: one of these tokens isn't allowed, or none that could follow is in the vocabulary.
        """
        place = self.place(row)
        if not place.follow(generated):
            raise GrammarError(
                f"Token {generated[-1]} is not what the grammar allows here: another logits processor, or a forced "
                "token, contradicts it; leave one of them out."
            )
        bits = place.bits()
        if not bool(bits.any()):
            raise GrammarError("The grammar goes on here, but no token of the tokenizer does; change the grammar.")
        return bits

    def forget(self) -> None:
        """Forgets all rows; the grammar stays compiled."""
        self._places.clear()


class GrammarPlace:
    """How far one row is in its grammar. Made by `Grammar.place`."""

    def __init__(self, matcher: Any, stop_token_ids: tuple[int, ...], num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._stop_token_ids = stop_token_ids
        self._tokens: list[int] = []  # those that the matcher has taken

    def follow(self, tokens: list[int]) -> bool:
        """Goes to where these generated tokens lead, back or forth.

        Returns:
            False if the grammar doesn't allow one of them. What comes after the text's end doesn't count.
        """
        if tokens[: len(self._tokens)] != self._tokens:
            pairs = enumerate(zip(self._tokens, tokens, strict=False))
            same = next((index for index, (a, b) in pairs if a != b), min(len(tokens), len(self._tokens)))
            self._matcher.rollback(len(self._tokens) - same)
            del self._tokens[same:]
        for token in tokens[len(self._tokens) :]:
            if self._matcher.is_terminated():
                break
            if not self._matcher.accept_token(token):
                return False
            self._tokens.append(token)
        return True

    def bits(self) -> torch.Tensor:
        """`[vocab / 32]` int32 on the CPU: a bit for each token that may come next, or that ends what is complete."""
        if self._matcher.is_terminated():
            return self.end_bits()
        bits = torch.zeros(1, self._num_words, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(bits)
        return bits[0]

    def end_bits(self) -> torch.Tensor:
        """The same, for the tokens that end a text."""
        words = [0] * self._num_words
        for token in self._stop_token_ids:
            words[token // 32] |= 1 << (token % 32)
        return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)


def mask_scores(scores: torch.Tensor, bits: Sequence[torch.Tensor]) -> torch.Tensor:
    """`scores` [R, vocab] with -inf for each token without a bit in its row's `bits`; those behind them have none."""
    words = torch.nn.utils.rnn.pad_sequence(list(bits), batch_first=True).to(scores.device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
    allowed = ((words[:, :, None] >> shifts) & 1).flatten(1).bool()
    width = scores.shape[1]
    if allowed.shape[1] < width:  # models often have more rows of logits than the tokenizer has tokens
        allowed = torch.nn.functional.pad(allowed, (0, width - allowed.shape[1]))
    return scores.masked_fill(~allowed[:, :width], float("-inf"))


def _require_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError("Grammars need xgrammar: pip install 'hf-paged[grammar]'.") from error
    return xgrammar


def _compiler(xgrammar: Any, tokenizer: Any) -> Any:
    # one a tokenizer: reading its vocabulary takes longer than most grammars
    with _guard:
        size, compiler = _compilers.get(tokenizer, (0, None))
        if compiler is None or size != len(tokenizer):
            try:
                info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
            except (ValueError, RuntimeError, TypeError) as error:
                raise RequestError(
                    f"xgrammar can't read the vocabulary of a {type(tokenizer).__name__}: {_cause(error)}"
                ) from error
            compiler = xgrammar.GrammarCompiler(info)
            _compilers[tokenizer] = (len(tokenizer), compiler)
        return compiler


def _compile(compiler: Any, kind: str, source: Any) -> Any:
    if kind != "json_schema" and not isinstance(source, str):
        raise RequestError(f"{kind} must be a string, not {source!r:.80}.")
    try:
        if kind == "json_schema":  # free white space is what small models get lost in
            return compiler.compile_json_schema(source, any_whitespace=False)
        return compiler.compile_regex(source) if kind == "regex" else compiler.compile_grammar(source)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise RequestError(f"{kind} {str(source)!r:.200} can't be compiled: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    # "[time] file:line: what is wrong": only the last part helps
    lines = str(error).strip().splitlines()
    return lines[0].split(": ", 1)[-1] if lines else type(error).__name__
