"""One entry, judged: does `cache_implementation="paged"` give stock's tokens, how does it run, and why not otherwise?

A case that could pass without doing what it is named after doesn't: the engine's counters must have moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_paged
from hf_paged.integrations.engines import release
from tests.models.building import PAD_TOKEN_ID, VOCAB_SIZE, CannotBuildError, build
from tests.models.entries import Entry
from tests.oracle import Ids, left_pad, random_prompt

CASES = {
    "greedy": "a ragged, left-padded batch, each row against stock's on its prompt alone (in stock's loop and in "
    "encoder-decoders: against stock's on the same batch)",
    "chunks": "the same with a budget of 7 tokens a step, so that prompts are computed in pieces",
    "preemption": "the same in a pool that can't hold the batch",
    "prefix": "the same again, and prompts that begin like one of it, so that what is cached is reused",
    "beams": "three beams",
    "sampling": "a seed, and the draws that stock makes with it",
}

NEW = 8
BLOCK_SIZE = 8
# Three tokens are less than the smallest chunk, 27 are four chunks and more than three blocks.
PROMPTS = [random_prompt(length, 60 + length) for length in (27, 3, 18, 12)]
# Ends of blocks: two that begin like the first prompt, for two and three blocks.
EXTENDED = [PROMPTS[0][:17] + random_prompt(4, 1), PROMPTS[0][:24]]

# Seed, and how wide embeddings and matrices are drawn; tried in this order until tokens depend on what stands before.
_DRAWS = ((0, 1.0, 1.5), (1, 0.15, 1.5), (2, 1.0, 3.0), (3, 0.4, 2.0), (4, 3.0, 2.0), (5, 0.15, 4.0), (6, 0.02, 1.0))
_MIN_GAP = 2e-4


class _Reasons(logging.Handler):
    """Keeps what hf_paged says."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one message."""
        self.messages.append(record.getMessage())


@contextmanager
def _heard() -> Iterator[list[str]]:
    handler, logger = _Reasons(), logging.getLogger("hf_paged")
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


def judge(entry: Entry) -> dict[str, Any]:
    """The outcome of an entry.

    Returns:
        "class"; "mode": "direct", "gather", "by row", "stock", "refused", or one of "not built" and "fails in stock",
        which say nothing about us; "why", if it doesn't run on the engine; "cases", each "equal" or what is wrong;
        "tokens" compared; "notes".
    """
    outcome: dict[str, Any] = {"class": entry.class_name}
    try:
        model, notes = _sensitive_model(entry)
    except CannotBuildError as error:
        return outcome | {"mode": "not built", "why": str(error)}
    except Exception as error:  # stock raises on what we would ask of it
        return outcome | {"mode": "fails in stock", "why": _words(error)}
    return outcome | _Judge(model, notes).outcome()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- a model whose tokens mean something -------------------------------------------------------------------------------


def _sensitive_model(entry: Entry) -> tuple[PreTrainedModel, list[str]]:
    """The first draw whose tokens vary, have no near ties, and depend on the prompt's first token."""
    doubts: list[tuple[int, int, str]] = []
    for index, draw in enumerate(_DRAWS):
        model = build(entry, *draw)
        doubt = _doubt(model)
        if not doubt:
            return model, []
        doubts.append((len(doubt), index, ", ".join(doubt)))
    _, index, doubt = min(doubts)
    return build(entry, *_DRAWS[index]), [f"weak evidence: {doubt}"]


def _doubt(model: PreTrainedModel) -> list[str]:
    inputs = _inputs(model, PROMPTS)
    out = model.generate(**inputs, **_GREEDY, output_logits=True, return_dict_in_generate=True)
    new = out.sequences[:, -NEW:]
    best = torch.stack(out.logits).float().topk(2).values  # [NEW, rows, 2]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first = torch.arange(len(ids)), mask.argmax(dim=1)
    other = {**inputs, "input_ids": ids.clone()}
    other["input_ids"][first] = ids[first] % (VOCAB_SIZE - 1) + 1
    changed = (model.generate(**other, **_GREEDY)[:, -NEW:] != new).any(dim=1)
    found = []
    if sum(len(set(row)) for row in new.tolist()) <= NEW * len(new) / 3:
        found.append("its tokens hardly vary")
    if (best[..., 0] - best[..., 1]).min() < _MIN_GAP:
        found.append("its tokens are near ties")
    if not changed.any():
        found.append("its tokens don't depend on the prompt's first")
    return found


_GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


def _inputs(model: PreTrainedModel, prompts: list[Ids]) -> dict[str, torch.Tensor]:
    if model.config.is_encoder_decoder:  # encoders read padding on the right
        longest = max(map(len, prompts))
        ids = torch.tensor([ids + [PAD_TOKEN_ID] * (longest - len(ids)) for ids in prompts])
        return {"input_ids": ids, "attention_mask": (ids != PAD_TOKEN_ID).long()}
    padded, mask = left_pad(prompts, PAD_TOKEN_ID)
    return {"input_ids": padded, "attention_mask": mask}


# -- the cases --------------------------------------------------------------------------------


class _Judge:
    """Runs one model through the cases."""

    def __init__(self, model: PreTrainedModel, notes: list[str]) -> None:
        self.model = model
        self.notes = notes
        self.tokens = 0
        self.batch = _inputs(model, PROMPTS)
        self.is_decoder = not model.config.is_encoder_decoder
        self.on_engine = False
        self.mode = "stock"

    def outcome(self) -> dict[str, Any]:
        """Mode, reason and cases."""
        try:
            stock = self._stock(self.batch, **_GREEDY)
            alone = [self._stock(_inputs(self.model, [ids]), **_GREEDY)[0] for ids in PROMPTS]
        except Exception as error:  # stock's own failure
            return {"mode": "fails in stock", "why": _words(error)}
        self.padding_is_right = all(row == one[-len(row) :] for row, one in zip(stock, alone, strict=True))
        with _heard() as said:
            greedy = self._case(lambda: self._greedy(stock, alone))
        engine = hf_paged.get_engine(self.model)
        self.on_engine = engine is not None
        self.mode = getattr(engine, "mode", "direct") if engine is not None else "stock"
        cases = {"greedy": greedy}
        result: dict[str, Any] = {"mode": self.mode}
        if engine is None:
            result["why"] = self._reason(said)
            if greedy.startswith("raises"):
                result["mode"] = "refused"
        if not self.padding_is_right and self.is_decoder:
            self.notes.append("stock's own padded batch differs from its rows alone")
        expected = alone if self.on_engine else stock
        cases["chunks"] = self._case(lambda: self._chunks(expected))
        cases["preemption"] = self._case(lambda: self._preemption(expected))
        cases["prefix"] = self._case(lambda: self._prefix(expected))
        cases["beams"] = self._case(self._beams)
        cases["sampling"] = self._case(self._sampling)
        return result | {"cases": cases, "tokens": self.tokens, "notes": self.notes}

    def _reason(self, said: list[str]) -> str:
        name = type(self.model).__name__
        text = said[-1] if said else "it has a decoding loop of its own"
        for prefix in (f"cache_implementation='paged' on {name}: ", f"{name} can't run packed. ", f"{name} "):
            text = text.removeprefix(prefix)
        return text

    def _case(self, run: Callable[[], str | None]) -> str:
        try:
            return run() or "equal"
        except Exception as error:
            return f"raises {_words(error)}"

    def _new(self, inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> list[Ids]:
        start = inputs["input_ids"].shape[1] if self.is_decoder else 0
        rows: list[Ids] = sequences[:, start:].tolist()
        return rows

    def _stock(self, inputs: dict[str, torch.Tensor], **options: Any) -> list[Ids]:
        return self._new(inputs, self.model.generate(**inputs, **options))

    def _paged(self, inputs: dict[str, torch.Tensor], **options: Any) -> list[Ids]:
        settings = {"block_size": BLOCK_SIZE, **options.pop("cache_config", {})}
        out = self.model.generate(**inputs, **options, cache_implementation="paged", cache_config=settings)
        return self._new(inputs, out)

    def _compare(self, actual: list[Ids], expected: list[Ids]) -> str | None:
        self.tokens += sum(map(len, expected))
        if actual == expected:
            return None
        wrong = [index for index, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b]
        return f"differs in {len(wrong) or 'the number of'} rows of {len(expected)}"

    def _stat(self, name: str) -> int:
        engine = hf_paged.get_engine(self.model)
        return int(engine.stats()[name]) if engine is not None else 0

    def _greedy(self, stock: list[Ids], alone: list[Ids]) -> str | None:
        ours = self._paged(self.batch, **_GREEDY)
        return self._compare(ours, alone if hf_paged.get_engine(self.model) is not None else stock)

    def _chunks(self, expected: list[Ids]) -> str | None:
        return self._compare(self._paged(self.batch, **_GREEDY, cache_config={"max_batch_tokens": 7}), expected)

    def _preemption(self, expected: list[Ids]) -> str | None:
        # the rows end with 14 blocks; the longest takes 5
        settings = {"num_blocks": 5, "enable_prefix_caching": False}
        wrong = self._compare(self._paged(self.batch, **_GREEDY, cache_config=settings), expected)
        if wrong is not None or not self.on_engine or self._stat("num_preemptions"):
            return wrong
        # behind a window blocks come back as fast as they are taken; rows that all begin with one block need two
        short = [ids[:length] for ids, length in zip(PROMPTS + PROMPTS, (6, 3, 5, 7, 4), strict=False)]
        inputs = [_inputs(self.model, [ids]) for ids in short]
        expected = [self._stock(one, **_GREEDY)[0] for one in inputs]
        wrong = self._compare(self._paged(_inputs(self.model, short), **_GREEDY, cache_config=settings), expected)
        if wrong is not None or self._stat("num_preemptions"):
            return wrong
        # recurrent states alone take no blocks that could run short
        return "equal, nothing to preempt" if self.mode == "by row" else "nothing was preempted"

    def _prefix(self, expected: list[Ids]) -> str | None:
        release(self.model)
        wrong = self._compare(self._paged(self.batch, **_GREEDY), expected)
        wrong = self._compare(self._paged(self.batch, **_GREEDY), expected) or wrong
        for ids in EXTENDED:
            inputs = _inputs(self.model, [ids])
            wrong = self._compare(self._paged(inputs, **_GREEDY), self._stock(inputs, **_GREEDY)) or wrong
        if wrong is None and self.on_engine and not self._stat("prefix_hit_tokens"):
            return "equal, no hits"
        return wrong

    def _fair_batch(self) -> dict[str, torch.Tensor]:
        # where stock's padding changes its tokens, rows of one length
        if self.padding_is_right:
            return self.batch
        return _inputs(self.model, [ids[:12] for ids in (PROMPTS[0], PROMPTS[2], PROMPTS[3])])

    def _beams(self) -> str | None:
        inputs, options = self._fair_batch(), {"max_new_tokens": NEW, "do_sample": False, "num_beams": 3}
        expected = self._in_stock(inputs, options)
        return expected if isinstance(expected, str) else self._compare(self._paged(inputs, **options), expected)

    def _sampling(self) -> str | None:
        inputs, options = self._fair_batch(), {"max_new_tokens": NEW, "do_sample": True, "top_k": 20}
        torch.manual_seed(5)
        expected = self._in_stock(inputs, options)
        torch.manual_seed(5)
        return expected if isinstance(expected, str) else self._compare(self._paged(inputs, **options), expected)

    def _in_stock(self, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> list[Ids] | str:
        try:
            return self._stock(inputs, **options)
        except Exception as error:
            return f"fails in stock: {_words(error)}"
